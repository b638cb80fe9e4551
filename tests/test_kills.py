"""Trainings that are killed anywhere and resumed end in the very bits of one that was not."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kill_cases import POINTS
from processes import TESTS, environment
from tiny import outcome, tiny_config, write_jsonl

pytestmark = pytest.mark.slow

RANDOM_MOMENTS = 10
STOPPED = ["generation.middle", "reward.middle", "update.middle", "checkpoint.middle"]
OPTIONS = {
    "train.steps": 5,
    "train.mini_batch_prompts": 1,
    "rollout.prompts_per_generation": 3,
    "algorithm.surplus_groups": "keep",
    "eval.every": 2,
    "checkpoint": {"every": 2},
    "parallel": {"timeout": 60.0},
}


def training(processes: int, kill: list | None = None, *overrides: str) -> dict:
    return {"processes": processes, "kill": kill or [], "overrides": overrides}


class Runs:
    """Runs of one configuration in one folder, by a script that serves cases like kill_cases.py."""

    def __init__(self, folder: Path, model_dir: Path, script: str = "kill_cases.py", **options) -> None:
        self.folder, self.script = folder, script
        held_out = write_jsonl(folder / "held_out.jsonl", [{"prompt": "1*1=", "answer": ""}])
        data = {"data.eval": {"source": str(held_out)}}
        self.config = tiny_config(folder, model_dir, **OPTIONS, **data, **options)
        self.results: dict[str, dict] = {}

    def run(self, trainings: dict[str, list[dict]]) -> None:
        """Runs by name, each with its trainings one after another."""
        cases = [
            {"run": str(self.folder / name), "config": str(self.config), "trainings": each}
            for name, each in trainings.items()
        ]
        (self.folder / "cases.json").write_text(json.dumps(cases))
        command = [sys.executable, str(TESTS / self.script), str(self.folder / "cases.json")]
        subprocess.run(command, env=environment(), check=True, timeout=500)
        for name in trainings:
            self.results[name] = json.loads((self.folder / f"{name}.json").read_text())

    def codes(self, name: str) -> list[list[int]]:
        return self.results[name]["codes"]

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def outcome(self, name: str) -> dict[str, object]:
        return outcome(self.folder / name)

    def assert_as_whole(self, name: str) -> None:
        got, want = self.outcome(name), self.outcome("whole")
        assert got.keys() == want.keys()
        assert [key for key in want if got[key] != want[key]] == [], self.log(name)


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two processes"])
def runs(request, tmp_path_factory, tiny_model_dir: Path) -> Runs:
    """`whole` was not killed; all others were, once or more, and are through."""
    size = request.param
    runs = Runs(tmp_path_factory.mktemp("kills"), tiny_model_dir)
    runs.run({"whole": [training(size)]})
    assert runs.codes("whole") == [[0] * size], runs.log("whole")
    choose, span = random.Random(size), runs.results["whole"]["seconds"]

    def at(point: str, rank: int, signum: int = signal.SIGKILL) -> dict:
        return training(size, [point, rank, int(signum)])

    kills = {point: [at(point, i % size)] for i, point in enumerate(POINTS)}
    kills |= {f"term.{point}": [at(point, size - 1, signal.SIGTERM)] for point in STOPPED}
    moments = [choose.uniform(0.2, 1.0) * span for _ in range(RANDOM_MOMENTS)]
    kills |= {f"moment.{i}": [training(size, [moment])] for i, moment in enumerate(moments)}
    kills["many"] = [at(choose.choice(list(POINTS)), 0) for _ in range(3)]
    runs.run({name: [*killed, training(size)] for name, killed in kills.items()})
    return runs


@pytest.mark.parametrize("point", POINTS)
def test_t15_a_run_killed_at_a_point_ends_as_one_that_was_not(runs: Runs, point: str) -> None:
    killed, resumed = runs.codes(point)
    assert -signal.SIGKILL in killed and set(resumed) == {0}, runs.log(point)
    runs.assert_as_whole(point)


@pytest.mark.parametrize("point", STOPPED)
def test_t13_a_run_terminated_in_a_phase_ends_as_one_that_was_not(runs: Runs, point: str) -> None:
    """One rank alone gets the signal, and all stop."""
    stopped, resumed = runs.codes(f"term.{point}")
    assert set(stopped) == {128 + signal.SIGTERM} and set(resumed) == {0}, runs.log(f"term.{point}")
    runs.assert_as_whole(f"term.{point}")


@pytest.mark.parametrize("moment", range(RANDOM_MOMENTS))
def test_a_run_killed_at_any_moment_ends_as_one_that_was_not(runs: Runs, moment: int) -> None:
    name = f"moment.{moment}"
    # A moment may come when all is written: then there is nothing left to resume.
    through = "the run is through" in runs.log(name)
    assert set(runs.codes(name)[-1]) == ({2} if through else {0}), runs.log(name)
    runs.assert_as_whole(name)


def test_a_run_killed_again_and_again_ends_as_one_that_was_not(runs: Runs) -> None:
    *killed, resumed = runs.codes("many")
    assert all(-signal.SIGKILL in codes for codes in killed) and set(resumed) == {0}, runs.log("many")
    runs.assert_as_whole("many")


def test_saved_by_two_processes_resumed_by_one_and_by_four(tmp_path: Path, tiny_model_dir: Path) -> None:
    runs = Runs(tmp_path, tiny_model_dir)
    half, rest = training(2, None, "train.steps=2"), [None, "train.steps=4"]
    sizes = {"two": 2, "one": 1, "four": 4}
    runs.run({name: [half, training(size, *rest)] for name, size in sizes.items()})
    want = runs.outcome("two")
    for name in ("one", "four"):
        assert runs.codes(name) == [[0, 0], [0] * sizes[name]], runs.log(name)
        got = runs.outcome(name)
        for step in (3, 4):
            rollouts = f"rollouts/step_{step:06d}.jsonl"
            assert got[rollouts] == want[rollouts]
        for ours, theirs in zip(got["metrics"], want["metrics"]):
            assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
