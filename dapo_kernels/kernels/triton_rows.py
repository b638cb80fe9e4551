"""The row operations of `backends.TorchRows` in Triton."""

from __future__ import annotations

from torch import Tensor
from triton.runtime.jit import JITFunction

from ..backends import LossRows, TorchRows
from ..objective import TokenInputs
from ..row_statistics import RowStatistics, merge_statistics
from .launch import row_splits
from .logprob_rows import _logprob_rows_kernel, logprob_rows, logprob_rows_backward
from .loss_rows import loss_rows


def is_interpreted() -> bool:
    """Whether Triton was told to interpret its kernels (TRITON_INTERPRET=1) when they were imported."""
    return not isinstance(_logprob_rows_kernel, JITFunction)


class TritonRows(TorchRows):
    copy_bytes = 0  # gradients are written over the logits

    def statistics(self, logits: Tensor, targets: Tensor) -> RowStatistics:
        """As in `TorchRows`, but logits stay as they are."""
        local = merge_statistics(logprob_rows(logits, targets, self.config, self.shard))
        return local if self.shard is None else self.shard.merge(local)

    def gradient(
        self,
        logits: Tensor,
        targets: Tensor,
        statistics: RowStatistics,
        logprob_grad: Tensor,
        entropy_grad: Tensor | None,
    ) -> Tensor:
        return logprob_rows_backward(
            logits, targets, statistics, logprob_grad, entropy_grad, self.config, self.dtype, self.shard
        )

    def loss(
        self,
        logits: Tensor,
        targets: Tensor,
        inputs: TokenInputs,
        weights: Tensor,
        want_gradient: bool,
    ) -> LossRows:
        """One launch where every row has a program of its own; few long rows, and rows of which this process
        holds only a part, take the launches of the log-probs and what lies between them in torch."""
        if self.shard is not None or row_splits(*logits.shape)[0] > 1:
            return super().loss(logits, targets, inputs, weights, want_gradient)
        dtype = self.dtype if want_gradient else None
        return loss_rows(logits, targets, inputs, self.config, weights, dtype)
