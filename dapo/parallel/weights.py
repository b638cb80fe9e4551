"""Shards back to whole tensors: into a copy that generates, and into a state dict to save."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..config import ParallelConfig
from ..model import Policy
from .meta import empty_like
from .world import World


def inference_copy(policy: Policy, config: ParallelConfig, world: World) -> PreTrainedModel:
    """A plain model to generate with, on this process's device, in the dtype that the policy computes in; its
    weights are undefined until `refresh`. With one process, the policy's own model."""
    if not world.distributed:
        return policy.model
    dtype = getattr(torch, config.param_dtype) if config.param_dtype else policy.model.dtype
    model = empty_like(policy.model, dtype)
    whole: dict[int, nn.Parameter] = {}  # by the parameter on meta: tied ones stay one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in whole:
                    value = torch.empty_like(parameter, device=world.device)
                    whole[id(parameter)] = nn.Parameter(value, requires_grad=False)
                module._parameters[name] = whole[id(parameter)]
    return model.to(world.device)


@torch.no_grad()
def refresh(copy: PreTrainedModel, policy: Policy) -> None:
    """Brings the policy's weights, as its forward uses them, into its inference copy. Every rank calls it;
    one block at a time is whole. With one process there is nothing to do."""
    if copy is policy.model:
        return
    for prefix, names in _units(policy).items():
        unit = policy.get_submodule(prefix)
        unit.reshard()  # what a forward without backward left gathered may be out of date
        unit.unshard()
        try:
            for name in names:
                # While gathered, a parameter is registered as a plain tensor under its own name.
                copy.get_parameter(name.removeprefix("model.")).copy_(policy.get_parameter(name))
        finally:
            unit.reshard()
    for name, buffer in policy.model.named_buffers():
        copy.get_buffer(name).copy_(buffer)


def _units(policy: Policy) -> dict[str, list[str]]:
    """What is gathered at a time: the name of each sharded module, and the names of its own parameters."""
    units: dict[str, list[str]] = {
        name: [] for name, module in policy.named_modules() if isinstance(module, FSDPModule)
    }
    for name, _ in policy.named_parameters():
        owner = name
        while owner not in units:
            owner = owner.rpartition(".")[0]
        units[owner].append(name)
    return units


def full_state_dict(policy: Policy, world: World) -> dict[str, Tensor]:
    """What `policy.model.state_dict()` would be without shards, on rank 0 in host memory; empty elsewhere.

    Every rank calls it. One tensor at a time is whole on the others, in the dtype of the optimizer's weights.
    Tied parameters are one tensor. Save by `model.save_pretrained(out, state_dict=...)` on rank 0.
    """
    if not world.distributed:
        return policy.model.state_dict()
    whole: dict[int, Tensor] = {}
    state = {}
    for name, value in policy.model.state_dict(keep_vars=True).items():
        if id(value) not in whole:
            tensor = _gathered(value.detach(), world.device)
            whole[id(value)] = tensor.cpu() if world.is_main else tensor.new_empty(0)
        state[name] = whole[id(value)]
    return state if world.is_main else {}


def _gathered(value: Tensor, device: torch.device) -> Tensor:
    # Offloaded shards go to the device first (no GPU has run this): NCCL gathers faster than gloo.
    return value.to(device).full_tensor() if isinstance(value, DTensor) else value
