"""The report of a run: its numbers, its charts, and that it survives whatever a run folder holds."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from dapo.report import save_curves, write_report
from dapo.report.curves import smooth

TITLES = [
    "Accuracy",
    "Entropy",
    "Groups without a signal",
    "Response length",
    "Reward",
    "Mean probability",
    "Clipped tokens",
    "Approximate KL",
    "Gradient norm and learning rate",
    "Where the time went",
    "Rollout mismatch",
]


def step_row(step: int) -> dict:
    return {
        **{"step": step, "update": 4 * step, "epoch": 0, "accuracy": 0.1 * step, "reward_mean": -1.0},
        **{"response_length_mean": 100.0, "response_length_max": 250, "reward_failures": 0},
        **{"groups_sampled": 10, "groups_kept": 4, "groups_all_correct": 1, "groups_all_wrong": 5},
        **{"grad_norm": 0.2, "lr": 1e-6, "num_tokens": 1500, "entropy": 0.5, "mean_prob": 0.8},
        **{"approx_kl": 2e-4, "clip_frac_low": 0.0, "clip_frac_high": 0.01, "skipped_updates": 0},
        **{"rollout_mismatch_kl": 1e-3, "rollout_mismatch_max": 0.2, "peak_memory_gb": 2.0 + step},
        **{"time_rollout_s": 6.0, "time_reward_s": 1.0, "time_train_s": 2.0, "time_sync_s": 1.0},
    }


def write_rows(path: Path, rows: list[dict], tail: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + tail, encoding="utf-8")


def write_eval(run: Path, step: int, accuracy: float, responses: list[dict]) -> None:
    summary = {"step": step, "prompts": 3, "samples_per_prompt": 4, "temperature": 1.0, "top_p": 0.9}
    summary |= {"accuracy": accuracy, "pass_at_k": 0.75, "answer_anywhere": 0.5, "greedy_accuracy": 0.25}
    summary |= {"greedy_answer_anywhere": 0.625, "response_length_mean": 90.0 + step}
    write_rows(run / f"eval/step_{step:06d}.json", [summary])
    write_rows(run / f"eval/step_{step:06d}.jsonl", responses)


def response(prompt: str, text: str, accuracy: int | None, greedy: bool = False) -> dict:
    row = {"prompt": prompt, "response": text, "answer": f"gold of {prompt}", "accuracy": accuracy}
    return row | {"length": len(text), "truncated": False, "greedy": greedy}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three steps, two evaluations, a configuration."""
    folder = tmp_path / "my-run"
    write_rows(folder / "metrics.jsonl", [step_row(step) for step in (1, 2, 3)])
    (folder / "config.yaml").write_text("algorithm:\n  clip_high: 0.28\n", encoding="utf-8")
    for step, accuracy in ((0, 0.125), (3, 0.5)):
        rows = [
            response(prompt, f"{kind} {step} {prompt}", int(step == 3), kind == "greedy")
            for prompt in ("first", "second")
            for kind in ("sampled", "greedy")
        ]
        write_eval(folder, step, accuracy, rows)
    return folder


def page(run: Path) -> str:
    out = write_report(run)
    assert out == run / "report.html"
    assert not [path for path in run.iterdir() if path.name.startswith(".")], "temporary file left behind"
    return out.read_text(encoding="utf-8")


def shown_tiles(html: str) -> dict[str, tuple[str, str]]:
    found = re.findall(r'<div><dt>(.*?)</dt><dd class="value">(.*?)</dd><dd>(.*?)</dd></div>', html)
    return {label: (value, note) for label, value, note in found}


def shown_charts(html: str) -> list[str]:
    return [unescape(title) for title in re.findall(r"<h3>(.*?)(?: <small>.*?</small>)?</h3>", html)]


def shown_table(html: str) -> list[list[str]]:
    body = re.search(r"<tbody>(.*?)</tbody>", html, re.DOTALL)
    assert body
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>(.*?)</tr>", body[1])]


def test_tiles_hold_the_numbers_of_the_run(run: Path) -> None:
    assert shown_tiles(page(run)) == {
        "Held-out accuracy": ("12.5% → 50.0%", "+37.5 points, step 0 to 3"),
        "Steps": ("3", "12 updates"),
        "Tokens trained": ("4,500", "1,500 per step"),
        "Wall time": ("30.0 s", "10.0 s per step"),
        "Groups kept": ("40.0%", "12 of 30"),
        "Peak memory": ("5.0 GB", "over all steps"),
    }


def test_page_follows_the_order_of_the_sections(run: Path) -> None:
    html = page(run)
    assert "<h1>my-run</h1>" in html
    assert shown_charts(html) == TITLES
    assert html.count("<svg ") == html.count("<figcaption>") == len(TITLES)
    headings = re.findall(r"<h2>(.*?)</h2>", html)
    assert headings[2:] == ["Evaluations before and after", "Rollouts before and after", "Configuration"]
    assert "Of 30.0 s in all: rollout 60.0%, reward 10.0%, train 20.0%, sync 10.0%." in html
    assert "clip_high: 0.28" in html[html.index("<details>") :]


