"""Fused policy losses for DAPO and its relatives; needs torch only."""

from . import reference
from .config import PolicyLossConfig
from .linear_logprobs import LogprobOutput, fused_linear_logprobs
from .linear_policy_loss import fused_linear_policy_loss
from .module import FusedLinearPolicyLoss
from .output import PolicyLossOutput
from .policy_loss import policy_loss

__all__ = [
    "FusedLinearPolicyLoss",
    "LogprobOutput",
    "PolicyLossConfig",
    "PolicyLossOutput",
    "fused_linear_logprobs",
    "fused_linear_policy_loss",
    "policy_loss",
    "reference",
]
