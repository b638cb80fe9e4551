"""What a benchmark leaves: results.json, report.md, report.html and the plots."""

from __future__ import annotations

import base64
import json
import platform
from html import escape
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from bench.implementations import BY_KEY
from bench.measure import FORWARD
from bench.plots import draw
from bench.runner import Result, WorkloadResults

PACKAGES = ("torch", "triton", "trl", "liger-kernel", "cut-cross-entropy", "verl", "quack-kernels")
HEADER = (
    "implementation", "forward, s", "forward + backward, s", "spread", "/ dapo-kernels",
    "share of GEMM ceiling", "u", "memory, MB", "log-prob error", "gradient error",
)  # fmt: skip


def write_report(
    folder: Path, benchmark: dict, groups: list[WorkloadResults], left_out: list[str], device: str
) -> None:
    """`benchmark`: pytest-benchmark's JSON, to which what could not run is added; `left_out`: workloads."""
    benchmark["unavailable"] = [vars(r) for g in groups for r in g.results if r.reason is not None]
    benchmark["row_operations"] = {
        g.workload.name: {"copy_gb_per_s": g.copy_gbs, **g.row_gbs} for g in groups
    }
    (folder / "results.json").write_text(json.dumps(benchmark, indent=1), encoding="utf-8")
    plots = draw(groups, folder)
    sections = [(f"{g.workload.name}", g.workload.describe(), table(g), notes(g)) for g in groups]
    missing = [*left_out, *not_run(groups)]
    (folder / "report.md").write_text(markdown(sections, plots, missing, device), encoding="utf-8")
    (folder / "report.html").write_text(html(sections, plots, missing, device), encoding="utf-8")


def machine(device: str) -> str:
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    if device == "cuda":
        where = torch.cuda.get_device_name()
    else:
        where = f"{_processor()}, {torch.get_num_threads()} threads"
    return f"{where}; Python {platform.python_version()}, {', '.join(versions)}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def table(group: WorkloadResults) -> list[list[str]]:
    """A row an implementation that ran, fastest first."""
    trained = group.trained()
    forward = {r.implementation: r for r in group.results if r.phase == FORWARD}
    times = {r.implementation: r.median for r in trained}
    ours = times.get("triton", times.get("torch"))
    return [
        _row(result, forward.get(result.implementation), ours, group)
        for result in sorted(trained, key=lambda r: r.median)
    ]


def _row(result: Result, forward: Result | None, ours: float | None, group: WorkloadResults) -> list[str]:
    middle = result.median
    spread = (max(result.seconds) - min(result.seconds)) / middle
    ceiling = 3 * group.workload.u / middle / 1e12 / group.gemm_tflops
    return [
        BY_KEY[result.implementation].name,
        "–" if forward is None else f"{forward.median:.3g}",
        f"{middle:.3g}",
        f"{spread:.0%}",
        "–" if ours is None else f"{middle / ours:.2f}",
        f"{ceiling:.0%}",
        _work(result, group),
        f"{result.peak_bytes / 1e6:.3g}" if result.peak_bytes < 1e8 else f"{result.peak_bytes / 1e6:.0f}",
        "–" if result.logprob_error is None else f"{result.logprob_error:.1e}",
        "–" if result.gradient_error is None else f"{result.gradient_error:.1e}",
    ]


def _work(result: Result, group: WorkloadResults) -> str:
    """FLOPs in u; unknown where products are inside of kernels, where torch's counter does not see them."""
    work = result.flops / group.workload.u
    return f"{work:.2f}" if work > group.workload.cost / 2 else "–"


def notes(group: WorkloadResults) -> str:
    rates = ", ".join(f"{name} {rate:.1f}" for name, rate in group.row_gbs.items())
    return (
        f"Three bare GEMMs: {group.gemm_median:.3g} s, {group.gemm_tflops:.3g} TFLOP/s. "
        f"Row operations: {rates} GB/s, a plain copy {group.copy_gbs:.1f} GB/s."
    )


def not_run(groups: list[WorkloadResults]) -> list[str]:
    """What did not run, why, and on how many workloads."""
    where: dict[tuple[str, str], list[str]] = {}
    for group in groups:
        for result in group.results:
            if result.reason is not None:
                key = (BY_KEY[result.implementation].name, result.reason)
                where.setdefault(key, []).append(group.workload.name)
    everywhere = len(groups)
    return [
        f"{name}: {reason}" + ("" if len(names) == everywhere else f" ({', '.join(names)})")
        for (name, reason), names in where.items()
    ]


INTRODUCTION = (
    "Forward and backward of the policy loss over one head. Medians of calls taken in turn; spread is "
    "(slowest - fastest) / median; / dapo-kernels: over the time of our default. The ceiling is the time of "
    "the three products alone, all tokens (fp32 on CPU); over 100 % means that work was skipped. u: matrix "
    "FLOPs over those of one product of all tokens with the head. Memory: beyond the inputs, gradients "
    "included. Errors: against fp64 on a small peaked case in the same dtype, worst absolute for log-probs, "
    "relative for the weight's gradient."
)


def markdown(sections: list, plots: list[Path], missing: list[str], device: str) -> str:
    lines = ["# Policy loss benchmark", "", machine(device), "", INTRODUCTION, ""]
    for name, description, rows, remarks in sections:
        lines += [f"## {name}", "", description, ""]
        lines += [f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
        lines += [f"| {' | '.join(row)} |" for row in rows]
        lines += ["", remarks, ""]
    lines += ["## Not run", "", *(f"- {line}" for line in missing), ""]
    lines += [f"![{plot.stem}]({plot.name})" for plot in plots]
    return "\n".join(lines) + "\n"


STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1200px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto}td,th{padding:3px 10px;"
    "text-align:right;border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}"
    "tr.ours{background:#eaf3fb}img{max-width:100%;margin:1em 0}.quiet,li{color:#595959}"
)


def html(sections: list, plots: list[Path], missing: list[str], device: str) -> str:
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Policy loss benchmark</title>"
        f"<style>{STYLE}</style><h1>Policy loss benchmark</h1><p>{escape(machine(device))}</p>"
        f"<p class=quiet>{escape(INTRODUCTION)}</p>"
    ]
    ours = {i.name for i in BY_KEY.values() if i.ours}
    for name, description, rows, remarks in sections:
        head = "".join(f"<th>{escape(cell)}</th>" for cell in HEADER)
        body = "".join(
            f"<tr{' class=ours' * (row[0] in ours)}>"
            + "".join(f"<td>{escape(c)}</td>" for c in row)
            + "</tr>"
            for row in rows
        )
        parts.append(
            f"<h2>{escape(name)}</h2><p>{escape(description)}</p><table><tr>{head}</tr>{body}</table>"
            f"<p class=quiet>{escape(remarks)}</p>"
        )
    items = "".join(f"<li>{escape(line)}</li>" for line in missing)
    parts.append(f"<h2>Not run</h2><ul>{items}</ul><h2>Plots</h2>")
    for plot in plots:
        data = base64.b64encode(plot.read_bytes()).decode()
        parts.append(f'<img alt="{plot.stem}" src="data:image/png;base64,{data}">')
    return "\n".join(parts) + "</html>\n"
