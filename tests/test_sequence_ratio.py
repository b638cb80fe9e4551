"""`ratio_level="sequence"`: one ratio a sequence, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loss_cases import check, make_case, run

from bench.measure import gemm_flops
from dapo_kernels import PolicyLossConfig, fused_linear_policy_loss, policy_loss

N, H, V, A_SEQUENCE = 60, 16, 96, 12


def whole_case(**config):
    """60 unmasked tokens, five sequences of 12 next to each other; the third has no advantage."""
    case = make_case(shape=(N,), hidden_size=H, vocab=V, **config)
    ids = torch.arange(N) // A_SEQUENCE
    advantages = torch.where(ids == 2, 0, torch.ones(N, dtype=torch.float64))
    return replace(
        case, mask=torch.ones(N), sequence_ids=ids, advantages=advantages, token_weights=None, bias=None
    )


def cost(case, **extra) -> float:
    """GEMM FLOPs of forward and backward in u."""
    return gemm_flops(lambda: run(fused_linear_policy_loss, case, **extra)) / (2 * N * H * V)


def test_ratio_is_the_exponential_of_the_mean_log_ratio():
    ids = torch.tensor([7, 3, 7, 3, 3, 5])
    old = torch.tensor([-1.0, -2.0, -1.5, -1.0, -3.0, -2.0])
    new = old + torch.tensor([0.1, -0.3, 0.3, 0.0, 0.6, 0.9])
    mask = torch.tensor([1, 1, 1, 1, 1, 0])
    config = PolicyLossConfig(ratio_level="sequence")
    output = policy_loss(new, torch.ones(6), mask, old, sequence_ids=ids, config=config)
    expected = -torch.tensor([0.2, 0.1, 0.2, 0.1, 0.1]).exp()
    torch.testing.assert_close(output.token_loss[:5], expected)
    assert output.token_loss[5] == 0


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("extra", [{}, {"kl_coef": 0.3, "entropy_coef": 0.2}, {"objective": "cispo"}])
def test_on_policy_needs_no_second_pass_and_is_right(on_policy, extra):
    case = whole_case(ratio_level="sequence", **extra)
    if on_policy:
        case = replace(case, old_logprobs=None)
    check(case)


@pytest.mark.parametrize(
    ("options", "on_policy", "work"),
    [
        ({}, False, 1 + 3 * 0.8),  # one sequence in five has no advantage, and no gradient
        ({}, True, 1 + 2 * 0.8),
        ({"skip_zero_advantage": True}, False, 0.8 * 4),
        ({"kl_coef": 0.3}, False, 4),
        ({"kl_coef": 0.3}, True, 3),
    ],
)
def test_work(options, on_policy, work):
    case = whole_case(ratio_level="sequence", **options)
    if on_policy:
        case = replace(case, old_logprobs=None)
    assert cost(case) == pytest.approx(work)


def test_a_token_without_advantage_carries_the_gradient_of_its_sequence():
    case = whole_case(ratio_level="sequence", epsilon_low=1.0, epsilon_high=10.0)
    advantages = torch.zeros(N, dtype=torch.float64)
    advantages[0] = 1.0
    result = run(fused_linear_policy_loss, replace(case, advantages=advantages))
    moved = result.grads["hidden"].abs().sum(1) > 0
    assert moved[:A_SEQUENCE].all() and not moved[A_SEQUENCE:].any()
    check(replace(case, advantages=advantages))
