"""The policy loss of every library on every workload of a suite, as pytest-benchmark reports it.

    pip install -e '.[bench]'
    pytest bench/ [--suite small|full] [--device cpu|cuda] [--peers trl liger] --benchmark-group-by=group

Implementations of a workload are timed in turn, round by round, because a machine's speed drifts; what was
timed is then handed to pytest-benchmark.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest


class Replay:
    """A clock that shows the durations it was given, one after the other."""

    def __init__(self) -> None:
        self.ticks: Iterator[float] = iter(())

    def load(self, seconds: list[float]) -> None:
        self.ticks = (tick for duration in seconds for tick in (0.0, duration))

    def __call__(self) -> float:
        return next(self.ticks)


REPLAY = Replay()


@pytest.mark.benchmark(timer=REPLAY)
def test_loss(benchmark, measured, workload, implementation, phase):
    results = [r for r in measured.results if r.implementation == implementation.key]
    result = next((r for r in results if r.phase == phase), results[0])
    if result.reason is not None:
        pytest.skip(result.reason)
    if result.phase != phase:
        pytest.skip("the library has no call that gives log-probs alone")
    benchmark.group = f"{workload.name}, {phase}: {workload.describe()}"
    benchmark.extra_info |= {
        "implementation": implementation.key,
        "workload": workload.name,
        "phase": phase,
        "peak_mb": result.peak_bytes / 1e6,
        "u": result.flops / workload.u,
        "logprob_error": result.logprob_error,
        "gradient_error": result.gradient_error,
        "gemm_ceiling_tflops": measured.gemm_tflops,
    }
    REPLAY.load(result.seconds)
    benchmark.pedantic(lambda: None, rounds=len(result.seconds), iterations=1)
