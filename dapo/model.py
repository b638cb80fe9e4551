"""The policy: load a causal language model, and compute its loss from hidden states inside one forward."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dapo_kernels import PolicyLossConfig, PolicyLossOutput, fused_linear_policy_loss

from .attention import PACKED_SDPA, NotPackable, boundaries, packed_forward, use_packed_attention
from .batching import MicroBatch, TrainSample, make_micro_batches
from .config import ModelConfig
from .errors import UserError, first_line

if TYPE_CHECKING:
    from .parallel.context import ContextGroup

logger = logging.getLogger(__name__)


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


def head_options(model: PreTrainedModel) -> dict[str, float]:
    """What a model does to its logits, as options of `PolicyLossConfig`."""
    config = model.config.get_text_config()
    options = {}
    for name in ("final_logit_softcapping", "logits_soft_cap"):  # Gemma, RecurrentGemma
        if getattr(config, name, None):
            options["logit_softcap"] = float(getattr(config, name))
    for name in ("logit_scale", "lm_head_multiplier"):  # Cohere, Falcon-H1
        if getattr(config, name, None):
            options["logit_scale"] = float(getattr(config, name))
    if getattr(config, "logits_scaling", None):  # HyperCLOVA X multiplies by it, Granite divides
        scaling = float(config.logits_scaling)
        options["logit_scale"] = scaling if config.model_type == "hyperclovax" else 1 / scaling
    return options


def max_positions(model: PreTrainedModel) -> int | None:
    """Tokens that a sequence may have, where the model says."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return positions if positions and positions > 1 else None


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


@dataclass(frozen=True)
class Loaded:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: list[int]


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Raises `UserError` when the folder lacks one, or there is no folder."""
    path = Path(config.path)
    looks_local = path.exists() or config.path.startswith((".", "/", "~")) or config.path.count("/") != 1
    if looks_local and not path.is_dir():
        raise UserError(
            f"model.path {config.path} is not a folder; `python -m dapo.smollm2 {config.path}` puts a small "
            "model there, any transformers model folder or hub name works"
        )
    try:
        return AutoTokenizer.from_pretrained(config.path)
    except Exception as error:  # whatever is wrong with the folder, only its owner can mend it
        raise UserError(
            f"model.path {config.path}: no tokenizer could be loaded; put the model's tokenizer files into "
            f"that folder ({first_line(error)})"
        ) from None


def load_model(config: ModelConfig) -> Loaded:
    """The model and its tokenizer. Raises `UserError` when the folder lacks either."""
    tokenizer = load_tokenizer(config)
    try:
        model = AutoModelForCausalLM.from_pretrained(config.path, dtype=getattr(torch, config.dtype))
    except Exception as error:
        raise UserError(
            f"model.path {config.path}: no model could be loaded; it needs config.json and safetensors of a "
            f"causal language model ({first_line(error)})"
        ) from None
    return Loaded(model, tokenizer, eos_token_ids(model, tokenizer))


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What ends a response. Raises `UserError` when nothing does."""
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    ids = [i for i in dict.fromkeys([tokenizer.eos_token_id, *stops]) if i is not None]
    if not ids:
        raise UserError("the model names no EOS token: set eos_token_id in its generation_config.json")
    return ids


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


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Writes a transformers folder, whole or not at all; the weights of `state_dict` where the model holds
    shards."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial, state_dict=state_dict)
        tokenizer.save_pretrained(partial)
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
