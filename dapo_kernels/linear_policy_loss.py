"""The one-pass fused linear policy loss: head, log-probs, objective and both gradients, chunk by chunk.

For a token-level objective `d loss / d logp` of a token depends on its own log-prob and on numbers known
beforehand. So once a chunk's logits exist, everything is finished before the next chunk:

    select -> for each chunk: logits GEMM -> row statistics -> objective -> dlogits in place
                              -> hidden-gradient GEMM, weight-gradient GEMM

With u = 2 N H V FLOPs this costs `g + 2f` u (g: share of tokens scored, f: share that carries gradient),
one chunk of logits in memory, and no recomputation in backward, which only scales what is already there.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .arguments import TokenBatch, check_head, flatten_tokens
from .config import PolicyLossConfig
from .gemm import accumulation_dtype, add_weight_grad_gemm, exact_fp32, hidden_grad_gemm, logits_gemm
from .objective import TokenTerms, token_coefficients, token_objective
from .output import PolicyLossOutput, metrics_from_sums, token_sums
from .reduction import token_reduction
from .row_ops import logits_gradient_, logits_statistics_
from .selection import Selection, scatter_tokens, select_tokens

WORKSPACE_BYTES = 256 * 2**20
"""Budget for one chunk of logits. A constant: never from free memory, or the bits would change with it."""


@torch.compiler.disable
def fused_linear_policy_loss(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    targets: Tensor,  # [...] int64
    advantages: Tensor,  # [...], or [B] / [B, 1] for [B, T] targets
    mask: Tensor,  # [...] bool or 0/1
    old_logprobs: Tensor | None = None,  # [...]
    *,
    ref_logprobs: Tensor | None = None,  # [...]
    token_weights: Tensor | None = None,  # [...] or [B, 1]
    entropy_weights: Tensor | None = None,  # [...] or 0-d
    bias: Tensor | None = None,  # [V]
    denominator: Tensor | float | None = None,
    sequence_ids: Tensor | None = None,  # [...] int64
    config: PolicyLossConfig = PolicyLossConfig(),  # noqa: B008 (frozen)
    selection: Tensor | None = None,  # [n] int64
    backend: str = "auto",
    chunk_tokens: int | None = None,
) -> PolicyLossOutput:
    """DAPO's policy loss straight from hidden states, without ever holding the logits.

    `dapo_kernels.reference.linear_policy_loss` has the same signature and spells out the definition.

    Args:
        hidden: `[..., H]` last hidden state at the position that predicts `targets` (the caller shifts).
        weight: `[V, H]` lm_head weight.
        targets: `[...]` int64 sampled token ids.
        advantages: `[...]`, or `[B]` / `[B, 1]` for `[B, T]` targets.
        mask: `[...]` bool or 0/1: tokens that count. Where it is 0 every other argument may hold anything.
        old_logprobs: `[...]` log-probs of the policy that sampled. None: on policy, ratio 1.
        ref_logprobs: `[...]`, required when `config.kl_coef != 0`.
        token_weights: `[...]` or `[B, 1]` constant factor on each token's policy term, not on KL or bonus.
        entropy_weights: `[...]` or 0-d constant factor on each token's entropy bonus.
        bias: `[V]` of the head.
        denominator: what the summed loss is divided by. Default: this call's unmasked tokens (token-mean)
            or sequences with at least one (seq-mean-*), at least 1. Give the optimizer step's global count
            so that the gradient does not depend on how the batch was cut.
        sequence_ids: `[...]` sequence of each token of a packed batch, for the seq-mean reductions.
        config: coefficients and switches.
        selection: `[n]` flat indices of the unmasked tokens if known: saves the call's one host read, and
            its check of the ids.
        backend: `auto` or `torch`.
        chunk_tokens: tokens whose logits exist at a time. Default: as many as fit 256 MiB.

    Returns:
        `PolicyLossOutput`; gradients reach `hidden`, `weight` and `bias`. fp64 inputs compute in fp64,
        all others in fp32.

    Raises:
        ValueError, TypeError: name the argument, what was given and what is allowed.
    """
    check_head(hidden, weight, bias, targets)
    if backend not in ("auto", "torch"):
        raise ValueError(f"backend must be 'auto' or 'torch', got {backend!r}")
    if chunk_tokens is not None and not (isinstance(chunk_tokens, int) and chunk_tokens >= 1):
        raise ValueError(f"chunk_tokens must be None or a whole number, at least 1, got {chunk_tokens!r}")
    dtype = accumulation_dtype(hidden, weight)
    batch = flatten_tokens(
        targets.shape,
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
    grad_enabled = torch.is_grad_enabled()
    wants = Wants(*(grad_enabled and t is not None and t.requires_grad for t in (hidden, weight, bias)))
    # The precision is set here, not by a surrounding autocast or a global TF32 switch.
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False), exact_fp32():
        head = Head(hidden.reshape(-1, hidden.shape[-1]), weight, bias, targets.reshape(-1))
        chosen = select_tokens(head.targets, batch, weight.shape[0], config, selection)
        reduction = token_reduction(batch.mask, batch.sequence_ids, denominator, dtype, config)
        chunk_tokens = chunk_tokens or max(1, WORKSPACE_BYTES // (weight.shape[0] * dtype.itemsize))
        result = _score(head, batch, chosen, reduction[0], wants, chunk_tokens, config)
        output = _assemble(result, batch, chosen, reduction, config)
    if any(wants):
        loss = _PrecomputedGradient.apply(hidden, weight, bias, output.loss, result.gradients, reduction[1])
        output = output._replace(loss=loss)
    return output


class Wants(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool


class Head(NamedTuple):
    """The head and the flat tokens it is applied to."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    targets: Tensor  # [N]


