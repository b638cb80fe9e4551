"""The policy in shards (FSDP2), and the norm of gradients in shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..config import ParallelConfig
from ..errors import UserError
from ..model import Policy
from .world import World


def shard_policy(policy: Policy, config: ParallelConfig, world: World) -> Policy:
    """Cuts the policy's parameters over the processes, in place, and returns it; with one process, as it was.

    Each transformer block is gathered for its own forward and backward. All else (embedding, last norm, head)
    belongs to the root, which is gathered when `Policy.forward` begins and kept until backward is through:
    the loss reads the head's weight there, so only calls of the policy itself work, not of its model. Takes
    parameters on `meta`, which `load_shards` fills, and real ones that are equal on all ranks.

    Raises:
        UserError: the model does not say what its blocks are.
    """
    if not world.distributed:
        return policy
    dtype = getattr(torch, config.param_dtype) if config.param_dtype else None
    options = {"mesh": world.fsdp_mesh, "offload_policy": _offload(config, world)}
    blocks = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # The root's inputs are advantages and old log-probs, which stay as exact as they come.
    root = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for block in transformer_blocks(policy.model):
        fully_shard(block, mp_policy=blocks, **options)
    return fully_shard(policy, mp_policy=root, **options)


def transformer_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The modules that transformers keeps whole on one device: each is called as a unit."""
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError(
            f"{type(model).__name__} does not name its blocks (_no_split_modules), so it cannot be sharded: "
            "train it with one process"
        )
    return blocks


def _offload(config: ParallelConfig, world: World) -> OffloadPolicy:
    """Parameters, gradients and optimizer state in host memory. On CPU that is where they are."""
    if config.offload and world.device.type == "cuda":
        return CPUOffloadPolicy()  # no GPU has run this yet
    return OffloadPolicy()


def clip_grad_norm(parameters: Iterable[Tensor], max_norm: float) -> float:
    """Scales gradients down to a norm of `max_norm` over all parameters and ranks, where it is larger.

    Args:
        parameters: those that the optimizer holds: between a forward and its backward `policy.parameters()`
            may be gathered ones.

    Returns:
        The norm before, the same on every rank.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
