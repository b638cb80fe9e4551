"""Importance weights between trainer and rollout log-probs: by hand, in the gradient, and in the metrics."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from update_cases import (
    BATCH,
    NUM_TOKENS,
    assert_close,
    captured,
    from_rollout,
    groups_of,
    plain_gradients,
    token_logprobs,
)

from dapo.config import AlgorithmConfig
from dapo.mismatch import MismatchStats, correction_weights

NAN = math.nan
DRIFT = (-1.0, 0.3, 1.2, -0.1)  # raw weights e, 0.74, 0.30 and 1.1, token by token


def settings(mode: str, level: str = "token", **more) -> dict:
    return {"rollout_correction": mode, "rollout_correction_level": level, **more}


def in_config(mode: str, level: str = "token", **more) -> dict:
    return {f"algorithm.{key}": value for key, value in settings(mode, level, **more).items()}


def weigh(ratios: list[float], *args, **more) -> tuple[list[float], list[bool]]:
    differences = torch.tensor([math.log(r) if r == r else r for r in ratios], dtype=torch.float64)
    weights, cut = correction_weights(differences, AlgorithmConfig(**settings(*args, **more)))
    assert weights.dtype == torch.float64 and weights.shape == cut.shape == differences.shape
    return [round(weight, 9) for weight in weights.tolist()], cut.tolist()


@pytest.mark.parametrize(
    ("mode", "more", "ratios", "weights", "cut"),
    [
        ("truncate", {}, [1, 4, 0.25, 1.5], [1, 2, 0.25, 1.5], [0, 1, 0, 0]),
        (
            "truncate",
            {"rollout_correction_cap": 1.25},
            [1, 4, 0.25, 1.5],
            [1, 1.25, 0.25, 1.25],
            [0, 1, 0, 1],
        ),
        ("mask", {}, [1, 4, 0.25, 1.5], [1, 0, 0, 1.5], [0, 1, 1, 0]),
        ("mask", {"rollout_correction_floor": 0.2}, [1, 4, 0.25, 1.5], [1, 0, 0.25, 1.5], [0, 1, 0, 0]),
        ("mask", {"rollout_correction_floor": 1.0, "rollout_correction_cap": 1.0}, [1, 1.01], [1, 0], [0, 1]),
        ("off", {}, [1, 4, 0.25], [1, 2, 0.25], [0, 1, 0]),
        ("truncate", {}, [NAN, 4, 0.25], [0, 2, 0.25], [0, 1, 0]),
        ("mask", {}, [NAN, 4, 1.5], [0, 0, 1.5], [0, 1, 0]),
    ],
)
def test_token_weights_by_hand(mode: str, more: dict, ratios, weights, cut) -> None:
    assert weigh(ratios, mode, **more) == (weights, cut)


@pytest.mark.parametrize(
    ("mode", "ratios", "weight", "cut"),
    [
        ("truncate", [1.5, 0.5, 2], 1.5, False),
        ("truncate", [1.5, 2, 4, 0.25], 2, True),  # product 3; the geometric mean, 1.3, is not cut
        ("truncate", [0.5, 0.5], 0.25, False),
        ("mask", [1.5, 0.5, 2], 1.5, False),
        ("mask", [1.5, 2], 0, True),
        ("mask", [0.5, 0.5], 0, True),
        ("truncate", [math.e] * 2000, 2, True),
        ("truncate", [1 / math.e] * 2000, round(math.exp(-20), 9), False),
    ],
)
def test_a_response_s_weight_is_the_product_of_its_tokens(mode, ratios, weight, cut) -> None:
    assert weigh(ratios, mode, "sequence") == ([weight] * len(ratios), [cut] * len(ratios))


def test_a_token_without_rollout_log_prob_is_in_no_product() -> None:
    assert weigh([NAN, 1.5, 1.2], "mask", "sequence") == ([0, 1.8, 1.8], [False] * 3)
    assert weigh([NAN, 1.5, 1.5], "mask", "sequence") == ([0, 0, 0], [False, True, True])


def test_stats_are_means_over_known_tokens() -> None:
    stats = MismatchStats()
    stats.add(torch.tensor([0.5, NAN, -1.0]), torch.tensor([True, False, False]))
    stats.add(torch.tensor([NAN]), torch.tensor([False]))
    stats.add(torch.tensor([0.0]), torch.tensor([False]))
    k3 = (math.exp(0.5) - 1.5) + math.exp(-1)
    assert stats.metrics() == {
        "rollout_mismatch_kl": pytest.approx(k3 / 3),
        "rollout_mismatch_max": 1.0,
        "rollout_is_clip_frac": pytest.approx(1 / 3),
    }
    assert set(MismatchStats().metrics().values()) == {0}


def plain_weighted(model, groups, weight) -> dict[str, Tensor]:
    """Gradients of `sum of weight * -advantage * ratio / tokens` over full logits, with ratio 1."""
    other = copy.deepcopy(model)
    terms, count = [], 0
    for group in groups:
        rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for sample, advantage in zip(group.samples, advantages):
            logprobs = token_logprobs(other, group.prompt.ids, sample.completion.token_ids)
            weights = weight(logprobs.detach() - from_rollout(group, sample))
            known = weights.isfinite()
            ratio = torch.exp(logprobs - logprobs.detach())
            terms.append(-(torch.where(known, weights, 0) * advantage * ratio).sum())
            count += int(known.sum())
    (torch.stack(terms).sum() / count).backward()
    return {name: parameter.grad for name, parameter in other.named_parameters()}


WEIGHTS = {
    ("truncate", "token"): lambda d: d.exp().clamp(max=2),
    ("mask", "token"): lambda d: d.exp() * ((d.exp() >= 0.5) & (d.exp() <= 2)),
    ("truncate", "sequence"): lambda d: d.sum().exp().clamp(max=2).expand_as(d),
    ("mask", "sequence"): lambda d: (d.sum().exp() * (0.5 <= d.sum().exp() <= 2)).expand_as(d),
}


@pytest.mark.parametrize(("mode", "level"), WEIGHTS)
@pytest.mark.parametrize("budget", [24, 10_000])
def test_gradient_is_that_of_the_weighted_plain_formula(make, model, mode, level, budget: int) -> None:
    groups = groups_of(model, drift=DRIFT)
    updater = make(**in_config(mode, level), **{"train.max_tokens_per_micro_batch": budget})
    (gradients,), _ = captured(updater, groups)
    assert_close(gradients, plain_weighted(model, groups, WEIGHTS[mode, level]))
    for name, without in plain_gradients(model, groups).items():
        assert (gradients[name] - without).norm() > 0.1 * without.norm(), name


def test_off_leaves_the_gradient_alone(make, model) -> None:
    groups = groups_of(model, drift=DRIFT)
    (gradients,), stats = captured(make(), groups)
    assert_close(gradients, plain_gradients(model, groups))
    assert stats.metrics()["rollout_is_clip_frac"] == pytest.approx(
        sum(first_of_four(BATCH)) / NUM_TOKENS
    )  # what truncation would cut


def first_of_four(batch) -> list[int]:
    """Of each response, how many tokens have the drift of -1, whose raw weight is e."""
    return [math.ceil(len(tokens) / 4) for _, responses in batch for tokens, *_ in responses]


@pytest.mark.parametrize(
    ("mode", "bounds", "share"),
    [
        ("truncate", {}, lambda n: math.ceil(n / 4)),
        ("mask", {}, lambda n: math.ceil(n / 4) + (n + 1) // 4),  # and those under the floor
        ("truncate", {"rollout_correction_cap": 3.0}, lambda n: 0),
    ],
)
def test_share_of_tokens_at_the_bounds(make, model, mode: str, bounds: dict, share) -> None:
    _, stats = captured(make(**in_config(mode, **bounds)), groups_of(model, drift=DRIFT))
    want = sum(share(len(tokens)) for _, responses in BATCH for tokens, *_ in responses)
    assert stats.metrics()["rollout_is_clip_frac"] == pytest.approx(want / NUM_TOKENS)
    assert stats.metrics()["rollout_mismatch_max"] == pytest.approx(1.2, rel=1e-5)


@pytest.mark.parametrize(("mode", "passes"), [("off", 1), ("truncate", 2), ("mask", 2)])
def test_old_log_probs_are_those_of_a_scoring_pass_where_it_corrects(make, model, mode, passes) -> None:
    updater = make(**in_config(mode), **{"train.max_tokens_per_micro_batch": 10_000})
    with_gradient = []
    updater.policy.register_forward_pre_hook(lambda *_: with_gradient.append(torch.is_grad_enabled()))
    _, stats = captured(updater, groups_of(model, drift=DRIFT))
    assert with_gradient == [False, True][2 - passes :]
    assert stats.metrics()["ratio_max"] == pytest.approx(1, abs=1e-6)


def test_stale_responses_are_not_corrected(make, model) -> None:
    """Their old log-probs are the rollout's already."""
    groups = groups_of(model, step=3, drift=DRIFT)
    (gradients,), stats = captured(make(**in_config("mask")), groups, step=4)
    assert_close(gradients, plain_gradients(model, groups, old=from_rollout))
    assert stats.metrics()["rollout_is_clip_frac"] == 0


