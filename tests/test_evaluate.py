"""`dapo eval` from end to end: its figures, that it goes on where it was stopped, that nothing but its
settings decides what comes out, and its page. And the held-out evaluation of a run, on the same core."""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tiny import EOS, write_jsonl
from transformers import AutoTokenizer

from dapo.cli import main
from dapo.config import Config, ModelConfig
from dapo.data import Prompt
from dapo.errors import UserError
from dapo.evaluate import Task, evaluate, respond
from dapo.evaluation.options import fingerprint, make_options, name_of
from dapo.evaluation.problems import load_problems
from dapo.evaluation.progress import EvalProgress
from dapo.evaluation.summary import describe, markdown, summarise
from dapo.model_files import load_model
from dapo.report import write_report
from dapo.report.eval_page import accuracy_chart, accuracy_edges, evaluation_page, problem_view
from dapo.rewards import Verdict
from dapo.rollout import Completion, HFEngine, Request, SamplingParams
from dapo.sources import Row

QUESTIONS = [{"question": f"{i}+{i}=", "answer": str(i), "note": "x" * i} for i in (1, 4, 7, 8, 3)]
# The last digit of a response is its answer: about half of the tiny model's responses have one.
DIGIT = ["--mode", "exact", "--answer-pattern", r"\d", "--max-tokens", "8", "--top-p", "1"]
N = 6


def run_eval(model: Path, data: Path, out: Path, *options: str, code: int = 0) -> None:
    try:
        assert main(["eval", str(model), str(data), "--out", str(out), *DIGIT, *options]) == code
    except KeyboardInterrupt:  # pytest itself must not see it
        pytest.fail("KeyboardInterrupt left main")


