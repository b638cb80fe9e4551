"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path`, of the same suffix, that takes its place once it is written in full."""
    temp = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temp
        os.replace(temp, path)
    finally:
        temp.unlink(missing_ok=True)


@contextmanager
def replacing_folder(out: Path) -> Iterator[Path]:
    """A folder to write to, which takes the place of `out` if all goes well, and else is removed."""
    partial, replaced = (out.with_name(f".{out.name}.{what}") for what in ("partial", "replaced"))

    def tidy() -> None:
        """Also after a process that was killed."""
        if replaced.exists() and not out.exists():
            os.rename(replaced, out)
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)

    tidy()
    partial.mkdir(parents=True)
    try:
        yield partial
        if out.exists():
            os.rename(out, replaced)
        os.rename(partial, out)
    finally:
        tidy()
