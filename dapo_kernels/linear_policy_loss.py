"""The fused linear policy loss: checks, selection, reduction, and the autograd function around one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .arguments import TokenBatch, check_call, check_head, flatten_tokens
from .backends import choose_rows
from .config import PolicyLossConfig
from .data_parallel import gather
from .gemm import accumulation_dtype, exact_precision
from .head import Head, Wants, flat_hidden
from .one_pass import Scored, score_tokens
from .output import PolicyLossOutput, metrics_from_sums, token_sums
from .reduction import selected_weights, token_reduction
from .selection import known_to_be_one, may_carry_gradient, scatter_tokens, select_tokens
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
        selection: `[n]` flat indices of the unmasked tokens, if known. Saves the call's one host read, and
            with it the check of ids and mask; nothing is skipped then, except in what is returned.
        backend: `torch`, `triton`, or `auto`: Triton for tensors on a GPU unless they are fp64 or Triton is
            not installed, else torch.
        chunk_tokens: tokens whose logits exist at a time. Default: as many as fit 256 MiB on CPU; on a GPU
            1 GiB, and at least 4096.
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
        targets,
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
        shard = None if vocab_group is None else VocabShard(vocab_group, weight.shape[0])
        head = Head(flat_hidden(hidden), weight, bias, targets.reshape(-1), shard, hidden_grad == "complete")
        rows = choose_rows(backend, hidden.device, config, shard, dtype, head.gemm_dtype)
        chosen = select_tokens(head.targets, batch, head.vocab_size, config, selection)
        weights, divisor = selected_weights(
            *token_reduction(batch.mask, batch.inputs.sequence_ids, denominator, dtype, config),
            chosen.index,
            rows.dtype,
        )
        result = score_tokens(head, batch.inputs, weights, chosen, wants, chunk_tokens, rows)
        if selection is not None and config.skip_zero_advantage:
            result = result.without(~may_carry_gradient(batch.mask, batch.inputs, config)[chosen.index])
        loss = (result.terms.loss * weights).sum()
        output = _assemble(loss if divisor is None else loss / divisor, result, batch, chosen.index, config)
    if any(wants):
        loss = _PrecomputedGradient.apply(hidden, weight, bias, output.loss, result.gradients, divisor)
        output = output._replace(loss=loss)
    return output


def _assemble(
    loss: Tensor,  # 0-d
    result: Scored,
    batch: TokenBatch,
    index: Tensor,  # [n]
    config: PolicyLossConfig,
) -> PolicyLossOutput:
    advantages = batch.inputs.advantages[index]
    if result.forgotten is not None:
        advantages = advantages.masked_fill(result.forgotten, 0)
    sums = token_sums(result.terms, result.entropy, advantages, batch.mask.sum(), config)
    if result.forgotten is not None:
        sums["num_scored"] = sums["num_scored"] - result.forgotten.sum()
    return PolicyLossOutput(
        loss=loss,
        logprobs=scatter_tokens(result.logprobs, index, batch.shape),
        entropy=scatter_tokens(result.entropy, index, batch.shape),
        token_loss=scatter_tokens(result.terms.loss, index, batch.shape),
        metrics=metrics_from_sums(sums),
        sums=sums,
    )


def _graph_is_kept() -> bool:
    """Whether the backward that runs was called with `retain_graph`; True where torch does not say."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return ask is None or ask()


class _PrecomputedGradient(torch.autograd.Function):
    """Ties a finished loss to the gradients found along with it; backward scales them."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, loss, gradients, divisor):
        ctx.shapes = [None if t is None else (t.shape, t.dtype) for t in (hidden, weight, bias)]
        ctx.save_for_backward(*gradients)  # freed by backward, even while the caller keeps the loss
        ctx.divisor = divisor
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        scale = grad_loss if ctx.divisor is None else grad_loss / ctx.divisor
        # A product by 1 is a copy of [V, H] that nobody needs, unless another backward is to come.
        as_is = ctx.divisor is None and known_to_be_one(grad_loss) and not _graph_is_kept()
        scaled = [
            None if gradient is None else (gradient if as_is else gradient * scale).to(like[1]).view(like[0])
            for gradient, like in zip(ctx.saved_tensors, ctx.shapes)
        ]
        return (*scaled, None, None, None)
