"""What a worker calls for each response: find the answer, hand it to the function."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from .loading import load_function


def prepare_call(function_path: str, key_path: str | None) -> Callable[..., Any]:
    """`call(response, answer, row, pattern) -> (value, key)`, async where the function is.

    A module may have a `warm_up()`, which is called first.

    Raises:
        ValueError: when a path names no function.
    """
    function = load_function(function_path)
    key = load_function(key_path) if key_path else lambda response: None
    warm_up = getattr(sys.modules[function.__module__], "warm_up", None)
    if warm_up is not None:
        warm_up()  # imports must not count against the first verdict's time
    takes_row = "row" in inspect.signature(function).parameters
    try:
        inspect.signature(function).bind("", "", **({"row": {}} if takes_row else {}))
    except TypeError as error:
        raise ValueError(
            f"{function_path!r} must take (response, answer), or (response, answer, row): {error}"
        ) from None

    def call(response: str, answer: str, row: dict | None, pattern: str | None) -> tuple:
        text = response if pattern is None else last_match(response, pattern)
        if text is None:
            return False, None
        value = function(text, answer, row=row) if takes_row else function(text, answer)
        return value, key(text)

    async def call_async(*arguments: Any) -> tuple:
        value, found = call(*arguments)
        return (await value if inspect.isawaitable(value) else value), found

    return call_async if inspect.iscoroutinefunction(function) else call


def last_match(response: str, pattern: str) -> str | None:
    """The last match of a pattern, or its group 1 where it has one, stripped; None where nothing matches."""
    match = None
    for found in _compiled(pattern).finditer(response):
        match = found
    if match is None:
        return None
    return (match.group(1 if match.re.groups else 0) or "").strip()


@lru_cache(maxsize=64)
def _compiled(pattern: str) -> re.Pattern:
    return re.compile(pattern)
