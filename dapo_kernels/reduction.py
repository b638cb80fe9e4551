"""From token losses to one number: the weight of each token, and what the sum is divided by."""

from __future__ import annotations

import torch
from torch import Tensor

from .config import PolicyLossConfig
from .sequences import count_by_sequence, dense_sequence_ids


def token_reduction(
    mask: Tensor,  # [N] bool
    sequence_ids: Tensor | None,  # [N] int64
    denominator: Tensor | float | None,
    dtype: torch.dtype,
    config: PolicyLossConfig,
) -> tuple[Tensor | None, Tensor | float]:
    """Returns the weight of every token (`[N]`, None: all 1) and the denominator.

    loss = sum_i weight_i * token_loss_i / denominator
    """
    by_sequence = config.reduction.startswith("seq-mean")
    weights, count = None, None
    if by_sequence:
        dense = dense_sequence_ids(sequence_ids)[1]
        lengths = count_by_sequence(mask, dense)
        count = (lengths > 0).sum()
        if config.reduction == "seq-mean-token-mean":
            weights = lengths[dense].clamp(min=1).to(dtype).reciprocal()
    if denominator is None:
        denominator = (count if by_sequence else mask.sum()).clamp(min=1)
    elif isinstance(denominator, Tensor):
        # A count of its own (the caller may go on adding to theirs), and 0 tokens make a loss of 0, not NaN.
        denominator = denominator.detach().to(dtype)
        denominator = torch.where(denominator == 0, 1, denominator)
    return weights, denominator


def selected_weights(
    weights: Tensor | None,  # [N]
    denominator: Tensor | float,
    index: Tensor,  # [n]
    gemm_dtype: torch.dtype,
) -> tuple[Tensor, Tensor | float | None]:
    """What the losses and gradients of the selected tokens are multiplied with before the GEMMs `[n]`, and
    what is divided by after them (None: nothing).

    fp16 would flush 1 / denominator to 0, and 1 / length too: there the largest weight becomes 1.
    """
    dtype = torch.float64 if gemm_dtype == torch.float64 else torch.float32
    ones = torch.ones(index.shape, dtype=dtype, device=index.device)
    chosen = ones if weights is None else weights[index]
    if gemm_dtype != torch.float16:
        return chosen / denominator, None
    largest = torch.cat([chosen, chosen.new_full((1,), torch.finfo(dtype).tiny)]).amax()
    return chosen / largest, denominator / largest
