"""Whole runs on two processes: the same rollouts, metrics and weights as on one, whatever falls to whom."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from processes import environment, torchrun
from safetensors.torch import load_file
from tiny import of_training, tiny_config, write_jsonl

from dapo.cli import main


def launch(config: Path, *overrides: str, processes: int = 2, **options) -> subprocess.Popen:
    command = torchrun(processes, "-m", "dapo", "train", str(config), *overrides)
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), **options
    )


def finish(process: subprocess.Popen, seconds: float = 240) -> str:
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail("the processes wait for each other")
    return output


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Odd numbers of prompts and samples, so that ranks get unequal shares; three updates a step.
SETTINGS = {
    "rollout.prompts_per_step": 3,
    "rollout.prompts_per_generation": 5,
    "train.mini_batch_prompts": 1,
    "train.steps": 3,
    "train.max_tokens_per_micro_batch": 24,
    "algorithm.surplus_groups": "keep",
    "eval.every": 2,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_model_dir: Path) -> tuple[Path, Path, str]:
    """The folders of a run on one process and of the same on two, and what the latter said."""
    folder = tmp_path_factory.mktemp("processes")
    held_out = write_jsonl(folder / "held.jsonl", [{"prompt": f"{i}*{i}=", "answer": ""} for i in range(3)])
    config = tiny_config(folder, tiny_model_dir, **SETTINGS, **{"data.eval": {"source": str(held_out)}})
    one, two = folder / "one", folder / "two"
    process = launch(config, f"run_dir={two}")
    assert main(["train", str(config), f"run_dir={one}"]) == 0
    output = finish(process)
    assert process.returncode == 0, output
    return one, two, output


def test_t5_t7_metrics_are_those_of_one_process(runs) -> None:
    """Uneven lengths, unequal shares, micro-batches that some rank lacks."""
    one, two, _ = runs
    ours, theirs = rows(one / "metrics.jsonl"), rows(two / "metrics.jsonl")
    assert len(ours) == len(theirs) == 3
    for mine, other in zip(ours, theirs):
        assert mine.keys() == other.keys()
        assert of_training(other) == pytest.approx(of_training(mine), rel=1e-4, abs=1e-5)
    assert any(row["staleness_max"] for row in ours) and ours[-1]["update"] == 9


def test_rollouts_and_evaluations_are_written_once_and_whole(runs) -> None:
    one, two, output = runs
    for name in ("rollouts/step_000001.jsonl", "eval/step_000000.jsonl", "eval/step_000003.jsonl"):
        ours, theirs = rows(one / name), rows(two / name)
        assert [row["response"] for row in ours] == [row["response"] for row in theirs], name
    assert output.count("step 3/3") == 1 and output.count("report: ") == 1  # one process speaks
    assert (two / "report.html").is_file()


def test_weights_are_those_of_one_process(runs) -> None:
    one, two, _ = runs
    ours, theirs = (load_file(run / "model" / "model.safetensors") for run in (one, two))
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(theirs[name], ours[name], rtol=1e-4, atol=1e-5)


def test_a_mistake_is_said_once(tmp_path: Path, tiny_model_dir: Path) -> None:
    process = launch(tiny_config(tmp_path, tiny_model_dir), "rollout.group_sise=4")
    output = finish(process)
    assert process.returncode != 0 and output.count("unknown key rollout.group_sise") == 1


@pytest.mark.slow
def test_t13_stopping_ends_all_processes(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = tiny_config(tmp_path, tiny_model_dir, **{"train.steps": 10_000})
    process = launch(config, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run/metrics.jsonl").is_file() or not rows(tmp_path / "run/metrics.jsonl"):
        assert time.monotonic() < deadline and process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output = finish(process, 60)
    assert process.returncode != 0 and "terminated after step" in output
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(config) not in listed
    for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines():
        json.loads(line)
