"""The three matrix products of the head, accumulated in fp32 (fp64 for fp64 inputs) whatever the inputs.

Where the build multiplies 16-bit numbers into fp32 (`mm(out_dtype=...)`, CUDA), a head whose hidden states
and weight share a 16-bit dtype is multiplied in it. Everywhere else operands are fp32 (fp64): the weight is
widened a tile of vocabulary rows at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from torch import Tensor

TILE_BYTES = 4 * 2**20
"""Size of a tile of the weight: 1024 rows at H 1024 in fp32."""


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any of them is, else fp32."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def gemm_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """What the operands of the three products are rounded to; the results are `accumulation_dtype`."""
    shared = hidden.dtype if hidden.dtype == weight.dtype else None
    if shared in (torch.bfloat16, torch.float16) and has_mixed_gemm(hidden.device.type):
        return shared
    return accumulation_dtype(hidden, weight)


@cache
def has_mixed_gemm(device_type: str) -> bool:
    """Whether this build multiplies 16-bit matrices into fp32 on such devices: tried once."""
    if device_type == "cpu":
        return False
    ones = torch.ones(16, 16, dtype=torch.bfloat16, device=device_type)
    total = torch.zeros(16, 16, device=device_type)
    try:
        mixed_mm(ones, ones, out=total)
        mixed_addmm_(total, ones, ones)
    except (RuntimeError, TypeError):
        return False
    return True


def mixed_mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    torch.mm(a, b, out_dtype=out.dtype, out=out)


def mixed_addmm_(total: Tensor, a: Tensor, b: Tensor) -> None:
    torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


class _ExactFp32:
    """Inside, fp32 products are computed in fp32 (no TF32, no bf16 passes), whatever the program allows. The
    setting is the process's: it is put back when the last thread inside leaves."""

    def __init__(self) -> None:
        self.lock, self.inside, self.changed = threading.Lock(), 0, []

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                libraries = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
                settings = [(library, library.fp32_precision) for library in libraries]
                self.changed = [(library, now) for library, now in settings if now != "ieee"]
                for library, _ in self.changed:
                    library.fp32_precision = "ieee"

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                for library, precision in self.changed:
                    library.fp32_precision = precision


exact_fp32 = _ExactFp32()


@contextmanager
def exact_precision(device: torch.device) -> Iterator[None]:
    """Inside, the precision of a loss is its own: no autograd, no autocast, no TF32."""
    no_autocast = nullcontext()
    if torch.amp.is_autocast_available(device.type):
        no_autocast = torch.autocast(device.type, enabled=False)
    with torch.no_grad(), no_autocast, exact_fp32:
        yield


def _weight_tiles(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """`(vocabulary slice, weight rows in dtype)`."""
    rows = max(1, TILE_BYTES // (weight.shape[1] * dtype.itemsize))
    for start in range(0, weight.shape[0], rows):
        tile = slice(start, start + rows)
        yield tile, weight[tile].to(dtype)


def logits_gemm(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`out = hidden @ weight.T + bias`. hidden `[n, H]` in the GEMM dtype, out `[n, V]` in the accumulation
    dtype."""
    if hidden.dtype != out.dtype:
        mixed_mm(hidden, weight.t(), out)
    elif weight.dtype == out.dtype and weight.device.type != "cpu":
        torch.mm(hidden, weight.t(), out=out)
    else:
        # On CPU a weight that needs no cast is cut too: with a tile in cache, up to 16 % faster.
        for tile, rows in _weight_tiles(weight, out.dtype):
            torch.mm(hidden, rows.t(), out=out[:, tile])
    if bias is not None:
        out += bias.to(out.dtype)


def hidden_grad_gemm(dlogits: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """`dlogits @ weight` as `[n, H]` in the accumulation dtype; dlogits `[n, V]` in the GEMM dtype."""
    if dlogits.dtype != dtype:
        rows = weight.new_empty((dlogits.shape[0], weight.shape[1]), dtype=dtype)
        mixed_mm(dlogits, weight, rows)
        return rows
    if weight.dtype == dtype:
        return dlogits @ weight
    total = weight.new_zeros((dlogits.shape[0], weight.shape[1]), dtype=dtype)
    for tile, rows in _weight_tiles(weight, dtype):
        total.addmm_(dlogits[:, tile], rows)
    return total


def add_weight_grad_gemm(total: Tensor | None, dlogits: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """`total + dlogits.T @ hidden` `[V, H]` in the accumulation dtype, in place; the first chunk (None) is
    written without reading."""
    if dlogits.dtype != dtype:
        if total is None:
            total = hidden.new_empty((dlogits.shape[1], hidden.shape[1]), dtype=dtype)
            mixed_mm(dlogits.t(), hidden, total)
        else:
            mixed_addmm_(total, dlogits.t(), hidden)
        return total
    if total is None:
        return dlogits.t() @ hidden
    return total.addmm_(dlogits.t(), hidden)
