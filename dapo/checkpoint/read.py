"""Opening checkpoints: everything is verified first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata

from ..errors import UserError
from ..parallel.world import World
from .errors import DamagedCheckpoint, reason
from .folders import saved_steps, step_folder, step_of
from .layout import check_layout
from .manifest import METADATA, RANKS, STATE, Manifest, parse_json, read_manifest, verified_bytes, verify
from .payload import TensorsPlanner, TensorsReader
from .pickles import read_metadata
from .together import on_main, together

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """One that has been verified. Tensors stay on disk until `load`."""

    path: Path
    step: int
    state: dict
    rank_states: list[dict]
    """By the rank that wrote them; there need not be as many ranks now."""
    _metadata: Metadata = field(repr=False)
    _world: World = field(repr=False)

    @property
    def names(self) -> frozenset[str]:
        """Of the tensors."""
        return frozenset(self._metadata.state_dict_metadata)

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Of the whole tensors, by name."""
        return MappingProxyType(
            {name: value.size for name, value in self._metadata.state_dict_metadata.items()}
        )

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Fills tensors of any placement, on any number of ranks, in place. Every rank calls it, with the
        same names; the checkpoint may hold more.

        Raises:
            UserError: the checkpoint lacks some, or has them in another shape or dtype. None was changed.
            DamagedCheckpoint: a file was changed since the checkpoint was opened. Some tensors may have been
                filled.
        """
        together(lambda: self._check(tensors), self._world)
        try:
            dcp.load(
                dict(tensors),
                storage_reader=TensorsReader(self.path, self._metadata),
                planner=TensorsPlanner(),
                no_dist=not self._world.distributed,
            )
        except dcp.CheckpointException as error:
            raise _worst([e for e, _ in error.failures.values()]) from error

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        known = self._metadata.state_dict_metadata
        lacking = sorted(tensors.keys() - known.keys())
        if lacking:
            raise UserError(f"checkpoint {self.path} lacks {_listed(lacking)}")
        different = []
        for name, tensor in sorted(tensors.items()):
            there = known[name].properties.dtype, known[name].size
            if there != (tensor.dtype, tensor.shape):
                saved, here = (
                    f"{dtype} {list(size)}" for dtype, size in (there, (tensor.dtype, tensor.shape))
                )
                different.append(f"{name} ({saved} there, {here} here)")
        if different:
            raise UserError(f"checkpoint {self.path} is of another model: {_listed(different)}")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f", and {len(names) - 3} more" if len(names) > 3 else "")


def _worst(errors: list[BaseException]) -> BaseException:
    """The one to raise on all ranks: Ctrl-C, else damage, else whatever came first."""
    order: list[Callable[[BaseException], bool]] = [
        lambda error: not isinstance(error, Exception),
        lambda error: isinstance(error, DamagedCheckpoint),
        lambda error: True,
    ]
    return next(error for fits in order for error in errors if fits(error))


def open_checkpoint(folder: Path, world: World) -> Checkpoint:
    """The checkpoint in a folder, once every file is found to be as it was written. Every rank calls it.

    Raises:
        DamagedCheckpoint: it is not; names the file.
        UserError: there is no such folder, or it is of another format.
    """
    folder = Path(folder)
    manifest = on_main(lambda: _manifest(folder), world)
    names = list(manifest.files)

    def verify_share() -> DamagedCheckpoint | None:
        # Returned, not raised: of several damaged files the first is named, however many ranks look.
        for name in names[world.rank :: world.size]:
            try:
                verify(folder, name, manifest.files[name])
            except DamagedCheckpoint as error:
                return error
        return None

    damages = [error for error in together(verify_share, world) if error is not None]
    if damages:
        raise min(damages, key=str)
    mine: list[Checkpoint] = []
    together(lambda: mine.append(_opened(folder, manifest, world)), world)
    return mine[0]


def _manifest(folder: Path) -> Manifest:
    manifest = read_manifest(folder)
    if step_of(folder) not in (None, manifest.step):
        raise DamagedCheckpoint(f"{folder} holds the checkpoint of step {manifest.step}")
    return manifest


def _opened(folder: Path, manifest: Manifest, world: World) -> Checkpoint:
    def content(name: str) -> bytes:
        return verified_bytes(folder, name, manifest.files[name])

    state = parse_json(folder / STATE, content(STATE), dict)
    ranks: list[Any] = parse_json(folder / RANKS, content(RANKS), list)
    if not ranks or not all(isinstance(rank, dict) for rank in ranks):
        raise DamagedCheckpoint(f"{folder / RANKS} must hold a list of mappings")
    path = folder / METADATA
    sizes = {name: entry.size for name, entry in manifest.files.items()}
    metadata = check_layout(path, read_metadata(path, content(METADATA)), sizes)
    return Checkpoint(folder, manifest.step, state, ranks, metadata, world)


def latest_checkpoint(root: Path, world: World) -> Checkpoint | None:
    """The newest checkpoint that is whole; None where there is none at all. Every rank calls it. Damaged ones
    are warned of and passed over.

    Raises:
        UserError: all are damaged, or the newest is of another format.
    """
    root = Path(root)

    def newest_first() -> list[int]:
        try:
            return saved_steps(root)[::-1]
        except OSError as error:
            raise UserError(f"checkpoints in {root} cannot be listed: {reason(error)}") from error

    steps = on_main(newest_first, world)
    for step in steps:
        try:
            return open_checkpoint(step_folder(root, step), world)
        except DamagedCheckpoint as error:
            damage = error
            if world.is_main:
                logger.warning("checkpoint of step %d is passed over: %s", step, error)
    if steps:
        raise UserError(
            f"all {len(steps)} checkpoints in {root} are damaged ({damage}): start a new run with another "
            "run_dir"
        )
    return None
