"""The data sets that `dapo data prepare` knows by name, and how to read others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from .errors import UserError

MATH_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{prompt}\n\nRemember to "
    'put your answer on its own line after "Answer:".'
)
"""The prompt of DAPO-Math-17k, letter for letter."""
GSM8K_TEMPLATE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "#### answer where answer is one number.\n\n{prompt}"
)


@dataclass(frozen=True)
class DataSet:
    """How to read a data set."""

    source: str
    """For `open_records`."""
    prompt_column: str | None = None
    """None: found by its usual names, as is the answer's."""
    answer_column: str | None = None
    template: str = MATH_TEMPLATE
    """Around prompts that are strings."""
    data_source: str = "math"
    """The reward mode that suits it."""
    after_marker: bool = False
    """The right answer is what follows `####`; without it there is none."""


KNOWN = {
    "dapo-math-17k": DataSet("hub:BytedTsinghua-SIA/DAPO-Math-17k", "prompt", "reward_model.ground_truth"),
    "aime-2024": DataSet("hub:BytedTsinghua-SIA/AIME-2024", "prompt", "reward_model.ground_truth"),
    "aime-2025": DataSet("hub:math-ai/aime25:test", "problem", "answer"),
    "gsm8k": DataSet("hub:openai/gsm8k:main:train", "question", "answer", GSM8K_TEMPLATE, "gsm8k", True),
    "math-500": DataSet("hub:HuggingFaceH4/MATH-500:test", "problem", "answer"),
}


def find_data_set(name: str, local: str | None = None, split: str | None = None) -> DataSet:
    """A known data set, or a file or `hub:` source as one.

    Args:
        local: a file to read a known data set from, in place of the hub.
        split: of the hub's, in place of the usual one.

    Raises:
        UserError: for an unknown name, and options that do not go with it.
    """
    data_set = KNOWN.get(name)
    if data_set is None:
        if local is not None:
            raise UserError(f"--from is for {', '.join(KNOWN)}; {name} is read from where it is")
        if not name.startswith("hub:") and not Path(name).suffix:
            raise UserError(f"{name!r} must be a file, hub:OWNER/NAME or one of {', '.join(KNOWN)}")
        data_set = DataSet(name, template="{prompt}")
    source = data_set.source if local is None else local
    if split is not None:
        if not source.startswith("hub:"):
            raise UserError(f"--split is for data sets of the hub; {source} has none")
        source = _with_split(source, split)
    return replace(data_set, source=source)


def _with_split(source: str, split: str) -> str:
    parts = source.split(":")  # hub, name[[, configuration], split]
    return ":".join([*(parts[:-1] if len(parts) > 2 else parts), split])
