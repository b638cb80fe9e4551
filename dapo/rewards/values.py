"""Which number a short text states: "34", "x = 34", "There are 34 ways", "$34$ cm"; and which it does not:
"34 or 35", "34 million", "not 34".

A number is an integer, a decimal, a fraction, a mixed number or a x 10^k, written out: `2·17` states none,
because an answer that may be left to be computed may be the question.
"""

from __future__ import annotations

import re
from fractions import Fraction

from .numbers import MINUS, NUMBER, exact_value
from .text import QUOTES, unwrap

_DEGREES = re.compile(r"\^\s?\{?\s?\\circ\s?\}?|\\degree\b|°")
_LATEX_WORDS = re.compile(r"\\(?:text[a-z]*|mathrm|mathbf|mbox|operatorname)\s?\{([^{}]*)\}")
_LATEX_SPACE = re.compile(r"\\[;: ]|\\q?quad\b|(?<=[^\s~])~(?=[^\s~])")
_THIN_SPACE = re.compile(r"\\,(?!\s?\d)|\\!(?!\s?\d)")
_DELIMITER = re.compile(r"(?<!\\)\$|\\[()\[\]]|\\(?:left|right|big|Big)(?![A-Za-z])")
_CURRENCY = re.compile(r"(?:(?:US)?\\?[$€£¥₹]|USD|EUR|Rs\.?)\s?")
_SIGNED_CURRENCY = re.compile(rf"\A([{re.escape(MINUS)}])\s?(?:US)?\\?[$€£¥₹]\s?")
_CHOICE = re.compile(r"(?:\([A-E]\)|[A-E][.)])\s+(?=[-−]?[\d\\.])")

_MIXED = re.compile(
    rf"([{re.escape(MINUS)}]?)\s?(\d+)(?:\s?(\\[dt]?frac\s?\{{\d+\}}\s?\{{\d+\}})|\s(\d+/\d+))", re.ASCII
)
_SCIENTIFIC = re.compile(
    rf"([{re.escape(MINUS)}]?\d+(?:\.\d+)?)"
    r"(?:\s?(?:\\times|\\cdot|×|·|\*)\s?10\s?\^\s?\{?\s?([-−]?\d{1,3})\s?\}?|[eE]([-−+]?\d{1,3})(?![\d.]))",
    re.ASCII,
)
_NUMBER = re.compile(NUMBER, re.ASCII)
_PERCENT = re.compile(r"\s?(?:\\?%|percent\b)")

# Behind a number: what makes an expression of it.
_OPERATOR = re.compile(
    r"\s?(?:[²³⁰-₉½¼¾√∛π‰_^*/×·÷=<>≤≥≠≈|&±!…]|\.\.|\\(?!text)[A-Za-z\\]|[-−+]\s?[\d(\\a-zA-Z]|[-−+]\s*\Z|:\d)"
)
_DASH = re.compile(r"\s+[-–—]+\s+(?=[A-Za-z])")
_UNIT = re.compile(
    r"(?:[cmk]?m|[mkµ]?g|m?[lL]|ft|in|lbs?|oz|mi|hrs?|min|secs?|mph|th|st|nd|rd|"
    r"deg)(?:\^?\{?[23]\}?)?(?![A-Za-z0-9^])"
)
_SHORT_UNIT = re.compile(
    r"\s{1,3}(?:[mgshLJNWVKAC]|[A-Za-z]{2,3})(?:\^?\{?\d\}?)?(?:/[A-Za-z]{1,3}(?:\^?\{?\d\}?)?)?\s*\Z"
)
_FIRST_WORD = re.compile(r"[\s.,;:()\[\]*—–" + QUOTES + r"-]*([A-Za-z]{2,}|a\b)")
_PICTURES = re.compile("[\u2600-\u27bf\ufe0f\U0001f300-\U0001faff]")
# First words behind a number that make another number of it, or offer another.
_CHANGES_VALUE = re.compile(
    r"(?:or|and|to|through|until|till|up|vs|versus|plus|minus|times|over|divided|multiplied|added|"
    r"raised|more|less|"
    r"fewer|greater|squared|cubed|factorial|choose|mod|modulo|base|pi|sqrt|sin|cos|tan|log|ln|exp|"
    r"otherwise|maybe|"
    r"perhaps|possibly|alternatively|if|half|halves|kilo|mega|bn|a half|th root|"
    r"(?:hundred|thousand|million|billion|trillion|dozen|third|quarter|fourth|fifth|sixth|seventh|eighth|"
    r"ninth|tenth|hundredth|thousandth)s?|(?:in|of|out of|from|below|above)\s+(?:base\s+)?\d+|in base)\b",
    re.I,
)
_HEDGE = re.compile(
    r"\b(?:wrong|incorrect|otherwise|maybe|perhaps|possibly|alternatively|versus|not (?:right|"
    r"correct|the answer)|"
    r"(?:could|might|may|can) (?:also )?be|or (?:more|fewer|less))\b|\bvs\b",
    re.I,
)
_OR_ANOTHER = re.compile(r"[^.\d]{0,30}(?<![A-Za-z])(?:or|vs)(?![A-Za-z])[^.\d]{0,20}\d", re.I)
_COMPOUND = re.compile(r"\W*[A-Za-z]+\W+(?:and\W+)?\d")
_EXPLAINS = re.compile(
    r"\W*(?:because|since|as|where|from|so|after|when|given|which|that|using|by|for)\b", re.I
)

