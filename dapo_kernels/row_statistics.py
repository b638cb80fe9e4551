"""What the objective and the gradient need to know of a row of logits."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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
    """`z_y`; -inf where the target lies in another vocabulary shard."""
    moment: Tensor | None = None
    """Sum of `exp(z - maximum) * (z - maximum)`, where parts are to be merged."""


MERGED_FIELDS = ("maximum", "total", "rest", "moment", "target_logit")
"""What is known of a part of a row (a stretch of its columns, or a vocabulary shard) before it is merged."""


def merge_statistics(parts: Tensor) -> RowStatistics:
    """`[parts, 5, n]` of MERGED_FIELDS to the statistics of whole rows, summed in the order of the parts."""
    maximum, total, rest, moment, target_logit = parts.unbind(1)  # [parts, n]
    highest = maximum.amax(0)
    scale = (maximum - highest).exp()
    return finish_statistics(
        highest,
        rest=(scale * rest).sum(0),
        moment=(scale * (moment + (maximum - highest) * total)).sum(0),
        target_logit=target_logit.amax(0),
    )


def finish_statistics(maximum: Tensor, rest: Tensor, moment: Tensor, target_logit: Tensor) -> RowStatistics:
    """Log-prob and entropy from the sums over a row."""
    target_exp = (target_logit - maximum).exp()
    total = rest + target_exp
    # log1p keeps log-probs near 0 exact when the target holds the maximum.
    log_total = torch.where(target_exp == 1, rest.log1p(), total.log())
    return RowStatistics(
        logprobs=target_logit - maximum - log_total,
        entropy=log_total - moment / total,
        maximum=maximum,
        total=total,
        rest=rest,
        target_logit=target_logit,
        moment=moment,
    )
