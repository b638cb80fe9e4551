"""Functions by import path."""

from __future__ import annotations

import importlib
from collections.abc import Callable


def load_function(path: str) -> Callable:
    """The function at `package.module:name`. Raises `ValueError` when there is none."""
    module_name, separator, name = path.partition(":")
    if not separator or not module_name or not name:
        raise ValueError(f"{path!r} must be package.module:function")
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{path!r}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{path!r}: {module_name} has no {name}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{path!r} is a {type(found).__name__}, not a function")
    return found
