"""avg@k, pass@k, maj@k and the bootstrap against their definitions by brute force."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from dapo.statistics import avg_at_k, bootstrap_interval, maj_at_k, mean_pass_at_k, pass_at_k


def test_avg_weighs_problems_alike_whatever_their_samples():
    assert avg_at_k([[1, 0], [1, 1, 1, 1], [0]]) == 0.5
    assert avg_at_k([[1, 0, 0]]) == 1 / 3
    rng = random.Random(0)
    values = [[rng.randint(0, 1) for _ in range(7)] for _ in range(11)]
    flat = [value for samples in values for value in samples]
    assert avg_at_k(values) == sum(flat) / 77  # rounded once
    with pytest.raises(ValueError, match="no problem"):
        avg_at_k([])


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(n):
    for c, k in itertools.product(range(n + 1), range(1, n + 1)):
        samples = [1] * c + [0] * (n - c)
        subsets = list(itertools.combinations(samples, k))
        assert pass_at_k(n, c, k) == sum(map(any, subsets)) / len(subsets)


def test_pass_at_k_is_exact_for_ten_thousand_samples():
    assert pass_at_k(10_000, 1, 1) == 1e-4 and pass_at_k(10_000, 1, 5_000) == 0.5
    assert pass_at_k(10_000, 0, 5_000) == 0 and pass_at_k(10_000, 5_001, 5_000) == 1
    product = math.prod(Fraction(i - 32, i) for i in range(10_000 - 7 + 1, 10_001))
    assert pass_at_k(10_000, 7, 32) == float(1 - product)


@pytest.mark.parametrize("n, c, k", [(4, 2, 0), (4, 2, 5), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_has_no_meaning(n, c, k):
    with pytest.raises(ValueError, match=f"k={k}, n={n}, c={c}"):
        pass_at_k(n, c, k)


def test_mean_pass_at_k_allows_different_numbers_of_samples():
    assert mean_pass_at_k([(2, 1), (4, 1)], 2) == pytest.approx((1 + 0.5) / 2)
    with pytest.raises(ValueError, match="k=3 is over the 2 samples"):
        mean_pass_at_k([(2, 1), (4, 1)], 3)


def majority(votes, right) -> float:
    """One vote as it is defined."""
    counts = Counter(vote for vote in votes if vote is not None)
    winners = [key for key in counts if counts[key] == max(counts.values())]
    return winners.count(right) / max(len(winners), 1)


@pytest.mark.parametrize("seed", range(20))
def test_maj_at_k_is_the_mean_over_subsets(seed):
    rng = random.Random(seed)
    votes = [rng.choice(["a", "b", "c", None]) for _ in range(rng.randint(1, 8))]
    for k in range(1, len(votes) + 1):
        subsets = list(itertools.combinations(votes, k))
        expected = sum(majority(subset, "a") for subset in subsets) / len(subsets)
        assert maj_at_k(votes, "a", k) == pytest.approx(expected, abs=1e-12)
    assert maj_at_k(votes, "a") == majority(votes, "a")


@pytest.mark.parametrize(
    "votes, expected",
    [
        ("aab", 1.0),
        ("abb", 0.0),
        ("ab", 1 / 2),
        ("abc", 1 / 3),
        ("aabbcd", 1 / 2),
        (["a", None, None, None], 1.0),  # those who abstain are no majority
        ([None, None], 0.0),
        ("bc", 0.0),
    ],
)
def test_ties_share_and_silence_loses(votes, expected):
    assert maj_at_k(list(votes), "a") == pytest.approx(expected)


def test_maj_at_k_of_many_subsets_is_drawn_and_close_to_exact():
    """C(16, 6) = 8008 subsets are drawn from: five standard errors of 40,000 draws are 0.0125."""
    votes = ["a"] * 6 + ["b"] * 5 + ["c"] * 2 + [None] * 3
    exact = sum(majority(subset, "a") for subset in itertools.combinations(votes, 6)) / math.comb(16, 6)
    drawn = maj_at_k(votes, "a", 6, draws=40_000)
    assert drawn != exact and drawn == pytest.approx(exact, abs=0.0125)
    shuffled = random.Random(0).sample(votes, 16)
    assert maj_at_k(shuffled, "a", 6, draws=40_000) == drawn  # fixed seed, and the order does not matter
    assert maj_at_k(votes, "a", 6, draws=40_000, seed=1) != drawn


@pytest.mark.parametrize("k", [0, 3])
def test_maj_at_k_refuses_more_voters_than_there_are(k):
    with pytest.raises(ValueError, match=f"k={k}, n=2"):
        maj_at_k(["a", "b"], "a", k)


def slow_interval(values, resamples=4000):
    """The two-level bootstrap as it is told, one draw after the other."""
    rng = random.Random(1)
    means = []
    for _ in range(resamples):
        problems = rng.choices(values, k=len(values))
        means.append(np.mean([np.mean(rng.choices(samples, k=len(samples))) for samples in problems]))
    return np.quantile(means, [0.025, 0.975])


@pytest.mark.parametrize(
    "values",
    [
        [[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 1, 0, 0], [0, 0, 1, 1]],
        [[1], [0, 0, 1], [0] * 9, [1, 1], [0], [1, 0]],  # different numbers of samples
        [[1, 0, 1, 1, 0, 0, 0, 1, 1, 1]],
        [[1], [0], [0], [1], [1], [0], [0]],
    ],
)
def test_interval_is_that_of_the_slow_bootstrap(values):
    low, high = bootstrap_interval(values)
    assert (low, high) == pytest.approx(slow_interval(values), abs=0.04)
    assert low < avg_at_k(values) < high


def test_interval_covers_problems_and_samples():
    """Of 20 problems that are all right or all wrong only the problems vary, of 20 alike only the samples;
    both widths are known: 2 x 1.96 standard errors."""
    split = bootstrap_interval([[1] * 8] * 10 + [[0] * 8] * 10)
    assert split[1] - split[0] == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(20), rel=0.1)
    alike = bootstrap_interval([[1, 0] * 4] * 20)
    assert alike[1] - alike[0] == pytest.approx(2 * 1.96 * 0.5 / math.sqrt(160), rel=0.1)


def test_interval_is_fixed_by_its_seed_and_defined_for_one_response(monkeypatch):
    values = [[1, 0, 0], [1, 1, 0], [0, 0, 0], [1, 0, 1]]
    assert bootstrap_interval(values) == bootstrap_interval(values) != bootstrap_interval(values, seed=1)
    assert bootstrap_interval([[1]]) == (1, 1) and bootstrap_interval([[0]]) == (0, 0)
    narrow = bootstrap_interval(values, level=0.5)
    assert bootstrap_interval(values)[0] < narrow[0] < narrow[1] < bootstrap_interval(values)[1]
    monkeypatch.setattr("dapo.statistics.DRAWN_AT_ONCE", 1000)  # in parts: as wide
    assert bootstrap_interval(values) == pytest.approx(bootstrap_interval(values, seed=2), abs=0.1)
