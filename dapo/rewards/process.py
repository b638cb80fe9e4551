"""One worker process, and the pipe to it.

Workers are plain subprocesses: they need no `__main__` guard, start from threads, spawned and daemonic
processes alike, and end with whoever started them, because the pipe does.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing import Pipe
from typing import Any

from .worker import BROKEN, DONE, EXHAUSTED, READY, Task

START_LIMIT = 60.0
"""Seconds a worker may take to import its function."""
CALLS_PER_WORKER = 5000
"""After which a worker is replaced: caches of the libraries it uses grow."""

_BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from dapo.rewards.worker import main
main(int(sys.argv[2]))
"""


@dataclass(frozen=True)
class Outcome:
    """What became of a call: its value, or why there is none."""

    value: Any = None
    failure: str | None = None


class CannotLoad(ValueError):
    """The function of a pool cannot be imported."""


class Call:
    def __init__(self, arguments: tuple) -> None:
        self.arguments, self.future = arguments, Future()
        self.alone = False
        """Must not share a worker: a call it was sent with may have blocked it."""

    def finish(self, outcome: Outcome) -> None:
        with contextlib.suppress(Exception):  # cancelled, or finished by `close`
            self.future.set_result(outcome)

    def fail_to_load(self, error: CannotLoad) -> None:
        with contextlib.suppress(Exception):
            self.future.set_exception(error)


class Worker:
    """One process, and the pipe to it."""

    def __init__(self, task: Task) -> None:
        self.task, self.calls, self.spent, self.ready = task, 0, False, False
        self.is_async = False
        self.killing = threading.Lock()
        self.connection, theirs = Pipe()
        boot = [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(theirs.fileno())]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        try:
            self.process = subprocess.Popen(
                boot,
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward function prints is for the person, not for the command's output
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the trainer, which then closes the pool
                env=environment,
            )
        finally:
            theirs.close()
        self.started = time.monotonic()

    def wait_until_ready(self) -> bool:
        """Whether the function is async, once the worker can call it."""
        if self.ready:
            return self.is_async
        state, detail = None, None
        with contextlib.suppress(EOFError, OSError):
            self.connection.send(self.task)
            if self.connection.poll(START_LIMIT):
                state, detail = self.connection.recv()
        if state == READY:
            self.ready, self.is_async = True, detail
            return detail
        self.spent = True
        if state == BROKEN:
            raise CannotLoad(detail)
        raise OSError("the worker did not start")

    def run(self, calls: list[Call]) -> list[Call]:
        """Finishes the calls. Returns those that one among them kept from being finished."""
        waiting = dict(enumerate(calls))
        self.calls += len(calls)
        self.spent = self.calls >= CALLS_PER_WORKER
        deadline = time.monotonic() + self.task.time_limit
        failure = f"no verdict within {self.task.time_limit:g} s"
        try:
            self.connection.send([(number, call.arguments) for number, call in waiting.items()])
            while waiting and self.connection.poll(max(0.0, deadline - time.monotonic())):
                number, (state, value) = self.connection.recv()
                self.spent |= state == EXHAUSTED
                waiting.pop(number).finish(Outcome(value) if state == DONE else Outcome(failure=value))
        except (EOFError, OSError):
            failure = self._cause_of_death()
        except Exception as error:  # arguments that cannot be sent
            failure = f"{type(error).__name__}: {error}"
        self.spent |= bool(waiting)
        if len(calls) > 1:
            return list(waiting.values())
        for call in waiting.values():
            call.finish(Outcome(failure=failure))
        return []

    def _cause_of_death(self) -> str:
        deadline = time.monotonic() + 1
        while (code := self.exit_code()) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        if code == -signal.SIGALRM:
            return f"no verdict within {self.task.time_limit:g} s"
        if code is None or code >= 0:
            return f"the worker ended (exit code {code})"
        return f"the worker was killed by {signal.Signals(-code).name}"

    def exit_code(self) -> int | None:
        """As of `subprocess`, without releasing the process's number, which `kill` needs; None while it
        runs."""
        if self.process.returncode is not None:
            return self.process.returncode
        try:
            found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another thread has just waited for it
            return self.process.wait()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def kill(self) -> None:
        """Ends the process and what it may have started. Any thread may call it, and more than one."""
        with self.killing:
            if self.process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=5)

    def close(self) -> None:
        """Ends the process and the pipe to it. For the thread that reads from it."""
        self.kill()
        self.connection.close()
