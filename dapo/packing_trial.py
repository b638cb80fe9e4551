"""Whether a model keeps packed sequences apart, found out by trying."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dapo_kernels import PolicyLossConfig

from .attention import PACKED_SDPA, NotPackable, packed_forward, use_packed_attention
from .batching import TrainSample, make_micro_batches
from .errors import UserError, first_line
from .model_facts import max_positions

if TYPE_CHECKING:
    from .model import Policy

logger = logging.getLogger(__name__)


def can_pack(policy: Policy, required: bool) -> bool:
    """Whether the model keeps packed sequences apart, by trying. If it does, its attention stays switched to
    what packed rows need; if not, the log says why, or with `required` a `UserError` does."""
    config = policy.model.config.get_text_config()
    given = config._attn_implementation
    alone = _trial(policy, packed=False)
    try:
        use_packed_attention(policy.model)
        _compare(policy, alone)
        return True
    except NotPackable as error:
        reason = str(error)
    except Exception as error:  # of a decoder that does not know the arguments of packed rows
        reason = first_line(error)
    if config._attn_implementation != given:
        policy.model.set_attn_implementation(given)
    name = type(policy.model).__name__
    if required:
        raise UserError(
            f"train.packing is true, but {name} cannot be packed: {reason}; set it to null or false"
        )
    logger.warning("sequences are padded, not packed: %s cannot be packed: %s", name, reason)
    return False


def _compare(policy: Policy, alone: list[Tensor]) -> None:
    """Raises `NotPackable` unless packed log-probs are those of the sequences alone, and stay where they are
    when the first sequence changes."""
    with packed_forward() as calls:
        packed = _trial(policy, packed=True)
    if policy.model.config.get_text_config()._attn_implementation == PACKED_SDPA:
        if not calls.packed:
            raise NotPackable("its attention is never told where sequences begin")
        if lost := calls.masked_windows - calls.told_windows:
            raise NotPackable(f"its local attention over {min(lost)} tokens is in its mask alone")
    rounding = 1e-4 if policy.model.dtype in (torch.float32, torch.float64) else 0.2
    difference = (torch.cat(packed) - torch.cat(alone)).abs().max().item()
    if not difference <= rounding:
        raise NotPackable(f"log-probs in a packed row and alone differ by {difference:.3g}")
    moved = _trial(policy, packed=True, first=4)
    difference = (torch.cat(packed[1:]) - torch.cat(moved[1:])).abs().max().item()
    # In any dtype: shapes are the same, so whatever does not depend on the first sequence has the same bits.
    if not difference <= 1e-5:
        raise NotPackable(f"one sequence of a packed row moves another's log-probs by {difference:.3g}")


@torch.no_grad()
def _trial(policy: Policy, packed: bool, first: int = 3) -> list[Tensor]:
    """Log-probs of a few short sequences, in one packed row or alone; `first` chooses the first one's ids."""
    config = policy.model.config.get_text_config()
    window = getattr(config, "sliding_window", None) or 0
    longest = min(window + 4 if 0 < window < 64 else 12, max_positions(policy.model) or 12)
    samples = []
    for start, length in ((first, longest), (5, longest // 2 + 1), (7, longest)):
        ids = [(start * i + start) % config.vocab_size for i in range(1, length + 1)]
        samples.append(TrainSample(ids[:1], ids[1:], [0.0] * (length - 1), 1.0, fresh=True))
    batches = make_micro_batches(samples, 10**9 if packed else 1, policy.model.device, packed=packed)
    found: dict[int, Tensor] = {}
    for batch in batches:
        output = policy(batch, PolicyLossConfig(**policy.head_options))
        found |= {id(s): values for s, values in zip(batch.samples, batch.split(output.logprobs))}
    return [found[id(sample)] for sample in samples]
