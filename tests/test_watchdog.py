"""Who waits for whom, who is gone: as sentences from notes, and as whole runs on two processes say it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from processes import TESTS, environment, shared_launch, torchrun
from tiny import build_tiny_model, tiny_config

import dapo.parallel.watchdog as watchdog
from dapo.config import ParallelConfig
from dapo.errors import TrainingStopped, UserError
from dapo.parallel import Watchdog, World, phase
from dapo.parallel.blame import describe_gone, describe_timeout, describe_wait, find_wait, ranks, silent
from dapo.parallel.notes import Note

NOW = 10_000.0


def note(rank: int, name: str, order: tuple[int, int], ago: float = 0.0, **values) -> Note:
    at = NOW - ago
    return Note(rank, "a", 10 + rank, name, 12, at, at, order=order, **{"heard": NOW - 1, **values})


def said(notes: list[Note], size: int | None = None) -> str | None:
    wait = find_wait(notes, size or len(notes), NOW)
    return None if wait is None else describe_wait(wait, NOW)


def test_the_rank_that_did_not_come_to_a_collective_is_named() -> None:
    notes = [note(r, "generation", (5, 0), 610 - r, waiting=True) for r in range(8)]
    notes[1] = note(1, "generation", (4, 3), 615)
    assert said(notes) == (
        "ranks 0, 2-7 have waited 610 s in generation of step 12 for rank 1, which is in generation of step 12 "
        "since 615 s (last heard of 1 s ago, host a, pid 11)"
    )
    notes[4] = note(4, "reward", (4, 9), 20, heard=NOW - 300)
    text = said(notes)
    assert "ranks 0, 2-3, 5-7 have waited" in text and "for rank 1, which" in text
    assert text.endswith(
        "; for rank 4, which is in reward of step 12 since 20 s (last heard of 300 s ago, host a, pid 14): the "
        "process is gone or stopped"
    )


def test_of_many_ranks_four_are_described() -> None:
    notes = [note(0, "generation", (5, 0), 700, waiting=True)]
    notes += [note(r, "generation", (4, 1), 800) for r in range(1, 8)]
    assert "rank 4, which" in said(notes) and "rank 5" not in said(notes)
    assert said(notes).endswith("; for 3 more ranks")


def test_within_an_update_who_is_ahead_waits() -> None:
    notes = [note(0, "update", (7, 3), 50), note(1, "update", (7, 2), 70), note(2, "update", (7, 3), 40)]
    assert said(notes).startswith(
        "ranks 0, 2 have waited 50 s in update of step 12 for rank 1, which is in update"
    )
    notes = [note(0, "update", (7, 3), 50), note(1, "update", (8, 0), 30, waiting=True)]
    assert said(notes).startswith("rank 1 has waited 30 s in update of step 12 for rank 0")


def test_where_none_is_behind_none_is_accused() -> None:
    for waiting, name in ((False, "update"), (True, "generation")):
        notes = [note(r, name, (7, 0), 90 - r, waiting=waiting) for r in range(3)]
        assert said(notes).startswith(f"ranks 0-2 have been in {name} of step 12 for 90 s without getting on")


def test_work_is_no_wait() -> None:
    assert said([note(r, "generation", (4, r), 9000) for r in range(3)]) is None  # all generate, for hours
    assert (
        said([note(0, "generation", (9, 1), 900), note(1, "sync", (8, 0))]) is None
    )  # no collective is near
    assert said([]) is None
    assert said([note(0, "update", (7, 0))], size=2) is None  # the other has not said anything yet


def test_a_collective_that_just_ends_is_no_wait() -> None:
    assert said([note(0, "generation", (5, 1)), note(1, "generation", (5, 0), waiting=True)]) is None


def test_a_timeout_that_nobody_can_be_blamed_for_says_so() -> None:
    text = describe_timeout([note(r, "loading", (0, 0)) for r in range(2)], 2, 60.0)
    assert (
        text
        == "parallel.timeout (60 s) is over: a collective did not end, and who was awaited cannot be told"
    )


def test_silence_is_of_those_that_did_not_say_goodbye() -> None:
    before = [note(r, "update", (1, 0), beat=5) for r in range(4)]
    after = [
        replace(before[0], beat=8),
        before[1],
        replace(before[2], ended="lost"),
        replace(before[3], ended="left"),
    ]
    assert silent(before, after) == [before[1]]
    assert describe_gone([before[1]]).startswith(
        "rank 1 (host a, pid 11) is gone; it was last in update of step 12."
    )


def test_ranks_are_listed_by_stretches() -> None:
    assert ranks([note(r, "sync", (0, 0)) for r in (7, 0, 2, 3, 4, 9, 10)]) == "ranks 0, 2-4, 7, 9-10"
    assert ranks([note(3, "sync", (0, 0))]) == "rank 3"


class Board:
    """Notes that no store holds."""

    def __init__(self, notes: list[Note]) -> None:
        self.notes, self.own, self.broken = notes, notes[0], False

    def read(self) -> list[Note]:
        return self.notes

    def change(self, **values) -> None:
        self.own = replace(self.own, **values)


@pytest.fixture
def of_two():
    """A watchdog of one of two processes, with notes that are given."""

    def make(notes: list[Note], **options) -> Watchdog:
        dog = Watchdog(World(torch.device("cpu")), ParallelConfig(**options))
        dog.notes, dog.world = Board(notes), World(torch.device("cpu"), notes[0].rank, 2)
        return dog

    return make


def test_warnings_come_at_growing_intervals_and_before_the_end(of_two, caplog) -> None:
    start = time.time()
    notes = [note(0, "generation", (5, 0), waiting=True), note(1, "generation", (4, 0))]
    notes = [replace(each, since=start, changed=start, heard=start) for each in notes]
    dog, warned = of_two(notes, warn_after=100, timeout=1000), []
    for now in range(1, 1000):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            dog._look(start + now, 5)
        warned += [now] * len(caplog.messages)
    assert warned == [100, 200, 400, 800, 990]
    dog.notes.notes = [replace(each, changed=start + 1000) for each in notes]
    dog._look(start + 1001, 5)  # the next wait is another one
    with caplog.at_level(logging.WARNING):
        dog._look(start + 1150, 5)
    assert "for rank 1" in caplog.text and "after 1000 s (parallel.timeout) the run fails" in caplog.text


def test_places_are_counted_alike_after_what_one_rank_skipped(of_two) -> None:
    """Generation is abandoned on one rank: it is not behind at the next collective."""
    dogs = [of_two([note(rank, "training", (0, 0))]) for rank in range(2)]
    for dog in dogs:
        with (
            pytest.raises(ZeroDivisionError) if dog is dogs[0] else phase("nothing"),
            dog.phase("generation", 3),
        ):
            if dog is dogs[0]:
                raise ZeroDivisionError
            with dog.phase("reward"):
                assert dog.place == "reward of step 3"
    assert dogs[0].place == "generation of step 3"  # where it was when it failed
    assert dogs[0].notes.own.order != dogs[1].notes.own.order
    for dog in dogs:
        with dog.waiting():
            assert dog.notes.own.waiting
    assert dogs[0].notes.own.order == dogs[1].notes.own.order and not dogs[0].notes.own.waiting


@pytest.mark.parametrize(
    ("error", "collective"),
    [
        (RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5"), True),
        (RuntimeError("[...] Timed out waiting 3000ms for recv operation to complete"), True),
        (torch.distributed.DistBackendError("NCCL communicator was aborted on rank 0."), True),
        (torch.distributed.DistStoreError("wait timeout after 2000ms, keys: /x"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (UserError("data.train: connection refused by the file"), False),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (TrainingStopped("step 3: too few groups"), False),
    ],
)
def test_errors_of_collectives_are_told_from_others(
    of_two, monkeypatch, error: Exception, collective: bool
) -> None:
    monkeypatch.setattr(watchdog, "SILENCE", 0.0)
    dog = of_two([note(0, "update", (5, 0)), note(1, "update", (4, 0), ended="failed", reason="it is tired")])
    explained = dog.explained(error)
    if collective:
        assert isinstance(explained, TrainingStopped) and dog.is_of_others
        assert str(explained) == "rank 1 (host a, pid 11) failed in update of step 12: it is tired"
    else:
        assert explained is error and dog.notes.own.ended == "failed"


def test_with_one_process_nothing_is_noted() -> None:
    dog = Watchdog(World(torch.device("cpu")), ParallelConfig())
    with phase("update", 1), dog.phase("generation"), dog.waiting(), watchdog.waiting():
        assert list(watchdog.each([1, 2])) == [1, 2] and watchdog.current() is None
    dog.close()


FORKED = ("sleeper", "killed", "first_killed", "timeout", "bug_everywhere", "memory")
"""The cases of watchdog_cases.py that run without torchrun."""


def launch(folder: Path) -> dict[str, dict]:
    """All cases, and one of them under the real torchrun, beside each other."""
    (folder / "real").mkdir()
    model = build_tiny_model(folder / "model")
    script, config = str(TESTS / "watchdog_cases.py"), tiny_config(folder, model)
    output = (folder / "bug.log").open("w")
    command = torchrun(2, script, str(tiny_config(folder / "real", model)), "bug")
    real = subprocess.Popen(command, env=environment(), stdout=output, stderr=subprocess.STDOUT)
    command = [sys.executable, script, str(folder), str(config), *FORKED]
    try:
        subprocess.run(command, env=environment(), check=True, timeout=200)
        code = real.wait(100)
    finally:
        real.kill()
    verdicts = {name: json.loads((folder / f"{name}.json").read_text()) for name in FORKED}
    return verdicts | {"bug": {"codes": [code]}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """By name: exit codes, how long the second process went on after the first had failed, and the log, its
    spaces made one."""
    verdicts, folder = shared_launch(tmp_path_factory, "watchdog", launch)
    logs = {name: (folder / f"{name}.log").read_text() for name in verdicts}
    return {name: (verdict, logs[name]) for name, verdict in verdicts.items()}


def lines(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("dapo: ")]


def test_a_wait_is_warned_of_while_rank_0_is_in_the_collective(runs) -> None:
    verdict, log = runs["sleeper"]
    text = " ".join(log.split())
    assert verdict["codes"] == [0, 0] and lines(log) == []
    assert (
        "rank 0 has waited 1 s in generation of step 2 for rank 1, which is in generation of step 2" in text
    )
    assert 1 <= text.count("rank 0 has waited") <= 2  # at 1 s and at 2 s
    assert "3 steps, 3 updates" in text


@pytest.mark.parametrize(
    ("name", "gone", "place"), [("killed", 1, "update"), ("first_killed", 0, "generation")]
)
def test_a_rank_that_is_killed_is_named_by_the_other(runs, name: str, gone: int, place: str) -> None:
    verdict, log = runs[name]
    (line,) = lines(log)
    assert verdict["codes"][gone] == -9 and verdict["codes"][1 - gone] == 1 and verdict["seconds"] < 12
    assert (
        line.startswith(f"dapo: rank {gone} (host ") and f"is gone; it was last in {place} of step 2." in line
    )
    assert "Traceback" not in log


def test_a_timeout_says_whom_the_others_waited_for(runs) -> None:
    verdict, log = runs["timeout"]
    (line,) = lines(log)
    assert verdict["codes"] == [1, 1] and "Traceback" not in log
    assert line.startswith(
        "dapo: parallel.timeout (6 s) is over: rank 0 has waited 6 s in generation of step 2 for"
    )
    assert "for rank 1, which is in generation of step 2" in line
    assert "has waited 1 s" not in log  # parallel.warn_after is off


def test_a_bug_on_one_rank_is_traced_once_under_torchrun(runs) -> None:
    verdict, log = runs["bug"]
    first, second = lines(log)
    assert verdict["codes"] == [1] and log.count('raise ZeroDivisionError("a bug")') == 1
    assert first == "dapo: rank 1 failed in generation of step 2, by an error that is not expected:"
    assert second.endswith("failed in generation of step 2: ZeroDivisionError: a bug")
    times = [line.split()[-1] for line in log.splitlines() if line.split()[:1] == ["time"]]
    first, second = (time.strptime(text, "%Y-%m-%d_%H:%M:%S") for text in (min(times), max(times)))
    assert len(times) == 2 and time.mktime(second) - time.mktime(first) <= 10


def test_a_bug_on_all_ranks_is_traced_once(runs) -> None:
    verdict, log = runs["bug_everywhere"]
    assert verdict["codes"] == [1, 1] and log.count("Traceback") == 1
    assert lines(log) == ["dapo: rank 0 failed in update of step 2, by an error that is not expected:"]


def test_memory_that_ends_on_one_rank_is_told_by_it_and_by_rank_0(runs) -> None:
    verdict, log = runs["memory"]
    own, other = sorted(lines(log), key=lambda line: "failed in" in line)
    assert verdict["codes"] == [1, 1] and "Traceback" not in log
    assert own.startswith("dapo: out of memory on rank 1 in the update: a micro-batch of")
    assert "train.max_tokens_per_micro_batch=" in own and "free 1.25 GiB of 79.10 GiB" in own
    assert "failed in update of step 2: out of memory on rank 1" in other
