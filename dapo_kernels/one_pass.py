"""The pass over the chunks: head, log-probs, objective and both gradients.

For a token-level objective `d loss / d logp` of a token depends on its own log-prob and on numbers known
beforehand. So once a chunk's logits exist, everything is finished before the next chunk:

    for each chunk: logits GEMM -> row statistics -> objective -> dlogits in place
                    -> hidden-gradient GEMM, weight-gradient GEMM

With u = 2 N H V FLOPs this costs `g + 2f` u (g: share of tokens scored, f: share that carries gradient),
one chunk of logits in memory, and no recomputation in backward, which only scales what is already there.
With one ratio a sequence, off policy, a token's coefficient waits for its whole sequence: then the logits of
the tokens that carry gradient are made a second time (`g + 3f`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .backends import LossRows, TorchRows
from .coefficients import SequenceCoefficients, token_coefficients
from .head import Chunk, Head, HeadGradients, Wants, add_gradients, head_chunks, logits_buffer
from .objective import TokenInputs, TokenTerms, token_objective
from .selection import Selection


class Scored(NamedTuple):
    """What the pass leaves; per-token fields are `[n]`, in the order of the selection."""

    logprobs: Tensor
    entropy: Tensor
    terms: TokenTerms
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None]
    """Of hidden `[N, H]`, weight `[V, H]`, bias `[V]`; of the token losses' sum under `weights`."""
    forgotten: Tensor | None = None
    """`[n]` bool, see `without`."""

    def without(self, forgotten: Tensor) -> Scored:
        """As if the tokens at `forgotten` `[n]` bool had not been scored: they have no gradient anyway."""

        def cleared(column: Tensor | None) -> Tensor | None:
            return None if column is None else column.masked_fill(forgotten, 0)

        return self._replace(
            logprobs=cleared(self.logprobs),
            entropy=cleared(self.entropy),
            terms=TokenTerms(*map(cleared, self.terms)),
            forgotten=forgotten,
        )


def score_tokens(
    head: Head,
    inputs: TokenInputs,  # [N] each
    weights: Tensor,  # [n] of each selected token in the sum
    selection: Selection,
    wants: Wants,
    chunk_tokens: int | None,
    rows: TorchRows,
) -> Scored:
    """First the tokens that carry gradient, then those that are only scored."""
    num_active = selection.num_active if any(wants) else 0
    gradients = HeadGradients(head, wants)
    by_sequence = rows.config.ratio_level == "sequence"
    if not by_sequence:
        inputs = inputs._replace(sequence_ids=None)  # the reduction alone had to know
    inputs = inputs.select(selection.index)
    buffer = logits_buffer(head, selection.index.numel(), chunk_tokens, rows)
    known = SequenceCoefficients(inputs, weights, rows.config) if by_sequence else None
    columns = [torch.empty_like(weights) for _ in range(2 if by_sequence else 2 + len(TokenTerms._fields))]
    for chunk in head_chunks(head, selection.index, buffer, num_active):
        active = chunk.part.start < num_active
        if by_sequence:
            part = _score_by_sequence(chunk, known, active, rows)
        else:
            own, share = inputs.select(chunk.part), weights[chunk.part]
            part = rows.loss(chunk.logits, chunk.targets, own, share, active)
        if part.dlogits is not None:
            gradients.add(chunk, part.dlogits)
        for column, values in zip(columns, (part.logprobs, part.entropy, *(part.terms or ()))):
            if values is not None:
                column[chunk.part] = values

    logprobs, entropy, *terms = columns
    if num_active and by_sequence and not known.available:
        _, *grads = token_coefficients(logprobs, entropy, inputs, weights, rows.config)
        grads = (None if grad is None else grad[:num_active] for grad in grads)
        add_gradients(gradients, selection.index[:num_active], *grads, buffer, rows)
    if by_sequence:
        terms = token_objective(logprobs, entropy, inputs, rows.config)
    else:
        terms = TokenTerms(*terms[:3], None if inputs.ref_logprobs is None else terms[3])
    return Scored(logprobs, entropy, terms, gradients.finish())


def _score_by_sequence(chunk: Chunk, known: SequenceCoefficients, active: bool, rows: TorchRows) -> LossRows:
    """A chunk under one ratio a sequence: its gradient if that can be known by now, its terms later."""
    statistics = rows.statistics(chunk.logits, chunk.targets)
    dlogits = None
    if active and known.available:
        grads = known(chunk.part, statistics.logprobs, statistics.entropy)
        dlogits = rows.gradient(chunk.logits, chunk.targets, statistics, *grads)
    return LossRows(statistics.logprobs, statistics.entropy, None, dlogits)
