"""Heads that are DTensors on a data-parallel mesh (FSDP2): gathered for the call, gradients averaged back."""

from __future__ import annotations

import torch
from torch import Tensor


def gather(parameter: Tensor | None) -> Tensor | None:
    """The whole parameter of a DTensor, anything else as it is. The gradient returns to the DTensor's own
    placement, averaged over its mesh as data-parallel gradients are."""
    if not hasattr(parameter, "full_tensor"):  # asked this way, torch.distributed.tensor is not imported
        return parameter
    from torch.distributed.tensor import Partial

    mesh = parameter.device_mesh
    # Sum and scale rather than Partial("avg"): gloo has no average.
    whole = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    return _ScaledGradient.apply(whole, 1 / mesh.size()) if torch.is_grad_enabled() else whole


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, factor):
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None
