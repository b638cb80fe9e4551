"""The objective of a token and its derivative by the log-prob, in registers; values are [ROWS] each.

`dapo_kernels.objective` has the same formulas in torch, and says where they come from. Here derivatives are
written out; the tests hold them against autograd there.
"""

import triton
import triton.language as tl

LIMIT = tl.constexpr(20.0)
"""`objective.LOG_RATIO_LIMIT`: outside, the ratio is constant."""


@triton.jit
def ratio_of(logprob, old_logprob):
    """log r, r, and dr / dlogp: r where the clamp lets it through, 0 outside."""
    difference = logprob - old_logprob
    log_ratio = tl.minimum(tl.maximum(difference, -LIMIT), LIMIT)
    ratio = tl.exp(log_ratio)
    return log_ratio, ratio, tl.where(tl.abs(difference) <= LIMIT, ratio, 0.0)


@triton.jit
def policy_term(
    logprob,
    ratio,
    ratio_slope,
    advantage,
    low,
    high,
    dual_clip,
    tau_positive,
    tau_negative,
    OBJECTIVE: tl.constexpr,
    DUAL_CLIP: tl.constexpr,
):
    """The policy loss L and dL / dlogp. `low` and `high` bound the ratio (clip) or its weight (cispo)."""
    clipped = tl.minimum(tl.maximum(ratio, low), high)
    if OBJECTIVE == "cispo":
        slope = -clipped * advantage
        loss = slope * logprob
    elif OBJECTIVE == "sapo":
        tau = tl.where(advantage > 0, tau_positive, tau_negative)
        x = tau * (ratio - 1.0)
        e = tl.exp(-tl.abs(x))
        gate = tl.where(x < 0, e, 1.0) / (1.0 + e)
        loss = -advantage * gate * 4.0 / tau
        slope = -4.0 * advantage * (e / ((1.0 + e) * (1.0 + e))) * ratio_slope
    else:
        free = ratio * advantage <= clipped * advantage
        loss = tl.where(free, -ratio * advantage, -clipped * advantage)
        slope = tl.where(free, -advantage * ratio_slope, 0.0)
        if DUAL_CLIP:
            capped = (advantage < 0) & (ratio > dual_clip)
            loss = tl.where(capped, -dual_clip * advantage, loss)
            slope = tl.where(capped, 0.0, slope)
    return loss, slope


@triton.jit
def kl_term(logprob, ref_logprob, KL_ESTIMATOR: tl.constexpr):
    """The KL estimate and its derivative by logp, with q = ref - logp: 0 where q is clamped."""
    difference = ref_logprob - logprob
    q = tl.minimum(tl.maximum(difference, -LIMIT), LIMIT)
    if KL_ESTIMATOR == "k3":
        e = tl.exp(q)
        kl = e - q - 1.0
        slope = 1.0 - e
    elif KL_ESTIMATOR == "k2":
        kl = q * q * 0.5
        slope = -q
    else:
        kl = -q
        slope = 1.0 + 0.0 * q
    return kl, tl.where(tl.abs(difference) <= LIMIT, slope, 0.0)
