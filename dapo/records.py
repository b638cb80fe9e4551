"""Records of files and hub data sets: JSONL, parquet, CSV, `hub:OWNER/NAME`."""

from __future__ import annotations

import csv
import functools
import glob
import itertools
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import UserError

BATCH_ROWS = 1000
MEND_EMPTY = "; `dapo data prepare FILE OUT` writes the data without such rows"
"""What to do about rows that lack a prompt or an answer."""


def open_records(source: str) -> Callable[[], Iterator[dict]]:
    """A reader of a file's or hub data set's records, in their order; every call starts over.

    Raises `UserError` at once for a file that does not exist and a name of the wrong form, later for what
    cannot be read.
    """
    if source.startswith("hub:"):
        return functools.partial(_read_hub, source, *_hub_name(source))
    path = Path(source)
    read = {".jsonl": _read_jsonl, ".parquet": _read_parquet, ".csv": _read_csv}.get(path.suffix)
    if path.suffix == ".json":
        raise UserError(
            f"data file {path} must be JSON Lines: one object a line, in a file whose name ends in .jsonl "
            f"(jq -c '.[]' makes them of a JSON list)"
        )
    if read is None:
        raise UserError(
            f"data source {source!r} must be reasoning_gym:TASK, hub:OWNER/NAME or a path ending in .jsonl, "
            f".parquet or .csv"
        )
    if not path.is_file():
        raise UserError(f"data file {path} not found")
    return functools.partial(read, path)


def column(record: dict, name: str, key: str, where: str) -> Any:
    """The value of a column; dots reach into structs, unless a column's own name holds them.

    Args:
        key: what the user sets to name the column, for the `UserError` where it does not exist.
        where: file and row, for the same.
    """
    if not has_column(record, name):
        raise UserError(f"{where} has no column {name!r}: set {key} to one of: {', '.join(_leaves(record))}")
    return record[name] if name in record else functools.reduce(dict.__getitem__, name.split("."), record)


def has_column(record: dict, name: str) -> bool:
    if name in record:
        return True
    value: Any = record
    for part in name.split("."):
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


_PROMPT_COLUMNS = ("prompt", "question", "problem")
_ANSWER_COLUMNS = ("reward_model.ground_truth", "answer")


def find_columns(record: dict, prompt: str | None, answer: str | None, where: str) -> tuple[str, str]:
    """Names of the columns of prompt and answer: the given ones, or else the usual ones that a record has.
    Raises `UserError` where it has none, and where a column is a struct whose parts have names."""
    found = []
    for kind, given, usual in (("prompt", prompt, _PROMPT_COLUMNS), ("answer", answer, _ANSWER_COLUMNS)):
        names = [name for name in usual if has_column(record, name)] if given is None else [given]
        if not names:
            raise UserError(
                f"{where} has none of the columns {', '.join(usual)}: set --{kind}-column to one of: "
                f"{', '.join(_leaves(record))}"
            )
        value = column(record, names[0], f"--{kind}-column", where)
        if isinstance(value, dict) and value:
            parts = ", ".join(f"{names[0]}.{part}" for part in _leaves(value))
            raise UserError(f"{where}: {names[0]} has parts: set --{kind}-column to one of: {parts}")
        found.append(names[0])
    return found[0], found[1]


def _leaves(record: dict) -> list[str]:
    """Names of all columns as they can be given: the parts of structs by dots."""
    names = []
    for name, value in record.items():
        nested = isinstance(value, dict) and value
        names += [f"{name}.{part}" for part in _leaves(value)] if nested else [str(name)]
    return names


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """ "1 prompt", "1,000 prompts": a number and its noun, for people."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def check_prompt(value: Any, name: str, where: str) -> None:
    """Raises `UserError` for what is neither a string nor a list of messages."""
    if not isinstance(value, str) and not are_messages(value):
        raise UserError(
            f"{where}: {name} must be a string or a list of {{role, content}} messages, got {value!r:.80}"
            f"{MEND_EMPTY if value is None else ''}"
        )


def prompt_key(prompt: str | list[dict]) -> tuple[str, ...]:
    """The same for equal prompts, and for no others; () for one that says nothing."""
    if isinstance(prompt, str):
        return (prompt,) if prompt.strip() else ()
    parts = [(message["role"], _as_key(message["content"])) for message in prompt]
    return tuple(itertools.chain(*parts)) if any(content.strip() for _, content in parts) else ()


def _as_key(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content, default=str) if content else ""


def are_messages(value: Any) -> bool:
    """Whether a column's value is a list of `{role, content}` messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and "content" in m for m in value)
    )