def rows_of(folder: Path) -> list[dict]:
    text = (folder / "results.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def timeless(folder: Path) -> dict:
    """The summary without what belongs to the occasion."""
    return {key: v for key, v in summary_of(folder).items() if key not in ("date", "command", "tokens_per_s")}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_jsonl(tmp_path_factory.mktemp("data") / "digits.jsonl", QUESTIONS)


@pytest.fixture(scope="module")
def done(tmp_path_factory, tiny_model_dir: Path, data: Path) -> Path:
    """A whole evaluation, five problems with six samples each."""
    out = tmp_path_factory.mktemp("eval") / "out"
    run_eval(tiny_model_dir, data, out, "-n", str(N))
    return out


@pytest.fixture
def calls(monkeypatch) -> list[int]:
    """How many responses each batch of the engine was asked for."""
    sizes: list[int] = []
    generate_batch = HFEngine._generate_batch

    def spy(self, requests, sampling, check):
        sizes.append(len(requests))
        return generate_batch(self, requests, sampling, check)

    monkeypatch.setattr(HFEngine, "_generate_batch", spy)
    return sizes


def test_results_hold_every_response_and_its_verdict(done: Path) -> None:
    rows = rows_of(done)
    assert [(row["problem"], row["sample"]) for row in rows] == [(p, s) for p in range(5) for s in range(N)]
    for row in rows:
        digits = re.findall(r"\d", row["response"])
        assert row["extracted"] == (digits[-1] if digits else None) and row["failure"] is None
        assert row["accuracy"] == (row["extracted"] == row["answer"])
        assert row["prompt"] == QUESTIONS[row["problem"]]["question"]
        assert row["length"] <= 8 and (row["length"] == 8 or not row["truncated"])
    assert 0 < sum(row["accuracy"] for row in rows) < len(rows)
    assert len({row["response"] for row in rows}) > 25  # every sample has noise of its own


def test_responses_are_the_engines_own_for_their_noise(done: Path, tiny_model_dir: Path, data: Path) -> None:
    options = make_options({"model": str(tiny_model_dir), "data": str(data), "samples": N})
    loaded = load_model(ModelConfig(path=str(tiny_model_dir)))
    problems = load_problems(options, loaded.tokenizer).problems
    requests = [Request(p.prompt.ids, (0, p.identity, s)) for p in problems for s in range(N)]
    completions = HFEngine(loaded.model, [EOS], 64).generate(requests, SamplingParams(8))
    texts = [loaded.tokenizer.decode(c.token_ids, skip_special_tokens=True) for c in completions]
    assert [row["response"] for row in rows_of(done)] == texts


def test_figures_are_those_of_the_results(done: Path) -> None:
    rows, summary = rows_of(done), summary_of(done)
    groups = [rows[i : i + N] for i in range(0, 5 * N, N)]
    right = [sum(row["accuracy"] for row in group) for group in groups]
    assert summary["avg"]["value"] == sum(right) / (5 * N)
    assert summary["avg"]["low"] < summary["avg"]["value"] < summary["avg"]["high"]
    assert [figure["k"] for figure in summary["pass_at_k"]] == [1, 2, 4, 6]
    assert summary["pass_at_k"][0] == summary["maj_at_k"][0] == {"k": 1, **summary["avg"]}
    assert summary["pass_at_k"][-1]["value"] == sum(map(bool, right)) / 5
    majorities = []
    for group in groups:
        votes = Counter(row["extracted"] for row in group if row["extracted"] is not None)
        winners = [key for key in votes if votes[key] == max(votes.values())]
        majorities.append(winners.count(group[0]["answer"]) / max(len(winners), 1))
    assert summary["maj_at_k"][-1]["value"] == pytest.approx(sum(majorities) / 5)
    assert summary["truncated_frac"] == sum(row["truncated"] for row in rows) / len(rows)
    assert summary["no_answer_frac"] == sum(row["extracted"] is None for row in rows) / len(rows)
    assert summary["response_length"]["max"] == 8 and summary["scorer_failures"] == {}
    assert summary["tokens_per_s"] > 0 and summary["responses"] == 30 and summary["problems"] == 5
    for group, line in zip(groups, summary["per_problem"]):
        votes = Counter(row["extracted"] for row in group if row["extracted"] is not None)
        shown = line["frequent_answers"]
        assert {one["answer"]: one["count"] for one in shown}.items() <= votes.items() and len(shown) <= 4
        assert [one["right"] for one in shown] == [one["answer"] == line["answer"] for one in shown]
        assert line["accuracy"] == sum(row["accuracy"] for row in group) / N


def test_headline_and_page_say_the_same(done: Path, tiny_model_dir: Path, data: Path, capsys) -> None:
    """The command again: nothing is generated, and it says once more what came out."""
    before = {path.name: path.read_bytes() for path in done.iterdir()}
    run_eval(tiny_model_dir, data, done, "-n", str(N))
    out = capsys.readouterr().out
    summary = summary_of(done)
    average = f"{summary['avg']['value']:.1%}"
    low, high = (100 * summary["avg"][end] for end in ("low", "high"))
    assert f"avg@6 {average} (95 % interval {low:.1f} to {high:.1f}), pass@6 " in out
    assert "data: 5 problems x 6 samples, from 5 rows" in out and str(done / "summary.html") in out
    assert {path.name: path.read_bytes() for path in done.iterdir()} == before
    page = (done / "summary.html").read_text(encoding="utf-8")
    assert f'<dt>avg@6</dt><dd class="value">{average}</dd>' in page
    assert f"| avg@6 | {100 * summary['avg']['value']:.1f} | " in (done / "summary.md").read_text()


def test_what_is_done_needs_no_model(done, tiny_model_dir, data, monkeypatch, capsys) -> None:
    monkeypatch.setattr("dapo.evaluation.run.load_model", lambda config: pytest.fail("loads the model"))
    run_eval(tiny_model_dir, data, done, "-n", str(N), "-k", "3")  # k is for the summary, not for the results
    assert [figure["k"] for figure in summary_of(done)["pass_at_k"]] == [
        3
    ] and "pass@3" in capsys.readouterr().out
    run_eval(tiny_model_dir, data, done, "-n", str(N))


@pytest.mark.parametrize("keep, in_order", [(0.0, True), (0.37, False), (0.9, True), (None, True)])
def test_goes_on_after_a_kill_to_the_same_files(
    tmp_path, done, tiny_model_dir, data, calls, capsys, keep, in_order
) -> None:
    """A kill leaves some lines, in the order in which they were judged, and the last one cut; None: just
    before its line break."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "settings.json").write_bytes((done / "settings.json").read_bytes())
    lines = (done / "results.jsonl").read_bytes().splitlines(keepends=True)
    if not in_order:
        random.Random(0).shuffle(lines)
    content = b"".join(lines)
    end = len(b"".join(lines[:4])) - 1 if keep is None else int(keep * len(content))
    (out / "results.jsonl").write_bytes(content[:end])
    left = (out / "results.jsonl").read_bytes().count(b"\n")
    run_eval(tiny_model_dir, data, out, "-n", str(N))
    assert sum(calls) == 30 - left
    assert f"going on after {left} of 30 responses" in capsys.readouterr().out or not left
    for name in ("results.jsonl", "settings.json"):
        assert (out / name).read_bytes() == (done / name).read_bytes()
    assert timeless(out) == timeless(done)


def test_ctrl_c_keeps_what_is_judged_and_says_how_to_go_on(
    tmp_path, done, tiny_model_dir, data, monkeypatch, capsys
) -> None:
    generate_batch = HFEngine._generate_batch
    batches = []

    def interrupted(self, requests, sampling, check):
        batches.append(len(requests))
        if len(batches) == 3:
            raise KeyboardInterrupt
        return generate_batch(self, requests, sampling, check)

    monkeypatch.setattr(HFEngine, "_generate_batch", interrupted)
    out = tmp_path / "out"
    run_eval(tiny_model_dir, data, out, "-n", str(N), "--max-sequences", "8", code=130)
    error = capsys.readouterr().err
    rows = rows_of(out) if (out / "results.jsonl").stat().st_size else []
    assert error.endswith(
        f"dapo: interrupted after {len(rows)} of 30 responses; the same command goes on from there\n"
    )
    assert len(rows) <= 16 and not (out / "summary.json").exists()
    run_eval(tiny_model_dir, data, out, "-n", str(N))
    assert (out / "results.jsonl").read_bytes() == (done / "results.jsonl").read_bytes()


@pytest.mark.parametrize("size", ["1", "7"])
def test_batches_do_not_matter(tmp_path, done, tiny_model_dir, data, calls, size) -> None:
    run_eval(tiny_model_dir, data, tmp_path / "out", "-n", str(N), "--max-sequences", size)
    assert len(calls) == -(-30 // int(size))
    assert (tmp_path / "out/results.jsonl").read_bytes() == (done / "results.jsonl").read_bytes()


def test_the_shape_of_the_data_does_not_matter(tmp_path, done, tiny_model_dir, capsys) -> None:
    """Every problem six times, in any order, with one response to each row; and a preset's six."""
    rows = QUESTIONS + random.Random(1).sample(QUESTIONS * (N - 1), len(QUESTIONS) * (N - 1))
    repeated = write_jsonl(tmp_path / "repeated.jsonl", rows)
    run_eval(tiny_model_dir, repeated, tmp_path / "out", "-n", "1")
    line = "each problem stands 6 times in the file: -n 1 asks for 6 samples of each\n"
    assert f"data: 5 problems x 6 samples, from 30 rows\n{line}" in capsys.readouterr().out
    assert rows_of(tmp_path / "out") == rows_of(done)
    assert timeless(tmp_path / "out")["avg"] == timeless(done)["avg"]
    shuffled = write_jsonl(tmp_path / "shuffled.jsonl", QUESTIONS[::-1])
    run_eval(tiny_model_dir, shuffled, tmp_path / "other", "-n", str(N))
    by_prompt = {(row["prompt"], row["sample"]): row["response"] for row in rows_of(done)}
    assert {
        (row["prompt"], row["sample"]): row["response"] for row in rows_of(tmp_path / "other")
    } == by_prompt


def test_limit_counts_problems_and_a_preset_counts_samples_a_problem(tmp_path, tiny_model_dir) -> None:
    data = write_jsonl(tmp_path / "repeated.jsonl", QUESTIONS * 3)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    given = {"model": "m", "data": str(data), "limit": 2}

    def samples(preset=None, **more):
        return [p.samples for p in load_problems(make_options(given | more, preset), tokenizer).problems]

    assert samples() == [3, 3] and samples(samples=2) == [6, 6] and samples(temperature=0.0) == [1, 1]
    assert samples("aime") == [32, 32] and samples("aime", samples=2) == [6, 6]
    options = make_options(given | {"temperature": 0.5}, "aime")
    assert (options.temperature, options.top_p, options.max_tokens) == (0.5, 0.7, 20480)


@pytest.mark.parametrize(
    "options, named",
    [
        (["--temperature", "0.5"], "temperature (1.0 there, 0.5 now) differs"),
        (["--max-tokens", "7", "--seed", "3"], "max_tokens (8 there, 7 now), seed (0 there, 3 now) differ"),
        (["-n", "2"], "other settings: samples (6 there, 2 now) differs;"),
        (["--limit", "4"], "other settings: limit (None there, 4 now) differs;"),
        (["--mode", "math"], "mode ('exact' there, 'math' now)"),
    ],
)
def test_other_settings_are_refused(done, tiny_model_dir, data, capsys, options, named) -> None:
    before = {path.name: path.read_bytes() for path in done.iterdir()}
    run_eval(tiny_model_dir, data, done, "-n", str(N), *options, code=2)
    error = capsys.readouterr().err
    assert named in error and "choose another --out" in error and error.count("\n") == 1
    assert {path.name: path.read_bytes() for path in done.iterdir()} == before


def test_another_model_in_the_same_place_is_refused(tmp_path, done, tiny_model_dir, data, capsys) -> None:
    settings = json.loads((done / "settings.json").read_text()) | {"model_fingerprint": "of yesterday"}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    run_eval(tiny_model_dir, data, tmp_path, "-n", str(N), code=2)
    assert "model_fingerprint ('of yesterday' there" in capsys.readouterr().err


def test_other_problems_in_the_same_file_are_refused(tmp_path, tiny_model_dir, capsys) -> None:
    data, out = write_jsonl(tmp_path / "data.jsonl", QUESTIONS[:1]), tmp_path / "out"
    run_eval(tiny_model_dir, data, out)
    write_jsonl(data, QUESTIONS[1:2])
    run_eval(tiny_model_dir, data, out, code=2)
    assert "other settings: problems_sha256 ('" in capsys.readouterr().err


def test_fingerprint_changes_with_the_weights_and_the_tokenizer(tmp_path) -> None:
    weights, notes = tmp_path / "model.safetensors", tmp_path / "notes.md"
    weights.write_bytes(b"1234")
    seen = [fingerprint(str(tmp_path))]
    notes.write_text("of no importance")
    assert fingerprint(str(tmp_path)) == seen[0]
    os.utime(weights, ns=(0, 0))  # trained on in place: as large as before
    seen.append(fingerprint(str(tmp_path)))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    seen.append(fingerprint(str(tmp_path)))
    assert len(set(seen)) == 3


@pytest.mark.parametrize(
    "model, options, named",
    [
        ("{tmp}/none", [], ["MODEL {tmp}/none is not a folder"]),
        ("{tmp}", [], ["neither {tmp}/config.json", "nor {tmp}/model/config.json"]),
        (None, ["--temperature", "-1"], ["--temperature must be 0 (greedy) or more, got -1.0"]),
        (None, ["--temperature", "0", "-n", "4"], ["--samples 4 with --temperature 0", "--samples 1"]),
        (None, ["--top-p", "0"], ["--top-p must be over 0 and at most 1, got 0.0"]),
        (None, ["-n", "0"], ["--samples must be at least 1, got 0"]),
        (None, ["-n", "4", "-k", "2,5"], ["-k 5 is over the 4 samples"]),
        (None, ["-k", "two"], ["-k must be whole numbers", "'two'"]),
        (None, ["--template", "Q"], ["--template must contain {prompt}", "'Q'"]),
        ("nomodel", [], ["MODEL nomodel is not a folder"]),
        (
            None,
            ["--mode", "maths"],
            ["--mode: no reward mode 'maths'", "math_dapo", "or data_source, by which"],
        ),
        (None, ["--answer-pattern", "("], ["--answer-pattern '(' is not a valid pattern"]),
        (None, ["--answer-column", "gold"], ["no column 'gold': set --answer-column to one of: question"]),
        (None, ["--chat-template", "yes"], ["--chat-template no"]),
        (None, ["--max-prompt-tokens", "2"], ["longer than --max-prompt-tokens=2", "shortest has 4"]),
        (None, ["--max-tokens", "253"], ["longest prompt (4 tokens)", "256 positions: use --max-tokens 252"]),
        (None, ["--preset", "aime", "--max-tokens", "253"], ["use --max-tokens 252 or less"]),
    ],
)
def test_mistakes_are_one_line_and_write_nothing(
    tmp_path, tiny_model_dir, data, capsys, model, options, named
) -> None:
    model = str(tiny_model_dir) if model is None else model.format(tmp=tmp_path)
    run_eval(Path(model), data, tmp_path / "out", *options, code=2)
    error = capsys.readouterr().err
    assert error.startswith("dapo: ") and error.count("\n") == 1
    assert [part for part in named if part.replace("{tmp}", str(tmp_path)) not in error] == []
    assert not (tmp_path / "out").exists()


def test_columns_that_are_not_found_are_asked_for(tmp_path, tiny_model_dir, capsys) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"q": "1+1=", "gold": "2"}])
    run_eval(tiny_model_dir, data, tmp_path / "out", code=2)
    assert "has none of the columns prompt, question, problem: set --prompt-column to one of: q, gold" in (
        capsys.readouterr().err
    )
    run_eval(tiny_model_dir, data, tmp_path / "out", "--prompt-column", "q", "--answer-column", "gold")
    assert rows_of(tmp_path / "out")[0]["answer"] == "2"


