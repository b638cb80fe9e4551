"""The Triton row kernels, interpreted on CPU, against fp64 autograd of the definition.

Each number must be as near to fp64 as torch in the same dtype is, give or take a tolerance. What the
interpreter cannot show (races, registers, widths) is in test_compile.py.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported, if conftest has not

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from loss_cases import HEAD, OPTIONS, fast, make_case
from torch import Tensor

from dapo_kernels import PolicyLossConfig, reference
from dapo_kernels.objective import TokenInputs, token_objective

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from dapo_kernels.kernels.launch import alias_rows, empty_rows
from dapo_kernels.kernels.logprob_rows import logprob_rows, logprob_rows_backward
from dapo_kernels.kernels.loss_rows import loss_rows

fp32, bf16, fp16, fp64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
RAGGED = (1, 2, 129, 1023, 4160, 32003)
FIELDS = ("logprobs", "entropy", "loss", "log_ratio", "ratio", "kl")


@pytest.fixture(autouse=True)
def interpreter_like_hardware(monkeypatch):
    """The interpreter cuts fp32 off to bf16, where GPUs round to nearest even; and numpy warns of infs."""
    cast = InterpreterBuilder.cast_impl

    def rounding_cast(self, source, dtype):
        if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(bf16)
            return TensorHandle(rounded.view(torch.uint16).numpy(), dtype.scalar)
        return cast(self, source, dtype)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", rounding_cast)
    with np.errstate(all="ignore"):
        yield


@dataclass
class RowCase:
    logits: Tensor  # [n, V] fp32, contiguous
    targets: Tensor  # [n]
    inputs: TokenInputs
    config: PolicyLossConfig
    row_weights: Tensor  # [n]

    def rows(self) -> Tensor:
        """The logits laid out for the kernels, NaN in the padding."""
        n, vocab = self.logits.shape
        whole = torch.full(
            (n + 1, empty_rows(1, vocab).stride(0)), torch.nan
        )  # one row more is in the buffer
        whole[:n, :vocab] = self.logits
        return whole[:n, :vocab]


class RowResult(NamedTuple):
    columns: dict[str, Tensor | None]  # [n] each
    dlogits: Tensor | None  # [n, V]


def scores(logits: Tensor, targets: Tensor, config: PolicyLossConfig) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy as torch gives them, differentiable."""
    z = logits * config.logit_scale
    if config.logit_softcap is not None:
        z = config.logit_softcap * torch.tanh(z / config.logit_softcap)
    logp = torch.log_softmax(z / config.temperature, -1)
    entropy = -(logp.exp() * logp.clamp(min=torch.finfo(z.dtype).min)).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


def row_case(n: int, vocab: int, seed: int = 0, spread: float = 2.0, **config) -> RowCase:
    """Ratios on both sides of every clip bound but not close to one."""
    g = torch.Generator().manual_seed(seed)
    config = PolicyLossConfig(**config)
    logits = torch.randn(n, vocab, generator=g) * spread
    targets = torch.randint(0, vocab, (n,), generator=g)
    logprobs, _ = scores(logits.double(), targets, config)
    log_ratio = torch.rand(n, generator=g) * 1.4 - 0.7
    for bound in (0.9, 1.1, 1 - config.epsilon_low, 1 + config.epsilon_high, config.dual_clip or 9):
        distance = log_ratio - torch.tensor(bound).log()
        log_ratio += torch.where(distance.abs() < 0.03, 0.06 * distance.sign(), 0.0)
    inputs = TokenInputs(
        advantages=torch.randn(n, generator=g),
        old_logprobs=(logprobs - log_ratio).float(),
        ref_logprobs=(logprobs + 0.5 * torch.randn(n, generator=g)).float(),
        token_weights=torch.rand(n, generator=g) + 0.5,
        entropy_weights=torch.rand(n, generator=g) + 0.5,
    )
    return RowCase(logits, targets, inputs, config, torch.rand(n, generator=g) + 0.5)


