"""The frozen model that the KL term holds the policy to."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from .config import ModelConfig
from .errors import UserError, first_line
from .model import Policy, verify_head
from .model_facts import heed_softcap


def load_reference(config: ModelConfig, policy: Policy) -> Policy:
    """The model of `reference_path`, or of `path`, frozen, on the policy's device and in its dtype.

    Loaded anew rather than copied from the policy, which may already have been trained or sharded.

    Raises:
        UserError: when it cannot be loaded, or its vocabulary is not the policy's.
    """
    key = "path" if config.reference_path is None else "reference_path"
    path = getattr(config, key)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, config.dtype))
    except Exception as error:  # whatever is wrong with the folder, only its owner can mend it
        raise UserError(
            f"model.{key} {path}: no reference model could be loaded; it needs config.json and safetensors "
            f"of a causal language model ({first_line(error)})"
        ) from None
    ours, theirs = (m.get_output_embeddings().weight.shape[0] for m in (policy.model, model))
    if ours != theirs:
        raise UserError(
            f"model.{key} {path}: the reference has a vocabulary of {theirs} tokens, the policy one of "
            f"{ours}; both must have the same"
        )
    model = heed_softcap(model).to(next(policy.parameters()).device).requires_grad_(False).eval()
    reference = Policy(model, packing=None if policy.packed else False)
    verify_head(reference)
    return reference
