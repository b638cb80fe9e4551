"""The head on a chunk of tokens: logits into one reused buffer, and gradients out of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .backends import TorchRows
from .gemm import (
    TILE_BYTES,
    accumulation_dtype,
    add_weight_grad_gemm,
    gemm_dtype,
    hidden_grad_gemm,
    logits_gemm,
)
from .row_layout import empty_rows, padded_width

if TYPE_CHECKING:
    from .vocab_parallel import VocabShard

CPU_WORKSPACE_BYTES = 256 * 2**20
GPU_WORKSPACE_BYTES = 2**30
GPU_CHUNK_TOKENS = 4096
"""The least a chunk has on a GPU: with fewer tokens the weight gradient's read and write of `[V, H]` fp32
costs as much as its product. Budgets are constants: were they free memory, the bits would change with it."""


class Wants(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool
    bias: bool


class Head(NamedTuple):
    """The head and the flat tokens it is applied to."""

    hidden: Tensor  # [N, H], or [..., H] where that would be a copy
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    targets: Tensor  # [N]
    shard: VocabShard | None = None
    """Set where `weight` and `bias` are this rank's rows of the vocabulary."""
    complete_hidden_grad: bool = True
    """Sum the hidden gradient over the shards."""

    @property
    def vocab_size(self) -> int:
        return self.weight.shape[0] if self.shard is None else self.shard.vocab_size

    def hidden_rows(self, index: Tensor) -> Tensor:
        """`[n, H]` of the tokens at flat `index` `[n]`."""
        if self.hidden.dim() == 2:
            return self.hidden.index_select(0, index)
        return self.hidden[torch.unravel_index(index, self.hidden.shape[:-1])]

    @property
    def dtype(self) -> torch.dtype:
        """Of logits and of sums."""
        return accumulation_dtype(self.hidden, self.weight)

    @property
    def gemm_dtype(self) -> torch.dtype:
        return gemm_dtype(self.hidden, self.weight)


def flat_hidden(hidden: Tensor) -> Tensor:
    """`[..., H]` as `[N, H]` if that takes no copy (a shifted `hidden[:, :-1]` would), else as it is."""
    try:
        return hidden.view(-1, hidden.shape[-1])
    except RuntimeError:
        return hidden


class Chunk(NamedTuple):
    """Some of the tokens at an index, and their logits."""

    part: slice
    """Where in the index they stand."""
    index: Tensor  # [c] which of the N tokens
    targets: Tensor  # [c]
    hidden: Tensor  # [c, H] in the GEMM dtype
    logits: Tensor  # [c, V] a view of the buffer: the next chunk overwrites it


def logits_buffer(head: Head, num_tokens: int, chunk_tokens: int | None, rows: TorchRows) -> Tensor:
    """`[chunk, V]`, a call's one large allocation: as many tokens as fit the budget, or `chunk_tokens`."""
    if chunk_tokens is None:
        chunk_tokens = _tokens_in_budget(head, rows.copy_bytes)
    chunk_tokens = min(chunk_tokens, num_tokens)
    return empty_rows(chunk_tokens, head.weight.shape[0], dtype=head.dtype, device=head.hidden.device)


def _tokens_in_budget(head: Head, copy_bytes: int) -> int:
    """How many tokens' logits, hidden states and hidden gradients fit beside a widened tile of the weight."""
    vocab, hidden_size = head.weight.shape
    logits_bytes = padded_width(vocab) * head.dtype.itemsize
    token_bytes = logits_bytes + vocab * copy_bytes
    token_bytes += hidden_size * (head.gemm_dtype.itemsize + head.dtype.itemsize)
    budget, least = CPU_WORKSPACE_BYTES, 1
    if head.hidden.device.type != "cpu":
        budget, least = max(GPU_WORKSPACE_BYTES, GPU_CHUNK_TOKENS * logits_bytes), GPU_CHUNK_TOKENS
    if head.weight.dtype != head.gemm_dtype:
        budget -= TILE_BYTES
    return max(least, budget // token_bytes)


def head_chunks(head: Head, index: Tensor, buffer: Tensor, boundary: int = 0) -> Iterator[Chunk]:
    """Applies the head to the tokens at `index` `[n]`, as many at a time as the buffer has rows. No chunk
    reaches across `boundary`."""
    for first, last in ((0, boundary), (boundary, index.numel())):
        for start in range(first, last, buffer.shape[0] or 1):
            part = slice(start, min(start + buffer.shape[0], last))
            rows = index[part]
            hidden = head.hidden_rows(rows).to(head.gemm_dtype)
            logits = buffer[: rows.numel()]
            logits_gemm(hidden, head.weight, head.bias, out=logits)
            yield Chunk(part, rows, head.targets[rows], hidden, logits)


class HeadGradients:
    """Accumulates the gradients of hidden `[N, H]`, weight `[V, H]` and bias `[V]` over chunks; those that
    are not wanted cost nothing and stay None."""

    def __init__(self, head: Head, wants: Wants) -> None:
        self.head, self.wants = head, wants
        self.hidden = self.weight = self.bias = None
        if wants.hidden:
            # In fp16 the gradient stays fp32 until the incoming scale and the denominator are in it.
            kept = torch.float32 if head.hidden.dtype == torch.float16 else head.hidden.dtype
            self.hidden = head.hidden.new_zeros((*head.targets.shape, head.hidden.shape[-1]), dtype=kept)

    def add(self, chunk: Chunk, dlogits: Tensor) -> None:
        """Adds a chunk, whose gradient of the logits is `[c, V]` in the GEMM dtype."""
        dtype = self.head.dtype
        if self.wants.hidden:
            rows = hidden_grad_gemm(dlogits, self.head.weight, dtype)
            if self.head.shard is not None and self.head.complete_hidden_grad:
                rows = self.head.shard.sum_(rows)
            self.hidden.index_copy_(0, chunk.index, rows.to(self.hidden.dtype))
        if self.wants.weight:
            self.weight = add_weight_grad_gemm(self.weight, dlogits, chunk.hidden, dtype)
        if self.wants.bias:
            total = dlogits.sum(0, dtype=dtype)
            self.bias = total if self.bias is None else self.bias.add_(total)

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The sums; zeros where there was no chunk."""
        if self.wants.weight and self.weight is None:
            self.weight = torch.zeros_like(self.head.weight, dtype=self.head.dtype)
        if self.wants.bias and self.bias is None:
            self.bias = torch.zeros_like(self.head.bias, dtype=self.head.dtype)
        return self.hidden, self.weight, self.bias


def add_gradients(
    gradients: HeadGradients,
    index: Tensor,  # [n]
    logprob_grad: Tensor,  # [n]
    entropy_grad: Tensor | None,  # [n]
    buffer: Tensor,
    rows: TorchRows,
) -> None:
    """Makes the logits of the tokens at `index` once more, and adds the gradients that follow from those of
    their log-probs and entropies: 3u where the first pass could not know them."""
    for chunk in head_chunks(gradients.head, index, buffer):
        statistics = rows.statistics(chunk.logits, chunk.targets)
        grads = [None if grad is None else grad[chunk.part] for grad in (logprob_grad, entropy_grad)]
        gradients.add(chunk, rows.gradient(chunk.logits, chunk.targets, statistics, *grads))