def as_text(answer: Any) -> str:
    """An answer column as text; a table of numbers stores 34 as 34.0."""
    if isinstance(answer, float) and answer.is_integer():
        return str(int(answer))
    return str(answer)


def _read_jsonl(path: Path) -> Iterator[dict]:
    # Not by `datasets`: it refuses a column of numbers and strings, as answers often are, and names no line.
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
    # Not by `datasets`: it decodes a row group at once, and the hub's files have a million rows in one.
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH_ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} cannot be read as parquet: {_line(error)}") from None


def _read_csv(path: Path) -> Iterator[dict]:
    datasets = _import_datasets(path)
    # What it logs it raises as well.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    try:
        names, delimiter = _csv_columns(path)
        with tempfile.TemporaryDirectory() as scratch:  # for its lock file: nothing goes to the user's cache
            table = datasets.load_dataset(
                "csv",
                data_files=glob.escape(str(path)),
                split="train",
                streaming=True,
                cache_dir=scratch,
                sep=delimiter,
                keep_default_na=False,
                # All text, or 05 would be 5.
                features=datasets.Features({name: datasets.Value("string") for name in names}),
            )
        yield from _records(table)
    except UserError:
        raise
    except Exception as error:
        mend = "; save it as UTF-8" if "codec can't decode" in str(error) else ""
        raise UserError(f"{path} cannot be read as CSV in UTF-8: {_line(error)}{mend}") from None


_DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab"}


def _first_rows(path: Path, delimiter: str) -> tuple[list[str] | None, list[str]]:
    """Header and first row."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = (row for row in csv.reader(file, delimiter=delimiter) if row)
        return next(rows, None), next(rows, [])


def _csv_columns(path: Path) -> tuple[list[str], str]:
    """The header and the delimiter: a comma, or what spreadsheets write in its place where the header has
    none. Raises `UserError` where the first row has more fields: pandas would shift all columns."""
    found = {delimiter: _first_rows(path, delimiter) for delimiter in _DELIMITERS}
    delimiter = next((d for d, (header, _) in found.items() if header and len(header) > 1), ",")
    header, first = found[delimiter]
    if header is None:
        raise UserError(f"{path} is empty: its first line must name the columns")
    if len(set(header)) < len(header):
        raise UserError(f"{path} names a column twice in its first line: {', '.join(header)}")
    if len(first) > len(header):
        raise UserError(
            f"{path}: the first row has {len(first)} fields, the header {len(header)}: put values that "
            f"hold a {_DELIMITERS[delimiter]} in double quotes"
        )
    return header, delimiter


def _hub_name(source: str) -> tuple[str, str | None, str]:
    """Repository, configuration and split of `hub:OWNER/NAME`, `hub:...:SPLIT` or `hub:...:CONFIG:SPLIT`."""
    name, *rest = source.removeprefix("hub:").split(":")
    if len(rest) > 2 or not all([*name.split("/"), *rest]) or name.count("/") != 1:
        raise UserError(
            f"data source {source!r} must be hub:OWNER/NAME, hub:OWNER/NAME:SPLIT or "
            f"hub:OWNER/NAME:CONFIG:SPLIT"
        )
    return name, rest[0] if len(rest) == 2 else None, rest[-1] if rest else "train"


def _read_hub(source: str, name: str, config: str | None, split: str) -> Iterator[dict]:
    datasets = _import_datasets(source)
    try:
        yield from _records(datasets.load_dataset(name, config, split=split, streaming=True))
    except ConnectionError as error:
        raise UserError(
            f"{source} cannot be reached: {_line(error)}; with no network, download it elsewhere and give "
            f"the file"
        ) from None
    except Exception as error:  # a dozen kinds, from an unknown name or split to a broken file
        raise UserError(f"{source} cannot be read from the hub: {_line(error)}") from None


def _records(table: Any) -> Iterator[dict]:
    """Records of an `IterableDataset`, by way of Arrow batches: ten times as fast as one by one."""
    for batch in table.with_format("arrow").iter(batch_size=BATCH_ROWS):
        yield from batch.to_pylist()


def _import_datasets(source: object) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{source} needs datasets: pip install 'dapo-kernels[train]'") from error
    return datasets


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
