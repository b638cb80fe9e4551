"""`dapo train`: a run, from its configuration to its report; or the rest of one."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

from ..errors import UserError
from .terminal import complain, open_console, stoppable


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model",
        description="Train a model as CONFIG says, or go on with a run that was stopped.",
    )
    parser.add_argument(
        "config", metavar="CONFIG", nargs="?", help="YAML file; docs/config.md lists every key"
    )
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replace values of CONFIG")
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="go on with the run in this folder from its newest whole checkpoint, as its own config.yaml (or "
        "CONFIG) and the overrides say",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..config import load_config
    from ..resume import resumed_config
    from ..status import go_on_command

    path, overrides = arguments.config, arguments.overrides
    if path is not None and re.match(r"[\w.]+=", path) and not Path(path).exists():
        path, overrides = None, [path, *overrides]
    if arguments.resume is not None:
        config, changes = resumed_config(arguments.resume, overrides, path)
    elif path is None:
        raise UserError("dapo train takes CONFIG, or --resume RUN")
    else:
        config, changes = load_config(path, overrides), None
    from ..parallel import watchdog  # takes seconds, which a mistake in the configuration need not wait for

    trainer = None

    def train() -> int:
        nonlocal trainer
        console = open_console()
        from ..trainer import Trainer

        try:
            trainer = Trainer(config, console, changes)
            trainer.train()
            trainer.finish()
        except Exception as error:
            if watchdog.current() is None:
                raise
            from .last_words import last_words

            return last_words(error, watchdog.current(), trainer and trainer.note)
        return 0

    def stopped(how: str, code: int) -> int:
        others = watchdog.current()
        if others is not None and (reason := others.failure_elsewhere()):  # torchrun ends the rest for it
            return complain(reason, 1)
        if others is not None and others.was_lost_elsewhere():
            return 1
        if trainer is None:
            return complain(f"{how} before training began", code)
        if not trainer.stop.saved:
            trainer.note("stopped", f"{how} at once: what came after the newest checkpoint is not saved")
        return complain(
            f"{how} after step {trainer.step}; what {config.run_dir} holds is whole: "
            f"`{shlex.join(['dapo', 'status', config.run_dir])}` shows it, "
            f"`{go_on_command(config.run_dir, trainer.world.size)}` goes on",
            code,
        )

    def close() -> None:
        if trainer is not None:
            trainer.close()
        elif watchdog.current() is not None:
            watchdog.current().close()

    return stoppable(train, stopped, close)
