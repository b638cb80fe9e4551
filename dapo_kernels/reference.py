"""The whole definition, with full logits and plain autograd: read this first.

Nothing is shared with the fast paths except the config and the result's shape, so that agreement means
something. It computes in the dtype it is given and holds `[n, V]` logits: for tests and small runs.

Symbols: z logits, p = softmax(z), A advantage, r ratio of the policy to the one that sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .config import PolicyLossConfig
from .output import PolicyLossOutput


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    advantages: Tensor,
    mask: Tensor,
    old_logprobs: Tensor | None = None,
    *,
    ref_logprobs: Tensor | None = None,
    token_weights: Tensor | None = None,
    entropy_weights: Tensor | None = None,
    bias: Tensor | None = None,
    denominator: Tensor | float | None = None,
    sequence_ids: Tensor | None = None,
    config: PolicyLossConfig = PolicyLossConfig(),  # noqa: B008 (frozen)
    selection: Tensor | None = None,
    backend: str = "auto",
    chunk_tokens: int | None = None,
    vocab_group: None = None,
    hidden_grad: str = "complete",
) -> PolicyLossOutput:
    """The policy loss as defined; arguments as in `fused_linear_policy_loss`. `selection`, `backend`,
    `chunk_tokens` and `hidden_grad` change nothing here. The head must be whole: no `vocab_group`."""
    if vocab_group is not None:
        raise ValueError("vocab_group must be None here: the reference takes the whole head")
    shape = targets.shape
    counted = mask.reshape(-1) != 0
    scored = counted.clone()
    ids = sequence_ids
    if ids is None and len(shape) > 1:
        ids = torch.arange(shape[:-1].numel(), device=targets.device).repeat_interleave(shape[-1])

    def flat(value: Tensor) -> Tensor:
        while value.dim() < len(shape):
            value = value[..., None]
        return value.expand(shape).reshape(-1)

    if config.skip_zero_advantage and config.kl_coef == 0 and config.entropy_coef == 0:
        gain = flat(advantages) if token_weights is None else flat(advantages) * flat(token_weights)
        scored &= gain != 0
        if config.ratio_level == "sequence":  # a sequence is skipped whole or not at all
            scored = counted & torch.isin(ids.reshape(-1), ids.reshape(-1)[scored])

    # Only scored tokens enter: elsewhere anything may stand.
    y = targets.reshape(-1)[scored]
    A = flat(advantages)[scored].to(hidden.dtype)
    z = hidden.reshape(-1, hidden.shape[-1])[scored] @ weight.T
    if bias is not None:
        z = z + bias
    z = z * config.logit_scale
    if config.logit_softcap is not None:
        z = config.logit_softcap * torch.tanh(z / config.logit_softcap)
    z = z / config.temperature
    logp_all = z - torch.logsumexp(z, -1, keepdim=True)
    logp = logp_all.gather(1, y[:, None]).squeeze(1)
    # The clamp makes 0 log 0 = 0 of a banned token's 0 * -inf.
    entropy = -(logp_all.exp() * logp_all.clamp(min=torch.finfo(z.dtype).min)).sum(-1)

    old = logp.detach() if old_logprobs is None else flat(old_logprobs)[scored]
    d = logp - old
    if config.ratio_level == "sequence":
        own = ids.reshape(-1)[scored]
        d = torch.stack([d[own == sequence].mean() for sequence in own]) if d.numel() else d
    d = torch.clamp(d, -20, 20)
    r = torch.exp(d)
    loss = _policy_term(r, logp, A, config)
    if token_weights is not None:
        loss = loss * flat(token_weights)[scored]
    kl = torch.zeros_like(logp)
    if ref_logprobs is not None:
        q = torch.clamp(flat(ref_logprobs)[scored] - logp, -20, 20)
        kl = {"k3": torch.exp(q) - q - 1, "k2": q**2 / 2, "k1": -q}[config.kl_estimator]
        loss = loss + config.kl_coef * (kl * r if config.kl_ratio_correction else kl)
    if config.entropy_coef != 0:
        factor = 1 if entropy_weights is None else flat(entropy_weights)[scored]
        loss = loss - config.entropy_coef * factor * entropy

    total = _reduce(loss, counted, scored, ids, denominator, config)
    return _output(total, loss, logp, entropy, r, d, kl, A, counted, scored, shape, config)


def _policy_term(r: Tensor, logp: Tensor, A: Tensor, config: PolicyLossConfig) -> Tensor:
    if config.objective == "cispo":
        low, high = config.cispo_bounds or (0.0, 1 + config.epsilon_high)
        return -torch.clamp(r, low, high).detach() * A * logp
    if config.objective == "sapo":
        tau = torch.full_like(A, config.sapo_temperature_neg)
        tau[A > 0] = config.sapo_temperature_pos
        return -A * torch.sigmoid(tau * (r - 1)) * 4 / tau
    loss = -torch.minimum(r * A, torch.clamp(r, 1 - config.epsilon_low, 1 + config.epsilon_high) * A)
    if config.dual_clip is not None:
        loss = torch.where(A < 0, torch.minimum(loss, -config.dual_clip * A), loss)
    return loss


def _reduce(
    loss: Tensor,  # [n]
    counted: Tensor,  # [N] bool: unmasked
    scored: Tensor,  # [N] bool: unmasked and not skipped
    sequence_ids: Tensor | None,
    denominator: Tensor | float | None,
    config: PolicyLossConfig,
) -> Tensor:
    if config.reduction in ("token-mean", "constant"):
        return loss.sum() / (max(int(counted.sum()), 1) if denominator is None else denominator)
    ids = sequence_ids.reshape(-1)
    sequences = ids[counted].unique().tolist()
    parts = []
    for sequence in sequences:
        part = loss[ids[scored] == sequence].sum()
        if config.reduction == "seq-mean-token-mean":
            part = part / (ids[counted] == sequence).sum()
        parts.append(part)
    total = torch.stack(parts).sum() if parts else loss.sum()
    return total / (max(len(sequences), 1) if denominator is None else denominator)


def _output(total, loss, logp, entropy, r, d, kl, A, counted, scored, shape, config) -> PolicyLossOutput:
    def unflat(value: Tensor) -> Tensor:
        full = value.new_zeros(scored.shape)
        full[scored] = value.detach()
        return full.view(shape)

    dual = torch.zeros_like(r, dtype=torch.bool)
    if config.dual_clip is not None and config.objective == "clip":
        dual = (A < 0) & (r > config.dual_clip)
    columns = {
        "entropy": entropy,
        "ratio_mean": r,
        "approx_kl": -d,
        "kl": kl,
        "clip_frac_low": (r < 1 - config.epsilon_low) & (A < 0),
        "clip_frac_high": (r > 1 + config.epsilon_high) & (A > 0),
        "dual_clip_frac": dual,
    }
    sums = {name: column.detach().to(r.dtype).sum() for name, column in columns.items()}
    n = max(int(scored.sum()), 1)
    metrics = {name: value / n for name, value in sums.items()}
    exact = {
        "ratio_max": r.detach().max() if r.numel() else r.new_zeros(()),
        "num_tokens": counted.sum().to(r.dtype),
        "num_scored": scored.sum().to(r.dtype),
    }
    return PolicyLossOutput(
        total, unflat(logp), unflat(entropy), unflat(loss), {**metrics, **exact}, {**sums, **exact}
    )
