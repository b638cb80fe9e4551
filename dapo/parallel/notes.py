"""What each process last said of itself, in the store that the process group was opened with.

Nothing here is a collective: whoever reads sees notes of processes that hang, and of those that are gone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from .world import World

BEAT = 1.0
"""Seconds between two signs of life."""
PATIENCE = timedelta(seconds=10)
"""For an answer of the store."""


@dataclass(frozen=True)
class Note:
    """Where one process is. Times are those of its own clock, in seconds since the epoch."""

    rank: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    phase: str = "loading"
    step: int | None = None
    since: float = field(default_factory=time.time)
    """When the phase began."""
    changed: float = field(default_factory=time.time)
    """When the process came to where it is within the phase."""
    waiting: bool = False
    """Inside a collective."""
    order: tuple[int, int] = (0, 0)
    """Collectives begun, and changes since the last one. All processes go through the same, so of two the
    one with less is behind; what an abandoned generation skips counts until the next collective only."""
    heard: float = field(default_factory=time.time)
    beat: int = 0
    ended: str | None = None
    """`failed` of itself, `lost` because of others, or `left` in good order."""
    reason: str = ""
    kind: str = ""
    """Equal for processes that end of the same."""

    @property
    def place(self) -> str:
        return self.phase if self.step is None else f"{self.phase} of step {self.step}"

    @property
    def process(self) -> str:
        return f"host {self.host}, pid {self.pid}"


class Notes:
    """This process's note, and those of all. A daemon thread gives signs of life.

    A store that could not be reached once is left alone (`broken`), since torch prints a page at each try:
    nothing is written any more, and nothing can be read.
    """

    def __init__(self, world: World) -> None:
        self.size, self.broken = world.size, False
        store = dist.group.WORLD.get_group_store()
        # Connections of their own: on a shared one, a thread that waits for an answer holds up the others.
        self._outgoing, self._incoming = (_room(store) for _ in range(2))
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self.own = Note(world.rank)
        self.change()
        self._thread = threading.Thread(target=self._keep_alive, name="signs of life", daemon=True)
        self._thread.start()

    def change(self, **values: object) -> None:
        """Writes the own note, with new values; one message without an answer."""
        with self._lock:
            self.own = dataclasses.replace(self.own, **values)
            self._write()

    def _keep_alive(self) -> None:
        while not self._closing.wait(BEAT):
            self.change(beat=self.own.beat + 1, heard=time.time())

    def _write(self) -> None:
        if self.broken:
            return
        try:
            self._outgoing.set(str(self.own.rank), json.dumps(dataclasses.asdict(self.own)))
        except RuntimeError:  # DistError is one
            self.broken = True

    def read(self) -> list[Note]:
        """Of all processes that have written one, by rank."""
        if self.broken:
            return []
        keys = [str(rank) for rank in range(self.size)]
        try:
            if not self._incoming.check(keys):
                keys = [key for key in keys if self._incoming.check([key])]
            written = self._incoming.multi_get(keys) if keys else []
        except RuntimeError:
            self.broken = True
            return []
        return [_parsed(text) for text in written]

    def close(self) -> None:
        self._closing.set()
        self._thread.join(PATIENCE.seconds)


def _room(store: dist.Store) -> dist.Store:
    connection = dist.PrefixStore("watchdog", store.clone())
    connection.set_timeout(PATIENCE)
    return connection


def _parsed(text: bytes) -> Note:
    values = json.loads(text)
    return Note(**values | {"order": tuple(values["order"])})