def without_logprobs(group, sample: int, *tokens: int):
    """The group with NaN for the rollout log-probs of these tokens."""
    samples = list(group.samples)
    completion = samples[sample].completion
    logprobs = [NAN if t in tokens else value for t, value in enumerate(completion.logprobs)]
    samples[sample] = replace(samples[sample], completion=replace(completion, logprobs=logprobs))
    return replace(group, samples=samples)


@pytest.mark.parametrize("mode", ["off", "truncate"])
def test_missing_log_probs_leave_their_tokens_out_and_are_counted(make, model, mode: str, caplog) -> None:
    groups = groups_of(model, drift=DRIFT)
    groups[0] = without_logprobs(without_logprobs(groups[0], 1, 0, 4), 2, 0, 1)  # of one, all of them
    with caplog.at_level(logging.WARNING):
        (gradients,), stats = captured(make(**in_config(mode)), groups)
    weight = (lambda d: d * 0 + 1) if mode == "off" else WEIGHTS[mode, "token"]
    assert_close(gradients, plain_weighted(model, groups, weight))
    metrics = stats.metrics()
    assert metrics["num_tokens"] == NUM_TOKENS - 4 and all(map(math.isfinite, metrics.values()))
    drifts = [
        DRIFT[t % 4]
        for group in groups
        for sample in group.samples
        for t, logprob in enumerate(sample.completion.logprobs)
        if logprob == logprob
    ]
    k3 = sum(math.exp(-drift) + drift - 1 for drift in drifts) / (NUM_TOKENS - 4)
    assert metrics["rollout_mismatch_kl"] == pytest.approx(k3, rel=1e-5)
    assert caplog.messages == [
        "4 of 42 response tokens have no rollout log-prob (NaN): they are left out of the loss"
    ]
