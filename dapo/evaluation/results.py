"""The responses of an evaluation on disk: one line each as soon as it is judged, in order at the end."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import replacing

FINGERPRINTS = ("model_fingerprint", "problems_sha256")
Place = tuple[int, int]
"""(problem, sample)."""


class Results:
    """`results.jsonl` of a folder that holds `settings.json`. What an earlier run left there counts, but for
    lines that are cut or not of this evaluation. Holds a lock: two runs never write the same file."""

    def __init__(self, folder: Path, places: Sequence[Place]) -> None:
        """Raises `UserError` when another process writes there.

        Args:
            places: all that the evaluation consists of.
        """
        self.path, self.places = folder / "results.jsonl", list(places)
        self.lock = (folder / "settings.json").open("rb")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.lock.close()
            raise UserError(
                f"another dapo eval is writing to {folder}: wait for it, or choose another --out"
            ) from None
        found = self.path.read_bytes() if self.path.exists() else b""
        self.lines = _whole_lines(found, set(self.places))
        if found != b"".join(self.lines.values()):
            self._write(list(self.lines.values()))
        self.file = self.path.open("ab", buffering=0)

    @property
    def missing(self) -> list[Place]:
        return [place for place in self.places if place not in self.lines]

    def add(self, row: dict[str, Any]) -> None:
        """Appends one response in one write."""
        # A lone surrogate becomes its JSON escape.
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")
        self.file.write(line)
        self.lines[row["problem"], row["sample"]] = line

    def finish(self) -> list[dict[str, Any]]:
        """Puts the complete file into the order of its places, and returns its rows."""
        ordered = [self.lines[place] for place in self.places]
        if ordered != list(self.lines.values()):
            self._write(ordered)
        return [json.loads(line) for line in ordered]

    def _write(self, lines: list[bytes]) -> None:
        with replacing(self.path) as partial:
            partial.write_bytes(b"".join(lines))

    def close(self) -> None:
        self.file.close()
        self.lock.close()


def _whole_lines(content: bytes, places: set[Place]) -> dict[Place, bytes]:
    lines: dict[Place, bytes] = {}
    for line in content.splitlines(keepends=True):
        try:
            row = json.loads(line)
            place = (row["problem"], row["sample"])
        except (ValueError, TypeError, KeyError):  # cut by a crash
            continue
        if line.endswith(b"\n") and place in places:
            lines.setdefault(place, line)
    return lines


def check_settings(folder: Path, settings: dict[str, Any]) -> bool:
    """Whether the folder holds an evaluation of these settings; False where it holds none. Raises `UserError`
    that names what differs where it holds another one."""
    path = folder / "settings.json"
    if not path.exists():
        if folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
            raise UserError(f"--out {folder} holds other files and no evaluation: choose another --out")
        return False
    try:
        found = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError):
        raise UserError(f"{path} cannot be read: choose another --out, or remove {folder}") from None
    differing = [key for key in settings | found if settings.get(key) != found.get(key)]
    # A fingerprint that differs because an option does tells nobody what to do.
    differing = [key for key in differing if key not in FINGERPRINTS] or differing
    if differing:
        texts = [f"{key} ({found.get(key)!r} there, {settings.get(key)!r} now)" for key in differing]
        raise UserError(
            f"{folder} holds results of other settings: {', '.join(texts)} differ{'s' * (len(texts) == 1)}; "
            "choose another --out, or give the same settings to go on"
        )
    return True


def write_settings(folder: Path, settings: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "settings.json", json.dumps(settings, indent=2) + "\n")


def read_summary(folder: Path) -> dict[str, Any]:
    """`summary.json` of an evaluation that has ended before; empty where there is none."""
    try:
        return json.loads((folder / "summary.json").read_bytes())
    except (OSError, ValueError):
        return {}


def write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_bytes(text.encode("utf-8", "backslashreplace"))
