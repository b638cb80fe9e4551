"""How rows of logits lie in memory, how programs divide them, and the checks that the launchers share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensor

from ..config import PolicyLossConfig
from ..row_layout import ROW_ALIGNMENT, padded_width

TILE_ELEMENTS = 4096
"""Elements of a tile: 8 a thread, which is one 16-byte store of bf16."""
TILE_THREADS = 512
FEW_PROGRAMS = 256
"""Rows that give fewer programs than this are cut, so that a large GPU has work for all of its cores. A
constant: were it the number of cores, the bits would depend on the device."""
AMD = torch.version.hip is not None
GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def alias_rows(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """`[n, V]` of `dtype` over the memory of fp32 logits `[n, V]`: each row starts where its logits start."""
    return logits.view(dtype)[:, : logits.shape[1]]


class RowTile(NamedTuple):
    """What one program works on at a time."""

    rows: int
    block: int
    num_warps: int

    def arguments(self) -> dict[str, int | bool]:
        """Of a launch. Fused multiply-add is named because Triton 3.9 warns where it is left open."""
        return {
            "ROWS": self.rows,
            "BLOCK": self.block,
            "num_warps": self.num_warps,
            "enable_fp_fusion": True,
        }


def row_tile(vocab_size: int, amd: bool) -> RowTile:
    """Several short rows, or a stretch of a long one."""
    block = min(TILE_ELEMENTS, triton.next_power_of_2(padded_width(vocab_size)))
    return RowTile(TILE_ELEMENTS // block, block, TILE_THREADS // (64 if amd else 32))


def row_splits(num_rows: int, vocab_size: int) -> tuple[int, int]:
    """How many programs share a row, and the columns that each takes: a whole number of tiles."""
    tile = row_tile(vocab_size, AMD)
    tiles = triton.cdiv(padded_width(vocab_size), tile.block)
    programs = max(1, triton.cdiv(num_rows, tile.rows))
    per_program = triton.cdiv(tiles, max(1, FEW_PROGRAMS // programs))
    return triton.cdiv(tiles, per_program), per_program * tile.block


def launch(kernel: triton.JITFunction, grid: tuple[int], arguments: dict) -> None:
    """Launches on the device of the logits; does nothing without rows, or for tensors without memory."""
    logits = arguments["logits_ptr"]
    if logits.numel() and not logits.is_meta and not isinstance(logits, FakeTensor):
        with _on_device(logits):
            kernel[grid](**arguments)


def _on_device(tensor: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_rows(name: str, value: Tensor) -> None:
    """Raises unless `value` is fp32 `[n, V]`, laid out as by `row_layout.empty_rows`."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.dtype != torch.float32:
        raise TypeError(f"{name} must be torch.float32, got {value.dtype}")
    if value.dim() != 2 or value.shape[1] == 0:
        raise ValueError(f"{name} must be [n, V] with V > 0, got {list(value.shape)}")
    pitch, width = value.stride(0), padded_width(value.shape[1])
    if value.stride(1) != 1 or pitch % ROW_ALIGNMENT or pitch < width:
        raise ValueError(
            f"{name} {list(value.shape)} must have strides (pitch, 1), the pitch a multiple of "
            f"{ROW_ALIGNMENT} and at least {width}, got {value.stride()}; see row_layout.empty_rows"
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


def check_gradient_dtype(dtype: torch.dtype) -> None:
    if dtype not in GRADIENT_DTYPES:
        raise TypeError(f"dtype of dlogits must be one of {GRADIENT_DTYPES}, got {dtype}")


def logits_arguments(logits: Tensor, targets: Tensor) -> dict[str, Tensor | int]:
    """The rows, their targets and sizes, checked."""
    check_rows("logits", logits)
    rows, vocab = logits.shape
    return {
        "logits_ptr": logits,
        "targets_ptr": check_column("targets", targets, logits, torch.int64),
        "num_rows": rows,
        "vocab": vocab,
        "width": padded_width(vocab),
        "pitch": logits.stride(0),
    }


def transform_arguments(config: PolicyLossConfig) -> dict[str, float | bool]:
    """The arguments of `row_math.to_z`."""
    cap = config.logit_softcap
    return {
        "factor": float(config.logit_scale / config.temperature),
        "inner": 0.0 if cap is None else config.logit_scale / cap,
        "outer": 0.0 if cap is None else cap / config.temperature,
        "SOFTCAP": cap is not None,
    }
