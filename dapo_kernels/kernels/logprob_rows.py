"""Rows of logits to log-probs and entropy, and the gradient of both, for a loss of the caller's own.

The forward reads each logit once and leaves it as it is; the backward reads it once more and writes dlogits,
over the logits if wanted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..config import PolicyLossConfig
from ..row_ops import RowStatistics
from .launch import (
    AMD,
    check_column,
    check_rows,
    is_alias,
    launch_options,
    on_device,
    padded_width,
    row_tile,
    transform_arguments,
)
from .row_math import load_target, row_statistics, to_z, write_gradient


@triton.jit(do_not_specialize=["num_rows", "vocab"])
def _logprob_rows_kernel(
    logits_ptr,  # [n, V] fp32, pitch
    statistics_ptr,  # [6, n] fp32: the fields of RowStatistics
    targets_ptr,  # [n] int64
    num_rows,
    vocab,
    width,
    pitch,
    factor,
    inner,
    outer,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # torch.compile hands floats over as fp64.
    factor, inner, outer = tl.cast(factor, tl.float32), tl.cast(inner, tl.float32), tl.cast(outer, tl.float32)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = rows < num_rows
    base = logits_ptr + rows * pitch
    target, target_logit = load_target(base, targets_ptr, rows, live, vocab)
    target_z = to_z(target_logit, factor, inner, outer, SOFTCAP)
    logprob, entropy, maximum, rest, target_exp = row_statistics(
        base, target, target_z, live, vocab, width, factor, inner, outer, SOFTCAP, ROWS, BLOCK
    )
    statistics = statistics_ptr + rows
    step = tl.cast(num_rows, tl.int64)
    tl.store(statistics, logprob, mask=live)
    tl.store(statistics + step, entropy, mask=live)
    tl.store(statistics + 2 * step, maximum, mask=live)
    tl.store(statistics + 3 * step, rest + target_exp, mask=live)
    tl.store(statistics + 4 * step, rest, mask=live)
    tl.store(statistics + 5 * step, target_z, mask=live)


def logprob_rows(
    logits: Tensor,  # [n, V] fp32, rows as by launch.empty_rows
    targets: Tensor,  # [n] int64
    config: PolicyLossConfig,
) -> RowStatistics:
    """Log-prob and entropy of every row, and what its backward needs: `[n]` fp32 each.

    Targets outside `[0, V)` give NaN.
    """
    arguments, grid = forward_arguments(logits, targets, config)
    if logits.shape[0]:
        with on_device(logits):
            _logprob_rows_kernel[grid](**arguments)
    return RowStatistics(*arguments["statistics_ptr"])


def forward_arguments(
    logits: Tensor, targets: Tensor, config: PolicyLossConfig, amd: bool = AMD
) -> tuple[dict, tuple[int]]:
    """Checks, the outputs' allocation, and what `logprob_rows` launches with: (arguments, grid)."""
    check_rows("logits", logits, (torch.float32,))
    rows, vocab = logits.shape
    tile = row_tile(vocab, amd)
    arguments = {
        "logits_ptr": logits,
        "statistics_ptr": torch.empty((6, rows), dtype=torch.float32, device=logits.device),
        "targets_ptr": check_column("targets", targets, logits, torch.int64),
        "num_rows": rows,
        "vocab": vocab,
        "width": padded_width(vocab),
        "pitch": logits.stride(0),
        "ROWS": tile.rows,
        "BLOCK": tile.block,
        **launch_options(tile),
        **transform_arguments(config),
    }
    return arguments, (triton.cdiv(rows, tile.rows),)


