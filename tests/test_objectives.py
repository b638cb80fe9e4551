"""The gradient of every objective and reduction that the configuration reaches, against a formula over full
logits."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from objective_cases import (
    DRIFT,
    apart,
    cispo,
    gspo,
    plain_gradients,
    sapo,
    sequence_mean,
    sequence_sum,
    token_mean,
)
from update_cases import (
    BATCH,
    TEMPERATURE,
    assert_close,
    captured,
    groups_of,
)

from dapo.config import Config

OBJECTIVES = {
    "cispo": ({"objective": "cispo"}, cispo),
    "cispo, bounds": (
        {"objective": "cispo", "cispo_bounds": [0.9, 1.1]},
        lambda *token: cispo(*token, low=0.9, high=1.1),
    ),
    "cispo follows clip_higher": (
        {"objective": "cispo", "clip_higher": False},
        lambda *token: cispo(*token, high=1.2),
    ),
    "sapo": ({"objective": "sapo"}, sapo),
    "sapo, temperatures": (
        {"objective": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 5.0},
        lambda *token: sapo(*token, positive=2.0, negative=5.0),
    ),
    "gspo": ({"ratio_level": "sequence"}, gspo),
    "gspo, narrow": (
        {"ratio_level": "sequence", "epsilon_low": 0.01, "epsilon_high": 0.02},
        lambda *token: gspo(*token, low=0.01, high=0.02),
    ),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("budget", [24, 10_000])
def test_gradient_of_each_objective_off_policy(make, model, name: str, budget: int) -> None:
    """Each on its own data: what it would be with the clip is something else."""
    switches, term = OBJECTIVES[name]
    groups = groups_of(model, step=0, drift=DRIFT)
    updater = make(
        **{f"algorithm.{key}": value for key, value in switches.items()},
        **{"train.max_tokens_per_micro_batch": budget},
    )
    (gradients,), _ = captured(updater, groups)
    assert_close(gradients, plain_gradients(model, groups, term))
    assert apart(gradients, plain_gradients(model, groups))


CAP = 9  # rollout.max_response_length
REDUCTIONS = {
    "token-mean": token_mean,
    "seq-mean-token-mean": sequence_mean,
    "seq-mean-token-sum": sequence_sum,
    "constant": lambda losses: torch.cat(losses).sum() / (CAP * 12),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("filtering", [False, True])
def test_gradient_of_each_reduction(make, model, reduction: str, filtering: bool) -> None:
    """It overrides `token_level_loss`. Responses that are filtered out count in the constant denominator,
    which does not depend on what was sampled."""
    groups = groups_of(model)
    switches = {"algorithm.reduction": reduction, "algorithm.token_level_loss": reduction != "token-mean"}
    switches |= {"algorithm.overlong_filtering": filtering, "rollout.max_response_length": CAP}
    updater = make(**switches)
    (gradients,), _ = captured(updater, groups)
    want = plain_gradients(
        model,
        groups,
        reduce=REDUCTIONS[reduction],
        keep=lambda sample: sample.completion.finished or not filtering,
    )
    assert_close(gradients, want)


def test_advantages_without_their_standard_deviation(make, model) -> None:
    groups = groups_of(model)
    (gradients,), _ = captured(make(**{"algorithm.advantage_std": False}), groups)
    assert_close(gradients, plain_gradients(model, groups, divide=False))
    assert apart(gradients, plain_gradients(model, groups))


def test_entropy_bonus(make, model) -> None:
    groups = groups_of(model)
    (gradients,), _ = captured(make(**{"algorithm.entropy_coef": 0.3}), groups)
    other = copy.deepcopy(model)
    bonus = []
    for prompt, responses in BATCH:
        for tokens, *_ in responses:
            logits = other(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            p = (logits / TEMPERATURE).softmax(-1)
            bonus.append(-(p * p.log()).sum(-1))
    (-0.3 * torch.cat(bonus).mean()).backward()
    want = plain_gradients(model, groups)
    for name, parameter in other.named_parameters():
        want[name] = want[name] + parameter.grad
    assert_close(gradients, want)


@pytest.mark.parametrize("bounds", [[1], [1, 2, 3], [2, 1], [-1, 1], ["a", 1], [0, math.inf], [True, 2]])
def test_cispo_bounds_are_checked_by_name(bounds: list) -> None:
    with pytest.raises(ValueError, match=r"cispo_bounds(.|\n)*\[low, high\] with 0 <= low <= high"):
        Config.model_validate({"algorithm": {"cispo_bounds": bounds}})


def test_a_floor_over_the_cap_is_named(make) -> None:
    bounds = {"algorithm.rollout_correction_floor": 3.0}
    with pytest.raises(ValueError, match=r"algorithm.rollout_correction_floor \(3.0\) must be at most"):
        make(**bounds, **{"algorithm.rollout_correction": "mask"})
    make(**bounds)
