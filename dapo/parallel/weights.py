"""Shards back to whole tensors: into a copy that generates, and into a state dict to save."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..config import ParallelConfig
from ..lora import Adapters
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
    """Brings the policy's weights, as its forward uses them, into its inference copy, adapters merged. Every
    rank calls it; one block at a time is whole. With one process there is nothing to do."""
    if copy is policy.model:
        return
    for name, weight in policy_weights(policy):
        copy.get_parameter(name).copy_(weight)
    for name, buffer in policy.model.named_buffers():
        copy.get_buffer(name).copy_(buffer)


@torch.no_grad()
def policy_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Every parameter as the policy's forward uses it, adapters merged, by its name in the plain model; tied
    ones once. A tensor holds until the next is asked for.

    In shards, one block at a time is whole: every rank takes all of them, in this order.
    """
    model, adapters = policy.model, Adapters(policy.model)
    for prefix, names in _units(policy).items():
        with _whole(policy.get_submodule(prefix)):
            for name in (name.removeprefix("model.") for name in names):
                plain = adapters.plain_name(name)
                if plain is not None:
                    # While gathered, a parameter is registered as a plain tensor under its own name.
                    yield plain, adapters.merged(name, model.get_parameter).detach()


@torch.no_grad()
def tied_head(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """The head's weight under its own name, where `policy_weights` has it as the input embedding alone; every
    rank takes it."""
    model = policy.model
    head = model.get_output_embeddings()
    if not model.config.get_text_config().tie_word_embeddings:
        return
    (name,) = (f"{name}.weight" for name, module in model.named_modules() if module is head)
    with _whole(policy):
        yield name, head.weight.detach()


@contextmanager
def _whole(unit: nn.Module) -> Iterator[None]:
    if not isinstance(unit, FSDPModule):
        yield
        return
    unit.reshard()  # what a forward without backward left gathered may be out of date
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()


def release(policy: Policy) -> None:
    """Lets go of what a forward without backward left gathered: `policy.parameters()` are shards again."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _units(policy: Policy) -> dict[str, list[str]]:
    """What is gathered at a time: the name of each sharded module, and the names of its own parameters. All
    at once where nothing is in shards."""
    units: dict[str, list[str]] = {
        name: [] for name, module in policy.named_modules() if name == "" or isinstance(module, FSDPModule)
    }
    for name, _ in policy.named_parameters():
        owner = name
        while owner not in units:
            owner = owner.rpartition(".")[0]
        units[owner].append(name)
    return units


def full_state_dict(policy: Policy, world: World) -> dict[str, Tensor]:
    """What `policy.model.state_dict()` would be without shards and with its adapters merged, on rank 0 in
    host memory; empty elsewhere. The policy stays as it is.

    Every rank calls it. One tensor at a time is whole on the others, in the dtype of the optimizer's weights.
    Tied parameters are one tensor. Save by `model.save_pretrained(out, state_dict=...)` on rank 0.
    """
    adapters = Adapters(policy.model)
    if not world.distributed and not adapters.layers:
        return policy.model.state_dict()
    values = policy.model.state_dict(keep_vars=True)
    whole: dict[int, Tensor] = {}
    state = {}
    for name, value in values.items():
        plain = adapters.plain_name(name)
        if plain is None:
            continue
        if id(value) not in whole:
            tensor = adapters.merged(name, lambda key: _gathered(values[key].detach(), world.device))
            whole[id(value)] = tensor.cpu() if world.is_main else tensor.new_empty(0)
        state[plain] = whole[id(value)]
    return state if world.is_main else {}


def adapter_state_dict(policy: Policy, world: World) -> dict[str, Tensor]:
    """The adapters' own weights under their names in `policy.model`, whole, on rank 0 in host memory; empty
    elsewhere, and where there are no adapters. Every rank calls it."""
    adapters, state = Adapters(policy.model), {}
    for name, value in policy.model.state_dict(keep_vars=True).items():
        if adapters.plain_name(name) is None:
            tensor = _gathered(value.detach(), world.device)
            if world.is_main:
                state[name] = tensor.cpu()
    return state


def _gathered(value: Tensor, device: torch.device) -> Tensor:
    # Offloaded shards go to the device first (no GPU has run this): NCCL gathers faster than gloo.
    return value.to(device).full_tensor() if isinstance(value, DTensor) else value
