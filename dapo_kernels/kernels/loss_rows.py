"""Rows of logits to loss, metrics and dlogits in one launch: each logit is read twice and written once.

Between the two sweeps a row is a handful of scalars: log-prob, ratio, clip, KL, bonus, and the derivatives of
the token's loss. So the gradient needs no second launch, and the logits no second buffer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backends import LossRows
from ..config import PolicyLossConfig
from ..objective import TokenInputs, TokenTerms
from .launch import (
    AMD,
    alias_rows,
    check_column,
    check_gradient_dtype,
    launch,
    logits_arguments,
    row_tile,
    transform_arguments,
)
from .row_math import load_target, row_scores, row_sums, write_gradient
from .token_math import token_loss


@triton.jit(do_not_specialize=["num_rows", "vocab"])
def _loss_rows_kernel(
    logits_ptr,  # [n, V] fp32, pitch
    dlogits_ptr,  # [n, V] GEMM dtype, dlogits_pitch; None: score only
    results_ptr,  # [6, n] fp32: log-prob, entropy, loss, log ratio, ratio, KL
    targets_ptr,  # [n] int64
    advantages_ptr,  # [n] fp32, and so on
    old_logprobs_ptr,  # None: on policy
    ref_logprobs_ptr,  # or None
    token_weights_ptr,  # or None
    entropy_weights_ptr,  # or None
    row_weights_ptr,  # or None
    num_rows,
    vocab,
    width,
    pitch,
    dlogits_pitch,
    factor,
    inner,
    outer,
    low,
    high,
    dual_clip,
    tau_positive,
    tau_negative,
    kl_coef,
    entropy_coef,
    OBJECTIVE: tl.constexpr,
    DUAL_CLIP: tl.constexpr,
    KL_ESTIMATOR: tl.constexpr,
    KL_RATIO: tl.constexpr,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OVERLAPS: tl.constexpr,
    AMD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # torch.compile hands floats over as fp64.
    factor, inner, outer = tl.cast(factor, tl.float32), tl.cast(inner, tl.float32), tl.cast(outer, tl.float32)
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = rows < num_rows
    base = logits_ptr + rows * pitch
    target, target_logit, target_z = load_target(
        base, targets_ptr, rows, live, 0, vocab, 0, vocab, factor, inner, outer, SOFTCAP
    )
    maximum, rest, target_exp, moment = row_sums(
        base, target, target_z, live, 0, width, vocab, width, factor, inner, outer, SOFTCAP, ROWS, BLOCK
    )
    logprob, entropy = row_scores(target_z, maximum, rest, target_exp, moment)
    loss, logprob_grad, entropy_grad, log_ratio, ratio, kl = token_loss(
        logprob,
        entropy,
        rows,
        live,
        advantages_ptr,
        old_logprobs_ptr,
        ref_logprobs_ptr,
        token_weights_ptr,
        entropy_weights_ptr,
        low,
        high,
        dual_clip,
        tau_positive,
        tau_negative,
        kl_coef,
        entropy_coef,
        OBJECTIVE,
        DUAL_CLIP,
        KL_ESTIMATOR,
        KL_RATIO,
        ENTROPY,
        ROWS,
    )
    results = results_ptr + rows
    step = tl.cast(num_rows, tl.int64)
    tl.store(results, logprob, mask=live)
    tl.store(results + step, entropy, mask=live)
    tl.store(results + 2 * step, loss, mask=live)
    tl.store(results + 3 * step, log_ratio, mask=live)
    tl.store(results + 4 * step, ratio, mask=live)
    tl.store(results + 5 * step, kl, mask=live)
    if dlogits_ptr is not None:
        if row_weights_ptr is not None:
            row_weight = tl.load(row_weights_ptr + rows, mask=live, other=0.0)
            logprob_grad *= row_weight
            entropy_grad *= row_weight
        write_gradient(
            base,
            dlogits_ptr + rows * dlogits_pitch,
            target,
            target_logit,
            live,
            logprob,
            entropy,
            maximum,
            rest,
            rest + target_exp,
            logprob_grad,
            entropy_grad,
            0,
            width,
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


def loss_rows(
    logits: Tensor,  # [n, V] fp32, rows as by row_layout.empty_rows
    targets: Tensor,  # [n] int64
    inputs: TokenInputs,  # [n] fp32 each
    config: PolicyLossConfig,
    row_weights: Tensor | None = None,  # [n] fp32
    dtype: torch.dtype | None = torch.float32,
) -> LossRows:
    """The objective of every token and its gradient by the raw logits times `row_weights`: `dlogits` of
    `dtype` (fp32, bf16, fp16) over the logits. dtype None: score only, and the logits stay as they are.

    Same equations as `row_ops` and `objective`. The columns of padding after V, up to a multiple of 64, are
    written too: with 0. Targets outside `[0, V)` give NaN.
    """
    arguments, grid = launch_arguments(logits, targets, inputs, config, row_weights, dtype)
    launch(_loss_rows_kernel, grid, arguments)
    results = arguments["results_ptr"]
    kl = None if inputs.ref_logprobs is None else results[5]
    terms = TokenTerms(results[2], results[3], results[4], kl)
    return LossRows(results[0], results[1], terms, arguments["dlogits_ptr"])


def launch_arguments(
    logits: Tensor,
    targets: Tensor,
    inputs: TokenInputs,
    config: PolicyLossConfig,
    row_weights: Tensor | None,
    dtype: torch.dtype | None,
    amd: bool = AMD,
) -> tuple[dict, tuple[int]]:
    """Checks, the outputs' allocation, and what `loss_rows` launches with: (arguments, grid)."""
    if config.ratio_level != "token":
        raise ValueError(f"config.ratio_level must be 'token' for one pass, got {config.ratio_level!r}")
    if dtype is not None:
        check_gradient_dtype(dtype)
    arguments = logits_arguments(logits, targets)
    rows, vocab = logits.shape
    tile = row_tile(vocab, amd)
    columns = inputs._asdict() | {"row_weights": row_weights}
    columns.pop("sequence_ids")  # of the reduction's weights, which are made outside
    dlogits = None if dtype is None else alias_rows(logits, dtype)
    arguments |= {f"{name}_ptr": check_column(name, value, logits) for name, value in columns.items()}
    arguments |= {
        "dlogits_ptr": dlogits,
        "results_ptr": torch.empty((6, rows), dtype=torch.float32, device=logits.device),
        "dlogits_pitch": 0 if dlogits is None else dlogits.stride(0),
        "OVERLAPS": dtype is not None and dtype.itemsize < logits.element_size(),
        "AMD": amd,
        **tile.arguments(),
        **transform_arguments(config),
        **_objective_arguments(config),
    }
    return arguments, (triton.cdiv(rows, tile.rows),)


def _objective_arguments(config: PolicyLossConfig) -> dict[str, float | bool | str]:
    """The arguments of `token_math.token_loss`."""
    bounds = (1 - config.epsilon_low, 1 + config.epsilon_high)
    if config.objective == "cispo":
        bounds = config.cispo_bounds or (0.0, bounds[1])
    return {
        "low": float(bounds[0]),
        "high": float(bounds[1]),
        "dual_clip": float(config.dual_clip or 0),
        "tau_positive": float(config.sapo_temperature_pos),
        "tau_negative": float(config.sapo_temperature_neg),
        "kl_coef": float(config.kl_coef),
        "entropy_coef": float(config.entropy_coef),
        "OBJECTIVE": config.objective,
        "DUAL_CLIP": config.dual_clip is not None,
        "KL_ESTIMATOR": config.kl_estimator,
        "KL_RATIO": config.kl_ratio_correction,
        "ENTROPY": config.needs_entropy_gradient,
    }
