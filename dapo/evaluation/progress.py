"""What a person sees of an evaluation: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import threading
import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 30.0
"""Seconds between lines where there is no terminal."""


class EvalProgress:
    """Counts responses as they are judged."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self.console, self.total, self.before, self.done = console, total, done, done
        self.right = self.tokens = 0
        self.summary = ""
        self.started = time.perf_counter()
        self.bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=30),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task("generating", total=total, completed=done)
        self.ended = threading.Event()
        # Responses come in bursts, a batch at a time: lines by the clock, not by the first of a burst.
        self.speaker = threading.Thread(target=self._speak, daemon=True)

    def __enter__(self) -> EvalProgress:
        self.bar.start()
        if not self.console.is_terminal:
            self.speaker.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self.bar.stop()
        self.ended.set()
        if self.speaker.is_alive():
            self.speaker.join()

    def _speak(self) -> None:
        said = self.done
        while not self.ended.wait(LINE_EVERY):
            if self.done > said:
                said = self.done
                self.console.print(f"{said}/{self.total} responses  {self.summary}", soft_wrap=True)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    def add(self, right: bool, tokens: int) -> None:
        self.done += 1
        self.right += right
        self.tokens += tokens
        new = self.done - self.before
        self.summary = f"right {self.right / new:.1%} of {new}  {self.tokens_per_s:.0f} tok/s"
        self.bar.update(self.task, completed=self.done, description=self.summary)
