"""Verdicts on the responses of a run, in the background, with the run's limits and reward terms."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import UserError
from .judging import Limits, close_pools, pool_of, submit, when_done
from .modes import Mode, find_mode
from .pool import CannotLoad, Outcome
from .verdict import Verdict

if TYPE_CHECKING:
    from ..config import RewardConfig
    from ..data import Prompt
    from ..sources import Source

logger = logging.getLogger(__name__)
SHOWN_FAILURES = 5
PER_ROW = "data_source"
"""The mode that leaves the choice to the column of this name."""


class Scorer:
    """Judges responses to the prompts of one source. Raises `UserError` when a mode or pattern cannot
    work."""

    def __init__(self, config: RewardConfig, source: Source) -> None:
        self.config, self.source = config, source
        self.limits = Limits(config.time_limit, config.memory_limit_mb, config.workers)
        name = config.mode or source.default_mode
        self.mode = None if name == PER_ROW else self._mode(name, "reward.mode")
        try:
            re.compile(config.answer_pattern or "")
        except re.error as error:
            raise UserError(
                f"reward.answer_pattern {config.answer_pattern!r} is not a valid pattern: {error}"
            ) from None
        self._checked: set[str] = set()
        self.failures = 0
        """Responses that could not be judged."""
        self._counting = threading.Lock()
        if self.mode is not None:
            self._check(self.mode.judge, self.mode.key, "reward.mode")
        for name, term in config.terms.items():
            self._check(term.function, None, f"reward.terms.{name}.function")

    def check_rows(self, prompts: Iterable[Prompt]) -> None:
        """Raises `UserError` when a row names no mode, before anything is judged."""
        if self.mode is not None:
            return
        for prompt in prompts:
            mode = self._mode_of(prompt)
            self._check(mode.judge, mode.key, f"row {prompt.index + 1}: {PER_ROW}")

    def _mode(self, name: object, where: str) -> Mode:
        try:
            return find_mode(name)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from None

    def _mode_of(self, prompt: Prompt) -> Mode:
        if self.mode is not None:
            return self.mode
        if PER_ROW not in prompt.row.entry:
            raise UserError(
                f"reward.mode={PER_ROW} needs a column of that name; row {prompt.index + 1} has none"
            )
        return self._mode(prompt.row.entry[PER_ROW], f"row {prompt.index + 1}: {PER_ROW}")

    def _check(self, function: str, key: str | None, where: str) -> None:
        """That a function of the user's own can be imported where it will be called."""
        if function in self._checked or function.startswith(__package__ + "."):
            return
        self._checked.add(function)
        try:
            pool_of(function, key, self.limits).check()
        except CannotLoad as error:
            raise UserError(f"{where}: {error}") from None

    def submit(self, response: str, prompt: Prompt) -> Future[Verdict]:
        """The verdict, as soon as there is one. The future never raises: what cannot be judged is logged, and
        the response is wrong."""
        row = self.source.judged_row(prompt.row)
        mode, pattern = self._mode_of(prompt), self.config.answer_pattern
        verdict = submit(mode, response, prompt.row.answer, row, pattern, self.limits)
        terms = [
            pool_of(term.function, None, self.limits).submit(response, prompt.row.answer, row, None)
            for term in self.config.terms.values()
        ]
        return when_done(
            [verdict, *terms], lambda *done: self._finish(*done, response=response, prompt=prompt)
        )

    def __call__(self, response: str, prompt: Prompt) -> Verdict:
        """Waits for the verdict."""
        return self.submit(response, prompt).result()

    def _finish(
        self, judged: Future[Verdict], *terms: Future[Outcome], response: str, prompt: Prompt
    ) -> Verdict:
        try:
            verdict = judged.result()
        except CannotLoad as error:
            verdict = Verdict(False, failure=str(error))
        for name, term in zip(self.config.terms, terms):
            value, failure = _term_value(term)
            failure = failure and f"reward term {name}: {failure}"
            verdict = replace(
                verdict, failure=verdict.failure or failure, terms={**verdict.terms, name: value}
            )
        if verdict.failed:
            self._warn(verdict.failure, response, prompt)
        return verdict

    def _warn(self, failure: str, response: str, prompt: Prompt) -> None:
        """Logs the first failures one by one, then only that there are more."""
        with self._counting:
            self.failures += 1
            count = self.failures
        if count <= SHOWN_FAILURES:
            logger.warning("no verdict on prompt %d, response %.80r: %s", prompt.index, response, failure)
        elif count in (10, 100, 1000, 10_000, 100_000):
            logger.warning("no verdict on %d responses so far, the last for: %s", count, failure)

    def close(self) -> None:
        """Ends the workers."""
        close_pools(self.limits)


def _term_value(term: Future[Outcome]) -> tuple[float, str | None]:
    """A term's value, or 0 and why there is none."""
    try:
        outcome = term.result()
    except CannotLoad as error:
        return 0.0, str(error)
    return (0.0, outcome.failure) if outcome.value is None else (outcome.value, None)


def contains_answer(response: str, answer: str) -> bool:
    """Whether the right answer stands anywhere in the response, as a word or number of its own. More lenient
    than any verdict: it tells learning to solve from learning to format."""
    word = re.escape(answer.strip())
    return re.search(rf"(?<![\w.\-−]){word}(?!\w|[.,]\d)", response) is not None
