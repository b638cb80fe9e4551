"""Log-probs and entropy straight from hidden states, both differentiable, for a loss of the caller's own.

What such a loss makes of a token may depend on every other token, so nothing can be finished while the
logits of a chunk exist: forward scores (1u), backward makes the logits again for the rows whose incoming
gradient is not 0, and takes both gradients (3u for those).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .arguments import check_call, check_head, flatten_mask
from .backends import TorchRows, choose_rows
from .config import PolicyLossConfig
from .data_parallel import gather
from .gemm import exact_precision
from .head import Head, HeadGradients, Wants, add_gradients, flat_hidden, head_chunks, logits_buffer
from .selection import keep_where, order_tokens, read_back
from .vocab_parallel import VocabShard

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class LogprobOutput(NamedTuple):
    logprobs: Tensor
    """`[...]` log-probs of the targets, differentiable, 0 where masked."""
    entropy: Tensor | None
    """`[...]` entropy in nats, differentiable, 0 where masked; None if it was not asked for."""


@torch.compiler.disable
def fused_linear_logprobs(
    hidden: Tensor,  # [..., H]
    weight: Tensor,  # [V, H]
    targets: Tensor,  # [...] int64
    *,
    mask: Tensor | None = None,  # [...] bool or 0/1
    bias: Tensor | None = None,  # [V]
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
    return_entropy: bool = True,
    backend: str = "auto",
    chunk_tokens: int | None = None,
    vocab_group: ProcessGroup | None = None,
    hidden_grad: Literal["complete", "partial"] = "complete",
) -> LogprobOutput:
    """Log-probs of `targets` and entropy under `softmax(z)`, z as in `fused_linear_policy_loss`, without
    ever holding the logits.

    Args:
        hidden: `[..., H]` last hidden state at the position that predicts `targets` (the caller shifts).
        weight: `[V, H]` lm_head weight, plain or a DTensor on a data-parallel mesh, which is gathered here
            and gets its gradient averaged over the mesh, in its own placement.
        targets: `[...]` int64 token ids.
        mask: `[...]` bool or 0/1; where it is 0 every other argument may hold anything. None: all count.
        bias: `[V]` of the head.
        temperature, logit_scale, logit_softcap: as in `PolicyLossConfig`.
        return_entropy: False saves its column, not its work.
        backend, chunk_tokens: as in `fused_linear_policy_loss`.
        vocab_group, hidden_grad: a head cut by vocabulary rows, as in `fused_linear_policy_loss`.

    Returns:
        `LogprobOutput`, fp32 (fp64 from fp64 inputs).

    Raises:
        ValueError, TypeError: name the argument, what was given and what is allowed.
    """
    check_head(hidden, weight, bias, targets)
    check_call(backend, chunk_tokens, hidden_grad)
    weight, bias = gather(weight), gather(bias)
    config = PolicyLossConfig(temperature=temperature, logit_scale=logit_scale, logit_softcap=logit_softcap)
    counted, num_odd = flatten_mask(mask, targets)
    shard = None if vocab_group is None else VocabShard(vocab_group, weight.shape[0])
    head = Head(hidden, weight, bias, targets.reshape(-1), shard)
    index = order_tokens(head.targets, counted, counted, counted, num_odd, head.vocab_size).index
    rows = choose_rows(backend, hidden.device, config, shard, head.dtype, head.gemm_dtype)
    options = HeadOptions(chunk_tokens, rows, hidden_grad == "complete")
    logprobs, entropy = _LinearLogprobs.apply(hidden, weight, bias, head.targets, index, options)
    shape = targets.shape
    return LogprobOutput(logprobs.view(shape), entropy.view(shape) if return_entropy else None)


class HeadOptions(NamedTuple):
    """What forward and backward have in common besides tensors."""

    chunk_tokens: int | None
    rows: TorchRows
    complete_hidden_grad: bool

    def head(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Head:
        flat, shard = flat_hidden(hidden.detach()), self.rows.shard
        return Head(flat, weight.detach(), bias, targets, shard, self.complete_hidden_grad)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, index, options):
        ctx.save_for_backward(hidden, weight, bias, targets, index)
        ctx.options = options
        ctx.set_materialize_grads(False)  # an output that the loss does not use then costs nothing
        head = options.head(hidden, weight, bias, targets)
        logprobs = torch.zeros(targets.shape, dtype=head.dtype, device=hidden.device)
        entropy = torch.zeros_like(logprobs)
        with exact_precision(hidden.device):
            buffer = logits_buffer(head, index.numel(), options.chunk_tokens, options.rows)
            for chunk in head_chunks(head, index, buffer):
                statistics = options.rows.statistics(chunk.logits, chunk.targets)
                logprobs[chunk.index] = statistics.logprobs
                entropy[chunk.index] = statistics.entropy
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, logprob_grad, entropy_grad):
        hidden, weight, bias, targets, index = ctx.saved_tensors
        options = ctx.options
        head = options.head(hidden, weight, bias, targets)
        with exact_precision(hidden.device):
            gradients = HeadGradients(head, Wants(*ctx.needs_input_grad[:3]))
            rows = _rows_with_gradient(index, logprob_grad, entropy_grad)
            if logprob_grad is None:
                logprob_grad = torch.zeros_like(targets, dtype=head.dtype)
            buffer = logits_buffer(head, rows.numel(), options.chunk_tokens, options.rows)
            grads = (None if grad is None else grad[rows] for grad in (logprob_grad, entropy_grad))
            add_gradients(gradients, rows, *grads, buffer, options.rows)
        finished = zip(gradients.finish(), (hidden, weight, bias))
        return (*(None if g is None else g.to(t.dtype).view(t.shape) for g, t in finished), *[None] * 3)


def _rows_with_gradient(index: Tensor, *gradients: Tensor | None) -> Tensor:
    """The part of `index` where any incoming gradient is not 0."""
    wanted = torch.zeros_like(index, dtype=torch.bool)
    for gradient in gradients:
        if gradient is not None:
            wanted |= gradient[index] != 0
    return keep_where(index, wanted, read_back(wanted.sum()))
