"""What the row kernels compile to, for GPUs that need not be here: a sample of bench/compile_report.py, and
that its check sees what it is there to see."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parents[1]


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """A process of its own: other tests import Triton as an interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_kernels_compile_without_spills_and_with_wide_accesses(target, tmp_path):
    table = tmp_path / "report.md"
    done = python(
        "-m", "bench.compile_report", "--targets", target, "--sample", "--out", str(table),
        TRITON_CACHE_DIR=str(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split("|")[1:-1] for line in table.read_text().splitlines() if line.startswith("| l")]
    assert len(rows) >= 4
    if target == "sm_90":
        assert all(int(row[2]) <= 64 for row in rows), "registers"


BROKEN = """
import triton
from bench import compile_report as report
from bench.kernel_variants import loss_variant
variant = loss_variant(152064, report.torch.bfloat16)
target = report.TARGETS[{target!r}]
def without_barrier(amd):
    return variant.arguments(amd) | {{"OVERLAPS": False}}
code = report.read_machine_code(report.compile_variant(variant._replace(arguments=without_barrier), target))
print(report.faults(variant, code, target))
def narrow(amd):
    return variant.arguments(amd) | {{"pitch": 152061}}
code = report.read_machine_code(report.compile_variant(variant._replace(arguments=narrow), target))
print(report.faults(variant, code, target))
"""


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_the_check_sees_a_missing_barrier_and_narrow_loads(target, tmp_path):
    done = python("-c", BROKEN.format(target=target), TRITON_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    barrier, narrow = done.stdout.splitlines()
    assert "no barrier between load and store" in barrier
    assert "4-byte load in a sweep" in narrow


def test_the_package_needs_torch_only():
    code = "import sys; sys.modules['triton'] = None; import dapo_kernels, dapo_kernels.kernels"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
