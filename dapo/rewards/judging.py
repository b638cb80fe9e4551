"""One response, one verdict: at once where that is safe, else in a worker."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from .loading import load_function
from .modes import Mode
from .pool import Outcome, Pool
from .process import Task
from .verdict import Verdict


@dataclass(frozen=True)
class Limits:
    """What a verdict may take."""

    time_limit: float = 5.0
    """Seconds, once a worker is free for it."""
    memory_mb: int = 1024
    """MiB of a worker's memory beyond its imports."""
    workers: int | None = None
    """Processes for each mode; None: one a CPU, at most 16."""

    @property
    def processes(self) -> int:
        if self.workers is not None:
            return self.workers
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(cpus, 16)


_pools: dict[tuple[str, str | None, Limits], Pool] = {}
_pools_lock = threading.Lock()


def _forget_pools() -> None:
    """A forked child has the parent's pools without the threads that feed them."""
    global _pools_lock
    _pools_lock = threading.Lock()
    _pools.clear()


os.register_at_fork(after_in_child=_forget_pools)


def pool_of(function: str, key: str | None, limits: Limits) -> Pool:
    """The process's pool for a function, shared by all who judge with it."""
    with _pools_lock:
        found = _pools.get((function, key, limits))
        if found is None:
            task = Task(function, key, limits.time_limit, limits.memory_mb << 20)
            found = _pools[function, key, limits] = Pool(task, limits.processes)
        return found


def close_pools(limits: Limits) -> None:
    """Ends the workers of all pools with these limits."""
    with _pools_lock:
        closing = [pool for (_, _, of_pool), pool in _pools.items() if of_pool == limits]
    for pool in closing:
        pool.close()


def submit(
    mode: Mode, response: str, answer: str, row: dict[str, Any] | None, pattern: str | None, limits: Limits
) -> Future[Verdict]:
    """The verdict on a response, or on what `pattern` finds last in it. The future raises nothing but
    `CannotLoad`, when the mode's function cannot be imported."""
    if mode.quick is not None and pattern is None:
        verdict = _at_once(mode, response, answer)
        if verdict is not None:
            done: Future[Verdict] = Future()
            done.set_result(verdict)
            return done
    outcome = pool_of(mode.judge, mode.key, limits).submit(response, answer, row, pattern)
    return when_done([outcome], _verdict)


def _at_once(mode: Mode, response: str, answer: str) -> Verdict | None:
    try:
        correct = mode.quick(response, answer)
        return None if correct is None else Verdict(correct, answer=load_function(mode.key)(response))
    except Exception as error:
        return Verdict(False, failure=f"{type(error).__name__}: {error}")


def _verdict(done: Future[Outcome]) -> Verdict:
    outcome = done.result()
    if outcome.failure is not None:
        return Verdict(False, failure=outcome.failure)
    return Verdict(outcome.value == 1.0, answer=outcome.key)


def when_done(futures: list[Future], combine: Callable[..., Any]) -> Future:
    """A future for what `combine` makes of the futures once all of them are done."""
    combined: Future = Future()
    left, lock = len(futures), threading.Lock()

    def one_done(_: Future) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        try:
            combined.set_result(combine(*futures))
        except BaseException as error:
            combined.set_exception(error)

    for future in futures:
        future.add_done_callback(one_done)
    return combined
