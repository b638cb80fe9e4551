"""Random rows of logits for the Triton row kernels, interpreted on CPU, and how near to fp64 they must be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from dapo_kernels import PolicyLossConfig
from dapo_kernels.kernels.loss_rows import loss_rows
from dapo_kernels.objective import TokenInputs, token_objective
from dapo_kernels.row_layout import empty_rows

fp32, bf16, fp16, fp64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
FIELDS = ("logprobs", "entropy", "loss", "log_ratio", "ratio", "kl")


@contextmanager
def rounding_interpreter() -> Iterator[None]:
    """The interpreter cuts fp32 off to bf16, where GPUs round to nearest even; and numpy warns of infs."""
    cast = InterpreterBuilder.cast_impl

    def rounding_cast(self, source, dtype):
        if source.dtype.scalar == tl.float32 and dtype.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(bf16)
            return TensorHandle(rounded.view(torch.uint16).numpy(), dtype.scalar)
        return cast(self, source, dtype)

    InterpreterBuilder.cast_impl = rounding_cast
    try:
        with np.errstate(all="ignore"):
            yield
    finally:
        InterpreterBuilder.cast_impl = cast


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


def by_kernel(case: RowCase, out: torch.dtype = fp32) -> RowResult:
    logits = case.rows()
    result = loss_rows(logits, case.targets, case.inputs, case.config, case.row_weights, out)
    dlogits = result.dlogits
    assert dlogits.data_ptr() == logits.data_ptr()
    assert not padding_of(dlogits).any(), "0 stands in the padding"
    return RowResult(dict(zip(FIELDS, (result.logprobs, result.entropy, *result.terms))), dlogits)


def padding_of(rows: Tensor) -> Tensor:
    """The columns after V that belong to the rows."""
    n, vocab = rows.shape
    return torch.as_strided(rows, (n, -vocab % 64), rows.stride(), rows.storage_offset() + vocab)


def assert_near(name: str, truth: Tensor, ours: Tensor, peer: Tensor, tolerance: float) -> None:
    """|truth - ours| <= |truth - same-dtype torch| + tolerance * max(1, |truth|)."""
    assert torch.isfinite(ours).all(), name
    error = (truth - ours.double()).abs()
    bound = (truth - peer.double()).abs().amax() + tolerance * truth.abs().clamp(min=1)
    assert (error <= bound).all(), f"{name}: {(error - bound).max():.2e} over the bound {bound.max():.2e}"


def check_case(case: RowCase, out: torch.dtype = fp32) -> RowResult:
    truth, peer, ours = by_torch(case, fp64), by_torch(case, fp32, out), by_kernel(case, out)
    for name in FIELDS:
        assert (ours.columns[name] is None) == (truth.columns[name] is None), name
        if truth.columns[name] is not None:
            assert_near(name, truth.columns[name], ours.columns[name], peer.columns[name], 2e-6)
    assert ours.dlogits.dtype == out
    assert_near("dlogits", truth.dlogits, ours.dlogits, peer.dlogits, 1e-6)
    return ours
