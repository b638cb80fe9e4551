"""Writes docs/config.md: every config key with its type, default and meaning, from dapo/config.

python scripts/config_reference.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from dapo.config import Config, Section

OUT = Path(__file__).parent.parent / "docs" / "config.md"
INTRO = """# Configuration

One YAML file a run, `dapo train CONFIG [section.key=value ...]`. The run's folder keeps the fully resolved
configuration in `config.yaml`. Unknown keys and wrong types are errors that name the nearest valid key.
This page is written by `python scripts/config_reference.py`.
"""


def reference() -> str:
    return INTRO + "".join(_section(Config, ""))


def _section(section: type[BaseModel], prefix: str) -> list[str]:
    rows, inner = [], []
    for name, field in section.model_fields.items():
        nested = _nested(field)
        if nested:
            named = ".NAME" if get_origin(field.annotation) is dict else ""
            inner.append((prefix + name + named, nested, field))
        else:
            meaning = " ".join((field.description or "").split())
            rows.append(f"| `{prefix}{name}` | {_type(field)} | {_default(field)} | {meaning} |\n")
    lines = []
    if rows:
        lines += ["\n| key | type | default | meaning |\n|---|---|---|---|\n", *rows]
    for name, nested, field in inner:
        words = [text for text in (field.description, nested.__doc__) if text and "BaseModel" not in text]
        lines.append(f"\n## `{name}`\n")
        lines += [f"\n{' '.join(text.split())}\n" for text in words]
        lines += _section(nested, f"{name}.")
    return lines


def _nested(field: FieldInfo) -> type[Section] | None:
    for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def _type(field: FieldInfo) -> str:
    text = field.annotation.__name__ if isinstance(field.annotation, type) else str(field.annotation)
    literal = re.search(r"Literal\[(.*?)\]", text)
    if literal:
        choices = [f"`{choice}`" for choice in re.findall(r"'([^']*)'", literal[1])]
        return " or ".join(choices + ["null"] * _may_be_null(field))
    for noise in ("typing.", "Annotated", "NoneType"):
        text = text.replace(noise, "")
    if "int" in text:
        text = "int or null" if _may_be_null(field) else "int"
    elif "float" in text:
        text = "float or null" if _may_be_null(field) else "float"
    return text.replace(" | None", " or null").replace("|", "or")


def _may_be_null(field: FieldInfo) -> bool:
    return "None" in str(field.annotation) or field.default is None


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "required"
    value = "null" if field.default is None else str(field.default)
    return f"`{value.lower() if isinstance(field.default, bool) else value}`"


if __name__ == "__main__":
    OUT.write_text(reference(), encoding="utf-8")
