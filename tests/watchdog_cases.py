"""What test_watchdog_runs.py runs: trainings on two processes, or three, of which one fails.

`python tests/watchdog_cases.py FOLDER CONFIG NAME...` runs cases beside each other, as torchrun would; the
log of a case is FOLDER/NAME.log, its verdict FOLDER/NAME.json. `torchrun ... tests/watchdog_cases.py CONFIG
NAME` runs one of them. Processes are forked from one that has imported everything, so they start at once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from processes import fork

import dapo.trainer
from dapo.cli import main
from dapo.model import Policy
from dapo.sampling import Sampler
from dapo.update import Updater

STEP = 2
"""In which something happens."""


def sleep_in_generation(seconds: float) -> Callable[[], None]:
    def install() -> None:
        generate = Sampler._generate_own

        def slow(self, batch, asked):
            deadline = time.monotonic() + seconds * (batch.step == STEP)
            while time.monotonic() < deadline:
                self.check()
                time.sleep(0.05)
            return generate(self, batch, asked)

        Sampler._generate_own = slow

    return install


def at(owner: type, name: str, action: Callable[[], object]) -> Callable[[], None]:
    """Has the action precede each call of a method in step STEP."""

    def install() -> None:
        inner, run, step = getattr(owner, name), dapo.trainer.Trainer._train_step, 0

        def train_step(self, number, progress):
            nonlocal step
            step = number
            run(self, number, progress)

        def acting(*args, **kwargs):
            if step == STEP:
                action()
            return inner(*args, **kwargs)

        dapo.trainer.Trainer._train_step = train_step
        setattr(owner, name, acting)

    return install


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def go_wrong() -> None:
    raise ZeroDivisionError("a bug")


def run_out() -> None:
    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which "
        "1.25 GiB is free."
    )


# Name: which ranks, what happens in them, more of the configuration.
CASES: dict[str, tuple[tuple[int, ...], Callable[[], None], list[str]]] = {
    "sleeper": ((1,), sleep_in_generation(4), ["parallel.warn_after=1"]),
    "killed": ((1,), at(Updater, "_update", die), []),
    "first_killed": ((0,), at(Sampler, "_generate_own", die), []),
    "timeout": ((1,), sleep_in_generation(60), ["parallel.timeout=6", "parallel.warn_after=null"]),
    "bug": ((1,), at(Sampler, "_generate_own", go_wrong), []),
    "bug_everywhere": ((0, 1), at(Updater, "run", go_wrong), []),
    "memory": ((1,), at(Policy, "forward", run_out), []),
}


PROCESSES = {"killed": 3}
"""Where it is not two."""


def train(name: str, rank: int, config: str, run: Path) -> int:
    ranks, install, overrides = CASES[name]
    if rank in ranks:
        install()
    return main(["train", config, f"run_dir={run}", "train.steps=3", *overrides])


def start(name: str, folder: Path, config: str) -> tuple[list[int], dist.Store]:
    """The processes of a training, and the store they meet in, which outlives them as torchrun's does."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    size = PROCESSES.get(name, 2)

    def work(rank: int) -> int:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        return train(name, rank, config, folder / name)

    log = folder / f"{name}.log"
    return [fork(lambda rank=rank: work(rank), log) for rank in range(size)], store


def run_cases(folder: Path, config: str, names: list[str], grace: float = 15.0) -> None:
    """Once a process fails the others get SIGTERM, and after so many seconds SIGKILL, as by torchrun."""
    started = {name: start(name, folder, config) for name in names}
    processes = {pid: (name, rank) for name in names for rank, pid in enumerate(started[name][0])}
    codes: dict[str, dict[int, int]] = {name: {} for name in names}
    failed: dict[str, float] = {}
    while processes:
        for pid in list(processes):
            name, rank = processes[pid]
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del processes[pid]
                codes[name][rank] = os.waitstatus_to_exitcode(status)
                if codes[name][rank] and name not in failed:
                    failed[name] = time.monotonic()
                    signal_all(processes, name, signal.SIGTERM)
                if len(codes[name]) == PROCESSES.get(name, 2):
                    seconds = time.monotonic() - failed.get(name, time.monotonic())
                    verdict = {"codes": [code for _, code in sorted(codes[name].items())], "seconds": seconds}
                    (folder / f"{name}.json").write_text(json.dumps(verdict))
            elif name in failed and time.monotonic() > failed[name] + grace:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def signal_all(processes: dict[int, tuple[str, int]], name: str, number: int) -> None:
    for pid, (case, _) in processes.items():
        if case == name:
            os.kill(pid, number)


if __name__ == "__main__":
    if "RANK" in os.environ:
        config, name = sys.argv[1:]
        sys.exit(train(name, int(os.environ["RANK"]), config, Path(config).parent / "run"))
    run_cases(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
