"""`manifest.json`: what a checkpoint's folder holds, with a digest of each file and of itself."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from .errors import DamagedCheckpoint, reason

FORMAT = 1
MANIFEST, STATE, RANKS, METADATA = "manifest.json", "state.json", "ranks.json", ".metadata"

_TENSORS = re.compile(r"__\d+_\d+\.distcp")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """A file as it was written."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int
    files: dict[str, Entry]
    """By name, all but the manifest itself."""


def digest(path: Path) -> Entry:
    """Size and digest of a file. Raises `OSError`."""
    sha, size, buffer = hashlib.sha256(), 0, memoryview(bytearray(1 << 20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            sha.update(buffer[:count])
            size += count
    return Entry(size, sha.hexdigest())


def seal(step: int, files: dict[str, Entry]) -> bytes:
    """The manifest's text."""
    listed = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in files.items()}
    return sealed({"format": FORMAT, "step": step, "torch": torch.__version__, "files": listed})


def sealed(content: dict[str, Any]) -> bytes:
    """The one text that stands for the content, with the content's digest in it: no byte of it can change
    unnoticed."""
    own = hashlib.sha256(_text(content)).hexdigest()
    return _text(content | {"sha256": own})


def _text(content: Any) -> bytes:
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder that holds the files it lists, in the sizes it gives, and no others. Their
    digests are yet to be compared.

    Raises:
        DamagedCheckpoint: it does not, or the manifest is not as it was written.
        UserError: there is no such folder, or it is of another format.
    """
    if not folder.is_dir():
        raise UserError(f"checkpoint {folder} not found")
    path = folder / MANIFEST
    if not os.path.lexists(path):
        raise DamagedCheckpoint(f"{path} is missing: {folder} is no whole checkpoint")
    manifest = _parsed(path, read_bytes(path))
    for name, entry in manifest.files.items():
        size = regular_file(folder / name).st_size
        if size != entry.size:
            raise DamagedCheckpoint(f"{folder / name} has {size} bytes instead of {entry.size}")
    try:
        strangers = sorted({entry.name for entry in os.scandir(folder)} - {MANIFEST, *manifest.files})
    except OSError as error:
        raise DamagedCheckpoint(f"{folder} cannot be listed: {reason(error)}") from error
    if strangers:
        raise DamagedCheckpoint(f"{folder} holds {strangers[0]!r}, which {MANIFEST} does not list")
    return manifest


def _parsed(path: Path, text: bytes) -> Manifest:
    content = parse_json(path, text, dict)
    own = content.pop("sha256", None)
    if sealed(content) != text:
        changed = "not as it was written" if isinstance(own, str) else "without a digest of its own"
        raise DamagedCheckpoint(f"{path} is {changed}")
    if content.get("format") != FORMAT or type(content["format"]) is not int:
        raise UserError(
            f"{path} has format {content.get('format')!r}, this version reads {FORMAT}: go on with the "
            f"version of dapo that wrote it"
        )
    step, files = content.get("step"), content.get("files")
    if type(step) is not int or step < 0:
        raise DamagedCheckpoint(f"{path} has step {step!r}")
    if not isinstance(files, dict):
        raise DamagedCheckpoint(f"{path} lists no files")
    for name in (METADATA, STATE, RANKS):
        if name not in files:
            raise DamagedCheckpoint(f"{path} does not list {name}")
    return Manifest(step, {name: _entry(path, name, files[name]) for name in sorted(files)})


def _entry(path: Path, name: str, value: Any) -> Entry:
    # No other name is ever written, and none of these leads out of the folder.
    if name not in (METADATA, STATE, RANKS) and not _TENSORS.fullmatch(name):
        raise DamagedCheckpoint(f"{path} lists {name!r}, which is no file of a checkpoint")
    size = value.get("size") if isinstance(value, dict) else None
    sha = value.get("sha256") if isinstance(value, dict) else None
    if type(size) is not int or size < 0 or not isinstance(sha, str) or not _DIGEST.fullmatch(sha):
        raise DamagedCheckpoint(f"{path} gives no size and digest of {name}")
    return Entry(size, sha)


def verify(folder: Path, name: str, entry: Entry) -> None:
    """Raises `DamagedCheckpoint` where a file is not as it was written."""
    path = folder / name
    regular_file(path)
    try:
        found = digest(path)
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {reason(error)}") from error
    _compare(path, found, entry)


def verified_bytes(folder: Path, name: str, entry: Entry) -> bytes:
    """A small file's content, which is what was written. Raises `DamagedCheckpoint`."""
    content = read_bytes(folder / name)
    _compare(folder / name, Entry(len(content), hashlib.sha256(content).hexdigest()), entry)
    return content


def _compare(path: Path, found: Entry, want: Entry) -> None:
    if found.size != want.size:
        raise DamagedCheckpoint(f"{path} has {found.size} bytes instead of {want.size}")
    if found.sha256 != want.sha256:
        raise DamagedCheckpoint(f"{path} is not as it was written: its digest differs from the manifest's")


def regular_file(path: Path) -> os.stat_result:
    """Raises `DamagedCheckpoint` for what is missing, a link or a folder."""
    try:
        status = path.lstat()
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is missing") from error
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {reason(error)}") from error
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpoint(f"{path} is a link, a folder or a device instead of a file")
    return status


def read_bytes(path: Path) -> bytes:
    regular_file(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{path} cannot be read: {reason(error)}") from error


def parse_json(path: Path, text: bytes, kind: type) -> Any:
    """Raises `DamagedCheckpoint` for what is no JSON, or of another kind than dict or list."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is not JSON: {reason(error)}") from error
    if not isinstance(content, kind):
        raise DamagedCheckpoint(f"{path} must hold a {'mapping' if kind is dict else 'list'}")
    return content
