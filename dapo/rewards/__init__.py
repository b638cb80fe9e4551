"""Verdicts out: which responses are right, and the rule-based reward."""

from .scorer import Scorer, Verdict

__all__ = ["Scorer", "Verdict"]
