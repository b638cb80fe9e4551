"""The loss row kernel, interpreted on CPU, against fp64 autograd of the definition.

Each number must be as near to fp64 as torch in the same dtype is, give or take a tolerance. What the
interpreter cannot show (races, registers, widths) is in test_compile.py.
"""

from dataclasses import replace

import pytest
import torch
from loss_cases import OPTIONS
from torch import Tensor

pytest.importorskip("triton")
from row_cases import (
    FIELDS,
    RowCase,
    bf16,
    by_kernel,
    check_case,
    fp16,
    fp32,
    fp64,
    row_case,
)

from dapo_kernels import PolicyLossConfig
from dapo_kernels.kernels.loss_rows import loss_rows
from dapo_kernels.objective import TokenInputs
from dapo_kernels.row_layout import empty_rows

RAGGED = (1, 2, 129, 1023, 4160, 32003)


pytestmark = pytest.mark.usefixtures("interpreter_like_hardware")


@pytest.mark.parametrize("vocab, n", [(53, 70), (4160, 6)])
@pytest.mark.parametrize("option", [name for name in OPTIONS if not name.startswith("sequence")])
def test_loss_rows_under_every_option(option, vocab, n):
    case = row_case(n, vocab, **OPTIONS[option])
    check_case(case)
    check_case(replace(case, inputs=case.inputs._replace(old_logprobs=None)), bf16)


@pytest.mark.parametrize("out", [fp32, bf16, fp16], ids=str)
@pytest.mark.parametrize("vocab", RAGGED)
def test_loss_rows_on_ragged_vocabularies(vocab, out):
    n = 5 if vocab > 1023 else 67  # a last program that is not full
    case = row_case(n, vocab, seed=vocab, entropy_coef=0.1, kl_coef=0.2)
    result = check_case(case, out)
    assert (result.columns["logprobs"] <= 0).all()


@pytest.mark.parametrize("vocab", [129920, 151643])
def test_loss_rows_on_large_vocabularies(vocab):
    check_case(row_case(2, vocab, entropy_coef=0.1), bf16)


def test_optional_columns_left_out():
    for vocab in (53, 4160):
        case = row_case(9, vocab, entropy_coef=0.3)
        for name in case.inputs._fields[1:-1]:
            check_case(replace(case, inputs=case.inputs._replace(**{name: None})))
        check_case(replace(case, inputs=TokenInputs(case.inputs.advantages, None, None, None, None)))


