"""The problems of an evaluation: rows of a data file, those that repeat put together."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..answer_classes import same_answer
from ..config import SourceConfig
from ..data import Prompt, conflicting, left_out, load_prompts
from ..errors import UserError
from ..records import MEND_EMPTY, counted, find_columns, open_records
from ..row_modes import known_mode, other_modes_note
from ..sources import Source
from .options import EvalOptions, data_config, make_section


@dataclass(frozen=True)
class Problem:
    prompt: Prompt
    samples: int
    """Responses to ask for."""
    rows: int
    """On which it stands."""
    identity: int
    """Of text and answer alone: keys the sampling noise, wherever the problem stands in whatever file."""


@dataclass(frozen=True)
class Problems:
    problems: list[Problem]
    rows: int
    source: Source
    columns: SourceConfig
    dropped: Counter[str]
    conflicts: int
    """Prompts that stand with two answers, each of them a problem."""

    @property
    def fewest_samples(self) -> int:
        return min(problem.samples for problem in self.problems)

    @property
    def longest_prompt(self) -> int:
        return max(len(problem.prompt.ids) for problem in self.problems)

    def digest(self) -> str:
        """Of what is asked, with how many samples, and what is right."""
        content = [(p.prompt.text, p.prompt.row.answer, p.samples) for p in self.problems]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def samples(self) -> int | str:
        """Of each problem: 32, or "1-3" where they differ."""
        return span(problem.samples for problem in self.problems)

    def describe(self) -> str:
        line = f"{counted(len(self.problems), 'problem')} x {self.samples} sample{'s' * (self.samples != 1)}"
        line += f", from {counted(self.rows, 'row')}"
        return line + left_out(self.dropped) + conflicting(self.conflicts)

    def notes(self, options: EvalOptions) -> list[str]:
        """What may be meant otherwise than the options say."""
        found = []
        if options.mode is None:
            named = {known_mode(problem.prompt.row.entry) for problem in self.problems}
            found.append(other_modes_note(named - {None}, self.source.default_mode))
        if options.samples is not None and not options.greedy and self.rows > len(self.problems):
            times = span(problem.rows for problem in self.problems)
            found.append(
                f"each problem stands {times} times in the file: -n {options.samples} asks for "
                f"{self.samples} samples of each"
            )
        return [note for note in found if note]


def span(counts: Iterable[int]) -> int | str:
    """The number, or "1-3" where they differ."""
    counts = sorted(counts)
    return counts[0] if counts[0] == counts[-1] else f"{counts[0]}-{counts[-1]}"


def load_problems(options: EvalOptions, tokenizer: PreTrainedTokenizerBase) -> Problems:
    """Reads the data and groups rows of the same prompt and answer into problems, in the order of their first
    rows. Raises `UserError` when the data cannot be read or hold no problem."""
    columns = find_source(options)
    prompts = load_prompts("eval", columns, data_config(options, columns), tokenizer)
    groups: dict[tuple[str, str], list[Prompt]] = {}
    for prompt in prompts.prompts:
        if not prompt.row.answer.strip() and not options.data.startswith("reasoning_gym:"):
            raise UserError(
                f"DATA {options.data} row {prompt.index + 1}: {columns.answer_column} is empty{MEND_EMPTY}"
            )
        groups.setdefault((prompt.text, prompt.row.answer), []).append(prompt)
    kept = list(groups.items())[: options.limit]
    problems = [
        Problem(rows[0], _samples(options, len(rows)), len(rows), _identity(*key)) for key, rows in kept
    ]
    rows = sum(problem.rows for problem in problems)
    answers: dict[str, str] = {}
    disagree = {
        text for (text, answer), _ in kept if not same_answer(answers.setdefault(text, answer), answer)
    }
    return Problems(problems, rows, prompts.source, columns, prompts.dropped, len(disagree))


def _samples(options: EvalOptions, rows: int) -> int:
    if options.greedy:
        return 1  # another would be the same
    return options.samples_per_problem or options.samples * rows


def _identity(text: str, answer: str) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps([text, answer]).encode()).digest()[:8], "little")


def find_source(options: EvalOptions) -> SourceConfig:
    """The source with the columns that were named, or else that its first record has. Raises `UserError`
    where it has none of the usual ones."""
    if options.data.startswith("reasoning_gym:"):
        return make_section(SourceConfig, source=options.data)
    first = next(iter(open_records(options.data)()), None)
    if first is None:
        raise UserError(f"DATA {options.data} holds no rows")
    prompt, answer = find_columns(first, options.prompt_column, options.answer_column, f"DATA {options.data}")
    return make_section(SourceConfig, source=options.data, prompt_column=prompt, answer_column=answer)