def test_evaluation_table_compares_first_and_last(run: Path) -> None:
    html = page(run)
    assert shown_table(html) == [
        ["Accuracy, sampled", "12.5%", "50.0%", "+37.5 points"],
        ["Accuracy, greedy", "25.0%", "25.0%", "+0.0 points"],
        ["Right answer anywhere, sampled", "50.0%", "50.0%", "+0.0 points"],
        ["Right answer anywhere, greedy", "62.5%", "62.5%", "+0.0 points"],
        ["pass@4", "75.0%", "75.0%", "+0.0 points"],
        ["Mean response length, tokens", "90.0", "93.0", "+3.0 tokens"],
    ]
    assert "3 prompts, 4 samples each, temperature 1.0, top-p 0.9." in html


def test_evaluations_in_the_metrics_stand_in_for_the_folder(tmp_path: Path) -> None:
    rows = [step_row(step) for step in (1, 2, 3)]
    rows[0] |= {"eval_accuracy": 0.6, "eval_pass_at_k": 0.9}
    rows[2] |= {"eval_accuracy": 0.5, "eval_pass_at_k": None}
    write_rows(tmp_path / "metrics.jsonl", rows)
    html = page(tmp_path)
    assert shown_tiles(html)["Held-out accuracy"] == ("60.0% → 50.0%", "−10.0 points, step 1 to 3")
    assert shown_table(html) == [
        ["Accuracy, sampled", "60.0%", "50.0%", "−10.0 points"],
        ["pass@k", "90.0%", "–", "–"],
    ]


def test_rollouts_pair_the_same_prompt_before_and_after(run: Path) -> None:
    html = page(run)
    html = html[html.index("Rollouts before and after") :]
    places = [
        html.index(f"<pre>{kind} {step} {prompt}</pre>")
        for prompt in ("first", "second")
        for kind in ("greedy", "sampled")
        for step in (0, 3)
    ]
    assert places == sorted(places)
    assert html.count("✗ wrong") == html.count("✓ right") == 4
    assert html.index("<pre>gold of first</pre>") < places[0]


