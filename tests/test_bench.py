"""The benchmarks run, say what they should, and are held to what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("pytest_benchmark")
from bench.implementations import BY_KEY
from bench.measure import SMALL, gemm_flops
from bench.runner import run_workload
from bench.suites import SUITES, TINY
from bench.workloads import Workload
from dapo_kernels import fused_linear_policy_loss

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_INTERPRET", "PYTEST_"))}
    env = inherited | environment
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)


def test_one_command_writes_the_whole_report(tmp_path):
    done = run(sys.executable, "-m", "bench.run", "--suite", "tiny", "--rounds", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    seen = {(b["extra_info"]["implementation"], b["extra_info"]["phase"]): b for b in results["benchmarks"]}
    ours = seen["torch", "forward + backward"]
    assert len(ours["stats"]["data"]) == 2 and ours["stats"]["median"] > 0
    assert ours["extra_info"]["u"] == pytest.approx(TINY[0].cost, rel=0.25)  # which tokens count is drawn
    assert ours["extra_info"]["gradient_error"] < 1e-5 and ours["extra_info"]["peak_mb"] > 0
    reasons = {r["implementation"]: r["reason"] for r in results["unavailable"]}
    assert "needs tensors on a GPU" in reasons["triton"]
    assert set(reasons) | {key for key, _ in seen} == set(BY_KEY), "left out without a word"
    for name in ("time_tokens", "memory_tokens", "time_live", "roofline", "error_memory"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64") == 5 and "http" not in page.split("<style>")[1]
    assert "| dapo-kernels, torch |" in (tmp_path / "report.md").read_text()


def test_a_peer_that_fails_or_is_wrong_is_a_row(monkeypatch):
    from dataclasses import replace

    def broken(batch):
        raise RuntimeError("no such device\nsecond line")

    wrong = replace(BY_KEY["plain"], key="wrong", loss=lambda batch: 2 * BY_KEY["plain"].loss(batch))
    absent = replace(BY_KEY["trl"], key="absent", loss=lambda batch: __import__("no_such_package"))
    impls = [replace(BY_KEY["plain"], key="broken", loss=broken), wrong, absent, BY_KEY["plain"]]
    impls[2] = replace(impls[2], logprobs=None)
    group = run_workload(TINY[0], impls, torch.device("cpu"), rounds=1)
    reasons = {r.implementation: r.reason for r in group.results}
    assert reasons["broken"] == "RuntimeError: no such device"
    assert reasons["wrong"].startswith("wrong: relative error 1")
    assert reasons["absent"] == "not installed (no_such_package): pip install trl==1.16.0"
    assert reasons["plain"] is None


@pytest.mark.parametrize("head", [(576, 49152), (896, 151936)])
def test_peaked_batches_have_the_paper_s_statistics(head):
    """Mean probability about 0.8, entropy about 0.4 nats; exactly the wanted share unmasked."""
    workload = Workload("", 256, *head, torch.float32, unmasked=0.3, zero_advantage=0.5)
    batch = workload.make()
    assert batch.mask.sum() == round(0.3 * 256) and (batch.advantages == 0).sum() == 1
    arguments = batch.arguments() | {"mask": torch.ones_like(batch.mask)}
    with torch.no_grad():
        output = fused_linear_policy_loss(**arguments)
    assert 0.75 < output.logprobs.exp().mean() < 0.85
    assert 0.3 < output.entropy.mean() < 0.5


def test_every_workload_can_be_made():
    """Lengths divide tokens; names tell workloads of a suite apart."""
    for suite in SUITES.values():
        assert all(w.tokens % w.length == 0 for w in suite)
        assert len({w.name for w in suite}) == len(suite)
    assert SMALL.tokens % SMALL.length == 0


def test_flops_are_counted_in_place_too():
    a, b, total = torch.ones(3, 4), torch.ones(4, 5), torch.ones(3, 5)
    assert gemm_flops(lambda: total.addmm_(a, b)) == gemm_flops(lambda: a @ b) == 2 * 3 * 4 * 5


@pytest.mark.slow
def test_gpu_check_runs_dry(tmp_path):
    done = run("bash", "scripts/gpu_check.sh", "--dry", OUT=str(tmp_path), PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) <= 40
    assert " passed" in (tmp_path / "correctness.txt").read_text()
    assert "dapo-kernels, Triton" in (tmp_path / "gpu_check.md").read_text()
