"""Trackers beside metrics.jsonl: what W&B is told, and that nothing they do stops a run or its record."""

from __future__ import annotations

import json
import logging
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny import tiny_config, tiny_values

from dapo import metrics
from dapo.cli import main
from dapo.config import Config
from dapo.errors import UserError
from dapo.logging import RunLogger
from dapo.metrics import ModelFlops, memory_gb, mfu, peak_flops


class FakeWandB(ModuleType):
    """Records what it is told; `fails_at` names the call that raises."""

    def __init__(self, fails_at: str | None = None) -> None:
        super().__init__("wandb")
        self.fails_at, self.calls, self.options = fails_at, [], None
        self.Settings = lambda **options: options

    def init(self, **options):
        self.options = options
        self._call("init")
        return SimpleNamespace(id="abc", log=self._log, finish=lambda: self._call("finish"))

    def _log(self, values: dict, step: int) -> None:
        self._call("log", step, values)

    def _call(self, name: str, *arguments) -> None:
        self.calls.append((name, *arguments))
        if name == self.fails_at:
            raise ConnectionError("api.wandb.ai\ncannot be reached")


@pytest.fixture
def wandb(monkeypatch):
    def install(fails_at: str | None = None) -> FakeWandB:
        fake = FakeWandB(fails_at)
        monkeypatch.setitem(sys.modules, "wandb", fake)
        return fake

    return install


def make_logger(folder: Path, **overrides) -> RunLogger:
    values = {"logging.wandb": "my-project", "logging.rollouts": False}
    return RunLogger(Config.model_validate(tiny_values(folder, folder, **values | overrides)))


def log_steps(logger: RunLogger, steps=(1, 2, 3)) -> list[dict]:
    for step in steps:
        values = {"step": step, "loss": step / 2, "accuracy": math.nan, "eval_pass_at_k": None}
        logger.log_step(values)
    logger.close()
    return [json.loads(line) for line in (logger.run / "metrics.jsonl").read_text().splitlines()]


LINES = [{"step": step, "loss": step / 2, "accuracy": None, "eval_pass_at_k": None} for step in (1, 2, 3)]


def test_wandb_is_told_the_configuration_and_every_finite_number(wandb, tmp_path: Path) -> None:
    fake = wandb()
    logger = make_logger(tmp_path, **{"logging.wandb_mode": "offline", "seed": 5})
    assert log_steps(logger) == LINES
    options = fake.options
    assert (options["project"], options["mode"], options["dir"]) == ("my-project", "offline", str(logger.run))
    assert options["config"]["seed"] == 5 and options["config"] == logger.config.model_dump(mode="json")
    assert fake.calls == [
        ("init",),
        *(("log", step, {"step": step, "loss": step / 2}) for step in (1, 2, 3)),
        ("finish",),
    ]


@pytest.mark.parametrize(
    ("fails_at", "calls"),
    [("init", ["init"]), ("log", ["init", "log"]), ("finish", ["init", "log", "log", "log", "finish"])],
)
def test_a_tracker_that_raises_is_left_out_with_one_warning(
    wandb, tmp_path: Path, caplog, fails_at: str, calls: list
) -> None:
    fake = wandb(fails_at)
    with caplog.at_level(logging.WARNING):
        assert log_steps(make_logger(tmp_path)) == LINES
    assert [call[0] for call in fake.calls] == calls
    assert caplog.messages == [
        "Weights & Biases is left out from here on: ConnectionError: api.wandb.ai cannot be reached; "
        "metrics.jsonl has everything"
    ]


def test_one_tracker_that_raises_does_not_silence_the_other(wandb, tmp_path: Path, monkeypatch) -> None:
    written = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar), flush=lambda: None)
    writer.close = lambda: written.append("closed")
    stub = ModuleType("torch.utils.tensorboard")
    stub.SummaryWriter = lambda folder, purge_step: writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stub)
    wandb("init")
    log_steps(make_logger(tmp_path, **{"logging.tensorboard": True}), steps=(7,))
    assert written == [("step", 7, 7), ("loss", 3.5, 7), "closed"]


@pytest.mark.parametrize(
    ("key", "module", "off"),
    [("wandb", "wandb", "null"), ("tensorboard", "torch.utils.tensorboard", "false")],
)
def test_a_missing_package_is_named_before_the_run_has_a_folder(
    tmp_path: Path, monkeypatch, key: str, module: str, off: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    options = {"logging.wandb": "p" if key == "wandb" else None, "logging.tensorboard": key == "tensorboard"}
    with pytest.raises(UserError) as caught:
        make_logger(tmp_path, **options)
    message = str(caught.value)
    assert message.startswith(f"logging.{key} needs the package {key} (")
    assert message.endswith(f"pip install {key}, or set logging.{key}={off}")
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_when_wandb_cannot_be_reached(wandb, tmp_path: Path, tiny_model_dir: Path) -> None:
    fake = wandb("log")
    config = tiny_config(tmp_path, tiny_model_dir, **{"logging.wandb": "p", "train.save_model": False})
    assert main(["train", str(config)]) == 0
    assert [call[0] for call in fake.calls] == ["init", "log"]
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_of_known_devices(name: str, tflops: float | None) -> None:
    assert peak_flops(name) == (None if tflops is None else tflops * 1e12)


@pytest.mark.parametrize("tied", [False, True])
def test_model_flops_are_those_of_the_palm_formula(tied: bool) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 50, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 6}
    flops = ModelFlops.of(LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied)))
    layer = 8 * 12 + 2 * 8 * 6 + 12 * 8 + 3 * 8 * 16 + 2 * 8  # q, k and v, o, MLP, norms
    parameters = 3 * layer + 8 + 50 * 8  # and the last norm, the head
    assert flops == ModelFlops(parameters, 3, 12)
    # Half of a [n, n] product of width 12 each for scores and values, 2 FLOPs a multiply-add, in 3 layers.
    assert flops.forward([5, 7]) == 2 * parameters * 12 + 3 * 2 * 12 * (5**2 + 7**2)


def test_mfu_needs_a_known_device(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert mfu(1e15, 2.0) == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert mfu(1e15, 2.0) == {"mfu": pytest.approx(1e15 / 2 / 989e12)}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    assert mfu(1e15, 2.0) == {}


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_is_what_is_held_now(monkeypatch) -> None:
    monkeypatch.setattr(metrics, "_gigabytes", lambda size: size / 1e9)
    before = memory_gb()
    block = torch.ones(50_000_000)
    assert 0.15 < memory_gb() - before < 0.25
    del block
    assert memory_gb() - before < 0.1
