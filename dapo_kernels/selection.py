"""Which tokens are scored and which of them carry gradient, known before any GEMM."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .arguments import TokenBatch
from .config import PolicyLossConfig
from .objective import TokenInputs
from .sequences import count_by_sequence, dense_sequence_ids


class Selection(NamedTuple):
    """Flat indices of the scored tokens; the first `num_active` may carry gradient, the others cannot."""

    index: Tensor  # [n] int64
    num_active: int


def select_tokens(
    targets: Tensor,  # [N] int64
    batch: TokenBatch,
    vocab_size: int,
    config: PolicyLossConfig,
    selection: Tensor | None = None,
) -> Selection:
    """Orders tokens as active, scored only, left out. Masked tokens are left out, and where neither KL nor
    entropy bonus is in the loss, tokens with `advantage * token_weight == 0` are known to be inactive.

    The counts and the check of the ids share the one host read of a call. With `selection` (the flat
    indices of the unmasked tokens) nothing is read: all of them are taken as active, unchecked.
    """
    if selection is not None:
        if not isinstance(selection, Tensor):
            raise TypeError(f"selection must be a tensor, got {type(selection).__name__}")
        if selection.dim() != 1 or selection.dtype != torch.int64:
            raise ValueError(f"selection must be [n] int64, got {list(selection.shape)} {selection.dtype}")
        return Selection(selection, selection.numel())

    active = may_carry_gradient(batch.mask, batch.inputs, config)
    scored = active if config.skip_zero_advantage else batch.mask
    return order_tokens(targets, batch.mask, active, scored, batch.num_odd, vocab_size)


def may_carry_gradient(mask: Tensor, inputs: TokenInputs, config: PolicyLossConfig) -> Tensor:
    """`[N]` bool: unmasked tokens whose coefficient is not known beforehand to be 0. With one ratio a
    sequence a token's coefficient depends on every advantage in it, so sequences are taken whole."""
    if not config.zero_advantage_is_inert:
        return mask
    gain = inputs.advantages if inputs.token_weights is None else inputs.advantages * inputs.token_weights
    active = mask & (gain != 0)
    if config.ratio_level == "sequence":
        dense = dense_sequence_ids(inputs.sequence_ids)[1]
        active = mask & (count_by_sequence(active, dense)[dense] > 0)
    return active


def order_tokens(
    targets: Tensor,  # [N] int64
    mask: Tensor,  # [N] bool: tokens that count
    active: Tensor,  # [N] bool: those of them that may carry gradient
    scored: Tensor,  # [N] bool: those of them that are scored
    num_odd: Tensor,  # 0-d: how many values of the caller's mask are neither 0 nor 1
    vocab_size: int,
) -> Selection:
    """Sorts tokens as active, scored only, left out; raises `ValueError` for an unmasked id outside of
    `[0, V)` and for a mask that is none. Reads its counts back at once."""
    bad = mask & ((targets < 0) | (targets >= vocab_size))
    counts = torch.stack([active.sum(), scored.sum(), bad.sum(), num_odd])
    num_active, num_scored, num_bad, num_odd = read_back(counts)
    check_mask(num_odd)
    if num_bad:
        worst = targets[bad][0].item()
        raise ValueError(
            f"targets must be in [0, {vocab_size}) where mask is 1, got {num_bad} outside, such as {worst}"
        )
    rank = 2 - scored.to(torch.uint8) - active.to(torch.uint8)  # 0 active, 1 scored only, 2 left out
    order = rank.sort(stable=True).indices
    return Selection(order[:num_scored], num_active)


def keep_where(index: Tensor, wanted: Tensor, count: int) -> Tensor:
    """The `count` entries of `index` `[n]` where `wanted` `[n]` is true, in their order."""
    return index[(~wanted).to(torch.uint8).sort(stable=True).indices[:count]]


def check_mask(num_odd: int) -> None:
    if num_odd:
        raise ValueError(f"mask must be bool or 0/1, got {num_odd} values that are neither 0 nor 1")


def read_back(values: Tensor) -> list[int] | int | float:
    """The only place where a call waits for the device."""
    return values.tolist()


def known_to_be_one(value: Tensor) -> bool:
    """Whether a 0-d value is 1, where it takes no waiting to know: on CPU, and not a fake tensor."""
    return value.is_cpu and not isinstance(value, FakeTensor) and read_back(value) == 1


def scatter_tokens(values: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    """`[n]` values back to `shape`, 0 elsewhere."""
    flat = values.new_zeros(shape.numel())
    flat[index] = values
    return flat.view(shape)
