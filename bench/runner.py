"""Runs implementations on a workload and keeps what was measured, failures included."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from bench.implementations import Implementation
from bench.measure import TRAIN, Timer, bare_gemms, errors, gemm_flops, peak_bytes, phases
from bench.row_bandwidth import copy_bandwidth, row_bandwidth
from bench.workloads import Workload

WRONG = 0.2
"""Relative error of the gradient from which a number is not worth timing."""


@dataclass
class Result:
    """One implementation on one workload, in one phase."""

    workload: str
    implementation: str
    phase: str
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    flops: int = 0
    logprob_error: float | None = None
    gradient_error: float | None = None
    reason: str | None = None
    """Why there is nothing else."""

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.seconds)


@dataclass
class WorkloadResults:
    workload: Workload
    results: list[Result]
    gemm_seconds: list[float]
    """Of the three bare GEMMs, measured in turn with the rest."""
    copy_gbs: float
    row_gbs: dict[str, float]
    """Of our row operations, by backend: bytes that have to move, over seconds."""

    @property
    def gemm_median(self) -> float:
        """Seconds."""
        return statistics.median(self.gemm_seconds)

    @property
    def gemm_tflops(self) -> float:
        """The ceiling: what the products reach alone."""
        return 3 * self.workload.u / self.gemm_median / 1e12

    def trained(self) -> list[Result]:
        """Forward and backward of what ran."""
        return [r for r in self.results if r.phase == TRAIN and r.reason is None]


def run_workload(
    workload: Workload,
    implementations: list[Implementation],
    device: torch.device,
    rounds: int,
    tell: Callable[[str], None] = lambda text: None,
) -> WorkloadResults:
    """`tell` is given a line before each step that takes a while."""
    torch.compiler.reset()
    batches = [workload.make(device, seed) for seed in range(2 if device.type == "cuda" else 1)]
    calls, done = {"gemms": bare_gemms(batches[0])}, []
    for implementation in implementations:
        tell(f"checking {implementation.name}")
        ready = _checked(workload, implementation, batches, device)
        done += ready
        if ready[0].reason is None:
            for result, call in zip(ready, phases(implementation, batches).values()):
                calls[result.phase + implementation.key] = call
    tell("timing in turns")
    calls["gemms"]()  # the others are warm
    seconds = Timer(device).rounds(calls, rounds, warm=True)
    for result in done:
        result.seconds = seconds.get(result.phase + result.implementation, [])
    tell("bandwidth of the row operations")
    shape = (min(workload.tokens, 512 if device.type == "cpu" else 4096), workload.vocab)
    return WorkloadResults(
        workload, done, seconds["gemms"], copy_bandwidth(shape, device), row_bandwidth(shape, device)
    )


def _checked(
    workload: Workload, implementation: Implementation, batches: list, device: torch.device
) -> list[Result]:
    """Results of every phase with everything but the time; or one with the reason why not."""

    def failed(reason: str) -> list[Result]:
        return [Result(workload.name, implementation.key, TRAIN, reason=reason)]

    if implementation.compiles and not workload.compiled:
        return failed("not run here: compiles for every shape")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logprob_error, gradient_error = errors(implementation, workload.dtype, device)
            if gradient_error is not None and not gradient_error < WRONG:
                return failed(f"wrong: relative error {gradient_error:.2g} of the gradient")
            results = []
            for phase, call in phases(implementation, batches).items():
                if implementation.compiles:
                    call()  # not under the counters, which keep it from compiling
                flops = gemm_flops(call)
                for batch in batches:
                    batch.hidden.grad = batch.weight.grad = None  # to be made anew, and counted
                memory = peak_bytes(call, device)
                if implementation.compiles:
                    call()
                results.append(
                    Result(
                        workload.name,
                        implementation.key,
                        phase,
                        peak_bytes=memory,
                        flops=flops,
                        logprob_error=logprob_error,
                        gradient_error=gradient_error,
                    )
                )
            return results
    except Exception as error:  # whatever a peer does, it is a row
        return failed(reason_of(error, implementation))


def reason_of(error: Exception, implementation: Implementation) -> str:
    if isinstance(error, ModuleNotFoundError) and implementation.package is not None:
        return f"not installed ({error.name}): pip install {implementation.package}"
    if "0 active drivers" in str(error):
        return "needs a GPU: Triton finds no driver"
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {text}"[:160]
