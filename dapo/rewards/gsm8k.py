"""Mode `gsm8k`: the number after the last `####`, or else the last number of the response.

Thousands separators, currency signs, percent signs and trailing zeros do not matter; the value does, exactly.
The right answer may be the data set's whole solution.
"""

from __future__ import annotations

import re

from .numbers import MINUS, exact_value

_MINUS = f"[{re.escape(MINUS)}]"
# A number of any grouping is found whole, so that 12,34 is one that reads as none, rather than as 34.
_NUMBER = re.compile(
    rf"(?P<sign>{_MINUS}?)(?:\\?[$€£]\s?)?(?P<inner>{_MINUS}?)(?P<value>\d[\d,]*(?:\.\d+)?(?:/\d+)?|\.\d+)",
    re.ASCII,
)
# Before a number that is only part of an expression: x^2, \sqrt{2}, x_2.
_PART = re.compile(r"(?:[\^_A-Za-z]|(?<!boxed)(?<!text)\{)\Z")
_ANOTHER = re.compile(r"\s*(?:[;/,]|or\b|and\b)\s*\\?[$€£]?[-−]?\d", re.I)


def quick(response: str, answer: str) -> bool:
    gold = answer_key(answer)
    return gold is not None and answer_key(response) == gold


judge = quick


def answer_key(response: str) -> str | None:
    """The number that a response answers, as `n` or `n/d`; None where there is none, or more than one."""
    _, marker, tail = response.rpartition("####")
    if marker:
        text = tail.lstrip().split("\n", 1)[0]
        match = _NUMBER.search(text)
        if match is None or _ANOTHER.match(text, match.end()):
            return None
    else:
        text, match = response, None
        for found in _NUMBER.finditer(response):
            match = found
        if match is None:
            return None
    value = exact_value(match["value"].rstrip(","))
    if value is None or _PART.search(text[: match.start()]):
        return None
    return str(-value if match["inner"] or _is_negative(text, match) else value)


def _is_negative(text: str, match: re.Match) -> bool:
    """Whether the minus before a number is a sign, and not the operator of `16-3`."""
    before = text[: match.start()][-3:]
    operand = before.rstrip()[-1:]
    return bool(match["sign"]) and not (operand.isdigit() or operand == ")" or before[-1:].isalpha())
