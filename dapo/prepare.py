"""`dapo data prepare`: data sets to one file of DAPO-Math-17k's schema, each prompt once."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from .answer_classes import COMPARABLE, classify, same_answer
from .data_sets import DataSet, find_data_set
from .errors import UserError
from .files import replacing
from .records import as_text, check_prompt, column, find_columns, has_column, open_records, prompt_key
from .row_modes import check_mode


@dataclass(frozen=True)
class Options:
    """What the command line says; None leaves a data set's own."""

    local: str | None = None
    """`--from`: a file to read a known data set from, in place of the hub."""
    split: str | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    template: str | None = None
    data_source: str | None = None
    keep_duplicates: bool = False
    keep_conflicts: bool = False
    answers: Literal["all", "comparable", "integer"] = "all"
    shuffle: int | None = None
    """Seed."""
    limit: int | None = None
    force: bool = False
    """Replace a file that is there."""


@dataclass
class Counts:
    """Where the rows went: all that are read are written or dropped for one reason."""

    read: int = 0
    unique: int = 0
    """Distinct prompts, of rows that have both prompt and answer."""
    conflicts: int = 0
    """Prompts whose copies disagree on the answer."""
    empty_prompts: int = 0
    empty_answers: int = 0
    conflicting: int = 0
    """Rows of conflicting prompts that were dropped."""
    duplicates: int = 0
    other_answers: int = 0
    """Rows whose answers are not of the wanted class."""
    beyond_limit: int = 0
    written: int = 0

    def lines(self) -> list[tuple[str, int]]:
        """What to show: names and numbers, without rows that were not dropped."""
        names = {
            "rows read": self.read,
            "distinct prompts": self.unique,
            "prompts with conflicting answers": self.conflicts,
            "dropped: empty prompt": self.empty_prompts,
            "dropped: empty answer": self.empty_answers,
            "dropped: conflicting answers": self.conflicting,
            "dropped: duplicate": self.duplicates,
            "dropped: other kind of answer": self.other_answers,
            "dropped: beyond --limit": self.beyond_limit,
            "rows written": self.written,
        }
        return [(name, count) for name, count in names.items() if count or not name.startswith("dropped")]


@dataclass
class _Problem:
    """The rows of one prompt: all, or just the first."""

    answer: str
    """The first copy's."""
    rows: list[dict]
    copies: int = 1
    conflicting: bool = False


def prepare(names: list[str], out: Path, options: Options) -> Counts:
    """Reads data sets one after the other and writes their rows to `out`, as a whole or not at all.

    Args:
        names: of known data sets, files, or `hub:` sources.
        out: a `.parquet` or `.jsonl` file; its folder is made.

    Raises:
        UserError: for wrong names and options, an `out` that exists, what cannot be read, and when no row
            is left.
    """
    if out.suffix not in (".parquet", ".jsonl"):
        raise UserError(f"OUT, the last name, must end in .parquet or .jsonl, got {out}")
    if out.exists() and not options.force:
        raise UserError(
            f"OUT {out} exists: --force replaces it; if it is a file to read, name the file to write after it"
        )
    if options.local is not None and len(names) > 1:
        raise UserError(f"--from takes one data set, got {', '.join(names)}")
    data_sets = {
        name: _configured(find_data_set(name, options.local, options.split), options) for name in names
    }
    counts = Counts()
    problems: dict[tuple, _Problem] = {}
    for name, data_set in data_sets.items():
        _collect(_rows(name, data_set, counts), problems, options.keep_duplicates)
    rows = _choose(problems, options, counts)
    if not rows:
        raise UserError(f"no row is left to write: {', '.join(f'{name} {n}' for name, n in counts.lines())}")
    out.parent.mkdir(parents=True, exist_ok=True)
    _write(rows, out)
    return counts


def _configured(data_set: DataSet, options: Options) -> DataSet:
    keys = ("prompt_column", "answer_column", "template", "data_source")
    given = {key: getattr(options, key) for key in keys if getattr(options, key) is not None}
    data_set = replace(data_set, **given)
    if "{prompt}" not in data_set.template:
        raise UserError(f"--template must contain {{prompt}}, got {data_set.template!r}")
    if options.data_source is not None:
        check_mode(data_set.data_source, "--data-source")
    return data_set


