"""The log-prob row kernels, interpreted on CPU, against fp64 autograd: whole rows, and rows cut up."""

import pytest
import torch
from loss_cases import OPTIONS

pytest.importorskip("triton")
from row_cases import assert_near, bf16, fp16, fp32, fp64, padding_of, row_case, scores

from dapo_kernels.kernels import launch
from dapo_kernels.kernels.logprob_rows import logprob_rows, logprob_rows_backward
from dapo_kernels.row_statistics import merge_statistics

pytestmark = pytest.mark.usefixtures("interpreter_like_hardware")


@pytest.mark.parametrize("out", [fp32, bf16, fp16], ids=str)
@pytest.mark.parametrize(
    "vocab, programs",
    [(1, 1), (2, 1), (129, 1), (1023, 1), (32003, 1), (32003, 10), (32003, 999), (8200, 10)],
)
@pytest.mark.parametrize("option", ["clip", "entropy_softcap", "scale"])
def test_logprob_rows(option, vocab, programs, out, monkeypatch):
    """K6, K7: any incoming gradients of log-probs and entropy; none for the entropy."""
    monkeypatch.setattr(launch, "FEW_PROGRAMS", programs)
    case = row_case(5 if vocab > 1023 else 21, vocab, **OPTIONS[option])
    g = torch.Generator().manual_seed(2)
    incoming = [torch.randn(len(case.targets), generator=g) for _ in range(2)]
    for with_entropy in (True, False):
        logits = case.rows()
        parts = logprob_rows(logits, case.targets, case.config)
        assert (len(parts) > 1) == (programs > 5)
        statistics = merge_statistics(parts)
        assert torch.equal(logits, case.logits)
        grads = (incoming[0], incoming[1] if with_entropy else None)
        dlogits = logprob_rows_backward(logits, case.targets, statistics, *grads, case.config, out)
        in_place = dlogits.data_ptr() == logits.data_ptr()
        assert in_place == (out == fp32 or len(parts) == 1), "cut rows narrow into memory of their own"
        assert dlogits.dtype == out and not padding_of(dlogits).any()
        results = []
        for dtype in (fp64, fp32):
            leaf = case.logits.to(dtype, copy=True).requires_grad_()
            logprobs, entropy = scores(leaf, case.targets, case.config)
            loss = logprobs @ incoming[0].to(dtype)
            if with_entropy:
                loss = loss + entropy @ incoming[1].to(dtype)
            loss.backward()
            results.append((logprobs.detach(), entropy.detach(), leaf.grad))
        truth, peer = results
        assert_near("logprobs", truth[0], statistics.logprobs, peer[0], 2e-6)
        assert_near("entropy", truth[1], statistics.entropy, peer[1], 2e-6)
        assert_near("dlogits", truth[2], dlogits, peer[2].to(out), 1e-6)
        share = statistics.rest / statistics.total
        assert_near("1 - p", -truth[0].expm1(), share, peer[0].expm1().neg(), 2e-6)


def test_rows_are_cut_where_programs_are_few():
    for rows, vocab in ((1, 152064), (8, 152064), (100, 256000), (256, 152064), (3, 4096), (1, 1), (0, 9)):
        splits, stretch = launch.row_splits(rows, vocab)
        assert (splits - 1) * stretch < vocab and splits * stretch >= vocab and stretch % 64 == 0
        assert splits == 1 or rows * splits <= launch.FEW_PROGRAMS
    assert launch.row_splits(256, 152064)[0] == 1
    assert launch.row_splits(1, 152064)[0] == 38


@pytest.mark.parametrize("vocab", [70, 9000])
def test_banned_tokens_and_bad_ids_in_parts(vocab):
    """K10, K12: stretches of nothing but -inf are merged; an id outside the vocabulary is NaN."""
    case = row_case(4, vocab)
    case.logits[:, : vocab // 2] = -torch.inf
    case.targets[:] = torch.tensor([vocab - 1, vocab - 2, -100, vocab])
    statistics = merge_statistics(logprob_rows(case.rows(), case.targets, case.config))
    want = scores(case.logits[:2].double(), case.targets[:2], case.config)
    torch.testing.assert_close(statistics.logprobs[:2].double(), want[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(statistics.entropy[:2].double(), want[1], rtol=1e-5, atol=1e-5)
    assert statistics.logprobs[2:].isnan().all()
