"""The three matrix products of the head, accumulated in fp32 (fp64 for fp64 inputs) whatever the inputs.

Products between equal dtypes go to the library as they are. Where a build has no mixed product
(`mm(out_dtype=...)` is CUDA only), the low-precision weight is widened a tile of vocabulary rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

TILE_BYTES = 32 * 2**20
"""Size of a widened tile of the weight."""


def accumulation_dtype(*tensors: Tensor | None) -> torch.dtype:
    """fp64 if any of them is, else fp32."""
    wide = any(tensor is not None and tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


@contextmanager
def exact_fp32() -> Iterator[None]:
    """Inside, fp32 products are computed in fp32 (no TF32, no bf16 passes), whatever the program allows."""
    libraries = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [library.fp32_precision for library in libraries]
    try:
        for library in libraries:
            library.fp32_precision = "ieee"
        yield
    finally:
        for library, precision in zip(libraries, before):
            library.fp32_precision = precision


@contextmanager
def exact_precision(device: torch.device) -> Iterator[None]:
    """Inside, the precision of a loss is its own: no autograd, no autocast, no TF32."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), exact_fp32():
        yield


def _weight_tiles(weight: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """`(vocabulary slice, weight rows in dtype)`: all of it at once when no cast is needed."""
    if weight.dtype == dtype:
        yield slice(None), weight
        return
    rows = max(1, TILE_BYTES // (weight.shape[1] * dtype.itemsize))
    for start in range(0, weight.shape[0], rows):
        tile = slice(start, start + rows)
        yield tile, weight[tile].to(dtype)


def logits_gemm(hidden: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """`out = hidden @ weight.T + bias`. hidden `[n, H]` and out `[n, V]` in the accumulation dtype."""
    for tile, rows in _weight_tiles(weight, out.dtype):
        if rows.shape[0] == out.shape[1]:
            torch.mm(hidden, rows.t(), out=out)
        else:
            out[:, tile] = hidden @ rows.t()
    if bias is not None:
        out += bias.to(out.dtype)


def hidden_grad_gemm(dlogits: Tensor, weight: Tensor) -> Tensor:
    """`dlogits @ weight` as `[n, H]` in the dtype of dlogits `[n, V]`."""
    total = None
    for tile, rows in _weight_tiles(weight, dlogits.dtype):
        part = dlogits[:, tile] @ rows
        total = part if total is None else total.add_(part)
    return total


def add_weight_grad_gemm(total: Tensor | None, dlogits: Tensor, hidden: Tensor) -> Tensor:
    """`total + dlogits.T @ hidden` `[V, H]`, in place; the first chunk (None) is written without reading."""
    if total is None:
        return dlogits.t() @ hidden
    return total.addmm_(dlogits.t(), hidden)
