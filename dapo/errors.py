"""Errors that are shown to a person as one line, without a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """Something in the configuration or the data that only the user can change (exit code 2)."""


class TrainingStopped(RuntimeError):
    """Training cannot go on as configured; what was written so far is whole (exit code 1)."""


class Terminated(BaseException):
    """SIGTERM, raised where the program happens to be, as KeyboardInterrupt is."""


def first_line(error: Exception) -> str:
    """What an error of a library says, short enough to be part of one line."""
    return str(error).strip().split("\n")[0]


def one_line(error: Exception) -> str | None:
    """What a person is told of an error of theirs, of the run or of the system; None for any other."""
    if isinstance(error, UserError | TrainingStopped):
        return str(error)
    if isinstance(error, OSError):
        where = f" {error.filename}" if error.filename else ""
        return f"cannot go on: {error.strerror or error}{where}; what was written is whole"
    return None