def by_torch(case: RowCase, dtype: torch.dtype, out: torch.dtype = fp64) -> RowResult:
    """Everything computed in `dtype` by autograd through full logits, dlogits rounded to `out`."""
    logits = case.logits.to(dtype, copy=True).requires_grad_()
    inputs = TokenInputs(*(None if value is None else value.to(dtype) for value in case.inputs))
    logprobs, entropy = scores(logits, case.targets, case.config)
    terms = token_objective(logprobs, entropy, inputs, case.config)
    (terms.loss * case.row_weights.to(dtype)).sum().backward()
    columns = dict(zip(FIELDS, (logprobs, entropy, *terms)))
    return RowResult({k: None if v is None else v.detach() for k, v in columns.items()}, logits.grad.to(out))


def by_kernel(case: RowCase, out: torch.dtype = fp32, in_place: bool = True) -> RowResult:
    logits = case.rows()
    dlogits = alias_rows(logits, out) if in_place else empty_rows(*logits.shape, dtype=out)
    result = loss_rows(logits, case.targets, case.inputs, case.config, dlogits, case.row_weights)
    if not in_place:
        assert torch.equal(logits, case.logits)
    padding = torch.as_strided(
        dlogits, (len(dlogits), -dlogits.shape[1] % 64), dlogits.stride(), logits.shape[1]
    )
    assert not padding.any(), "0 stands in the padding"
    return RowResult(dict(zip(FIELDS, (result.logprobs, result.entropy, *result.terms))), dlogits)


def assert_near(name: str, truth: Tensor, ours: Tensor, peer: Tensor, tolerance: float) -> None:
    """|truth - ours| <= |truth - same-dtype torch| + tolerance * max(1, |truth|)."""
    assert torch.isfinite(ours).all(), name
    error = (truth - ours.double()).abs()
    bound = (truth - peer.double()).abs().amax() + tolerance * truth.abs().clamp(min=1)
    assert (error <= bound).all(), f"{name}: {(error - bound).max():.2e} over the bound {bound.max():.2e}"


def check_case(case: RowCase, out: torch.dtype = fp32, in_place: bool = True) -> RowResult:
    truth, peer, ours = by_torch(case, fp64), by_torch(case, fp32, out), by_kernel(case, out, in_place)
    for name in FIELDS:
        assert (ours.columns[name] is None) == (truth.columns[name] is None), name
        if truth.columns[name] is not None:
            assert_near(name, truth.columns[name], ours.columns[name], peer.columns[name], 2e-6)
    assert ours.dlogits.dtype == out
    assert_near("dlogits", truth.dlogits, ours.dlogits, peer.dlogits, 1e-6)
    return ours


@pytest.mark.parametrize("vocab, n", [(53, 70), (4160, 6)])
@pytest.mark.parametrize("option", [name for name in OPTIONS if not name.startswith("sequence")])
def test_loss_rows_under_every_option(option, vocab, n):
    case = row_case(n, vocab, **OPTIONS[option])
    check_case(case)
    check_case(replace(case, inputs=case.inputs._replace(old_logprobs=None)), bf16)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("out", [fp32, bf16, fp16], ids=str)
@pytest.mark.parametrize("vocab", RAGGED)
def test_loss_rows_on_ragged_vocabularies(vocab, out, in_place):
    n = 5 if vocab > 1023 else 67  # a last program that is not full
    case = row_case(n, vocab, seed=vocab, entropy_coef=0.1, kl_coef=0.2)
    result = check_case(case, out, in_place)
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
    return loss_rows(case.rows(), case.targets, case.inputs, case.config).logprobs


@pytest.mark.parametrize("vocab", [70, 5000])
def test_scoring_leaves_logits_alone(vocab):
    case = row_case(7, vocab, kl_coef=0.1)
    logits = case.rows()
    scored = loss_rows(logits, case.targets, case.inputs, case.config)
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
    loss_rows(logits, case.targets, case.inputs, case.config, alias_rows(logits, fp32), case.row_weights)
    torch.testing.assert_close(logits, by_kernel(case).dlogits, rtol=0, atol=0)
    logits.fill_(7.0)
    buffer[2:7, 64 + vocab : 64 + width] = 7.0
    assert (buffer == 7).all()


