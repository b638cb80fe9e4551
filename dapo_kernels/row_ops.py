"""The two operations on rows of logits, in torch and in place.

One buffer of logits `[n, V]` lives through a chunk: `logits_statistics_` turns it into shifted exponentials
and returns what the objective needs; `logits_gradient_` turns those into the gradient of the logits.
Small blocks of rows are finished while they are in cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .config import PolicyLossConfig

BLOCK_BYTES = 2 * 2**20
"""Rows worked on at a time: their logits and one scratch copy should stay in cache."""


class RowStatistics(NamedTuple):
    """Of each row of logits z = softcap(logits * scale) / temperature; every field `[n]`."""

    logprobs: Tensor
    """`z_y - logsumexp(z)`."""
    entropy: Tensor
    """`-sum p log p` in nats."""
    maximum: Tensor
    total: Tensor
    """Sum of `exp(z - maximum)`."""
    rest: Tensor
    """The same without the target: `1 - p_y = rest / total` without cancellation near p_y = 1."""
    target_logit: Tensor
    """`z_y`."""


def _row_blocks(rows: Tensor) -> list[slice]:
    block = max(1, BLOCK_BYTES // (rows.shape[1] * rows.element_size()))
    return [slice(start, start + block) for start in range(0, rows.shape[0], block)]


def logits_statistics_(logits: Tensor, targets: Tensor, config: PolicyLossConfig) -> RowStatistics:
    """logits `[n, V]` (fp32 or fp64) become `exp(z - max z)`; targets `[n]` int64."""
    columns = [logits.new_empty(logits.shape[0]) for _ in RowStatistics._fields]
    scratch = None
    for block in _row_blocks(logits):
        z, y = logits[block], targets[block, None]
        scratch = torch.empty_like(z) if scratch is None else scratch[: z.shape[0]]
        for column, value in zip(columns, _block_statistics_(z, y, scratch, config)):
            column[block] = value
    return RowStatistics(*columns)


def _block_statistics_(z: Tensor, y: Tensor, scratch: Tensor, config: PolicyLossConfig) -> RowStatistics:
    _transform_(z, config)
    maximum = z.amax(-1, keepdim=True)
    target_logit = z.gather(1, y)
    # A banned token (-inf) must not make 0 * inf of its entropy term.
    shifted = torch.sub(z, maximum, out=scratch).clamp_(min=torch.finfo(z.dtype).min)
    exps = torch.exp(shifted, out=z)

    target_exp = exps.gather(1, y)
    exps.scatter_(1, y, 0)
    rest = exps.sum(-1, keepdim=True)
    exps.scatter_(1, y, target_exp)
    total = rest + target_exp
    # log1p keeps log-probs near 0 exact when the target holds the maximum.
    log_total = torch.where(target_exp == 1, rest.log1p(), total.log())
    entropy = log_total - torch.linalg.vecdot(exps, shifted)[:, None] / total
    values = (target_logit - maximum - log_total, entropy, maximum, total, rest, target_logit)
    return RowStatistics(*(value.squeeze(1) for value in values))


def _transform_(logits: Tensor, config: PolicyLossConfig) -> None:
    """Raw logits to z, in place: scale, softcap, temperature."""
    if config.logit_softcap is None:
        factor = config.logit_scale / config.temperature
        if factor != 1:
            logits.mul_(factor)
        return
    cap = config.logit_softcap
    logits.mul_(config.logit_scale / cap).tanh_().mul_(cap / config.temperature)


def logits_gradient_(
    exps: Tensor,  # [n, V], left by logits_statistics_
    targets: Tensor,  # [n] int64
    statistics: RowStatistics,
    logprob_grad: Tensor,  # [n]
    entropy_grad: Tensor | None,  # [n]
    config: PolicyLossConfig,
) -> None:
    """`exps` become the gradient with respect to the raw logits (before scale, softcap, temperature).

    d logp / dz_j = [j = y] - p_j; dH / dz_j = -p_j (log p_j + H).
    """
    for block in _row_blocks(exps):
        part = RowStatistics(*(column[block, None] for column in statistics))
        e, y = exps[block], targets[block, None]
        factor = config.logit_scale / config.temperature  # dz / d(raw logit), but for a softcap
        c = logprob_grad[block, None] * factor
        h = None if entropy_grad is None else entropy_grad[block, None] * factor
        slope = None if config.logit_softcap is None else _softcap_slope(e, y, part, config)

        target_grad = c * part.rest / part.total
        if h is None:
            e.mul_(-c / part.total)
        else:
            log_total = part.total.log()
            p = e / part.total
            log_p = e.log_().sub_(log_total).clamp_(min=torch.finfo(e.dtype).min)
            bonus = torch.mul(p, log_p.add_(part.entropy), out=log_p)
            target_p = p.gather(1, y)
            target_grad = target_grad - h * target_p * (part.logprobs + part.entropy)
            torch.add(p.mul_(-c), bonus.mul_(-h), out=e)
        e.scatter_(1, y, target_grad)
        if slope is not None:
            e.mul_(slope)


def _softcap_slope(exps: Tensor, y: Tensor, statistics: RowStatistics, config: PolicyLossConfig) -> Tensor:
    """`1 - tanh^2` of the softcap at each logit. z is recovered from its exponential: where that has
    underflowed to 0 so has the gradient, except at the target, whose z is kept."""
    limit = config.logit_softcap / config.temperature
    z = exps.log().add_(statistics.maximum).clamp_(-limit, limit)
    z.scatter_(1, y, statistics.target_logit)
    return 1 - (z / limit).square_()
