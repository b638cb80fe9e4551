"""The page of an evaluation: its figures, problems and some responses, in one self-contained file."""

from collections.abc import Callable, Sequence

import matplotlib
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from ..evaluation.options import name_of
from ..evaluation.summary import caveat
from ..records import counted
from ..rewards.scorer import PER_ROW
from .charts import BLUE, VERMILLION
from .curves import STYLE, figure_svg
from .page import amount, excerpt, interval, load_template, percent, spread

SHOWN = 3  # responses of each kind
LENGTH_BINS, ACCURACY_BINS = 40, 20


def evaluation_page(summary: dict, rows: Sequence[dict]) -> str:
    """The page as HTML.

    Args:
        summary: as in summary.json.
        rows: of results.jsonl.
    """
    settings = summary["settings"]
    prompts = {row["problem"]: row["prompt"] for row in rows}
    return load_template("eval.html.jinja").render(
        name=name_of(settings["model"]),
        about=about(settings),
        tiles=tiles(summary),
        notes=notes(summary),
        figures=figure_rows(summary),
        charts=[accuracy_chart(summary), length_chart(rows)],
        problems=[
            problem_view(row, prompts[row["problem"]], settings["mode"]) for row in summary["per_problem"]
        ],
        kinds=response_views(rows),
        facts={**settings, "date": summary["date"], "command": summary["command"]},
    )


def about(settings: dict) -> str:
    """The data and how responses were sampled."""
    how = f"temperature {settings['temperature']:g}, top-p {settings['top_p']:g}"
    if settings["temperature"] == 0:
        how = "greedy"
    return (
        f"{settings['data']}: {how}, at most {settings['max_tokens']:,} tokens, judged as {settings['mode']}"
    )


def tiles(summary: dict) -> list[tuple[str, str, str]]:
    average, length, speed = summary["avg"], summary["response_length"], summary["tokens_per_s"]
    majority, passed = summary["maj_at_k"][-1], summary["pass_at_k"][-1]
    return [
        (
            f"avg@{summary['samples']}",
            percent(average["value"]),
            f"95% interval {100 * average['low']:.1f} – {percent(average['high'])}",
        ),
        (f"pass@{passed['k']}", percent(passed["value"]), "at least one right"),
        (f"maj@{majority['k']}", percent(majority["value"]), "the majority right"),
        (
            "Responses",
            amount(summary["responses"]),
            f"to {counted(summary['problems'], 'problem')}"
            + (f", {amount(speed)} tokens/s" if speed else ""),
        ),
        (
            "Response length",
            f"{length['mean']:,.0f}",
            f"mean tokens; median {length['median']:,.0f}, longest {length['max']:,}",
        ),
        (
            "Truncated",
            percent(summary["truncated_frac"]),
            f"of responses; {percent(summary['no_answer_frac'])} have no answer",
        ),
    ]


def notes(summary: dict) -> list[str]:
    """What a reader should know before trusting the figures."""
    found = [caveat(summary)] if caveat(summary) else []
    found += [f"scorer failures: {count} × {what}" for what, count in summary["scorer_failures"].items()]
    found += [f"prompts left out: {count} {why}" for why, count in summary["left_out"].items()]
    if summary["truncated_frac"] > 0.1:
        found.append(f"{percent(summary['truncated_frac'])} of responses were truncated")
    return found


def figure_rows(summary: dict) -> list[tuple[str, str, str]]:
    """Name, value and interval of avg, pass@k and maj@k."""
    rows = [(f"avg@{summary['samples']}", summary["avg"])]
    for name in ("pass", "maj"):
        rows += [(f"{name}@{figure['k']}", figure) for figure in summary[f"{name}_at_k"]]
    return [
        (name, percent(f["value"]), interval({"accuracy_low": f["low"], "accuracy_high": f["high"]}))
        for name, f in rows
    ]


def histogram(title: str, caption: str, draw: Callable[[Axes], None]) -> dict:
    """A small chart as the page takes it."""
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "none"}):
        figure = Figure(figsize=(4.1, 2.6), layout="constrained")
        ax = figure.add_subplot()
        draw(ax)
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.grid(axis="x", visible=False)
        return {"title": title, "svg": Markup(figure_svg(figure, title)), "caption": caption}