def _rows(name: str, data_set: DataSet, counts: Counts) -> Iterator[tuple[tuple, str, Callable[[], dict]]]:
    """Prompt's key, answer and how to make the row to write, of all records that have prompt and answer."""
    columns = ("", "")
    for number, record in enumerate(open_records(data_set.source)(), start=1):
        counts.read += 1
        where = f"{data_set.source} row {number}"
        if number == 1:
            columns = find_columns(record, data_set.prompt_column, data_set.answer_column, where)
        prompt = column(record, columns[0], "--prompt-column", where)
        answer = column(record, columns[1], "--answer-column", where)
        answer = "" if answer is None else as_text(answer).strip()
        if data_set.after_marker:
            _, marker, tail = answer.rpartition("####")
            answer = tail.strip() if marker else ""
        if prompt is not None:
            check_prompt(prompt, columns[0], where)
        if prompt is None or not prompt_key(prompt):
            counts.empty_prompts += 1
        elif not answer:
            counts.empty_answers += 1
        else:
            messages = _messages(prompt, data_set.template, where)
            origin = {"source": name, "row": number}
            make = functools.partial(_row, record, messages, answer, data_set.data_source, origin)
            yield prompt_key(messages), answer, make


def _row(record: dict, messages: list[dict], answer: str, data_source: str, origin: dict) -> dict:
    return {
        "data_source": data_source,
        "prompt": messages,
        "ability": str(record.get("ability") or "MATH"),
        "reward_model": {
            "ground_truth": answer,
            "style": str(_nested(record, "reward_model.style", "rule")),
        },
        "extra_info": {"index": str(_nested(record, "extra_info.index", origin["row"])), **origin},
    }


def _messages(prompt: str | list[dict], template: str, where: str) -> list[dict]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": template.replace("{prompt}", prompt)}]
    if not all(isinstance(message["content"], str) for message in prompt):
        raise UserError(f"{where}: the contents of messages must be strings, got {prompt!r:.80}")
    return [{"role": message["role"], "content": message["content"]} for message in prompt]


def _nested(record: dict, name: str, default: Any) -> Any:
    value = column(record, name, "", "") if has_column(record, name) else None
    return default if value is None else value


def _collect(
    rows: Iterator[tuple[tuple, str, Callable[[], dict]]],
    problems: dict[tuple, _Problem],
    keep_duplicates: bool,
) -> None:
    """Adds rows to the problems there are. Memory: the distinct prompts', unless duplicates are kept."""
    for key, answer, make in rows:
        problem = problems.get(key)
        if problem is None:
            problems[key] = _Problem(answer, [make()])
            continue
        problem.copies += 1
        if not same_answer(problem.answer, answer):
            problem.conflicting = True
        if keep_duplicates:
            problem.rows.append(make() | {"prompt": problem.rows[0]["prompt"]})


def _answer(row: dict) -> str:
    return row["reward_model"]["ground_truth"]


def _choose(problems: dict[tuple, _Problem], options: Options, counts: Counts) -> list[dict]:
    """The rows to write; counts the others."""
    rows: list[dict] = []
    counts.unique = len(problems)
    for problem in problems.values():
        counts.conflicts += problem.conflicting
        if problem.conflicting and not options.keep_conflicts:
            counts.conflicting += problem.copies
            continue
        counts.duplicates += problem.copies - len(problem.rows)
        rows += problem.rows
    if options.answers != "all":
        wanted = ("integer",) if options.answers == "integer" else COMPARABLE
        pairs = {(_answer(row), row["data_source"]) for row in rows}
        good = {pair for pair in pairs if classify(*pair).name in wanted}
        counts.other_answers = len(rows)
        rows = [row for row in rows if (_answer(row), row["data_source"]) in good]
        counts.other_answers -= len(rows)
    if options.shuffle is not None:
        random.Random(options.shuffle).shuffle(rows)
    if options.limit is not None:
        counts.beyond_limit = max(0, len(rows) - options.limit)
        rows = rows[: options.limit]
    counts.written = len(rows)
    return rows


def _write(rows: list[dict], out: Path) -> None:
    try:
        with replacing(out) as temp:
            if out.suffix == ".jsonl":
                with temp.open("w", encoding="utf-8") as file:
                    file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            else:
                _write_parquet(rows, temp)
    except UnicodeEncodeError as error:  # half of a surrogate pair, from a cut JSON escape
        raise UserError(f"a prompt or answer is not valid Unicode: {error.object!r:.80}") from None


def _write_parquet(rows: list[dict], path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    text, struct = pa.string(), pa.struct
    schema = pa.schema(
        {
            "data_source": text,
            "prompt": pa.list_(struct({"content": text, "role": text})),
            "ability": text,
            "reward_model": struct({"ground_truth": text, "style": text}),
            "extra_info": struct({"index": text, "source": text, "row": pa.int64()}),
        }
    )
    # Small row groups: readers that take one at a time, as `datasets` does, stay small too.
    parquet.write_table(pa.Table.from_pylist(rows, schema), path, row_group_size=10_000)