def test_training_rollouts_stand_in_for_evaluations(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", [step_row(1)])
    for step, prompt in ((1, "early"), (2, "middle"), (3, "late")):
        write_rows(tmp_path / f"rollouts/step_{step:06d}.jsonl", [response(prompt, f"of {prompt}", None)] * 2)
    html = page(tmp_path)
    assert "<pre>of early</pre>" in html and "<pre>of late</pre>" in html and "of middle" not in html
    assert html.count("? not graded") == 2
    assert "drew different prompts" in html


def test_at_most_six_prompts_spread_over_the_file(run: Path) -> None:
    for step in (0, 3):
        write_eval(run, step, 0.5, [response(f"prompt-{i}-", "text", 1) for i in range(60)])
    shown = re.findall(r"<pre>prompt-(\d+)-</pre>", page(run))
    assert shown == ["0", "10", "20", "30", "40", "50"]


def test_text_of_the_run_is_escaped(run: Path) -> None:
    evil = "<script>alert('x')</script>\x00\x1b[31m\ud800"
    write_eval(run, 0, 0.1, [response(evil, evil, 1, greedy=True)])
    write_eval(run, 3, 0.1, [response(evil, evil, 0, greedy=True)])
    (run / "config.yaml").write_text("name: </pre><script>", encoding="utf-8")
    html = page(run)
    assert "<script" not in html
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;␀␛[31m\ufffd" in html
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", html)


def test_long_text_keeps_both_ends_and_says_its_length(run: Path) -> None:
    long = "START" + "x" * 100_000 + "The answer is 42"
    for step in (0, 3):
        write_eval(run, step, 0.1, [response("p", long, 1)])
    html = page(run)
    assert f"{len(long) - 600:,} of {len(long):,} characters left out" in html
    assert "START" in html and "The answer is 42" in html
    assert max(map(len, re.findall(r"x+", html))) < 600


def test_page_needs_no_network(run: Path) -> None:
    html = page(run)
    references = re.findall(r"""(?:src|href)\s*=\s*["']?([^"'\s>]*)|url\(\s*["']?([^"')]*)""", html)
    assert references
    assert all((a or b).startswith("#") for a, b in references)
    assert "@import" not in html and "<script" not in html and "<link" not in html


def test_charts_without_values_are_left_out(tmp_path: Path) -> None:
    rows = [
        step_row(step) | {"mean_prob": None, "approx_kl": math.nan, "entropy": None} for step in (1, 2, 3)
    ]
    for row in rows:
        for key in ("grad_norm", "lr", "rollout_mismatch_kl"):
            del row[key]
    rows[1]["entropy"] = 0.4
    write_rows(tmp_path / "metrics.jsonl", rows)
    left_out = {"Mean probability", "Approximate KL", "Gradient norm and learning rate"}
    assert shown_charts(page(tmp_path)) == [title for title in TITLES if title not in left_out]


@pytest.mark.parametrize("rows", [[], [{"step": 1}], [{"step": 1, "entropy": "?", "num_tokens": None}], [{}]])
def test_a_run_without_values_gives_a_readable_page(tmp_path: Path, rows: list[dict]) -> None:
    write_rows(tmp_path / "metrics.jsonl", rows)
    html = page(tmp_path)
    assert "No values recorded yet" in html and "<svg" not in html
    assert shown_tiles(html) == {
        "Held-out accuracy": ("–", "not recorded"),
        "Steps": (str(len(rows)), ""),
        **dict.fromkeys(("Tokens trained", "Wall time", "Groups kept", "Peak memory"), ("–", "not recorded")),
    }
    assert save_curves(tmp_path, tmp_path / "curves.png").stat().st_size > 0


def test_one_step_is_drawn(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", [step_row(1)])
    write_rows(tmp_path / "eval/step_000000.json", [{"step": 0, "accuracy": 0.25}])
    html = page(tmp_path)
    assert shown_charts(html) == TITLES
    assert shown_tiles(html)["Held-out accuracy"] == ("25.0%", "at step 0, the only evaluation")
    assert shown_tiles(html)["Steps"] == ("1", "4 updates")
    assert shown_table(html) == [["Accuracy, sampled", "25.0%"]]


def test_half_written_last_lines_are_ignored(run: Path) -> None:
    whole = page(run)
    for path in [run / "metrics.jsonl", *run.glob("eval/*.jsonl")]:
        cut = json.dumps(step_row(4) | {"prompt": "é"}, ensure_ascii=False).encode()
        path.write_bytes(path.read_bytes() + cut[:-3])  # in the middle of a character
    (run / "eval/step_000004.json").write_text('{"step": 4, "accu', encoding="utf-8")
    assert page(run) == whole


def test_a_step_run_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", [step_row(1), step_row(2), step_row(2) | {"num_tokens": 500}])
    assert shown_tiles(page(tmp_path))["Tokens trained"] == ("2,000", "1,000 per step")


def test_failures_are_pointed_out(tmp_path: Path) -> None:
    rows = [step_row(1) | {"reward_failures": 3}, step_row(2) | {"skipped_updates": 1, "reward_failures": 2}]
    write_rows(tmp_path / "metrics.jsonl", rows)
    assert "Worth a look – reward failures: 5, skipped updates: 1." in page(tmp_path)


@pytest.mark.parametrize("act", [write_report, lambda run: save_curves(run, run / "curves.png")])
def test_missing_metrics_are_named_in_one_line(tmp_path: Path, act) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl not found: name the output folder") as error:
        act(tmp_path)
    assert str(tmp_path / "metrics.jsonl") in str(error.value) and "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_curves_are_saved_by_suffix(run: Path) -> None:
    picture = matplotlib.image.imread(save_curves(run, run / "docs/curves.png"))
    assert picture.shape[1] > 1000 and picture.std() > 0.01
    svg = ElementTree.parse(save_curves(run, run / "docs/curves.svg")).getroot()
    assert svg.tag.endswith("svg")
    assert sorted(path.name for path in (run / "docs").iterdir()) == ["curves.png", "curves.svg"]


def test_long_runs_are_smoothed_and_drawn(tmp_path: Path) -> None:
    write_rows(tmp_path / "metrics.jsonl", [step_row(step) for step in range(1, 401)])
    html = page(tmp_path)
    assert shown_charts(html) == TITLES
    assert shown_tiles(html)["Wall time"][0] == "1 h 6 min"
    assert len(html) < 1_000_000


def test_smoothing_keeps_level_and_removes_noise() -> None:
    np.testing.assert_allclose(smooth(np.full(50, 3.0)), 3.0)
    noise = np.random.default_rng(0).normal(size=200)
    assert smooth(noise).std() < 0.5 * noise.std()
    line = np.arange(100.0)
    np.testing.assert_allclose(smooth(line)[20:-20], line[20:-20])


def test_header_names_the_model_and_the_data(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "accuracy": 0.5}\n')
    page = write_report(tmp_path).read_text()
    assert "DAPO training run</p>" in page  # a configuration that is not there is not missed
    (tmp_path / "config.yaml").write_text("model: {path: models/Some-LM}\ndata: {train: {source: a.jsonl}}\n")
    assert "DAPO training run – Some-LM on a.jsonl</p>" in write_report(tmp_path).read_text()
