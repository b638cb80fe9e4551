"""The same objective for trainers that already hold log-probs."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import check_config, flatten_tokens
from .config import PolicyLossConfig
from .gemm import accumulation_dtype
from .objective import TokenTerms, token_objective
from .output import PolicyLossOutput, metrics_from_sums, token_sums
from .reduction import token_reduction
from .selection import check_mask, keep_where, may_carry_gradient, read_back, scatter_tokens


def policy_loss(
    logprobs: Tensor,  # [...]
    advantages: Tensor,  # [...], or [B] / [B, 1] for [B, T] log-probs
    mask: Tensor,  # [...] bool or 0/1
    old_logprobs: Tensor | None = None,  # [...]
    *,
    entropy: Tensor | None = None,  # [...]
    ref_logprobs: Tensor | None = None,  # [...]
    token_weights: Tensor | None = None,  # [...] or [B, 1]
    entropy_weights: Tensor | None = None,  # [...] or 0-d
    denominator: Tensor | float | None = None,
    sequence_ids: Tensor | None = None,  # [...] int64
    config: PolicyLossConfig = PolicyLossConfig(),  # noqa: B008 (frozen)
) -> PolicyLossOutput:
    """The policy loss of `fused_linear_policy_loss` from log-probs and entropy that the caller computed.

    Gradients reach `logprobs` and, with an entropy bonus, `entropy`; the other arguments are as there. The
    settings of `config` that make log-probs out of logits (temperature, scale, softcap) are the caller's.
    Only the number of scored tokens is read back to the host.

    Raises:
        ValueError, TypeError: name the argument, what was given and what is allowed.
    """
    check_config(config)
    if not isinstance(logprobs, Tensor) or not logprobs.is_floating_point():
        raise TypeError(
            f"logprobs must be a floating point tensor, got {getattr(logprobs, 'dtype', logprobs)}"
        )
    if config.entropy_coef != 0 and entropy is None:
        raise ValueError(
            f"entropy is required when config.entropy_coef is not 0 (it is {config.entropy_coef})"
        )
    if entropy is not None and not isinstance(entropy, Tensor):
        raise TypeError(f"entropy must be a tensor, got {type(entropy).__name__}")
    if entropy is not None and entropy.shape != logprobs.shape:
        raise ValueError(f"entropy must have shape {list(logprobs.shape)}, got {list(entropy.shape)}")
    dtype = accumulation_dtype(logprobs)
    batch = flatten_tokens(
        logprobs,
        dtype,
        config,
        advantages=advantages,
        mask=mask,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        token_weights=token_weights,
        entropy_weights=entropy_weights,
        denominator=denominator,
        sequence_ids=sequence_ids,
    )
    weights, denominator = token_reduction(batch.mask, batch.inputs.sequence_ids, denominator, dtype, config)
    scored_mask = batch.mask
    if config.skip_zero_advantage:
        scored_mask = may_carry_gradient(batch.mask, batch.inputs, config)
    count, num_odd = read_back(torch.stack([scored_mask.sum(), batch.num_odd]))
    check_mask(num_odd)
    index = keep_where(torch.arange(scored_mask.numel(), device=scored_mask.device), scored_mask, count)
    inputs = batch.inputs.select(index)
    scored = logprobs.reshape(-1).to(dtype)[index]
    scored_entropy = None if entropy is None else entropy.reshape(-1).to(dtype)[index]
    terms = token_objective(scored, scored_entropy, inputs, config)
    weighted = terms.loss if weights is None else terms.loss * weights[index]

    detached = TokenTerms(*(None if term is None else term.detach() for term in terms))
    seen_entropy = torch.zeros_like(scored) if scored_entropy is None else scored_entropy
    seen_entropy = seen_entropy.detach()
    sums = token_sums(detached, seen_entropy, inputs.advantages, batch.mask.sum(), config)
    return PolicyLossOutput(
        loss=weighted.sum() / denominator,
        logprobs=scatter_tokens(scored.detach(), index, batch.shape),
        entropy=scatter_tokens(seen_entropy, index, batch.shape),
        token_loss=scatter_tokens(detached.loss, index, batch.shape),
        metrics=metrics_from_sums(sums),
        sums=sums,
    )
