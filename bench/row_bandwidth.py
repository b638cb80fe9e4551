"""Bytes a second of our row operations, against a plain copy measured beside them."""

from __future__ import annotations

import statistics

import torch

from bench.measure import Timer
from dapo_kernels import PolicyLossConfig
from dapo_kernels.backends import choose_rows
from dapo_kernels.objective import TokenInputs
from dapo_kernels.row_layout import empty_rows

ROUNDS = 3


def copy_bandwidth(shape: tuple[int, int], device: torch.device) -> float:
    """GB/s of `copy_`, reads and writes counted."""
    source = torch.randn(shape, device=device)
    target = torch.empty_like(source)
    seconds = Timer(device).rounds({"copy": lambda: target.copy_(source)}, ROUNDS)["copy"]
    return 2 * source.nbytes / statistics.median(seconds) / 1e9


def row_bandwidth(shape: tuple[int, int], device: torch.device) -> dict[str, float]:
    """GB/s of the loss on rows of logits by backend: each logit is read twice, its gradient written once."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator).to(device)
    targets = torch.randint(shape[1], shape[:1], generator=generator).to(device)
    column = torch.randn(shape[0], generator=generator).to(device)
    buffer = empty_rows(*shape, device=device)
    inputs = TokenInputs(column, column - 11, None, None, None)
    rates = {}
    for backend in ("torch", "triton") if device.type == "cuda" else ("torch",):
        rows = choose_rows(backend, device, PolicyLossConfig(), None, torch.float32, torch.float32)

        def call(rows=rows) -> None:
            rows.loss(buffer, targets, inputs, column.abs(), True)

        timer, seconds = Timer(device), []
        with torch.no_grad():
            for n in range(ROUNDS + 1):
                buffer.copy_(logits)  # the last call left its gradient there
                took = timer.seconds(call)
                seconds += [took] if n else []
        rates[backend] = 3 * logits.nbytes / statistics.median(seconds) / 1e9
    return rates
