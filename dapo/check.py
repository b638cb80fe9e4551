"""`dapo data check`: what the reward will be able to see in a data file, before training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .answer_classes import CLASSES, WORKED_SOLUTION, AnswerClass, classify, gold, same_answer
from .data_sets import GSM8K_TEMPLATE, MATH_TEMPLATE
from .errors import UserError
from .records import as_text, check_prompt, column, counted, find_columns, open_records, prompt_key
from .rewards.scorer import PER_ROW
from .row_modes import check_mode, known_mode, mode_of_row, other_modes_note

if TYPE_CHECKING:
    from rich.table import Table

DEFAULT_MODE = "math"
MAX_EXAMPLES = 5
MEANINGS = {
    "integer": "a whole number",
    "number": "a decimal or simple fraction",
    "expression": "one closed form",
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


@dataclass(frozen=True)
class Conflict:
    """A prompt whose copies disagree: its first row, and the first that gives another answer."""

    prompt: str
    rows: tuple[int, int]
    answers: tuple[str, str]

    def __str__(self) -> str:
        (row, other_row), (answer, other) = self.rows, self.answers
        return (
            f'"{_short(self.prompt, 60)}": {_short(answer) or "none"} in row {row}, '
            f"{_short(other) or 'none'} in row {other_row}"
        )


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
    conflicting: list[Conflict]
    groups: dict[AnswerClass, Group]
    modes: set[str]
    """That judge."""
    note: str = ""
    """On modes that rows name and nobody asked for."""

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
    source: str, mode: str | None = None, prompt_column: str | None = None, answer_column: str | None = None
) -> Report:
    """Reads a file or hub data set and classifies its answers.

    Args:
        mode: how rewards judge, `reward.mode`; None: by `math`, with a note where rows name other modes.
        prompt_column, answer_column: found by themselves where they have usual names.

    Raises:
        UserError: for what cannot be read, unknown columns and modes, and a source without rows.
    """
    used = mode or DEFAULT_MODE
    check_mode(used, "--mode", per_row=True)
    answers: dict[tuple[str, str], list[int]] = {}  # by answer and mode: rows and first row of each
    copies = _Copies()
    modes: set[str] = set()
    named: set[str] = set()
    columns = ("", "")
    number = 0
    for number, record in enumerate(open_records(source)(), start=1):
        where = f"{source} row {number}"
        if number == 1:
            columns = find_columns(record, prompt_column, answer_column, where)
        prompt = column(record, columns[0], "--prompt-column", where)
        answer = column(record, columns[1], "--answer-column", where)
        row_mode = mode_of_row(record, where) if used == PER_ROW else used
        if row_mode not in modes:
            check_mode(row_mode, f"{where}: {PER_ROW}")  # a function may not be there
            modes.add(row_mode)
        answer = "" if answer is None else gold(as_text(answer), row_mode)
        answers.setdefault((answer, row_mode), [0, number])[0] += 1
        if prompt is not None:
            check_prompt(prompt, columns[0], where)
        copies.add(prompt, answer, number)
        if mode is None and (known := known_mode(record)):
            named.add(known)
    if not number:
        raise UserError(f"{source} holds no rows")
    return Report(
        source,
        used,
        columns,
        rows=number,
        prompts=len(copies.first),
        empty_prompts=copies.empty,
        conflicting=list(copies.conflicting.values()),
        groups=_group(answers),
        modes=modes,
        note=other_modes_note(named, used),
    )


class _Copies:
    """Prompts, and which of them stand with two answers."""

    def __init__(self) -> None:
        self.first: dict[tuple, tuple[str, int]] = {}
        """Answer and row of each."""
        self.conflicting: dict[tuple, Conflict] = {}
        self.empty = 0

    def add(self, prompt: str | list | None, answer: str, number: int) -> None:
        key = () if prompt is None else prompt_key(prompt)
        if not key:
            self.empty += 1
            return
        first, row = self.first.setdefault(key, (answer, number))
        if key not in self.conflicting and not same_answer(first, answer):
            self.conflicting[key] = Conflict(_asked(key), (row, number), (first, answer))


def _asked(key: tuple[str, ...]) -> str:
    """The text of a prompt, without the usual words around a problem, which are the same in all rows."""
    text = " ".join(key[1::2] or key)
    for template in (MATH_TEMPLATE, GSM8K_TEMPLATE):
        text = text.removeprefix(template.partition("{prompt}")[0])
    return text


def _group(answers: dict[tuple[str, str], list[int]]) -> dict[AnswerClass, Group]:
    """Groups of the answers in the order of `CLASSES`, large ones first within a class."""
    groups: dict[AnswerClass, Group] = {}
    for (answer, mode), (rows, first) in answers.items():
        group = groups.setdefault(classify(answer, mode), Group())
        group.rows += rows
        group.answers += 1
        if len(group.examples) < MAX_EXAMPLES:
            group.examples.append((first, answer))
    order = sorted(groups.items(), key=lambda item: (CLASSES.index(item[0].name), -item[1].rows))
    return dict(order)


HEADINGS = ("class", "rows", "share", "answers", "examples (row: answer)")


def _cells(report: Report) -> Iterator[tuple[str, str, str, str, list[str]]]:
    for kind, group in report.groups.items():
        share = f"{100 * group.rows / report.rows:.1f} %"
        examples = [f"{row}: {_short(answer)}" for row, answer in group.examples]
        yield str(kind), str(group.rows), share, str(group.answers), examples


def legend(report: Report) -> list[str]:
    """What each class that occurs means."""
    lines = []
    for name in dict.fromkeys(kind.name for kind in report.groups):
        by_value = name == "expression" and "math" in report.modes
        lines.append(f"{name}: {MEANINGS[name]}" + ("; mode math compares its value" if by_value else ""))
    return lines


def _short(text: str, longest: int = 40) -> str:
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 1] + "…"


def summary(report: Report) -> str:
    """Rows, prompts, copies and conflicts, and what to do about them, in a few lines."""
    prompt, answer = report.columns
    conflicts = counted(len(report.conflicting), "prompt")
    lines = [
        f"{report.source}: {counted(report.rows, 'row')} (prompts in {prompt}, answers in {answer}), "
        f"{counted(report.prompts, 'distinct prompt')}, {counted(report.duplicates, 'duplicate')}, "
        f"{conflicts} with conflicting answers, {counted(report.empty_prompts, 'empty prompt')}; "
        f"judged by {_judges(report)}"
    ]
    if report.note:
        lines.append(f"Note: {report.note}.")
    if report.conflicting:
        lines.append(
            "Conflicting answers, for example:" if len(report.conflicting) > 1 else "Conflicting answers:"
        )
        lines += [f"- {conflict}" for conflict in report.conflicting[:MAX_EXAMPLES]]
    if any(kind.reason == WORKED_SOLUTION for kind in report.groups):
        lines.append(
            "Whole solutions that end in `#### answer`: take --mode gsm8k, or cut them by `dapo data prepare "
            "gsm8k --from FILE OUT`."
        )
    if not report.comparable:
        lines.append("Nothing here can be compared: no response could earn the reward.")
    return "\n".join(lines)


def _judges(report: Report) -> str:
    if report.mode != PER_ROW:
        return f"mode {report.mode}"
    return f"the mode that each row names in {PER_ROW} ({', '.join(sorted(report.modes))})"


def to_table(report: Report) -> Table:
    """The classes for a terminal of 80 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for heading in HEADINGS:
        number = heading in ("rows", "share", "answers")
        table.add_column(heading, justify="right" if number else "left", no_wrap=number)
    table.columns[0].max_width = 24  # "ambiguous: tuple or open interval" goes on in a second line
    table.columns[-1].overflow = "fold"
    for *cells, examples in _cells(report):
        table.add_row(*cells, "\n".join(examples))
    return table


def to_markdown(report: Report) -> str:
    """The same as a page."""
    lines = [
        "# Answers", "", summary(report), "",
        f"| {' | '.join(HEADINGS)} |",
        "|---|--:|--:|--:|---|",
    ]  # fmt: skip
    for *cells, examples in _cells(report):
        shown = "<br>".join(_code(example) for example in examples)
        lines.append(f"| {' | '.join(cells)} | {shown} |")
    lines += ["", *(f"- {line}" for line in legend(report))]
    return "\n".join(lines) + "\n"


def _code(example: str) -> str:
    """An example that Markdown leaves as it is, in a table."""
    row, _, answer = example.partition(": ")
    if not answer:
        return row
    answer = answer.replace("|", "\\|")
    return f"{row}: `` {answer} ``" if "`" in answer else f"{row}: `{answer}`"
