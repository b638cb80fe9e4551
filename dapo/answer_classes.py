"""What kind of answer a text is, and so how safely a rule can compare others with it.

The paper turns answers into integers so that rules can verify them (section 3.5); this tells which already
are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from .rewards.numbers import NUMBER, exact_value

CLASSES = ("integer", "number", "expression", "choice", "text", "ambiguous", "unverifiable", "empty")
COMPARABLE = ("integer", "number", "expression", "choice")
"""Classes of one value each, which a right response can be compared with safely."""

WORKED_SOLUTION = "worked solution"
"""Reason of an answer column that holds gsm8k's whole solutions."""


@dataclass(frozen=True)
class AnswerClass:
    name: str
    """One of `CLASSES`."""
    reason: str = ""
    """Why an answer is ambiguous; what an unverifiable one looks like."""

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


_DELIMITERS = re.compile(r"\$\$(.*)\$\$|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]|\\f?boxed\s*\{(.*)\}", re.S)
_WORDS = re.compile(r"\\(?:text[a-z]*|math(?:rm|bf|it)|mbox|operatorname)\s*\{([^{}]*)\}")
_SIZES = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])|\\!")
_SPACES = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~|\s+")
_COMMANDS = re.compile(r"\\(?:begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")

_CHOICE = re.compile(r"[(\[]?[A-E][)\].:]?")
_GROUPED = re.compile(r"[-+−]?\d+(?:,\d+)+(?:\.\d*)?|[-+−]?\d+(?:\.\d+){2,}")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_CONJUNCTION = re.compile(r"(?<![A-Za-z])(?:or|and)(?![A-Za-z])")
_POWER_OF_TEN = re.compile(
    r"([-+−]?(?:\d+(?:\.\d*)?|\.\d+))(?:[eE]|\s?(?:\\times|\\cdot|[×·*])\s?10\s?\^\s?)"
    r"(?:([-+−]?\d{1,3})|\{\s?([-+−]?\d{1,3})\s?\})",
    re.ASCII,
)
_MIXED = re.compile(r"[-+−]?\d+\s*\\[dt]?frac\s*\{?\d+\}?\s*\{?\d+\}?|[-+−]?\d+\s+\d+\s*/\s*\d+")
_RATIO = re.compile(r"\d+(?:\s*:\s*\d+)+(?:\s*[ap]\.?m\.?)?", re.I)
_SYMBOL_UNIT = re.compile(r"\\?[$€£]\s*[\d.].*|.*(?:%|\^\s*\{?\s*\\circ\s*\}?|\\degree|°)", re.S)
_LETTER_UNIT = re.compile(rf"{NUMBER}\s+[mgshLJNWVK](?:\s*\^\s*\{{?[23]\}}?)?")
_TRIGONOMETRY = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_RELATIONS = {
    "equation": re.compile(r"=|\\(?:equiv|approx|sim)(?![A-Za-z])|≈"),
    "inequality": re.compile(r"[<>≤≥≠]|\\(?:[lg]eq?q?(?:slant)?|neq?|[lg]t)(?![A-Za-z])"),
    "set or interval": re.compile(r"\\(?:in|notin|cup|cap|setminus|emptyset|varnothing)(?![A-Za-z])|[∈∪∩∅]"),
    "several values": re.compile(r"\\(?:pm|mp)(?![A-Za-z])|[±∓]"),
}
_FUNCTION = re.compile(
    r"(?:arc)?(?:sin|cos|tan|cot|sec|csc)|log|exp|sqrt|frac|floor|ceil|max|min|gcd|lcm", re.I
)
_SHORT_WORD = re.compile(r"no|or|an|is|of|to|at|in|by|[cmk]m|[mk]g|m[lL]|ft|lb|oz|mi|hr|am|pm")


def same_answer(one: str, other: str) -> bool:
    """Whether two right answers agree: equal as texts, or as numbers."""
    return one == other or (_value(one) is not None and _value(one) == _value(other))


def _value(answer: str) -> Fraction | None:
    """Of a number, `1.5e3` and `3 \\times 10^5` among them; None for all else."""
    power = _POWER_OF_TEN.fullmatch(answer)
    if power is None:
        return exact_value(answer)
    value = exact_value(power[1])
    exponent = int((power[2] or power[3]).replace("−", "-"))
    return None if value is None else value * Fraction(10) ** exponent


def classify(answer: str, mode: str = "math") -> AnswerClass:
    """The class of a right answer. `unverifiable` when even the answer itself earns no reward; `text` where
    mode `math` takes nothing but the answer's own spelling.

    Args:
        mode: how rewards judge (`reward.mode`). A whole gsm8k solution counts as what follows its `####`.
    """
    from .rewards import verify

    answer = gold(answer, mode)
    looks = shape(answer)
    if looks.name == "empty" or verify(_RESPONSES.get(mode, "Answer: {}").format(answer), answer, mode):
        if looks.name == "expression" and mode == "math" and not _is_parsed(answer):
            return AnswerClass("text", "math-verify cannot read it")
        return looks
    return AnswerClass("unverifiable", looks.reason or looks.name)


