"""`dapo data prepare`: what each data set becomes, copies, conflicts, and which answers are kept."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ruamel.yaml import YAML
from tiny import write_jsonl

from dapo.cli import main
from dapo.config import SourceConfig
from dapo.data_sets import GSM8K_TEMPLATE, KNOWN, MATH_TEMPLATE, find_data_set
from dapo.errors import UserError
from dapo.prepare import Counts, Options, prepare
from dapo.sources import open_source


def user(content: str) -> list[dict]:
    return [{"role": "user", "content": content}]


def dapo_row(prompt: str, answer: str, index: object = "i") -> dict:
    """A row as the hub's DAPO-Math-17k has it."""
    return {
        "data_source": "math_dapo",
        "prompt": user(prompt),
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


def read(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def dropped(counts: Counts) -> int:
    reasons = ("empty_prompts", "empty_answers", "conflicting", "duplicates", "other_answers", "beyond_limit")
    return sum(getattr(counts, reason) for reason in reasons)


@pytest.fixture
def run(tmp_path):
    """Prepares rows that are written to a JSONL file first; returns rows and counts."""

    def run(rows: list[dict], name: str | None = None, out: str = "out.jsonl", **options):
        path = str(write_jsonl(tmp_path / "in.jsonl", rows))
        names, local = ([path], None) if name is None else ([name], path)
        counts = prepare(names, tmp_path / out, Options(local=local, force=True, **options))
        assert counts.read == counts.written + dropped(counts) == len(rows)
        written = read(tmp_path / out)
        assert len(written) == counts.written
        return written, counts

    return run


def answers(rows: list[dict]) -> list[str]:
    return [row["reward_model"]["ground_truth"] for row in rows]


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_dapo_math_17k(tmp_path, suffix):
    """The hub's file repeats its prompts; what is written loads as training data."""
    rows = [dapo_row(f"p{i % 7}", str(i % 7), f"uuid-{i}") for i in range(700)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "hub.parquet")
    out = tmp_path / "new" / f"out{suffix}"
    counts = prepare(["dapo-math-17k"], out, Options(local=str(tmp_path / "hub.parquet")))
    assert counts == Counts(read=700, unique=7, duplicates=693, written=7)
    assert read(out)[3] == {
        "data_source": "math",
        "prompt": user("p3"),
        "ability": "MATH",
        "reward_model": {"ground_truth": "3", "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "uuid-3", "source": "dapo-math-17k", "row": 4},
    }
    source = open_source(SourceConfig(source=str(out), answer_column="reward_model.ground_truth"))
    assert [(row.question, row.answer) for row in source.rows()] == [
        (user(f"p{i}"), str(i)) for i in range(7)
    ]
    assert os.listdir(out.parent) == [out.name]  # no temporary file stays


def test_parquet_has_the_schema_of_dapo_math_17k(run, tmp_path):
    run([{"prompt": "a", "answer": "1"}], out="out.parquet")
    schema = pq.read_schema(tmp_path / "out.parquet")
    assert schema.names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert str(schema.field("prompt").type) == "list<element: struct<content: string, role: string>>"
    assert str(schema.field("reward_model").type) == "struct<ground_truth: string, style: string>"


def test_gsm8k(run):
    solution = "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 1,018"
    (row, other), counts = run(
        [
            {"question": "How {many}?", "answer": solution},
            {"question": "b", "answer": "#### -3 "},
            {"question": "c", "answer": "no marker"},
        ],
        "gsm8k",
    )
    assert row["prompt"] == user(GSM8K_TEMPLATE.replace("{prompt}", "How {many}?"))
    assert "#### answer" in row["prompt"][0]["content"]
    assert answers([row, other]) == ["1,018", "-3"] and row["data_source"] == "gsm8k"
    assert row["extra_info"] == {"index": "1", "source": "gsm8k", "row": 1}
    assert counts.empty_answers == 1


@pytest.mark.parametrize("name", ["math-500", "aime-2025"])
def test_problems_are_wrapped(run, name):
    problem = r"Find $\frac{1}{2}$ of {prompt}."
    (row,), _ = run([{"problem": problem, "solution": "s", "answer": "70"}], name)
    (message,) = row["prompt"]
    assert message["content"] == MATH_TEMPLATE.replace("{prompt}", problem)
    assert problem in message["content"] and row["data_source"] == "math" and answers([row]) == ["70"]


def test_templates(run):
    rows = [{"prompt": " a\n", "answer": 1}, {"prompt": user("b"), "answer": 2.0}]
    plain, _ = run(rows)
    assert [row["prompt"] for row in plain] == [user(" a\n"), user("b")]
    wrapped, _ = run(rows, template="Q: {prompt}!", data_source="exact")
    assert [row["prompt"] for row in wrapped] == [user("Q:  a\n!"), user("b")]  # messages stay as they are
    assert answers(wrapped) == ["1", "2"] and {row["data_source"] for row in wrapped} == {"exact"}


def test_columns(run):
    (row,), _ = run([{"q": {"text": "a"}, "gold": "7"}], prompt_column="q.text", answer_column="gold")
    assert row["prompt"] == user("a") and answers([row]) == ["7"]
    (row,), _ = run([{"question": "a", "answer": "7"}])
    assert row["prompt"] == user("a")


def test_copies_and_conflicts(run):
    rows = [("a", "1"), ("b", "2"), ("a", "1"), ("c", "3"), ("b", "5"), ("c", "3.0"), ("b", "2"), ("d", "x")]
    rows = [dapo_row(*row) for row in rows]
    kept, counts = run(rows)
    assert answers(kept) == ["1", "3", "x"]  # all copies of b go: nobody knows which is right
    assert counts == Counts(read=8, unique=4, conflicts=1, conflicting=3, duplicates=2, written=3)
    kept, counts = run(rows, keep_conflicts=True)
    assert answers(kept) == ["1", "2", "3", "x"]
    assert counts == Counts(read=8, unique=4, conflicts=1, duplicates=4, written=4)
    kept, counts = run(rows, keep_duplicates=True)
    assert answers(kept) == ["1", "1", "3", "3.0", "x"] and counts.conflicting == 3 and not counts.duplicates
    kept, counts = run(rows, keep_duplicates=True, keep_conflicts=True)
    assert sorted(answers(kept)) == sorted(answers(rows)) and counts.written == 8


def test_same_text_in_another_role_is_another_prompt(run):
    system = [{"role": "system", "content": "a"}]
    kept, _ = run([{"prompt": user("a"), "answer": "1"}, {"prompt": system, "answer": "2"}])
    assert answers(kept) == ["1", "2"]


def test_empty_rows(run):
    rows = [
        ("", "1"),
        (" \n", "1"),
        (None, "1"),
        (user(" "), "1"),
        ("a", ""),
        ("a", None),
        ("a", " "),
        ("a", 0),
    ]
    kept, counts = run([{"prompt": prompt, "answer": answer} for prompt, answer in rows])
    assert answers(kept) == ["0"] and counts.empty_prompts == 4 and counts.empty_answers == 3
    assert counts.unique == 1 and counts.conflicts == 0


KINDS = ["34", "1,000", "0.5", r"\sqrt{2}", "C", "Evelyn", "3, 5", "34 cm", "x=3", "-7"]


def test_answers_of_a_kind(run):
    rows = [{"prompt": f"p{i}", "answer": answer} for i, answer in enumerate(KINDS)]
    kept, counts = run(rows, answers="integer")
    assert answers(kept) == ["34", "1,000", "-7"] and counts.other_answers == 7
    kept, counts = run(rows, answers="comparable")
    assert answers(kept) == ["34", "1,000", "0.5", r"\sqrt{2}", "C", "-7"] and counts.other_answers == 4


def test_shuffle_and_limit(run):
    rows = [dapo_row(f"p{i}", str(i)) for i in range(50)]
    kept, counts = run(rows, limit=3)
    assert answers(kept) == ["0", "1", "2"] and counts.beyond_limit == 47
    first, other = (answers(run(rows, shuffle=seed)[0]) for seed in (0, 1))
    assert sorted(first) == sorted(other) == sorted(answers(rows)) and answers(rows) != first != other
    assert answers(run(rows, shuffle=0, limit=9)[0]) == first[:9]


def test_several_data_sets_in_one_file(tmp_path):
    one = write_jsonl(tmp_path / "one.jsonl", [dapo_row("a", "1", 7), dapo_row("b", "2", 8)])
    two = write_jsonl(
        tmp_path / "two.jsonl", [{"question": "b", "answer": 2}, {"question": "c", "answer": 3}]
    )
    counts = prepare([str(one), str(two)], tmp_path / "out.parquet", Options())
    assert (counts.read, counts.duplicates, counts.written) == (4, 1, 3)
    rows = read(tmp_path / "out.parquet")
    assert [row["extra_info"] for row in rows] == [
        {"index": "7", "source": str(one), "row": 1},
        {"index": "8", "source": str(one), "row": 2},
        {"index": "2", "source": str(two), "row": 2},
    ]


@pytest.mark.parametrize(
    "name, split, source",
    [
        ("dapo-math-17k", None, "hub:BytedTsinghua-SIA/DAPO-Math-17k"),
        ("dapo-math-17k", "test", "hub:BytedTsinghua-SIA/DAPO-Math-17k:test"),
        ("aime-2024", None, "hub:BytedTsinghua-SIA/AIME-2024"),
        ("aime-2025", None, "hub:math-ai/aime25:test"),
        ("math-500", "train", "hub:HuggingFaceH4/MATH-500:train"),
        ("gsm8k", None, "hub:openai/gsm8k:main:train"),
        ("gsm8k", "test", "hub:openai/gsm8k:main:test"),
        ("hub:o/n", "test", "hub:o/n:test"),
    ],
)
def test_where_data_sets_come_from(name, split, source):
    assert find_data_set(name, split=split).source == source


@pytest.mark.parametrize(
    "names, out, options, complaint",
    [
        (["aime"], "o.jsonl", {}, "'aime' must be a file, hub:OWNER/NAME or one of dapo-math-17k"),
        (["no.jsonl"], "o.jsonl", {}, "data file no.jsonl not found"),
        (["gsm8k"], "o.csv", {}, "OUT, the last name, must end in .parquet or .jsonl, got"),
        (["x.jsonl"], "o.jsonl", {"local": "y.jsonl"}, "--from is for dapo-math-17k"),
        (
            ["gsm8k", "math-500"],
            "o.jsonl",
            {"local": "y.jsonl"},
            "--from takes one data set, got gsm8k, math-500",
        ),
        (["gsm8k"], "o.jsonl", {"local": "y.jsonl", "split": "test"}, "--split is for data sets of the hub"),
        (["gsm8k"], "o.jsonl", {"template": "Q"}, "--template must contain {prompt}, got 'Q'"),
        (
            ["gsm8k"],
            "o.jsonl",
            {"data_source": "maths"},
            "--data-source: no reward mode 'maths'; there are exact, gsm8k",
        ),
        (
            ["gsm8k"],
            "o.jsonl",
            {"data_source": "no_such:mode"},
            "--data-source: 'no_such:mode': No module named",
        ),
    ],
)
def test_wrong_options(tmp_path, monkeypatch, names, out, options, complaint):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=re.escape(complaint)):
        prepare(names, Path(out), Options(**options))
    assert os.listdir(tmp_path) == []


def test_a_failure_leaves_the_old_file(tmp_path):
    out = write_jsonl(tmp_path / "out.jsonl", [{"old": True}])
    path = write_jsonl(
        tmp_path / "in.jsonl", [{"prompt": "a", "answer": "1"}, {"prompt": "b\ud800", "answer": "2"}]
    )
    with pytest.raises(UserError, match="not valid Unicode"):
        prepare([str(path)], out, Options(force=True))
    assert read(out) == [{"old": True}] and sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]
    with pytest.raises(UserError, match=r"no row is left to write: rows read 1, .*empty answer 1"):
        prepare([str(write_jsonl(path, [{"prompt": "a", "answer": ""}]))], out, Options(force=True))
    assert read(out) == [{"old": True}]


def test_what_exists_is_replaced_by_force_alone(tmp_path, capsys):
    """OUT forgotten, the last file to read would be it."""
    one = write_jsonl(tmp_path / "one.jsonl", [{"prompt": "a", "answer": "1"}])
    two = write_jsonl(tmp_path / "two.jsonl", [{"prompt": "b", "answer": "2"}])
    assert main(["data", "prepare", str(one), str(two)]) == 2
    error = capsys.readouterr().err
    assert f"OUT {two} exists: --force replaces it" in error and "name the file to write after it" in error
    assert read(two) == [{"prompt": "b", "answer": "2"}]
    assert main(["data", "prepare", str(one), str(two), "--force"]) == 0
    assert answers(read(two)) == ["1"]


def test_command(tmp_path, capsys):
    path = write_jsonl(tmp_path / "in.jsonl", [dapo_row("a", "1"), dapo_row("a", "1"), dapo_row("b", "x=1")])
    out = tmp_path / "out.parquet"
    assert (
        main(["data", "prepare", "dapo-math-17k", str(out), "--from", str(path), "--answers", "integer"]) == 0
    )
    shown = re.sub(r" +", " ", capsys.readouterr().out)
    for line in (
        "rows read 3",
        "distinct prompts 2",
        "dropped: duplicate 1",
        "dropped: other kind of answer 1",
    ):
        assert line in shown
    assert "rows written 1" in shown and "empty" not in shown and answers(read(out)) == ["1"]
    config = YAML(typ="safe").load(shown[shown.index("data: {") :])  # what to write in the configuration
    assert config["data"]["train"] == {"source": str(out), "answer_column": "reward_model.ground_truth"}
    assert config["reward"] == {"mode": "data_source"}
    assert main(["data", "prepare", "nonsense", str(out), "--force"]) == 2
    assert re.fullmatch(r"dapo: 'nonsense' must be a file, .*\n", capsys.readouterr().err)
    with pytest.raises(SystemExit, match="2"):
        main(["data", "prepare", "gsm8k", str(out), "--limit", "0"])
    assert "argument --limit: must be a whole number of at least 1, got '0'" in capsys.readouterr().err


def real(request, name: str) -> str:
    path = request.config.rootpath / "../shared/data" / name
    if not path.is_file():
        pytest.skip(f"needs ../shared/data/{name}")
    return str(path)


def test_aime_2024(request, tmp_path):
    path, out = real(request, "aime-2024.parquet"), tmp_path / "out.parquet"
    counts = prepare(["aime-2024"], out, Options(local=path, answers="integer"))
    assert counts == Counts(read=960, unique=30, duplicates=930, written=30)
    assert all(0 <= int(answer) <= 999 for answer in answers(read(out)))
    assert prepare(["aime-2024"], out, Options(local=path, keep_duplicates=True, force=True)).written == 960
    # Wrapping the bare problems gives the prompts of the file: the template is DAPO's.
    prepare([path], out, Options(prompt_column="extra_info.raw_problem", template=MATH_TEMPLATE, force=True))
    assert {row["prompt"][0]["content"] for row in read(out)} == {
        row["prompt"][0]["content"] for row in pq.read_table(path).to_pylist()
    }


def test_gsm8k_test(request, tmp_path):
    counts = prepare(
        ["gsm8k"], tmp_path / "o.parquet", Options(local=real(request, "gsm8k-test.jsonl"), answers="integer")
    )
    assert counts == Counts(read=1319, unique=1319, written=1319)
    assert answers(read(tmp_path / "o.parquet"))[:3] == ["18", "3", "70000"]


def test_known_data_sets_have_modes_that_exist():
    from dapo.rewards import mode_names

    assert {data_set.data_source for data_set in KNOWN.values()} <= set(mode_names())
