"""Launching several processes by torchrun, and sharing what one launch yields among xdist's workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

if TYPE_CHECKING:
    from dapo.parallel import World

TESTS = Path(__file__).parent


def torchrun(processes: int, *arguments: str) -> list[str]:
    """The command that starts so many processes of a script, or of `-m` and a module."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
    return [*launcher, str(processes), *arguments]


def environment() -> dict[str, str]:
    """One thread a process; this checkout and its tests can be imported."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"}


def shared_launch(
    factory: pytest.TempPathFactory, name: str, launch: Callable[[Path], dict[str, dict]]
) -> tuple[dict[str, dict], Path]:
    """Results of `launch`, which is given an empty folder, and the folder. Workers of xdist share one launch:
    the first makes it."""
    folder = factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / name
    results = folder / "all.json"
    with FileLock(folder.with_suffix(".lock"), timeout=300):
        if not results.exists():
            folder.mkdir(exist_ok=True)
            results.write_text(json.dumps(launch(folder)))
    return json.loads(results.read_text()), folder


def fork(work: Callable[[], int], log: Path) -> int:
    """Id of a process of its own group that does the work, whose result is its exit code; it writes to the
    log."""
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        code = work()
    finally:
        os._exit(code)


def run_cases(folder: Path, processes: int, script: str, cases: Sequence[str]) -> dict[str, dict]:
    """Results of the cases of tests/SCRIPT, run one after another by so many processes. Those that did not
    come to an end are absent, and what ended them is printed."""
    command = torchrun(processes, str(TESTS / script), str(folder), *cases)
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    for error in folder.glob("*.error"):
        print(f"{error.name}:\n{error.read_text()}")
    if done.returncode:
        print(done.stderr[-6000:])
    files = {name: folder / f"{name}.json" for name in cases}
    return {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}


def serve_cases(functions: Mapping[str, Any], world: World) -> None:
    """What a script of `run_cases` does: calls `case_NAME(folder, world)` for each name on its command line.
    Rank 0 writes the results; a case that fails ends its process, and so all of them."""
    import torch

    torch.set_num_threads(1)
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names:
        started = time.perf_counter()
        try:
            result = functions[f"case_{name}"](folder, world)
        except BaseException:
            (folder / f"{name}.{world.rank}.error").write_text(traceback.format_exc())
            os._exit(1)  # without waiting for the other ranks
        result["seconds"] = time.perf_counter() - started
        if world.is_main:
            (folder / f"{name}.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    world.close()
    assert not torch.distributed.is_initialized()
