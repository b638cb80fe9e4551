"""Models that cap their attention scores (Gemma 2) do so in rollouts and training, whatever the attention."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import build_tiny_model
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from dapo.config import ModelConfig
from dapo.model import Policy
from dapo.model_files import load_model
from dapo.parallel import empty_model
from dapo.reference import load_reference


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = build_tiny_model(tmp_path_factory.mktemp("gemma2"))  # for its tokenizer
    config = Gemma2Config(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        attn_logit_softcapping=0.5,
        final_logit_softcapping=None,
        eos_token_id=1,
    )
    torch.manual_seed(0)
    Gemma2ForCausalLM(config).save_pretrained(folder)
    return folder


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 20)[None], use_cache=False).logits


def test_scores_are_capped_wherever_a_model_is_loaded(folder: Path) -> None:
    want = logits(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"))
    silent = logits(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa"))
    assert (silent - want).abs().max() > 0.1  # what SDPA leaves out
    loaded = load_model(ModelConfig(path=str(folder))).model
    torch.testing.assert_close(logits(loaded), want)
    reference = load_reference(ModelConfig(path=str(folder)), Policy(loaded))
    torch.testing.assert_close(logits(reference.model), want)
    assert empty_model(folder, torch.float32).config._attn_implementation == "eager"