def notes_of(tmp_path: Path, tiny_model_dir: Path, rows: list[dict], **given) -> tuple[str, list[str]]:
    """The line that describes the data, and the notes below it."""
    data = write_jsonl(tmp_path / "data.jsonl", rows)
    options = make_options({"model": "m", "data": str(data)} | given)
    problems = load_problems(options, AutoTokenizer.from_pretrained(tiny_model_dir))
    return problems.describe(), problems.notes(options)


def test_what_is_said_of_the_data(tmp_path, tiny_model_dir) -> None:
    def row(prompt: str, answer: str, mode: str) -> dict:
        return {"prompt": prompt, "answer": answer, "data_source": mode}

    rows = [row("a", "1", "gsm8k"), row("a", "2", "math"), row("b", "3", "unknown"), row("b", "3", "exact")]
    line, notes = notes_of(tmp_path, tiny_model_dir, rows)
    assert line == "3 problems x 1-2 samples, from 4 rows; 1 prompt with conflicting answers"
    assert notes == [
        "rows name their mode (gsm8k) in data_source; judged by math: --mode data_source judges by theirs",
        "each problem stands 1-2 times in the file: -n 1 asks for 1-2 samples of each",
    ]
    assert notes_of(tmp_path, tiny_model_dir, rows, mode="math", temperature=0.0)[1] == []
    assert notes_of(tmp_path, tiny_model_dir, rows, limit=1)[0] == "1 problem x 1 sample, from 1 row"
    assert notes_of(tmp_path, tiny_model_dir, rows[1:2]) == ("1 problem x 1 sample, from 1 row", [])


