"""Log-probs to the per-token objective: the one home of every formula that the fast paths use.

`reference.py` states the same definition independently and in full; tests hold the two together.
All tensors here are `[n]`: only tokens that count, already selected. Gradients come from autograd through
these few scalars a token, so that no derivative is written down twice.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .config import PolicyLossConfig
from .sequences import sequence_mean

LOG_RATIO_LIMIT = 20.0
"""exp(20) is 4.9e8: finite in every dtype, far outside any clip range."""


class TokenInputs(NamedTuple):
    """What is known of each selected token before the forward; every field `[n]` or None."""

    advantages: Tensor
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    token_weights: Tensor | None
    entropy_weights: Tensor | None
    sequence_ids: Tensor | None = None

    def select(self, index: Tensor | slice) -> TokenInputs:
        return TokenInputs(*(None if value is None else value[index] for value in self))


class TokenTerms(NamedTuple):
    """The objective of each token and what the metrics need; every field `[n]`."""

    loss: Tensor
    log_ratio: Tensor
    ratio: Tensor
    kl: Tensor | None


def token_objective(
    logprobs: Tensor,  # [n]
    entropy: Tensor | None,  # [n], required where config.entropy_coef != 0
    inputs: TokenInputs,
    config: PolicyLossConfig,
) -> TokenTerms:
    """`token_weights * L + kl_coef * KL - entropy_coef * entropy_weights * entropy` of each token."""
    old_logprobs = logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
    log_ratio = logprobs - old_logprobs
    if config.ratio_level == "sequence":
        log_ratio = sequence_mean(log_ratio, inputs.sequence_ids)
    log_ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = log_ratio.exp()

    loss = _POLICY_LOSS[config.objective](logprobs, ratio, inputs.advantages, config)
    if inputs.token_weights is not None:
        loss = loss * inputs.token_weights

    kl = None
    if inputs.ref_logprobs is not None:
        kl = kl_estimate(logprobs, inputs.ref_logprobs, config)
        if config.kl_coef != 0:
            loss = loss + config.kl_coef * (kl * ratio if config.kl_ratio_correction else kl)

    if config.entropy_coef != 0:
        bonus = entropy if inputs.entropy_weights is None else inputs.entropy_weights * entropy
        loss = loss - config.entropy_coef * bonus
    return TokenTerms(loss, log_ratio, ratio, kl)


def _clip_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor, config: PolicyLossConfig) -> Tensor:
    """DAPO Eq. 8: `-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)`, and the dual clip where A < 0."""
    clipped = ratio.clamp(1 - config.epsilon_low, 1 + config.epsilon_high)
    # On a tie the unclipped branch is taken: inside the clip range both carry the same gradient.
    loss = torch.where(ratio * advantages <= clipped * advantages, -ratio * advantages, -clipped * advantages)
    if config.dual_clip is not None:
        capped = (advantages < 0) & (ratio > config.dual_clip)
        loss = torch.where(capped, -config.dual_clip * advantages, loss)
    return loss


def _cispo_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor, config: PolicyLossConfig) -> Tensor:
    """CISPO (arXiv 2506.13585, Eq. 4): the clipped ratio is a constant weight on `A log p`."""
    low, high = config.cispo_bounds or (0.0, 1 + config.epsilon_high)
    return -ratio.detach().clamp(low, high) * advantages * logprobs


def _sapo_loss(logprobs: Tensor, ratio: Tensor, advantages: Tensor, config: PolicyLossConfig) -> Tensor:
    """SAPO (arXiv 2511.20347): a sigmoid gate around ratio 1 in place of the hard clip."""
    temperature = torch.full_like(advantages, config.sapo_temperature_neg)
    temperature.masked_fill_(advantages > 0, config.sapo_temperature_pos)
    return -advantages * torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature


_POLICY_LOSS = {"clip": _clip_loss, "cispo": _cispo_loss, "sapo": _sapo_loss}


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, config: PolicyLossConfig) -> Tensor:
    """KL(policy, reference) of each token from its log-probs alone (Schulman's k1, k2, k3)."""
    q = (ref_logprobs - logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if config.kl_estimator == "k3":
        return q.exp() - q - 1
    if config.kl_estimator == "k2":
        return q.square() / 2
    return -q
