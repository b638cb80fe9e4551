"""`dapo data`: prepare and check data files."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..data_sets import KNOWN
from ..errors import UserError


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "data", help="prepare and check data files", description="Prepare and check data files."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    _add_prepare(actions)
    _add_check(actions)


def _add_prepare(actions: argparse._SubParsersAction) -> None:
    parser = actions.add_parser(
        "prepare",
        help="write a training file of data sets, each prompt once",
        description="Write data sets to one file of DAPO-Math-17k's schema, each prompt once. "
        f"NAME: {', '.join(KNOWN)}, hub:OWNER/NAME[:CONFIG][:SPLIT] or a .jsonl, .parquet or .csv file.",
    )
    option = parser.add_argument
    option("names", metavar="NAME", nargs="+", help="what to read")
    option("out", metavar="OUT", type=Path, help="the .parquet or .jsonl file to write")
    option(
        "--from", dest="local", metavar="FILE", help="read a known data set from a file in place of the hub"
    )
    option("--split", help="of the hub's data set, in place of the usual one")
    _add_columns(parser)
    option("--template", help="what to wrap prompts in that are strings; holds {prompt}")
    option("--data-source", metavar="MODE", help="reward mode to write in the data_source column")
    option("--force", action="store_true", help="replace OUT where it exists")
    option("--keep-duplicates", action="store_true", help="write every copy of a prompt")
    option("--keep-conflicts", action="store_true", help="write prompts whose copies disagree on the answer")
    option(
        "--answers",
        choices=("all", "comparable", "integer"),
        default="all",
        help="write only rows whose answers can be compared safely, or are integers (default: all)",
    )
    option("--shuffle", metavar="SEED", type=int, help="write the rows in a random order")
    option("--limit", metavar="N", type=_count, help="write at most so many rows")
    parser.set_defaults(run=run_prepare)


def _add_check(actions: argparse._SubParsersAction) -> None:
    parser = actions.add_parser(
        "check",
        help="show what kinds of answers a file holds, and which of them can earn the reward",
        description="Classify the answers of FILE, find repeated prompts and conflicting answers. Exit code "
        "1 when no answer can be compared.",
    )
    parser.add_argument("source", metavar="FILE", help="a .jsonl, .parquet or .csv file, or hub:OWNER/NAME")
    _add_columns(parser)
    parser.add_argument(
        "--mode",
        help="how rewards judge (default: math); data_source: each row by the mode in that column",
    )
    parser.add_argument("--out", metavar="FILE.md", type=Path, help="also write the report as Markdown")
    parser.set_defaults(run=run_check)


def _add_columns(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-column", metavar="NAME", help="default: prompt, question or problem")
    parser.add_argument(
        "--answer-column", metavar="NAME", help="default: reward_model.ground_truth or answer"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def run_prepare(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from ..prepare import Options, prepare

    names = Options.__dataclass_fields__
    options = Options(**{name: getattr(arguments, name) for name in names})
    console = Console(markup=False, emoji=False, highlight=False)
    with console.status(f"reading {', '.join(arguments.names)}"):
        counts = prepare(arguments.names, arguments.out, options)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right")
    for name, count in counts.lines():
        table.add_row(name, f"{count:,}")
    console.print(table)
    console.print(
        f"data: {{train: {{source: {arguments.out}, answer_column: reward_model.ground_truth}}}}\n"
        f"reward: {{mode: data_source}}",
        soft_wrap=True,
    )
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ..check import check, legend, summary, to_markdown, to_table
    from ..files import replacing

    if arguments.out is not None:
        _check_report_path(arguments.source, arguments.out)
    console = Console(markup=False, emoji=False, highlight=False)
    with console.status(f"reading {arguments.source}"):
        report = check(arguments.source, arguments.mode, arguments.prompt_column, arguments.answer_column)
    console.print(to_table(report))
    console.print("\n".join(legend(report)) + "\n", soft_wrap=True)
    console.print(summary(report), soft_wrap=True)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(arguments.out) as temp:
            temp.write_text(to_markdown(report), encoding="utf-8")
        console.print(arguments.out, soft_wrap=True)
    return 0 if report.comparable else 1


def _check_report_path(source: str, out: Path) -> None:
    """Raises `UserError` where the report would take the place of the data, or of what is no report."""
    if Path(source).exists() and out.exists() and out.samefile(source):
        raise UserError(f"--out {out} is FILE itself, which the report would replace: name a .md file")
    if out.suffix != ".md":
        raise UserError(f"--out must end in .md, got {out}")
