"""Advantages, length penalty and group filter, against numbers worked out by hand."""

import pytest
import torch

from dapo.algorithm import group_advantages, keep_group, soft_overlong_penalty

# Mean -0.5 and unbiased variance 1; mean -0.5 and unbiased variance 7.5 / 3.
REWARDS = [1.0, -1.0, -1.0, -1.0, 1.0, 0.5, -1.0, -2.5]
CENTRED = [1.5, -0.5, -0.5, -0.5, 1.5, 1.0, -0.5, -2.0]
STD = [1.0] * 4 + [2.5**0.5] * 4


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_advantages_are_centred_and_divided_by_unbiased_std_plus_eps(eps: float) -> None:
    advantages = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), 4, eps)
    want = torch.tensor([c / (s + eps) for c, s in zip(CENTRED, STD)], dtype=torch.float64)
    torch.testing.assert_close(advantages, want, rtol=1e-12, atol=0)


def test_default_eps_is_the_released_script_s() -> None:
    advantages = group_advantages(torch.tensor([1e-6, 0.0], dtype=torch.float64), 2)
    std = 1e-6 / 2**0.5
    torch.testing.assert_close(advantages[0].item(), 0.5e-6 / (std + 1e-6), rtol=1e-9, atol=0)


def test_groups_do_not_see_each_other() -> None:
    rewards = torch.tensor(REWARDS, dtype=torch.float64)
    alone = torch.cat([group_advantages(rewards[:4], 4), group_advantages(1000 + 7 * rewards[4:], 4)])
    together = group_advantages(torch.cat([rewards[:4], 1000 + 7 * rewards[4:]]), 4)
    torch.testing.assert_close(together, alone, rtol=1e-14, atol=0)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0, -2.0, -1.5])
def test_equal_rewards_give_exactly_zero(value: float) -> None:
    assert group_advantages(torch.full((16,), value), 16).tolist() == [0.0] * 16


@pytest.mark.parametrize("value", [-2.98, -1.3])
def test_equal_rewards_that_fp32_cannot_hold_give_zero(value: float) -> None:
    assert group_advantages(torch.full((16,), value), 16).abs().max().item() < 1e-3


def test_integer_rewards() -> None:
    torch.testing.assert_close(group_advantages(torch.tensor([1, -1, -1, -1]), 4)[0].item(), 1.5 / (1 + 1e-6))


@pytest.mark.parametrize(
    ("shape", "size", "message"),
    [
        ((4,), 1, "group_size must be at least 2, got 1"),
        ((4,), 0, "group_size must be at least 2, got 0"),
        ((7,), 4, r"rewards must be \[P \* 4\], got \[7\]"),
        ((2, 4), 4, r"rewards must be \[P \* 4\], got \[2, 4\]"),
    ],
)
def test_wrong_groups_are_named(shape: tuple, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.zeros(shape), size)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (0, 0.0),
        (1, 0.0),
        (16383, 0.0),
        (16384, 0.0),
        (16385, -1 / 4096),
        (17408, -0.25),
        (18432, -0.5),
        (20479, -4095 / 4096),
        (20480, -1.0),
        (20481, -1.0),
        (40960, -1.0),
    ],
)
def test_penalty_at_the_knots_of_equation_13(length: int, penalty: float) -> None:
    assert soft_overlong_penalty(length, 20480, 4096) == penalty
    assert soft_overlong_penalty(length, 20480, 4096, factor=0.5) == penalty / 2
    assert soft_overlong_penalty(length, 20480, 4096, factor=0.0) == 0


@pytest.mark.parametrize("cache", [0, -1, 20480, 20481])
def test_cache_that_does_not_fit_is_named(cache: int) -> None:
    with pytest.raises(ValueError, match=f"cache_length must be over 0 .* max_length 20480, got {cache}"):
        soft_overlong_penalty(5, 20480, cache)


@pytest.mark.parametrize(
    ("accuracies", "kept"),
    [
        ([0, 0, 0], False),
        ([1, 1, 1], False),
        ([0, 0, 1], True),
        ([1, 1, 0], True),
        ([True, False], True),
        ([1] * 15 + [0], True),
        ([0.0] * 15 + [1.0], True),
        ([0.1] * 10, True),
        ([1], False),
    ],
)
def test_groups_with_right_and_wrong_responses_are_kept(accuracies: list, kept: bool) -> None:
    assert keep_group(accuracies) is kept
