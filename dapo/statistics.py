"""Figures of an evaluation: avg@k, pass@k, maj@k, and how uncertain a mean over problems is."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

ENUMERATED = 5000
"""Subsets that `maj_at_k` looks at one by one; of more it draws some."""
DRAWN_AT_ONCE = 4_000_000
"""Numbers that `bootstrap_interval` holds at a time."""


def avg_at_k(values: Sequence[Sequence[float]]) -> float:
    """Mean over problems of the mean over a problem's samples: (1/P) sum_p (1/n_p) sum_s v_ps.

    The expected accuracy of one response; the figure that the DAPO paper gives for AIME 2024, with n = 32
    (arXiv 2503.14476, section 4.1). Rounded once: the order of samples does not matter.

    Args:
        values: for each problem its samples' accuracies; every problem has at least one.
    """
    _refuse_empty(values)
    return float(sum(Fraction(sum(samples)) / len(samples) for samples in values) / len(values))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that at least one of k samples is right, estimated from n samples of which c are right:
    1 - C(n-c, k) / C(n, k), the unbiased estimator of Chen et al. 2021 (arXiv 2107.03374, equation 1).

    In whole numbers up to one last division, so it is exact to the last bit at any n. Raises `ValueError`
    where k is not in 1..n or c is not in 0..n.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got k={k}, n={n}, c={c}")
    subsets = math.comb(n, k)
    return (subsets - math.comb(n - c, k)) / subsets


def mean_pass_at_k(counts: Sequence[tuple[int, int]], k: int) -> float:
    """Mean of `pass_at_k` over problems, each given as (n, c). Raises `ValueError` where k is over the
    smallest n: a problem with fewer samples says nothing about k of them."""
    _refuse_empty(counts)
    fewest = min(n for n, _ in counts)
    if k > fewest:
        raise ValueError(f"pass@k: k={k} is over the {fewest} samples of a problem")
    return math.fsum(pass_at_k(n, c, k) for n, c in counts) / len(counts)


def maj_at_k(
    votes: Sequence[str | None], right: str, k: int | None = None, *, draws: int = 4096, seed: int = 0
) -> float:
    """Probability that a majority vote of k samples is right (self-consistency, Wang et al. 2022,
    arXiv 2203.11171), averaged over the subsets of size k of a problem's n samples.

    The answer with the most votes wins; where the right one ties with t others, the subset counts
    1 / (1 + t).
    None abstains, and where all abstain the vote is lost. Exact for k = n and where there are at most
    `ENUMERATED` subsets; else the mean over `draws` random ones, whose standard error is under
    0.5 / sqrt(draws).

    Args:
        votes: the answer of each sample, in canonical form.
        right: the one that is right.
        k: None for n.

    Raises:
        ValueError: k is not in 1..n.
    """
    n = len(votes)
    k = n if k is None else k
    if not 1 <= k <= n:
        raise ValueError(f"maj@k needs 1 <= k <= n, got k={k}, n={n}")
    # Classes in order of size, not of appearance: the same votes draw the same subsets in any order.
    others = sorted((key for key in set(votes) if key not in (None, right)), key=lambda key: votes.count(key))
    classes = {key: i for i, key in enumerate([right, *others, None])}
    if right not in votes:
        return 0.0
    if math.comb(n, k) <= ENUMERATED:
        chosen = np.array(list(itertools.combinations([classes[vote] for vote in votes], k)))  # [S, k]
        counts = (chosen[:, :, None] == np.arange(len(classes))).sum(1)  # [S, classes]
    else:
        sizes = Counter(votes)
        colors = [sizes[key] for key in classes]
        rng = np.random.default_rng(seed)
        counts = rng.multivariate_hypergeometric(colors, k, size=draws, method="marginals")
    for_right, for_others = counts[:, 0], counts[:, 1:-1]
    most = for_others.max(1, initial=0)
    ties = (for_others == for_right[:, None]).sum(1)
    won = (for_right > 0) & (for_right >= most)
    return float(np.where(won, 1 / (1 + ties), 0.0).mean())


def bootstrap_interval(
    values: Sequence[Sequence[float]], *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of `avg_at_k(values)`, by a bootstrap of two levels (Efron and Tibshirani 1993,
    chapters 8 and 13): each resample draws P problems with replacement, and for each of them as many samples
    as it has, with replacement too. It covers which problems were asked and which responses were sampled.

    With one problem only its samples vary, with one sample each only the problems; with one of one the
    interval is that value. The same seed gives the same interval.

    Args:
        values: for each problem its samples' values; every problem has at least one.
    """
    _refuse_empty(values)
    sizes = np.array([len(samples) for samples in values])
    starts = sizes.cumsum() - sizes
    flat = np.array([value for samples in values for value in samples], dtype=float)
    rng = np.random.default_rng(seed)
    problems, largest = len(sizes), int(sizes.max())
    at_once = max(1, DRAWN_AT_ONCE // (problems * largest))
    means = []
    for start in range(0, resamples, at_once):
        shape = (min(at_once, resamples - start), problems)
        drawn = rng.integers(problems, size=shape)  # [R, P]
        size = sizes[drawn][..., None]
        sample = (rng.random((*shape, largest)) * size).astype(int)  # [R, P, n]
        taken = flat[starts[drawn][..., None] + sample]
        kept = np.arange(largest) < size  # problems with fewer samples than the most
        means.append((np.where(kept, taken, 0).sum(2) / size[..., 0]).mean(1))
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def _refuse_empty(values: Sequence) -> None:
    if not len(values):
        raise ValueError("there is no problem to take a mean over")