class Scored(NamedTuple):
    """What the pass over the chunks leaves; per-token fields are `[n]`, in the order of the selection."""

    logprobs: Tensor
    entropy: Tensor
    terms: TokenTerms
    gradients: list[Tensor | None]
    """Of hidden `[N, H]`, weight `[V, H]`, bias `[V]`; of the loss before its division."""


def _chunks(selection: Selection, chunk_tokens: int) -> list[tuple[slice, bool]]:
    """Slices of the selection and whether they carry gradient; no chunk mixes the two kinds."""
    chunks = []
    for start, stop, active in (
        (0, selection.num_active, True),
        (selection.num_active, len(selection.index), False),
    ):
        for first in range(start, stop, chunk_tokens):
            chunks.append((slice(first, min(first + chunk_tokens, stop)), active))
    return chunks


def _score(
    head: Head,
    batch: TokenBatch,
    selection: Selection,
    reduction_weights: Tensor | None,  # [N]
    wants: Wants,
    chunk_tokens: int,
    config: PolicyLossConfig,
) -> Scored:
    """The pass itself."""
    dtype = batch.inputs.advantages.dtype
    chunks = _chunks(selection, chunk_tokens)
    longest = max((part.stop - part.start for part, _ in chunks), default=0)
    buffer = head.hidden.new_empty((longest, head.weight.shape[0]), dtype=dtype)
    grad_hidden = _empty_hidden_grad(head.hidden) if wants.hidden else None
    grad_weight = grad_bias = None
    columns = []
    for part, active in chunks:
        index = selection.index[part]
        targets = head.targets[index]
        hidden = head.hidden.index_select(0, index).to(dtype)  # [c, H]
        logits = buffer[: len(index)]  # [c, V]
        logits_gemm(hidden, head.weight, head.bias, out=logits)
        statistics = logits_statistics_(logits, targets, config)
        inputs = batch.inputs.select(index)
        scores = statistics.logprobs, statistics.entropy
        if not active or not any(wants):
            columns.append((*scores, *token_objective(*scores, inputs, config)))
            continue
        terms, logprob_grad, entropy_grad = token_coefficients(*scores, inputs, config)
        columns.append((*scores, *terms))
        if reduction_weights is not None:
            logprob_grad = logprob_grad * reduction_weights[index]
            entropy_grad = None if entropy_grad is None else entropy_grad * reduction_weights[index]
        logits_gradient_(logits, targets, statistics, logprob_grad, entropy_grad, config)
        if wants.hidden:
            grad_hidden.index_copy_(0, index, hidden_grad_gemm(logits, head.weight).to(grad_hidden.dtype))
        if wants.weight:
            grad_weight = add_weight_grad_gemm(grad_weight, logits, hidden)
        if wants.bias:
            grad_bias = logits.sum(0) if grad_bias is None else grad_bias.add_(logits.sum(0))

    if wants.weight and grad_weight is None:
        grad_weight = torch.zeros_like(head.weight, dtype=dtype)
    if wants.bias and grad_bias is None:
        grad_bias = torch.zeros_like(head.bias, dtype=dtype)
    empty = batch.inputs.advantages.new_empty(0)
    joined = [torch.cat(column) if column[0] is not None else None for column in zip(*columns)] or [empty] * 6
    return Scored(joined[0], joined[1], TokenTerms(*joined[2:]), [grad_hidden, grad_weight, grad_bias])


def _empty_hidden_grad(hidden: Tensor) -> Tensor:
    # In fp16 the gradient stays fp32 until the incoming scale and the denominator are in it.
    return torch.zeros_like(hidden, dtype=torch.float32 if hidden.dtype == torch.float16 else None)


def _assemble(
    result: Scored,
    batch: TokenBatch,
    selection: Selection,
    reduction: tuple[Tensor | None, Tensor | float],
    config: PolicyLossConfig,
) -> PolicyLossOutput:
    weights, denominator = reduction
    index = selection.index
    weighted = result.terms.loss if weights is None else result.terms.loss * weights[index]
    advantages = batch.inputs.advantages[index]
    sums = token_sums(result.terms, result.entropy, advantages, batch.mask.sum(), config)
    return PolicyLossOutput(
        loss=weighted.sum() / denominator,
        logprobs=scatter_tokens(result.logprobs, index, batch.shape),
        entropy=scatter_tokens(result.entropy, index, batch.shape),
        token_loss=scatter_tokens(result.terms.loss, index, batch.shape),
        metrics=metrics_from_sums(sums),
        sums=sums,
    )


class _PrecomputedGradient(torch.autograd.Function):
    """Ties a finished loss to the gradients found along with it; backward scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, loss, gradients, denominator):
        ctx.shapes = [None if t is None else (t.shape, t.dtype) for t in (hidden, weight, bias)]
        ctx.save_for_backward(*gradients)  # freed by backward, even while the caller keeps the loss
        ctx.denominator = denominator
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        scale = grad_loss / ctx.denominator
        scaled = [
            None if gradient is None else (gradient * scale).to(like[1]).view(like[0])
            for gradient, like in zip(ctx.saved_tensors, ctx.shapes)
        ]
        return (*scaled, None, None, None)
