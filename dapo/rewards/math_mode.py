"""Mode `math`: is the final answer of a response equal to the right one?

Where the right answer is a number, the response must state that number, and the comparison is exact. What
else there is goes to math-verify, which may take for ever on hostile input: call `judge` where it can be
killed. `quick` never does and takes time linear in its input.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

from .answers import read_answer
from .text import MAX_ANSWER, has_prose, unwrap
from .values import plain, stated_numbers

MAX_EXPRESSION = 500
"""Characters of an expression that is compared by math-verify; the longest answer of MATH-500 has 159."""

_LATEX_WORDS = re.compile(r"\\(?:text[a-z]*|mathrm|mbox)\s?\{([^{}]*)\}")
_SIGN = re.compile(r"(?P<sign>(?<![<>!:=\\])=(?![=>])|≈|\\approx(?![A-Za-z]))|\\[{}]|[{}]")
_ARITHMETIC = re.compile(
    r"(?:\\(?:[dt]?frac|sqrt|cdot|times|div|left|right)(?![A-Za-z])|[\d+\-−*/^(){}\[\].,\s·×÷])+", re.ASCII
)
# One unknown with a factor, a power or a sum: 2x = 34 does not say what x is.
_UNSOLVED = re.compile(r"[-−]|\d|[+*/^√]|\\(?:sqrt|frac|log|ln)")
# A sign that names what follows: x, f(3), a_{10}, P(X), AB, \angle ABC.
_NAME = re.compile(r"\\?[A-Za-z]+'*(?:_\{?\w+\}?)?(?:\([^()=]*\))?")
_CHOICE = re.compile(r"([a-e])")
_CHOICE_MADE = re.compile(r"(?:(?:option|choice|answer)\s+)?\(?(?:([a-e])(?=[.):]|\s*\Z)|([a-e])\))")
_OTHER_CHOICE = re.compile(r"\b(?:or|and|,)\s*\(?[a-e]\b|\([b-e]\)")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_GREEK = re.compile(r"\\(?:alpha|beta|gamma|delta|theta|phi|lambda|angle|triangle)")
# 9^{9^{9^9}}: no number that can be written down.
_TOWER = re.compile(r"(?:\^\s*\{*\s*[^{}^+\-*/\\ ]{0,20}){3}")
# Restating the problem is no answer to it.
_UNEVALUATED = re.compile(r"\\(?:sum|int|iint|oint|prod|lim|max|min|phantom|cancel|tag|llap)(?![A-Za-z])")
_UNICODE = str.maketrans(
    {
        **{"²": "^2", "³": "^3", "−": "-", "∞": r"\infty", "π": r"\pi ", "θ": r"\theta ", "·": r"\cdot "},
        **{"×": r"\times ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in "},
        "∅": r"\emptyset ",
    }
)
_ROOT = re.compile(r"√\s?(?:(\d+|[A-Za-z])|\(([^()]*)\))")


def quick(response: str, answer: str) -> bool | None:
    """The verdict, or None where only math-verify can tell."""
    if len(answer) > MAX_ANSWER:
        return response.strip() == answer.strip()
    gold = unwrap(answer)
    if not gold:
        return False
    if len(response) < len(answer) + 100 and unwrap(response) == gold:
        return True
    reading = read_answer(response)
    if reading is None or not reading.text or reading.hedged:
        return False
    if reading.text == gold:
        return True
    if len(reading.text) > MAX_EXPRESSION:
        return False
    values = stated_numbers(gold)
    if values:
        return _states(reading.text, values)
    choice = _CHOICE.fullmatch(_bare_words(gold))
    if choice:
        return _chosen(reading.text) == choice[1]
    if _is_words(gold):
        return _bare_words(reading.text) == _bare_words(gold)
    return _compare(gold, _as_expression(reading.text, gold))


def judge(response: str, answer: str) -> bool:
    """The verdict, with math-verify where it is needed. May hang or raise."""
    verdict = quick(response, answer)
    if verdict is not None:
        return verdict
    gold, text = unwrap(answer), read_answer(response).text
    values = stated_numbers(gold)
    if values:
        sides = _sides(plain(text))
        return any(all(_equal(str(value), side) for side in sides) for value in values)
    sides = _sides_of_expression(gold, _as_expression(text, gold))
    return all(_equal(_as_expression(gold, gold), side) for side in sides)


def answer_key(response: str) -> str | None:
    """The final answer in one spelling, so that equal answers vote together; None where there is none."""
    reading = read_answer(response)
    if reading is None or reading.hedged or not reading.text:
        return None
    sides = _sides(plain(reading.text))
    numbers = stated_numbers(sides[-1] if sides else reading.text)
    if numbers is not None:
        return str(numbers[0]) if numbers else None
    text = reading.text.replace("\\dfrac", "\\frac").replace("\\left", "").replace("\\right", "")
    return re.sub(r"\s+", "", text)


def _states(text: str, values: list[Fraction]) -> bool | None:
    """Whether a text states one of the values and no other; None where an equation has a side to be
    computed."""
    numbers = stated_numbers(text)
    if numbers is not None:
        return _is_reduced(text, values) and not set(values).isdisjoint(numbers)
    sides = _sides(plain(text))
    if len(sides) == 1:
        numbers = stated_numbers(sides[0])
        return bool(numbers) and "=" in text and not set(values).isdisjoint(numbers)
    stated = [stated_numbers(side) for side in sides]
    for side, numbers in zip(sides, stated):
        if numbers is not None and set(values).isdisjoint(numbers):
            return False
        if numbers is None and (not _ARITHMETIC.fullmatch(side) or _TOWER.search(side)):
            return False
    if not any(stated):
        return False  # nothing is worked out
    return True if all(numbers is not None for numbers in stated) else None


def _is_reduced(text: str, values: list[Fraction]) -> bool:
    """Not 68/2 for 34: a quotient that is a whole number is left to be computed."""
    fraction = re.search(r"\d\s?/\s?\d|frac", plain(text)[:40])
    return not fraction or values[0].denominator > 1 or bool(re.match(r"[-−]?\d+ [\d\\]", plain(text)))


def _sides(text: str) -> list[str]:
    """The values of `x = 2·17 = 34`: sides that only name what is asked, such as `x` or `f(3)`, are left out.
    After an approximation sign stands no value but a rounding of the one before."""
    pieces, signs = _split(text)
    if signs and signs[-1] != "=" and not _names(pieces[-2]):
        pieces.pop()
    values = [piece for piece in pieces[:-1] if piece and not _names(piece)]
    return [piece for piece in [*values, pieces[-1]] if piece]


def _split(text: str) -> tuple[list[str], list[str]]:
    """A text cut at its equality signs, those within braces excepted; and the signs."""
    pieces, signs, start, depth = [], [], 0, 0
    for match in _SIGN.finditer(text):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if match["sign"] and depth == 0:
            pieces.append(unwrap(text[start : match.start()]))
            signs.append(match[0])
            start = match.end()
    return [*pieces, unwrap(text[start:])], signs


def _names(piece: str) -> bool:
    """Whether a side of an equation says what is asked, rather than a value."""
    symbols = _COMMAND.sub(lambda match: match[0] if match[0][1].isupper() else "", piece)
    letters = re.findall(r"[A-Za-z]+", symbols)
    if not letters and not _GREEK.search(piece):
        return False
    if re.match(r"\s*[-−]?[\d.,]+\s*(?:[,;]|so\b|and\b|or\b)", piece):  # "35, y" of "x = 35, y = 34"
        return False
    if _NAME.fullmatch(piece.strip()):
        return True
    return not (len(set(letters)) == 1 and len(letters[0]) == 1 and _UNSOLVED.search(piece))


def _compare(gold: str, text: str) -> bool | None:
    """Whether an expression is right, without math-verify; None where it is needed."""
    if len(gold) > MAX_EXPRESSION or not _worth_parsing(text):
        return False
    if "_" in gold or "_" in text:  # 4210_5: math-verify drops subscripts
        return _spelling(gold) == _spelling(text)
    if _list_brackets(_as_expression(gold, gold)) != _list_brackets(text):
        return False
    return None


def _as_expression(text: str, gold: str) -> str:
    """An answer without the `x \\in` before a set; where the right answer lists values, the last `and` is a
    comma."""
    text = re.sub(r"\A\s*[A-Za-z]\s*(?:\\in(?![A-Za-z])|∈)\s*", "", text)
    if "," not in gold and "\\pm" not in gold:
        return text
    return re.sub(r"\s*,?\s*\b(?:and|or)\b\s*", ", ", _LATEX_WORDS.sub(r" \1 ", text))


def _worth_parsing(text: str) -> bool:
    text = " ".join(text.split())
    hopeless = _UNEVALUATED.search(text) or _TOWER.search(text)
    return text.isprintable() and not has_prose(_LATEX_WORDS.sub("", text)) and not hopeless


def _spelling(text: str) -> str:
    return re.sub(r"[{}\s]|\\left|\\right", "", text)


def _list_brackets(text: str) -> str:
    """The brackets around a list, such as a point's or an interval's; "" around anything else."""
    text = re.sub(r"\\(?:left|right)", "", text).strip()
    return text[0] + text[-1] if "," in text and text[0] in "([" and text[-1] in ")]" else ""


def _sides_of_expression(gold: str, text: str) -> list[str]:
    """The sides to compare with an expression: all but plain names, unless it is an equation itself."""
    if _SIGN.search(gold) and "=" in gold:
        return [text]
    pieces, _ = _split(text)
    return [p for p in pieces[:-1] if p and not _NAME.fullmatch(p.strip())] + pieces[-1:]


def _chosen(text: str) -> str | None:
    """The letter of a multiple-choice answer: "(C) 12", "C. 12", "option C", in small letters; None for
    two."""
    text = _bare_words(plain(text)) if text.strip("()[] .")[1:] else text.strip("()[] .").casefold()
    found = _CHOICE_MADE.match(text)
    return (found[1] or found[2]) if found and not _OTHER_CHOICE.search(text[found.end() :]) else None


def _is_words(gold: str) -> bool:
    return has_prose(_LATEX_WORDS.sub(r" \1 ", gold)) and not any(c in gold for c in "0123456789\\^=<>")


def _bare_words(text: str) -> str:
    return " ".join(_LATEX_WORDS.sub(r" \1 ", text).strip("()[] ").casefold().split())


def warm_up() -> None:
    _equal(r"\frac{1}{2}", r"2 \cdot 3")


@lru_cache(maxsize=1024)
def _parsed(text: str) -> list:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    targets = (LatexExtractionConfig(), ExprExtractionConfig())
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2]}}}", text).translate(_UNICODE)
    return parse(f"${text}$", extraction_config=targets, parsing_timeout=None)


def _equal(gold: str, text: str) -> bool:
    from math_verify import verify

    return bool(verify(_parsed(gold), _parsed(text), float_rounding=14, timeout_seconds=None))
