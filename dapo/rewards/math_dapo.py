"""Mode `math_dapo`: the scorer released with DAPO, bit for bit, for reproduction. Its strict-box variant is
the mode `math_dapo_strict_box`.

It rejects `Answer: 34.` and takes `3,4` for 34; mode `math` does neither.
"""

from __future__ import annotations

import re

TAIL, BOX_TAIL = 300, 100
"""Characters at the end of a response that are looked at."""
NO_ANSWER = "[INVALID]"
MAX_ANSWER = 1000
"""Characters of a right answer up to which its normalisation, which takes quadratic time, is done at once."""

_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_REPLACED = [
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
]
_DELETED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue"),
    *("points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals"),
    *("edges", "students", "childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}"),
    *("\\text{}^2", "\\text{}^3", "\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;"),
    *(",\\!", "{,}", '"', "\\dots"),
)
_REWRITTEN = [
    (re.compile(r"(.*?)(\$)(.*?)(\$)(.*)"), r"$\3$"),
    (re.compile(r"(\\text\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\textbf\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\overline\{)(.*?)(\})"), r"\2"),
    (re.compile(r"(\\boxed\{)(.*)(\})"), r"\2"),
    (re.compile(r"(frac)([^{])(.)"), r"frac{\2}{\3}"),
    (re.compile(r"(sqrt)([^{])"), r"sqrt{\2}"),
]


def quick(response: str, answer: str) -> bool | None:
    return None if len(answer) > MAX_ANSWER else judge(response, answer)


def judge(response: str, answer: str) -> bool:
    return _extract(response) == normalise(answer)


def answer_key(response: str) -> str | None:
    found = _extract(response)
    return None if found == NO_ANSWER else found


def _extract(response: str) -> str:
    matches = _ANSWER.findall(response[-TAIL:])
    return normalise(matches[-1] if matches else NO_ANSWER)


def normalise(answer: str) -> str:
    """An answer as the released scorer compares it."""
    answer = answer.split("=")[-1]
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    for old in _DELETED:
        answer = answer.replace(old, "")
    for pattern, new in _REWRITTEN:
        answer = pattern.sub(new, answer)
    answer = answer.replace("$", "")
    digits = answer.replace(",", "")
    return (digits if digits.isdigit() else answer).strip()


def strict_box(response: str, answer: str) -> bool:
    """Whether the last `\\boxed{...}` of the last 100 characters holds exactly the answer."""
    return strict_box_key(response) == answer


def strict_box_key(response: str) -> str | None:
    tail = response[-BOX_TAIL:]
    start = tail.rfind("\\boxed{")
    depth = 0
    for i in range(start, len(tail)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(tail[i], 0)
        if tail[i] == "}" and depth == 0:
            return tail[start + len("\\boxed{") : i]
    return None
