"""What a policy loss returns, and how token terms become its loss and metrics."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .config import PolicyLossConfig
from .objective import TokenTerms


class PolicyLossOutput(NamedTuple):
    """The result of a policy loss call."""

    loss: Tensor
    """0-d, fp32 (fp64 from fp64 inputs), with a graph; a connected zero when nothing is selected."""
    logprobs: Tensor
    """`[...]` log-probs of the targets, detached, 0 where masked."""
    entropy: Tensor
    """`[...]` entropy of the policy in nats, detached, 0 where masked."""
    token_loss: Tensor
    """`[...]` objective of each token before the reduction, detached, 0 where masked."""
    metrics: dict[str, Tensor]
    """0-d means over scored tokens (0 when there is none), `ratio_max`, and the counts."""
    sums: dict[str, Tensor]
    """The same as sums over scored tokens, to add up over micro-batches and ranks; `ratio_max` is a max."""


def token_sums(
    terms: TokenTerms,
    entropy: Tensor,  # [n]
    advantages: Tensor,  # [n]
    num_tokens: Tensor | int,
    config: PolicyLossConfig,
) -> dict[str, Tensor]:
    """Sums over the scored tokens `[n]`: see `PolicyLossOutput.sums`."""
    ratio, log_ratio = terms.ratio, terms.log_ratio
    dual = ratio.new_zeros(())
    if config.dual_clip is not None and config.objective == "clip":
        dual = ((ratio > config.dual_clip) & (advantages < 0)).sum()
    sums = {
        "entropy": entropy.sum(),
        "ratio_mean": ratio.sum(),
        "ratio_max": torch.cat([ratio, ratio.new_zeros(1)]).amax(),
        "approx_kl": -log_ratio.sum(),
        "kl": ratio.new_zeros(()) if terms.kl is None else terms.kl.sum(),
        "clip_frac_low": ((ratio < 1 - config.epsilon_low) & (advantages < 0)).sum(),
        "clip_frac_high": ((ratio > 1 + config.epsilon_high) & (advantages > 0)).sum(),
        "dual_clip_frac": dual,
        "num_tokens": torch.as_tensor(num_tokens, device=ratio.device),
        "num_scored": ratio.new_full((), ratio.numel()),
    }
    return {name: value.to(ratio.dtype) for name, value in sums.items()}


def metrics_from_sums(sums: dict[str, Tensor]) -> dict[str, Tensor]:
    """Means over scored tokens from (aggregated) sums; counts and the maximum stay as they are."""
    as_is = ("ratio_max", "num_tokens", "num_scored")
    scored = sums["num_scored"].clamp(min=1)
    return {name: value.clone() if name in as_is else value / scored for name, value in sums.items()}
