"""A process that judges, and that the kernel kills when a verdict takes too long or too much memory.

Started by `pool.py`; imports no more than the function it judges with.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import math
import os
import pickle
import resource
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .calls import prepare_call
from .channel import Channel

READY, BROKEN = "ready", "broken"
DONE, FAILED = "done", "failed"
MAX_KEY = 2000
"""Characters of an answer that are reported."""
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


def main(socket_fd: int) -> None:
    channel = Channel(socket.socket(fileno=socket_fd))
    task: Task = pickle.loads(channel.receive())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # says of each call that it has no time limit
    logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)
    try:
        function = prepare_call(task.function, task.key)
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{task.function!r}: {type(error).__name__}: "
        _reply(channel, state=BROKEN, failure=f"{kind}{error}")
        return
    _limit_memory(task.memory_limit)
    is_async = inspect.iscoroutinefunction(function)
    _reply(channel, state=READY, is_async=is_async)
    serve = _serve_async if is_async else _serve
    # These say that whoever asked is gone.
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        serve(channel, function, task)
    os._exit(0)  # what the function may have left running must not hold the process


def _serve(channel: Channel, function: Callable, task: Task) -> None:
    own_pid = os.getpid()
    while True:
        ((number, arguments),) = pickle.loads(channel.receive())
        # The kernel's own action, which no code that holds the interpreter can delay.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, task.own_limit)
        try:
            outcome = _as_reply(*function(*arguments))
        except MemoryError:
            outcome = {"state": EXHAUSTED, "failure": f"more than {task.memory_limit >> 20} MiB"}
        except BaseException as error:
            outcome = {"state": FAILED, "failure": _describe(error)}
        signal.setitimer(signal.ITIMER_REAL, 0)
        if os.getpid() != own_pid:  # a child that the function forked came back
            os._exit(0)
        _reply(channel, call=number, **outcome)
        if outcome["state"] == EXHAUSTED:
            return


def _serve_async(channel: Channel, function: Callable, task: Task) -> None:
    async def call(number: int, arguments: tuple) -> None:
        try:
            outcome = _as_reply(*await asyncio.wait_for(function(*arguments), task.own_limit))
        except asyncio.TimeoutError:
            outcome = {"state": FAILED, "failure": f"no verdict within {task.time_limit:g} s"}
        except BaseException as error:
            outcome = {"state": FAILED, "failure": _describe(error)}
        _reply(channel, call=number, **outcome)

    async def call_all(jobs: list) -> None:
        await asyncio.gather(*(call(number, arguments) for number, arguments in jobs))

    with asyncio.Runner() if hasattr(asyncio, "Runner") else _Runner() as runner:  # one loop for all batches
        while True:
            runner.run(call_all(pickle.loads(channel.receive())))


class _Runner:
    """`asyncio.Runner` for Python 3.10."""

    def __enter__(self) -> _Runner:
        self.loop = asyncio.new_event_loop()
        return self

    def run(self, work: Any) -> None:
        self.loop.run_until_complete(work)

    def __exit__(self, *exc_info: object) -> None:
        self.loop.close()


def _as_reply(value: Any, key: str | None) -> dict[str, Any]:
    """What the function returned as a number: no object of its own ever leaves the worker."""
    kind = type(value).__name__
    if isinstance(value, (str, bytes)) or not hasattr(type(value), "__float__"):
        return {"state": FAILED, "failure": f"returned a {kind}; it must be a bool or a number"}
    number = float(value)
    if not math.isfinite(number):
        return {"state": FAILED, "failure": f"returned {number}; it must be finite"}
    return {"state": DONE, "value": number, "key": None if key is None else str(key)[:MAX_KEY]}


def _reply(channel: Channel, **reply: Any) -> None:
    channel.send(json.dumps(reply).encode())


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
