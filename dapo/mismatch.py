"""Trainer against rollout log-probs of the same tokens: how far they are apart, and the importance weights
that correct for it.

The rollout engine computes the policy with other kernels, often in another precision, than the trainer. What
it samples is therefore not quite on policy. Truncated importance sampling weighs each token's loss by
exp(d), d = trainer's log-prob before the step's updates - rollout's log-prob, bounded so that few tokens
cannot own the gradient (https://fengyao.notion.site/off-policy-rl; masked: IcePop, MIS).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import AlgorithmConfig

LOG_WEIGHT_LIMIT = 20.0
"""exp(20) is 4.9e8: a sum over a long response stays finite, far outside any bound."""


def correction_weights(differences: Tensor, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The constant weights of one response's tokens, and which of them the bounds changed.

    At level `token` a token's raw weight is exp(d). At level `sequence` all have exp(sum of d), the product
    of the ratios: the importance ratio of the whole response, as verl (`rollout_is: sequence`) and TRL
    (`sequence_truncate`, `sequence_mask`) define it, not GSPO's geometric mean.

    Args:
        differences: `[n]` d of each token, NaN where the rollout gave no log-prob: such a token is in no sum
            and its weight is 0.
        algorithm: `rollout_correction` with its level, cap and floor. `off` counts as `truncate`, which says
            what switching it on would do.

    Returns:
        `[n]` weights in the dtype of `differences`, and `[n]` bool: cut to the cap, or masked to 0.
    """
    known = ~differences.isnan()
    d = torch.where(known, differences, 0)
    if algorithm.rollout_correction_level == "sequence":
        d = d.sum().expand_as(d)
    raw = d.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT).exp()
    cut = raw > algorithm.rollout_correction_cap
    if algorithm.rollout_correction == "mask":
        cut = cut | (raw < algorithm.rollout_correction_floor)
        weights = torch.where(cut, 0, raw)
    else:
        weights = raw.clamp(max=algorithm.rollout_correction_cap)
    return torch.where(known, weights, 0), cut & known


@dataclass
class MismatchStats:
    """Sums over the fresh tokens of one rollout batch that have a rollout log-prob."""

    tokens: int = 0
    k3: float = 0.0
    largest: float = 0.0
    cut: int = 0

    def add(self, differences: Tensor, cut: Tensor) -> None:
        """One response's `[n]` differences (NaN: unknown) and `[n]` bool of what the bounds changed."""
        d = differences[~differences.isnan()].double()
        if not d.numel():
            return
        bounded = d.clamp(-LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
        self.tokens += d.numel()
        self.k3 += (bounded.exp() - bounded - 1).sum().item()
        self.largest = max(self.largest, d.abs().max().item())
        self.cut += int(cut.sum())

    def metrics(self) -> dict[str, float]:
        """Means under the names of metrics.jsonl; 0 where there was nothing to take a mean of."""
        tokens = max(self.tokens, 1)
        return {
            "rollout_mismatch_kl": self.k3 / tokens,
            "rollout_mismatch_max": self.largest,
            "rollout_is_clip_frac": self.cut / tokens,
        }
