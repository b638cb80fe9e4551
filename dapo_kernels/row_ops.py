"""The two operations on rows of logits, in torch and in place.

One buffer of logits `[n, V]` lives through a chunk: `logits_statistics_` turns it into shifted exponentials
and returns what the objective needs; `logits_gradient_` turns those into the gradient of the logits.
Small blocks of rows are finished while they are in cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .config import PolicyLossConfig
from .row_statistics import RowStatistics, finish_statistics

if TYPE_CHECKING:
    from .vocab_parallel import VocabShard

CPU_BLOCK_BYTES = 2 * 2**20
"""Rows worked on at a time: their logits and one scratch copy should stay in cache."""
GPU_BLOCK_BYTES = 64 * 2**20
"""Enough for a GPU's cores, and few launches."""


def _row_blocks(rows: Tensor) -> list[slice]:
    block_bytes = CPU_BLOCK_BYTES if rows.device.type == "cpu" else GPU_BLOCK_BYTES
    block = max(1, block_bytes // (rows.shape[1] * rows.element_size()))
    return [slice(start, start + block) for start in range(0, rows.shape[0], block)]


def logits_statistics_(
    logits: Tensor, targets: Tensor, config: PolicyLossConfig, shard: VocabShard | None = None
) -> RowStatistics:
    """logits `[n, V]` (fp32 or fp64) become `exp(z - max z)`; targets `[n]` int64. With a shard, logits are
    its columns, and the statistics those of whole rows."""
    owned = None
    if shard is not None:
        targets, owned = shard.localise(targets)
    columns = [logits.new_empty(logits.shape[0]) for _ in RowStatistics._fields]
    scratch = None
    for block in _row_blocks(logits):
        z, y = logits[block], targets[block, None]
        scratch = torch.empty_like(z) if scratch is None else scratch[: z.shape[0]]
        mine = None if owned is None else owned[block, None]
        for column, value in zip(columns, _block_statistics_(z, y, mine, scratch, config)):
            column[block] = value.squeeze(1)
    statistics = RowStatistics(*columns)
    if shard is None:
        return statistics
    whole = shard.merge(statistics)
    logits.mul_((statistics.maximum - whole.maximum).exp()[:, None])
    return whole


def _block_statistics_(
    z: Tensor, y: Tensor, owned: Tensor | None, scratch: Tensor, config: PolicyLossConfig
) -> RowStatistics:
    _transform_(z, config)
    lowest = torch.finfo(z.dtype).min
    maximum = z.amax(-1, keepdim=True).clamp_(min=lowest)  # a shard may hold banned tokens (-inf) only
    target_logit = z.gather(1, y)
    # A banned token must not make 0 * inf of its entropy term.
    shifted = torch.sub(z, maximum, out=scratch).clamp_(min=lowest)
    exps = torch.exp(shifted, out=z)

    target_exp = exps.gather(1, y)
    if owned is not None:
        target_logit = torch.where(owned, target_logit, -torch.inf)
    exps.scatter_(1, y, 0 if owned is None else torch.where(owned, 0, target_exp))
    rest = exps.sum(-1, keepdim=True)
    exps.scatter_(1, y, target_exp)
    moment = torch.linalg.vecdot(exps, shifted)[:, None]
    return finish_statistics(maximum, rest, moment, target_logit)


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
    shard: VocabShard | None = None,
) -> None:
    """`exps` become the gradient with respect to the raw logits (before scale, softcap, temperature).

    d logp / dz_j = [j = y] - p_j; dH / dz_j = -p_j (log p_j + H).
    """
    owned = None
    if shard is not None:
        targets, owned = shard.localise(targets)
    for block in _row_blocks(exps):
        part = RowStatistics(*(column[block, None] for column in statistics))
        e, y = exps[block], targets[block, None]
        factor = config.logit_scale / config.temperature  # dz / d(raw logit), but for a softcap
        c = logprob_grad[block, None] * factor
        h = None if entropy_grad is None else entropy_grad[block, None] * factor
        mine = None if owned is None else owned[block, None]
        slope = None if config.logit_softcap is None else _softcap_slope(e, y, mine, part, config)

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
        _set_target_(e, y, mine, target_grad)
        if slope is not None:
            e.mul_(slope)


def _set_target_(rows: Tensor, y: Tensor, owned: Tensor | None, values: Tensor) -> None:
    """Writes each row's value at its target, where the target is in these columns."""
    rows.scatter_(1, y, values if owned is None else torch.where(owned, values, rows.gather(1, y)))


def _softcap_slope(
    exps: Tensor, y: Tensor, owned: Tensor | None, statistics: RowStatistics, config: PolicyLossConfig
) -> Tensor:
    """`1 - tanh^2` of the softcap at each logit. z is recovered from its exponential: where that has
    underflowed to 0 so has the gradient, except at the target, whose z is kept."""
    limit = config.logit_softcap / config.temperature
    z = exps.log().add_(statistics.maximum).clamp_(-limit, limit)
    _set_target_(z, y, owned, statistics.target_logit)
    return 1 - (z / limit).square_()
