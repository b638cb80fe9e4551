"""Sums over the tokens of each sequence, from ids that need be neither sorted nor dense.

Floats are summed over sorted segments, never by atomic adds: the same bits from run to run on every device.
Nothing is read back to the host, so that the number of sequences need not be known.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dense_sequence_ids(sequence_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The order `[n]` that sorts the tokens by sequence, and each token's sequence `[n]` counted from 0."""
    sorted_ids, order = sequence_ids.sort(stable=True)
    starts = torch.ones_like(sorted_ids)
    starts[1:] = sorted_ids[1:] != sorted_ids[:-1]
    dense = torch.empty_like(order)
    dense[order] = starts.cumsum(0) - 1
    return order, dense


def count_by_sequence(flags: Tensor, dense: Tensor) -> Tensor:
    """How many flags `[n]` are set in each sequence, `[n]` by dense id: integers, exact in any order."""
    return torch.zeros_like(dense).scatter_add_(0, dense, flags.long())


def sequence_mean(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Each token's value `[n]` becomes the mean over its sequence. Differentiable."""
    order, dense = dense_sequence_ids(sequence_ids)
    lengths = count_by_sequence(torch.ones_like(dense), dense)
    sums = torch.segment_reduce(values[order], "sum", lengths=lengths, unsafe=True)
    return (sums / lengths.clamp(min=1))[dense]
