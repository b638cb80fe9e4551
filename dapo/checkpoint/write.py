"""Writing a checkpoint: beside its place, by all ranks, then renamed."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import StorageMeta

from ..parallel.world import World
from .errors import CheckpointFailed, Elsewhere, reason
from .folders import delete, step_folder, temporary
from .manifest import MANIFEST, METADATA, RANKS, STATE, Entry, digest, seal
from .pieces import Piece, PiecesPlanner, pieces_of
from .together import on_main, together

# One process is what was meant.
warnings.filterwarnings("ignore", ".*assuming the intent is to (save|load) in a single process")


def write_checkpoint(
    root: Path,
    step: int,
    tensors: Mapping[str, Tensor],
    state: dict,
    rank_state: dict,
    world: World,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes `root/step_000010` and returns its path. Every rank calls it, with tensors of the same names.

    One that is there already is replaced once the new one is whole. If this fails on one rank, it fails on
    all, and nothing is left of it.

    Args:
        tensors: DTensors, or plain ones that are equal on all ranks. They must not change meanwhile.
        state: JSON values, of which rank 0's are kept.
        rank_state: JSON values, kept for each rank.
        group: gloo group of all ranks to talk on; None: the default one.

    Raises:
        CheckpointFailed: a file could not be written, or another rank did not come along.
    """
    return write_pieces(root, step, lambda: pieces_of(tensors), state, rank_state, world, group)


def write_pieces(
    root: Path,
    step: int,
    pieces: Callable[[], Mapping[str, Piece]],
    state: dict,
    rank_state: dict,
    world: World,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """As `write_checkpoint`; what goes wrong in `pieces` counts as a failure to write."""
    folder = step_folder(root, step)
    partial = temporary(folder, "partial")
    try:
        _write(folder, partial, step, pieces, state, rank_state, world, group)
    except BaseException as error:
        if world.is_main:
            shutil.rmtree(partial, ignore_errors=True)
        cause = _cause(error, world)
        if not isinstance(cause, Exception):
            raise cause from None  # Ctrl-C
        raise CheckpointFailed(f"checkpoint {folder} could not be written: {reason(cause)}") from cause
    return folder


def _write(
    folder: Path,
    partial: Path,
    step: int,
    pieces: Callable[[], Mapping[str, Piece]],
    state: dict,
    rank_state: dict,
    world: World,
    group: dist.ProcessGroup | None,
) -> None:
    def begin() -> tuple[Mapping[str, Piece], str, str]:
        ready = pieces(), json.dumps(state), json.dumps(rank_state)
        if world.is_main:
            delete(partial)  # of a writer that was killed
            partial.mkdir(parents=True)
        return ready

    mine: list[tuple[Mapping[str, Piece], str, str]] = []
    together(lambda: mine.append(begin()), world, group)
    planned, state_text, rank_text = mine[0]
    dcp.save(
        {},
        storage_writer=_Writer(partial),
        planner=PiecesPlanner(planned),
        process_group=group,
        no_dist=not world.distributed,
    )
    written = together(lambda: (rank_text, _written_by(partial, world)), world, group)
    on_main(lambda: _finish(folder, partial, step, state_text, written), world, group)


class _Writer(dcp.FileSystemWriter):
    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # without the path, which is of use to nobody once the folder is renamed

    def write_data(self, plan, planner):
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            # Of a full disk torch.save tells as of its own confusion; and what goes to other ranks comes
            # without its context.
            seen: BaseException | None = error
            while seen is not None and not isinstance(seen, OSError):
                seen = seen.__cause__ or seen.__context__
            raise OSError(getattr(seen, "errno", None) or 5, reason(seen or error)) from error


def _written_by(partial: Path, world: World) -> dict[str, Entry]:
    names = sorted(path.name for path in partial.glob(f"__{world.rank}_*.distcp"))
    return {name: digest(partial / name) for name in names + [METADATA] * world.is_main}


def _finish(
    folder: Path, partial: Path, step: int, state: str, written: list[tuple[str, dict[str, Entry]]]
) -> None:
    ranks = "[" + ",\n".join(text for text, _ in written) + "]\n"
    files = {name: entry for _, entries in written for name, entry in entries.items()}
    for name in files:
        if not (partial / name).is_file():
            raise CheckpointFailed(f"{name} of another process is not there: all must see the same folder")
    for name, text in ((STATE, state + "\n"), (RANKS, ranks)):
        _write_file(partial / name, text.encode())
        files[name] = digest(partial / name)
    _write_file(partial / MANIFEST, seal(step, files))
    _sync(partial)
    _put_in_place(partial, folder)


def _put_in_place(partial: Path, folder: Path) -> None:
    aside = temporary(folder, "replaced")
    delete(aside)
    if folder.exists():
        os.rename(folder, aside)
    try:
        os.rename(partial, folder)
    except OSError:
        if aside.exists():
            os.rename(aside, folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)  # else `prune` does it


def _write_file(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Makes the names in a folder last."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _cause(error: BaseException, world: World) -> BaseException:
    """Why it failed: this rank's own reason to stop, else the first rank's."""
    if world.distributed and isinstance(error, RuntimeError) and not isinstance(error, CheckpointFailed):
        # All other errors of several processes come in another type: this is gloo's.
        return Elsewhere(f"another process did not come along: {reason(error)}")
    if not isinstance(error, dcp.CheckpointException):
        return error
    failures: dict[int, Any] = error.failures
    own = failures.get(world.rank, (None,))[0]
    if own is not None and not isinstance(own, Exception):
        return own
    rank, (first, _) = min(failures.items(), key=lambda item: item[0])
    where = f" (process {rank})" if world.distributed else ""
    return OSError(getattr(first, "errno", None) or 5, f"{reason(first)}{where}")