@pytest.mark.parametrize("answer", ["", "  ", None])
def test_rows_without_an_answer_are_refused(tmp_path, tiny_model_dir, answer) -> None:
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": answer}]
    with pytest.raises(
        UserError, match=r"row 2: answer is (empty|null); `dapo data prepare FILE OUT` writes"
    ):
        notes_of(tmp_path, tiny_model_dir, rows)


def test_empty_answers_of_csv_files_are_refused(tmp_path, tiny_model_dir, capsys) -> None:
    data = tmp_path / "data.csv"
    data.write_text("prompt,answer\n1+1=,2\n2+2=,\n")
    run_eval(tiny_model_dir, data, tmp_path / "out", code=2)
    assert f"DATA {data} row 2: answer is empty; `dapo data prepare" in capsys.readouterr().err


def test_dapo_schema_is_found(tmp_path, tiny_chat_model_dir) -> None:
    row = {
        "prompt": [{"role": "user", "content": "1+1"}],
        "reward_model": {"ground_truth": "2"},
        "answer": "no",
    }
    data = write_jsonl(tmp_path / "data.jsonl", [row])
    tokenizer = AutoTokenizer.from_pretrained(tiny_chat_model_dir)
    (problem,) = load_problems(make_options({"model": "m", "data": str(data)}), tokenizer).problems
    assert (problem.prompt.text, problem.prompt.row.answer) == ("<bos>[user]1+1[assistant]", "2")


