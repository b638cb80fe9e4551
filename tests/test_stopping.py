"""Ctrl-C and SIGTERM: the exit code, one line for the person, and a run folder that is whole."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from tiny import tiny_config, unfinished, write_jsonl
from transformers import PreTrainedModel

from dapo.cli import main
from dapo.stopping import StopRequest

REPOSITORY = Path(__file__).parent.parent
SIGNALS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}


def start(folder: Path, model_dir: Path) -> subprocess.Popen:
    folder.mkdir()
    held_out = write_jsonl(folder / "held_out.jsonl", [{"prompt": "1*1=", "answer": ""}])
    options = {"train.steps": 100_000, "eval.every": 5, "data.eval": {"source": str(held_out)}}
    config = tiny_config(folder, model_dir, **options)
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "dapo", "train", str(config)],
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=err,
            # A shell's background jobs ignore SIGINT, and so would their children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )


def wait_for_steps(process: subprocess.Popen, metrics: Path, steps: int) -> None:
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= steps):
        assert process.poll() is None, f"ended by itself with {process.returncode}"
        assert time.monotonic() < deadline, "no steps within two minutes"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, tiny_model_dir: Path) -> dict[signal.Signals, tuple[int, Path]]:
    """Two runs at once, each stopped in the middle by its signal: exit code and folder."""
    base = tmp_path_factory.mktemp("stopping")
    processes = {signum: start(base / signum.name, tiny_model_dir) for signum in SIGNALS}
    try:
        for signum, process in processes.items():
            wait_for_steps(process, base / signum.name / "run/metrics.jsonl", 2)
            process.send_signal(signum)
        return {
            signum: (process.wait(timeout=60), base / signum.name) for signum, process in processes.items()
        }
    finally:
        for process in processes.values():
            process.kill()


@pytest.mark.parametrize("signum", SIGNALS)
def test_signal_ends_the_run_with_its_code_and_one_line(stopped, signum: signal.Signals) -> None:
    code, folder = stopped[signum]
    want, how = SIGNALS[signum]
    assert code == want
    error = (folder / "err").read_text()
    run = folder / "run"
    steps = (run / "metrics.jsonl").read_bytes().count(b"\n")
    said = [
        f"dapo: {how} after step {step}; what {run} holds is whole: `dapo status {run}` shows it, "
        f"`dapo train --resume {run}` goes on\n"
        for step in (steps, steps + 1)  # a step counts as done before its evaluation is
    ]
    assert error in said and "Traceback" not in (folder / "out").read_text()


@pytest.mark.parametrize("signum", SIGNALS)
def test_what_a_stopped_run_leaves_is_whole(stopped, signum: signal.Signals) -> None:
    run = stopped[signum][1] / "run"
    assert unfinished(run) == []
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) >= 2 and [row["step"] for row in metrics] == list(range(1, len(metrics) + 1))
    for path in [*run.glob("rollouts/*"), *run.glob("eval/*.jsonl")]:
        text = path.read_text()
        assert text.endswith("\n") and all(json.loads(line)["prompt"] for line in text.splitlines())
    assert len(list(run.glob("rollouts/*"))) in (len(metrics), len(metrics) + 1)
    assert main(["report", str(run)]) == 0 and (run / "report.html").stat().st_size > 1000


def interrupted_main(arguments: list[str]) -> int | str:
    """pytest itself must not see a KeyboardInterrupt."""
    try:
        return main(arguments)
    except KeyboardInterrupt:
        return "KeyboardInterrupt left main"


def test_interrupt_while_torch_is_being_imported(tmp_path, tiny_model_dir, monkeypatch, capsys) -> None:
    class Importing(ModuleType):
        def __getattr__(self, name: str):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "dapo.trainer", Importing("dapo.trainer"))
    assert interrupted_main(["train", str(tiny_config(tmp_path, tiny_model_dir))]) == 130
    error = capsys.readouterr().err
    assert error.startswith("dapo: interrupted before") and error.count("\n") == 1


def test_interrupt_while_the_model_is_saved_leaves_no_half_model(
    tmp_path, tiny_model_dir, monkeypatch, capsys
) -> None:
    def save_half(self, folder, **options):
        (Path(folder) / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_half)
    config = tiny_config(tmp_path, tiny_model_dir, **{"train.steps": 1})
    assert interrupted_main(["train", str(config)]) == 130
    assert capsys.readouterr().err.startswith("dapo: interrupted after step 1; what ")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "checkpoints",
        "config.yaml",
        "events.jsonl",
        "metrics.jsonl",
        "rollouts",
    ]


def test_interrupt_while_rollouts_are_written_leaves_no_half_file(
    tmp_path, tiny_model_dir, monkeypatch
) -> None:
    replace = os.replace

    def interrupt(source, target):
        if Path(target).parent.name == "rollouts":
            raise KeyboardInterrupt
        replace(source, target)

    config = tiny_config(tmp_path, tiny_model_dir)
    monkeypatch.setattr("os.replace", interrupt)
    assert interrupted_main(["train", str(config)]) == 130
    assert list((tmp_path / "run/rollouts").iterdir()) == []


@pytest.mark.parametrize(
    ("error", "after_errors", "stays"),
    [(ValueError, True, True), (ValueError, False, False), (KeyboardInterrupt, True, False)],
)
def test_a_signal_after_an_error_is_noted_where_others_bring_it(error, after_errors, stays) -> None:
    stop, usual = StopRequest(), signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(error), stop.noted(after_errors=after_errors):
            raise error
        assert (signal.getsignal(signal.SIGTERM) is not usual) == stays
        if stays:
            signal.raise_signal(signal.SIGTERM)
            assert stop.signal == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is usual
    finally:
        signal.signal(signal.SIGTERM, usual)
        signal.signal(signal.SIGINT, signal.default_int_handler)