_FILLER = re.compile(
    r"(?:therefore|thus|hence|so|then|simply|just|indeed|exactly|only|precisely|a total of|total of|equal to)"
    r"\b[\s:,]*",
    re.I,
)
_LEAD_IN = re.compile(
    r"(?:[A-Za-z][A-Za-z'+()|\\-]*[\s,]+){0,12}?"
    r"(?:(?:is|are|equals|get|gets|have|has|takes|costs|of)\b[\s:]*|[A-Za-z]+:\s+)",
    re.I,
)
_DENIAL = re.compile(
    r"\b(?:not|never|neither|nor|nothing|unknown|no|less|more|fewer|greater|least|most|than|between|"
    r"cannot|half|twice|"
    r"double|square|cube|root|negative|minus|opposite|inverse|reciprocal|either|about|around|"
    r"roughly|nearly|almost|"
    r"approximately)\b|n't",
    re.I,
)


def stated_numbers(text: str) -> list[Fraction] | None:
    """The number that a text states, as one value, or two for a percentage; none when it is more than one
    answer or the words around it change it. None when the text states no number but may be an expression."""
    text = plain(text)
    for _ in range(4):
        numbers = _leading_numbers(text)
        if numbers is not None:
            return numbers
        before = _FILLER.match(text) or _LEAD_IN.match(text)
        if not before or _DENIAL.search(before[0]):
            return None
        text = unwrap(text[before.end() :])
    return None


def plain(text: str) -> str:
    """LaTeX's words, spaces, degrees and delimiters as plain text."""
    text = _DEGREES.sub("", _LATEX_WORDS.sub(r" \1 ", text))
    text = _DELIMITER.sub(" ", _THIN_SPACE.sub(" ", _LATEX_SPACE.sub(" ", text)))
    return unwrap(re.sub(r" {1,4}\^", "^", text))


def _leading_numbers(text: str) -> list[Fraction] | None:
    """What a text that begins with a number, and may go on in prose, states."""
    text = _SIGNED_CURRENCY.sub(r"\1", text[_choice_end(text) :])
    currency = _CURRENCY.match(text)
    text = _without_brackets(text[currency.end() :] if currency else text)
    value, end, is_fraction = _value_at_start(text)
    if end == 0:
        return None
    percent = None if is_fraction else _PERCENT.match(text, end)
    rest = text[percent.end() if percent else end :]
    rest = _DASH.sub(" ", rest, count=1) if _DASH.match(rest) else rest
    if _is_expression(rest):
        return None
    if value is None or not _is_harmless(rest):
        return []
    return [value, value / 100] if percent else [value]


def _choice_end(text: str) -> int:
    """Where the label of a multiple-choice answer ends that a value follows: 4 for "(C) 34"."""
    label = _CHOICE.match(text)
    return label.end() if label else 0


def _value_at_start(text: str) -> tuple[Fraction | None, int, bool]:
    """A number's value, where it ends (0: there is none), and whether it is written as a fraction."""
    mixed = _MIXED.match(text)
    if mixed:
        part = exact_value(mixed[3] or mixed[4])
        value = None if part is None else (int(mixed[2]) + part) * (-1 if mixed[1] else 1)
        return value, mixed.end(), True
    scientific = _SCIENTIFIC.match(text)
    if scientific:
        value = exact_value(scientific[1])
        exponent = int((scientific[2] or scientific[3]).replace("−", "-"))
        return None if value is None else value * Fraction(10) ** exponent, scientific.end(), False
    number = _NUMBER.match(text)
    if not number:
        return None, 0, False
    digits = number[0].removesuffix(".")  # of the sentence
    return exact_value(digits), len(digits), "/" in digits or "frac" in digits


def _is_expression(rest: str) -> bool:
    if _OPERATOR.match(rest) or re.match(r"\s+[-−]?\.?\d", rest):
        return True
    return rest[:1].isalpha() and not _UNIT.match(rest)


def _is_harmless(rest: str) -> bool:
    """Whether what follows a number is nothing, a unit or prose that leaves the number as it is."""
    rest = _PICTURES.sub("", rest)
    if not rest.strip(" .,;:?$)]"):
        return True
    if _UNIT.match(rest) and not _UNIT.sub("", rest, count=1).strip(" .,;:"):
        return True
    if _SHORT_UNIT.fullmatch(rest) and not _CHANGES_VALUE.match(rest.strip()):
        return True
    sentence = re.match(r"\s?[.;]\s+(?=[A-Za-z(])", rest)
    if sentence:  # another one: only what takes the number back matters
        rest = rest[sentence.end() :]
        return not (_HEDGE.search(rest) or _OR_ANOTHER.match(rest))
    word = _FIRST_WORD.match(rest) or (_UNIT.match(rest) and re.match(r"()\w+", rest))
    if not word or _CHANGES_VALUE.match(rest[word.start(1) :]):
        return False
    if _HEDGE.search(rest) or _OR_ANOTHER.match(rest):
        return False
    return _COMPOUND.match(rest) is None or _EXPLAINS.match(rest) is not None


def _without_brackets(text: str) -> str:
    text = text.strip()
    while len(text) > 2 and text[0] + text[-1] in ("()", "[]", "{}") and exact_value(text[1:-1]) is not None:
        text = text[1:-1].strip()
    return text
