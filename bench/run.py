"""Benchmarks the policy loss beside its peers: one command, one folder of results.

    python -m bench.run [--device cpu|cuda] [--suite small|full] [--peers trl liger] [--rounds 3] --out DIR

Writes results.json (pytest-benchmark's format, with memory, FLOPs and errors as extra info, and what could
not run), report.md, report.html and the plots as PNG.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.implementations import BY_KEY
from bench.report import write_report
from bench.session import RESULTS, TELL
from bench.suites import SUITES

HERE = Path(__file__).resolve().parent


class Session:
    """Collects what the benchmarks measured, and shows where they are."""

    def __init__(self, progress: Progress, count: int) -> None:
        self.progress = progress
        self.task = progress.add_task("", total=count)
        self.results = {}
        self.start = time.perf_counter()

    def tell(self, workload, text: str | None) -> None:
        if text is None:
            self.progress.advance(self.task)
            text = "done"
        self.progress.update(self.task, description=f"{workload.name}: {text}")
        if not self.progress.console.is_terminal:  # where no bar is drawn, a line
            print(
                f"{time.perf_counter() - self.start:5.0f} s  {workload.name}: {text}",
                file=self.progress.console.file,
                flush=True,
            )

    def pytest_configure(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.config.stash[TELL] = self.tell
        self.results = self.config.stash[RESULTS]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu or cuda; cuda if there is one",
    )
    parser.add_argument(
        "--suite", default="small", choices=sorted({name for _, name in SUITES}), help="workloads"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=sorted(BY_KEY), metavar="KEY", help=f"default all: {', '.join(BY_KEY)}"
    )
    parser.add_argument("--rounds", type=int, default=3, help="timed calls of each implementation")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    options = parser.parse_args(argv)
    if options.device not in ("cpu", "cuda"):
        parser.error(f"--device must be cpu or cuda, got {options.device}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is a file")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    return options


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory() as folder,
        # pytest captures the process's stderr: the bar goes to a copy of it.
        os.fdopen(os.dup(sys.stderr.fileno()), "w", encoding="utf-8") as stream,
        Progress(*columns, console=Console(file=stream)) as progress,
    ):
        session = Session(progress, sum(not w.missing for w in SUITES[options.device, options.suite]))
        file = Path(folder) / "benchmark.json"
        arguments = [str(HERE), "-q", "-p", "no:cacheprovider", "--no-header", "--no-summary", "-W", "ignore"]
        arguments += [f"--device={options.device}", f"--suite={options.suite}", f"--rounds={options.rounds}"]
        arguments += [f"--benchmark-json={file}", "--benchmark-quiet", "--capture=fd"]
        if options.peers is not None:
            arguments += ["--peers", *options.peers]
        code = _quietly(arguments, session)
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not file.exists():
            return int(code) or 1
        results = json.loads(file.read_text(encoding="utf-8"))
    missing = [f"{w.name}: {w.missing}" for w in SUITES[options.device, options.suite] if w.missing]
    write_report(options.out, results, list(session.results.values()), missing, options.device)
    print(f"{time.perf_counter() - start:.0f} s; report: {options.out / 'report.html'}")
    return int(code)


def _quietly(arguments: list[str], session: Session) -> int:
    """pytest without its dots: the progress bar says where things are."""
    from contextlib import redirect_stdout
    from io import StringIO

    output = StringIO()
    with redirect_stdout(output):
        code = pytest.main(arguments, plugins=[session])
    if code != pytest.ExitCode.OK:
        print(output.getvalue(), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
