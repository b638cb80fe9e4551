"""The two sweeps over rows of logits that the kernels are made of.

A program owns ROWS rows and walks along them in tiles of BLOCK columns. Raw logits x become

    z = softcap(x * scale) / temperature,   softcap(u) = cap * tanh(u / cap)

in registers; memory always holds raw logits. `factor` = scale / temperature, `inner` = scale / cap,
`outer` = cap / temperature. Rows are padded to `width`, a multiple of 64 columns: what stands in the padding
is read and ignored, so that every access is 16 bytes wide whatever the vocabulary.
"""

import triton
import triton.language as tl

FLOOR = tl.constexpr(-1e4)
"""exp(FLOOR) is 0: shifted logits stop here, so that a banned token's 0 * -inf is 0."""
LOWEST = tl.constexpr(-3e38)
"""Stands for the maximum of nothing; finite, so that differences of maxima are never NaN."""


@triton.jit
def to_z(x, factor, inner, outer, SOFTCAP: tl.constexpr):
    """Raw logits to z."""
    if SOFTCAP:
        u = x * inner
        e = tl.exp(-2.0 * tl.abs(u))
        tanh = (1.0 - e) / (1.0 + e)
        square = u * u  # near 0 the difference cancels; the series is exact to 6e-8 there
        series = u * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        z = tl.where(tl.abs(u) < 0.2, series, tl.where(u < 0, -tanh, tanh)) * outer
    else:
        z = x * factor
    return z


@triton.jit
def softcap_slope(x, inner):
    """d softcap(u) / du = 1 - tanh^2, without the cancellation where it saturates."""
    e = tl.exp(-2.0 * tl.abs(x * inner))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def load_target(
    base,  # [ROWS] pointers to the rows
    targets_ptr,
    rows,
    live,
    first,  # columns [first, last) are looked at
    last,
    shard_first,  # id of column 0
    vocab_size,  # ids of all shards
    factor,
    inner,
    outer,
    SOFTCAP: tl.constexpr,
):
    """Each row's target column (-1 if it is not looked at), raw logit and z, [ROWS] each.

    z is -inf for a target in other columns or another shard, NaN for an id outside the vocabulary: never a
    fault, never a number.
    """
    token = tl.load(targets_ptr + rows, mask=live, other=0)
    column = token - shard_first
    mine = live & (column >= first) & (column < last)
    logit = tl.load(base + column, mask=mine, other=0.0)
    elsewhere = tl.where((token >= 0) & (token < vocab_size), float("-inf"), float("nan"))
    z = tl.where(mine, to_z(logit, factor, inner, outer, SOFTCAP), elsewhere)
    return tl.where(mine, column, -1).to(tl.int32), logit, z


