"""Work on all ranks that ends alike on all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import UserError
from ..parallel.world import World
from .errors import CheckpointFailed, Elsewhere, reason

T = TypeVar("T")


def together(work: Callable[[], T], world: World, group: dist.ProcessGroup | None = None) -> list[T]:
    """What `work` returned on each rank, in order. If it raised on some, all raise the first one's error.

    Args:
        group: all ranks' group to talk on; None: the default one.
    """
    value, error = None, None
    try:
        value = work()
    except Exception as e:
        error = e
    if not world.distributed:
        if error is not None:
            raise error
        return [value]
    received: list[Any] = [None] * world.size
    dist.all_gather_object(received, (value, error and _portable(error, world)), group=group)
    for rank, (_, remote) in enumerate(received):
        if remote is not None:
            raise remote from (error if rank == world.rank else None)
    return [value for value, _ in received]


def on_main(work: Callable[[], T], world: World, group: dist.ProcessGroup | None = None) -> T:
    """What `work` returned, or raised, on rank 0: on every rank."""
    return together(lambda: work() if world.is_main else None, world, group)[0]


def _portable(error: Exception, world: World) -> Exception:
    """What can be pickled for sure and says the same."""
    if isinstance(error, CheckpointFailed | UserError):
        return type(error)(str(error))
    if isinstance(error, OSError) and error.strerror:
        return OSError(error.errno, f"{error.strerror} (process {world.rank})")
    return Elsewhere(f"{reason(error)} (process {world.rank})")
