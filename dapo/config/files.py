"""Configurations from YAML files and back, and what is said about wrong ones."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import get_origin

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML

from ..errors import UserError
from .base import Section
from .run import Config
from .yaml_values import read_values


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Reads a YAML file and what it includes, applies `section.key=value` overrides (values are YAML) and
    validates."""
    values = read_values(Path(path), overrides or [])
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: " + "; ".join(_describe(item) for item in error.errors())) from None


def save_config(config: Config, path: Path) -> None:
    """Writes the fully resolved configuration; `load_config` reads it back to the same."""
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(config.model_dump(mode="json"), file)


def _describe(error: dict) -> str:
    keys = [str(key) for key in error["loc"]]
    name = ".".join(keys)
    if error["type"] == "extra_forbidden":
        return f"unknown key {name}; {_nearest(keys)}"
    if error["type"] == "missing":
        return f"{name} is required"
    message = error["msg"].removeprefix("Value error, ")
    if not name:
        return message
    message = message[0].lower() + message[1:]
    return f"{name}: {message}, got {error['input']!r} ({type(error['input']).__name__})"


def _nearest(keys: list[str]) -> str:
    known = _all_keys(Config)
    name = ".".join(keys)
    close = [other for other in known if other.split(".")[-1] == keys[-1]][:1]  # in the wrong section
    close = close or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    siblings = [other.split(".")[-1] for other in known if other.split(".")[:-1] == keys[:-1]]
    return f"did you mean {close[0]}?" if close else f"allowed here: {', '.join(siblings)}"


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        inner = "NAME." if get_origin(field.annotation) is dict else ""
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Section):
                keys += _all_keys(kind, f"{prefix}{name}.{inner}")
    return keys
