"""The policy: load a causal language model, and compute its loss from hidden states inside one forward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from dapo_kernels import PolicyLossConfig, PolicyLossOutput, fused_linear_policy_loss

from .attention import boundaries, packed_forward
from .batching import MicroBatch, TrainSample, make_micro_batches
from .errors import UserError
from .model_facts import head_options, max_positions
from .packing_trial import can_pack

if TYPE_CHECKING:
    from .parallel.context import ContextGroup


class Policy(nn.Module):
    """A causal language model whose forward returns the policy loss.

    The head's logits never exist as a whole: hidden states go straight into the fused loss.

    Args:
        packing: `train.packing`. Unless False, the model's attention is switched to one that keeps packed
            sequences apart, and `packed` says whether it does.

    Raises:
        UserError: `packing` is True, and the model does not keep packed sequences apart.
    """

    def __init__(self, model: PreTrainedModel, packing: bool | None = False) -> None:
        super().__init__()
        self.model = model
        self.head_options = head_options(model)
        self.context: ContextGroup | None = None
        """The processes that share each packed row; `parallel.share_sequences` sets it."""
        self.offload_activations = False
        """Whether what checkpointed blocks keep for backward waits in host memory."""
        self.packed = packing is not False and can_pack(self, required=bool(packing))

    def forward(
        self,
        batch: MicroBatch,
        config: PolicyLossConfig,
        denominator: float | None = None,
    ) -> PolicyLossOutput:
        """Where processes share the row, all return the same; the mean of their gradients is that of the
        loss. They need the row's `denominator`, and cannot know a whole sequence's mean."""
        if self.context is None:
            hidden = self._hidden(batch)[:, :-1]  # [B, T-1, H]: position t predicts token t + 1
            return self._loss(hidden, batch, config, denominator)
        if denominator is None or config.reduction == "seq-mean-token-mean" or config.ratio_level != "token":
            raise ValueError(
                "with a context group give a denominator, and neither reduction='seq-mean-token-mean' nor "
                f"ratio_level='sequence'; got {denominator}, {config.reduction!r} and {config.ratio_level!r}"
            )
        own = self.context.stretch(batch)
        # Over all ranks gradients are averaged: each loss is for c times its part of the row.
        output = self._loss(self._hidden(own), own, config, denominator / self.context.size)
        return self.context.whole(output, batch.targets.shape[1])

    def _loss(
        self,
        hidden: Tensor,  # as many positions as `batch` has targets
        batch: MicroBatch,
        config: PolicyLossConfig,
        denominator: float | None,
    ) -> PolicyLossOutput:
        head = self.model.get_output_embeddings()
        return fused_linear_policy_loss(
            hidden,
            head.weight,
            batch.targets,
            batch.advantages,
            batch.mask,
            batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs,
            token_weights=batch.token_weights,
            bias=getattr(head, "bias", None),
            denominator=denominator,
            sequence_ids=batch.sequence_ids,
            config=config,
        )

    def _hidden(self, batch: MicroBatch) -> Tensor:
        """Last hidden states, `[B, T, H]`."""
        with self._kept_for_backward():
            return self._decode(batch)

    def _kept_for_backward(self) -> AbstractContextManager:
        if not self.offload_activations:
            return nullcontext()
        # No GPU has run this yet.
        return torch.autograd.graph.save_on_cpu(pin_memory=self.model.device.type == "cuda")

    def _decode(self, batch: MicroBatch) -> Tensor:
        decoder = self.model.get_decoder()
        if batch.lengths is None:
            # Sequences are padded on the right: causal attention alone keeps padding out of every token's
            # sight, so no attention mask is needed.
            return decoder(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        shared = {} if self.context is None else {"context": self.context}
        with packed_forward():
            return decoder(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                **boundaries(self.model, batch.lengths),
                **shared,
            ).last_hidden_state


@torch.no_grad()
def verify_head(policy: Policy) -> None:
    """Raises `UserError` unless the policy's log-probs are those of the model's own logits: a guard against
    models that do to their logits what `head_options` does not know."""
    model = policy.model
    text_config = model.config.get_text_config()
    length = min(8, max_positions(model) or 8)
    ids = torch.arange(3, 3 + length, device=model.device).clamp(max=text_config.vocab_size - 1)
    sample = TrainSample(ids[:1].tolist(), ids[1:].tolist(), [0.0] * (length - 1), 1.0, fresh=True)
    (batch,) = make_micro_batches([sample], len(ids), model.device)
    (ours,) = batch.split(policy(batch, PolicyLossConfig(**policy.head_options)).logprobs)
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
    theirs = logits.log_softmax(-1).gather(1, ids[1:, None]).squeeze(1)
    difference = (ours - theirs).abs().max().item()
    if not difference < (1e-3 if model.dtype == torch.float32 else 0.2):
        raise UserError(
            f"{type(model).__name__} changes its logits in a way that this trainer does not know: log-probs "
            f"differ by {difference:.3g}"
        )


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Recomputes activations in backward. transformers does so in training mode only, where dropout, which
    would make the ratio to the sampling policy noise, has to be off by hand."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
