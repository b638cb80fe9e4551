"""`dapo train`: a run, from its configuration to its report."""

from __future__ import annotations

import argparse

from .terminal import complain, open_console, stoppable


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser("train", help="train a model", description="Train a model as CONFIG says.")
    parser.add_argument("config", metavar="CONFIG", help="YAML file; docs/config.md lists every key")
    parser.add_argument("overrides", metavar="section.key=value", nargs="*", help="replace values of CONFIG")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..config import load_config

    config = load_config(arguments.config, arguments.overrides)
    trainer = None

    def train() -> int:
        nonlocal trainer
        console = open_console()
        from ..trainer import Trainer

        trainer = Trainer(config, console)
        trainer.train()
        trainer.finish()
        return 0

    def stopped(how: str, code: int) -> int:
        if trainer is None:
            return complain(f"{how} before training began", code)
        return complain(
            f"{how} after step {trainer.step}; what {config.run_dir} holds is whole: "
            f"`dapo report {config.run_dir}` shows it",
            code,
        )

    def close() -> None:
        if trainer is not None:
            trainer.close()

    return stoppable(train, stopped, close)
