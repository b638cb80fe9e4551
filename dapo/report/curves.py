"""Draws the charts of a report with matplotlib."""

import io
import math
import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .charts import PAPER_CHARTS, Chart, Line
from .data import Rows, column

SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
SMOOTH_ABOVE = 20  # steps; shorter runs are drawn as they are
STYLE = {
    "svg.hashsalt": "dapo",  # the same run gives the same bytes
    "font.size": 8.5,
    "axes.edgecolor": "#9a9a9a",
    "axes.linewidth": 0.7,
    "axes.labelcolor": "#444",
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "xtick.color": "#9a9a9a",
    "ytick.color": "#9a9a9a",
    "xtick.labelcolor": "#444",
    "ytick.labelcolor": "#444",
    "legend.frameon": False,
    "legend.fontsize": 8,
}


def points(line: Line, metrics: Rows, evals: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a line, without the missing ones."""
    rows = evals if line.held_out else metrics
    steps, values = np.array([row["step"] for row in rows], dtype=float), column(rows, line.key)
    found = np.isfinite(values)
    return steps[found], values[found]


def has_data(chart: Chart, metrics: Rows, evals: Rows) -> bool:
    return any(len(points(line, metrics, evals)[0]) for line in chart.lines)


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred average, weighted by a triangle over a tenth of the run, which is cut off at both ends."""
    weights = np.bartlett(2 * max(3, len(values) // 10) + 1)
    return np.convolve(values, weights, "same") / np.convolve(np.ones_like(values), weights, "same")


def draw_line(ax: Axes, line: Line, label: str, x: np.ndarray, y: np.ndarray) -> None:
    """Points for held-out lines; else a line, and above 20 steps a thin raw one under a smoothed one."""
    style, marker = ("--", "x") if line.dashed else ("-", "o")
    if line.held_out:
        ax.plot(x, y, ":", color=line.color, lw=0.8, marker="D", ms=4, label=label, zorder=3)
    elif len(x) <= SMOOTH_ABOVE:
        ax.plot(x, y, style, color=line.color, lw=1.4, marker=marker, ms=3, label=label)
    elif line.exact:
        ax.plot(x, y, style, color=line.color, lw=1.4, label=label)
    else:
        # Tinted, not transparent: the many overlaps of a long noisy line would add up to full colour.
        tint = 0.35 * np.array(to_rgb(line.color)) + 0.65
        ax.plot(x, y, color=tint, lw=0.6, zorder=1.9)
        ax.plot(x, smooth(y), style, color=line.color, lw=1.7, label=label)


def draw_intervals(ax: Axes, line: Line, evals: Rows) -> None:
    """An upright bar over each held-out point, where the evaluation says how uncertain it is."""
    steps = np.array([row["step"] for row in evals], dtype=float)
    low, high = column(evals, f"{line.key}_low"), column(evals, f"{line.key}_high")
    found = np.isfinite(low + high)
    ax.vlines(steps[found], low[found], high[found], color=line.color, lw=1, alpha=0.6)


def draw_stack(ax: Axes, lines: Sequence[Line], metrics: Rows) -> None:
    """One filled band per line, stacked; long runs are averaged into at most 300 bars."""
    steps = np.array([row["step"] for row in metrics], dtype=float)
    parts = np.array_split(np.arange(len(steps)), min(len(steps), 300))
    edges = np.array([steps[part[0]] for part in parts] + [steps[-1] + 1]) - 0.5
    x, base = np.repeat(edges, 2)[1:-1], np.zeros(2 * len(parts))
    for line in lines:
        values = np.nan_to_num(column(metrics, line.key))
        top = base + np.repeat([values[part].mean() for part in parts], 2)
        ax.fill_between(x, base, top, color=line.color, label=line.label, lw=0)
        base = top


def scale_axis(ax: Axes, unit: str, percent: bool) -> None:
    """A scale that starts at 0 unless the values lie far from it; a power of ten goes into the label."""
    low, high = ax.dataLim.y0, ax.dataLim.y1
    if low == high:  # a constant: shown against 0, not against its own rounding error
        ax.set_ylim(min(0, 1.25 * low), max(0, 1.25 * low) or float(low == 0))
    elif 0 <= low < 0.6 * high:
        ax.set_ylim(bottom=0)
    largest = max(map(abs, ax.get_ylim()))
    power = 0 if percent or 1e-2 <= largest < 1e5 else math.floor(math.log10(largest))
    factor, sign = (100, "%") if percent else (10.0**-power, "")
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y * factor:,.4g}{sign}".replace("-", "−")))
    ax.set_ylabel(unit + (f" (×10{str(power).translate(SUPERSCRIPT)})" if power else ""))


def draw_chart(ax: Axes, chart: Chart, metrics: Rows, evals: Rows) -> None:
    """Draws the chart's lines that hold data, its axes, and a legend above if it can have several lines."""
    lines = [line for line in chart.lines if len(points(line, metrics, evals)[0])]
    left, right = ([line for line in lines if line.right is side] for side in (False, True))
    axes = [(ax, left, chart.unit)] if left else []
    if right:
        axes.append((ax.twinx() if left else ax, right, chart.right_unit))
    for axis, own, unit in axes:
        axis.spines.right.set_visible(len(axes) > 1 and axis is not ax)
        if chart.stacked:
            draw_stack(axis, own, metrics)
        else:
            for line in own:
                label = f"{line.label} (right axis)" if axis is not ax else line.label
                draw_line(axis, line, label, *points(line, metrics, evals))
                if line.held_out:
                    draw_intervals(axis, line, evals)
        scale_axis(axis, unit, chart.percent)
    axes[-1][0].grid(len(axes) == 1)  # two grids at once cannot be read
    steps = [row["step"] for row in (*metrics, *evals)]
    pad = max(0.5, 0.02 * (max(steps) - min(steps)))
    ax.set_xlim(min(steps) - pad, max(steps) + pad)
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.set_xlabel("step")
    handles = [handle for axis, _, _ in axes for handle in axis.get_legend_handles_labels()[0]]
    if len(chart.lines) > 1:
        ax.legend(handles=handles, loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=len(handles))


def chart_svg(chart: Chart, metrics: Rows, evals: Rows) -> str:
    """The chart as an <svg> element to set inside a page."""
    with matplotlib.rc_context({**STYLE, "svg.fonttype": "none"}):
        figure = Figure(figsize=(8.5 if chart.wide else 4.1, 2.6), layout="constrained")
        draw_chart(figure.add_subplot(), chart, metrics, evals)
        return figure_svg(figure, f"{chart.title} by step")


def figure_svg(figure: Figure, label: str) -> str:
    """A figure as an <svg> element; `label` is for those who cannot see it. Call it in the figure's style."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
    # Nobody refers to the ids of groups, and they repeat from chart to chart.
    return re.sub(r' id="\w+_\d+"', "", svg)


def save_figure(metrics: Rows, evals: Rows, out: Path) -> None:
    """The paper's curves in one figure, in the format of `out`'s suffix."""
    charts = [chart for chart in PAPER_CHARTS if has_data(chart, metrics, evals)]
    columns = max(1, min(3, len(charts)))
    rows = max(1, math.ceil(len(charts) / columns))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.0 * columns, 2.8 * rows), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
        for i, chart in enumerate(charts):
            ax = figure.add_subplot(rows, columns, i + 1)
            draw_chart(ax, chart, metrics, evals)
            ax.set_title(chart.title, loc="left", pad=20, fontsize=10, fontweight="bold")
        if not charts:
            figure.text(0.5, 0.5, "no steps recorded yet", ha="center", va="center")
        figure.savefig(out, format=out.suffix[1:].lower() or "png", dpi=150)
