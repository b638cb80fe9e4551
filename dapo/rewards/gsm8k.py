"""Mode `gsm8k`: the number after the last `####`, or that of an explicit answer, or else the last number of
the response.

Thousands separators, currency signs, units and trailing zeros do not matter; the value does, exactly. The
right answer may be the data set's whole solution.
"""

from __future__ import annotations

import re

from .answers import read_answer
from .numbers import MINUS, exact_value
from .values import stated_numbers

_MINUS = f"[{re.escape(MINUS)}]"
# A number of any grouping is found whole, so that 12,34 is one that reads as none, rather than as 34.
_NUMBER = re.compile(
    rf"(?P<sign>{_MINUS}?)(?:\\?[$€£]\s?)?(?P<inner>{_MINUS}?)(?P<value>\d+(?:,\d+)*(?:\.\d+)?(?:/\d+)?|\.\d+)",
    re.ASCII,
)
# Before a number that is only part of an expression: x^2, \sqrt{2}, x_2.
_PART = re.compile(r"(?:[\^_A-Za-z]|(?<!boxed)(?<!text)\{)\Z")
_DENIED = re.compile(r"\b(?:not|minus|negative)\s{1,3}\Z", re.I)


def quick(response: str, answer: str) -> bool:
    gold = answer_key(answer)
    return gold is not None and answer_key(response) == gold


judge = quick


def answer_key(response: str) -> str | None:
    """The number that a response answers, as `n` or `n/d`; None where there is none, or more than one."""
    marked = _after_hashes(response)
    if marked is not None:
        return _stated(marked)
    reading = read_answer(response)
    if reading is not None:
        stated = None if reading.hedged else _stated(reading.text)
        if stated is not None or reading.hedged:
            return stated
    return _last_number(response)


def _after_hashes(response: str) -> str | None:
    """What stands on the line of the last `####` that a number follows, behind its last `=`."""
    end = len(response)
    for _ in range(10):
        start = response.rfind("####", 0, end)
        if start < 0:
            return None
        line = response[start + 4 : end].lstrip().split("\n", 1)[0].split("####", 1)[0]
        if any(character.isdigit() for character in line):
            return line.rpartition("=")[2]
        end = start
    return None


def _stated(text: str) -> str | None:
    numbers = stated_numbers(text[:500]) if len(text) <= 500 else None
    return str(numbers[0]) if numbers else None


def _last_number(response: str) -> str | None:
    match = None
    for found in _NUMBER.finditer(response):
        match = found
    if match is None:
        return None
    value, before = exact_value(match["value"]), response[: match.start()][-20:]
    if value is None or _PART.search(before) or _DENIED.search(before):
        return None
    return str(-value if match["inner"] or (match["sign"] and _is_sign(before)) else value)


def _is_sign(before: str) -> bool:
    """Whether the minus before a number is a sign, and not the operator of `16-3`."""
    operand = before.rstrip()[-1:]
    return not (operand.isdigit() or operand == ")" or before[-1:].isalpha())
