"""From token losses to one number: the weight of each token, and what the sum is divided by."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import PolicyLossConfig


def token_reduction(
    mask: Tensor,  # [N] bool
    sequence_ids: Tensor | None,  # [N] int64
    denominator: Tensor | float | None,
    dtype: torch.dtype,
    config: PolicyLossConfig,
) -> tuple[Tensor | None, Tensor | float]:
    """Returns the weight of every token (`[N]`, None: all 1) and the denominator.

    loss = sum_i weight_i * token_loss_i / denominator
    """
    by_sequence = config.reduction.startswith("seq-mean")
    weights, count = None, None
    if by_sequence:
        lengths, count = _sequence_lengths(mask, sequence_ids)
        if config.reduction == "seq-mean-token-mean":
            weights = lengths.clamp(min=1).to(dtype).reciprocal()
    if denominator is None:
        denominator = (count if by_sequence else mask.sum()).clamp(min=1)
    elif isinstance(denominator, Tensor):
        denominator = denominator.detach().to(dtype)  # an fp64 count must not make the loss fp64
    return weights, denominator


def _sequence_lengths(mask: Tensor, sequence_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The number of unmasked tokens in each token's sequence, `[N]`, and the number of sequences
    with at least one. Ids need be neither sorted nor dense; nothing is read back to the host."""
    sorted_ids, order = sequence_ids.sort(stable=True)
    starts = torch.ones_like(sorted_ids)
    starts[1:] = sorted_ids[1:] != sorted_ids[:-1]
    segment = torch.empty_like(order)
    segment[order] = starts.cumsum(0) - 1  # [N], in the tokens' own order
    counts = torch.zeros_like(segment).scatter_add_(0, segment, mask.long())  # integers: exact in any order
    return counts[segment], (counts > 0).sum()
