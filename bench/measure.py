"""How things are measured: in turns, in time, memory, FLOPs and error."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from bench.implementations import CONFIG, Implementation
from bench.workloads import Batch, Workload
from dapo_kernels import reference

FLUSH_BYTES = 256 * 2**20
"""Written between two timings on a GPU, so that the second does not find its inputs in the L2 cache."""


def forward_backward(loss: Callable[[Batch], torch.Tensor], batch: Batch) -> None:
    batch.hidden.grad = batch.weight.grad = None
    loss(batch).backward()


def forward(logprobs: Callable[[Batch], torch.Tensor], batch: Batch) -> None:
    with torch.no_grad():
        logprobs(batch)


class Timer:
    """Seconds of calls that take turns, so that whatever else the machine does meets all alike."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.flush = None
        if device.type == "cuda":
            self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    def seconds(self, call: Callable[[], object]) -> float:
        if self.flush is None:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        self.flush.fill_(1)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def rounds(
        self, calls: dict[str, Callable[[], object]], rounds: int, warm: bool = False
    ) -> dict[str, list[float]]:
        """Every call once to warm up, unless they are `warm`, then `rounds` times in turn."""
        for call in calls.values():
            if not warm:
                call()
        seconds = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                seconds[name].append(self.seconds(call))
        return seconds


def interleaved_medians(calls: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Median seconds of each call on CPU."""
    timer = Timer(torch.device("cpu"))
    return {name: statistics.median(values) for name, values in timer.rounds(calls, rounds).items()}


def peak_bytes(call: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """The highest sum of live allocations during one call, beyond what there was before."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False) as trace:
        call()
    live = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def gemm_flops(call: Callable[[], object]) -> int:
    """FLOPs of all matrix products in a call."""

    def addmm_flops(total, a, b, *args, out_shape=None, **options):
        return 2 * a[0] * a[1] * b[1]

    mapping = {torch.ops.aten.addmm_: addmm_flops}  # not counted by default
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        call()
    return counter.get_total_flops()


def bare_gemms(batch: Batch) -> Callable[[], None]:
    """The three products that a loss over this head cannot do without: in fp32 on CPU, where 16-bit products
    are slower by far."""
    dtype = torch.float32 if batch.hidden.device.type == "cpu" else batch.hidden.dtype
    hidden, weight = batch.hidden.detach().flatten(0, 1).to(dtype), batch.weight.detach().to(dtype)

    def products() -> None:
        logits = hidden @ weight.T
        logits @ weight
        logits.T @ hidden

    return products


SMALL = Workload("small", tokens=64, hidden_size=512, vocab=2048, length=32, unmasked=0.7)
"""On this every implementation is held against fp64 before it is timed."""


@cache
def errors(
    implementation: Implementation, dtype: torch.dtype, device: torch.device
) -> tuple[float | None, float | None]:
    """Worst absolute error of a log-prob, and relative error of the weight's gradient, against fp64 on the
    same inputs. None where there is nothing to compare."""
    batch = replace(SMALL, dtype=dtype).make(device)
    wide = batch.to(torch.float64)
    truth = reference.linear_policy_loss(**wide.arguments(), config=CONFIG)
    truth.loss.backward()
    logprob_error = gradient_error = None
    if implementation.logprobs is not None:
        with torch.no_grad():
            logprobs = implementation.logprobs(batch)
        logprob_error = (logprobs.double() - truth.logprobs)[batch.mask].abs().max().item()
    forward_backward(implementation.loss, batch)
    if implementation.compiles:
        torch.compiler.reset()  # a graph of this small shape would make the next one dynamic
    if implementation.exact_loss:
        error = batch.weight.grad.double() - wide.weight.grad
        gradient_error = (error.norm() / wide.weight.grad.norm()).item()
    return logprob_error, gradient_error


def in_turns(batches: list[Batch], call: Callable[[Batch], None]) -> Callable[[], None]:
    """A call on the next of the batches, so that no timing sees the inputs of the one before."""
    state = {"next": 0}

    def turn() -> None:
        state["next"] = (state["next"] + 1) % len(batches)
        call(batches[state["next"]])

    return turn


FORWARD, TRAIN = "forward", "forward + backward"


def phases(implementation: Implementation, batches: list[Batch]) -> dict[str, Callable[[], None]]:
    calls = {TRAIN: in_turns(batches, partial(forward_backward, implementation.loss))}
    if implementation.logprobs is not None:
        calls[FORWARD] = in_turns(batches, partial(forward, implementation.logprobs))
    return calls
