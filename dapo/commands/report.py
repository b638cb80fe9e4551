"""`dapo report`: a run's page."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UserError


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "report",
        help="write a run's report.html",
        description="Write report.html of a run, running or ended.",
    )
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument(
        "--curves", metavar="FILE", type=Path, help="also draw the main curves to a PNG or SVG"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..report import save_curves, write_report

    try:
        print(write_report(arguments.run_dir))
        if arguments.curves is not None:
            print(save_curves(arguments.run_dir, arguments.curves))
    except ValueError as error:
        raise UserError(str(error)) from None
    return 0
