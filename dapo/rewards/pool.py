"""Calls a function in worker processes that are killed when it hangs, crashes or takes too much memory."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import weakref
from concurrent.futures import Future
from typing import Any

from .process import Call, CannotLoad, Outcome, Task, Worker

ASYNC_CALLS = 64
"""Of an async function, at the same time in one worker."""


class Pool:
    """Up to `workers` processes that call one function. Threads may share it. Once closed, it starts anew
    with the next call."""

    def __init__(self, task: Task, workers: int) -> None:
        self.task, self.workers = task, workers
        self._lock = threading.Lock()
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._slots: list[_Slot] = []
        self._idle = 0
        _POOLS.add(self)

    def submit(self, *arguments: Any) -> Future[Outcome]:
        """Calls the function with `arguments`; the future never raises but `CannotLoad`."""
        call = Call(arguments)
        with self._lock:
            if self._idle < self._queue.qsize() + 1 and len(self._slots) < self.workers:
                self._slots.append(_Slot(self, self._queue))
            self._queue.put(call)
        return call.future

    def check(self) -> None:
        """Starts a worker and waits until it can be called. Raises `CannotLoad` when it never can."""
        worker = Worker(self.task)
        try:
            worker.wait_until_ready()
        finally:
            worker.close()

    def close(self) -> None:
        """Ends the workers; calls that wait or run fail."""
        with self._lock:
            slots, calls = self._slots, self._queue
            self._slots, self._queue, self._idle = [], queue.SimpleQueue(), 0
        with contextlib.suppress(queue.Empty):
            while True:
                call = calls.get_nowait()
                if call is not None:
                    call.finish(Outcome(failure="closed"))
        for _ in slots:
            calls.put(None)
        for slot in slots:
            slot.close()


class _Slot:
    """A thread that feeds one worker at a time."""

    def __init__(self, pool: Pool, calls: queue.SimpleQueue) -> None:
        self.pool, self.calls = pool, calls
        self.worker: Worker | None = None
        self.closed = False
        self.thread = threading.Thread(target=self._run, name="dapo-verdicts", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while not self.closed:
            self._count_idle(+1)
            call = self.calls.get()
            self._count_idle(-1)
            if call is None:
                break
            self._work([call])
        self._drop_worker()

    def _count_idle(self, change: int) -> None:
        with self.pool._lock:
            if self.pool._queue is self.calls:
                self.pool._idle += change

    def _work(self, calls: list[Call]) -> None:
        """Finishes the calls, and with an async function those that wait as well, whatever happens."""
        try:
            if self.worker is not None and not self.worker.is_usable():
                self._drop_worker()
            if self.worker is None:
                self.worker = Worker(self.pool.task)
            is_async = self.worker.wait_until_ready()
            while is_async and len(calls) < ASYNC_CALLS and not calls[0].alone:
                try:
                    call = self.calls.get_nowait()
                except queue.Empty:
                    break
                if call is None:
                    self.calls.put(None)
                    break
                calls.append(call)
            left = self.worker.run(calls)
        except CannotLoad as error:
            for call in calls:
                call.fail_to_load(error)
            left = []
        except OSError as error:  # no process could be started
            for call in calls:
                call.finish(Outcome(failure=f"no worker: {error}"))
            left = []
        if self.worker is None or self.worker.spent:
            self._drop_worker()
        for call in left:
            call.alone = True
            self._work([call])

    def _drop_worker(self) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.close()

    def close(self) -> None:
        self.closed = True
        worker = self.worker
        if worker is not None:
            worker.kill()
        if self.thread is not threading.current_thread():
            self.thread.join(timeout=5)


_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for pool in list(_POOLS):
        pool.close()
