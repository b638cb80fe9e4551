"""The fused loss as an `nn.Module`."""

from __future__ import annotations

from torch import nn

from .config import PolicyLossConfig
from .linear_policy_loss import fused_linear_policy_loss
from .output import PolicyLossOutput


class FusedLinearPolicyLoss(nn.Module):
    """`fused_linear_policy_loss` with its config held: call it with the same tensors."""

    def __init__(
        self,
        config: PolicyLossConfig = PolicyLossConfig(),  # noqa: B008 (frozen)
        backend: str = "auto",
        chunk_tokens: int | None = None,
    ) -> None:
        super().__init__()
        self.config, self.backend, self.chunk_tokens = config, backend, chunk_tokens

    def forward(
        self, hidden, weight, targets, advantages, mask, old_logprobs=None, **tensors
    ) -> PolicyLossOutput:
        return fused_linear_policy_loss(
            hidden,
            weight,
            targets,
            advantages,
            mask,
            old_logprobs,
            config=self.config,
            backend=self.backend,
            chunk_tokens=self.chunk_tokens,
            **tensors,
        )

    def extra_repr(self) -> str:
        return f"{self.config}, backend={self.backend!r}, chunk_tokens={self.chunk_tokens}"
