"""How a run is asked to end: what is under way is finished or abandoned, on all ranks alike."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from .errors import Terminated
from .parallel import World, all_gather_objects

T = TypeVar("T")


class Abandoned(Exception):
    """What was being generated is not waited for."""


class StopRequest:
    """Ctrl-C or SIGTERM, noted while a run is at work that must not be torn."""

    def __init__(self) -> None:
        self.signal = 0
        """Number of the signal that came; 0: none."""
        self.saved = False
        """Whether the run has saved and ended because of it."""

    @contextmanager
    def noted(
        self, on_first: Callable[[int], None] = lambda signum: None, after_errors: bool = False
    ) -> Iterator[None]:
        """Inside, the first signal is noted, and `on_first` told its number; a second one has its usual
        effect. Only the main thread can do so: in others nothing changes.

        Args:
            after_errors: whether that stays so when an error leaves: of processes that end of one cause each
                is to tell of it, and not of the signal that its end brought the others.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def note(number: int, frame: object) -> None:
            self.signal = number
            restore()
            on_first(number)

        def restore() -> None:
            for number, handler in usual.items():
                signal.signal(number, handler)

        for number in usual:
            signal.signal(number, note)
        stays = False
        try:
            yield
        except Exception:
            stays = after_errors
            raise
        finally:
            if not stays:
                restore()

    def abandon(self) -> None:
        """For work that need not be finished to call now and then. Raises `Abandoned` once a signal came."""
        if self.signal:
            raise Abandoned

    def leave(self) -> None:
        """Raises what the signal would have raised."""
        raise KeyboardInterrupt if self.signal == signal.SIGINT else Terminated


def work_of_all_ranks(work: Callable[[], T], world: World) -> list[T]:
    """On every rank what `work` returned on each data rank, in order. Raises `Abandoned` on all of them when
    it did on one."""
    try:
        done = [work()]
    except Abandoned:
        done = []
    parts = all_gather_objects(done, world)
    if not all(parts):
        raise Abandoned
    return [result for (result,) in parts]
