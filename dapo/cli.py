"""The `dapo` command."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import TrainingStopped, UserError

if TYPE_CHECKING:
    from rich.console import Console


class Terminated(BaseException):
    """SIGTERM, raised where the program happens to be, as KeyboardInterrupt is."""


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 training could not go on, 2 wrong input,
    130 interrupted, 143 terminated."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except UserError as error:
        return _complain(str(error), 2)
    except TrainingStopped as error:
        return _complain(str(error), 1)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        return _complain(f"cannot go on: {error.strerror or error}{where}; what was written is whole", 1)


def _complain(message: str, code: int) -> int:
    print(f"dapo: {' '.join(message.split())}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dapo", description="Train language models with DAPO.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a model", description="Train a model as CONFIG says.")
    train.add_argument("config", metavar="CONFIG", help="YAML file; docs/config.md lists every key")
    train.add_argument("overrides", metavar="section.key=value", nargs="*", help="replace values of CONFIG")
    train.set_defaults(run=_train)

    report = commands.add_parser(
        "report",
        help="write a run's report.html",
        description="Write report.html of a run, running or ended.",
    )
    report.add_argument("run_dir", metavar="RUN", type=Path, help="the run's folder")
    report.add_argument(
        "--curves", metavar="FILE", type=Path, help="also draw the main curves to a PNG or SVG"
    )
    report.set_defaults(run=_report)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    from .config import load_config

    config = load_config(arguments.config, arguments.overrides)
    signal.signal(signal.SIGTERM, _raise_terminated)
    trainer = None
    try:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        console = _console()
        from .trainer import Trainer

        trainer = Trainer(config, console)
        trainer.train()
        trainer.finish()
        return 0
    except (KeyboardInterrupt, Terminated) as stop:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second one must not tear the goodbye
            signal.signal(number, signal.SIG_IGN)
        return _stopped(config.run_dir, trainer, 130 if isinstance(stop, KeyboardInterrupt) else 143)
    finally:
        if trainer is not None:
            trainer.close()


def _console() -> Console:
    """Where the run speaks; warnings go there too, so that they do not tear the progress bar."""
    from rich.console import Console
    from rich.logging import RichHandler
    from transformers.utils import logging as transformers_logging

    class RunConsole(Console):
        def on_broken_pipe(self) -> None:
            """Whoever read the output (`| head`) has left: train on in silence."""
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    console = RunConsole(markup=False, emoji=False, highlight=False)  # paths and responses as they are
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    transformers_logging.disable_progress_bar()
    return console


def _raise_terminated(signum: int, frame: object) -> None:
    raise Terminated


def _stopped(run_dir: str, trainer: object, code: int) -> int:
    how = "interrupted" if code == 130 else "terminated"
    if trainer is None:
        return _complain(f"{how} before training began", code)
    return _complain(
        f"{how} after step {trainer.step}; what {run_dir} holds is whole: `dapo report {run_dir}` shows it",
        code,
    )


def _report(arguments: argparse.Namespace) -> int:
    from .report import save_curves, write_report

    try:
        print(write_report(arguments.run_dir))
        if arguments.curves is not None:
            print(save_curves(arguments.run_dir, arguments.curves))
    except ValueError as error:
        raise UserError(str(error)) from None
    return 0