@triton.jit(do_not_specialize=["num_rows", "vocab"])
def _logprob_rows_backward_kernel(
    logits_ptr,  # [n, V] fp32, pitch
    dlogits_ptr,  # [n, V] GEMM dtype, dlogits_pitch
    targets_ptr,  # [n] int64
    logprobs_ptr,  # [n] fp32, and so on
    entropy_ptr,
    maximum_ptr,
    total_ptr,
    rest_ptr,
    logprob_grad_ptr,
    entropy_grad_ptr,  # or None
    num_rows,
    vocab,
    width,
    pitch,
    dlogits_pitch,
    factor,
    inner,
    outer,
    SOFTCAP: tl.constexpr,
    ALIASED: tl.constexpr,
    AMD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    factor, inner, outer = tl.cast(factor, tl.float32), tl.cast(inner, tl.float32), tl.cast(outer, tl.float32)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = rows < num_rows
    base = logits_ptr + rows * pitch
    target, target_logit = load_target(base, targets_ptr, rows, live, vocab)
    ENTROPY: tl.constexpr = entropy_grad_ptr is not None
    entropy_grad = tl.zeros((ROWS,), tl.float32)
    if ENTROPY:
        entropy_grad = tl.load(entropy_grad_ptr + rows, mask=live, other=0.0)
    write_gradient(
        base,
        dlogits_ptr + rows * dlogits_pitch,
        target,
        target_logit,
        live,
        tl.load(logprobs_ptr + rows, mask=live, other=0.0),
        tl.load(entropy_ptr + rows, mask=live, other=0.0),
        tl.load(maximum_ptr + rows, mask=live, other=0.0),
        tl.load(rest_ptr + rows, mask=live, other=0.0),
        tl.load(total_ptr + rows, mask=live, other=1.0),
        tl.load(logprob_grad_ptr + rows, mask=live, other=0.0),
        entropy_grad,
        vocab,
        width,
        factor,
        inner,
        outer,
        ENTROPY,
        SOFTCAP,
        ALIASED,
        AMD,
        ROWS,
        BLOCK,
    )


def logprob_rows_backward(
    logits: Tensor,  # [n, V] fp32, as logprob_rows saw them
    targets: Tensor,  # [n] int64
    statistics: RowStatistics,  # [n] fp32 each
    logprob_grad: Tensor,  # [n] fp32
    entropy_grad: Tensor | None,  # [n] fp32
    config: PolicyLossConfig,
    dlogits: Tensor,  # [n, V] fp32, bf16 or fp16
) -> None:
    """Writes the gradient by the raw logits into `dlogits`: `launch.alias_rows(logits, dtype)` to write over
    the logits, or rows of their own. The columns of padding after V are written too: with 0."""
    arguments, grid = backward_arguments(
        logits, targets, statistics, logprob_grad, entropy_grad, config, dlogits
    )
    if logits.shape[0]:
        with on_device(logits):
            _logprob_rows_backward_kernel[grid](**arguments)


def backward_arguments(
    logits: Tensor,
    targets: Tensor,
    statistics: RowStatistics,
    logprob_grad: Tensor,
    entropy_grad: Tensor | None,
    config: PolicyLossConfig,
    dlogits: Tensor,
    amd: bool = AMD,
) -> tuple[dict, tuple[int]]:
    """Checks, and what `logprob_rows_backward` launches with: (arguments, grid)."""
    check_rows("logits", logits, (torch.float32,))
    rows, vocab = logits.shape
    tile = row_tile(vocab, amd)
    known = {name: check_column(name, value, logits) for name, value in statistics._asdict().items()}
    arguments = {
        "logits_ptr": logits,
        "dlogits_ptr": dlogits,
        "targets_ptr": check_column("targets", targets, logits, torch.int64),
        **{f"{name}_ptr": known[name] for name in ("logprobs", "entropy", "maximum", "total", "rest")},
        "logprob_grad_ptr": check_column("logprob_grad", logprob_grad, logits),
        "entropy_grad_ptr": check_column("entropy_grad", entropy_grad, logits),
        "num_rows": rows,
        "vocab": vocab,
        "width": padded_width(vocab),
        "pitch": logits.stride(0),
        "dlogits_pitch": dlogits.stride(0),
        "ALIASED": is_alias(logits, dlogits),
        "AMD": amd,
        "ROWS": tile.rows,
        "BLOCK": tile.block,
        **launch_options(tile),
        **transform_arguments(config),
    }
    return arguments, (triton.cdiv(rows, tile.rows),)
