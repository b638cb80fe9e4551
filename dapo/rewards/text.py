"""Taking off what only dresses an answer: delimiters, markdown, markup, invisible characters."""

from __future__ import annotations

import re
from collections.abc import Iterator

MAX_ANSWER = 2000
"""Characters of an answer: what is longer is none."""
MAX_OCCURRENCES = 100
"""Of a marker, looked at from the end."""

_INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff"))
_TAG = re.compile(r"</?[A-Za-z][^<>\n]{0,40}>")
_COLOR = re.compile(r"\\(?:text)?color\s*\{\w{0,20}\}")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\{(?:align|gather|equation|aligned|split)\*?\}|(?<!\\)&")
_BRACE = re.compile(r"\\[{}]|[{}]")
_WRAPPERS = re.compile(
    r"\\(?:text|textbf|textit|mathrm|mathbf|mathit|mbox|fbox|boxed|framebox|underline|displaystyle|bf|rm)\b\s*"
)
_LATEX_SPACES = ("\\,", "\\;", "\\:", "\\!", "\\ ", "\\quad", "\\qquad", "\\\\", "\\square", "\\blacksquare")
OPENERS = {"\\[": "\\]", "$$": "$$", "$": "$", "\\(": "\\)"}
QUOTES = "\"'“”‘’"


def unwrap(text: str) -> str:
    """A value without what only dresses it: markdown, markup, LaTeX delimiters, `\\text{}`, punctuation
    behind."""
    text = _TAG.sub("", _COLOR.sub("", text.translate(_INVISIBLE)))
    for _ in range(10):
        before = text
        text = _strip_end(text.strip(" \t\r\n*`\u00a0" + QUOTES).removesuffix("_"))
        if text.startswith("}") or (text.endswith("}") and text.count("}") > text.count("{")):
            text = text[1:] if text.startswith("}") else text[:-1]
        elif text.startswith("{") and closing(text, 0) == len(text) - 1:
            text = text[1:-1]
        for opener, closer in OPENERS.items():
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


def _strip_end(text: str) -> str:
    while True:
        shorter = text.rstrip(".,;:。|?✓✅ \t\r\n")
        for space in _LATEX_SPACES:
            if shorter.endswith(space):
                shorter = shorter[: -len(space)]
        if shorter == text:
            return text
        text = shorter


def _inside_braces(text: str, start: int) -> str:
    """`{...}` from `start` on without its braces; unchanged when something follows them."""
    if text[start : start + 1] != "{":
        return text[start:]
    end = closing(text, start)
    return text[start + 1 : end] if end == len(text) - 1 else text


def closing(text: str, brace: int) -> int:
    """Where the brace that opens at `brace` closes, -1 when it does not within `MAX_ANSWER` characters."""
    depth = 0
    for match in _BRACE.finditer(text, brace, brace + MAX_ANSWER):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return -1


def one_line(text: str) -> str:
    """An answer over several lines, such as an align environment, as one."""
    if "\\begin{" in text:
        flat = _ENVIRONMENT.sub(" ", text)
        if "\\begin{" not in flat:  # a matrix keeps its rows
            text = flat.replace("\\\\", " ")
    return " ".join(text.split())


def occurrences(text: str, word: str, end: int | None = None) -> Iterator[int]:
    """Where a word stands, the last first, in lower or upper case."""
    stop = len(text) if end is None else end
    ends = {word: stop, word.upper(): stop}
    for _ in range(MAX_OCCURRENCES):
        found = {w: text.rfind(w, 0, e) for w, e in ends.items()}
        last = max(found, key=found.__getitem__)
        if found[last] < 0:
            return
        yield found[last]
        ends[last] = found[last]


_FUNCTIONS = frozenset(
    ("pi", "sqrt", "sin", "cos", "tan", "cot", "log", "ln", "exp", "arcsin", "arccos", "arctan", "inf")
)


def has_prose(text: str) -> bool:
    """Whether words stand in a text that are neither LaTeX commands nor names of functions."""
    text = re.sub(r"\\(?:begin|end|operatorname|text[a-z]*|math[a-z]*)\*?\{[^{}]*\}", " ", text)
    words = re.findall(r"(?<![\\A-Za-z])[A-Za-z]{2,}", text)
    return any(word.lower() not in _FUNCTIONS for word in words)
