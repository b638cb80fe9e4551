"""Whole runs through the command: what they leave behind, that a seed fixes them, and that they learn."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tiny import of_training, tiny_config, unfinished, write_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo.cli import main
from dapo.config import load_config
from dapo.trainer import Trainer

NAMES = """
step update epoch reward_mean accuracy response_length_mean response_length_max truncated_frac
overlong_penalty_mean reward_failures num_gen_batches groups_sampled groups_kept groups_all_correct
groups_all_wrong staleness_max loss grad_norm lr num_tokens entropy mean_prob ratio_mean ratio_max
approx_kl clip_frac_low clip_frac_high dual_clip_frac rollout_mismatch_kl rollout_mismatch_max
rollout_is_clip_frac skipped_updates time_rollout_s time_reward_s time_train_s time_sync_s tokens_per_s
peak_memory_gb memory_rollout_gb memory_train_gb
"""
KEYS = set(NAMES.split())
EVAL_KEYS = {"eval_accuracy", "eval_pass_at_k"}


def strict_rows(path: Path) -> list[dict]:
    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    text = path.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def train(folder: Path, model_dir: Path, **overrides) -> list[dict]:
    """Runs to the end; the rows of metrics.jsonl."""
    assert main(["train", str(tiny_config(folder, model_dir, **overrides))]) == 0
    return strict_rows(folder / "run" / "metrics.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model_dir: Path) -> Path:
    """Three steps of two updates, evaluated before them, after the second and after the last."""
    folder = tmp_path_factory.mktemp("training")
    held_out = write_jsonl(
        folder / "held_out.jsonl", [{"prompt": f"{i}*{i}=", "answer": ""} for i in range(3)]
    )
    options = {"train.steps": 3, "train.mini_batch_prompts": 1, "logging.tensorboard": True}
    options |= {"data.eval": {"source": str(held_out)}, "eval.every": 2}
    train(folder, tiny_model_dir, **options)
    return folder


@pytest.fixture
def run(folder: Path) -> Path:
    return folder / "run"


def test_metrics_have_a_line_a_step_with_the_keys_of_the_contract(run: Path) -> None:
    rows = strict_rows(run / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3] and [row["update"] for row in rows] == [2, 4, 6]
    assert [set(row) for row in rows] == [KEYS, KEYS | EVAL_KEYS, KEYS | EVAL_KEYS]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values())
        assert 0 < row["groups_kept"] <= row["groups_sampled"] == 4 * row["num_gen_batches"]
        assert 0 < row["mean_prob"] < 1 and row["grad_norm"] > 0 and row["lr"] == 1e-3
        assert row["rollout_mismatch_max"] < 1e-4  # engine and trainer compute the same policy
        assert row["tokens_per_s"] > 0 and row["peak_memory_gb"] == int(row["peak_memory_gb"]) > 0
    prompts_taken = [sum(row["groups_sampled"] for row in rows[:i]) for i in (1, 2, 3)]
    assert [row["epoch"] for row in rows] == [(taken - 1) // 8 for taken in prompts_taken]


def test_config_reads_back_to_the_same(folder: Path, run: Path) -> None:
    assert load_config(run / "config.yaml") == load_config(folder / "config.yaml")


def test_rollouts_hold_what_the_metrics_sum_up(run: Path) -> None:
    for metrics in strict_rows(run / "metrics.jsonl"):
        rows = strict_rows(run / "rollouts" / f"step_{metrics['step']:06d}.jsonl")
        assert len(rows) == metrics["groups_sampled"] * 4
        keys = ["prompt", "response", "answer", "reward", "accuracy", "length", "truncated", "kept"]
        keys += ["overlong_penalty", "reward_terms", "failure"]
        assert all(list(row) == keys for row in rows)
        groups = [rows[i : i + 4] for i in range(0, len(rows), 4)]
        assert all(len({row["prompt"] for row in group}) == 1 for group in groups)
        for group in groups:
            assert {row["kept"] for row in group} == {0 < sum(row["accuracy"] for row in group) < 4}
        for row in rows:
            penalty = -max(row["length"] - 3, 0) / 2
            assert row["accuracy"] == any(character.isdigit() for character in row["response"])
            assert row["reward"] == (1 if row["accuracy"] else -1) + penalty
            assert (row["overlong_penalty"], row["reward_terms"], row["failure"]) == (penalty, {}, None)
            assert row["length"] <= 5 and (row["length"] == 5 or not row["truncated"])
        for key, name in (
            ("reward", "reward_mean"),
            ("accuracy", "accuracy"),
            ("truncated", "truncated_frac"),
        ):
            assert metrics[name] == pytest.approx(sum(row[key] for row in rows) / len(rows))
        assert metrics["response_length_mean"] == sum(row["length"] for row in rows) / len(rows)
        assert metrics["groups_kept"] == sum(group[0]["kept"] for group in groups)


def test_evaluations_are_written_before_during_and_after(run: Path) -> None:
    metrics = {row["step"]: row for row in strict_rows(run / "metrics.jsonl")}
    assert sorted(path.name for path in (run / "eval").iterdir()) == sorted(
        f"step_{step:06d}{suffix}" for step in (0, 2, 3) for suffix in (".json", ".jsonl")
    )
    for step in (0, 2, 3):
        result = json.loads((run / "eval" / f"step_{step:06d}.json").read_text())
        rows = strict_rows(run / "eval" / f"step_{step:06d}.jsonl")
        sampled = [row["accuracy"] for row in rows if not row["greedy"]]
        assert len(sampled) == 3 * 2 and len(rows) == 3 * 2 + 3 and result["step"] == step
        assert result["accuracy"] == sum(sampled) / 6
        assert result["pass_at_k"] == sum(any(sampled[i : i + 2]) for i in (0, 2, 4)) / 3
        if step:
            assert metrics[step]["eval_accuracy"] == result["accuracy"]
            assert metrics[step]["eval_pass_at_k"] == result["pass_at_k"]


def test_tensorboard_has_the_metrics(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    metrics = strict_rows(run / "metrics.jsonl")
    assert set(events.Tags()["scalars"]) >= KEYS | {"eval/accuracy", "eval/greedy_accuracy"}
    for key in ("reward_mean", "entropy", "loss", "num_tokens"):
        written = [(event.step, event.value) for event in events.Scalars(key)]
        assert written == [(row["step"], pytest.approx(row[key], rel=1e-6)) for row in metrics]
    assert [event.step for event in events.Scalars("eval/accuracy")] == [0, 2, 3]


def test_run_folder_holds_a_report_a_model_and_nothing_half_written(run: Path, tiny_model_dir: Path) -> None:
    assert "Held-out accuracy" in (run / "report.html").read_text(encoding="utf-8")
    assert unfinished(run) == []
    before = AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict()
    after = AutoModelForCausalLM.from_pretrained(run / "model").state_dict()
    assert before.keys() == after.keys()
    moved = {name: (after[name] - before[name]).abs().max().item() for name in before}
    assert all(0 < change < 0.05 for change in moved.values()), moved  # six steps of 1e-3 and weight decay
    tokenizers = [AutoTokenizer.from_pretrained(path) for path in (tiny_model_dir, run / "model")]
    assert tokenizers[0]("12+a b")["input_ids"] == tokenizers[1]("12+a b")["input_ids"]


def test_a_seed_fixes_the_run(tmp_path: Path, tiny_model_dir: Path) -> None:
    runs = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / name).mkdir()
        runs[name] = [of_training(row) for row in train(tmp_path / name, tiny_model_dir, seed=seed)]
    assert runs["a"] == runs["b"] and runs["a"] != runs["c"]
    a, b, c = (tmp_path / name / "run" for name in "abc")
    assert (a / "rollouts/step_000002.jsonl").read_bytes() == (b / "rollouts/step_000002.jsonl").read_bytes()
    weights = [(path / "model/model.safetensors").read_bytes() for path in (a, b, c)]
    assert weights[0] == weights[1] != weights[2]


def test_kept_surplus_is_trained_on_later(tmp_path: Path, tiny_model_dir: Path) -> None:
    keep = {"algorithm.surplus_groups": "keep", "rollout.prompts_per_generation": 8, "train.steps": 4}
    rows = train(tmp_path, tiny_model_dir, **keep)
    assert rows[0]["groups_kept"] >= 6 and rows[0]["staleness_max"] == 0
    assert [row["staleness_max"] for row in rows[1:3]] == [1, 2] and rows[1]["groups_sampled"] == 0
    assert all(row["num_tokens"] > 0 and row["skipped_updates"] == 0 for row in rows)
    # Off policy: the second step's ratios are to the weights of the first step's rollouts.
    assert rows[0]["ratio_max"] == 1 < rows[1]["ratio_max"] < 1.5


NEVER_RIGHT = {"reward": {"answer_pattern": "no such answer"}, "algorithm.max_generation_batches": 2}


def test_too_few_groups_end_the_run_with_one_line(tmp_path: Path, tiny_model_dir: Path, capsys) -> None:
    config = tiny_config(tmp_path, tiny_model_dir, **NEVER_RIGHT)
    assert main(["train", str(config)]) == 1
    error = capsys.readouterr().err
    assert (
        error.startswith("dapo: step 1: after 2 generation batches only 0 groups") and error.count("\n") == 1
    )
    assert "none right: 8" in error
    assert (tmp_path / "run/metrics.jsonl").read_text() == "" and main(["report", str(tmp_path / "run")]) == 0


def test_too_few_groups_can_be_gone_on_with(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = train(tmp_path, tiny_model_dir, **NEVER_RIGHT, **{"algorithm.on_too_few_groups": "train"})
    assert [(row["groups_all_wrong"], row["groups_kept"], row["update"], row["loss"]) for row in rows] == [
        (8, 0, 0, 0)
    ] * 2
    before, after = (
        AutoModelForCausalLM.from_pretrained(path).state_dict()
        for path in (tiny_model_dir, tmp_path / "run/model")
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_learnable_task_is_learnt_with_every_technique_on(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The last digit of a response must be 7: about 1 in 17 responses at first."""
    rows = [{"prompt": f"{a}{b}=", "answer": "7"} for a in "abcd" for b in "xy"]
    task = {"data.train": {"source": str(write_jsonl(tmp_path / "seven.jsonl", rows))}}
    task |= {"reward": {"mode": "exact", "answer_pattern": r"\d"}}
    task |= {"optimizer": {"learning_rate": 5e-3, "warmup_steps": 2}}
    sizes = {"prompts_per_step": 8, "prompts_per_generation": 16, "group_size": 16, "max_response_length": 6}
    task |= {f"rollout.{key}": value for key, value in sizes.items()}
    task |= {
        "algorithm": {"overlong_cache_length": 3, "max_generation_batches": 3, "on_too_few_groups": "train"}
    }
    task |= {"train": {"steps": 20, "mini_batch_prompts": 4, "max_tokens_per_micro_batch": 2048}}
    metrics = train(tmp_path, tiny_model_dir, **task)
    assert sum(row["accuracy"] for row in metrics[:3]) / 3 < 0.2
    assert sum(row["accuracy"] for row in metrics[-3:]) / 3 > 0.9
    assert metrics[-1]["reward_mean"] > metrics[0]["reward_mean"] + 1.5
    assert metrics[-1]["entropy"] < metrics[0]["entropy"] and metrics[-1]["groups_all_correct"] > 8
    assert any(row["clip_frac_high"] > 0 for row in metrics) and metrics[0]["overlong_penalty_mean"] < -0.5


def test_gradient_checkpointing_recomputes_the_layers(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = tiny_config(tmp_path, tiny_model_dir, **{"train.gradient_checkpointing": True})
    trainer = Trainer(load_config(config))
    groups = trainer.sampler.fill(1).groups
    forwards, attentions = [], []
    trainer.policy.register_forward_pre_hook(lambda *_: forwards.append(1))
    layer = trainer.policy.model.model.layers[0].self_attn
    layer.register_forward_pre_hook(lambda *_: attentions.append(1))
    trainer.updater.run(groups, 1)
    trainer.close()
    assert len(attentions) == 2 * len(forwards) > 0
