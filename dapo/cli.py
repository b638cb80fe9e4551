"""The `dapo` command."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from .errors import TrainingStopped, UserError, one_line

COMMANDS = {
    "train": "train",
    "status": "status",
    "report": "report",
    "eval": "evaluate",
    "export": "export",
    "data": "data",
}
"""Each command's module in `commands`."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 it could not go on, 2 wrong input,
    130 interrupted, 143 terminated."""
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        return arguments.run(arguments)
    except (UserError, TrainingStopped, OSError) as error:
        return _complain(one_line(error), 2 if isinstance(error, UserError) else 1)


def _complain(message: str, code: int) -> int:
    from .commands.terminal import complain

    return complain(message, code)


def _parse(argv: list[str]) -> argparse.Namespace:
    """Imports the command that is named alone: what others need may take seconds."""
    parser = argparse.ArgumentParser(prog="dapo", description="Train language models with DAPO.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in argv[:1] if argv[:1] and argv[0] in COMMANDS else COMMANDS:
        import_module(f".commands.{COMMANDS[name]}", __package__).add(commands)
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes positional words before an option or after it, not on both sides.
    if rest and all("=" in word and not word.startswith("-") for word in rest) and "overrides" in arguments:
        arguments.overrides += rest
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return arguments
