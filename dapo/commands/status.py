"""`dapo status`: a run's folder explains itself."""

from __future__ import annotations

import argparse
import json
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

STATES = {  # state: (colour, what it means)
    "running": ("green", ""),
    "finished": ("green", ""),
    "stopped": ("yellow", "by a signal; its last step is saved"),
    "failed": ("red", "it could not go on, see its events"),
    "killed": ("red", "it is not running, and did not say why it ended"),
    "unfinished": ("yellow", "nothing tells whether it is running: see when it was last written"),
}
DATE = "%Y-%m-%d %H:%M:%S"
SHOWN_PARTS = 4  # of the disk


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "status",
        help="say how a run is doing",
        description="Say how far a run is, how it does, what befell it and how to go on, from its folder "
        "alone. The run may be going; nothing is written.",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--json", action="store_true", help="one JSON object; docs/run.md lists its keys")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..status import read_status

    status = read_status(arguments.run_dir)
    if arguments.json:
        print(json.dumps(status, indent=2))
    else:
        _show(status)
    return 0


def _show(status: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..report.page import VISIBLE

    console = Console(markup=False, emoji=False, highlight=False)
    # What others wrote may hold anything, escape sequences too.
    lines = [(label, text.replace("\n", " ").translate(VISIBLE)) for label, text in describe(status)]
    if not console.is_terminal:
        for label, text in lines:
            console.print(f"{label}: {text}", soft_wrap=True)
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    shown = ""
    for label, text in lines:
        style = STATES[status["state"]][0] if label == "state" else None
        table.add_row("" if label == shown else label, text, style=style)
        shown = label
    console.print(table)


def describe(status: dict[str, Any], now: float | None = None) -> list[tuple[str, str]]:
    """Labels and texts, one a line; what is not known is left out."""
    now = time.time() if now is None else now
    events = status["events"]
    counts = ", ".join(f"{count} {kind}" for kind, count in events["counts"].items())
    lines = [
        ("run", status["run"]),
        ("state", _state(status, now)),
        (
            "step",
            f"{status['step']} of {'an unknown number' if status['steps'] is None else status['steps']}",
        ),
        ("pace", _pace(status)),
        ("checkpoint", _checkpoint(status["checkpoint"], now)),
        ("best evaluation", _evaluation(status["best_evaluation"])),
        ("last evaluation", _evaluation(status["last_evaluation"])),
        ("last step", _metrics(status["metrics"]) if status["step"] else ""),
        ("skipped updates", str(status["skipped_updates"])),
        ("reward failures", str(status["reward_failures"])),
        ("events", counts or "none"),
        *(("events", _event(event)) for event in events["last"]),
        ("disk", _disk(status["disk"])),
        ("go on", status["go_on"] or ""),
    ]
    return [(label, text) for label, text in lines if text]


def _state(status: dict[str, Any], now: float) -> str:
    meaning = STATES[status["state"]][1]
    written = f"last written {_ago(status['written'], now)}" if status["written"] else ""
    return "; ".join(filter(None, [status["state"] + (f": {meaning}" if meaning else ""), written]))


def _pace(status: dict[str, Any]) -> str:
    from ..report.page import duration

    if status["step_seconds"] is None:
        return ""
    pace, left = f"{duration(status['step_seconds'])} a step", status["seconds_left"]
    return f"{pace}, {duration(left)} left, evaluations apart" if left else pace


def _checkpoint(checkpoint: dict[str, Any] | None, now: float) -> str:
    if checkpoint is None:
        return "none yet"
    processes = checkpoint["processes"] or 1
    parts = [
        f"step {checkpoint['step']}",
        _ago(checkpoint["written"], now) if checkpoint["written"] else "not whole: it has no manifest",
        size(checkpoint["bytes"]),
        f"of {processes} processes" if processes > 1 else "",
        "also " + ", ".join(map(str, checkpoint["kept"][:-1])) if len(checkpoint["kept"]) > 1 else "",
    ]
    return ", ".join(filter(None, parts))


def _evaluation(evaluation: dict[str, Any] | None) -> str:
    if evaluation is None:
        return ""
    text = f"{evaluation['accuracy']:.1%} at step {evaluation['step']}"
    low, high = evaluation["accuracy_low"], evaluation["accuracy_high"]
    return (
        text if low is None or high is None else f"{text} (95 % interval {100 * low:.1f} to {100 * high:.1f})"
    )


def _metrics(metrics: dict[str, Any]) -> str:
    shown = {
        "reward_mean": "reward {:+.2f}",
        "accuracy": "accuracy {:.1%}",
        "entropy": "entropy {:.2f}",
        "response_length_mean": "length {:.1f}",
        "tokens_per_s": "{:.0f} tokens/s",
    }
    texts = (
        text.format(metrics[key]) if metrics[key] is not None else f"{text.split(' {')[0]} –"
        for key, text in shown.items()
        if metrics[key] is not None or not text.startswith("{")
    )
    return ", ".join(texts)


def _event(event: dict[str, Any]) -> str:
    when = ""
    with suppress(TypeError, ValueError, OverflowError, OSError):  # none, or none that a calendar has
        when = datetime.fromtimestamp(event["time"]).strftime(DATE)
    step = "" if event["step"] is None else f"step {event['step']}"
    return "  ".join(filter(None, [when, step, event["kind"], event["message"]]))


def _disk(disk: dict[str, Any]) -> str:
    parts = [f"{name} {size(count)}" for name, count in list(disk["parts"].items())[:SHOWN_PARTS] if count]
    return f"{size(disk['bytes'])}: {', '.join(parts)}" if parts else size(disk["bytes"])


def size(count: float) -> str:
    """1.2 GB, 34.0 kB, 17 bytes."""
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:.0f} bytes"


def _ago(then: float, now: float) -> str:
    from ..report.page import duration

    return f"{duration(max(now - then, 0.0))} ago"