def test_a_runs_folder_stands_for_its_model(tmp_path, tiny_model_dir, data, done) -> None:
    (tmp_path / "my-run").mkdir()
    (tmp_path / "my-run/model").symlink_to(tiny_model_dir, target_is_directory=True)
    run_eval(tmp_path / "my-run", data, tmp_path / "out", "-n", str(N))
    assert rows_of(tmp_path / "out") == rows_of(done)
    assert name_of(f"{tmp_path}/my-run") == name_of(f"{tmp_path}/my-run/model/") == "my-run"
    names = ["Qwen/Qwen2.5-0.5B", "hub:openai/gsm8k:main:test", "reasoning_gym:gcd", "a/b.c.parquet"]
    assert list(map(name_of, names)) == ["Qwen2.5-0.5B", "gsm8k-main-test", "gcd", "b.c"]


def test_two_at_once_do_not_write_the_same_file(tmp_path, tiny_model_dir, data, capsys) -> None:
    from dapo.evaluation.results import Results

    run_eval(tiny_model_dir, data, tmp_path / "out")
    first = Results(tmp_path / "out", [(0, 0)])
    run_eval(tiny_model_dir, data, tmp_path / "out", code=2)
    assert "another dapo eval is writing to" in capsys.readouterr().err
    first.close()
    run_eval(tiny_model_dir, data, tmp_path / "out")


def test_lines_come_by_the_clock_where_there_is_no_terminal(monkeypatch, capsys) -> None:
    monkeypatch.setattr("dapo.evaluation.progress.LINE_EVERY", 0.1)
    with EvalProgress(Console(), total=10, done=4) as progress:
        progress.add(True, 20)
        progress.add(False, 30)
        time.sleep(0.35)
    out = capsys.readouterr().out
    assert re.fullmatch(r"6/10 responses  right 50.0% of 2  \d+ tok/s\n", out)  # once: nothing new after it