@triton.jit
def row_sums(
    base,  # [ROWS] pointers to the rows
    target,  # [ROWS] int32 column, or -1
    target_z,  # [ROWS]
    live,  # [ROWS] bool
    first,  # columns [first, end) are swept
    end,
    vocab,
    width,
    factor,
    inner,
    outer,
    SOFTCAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """First sweep. Returns, [ROWS] each: max z, sum of exp(z - max) without the target (`rest`), the target's
    share of it, and sum of exp(z - max) (z - max).

    Each thread keeps running statistics of its own columns, four at a time; they meet once, at the end.
    """
    lane = tl.arange(0, BLOCK // 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]  # [1, BLOCK/4, 4]
    peak = tl.full((ROWS, BLOCK // 4), LOWEST, tl.float32)
    total = tl.zeros((ROWS, BLOCK // 4), tl.float32)  # sum of e = exp(z - peak)
    moment = tl.zeros((ROWS, BLOCK // 4), tl.float32)  # sum of e * (z - peak)
    for start in range(first, end, BLOCK):
        column = start + lane
        mask = column < width
        if ROWS > 1:
            mask = mask & live[:, None, None]
        x = tl.load(base[:, None, None] + column, mask=mask, other=0.0)  # [ROWS, BLOCK/4, 4]
        z = to_z(x, factor, inner, outer, SOFTCAP)
        # The target stays out, so that 1 - p_y = rest / total suffers no cancellation.
        z = tl.where((column < vocab) & (column != target[:, None, None]), z, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(z, 2))
        shift = tl.maximum(z - new_peak[:, :, None], FLOOR, propagate_nan=tl.PropagateNan.ALL)
        e = tl.exp(shift)
        change = tl.maximum(peak - new_peak, FLOOR)
        rescale = tl.exp(change)
        moment = moment * rescale + total * (change * rescale) + tl.sum(e * shift, 2)
        total = total * rescale + tl.sum(e, 2)
        peak = new_peak

    maximum = tl.maximum(tl.max(peak, 1), target_z, propagate_nan=tl.PropagateNan.ALL)
    change = tl.maximum(peak - maximum[:, None], FLOOR)
    rescale = tl.exp(change)
    rest = tl.sum(total * rescale, 1)
    target_shift = tl.maximum(target_z - maximum, FLOOR, propagate_nan=tl.PropagateNan.ALL)
    target_exp = tl.exp(target_shift)
    row_moment = tl.sum(moment * rescale + total * (change * rescale), 1) + target_exp * target_shift
    return maximum, rest, target_exp, row_moment


@triton.jit
def row_scores(target_z, maximum, rest, target_exp, moment):
    """Log-prob and entropy, [ROWS] each, of whole rows; log1p keeps log-probs near 0 exact."""
    u = 1.0 + rest
    # log(u) / (u - 1) * rest undoes the rounding of 1 + rest.
    log1p = tl.where(u == 1.0, rest, tl.log(u) * (rest / tl.where(u == 1.0, 1.0, u - 1.0)))
    log_total = tl.where(target_exp == 1.0, log1p, tl.log(target_exp + rest))
    return target_z - maximum - log_total, log_total - moment / (rest + target_exp)


@triton.jit
def write_gradient(
    base,  # [ROWS] pointers to the rows of logits
    out,  # [ROWS] pointers to the rows of dlogits
    target,  # [ROWS] int32 column, or -1
    target_logit,  # [ROWS] raw
    live,  # [ROWS] bool
    logprob,  # [ROWS], and so on down to the incoming gradients
    entropy,
    maximum,
    rest,
    total,
    logprob_grad,
    entropy_grad,
    first,  # columns [first, end) are swept
    end,
    vocab,
    width,
    factor,
    inner,
    outer,
    ENTROPY: tl.constexpr,
    SOFTCAP: tl.constexpr,
    OVERLAPS: tl.constexpr,
    AMD: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Second sweep: the gradient of the raw logits, rounded once to the dtype of `out`.

    d logp / dz_j = [j = y] - p_j;  dH / dz_j = -p_j (log p_j + H);  entropy_grad counts with ENTROPY only.
    """
    at_target = logprob_grad * (rest / total)
    constant = logprob_grad
    if ENTROPY:
        bounded = tl.maximum(logprob, FLOOR, propagate_nan=tl.PropagateNan.ALL)
        at_target -= entropy_grad * tl.exp(bounded) * (bounded + entropy)
        constant += entropy_grad * (entropy - tl.log(total))
    at_target *= factor
    # Elsewhere: -exp(shift) / total * (logprob_grad + entropy_grad * (shift - log total + H)) * factor.
    constant = -constant * (factor / total)
    linear = -entropy_grad * (factor / total)
    if SOFTCAP:
        at_target *= softcap_slope(target_logit, inner)

    lane = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    for start in range(first, end, BLOCK):
        column = start + lane
        mask = column < width
        if ROWS > 1:
            mask = mask & live[:, None]
        x = tl.load(base[:, None] + column, mask=mask, other=0.0)  # [ROWS, BLOCK]
        if OVERLAPS:
            # Block k of a 16-bit output lies over the floats of block k // 2: a warp that is ahead must not
            # store there before every warp has loaded its block.
            if AMD:
                # PTX's barrier orders loads that are still in flight; this one needs the value to be there.
                x = tl.inline_asm_elementwise("", "=v,0", [x], tl.float32, is_pure=False, pack=1)
            tl.debug_barrier()
        shift = to_z(x, factor, inner, outer, SOFTCAP) - maximum[:, None]
        if ENTROPY:
            shift = tl.maximum(shift, FLOOR)
            gradient = tl.exp(shift) * (constant[:, None] + linear[:, None] * shift)
        else:
            gradient = tl.exp(shift) * constant[:, None]
        if SOFTCAP:
            gradient *= softcap_slope(x, inner)
        gradient = tl.where(column == target[:, None], at_target[:, None], gradient)
        gradient = tl.where(column < vocab, gradient, 0.0)
        tl.store(out[:, None] + column, gradient.to(out.dtype.element_ty), mask=mask)
