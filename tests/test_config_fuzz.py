"""Configurations that were damaged or mistyped: each is read, or refused in one line, and that is all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tiny import tiny_config

from dapo.config import Config, load_config, save_config
from dapo.errors import UserError
from dapo.resume import resumed_config

CASES = 100
VALUES = ["", "null", "-1", "1e999", ".nan", "[]", "{}", "'x'", "true", "9" * 400]
VALUES += [
    "!!python/object:os.system x",
    "&a [*a]",
    "\x00",
    "2024-01-01",
    "0x10",
    "- 1",
    "[1, 2",
    "{a: b",
    "%",
    "@",
    "\ud83d",
]


def damaged(text: str, choose: random.Random) -> bytes:
    content = bytearray(text.encode())
    lines = text.splitlines(keepends=True)
    kind = choose.choice(["cut", "flip", "insert", "drop line", "double line", "value", "shuffle"])
    if kind == "cut":
        return bytes(content[: choose.randrange(len(content))])
    if kind == "flip":
        for _ in range(choose.randint(1, 4)):
            content[choose.randrange(len(content))] ^= 1 << choose.randrange(8)
        return bytes(content)
    if kind == "insert":
        at = choose.randrange(len(content))
        return bytes(content[:at]) + choose.randbytes(choose.randint(1, 9)) + bytes(content[at:])
    if kind == "shuffle":
        choose.shuffle(lines)
    at = choose.randrange(len(lines))
    if kind == "drop line":
        del lines[at]
    if kind == "double line":
        lines.insert(at, lines[at])
    if kind == "value":
        key = lines[at].partition(":")[0]
        lines[at] = f"{key}: {choose.choice(VALUES)}\n"
    return "".join(lines).encode("utf-8", "surrogatepass")


@pytest.fixture(scope="module")
def text(tmp_path_factory, tiny_model_dir: Path) -> str:
    path = tmp_path_factory.mktemp("config") / "whole.yaml"
    save_config(load_config(tiny_config(path.parent, tiny_model_dir)), path)
    return path.read_text()


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_configuration_is_read_or_refused_in_one_line(tmp_path: Path, text: str, seed: int) -> None:
    choose, refused = random.Random(seed), 0
    run = tmp_path / "run"
    run.mkdir()
    for _ in range(CASES // 4):
        content = damaged(text, choose)
        (run / "config.yaml").write_bytes(content)
        for read in (lambda: load_config(run / "config.yaml"), lambda: resumed_config(run, [])[0]):
            try:
                assert isinstance(read(), Config)
            except UserError as error:
                refused += 1
                message = str(error)
                assert message.strip() and "\n" not in message and len(message) < 20_000, content
                assert str(run) in message or "config.yaml" in message, content
        assert (run / "config.yaml").read_bytes() == content  # reading changes nothing
    assert refused > CASES // 8
