"""Rows of logits to loss, metrics and dlogits in one launch: each logit is read twice and written once.

Between the two sweeps a row is a handful of scalars: log-prob, ratio, clip, KL, bonus, and the derivatives of
the token's loss. So the gradient needs no second launch, and the logits no second buffer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..config import PolicyLossConfig
from ..objective import TokenInputs, TokenTerms
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
from .token_math import kl_term, policy_term, ratio_of


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
    ALIASED: tl.constexpr,
    AMD: tl.constexpr,
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

    advantage = tl.load(advantages_ptr + rows, mask=live, other=0.0)
    old_logprob = logprob
    if old_logprobs_ptr is not None:
        old_logprob = tl.load(old_logprobs_ptr + rows, mask=live, other=0.0)
    log_ratio, ratio, ratio_slope = ratio_of(logprob, old_logprob)
    loss, logprob_grad = policy_term(
        logprob,
        ratio,
        ratio_slope,
        advantage,
        tl.cast(low, tl.float32),
        tl.cast(high, tl.float32),
        tl.cast(dual_clip, tl.float32),
        tl.cast(tau_positive, tl.float32),
        tl.cast(tau_negative, tl.float32),
        OBJECTIVE,
        DUAL_CLIP,
    )
    if token_weights_ptr is not None:
        token_weight = tl.load(token_weights_ptr + rows, mask=live, other=0.0)
        loss *= token_weight
        logprob_grad *= token_weight

    kl = tl.zeros((ROWS,), tl.float32)
    if ref_logprobs_ptr is not None:
        kl, kl_grad = kl_term(logprob, tl.load(ref_logprobs_ptr + rows, mask=live, other=0.0), KL_ESTIMATOR)
        kl_loss = kl
        if KL_RATIO:
            kl_loss = kl * ratio
            kl_grad = kl_grad * ratio + kl * ratio_slope
        weight = tl.cast(kl_coef, tl.float32)
        loss += tl.where(weight != 0, weight * kl_loss, 0.0)
        logprob_grad += tl.where(weight != 0, weight * kl_grad, 0.0)

    entropy_grad = tl.zeros((ROWS,), tl.float32)
    if ENTROPY:
        entropy_grad -= tl.cast(entropy_coef, tl.float32)
        if entropy_weights_ptr is not None:
            entropy_grad *= tl.load(entropy_weights_ptr + rows, mask=live, other=0.0)
        loss += entropy_grad * entropy

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


class LossRows(NamedTuple):
    """Of each row; every field `[n]` fp32, those of `terms` too."""

    logprobs: Tensor
    entropy: Tensor
    terms: TokenTerms


def loss_rows(
    logits: Tensor,  # [n, V] fp32, rows as by launch.empty_rows
    targets: Tensor,  # [n] int64
    inputs: TokenInputs,  # [n] fp32 each
    config: PolicyLossConfig,
    dlogits: Tensor | None = None,  # [n, V] fp32, bf16 or fp16
    row_weights: Tensor | None = None,  # [n] fp32
) -> LossRows:
    """The objective of every token and, with `dlogits`, its gradient by the raw logits times `row_weights`.

    Same equations as `row_ops` and `objective`. dlogits: `launch.alias_rows(logits, dtype)` to write over the
    logits, or rows of their own, or None to score only (then logits are left as they are). The columns of
    padding after V, up to a multiple of 64, are written too: with 0. Targets outside `[0, V)` give NaN.
    """
    arguments, grid = launch_arguments(logits, targets, inputs, config, dlogits, row_weights)
    if logits.shape[0]:
        with on_device(logits):
            _loss_rows_kernel[grid](**arguments)
    results = arguments["results_ptr"]
    kl = None if inputs.ref_logprobs is None else results[5]
    return LossRows(results[0], results[1], TokenTerms(results[2], results[3], results[4], kl))


def launch_arguments(
    logits: Tensor,
    targets: Tensor,
    inputs: TokenInputs,
    config: PolicyLossConfig,
    dlogits: Tensor | None = None,
    row_weights: Tensor | None = None,
    amd: bool = AMD,
) -> tuple[dict, tuple[int]]:
    """Checks, the outputs' allocation, and what `loss_rows` launches with: (arguments, grid)."""
    check_rows("logits", logits, (torch.float32,))
    aliased = dlogits is not None and is_alias(logits, dlogits)
    rows, vocab = logits.shape
    tile = row_tile(vocab, amd)
    bounds = (1 - config.epsilon_low, 1 + config.epsilon_high)
    if config.objective == "cispo":
        bounds = config.cispo_bounds or (0.0, bounds[1])
    if config.ratio_level != "token":
        raise ValueError(f"config.ratio_level must be 'token' for one pass, got {config.ratio_level!r}")
    per_token = inputs._asdict()
    per_token.pop("sequence_ids")  # of the reduction's weights and of sequence ratios, which are made outside
    columns = {name: check_column(name, value, logits) for name, value in per_token.items()}
    arguments = {
        "logits_ptr": logits,
        "dlogits_ptr": dlogits,
        "results_ptr": torch.empty((6, rows), dtype=torch.float32, device=logits.device),
        "targets_ptr": check_column("targets", targets, logits, torch.int64),
        **{f"{name}_ptr": value for name, value in columns.items()},
        "row_weights_ptr": check_column("row_weights", row_weights, logits),
        "num_rows": rows,
        "vocab": vocab,
        "width": padded_width(vocab),
        "pitch": logits.stride(0),
        "dlogits_pitch": 0 if dlogits is None else dlogits.stride(0),
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
        "ALIASED": aliased,
        "AMD": amd,
        "ROWS": tile.rows,
        "BLOCK": tile.block,
        **launch_options(tile),
        **transform_arguments(config),
    }
    return arguments, (triton.cdiv(rows, tile.rows),)
