"""Going on with a run: which of its settings may differ, and what of its folder stays."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

from .config import Config, load_config
from .errors import UserError
from .files import replacing

logger = logging.getLogger(__name__)

FIXED = ("seed", "model", "data", "lora", "rollout.group_size")
"""Sections and keys that a resumed run shares with its beginning; all others may change."""
MOVABLE = ("model.path", "model.reference_path", "data.train.source", "data.eval.source")
"""But these may be somewhere else: what they hold is compared."""


def resumed_config(
    run: str | Path, overrides: list[str], path: str | Path | None = None
) -> tuple[Config, list[str]]:
    """The configuration to go on with, and what differs from the run's own, as "KEY: OLD -> NEW".

    Args:
        run: the run's folder.
        overrides: `section.key=value`.
        path: a configuration to use in place of the run's.

    Raises:
        UserError: it is not a run's folder, or a setting differs that may not.
    """
    run = Path(run)
    own = run / "config.yaml"
    if run.parent.name == "checkpoints":
        raise UserError(
            f"--resume {run}: give the run's folder, {run.parent.parent}. It goes on from its newest whole "
            "checkpoint; to go back to an earlier one, move the newer ones away"
        )
    if not own.is_file():
        raise UserError(
            f"--resume {run}: there is no config.yaml, so it is not a run's folder. Of a run that lost it: "
            "copy the configuration there"
        )
    before = load_config(own)
    after = load_config(path or own, overrides).model_copy(update={"run_dir": str(run)})
    old, new = (_flat(config.model_dump(mode="json")) for config in (before, after))
    changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    changed = [key for key in changed if key != "run_dir"]
    differences = {key: f"{key}: {old.get(key)!r} -> {new.get(key)!r}" for key in changed}
    refused = [text for key, text in differences.items() if _is_fixed(key)]
    if refused:
        raise UserError(
            f"--resume {run}: these may not change within a run: {'; '.join(refused)}. Leave them as they "
            "are, or start a new run"
        )
    return after, list(differences.values())


def _is_fixed(key: str) -> bool:
    return key not in MOVABLE and any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def check_can_begin_again(run: Path, every: int) -> None:
    """For a run without a checkpoint: raises `UserError` if there ought to be one, since what the run has
    logged would be lost.

    Args:
        every: `checkpoint.every`.
    """
    made = max((step for step in map(_step_of, _lines(run / "metrics.jsonl")) if step is not None), default=0)
    saved = any(event["kind"] in ("finished", "stopped") and event["step"] for event in _events(run))
    # The first one may be unfinished until the second is due.
    if made and (saved or every == 0 or made > 2 * every):
        raise UserError(
            f"--resume {run}: metrics.jsonl has {made} steps, but {run}/checkpoints holds none to go on "
            "from: put it back, or start a new run with another run_dir"
        )


def is_finished(run: Path, step: int) -> bool:
    """Whether the model and the report of the step are written."""
    return any(event["kind"] == "finished" and event["step"] == step for event in _events(run))


def _events(run: Path) -> list[dict[str, Any]]:
    lines = [line for line in _lines(run / "events.jsonl") if _step_of(line) is not None]
    return [event for event in map(json.loads, lines) if "kind" in event]


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\n") if path.exists() else []


def cut_back(run: Path, sampled: int, logged: int) -> None:
    """Takes out of a run's folder what belongs to later steps than the state it goes on from.

    Args:
        sampled: the last step whose rollouts stay.
        logged: the last step whose line in metrics.jsonl, and whose evaluation, stay.
    """
    metrics = run / "metrics.jsonl"
    if metrics.exists():
        kept = {_step_of(line): line for line in _lines(metrics) if _step_of(line) in range(1, logged + 1)}
        if len(kept) < logged:
            logger.warning("%s lacks %d of the first %d steps", metrics, logged - len(kept), logged)
        with replacing(metrics) as partial:
            partial.write_bytes(b"".join(kept[step] + b"\n" for step in sorted(kept)))
    for folder, last in (("rollouts", sampled), ("eval", logged)):
        for path in (run / folder).glob("step_*"):
            if path.stem[5:].isdigit() and int(path.stem[5:]) > last:
                path.unlink()
    for partial in [*run.glob(".*"), *run.glob("*/.*")]:  # of a process that was killed while it wrote
        if partial.parent.name != "checkpoints":
            shutil.rmtree(partial) if partial.is_dir() else partial.unlink()


def _step_of(line: bytes) -> int | None:
    """None for a line that was torn."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return None
