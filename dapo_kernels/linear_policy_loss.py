"""The one-pass fused linear policy loss: head, log-probs, objective and both gradients, chunk by chunk.

For a token-level objective `d loss / d logp` of a token depends on its own log-prob and on numbers known
beforehand. So once a chunk's logits exist, everything is finished before the next chunk:

    select -> for each chunk: logits GEMM -> row statistics -> objective -> dlogits in place
                              -> hidden-gradient GEMM, weight-gradient GEMM

With u = 2 N H V FLOPs this costs `g + 2f` u (g: share of tokens scored, f: share that carries gradient),
one chunk of logits in memory, and no recomputation in backward, which only scales what is already there.
With one ratio a sequence, off policy, a token's coefficient waits for its whole sequence: then the logits of
the tokens that carry gradient are made a second time (`g + 3f`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .arguments import TokenBatch, check_call, check_head, flatten_tokens
from .coefficients import ChunkCoefficients, token_coefficients
from .config import PolicyLossConfig
from .data_parallel import gather
from .gemm import accumulation_dtype, exact_precision
from .head import Head, HeadGradients, Wants, add_gradients, head_chunks, logits_buffer
from .objective import TokenTerms, token_objective
from .output import PolicyLossOutput, metrics_from_sums, token_sums
from .reduction import token_reduction
from .row_ops import logits_gradient_, logits_statistics_
from .selection import Selection, scatter_tokens, select_tokens
from .vocab_parallel import VocabShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
    vocab_group: ProcessGroup | None = None,
    hidden_grad: Literal["complete", "partial"] = "complete",
) -> PolicyLossOutput:
    """DAPO's policy loss straight from hidden states, without ever holding the logits.

    `dapo_kernels.reference.linear_policy_loss` has the same signature and spells out the definition.

    Args:
        hidden: `[..., H]` last hidden state at the position that predicts `targets` (the caller shifts).
        weight: `[V, H]` lm_head weight, plain or a DTensor on a data-parallel mesh, which is gathered here
            and gets its gradient averaged over the mesh, in its own placement.
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
        sequence_ids: `[...]` sequence of each token of a packed batch, for the seq-mean reductions and
            `ratio_level="sequence"`. No sequence may be spread over two calls.
        config: coefficients and switches.
        selection: `[n]` flat indices of the tokens to score, if known: the unmasked ones, less those that
            `skip_zero_advantage` skips. Saves the call's one host read, and its check of the ids.
        backend: `auto` or `torch`.
        chunk_tokens: tokens whose logits exist at a time. Default: as many as fit 256 MiB.
        vocab_group: process group over which the head is cut: `weight` and `bias` are this rank's equal
            part of the vocabulary, everything else is the same on every rank.
        hidden_grad: with `vocab_group`, `complete` sums the gradient of `hidden` over the group; `partial`
            leaves it to a caller whose own backward does.

    Returns:
        `PolicyLossOutput`; gradients reach `hidden`, `weight` and `bias`. fp64 inputs compute in fp64,
        all others in fp32.

    Raises:
        ValueError, TypeError: name the argument, what was given and what is allowed.
    """
    check_head(hidden, weight, bias, targets)
    check_call(backend, chunk_tokens, hidden_grad)
    weight, bias = gather(weight), gather(bias)
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
    with exact_precision(hidden.device):
        flat = hidden.reshape(-1, hidden.shape[-1])
        shard = None if vocab_group is None else VocabShard(vocab_group, weight.shape[0])
        head = Head(flat, weight, bias, targets.reshape(-1), shard, hidden_grad == "complete")
        chosen = select_tokens(head.targets, batch, head.vocab_size, config, selection)
        reduction = token_reduction(batch.mask, batch.inputs.sequence_ids, denominator, dtype, config)
        result = _score(head, batch, chosen, reduction[0], wants, chunk_tokens, config)
        output = _assemble(result, batch, chosen, reduction, config)
    if any(wants):
        loss = _PrecomputedGradient.apply(hidden, weight, bias, output.loss, result.gradients, reduction[1])
        output = output._replace(loss=loss)
    return output


class Scored(NamedTuple):
    """What the pass over the chunks leaves; per-token fields are `[n]`, in the order of the selection."""

    logprobs: Tensor
    entropy: Tensor
    terms: TokenTerms
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None]
    """Of hidden `[N, H]`, weight `[V, H]`, bias `[V]`; of the loss before its division."""


def _score(
    head: Head,
    batch: TokenBatch,
    selection: Selection,
    reduction_weights: Tensor | None,  # [N]
    wants: Wants,
    chunk_tokens: int | None,
    config: PolicyLossConfig,
) -> Scored:
    """The pass itself: first the tokens that carry gradient, then those that are only scored."""
    inputs = batch.inputs.select(selection.index)
    weights = None if reduction_weights is None else reduction_weights[selection.index]
    dtype = inputs.advantages.dtype
    buffer = logits_buffer(head, selection.index.numel(), chunk_tokens, dtype)
    num_active = selection.num_active if any(wants) else 0
    gradients = HeadGradients(head, wants, dtype)
    coefficients = ChunkCoefficients(inputs, weights, config)
    logprobs, entropy = torch.empty_like(inputs.advantages), torch.empty_like(inputs.advantages)
    for chunk in head_chunks(head, selection.index, buffer, num_active):
        statistics = logits_statistics_(chunk.logits, chunk.targets, config, head.shard)
        logprobs[chunk.part], entropy[chunk.part] = statistics.logprobs, statistics.entropy
        if chunk.part.start < num_active and coefficients.available:
            grads = coefficients(chunk.part, statistics.logprobs, statistics.entropy)
            logits_gradient_(chunk.logits, chunk.targets, statistics, *grads, config, head.shard)
            gradients.add(chunk)
    if num_active and not coefficients.available:
        grads = token_coefficients(logprobs, entropy, inputs, weights, config)
        grads = (None if grad is None else grad[:num_active] for grad in grads)
        add_gradients(gradients, selection.index[:num_active], *grads, buffer, config)
    terms = token_objective(logprobs, entropy, inputs, config)
    return Scored(logprobs, entropy, terms, gradients.finish())


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
