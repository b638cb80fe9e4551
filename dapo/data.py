"""Prompts in: sources of questions, tokenised once, held-out ones kept apart, served in epochs."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .answer_classes import same_answer
from .config import DataConfig, SourceConfig
from .errors import UserError
from .records import MEND_EMPTY, counted
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
    conflicts: int = 0
    """Prompts that stand in the source with two answers."""

    def describe(self) -> str:
        """What is used and what was left out, for the start of a run."""
        line = counted(len(self.prompts), "prompt") + left_out(self.dropped)
        return line + conflicting(self.conflicts)


def left_out(dropped: Counter[str]) -> str:
    """ " (left out: 1 duplicate, 3 too long)", or "" where nothing was."""
    parts = [
        counted(count, reason) if reason == "duplicate" else f"{count} {reason}"
        for reason, count in sorted(dropped.items())
    ]
    return f" (left out: {', '.join(parts)})" if parts else ""


def conflicting(prompts: int) -> str:
    """What to say of prompts that stand with two answers; "" where there are none."""
    return f"; {counted(prompts, 'prompt')} with conflicting answers" if prompts else ""


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
    seen: dict[str, str] = {}  # the answer of each text
    conflicts: set[str] = set()
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
        known = text in seen
        if not same_answer(seen.setdefault(text, row.answer), row.answer):
            conflicts.add(text)
        if config.deduplicate and known:
            dropped["duplicate"] += 1
            continue
        if not _is_unicode(text):
            raise UserError(f"data.{name} ({source_config.source}): row {index + 1} is not valid Unicode")
        ids = tokenise(text, row.question, config, tokenizer)
        if not ids:
            raise UserError(
                f"data.{name} ({source_config.source}): row {index + 1} holds an empty prompt{MEND_EMPTY}"
            )
        if len(ids) > config.max_prompt_length:
            dropped["too long"] += 1
            too_long.append(len(ids))
        else:
            prompts.append(Prompt(index, text, ids, row))
    if not prompts:
        raise UserError(f"data.{name} ({source_config.source}) {_why_empty(dropped, too_long, config)}")
    return PromptSet(source, prompts, dropped, len(conflicts))


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
    """The text of a prompt as the model sees it; `data.prompt_template` is for strings only."""
    if isinstance(question, str):
        question = config.prompt_template.replace("{prompt}", question)
    if not _templated(question, config):
        return question if isinstance(question, str) else _contents(question)
    if tokenizer.chat_template is None:
        raise UserError(
            "the model's tokenizer has no chat template: set data.chat_template=false, which sends message "
            "lists as their contents"
        )
    messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:  # it may refuse roles and their order
        raise UserError(
            f"the model's chat template refuses the messages {messages!r:.200}: {error}"
        ) from None


def _templated(question: str | list, config: DataConfig) -> bool:
    """Whether a prompt goes through the chat template."""
    return not isinstance(question, str) if config.chat_template is None else config.chat_template


def _contents(messages: list[dict]) -> str:
    contents = [message["content"] for message in messages]
    if not all(isinstance(content, str) for content in contents):
        raise UserError(
            f"data.chat_template=false needs messages whose content is a string, got {messages!r:.200}"
        )
    return "\n\n".join(contents)


def tokenise(
    text: str, question: str | list, config: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Token ids of a rendered prompt. A chat template writes its own BOS: none is added to it."""
    return tokenizer(text, add_special_tokens=not _templated(question, config))["input_ids"]


_SAME = {
    "seed": "the seed of the data order",
    "prompts": "the number of training prompts",
    "fingerprint": "the text of the training prompts",
}


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

    def state_dict(self) -> dict[str, int | str]:
        """Where the stream stands, as plain values for JSON: what comes next is the same after
        `load_state_dict`."""
        return {
            "seed": self.seed,
            "epoch": self.epoch,
            "position": self.position,
            "prompts": len(self.prompts),
            "fingerprint": self.fingerprint,
        }

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        """Goes to where another stream of the same prompts and seed stood. Raises `UserError` for others, and
        then stays where it is."""
        mine = self.state_dict()
        missing = [key for key in mine if key not in state]
        if missing:
            raise UserError(f"the saved state of the prompts lacks {', '.join(missing)}")
        for key, what in _SAME.items():
            if state[key] != mine[key]:
                raise UserError(
                    f"{what} differs from the saved run's: {state[key]} there, {mine[key]} here; go on with "
                    f"its data, tokenizer and seed"
                )
        epoch, position = state["epoch"], state["position"]
        if not 0 <= position <= len(self.prompts):
            raise UserError(f"the saved state has position {position} of {len(self.prompts)} prompts")
        self.epoch, self.position = epoch, position
        self._order = self._shuffled()

    @functools.cached_property
    def fingerprint(self) -> str:
        """16 hex digits that tell the prompts, their tokens and their order from others."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(json.dumps([prompt.text, prompt.ids]).encode())
        return digest.hexdigest()[:16]
