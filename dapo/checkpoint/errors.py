"""What goes wrong with checkpoints."""

from __future__ import annotations

from ..errors import UserError, first_line


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written; earlier ones are whole. One line, with the path and the reason."""


class DamagedCheckpoint(UserError):
    """A checkpoint is not what was written. One line that names the file and what is wrong with it."""


class Elsewhere(Exception):
    """Any other error, of some rank, as text: not every one can be sent."""


def reason(error: BaseException) -> str:
    """An error as part of one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    said = first_line(error) if str(error).strip() else ""
    if isinstance(error, CheckpointFailed | UserError | Elsewhere):
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
