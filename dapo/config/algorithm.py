"""The `algorithm` section: DAPO's switches and numbers, and those of other objectives."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, field_validator

from .base import Count, Section, Weight


class AlgorithmConfig(Section):
    """DAPO's four techniques are switches. All off is naive GRPO without a KL term; other objectives are
    under `configs/algorithms`."""

    clip_higher: bool = True
    """Off: the upper clip range is `epsilon_low` too."""
    epsilon_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    epsilon_high: Weight = 0.28
    dual_clip: float | None = None
    """Bound on the ratio where the advantage is negative (the released script has 10)."""
    dynamic_sampling: bool = True
    """Drop groups that are all right or all wrong, and sample until the batch is full."""
    max_generation_batches: Count = 10
    """Generation batches a step may take to fill the batch."""
    on_too_few_groups: Literal["stop", "train"] = "stop"
    """After `max_generation_batches`: stop with a message, or train on the groups there are."""
    surplus_groups: Literal["discard", "keep"] = "discard"
    """Qualified groups beyond the batch: discard as the released run did, or keep for the next step, with
    the log-probs of the policy that generated them as old log-probs."""
    token_level_loss: bool = True
    """Mean over all tokens of the optimizer step. Off: mean over sequences of their token means (GRPO)."""
    reduction: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", None] = None
    """How token losses become one number. Null: as `token_level_loss` says. `constant` divides their sum by
    `rollout.max_response_length` times the number of responses (Dr. GRPO)."""
    soft_overlong_punishment: bool = True
    """Eq. 13: a penalty that grows over the last `overlong_cache_length` tokens."""
    overlong_cache_length: Count = 4096
    overlong_penalty_factor: Weight = 1.0
    overlong_filtering: bool = False
    """Leave truncated responses out of the loss (they still count in their group's advantages)."""
    num_iterations: Count = 1
    """Passes over each rollout batch (the paper's mu)."""
    advantage_eps: Annotated[float, Field(gt=0)] = 1e-6
    advantage_std: bool = True
    """Divide by the group's standard deviation. Off: rewards minus their mean (Dr. GRPO)."""
    objective: Literal["clip", "cispo", "sapo"] = "clip"
    """`clip`: PPO's and DAPO's. `cispo`: the clipped ratio as a constant weight on the log-prob. `sapo`: a
    soft gate around ratio 1."""
    cispo_bounds: list | None = None
    """`[low, high]` of CISPO's weight. Null: `[0, 1 + epsilon_high]`."""
    sapo_temperature_pos: Annotated[float, Field(gt=0)] = 1.0
    """Of SAPO's gate where the advantage is positive."""
    sapo_temperature_neg: Annotated[float, Field(gt=0)] = 1.05
    """Of SAPO's gate elsewhere."""
    ratio_level: Literal["token", "sequence"] = "token"
    """`sequence`: one ratio a response, the exponential of its mean log-ratio (GSPO)."""
    kl_coef: Weight = 0.0
    """Weight of the KL term to the model of `model.reference_path`. DAPO has none."""
    kl_estimator: Literal["k3", "k2", "k1"] = "k3"
    """With q = reference log-prob - log-prob: `k3` is exp(q) - q - 1, `k2` q^2 / 2, `k1` -q."""
    kl_ratio_correction: bool = False
    """Multiply the KL term by the ratio, which makes its gradient unbiased off policy."""
    entropy_coef: Weight = 0.0
    """Weight of the entropy bonus."""
    rollout_correction: Literal["off", "truncate", "mask"] = "off"
    """Weigh each token's loss by its probability under the trainer over that under the rollout engine, before
    the step's updates. `truncate`: at most `rollout_correction_cap` (TIS). `mask`: 0 outside of
    `rollout_correction_floor` to `rollout_correction_cap` (MIS, IcePop)."""
    rollout_correction_level: Literal["token", "sequence"] = "token"
    """`sequence`: one weight a response, the product of its tokens' (as in verl and TRL)."""
    rollout_correction_cap: Annotated[float, Field(gt=0)] = 2.0
    rollout_correction_floor: Weight = 0.5
    """Of `mask` alone."""

    @field_validator("cispo_bounds")
    @classmethod
    def _bounds(cls, bounds: list | None) -> list[float] | None:
        numbers = [bound for bound in bounds or [] if type(bound) in (int, float) and math.isfinite(bound)]
        if bounds is not None and not (len(bounds) == len(numbers) == 2 and 0 <= numbers[0] <= numbers[1]):
            raise ValueError("must be null or [low, high] with 0 <= low <= high")
        return None if bounds is None else [float(bound) for bound in numbers]

    @property
    def loss_reduction(self) -> str:
        return self.reduction or ("token-mean" if self.token_level_loss else "seq-mean-token-mean")
