"""What a process of several says when it ends with an error: once, and of whom it is about."""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable

from ..errors import UserError, first_line, one_line
from ..memory_advice import is_out_of_memory, without_advice
from ..parallel.watchdog import Watchdog
from .terminal import print_line


def last_words(error: Exception, watchdog: Watchdog, note: Callable[[str, str], None] | None = None) -> int:
    """Says what ended this process, unless a lower rank says the same, and returns its exit code. What a
    person can do something about, and the loss of another process, is one line; else it is the traceback.

    It may take some seconds: who is behind the failure of a collective shows in who keeps silent.
    """
    # torchrun ends all processes once one is gone; this one is about to end, and to say why.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    place, rank = watchdog.place, watchdog.world.rank
    if is_out_of_memory(error):
        error = without_advice(error, place)
    error = watchdog.explained(error)
    if note is not None:
        note("failed", first_line(error) or type(error).__name__)
    code = 2 if isinstance(error, UserError) else 1
    if not watchdog.is_first_to_say():
        return code
    line = one_line(error)
    if line is not None:
        spoken = watchdog.is_of_others or rank == 0 or f"rank {rank}" in line
        print_line(line if spoken else f"rank {rank}: {line}")
        return code
    print_line(f"rank {rank} failed in {place}, by an error that is not expected:")
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    return code
