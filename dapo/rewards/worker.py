"""A process that judges, and that the kernel kills when a verdict takes too long or too much memory.

Started by `pool.py`; imports no more than the function it judges with.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from .calls import prepare_call

READY, BROKEN = "ready", "broken"
DONE, FAILED = "done", "failed"
EXHAUSTED = "exhausted"
"""Failed for want of memory; the worker ends."""


@dataclass(frozen=True)
class Task:
    """What a worker does all its life."""

    function: str
    """`package.module:function`, plain or async, called as `function(response, answer)`, with the keyword
    `row` where it has one."""
    key: str | None
    """Import path of what reads the answer out of a response, or None."""
    time_limit: float
    """Seconds from sending a call to its outcome; a fifth of it, at most 1 s, is for starting and killing."""
    memory_limit: int
    """Bytes beyond what the imports take."""

    @property
    def own_limit(self) -> float:
        """Seconds the call itself may take."""
        return self.time_limit - min(1.0, self.time_limit / 5)


def main(connection_fd: int) -> None:
    connection = Connection(connection_fd)
    task: Task = connection.recv()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # says of each call that it has no time limit
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    try:
        function = prepare_call(task.function, task.key)
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{task.function!r}: {type(error).__name__}: "
        connection.send((BROKEN, f"{kind}{error}"))
        return
    _limit_memory(task.memory_limit)
    is_async = inspect.iscoroutinefunction(function)
    connection.send((READY, is_async))
    serve = _serve_async if is_async else _serve
    # These say that whoever asked is gone.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError, KeyboardInterrupt):
        serve(connection, function, task)
    os._exit(0)  # what the function may have left running must not hold the process


def _serve(connection: Connection, function: Callable, task: Task) -> None:
    while True:
        ((number, arguments),) = connection.recv()
        # The kernel's own action, which no code that holds the interpreter can delay.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, task.own_limit)
        try:
            outcome = DONE, function(*arguments)
        except MemoryError:
            outcome = EXHAUSTED, f"more than {task.memory_limit >> 20} MiB"
        except BaseException as error:
            outcome = FAILED, _describe(error)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _send(connection, number, outcome)
        if outcome[0] == EXHAUSTED:
            return


def _serve_async(connection: Connection, function: Callable, task: Task) -> None:
    async def call(number: int, arguments: tuple) -> None:
        try:
            outcome = DONE, await asyncio.wait_for(function(*arguments), task.own_limit)
        except asyncio.TimeoutError:
            outcome = FAILED, f"no verdict within {task.time_limit:g} s"
        except BaseException as error:
            outcome = FAILED, _describe(error)
        _send(connection, number, outcome)

    async def call_all(jobs: list) -> None:
        await asyncio.gather(*(call(number, arguments) for number, arguments in jobs))

    with asyncio.Runner() if hasattr(asyncio, "Runner") else _Runner() as runner:  # one loop for all batches
        while True:
            runner.run(call_all(connection.recv()))


class _Runner:
    """`asyncio.Runner` for Python 3.10."""

    def __enter__(self) -> _Runner:
        self.loop = asyncio.new_event_loop()
        return self

    def run(self, work: Any) -> None:
        self.loop.run_until_complete(work)

    def __exit__(self, *exc_info: object) -> None:
        self.loop.close()


def _send(connection: Connection, number: int, outcome: tuple[str, Any]) -> None:
    try:
        connection.send((number, outcome))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:  # what the function returned cannot be sent
        connection.send((number, (FAILED, _describe(error))))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _limit_memory(limit: int) -> None:
    """Caps the address space at what is in use now plus `limit`; where the system says what that is."""
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    except (OSError, ValueError):
        pass
