"""Verdicts out: which responses are right, and the rule-based reward. Imports neither torch nor
transformers."""

from __future__ import annotations

import logging
import math

from . import judging
from .judging import Limits
from .loading import load_function
from .modes import Mode, find_mode, mode_names, register_mode
from .pool import CannotLoad
from .scorer import Scorer
from .verdict import Verdict

__all__ = ["CannotLoad", "Scorer", "Verdict", "answer_key", "mode_names", "register_mode", "verify"]

logger = logging.getLogger(__name__)


def verify(response: str, answer: str, mode: str = "math", *, time_limit: float = 5.0) -> bool:
    """Whether a response gives the right answer.

    Never raises for any response or answer, and never takes longer than `time_limit`: what cannot be judged,
    whether it hangs, crashes or exhausts memory, is wrong, and logged as a warning. Thread-safe.

    Args:
        response: the model's whole response.
        answer: the right answer.
        mode: one of `mode_names()`, or `package.module:function` of a function `(response, answer) -> bool`.
        time_limit: seconds.

    Raises:
        ValueError: when there is no such mode, its function cannot be imported, or `time_limit` is not a
        positive
            number.
    """
    if not 0 < time_limit < math.inf:
        raise ValueError(f"time_limit must be a positive number of seconds, got {time_limit}")
    found = find_mode(mode)
    verdict = judging.submit(found, _text(response), _text(answer), None, None, Limits(time_limit)).result()
    if verdict.failed:
        logger.warning("no verdict on %.80r: %s; it counts as wrong", response, verdict.failure)
    return verdict.correct


def answer_key(response: str, mode: str = "math") -> str | None:
    """The final answer of a response in one spelling, so that equal answers can be counted; None: no answer.

    Raises:
        ValueError: when there is no such mode.
    """
    found: Mode = find_mode(mode)
    return load_function(found.key)(_text(response)) if found.key else None


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return "" if value is None else str(value)
    except Exception:  # a number of too many digits, an object that cannot be shown
        return ""
