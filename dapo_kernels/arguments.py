"""Checks of what callers pass, and one flat view of it: every message names the argument and the shapes."""

from __future__ import annotations

from numbers import Real
from typing import NamedTuple

import torch
from torch import Tensor

from .config import PolicyLossConfig
from .objective import TokenInputs

BACKENDS = ("auto", "torch", "triton")
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class TokenBatch(NamedTuple):
    """The per-token arguments of one call, flattened to `[N]`."""

    shape: torch.Size
    """Shape of the caller's targets or log-probs."""
    mask: Tensor
    """`[N]` bool."""
    num_odd: Tensor
    """0-d: how many values of the caller's mask are neither 0 nor 1."""
    inputs: TokenInputs
    """`[N]` each; masked entries may hold anything, except in `sequence_ids`."""


def flatten_tokens(
    tokens: Tensor,
    dtype: torch.dtype,
    config: PolicyLossConfig,
    *,
    advantages: Tensor,
    mask: Tensor,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    token_weights: Tensor | None,
    entropy_weights: Tensor | None,
    denominator: Tensor | float | None,
    sequence_ids: Tensor | None,
) -> TokenBatch:
    """Checks every per-token argument against `tokens` (the targets or log-probs `[...]`) and flattens it;
    floats become `dtype`."""
    shape = tokens.shape
    check_config(config)
    if config.kl_coef != 0 and ref_logprobs is None:
        raise ValueError(f"ref_logprobs is required when config.kl_coef is not 0 (it is {config.kl_coef})")
    _check_denominator(denominator, config)

    def per_token(name: str, value: Tensor | None, also: tuple[str, ...] = ()) -> Tensor | None:
        if value is None:
            return None
        if isinstance(value, Tensor) and value.dim() == 0:
            value = value.to(tokens.device)
        expanded = _expand(name, value, tokens, also)
        return expanded.detach().to(dtype).reshape(-1)

    _check_tensor("mask", mask)
    mask, num_odd = flatten_mask(mask, tokens)
    inputs = TokenInputs(
        advantages=per_token("advantages", advantages, ("[B]", "[B, 1]")),
        old_logprobs=per_token("old_logprobs", old_logprobs),
        ref_logprobs=per_token("ref_logprobs", ref_logprobs),
        token_weights=per_token("token_weights", token_weights, ("[B, 1]",)),
        entropy_weights=per_token("entropy_weights", entropy_weights, ("0-d",)),
        sequence_ids=_sequence_ids(sequence_ids, tokens, config),
    )
    return TokenBatch(shape, mask, num_odd, inputs)


def check_config(config: PolicyLossConfig) -> None:
    if not isinstance(config, PolicyLossConfig):
        raise TypeError(f"config must be a PolicyLossConfig, got {type(config).__name__}")


def _check_tensor(name: str, value: Tensor) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def _check_device(name: str, value: Tensor, device: torch.device) -> None:
    if value.device != device:
        raise ValueError(f"{name} must be on {device} like the other arguments, got {value.device}")


def _expand(name: str, value: Tensor, tokens: Tensor, also: tuple[str, ...]) -> Tensor:
    _check_tensor(name, value)
    _check_device(name, value, tokens.device)
    shape = tokens.shape
    if value.shape == shape:
        return value
    if "0-d" in also and value.dim() == 0:
        return value.expand(shape)
    if len(shape) == 2:
        if "[B]" in also and value.shape == shape[:1]:
            return value[:, None].expand(shape)
        if "[B, 1]" in also and value.shape == (shape[0], 1):
            return value.expand(shape)
    sizes = {"[B]": str(list(shape[:1])), "[B, 1]": str([*shape[:1], 1]), "0-d": "0-d"}
    allowed = " or ".join([str(list(shape)), *(sizes[s] for s in also if s == "0-d" or len(shape) == 2)])
    raise ValueError(f"{name} must have shape {allowed} to go with the tokens, got {list(value.shape)}")


def _check_denominator(denominator: Tensor | float | None, config: PolicyLossConfig) -> None:
    if denominator is None:
        if config.reduction == "constant":
            raise ValueError("denominator is required when config.reduction is 'constant'")
    elif isinstance(denominator, Tensor):
        if denominator.dim() != 0 or denominator.is_complex():
            given = f"{list(denominator.shape)} {denominator.dtype}"
            raise ValueError(f"denominator must be a number or 0-d, got shape {given}")
    elif not isinstance(denominator, Real):
        raise TypeError(f"denominator must be a number or 0-d tensor, got {type(denominator).__name__}")
    elif not denominator > 0:
        raise ValueError(f"denominator must be over 0, got {denominator}")


def _sequence_ids(sequence_ids: Tensor | None, tokens: Tensor, config: PolicyLossConfig) -> Tensor | None:
    shape = tokens.shape
    if not config.needs_sequences:
        return None
    if sequence_ids is not None:
        _check_tensor("sequence_ids", sequence_ids)
        if sequence_ids.dtype != torch.int64:
            raise TypeError(f"sequence_ids must be int64, got {sequence_ids.dtype}")
        return _expand("sequence_ids", sequence_ids, tokens, ()).reshape(-1)
    if len(shape) < 2:
        raise ValueError(
            f"sequence_ids is required for a packed batch {list(shape)} when config.reduction is "
            f"{config.reduction!r} and config.ratio_level {config.ratio_level!r}"
        )
    rows = shape[:-1].numel()
    return torch.arange(rows, device=tokens.device).repeat_interleave(shape[-1])


def check_head(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> None:
    """Raises unless hidden is `[..., H]`, weight `[V, H]`, bias `[V]`, targets `[...]` int64."""
    for name, value in (("hidden", hidden), ("weight", weight), ("bias", bias), ("targets", targets)):
        if name == "bias" and value is None:
            continue
        _check_tensor(name, value)
        _check_device(name, value, hidden.device)
        if name != "targets" and value.dtype not in FLOATS:
            raise TypeError(f"{name} must be one of {FLOATS}, got {value.dtype}")
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64, got {targets.dtype}")
    if weight.dim() != 2:
        raise ValueError(f"weight must be [V, H], got {list(weight.shape)}")
    if weight.shape[1] == 0:
        raise ValueError(f"weight must be [V, H] with H over 0, got {list(weight.shape)}")
    if hidden.shape != (*targets.shape, weight.shape[1]):
        wanted = [*targets.shape, weight.shape[1]]
        raise ValueError(
            f"hidden must be [..., H] = {wanted} for targets {list(targets.shape)} and weight "
            f"{list(weight.shape)}, got {list(hidden.shape)}"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [V] = {[weight.shape[0]]}, got {list(bias.shape)}")


def check_call(backend: str, chunk_tokens: int | None, hidden_grad: str) -> None:
    if hidden_grad not in ("complete", "partial"):
        raise ValueError(f"hidden_grad must be 'complete' or 'partial', got {hidden_grad!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if chunk_tokens is not None and not (isinstance(chunk_tokens, int) and chunk_tokens >= 1):
        raise ValueError(f"chunk_tokens must be None or a whole number, at least 1, got {chunk_tokens!r}")


def flatten_mask(mask: Tensor | None, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """`[N]` bool (all true for None), and how many values are neither 0 nor 1 (0-d): not read back here."""
    if mask is None:
        mask = torch.ones_like(tokens, dtype=torch.bool)
    flat = _expand("mask", mask, tokens, ()).detach().reshape(-1)
    if flat.dtype == torch.bool:
        return flat, torch.zeros((), dtype=torch.int64, device=flat.device)
    return flat != 0, ((flat != 0) & (flat != 1)).sum()