# The core, with an engine and a scorer that do as they are told.


class Echo:
    """An engine whose completion to a prompt is the prompt; hands over parts of two."""

    def generate(self, requests, sampling, on_completion=None, check=None):
        completions = [Completion(list(r.prompt_ids), [0.0] * len(r.prompt_ids), True) for r in requests]
        for i, completion in enumerate(completions):
            on_completion(i, completion)
        return completions


class Slow:
    """A scorer whose verdicts come when they are given."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[Verdict]] = {}

    def submit(self, text: str, prompt: Prompt) -> Future[Verdict]:
        return self.futures.setdefault(text, Future())


class Letters:
    def decode(self, ids, skip_special_tokens=True) -> str:
        return "".join(map(chr, ids))


def prompt_of(text: str, index: int = 0, answer: str = "a") -> Prompt:
    return Prompt(index, text, [ord(c) for c in text], Row(text, answer, {}))


def test_a_response_is_reported_while_others_are_generated() -> None:
    """Not only when the next one is there: the second engine call waits for the first one's line."""
    scorer, got = Slow(), []
    reported = Future()

    class Waiting(Echo):
        def generate(self, requests, sampling, on_completion=None, check=None):
            on_completion(0, Completion([ord("a")], [0.0], True))
            scorer.futures["a"].set_result(Verdict(True, answer="a"))
            reported.result(timeout=20)
            on_completion(1, Completion([ord("b")], [0.0], False))
            scorer.futures["b"].set_result(Verdict(False, failure="slow"))

    def on_judged(i, judged):
        got.append((i, judged.text, judged.length, judged.truncated, judged.verdict.correct, judged.vote))
        if i == 0:
            reported.set_result(None)

    tasks = [Task(prompt_of("x"), (0,)), Task(prompt_of("y"), (1,))]
    respond(tasks, SamplingParams(5), Waiting(), scorer, Letters(), on_judged)
    assert got == [(0, "a", 1, False, True, "\0right"), (1, "b", 1, True, False, None)]


def test_what_the_receiver_raises_comes_out() -> None:
    """Also of the last response, whose verdict comes after the last token."""
    scorer = Slow()
    threading.Timer(0.2, scorer.submit("x", None).set_result, [Verdict(True)]).start()

    def full_disk(i, judged):
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        respond([Task(prompt_of("x"), (0,))], SamplingParams(5), Echo(), scorer, Letters(), full_disk)


def test_nothing_is_reported_after_an_interrupt() -> None:
    """A verdict that comes then may be of a scorer that is being stopped."""
    scorer, got = Slow(), []

    class Interrupted(Echo):
        def generate(self, requests, sampling, on_completion=None, check=None):
            super().generate(requests, sampling, on_completion)
            scorer.futures["x"].set_running_or_notify_cancel()
            threading.Timer(0.2, scorer.futures["x"].set_result, [Verdict(False, failure="closed")]).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        respond(
            [Task(prompt_of("x"), (0,))],
            SamplingParams(5),
            Interrupted(),
            scorer,
            Letters(),
            lambda *row: got.append(row),
        )
    assert got == []


class Graded:
    """Right is "a", "?" has no answer, the rest answers itself."""

    def submit(self, text: str, prompt: Prompt) -> Future[Verdict]:
        future: Future[Verdict] = Future()
        future.set_result(Verdict(text == "a", answer=None if text == "?" else text))
        return future


class Scripted(Echo):
    """Samples of three prompts: a majority, a tie, and one that is mostly silent."""

    TEXTS = ("aab?", "abb?"[::-1], "????")

    def generate(self, requests, sampling, on_completion=None, check=None):
        for i, request in enumerate(requests):
            text = (
                "b" if sampling.temperature == 0 else self.TEXTS[request.noise_key[2]][request.noise_key[3]]
            )
            on_completion(i, Completion([ord(text)], [0.0], finished=text != "b"))


def test_held_out_figures_of_a_training_run() -> None:
    values = {"run_dir": "r", "model": {"path": "m"}, "data": {"train": {"source": "s"}}}
    values |= {"train": {"steps": 1}, "eval": {"samples_per_prompt": 4}}
    config = Config.model_validate(values)
    prompts = [prompt_of(f"q{i}", i) for i in range(3)]
    result, responses = evaluate(config, 7, prompts, Scripted(), Graded(), Letters())
    assert (result.step, result.prompts, result.samples_per_prompt) == (7, 3, 4)
    assert result.accuracy == 3 / 12 and result.pass_at_k == 2 / 3 and result.maj_at_k == 1 / 3
    assert 0 <= result.accuracy_low < 3 / 12 < result.accuracy_high < 1
    assert result.truncated_frac == 3 / 12 and result.no_answer_frac == 6 / 12
    assert result.greedy_accuracy == 0 and result.greedy_answer_anywhere == 0
    assert [(r.response, r.accuracy, r.extracted, r.greedy) for r in responses[:4]] == [
        ("b", 0, "b", True),
        ("b", 0, "b", True),
        ("b", 0, "b", True),
        ("a", 1, "a", False),
    ]


