"""`dapo data check`: what the reward will be able to see in a data file, before training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .answer_classes import CLASSES, WORKED_SOLUTION, AnswerClass, check_mode, classify, gold, same_answer
from .errors import UserError
from .records import as_text, check_prompt, column, find_columns, open_records, prompt_key

if TYPE_CHECKING:
    from rich.table import Table

MAX_EXAMPLES = 5
MEANINGS = {
    "integer": "a whole number",
    "number": "a decimal or simple fraction",
    "expression": "one closed form; mode math compares its value",
    "choice": "a single letter",
    "text": "compared by its spelling",
    "ambiguous": "may be read in more than one way",
    "unverifiable": "even the answer itself earns no reward",
    "empty": "no answer",
}


@dataclass
class Group:
    """The answers of one class."""

    rows: int = 0
    answers: int = 0
    """Distinct ones."""
    examples: list[tuple[int, str]] = field(default_factory=list)
    """Row, counted from 1, and answer."""


@dataclass
class Report:
    source: str
    mode: str
    columns: tuple[str, str]
    """Of prompt and answer."""
    rows: int
    prompts: int
    """Distinct ones; empty ones do not count."""
    empty_prompts: int
    conflicting: list[int]
    """For each prompt whose copies disagree on the answer, the first row that does."""
    groups: dict[AnswerClass, Group]

    @property
    def duplicates(self) -> int:
        """Rows that repeat a prompt."""
        return self.rows - self.prompts - self.empty_prompts

    @property
    def comparable(self) -> int:
        """Rows whose answer can be given at all."""
        lost = ("unverifiable", "empty")
        return sum(group.rows for kind, group in self.groups.items() if kind.name not in lost)


def check(
    source: str, mode: str = "math", prompt_column: str | None = None, answer_column: str | None = None
) -> Report:
    """Reads a file or hub data set and classifies its answers.

    Args:
        mode: how rewards judge, `reward.mode`.
        prompt_column, answer_column: found by themselves where they have usual names.

    Raises:
        UserError: for what cannot be read, unknown columns and modes, and a source without rows.
    """
    check_mode(mode, "--mode")
    answers: dict[str, list[int]] = {}  # rows and first row of each
    prompts: dict[tuple, str] = {}
    conflicting: dict[tuple, int] = {}
    number = empty = 0
    columns = ("", "")
    for number, record in enumerate(open_records(source)(), start=1):
        where = f"{source} row {number}"
        if number == 1:
            columns = find_columns(record, prompt_column, answer_column, where)
        prompt = column(record, columns[0], "--prompt-column", where)
        answer = column(record, columns[1], "--answer-column", where)
        answer = "" if answer is None else gold(as_text(answer), mode)
        answers.setdefault(answer, [0, number])[0] += 1
        if prompt is not None:
            check_prompt(prompt, columns[0], where)
        key = () if prompt is None else prompt_key(prompt)
        if not key:
            empty += 1
        elif not same_answer(prompts.setdefault(key, answer), answer):
            conflicting.setdefault(key, number)
    if not number:
        raise UserError(f"{source} holds no rows")
    groups = _group(answers, mode)
    return Report(source, mode, columns, number, len(prompts), empty, list(conflicting.values()), groups)


def _group(answers: dict[str, list[int]], mode: str) -> dict[AnswerClass, Group]:
    """Groups of the answers in the order of `CLASSES`, large ones first within a class."""
    groups: dict[AnswerClass, Group] = {}
    for answer, (rows, first) in answers.items():
        group = groups.setdefault(classify(answer, mode), Group())
        group.rows += rows
        group.answers += 1
        if len(group.examples) < MAX_EXAMPLES:
            group.examples.append((first, answer))
    order = sorted(groups.items(), key=lambda item: (CLASSES.index(item[0].name), -item[1].rows))
    return dict(order)


HEADINGS = ("class", "rows", "share", "answers", "what it means", "examples (row: answer)")


def _cells(report: Report) -> Iterator[tuple[str, str, str, str, str, list[str]]]:
    for kind, group in report.groups.items():
        share = f"{100 * group.rows / report.rows:.1f} %"
        examples = [f"{row}: {_short(answer)}" for row, answer in group.examples]
        yield str(kind), str(group.rows), share, str(group.answers), MEANINGS[kind.name], examples


def _short(answer: str) -> str:
    text = " ".join(answer.split())
    return text if len(text) <= 40 else text[:39] + "…"


def summary(report: Report) -> str:
    """Rows, prompts, copies and conflicts, in one or two lines."""
    prompt, answer = report.columns
    lines = [
        f"{report.source}: {report.rows} rows (prompts in {prompt}, answers in {answer}), "
        f"{report.prompts} distinct prompts, {report.duplicates} duplicates, "
        f"{len(report.conflicting)} prompts with conflicting answers, {report.empty_prompts} empty prompts; "
        f"judged by mode {report.mode}"
    ]
    if report.conflicting:
        rows = ", ".join(map(str, report.conflicting[:MAX_EXAMPLES]))
        lines.append(f"Conflicting answers, for example in rows {rows}.")
    if any(kind.reason == WORKED_SOLUTION for kind in report.groups):
        lines.append(
            "Whole solutions that end in `#### answer`: take --mode gsm8k, or cut them by `dapo data prepare "
            "gsm8k --from FILE OUT`."
        )
    if not report.comparable:
        lines.append("Nothing here can be compared: no response could earn the reward.")
    return "\n".join(lines)


def to_table(report: Report) -> Table:
    """The classes for a terminal."""
    from rich.table import Table

    table = Table()
    for heading in HEADINGS:
        table.add_column(heading, justify="right" if heading in ("rows", "share", "answers") else "left")
    for *cells, examples in _cells(report):
        table.add_row(*cells, "\n".join(examples))
    return table


def to_markdown(report: Report) -> str:
    """The same as a page."""
    lines = [
        "# Answers", "", summary(report), "",
        f"| {' | '.join(HEADINGS)} |",
        "|---|--:|--:|--:|---|---|",
    ]  # fmt: skip
    for *cells, examples in _cells(report):
        shown = "<br>".join(_code(example) for example in examples)
        lines.append(f"| {' | '.join(cells)} | {shown} |")
    return "\n".join(lines) + "\n"


def _code(example: str) -> str:
    """An example that Markdown leaves as it is, in a table."""
    row, _, answer = example.partition(": ")
    if not answer:
        return row
    answer = answer.replace("|", "\\|")
    return f"{row}: `` {answer} ``" if "`" in answer else f"{row}: `{answer}`"
