"""Where prompts come from: reasoning_gym tasks, JSONL and parquet files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from .config import SourceConfig
from .errors import UserError


@dataclass(frozen=True)
class Row:
    question: str | list
    """A string, or a list of `{role, content}` messages."""
    answer: str
    entry: dict[str, Any]
    """The source's own record."""


class Source(Protocol):
    def rows(self) -> Iterator[Row]: ...

    def is_correct(self, answer: str, row: Row) -> bool:
        """Whether an answer taken from a response is right. May raise: the caller counts that as wrong."""
        ...


def open_source(config: SourceConfig) -> Source:
    """Raises `UserError` when the task or file does not exist or lacks the columns."""
    if config.source.startswith("reasoning_gym:"):
        return ReasoningGymSource(config)
    path = Path(config.source)
    if path.suffix not in (".jsonl", ".parquet"):
        raise UserError(
            f"data source {config.source!r} must be reasoning_gym:TASK or a path ending in .jsonl or .parquet"
        )
    if not path.is_file():
        raise UserError(f"data file {path} not found")
    return FileSource(path, config)


class ReasoningGymSource:
    """A procedural task of reasoning_gym, scored by that library: right is exactly 1.0, as its scorers give
    partial credit to answers that merely contain the right one."""

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

    def is_correct(self, answer: str, row: Row) -> bool:
        return self.dataset.score_answer(answer, row.entry) == 1.0


class FileSource:
    """Rows of a JSONL or parquet file, right when the answer equals the answer column."""

    def __init__(self, path: Path, config: SourceConfig) -> None:
        self.path, self.config = path, config

    def rows(self) -> Iterator[Row]:
        read = _read_jsonl if self.path.suffix == ".jsonl" else _read_parquet
        for number, record in enumerate(read(self.path), start=1):
            question = self._column(record, self.config.prompt_column, "prompt_column", number)
            answer = self._column(record, self.config.answer_column, "answer_column", number)
            if not isinstance(question, str) and not _are_messages(question):
                raise UserError(
                    f"{self.path} row {number}: {self.config.prompt_column} must be a string or a list of "
                    f"{{role, content}} messages, got {question!r:.80}"
                )
            if answer is None:
                raise UserError(f"{self.path} row {number}: {self.config.answer_column} is null")
            yield Row(question, _as_text(answer), record)

    def _column(self, record: dict, name: str, key: str, number: int) -> Any:
        value: Any = record
        for part in name.split("."):
            if not isinstance(value, dict) or part not in value:
                columns = ", ".join(record)
                raise UserError(
                    f"{self.path} row {number} has no column {name!r}: set {key} to one of: {columns}"
                )
            value = value[part]
        return value

    def is_correct(self, answer: str, row: Row) -> bool:
        return answer == row.answer.strip()


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )


def _as_text(answer: Any) -> str:
    """An answer column as text; a table of numbers stores 34 as 34.0."""
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return str(answer)


def _read_jsonl(path: Path) -> Iterator[dict]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:  # not UTF-8 or not JSON
                raise UserError(f"{path} line {number} is not JSON: {error}") from None
            if not isinstance(record, dict):
                raise UserError(f"{path} line {number} must be an object, got {type(record).__name__}")
            yield record


def _read_parquet(path: Path) -> Iterator[dict]:
    import pyarrow
    from pyarrow import parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {error}") from None
