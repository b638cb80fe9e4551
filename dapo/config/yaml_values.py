"""The values of a configuration before they are validated: YAML files, what they include, and overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ..errors import UserError

INCLUDE = "include"


def read_values(path: Path, overrides: list[str]) -> dict[str, Any]:
    """The file's values over those of the files it includes, under `section.key=value` overrides in order.
    An override of `include` lays the files it names over what is there; their paths are relative to where the
    command runs.

    Raises:
        UserError: when a file or an override cannot be read.
    """
    values = _read_file(path, "config file", including=())
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise UserError(f"override {override!r} must be section.key=value")
        value = _parse(text, f"override {override!r}")
        if key == INCLUDE:
            for name in _names(value, f"override {override!r}"):
                _merge(values, _read_file(Path(name), f"override {override!r}:", including=()))
        else:
            _set(values, key.split("."), value, override)
    return values


def _read_file(path: Path, what: str, including: tuple[Path, ...]) -> dict[str, Any]:
    """The values of a file over those of its includes, of which later ones win. `including`: the files whose
    includes led here."""
    if not path.is_file():
        raise UserError(f"{what} {path} not found")
    if path.resolve() in including:
        raise UserError(f"{what} {path} includes itself")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: {error}") from None
    own = _parse(text, str(path))
    if not isinstance(own, dict):
        raise UserError(f"{path} must hold sections such as `model:`, got {type(own).__name__}")
    values: dict[str, Any] = {}
    for name in _names(own.pop(INCLUDE, None), str(path)):
        _merge(values, _read_file(path.parent / name, f"{path}: {INCLUDE}", (*including, path.resolve())))
    _merge(values, own)
    return values


def _names(value: Any, where: str) -> list[str]:
    names = [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(
            f"{where}: {INCLUDE} must be a list of YAML files, got {value!r} ({type(value).__name__})"
        )
    return names


def _merge(values: dict[str, Any], over: dict[str, Any]) -> None:
    """Lays `over` on `values`, section by section."""
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def _parse(text: str, where: str) -> Any:
    try:
        return YAML(typ="safe", pure=True).load(text)  # YAML 1.2: 1e-5 is a number, `on` is not
    except YAMLError as error:
        raise UserError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from None


def _set(values: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for key in keys[:-1]:
        if values.get(key) is None:
            values[key] = {}
        child = values[key]
        if not isinstance(child, dict):
            raise UserError(f"override {override!r}: {key} is not a section")
        values = child
    values[keys[-1]] = value
