"""The final answer of a response, as a careful person would find it.

The last explicit answer counts: `Answer: ...`, a heading "Answer", `<answer>` tags, `\\boxed{...}`. Where
there is none, the last "the answer is ..."; and else a last line that is nothing but one value set apart.
Every scan takes time linear in the response.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from .numbers import exact_value
from .text import MAX_ANSWER, OPENERS, closing, has_prose, occurrences, one_line, unwrap

_END_OF_TURN = re.compile(
    r"<\|(?:im_end|endoftext|eot_id|end_of_text|end|eom_id|return)\|>|<｜end▁of▁sentence｜>|</s>|<eos>"
    r"|<end_of_turn>|\[/INST\]"
)
# Matched where "nswer" stands. "Answer:", "**Answer**: ", "Answer (in cm):", "answer = ".
_COLON = re.compile(
    r"nswer(?:s|\(s\))?[*_\s]{0,4}(?:\(in [^()\n]{0,20}\))?[*_\s]{0,4}[:：=][*_ \t]{0,6}", re.I
)
_HEADING = re.compile(r"nswer[ \t#*_]{0,8}(?=\n)", re.I)
_HEADING_BEFORE = re.compile(r"(?:^|\n)[ \t#*_>]{0,12}(?:(?:the|my)[ \t]{1,4})?(?:final[ \t]{1,4})?a\Z", re.I)
_IS = re.compile(
    r"nswer(?:\s{1,4}(?:to|of|for)\s[^\n.:=]{1,60}?)?\s{1,4}"
    r"(?:is|was|are|equals|(?:must|should|would|will) be)\b[:：]?",
    re.I,
)
# What makes an answer one that is not given: "wrong answer: 34", "I doubt the answer is", "2 * answer =".
_NOT_GIVEN = re.compile(
    r"\b(?:wrong|incorrect|false|not|non|doubt|if|half|twice|previous|partial|possible)\b[^.\n:]{0,25}\Z"
    r"|\d\s{0,3}[*/+−-]\s{0,3}\Z",
    re.I,
)
_SAYS_SOMETHING = re.compile(r"[^\n]{0,200}?[\d\\$]|[\s*(]{0,4}[A-E][\s*).]{0,4}(?:\n|\Z)")
_VACUOUS = re.compile(
    r"(?:see|as|above|below|this|that|yes|given|shown|stated|must|should|it)\b[^\d\\]*\Z", re.I
)
_DENIED = re.compile(r"[\s$.)]{0,6}(?:is|was)\s{1,3}(?:wrong|incorrect|not)\b", re.I)
# A value that another is offered beside: "or 35" behind it, "34 or" before it.
_ANOTHER = re.compile(
    r"[\s$.)\]}*\\]{0,8}(?:,|;|/|\||\bor\b|\band\b|\blor\b|\bvee\b)[\s$(\[{*_\\]{0,8}[-−+]?\.?\d", re.I
)
_ONE_BEFORE = re.compile(r"\d[\s$)\]}*\\]{0,8}(?:,|;|/|\||\bor\b|\band\b)[\s$(\[{*_\\a-z]{0,12}\Z", re.I)
# What makes another value of a box: -\boxed{34}, 2\boxed{34}, \sqrt{\boxed{34}}; \boxed{34}^2.
_CHANGED_BEFORE = re.compile(
    r"(?:(?:^|[=$(\s])[-−]|\d\s?|[*^_/+]\s?|\\(?:cdot|times|div|sqrt|neq|not|pm)\s?"
    r"|\\(?:sqrt(?:\[\d+\])?|[dt]?frac)\{)\Z"
)
_BULLET = re.compile(r"(?:^|\n)[ \t]*[-*+•]\s+\Z")
_CHANGED_BEHIND = re.compile(
    r"\s{0,2}(?:[\^_!²³½¼¾√‰+*/]|[-−]\s?\d|\\(?:cdot|times|div|pi|sqrt|[dt]?frac|neq|pm)(?![A-Za-z]))"
    r"|[0-9A-Za-z]"
)
_EQUATION_BEFORE = re.compile(r"(?:^|[\s$(])([-−]?\d[\d,.]*)\s?=\s?\Z")
_EQUATION_BEHIND = re.compile(r"\s?=\s?([-−]?\d[\d,.]*)")
_LINES_READ = 4000
"""Characters of context of a box, at most."""


@dataclass(frozen=True)
class Reading:
    """What a response answers."""

    text: str
    """The answer without delimiters and markdown; prose may follow it."""
    hedged: bool = False
    """Something else is offered beside it, or it is taken back."""


@lru_cache(maxsize=8)  # a verdict reads its response more than once
def read_answer(response: str) -> Reading | None:
    """The final answer of a response; None where there is none."""
    response = _visible(response)
    vacuous = None
    for end, reading in _explicit(response):
        if reading is None or not reading.text:
            continue
        if _VACUOUS.match(reading.text):
            vacuous = vacuous or reading
            continue
        return _unless_taken_back(reading, response, end)
    if vacuous is not None:
        return vacuous
    start = next(_sentences(response), None)
    return _read_line(response, start)[1] if start is not None else _read_last_line(response)


def _visible(response: str) -> str:
    """A response without what stands behind an end of turn, within `<think>` and in HTML comments."""
    response = _END_OF_TURN.split(response, maxsplit=1)[0].rpartition("</think>")[2]
    parts = response.split("<!--")
    return parts[0] + "".join(part.partition("-->")[2] for part in parts[1:])


def _explicit(text: str) -> Iterator[tuple[int, Reading | None]]:
    """Explicit answers, the last first, each with where it ends."""
    end = len(text)
    for _ in range(20):
        found = [
            (start, kind)
            for start, kind in (
                (_last_colon(text, end), "colon"),
                (text.rfind("<answer>", 0, end), "tag"),
                (_last_box(text, end), "box"),
            )
            if start >= 0
        ]
        if not found:
            return
        end, kind = max(found)
        yield {"colon": _read_colon, "tag": _read_tag, "box": _read_boxes}[kind](text, end)


def _last_colon(text: str, end: int) -> int:
    """Where the last "Answer:" or heading "Answer" before `end` begins, -1 for none."""
    for start in occurrences(text, "nswer", end):
        if not _is_word(text, start):
            continue
        heading = _HEADING.match(text, start) and _HEADING_BEFORE.search(text[max(0, start - 40) : start])
        if heading or _COLON.match(text, start):
            return start
    return -1


def _is_word(text: str, start: int) -> bool:
    """Whether "answer" is a word there, and not one that is said not to be given."""
    if start == 0 or text[start - 1] not in "aA" or (start > 1 and text[start - 2].isalpha()):
        return False
    return not _NOT_GIVEN.search(text[max(0, start - 60) : start - 1])


def _sentences(text: str) -> Iterator[int]:
    """Where the values of "answer is" begin, the last first."""
    for start in occurrences(text, "nswer"):
        said = _IS.match(text, start) if _is_word(text, start) else None
        # "I hope the answer is clear" says none.
        if said and _SAYS_SOMETHING.match(text[said.end() : said.end() + 200]):
            yield said.end()


def _read_colon(text: str, start: int) -> tuple[int, Reading | None]:
    match = _COLON.match(text, start) or _HEADING.match(text, start)
    end, reading = _read_line(text, match.end())
    line_start = text.rfind("\n", 0, start) + 1
    before = text[line_start:start][-200:]
    if reading and _COLON.search(before) and re.search(r"\d", before):  # "Answer: 35 % Answer: 34"
        reading = Reading(reading.text, hedged=True)
    return end, reading


def _read_tag(text: str, start: int) -> tuple[int, Reading | None]:
    start += len("<answer>")
    content = text[start : start + MAX_ANSWER].partition("</answer>")[0]
    others = text[:start].removesuffix("<answer>").rstrip().endswith("</answer>")
    return start + len(content) + len("</answer>"), Reading(unwrap(one_line(content)), hedged=others)


def _line(text: str, start: int) -> tuple[int, int]:
    """The line that answers: the rest of this one, or where it is blank the next; display math as a whole."""
    while start < len(text) and text[start] in " \t\r*_`#}":
        start += 1
    if text[start : start + 1] == "\n":
        while start < len(text) and text[start] in " \t\r\n*_>`#}":
            start += 1
        if text[start : start + 2] in ("- ", "* ", "• "):
            start += 2
    newline = text.find("\n", start)
    end = len(text) if newline < 0 else newline
    opener = text[start:end].strip(" \t\r*_")
    closer = OPENERS.get(opener) or (opener.startswith("\\begin{") and "\\end{" + opener[7:].split("}")[0])
    if closer:
        closes = text.find(closer, end, end + MAX_ANSWER)
        if closes >= 0:
            end = closes + len(closer) + (1 if closer.startswith("\\end{") else 0)
    return start, end


def _read_line(text: str, start: int) -> tuple[int, Reading | None]:
    start, end = _line(text, start)
    value = unwrap(one_line(text[start:end][: MAX_ANSWER + 1]))
    return end, Reading(value) if value else None


def _last_box(text: str, end: int) -> int:
    """Where the last complete `\\boxed{...}` before `end` begins (at its name), -1 for none."""
    for start in occurrences(text, "boxed", end):
        if _box_end(text, start) >= 0:
            return start
    return -1


def _box_end(text: str, start: int) -> int:
    brace = start + len("boxed")
    while text[brace : brace + 1] == " ":
        brace += 1
    return closing(text, brace) if text[brace : brace + 1] == "{" else -1


def _read_boxes(text: str, start: int) -> tuple[int, Reading]:
    """The last box, with the others of its line: different ones are alternatives, or a list."""
    end = _box_end(text, start)
    line_start = max(text.rfind("\n", 0, start) + 1, start - _LINES_READ)
    values, first = [_content(text, start, end)], start
    while len(values) < 10:
        other = _last_box(text, first)
        if other < 0 or (other < line_start and text[_box_end(text, other) + 1 : first].strip("\\f\n $*.")):
            break
        values.insert(0, _content(text, other, _box_end(text, other)))
        first = other
    distinct = list(dict.fromkeys(values))
    before = text[max(line_start, first - 80) : first].removesuffix("f").removesuffix("\\")
    behind = text[end + 1 : end + 80]
    return end + 1, Reading(", ".join(distinct), hedged=_is_changed(before, behind, distinct[-1]))


def _content(text: str, start: int, end: int) -> str:
    return unwrap(one_line(text[text.index("{", start) + 1 : end]))


def _is_changed(before: str, behind: str, value: str) -> bool:
    """Whether what stands around a box makes its value another one, or offers one beside it."""
    if (_CHANGED_BEFORE.search(before) and not _BULLET.search(before)) or _ONE_BEFORE.search(before):
        return True
    if _CHANGED_BEHIND.match(behind) or _ANOTHER.match(behind):
        return True
    sides = [_EQUATION_BEFORE.search(before), _EQUATION_BEHIND.match(behind.lstrip("$"))]
    return any(side and exact_value(side[1].rstrip(".,")) != exact_value(value) for side in sides)


def _unless_taken_back(reading: Reading, text: str, end: int) -> Reading:
    """The reading, hedged where the text behind it says something else."""
    behind = text[end : end + 400]
    said = next(_sentences(text), -1)
    later = _read_line(text, said)[1] if said > end else None
    lines = [line.strip() for line in behind.split("\n")[1:] if line.strip()]
    following = lines[0] if lines else ""
    if following.lower() == "or" and len(lines) > 1:
        following += " " + lines[1]
    own = _first_number(reading.text)
    another = [later and _first_number(later.text), exact_value(unwrap(following.lstrip("-*• ")))]
    if any(value is not None and own is not None and value != own for value in another):
        return Reading(reading.text, hedged=True)
    if _DENIED.match(behind) or re.match(r"(?:or|and)\b[^.\n]{0,30}[\d\\]", following, re.I):
        return Reading(reading.text, hedged=True)
    return reading


def _first_number(text: str):
    match = re.match(r"[\s$(\\]*([-−]?\d[\d,.]*)", text)
    return exact_value(match[1].rstrip(".,")) if match else None


def _read_last_line(text: str) -> Reading | None:
    """A response that is one value, or ends in one that stands alone in bold, as display math or behind
    GSM8K's `####`."""
    text = text.strip()
    hashes = text.rfind("####")
    if hashes >= 0 and (hashes == 0 or text[hashes - 1] == "\n"):
        last = text[hashes + 4 :].split("\n", 1)[0]
    else:
        last = text[max(text.rfind("\n") + 1, len(text) - MAX_ANSWER - 1) :]
        bare = last == text or (last[:2] == last[-2:] and last[:2] in ("**", "$$")) or last[:2] == "\\["
        if not bare:
            return None
    value = unwrap(last)
    return None if not value or len(last) > MAX_ANSWER or has_prose(value) else Reading(value)
