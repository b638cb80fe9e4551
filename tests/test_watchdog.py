"""Who waits for whom, who is gone: from the notes of processes to sentences."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import dapo.parallel.notes as notes_module
import dapo.parallel.watchdog as watchdog
from dapo.config import ParallelConfig
from dapo.errors import TrainingStopped, UserError
from dapo.parallel import Watchdog, World, phase
from dapo.parallel.blame import describe_gone, describe_timeout, describe_wait, find_wait, ranks, silent
from dapo.parallel.notes import Note, Notes

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
        "ranks 0, 2-7 have waited 610 s in generation of step 12 for rank 1, which is in generation of step "
        "12 since 615 s (last heard of 1 s ago, host a, pid 11)"
    )
    notes[4] = note(4, "reward", (4, 9), 20, heard=NOW - 300)
    text = said(notes)
    assert "ranks 0, 2-3, 5-7 have waited" in text and "for rank 1, which" in text
    assert text.endswith(
        "; for rank 4, which is in reward of step 12 since 20 s (last heard of 300 s ago, host a, pid 14): "
        "the process is gone or stopped"
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
        (dist.DistBackendError("NCCL communicator was aborted on rank 0."), True),
        (dist.DistStoreError("wait timeout after 2000ms, keys: /x"), True),
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


def test_a_loss_is_told_by_the_rank_that_met_it(of_two) -> None:
    own, other = note(0, "update", (5, 0), ended="lost"), note(1, "update", (5, 0))
    assert not of_two([own, other]).was_lost_elsewhere()
    assert of_two([own, replace(other, ended="lost")]).was_lost_elsewhere()


def test_with_one_process_nothing_is_noted() -> None:
    dog = Watchdog(World(torch.device("cpu")), ParallelConfig())
    with phase("update", 1), dog.phase("generation"), dog.waiting(), watchdog.waiting():
        assert list(watchdog.each([1, 2])) == [1, 2] and watchdog.current() is None
    dog.close()


@pytest.fixture
def store(monkeypatch):
    """Of a process group of this process alone, with signs of life at short intervals."""
    monkeypatch.setattr(notes_module, "BEAT", 0.05)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


def test_notes_are_read_of_those_that_wrote_and_show_who_lives(store) -> None:
    first = Notes(World(torch.device("cpu"), rank=0, size=3))
    last = Notes(World(torch.device("cpu"), rank=2, size=3))
    last.change(phase="update", step=4, order=(3, 1))
    before = first.read()
    assert [each.rank for each in before] == [0, 2]  # rank 1 is not there yet
    assert before[1].place == "update of step 4" and before[1].order == (3, 1)
    last.close()
    before = first.read()
    deadline = time.monotonic() + 10
    while first.read()[0].beat == before[0].beat and time.monotonic() < deadline:
        time.sleep(0.01)
    after = first.read()
    assert silent(before, after) == [after[1]] and after[0].heard > before[0].heard
    first.close()
