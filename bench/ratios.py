"""What the fused loss promises, as ratios within one process on CPU, beside the peers that are installed.

    python -m bench.ratios [--rounds 5]

Prints a table: what, measured, at most. Exits with 1 if a limit is passed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from bench.implementations import BY_KEY
from bench.measure import bare_gemms, errors, forward_backward, gemm_flops, interleaved_medians, peak_bytes
from bench.runner import reason_of
from bench.workloads import Workload
from dapo_kernels import fused_linear_policy_loss

ALL_TOKENS = Workload("", 1024, 1024, 32768, torch.float32, distribution="uniform")
PART = replace(ALL_TOKENS, unmasked=0.4)
HALF_ZERO = replace(ALL_TOKENS, zero_advantage=0.5)
U = ALL_TOKENS.u
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PEERS = {
    "trl": {"fp32": 0.70, "bf16": 0.90},
    "liger": {"fp32": 0.50, "bf16": 0.50},
    "liger-compiled": {"fp32": 0.50, "bf16": 0.50},
}
"""The largest ratio to each."""
OURS = BY_KEY["torch"]


class Row(NamedTuple):
    what: str
    measured: float | None
    at_most: float
    note: str = ""

    @property
    def missed(self) -> bool:
        return self.measured is not None and self.measured > self.at_most


def flops() -> Iterator[Row]:
    yield Row("GEMM FLOPs / u, all tokens", _flops(ALL_TOKENS) / U, 3.0)
    share = round(PART.unmasked * PART.tokens) / PART.tokens
    yield Row("GEMM FLOPs / u for each unmasked token, 40 % unmasked", _flops(PART) / U / share, 3.0)
    yield Row("GEMM FLOPs / u, half of the tokens with A = 0", _flops(HALF_ZERO) / U, 2.0)


def _flops(workload: Workload) -> int:
    return gemm_flops(partial(forward_backward, OURS.loss, workload.make()))


def time_against_gemms(rounds: int) -> Iterator[Row]:
    batch, part = ALL_TOKENS.make(), PART.make()
    seconds = interleaved_medians(
        {
            "ours": partial(forward_backward, OURS.loss, batch),
            "gemms": bare_gemms(batch),
            "part": partial(forward_backward, OURS.loss, part),
        },
        rounds,
    )
    yield Row("time / three bare GEMMs, fp32", seconds["ours"] / seconds["gemms"], 1.20)
    yield Row("time at 40 % unmasked / time at 100 %, fp32", seconds["part"] / seconds["ours"], 0.45)


def time_against_peers(rounds: int) -> Iterator[Row]:
    for dtype in DTYPES:
        batch = replace(ALL_TOKENS, dtype=DTYPES[dtype]).make()
        calls, missing = {"torch": partial(forward_backward, OURS.loss, batch)}, {}
        for key in PEERS:
            try:
                errors(BY_KEY[key], DTYPES[dtype], torch.device("cpu"))
                forward_backward(BY_KEY[key].loss, batch)
                calls[key] = partial(forward_backward, BY_KEY[key].loss, batch)
            except Exception as error:
                missing[key] = reason_of(error, BY_KEY[key])
        seconds = interleaved_medians(calls, rounds)
        for key, limits in PEERS.items():
            ratio = None if key in missing else seconds["torch"] / seconds[key]
            what = f"time / {BY_KEY[key].name}, {dtype}"
            yield Row(what, ratio, limits[dtype], missing.get(key, ""))


def memory() -> Iterator[Row]:
    for tokens in (8192, 32768):
        workload = Workload("", tokens, 576, 49152, torch.float32, unmasked=0.1, distribution="uniform")
        batch = workload.make()
        batch.mask[:] = True
        batch.weight.requires_grad_(False)
        peak = peak_bytes(partial(forward_backward, OURS.loss, batch))
        beyond = peak - batch.hidden.nbytes  # its gradient
        yield Row(f"MB beyond inputs and gradients, V 49152, N {tokens}, frozen head", beyond / 1e6, 300)


def exactness() -> Iterator[Row]:
    """Log-probs from bf16 inputs against fp64 on the same values, logits up to 30."""
    batch = replace(ALL_TOKENS, dtype=torch.bfloat16).make()
    batch.hidden = batch.hidden.detach() * 6
    with torch.no_grad():
        logits = batch.hidden.double() @ batch.weight.double().T
        largest = logits.abs().max().item()
        truth = logits.log_softmax(-1).gather(-1, batch.targets[..., None]).squeeze(-1)
        error = (fused_linear_policy_loss(**batch.arguments()).logprobs - truth).abs().max().item()
    yield Row(f"absolute log-prob error from bf16, logits up to {largest:.0f}", error, 1e-4)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of which the median is taken")
    rounds = parser.parse_args(argv).rounds
    shape = f"N {ALL_TOKENS.tokens}, H {ALL_TOKENS.hidden_size}, V {ALL_TOKENS.vocab}"
    print(f"{shape}; {torch.get_num_threads()} threads; torch {torch.__version__}\n")
    print("| what | measured | at most |\n|---|---|---|")
    missed = False
    for row in _rows(rounds):
        value = row.note if row.measured is None else f"{row.measured:.3g}{' (missed)' * row.missed}"
        print(f"| {row.what} | {value} | {row.at_most:g} |", flush=True)
        missed |= row.missed
    return int(missed)


def _rows(rounds: int) -> Iterator[Row]:
    yield from flops()
    yield from time_against_gemms(rounds)
    yield from time_against_peers(rounds)
    yield from memory()
    yield from exactness()


if __name__ == "__main__":
    sys.exit(main())
