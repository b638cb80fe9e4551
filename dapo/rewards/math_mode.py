"""Mode `math`: is the final answer of a response equal to the right one?

Numbers are compared exactly and at once. What else there is goes to math-verify, which may take for ever on
hostile input: call `judge` where it can be killed. `quick` never does and takes linear time.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from .answers import _ANOTHER, _OR_LATER, Reading, has_prose, read_answer, unwrap
from .numbers import NUMBER, exact_value

MAX_EXPRESSION = 500
"""Characters of an expression that is compared by math-verify; the longest answer of MATH-500 has 159."""

_FIRST_NUMBER = re.compile(rf"(?:\\?[$€£]\s?)?({NUMBER})(\s*(?:\\?%|percent\b))?", re.ASCII)
_LATEX_WORDS = re.compile(r"\\(?:text[a-z]*|mathrm|mbox)\s*\{([^{}]*)\}")
_LATEX_SPACE = re.compile(r"\\[,;:! ]|\\q?quad\b|~")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b|°")
# Before a value: "the number of ways is", "x equals". Words alone, so that nothing is computed there.
_LEAD_IN = re.compile(r"(?:[A-Za-z][A-Za-z']*[\s,]+){0,12}?(?:is|are|equals|get|have)\b[\s:]*", re.I)
_DENIAL = re.compile(
    r"\b(?:not|never|neither|nor|unknown|no|less|more|fewer|greater|least|most|than|between|cannot)\b|n't",
    re.I,
)
# Words that make another number of the one before them.
_CHANGES_VALUE = re.compile(
    r"(?:hundred|thousand|million|billion|trillion|dozen|pi|squared|cubed|factorial|times|plus|minus|over|"
    r"divided|mod|choose|and a half|th root|sqrt|sin|cos|tan|log|ln|exp)\b",
    re.I,
)
_GLUED_UNIT = re.compile(
    r"(?:[cmk]?m|[mk]?g|m?l|ft|in|lbs?|oz|mi|hrs?|min|secs?|mph|th|st|nd|rd|deg)\b", re.I
)
_PROSE = re.compile(
    r"[\s.,;:()\[\]*_—–-]*(?=[A-Za-z]{2}|[aI]\b|[mgshL](?:\^\{?\d\}?)?\s*\Z)|[\s.,;:()\[\]]*\("
)
_SIGN = re.compile(r"(?P<sign>(?<![<>!:=\\])=(?![=>])|≈|\\approx(?![A-Za-z]))|\\[{}]|[{}]")
_NAME = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
# 9^{9^{9^9}}: no number that can be written down.
_TOWER = re.compile(r"(?:\^\s*\{*\s*[^{}^+\-*/\\ ]{0,20}){3}")
# Restating the problem is no answer to it.
_UNEVALUATED = re.compile(r"\\(?:sum|int|iint|oint|prod|lim|max|min)(?![A-Za-z])")


def quick(response: str, answer: str) -> bool | None:
    """The verdict, or None where only math-verify can tell."""
    gold = unwrap(answer)
    if not gold:
        return False
    if _same_text(response, gold):
        return True
    reading = read_answer(response)
    if reading is None or not reading.text:
        return False
    if _same_text(reading.text, gold):
        return not reading.several or exact_value(gold) is None
    value = exact_value(gold)
    if value is not None:
        return _is_number(reading, value)
    if _is_words(gold):
        return _bare_words(reading.text) == _bare_words(gold)
    if len(gold) > MAX_EXPRESSION or len(reading.text) > MAX_EXPRESSION:
        return False
    return None if _worth_parsing(reading.text) else False


def judge(response: str, answer: str) -> bool:
    """The verdict, with math-verify where it is needed. May hang or raise."""
    verdict = quick(response, answer)
    if verdict is not None:
        return verdict
    gold, reading = unwrap(answer), read_answer(response)
    if exact_value(gold) is None:
        return _equal(gold, reading.text)
    sides = _sides(_plain(reading.text))
    return bool(sides) and all(exact_value(side) == exact_value(gold) or _equal(gold, side) for side in sides)


def answer_key(response: str) -> str | None:
    """The final answer in one spelling, so that equal answers vote together; None where there is none."""
    reading = read_answer(response)
    if reading is None or reading.several or not reading.text:
        return None
    numbers = _leading_number(_plain(reading.text))
    if numbers is not None:
        return str(numbers[0]) if numbers else None
    return re.sub(
        r"\s+", "", reading.text.replace("\\dfrac", "\\frac").replace("\\left", "").replace("\\right", "")
    )


def _is_number(reading: Reading, value: Fraction) -> bool | None:
    """Whether a reading is this number and no other."""
    if reading.several or len(reading.text) > MAX_EXPRESSION:
        return False
    text = _plain(reading.text)
    for _ in range(3):
        numbers = _leading_number(text)
        if numbers is not None:
            return value in numbers
        lead_in = _LEAD_IN.match(text)
        if not lead_in or _DENIAL.search(lead_in[0]):
            break
        text = unwrap(text[lead_in.end() :])
    sides = _sides(text)
    for side in sides:
        numbers = _leading_number(side)
        if numbers is not None and value not in numbers:
            return False
        if numbers is None and not _worth_parsing(side):
            return False
    decided = sides and all(_leading_number(side) is not None for side in sides)
    return True if decided else None if sides else False


def _leading_number(text: str) -> list[Fraction] | None:
    """What a text that begins with a number, and may go on in prose, can be read as: nothing when it is more
    than one answer, two values for a percentage. None when it is no number but an expression."""
    text = _strip_brackets(text)
    match = _FIRST_NUMBER.match(text)
    if match is None:
        return None
    rest = text[match.end() :]
    value = exact_value(match[1])
    if not rest.strip(" .,;:!$)") and "!" not in rest:
        pass
    elif _ANOTHER.match(rest) or _OR_LATER.search(rest) or re.match(r"\s+[-−]?\.?\d", rest):
        return []
    elif not _is_unit_or_prose(rest):
        return None
    elif _CHANGES_VALUE.match(rest.lstrip(" -")):
        return []
    if value is None:
        return []
    return [value, value / 100] if match[2] else [value]


def _is_unit_or_prose(rest: str) -> bool:
    if rest[0].isalpha():
        return _GLUED_UNIT.match(rest) is not None
    return _PROSE.match(rest) is not None


def _plain(text: str) -> str:
    """LaTeX's words, spaces and degrees as plain text; math delimiters around a first value gone."""
    text = _DEGREES.sub("", _LATEX_SPACE.sub(" ", _LATEX_WORDS.sub(r" \1 ", text)))
    for opener, closer in (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]")):
        if text.lstrip().startswith(opener) and text.count(closer) >= (2 if opener == closer else 1):
            inner, _, rest = text.lstrip()[len(opener) :].partition(closer)
            text = unwrap(inner) + rest
    return unwrap(text)


