"""Verdicts never hang: the pool outlives whatever the functions it calls do."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dapo.rewards.pool import CannotLoad, Pool
from dapo.rewards.process import Task

HERE = Path(__file__).parent
LIMIT = 1.5


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture
def make():
    pools = []

    def build(function="behave", workers=2, limit=LIMIT, memory=1 << 28) -> Pool:
        pools.append(Pool(Task(f"reward_functions:{function}", None, limit, memory), workers))
        return pools[-1]

    yield build
    for pool in pools:
        pool.close()


def ask(pool: Pool, response: str, answer: str = "yes"):
    return pool.submit(response, answer, None, None)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def wait_until_gone(pid: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is left over"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "deed, failure",
    [
        ("hang", "no verdict within 1.5 s"),
        ("sleep", "no verdict within 1.5 s"),
        ("hold the interpreter", "no verdict within 1.5 s"),
        ("ignore the alarm", "no verdict within 1.5 s"),
        ("crash", "the worker was killed by SIGSEGV"),
        ("exit", "SystemExit: 3"),
        ("leave", "the worker ended (exit code 3)"),
        ("raise", "RuntimeError: out of order"),
        ("devour", "more than 256 MiB"),
        ("recurse", "RecursionError"),
        ("unpicklable", "returned a function; it must be a bool or a number"),
        ("huge number", "OverflowError"),
        ("odd number", "ZeroDivisionError"),
        ("slow number", "no verdict within 1.5 s"),
        ("nan", "returned nan; it must be finite"),
        ("garble", "a message of"),
    ],
)
def test_a_call_that_fails_costs_no_other(make, deed, failure):
    pool = make(workers=1)
    started = time.monotonic()
    outcomes = [ask(pool, word).result(timeout=30) for word in ("yes", deed, "yes", "no")]
    assert [outcome.value for outcome in outcomes] == [1, None, 1, 0]
    assert failure in outcomes[1].failure and time.monotonic() - started < 2 * LIMIT + 10


def test_limits_are_kept_while_others_are_judged(make):
    """Four hung calls on two workers take two limits, not for ever."""
    pool = make()
    ask(pool, "yes").result(timeout=30)
    started = time.monotonic()
    hung = [ask(pool, "hang") for _ in range(4)]
    fine = [ask(pool, "yes") for _ in range(4)]
    assert all(future.result(timeout=30).failure for future in hung)
    assert all(future.result(timeout=30).value == 1 for future in fine)
    assert time.monotonic() - started < 2 * LIMIT + 8


def test_workers_are_kept_and_shared_by_threads(make):
    pool = make()
    with ThreadPoolExecutor(8) as threads:
        pids = list(threads.map(lambda _: int(ask(pool, "pid").result(timeout=30).value), range(100)))
    assert 1 <= len(set(pids)) <= 2 and os.getpid() not in pids
    assert all(map(alive, pids))
    pool.close()
    assert not any(map(alive, pids))
    assert ask(pool, "yes").result(timeout=30).value == 1  # it starts anew


def test_what_a_call_started_dies_with_it(make, tmp_path):
    note = tmp_path / "pid"
    assert ask(make(), "child", str(note)).result(timeout=30).failure
    wait_until_gone(int(note.read_text()), seconds=5)


def test_a_worker_that_died_idle_costs_no_call(make):
    pool = make(workers=1)
    pid = int(ask(pool, "pid").result(timeout=30).value)
    os.kill(pid, 9)
    while alive(pid):
        time.sleep(0.01)
    assert ask(pool, "yes").result(timeout=30).value == 1


@pytest.mark.parametrize("deed", ["fork", "forge"])
def test_a_verdict_goes_to_the_response_it_is_about(make, deed):
    """A function that forks comes back twice; what a worker says out of turn must not answer the next
    call."""
    pool = make(workers=1)
    for _ in range(3):
        ask(pool, deed, deed).result(timeout=30)
        words = ["no", "yes", "no", "yes"]
        assert [ask(pool, word).result(timeout=30).value for word in words] == [0, 1, 0, 1]


def test_closing_ends_what_waits(make):
    pool = make(workers=1, limit=60.0)
    futures = [ask(pool, "sleep") for _ in range(3)]
    time.sleep(0.2)
    threading.Timer(0.3, pool.close).start()
    assert all(future.result(timeout=20).failure for future in futures)


@pytest.mark.parametrize("response", ["NUL \0 byte", "\ud800 alone", "9" * 1_000_000, "😀"])
def test_any_text_arrives_whole(make, response):
    assert ask(make(), response, response).result(timeout=30).value == 1


def test_async_calls_wait_together(make):
    pool = make("patient", workers=1, limit=4.0)
    ask(pool, "0", "0").result(timeout=30)
    started = time.monotonic()
    futures = [ask(pool, "0.5", "0.5") for _ in range(40)]
    assert all(future.result(timeout=30).value == 1 for future in futures)
    assert time.monotonic() - started < 6  # 20 s one after the other
    assert ask(pool, "raise").result(timeout=30).failure == "RuntimeError: out of order"
    assert ask(pool, "99").result(timeout=30).failure == "no verdict within 4 s"


def test_an_async_call_that_blocks_costs_no_other(make):
    pool = make("patient", workers=1)
    ask(pool, "0", "0").result(timeout=30)
    futures = [ask(pool, word, "0.1") for word in ("0.1", "block", "0.1", "0.1")]
    outcomes = [future.result(timeout=40) for future in futures]
    assert [bool(outcome.failure) for outcome in outcomes] == [False, True, False, False]


@pytest.mark.parametrize(
    "path, complaint",
    [
        ("no_such_module:fn", "No module named 'no_such_module'"),
        ("reward_functions:nothing", "reward_functions has no nothing"),
        ("reward_functions:NOT_A_FUNCTION", "is a int, not a function"),
        ("reward_functions", "must be package.module:function"),
    ],
)
def test_a_function_that_cannot_be_imported(path, complaint):
    pool = Pool(Task(path, None, LIMIT, 1 << 28), 1)
    with pytest.raises(CannotLoad, match=complaint):
        pool.check()
    with pytest.raises(CannotLoad, match=complaint):
        ask(pool, "yes").result(timeout=30)
    pool.close()


PROGRAM = """
import multiprocessing, os, signal, sys
from dapo.rewards.pool import Pool
from dapo.rewards.process import Task
def ask(word):
    return pool.submit(word, "yes", None, None).result(30).value
