"""Rows of logits to the sums that log-prob and entropy are made of, and the gradient of both.

For a loss of the caller's own, and wherever the coefficients of a row wait for other rows. The forward reads
each logit once and leaves it as it is; the backward reads it once more and writes dlogits over the logits.

Where there are few rows, each is cut into stretches of columns with a program each. A stretch then is what a
vocabulary shard is: both leave the same sums, and `row_statistics.merge_statistics` puts either together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..config import PolicyLossConfig
from ..row_layout import empty_rows
from ..row_statistics import MERGED_FIELDS, RowStatistics
from ..vocab_parallel import VocabShard
from .launch import (
    AMD,
    alias_rows,
    check_column,
    check_gradient_dtype,
    launch,
    logits_arguments,
    row_splits,
    row_tile,
    transform_arguments,
)
from .row_math import load_target, row_sums, write_gradient


@triton.jit(do_not_specialize=["num_rows", "vocab", "splits", "shard_first", "vocab_size"])
def _logprob_rows_kernel(
    logits_ptr,  # [n, V] fp32, pitch
    sums_ptr,  # [splits, 5, n] fp32: row_statistics.MERGED_FIELDS
    targets_ptr,  # [n] int64
    num_rows,
    vocab,
    width,
    pitch,
    splits,
    stretch,
    shard_first,
    vocab_size,
    factor,
    inner,
    outer,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # torch.compile hands floats over as fp64.
    factor, inner, outer = tl.cast(factor, tl.float32), tl.cast(inner, tl.float32), tl.cast(outer, tl.float32)
    split = tl.program_id(0) % splits
    rows = (tl.program_id(0) // splits * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = rows < num_rows
    base = logits_ptr + rows * pitch
    first = split * stretch
    last = tl.minimum(first + stretch, vocab)
    target, _, target_z = load_target(
        base, targets_ptr, rows, live, first, last, shard_first, vocab_size, factor, inner, outer, SOFTCAP
    )
    end = tl.minimum(first + stretch, width)
    maximum, rest, target_exp, moment = row_sums(
        base, target, target_z, live, first, end, vocab, width, factor, inner, outer, SOFTCAP, ROWS, BLOCK
    )
    step = tl.cast(num_rows, tl.int64)
    sums = sums_ptr + split * 5 * step + rows
    tl.store(sums, maximum, mask=live)
    tl.store(sums + step, rest + target_exp, mask=live)
    tl.store(sums + 2 * step, rest, mask=live)
    tl.store(sums + 3 * step, moment, mask=live)
    tl.store(sums + 4 * step, target_z, mask=live)


def logprob_rows(
    logits: Tensor,  # [n, V] fp32, rows as by row_layout.empty_rows
    targets: Tensor,  # [n] int64
    config: PolicyLossConfig,
    shard: VocabShard | None = None,
) -> Tensor:
    """`[parts, 5, n]` fp32: `row_statistics.MERGED_FIELDS` of every row, in one or more parts.

    With `shard`, logits are its columns; targets stay ids of the whole vocabulary. Those outside of it give
    NaN.
    """
    arguments, grid = forward_arguments(logits, targets, config, shard)
    launch(_logprob_rows_kernel, grid, arguments)
    return arguments["sums_ptr"]


def forward_arguments(
    logits: Tensor,
    targets: Tensor,
    config: PolicyLossConfig,
    shard: VocabShard | None = None,
    amd: bool = AMD,
) -> tuple[dict, tuple[int]]:
    """Checks, the outputs' allocation, and what `logprob_rows` launches with: (arguments, grid)."""
    arguments, programs = _row_arguments(logits, targets, config, shard, amd)
    size = (arguments["splits"], len(MERGED_FIELDS), logits.shape[0])
    arguments["sums_ptr"] = torch.empty(size, dtype=torch.float32, device=logits.device)
    return arguments, (programs,)


