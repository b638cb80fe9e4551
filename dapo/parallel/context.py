"""Sequence parallelism: the tokens of one packed row over several processes (`parallel.context`).

DeepSpeed-Ulysses (arXiv 2309.14509). Every process of a context group holds the same micro-batch and runs the
decoder on its own stretch of the row. Only attention needs the other stretches: an all-to-all gives each
process all tokens of some of the heads before it, and another one its own tokens with all heads after it.

Tested with gloo on CPUs; no GPU has run it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from dapo_kernels import PolicyLossOutput
from dapo_kernels.output import metrics_from_sums

from ..attention import PACKED_SDPA
from ..batching import MicroBatch
from ..errors import UserError
from .world import World

if TYPE_CHECKING:
    from ..model import Policy


def share_sequences(policy: Policy, world: World) -> Policy:
    """Has the policy's forwards spread each row over the world's context group, from now on, in place; with
    `parallel.context: 1` it stays as it is. All processes of a group then call it with the same batches.

    Raises:
        UserError: the model's sequences cannot be shared by so many processes.
    """
    if world.context == 1:
        return policy
    name, config = type(policy.model).__name__, policy.model.config.get_text_config()
    if not policy.packed:
        raise UserError(
            f"parallel.context is {world.context}, which takes packed rows, and {name} runs on padded ones "
            "(train.packing is false, or the model cannot be packed: see the log): set parallel.context to 1"
        )
    heads = config.num_attention_heads
    check_heads(heads, getattr(config, "num_key_value_heads", None) or heads, world.context)
    if varying := _varying_rope(config):
        raise UserError(
            f"parallel.context is {world.context}, but {name} has {varying} RoPE, whose frequencies follow "
            "the largest position at hand, and processes would differ in it: set parallel.context to 1"
        )
    if config._attn_implementation != PACKED_SDPA:  # flash-attn would not exchange heads; no GPU has run this
        policy.model.set_attn_implementation(PACKED_SDPA)
    policy.context = ContextGroup(world.context_group)
    return policy


def check_heads(heads: int, key_value_heads: int, context: int) -> None:
    """Raises `UserError` unless attention's heads can be dealt to `context` processes: each gets equally many
    query heads, with the key and value heads that those use."""
    if heads % context or (key_value_heads % context and context % key_value_heads):
        raise UserError(
            f"parallel.context is {context}, and the model has {heads} query heads and {key_value_heads} key "
            "and value heads: it must divide the query heads, and divide the key and value heads or be a "
            "multiple of them"
        )


def _varying_rope(config) -> str | None:
    """The type of a rotary embedding that looks at the largest position of its input, if there is one."""
    given = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [value for value in given.values() if isinstance(value, dict)]
    types = [str(each.get("rope_type")) for each in (given, *by_layer_type)]
    return next((kind for kind in types if "dynamic" in kind or kind == "longrope"), None)


class ContextGroup:
    """The processes that share a row of T tokens: c of them, rank r with the r-th of c equal stretches.

    Args:
        group: the processes; None: all of them.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def stretch(self, batch: MicroBatch) -> MicroBatch:
        """This process's n = ceil(T / c) tokens of a packed row, every tensor `[1, n]`.

        Targets get an entry for the row's last token, and the row is padded to c n tokens; neither is in the
        loss. `lengths` stay those of the whole row, the padding as a sequence of its own.
        """
        if batch.lengths is None:
            raise UserError(f"parallel.context is {self.size}, which takes packed rows, not padded ones")
        tokens = batch.input_ids.shape[1]
        n = -(-tokens // self.size)

        def own(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            padded = pad(values, (0, self.size * n - values.shape[1]))  # [1, c n]
            return padded[:, self.rank * n : (self.rank + 1) * n]

        padding = self.size * n - tokens
        return replace(
            batch,
            input_ids=own(batch.input_ids),
            targets=own(batch.targets),
            mask=own(batch.mask),
            advantages=own(batch.advantages),
            old_logprobs=own(batch.old_logprobs),
            ref_logprobs=own(batch.ref_logprobs),
            token_weights=own(batch.token_weights),
            lengths=(*batch.lengths, padding) if padding else batch.lengths,
            position_ids=own(batch.position_ids),
            sequence_ids=own(batch.sequence_ids),
        )

    def whole(self, output: PolicyLossOutput, targets: int) -> PolicyLossOutput:
        """The outputs of all stretches as that of the row, the same on every process.

        Values by token become `[1, targets]`, the loss the mean of the processes' losses, `sums` their sums.
        Only gradients stay apart: that of the loss is this process's own, so that their mean is the row's.
        """
        by_token = torch.stack([output.logprobs, output.entropy, output.token_loss])  # [3, 1, n]
        row = self._gathered(by_token).movedim(0, -2).flatten(-2)[..., :targets]  # [3, 1, targets]
        numbers = torch.stack([output.loss.detach(), *output.sums.values()]).double()  # [1 + sums]
        numbers = self._gathered(numbers)  # [c, 1 + sums]
        sums = dict(zip(output.sums, numbers[:, 1:].sum(0).to(output.loss.dtype)))
        largest = 1 + list(sums).index("ratio_max")
        sums["ratio_max"] = numbers[:, largest].amax().to(output.loss.dtype)
        mean = numbers[:, 0].mean().to(output.loss.dtype)
        return PolicyLossOutput(_WithValue.apply(output.loss, mean), *row, metrics_from_sums(sums), sums)

    def _gathered(self, values: Tensor) -> Tensor:
        """`[c, ...]` the values `[...]` of every process."""
        received = values.new_empty((self.size, *values.shape))
        dist.all_gather(list(received), values.contiguous(), group=self.group)
        return received

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Before attention: `[1, heads, n, D]` each to `[1, heads / c, c n, D]`, differentiably.

        With fewer key and value heads than processes each is sent to all processes whose query heads use it.
        """
        check_heads(query.shape[1], key.shape[1], self.size)
        if key.shape[1] % self.size:
            copies = self.size // key.shape[1]
            key, value = (each.repeat_interleave(copies, dim=1) for each in (key, value))
        parts = [
            each[0].unflatten(0, (self.size, -1)) for each in (query, key, value)
        ]  # [c, heads / c, n, D]
        sent = torch.cat([part.flatten(1) for part in parts], dim=1)  # one collective for all three
        received = _AllToAll.apply(sent, self.group).split([part[0].numel() for part in parts], dim=1)
        return tuple(
            values.view(part.shape).transpose(0, 1).flatten(1, 2)[None]
            for values, part in zip(received, parts)
        )

    def to_tokens(self, output: Tensor) -> Tensor:
        """After attention: `[1, c n, heads / c, D]` to `[1, n, heads, D]`, differentiably."""
        sent = output[0].unflatten(0, (self.size, -1))  # [c, n, heads / c, D]
        received = _AllToAll.apply(sent, self.group)  # the same shape, c over blocks of heads
        return received.transpose(0, 1).flatten(1, 2)[None]


class _AllToAll(torch.autograd.Function):
    """`[c, ...]`: entry j goes to process j, entry j of the result came from it. It is its own inverse, and
    so is its backward."""

    @staticmethod
    def forward(ctx, values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        return _all_to_all(values, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.group), None


def _all_to_all(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    values = values.contiguous()
    received = torch.empty_like(values)
    dist.all_to_all_single(received, values, group=group)
    return received


class _WithValue(torch.autograd.Function):
    """Shows one number and has the gradient of another."""

    @staticmethod
    def forward(ctx, loss: Tensor, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
