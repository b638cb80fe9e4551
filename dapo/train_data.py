"""The prompts of a run, with what judges their responses: to train on, and held out."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from .config import Config
from .data import Prompt, PromptSet, load_prompts
from .errors import UserError
from .rewards import Scorer


@dataclass(frozen=True)
class JudgedPrompts:
    """Prompts and their scorer."""

    prompts: list[Prompt]
    scorer: Scorer

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt.ids) for prompt in self.prompts)

    @classmethod
    def of(cls, config: Config, prompts: PromptSet) -> JudgedPrompts:
        scorer = Scorer(config.reward, prompts.source)
        scorer.check_rows(prompts.prompts)
        return cls(prompts.prompts, scorer)


def load_train_data(
    config: Config, tokenizer: PreTrainedTokenizerBase, positions: int | None, console: Console
) -> tuple[JudgedPrompts, JudgedPrompts | None]:
    """What to train on, and what is held out, if anything is.

    Args:
        positions: tokens that a sequence of the model may have. None: any number.

    Raises:
        UserError: the data or the scorer cannot work, or sequences would not fit the model.
    """
    held_out = _load_held_out(config, tokenizer, console)
    train = load_prompts("train", config.data.train, config.data, tokenizer, held_out)
    console.print(f"train data: {train.describe()}", soft_wrap=True)
    _check_length(config, train.prompts, positions)
    return JudgedPrompts.of(config, train), None if held_out is None else JudgedPrompts.of(config, held_out)


def _load_held_out(config: Config, tokenizer: PreTrainedTokenizerBase, console: Console) -> PromptSet | None:
    if config.data.eval is None:
        if config.eval.every:
            raise UserError("eval.every needs data.eval: name held-out prompts there")
        return None
    held_out = load_prompts("eval", config.data.eval, config.data, tokenizer)
    console.print(f"held-out data: {held_out.describe()}", soft_wrap=True)
    return held_out


def _check_length(config: Config, prompts: list[Prompt], positions: int | None) -> None:
    longest = max(len(prompt.ids) for prompt in prompts)
    if positions is not None and longest + config.rollout.max_response_length > positions:
        raise UserError(
            f"the longest prompt ({longest} tokens) and rollout.max_response_length "
            f"({config.rollout.max_response_length}) go beyond the model's {positions} positions: lower "
            "data.max_prompt_length or rollout.max_response_length"
        )
