"""The command line: what a person gets wrong is exit code 2 and one line that says what and what to do."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny import PROMPTS, tiny_config, write_jsonl

from dapo.cli import main

ROWS = [{"prompt": "1+1=", "answer": "2", "info": {"level": 1}}]


@pytest.fixture(autouse=True)
def keep_sigterm():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def complaint(tmp_path, tiny_model_dir, capsys):
    """Runs `dapo train`, checks exit code 2, one line on stderr and no run folder, and returns the line."""

    def run(*overrides: str, before=lambda folder: None, config: Path | None = None) -> str:
        path = config or tiny_config(tmp_path, tiny_model_dir)
        before(tmp_path)
        assert main(["train", str(path), *overrides]) == 2
        err = capsys.readouterr().err
        assert err.startswith("dapo: ") and err.endswith("\n") and err.count("\n") == 1, err
        assert not (tmp_path / "run").exists()
        return err

    return run


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["rollout.group_sise=4"], ["unknown key rollout.group_sise", "did you mean rollout.group_size?"]),
        (["train.steps=many"], ["train.steps: input should be a valid integer", "got 'many' (str)"]),
        (["seed"], ["override 'seed' must be section.key=value"]),
        (["rollout.group_size=1"], ["rollout.group_size", "greater than or equal to 2, got 1"]),
        (["data.train.source={}/none.jsonl"], ["data file {}/none.jsonl not found"]),
        (
            ["data.train.source={}/prompts.txt"],
            ["must be reasoning_gym:TASK, hub:OWNER/NAME or a path ending in .jsonl"],
        ),
        (
            ["data.train.answer_column=gold"],
            ["row 1 has no column 'gold': set answer_column to one of: prompt"],
        ),
        (["data.train.prompt_column=q.text"], ["row 1 has no column 'q.text': set prompt_column to one of"]),
        (
            ["data.train.prompt_column=info"],
            ["row 1: info must be a string or a list"],
        ),
        (
            ["data.max_prompt_length=3"],
            ["data.max_prompt_length=3", "1 prompts are longer", "(the shortest has 4): raise it"],
        ),
        (["data.eval.source={}/prompts.jsonl"], ["1 prompts are also in data.eval", "use other prompts"]),
        (["eval.every=1"], ["eval.every needs data.eval"]),
        (["reward.answer_pattern='(\\d'"], ["reward.answer_pattern '(\\\\d' is not a valid pattern"]),
        (["model.path={}/none"], ["model.path {}/none is not a folder", "python -m dapo.smollm2 {}/none"]),
        (["data.train.source=reasoning_gym:sums"], ["no task 'sums'", "it has ab, ", "chain_sum"]),
        (
            ["data.train.source=reasoning_gym:chain_sum", "data.train.task={terms: 2}"],
            ["task options of reasoning_gym:chain_sum ({'terms': 2})", "unexpected keyword argument 'terms'"],
        ),
        (
            ["data.train.source=reasoning_gym:chain_sum", "data.train.task={min_terms: 0}"],
            ["task options of reasoning_gym:chain_sum ({'min_terms': 0})", "min_terms must be positive"],
        ),
    ],
)
def test_wrong_configuration(complaint, tmp_path, overrides, expected):
    line = complaint(
        *[override.replace("{}", str(tmp_path)) for override in overrides],
        before=lambda folder: write_jsonl(folder / "prompts.jsonl", ROWS),
    )
    for part in expected:
        assert part.replace("{}", str(tmp_path)) in line


@pytest.mark.parametrize(
    "content, expected",
    [
        ("", "holds no prompts"),
        ("\n \n", "holds no prompts"),
        ('{"prompt": "a", "answer": "1"}\n\n{"prompt": "b", \n', "prompts.jsonl line 3 is not JSON"),
        ('["a", "1"]\n', "prompts.jsonl line 1 must be an object, got list"),
        ('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n', "row 2 has no column 'answer'"),
        (
            '{"prompt": null, "answer": "1"}\n',
            "row 1: prompt must be a string or a list",
        ),
        ('{"prompt": [{"role": "user", "content": "a"}], "answer": "1"}\n', "tokenizer has no chat template"),
        pytest.param(
            b'{"prompt": "\xe9", "answer": "1"}\n',
            "prompts.jsonl",
        ),
        pytest.param(
            b'{"prompt": "", "answer": "1"}\n',
            "row 1 holds an empty prompt",
        ),
    ],
)
def test_wrong_jsonl(complaint, content, expected):
    content = content.encode() if isinstance(content, str) else content
    assert expected in complaint(before=lambda folder: (folder / "prompts.jsonl").write_bytes(content))


def damaged_parquet(path: Path, start: int, end: int) -> None:
    table = pa.table({"prompt": ["a" * 50] * 100, "answer": ["b"] * 100})
    pq.write_table(table, path, compression="none", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[start:end] = b"\xff" * len(content[start:end])
    path.write_bytes(content)


@pytest.mark.parametrize(
    "start, end",
    [
        (-40, None),
        pytest.param(
            *(4, 60),
        ),
    ],
    ids=["footer", "pages"],
)
def test_broken_parquet(complaint, tmp_path, start, end):
    path = tmp_path / "data.parquet"
    line = complaint(f"data.train.source={path}", before=lambda _: damaged_parquet(path, start, end))
    assert f"{path} cannot be read as parquet" in line


@pytest.mark.parametrize("content, expected", [(None, "not found"), ("model: [\n", "is not valid YAML")])
def test_wrong_configuration_file(complaint, tmp_path, content, expected):
    path = tmp_path / "mine.yaml"
    if content:
        path.write_text(content)
    line = complaint(config=path)
    assert str(path) in line and expected in line


def test_configuration_file_not_in_utf8(complaint, tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"run_dir: \xe9\n")
    assert "mine.yaml" in complaint(config=tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    "missing, expected",
    [("token*", "no tokenizer"), ("*.safetensors", "no model"), ("*", "no tokenizer")],
)
def test_incomplete_model_folder(complaint, tmp_path, tiny_model_dir, missing, expected):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    for path in folder.glob(missing):
        path.unlink()
    assert f"model.path {folder}: {expected} could be loaded" in complaint(f"model.path={folder}")


def test_cut_model_file(complaint, tmp_path, tiny_model_dir):
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert f"model.path {folder}" in complaint(f"model.path={folder}")


def test_task_option_of_wrong_type(complaint):
    line = complaint("data.train.source=reasoning_gym:chain_sum", "data.train.task={seed: x}")
    assert "task options of reasoning_gym:chain_sum ({'seed': 'x'})" in line


def test_run_folder_in_use_is_left_alone(tmp_path, tiny_model_dir, capsys):
    (tmp_path / "run" / "deep").mkdir(parents=True)
    (tmp_path / "run" / "deep" / "metrics.jsonl").write_text("precious")
    config = tiny_config(tmp_path, tiny_model_dir)
    assert main(["train", str(config)]) == 2
    line = f"dapo: run_dir {tmp_path}/run is not empty: choose another run_dir, move that run away, or go on "
    line += f"with it by dapo train --resume {tmp_path}/run\n"
    assert capsys.readouterr().err == line
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert [path.read_text() for path in files] == ["precious"]


def test_run_folder_is_a_file(tmp_path, tiny_model_dir, capsys):
    (tmp_path / "run").write_text("precious")
    assert main(["train", str(tiny_config(tmp_path, tiny_model_dir))]) == 2
    assert f"run_dir {tmp_path}/run" in capsys.readouterr().err


def test_tiny_configuration_trains(tmp_path, tiny_model_dir, capsys):
    """The complaints above are not about something else: without their cause there are none."""
    (tmp_path / "run").mkdir()  # an empty folder will do
    assert main(["train", str(tiny_config(tmp_path, tiny_model_dir)), "train.steps=1"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and f"train data: {len(PROMPTS)} prompts" in out and "step 1/1" in out
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/run/report.html\n"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--help"], ["train", "report"]),
        (["train", "--help"], ["CONFIG", "section.key=value"]),
        (["report", "--help"], ["RUN", "--curves"]),
    ],
)
def test_help(capsys, arguments, words):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    out, err = capsys.readouterr()
    assert caught.value.code == 0 and err == "" and all(word in out for word in words)


@pytest.mark.parametrize("exists", [True, False])
def test_report_without_metrics(tmp_path, capsys, exists):
    run = tmp_path / "run"
    if exists:
        run.mkdir()
    assert main(["report", str(run)]) == 2
    err = capsys.readouterr().err
    assert (
        err.startswith(f"dapo: {run}/metrics.jsonl not found: name the output folder")
        and err.count("\n") == 1
    )
    assert list(tmp_path.rglob("*")) == ([run] if exists else [])


def test_as_a_process(tmp_path, tiny_model_dir):
    """Nothing that a library prints or that Python shows at exit comes on top of the one line."""
    config = tiny_config(tmp_path, tiny_model_dir)
    command = [sys.executable, "-m", "dapo", "train", str(config), "reward.answer_pattern='('"]
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2 and result.stdout == f"train data: {len(PROMPTS)} prompts\n"
    assert result.stderr.startswith("dapo: reward.answer_pattern") and result.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()
