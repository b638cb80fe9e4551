"""The figures of an evaluation: summary.json, summary.md, summary.html and the line on the terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from ..errors import UserError
from ..evaluate import RIGHT
from ..records import counted
from ..statistics import avg_at_k, bootstrap_interval, maj_at_k, pass_at_k
from .options import name_of
from .problems import span
from .results import write_text

MAJORITY_DRAWS = 100_000
"""Of subsets for maj@k, over all problems."""
SHOWN_ANSWERS = 4

Row = dict[str, Any]


def summarise(
    rows: Sequence[Row], settings: dict[str, Any], ks: Sequence[int], facts: dict[str, Any]
) -> dict[str, Any]:
    """All figures of the complete results.

    Args:
        rows: of results.jsonl, in the order of problems and samples.
        ks: of pass@k and maj@k, none over the fewest samples of a problem.
        facts: of the run: date, command, tokens_per_s, left_out.
    """
    groups: dict[int, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["problem"], []).append(row)
    right = [[row["accuracy"] for row in group] for group in groups.values()]
    votes = [[vote_of(row) for row in group] for group in groups.values()]
    lengths = [row["length"] for row in rows]
    draws = max(200, MAJORITY_DRAWS // len(groups))
    low, high = bootstrap_interval(right)
    average = {"value": avg_at_k(right), "low": low, "high": high}

    def over_problems(k: int, values: Iterator[float]) -> dict[str, float]:
        return {"k": k, **(average if k == 1 else _mean(list(values)))}  # one response: the same figure

    return {
        "settings": settings,
        **facts,
        "problems": len(groups),
        "samples": span(len(group) for group in right),
        "responses": len(rows),
        "avg": average,
        "pass_at_k": [over_problems(k, (pass_at_k(len(g), sum(g), k) for g in right)) for k in ks],
        "maj_at_k": [
            over_problems(k, (maj_at_k(g, RIGHT, k, draws=draws, seed=i) for i, g in enumerate(votes)))
            for k in ks
        ],
        "response_length": {"mean": fmean(lengths), "median": median(lengths), "max": max(lengths)},
        "truncated_frac": fmean(row["truncated"] for row in rows),
        "no_answer_frac": fmean(vote is None for group in votes for vote in group),
        "scorer_failures": dict(Counter(row["failure"] for row in rows if row["failure"] is not None)),
        "per_problem": [_problem(group) for group in groups.values()],
    }


def _mean(values: Sequence[float]) -> dict[str, float]:
    """Of one figure a problem, with an interval over problems alone: each figure brings its sampling noise
    along, and responses drawn twice would bias what is a maximum or a majority of them."""
    low, high = bootstrap_interval([[value] for value in values])
    return {"value": fmean(values), "low": low, "high": high}


def vote_of(row: Row) -> str | None:
    return RIGHT if row["accuracy"] else row["extracted"]


def _problem(group: Sequence[Row]) -> dict[str, Any]:
    """One line of the table of problems. Right answers count together, in the spelling of the first one."""
    first = group[0]
    votes = Counter(vote for vote in map(vote_of, group) if vote is not None)
    spelling = next((row["extracted"] for row in group if row["accuracy"]), None) or first["answer"]
    return {
        "problem": first["problem"],
        "accuracy": fmean(row["accuracy"] for row in group),
        "samples": len(group),
        "answer": first["answer"],
        "frequent_answers": [
            {"answer": spelling if vote == RIGHT else vote, "count": count, "right": vote == RIGHT}
            for vote, count in votes.most_common(SHOWN_ANSWERS)
        ],
        "length_mean": fmean(row["length"] for row in group),
        "truncated": sum(row["truncated"] for row in group),
    }


def write_summary(folder: Path, summary: dict[str, Any], rows: Sequence[Row]) -> list[Path]:
    """Writes the three files and returns their paths."""
    from ..report.eval_page import evaluation_page

    texts: dict[str, Callable[[], str]] = {
        "summary.json": lambda: json.dumps(summary, indent=2, ensure_ascii=False) + "\n",
        "summary.md": lambda: markdown(summary),
        "summary.html": lambda: evaluation_page(summary, rows),
    }
    paths = []
    for name, text in texts.items():
        paths.append(folder / name)
        write_text(paths[-1], text())
    return paths


def interval(figure: dict[str, float]) -> str:
    return f"{100 * figure['low']:.1f} to {100 * figure['high']:.1f}"


def caveat(summary: dict[str, Any]) -> str:
    """What the interval cannot say where no response is right, as nothing varies then; else ""."""
    problems = summary["problems"]
    if summary["avg"]["value"] > 0:
        return ""
    return f"no response is right: with {counted(problems, 'problem')} the true value may still be " + (
        f"up to about 3/{problems} ({3 / problems:.1%})" if problems > 3 else "anything"
    )


def describe(summary: dict[str, Any]) -> str:
    """The headline in one line."""
    settings, average = summary["settings"], summary["avg"]
    last, majority = summary["pass_at_k"][-1], summary["maj_at_k"][-1]
    how = "greedy" if settings["temperature"] == 0 else f"T = {settings['temperature']:g}, "
    how += "" if settings["temperature"] == 0 else f"top_p = {settings['top_p']:g}"
    return (
        f"avg@{summary['samples']} {average['value']:.1%} (95 % interval {interval(average)}), "
        f"pass@{last['k']} {last['value']:.1%}, maj@{majority['k']} {majority['value']:.1%}; "
        f"{counted(summary['problems'], 'problem')}, {counted(summary['responses'], 'response')}, {how}, "
        f"truncated {summary['truncated_frac']:.1%}" + (f"; {caveat(summary)}" if caveat(summary) else "")
    )


def markdown(summary: dict[str, Any]) -> str:
    """The figures as a page of Markdown, the problems left out."""
    settings, length = summary["settings"], summary["response_length"]
    title = f"# {name_of(settings['model'])} on {name_of(settings['data'])}"
    lines = [title, "", describe(summary), ""]
    lines += ["| figure | % | 95 % interval |", "|---|---|---|"]
    lines.append(
        f"| avg@{summary['samples']} | {100 * summary['avg']['value']:.1f} | {interval(summary['avg'])} |"
    )
    for name, key in (("pass", "pass_at_k"), ("maj", "maj_at_k")):
        for figure in summary[key]:
            lines.append(f"| {name}@{figure['k']} | {100 * figure['value']:.1f} | {interval(figure)} |")
    failures = summary["scorer_failures"]
    facts = {
        "tokens": f"mean {length['mean']:.1f}, median {length['median']:g}, max {length['max']}",
        "truncated": f"{summary['truncated_frac']:.1%}",
        "without an answer": f"{summary['no_answer_frac']:.1%}",
        "scorer failures": ", ".join(f"{count} x {what}" for what, count in failures.items()) or "none",
        "left out": ", ".join(f"{count} {why}" for why, count in summary["left_out"].items()) or "none",
        "tokens/s": "–" if summary["tokens_per_s"] is None else f"{summary['tokens_per_s']:.0f}",
        "date": summary["date"],
        "command": f"`{summary['command']}`",
    }
    lines += ["", *(f"- {name}: {text}" for name, text in facts.items()), ""]
    lines += ["| setting | value |", "|---|---|"]
    lines += [f"| {key} | {_cell(value)} |" for key, value in settings.items()]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "\\n")


def k_list(text: str) -> tuple[int, ...]:
    """The numbers of "1,4,32". Raises `UserError`."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"-k must be whole numbers such as 1,4,32, got {text!r}") from None
