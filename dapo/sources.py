"""Where prompts come from: reasoning_gym tasks, files and hub data sets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from .config import SourceConfig
from .errors import UserError
from .records import MEND_EMPTY, as_text, check_prompt, column, open_records


@dataclass(frozen=True)
class Row:
    question: str | list
    """A string, or a list of `{role, content}` messages."""
    answer: str
    entry: dict[str, Any]
    """The source's own record."""


class Source(Protocol):
    default_mode: str
    """The reward mode that suits it."""

    def rows(self) -> Iterator[Row]: ...

    def judged_row(self, row: Row) -> dict[str, Any]:
        """What of a row its verdict may need besides the answer."""
        ...


def open_source(config: SourceConfig) -> Source:
    """Raises `UserError` when the task or file does not exist or lacks the columns."""
    if config.source.startswith("reasoning_gym:"):
        return ReasoningGymSource(config)
    return FileSource(config)


class ReasoningGymSource:
    """A procedural task of reasoning_gym."""

    default_mode = "reasoning_gym"

    def __init__(self, config: SourceConfig) -> None:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise UserError(
                f"{config.source} needs reasoning-gym: pip install 'dapo-kernels[train]'"
            ) from error
        self.config = config
        name = config.source.removeprefix("reasoning_gym:")
        if name not in DATASETS:
            raise UserError(f"reasoning_gym has no task {name!r}; it has {', '.join(sorted(DATASETS))}")
        try:
            self.dataset = reasoning_gym.create_dataset(name, **{"seed": 0, **config.task})
        except Exception as error:
            raise self._wrong_options(error) from error

    def rows(self) -> Iterator[Row]:
        try:
            for entry in self.dataset:
                yield Row(entry["question"], str(entry["answer"]), entry)
        except Exception as error:  # a task checks some of its options only when it makes a problem
            raise self._wrong_options(error) from error

    def _wrong_options(self, error: Exception) -> UserError:
        return UserError(f"task options of {self.config.source} ({self.config.task}): {error}")

    def judged_row(self, row: Row) -> dict[str, Any]:
        task = self.config.source.removeprefix("reasoning_gym:")
        return {"task": task, "options": self.config.task, "entry": row.entry}


class FileSource:
    """Rows of a file or of a hub data set."""

    default_mode = "math"

    def __init__(self, config: SourceConfig) -> None:
        self.config = config
        self.records = open_records(config.source)

    def rows(self) -> Iterator[Row]:
        config = self.config
        for number, record in enumerate(self.records(), start=1):
            where = f"{config.source} row {number}"
            question = column(record, config.prompt_column, "prompt_column", where)
            answer = column(record, config.answer_column, "answer_column", where)
            check_prompt(question, config.prompt_column, where)
            if answer is None:
                raise UserError(f"{where}: {config.answer_column} is null{MEND_EMPTY}")
            yield Row(question, as_text(answer), record)

    def judged_row(self, row: Row) -> dict[str, Any]:
        return row.entry
