"""The coefficients and switches of the policy loss, validated once when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import Literal, get_args

Objective = Literal["clip", "cispo", "sapo"]
RatioLevel = Literal["token", "sequence"]
Reduction = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"]
KLEstimator = Literal["k3", "k2", "k1"]


@dataclass(frozen=True, kw_only=True)
class PolicyLossConfig:
    """What the policy loss computes. The defaults are DAPO's (arXiv 2503.14476, Eq. 8 and sec. 4.1).

    `dapo_kernels.reference.linear_policy_loss` spells out the definition. Raises `ValueError` naming the
    field when a value is not allowed.
    """

    epsilon_low: float = 0.2
    """Lower clip range: ratios under `1 - epsilon_low` earn nothing more where A < 0."""
    epsilon_high: float = 0.28
    """Upper clip range (Clip-Higher): ratios over `1 + epsilon_high` earn nothing more where A > 0."""
    dual_clip: float | None = None
    """Where A < 0, the loss is at most `-dual_clip * A`. At least `1 + epsilon_high`. None: off."""
    objective: Objective = "clip"
    """`clip` (PPO/DAPO), `cispo` (clipped constant weight times log-prob), `sapo` (soft gate)."""
    cispo_bounds: tuple[float, float] | None = None
    """Bounds of CISPO's constant weight. None: `(0, 1 + epsilon_high)`."""
    sapo_temperature_pos: float = 1.0
    """SAPO's gate temperature where A > 0."""
    sapo_temperature_neg: float = 1.05
    """SAPO's gate temperature where A <= 0."""
    ratio_level: RatioLevel = "token"
    """`token`, or `sequence`: one ratio a sequence, the exponential of its mean log-ratio (GSPO)."""
    reduction: Reduction = "token-mean"
    """How token losses become one number; the denominator counts tokens or sequences."""
    kl_coef: float = 0.0
    """Weight of the KL term to the reference policy. DAPO has none."""
    kl_estimator: KLEstimator = "k3"
    """`k3`: exp(q) - q - 1, `k2`: q^2 / 2, `k1`: -q, with q = ref_logprob - logprob."""
    kl_ratio_correction: bool = False
    """Multiply the KL term by the ratio, with gradient, before any clip."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    temperature: float = 1.0
    """Sampling temperature: logits are divided by it."""
    logit_scale: float = 1.0
    """Logits are multiplied by it, before the softcap (Cohere, Granite)."""
    logit_softcap: float | None = None
    """Logits become `softcap * tanh(logits / softcap)` (Gemma-2). None: off."""
    skip_zero_advantage: bool = False
    """Do not even score tokens whose `advantage * token_weight` is 0, where there is neither KL nor bonus."""

    def __post_init__(self) -> None:
        for name, literal in (
            ("objective", Objective),
            ("ratio_level", RatioLevel),
            ("reduction", Reduction),
            ("kl_estimator", KLEstimator),
        ):
            self._require(name, getattr(self, name) in get_args(literal), f"one of {get_args(literal)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                self._require(field.name, isinstance(value, bool), "True or False")
            elif field.type == "float" or (field.type == "float | None" and value is not None):
                self._require(field.name, _is_number(value) and math.isfinite(value), "a finite number")
        self._require("epsilon_low", 0 <= self.epsilon_low <= 1, "between 0 and 1")
        self._require("epsilon_high", self.epsilon_high >= 0, "at least 0")
        if self.dual_clip is not None:
            least = 1 + self.epsilon_high
            self._require(
                "dual_clip", self.dual_clip >= least, f"None or at least 1 + epsilon_high = {least}"
            )
        if self.cispo_bounds is not None:
            bounds = self.cispo_bounds
            pair = isinstance(bounds, (tuple, list)) and len(bounds) == 2 and all(map(_is_number, bounds))
            ordered = pair and 0 <= bounds[0] <= bounds[1]
            self._require("cispo_bounds", ordered, "None or (low, high) with 0 <= low <= high")
        for name in ("sapo_temperature_pos", "sapo_temperature_neg", "temperature"):
            self._require(name, getattr(self, name) > 0, "over 0")
        self._require("logit_scale", self.logit_scale != 0, "not 0")
        if self.logit_softcap is not None:
            self._require("logit_softcap", self.logit_softcap > 0, "None or over 0")

    def _require(self, name: str, allowed: bool, what: str) -> None:
        if not allowed:
            raise ValueError(f"PolicyLossConfig.{name} must be {what}, got {getattr(self, name)!r}")

    @property
    def needs_entropy_gradient(self) -> bool:
        return self.entropy_coef != 0

    @property
    def needs_sequences(self) -> bool:
        """Whether it matters which tokens are of one sequence."""
        return self.ratio_level == "sequence" or self.reduction.startswith("seq-mean")

    @property
    def zero_advantage_is_inert(self) -> bool:
        """Whether a token with A = 0 has no gradient, whatever its log-prob turns out to be."""
        return self.kl_coef == 0 and self.entropy_coef == 0


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
