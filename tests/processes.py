"""Launching several processes by torchrun, and sharing what one launch yields among xdist's workers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

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
