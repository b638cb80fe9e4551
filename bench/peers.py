"""Other libraries' log-probs and losses over a vocabulary, called as their own trainers call them.

Every import stands where it is used: a peer that is not installed, or does not run on a device, raises there,
and becomes a row of the table that says why. Where a library has log-probs only, `policy_loss` goes on top.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from bench.workloads import Batch
from dapo_kernels import PolicyLossConfig, policy_loss

CONFIG = PolicyLossConfig()


def loss_of_logprobs(batch: Batch, logprobs: Tensor, entropy: Tensor | None = None) -> Tensor:
    entropy = None if entropy is None else entropy.detach()
    inputs = (batch.advantages, batch.mask, batch.old_logprobs)
    return policy_loss(logprobs, *inputs, entropy=entropy, config=CONFIG).loss


def scored_tokens(batch: Batch) -> Tensor:
    """`[B, T]` bool. Where Triton runs, TRL gathers the tokens that count; elsewhere it scores all."""
    return batch.mask if batch.hidden.device.type in ("cuda", "xpu") else torch.ones_like(batch.mask)


def trl_scores(batch: Batch) -> tuple[Tensor, Tensor]:
    """Tiles and outputs as the GRPO trainer asks for."""
    from trl.kernels import ChunkedLogProbFunction

    keep = scored_tokens(batch)
    scores = ChunkedLogProbFunction.apply(
        batch.hidden[keep], batch.weight, None, batch.targets[keep], 1.0, 32768, None, 1.0, ("entropy",)
    )
    return tuple(torch.zeros_like(batch.old_logprobs).masked_scatter(keep, x.float()) for x in scores[:2])


def trl_loss(batch: Batch) -> Tensor:
    return loss_of_logprobs(batch, *trl_scores(batch))


def trl_logprobs(batch: Batch) -> Tensor:
    return trl_scores(batch)[0]


def liger_loss(batch: Batch, compiled: bool) -> Tensor:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(
        beta=0.0,
        compiled=compiled,
        use_ref_model=False,
        epsilon_low=CONFIG.epsilon_low,
        epsilon_high=CONFIG.epsilon_high,
        loss_type="dapo",
    )
    mask, old = batch.mask.float(), batch.old_logprobs
    return loss(batch.hidden, batch.weight, batch.targets, mask, batch.advantages, old_per_token_logps=old)[0]


def liger_triton_loss(batch: Batch) -> Tensor:
    """On full logits, which it takes with one position more than there are tokens."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    logits = torch.nn.functional.pad(batch.hidden, (0, 0, 0, 1)) @ batch.weight.T
    losses = triton_grpo_loss(
        logits,
        batch.old_logprobs,
        None,
        batch.targets,
        batch.advantages,
        batch.mask,
        temperature=1.0,
        beta=0.0,
        eps_low=CONFIG.epsilon_low,
        eps_high=CONFIG.epsilon_high,
    )[0]
    return (losses * batch.mask).sum() / batch.mask.sum()


def cce_logprobs(batch: Batch, impl: str) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    targets = batch.targets.masked_fill(~batch.mask, -100)
    return -linear_cross_entropy(batch.hidden, batch.weight, targets, reduction="none", impl=impl).float()


def cce_loss(batch: Batch, impl: str) -> Tensor:
    return loss_of_logprobs(batch, cce_logprobs(batch, impl))


def verl_torch_scores(batch: Batch) -> tuple[Tensor, Tensor]:
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    return FusedLinearForPPO()(batch.hidden, batch.weight, batch.targets, 1.0)


def verl_torch_loss(batch: Batch) -> Tensor:
    return loss_of_logprobs(batch, *verl_torch_scores(batch))


def verl_torch_logprobs(batch: Batch) -> Tensor:
    return verl_torch_scores(batch)[0]


def verl_kernel_scores(batch: Batch) -> list[Tensor]:
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    scores = linear_cross_entropy(batch.hidden, batch.weight, batch.targets, 1.0, "none")
    return [value.view(batch.targets.shape) for value in scores]


def verl_kernel_loss(batch: Batch) -> Tensor:
    return loss_of_logprobs(batch, *verl_kernel_scores(batch))


def verl_kernel_logprobs(batch: Batch) -> Tensor:
    return verl_kernel_scores(batch)[0]


def quack_loss(batch: Batch) -> Tensor:
    """The mean cross-entropy of the tokens that count: it has no gradient per token, so this is not a policy
    loss, but the GEMMs are the same."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    targets = batch.targets.masked_fill(~batch.mask, -100).flatten()
    return chunked_linear_cross_entropy(batch.hidden.flatten(0, 1), batch.weight, targets)


@cache
def compiled_plain_scores():
    """Full logits under torch.compile; a function of tensors, so that its graphs are kept."""

    def scores(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logp = (hidden @ weight.T).float().log_softmax(-1)
        return logp.gather(-1, targets[..., None]).squeeze(-1), -(logp.exp() * logp).sum(-1)

    return torch.compile(scores, dynamic=False)


def compiled_loss(batch: Batch) -> Tensor:
    return loss_of_logprobs(batch, *compiled_plain_scores()(batch.hidden, batch.weight, batch.targets))


def compiled_logprobs(batch: Batch) -> Tensor:
    return compiled_plain_scores()(batch.hidden, batch.weight, batch.targets)[0]
