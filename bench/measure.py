"""How things are measured: interleaved medians, live memory, batches that look like a training step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from bench.implementations import Batch
from dapo_kernels import fused_linear_policy_loss


def make_batch(
    shape: tuple[int, int],
    hidden_size: int,
    vocab: int,
    dtype: torch.dtype,
    unmasked: float = 1.0,
    seed: int = 0,
) -> Batch:
    """Old log-probs lie around the current ones, so that ratios are on both sides of the clip range.
    `unmasked`: exactly this share of the tokens counts."""
    generator = torch.Generator().manual_seed(seed)
    tokens = shape[0] * shape[1]
    hidden = torch.randn(*shape, hidden_size, generator=generator).to(dtype)
    weight = (torch.randn(vocab, hidden_size, generator=generator) * hidden_size**-0.5).to(dtype)
    targets = torch.randint(vocab, shape, generator=generator)
    mask = (torch.randperm(tokens, generator=generator) < unmasked * tokens).view(shape)
    advantages = torch.randn(shape[0], generator=generator)
    with torch.no_grad():
        logprobs = fused_linear_policy_loss(hidden, weight, targets, advantages, mask).logprobs
    old = logprobs + 0.2 * torch.randn(shape, generator=generator)
    return Batch(hidden.requires_grad_(), weight.requires_grad_(), targets, advantages, mask, old)


def forward_backward(loss: Callable[[Batch], torch.Tensor], batch: Batch) -> None:
    batch.hidden.grad = batch.weight.grad = None
    loss(batch).backward()


def interleaved_medians(calls: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    """Median seconds of each call; they take turns, so that what else the machine does meets all alike."""
    seconds = {name: [] for name in calls}
    for call in calls.values():
        call()  # warm up
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_bytes(call: Callable[[], object]) -> int:
    """The highest sum of live allocations on CPU during one call, beyond what there was before."""
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

    def addmm_flops(total, a, b, out_shape=None, **options):
        return 2 * a[0] * a[1] * b[1]

    mapping = {torch.ops.aten.addmm_: addmm_flops}  # not counted by default
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        call()
    return counter.get_total_flops()
