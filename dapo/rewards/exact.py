"""Mode `exact`: the response, or what `answer_pattern` finds in it, equals the answer."""

from __future__ import annotations


def judge(response: str, answer: str) -> bool:
    return response.strip() == answer.strip()


def answer_key(response: str) -> str | None:
    return response.strip() or None
