"""What a run's folder says of the run: how far it is, how it does, what befell it and how to go on."""

from __future__ import annotations

import fcntl
import os
import shlex
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from .errors import UserError
from .report.charts import TIMES
from .report.data import Rows, as_text, number, read_evals, read_jsonl, read_metrics, step_files

LAST_STEPS = 20
"""Whose median time is the pace."""
LAST_EVENTS = 5
SHOWN_METRICS = ("reward_mean", "accuracy", "entropy", "response_length_mean", "tokens_per_s")
EVALUATION = ("accuracy", "accuracy_low", "accuracy_high", "pass_at_k", "greedy_accuracy")
BEGUN = ("started", "resumed")
ENDED = ("stopped", "finished", "failed")
"""Kinds of events that are a state too, until the run goes on."""


def read_status(run: Path) -> dict[str, Any]:
    """All of it as JSON values, with the keys that docs/run.md lists. Nothing is written, and what is missing
    or torn is null or left out.

    Raises:
        UserError: it is no run's folder.
    """
    known = [run / name for name in ("config.yaml", "metrics.jsonl", "events.jsonl")]
    if not any(path.is_file() for path in known):
        raise UserError(
            f"{run} is no run's folder: neither config.yaml, metrics.jsonl nor events.jsonl is there; name "
            "the run_dir of a training run"
        )
    steps = _steps(run / "config.yaml")
    metrics = read_metrics(run) if known[1].is_file() else []
    events = read_jsonl(known[2]) if known[2].is_file() else []
    step = metrics[-1]["step"] if metrics else 0
    state, checkpoint = _state(run, events, step, steps), _checkpoint(run)
    pace = _pace(metrics)
    left = None if pace is None or steps is None or state == "finished" else pace * max(steps - step, 0)
    last = metrics[-1] if metrics else {}
    return {
        "run": str(run),
        "state": state,
        "step": step,
        "steps": steps,
        "written": max((_modified(path) for path in known), default=0.0) or None,
        "step_seconds": pace,
        "seconds_left": left,
        "checkpoint": checkpoint,
        **_evaluations(read_evals(run, metrics)),
        "metrics": {key: _known(last.get(key)) for key in SHOWN_METRICS},
        "skipped_updates": _total(metrics, "skipped_updates"),
        "reward_failures": _total(metrics, "reward_failures"),
        "events": _events(events),
        "disk": _disk(run),
        "go_on": _go_on(run, state, steps, checkpoint),
    }


def is_held(path: Path) -> bool | None:
    """Whether a process holds the lock that it takes on events.jsonl; None where that cannot be told. The
    lock that is tried is shared and given back at once: it stops no other look."""
    try:
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            fcntl.flock(file, fcntl.LOCK_UN)
            return False
    except OSError:  # no such file, or a file system without locks
        return None


def _state(run: Path, events: Rows, step: int, steps: int | None) -> str:
    held = is_held(run / "events.jsonl")
    if held:
        return "running"
    kinds = [event.get("kind") for event in events]
    last = next((kind for kind in reversed(kinds) if kind in (*BEGUN, *ENDED)), None)
    if last in ENDED:
        return last
    if not kinds and steps is not None and step >= steps and (run / "report.html").is_file():
        return "finished"  # before there were events
    return "unfinished" if held is None else "killed"


def _steps(config: Path) -> int | None:
    """`train.steps`, also of a configuration that this version does not take."""
    with suppress(OSError, YAMLError, KeyError, TypeError, ValueError):
        steps = YAML(typ="safe", pure=True).load(config)["train"]["steps"]
        return steps if type(steps) is int else None
    return None


def _pace(metrics: Rows) -> float | None:
    """Seconds of a step, evaluations and checkpoints apart."""
    rows = [[number(row.get(key)) for key in TIMES] for row in metrics[-LAST_STEPS:]]
    times = [sum(time for time in row if time == time) for row in rows]  # without NaN
    times = [time for time in times if time > 0]
    return median(times) if times else None


def _checkpoint(run: Path) -> dict[str, Any] | None:
    """The newest one; whether it is whole only reading it would tell."""
    folders = step_files(run / "checkpoints", "")
    if not folders:
        return None
    step, folder = max(folders.items())
    return {
        "step": step,
        "path": str(folder),
        "written": _modified(folder / "manifest.json") or None,
        "bytes": sum(_size(path) for path in folder.glob("*")),
        "processes": _processes(folder),
        "kept": list(folders),
    }


def _processes(checkpoint: Path) -> int | None:
    """How many wrote it."""
    ranks = [path.name.split("_")[2] for path in checkpoint.glob("__*_*.distcp")]
    numbers = [int(rank) for rank in ranks if rank.isdecimal()]
    return max(numbers) + 1 if numbers else None


def _evaluations(evals: Rows) -> dict[str, Any]:
    figures = [{"step": row["step"], **{key: _known(row.get(key)) for key in EVALUATION}} for row in evals]
    figures = [figure for figure in figures if figure["accuracy"] is not None]
    best = max(figures, key=lambda figure: figure["accuracy"], default=None)
    return {"best_evaluation": best, "last_evaluation": figures[-1] if figures else None}


def _events(events: Rows) -> dict[str, Any]:
    shown = [
        {
            "time": _known(event.get("time")),
            "kind": as_text(event.get("kind")),
            "step": _known(event.get("step")),
            "message": as_text(event.get("message")),
        }
        for event in events
    ]
    return {"counts": dict(Counter(event["kind"] for event in shown)), "last": shown[-LAST_EVENTS:]}


def _go_on(run: Path, state: str, steps: int | None, checkpoint: dict | None) -> str | None:
    """The command; None while the run is going, and where there is no configuration to go on with."""
    if state == "running" or steps is None:
        return None
    processes = (checkpoint or {}).get("processes") or 1
    return go_on_command(run, processes, *([f"train.steps={2 * steps}"] if state == "finished" else []))


def go_on_command(run: str | Path, processes: int, *overrides: str) -> str:
    """What resumes a run, as a line for a shell."""
    start = ["dapo"] if processes == 1 else f"torchrun --nproc_per_node {processes} -m dapo".split()
    return shlex.join([*start, "train", "--resume", str(run), *overrides])


def _disk(run: Path) -> dict[str, Any]:
    """Bytes of the whole folder, and by what is directly in it, the largest first."""
    parts = {path.name: _size(path) for path in run.glob("*")}
    largest = sorted(parts.items(), key=lambda part: -part[1])
    return {"bytes": sum(parts.values()), "parts": dict(largest)}


def _size(path: Path) -> int:
    """Of a file or a folder; a running training may take files away meanwhile."""
    if path.is_dir() and not path.is_symlink():
        return sum(_size(Path(folder) / name) for folder, _, names in os.walk(path) for name in names)
    with suppress(OSError):
        return path.lstat().st_size
    return 0


def _modified(path: Path) -> float:
    """0 where there is no such file."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _total(metrics: Rows, key: str) -> int:
    values = (number(row.get(key)) for row in metrics)
    return int(sum(value for value in values if value == value))


def _known(value: object) -> float | int | None:
    """A number as it is; None where it is none, or not finite."""
    return None if number(value) != number(value) or isinstance(value, str) else value  # type: ignore[return-value]
