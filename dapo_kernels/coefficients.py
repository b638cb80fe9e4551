"""What a token's log-prob and entropy are multiplied with in the gradient, and when that can be known.

At token level a coefficient depends on the token's own log-prob: it is known as soon as the token's chunk is
scored. With one ratio a sequence it depends on the log-probs of the whole sequence, except on policy, where
every ratio is 1 before anything is scored.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .config import PolicyLossConfig
from .objective import TokenInputs, TokenTerms, token_objective


def token_coefficients(
    logprobs: Tensor,  # [n]
    entropy: Tensor,  # [n]
    inputs: TokenInputs,
    weights: Tensor,  # [n] of each token in the sum
    config: PolicyLossConfig,
) -> tuple[TokenTerms, Tensor, Tensor | None]:
    """The terms of the objective, and the derivatives of the weighted sum of its losses by each log-prob
    `[n]` and by each entropy `[n]` (None: all 0)."""
    with torch.enable_grad():
        logprobs = logprobs.detach().requires_grad_()
        entropy = entropy.detach().requires_grad_(config.needs_entropy_gradient)
        terms = token_objective(logprobs, entropy, inputs, config)
        total = (terms.loss * weights).sum()
        wanted = (logprobs, entropy) if config.needs_entropy_gradient else (logprobs,)
        gradients = torch.autograd.grad(total, wanted)
    terms = TokenTerms(*(None if term is None else term.detach() for term in terms))
    return terms, gradients[0], gradients[1] if config.needs_entropy_gradient else None


class SequenceCoefficients:
    """The coefficients of a part of the selected tokens under one ratio a sequence, from the scores of that
    part alone: on policy they can be had."""

    def __init__(self, inputs: TokenInputs, weights: Tensor, config: PolicyLossConfig) -> None:
        self.inputs, self.weights, self.config = inputs, weights, config
        ratio_on_kl = config.kl_coef != 0 and config.kl_ratio_correction
        self.available = inputs.old_logprobs is None and not ratio_on_kl
        """False: the log-probs of all tokens are needed first."""
        if self.available:
            policy_only = replace(config, kl_coef=0.0, entropy_coef=0.0)
            anything = torch.zeros_like(inputs.advantages)  # on policy the log-probs themselves do not matter
            self.policy_part = token_coefficients(anything, anything, inputs, weights, policy_only)[1]

    def __call__(self, part: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
        """KL and entropy bonus are each token's own; the policy term is added as known."""
        inputs = self.inputs.select(part)
        own = inputs._replace(advantages=torch.zeros_like(inputs.advantages))
        token_level = replace(self.config, ratio_level="token")
        _, logprob_grad, entropy_grad = token_coefficients(
            logprobs, entropy, own, self.weights[part], token_level
        )
        return logprob_grad + self.policy_part[part], entropy_grad
