"""`include`: what a configuration takes from other files, and which key wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from dapo.config import load_config
from dapo.errors import UserError

MINIMAL = "run_dir: r\nmodel: {path: m}\ndata: {train: {source: d.jsonl}}\ntrain: {steps: 1}\n"


@pytest.fixture
def write(tmp_path: Path):
    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_own_keys_win_over_included_ones_and_later_files_over_earlier(write) -> None:
    write("sub/first.yaml", "seed: 1\nalgorithm: {epsilon_low: 0.1, epsilon_high: 0.4}\neval: {every: 3}\n")
    write("sub/second.yaml", "seed: 2\nalgorithm: {epsilon_high: 0.5, dual_clip: 9}\n")
    path = write(
        "run.yaml", f"{MINIMAL}include: [sub/first.yaml, sub/second.yaml]\nalgorithm: {{dual_clip: 7}}\n"
    )
    config = load_config(path)
    algorithm = config.algorithm
    assert (config.seed, algorithm.epsilon_low, algorithm.epsilon_high, algorithm.dual_clip) == (
        2,
        0.1,
        0.5,
        7,
    )
    assert config.eval.every == 3 and config.include == []


def test_paths_are_relative_to_the_file_that_names_them(write) -> None:
    write("a/deep.yaml", "seed: 4\n")
    write("a/outer.yaml", "include: [deep.yaml]\nalgorithm: {num_iterations: 2}\n")
    config = load_config(write("run.yaml", MINIMAL + "include: [a/outer.yaml]\n"))
    assert (config.seed, config.algorithm.num_iterations) == (4, 2)


def test_on_the_command_line_it_lies_over_the_file_in_order(write, monkeypatch, tmp_path: Path) -> None:
    write("preset.yaml", "algorithm: {epsilon_low: 0.1, epsilon_high: 0.4}\n")
    path = write("sub/run.yaml", MINIMAL + "algorithm: {epsilon_low: 0.3, dual_clip: 9}\n")
    monkeypatch.chdir(tmp_path)  # what the shell completes
    config = load_config(path, ["algorithm.epsilon_high=0.9", "include=[preset.yaml]"])
    assert (config.algorithm.epsilon_low, config.algorithm.epsilon_high) == (0.1, 0.4)
    assert config.algorithm.dual_clip == 9
    config = load_config(path, ["include=[preset.yaml]", "algorithm.epsilon_high=0.9"])
    assert (config.algorithm.epsilon_low, config.algorithm.epsilon_high) == (0.1, 0.9)


@pytest.mark.parametrize(
    ("include", "message"),
    [
        ("[none.yaml]", r"run.yaml: include \S+/none.yaml not found$"),
        ("none.yaml", r"run.yaml: include must be a list of YAML files, got 'none.yaml' \(str\)$"),
        ("[run.yaml]", r"run.yaml: include \S+/run.yaml includes itself$"),
        ("[loop.yaml]", r"loop.yaml: include \S+/run.yaml includes itself$"),
        ("[list.yaml]", r"list.yaml must hold sections such as `model:`, got list$"),
        ("[typo.yaml]", r"unknown key algorithm.epsilon_hi; did you mean algorithm.epsilon_high\?$"),
    ],
)
def test_includes_that_do_not_work(write, include: str, message: str) -> None:
    write("loop.yaml", "include: [run.yaml]\n")
    write("list.yaml", "- a\n")
    write("typo.yaml", "algorithm: {epsilon_hi: 1}\n")
    with pytest.raises(UserError, match=message):
        load_config(write("run.yaml", MINIMAL + f"include: {include}\n"))


def test_an_override_that_does_not_work(write) -> None:
    path = write("run.yaml", MINIMAL)
    with pytest.raises(UserError, match=r"^override 'include=\[no.yaml\]': no.yaml not found$"):
        load_config(path, ["include=[no.yaml]"])
    with pytest.raises(UserError, match=r"^override 'include=no.yaml': include must be a list"):
        load_config(path, ["include=no.yaml"])
    with pytest.raises(UserError, match="did you mean include"):
        load_config(path, ["inculde=[no.yaml]"])
