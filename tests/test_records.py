"""Files and hub data sets as records: order, text of answers, and what is said of what cannot be read."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dapo.config import SourceConfig
from dapo.errors import UserError
from dapo.records import counted, find_columns, open_records, prompt_key
from dapo.sources import open_source


def write_csv(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def records(source: object) -> list[dict]:
    return list(open_records(str(source))())


TRICKY = [
    "05",
    "1,000",
    "NA",
    "",
    "null",
    "1.50",
    "True",
    "1e5",
    " 7 ",
    'say "x"',
    "two\nlines",
    "é√",
    "-0",
    "nan",
]


def test_csv_answers_stay_text(tmp_path):
    rows = "".join('"p{}","{}"\r\n'.format(i, text.replace('"', '""')) for i, text in enumerate(TRICKY))
    path = write_csv(tmp_path / "data.csv", "prompt,answer\r\n" + rows)
    assert [record["answer"] for record in records(path)] == TRICKY
    assert [row.answer for row in open_source(SourceConfig(source=str(path))).rows()] == TRICKY


def test_csv_of_numbers_alone_stays_text(tmp_path):
    path = write_csv(tmp_path / "data.csv", "\ufeffprompt,answer\n1,05\n2,10\n")
    assert records(path) == [{"prompt": "1", "answer": "05"}, {"prompt": "2", "answer": "10"}]


def test_csv_columns_whose_names_hold_dots(tmp_path):
    path = write_csv(tmp_path / "data.csv", "prompt,reward_model.ground_truth\na,7\n")
    source = open_source(SourceConfig(source=str(path), answer_column="reward_model.ground_truth"))
    assert [row.answer for row in source.rows()] == ["7"]


@pytest.mark.parametrize(
    "text, complaint",
    [
        (
            "prompt,answer\na,1,000\nb,2,000\n",
            "first row has 3 fields, the header 2: put values that hold a comma",
        ),
        ("prompt,answer\na,1\nb,2,000\n", "line 3, saw 3"),
        ('prompt,answer\n"a,1\nb,2\n', "cannot be read as CSV"),
        ("prompt,answer,answer\na,1,2\n", "names a column twice"),
        ("", "is empty"),
    ],
)
def test_csv_that_cannot_be_read(tmp_path, text, complaint, monkeypatch):
    logged = []
    monkeypatch.setattr(logging.getLogger("datasets"), "handlers", [logging.NullHandler()])
    monkeypatch.setattr(logging.NullHandler, "handle", lambda self, record: logged.append(record))
    path = write_csv(tmp_path / "data.csv", text)
    with pytest.raises(UserError) as error:
        records(path)
    assert str(path) in str(error.value) and complaint in str(error.value) and "\n" not in str(error.value)
    assert not logged  # nothing but the one line is shown


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_csv_of_other_delimiters(tmp_path, delimiter):
    """A comma in a value, or in a header that has others, delimits nothing."""
    path = write_csv(tmp_path / "data.csv", f"prompt{delimiter}answer\na, b{delimiter}1,5\n")
    assert records(path) == [{"prompt": "a, b", "answer": "1,5"}]
    write_csv(path, f"prompt{delimiter}answer\na{delimiter}1{delimiter}5\n")
    name = {";": "semicolon", "\t": "tab"}[delimiter]
    with pytest.raises(UserError, match=f"3 fields, the header 2: put values that hold a {name} in double"):
        records(path)


def test_csv_of_one_column_and_of_semicolons_in_names(tmp_path):
    path = write_csv(tmp_path / "data.csv", "prompt\na;b\n")
    assert records(path) == [{"prompt": "a;b"}]
    write_csv(path, "prompt;x,answer\na,1\n")
    assert records(path) == [{"prompt;x": "a", "answer": "1"}]


def test_csv_that_is_not_utf8(tmp_path):
    path = tmp_path / "data.csv"
    path.write_bytes("prompt,answer\né,1\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"cannot be read as CSV in UTF-8: .*; save it as UTF-8$"):
        records(path)
    path.write_bytes(b"prompt,answer\n" + b"a,1\n" * 100_000 + "é,1\n".encode("latin-1"))  # far below
    with pytest.raises(UserError, match=r"cannot be read as CSV in UTF-8: .*; save it as UTF-8$"):
        records(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet", ".csv"])
def test_rows_keep_the_order_of_the_file(tmp_path, suffix):
    """More rows than a batch and a row group hold; a name that is no pattern; read again from the start."""
    rows = [{"prompt": f"p{i * 7919 % 2500}", "answer": str(i)} for i in range(2500)]
    path = tmp_path / f"da[t]a*{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=700)
    else:
        write_csv(path, "prompt,answer\n" + "".join(f"{row['prompt']},{row['answer']}\n" for row in rows))
    read = open_records(str(path))
    assert list(read()) == rows
    assert list(read()) == rows


def test_jsonl_answers_of_mixed_type(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"prompt": "a", "answer": 34}\n{"prompt": "b", "answer": "x"}\n{"prompt": "c", "answer": 0.5}\n'
    )
    assert [row.answer for row in open_source(SourceConfig(source=str(path))).rows()] == ["34", "x", "0.5"]


def damaged(kind: str, whole: bytes) -> bytes:
    if kind == "cut":
        return whole[: len(whole) // 2]
    return {"empty": b"", "text": b"prompt,answer\n"}.get(kind) or whole[:50] + bytes(2000) + whole[2050:]


@pytest.mark.parametrize("kind", ["cut", "empty", "text", "zeros"])
def test_broken_parquet(tmp_path, kind):
    path = tmp_path / "data.parquet"
    rows = [{"prompt": f"{i * i * 7919}", "answer": f"{i}"} for i in range(3000)]
    pq.write_table(pa.Table.from_pylist(rows), path, use_dictionary=False)
    path.write_bytes(damaged(kind, path.read_bytes()))
    with pytest.raises(UserError, match=f"^{re.escape(str(path))} cannot be read as parquet: [^\n]+$"):
        records(path)


def test_empty_parquet_has_no_rows(tmp_path):
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "data.parquet")
    assert records(tmp_path / "data.parquet") == []


def test_local_files_leave_nothing_behind(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    write_csv(tmp_path / "data.csv", "prompt,answer\na,1\n")
    pq.write_table(pa.Table.from_pylist([{"prompt": "a"}]), tmp_path / "data.parquet")
    assert len(records(tmp_path / "data.csv")) == len(records(tmp_path / "data.parquet")) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"data.csv", "data.parquet"}


class FakeHub:
    """`datasets.load_dataset` of a hub that holds one data set."""

    def __init__(self, rows: list[dict]) -> None:
        self.rows, self.calls = rows, []

    def __call__(self, name, config=None, *, split, streaming):
        from datasets import Dataset

        assert streaming is True
        self.calls.append((name, config, split))
        return Dataset.from_list(self.rows).to_iterable_dataset()


@pytest.mark.parametrize(
    "source, called",
    [
        ("hub:o/n", ("o/n", None, "train")),
        ("hub:o/n:test", ("o/n", None, "test")),
        ("hub:openai/gsm8k:main:test", ("openai/gsm8k", "main", "test")),
    ],
)
def test_hub_names(monkeypatch, source, called):
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}], "answer": str(i)} for i in range(2100)]
    hub = FakeHub(rows)
    monkeypatch.setattr("datasets.load_dataset", hub)
    assert records(source) == rows
    assert hub.calls == [called]


@pytest.mark.parametrize(
    "source", ["hub:", "hub:name", "hub:a/b/c", "hub:/n", "hub:o/", "hub:o/n:", "hub:o/n:a:b:c"]
)
def test_hub_names_of_the_wrong_form(source):
    with pytest.raises(
        UserError, match=re.escape(f"{source!r} must be hub:OWNER/NAME, hub:OWNER/NAME:SPLIT or")
    ):
        open_records(source)


def test_hub_without_network():
    """The tests run offline: `datasets` itself says so."""
    with pytest.raises(
        UserError, match=r"^hub:openai/gsm8k:main:train cannot be reached: [^\n]+ give the file$"
    ):
        records("hub:openai/gsm8k:main:train")


def test_what_the_hub_says_is_passed_on(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("Unknown split \"dev\".\nShould be one of ['train', 'test'].")

    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(
        UserError, match=r"^hub:o/n:dev cannot be read from the hub: Unknown split \"dev\". Should be"
    ):
        records("hub:o/n:dev")


def test_without_datasets(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in ("hub:o/n", write_csv(tmp_path / "data.csv", "prompt\na\n")):
        with pytest.raises(UserError, match=re.escape("needs datasets: pip install 'dapo-kernels[train]'")):
            records(source)


@pytest.mark.parametrize("source", ["data.txt", "data", "data.parquet.gz"])
def test_unknown_kinds_of_sources(source):
    with pytest.raises(
        UserError, match=r"must be reasoning_gym:TASK, hub:OWNER/NAME or a path ending in \.jsonl"
    ):
        open_records(source)


def test_json_is_to_be_made_json_lines():
    with pytest.raises(
        UserError, match=r"data.json must be JSON Lines: one object a line, .* ends in .jsonl"
    ):
        open_records("data.json")


def test_columns_with_parts_are_named_by_their_parts():
    record = {"q": "a", "sol": {"final": "1", "steps": {"all": []}}}
    with pytest.raises(
        UserError, match=r"f: sol has parts: set --answer-column to one of: sol\.final, sol\.steps\.all$"
    ):
        find_columns(record, "q", "sol", "f")
    with pytest.raises(UserError, match=r"set --answer-column to one of: q, sol\.final, sol\.steps\.all$"):
        find_columns(record, "q", None, "f")
    assert find_columns(record, "q", "sol.final", "f") == ("q", "sol.final")


def test_numbers_agree_with_their_nouns():
    assert [counted(n, "prompt") for n in (0, 1, 2000)] == ["0 prompts", "1 prompt", "2,000 prompts"]
    assert counted(2, "copy", "copies") == "2 copies"


def test_columns_that_are_found():
    dapo = {"prompt": [], "reward_model": {"ground_truth": "1"}, "answer": "no"}
    assert find_columns(dapo, None, None, "f") == ("prompt", "reward_model.ground_truth")
    assert find_columns(dapo, None, "answer", "f") == ("prompt", "answer")
    assert find_columns({"question": "q", "answer": "1"}, None, None, "f") == ("question", "answer")
    both = {"problem": "q", "question": "r", "answer": "1"}
    assert find_columns(both, None, None, "f") == ("question", "answer")
    with pytest.raises(UserError, match=r"f has none of the columns .*: set --prompt-column to one of: a, b"):
        find_columns({"a": 1, "b": 2}, None, "b", "f")
    with pytest.raises(UserError, match=r"f has no column 'c': set --answer-column to one of: prompt, b"):
        find_columns({"prompt": "a", "b": 2}, None, "c", "f")


def test_keys_of_prompts():
    def user(content):
        return [{"role": "user", "content": content}]

    assert prompt_key(user("a")) == prompt_key([{"content": "a", "role": "user", "more": 1}])
    prompts = [
        "a",
        "a ",
        "user",
        user("a"),
        user("b"),
        [{"role": "system", "content": "a"}],
        user("a") + user(""),
    ]
    assert len({prompt_key(prompt) for prompt in prompts}) == len(prompts)
    assert [prompt_key(prompt) for prompt in ("", " \n", user(""), user(None), user(" "))] == [()] * 5
