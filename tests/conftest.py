"""Shared fixtures: tiny models, made once a session. `tiny.py` has what goes with them."""

from __future__ import annotations

import copy
import os
import signal
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches for the network
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton; test_compile.py goes without


@pytest.fixture(autouse=True)
def own_signal_handler():
    """The commands set one for SIGTERM."""
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def interpreter_like_hardware():
    """Triton's interpreter rounds to bf16 as GPUs do, and numpy keeps quiet about infs."""
    from row_cases import rounding_interpreter

    with rounding_interpreter():
        yield


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    """A random 2-layer Llama with a character tokenizer that adds no special tokens; pad is EOS."""
    from tiny import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_chat_model_dir(tmp_path_factory) -> Path:
    """The same, with a tokenizer that adds BOS by itself and a chat template that writes one too."""
    from tiny import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny_chat"), chat=True)


@pytest.fixture(scope="session")
def model_fp64(tiny_model_dir: Path):
    """The first tiny model in fp64, not to be changed."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64)


@pytest.fixture
def model(model_fp64):
    """A copy of it to train."""
    return copy.deepcopy(model_fp64)


@pytest.fixture
def make(tmp_path: Path, model):
    """An updater of `model`, with overrides of its configuration by dotted key."""
    from update_cases import make_updater

    return lambda **overrides: make_updater(tmp_path, model, **overrides)
