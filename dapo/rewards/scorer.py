"""From a response to a verdict: extract the answer, ask the source's scorer, survive its faults."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from ..config import RewardConfig
from ..data import Prompt
from ..errors import UserError
from ..sources import Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Verdict:
    correct: bool
    failed: bool = False
    """The scorer raised; the response counts as wrong."""


class Scorer:
    """Judges responses to the prompts of one source."""

    def __init__(self, config: RewardConfig, source: Source) -> None:
        self.source = source
        try:
            self.pattern = None if config.answer_pattern is None else re.compile(config.answer_pattern)
        except re.error as error:
            raise UserError(
                f"reward.answer_pattern {config.answer_pattern!r} is not a valid pattern: {error}"
            ) from None

    def __call__(self, response: str, prompt: Prompt) -> Verdict:
        """Never raises: a scorer that does is logged, and the response is wrong."""
        try:
            answer = self.extract(response)
            correct = answer is not None and bool(self.source.is_correct(answer, prompt.row))
            return Verdict(correct)
        except Exception as error:
            logger.warning(
                "the scorer failed on prompt %d, response %.80r: %s", prompt.index, response, error
            )
            return Verdict(correct=False, failed=True)

    def extract(self, response: str) -> str | None:
        """The answer in a response: the pattern's last match, or the whole response; stripped."""
        if self.pattern is None:
            return response.strip()
        matches = list(self.pattern.finditer(response))
        if not matches:
            return None
        return (matches[-1].group(1 if self.pattern.groups else 0) or "").strip()


def contains_answer(response: str, answer: str) -> bool:
    """Whether the right answer stands anywhere in the response, as a word or number of its own. More lenient
    than any verdict: it tells learning to solve from learning to format."""
    word = re.escape(answer.strip())
    return re.search(rf"(?<![\w.\-−]){word}(?!\w|[.,]\d)", response) is not None