def _strip_brackets(text: str) -> str:
    text = re.sub(r"\\(?:left|right|big|Big)\b", "", text).strip()
    while len(text) > 2 and text[0] + text[-1] in ("()", "[]", "{}") and exact_value(text[1:-1]) is not None:
        text = text[1:-1].strip()
    return text


def _sides(text: str) -> list[str]:
    """The values of `x = 2·17 = 34`: sides that only name what is asked, such as `x` or `f(3)`, are left out
    unless nothing else is there. After an approximation sign stands no value but a rounding of the one
    before."""
    pieces, signs, start, depth = [], [], 0, 0
    for match in _SIGN.finditer(text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if match["sign"] and depth == 0:  # the one in \\sum_{k=1} is none
            pieces.append(unwrap(text[start : match.start()]))
            signs.append(match[0])
            start = match.end()
    pieces.append(unwrap(text[start:]))
    if signs and signs[-1] != "=" and not _names(pieces[-2]):
        pieces.pop()
    values = [piece for piece in pieces[:-1] if piece and not _names(piece)]
    return [piece for piece in [*values, pieces[-1]] if piece]


def _names(piece: str) -> bool:
    return _NAME.search(re.sub(r"\\[A-Za-z]+", "", piece)) is not None


def _worth_parsing(text: str) -> bool:
    hopeless = _UNEVALUATED.search(text) or _TOWER.search(text)
    return text.isprintable() and bool(text) and not has_prose(text) and not hopeless


def _is_words(gold: str) -> bool:
    return has_prose(_LATEX_WORDS.sub(r" \1 ", gold)) and not any(c in gold for c in "0123456789\\^=<>")


def _bare_words(text: str) -> str:
    return " ".join(_LATEX_WORDS.sub(r" \1 ", text).strip("()[] ").casefold().split())


def _same_text(text: str, gold: str) -> bool:
    return len(text) < len(gold) + 100 and unwrap(text) == gold


def warm_up() -> None:
    _equal(r"\frac{1}{2}", r"2 \cdot 3")


@lru_cache(maxsize=1024)
def _parsed(text: str) -> list:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = (LatexExtractionConfig(), ExprExtractionConfig())
    return parse(f"${text}$", extraction_config=targets, parsing_timeout=None)


def _equal(gold: str, text: str) -> bool:
    from math_verify import verify

    return bool(verify(_parsed(gold), _parsed(text), timeout_seconds=None))
