"""What an H200 and an H100 can do at best with the loss over each head: writes bench/ceilings.md.

    python -m bench.ceilings

Arithmetic only; the measured columns are filled from `scripts/gpu_check.sh` on such a machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from bench.suites import GPU_SMALL
from bench.workloads import Workload


class Gpu(NamedTuple):
    name: str
    gemm_tflops: float
    """What large bf16 GEMMs reach (the data sheet's dense peak is 989 for both)."""
    bandwidth_tbs: float
    """Data sheet, TB/s."""


GPUS = (Gpu("H200", 790.0, 4.8), Gpu("H100 SXM", 666.0, 3.35))
CHUNK = 4096
COLUMNS = (
    "head, N", "TFLOP (3u)", "products, ms", "bound by", "row kernel, GB", "ms", "weight gradient, ms",
    "target, ms", "measured, ms", "/ GEMMs of the same run",
)  # fmt: skip
OVERHEAD = 1.03
"""Launches, gathers and tails, which the target allows for beside products and row traffic."""


def row_bytes(w: Workload) -> int:
    """Of the row kernel: fp32 logits read twice, 16-bit gradients written once."""
    return w.tokens * w.vocab * (2 * 4 + w.dtype.itemsize)


def accumulator_bytes(w: Workload) -> int:
    """The fp32 weight gradient: written by the first chunk, read and written by every other; rounded once."""
    chunks = -(-w.tokens // CHUNK)
    return w.vocab * w.hidden_size * (4 * (2 * chunks - 1) + 4 + w.dtype.itemsize)


def floors(w: Workload, gpu: Gpu) -> tuple[float, float, float]:
    """Milliseconds of the three products, of the row kernel, and of the accumulator beyond the products."""
    gemms = 3 * w.u / gpu.gemm_tflops / 1e9
    rows = row_bytes(w) / gpu.bandwidth_tbs / 1e9
    return gemms, rows, accumulator_bytes(w) / gpu.bandwidth_tbs / 1e9


def binds(w: Workload, gpu: Gpu) -> str:
    """What the three products run into."""
    moved = w.vocab * w.hidden_size * 3 * w.dtype.itemsize + w.tokens * w.vocab * (4 + 2 * w.dtype.itemsize)
    return "FLOPs" if 3 * w.u / gpu.gemm_tflops / 1e12 > moved / gpu.bandwidth_tbs / 1e12 else "bytes"


def measured(text: str) -> dict[tuple[str, str], list[str]]:
    """The last two cells of every row of an earlier file, by GPU and head: they are kept."""
    cells, gpu = {}, ""
    for line in text.splitlines():
        if line.startswith("## "):
            gpu = line[3:].split(":")[0]
        elif line.startswith("| "):
            row = [cell.strip() for cell in line.strip("|").split("|")]
            cells[gpu, row[0]] = row[-2:]
    return cells


def table(gpu: Gpu, known: dict[tuple[str, str], list[str]]) -> list[str]:
    lines = [
        f"## {gpu.name}: {gpu.gemm_tflops:.0f} TFLOP/s, {gpu.bandwidth_tbs:g} TB/s",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for w in GPU_SMALL:
        gemms, rows, accumulator = floors(w, gpu)
        target = OVERHEAD * (gemms + rows)
        cells = [
            w.name,
            f"{3 * w.u / 1e12:.1f}",
            f"{gemms:.1f}",
            binds(w, gpu),
            f"{row_bytes(w) / 1e9:.1f}",
            f"{rows:.1f}",
            f"{accumulator:.1f}",
            f"{target:.0f}",
            *known.get((gpu.name, w.name), ["", ""]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


HEADING = """# Floors of the fused loss on GPUs

Written by `python -m bench.ceilings`: arithmetic, not measurement. bf16, all tokens live. Forward and
backward need three products (3u) and one row kernel that reads fp32 logits twice and writes 16-bit
gradients over them; the two do not overlap here. The weight gradient's fp32 accumulator is read and
written once a chunk of 4096 tokens, inside the product that adds to it, mostly hidden behind its FLOPs.
Target: products + row kernel, and 3 % for the rest. The measured columns are filled from `bash
scripts/gpu_check.sh` on that GPU, and stay empty until then.
"""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("ceilings.md"))
    out = parser.parse_args(argv).out
    known = measured(out.read_text(encoding="utf-8")) if out.exists() else {}
    lines = [HEADING, *(line for gpu in GPUS for line in table(gpu, known))]
    out.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
