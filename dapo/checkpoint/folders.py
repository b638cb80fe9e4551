"""Which folders are checkpoints, which are leftovers, and which are deleted."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from ..errors import UserError
from .errors import reason

logger = logging.getLogger(__name__)

_STEP = re.compile(r"step_(\d{6,})")
_TEMPORARY = re.compile(r"\.step_\d{6,}\.(partial|replaced|deleted)")


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return Path(root) / f"step_{step:06d}"


def step_of(folder: Path) -> int | None:
    """The step that a folder's name gives; None where it is no name of a checkpoint."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match and folder.name == step_folder(folder.parent, int(match[1])).name else None


def temporary(folder: Path, what: str) -> Path:
    """A name beside a checkpoint's that is never taken for one. `what`: partial, replaced or deleted."""
    return folder.with_name(f".{folder.name}.{what}")


def saved_steps(root: Path) -> list[int]:
    """Steps that have a checkpoint, ascending; empty where there is no such folder. What is being written,
    and anything else, does not count."""
    root = Path(root)
    if not root.is_dir():
        if root.is_symlink() or root.exists():
            raise UserError(f"{root} is no folder, or a link to nothing: checkpoints go there")
        return []
    steps = (step_of(entry) for entry in root.iterdir() if entry.is_dir())
    return sorted(step for step in steps if step is not None)


def prune(root: Path, keep: int, best: int | None = None) -> None:
    """Deletes all checkpoints but the newest `keep` and the one of the step `best`, and what killed writers
    left. Only rank 0 calls it, and not while one is written. What cannot be deleted is warned of."""
    root = Path(root)
    try:
        steps = saved_steps(root)
        leftovers = [path for path in root.glob(".step_*") if _TEMPORARY.fullmatch(path.name)]
    except OSError as error:
        logger.warning("old checkpoints in %s were not deleted: %s", root, reason(error))
        return
    kept = {best, *steps[max(len(steps) - keep, 0) :]}
    for folder in leftovers + [step_folder(root, step) for step in steps if step not in kept]:
        try:
            delete(folder)
        except OSError as error:
            logger.warning("%s could not be deleted: %s", folder, reason(error))


def set_aside(root: Path, after: int) -> list[int]:
    """Renames checkpoints of later steps to `step_000010.damaged`, which none of this counts any more, and
    returns their steps. For those that a run passed over, which would be taken for its newest."""
    later = [step for step in saved_steps(root) if step > after]
    for step in later:
        folder = step_folder(root, step)
        aside = folder.with_name(f"{folder.name}.damaged")
        shutil.rmtree(aside, ignore_errors=True)
        os.rename(folder, aside)
        logger.warning("%s is kept as %s", folder, aside.name)
    return later


def delete(folder: Path) -> None:
    """Deletes a folder, under a name that is no checkpoint's: half of one must not look whole. Raises
    `OSError`; without an error where there is none."""
    if step_of(folder) is not None:
        aside = temporary(folder, "deleted")
        if aside.exists():
            shutil.rmtree(aside)
        os.rename(folder, aside)
        folder = aside
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
