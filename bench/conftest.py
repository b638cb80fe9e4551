"""Options of `pytest bench/`, and what is measured once a workload and used by all of its benchmarks."""

from __future__ import annotations

import pytest
import torch

from bench.implementations import ALL, BY_KEY
from bench.measure import FORWARD, TRAIN
from bench.runner import WorkloadResults, run_workload
from bench.session import RESULTS, TELL
from bench.suites import SUITES


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dapo-kernels")
    group.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where to run")
    group.addoption("--suite", default="small", choices=sorted({name for _, name in SUITES}))
    group.addoption("--peers", nargs="*", default=None, metavar="KEY", help=f"of {', '.join(BY_KEY)}")
    group.addoption("--rounds", type=int, default=3, help="timed calls of each implementation")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RESULTS] = {}
    if config.getoption("--rounds") < 1:
        raise pytest.UsageError(f"--rounds must be at least 1, got {config.getoption('--rounds')}")
    if config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch finds no GPU")
    for key in config.getoption("--peers") or []:
        if key not in BY_KEY:
            raise pytest.UsageError(f"--peers must be of {', '.join(BY_KEY)}, got {key!r}")


def chosen(config: pytest.Config) -> list:
    keys = config.getoption("--peers")
    return [i for i in ALL if keys is None or i.ours or i.key in keys]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    workloads = SUITES[config.getoption("--device"), config.getoption("--suite")]
    workloads = [workload for workload in workloads if workload.missing is None]
    metafunc.parametrize("workload", workloads, ids=lambda workload: workload.name)
    metafunc.parametrize("phase", (FORWARD, TRAIN))
    metafunc.parametrize("implementation", chosen(config), ids=lambda i: i.key)


@pytest.fixture
def measured(request: pytest.FixtureRequest, workload) -> WorkloadResults:
    config, done = request.config, request.config.stash[RESULTS]
    if workload.name not in done:
        tell = config.stash.get(TELL, lambda workload, text: None)
        done[workload.name] = run_workload(
            workload,
            chosen(config),
            torch.device(config.getoption("--device")),
            config.getoption("--rounds"),
            lambda text: tell(workload, text),
        )
        tell(workload, None)
    return done[workload.name]
