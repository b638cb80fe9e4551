"""DAPO's reward shaping, group filter and advantages: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor, group_size: int, eps: float = 1e-6, divide_by_std: bool = True
) -> Tensor:
    """`(R - mean) / (std + eps)` within each group (Eq. 9), with the unbiased standard deviation.

    Args:
        rewards: `[P * G]` shaped rewards, the responses of a prompt next to each other.
        group_size: G, at least 2.
        eps: keeps groups of equal rewards at 0.
        divide_by_std: False leaves it at `R - mean` (Dr. GRPO, arXiv 2503.20783): dividing favours prompts
            that are very easy or very hard.

    Returns:
        `[P * G]` advantages.

    Raises:
        ValueError: when `group_size` is under 2 or does not divide the number of rewards.
    """
    if group_size < 2:
        raise ValueError(f"group_size must be at least 2, got {group_size}")
    if rewards.dim() != 1 or rewards.numel() % group_size:
        raise ValueError(f"rewards must be [P * {group_size}], got {list(rewards.shape)}")
    # In fp64: the rounding of a mean of equal fp32 rewards would not be small beside eps.
    groups = rewards.double().view(-1, group_size)  # [P, G]
    centred = groups - groups.mean(1, keepdim=True)
    scale = groups.std(1, keepdim=True) + eps if divide_by_std else 1.0
    advantages = (centred / scale).view(-1)
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())


def soft_overlong_penalty(length: int, max_length: int, cache_length: int, factor: float = 1.0) -> float:
    """Soft overlong punishment (Eq. 13): 0 up to `max_length - cache_length` tokens, then linear down to
    `-factor` at `max_length` and beyond.

    Raises:
        ValueError: unless `0 < cache_length < max_length`.
    """
    if not 0 < cache_length < max_length:
        raise ValueError(f"cache_length must be over 0 and under max_length {max_length}, got {cache_length}")
    excess = length - (max_length - cache_length)
    return -factor * min(max(excess / cache_length, 0.0), 1.0)


def keep_group(accuracies: Sequence[float]) -> bool:
    """Dynamic sampling's filter (Eq. 11): true when some but not all responses are right. Takes the raw
    correctness (0 or 1) of a group's responses, never the shaped reward."""
    mean = sum(accuracies) / len(accuracies)
    return 0 < mean < 1
