"""Which mode judges the rows of a file: one for all, or the one that each row names in `data_source`."""

from __future__ import annotations

from .errors import UserError
from .rewards.modes import find_mode, mode_names
from .rewards.scorer import PER_ROW


def check_mode_name(mode: str, key: str, per_row: bool = False) -> None:
    """Raises `UserError`, which names `key`, where rewards have no mode of that name.

    Args:
        per_row: whether `data_source`, by which each row names its own, is allowed too.
    """
    if per_row and mode == PER_ROW:
        return
    try:
        find_mode(mode)
    except ValueError as error:
        unknown = str(error).startswith("no reward mode")
        more = f", or {PER_ROW}, by which each row names its own" if per_row and unknown else ""
        raise UserError(f"{key}: {error}{more}") from None


def check_mode(mode: str, key: str, per_row: bool = False) -> None:
    """The same, and that a function of the user's own can be loaded."""
    from .rewards import verify

    check_mode_name(mode, key, per_row)
    if per_row and mode == PER_ROW:
        return
    try:
        verify("", "", mode)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None


def mode_of_row(record: dict, where: str) -> str:
    """The mode that a row names in its column `data_source`, aliases resolved. Raises `UserError` where it
    names none."""
    if PER_ROW not in record:
        raise UserError(
            f"{where} has no column {PER_ROW}: mode {PER_ROW} needs one that names each row's mode"
        )
    try:
        return find_mode(record[PER_ROW]).name
    except ValueError as error:
        raise UserError(f"{where}: {PER_ROW} is {record[PER_ROW]!r}: {error}") from None


def known_mode(record: dict) -> str | None:
    """The registered mode that a row names in `data_source`, where it does."""
    try:
        name = find_mode(record.get(PER_ROW)).name
    except ValueError:
        return None
    return name if name in mode_names() else None


def other_modes_note(modes: set[str], used: str) -> str:
    """What to say when no mode was asked for and rows name others than the one that judges; else ""."""
    others = sorted(modes - {used, PER_ROW})
    if not others or used == PER_ROW:
        return ""
    return (
        f"rows name their mode ({', '.join(others)}) in {PER_ROW}; judged by {used}: "
        f"--mode {PER_ROW} judges by theirs"
    )
