"""What the fused loss promises, as ratios within one process on CPU, beside the peers that are installed.

    python -m bench.ratios [--rounds 5]

Prints a table: what, measured, at most. Exits with 1 if a limit is passed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from bench.implementations import LIGER, LIGER_COMPILED, OURS, TRL, Batch
from bench.measure import forward_backward, gemm_flops, interleaved_medians, make_batch, peak_bytes
from dapo_kernels import fused_linear_policy_loss

SHAPE, HIDDEN, VOCAB = (8, 128), 1024, 32768
TOKENS = SHAPE[0] * SHAPE[1]
U = 2 * TOKENS * HIDDEN * VOCAB
LIMITS = {("TRL", "fp32"): 0.70, ("TRL", "bf16"): 0.90, ("Liger", "fp32"): 0.50, ("Liger", "bf16"): 0.50}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Row(NamedTuple):
    what: str
    measured: float | None
    at_most: float
    note: str = ""

    @property
    def missed(self) -> bool:
        return self.measured is not None and self.measured > self.at_most


def flops() -> Iterator[Row]:
    batch = make_batch(SHAPE, HIDDEN, VOCAB, torch.float32)
    yield Row("GEMM FLOPs / u, all tokens", _flops(batch) / U, 3.0)
    part = make_batch(SHAPE, HIDDEN, VOCAB, torch.float32, unmasked=0.4)
    share = part.mask.float().mean().item()
    yield Row("GEMM FLOPs / u for each unmasked token, 40 % unmasked", _flops(part) / U / share, 3.0)
    batch.advantages[::2] = 0.0
    yield Row("GEMM FLOPs / u, half of the tokens with A = 0", _flops(batch) / U, 2.0)


def _flops(batch: Batch) -> int:
    return gemm_flops(partial(forward_backward, OURS.loss, batch))


def bare_gemms(batch: Batch) -> None:
    hidden, weight = batch.hidden.detach().flatten(0, 1), batch.weight.detach()
    logits = hidden @ weight.T
    logits @ weight
    logits.T @ hidden


def time_against_gemms(rounds: int) -> Iterator[Row]:
    batch = make_batch(SHAPE, HIDDEN, VOCAB, torch.float32)
    part = make_batch(SHAPE, HIDDEN, VOCAB, torch.float32, unmasked=0.4)
    seconds = interleaved_medians(
        {
            "ours": partial(forward_backward, OURS.loss, batch),
            "gemms": partial(bare_gemms, batch),
            "part": partial(forward_backward, OURS.loss, part),
        },
        rounds,
    )
    yield Row("time / three bare GEMMs, fp32", seconds["ours"] / seconds["gemms"], 1.20)
    yield Row("time at 40 % unmasked / time at 100 %, fp32", seconds["part"] / seconds["ours"], 0.45)


def time_against_peers(rounds: int) -> Iterator[Row]:
    for dtype in DTYPES:
        batch = make_batch(SHAPE, HIDDEN, VOCAB, DTYPES[dtype])
        peers = [TRL, LIGER, LIGER_COMPILED]
        calls = {p.name: partial(forward_backward, p.loss, batch) for p in [OURS, *peers] if not p.missing}
        seconds = interleaved_medians(calls, rounds)
        for peer in peers:
            limit = LIMITS[peer.name.split()[0], dtype]
            if peer.missing:
                yield Row(f"time / {peer.name}, {dtype}", None, limit, peer.missing)
            else:
                yield Row(f"time / {peer.name}, {dtype}", seconds[OURS.name] / seconds[peer.name], limit)


def memory() -> Iterator[Row]:
    for tokens in (8192, 32768):
        batch = make_batch((tokens // 128, 128), 576, 49152, torch.float32, unmasked=1024 / tokens)
        batch.mask[:] = True
        batch.weight.requires_grad_(False)
        peak = peak_bytes(partial(forward_backward, OURS.loss, batch))
        beyond = peak - batch.hidden.nbytes  # its gradient
        yield Row(f"MB beyond inputs and gradients, V 49152, N {tokens}, frozen head", beyond / 1e6, 300)


def exactness() -> Iterator[Row]:
    """Log-probs from bf16 inputs against fp64 on the same values, logits up to 30."""
    batch = make_batch(SHAPE, HIDDEN, VOCAB, torch.bfloat16)
    with torch.no_grad():
        low = vars(batch) | {"hidden": batch.hidden * 6, "weight": batch.weight}
        logits = low["hidden"].double().flatten(0, 1) @ batch.weight.double().T
        largest = logits.abs().max().item()
        truth = logits.log_softmax(-1).gather(1, batch.targets.view(-1, 1)).view(SHAPE)
        error = (fused_linear_policy_loss(**low).logprobs - truth).abs().max().item()
    yield Row(f"absolute log-prob error from bf16, |z| up to {largest:.0f}", error, 1e-4)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of which the median is taken")
    rounds = parser.parse_args(argv).rounds
    print(
        f"N {TOKENS}, H {HIDDEN}, V {VOCAB}; {torch.get_num_threads()} threads; torch {torch.__version__}\n"
    )
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
