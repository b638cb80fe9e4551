"""How a buffer of rows of logits lies in memory."""

from __future__ import annotations

import torch
from torch import Tensor

ROW_ALIGNMENT = 64
"""Rows start at multiples of this many elements: 16-byte accesses, and aligned GEMM rows, for any V."""


def padded_width(vocab_size: int) -> int:
    return -(-vocab_size // ROW_ALIGNMENT) * ROW_ALIGNMENT


def empty_rows(
    rows: int, vocab_size: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """An uninitialised `[n, V]` whose row pitch is a multiple of 64 elements."""
    return torch.empty((rows, padded_width(vocab_size)), dtype=dtype, device=device)[:, :vocab_size]
