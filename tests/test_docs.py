"""What the documentation shows works as shown."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from dapo.config import Config, load_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_config_reference_is_current(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from config_reference import OUT, reference

    assert OUT.read_text(encoding="utf-8") == reference(), "run python scripts/config_reference.py"
    sys.modules.pop("config_reference")


def test_shipped_configurations_load():
    paths = sorted((ROOT / "configs").glob("**/*.yaml"))
    paths = [path for path in paths if path.parent.name != "algorithms"]  # to be included
    assert paths
    for path in paths:
        load_config(path)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_readme_configuration_is_valid(text):
    Config.model_validate(YAML(typ="safe", pure=True).load(text))


@pytest.mark.parametrize("code", blocks("python"))
def test_readme_example_runs(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out


def test_readme_links_lead_somewhere():
    targets = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert targets
    assert [link for link in targets if not (ROOT / link).exists()] == []
