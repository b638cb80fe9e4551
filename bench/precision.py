"""What each precision rule of the fused loss is worth: the same numbers with the rule and without.

    python -m bench.precision

The values stand in docs/kernels.md. Errors are against fp64 on the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dapo_kernels import PolicyLossConfig, fused_linear_policy_loss
from dapo_kernels.row_ops import logits_gradient_, logits_statistics_

bf16, fp16, fp32, fp64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Example(NamedTuple):
    rule: str
    shown: str
    without: str
    with_rule: str


def logits_in_fp32() -> Example:
    """Logits up to 30 from bf16 inputs."""
    generator = torch.Generator().manual_seed(0)
    hidden = (torch.randn(512, 512, generator=generator) * 6).to(bf16)
    weight = (torch.randn(8192, 512, generator=generator) * 512**-0.5).to(bf16)
    targets = torch.randint(8192, (512,), generator=generator)
    logits = hidden.double() @ weight.double().T
    truth = logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    rounded = logits.to(bf16).float().log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    ones = torch.ones(512)
    with torch.no_grad():
        ours = fused_linear_policy_loss(hidden, weight, targets, ones, ones).logprobs
    worst = [(x - truth).abs().max().item() for x in (rounded, ours)]
    shown = f"worst log-prob error at logits up to {logits.abs().max():.0f}, and what it does to a ratio"
    return Example(
        "logits stay fp32",
        shown,
        *(f"{error:.1g} nats, {100 * math.expm1(error):.1g} %" for error in worst),
    )


def gradient_of_logits(logits: Tensor, target: int) -> Tensor:
    """d log p(target) / d logits of one row, by the row operations."""
    rows, targets = logits.clone()[None], torch.tensor([target])
    config = PolicyLossConfig()
    statistics = logits_statistics_(rows, targets, config)
    logits_gradient_(rows, targets, statistics, torch.ones(1), None, config)
    return rows[0]


def target_before_rounding() -> Example:
    """p(y) = 0.9995: the target's entry of the gradient is 1 - p."""
    logits = torch.zeros(1000)
    logits[0] = math.log(0.9995 / 0.0005 * 999)
    truth = 1 - logits.double().softmax(0)[0]
    naive = 1 - logits.softmax(0)[0].to(bf16).float()
    ours = gradient_of_logits(logits, 0)[0].to(bf16).float()
    errors = [abs(x / truth - 1).item() for x in (naive, ours)]
    return Example(
        "`1 - p` first, then one rounding to bf16", "error of `1 - p` at p = 0.9995", *_percent(errors)
    )


def rest_of_the_sum() -> Example:
    """p(y) = 1 - 1e-6 in fp32."""
    logits = torch.zeros(1000)
    logits[0] = math.log((1 - 1e-6) / 1e-6 * 999)
    wide = logits.double()
    truth = (wide[1:] - wide.logsumexp(0)).exp().sum()
    naive = 1 - logits.softmax(0)[0]
    ours = gradient_of_logits(logits, 0)[0]
    errors = [abs(x.double() / truth - 1).item() for x in (naive, ours)]
    return Example("`1 - p` as the sum without the target", "error of `1 - p` at 1e-6", *_percent(errors))


def weight_gradient_in_fp32() -> Example:
    """64 chunks of 64 tokens, bf16 products."""
    generator = torch.Generator().manual_seed(0)
    dlogits = torch.randn(64, 64, 256, generator=generator).to(bf16)
    hidden = (torch.randn(64, 64, 128, generator=generator) + 0.5).to(bf16)
    truth = torch.einsum("cnv,cnh->vh", dlogits.double(), hidden.double())
    low, high = torch.zeros(256, 128, dtype=bf16), torch.zeros(256, 128)
    for d, h in zip(dlogits, hidden):
        low += (d.float().T @ h.float()).to(bf16)
        high.addmm_(d.float().T, h.float())
    errors = [((x.double() - truth).norm() / truth.norm()).item() for x in (low, high.to(bf16))]
    return Example("weight gradient summed in fp32", "its relative error over 64 chunks", *_percent(errors))


def denominator_after_fp16() -> Example:
    """Nearly uniform over 32768 ids, denominator 16384."""
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(32768, generator=generator).softmax(0)
    kept = [(p / d).to(fp16).double().sum() * d for d in (16384.0, 1.0)]
    lost = [abs(1 - x.item()) for x in kept]
    return Example(
        "fp16: divide by the denominator after the products", "gradient mass lost", *_percent(lost)
    )


def maximum_first() -> Example:
    """All logits near 10,000."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 1000, generator=generator) + 1e4
    truth = logits.double().log_softmax(-1)[:, 0]
    highest = logits.amax(-1)
    log_sum = (logits - highest[:, None]).exp().sum(-1).log()
    both = (logits[:, 0] - (highest + log_sum), (logits[:, 0] - highest) - log_sum)
    errors = [(x.double() - truth).abs().max().item() for x in both]
    return Example(
        "log-prob as `(z_y - max) - log sum`",
        "worst error with all logits near 10,000",
        *(f"{error:.1g} nats" for error in errors),
    )


def _percent(values: list[float]) -> Iterator[str]:
    return (f"{100 * value:.3g} %" for value in values)


EXAMPLES: tuple[Callable[[], Example], ...] = (
    logits_in_fp32,
    target_before_rounding,
    rest_of_the_sum,
    weight_gradient_in_fp32,
    denominator_after_fp16,
    maximum_first,
)


def main() -> None:
    print("| rule | measured | without | with |\n|---|---|---|---|")
    for example in EXAMPLES:
        print("| " + " | ".join(example()) + " |")


if __name__ == "__main__":
    main()
