"""The report of a run: its numbers, curves and rollouts on one self-contained page."""

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ..files import replacing
from .charts import PAPER_CHARTS, TIMES, UPDATE_CHARTS
from .curves import chart_svg, has_data, save_figure
from .data import Rows, as_text, column, number, read_evals, read_metrics, read_rollouts

SHOWN_PROMPTS = 6
HEAD, TAIL = 400, 200  # characters shown of a long text; the answer tends to stand at its end
# Control characters show as their pictures; lone surrogates, which UTF-8 cannot hold, as U+FFFD.
VISIBLE = {
    **{code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys([*range(0x80, 0xA0), *range(0xD800, 0xE000)], 0xFFFD),
}
# Rows of the evaluation table: key, name, whether it is a share.
EVALUATION_ROWS = (
    ("accuracy", "Accuracy, sampled", True),
    ("greedy_accuracy", "Accuracy, greedy", True),
    ("answer_anywhere", "Right answer anywhere, sampled", True),
    ("greedy_answer_anywhere", "Right answer anywhere, greedy", True),
    ("pass_at_k", "pass@k", True),
    ("maj_at_k", "maj@k", True),
    ("response_length_mean", "Mean response length, tokens", False),
    ("truncated_frac", "Cut at the limit", True),
    ("no_answer_frac", "Without an answer", True),
)


def write_report(run: Path) -> Path:
    """Writes `run`/report.html, one file that needs no network, and returns its path."""
    run = Path(run)
    metrics = read_metrics(run)
    evals = read_evals(run, metrics)
    config = run / "config.yaml"
    page = load_template("page.html.jinja").render(
        name=run.resolve().name,
        tiles=[accuracy_tile(evals), *run_tiles(metrics)],
        notes=warnings(metrics),
        sections=[
            ("What the DAPO paper watches", drawn(PAPER_CHARTS, metrics, evals)),
            ("Updates, time and rollouts", drawn(UPDATE_CHARTS, metrics, evals)),
        ],
        evaluation=evaluation_table(evals),
        rollouts=rollout_view(run),
        config=config.read_text("utf-8", errors="replace") if config.is_file() else "",
        about=about_run(config),
    )
    out = run / "report.html"
    with replacing(out) as temp:
        temp.write_text(page, encoding="utf-8")
    return out


def save_curves(run: Path, out: Path) -> Path:
    """Saves the paper's curves as one picture, PNG or SVG by the suffix of `out`, and returns `out`."""
    out = Path(out)
    metrics = read_metrics(Path(run))
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as temp:
        save_figure(metrics, read_evals(Path(run), metrics), temp)
    return out


def about_run(config: Path) -> str:
    """The model and the data of a run, where its configuration can be read."""
    try:
        values = YAML(typ="safe", pure=True).load(config)
        return f"{Path(values['model']['path']).name} on {values['data']['train']['source']}"
    except (OSError, YAMLError, KeyError, TypeError, ValueError):
        return ""


def load_template(name: str) -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value.translate(VISIBLE) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


def percent(x: float) -> str:
    return f"{100 * x:.1f}%"


def signed(x: float) -> str:
    return f"{x:+.1f}".replace("-", "−")


def amount(x: float) -> str:
    """12,345 or 5.68M or 1.20B."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if x >= size:
            return f"{x / size:.2f}{letter}"
    return f"{x:,.0f}"


def duration(seconds: float) -> str:
    """5.2 s, 3 min 20 s, 2 h 5 min or 54.4 h."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    if seconds >= 36_000:
        return f"{seconds / 3600:,.1f} h"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def over_run(metrics: Rows, key: str, reduce: Callable = np.sum) -> float:
    """One number from all steps that report the metric, NaN when none does."""
    values = column(metrics, key)
    values = values[np.isfinite(values)]
    return float(reduce(values)) if len(values) else math.nan


def tile(label: str, value: float, shown: Callable[[float], str], note: str = "") -> tuple[str, str, str]:
    """A headline number: label, value, smaller note."""
    return (label, "–", "not recorded") if math.isnan(value) else (label, shown(value), note)


def accuracy_tile(evals: Rows) -> tuple[str, str, str]:
    """Held-out accuracy of the first and the last evaluation."""
    found = [(row["step"], number(row.get("accuracy"))) for row in evals]
    found = [(step, accuracy) for step, accuracy in found if not math.isnan(accuracy)]
    label = "Held-out accuracy"
    if len(found) < 2:
        step, accuracy = found[0] if found else (0, math.nan)
        return tile(label, accuracy, percent, f"at step {step}, the only evaluation")
    (first, before), (last, after) = found[0], found[-1]
    note = f"{signed(100 * (after - before))} points, step {first} to {last}"
    return label, f"{percent(before)} → {percent(after)}", note


def run_tiles(metrics: Rows) -> list[tuple[str, str, str]]:
    steps, updates = max(len(metrics), 1), over_run(metrics, "update", np.max)
    tokens, memory = over_run(metrics, "num_tokens"), over_run(metrics, "peak_memory_gb", np.max)
    seconds = sum(phase_times(metrics).values()) or math.nan
    counted = [row for row in metrics if not math.isnan(number(row.get("groups_kept")))]
    kept, sampled = over_run(counted, "groups_kept"), over_run(counted, "groups_sampled")
    return [
        (
            "Steps",
            amount(len(metrics)),
            "" if math.isnan(updates) else f"{amount(updates)} update{'s' * (updates != 1)}",
        ),
        tile("Tokens trained", tokens, amount, f"{amount(tokens / steps)} per step"),
        tile("Wall time", seconds, duration, f"{duration(seconds / steps)} per step" if seconds > 0 else ""),
        tile(
            "Groups kept", kept / sampled if sampled else math.nan, percent, f"{kept:,.0f} of {sampled:,.0f}"
        ),
        tile("Peak memory", memory or math.nan, lambda gb: f"{gb:.1f} GB", "over all steps"),
    ]


def phase_times(metrics: Rows) -> dict[str, float]:
    """Seconds of the whole run by time_* metric, the usual four phases first."""
    keys = dict.fromkeys([*TIMES, *(key for row in metrics for key in row if key.startswith("time_"))])
    times = {key: over_run(metrics, key) for key in keys}
    return {key: seconds for key, seconds in times.items() if seconds > 0}


def time_split(metrics: Rows) -> str:
    """The share of each phase in words."""
    times = phase_times(metrics)
    whole = sum(times.values())
    names = {
        key: TIMES[key][0] if key in TIMES else key.removeprefix("time_").removesuffix("_s") for key in times
    }
    parts = [f"{names[key]} {percent(seconds / whole)}" for key, seconds in times.items()]
    return f"Of {duration(whole)} in all: {', '.join(parts)}."


def warnings(metrics: Rows) -> list[str]:
    """What went wrong without stopping the run."""
    counts = {
        "reward failures": over_run(metrics, "reward_failures"),
        "skipped updates": over_run(metrics, "skipped_updates"),
    }
    return [f"{what}: {amount(count)}" for what, count in counts.items() if count > 0]


def drawn(charts: Sequence, metrics: Rows, evals: Rows) -> list[dict]:
    """The charts that have data, ready for the page."""
    return [
        {
            "chart": chart,
            "svg": Markup(chart_svg(chart, metrics, evals)),
            "addition": time_split(metrics) if chart.stacked else "",
        }
        for chart in charts
        if has_data(chart, metrics, evals)
    ]


def evaluation_table(evals: Rows) -> dict | None:
    """First and last evaluation side by side, with the settings they ran under."""
    if not evals:
        return None
    ends = [evals[0], evals[-1]] if len(evals) > 1 else [evals[0]]
    rows = []
    for key, name, share in EVALUATION_ROWS:
        values = [number(row.get(key)) for row in ends]
        if all(math.isnan(value) for value in values):
            continue
        shown = ["–" if math.isnan(x) else percent(x) if share else f"{x:,.1f}" for x in values]
        change = (values[-1] - values[0]) * (100 if share else 1)
        unit = "points" if share else "tokens"
        shown += [] if len(ends) < 2 else ["–" if math.isnan(change) else f"{signed(change)} {unit}"]
        rows.append((name.replace("@k", f"@{ends[-1].get('samples_per_prompt') or 'k'}"), shown))
        if key == "accuracy" and any(map(interval, ends)):
            rows.append(("95% interval", [*(interval(row) or "–" for row in ends), *[""] * (len(ends) - 1)]))
    settings = list(dict.fromkeys(filter(None, map(evaluation_settings, ends))))
    return {"steps": [row["step"] for row in ends], "rows": rows, "settings": settings}


def interval(row: dict) -> str:
    """The interval of an evaluation's accuracy, "" where it has none."""
    low, high = number(row.get("accuracy_low")), number(row.get("accuracy_high"))
    return "" if math.isnan(low + high) else f"{100 * low:.1f} – {percent(high)}"


def evaluation_settings(row: dict) -> str:
    names = {
        "prompts": "{} prompts",
        "samples_per_prompt": "{} samples each",
        "temperature": "temperature {}",
        "top_p": "top-p {}",
    }
    return ", ".join(text.format(row[key]) for key, text in names.items() if row.get(key) is not None)


def rollout_view(run: Path) -> dict | None:
    """Responses of the first and last step to the same few prompts, spread evenly over the file."""
    folder, by_step = read_rollouts(run)
    if not by_step:
        return None
    columns = list(by_step.values())
    shared = [prompt for prompt in columns[0] if prompt in columns[-1]]
    if shared:
        prompts = spread(shared, SHOWN_PROMPTS)
    else:
        prompts = [prompt for column in columns for prompt in spread(list(column), SHOWN_PROMPTS // 2)]
    views = []
    for prompt in prompts:
        groups = [column.get(prompt, []) for column in columns]
        answer = next(as_text(row.get("answer")) for group in groups for row in group)
        pairs = zip_longest(*(one_of_each(step, group) for step, group in zip(by_step, groups)))
        views.append({"prompt": excerpt(prompt), "answer": excerpt(answer), "pairs": list(pairs)})
    return {"folder": folder, "columns": len(columns), "prompts": views, "same": bool(shared)}


def spread(values: list, n: int) -> list:
    """At most n of the values, at even intervals."""
    return values if len(values) <= n else [values[i * len(values) // n] for i in range(n)]


def one_of_each(step: int, group: Rows) -> list[dict]:
    """The greedy response, where there is one, and the first sampled one."""
    greedy = [row for row in group if row.get("greedy")][:1]
    sampled = [row for row in group if not row.get("greedy")][:1]
    return [response_view(step, row) for row in greedy + sampled]


def response_view(step: int, row: dict) -> dict:
    accuracy, length = number(row.get("accuracy")), number(row.get("length"))
    return {
        "title": f"Step {step}, {'greedy' if row.get('greedy') else 'sampled'}",
        "mark": "unknown" if math.isnan(accuracy) else "right" if accuracy > 0.5 else "wrong",
        "length": "" if math.isnan(length) else f"{length:,.0f} tokens",
        "truncated": bool(row.get("truncated")),
        "text": excerpt(as_text(row.get("response"))),
    }


def excerpt(text: str) -> dict[str, str]:
    """A text, or the two ends of a long one with a note of its full length."""
    if len(text) <= HEAD + TAIL:
        return {"head": text, "note": "", "tail": ""}
    note = f"… {len(text) - HEAD - TAIL:,} of {len(text):,} characters left out …"
    return {"head": text[:HEAD], "note": note, "tail": text[-TAIL:]}