def _row_arguments(
    logits: Tensor, targets: Tensor, config: PolicyLossConfig, shard: VocabShard | None, amd: bool
) -> tuple[dict, int]:
    """What both kernels are launched with, and how many programs."""
    arguments = logits_arguments(logits, targets)
    rows, vocab = logits.shape
    tile = row_tile(vocab, amd)
    splits, stretch = row_splits(rows, vocab)
    arguments |= {
        "splits": splits,
        "stretch": stretch,
        "shard_first": 0 if shard is None else shard.first,
        "vocab_size": vocab if shard is None else shard.vocab_size,
        **tile.arguments(),
        **transform_arguments(config),
    }
    return arguments, triton.cdiv(rows, tile.rows) * splits


@triton.jit(do_not_specialize=["num_rows", "vocab", "splits", "shard_first", "vocab_size"])
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
    splits,
    stretch,
    shard_first,
    vocab_size,
    factor,
    inner,
    outer,
    SOFTCAP: tl.constexpr,
    OVERLAPS: tl.constexpr,
    AMD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    factor, inner, outer = tl.cast(factor, tl.float32), tl.cast(inner, tl.float32), tl.cast(outer, tl.float32)
    split = tl.program_id(0) % splits
    rows = (tl.program_id(0) // splits * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = rows < num_rows
    base = logits_ptr + rows * pitch
    first = split * stretch
    last = tl.minimum(first + stretch, vocab)
    target, target_logit, _ = load_target(
        base, targets_ptr, rows, live, first, last, shard_first, vocab_size, factor, inner, outer, SOFTCAP
    )
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
        first,
        tl.minimum(first + stretch, width),
        vocab,
        width,
        factor,
        inner,
        outer,
        ENTROPY,
        SOFTCAP,
        OVERLAPS,
        AMD,
        ROWS,
        BLOCK,
    )


def logprob_rows_backward(
    logits: Tensor,  # [n, V] fp32, as logprob_rows saw them
    targets: Tensor,  # [n] int64
    statistics: RowStatistics,  # [n] fp32 each, of whole rows
    logprob_grad: Tensor,  # [n] fp32
    entropy_grad: Tensor | None,  # [n] fp32
    config: PolicyLossConfig,
    dtype: torch.dtype = torch.float32,
    shard: VocabShard | None = None,
) -> Tensor:
    """The gradient by the raw logits: `[n, V]` of `dtype` (fp32, bf16, fp16), written over the logits.

    The columns of padding after V are written too: with 0. Rows that several programs share go to memory of
    their own where `dtype` is narrower, because one program would write over logits that another has still
    to read.
    """
    arguments, grid = backward_arguments(
        logits, targets, statistics, logprob_grad, entropy_grad, config, dtype, shard
    )
    launch(_logprob_rows_backward_kernel, grid, arguments)
    return arguments["dlogits_ptr"]


def backward_arguments(
    logits: Tensor,
    targets: Tensor,
    statistics: RowStatistics,
    logprob_grad: Tensor,
    entropy_grad: Tensor | None,
    config: PolicyLossConfig,
    dtype: torch.dtype,
    shard: VocabShard | None = None,
    amd: bool = AMD,
) -> tuple[dict, tuple[int]]:
    """Checks, and what `logprob_rows_backward` launches with: (arguments, grid)."""
    check_gradient_dtype(dtype)
    arguments, programs = _row_arguments(logits, targets, config, shard, amd)
    narrower = dtype.itemsize < logits.element_size()
    if narrower and arguments["splits"] > 1:
        dlogits = empty_rows(*logits.shape, dtype=dtype, device=logits.device)
    else:
        dlogits = alias_rows(logits, dtype)
    columns = {
        name: getattr(statistics, name) for name in ("logprobs", "entropy", "maximum", "total", "rest")
    }
    columns |= {"logprob_grad": logprob_grad, "entropy_grad": entropy_grad}
    arguments |= {f"{name}_ptr": check_column(name, value, logits) for name, value in columns.items()}
    arguments |= {
        "dlogits_ptr": dlogits,
        "dlogits_pitch": dlogits.stride(0),
        "OVERLAPS": narrower and arguments["splits"] == 1,
        "AMD": amd,
    }
    return arguments, (programs,)
