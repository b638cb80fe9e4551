"""What the commands share: one-line complaints, a console that survives its reader, orderly stops."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import Terminated

if TYPE_CHECKING:
    from rich.console import Console


SPEECH = 3.0
"""Seconds for the first process to say what ended all: torchrun ends the others with the first to go."""


def complain(message: str, code: int) -> int:
    """Prints one line to stderr and returns `code`. Of the processes of a run, the first one speaks."""
    if os.environ.get("RANK", "0") == "0":
        print_line(message)
    elif code in (1, 2):
        time.sleep(SPEECH)
    return code


def print_line(message: str) -> None:
    """In one write: processes of a run share the terminal."""
    sys.stderr.write(f"dapo: {' '.join(message.split())}\n")
    sys.stderr.flush()


def stoppable(work: Callable[[], int], stopped: Callable[[str, int], int], close: Callable[[], None]) -> int:
    """Runs `work` and returns its exit code. On Ctrl-C or SIGTERM returns what `stopped` does, given
    "interrupted" and 130, or "terminated" and 143. `close` runs in any case."""
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        return work()
    except (KeyboardInterrupt, Terminated) as stop:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one must not tear the goodbye
            signal.signal(number, signal.SIG_IGN)
        interrupted = isinstance(stop, KeyboardInterrupt)
        return stopped(*(("interrupted", 130) if interrupted else ("terminated", 143)))
    finally:
        close()


def _raise_terminated(signum: int, frame: object) -> None:
    raise Terminated


def open_console() -> Console:
    """Where a run speaks; warnings go there too, so that they do not tear the progress bar."""
    import logging

    from rich.console import Console
    from rich.logging import RichHandler
    from transformers.utils import logging as transformers_logging

    class RunConsole(Console):
        def on_broken_pipe(self) -> None:
            """Whoever read the output (`| head`) has left: go on in silence."""
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    console = RunConsole(markup=False, emoji=False, highlight=False)  # paths and responses as they are
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False)
    else:  # in a file, a line stays a line
        handler = logging.StreamHandler(sys.stdout)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    transformers_logging.disable_progress_bar()
    return console