def test_report_of_a_run_shows_the_interval_and_the_new_figures(tmp_path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "accuracy": 0.5}\n{"step": 2, "accuracy": 0.5}\n')
    (tmp_path / "eval").mkdir()
    figures = {"accuracy": 0.5, "accuracy_low": 0.41, "accuracy_high": 0.6, "maj_at_k": 0.75}
    figures |= {"truncated_frac": 0.125, "no_answer_frac": 0.0625, "samples_per_prompt": 4}

    def table_and_bars(*steps: dict) -> tuple[list, int]:
        for step, extra in enumerate(steps):
            (tmp_path / f"eval/step_{step:06d}.json").write_text(json.dumps(figures | extra))
        page = write_report(tmp_path).read_text(encoding="utf-8")
        body = re.search(r"<tbody>(.*?)</tbody>", page, re.DOTALL)[1]
        rows = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", body)]
        return rows, page.count("stroke-opacity: 0.6")

    rows, bars = table_and_bars({}, {"accuracy_low": 0.3})
    assert rows == [
        ["Accuracy, sampled", "50.0%", "50.0%", "+0.0 points"],
        ["95% interval", "41.0 – 60.0%", "30.0 – 60.0%", ""],
        ["maj@4", "75.0%", "75.0%", "+0.0 points"],
        ["Cut at the limit", "12.5%", "12.5%", "+0.0 points"],
        ["Without an answer", "6.2%", "6.2%", "+0.0 points"],
    ]
    assert bars == 2  # an upright bar over each held-out point
    rows, bars = table_and_bars({"accuracy_low": None}, {})
    assert rows[1] == ["95% interval", "–", "41.0 – 60.0%", ""] and bars == 1


# The page.


