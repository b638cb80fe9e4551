"""Forward and backward of the policy loss: fused, and plain torch over full logits.

    pip install -e '.[bench]'
    pytest bench/ --benchmark-group-by=group

`peak_mb` in the extra info (`--benchmark-json FILE`) is the memory that the call takes beyond its inputs.
"""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dapo_kernels import fused_linear_policy_loss, reference

TOKENS, HIDDEN, VOCAB = 1024, 576, 49152  # SmolLM2's head


def make_inputs(unmasked: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator) * 0.05
    targets = torch.randint(VOCAB, (TOKENS,), generator=generator)
    with torch.no_grad():
        old = fused_linear_policy_loss(
            hidden, weight, targets, torch.ones(TOKENS), torch.ones(TOKENS)
        ).logprobs
    return {
        "hidden": hidden.requires_grad_(),
        "weight": weight.requires_grad_(),
        "targets": targets,
        "advantages": torch.randn(TOKENS, generator=generator),
        "mask": torch.rand(TOKENS, generator=generator) < unmasked,
        "old_logprobs": old + 0.1 * torch.randn(TOKENS, generator=generator),
    }


def step(loss_function, inputs: dict[str, torch.Tensor]) -> None:
    inputs["hidden"].grad = inputs["weight"].grad = None
    loss_function(**inputs).loss.backward()


def peak_bytes(loss_function, inputs: dict[str, torch.Tensor]) -> int:
    """The highest sum of live allocations during one call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=False) as trace:
        step(loss_function, inputs)
    live = peak = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("unmasked", [1.0, 0.4])
@pytest.mark.parametrize(
    "loss_function", [fused_linear_policy_loss, reference.linear_policy_loss], ids=["fused", "plain torch"]
)
def test_policy_loss(benchmark, loss_function, unmasked):
    inputs = make_inputs(unmasked)
    benchmark.group = f"N {TOKENS}, H {HIDDEN}, V {VOCAB}, fp32, {unmasked:.0%} unmasked"
    benchmark.extra_info["peak_mb"] = peak_bytes(loss_function, inputs) / 1e6
    benchmark.pedantic(step, (loss_function, inputs), rounds=5, warmup_rounds=1)
