"""What test_kills.py runs: `python tests/kill_cases.py CASES.json`, trainings that are killed and resumed.

A case is `{"run", "config", "trainings"}`; a training is `{"processes", "overrides", "kill"}`, and all but
the first resume. `kill` is `[point, rank, signal]`, or `[seconds]` for a moment, or empty. The log of a case
is RUN.log, its verdict RUN.json. Trainings are forked from a process that has imported everything and
computed nothing, so they start at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch.optim
from processes import fork

import dapo.rollout.build
import dapo.sampling
import dapo.saving
import dapo.trainer
from dapo.cli import main
from dapo.rewards import Scorer
from dapo.rollout import HFEngine
from dapo.rollout.hf import KeyedSampler
from dapo.sampling import Sampler
from dapo.trainer import Trainer
from dapo.update import Updater

KILL_STEP = 4
BEFORE, AFTER = False, True

# Point: object, attribute, which call of step KILL_STEP, before or after it.
POINTS: dict[str, tuple[Any, str, int, bool]] = {
    "generation.start": (Sampler, "_generate_own", 1, BEFORE),
    "generation.middle": (KeyedSampler, "__call__", 3, BEFORE),
    "generation.end": (HFEngine, "generate", 1, AFTER),
    "reward.start": (Scorer, "submit", 1, BEFORE),
    "reward.middle": (Sampler, "_sample", 3, BEFORE),
    "reward.end": (dapo.sampling, "work_of_all_ranks", 1, AFTER),
    "update.start": (Updater, "run", 1, BEFORE),
    "update.middle": (torch.optim.AdamW, "step", 1, AFTER),
    "update.end": (Updater, "run", 1, AFTER),
    "sync.start": (HFEngine, "sync_weights", 1, BEFORE),
    "sync.middle": (dapo.rollout.build, "refresh", 1, AFTER),
    "sync.end": (HFEngine, "sync_weights", 1, AFTER),
    "checkpoint.start": (dapo.saving, "training_tensors", 1, BEFORE),
    "checkpoint.middle": (os, "fsync", 2, AFTER),
    "checkpoint.end": (os, "rename", 1, AFTER),
}


def install(point: str, signum: int) -> None:
    """Sends this process the signal when it comes to the point."""
    owner, name, wanted, after = POINTS[point]
    inner, calls, step = getattr(owner, name), 0, 0

    def train_step(self, number: int, progress) -> None:
        nonlocal step
        step = number
        original_step(self, number, progress)

    def killing(*args, **kwargs):
        nonlocal calls
        calls += step >= KILL_STEP
        if calls == wanted and not after:
            os.kill(os.getpid(), signum)
        result = inner(*args, **kwargs)
        if calls == wanted and after:
            os.kill(os.getpid(), signum)
        return result

    original_step, Trainer._train_step = Trainer._train_step, train_step
    setattr(owner, name, killing)


def start(training: dict, arguments: list[str], log: Path) -> list[int]:
    """The processes of one training."""
    size, kill = training["processes"], training["kill"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def work(rank: int) -> int:
        if size > 1:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if len(kill) == 3 and kill[1] == rank:
            install(kill[0], kill[2])
        return main(["train", *arguments, *training["overrides"]])

    return [fork(lambda rank=rank: work(rank), log) for rank in range(size)]


def wait(pids: list[int], seconds: float) -> list[int]:
    """Exit codes, negative for signals. When one is killed, or time is up, the others are killed, as torchrun
    does it."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if signal.SIGKILL in map(abs, codes.values()) or time.monotonic() > deadline:
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


def run_case(case: dict) -> dict:
    """Exit codes of each training's processes, and how long the last training took."""
    arguments, codes = [case["config"], f"run_dir={case['run']}"], []
    for training in case["trainings"]:
        if Path(case["run"], "config.yaml").exists():
            arguments = ["--resume", case["run"]]
        began, kill = time.monotonic(), training["kill"]
        processes = start(training, arguments, Path(f"{case['run']}.log"))
        codes.append(wait(processes, kill[0] if len(kill) == 1 else 60))
    return {"codes": codes, "seconds": time.monotonic() - began}


def run_cases(cases: list[dict], at_a_time: int) -> None:
    running: set[int] = set()
    for case in cases:
        if len(running) == at_a_time:
            running.discard(os.wait()[0])

        def work(case=case) -> int:
            Path(f"{case['run']}.json").write_text(json.dumps(run_case(case)))
            return 0

        running.add(fork(work, Path(f"{case['run']}.log")))
    while running:
        running.discard(os.wait()[0])


if __name__ == "__main__":
    run_cases(json.loads(Path(sys.argv[1]).read_text()), at_a_time=2)