def test_hostile_responses_are_escaped(done: Path) -> None:
    evil = "<script>alert('x')</script>\x00\x1b[31m\ud800"
    rows = [row | dict.fromkeys(("response", "prompt", "answer", "extracted"), evil) for row in rows_of(done)]
    summary = summary_of(done)
    summary["per_problem"] = [
        line | {"answer": evil, "frequent_answers": [{"answer": evil, "count": 3, "right": False}]}
        for line in summary["per_problem"]
    ]
    summary |= {"command": evil, "scorer_failures": {evil: 2}}
    summary["settings"] = summary["settings"] | {"model": evil, "data": evil}
    page = evaluation_page(summary, rows)
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;␀␛[31m\ufffd" in page
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", page) and page.encode()


def test_page_shows_problems_and_needs_no_network(done: Path) -> None:
    page, summary = (done / "summary.html").read_text(encoding="utf-8"), summary_of(done)
    references = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]*)|url\(\s*["']?([^"')]*)""", page)
    assert references and all((a or b).startswith("#") for a, b in references)
    assert "@import" not in page and "<link" not in page
    assert page.count("<svg ") == 2 and page.count('class="bar"') == 5
    widths = re.findall(r'<span style="width: ([\d.]+)%">', page)
    assert widths == [f"{100 * line['accuracy']:.1f}" for line in summary["per_problem"]]
    shown = [one for line in summary["per_problem"] for one in line["frequent_answers"]]
    assert all(f"{one['answer']}{' ✓' * one['right']} × {one['count']}" in page for one in shown)
    assert re.findall(r"<h3>(.*?)</h3>", page)[2:] == ["Right", "Wrong", "Truncated"]
    texts = [page, (done / "summary.md").read_text(encoding="utf-8")]
    assert not any(re.search("cut at|<th>Cut", text, re.IGNORECASE) for text in texts)
    assert all(re.search("truncated", text, re.IGNORECASE) for text in texts)


def bars_of(values: list[float], samples: int) -> tuple[list[str], list[float]]:
    """Labels of the accuracy chart's axis, and where its bars stand."""
    rows = [{"accuracy": value, "samples": samples} for value in values]
    svg = accuracy_chart({"per_problem": rows})["svg"]
    counts, edges = np.histogram(values, bins=accuracy_edges(samples))
    centres = [round((a + b) / 2, 3) for a, b, count in zip(edges, edges[1:], counts) if count]
    return re.findall(r"<text[^>]*>([^<]*%)</text>", svg), centres


def test_accuracies_are_drawn_from_0_to_100_percent() -> None:
    labels = ["0%", "20%", "40%", "60%", "80%", "100%"]
    assert bars_of([0, 0, 1], 1) == (labels, [0.05, 0.95])
    assert bars_of([0, 0.5, 1], 2) == (labels, [0.167, 0.5, 0.833])
    for n in (3, 7, 20):  # each value has its own bar, in spite of rounding
        assert len(bars_of([i / n for i in range(n + 1)], n)[1]) == n + 1 == len(accuracy_edges(n)) - 1
    assert len(accuracy_edges(1000)) - 1 == 21


def test_nothing_right_says_what_the_interval_cannot(done: Path) -> None:
    rows = [row | {"accuracy": 0} for row in rows_of(done)]
    facts = {"date": "today", "command": "c", "tokens_per_s": 1.0, "left_out": {}}
    settings = summary_of(done)["settings"]
    nothing, something = (summarise(r, settings, [1], facts) for r in (rows, rows_of(done)))
    says = "with 5 problems the true value may still be up to about 3/5 (60.0%)"
    assert "avg@6 0.0% (95 % interval 0.0 to 0.0)" in describe(nothing)
    assert says in describe(nothing) and says in markdown(nothing) and says in evaluation_page(nothing, rows)
    assert "may still be" not in describe(something) + evaluation_page(something, rows_of(done))
    (one,) = [summarise(rows[:1], settings, [1], facts)]
    assert "1 problem, 1 response, " in describe(
        one
    ) and "with 1 problem the true value may still be anything" in describe(one)
    assert "to 1 problem<" in evaluation_page(one, rows[:1]).replace(", 1 tokens/s", "")


def test_titles_are_names(done: Path) -> None:
    summary = summary_of(done)
    summary["settings"] |= {"model": "/home/me/runs/mine/model", "data": "/data/aime.parquet"}
    assert markdown(summary).startswith("# mine on aime\n")
    assert "<h1>mine</h1>" in evaluation_page(summary, rows_of(done))
    assert summary["samples"] == summary["settings"]["samples"] == N


def test_the_right_answer_of_a_whole_solution_is_its_number() -> None:
    row = {"problem": 0, "answer": "9 * 2 = 18\n#### 18", "accuracy": 0.5, "frequent_answers": []}
    row |= {"length_mean": 4.0, "truncated": 1, "samples": 2}
    assert [problem_view(row, "p", mode)["answer"] for mode in ("gsm8k", "data_source")] == ["18", "18"]
    assert problem_view(row, "p", "math")["answer"] == row["answer"]  # as it is judged


def test_half_a_surrogate_pair_survives_the_file(tmp_path: Path) -> None:
    from dapo.evaluation.results import Results, write_settings

    write_settings(tmp_path, {})
    row = {"problem": 0, "sample": 0, "response": "\ud800 é \x85\u2028"}
    results = Results(tmp_path, [(0, 0)])
    results.add(row)
    results.close()
    before = (tmp_path / "results.jsonl").read_bytes()
    results = Results(tmp_path, [(0, 0)])
    assert results.missing == [] and results.finish() == [row]
    assert (tmp_path / "results.jsonl").read_bytes() == before
    results.close()


# The real thing.


@pytest.mark.slow
def test_smollm2_on_aime(request, tmp_path, capsys) -> None:
    root = request.config.rootpath
    model, data = root / "models/SmolLM2-135M-Instruct", root / Path("../shared/data/aime-2024.parquet")
    if not (model / "config.json").is_file() or not data.is_file():
        pytest.skip("needs models/SmolLM2-135M-Instruct and ../shared/data/aime-2024.parquet")
    options = ["--limit", "8", "--temperature", "0", "--max-tokens", "24", "--out", str(tmp_path / "out")]
    assert main(["eval", str(model), str(data), *options]) == 0
    assert "data: 8 problems x 1 sample, from 256 rows" in capsys.readouterr().out
    rows = rows_of(tmp_path / "out")
    assert len(rows) == 8 and all(
        row["prompt"].count("Solve the following math problem") == 1 for row in rows
    )
    assert all(0 <= int(row["answer"]) <= 999 and row["length"] <= 24 for row in rows)
    words = [word for row in rows for word in re.findall("[a-z]{3,}", row["response"])]
    assert len(words) > 20 and {"the", "find"} <= set(words)  # it speaks; some responses are a number alone
