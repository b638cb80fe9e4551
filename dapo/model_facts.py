"""What a model's configuration says of it, and transformers does not always heed."""

from __future__ import annotations

from transformers import PreTrainedModel


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


def heed_softcap(model: PreTrainedModel) -> PreTrainedModel:
    """Returns the model with an attention that caps its scores where the model's do (Gemma 2): SDPA, which
    transformers chooses, silently leaves that out, and whatever else runs the model would not."""
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None) and config._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")
    return model
