"""The ways to judge a response, by name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from . import exact, gsm8k, math_dapo, math_mode


@dataclass(frozen=True)
class Mode:
    """How a mode judges. `quick` runs in the caller's process and must take time linear in its input; what it
    leaves open, `judge` decides in a worker."""

    name: str
    judge: str
    """Import path of `judge(response, answer)`, or `judge(response, answer, row)`, plain or async. Right is
    True or 1."""
    quick: Callable[[str, str], bool | None] | None = None
    key: str | None = None
    """Import path of `key(response)`: the final answer in one spelling, or None."""
    needs: str | None = None
    """Package to install for it, where that is optional; its module is named alike."""

    def check_installed(self) -> None:
        """Raises `ValueError` when what the mode needs is missing."""
        if self.needs and not _is_installed(self.needs.replace("-", "_")):
            raise ValueError(f"reward mode {self.name} needs {self.needs}: pip install 'dapo-kernels[train]'")


@lru_cache
def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


_HERE = __package__
_MODES = {
    mode.name: mode
    for mode in (
        Mode(
            "math",
            f"{_HERE}.math_mode:judge",
            math_mode.quick,
            f"{_HERE}.math_mode:answer_key",
            "math-verify",
        ),
        Mode("math_dapo", f"{_HERE}.math_dapo:judge", math_dapo.quick, f"{_HERE}.math_dapo:answer_key"),
        Mode(
            "math_dapo_strict_box",
            f"{_HERE}.math_dapo:strict_box",
            math_dapo.strict_box,
            f"{_HERE}.math_dapo:strict_box_key",
        ),
        Mode("gsm8k", f"{_HERE}.gsm8k:judge", gsm8k.quick, f"{_HERE}.gsm8k:answer_key"),
        Mode("reasoning_gym", f"{_HERE}.tasks:judge", None, f"{_HERE}.exact:answer_key", "reasoning-gym"),
        Mode("exact", f"{_HERE}.exact:judge", exact.judge, f"{_HERE}.exact:answer_key"),
    )
}
_ALIASES = {"openai/gsm8k": "gsm8k"}


def mode_names() -> list[str]:
    return sorted(_MODES)


def find_mode(name: str) -> Mode:
    """A registered mode, or a function's import path `package.module:function` as one.

    Raises:
        ValueError: for any other name, and when what the mode needs is not installed.
    """
    if not isinstance(name, str):
        raise ValueError(f"mode must be a string, got {name!r}")
    name = _ALIASES.get(name, name)
    if name in _MODES:
        _MODES[name].check_installed()
        return _MODES[name]
    if ":" in name:
        return Mode(name, judge=name, key=f"{_HERE}.exact:answer_key")
    raise ValueError(
        f"no reward mode {name!r}; there are {', '.join(mode_names())}, and package.module:function"
    )


def register_mode(name: str) -> Callable[[Callable], Callable]:
    """Decorator that gives a function `(response, answer) -> bool` a name as a mode. It may also take `row`,
    the data's own record, and be async. It runs in workers that import it, so it must stand in a module.

    Raises:
        ValueError: when the name is taken, or the function is local or in `__main__`.
    """

    def register(function: Callable) -> Callable:
        path = f"{function.__module__}:{function.__qualname__}"
        if name in _MODES and _MODES[name].judge != path:
            raise ValueError(f"reward mode {name!r} is taken by {_MODES[name].judge}")
        if function.__module__ == "__main__" or "<" in function.__qualname__:
            raise ValueError(f"{path} must be a function of a module that can be imported")
        _MODES[name] = Mode(name, path, key=f"{_HERE}.exact:answer_key")
        return function

    return register
