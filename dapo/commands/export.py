"""`dapo export`: a checkpoint as a transformers folder."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from .terminal import complain, open_console, stoppable


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "export",
        help="write a checkpoint as a transformers model",
        description="Write a checkpoint as a transformers folder with a model card: config, tokenizer and "
        "safetensors, adapters merged. Takes neither a GPU nor the processes that trained.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        type=Path,
        help="RUN/checkpoints/step_000010, or RUN for its newest whole checkpoint",
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    option = parser.add_argument
    option("--best", action="store_true", help="with RUN: the checkpoint of its best evaluation")
    option(
        "--dtype",
        choices=["bfloat16", "float16", "float32"],
        default="bfloat16",
        help="of the weights (bfloat16)",
    )
    option("--max-shard-size", metavar="SIZE", type=_size, help="of a weights file, as 5GB (50GB)")
    option("--model", metavar="PATH", help="the base model, where it is not at the run's model.path any more")
    option("--overwrite", action="store_true", help="replace OUT where it holds a model")
    parser.set_defaults(run=run)


def _size(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*[KMGT]B", text):
        raise argparse.ArgumentTypeError(f"must be a size such as 5GB or 500MB, got {text!r}")
    return text


def run(arguments: argparse.Namespace) -> int:
    def export() -> int:
        console = open_console()
        from ..export import export

        given = vars(arguments)
        names = ("out", "dtype", "max_shard_size", "model", "best", "overwrite")
        step = export(arguments.checkpoint, **{name: given[name] for name in names})
        console.print(f"step {step} in {arguments.dtype}: {arguments.out}", soft_wrap=True)
        return 0

    def stopped(how: str, code: int) -> int:
        return complain(f"{how}; {arguments.out} is as it was", code)

    return stoppable(export, stopped, lambda: None)
