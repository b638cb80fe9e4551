"""The head cut over a process group by vocabulary rows, as tensor-parallel trainers hold it.

Every rank works on its own rows of logits. Per chunk the ranks exchange five numbers a token, from which each
makes the statistics of the whole row in the same order, so that all go on with the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from .row_statistics import MERGED_FIELDS, RowStatistics, merge_statistics

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class VocabShard:
    """This rank's equal part of the vocabulary: `rows` ids from `rank * rows` on."""

    def __init__(self, group: ProcessGroup, rows: int) -> None:
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"vocab_group must be a ProcessGroup, got {type(group).__name__}")
        self.group, self.rows = group, rows
        self.world_size = dist.get_world_size(group)
        self.first = dist.get_rank(group) * rows

    @property
    def vocab_size(self) -> int:
        return self.rows * self.world_size

    def localise(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Ids `[n]` as columns of this shard, and which of them it owns; the others point anywhere in it."""
        local = targets - self.first
        return local.clamp(0, self.rows - 1), (local >= 0) & (local < self.rows)

    def merge(self, local: RowStatistics) -> RowStatistics:
        """The statistics of whole rows from those of each shard."""
        mine = torch.stack([getattr(local, name) for name in MERGED_FIELDS])
        parts = mine.new_empty(self.world_size * len(mine), mine.shape[1])
        dist.all_gather_into_tensor(parts, mine, group=self.group)
        return merge_statistics(parts.view(self.world_size, *mine.shape))

    def sum_(self, values: Tensor) -> Tensor:
        """Sum over the group, in place."""
        dist.all_reduce(values, group=self.group)
        return values
