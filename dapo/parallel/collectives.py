"""What processes tell each other besides tensors of the model. With one process all of it is the identity."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .watchdog import waiting
from .world import World

T = TypeVar("T")
Number = float | Tensor


def all_reduce_sum(values: Mapping[str, Number], world: World) -> dict[str, float]:
    """Sums over the data ranks, in fp64, one collective.

    Args:
        values: numbers or 0-d tensors, under the same names on every rank.
    """
    return _all_reduce(values, world, dist.ReduceOp.SUM)


def all_reduce_max(values: Mapping[str, Number], world: World) -> dict[str, float]:
    """Maxima over all ranks; arguments as those of `all_reduce_sum`."""
    return _all_reduce(values, world, dist.ReduceOp.MAX)


def _all_reduce(values: Mapping[str, Number], world: World, op: dist.ReduceOp) -> dict[str, float]:
    plain = {name: float(value) for name, value in values.items()}
    if not world.distributed:
        return plain
    names = sorted(plain)
    # Ranks that disagree on the names would add apples to pears: a checksum of them goes along.
    checksum = float(zlib.crc32(" ".join(names).encode()))
    packed = torch.tensor([checksum, *(plain[name] for name in names)], dtype=torch.float64)
    # Ranks that share sequences would be counted twice in a sum.
    with waiting():
        dist.all_reduce(packed, op, group=world.data_group if op == dist.ReduceOp.SUM else None)
    seen, *reduced = packed.tolist()
    if seen != (checksum * world.data_size if op == dist.ReduceOp.SUM else checksum):
        raise RuntimeError(f"ranks reduce different names; rank {world.rank} has {names}")
    result = dict(zip(names, reduced))
    return {name: result[name] for name in plain}


def gather_objects(value: T, world: World) -> list[T] | None:
    """On rank 0 the value of each data rank, in order; elsewhere None. Values are pickled."""
    if not world.distributed:
        return [value]
    received = [None] * world.size if world.is_main else None
    with waiting():
        dist.gather_object(value, received, dst=0)
    return received[:: world.context] if received is not None else None


def all_gather_objects(value: T, world: World) -> list[T]:
    """On every rank the value of each data rank, in order. Values are pickled."""
    if not world.distributed:
        return [value]
    received: list[Any] = [None] * world.size
    with waiting():
        dist.all_gather_object(received, value)
    return received[:: world.context]


def same_on_all_ranks(value: T, world: World) -> T:
    """Rank 0's value, on every rank. A decision that was made from clocks, files or floats has to come from
    one place, or some ranks go on into a collective that others never enter."""
    if not world.distributed:
        return value
    box = [value]
    with waiting():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def split_across_ranks(items: Sequence[T], world: World, cost: Callable[[T], float] | None = None) -> list[T]:
    """This rank's share of items that all ranks hold in the same order.

    Args:
        cost: of one item. Without it the share is a contiguous part, of equal length give or take one, so
            that the shares of all ranks in order are `items`. With it, each item, costliest first, goes to
            the rank that has least; a share keeps the order of `items`.
    """
    size, rank = world.data_size, world.data_rank
    if cost is None:
        return list(items[len(items) * rank // size : len(items) * (rank + 1) // size])
    costs = [cost(item) for item in items]
    load, mine = [0.0] * size, []
    for index in sorted(range(len(items)), key=lambda i: (-costs[i], i)):
        least = min(range(size), key=lambda r: (load[r], r))
        load[least] += costs[index]
        if least == rank:
            mine.append(index)
    return [items[index] for index in sorted(mine)]
