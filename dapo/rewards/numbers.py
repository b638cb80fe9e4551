"""Numbers as people and LaTeX write them, read exactly."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_DIGITS = 1000
"""Longer numbers are not read: no answer is that long, and turning them into integers takes quadratic
time."""

MINUS = "-−–﹣－"
# Between groups of three digits: comma, LaTeX's comma and thin spaces, thin and no-break spaces, a space.
_SEPARATOR = r"(?:,|\{,\}|\\[,!;:]|\\ |[     ]|,\\!)"
_INTEGER = rf"(?:\d{{1,3}}(?:{_SEPARATOR}\d{{3}})+(?!\d)|\d+)"
_DECIMAL = rf"(?:{_INTEGER}(?:\.\d*)?|\.\d+)"
_BRACED = r"(?:\{\s*[-+−]?\d+\s*\}|\s?\d)"
_FRACTION = rf"(?:\\[dtc]?frac{_BRACED}{_BRACED}|\d+\s?/\s?\d+)"
NUMBER = rf"(?:[+{re.escape(MINUS)}]\s?)?(?:{_FRACTION}|{_DECIMAL})"
"""Pattern of one number: integer, decimal or simple fraction. Its time is linear in the text."""

_NUMBER = re.compile(NUMBER, re.ASCII)
_PARTS = re.compile(r"[-−]?\d+", re.ASCII)
_NOISE = re.compile(_SEPARATOR)


def exact_value(text: str) -> Fraction | None:
    """The value of a text that is exactly one integer, decimal or simple fraction; else None.

    Thousands separators must stand between groups of three digits: `1,000` is 1000, `12,34` is no number.
    Takes a U+2212 minus, `\\frac{1}{2}`, `\\frac12` and `1/2`, surrounding spaces. None for a zero
    denominator and beyond `MAX_DIGITS` characters.
    """
    text = text.strip()
    if not text or len(text) > MAX_DIGITS or not _NUMBER.fullmatch(text):
        return None
    sign = -1 if text[0] in MINUS else 1
    body = text.lstrip("+ " + MINUS) if text[0] in "+" + MINUS else text
    if "/" in body or body.startswith("\\"):
        return _fraction(sign, body)
    whole, _, decimals = _NOISE.sub("", body).partition(".")
    return sign * Fraction(int((whole + decimals) or "0"), 10 ** len(decimals))


def _fraction(sign: int, body: str) -> Fraction | None:
    if "/" in body:
        numerator, denominator = body.split("/")
    else:
        digits = body[body.index("c") + 1 :] if body.startswith("\\frac") else body[body.index("frac") + 4 :]
        parts = _PARTS.findall(digits)
        if len(parts) == 1:  # \frac12
            parts = list(parts[0])
        numerator, denominator = parts
    bottom = int(denominator.replace("−", "-"))
    return sign * Fraction(int(numerator.replace("−", "-")), bottom) if bottom else None
