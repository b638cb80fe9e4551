"""`dapo eval`: avg@k, pass@k and maj@k of a model on a data file."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from .terminal import complain, open_console, stoppable


def add(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "eval",
        help="evaluate a model",
        description="Sample responses to the problems of DATA, judge them, and sum them up in "
        "DIR/summary.html. The same command goes on where it was stopped.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="transformers folder, hub name, or a training run's folder"
    )
    parser.add_argument(
        "data", metavar="DATA", help=".jsonl, .parquet or .csv file, hub:OWNER/NAME or reasoning_gym:TASK"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="default: evals/MODEL-DATA")
    _add_sampling(parser.add_argument_group("sampling"))
    _add_problems(parser.add_argument_group("problems and answers"))
    _add_running(parser.add_argument_group("running"))
    parser.set_defaults(run=run)


def _add_sampling(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--preset",
        choices=["aime"],
        help="aime: T 1.0, top_p 0.7, 20480 tokens, 32 samples a problem, as in the DAPO paper; other "
        "options go first",
    )
    group.add_argument("-n", "--samples", metavar="N", type=int, help="responses to each row (1)")
    group.add_argument("--temperature", metavar="T", type=float, help="0: greedy (1.0)")
    group.add_argument("--top-p", metavar="P", type=float, help="(0.7)")
    group.add_argument("--max-tokens", metavar="N", type=int, help="of a response (2048)")
    group.add_argument("--seed", metavar="N", type=int, help="(0)")


def _add_problems(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--prompt-column", metavar="NAME", help="default: prompt, question or problem")
    group.add_argument("--answer-column", metavar="NAME", help="default: reward_model.ground_truth or answer")
    group.add_argument("--limit", metavar="N", type=int, help="the first so many problems")
    group.add_argument("--max-prompt-tokens", metavar="N", type=int, help="leave longer prompts out")
    group.add_argument("--template", metavar="TEXT", help="what string prompts are wrapped in ({prompt})")
    group.add_argument(
        "--chat-template",
        choices=["auto", "yes", "no"],
        help="whether prompts go through it; auto: message lists do, strings do not",
    )
    group.add_argument(
        "--mode",
        help="how answers are judged: a mode of docs/rewards.md (math, or the task's own); data_source: each "
        "row by the mode in that column",
    )
    group.add_argument("--answer-pattern", metavar="REGEX", help="its last match is the answer")
    group.add_argument(
        "-k", metavar="K,K", dest="ks", help="of pass@k and maj@k (powers of two, and all samples)"
    )


def _add_running(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the weights (float32)")
    group.add_argument("--max-sequences", metavar="N", type=int, help="generated at a time (128)")


def run(arguments: argparse.Namespace) -> int:
    from ..evaluation.options import make_options
    from ..evaluation.summary import k_list

    given = vars(arguments) | {"ks": None if arguments.ks is None else k_list(arguments.ks)}
    options = make_options(given, arguments.preset)
    evaluation = None

    def evaluate() -> int:
        nonlocal evaluation
        console = open_console()
        from ..evaluation.run import Evaluation

        evaluation = Evaluation(options, shlex.join(["dapo", *sys.argv[1:]]), console)
        evaluation.run()
        return 0

    def stopped(how: str, code: int) -> int:
        return complain(f"{how} {evaluation.stopped() if evaluation else 'before the first response'}", code)

    def close() -> None:
        if evaluation is not None:
            evaluation.close()

    return stoppable(evaluate, stopped, close)
