"""What a run folder holds, read for the report: metrics, evaluations and rollouts."""

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

Rows = Sequence[dict]  # one dict per step, each with its "step"


def read_jsonl(path: Path) -> list[dict]:
    """The objects of a .jsonl file, without lines that a crash cut short."""
    rows = []
    for line in path.read_bytes().split(b"\n"):
        with suppress(ValueError):
            rows.append(json.loads(line.decode("utf-8", "replace"), strict=False))
    return [row for row in rows if isinstance(row, dict)]


def read_metrics(run: Path) -> list[dict]:
    """One row per step, in order; a step repeated after a resume counts as it was run last."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} not found: name the output folder of a training run, which holds this file")
    rows = {}
    for i, row in enumerate(read_jsonl(path), 1):
        step = number(row.get("step"))
        step = i if math.isnan(step) else int(step)
        rows[step] = row | {"step": step}
    return [rows[step] for step in sorted(rows)]


def step_files(folder: Path, suffix: str) -> dict[int, Path]:
    """The folder's step_000123 files, by step."""
    named = ((re.fullmatch(r"step_(\d+)", path.stem), path) for path in folder.glob(f"step_*{suffix}"))
    return {step: path for step, path in sorted((int(match[1]), path) for match, path in named if match)}


def read_evals(run: Path, metrics: Rows) -> list[dict]:
    """The evaluations in step order: those in metrics.jsonl, completed by the files in eval/."""
    evals = {
        row["step"]: {"accuracy": row.get("eval_accuracy"), "pass_at_k": row.get("eval_pass_at_k")}
        for row in metrics
        if not math.isnan(number(row.get("eval_accuracy")))
    }
    for step, path in step_files(run / "eval", ".json").items():
        with suppress(ValueError):
            found = json.loads(path.read_bytes())
            if isinstance(found, dict):
                evals[step] = evals.get(step, {}) | found
    return [evals[step] | {"step": step} for step in sorted(evals)]


def read_rollouts(run: Path) -> tuple[str, dict[int, dict[str, list[dict]]]]:
    """Responses by step and prompt, of the first and last file in eval/, or else in rollouts/.

    Also says which folder they come from; "" when neither holds any.
    """
    for folder in ("eval", "rollouts"):
        files = step_files(run / folder, ".jsonl")
        found = {}
        for steps in (list(files), list(reversed(files))):
            for step in steps:
                rows = read_jsonl(files[step])
                if rows:
                    found[step] = by_prompt(rows)
                    break
        if found:
            return folder, dict(sorted(found.items()))
    return "", {}


def by_prompt(rows: Rows) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for row in rows:
        groups.setdefault(as_text(row.get("prompt")), []).append(row)
    return groups


def as_text(value: object) -> str:
    """Strings as they are, nothing for null, chat messages and other values as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False)


def number(value: object) -> float:
    """A metric's value as a float, NaN when it is missing or not finite."""
    try:
        x = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return math.nan
    return x if math.isfinite(x) else math.nan


def column(rows: Rows, key: str) -> np.ndarray:
    """A metric over the rows, NaN where it is missing; "a/b" gives a ratio."""
    top, _, bottom = key.partition("/")
    values = np.array([number(row.get(top)) for row in rows], dtype=float)
    if not bottom:
        return values
    below = column(rows, bottom)
    return np.divide(values, below, out=np.full_like(values, np.nan), where=below > 0)
