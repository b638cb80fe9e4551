"""The final answer of a response, as a careful person would find it.

The last of the explicit answers counts: `Answer: ...`, a heading "Answer", `<answer>` tags, `\\boxed{...}`.
Where there is none, the last "the answer is ..."; and else a response that is nothing but one value. Every
scan takes time linear in the response.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

MAX_OCCURRENCES = 100
"""Of a marker, looked at from the end."""
MAX_ANSWER = 2000
"""Characters of an answer: what is longer is none."""

_END_OF_TURN = re.compile(
    r"<\|(?:im_end|endoftext|eot_id|end_of_text|end|eom_id|return)\|>|<｜end▁of▁sentence｜>|</s>|<eos>"
    r"|<end_of_turn>"
)
# Matched where "nswer" stands. "Answer:", "**Answer**: ", "Answer (in cm):", "answer = ".
_COLON = re.compile(r"nswer(?:s|\(s\))?[*_\s]{0,4}(?:\([^()\n]{0,30}\))?[*_\s]{0,4}[:：=][*_ \t]{0,6}", re.I)
_HEADING = re.compile(r"nswer[ \t#*_]{0,8}(?=\n)", re.I)
_HEADING_BEFORE = re.compile(r"(?:^|\n)[ \t#*_>]{0,12}(?:(?:the|my)[ \t]+)?(?:final[ \t]+)?a\Z", re.I)
_IS = re.compile(
    r"nswer(?:\s+(?:to|of|for)\s[^\n.:=]{1,60}?)?\s+(?:is|was|are|(?:must|should|would|will) be)\b[:：]?",
    re.I,
)
_BRACE = re.compile(r"\\[{}]|[{}]")
# What may stand between two boxes that are alternatives.
_BETWEEN = re.compile(r"[\s$.\\()\[\]*]*(?:,|;|or|and|\\text\{\s*(?:or|and)\s*\})[\s$\\()\[\]*]*", re.I)
_OPENERS = {"\\[": "\\]", "$$": "$$", "$": "$", "\\(": "\\)"}
_WRAPPERS = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|fbox|displaystyle|bf|rm)\b\s*")
_SPACE_AT_END = re.compile(r"(?:\\[,;:! ]|\\q?quad|\\\\|[|?\s])+\Z")
# After a value: "or 35", ", 35", "/ 35", "± 1", "\text{ or } 35".
_ANOTHER = re.compile(
    r"[\s$)\]}.*_\\]{0,8}(?:(?<![A-Za-z])(?:or|and|to|through)(?![A-Za-z])|[,;/|&±–]|pm(?![A-Za-z])"
    r"|text\{\s*(?:or|and)\s*\})\s{0,3}(?:(?:maybe|perhaps|possibly|also|else|even)\s)?"
    r"[\s$(\[{*_\\]{0,8}[-−+]?(?:\.?\d|f?boxed|d?frac|sqrt)",
    re.I,
)
_OR_LATER = re.compile(r"(?<![A-Za-z])or(?![A-Za-z])[^.\n\d]{0,20}\d", re.I)


@dataclass(frozen=True)
class Reading:
    """What a response answers."""

    text: str
    """The answer without delimiters and markdown; prose may follow it."""
    several: bool = False
    """More than one answer is on offer."""


def read_answer(response: str) -> Reading | None:
    """The final answer of a response; None where there is none."""
    response = _END_OF_TURN.split(response, maxsplit=1)[0]
    response = response.rpartition("</think>")[2]
    colon, sentence = _last_markers(response)
    tag, box = _last_tag(response), _last_box(response)
    explicit = max(colon, tag)
    if box is not None and box[0] > explicit:
        line_end = _line(response, explicit)[1] if explicit >= 0 else -1
        if box[0] >= line_end:
            return _read_boxes(response, box)
    if explicit >= 0:
        return _read_line(response, explicit)
    return _read_line(response, sentence) if sentence >= 0 else _read_last_line(response)


def has_prose(text: str) -> bool:
    """Whether words stand in a text that are neither LaTeX commands nor names of functions."""
    text = re.sub(r"\\(?:begin|end|operatorname|text[a-z]*|math[a-z]*)\*?\{[^{}]*\}", " ", text)
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text)
    return any(word.lower() not in _FUNCTIONS for word in words)


_FUNCTIONS = {
    "pi",
    "sqrt",
    "sin",
    "cos",
    "tan",
    "cot",
    "log",
    "ln",
    "exp",
    "arcsin",
    "arccos",
    "arctan",
    "inf",
}


def unwrap(text: str) -> str:
    """A value without what only dresses it: markdown, LaTeX delimiters, `\\text{}`, trailing punctuation."""
    for _ in range(10):
        before = text
        text = _SPACE_AT_END.sub("", text.strip(" \t\r\n*_`~\u00a0")).rstrip(".,;:。")
        if text.startswith("}") or (text.endswith("}") and text.count("}") > text.count("{")):
            text = text[1:] if text.startswith("}") else text[:-1]
        for opener, closer in _OPENERS.items():
            if text.startswith(opener) and len(text) > len(opener):
                inner, _, rest = text[len(opener) :].partition(closer)
                if not rest and text.endswith(closer):
                    text = inner
        wrapper = _WRAPPERS.match(text)
        if wrapper:
            text = _inside_braces(text, wrapper.end())
        if text == before:
            break
    return text


def _inside_braces(text: str, start: int) -> str:
    """`{...}` from `start` on without its braces; unchanged when something follows them."""
    if text[start : start + 1] != "{":
        return text[start:]
    end = _closing(text, start)
    return text[start + 1 : end] if end == len(text) - 1 else text


def _occurrences(text: str, word: str) -> Iterator[int]:
    """Where a word stands, the last first, in lower or upper case."""
    ends = {word: len(text), word.upper(): len(text)}
    for _ in range(MAX_OCCURRENCES):
        found = {w: text.rfind(w, 0, end) for w, end in ends.items()}
        last = max(found, key=found.__getitem__)
        if found[last] < 0:
            return
        yield found[last]
        ends[last] = found[last]


def _last_markers(text: str) -> tuple[int, int]:
    """Where the content begins of the last "Answer:" or heading, and of the last "answer is"; -1 for none."""
    sentence = first_sentence = -1
    for start in _occurrences(text, "nswer"):
        if start == 0 or text[start - 1] not in "aA" or (start > 1 and text[start - 2].isalpha()):
            continue
        explicit = _COLON.match(text, start)
        heading = None if explicit else _HEADING.match(text, start)
        if heading and not _HEADING_BEFORE.search(text[max(0, start - 40) : start]):
            heading = None
        if explicit or heading:
            return (explicit or heading).end(), sentence
        said = _IS.match(text, start)
        if said and sentence < 0:
            first_sentence = max(first_sentence, said.end())
            if any(c.isdigit() or c in "\\$" for c in text[said.end() : said.end() + 200].split("\n")[0]):
                sentence = said.end()  # "I hope the answer is clear" says none
    return -1, sentence if sentence >= 0 else first_sentence


def _last_tag(text: str) -> int:
    start = text.rfind("<answer>")
    return start + len("<answer>") if start >= 0 else -1


def _last_box(text: str, end: int | None = None) -> tuple[int, int, str] | None:
    """Start, end and content of the last complete `\\boxed{...}`."""
    start = len(text) if end is None else end
    for _ in range(MAX_OCCURRENCES):
        start = text.rfind("boxed", 0, start)
        if start < 0:
            return None
        brace = start + len("boxed")
        while text[brace : brace + 1] == " ":
            brace += 1
        if text[brace : brace + 1] != "{":
            continue
        closing = _closing(text, brace)
        if closing >= 0:
            return start, closing + 1, text[brace + 1 : closing]
    return None


def _closing(text: str, brace: int) -> int:
    """Where the brace that opens at `brace` closes, -1 when it does not within `MAX_ANSWER` characters."""
    depth = 0
    for match in _BRACE.finditer(text, brace, brace + MAX_ANSWER):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return -1


def _line(text: str, start: int) -> tuple[int, int]:
    """The line that answers: the rest of this one, or where it is blank the next; display math as a whole."""
    while start < len(text) and text[start] in " \t\r\n*_>`#}":
        start += 1
    newline = text.find("\n", start)
    end = len(text) if newline < 0 else newline
    opener = text[start:end].strip(" \t\r*_")
    if opener in _OPENERS:
        closing = text.find(_OPENERS[opener], end)
        if 0 <= closing < end + MAX_ANSWER:
            end = closing + len(_OPENERS[opener])
    return start, end


def _read_line(text: str, start: int) -> Reading | None:
    start, end = _line(text, start)
    box = _last_box(text, end)
    if box is not None and box[0] >= start:
        return _read_boxes(text, box)
    line = text[start:end].split("</answer>")[0][: MAX_ANSWER + 1]
    value = " ".join(unwrap(line).split())
    if not value:
        return None
    after = text[end : end + 100].lstrip()
    return Reading(value, several=_OR_LATER.match(after) is not None)


def _read_boxes(text: str, box: tuple[int, int, str]) -> Reading:
    """The last box, with those before it that are alternatives to it, and what stands behind it."""
    values = [unwrap(box[2])]
    several = _ANOTHER.match(text, box[1]) is not None
    start = box[0]
    while len(values) < 10:
        other = _last_box(text, start)
        if other is None or not _BETWEEN.fullmatch(
            text[other[1] : start].removesuffix("f").removesuffix("\\")
        ):
            break
        values.insert(0, unwrap(other[2]))
        start = other[0]
    distinct = list(dict.fromkeys(values))
    return Reading(", ".join(distinct), several=several or len(distinct) > 1)


def _read_last_line(response: str) -> Reading | None:
    """A response that is one value, or ends in one behind GSM8K's `####`."""
    text = response.strip()
    last = text[max(text.rfind("\n") + 1, len(text) - MAX_ANSWER - 1) :]
    if last.startswith("####"):
        last = last[4:]
    elif last != text:
        return None
    value = unwrap(last)
    return None if not value or len(last) > MAX_ANSWER or has_prose(value) else Reading(value)