def test_rows_beyond_32_bit_offsets(tmp_path):
    """K14, on a sparse file: the third row starts at element 2**31."""
    case = row_case(3, 5000)
    pitch = 2**30
    whole = torch.from_file(str(tmp_path / "rows"), shared=True, size=2 * pitch + 5056)
    logits = whole.as_strided((3, 5000), (pitch, 1)).copy_(case.logits)
    loss_rows(logits, case.targets, case.inputs, case.config, alias_rows(logits, bf16), case.row_weights)
    assert torch.equal(alias_rows(logits, bf16), by_kernel(case, bf16).dlogits)


def test_no_rows():
    case = row_case(0, 70)
    result = loss_rows(case.rows(), case.targets, case.inputs, case.config, alias_rows(case.rows()[:0], bf16))
    assert result.logprobs.shape == result.terms.kl.shape == (0,)


@pytest.mark.parametrize("option", ["clip", "k3_ratio", "entropy_softcap", "scale", "cispo_bounds"])
def test_loss_rows_in_place_of_the_torch_backend(option):
    """The reference's loss and gradients through a real head: logits GEMM, kernel, gradient GEMM."""
    case = make_case((29,), 16, 131, fp64, mask=1.1, **{**OPTIONS[option], "reduction": "token-mean"})
    truth = fast(case).quantities()
    plain = reference.linear_policy_loss(**case.arguments())
    low = case.to(fp32)
    logits = empty_rows(29, 131).copy_(low.hidden @ low.weight.T + low.bias)
    names = TokenInputs._fields[:-1]
    inputs = TokenInputs(**{name: getattr(low, name) for name in names})
    result = loss_rows(logits, low.targets, inputs, case.config, alias_rows(logits, fp32))
    torch.testing.assert_close(result.terms.loss.mean().double(), plain.loss, rtol=1e-5, atol=1e-6)
    gradients = (logits @ low.weight, logits.T @ low.hidden, logits.sum(0))
    for name, gradient in zip(HEAD, gradients):
        expected = next(value for key, value in truth.items() if key.endswith(name))
        torch.testing.assert_close((gradient / 29).double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("out", [fp32, bf16, fp16], ids=str)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("vocab", RAGGED)
@pytest.mark.parametrize("option", ["clip", "entropy_softcap", "scale"])
def test_logprob_rows(option, vocab, in_place, out):
    """K6, K7: any incoming gradients of log-probs and entropy; none for the entropy."""
    case = row_case(5 if vocab > 1023 else 21, vocab, **OPTIONS[option])
    g = torch.Generator().manual_seed(2)
    incoming = [torch.randn(len(case.targets), generator=g) for _ in range(2)]
    for with_entropy in (True, False):
        logits = case.rows()
        statistics = logprob_rows(logits, case.targets, case.config)
        assert torch.equal(logits, case.logits)
        dlogits = alias_rows(logits, out) if in_place else empty_rows(*logits.shape, dtype=out)
        logprob_rows_backward(
            logits,
            case.targets,
            statistics,
            incoming[0],
            incoming[1] if with_entropy else None,
            case.config,
            dlogits,
        )
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
        assert_near(
            "1 - p", -truth[0].expm1(), statistics.rest / statistics.total, peer[0].expm1().neg(), 2e-6
        )


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
    refuse(TypeError, "dlogits must be", dlogits=empty_rows(3, 70, dtype=fp64))
    refuse(ValueError, r"dlogits must be \[3, 70\] like logits", dlogits=empty_rows(3, 71))
    buffer = empty_rows(4, 70)
    refuse(ValueError, "share memory", logits=buffer[:3], dlogits=buffer[1:])
