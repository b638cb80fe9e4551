"""How rows of logits lie in memory, how programs divide them, and the checks that the launchers share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..config import PolicyLossConfig

ROW_ALIGNMENT = 64
"""Rows start at multiples of this many elements: 16-byte accesses, and aligned GEMM rows, for any V."""
TILE_ELEMENTS = 4096
"""Elements of a tile: 8 a thread, which is one 16-byte store of bf16."""
TILE_THREADS = 512
AMD = torch.version.hip is not None
GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def padded_width(vocab_size: int) -> int:
    return -(-vocab_size // ROW_ALIGNMENT) * ROW_ALIGNMENT


def empty_rows(
    rows: int, vocab_size: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Tensor:
    """An uninitialised `[n, V]` whose row pitch is a multiple of 64 elements."""
    return torch.empty((rows, padded_width(vocab_size)), dtype=dtype, device=device)[:, :vocab_size]


def alias_rows(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """`[n, V]` of `dtype` over the memory of fp32 logits `[n, V]`: each row starts where its logits start."""
    return logits.view(dtype)[:, : logits.shape[1]]


class RowTile(NamedTuple):
    """What one program works on at a time."""

    rows: int
    block: int
    num_warps: int


def row_tile(vocab_size: int, amd: bool) -> RowTile:
    """Several short rows, or a stretch of a long one."""
    block = min(TILE_ELEMENTS, triton.next_power_of_2(padded_width(vocab_size)))
    return RowTile(TILE_ELEMENTS // block, block, TILE_THREADS // (64 if amd else 32))


def launch_options(tile: RowTile) -> dict[str, int | bool]:
    """Compiler options. Fused multiply-add is named because Triton 3.9 warns where it is left open."""
    return {"num_warps": tile.num_warps, "enable_fp_fusion": True}


def check_rows(
    name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], shape: torch.Size | None = None
) -> None:
    """Raises unless `value` is `[n, V]` (or `shape`) of one of `dtypes`, laid out as by `empty_rows`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {value.dtype}")
    if value.dim() != 2 or value.shape[1] == 0 or (shape is not None and value.shape != shape):
        wanted = "[n, V] with V > 0" if shape is None else f"{list(shape)} like logits"
        raise ValueError(f"{name} must be {wanted}, got {list(value.shape)}")
    pitch, width = value.stride(0), padded_width(value.shape[1])
    if value.stride(1) != 1 or pitch % ROW_ALIGNMENT or pitch < width:
        raise ValueError(
            f"{name} {list(value.shape)} must have strides (pitch, 1), the pitch a multiple of "
            f"{ROW_ALIGNMENT} and at least {width}, got {value.stride()}; see launch.empty_rows"
        )
    end = (value.storage_offset() + (value.shape[0] - 1) * pitch + width) * value.element_size()
    if value.shape[0] and end > value.untyped_storage().nbytes():
        raise ValueError(
            f"{name} {list(value.shape)} must own the {width - value.shape[1]} columns after its last row"
        )


def check_column(
    name: str, value: Tensor | None, logits: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor | None:
    """`value` contiguous, or None; raises unless it is `[n]` of `dtype` on the device of logits `[n, V]`."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.shape != logits.shape[:1]:
        raise ValueError(
            f"{name} must be [n] = {list(logits.shape[:1])} for logits {list(logits.shape)}, "
            f"got {list(value.shape)}"
        )
    if value.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {value.dtype}")
    if value.device != logits.device:
        raise ValueError(f"{name} must be on {logits.device} like logits, got {value.device}")
    return value.contiguous()


def is_alias(logits: Tensor, dlogits: Tensor) -> bool:
    """Whether dlogits lie over the logits; raises if they overlap other than row on row."""
    check_rows("dlogits", dlogits, GRADIENT_DTYPES, logits.shape)
    if dlogits.device != logits.device:
        raise ValueError(f"dlogits must be on {logits.device} like logits, got {dlogits.device}")
    if dlogits.untyped_storage()._cdata != logits.untyped_storage()._cdata:
        return False

    def layout(rows: Tensor) -> tuple[int, int]:
        return rows.storage_offset() * rows.element_size(), rows.stride(0) * rows.element_size()

    if layout(dlogits) != layout(logits):
        raise ValueError(
            "dlogits that share memory with logits must start at the same bytes, row by row "
            f"(launch.alias_rows), got offset and pitch {layout(dlogits)} against {layout(logits)}"
        )
    return True


def transform_arguments(config: PolicyLossConfig) -> dict[str, float | bool]:
    """The arguments of `row_math.to_z`."""
    cap = config.logit_softcap
    return {
        "factor": float(config.logit_scale / config.temperature),
        "inner": 0.0 if cap is None else config.logit_scale / cap,
        "outer": 0.0 if cap is None else cap / config.temperature,
        "SOFTCAP": cap is not None,
    }


def on_device(tensor: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
