"""From the notes of all processes to sentences: who waits for whom, who is gone, who failed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from .notes import BEAT, Note

MEETING = ("update", "sync")
"""Phases in which processes meet all the time, inside FSDP: who is ahead of another waits for it."""
LONG_SILENCE = 10 * BEAT
NAMED = 4
"""Ranks that a sentence describes; of more it gives the number."""


@dataclass(frozen=True)
class Wait:
    waiting: list[Note]
    awaited: list[Note]
    """Those that are behind. Empty: all stand at the same place."""
    seconds: float
    """Of who has waited longest."""


def find_wait(notes: Sequence[Note], size: int, now: float) -> Wait | None:
    """Who waits for whom, if anyone does.

    Args:
        notes: those there are, of `size` processes.
        now: seconds since the epoch.
    """
    if not notes:
        return None
    least = min(note.order for note in notes)
    waiting = [n for n in notes if n.waiting or (n.phase in MEETING and n.order > least)]
    # In one place of the update: within a forward or a backward nobody can be told from the others.
    together = len(notes) == size and all(n.order == least for n in notes)
    if together and all(n.waiting or n.phase in MEETING for n in notes):
        waiting = list(notes)
    if not waiting:
        return None
    furthest = max(note.order for note in waiting)
    awaited = [n for n in notes if n.order < furthest and not n.waiting]
    if not awaited and not together:
        return None  # the moment at which a collective ends
    waiting = [n for n in waiting if n not in awaited]
    return Wait(waiting, awaited, max(now - note.changed for note in waiting))


def describe_wait(wait: Wait, now: float) -> str:
    who, seconds = ranks(wait.waiting), round(wait.seconds)
    place = wait.waiting[0].place
    have = "has" if len(wait.waiting) == 1 else "have"
    if not wait.awaited:
        return (
            f"{who} {have} been in {place} for {seconds} s without getting on, and none is behind another: "
            "look at what the processes do (`py-spy dump --pid PID`), and at the network between them"
        )
    return f"{who} {have} waited {seconds} s in {place} for {_listed(wait.awaited, now)}"


def _listed(notes: Sequence[Note], now: float) -> str:
    parts = [f"rank {note.rank}, which {_state(note, now)}" for note in notes[:NAMED]]
    more = [f"{len(notes) - NAMED} more ranks"] if len(notes) > NAMED else []
    return "; for ".join(parts + more)


def _state(note: Note, now: float) -> str:
    if note.ended == "failed":
        return f"failed in {note.place} ({note.process}): {note.reason}"
    silence = max(0, round(now - note.heard))
    state = f"is in {note.place} since {max(0, round(now - note.since))} s"
    if note.ended == "left":
        state = "has left"
    gone = ": the process is gone or stopped" if silence > LONG_SILENCE else ""
    return f"{state} (last heard of {silence} s ago, {note.process}){gone}"


def describe_gone(notes: Sequence[Note]) -> str:
    each = [f"rank {n.rank} ({n.process}) is gone; it was last in {n.place}" for n in notes[:NAMED]]
    if len(notes) > NAMED:
        each.append(f"so are {len(notes) - NAMED} more ranks")
    return (
        f"{'; '.join(each)}. Where nobody ended it, the machine did, most often for want of memory "
        "(`dmesg` on that host tells)"
    )


def describe_failed(note: Note) -> str:
    return f"rank {note.rank} ({note.process}) failed in {note.place}: {note.reason}"


def silent(before: Sequence[Note], after: Sequence[Note]) -> list[Note]:
    """Those that gave no sign of life between two readings, and did not say that they end."""
    beats = {note.rank: note.beat for note in before}
    return [n for n in after if n.ended is None and n.beat == beats.get(n.rank)]


def failed(notes: Sequence[Note]) -> Note | None:
    """Who failed of itself: others were lost for that."""
    return next((note for note in notes if note.ended == "failed"), None)


def describe_timeout(notes: Sequence[Note], size: int, timeout: float) -> str:
    now = time.time()
    wait, limit = find_wait(notes, size, now), f"parallel.timeout ({timeout:g} s) is over"
    if wait is None:
        return f"{limit}: a collective did not end, and who was awaited cannot be told"
    return f"{limit}: {describe_wait(wait, now)}"


def ranks(notes: Sequence[Note]) -> str:
    """As in "ranks 0, 2-7"."""
    spans: list[list[int]] = []
    for rank in sorted(note.rank for note in notes):
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(notes) == 1 else f"ranks {text}"
