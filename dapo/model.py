"""The policy: load a causal language model, and compute its loss from hidden states inside one forward."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from dapo_kernels import PolicyLossConfig, PolicyLossOutput, fused_linear_policy_loss

from .batching import MicroBatch, TrainSample, make_micro_batches
from .config import ModelConfig
from .errors import UserError


class Policy(nn.Module):
    """A causal language model whose forward returns the policy loss.

    The head's logits never exist as a whole: hidden states go straight into the fused loss.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.head_options = head_options(model)

    def forward(
        self,
        batch: MicroBatch,
        config: PolicyLossConfig,
        denominator: float | None = None,
    ) -> PolicyLossOutput:
        # Sequences are padded on the right: causal attention alone keeps padding out of every token's
        # sight, so no attention mask is needed.
        hidden = self.model.get_decoder()(input_ids=batch.input_ids, use_cache=False).last_hidden_state
        head = self.model.get_output_embeddings()
        return fused_linear_policy_loss(
            hidden[:, :-1],  # [B, T-1, H]: position t predicts token t + 1
            head.weight,
            batch.targets,
            batch.advantages,
            batch.mask,
            batch.old_logprobs,
            bias=getattr(head, "bias", None),
            denominator=denominator,
            config=config,
        )


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


@dataclass(frozen=True)
class Loaded:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: list[int]


def load_model(config: ModelConfig) -> Loaded:
    """The model and its tokenizer. Raises `UserError` when the folder lacks either."""
    path = Path(config.path)
    looks_local = path.exists() or config.path.startswith((".", "/", "~")) or config.path.count("/") != 1
    if looks_local and not path.is_dir():
        raise UserError(
            f"model.path {config.path} is not a folder; `python -m dapo.smollm2 {config.path}` puts a small "
            "model there, any transformers model folder or hub name works"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.path)
    except Exception as error:  # whatever is wrong with the folder, only its owner can mend it
        raise UserError(
            f"model.path {config.path}: no tokenizer could be loaded; put the model's tokenizer files into "
            f"that folder ({_first_line(error)})"
        ) from None
    try:
        model = AutoModelForCausalLM.from_pretrained(config.path, dtype=getattr(torch, config.dtype))
    except Exception as error:
        raise UserError(
            f"model.path {config.path}: no model could be loaded; it needs config.json and safetensors of a "
            f"causal language model ({_first_line(error)})"
        ) from None
    return Loaded(model, tokenizer, _eos_token_ids(model, tokenizer))


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
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


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Writes a transformers folder, whole or not at all."""
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
