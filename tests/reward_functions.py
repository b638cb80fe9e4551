"""Reward functions that misbehave, for the tests of the pool and of the scorer; imported by worker
processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dapo.rewards import register_mode

NOT_A_FUNCTION = 3


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
