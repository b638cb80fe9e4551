"""Attention for packed rows: many sequences in one row, none of which sees another.

transformers' own SDPA attends across a packed row unless it is given an `[N, N]` mask, which costs more than
padding. Here it runs once a sequence. On a GPU with flash-attn the model is switched to that instead, which
knows packed rows by itself. No GPU has run either path.

The boundaries reach the attention function as the keyword arguments that flash-attn has (`cu_seq_lens_q` and
so on): decoders hand them down as arguments of every layer, so that a layer which is computed again in
backward gets them again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import is_flash_attn_2_available

if TYPE_CHECKING:
    from .parallel.context import ContextGroup

PACKED_SDPA, FLASH = "packed_sdpa", "flash_attention_2"
UNSUPPORTED = {
    "softcap": "soft-capped attention scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
}


class NotPackable(Exception):
    """The model's attention asks for something that packed rows do not have; the message says what."""


@dataclass
class AttentionCalls:
    """What the layers of one packed forward asked for."""

    packed: int = 0
    """Calls that were given the boundaries."""
    masked_windows: set[int] = field(default_factory=set)
    """Local attention that the model would have put into its mask."""
    told_windows: set[int] = field(default_factory=set)
    """Windows that attention itself was told of. One that is in the mask alone would be lost."""


# Only says that no [N, N] mask need be made, which decoders do outside of their layers, and records. What is
# computed again in backward does not see it and does not need to.
_packed_forward: ContextVar[AttentionCalls | None] = ContextVar("packed_forward", default=None)


@contextmanager
def packed_forward() -> Iterator[AttentionCalls]:
    """Around a decoder's forward on a packed row. One inside another records to the outer one."""
    calls = _packed_forward.get() or AttentionCalls()
    token = _packed_forward.set(calls)
    try:
        yield calls
    finally:
        _packed_forward.reset(token)


def packed_sdpa(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, N, D]
    key: Tensor,  # [1, key heads, N, D]
    value: Tensor,  # [1, key heads, N, D]
    attention_mask: Tensor | None,
    cu_seq_lens_q: Tensor | None = None,  # [S + 1] 0 and where each sequence ends
    sliding_window: int | None = None,
    context: ContextGroup | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """transformers' SDPA, one call a sequence where boundaries are given, the ordinary one where not.

    Args:
        context: the processes that share the row. `N` tokens are this one's; the boundaries are the row's.

    Returns:
        `[1, N, heads, D]`, and None in place of the attention weights.

    Raises:
        NotPackable: a packed call with softcap, sinks or a position bias.
    """
    if cu_seq_lens_q is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise NotPackable(f"it has {what}")
    calls = _packed_forward.get()
    if calls is not None:
        calls.packed += 1
        calls.told_windows |= {sliding_window} if sliding_window else set()
    if context is not None:
        query, key, value = context.to_heads(query, key, value)  # all tokens of some heads
        # SDPA asks the module how many query heads share a key head: here, not in the whole layer.
        groups = query.shape[1] // key.shape[1]
        module = SimpleNamespace(is_causal=getattr(module, "is_causal", True), num_key_value_groups=groups)
    lengths = cu_seq_lens_q.diff().tolist()
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)))
    outputs = [
        sdpa_attention_forward(module, *part, window_mask(length, sliding_window, query.device), **kwargs)[0]
        for length, part in zip(lengths, parts)
    ]
    output = torch.cat(outputs, dim=1)  # [1, tokens of the row, heads, D]
    return (output if context is None else context.to_tokens(output)), None


def window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """`[1, 1, length, length]` bool, each token with the `window` last ones; None: plain causal attention."""
    if not window or length <= window:
        return None
    at = torch.arange(length, device=device)
    distance = at[:, None] - at  # [length, length]
    return ((distance >= 0) & (distance < window))[None, None]


def _mask(*args, local_size: int | None = None, **kwargs) -> Tensor | None:
    """SDPA's mask for padded rows; none for a packed one."""
    calls = _packed_forward.get()
    if calls is None:
        return sdpa_mask(*args, local_size=local_size, **kwargs)
    if local_size is not None:
        calls.masked_windows.add(local_size)
    return None


AttentionInterface.register(PACKED_SDPA, packed_sdpa)
AttentionMaskInterface.register(PACKED_SDPA, _mask)


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switches the model, for all of its forwards, to an attention that knows packed rows.

    Raises:
        NotPackable: the model has none; it is left as it was.
    """
    given = model.config.get_text_config()._attn_implementation
    if given == FLASH:
        return
    if given not in ("sdpa", PACKED_SDPA):
        raise NotPackable(f"its attention is {given!r}, not transformers' SDPA or flash-attn")
    half = model.dtype in (torch.bfloat16, torch.float16)  # all that flash-attn computes in
    flash = half and model.device.type == "cuda" and is_flash_attn_2_available()
    name = FLASH if flash and getattr(model, "_supports_flash_attn", False) else PACKED_SDPA
    model.set_attn_implementation(name)
    if model.config.get_text_config()._attn_implementation != name:
        raise NotPackable("its attention cannot be set")


def boundaries(model: PreTrainedModel, lengths: tuple[int, ...]) -> dict[str, Tensor | int]:
    """The lengths of the sequences in a packed row, as a decoder's keyword arguments."""
    ends = torch.tensor((0, *lengths)).cumsum(0, dtype=torch.int32)  # [S + 1]
    if model.config.get_text_config()._attn_implementation == FLASH:
        ends = ends.to(model.device)  # SDPA cuts by them on the host
    longest = max(lengths)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
