"""Names the process that others wait for: while they wait, and when a collective fails (docs/parallel.md).

What marks the place where a process is (`phase`, `waiting`, `each`) is free for all to call: it does nothing
where no watchdog is at work, which is so with a single process.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch.distributed as dist

from ..config import ParallelConfig
from ..errors import TrainingStopped, first_line
from .blame import (
    describe_failed,
    describe_gone,
    describe_timeout,
    describe_wait,
    failed,
    find_wait,
    silent,
)
from .notes import BEAT, Note, Notes
from .world import World

T = TypeVar("T")
logger = logging.getLogger(__name__)

LOOK = 5.0
"""Seconds between two looks at who waits."""
SILENCE = 3.5 * BEAT
"""After so many seconds without a sign of life a process is gone, when a connection broke before."""
ECHO = 2.0
"""Seconds that a process which failed gives a lower rank to say the same."""
TIMED_OUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
# No GPU has run this yet: what NCCL says is from its sources.
BROKEN = re.compile(
    r"connection (closed|reset|refused)|closed by peer|broken pipe|timed out waiting|gloo/transport"
    r"|nccl error|nccl communicator|remote process exited",
    re.IGNORECASE,
)
_current: Watchdog | None = None


class Watchdog:
    """Of one process. Rank 0's warns of long waits; each explains the errors of its own collectives."""

    def __init__(self, world: World, config: ParallelConfig) -> None:
        global _current
        self.world, self.config = world, config
        self.notes = Notes(world) if world.distributed else None
        self._closing, self._thread = threading.Event(), None
        self._next_warning = config.warn_after or 0.0
        _current = self if world.distributed else None
        if world.distributed and world.is_main and config.warn_after:
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()

    @contextlib.contextmanager
    def phase(self, name: str, step: int | None = None) -> Iterator[None]:
        """Inside, this process is in the phase. What is raised leaves it there: that is where it failed."""
        if not self._noting:
            yield
            return
        outer = self.notes.own
        self._move(phase=name, step=outer.step if step is None else step, since=time.time())
        yield
        self._move(phase=outer.phase, step=outer.step, since=outer.since)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this process is in a collective of all processes, or of those that share no sequences."""
        if not self._noting:
            yield
            return
        collectives, _ = self.notes.own.order
        self.notes.change(waiting=True, changed=time.time(), order=(collectives + 1, 0))
        yield
        self._move(waiting=False)

    def moved(self) -> None:
        """This process has come to its next part of a phase; all processes have as many."""
        if self._noting:
            self._move()

    @property
    def _noting(self) -> bool:
        """Other threads, such as the one that writes checkpoints, are not who others wait for."""
        return self.notes is not None and threading.current_thread() is threading.main_thread()

    def _move(self, **values: object) -> None:
        collectives, changes = self.notes.own.order
        self.notes.change(changed=time.time(), order=(collectives, changes + 1), **values)

    def _watch(self) -> None:
        seconds = min(LOOK, self.config.warn_after / 4)
        while not self._closing.wait(seconds):
            self._look(time.time(), seconds)

    def _look(self, now: float, seconds: float) -> None:
        """Warns of a long wait, again when it is twice as long, and before it ends the run."""
        wait = find_wait(self.notes.read(), self.world.size, now)
        if wait is None or wait.seconds < self.config.warn_after:
            self._next_warning = self.config.warn_after
        elif wait.seconds >= self._next_warning:
            self._next_warning = 2 * wait.seconds
            last = self.config.timeout - 2 * seconds
            if wait.seconds < last:
                self._next_warning = min(self._next_warning, last)
            logger.warning(
                "%s; after %g s (parallel.timeout) the run fails",
                describe_wait(wait, now),
                self.config.timeout,
            )

    def explained(self, error: Exception) -> Exception:
        """For an error of a collective a `TrainingStopped` that says which rank is behind it, as far as can
        be known after some seconds; any other error itself. Notes in either case how this process ends."""
        text = str(error)
        if not _of_a_collective(error):
            reason = _short(error)
            self.notes.change(ended="failed", reason=reason, kind=getattr(error, "kind", reason))
            return error
        timed_out = bool(TIMED_OUT.search(text))
        self.notes.change(ended="lost", waiting=True)
        sentence = self._find_cause(timed_out)
        if sentence is None:
            sentence = f"a collective failed in {self.notes.own.place}: {first_line(error)}"
        elif isinstance(error, TrainingStopped):
            sentence = f"{sentence}; {text}"
        return TrainingStopped(sentence)

    def _find_cause(self, timed_out: bool) -> str | None:
        before = notes = self.notes.read()
        if not notes:
            return "the process that the others are known from (torchrun, else rank 0) is gone"
        deadline = time.monotonic() + SILENCE
        while not timed_out and failed(notes) is None and time.monotonic() < deadline:
            time.sleep(BEAT / 4)
            notes = self.notes.read()
        if note := failed(notes):
            return describe_failed(note)
        if timed_out:
            return describe_timeout(notes, self.world.size, self.config.timeout)
        gone = silent(before, notes)
        return describe_gone(gone) if gone else None

    def failure_elsewhere(self) -> str | None:
        """What another process said when it failed, if one did."""
        note = failed(self.notes.read())
        return None if note is None or note.rank == self.world.rank else describe_failed(note)

    def was_lost_elsewhere(self) -> bool:
        """Whether another process has ended because of others; it has said why."""
        return any(note.ended == "lost" and note.rank != self.world.rank for note in self.notes.read())

    def is_first_to_say(self) -> bool:
        """Of an error that was given to `explained`: whether no lower rank ends of the same, or because
        others were lost, as this one."""
        deadline = time.monotonic() + (ECHO if self.world.rank else 0)
        while time.monotonic() < deadline and not self.notes.broken:
            if any(self._says_the_same(note) for note in self.notes.read()):
                return False
            time.sleep(0.05)
        # Rank 0 may have gone with the store; one of the others speaks then.
        return self.world.rank <= 1 or not self.notes.broken

    def _says_the_same(self, note: Note) -> bool:
        own = self.notes.own
        return note.rank < own.rank and (note.ended, note.kind) == (own.ended, own.kind)

    @property
    def place(self) -> str:
        return self.notes.own.place

    @property
    def is_of_others(self) -> bool:
        """Whether this process ends because of others."""
        return self.notes.own.ended == "lost"

    def close(self) -> None:
        """Says that this process leaves, and stops the threads."""
        global _current
        _current = None
        self._closing.set()
        if self._thread is not None:
            self._thread.join(LOOK)
        if self.notes is not None:
            if self.notes.own.ended is None:
                self.notes.change(ended="left")
            self.notes.close()


def _of_a_collective(error: Exception) -> bool:
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(BROKEN.search(str(error)))


def _short(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, TrainingStopped | ValueError | OSError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= 200 else f"{text[:200]}…"


def current() -> Watchdog | None:
    """The one at work; None with a single process."""
    return _current


def phase(name: str, step: int | None = None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if _current is None else _current.phase(name, step)


def waiting() -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if _current is None else _current.waiting()


def each(parts: Iterable[T]) -> Iterator[T]:
    """The parts; each is a place of its own, at which others can be behind."""
    for part in parts:
        if _current is not None:
            _current.moved()
        yield part
