"""The `dapo` command."""

from __future__ import annotations

import argparse

from .commands import data, evaluate, report, train
from .commands.terminal import complain
from .errors import TrainingStopped, UserError


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 it could not go on, 2 wrong input,
    130 interrupted, 143 terminated."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except UserError as error:
        return complain(str(error), 2)
    except TrainingStopped as error:
        return complain(str(error), 1)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        return complain(f"cannot go on: {error.strerror or error}{where}; what was written is whole", 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dapo", description="Train language models with DAPO.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (train, evaluate, report, data):
        command.add(commands)
    return parser
