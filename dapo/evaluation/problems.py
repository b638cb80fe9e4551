"""The problems of an evaluation: rows of a data file, those that repeat put together."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..config import SourceConfig
from ..data import Prompt, load_prompts
from ..errors import UserError
from ..records import has_column, open_records
from ..sources import Source
from .options import EvalOptions, data_config, make_section

PROMPT_COLUMNS = ("prompt", "question", "problem")
ANSWER_COLUMNS = ("reward_model.ground_truth", "answer")


@dataclass(frozen=True)
class Problem:
    prompt: Prompt
    samples: int
    """Responses to ask for."""
    identity: int
    """Of text and answer alone: keys the sampling noise, wherever the problem stands in whatever file."""


@dataclass(frozen=True)
class Problems:
    problems: list[Problem]
    rows: int
    source: Source
    columns: SourceConfig
    dropped: Counter[str]

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
    def samples(self) -> str:
        """Of each problem, "32" or "1 to 3"."""
        fewest, most = self.fewest_samples, max(problem.samples for problem in self.problems)
        return f"{fewest}" if fewest == most else f"{fewest} to {most}"

    def describe(self) -> str:
        line = f"{len(self.problems)} problems x {self.samples} samples, from {self.rows} rows"
        left_out = [f"{count} {reason}" for reason, count in sorted(self.dropped.items())]
        return line + (f" (left out: {', '.join(left_out)})" if left_out else "")


def load_problems(options: EvalOptions, tokenizer: PreTrainedTokenizerBase) -> Problems:
    """Reads the data and groups rows of the same prompt and answer into problems, in the order of their first
    rows. Raises `UserError` when the data cannot be read or hold no problem."""
    columns = find_columns(options)
    prompts = load_prompts("eval", columns, data_config(options, columns), tokenizer)
    groups: dict[tuple[str, str], list[Prompt]] = {}
    for prompt in prompts.prompts:
        groups.setdefault((prompt.text, prompt.row.answer), []).append(prompt)
    kept = list(groups.items())[: options.limit]
    problems = [Problem(rows[0], _samples(options, len(rows)), _identity(*key)) for key, rows in kept]
    return Problems(problems, sum(len(rows) for _, rows in kept), prompts.source, columns, prompts.dropped)


def _samples(options: EvalOptions, rows: int) -> int:
    if options.greedy:
        return 1  # another would be the same
    return options.samples_per_problem or options.samples * rows


def _identity(text: str, answer: str) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps([text, answer]).encode()).digest()[:8], "little")


def find_columns(options: EvalOptions) -> SourceConfig:
    """The source with the columns that were named, or else that its first record has. Raises `UserError`
    where it has none of the usual ones."""
    if options.data.startswith("reasoning_gym:"):
        return make_section(SourceConfig, source=options.data)
    first = next(iter(open_records(options.data)()), None)
    if first is None:
        raise UserError(f"DATA {options.data} holds no rows")
    prompt = options.prompt_column or _first_found(options, first, "prompt", PROMPT_COLUMNS)
    answer = options.answer_column or _first_found(options, first, "answer", ANSWER_COLUMNS)
    return make_section(SourceConfig, source=options.data, prompt_column=prompt, answer_column=answer)


def _first_found(options: EvalOptions, record: dict, what: str, names: Sequence[str]) -> str:
    for name in names:
        if has_column(record, name):
            return name
    raise UserError(
        f"DATA {options.data} has no column {' or '.join(names)} for the {what}: set --{what}-column to one "
        f"of: {', '.join(record)}"
    )
