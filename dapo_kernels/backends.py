"""What a backend does with rows of logits, and the choice of one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .coefficients import token_coefficients
from .config import PolicyLossConfig
from .objective import TokenInputs, TokenTerms, token_objective
from .row_ops import logits_gradient_, logits_statistics_
from .row_statistics import RowStatistics

if TYPE_CHECKING:
    from .vocab_parallel import VocabShard


class LossRows(NamedTuple):
    """The finished loss of some tokens, `[n]` each."""

    logprobs: Tensor
    entropy: Tensor
    terms: TokenTerms
    dlogits: Tensor | None
    """`[n, V]` gradient of the logits, in the GEMM's dtype; None if it was not asked for."""


class TorchRows:
    """The row operations in torch: the default on CPU, and what a backend has to offer."""

    def __init__(self, config: PolicyLossConfig, shard: VocabShard | None, dtype: torch.dtype) -> None:
        self.config, self.shard, self.dtype = config, shard, dtype

    @property
    def copy_bytes(self) -> int:
        """Of a logit, beside its place in the buffer: a narrower gradient is a copy here."""
        return self.dtype.itemsize if self.dtype.itemsize < 4 else 0

    def statistics(self, logits: Tensor, targets: Tensor) -> RowStatistics:
        """logits `[n, V]`, which are changed to what `gradient` needs; targets `[n]`."""
        return logits_statistics_(logits, targets, self.config, self.shard)

    def gradient(
        self,
        logits: Tensor,  # [n, V] left by `statistics`
        targets: Tensor,  # [n]
        statistics: RowStatistics,
        logprob_grad: Tensor,  # [n]
        entropy_grad: Tensor | None,  # [n]
    ) -> Tensor:
        """The gradient by the raw logits `[n, V]` in the GEMM's dtype, over the logits where it fits."""
        logits_gradient_(logits, targets, statistics, logprob_grad, entropy_grad, self.config, self.shard)
        return logits.to(self.dtype)

    def loss(
        self,
        logits: Tensor,  # [n, V]
        targets: Tensor,  # [n]
        inputs: TokenInputs,  # [n] each
        weights: Tensor,  # [n] of each token in the sum
        want_gradient: bool,
    ) -> LossRows:
        """Token-level losses, and the gradient of their weighted sum."""
        statistics = self.statistics(logits, targets)
        logprobs, entropy = statistics.logprobs, statistics.entropy
        if not want_gradient:
            return LossRows(logprobs, entropy, token_objective(logprobs, entropy, inputs, self.config), None)
        terms, *grads = token_coefficients(logprobs, entropy, inputs, weights, self.config)
        return LossRows(logprobs, entropy, terms, self.gradient(logits, targets, statistics, *grads))


def choose_rows(
    backend: str,
    device: torch.device,
    config: PolicyLossConfig,
    shard: VocabShard | None,
    logits_dtype: torch.dtype,
    gemm_dtype: torch.dtype,
) -> TorchRows:
    """`auto` is Triton on GPUs, where it is installed and the inputs are not fp64; torch elsewhere."""
    on_gpu = device.type in ("cuda", "xpu")  # ROCm calls itself cuda
    if backend == "auto":
        fits = on_gpu and logits_dtype == torch.float32 and find_spec("triton") is not None
        backend = "triton" if fits else "torch"
    if backend == "torch":
        return TorchRows(config, shard, gemm_dtype)

    if logits_dtype != torch.float32:
        raise ValueError("backend 'triton' computes in fp32: for fp64 inputs use 'torch' or 'auto'")
    try:
        from .kernels.triton_rows import TritonRows, is_interpreted
    except ImportError as error:
        raise ImportError("backend 'triton' needs Triton: pip install triton") from error
    if device.type == "cpu" and not is_interpreted():
        raise ValueError(
            "backend 'triton' needs tensors on a GPU, got hidden on cpu (TRITON_INTERPRET=1 in the "
            "environment interprets the kernels there, for tests)"
        )
    return TritonRows(config, shard, gemm_dtype)
