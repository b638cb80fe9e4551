"""Runs on two processes that hang, fail or are killed: who is named, once, and all processes end."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import TESTS, environment, shared_launch, torchrun
from tiny import build_tiny_model, tiny_config

FORKED = ("sleeper", "killed", "first_killed", "timeout", "bug_everywhere", "memory")
"""The cases of watchdog_cases.py that run without torchrun."""


def launch(folder: Path) -> dict[str, dict]:
    """All cases, and one of them under the real torchrun, beside each other."""
    (folder / "real").mkdir()
    model = build_tiny_model(folder / "model")
    script, config = str(TESTS / "watchdog_cases.py"), tiny_config(folder, model)
    output = (folder / "bug.log").open("w")
    command = torchrun(2, script, str(tiny_config(folder / "real", model)), "bug")
    real = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
    command = [sys.executable, script, str(folder), str(config), *FORKED]
    try:
        subprocess.run(command, env=environment(), check=True, timeout=200)
        code = real.wait(100)
    finally:
        real.kill()
    verdicts = {name: json.loads((folder / f"{name}.json").read_text()) for name in FORKED}
    return verdicts | {"bug": {"codes": [code]}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By name: exit codes, with how long the second process went on after the first had failed; the log."""
    verdicts, folder = shared_launch(tmp_path_factory, "watchdog", launch)
    logs = {name: (folder / f"{name}.log").read_text() for name in verdicts}
    return {name: (verdict, logs[name]) for name, verdict in verdicts.items()}


def lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("dapo: ")]


def test_a_wait_is_warned_of_while_rank_0_is_in_the_collective(runs) -> None:
    verdict, log = runs["sleeper"]
    text = " ".join(log.split())
    assert verdict["codes"] == [0, 0] and lines(log) == []
    wait = (
        r"rank 0 has waited \d s in generation of step 2 for rank 1, which is in generation of step 2 since"
    )
    assert 1 <= len(re.findall(wait, text)) <= 3  # at 1 s and at 2 s, of four looks a second
    assert "3 steps, 3 updates" in text


@pytest.mark.parametrize(
    ("name", "gone", "place"), [("killed", 1, "update"), ("first_killed", 0, "generation")]
)
def test_a_rank_that_is_killed_is_named_once_by_those_that_live(
    runs, name: str, gone: int, place: str
) -> None:
    verdict, log = runs[name]
    (line,) = lines(log)
    codes = [1] * len(verdict["codes"])
    codes[gone] = -9
    assert verdict["codes"] == codes and verdict["seconds"] < 12 and "Traceback" not in log
    assert line.startswith(f"dapo: rank {gone} (host ") and f"it was last in {place} of step 2." in line
    assert line.count("is gone") == 1


def test_a_timeout_says_whom_the_others_waited_for(runs) -> None:
    verdict, log = runs["timeout"]
    (line,) = lines(log)
    assert verdict["codes"] == [1, 1] and "Traceback" not in log
    assert re.match(
        r"dapo: parallel.timeout \(6 s\) is over: rank 0 has waited [67] s in generation of step 2 for "
        "rank 1, which is in generation of step 2",
        line,
    )
    assert log.count("has waited") == 1  # parallel.warn_after is off


def test_a_bug_on_one_rank_is_traced_once_under_torchrun(runs) -> None:
    verdict, log = runs["bug"]
    first, second = lines(log)
    assert verdict["codes"] == [1] and log.count('raise ZeroDivisionError("a bug")') == 1
    assert first == "dapo: rank 1 failed in generation of step 2, by an error that is not expected:"
    assert second.endswith("failed in generation of step 2: ZeroDivisionError: a bug")
    times = [line.split()[-1] for line in log.splitlines() if line.split()[:1] == ["time"]]
    first, second = (time.strptime(text, "%Y-%m-%d_%H:%M:%S") for text in (min(times), max(times)))
    assert len(times) == 2 and time.mktime(second) - time.mktime(first) <= 10


def test_a_bug_on_all_ranks_is_traced_once(runs) -> None:
    verdict, log = runs["bug_everywhere"]
    assert verdict["codes"] == [1, 1] and log.count("Traceback") == 1
    assert lines(log) == ["dapo: rank 0 failed in update of step 2, by an error that is not expected:"]


def test_memory_that_ends_on_one_rank_is_told_by_it_and_by_rank_0(runs) -> None:
    verdict, log = runs["memory"]
    own, other = sorted(lines(log), key=lambda line: "failed in" in line)
    assert verdict["codes"] == [1, 1] and "Traceback" not in log
    assert own.startswith("dapo: out of memory on rank 1 in the update: a micro-batch of")
    assert "train.max_tokens_per_micro_batch=" in own and "free 1.25 GiB of 79.10 GiB" in own
    assert "failed in update of step 2: out of memory on rank 1" in other
