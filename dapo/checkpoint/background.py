"""Writing checkpoints while training goes on."""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from ..parallel.world import World
from .errors import CheckpointFailed, reason
from .pieces import Piece, pieces_of
from .write import write_pieces

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Writes checkpoints in a thread, one at a time. Every rank has one, and they do the same in the same
    order; the threads talk among themselves, on a group of their own."""

    def __init__(self, root: Path, world: World) -> None:
        self.root = Path(root)
        self.world = world
        # Training's collectives go on meanwhile: on one group the two would take each other's turns.
        self._group = dist.new_group(backend="gloo") if world.distributed else None
        self._staged: dict[str, Tensor] = {}
        self._thread: threading.Thread | None = None
        self._failure: CheckpointFailed | None = None

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: dict,
        rank_state: dict,
        then: Callable[[Path], None] | None = None,
    ) -> None:
        """Waits for the checkpoint before, copies this one's values to host memory and returns. Arguments
        as those of `write_checkpoint`.

        Args:
            then: called in the thread on rank 0, with the path, once the checkpoint is whole. What it raises
                is logged.

        Raises:
            CheckpointFailed: the one before; this one was not begun then.
        """
        self.wait()
        pieces = self._stage(tensors)
        arguments = (step, pieces, copy.deepcopy(state), copy.deepcopy(rank_state), then)
        # A daemon: a process that dies of something else does not wait for its disk.
        self._thread = threading.Thread(target=self._run, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Returns once nothing is being written. Raises the `CheckpointFailed` of what was, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Waits; what failed is logged."""
        try:
            self.wait()
        except CheckpointFailed as error:
            logger.warning("%s", error)

    def _run(
        self,
        step: int,
        pieces: Callable[[], Mapping[str, Piece]],
        state: dict,
        rank_state: dict,
        then: Callable[[Path], None] | None,
    ) -> None:
        try:
            path = write_pieces(self.root, step, pieces, state, rank_state, self.world, self._group)
        except CheckpointFailed as error:
            self._failure = error
            return
        if then is not None and self.world.is_main:
            try:
                then(path)
            except Exception as error:
                logger.warning("after %s was written: %s", path, reason(error))

    def _stage(self, tensors: Mapping[str, Tensor]) -> Callable[[], Mapping[str, Piece]]:
        """Copies of this rank's blocks. If that fails, so will the writing, on all ranks."""
        try:
            pieces = pieces_of(tensors, self._copy)
            if any(tensor.is_cuda for tensor in tensors.values()):
                torch.cuda.synchronize()  # the copies were only enqueued. No GPU has run this yet.
        except Exception as error:
            failure = CheckpointFailed(f"no copy in host memory: {reason(error)}")

            def fail() -> Mapping[str, Piece]:
                raise failure

            return fail
        self._staged = {name: piece.values for name, piece in pieces.items()}
        return lambda: pieces

    def _copy(self, name: str, values: Tensor) -> Tensor:
        """In the memory that the name's last copy was in, if it fits."""
        held = self._staged.get(name)
        if held is None or (held.shape, held.dtype) != (values.shape, values.dtype):
            held = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        return held.copy_(values, non_blocking=values.is_cuda)
