"""One worker process, and the channel to it.

Workers are plain subprocesses: they need no `__main__` guard, start from threads, spawned and daemonic
processes alike, and end with whoever started them, because the channel does.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

from .channel import Channel
from .worker import BROKEN, EXHAUSTED, Task

MAX_REPLY = 1 << 20
"""Bytes."""
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

    value: float | None = None
    key: str | None = None
    """The answer that was judged."""
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
    """One process, and the channel to it."""

    def __init__(self, task: Task) -> None:
        self.task, self.calls, self.spent, self.ready = task, 0, False, False
        self.is_async = False
        self.killing = threading.Lock()
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
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
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()

    def wait_until_ready(self) -> bool:
        """Whether the function is async, once the worker can call it. Raises `CannotLoad` when it never can,
        `OSError` when the worker does not come up."""
        if self.ready:
            return self.is_async
        deadline = time.monotonic() + START_LIMIT
        try:
            self.channel.send(pickle.dumps(self.task), deadline)
            reply = json.loads(self.channel.receive(deadline, MAX_REPLY))
        except (EOFError, TimeoutError, ValueError):
            self.spent = True
            raise OSError("the worker did not start") from None
        if reply["state"] == BROKEN:
            self.spent = True
            raise CannotLoad(reply["failure"])
        self.ready, self.is_async = True, reply["is_async"]
        return self.is_async

    def run(self, calls: list[Call]) -> list[Call]:
        """Finishes the calls. Returns those that one among them kept from being finished."""
        waiting = dict(enumerate(calls, start=self.calls))
        self.calls += len(calls)
        self.spent = self.calls >= CALLS_PER_WORKER
        deadline = time.monotonic() + self.task.time_limit
        try:
            jobs = [(number, call.arguments) for number, call in waiting.items()]
            self.channel.send(pickle.dumps(jobs), deadline)
            while waiting:
                reply = json.loads(self.channel.receive(deadline, MAX_REPLY))
                call = waiting.pop(reply["call"], None)
                if call is None:  # of an earlier call, which had its verdict
                    self.spent = True
                    continue
                self.spent |= reply["state"] == EXHAUSTED
                call.finish(Outcome(reply.get("value"), reply.get("key"), reply.get("failure")))
        except TimeoutError:
            failure = f"no verdict within {self.task.time_limit:g} s"
        except EOFError:
            failure = self._cause_of_death()
        except Exception as error:  # arguments that cannot be sent, a reply that is none
            failure = f"{type(error).__name__}: {error}"
        self.spent |= bool(waiting)
        if len(calls) > 1:
            return list(waiting.values())
        for call in waiting.values():
            call.finish(Outcome(failure=failure))
        return []

    def is_usable(self) -> bool:
        """Whether it still runs and has said nothing out of turn, which a later call would take for its
        own."""
        return self.exit_code() is None and not self.channel.has_message()

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
        """Ends the process and the channel to it. For the thread that reads from it."""
        self.kill()
        self.channel.close()