_RESPONSES = {"gsm8k": "#### {}", "math_dapo_strict_box": "\\boxed{{{}}}", "exact": "{}"}
"""How a response states its answer, where not by `Answer: `."""


def _is_parsed(answer: str) -> bool:
    """Whether another spelling of an expression is right as well."""
    from .rewards import verify

    bare = _bare(answer)
    return any(verify(f"Answer: {other}", answer) for other in (rf"\left({bare}\right)", rf"1 \cdot {bare}"))


def gold(answer: str, mode: str) -> str:
    """The right answer of an answer column."""
    return (answer.rpartition("####")[2] if mode == "gsm8k" else answer).strip()


def shape(answer: str) -> AnswerClass:
    """The class of an answer by its looks alone. Takes LaTeX, with or without delimiters."""
    text = _bare(answer)
    if not text:
        return AnswerClass("empty")
    if _CHOICE.fullmatch(text):
        return AnswerClass("choice")
    value = _value(text)
    if value is not None:
        return AnswerClass("integer" if value.denominator == 1 else "number")
    reason = _ambiguity(text)
    if reason:
        return AnswerClass("ambiguous", reason)
    return AnswerClass("text" if _prose(text) else "expression")


def _bare(answer: str) -> str:
    """An answer without math delimiters, `\\text{}` and what only sets sizes and spaces."""
    text = answer.strip()
    for _ in range(5):
        match = _DELIMITERS.fullmatch(text)
        inner = next((group for group in match.groups() if group is not None), "") if match else "$"
        if "$" in inner or "\\)" in inner or not _balanced(inner):
            break
        text = inner.strip()
    text = _WORDS.sub(r" \1 ", _SIZES.sub("", text))
    return _SPACES.sub(" ", text).strip().removesuffix(".").strip()


def _ambiguity(text: str) -> str:
    """Why a text that is no number can be read in more than one way, or is written in several; else ""."""
    if "####" in text:
        return WORKED_SOLUTION
    if _GROUPED.fullmatch(text):
        return _grouping(text)
    if _MIXED.fullmatch(text):
        return "mixed number"
    if _RATIO.fullmatch(text):
        return "ratio or time"
    bracketed = _bracketed(text)
    if bracketed:
        return bracketed
    top = _outside_braces(text)
    for reason, pattern in _RELATIONS.items():
        if pattern.search(top):
            return reason
    if _several(text):
        return "several values"
    return "unit" if _has_unit(text) else ""


def _grouping(text: str) -> str:
    """`12,34` may be 1234, 12.34 or two values; `1,2,3` can only be three."""
    groups = text.split(",")[1:]
    listed = len(groups) > 1 and not any(len(group.partition(".")[0]) == 3 for group in groups)
    return "several values" if listed else "malformed number"


def _bracketed(text: str) -> str:
    """What a text between one pair of brackets is, when it has more than one part."""
    if re.fullmatch(r"\\?\{.*\}", text, re.S):
        return "set"
    if text.startswith("\\langle"):
        return "tuple"
    if text[0] not in "([" or text[-1] not in ")]" or not _balanced(text[1:-1]):
        return ""
    parts = len(_split(text[1:-1], ","))
    if parts == 1:
        return ""
    if parts > 2:
        return "tuple" if text[0] == "(" else "list"
    if text[0] + text[-1] not in ("()", "[]") or "\\infty" in text or "∞" in text:
        return "interval"
    return "tuple or open interval" if text[0] == "(" else "interval or list"


def _several(text: str) -> bool:
    """Whether values are listed: `3, 5`, `2 or 3`. Words alone are no values."""
    parts = [part for chunk in _split(_THOUSANDS.sub("", text), ",;") for part in _CONJUNCTION.split(chunk)]
    values = [part for part in parts if re.search(r"[\d\\]", part) or re.fullmatch(r"\s*[A-Za-z]\s*", part)]
    return len(values) > 1


def _has_unit(text: str) -> bool:
    if _SYMBOL_UNIT.fullmatch(text):
        return not _TRIGONOMETRY.match(text)
    if _LETTER_UNIT.fullmatch(text):
        return True
    return re.match(r"[-+−(]?[\d.\\]", text) is not None and _prose(text)


def _prose(text: str) -> bool:
    """Whether words stand in a text: not LaTeX commands, functions or products such as xy."""
    words = re.findall(r"[A-Za-z]{2,}", _COMMANDS.sub(" ", text))
    return any(
        _SHORT_WORD.fullmatch(word) if len(word) == 2 else not _FUNCTION.fullmatch(word) for word in words
    )


def _outside_braces(text: str) -> str:
    """A text without what stands in braces: the = of `\\sum_{k=1}` makes no equation."""
    for _ in range(10):
        text, count = re.subn(r"(?<!\\)\{[^{}]*\}", "", text)
        if not count:
            break
    return text


def _split(text: str, separators: str) -> list[str]:
    """The parts between separators that stand outside all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character in separators and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _balanced(text: str) -> bool:
    """Whether no bracket closes that was not opened, and all close. Kinds may mix, as in `(1, 2]`."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth < 0:
            return False
    return depth == 0
