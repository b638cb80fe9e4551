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
from .objective import TokenInputs, token_objective


def token_coefficients(
    logprobs: Tensor,  # [n]
    entropy: Tensor,  # [n]
    inputs: TokenInputs,
    weights: Tensor | None,  # [n] of each token in the sum, None: 1
    config: PolicyLossConfig,
) -> tuple[Tensor, Tensor | None]:
    """The derivatives of the weighted sum of the token losses by each log-prob `[n]` and by each entropy
    `[n]` (None: all 0)."""
    with torch.enable_grad():
        logprobs = logprobs.detach().requires_grad_()
        entropy = entropy.detach().requires_grad_(config.needs_entropy_gradient)
        loss = token_objective(logprobs, entropy, inputs, config).loss
        total = (loss if weights is None else loss * weights).sum()
        wanted = (logprobs, entropy) if config.needs_entropy_gradient else (logprobs,)
        gradients = torch.autograd.grad(total, wanted)
    return gradients[0], gradients[1] if config.needs_entropy_gradient else None


class ChunkCoefficients:
    """The coefficients of a part of the selected tokens, from the scores of that part alone."""

    def __init__(self, inputs: TokenInputs, weights: Tensor | None, config: PolicyLossConfig) -> None:
        self.inputs, self.weights, self.config = inputs, weights, config
        self.policy_part = None
        if config.ratio_level == "sequence" and self.available:
            policy_only = replace(config, kl_coef=0.0, entropy_coef=0.0)
            anything = torch.zeros_like(inputs.advantages)  # on policy the log-probs themselves do not matter
            self.policy_part = token_coefficients(anything, anything, inputs, weights, policy_only)[0]

    @property
    def available(self) -> bool:
        """False: the log-probs of all tokens are needed first."""
        on_policy = self.inputs.old_logprobs is None
        ratio_on_kl = self.config.kl_coef != 0 and self.config.kl_ratio_correction
        return self.config.ratio_level == "token" or (on_policy and not ratio_on_kl)

    def __call__(self, part: slice, logprobs: Tensor, entropy: Tensor) -> tuple[Tensor, Tensor | None]:
        inputs = self.inputs.select(part)
        weights = None if self.weights is None else self.weights[part]
        if self.policy_part is None:
            return token_coefficients(logprobs, entropy, inputs, weights, self.config)
        # KL and entropy bonus are each token's own; the policy term is added as known.
        own = inputs._replace(advantages=torch.zeros_like(inputs.advantages))
        token_level = replace(self.config, ratio_level="token")
        logprob_grad, entropy_grad = token_coefficients(logprobs, entropy, own, weights, token_level)
        return logprob_grad + self.policy_part[part], entropy_grad
