"""The plots of a benchmark: one message each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from bench.implementations import BY_KEY
from bench.runner import Result, WorkloadResults

# Okabe and Ito's colours, told apart by colour-blind readers; peers that run together have different ones.
COLORS = {
    "torch": "#0072B2",
    "triton": "#000000",
    "skip": "#56B4E9",
    "lean": "#003F72",
    "plain": "#999999",
    "compiled": "#666666",
    "trl": "#D55E00",
    "liger": "#009E73",
    "liger-compiled": "#4DB899",
    "liger-triton": "#005A40",
    "verl-torch": "#CC79A7",
    "verl-kernel": "#8A4F73",
    "quack": "#F0E442",
}
OTHER = "#E69F00"
MARKERS = "osv^Dx*P<>"


def color_of(key: str) -> str:
    return COLORS.get(key, OTHER)


def marker_of(key: str) -> str:
    return MARKERS[list(BY_KEY).index(key) % len(MARKERS)]


def _lines(
    axes: Axes,
    groups: list[WorkloadResults],
    x: Callable[[WorkloadResults], float],
    y: Callable[[Result], float],
) -> None:
    """A line an implementation, over the workloads that it ran on."""
    points: dict[str, list[tuple[float, float]]] = {}
    for group in groups:
        for result in group.trained():
            points.setdefault(result.implementation, []).append((x(group), y(result)))
    for key, line in points.items():
        if line:
            axes.plot(
                *zip(*sorted(line)), marker=marker_of(key), color=color_of(key), label=BY_KEY[key].name,
                linewidth=2.5 if BY_KEY[key].ours else 1.5,
            )  # fmt: skip


def _same_but_tokens(groups: list[WorkloadResults]) -> list[WorkloadResults]:
    """The most workloads that differ in nothing but N."""
    families: dict[tuple, list[WorkloadResults]] = {}
    for group in groups:
        w = group.workload
        family = (w.hidden_size, w.vocab, w.dtype, w.unmasked, w.zero_advantage, w.distribution)
        families.setdefault(family, []).append(group)
    return max(families.values(), key=lambda family: len({g.workload.tokens for g in family}))


def _same_but_live_share(groups: list[WorkloadResults]) -> list[WorkloadResults]:
    """The most workloads that differ in nothing but which tokens are live."""
    families: dict[tuple, list[WorkloadResults]] = {}
    for group in groups:
        w = group.workload
        family = (w.tokens, w.hidden_size, w.vocab, w.dtype, w.distribution)
        families.setdefault(family, []).append(group)
    return max(families.values(), key=lambda family: len({g.workload.cost for g in family}))


def _head(group: WorkloadResults) -> str:
    w = group.workload
    return f"H {w.hidden_size}, V {w.vocab}, {str(w.dtype).removeprefix('torch.')}"


def _plain_ticks(axes: Axes, family: list[WorkloadResults]) -> None:
    """Numbers as one reads them, and N where there are points."""
    axes.set_xticks(sorted({g.workload.tokens for g in family}), minor=False)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _over_tokens(
    groups: list[WorkloadResults], axes: Axes, y: Callable[[Result], float], ylabel: str, message: str
) -> list[WorkloadResults]:
    """Lines over N; returns the workloads that they are of."""
    family = _same_but_tokens(groups)
    _lines(axes, family, lambda g: g.workload.tokens, y)
    title = f"{message}\n{_head(family[0])}"
    axes.set(xlabel="tokens N", ylabel=ylabel, xscale="log", yscale="log", title=title)
    _plain_ticks(axes, family)
    return family


def time_over_tokens(groups: list[WorkloadResults], axes: Axes) -> None:
    label = "forward + backward, seconds"
    family = _over_tokens(groups, axes, lambda r: r.median, label, "Time follows the bare GEMMs")
    gemms = sorted((g.workload.tokens, g.gemm_median) for g in family)
    axes.plot(*zip(*gemms), color="black", linestyle=":", label="the three bare GEMMs")


def memory_over_tokens(groups: list[WorkloadResults], axes: Axes) -> None:
    label = "peak memory beyond the inputs, MB"
    _over_tokens(groups, axes, lambda r: r.peak_bytes / 1e6, label, "Memory follows the budget, not N")


def time_over_live_share(groups: list[WorkloadResults], axes: Axes) -> None:
    family = _same_but_live_share(groups)
    _lines(axes, family, lambda g: g.workload.cost / 3, lambda r: r.median)
    axes.set(
        xlabel="work that cannot be skipped: (g + 2f) / 3", ylabel="forward + backward, seconds",
        xlim=(0, 1.05),
        title=f"What carries no gradient costs less\nN {family[0].workload.tokens}, {_head(family[0])}",
    )  # fmt: skip
    axes.set_ylim(bottom=0)


def intensity(group: WorkloadResults) -> float:
    """FLOPs of the three products for each byte that they and the row operations have to move."""
    w = group.workload
    size = w.dtype.itemsize
    weight = w.vocab * w.hidden_size * (2 * size + 4)  # read twice, its gradient written in fp32
    hidden = 3 * w.tokens * w.hidden_size * size
    logits = (
        w.tokens * w.vocab * (4 + 2 * 4 + size + 2 * size)
    )  # written, read twice, written as gradient, read
    return 3 * w.u / (weight + hidden + logits)


def roofline(groups: list[WorkloadResults], axes: Axes) -> None:
    live = [g for g in groups if g.workload.cost == 3]
    xs = [intensity(g) for g in live] or [1]
    ceiling = max(g.gemm_tflops for g in groups)
    bandwidth = max(g.copy_gbs for g in groups)
    grid = [min(xs) / 8, ceiling * 1e3 / bandwidth, max(xs) * 2]
    axes.plot(
        sorted(grid), [min(ceiling, x * bandwidth / 1e3) for x in sorted(grid)], color="black", linestyle=":",
        label=f"roof: copy {bandwidth:.0f} GB/s, GEMMs {ceiling:.3g} TFLOP/s",
    )  # fmt: skip
    seen = set()
    for group in live:
        for result in group.trained():
            key = result.implementation
            axes.scatter(
                intensity(group), 3 * group.workload.u / result.median / 1e12, color=color_of(key),
                marker=marker_of(key), label=None if key in seen else BY_KEY[key].name, zorder=3,
            )  # fmt: skip
            seen.add(key)
    axes.set(
        xlabel="FLOP per byte of the loss over this head", ylabel="useful TFLOP/s: 3u / time", xscale="log",
        yscale="log", title="How close to what the machine can do\nworkloads with all tokens live",
    )  # fmt: skip


def error_over_memory(groups: list[WorkloadResults], axes: Axes) -> None:
    low = [g for g in groups if g.workload.dtype.itemsize == 2] or groups
    group = low[0]
    for result in group.trained():
        if result.gradient_error is not None:
            axes.scatter(
                result.peak_bytes / 1e6, result.gradient_error, s=70, color=color_of(result.implementation),
                marker=marker_of(result.implementation), label=BY_KEY[result.implementation].name,
            )  # fmt: skip
    axes.set(
        xlabel="peak memory beyond the inputs, MB", ylabel="relative error of the weight gradient",
        xscale="log", yscale="log",
        title=f"Lean and exact is down and left\nN {group.workload.tokens}, {_head(group)}",
    )  # fmt: skip


PLOTS = {
    "time_tokens": time_over_tokens,
    "memory_tokens": memory_over_tokens,
    "time_live": time_over_live_share,
    "roofline": roofline,
    "error_memory": error_over_memory,
}


def draw(groups: list[WorkloadResults], folder: Path) -> list[Path]:
    """Writes every plot as PNG."""
    files = []
    for name, plot in PLOTS.items():
        figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
        plot(groups, axes)
        axes.grid(alpha=0.25, which="both")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        files.append(folder / f"{name}.png")
        figure.savefig(files[-1], dpi=120)
        plt.close(figure)
    return files
