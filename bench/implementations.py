"""The policy loss as ours and as peers compute it, each behind the same two calls.

A peer is used as its own trainer uses it. Where it is not installed, `missing` says what to install.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor

from dapo_kernels import PolicyLossConfig, fused_linear_policy_loss, policy_loss, reference

CONFIG = PolicyLossConfig()


@dataclass
class Batch:
    """What one call is given: sequences of equal length, one advantage each."""

    hidden: Tensor  # [B, T, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [B, T]
    advantages: Tensor  # [B]
    mask: Tensor  # [B, T] bool
    old_logprobs: Tensor  # [B, T] fp32


@dataclass(frozen=True)
class Implementation:
    name: str
    loss: Callable[[Batch], Tensor]
    """The 0-d loss, with a graph to hidden and weight."""
    package: str | None = None

    @property
    def missing(self) -> str | None:
        """What to install, or None."""
        if self.package is None or find_spec(self.package.split("==")[0].replace("-", "_")):
            return None
        return f"pip install {self.package}"


def ours(batch: Batch, config: PolicyLossConfig = CONFIG, backend: str = "auto") -> Tensor:
    return fused_linear_policy_loss(**vars(batch), config=config, backend=backend).loss


def plain_torch(batch: Batch) -> Tensor:
    return reference.linear_policy_loss(**vars(batch), config=CONFIG).loss


def trl(batch: Batch) -> Tensor:
    """TRL's chunked log-probs (tiles and outputs as its GRPO trainer asks for), then the loss on them. On CPU
    it scores masked tokens too."""
    from trl.kernels import ChunkedLogProbFunction

    keep = batch.mask if batch.hidden.device.type in ("cuda", "xpu") else torch.ones_like(batch.mask)
    outputs = ChunkedLogProbFunction.apply(
        batch.hidden[keep], batch.weight, None, batch.targets[keep], 1.0, 32768, None, 1.0, ("entropy",)
    )
    logprobs, entropy = (
        torch.zeros_like(batch.old_logprobs).masked_scatter(keep, values) for values in outputs[:2]
    )
    return policy_loss(
        logprobs, batch.advantages, batch.mask, batch.old_logprobs, entropy=entropy.detach(), config=CONFIG
    ).loss


def liger(batch: Batch, compiled: bool) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=compiled,
        use_ref_model=False,
        epsilon_low=CONFIG.epsilon_low,
        epsilon_high=CONFIG.epsilon_high,
        loss_type="dapo",
    )
    return loss(
        batch.hidden,
        batch.weight,
        batch.targets,
        batch.mask.float(),
        batch.advantages,
        old_per_token_logps=batch.old_logprobs,
    )[0]


OURS = Implementation("dapo-kernels", ours)
PLAIN = Implementation("plain torch, full logits", plain_torch)
TRL = Implementation("TRL ChunkedLogProbFunction + loss", trl, "trl==1.16.0")
LIGER = Implementation(
    "Liger LigerFusedLinearGRPOLoss", partial(liger, compiled=False), "liger-kernel==0.8.5"
)
LIGER_COMPILED = Implementation(
    "Liger LigerFusedLinearGRPOLoss, compiled", partial(liger, compiled=True), "liger-kernel==0.8.5"
)
