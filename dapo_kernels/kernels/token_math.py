"""The objective of a token and its derivative by the log-prob, in registers; values are [ROWS] each.

`dapo_kernels.objective` has the same formulas in torch, and says where they come from. Here derivatives are
written out; the tests hold them against autograd there.
"""

import triton
import triton.language as tl

LIMIT = tl.constexpr(20.0)
"""`objective.LOG_RATIO_LIMIT`: outside, the ratio is constant."""


@triton.jit
def clamp(x, low, high):
    """NaN stays NaN: by default Triton would make a bound of it."""
    raised = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(raised, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def ratio_of(logprob, old_logprob):
    """log r, r, and dr / dlogp: r where the clamp lets it through, 0 outside."""
    difference = logprob - old_logprob
    log_ratio = clamp(difference, -LIMIT, LIMIT)
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
    clipped = clamp(ratio, low, high)
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
    q = clamp(difference, -LIMIT, LIMIT)
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


@triton.jit
def token_loss(
    logprob,
    entropy,
    rows,
    live,
    advantages_ptr,  # [n] fp32, and so on
    old_logprobs_ptr,  # None: on policy
    ref_logprobs_ptr,  # or None
    token_weights_ptr,  # or None
    entropy_weights_ptr,  # or None
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
    ROWS: tl.constexpr,
):
    """The whole loss of a token, its derivatives by log-prob and entropy, and log r, r and the KL."""
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
    return loss, logprob_grad, entropy_grad, log_ratio, ratio, kl
