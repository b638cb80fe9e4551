"""Prompts in: sources of questions, tokenised once, held-out ones kept apart, served in epochs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .config import DataConfig, SourceConfig
from .errors import UserError
from .sources import Row, Source, open_source


@dataclass(frozen=True)
class Prompt:
    index: int
    """Position in its source: names the prompt, whatever the order of serving."""
    text: str
    """As the model sees it."""
    ids: list[int]
    row: Row


@dataclass(frozen=True)
class PromptSet:
    """The prompts of a source that can be used, and what was left out."""

    source: Source
    prompts: list[Prompt]
    dropped: Counter[str]
    """How many prompts each of `held out`, `duplicate` and `too long` cost."""

    def describe(self) -> str:
        """What is used and what was left out, for the start of a run."""
        parts = [f"{count} {reason}" for reason, count in sorted(self.dropped.items())]
        return f"{len(self.prompts)} prompts" + (f" (left out: {', '.join(parts)})" if parts else "")


def load_prompts(
    name: str,
    source_config: SourceConfig,
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    held_out: PromptSet | None = None,
) -> PromptSet:
    """Reads, renders, tokenises and filters a source. Raises `UserError` when no prompt is left.

    Args:
        name: the config key, for messages.
        held_out: prompts that must not be in the result.
    """
    source = open_source(source_config)
    seen: set[str] = set()
    kept_out = {prompt.text for prompt in held_out.prompts} if held_out else set()
    prompts: list[Prompt] = []
    dropped: Counter[str] = Counter()
    too_long: list[int] = []
    for index, row in enumerate(source.rows()):
        if len(prompts) == source_config.limit:
            break
        text = render_prompt(row.question, config, tokenizer)
        if text in kept_out:
            dropped["held out"] += 1
            continue
        if config.deduplicate and text in seen:
            dropped["duplicate"] += 1
            continue
        seen.add(text)
        if not _is_unicode(text):
            raise UserError(f"data.{name} ({source_config.source}): row {index + 1} is not valid Unicode")
        ids = tokenise(text, row.question, config, tokenizer)
        if not ids:
            raise UserError(f"data.{name} ({source_config.source}): row {index + 1} holds an empty prompt")
        if len(ids) > config.max_prompt_length:
            dropped["too long"] += 1
            too_long.append(len(ids))
        else:
            prompts.append(Prompt(index, text, ids, row))
    if not prompts:
        raise UserError(f"data.{name} ({source_config.source}) {_why_empty(dropped, too_long, config)}")
    return PromptSet(source, prompts, dropped)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, from a cut JSON escape
        return False
    return True


def _why_empty(dropped: Counter[str], too_long: list[int], config: DataConfig) -> str:
    if not dropped:
        return "holds no prompts"
    reasons = []
    if dropped["too long"]:
        reasons.append(
            f"{dropped['too long']} prompts are longer than data.max_prompt_length="
            f"{config.max_prompt_length} tokens (the shortest has {min(too_long)}): raise it"
        )
    if dropped["held out"]:
        reasons.append(
            f"{dropped['held out']} prompts are also in data.eval: use other prompts for one of them"
        )
    return f"has no usable prompt: {'; '.join(reasons)}"


def render_prompt(question: str | list, config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a prompt: wrapped in the template, or sent through the tokenizer's chat template."""
    if isinstance(question, str):
        question = config.prompt_template.replace("{prompt}", question)
        if not config.chat_template:
            return question
        question = [{"role": "user", "content": question}]
    if tokenizer.chat_template is None:
        raise UserError(
            "the model's tokenizer has no chat template; set data.chat_template=false and use strings"
        )
    return tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)


def tokenise(
    text: str, question: str | list, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Token ids of a rendered prompt. A chat template writes its own BOS: none is added to it."""
    templated = config.chat_template or not isinstance(question, str)
    return tokenizer(text, add_special_tokens=not templated)["input_ids"]


class PromptStream:
    """Serves prompts for ever, each epoch in an order of its own that depends on (seed, epoch) alone."""

    def __init__(self, prompts: list[Prompt], seed: int) -> None:
        self.prompts, self.seed = prompts, seed
        self.epoch, self.position = 0, 0
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}/{self.epoch}").shuffle(order)
        return order

    def take(self, count: int) -> list[Prompt]:
        return [next(self) for _ in range(count)]

    def __iter__(self) -> Iterator[Prompt]:
        return self

    def __next__(self) -> Prompt:
        if self.position == len(self._order):
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._shuffled()
        self.position += 1
        return self.prompts[self._order[self.position - 1]]
