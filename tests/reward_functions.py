"""Reward functions that misbehave, for the tests of the pool and of the scorer; imported by worker
processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

from dapo.rewards import register_mode
from dapo.rewards.channel import HEADER

NOT_A_FUNCTION = 3


class Odd:
    def __float__(self):
        raise ZeroDivisionError


class Slow:
    def __float__(self):
        time.sleep(600)


def write_to_the_channel(message: bytes) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode):
                os.write(fd, message)


def behave(response: str, answer: str):
    """Does what the response says, then says whether it is the answer."""
    match response:
        case "hang":
            while True:
                pass
        case "sleep":
            time.sleep(600)
        case "hold the interpreter":
            return 9**9**9**9  # one bytecode that never ends: no Python signal handler would ever run
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            sys.exit(3)
        case "leave":
            os._exit(3)
        case "raise":
            raise RuntimeError("out of order")
        case "devour":
            return len(bytearray(1 << 34))
        case "recurse":
            return behave("recurse", answer)
        case "unpicklable":
            return lambda: 0
        case "huge number":
            return 10**400
        case "odd number":
            return Odd()
        case "slow number":
            return Slow()
        case "nan":
            return float("nan")
        case "garble":
            write_to_the_channel(b"garbage" * 100)
        case "forge":
            message = json.dumps({"call": 0, "state": "done", "value": 1.0}).encode()
            write_to_the_channel(HEADER.pack(len(message)) + message)
            return 0
        case "fork":
            os.fork()
        case "text":
            return "yes"
        case "half":
            return 0.5
        case "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(answer).write_text(str(child.pid))
            time.sleep(600)
        case "pid":
            return os.getpid()
        case "ignore the alarm":
            signal.signal(signal.SIGALRM, signal.SIG_IGN)
            time.sleep(600)
    return response == answer


async def patient(response: str, answer: str) -> bool:
    """Waits for as many seconds as the answer says before it agrees; "block" holds the event loop."""
    if response == "block":
        time.sleep(600)
    if response == "raise":
        raise RuntimeError("out of order")
    await asyncio.sleep(float(response))
    return response == answer


@register_mode("even")
def even(response: str, answer: str) -> bool:
    return int(response) % 2 == 0


def has_level(response: str, answer: str, row: dict) -> bool:
    return row["level"] == int(response)


def brevity(response: str, answer: str) -> float:
    if response == "raise":
        raise RuntimeError("no brevity")
    return -len(response) / 10


async def waits(response: str, answer: str, row: dict) -> float:
    await asyncio.sleep(0.01)
    return float(row["bonus"])


def one_argument(response: str) -> bool:
    return True


def generous(*arguments, **named) -> bool:
    return True
