"""The processes of a run: who they are, and how they are arranged."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..config import ParallelConfig
from ..errors import UserError


@dataclass(frozen=True)
class World:
    """One process's view of all. With a single process there is neither a process group nor a mesh."""

    device: torch.device
    rank: int = 0
    size: int = 1
    context: int = 1
    """Processes that share each sequence; they hold the same samples."""
    mesh: DeviceMesh | None = None
    """Dimensions `replicate`, `shard` and `context`, ranks counted along the last one first."""
    fsdp_mesh: DeviceMesh | None = None
    """What parameters are sharded over: `shard` and `context` in one dimension, after `replicate` if there
    is more than one replica."""
    data_group: dist.ProcessGroup | None = None
    """The processes that hold other samples than this one, and itself. None: all of them."""

    @property
    def distributed(self) -> bool:
        return self.size > 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and speaks to the person."""
        return self.rank == 0

    @property
    def data_size(self) -> int:
        """Shares that a batch is cut into. FSDP averages gradients, so a loss that is divided by
        `count / data_size` on every rank gives the gradient of the sum over all ranks, divided by `count`."""
        return self.size // self.context

    @property
    def data_rank(self) -> int:
        return self.rank // self.context

    @property
    def context_group(self) -> dist.ProcessGroup | None:
        """The processes that share this one's sequences, and itself."""
        return self.mesh["context"].get_group() if self.mesh is not None else None

    def close(self) -> None:
        """Leaves the process group, without waiting for anyone: others may have died."""
        if self.distributed and dist.is_initialized():
            dist.destroy_process_group()


def open_world(config: ParallelConfig) -> World:
    """Joins the other processes that `torchrun` started; alone when it did not, or started only one.

    Raises:
        UserError: the processes cannot be arranged as `parallel` says.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    cuda = torch.cuda.is_available()
    if size == 1:
        _check_single(config)
        return World(torch.device("cuda" if cuda else "cpu"))
    _shard_size(config, size)  # raises before the others are waited for
    device = _own_device(cuda)
    dist.init_process_group(
        # gloo besides NCCL: numbers, objects and offloaded parameters travel from host memory.
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        timeout=timedelta(seconds=config.timeout),
    )
    return arrange(config, device)


def arrange(config: ParallelConfig, device: torch.device) -> World:
    """The processes of the default group as `parallel` says."""
    size = dist.get_world_size()
    shard = _shard_size(config, size)
    dims = (config.replicate, shard, config.context)
    mesh = init_device_mesh(device.type, dims, mesh_dim_names=("replicate", "shard", "context"))
    fsdp_mesh = init_device_mesh(
        device.type, (config.replicate, shard * config.context), mesh_dim_names=("replicate", "shard")
    )
    return World(
        device,
        rank=dist.get_rank(),
        size=size,
        context=config.context,
        mesh=mesh,
        # Without a dimension of one replica, FSDP spares its gradients an all-reduce among themselves.
        fsdp_mesh=fsdp_mesh if config.replicate > 1 else fsdp_mesh["shard"],
        data_group=_data_group(size, config.context),
    )


def _check_single(config: ParallelConfig) -> None:
    for key in ("replicate", "context"):
        if getattr(config, key) != 1:
            raise UserError(
                f"parallel.{key} is {getattr(config, key)}, but there is one process: set it to 1, or start "
                "`torchrun --nproc_per_node N -m dapo train CONFIG`"
            )
    for key, instead in (("param_dtype", "null (model.dtype sets the dtype)"), ("offload", "false")):
        if getattr(config, key):
            raise UserError(
                f"parallel.{key} is {getattr(config, key)}, which takes two processes or more, and there is "
                f"one: set it to {instead}, or start `torchrun --nproc_per_node N -m dapo train CONFIG`"
            )


def _shard_size(config: ParallelConfig, size: int) -> int:
    """Processes that one copy of the parameters is cut over, context aside."""
    for key in ("replicate", "context"):
        if size % getattr(config, key):
            raise UserError(f"parallel.{key} ({getattr(config, key)}) must divide the {size} processes")
    if size % (config.replicate * config.context):
        raise UserError(
            f"parallel.replicate ({config.replicate}) times parallel.context ({config.context}) must divide "
            f"the {size} processes"
        )
    return size // config.replicate // config.context


def _own_device(cuda: bool) -> torch.device:
    if not cuda:
        return torch.device("cpu")
    # No GPU has run this branch yet.
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local >= torch.cuda.device_count():
        raise UserError(
            f"process {local} of this machine has no GPU of its own: there are {torch.cuda.device_count()}; "
            "lower torchrun's --nproc_per_node"
        )
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _data_group(size: int, context: int) -> dist.ProcessGroup | None:
    if context == 1:
        return None
    groups = [dist.new_group(list(range(first, size, context))) for first in range(context)]
    return groups[dist.get_rank() % context]
