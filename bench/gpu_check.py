"""The throughput part of scripts/gpu_check.sh: one table, needs torch and Triton only.

    python -m bench.gpu_check [--dry] --out DIR

Times our loss and every peer that can be imported, at the heads of Qwen2.5-32B and Llama-3-8B, and writes
gpu_check.json and gpu_check.md. `--dry`: tiny, on CPU. Exits with 1 if one of ours could not run or is wrong.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import torch
import triton

from bench.implementations import ALL, BY_KEY
from bench.runner import WorkloadResults, run_workload
from bench.suites import GPU_SMALL, TINY

PEERS_SHOWN = 4
"""Of each workload, the fastest: the table stays under 40 lines. The files have all."""
LIMITS = {torch.bfloat16: (1e-3, 0.02), torch.float32: (1e-4, 1e-4)}
"""Largest log-prob error and relative gradient error of ours."""


def rows(group: WorkloadResults) -> list[str]:
    """The workload, then a line an implementation, fastest first."""
    gemms = group.gemm_median
    rates = ", ".join(f"{name} {rate:.0f}" for name, rate in group.row_gbs.items())
    lines = [
        f"{group.workload.name}: GEMMs {1e3 * gemms:.1f} ms = {group.gemm_tflops:.3g} TFLOP/s; rows {rates} "
        f"of {group.copy_gbs:.0f} GB/s"
    ]
    trained = group.trained()
    peers = [r for r in trained if not BY_KEY[r.implementation].ours]
    shown = [r for r in trained if r not in peers]
    shown += sorted(peers, key=lambda r: r.median)[:PEERS_SHOWN]
    for result in sorted(shown, key=lambda r: r.median):
        time = result.median
        lines.append(
            f"  {BY_KEY[result.implementation].name:34s} {1e3 * time:8.1f} ms  "
            f"{time / gemms:5.2f} of the GEMMs  {result.peak_bytes / 1e9:6.2f} GB  "
            f"error {result.gradient_error or 0:.0e}"
        )
    return lines


def wrong(group: WorkloadResults) -> list[str]:
    """What of ours did not run, or is not exact."""
    faults = []
    for result in group.results:
        if not BY_KEY[result.implementation].ours:
            continue
        logprob_limit, gradient_limit = LIMITS[group.workload.dtype]
        if result.reason is not None:
            faults.append(f"{group.workload.name}, {result.implementation}: {result.reason}")
        elif not ((result.logprob_error or 0) <= logprob_limit and result.gradient_error <= gradient_limit):
            errors = f"log-prob {result.logprob_error}, gradient {result.gradient_error}"
            faults.append(f"{group.workload.name}, {result.implementation}: error {errors}")
    return faults


def machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"
    return f"{name}, torch {torch.__version__}, Triton {triton.__version__}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry", action="store_true", help="tiny, on CPU, through Triton's interpreter")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(argv)
    device = torch.device("cpu" if options.dry else "cuda")
    options.out.mkdir(parents=True, exist_ok=True)

    groups, faults = [], []
    for workload in TINY if options.dry else GPU_SMALL:
        print(f"{workload.name}: {workload.describe()}", flush=True)
        try:
            groups.append(run_workload(workload, ALL, device, rounds=2 if options.dry else 7))
        except Exception as error:  # what was measured until then is still told
            faults.append(f"{workload.name}: {type(error).__name__}: {error}"[:200])
    lines = [machine(device), *(line for group in groups for line in rows(group))]
    left_out = {(r.implementation, r.reason) for g in groups for r in g.results if r.reason is not None}
    text = "\n".join(
        [*lines, "", "Not run:", *(f"  {BY_KEY[key].name}: {why}" for key, why in sorted(left_out))]
    )
    (options.out / "gpu_check.md").write_text(f"```\n{text}\n```\n", encoding="utf-8")
    records = [{"workload": g.workload.describe(), **vars(r)} for g in groups for r in g.results]
    (options.out / "gpu_check.json").write_text(json.dumps(records, indent=1), encoding="utf-8")
    faults += [fault for group in groups for fault in wrong(group)]
    print("\n".join([*lines, *(f"WRONG {fault}" for fault in faults)][:38]))
    print(f"{'FAILED' if faults else 'ok'}; everything: {options.out}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