def accuracy_chart(summary: dict) -> dict:
    """How many problems have which accuracy."""
    values = [row["accuracy"] for row in summary["per_problem"]]
    edges = accuracy_edges(max(row["samples"] for row in summary["per_problem"]))

    def draw(ax: Axes) -> None:
        ax.hist(values, bins=edges, color=BLUE, rwidth=0.85)
        ax.xaxis.set_major_formatter(PercentFormatter(1))
        ax.set_xlim(0, 1)
        ax.set_xlabel("right responses")
        ax.set_ylabel("problems")

    caption = (
        "Problems by the share of their responses that are right; those at both ends tell models apart least."
    )
    return histogram("Accuracy of problems", caption, draw)


def accuracy_edges(samples: int) -> np.ndarray:
    """Edges of the bars from 0 to 1. Of up to 20 samples, each of 0, 1/n, ..., 1 has a bar of its own; one
    sample has narrow bars at both ends."""
    return np.linspace(0, 1, 11 if samples == 1 else min(samples, ACCURACY_BINS) + 2)


def length_chart(rows: Sequence[dict]) -> dict:
    """How many responses have which length; truncated ones on top."""
    cut = [row["length"] for row in rows if row["truncated"]]
    whole = [row["length"] for row in rows if not row["truncated"]]

    def draw(ax: Axes) -> None:
        most = max(cut + whole)
        edges = np.linspace(0, most + 1, min(most + 1, LENGTH_BINS) + 1)
        ax.hist(
            [whole, cut],
            bins=edges,
            stacked=True,
            color=[BLUE, VERMILLION],
            label=["ended", "truncated"],
        )
        ax.set_xlim(0, most + 1)
        ax.set_xlabel("tokens")
        ax.set_ylabel("responses")
        ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=2)

    caption = (
        "Tokens of each response; a heap at the right end means that the limit is too low for this model."
    )
    return histogram("Length of responses", caption, draw)


def problem_view(row: dict, prompt: str, mode: str) -> dict:
    # Whole solutions, which these modes take, end in their answer.
    answer = row["answer"].rpartition("####")[2].strip() if mode in ("gsm8k", PER_ROW) else row["answer"]
    return {
        "number": row["problem"] + 1,
        "prompt": excerpt(prompt),
        "answer": short_end(answer),
        "accuracy": percent(row["accuracy"]),
        "width": f"{100 * row['accuracy']:.1f}",
        "answers": [
            f"{short(one['answer'])}{' ✓' if one['right'] else ''} × {one['count']}"
            for one in row["frequent_answers"]
        ],
        "length": f"{row['length_mean']:,.0f}",
        "truncated": f"{row['truncated']} of {row['samples']}" if row["truncated"] else "–",
    }


def short(text: str, longest: int = 60) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def short_end(text: str, longest: int = 60) -> str:
    """The end of a solution is its answer."""
    return text if len(text) <= longest else "…" + text[1 - longest :]


def response_views(rows: Sequence[dict]) -> list[tuple[str, list[dict]]]:
    """A few responses of each kind, at even intervals through the file."""
    kinds = {
        "Right": [row for row in rows if row["accuracy"]],
        "Wrong": [row for row in rows if not row["accuracy"] and not row["truncated"]],
        "Truncated": [row for row in rows if not row["accuracy"] and row["truncated"]],
    }
    return [
        (kind, [response_view(row) for row in spread(found, SHOWN)]) for kind, found in kinds.items() if found
    ]


def response_view(row: dict) -> dict:
    extracted = "" if row["extracted"] is None else f" · answers {short(row['extracted'])}"
    return {
        "prompt": excerpt(row["prompt"]),
        "answer": excerpt(row["answer"]),
        "title": f"Problem {row['problem'] + 1}, sample {row['sample'] + 1}{extracted}",
        "mark": "right" if row["accuracy"] else "wrong",
        "length": counted(row["length"], "token") + ", truncated" * row["truncated"],
        "truncated": False,  # said by the length: the report of a run has other words for it
        "text": excerpt(row["response"]),
    }