def child(pipe):
    pipe.send(ask("yes"))
pool = Pool(Task("reward_functions:behave", None, 3.0, 1 << 28), 2)
print(int(ask("pid")), flush=True)
{then}
"""


def run(then: str) -> subprocess.CompletedProcess:
    program = PROGRAM.format(then=textwrap.dedent(then))
    environment = os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parent}"}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment
    )


@pytest.mark.parametrize(
    "then, code",
    [
        ("", 0),
        ("pool.submit('hang', '', None, None)", 0),
        ("raise RuntimeError", 1),
        ("os._exit(5)", 5),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("pool.submit('hang', '', None, None); import time; time.sleep(0.5); os.kill(os.getpid(), 9)", -9),
    ],
    ids=["end", "busy", "error", "_exit", "killed", "killed while busy"],
)
def test_no_worker_is_left_over(then, code):
    done = run(then)
    assert done.returncode == code, done.stderr
    wait_until_gone(int(done.stdout.split()[0]), seconds=6)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_have_workers_of_their_own(method, tmp_path):
    """Daemonic ones, which may start no process by multiprocessing, as well."""
    script = tmp_path / "trainer.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, sys
            from dapo.rewards import verify
            def child(pipe):
                pipe.send(verify(r"Answer: $\\\\sqrt{12}$", r"2\\\\sqrt{3}"))
            if __name__ == "__main__":
                assert verify(r"Answer: $\\\\sqrt{12}$", r"2\\\\sqrt{3}")
                context = multiprocessing.get_context(sys.argv[1])
                ours, theirs = context.Pipe()
                process = context.Process(target=child, args=(theirs,), daemon=True)
                process.start()
                assert ours.poll(30) and ours.recv() is True
                process.join(30)
                assert process.exitcode == 0
            """
        )
    )
    done = subprocess.run(
        [sys.executable, str(script), method],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(HERE.parent)},
    )
    assert done.returncode == 0, done.stderr