@pytest.mark.parametrize("offset", [1e4, -300.0])
@pytest.mark.parametrize("vocab", [70, 5000])
def test_a_common_offset_changes_nothing(vocab, offset):
    """K2, on logits that the offset leaves exact."""
    case = row_case(7, vocab, entropy_coef=0.2)
    case.logits = (case.logits * 64).round() / 64
    moved = replace(case, logits=case.logits + offset)
    for ours, theirs in zip(by_kernel(case)[0].values(), by_kernel(moved)[0].values()):
        assert torch.equal(ours, theirs)
    assert torch.equal(by_kernel(case).dlogits, by_kernel(moved).dlogits)


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("banned", [-torch.inf, torch.finfo(fp32).min, -1e38])
@pytest.mark.parametrize("vocab", [70, 9000])
def test_banned_tokens(vocab, banned, softcap):
    """K10: whole stretches of a row, whatever stands for minus infinity, but not the target."""
    case = row_case(5, vocab, entropy_coef=0.2, logit_softcap=softcap)
    ban = torch.rand(5, vocab, generator=torch.Generator().manual_seed(1)) < 0.5
    ban[:2, : vocab // 2] = True
    ban[2] = True
    case.logits[ban.scatter(1, case.targets[:, None], False)] = banned
    ours = check_case(case)
    if softcap is None:
        assert (ours.columns["entropy"][2] == 0) and not ours.dlogits[2].any()


@pytest.mark.parametrize("vocab", [100, 5000])
@pytest.mark.parametrize("lead", [3.0, 8.0, 15.0, 30.0])
def test_a_confident_target_keeps_its_digits(vocab, lead):
    """K4: log p and 1 - p near p = 1, to 1e-5 relative."""
    case = row_case(4, vocab, spread=0.1)
    case.logits.scatter_(1, case.targets[:, None], lead + torch.tensor(vocab).log().item())
    case.inputs = TokenInputs(torch.ones(4), None, None, None, None)
    target = case.targets[:, None]
    others = (case.logits.double() - case.logits.double().gather(1, target)).exp()
    rest = others.scatter(1, target, 0).sum(1)  # log_softmax would not do here, not even in fp64
    ours = by_kernel(case)
    slope = ours.dlogits.gather(1, target).squeeze(1)
    torch.testing.assert_close(ours.columns["logprobs"].double(), -rest.log1p(), rtol=1e-5, atol=0)
    torch.testing.assert_close(slope.double(), -case.row_weights * rest / (1 + rest), rtol=1e-5, atol=0)


@pytest.mark.parametrize("objective", ["clip", "cispo", "sapo"])
def test_log_ratios_beyond_the_clamp(objective):
    """K9: finite numbers, and no gradient through a clamped ratio or KL."""
    for kl_estimator in ("k1", "k2", "k3"):
        case = row_case(8, 53, objective=objective, kl_coef=0.1, kl_estimator=kl_estimator, entropy_coef=0.1)
        shift = torch.tensor([200.0, -200.0, 21.0, -21.0] * 2)
        case.inputs = case.inputs._replace(
            old_logprobs=case.inputs.old_logprobs + shift, ref_logprobs=case.inputs.ref_logprobs - 2 * shift
        )
        case.inputs.advantages.copy_(torch.tensor([1.0] * 4 + [-1.0] * 4))
        check_case(case)


def test_nan_stays_visible():
    """A NaN among the logits, or a target outside the vocabulary, never gives a number."""
    for vocab in (70, 5000):
        case = row_case(4, vocab)
        case.logits[1, (case.targets[1] + 1) % vocab] = torch.nan
        case.targets[2], case.targets[3] = -100, vocab
        result = by_kernel_unchecked(case)
        assert torch.isfinite(result[0]) and result[1:].isnan().all()


def by_kernel_unchecked(case: RowCase) -> Tensor:
    return loss_rows(case.rows(), case.targets, case.inputs, case.config, dtype=None).logprobs


@pytest.mark.parametrize("vocab", [70, 5000])
def test_scoring_leaves_logits_alone(vocab):
    case = row_case(7, vocab, kl_coef=0.1)
    logits = case.rows()
    scored = loss_rows(logits, case.targets, case.inputs, case.config, dtype=None)
    assert torch.equal(logits, case.logits)
    trained = by_kernel(case).columns
    for name, value in zip(FIELDS, (scored.logprobs, scored.entropy, *scored.terms)):
        assert torch.equal(value, trained[name]), name


@pytest.mark.parametrize("vocab", [70, 5000])
def test_part_of_a_buffer(vocab):
    """Rows before, after and beside the given ones stay as they are."""
    case = row_case(5, vocab)
    width = empty_rows(1, vocab).stride(0)
    buffer = torch.full((9, width + 128), 7.0)
    logits = buffer[2:7, 64 : 64 + vocab]
    logits.copy_(case.logits)
    loss_rows(logits, case.targets, case.inputs, case.config, case.row_weights)
    torch.testing.assert_close(logits, by_kernel(case).dlogits, rtol=0, atol=0)
    logits.fill_(7.0)
    buffer[2:7, 64 + vocab : 64 + width] = 7.0
    assert (buffer == 7).all()


def test_k14_rows_beyond_32_bit_offsets(tmp_path):
    """K14, on a sparse file: the third row starts at element 2**31."""
    case = row_case(3, 5000)
    pitch = 2**30
    whole = torch.from_file(str(tmp_path / "rows"), shared=True, size=2 * pitch + 5056)
    logits = whole.as_strided((3, 5000), (pitch, 1)).copy_(case.logits)
    result = loss_rows(logits, case.targets, case.inputs, case.config, case.row_weights, bf16)
    assert torch.equal(result.dlogits, by_kernel(case, bf16).dlogits)


def test_no_rows():
    case = row_case(0, 70)
    result = loss_rows(case.rows(), case.targets, case.inputs, case.config, dtype=bf16)
    assert result.logprobs.shape == result.terms.kl.shape == (0,)


def refuse(error: type[Exception], words: str, **changes) -> None:
    case = row_case(3, 70)
    arguments = {
        "logits": case.rows(),
        "targets": case.targets,
        "inputs": case.inputs,
        "config": case.config,
        **changes,
    }
    with pytest.raises(error, match=words):
        loss_rows(**arguments)


def test_wrong_arguments_are_named():
    inputs = row_case(3, 70).inputs
    refuse(TypeError, "logits must be torch.float32, got torch.float64", logits=empty_rows(3, 70).double())
    refuse(ValueError, r"logits must be \[n, V\]", logits=torch.zeros(70))
    refuse(ValueError, r"logits \[3, 70\] must have strides", logits=torch.zeros(3, 70))
    refuse(ValueError, "must own the 58 columns", logits=torch.zeros(326).as_strided((3, 70), (128, 1)))
    refuse(TypeError, "targets must be torch.int64", targets=torch.zeros(3, dtype=torch.int32))
    refuse(ValueError, r"targets must be \[n\] = \[3\]", targets=torch.zeros(4, dtype=torch.int64))
    sequences = PolicyLossConfig(ratio_level="sequence")
    refuse(ValueError, "config.ratio_level must be 'token' for one pass", config=sequences)
    refuse(TypeError, "advantages must be a tensor", inputs=inputs._replace(advantages=1.0))
    refuse(ValueError, r"old_logprobs must be \[n\]", inputs=inputs._replace(old_logprobs=torch.zeros(3, 1)))
    refuse(TypeError, "row_weights must be torch.float32", row_weights=torch.zeros(3).double())
    refuse(TypeError, "dtype of dlogits must be one of", dtype=fp64)
