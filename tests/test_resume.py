"""A run that is stopped and resumed, in one process: what comes after is what would have come."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from tiny import outcome, tiny_config, unfinished, write_jsonl

import dapo.trainer
from dapo.checkpoint import saved_steps
from dapo.cli import main
from dapo.config import load_config
from dapo.errors import UserError
from dapo.resume import cut_back, resumed_config
from dapo.sampling import Sampler
from dapo.stopping import Abandoned
from dapo.update import Updater

EVERYTHING = {
    "train.mini_batch_prompts": 1,
    "algorithm": {"overlong_cache_length": 2, "surplus_groups": "keep", "num_iterations": 2},
    "rollout.prompts_per_generation": 3,
    "optimizer": {"learning_rate": 1e-3, "warmup_steps": 4},
}


@pytest.fixture
def make(tmp_path: Path, tiny_model_dir: Path):
    """Writes the configuration of the run NAME/run, with a held-out prompt where it is evaluated."""

    def config(name: str, **overrides) -> str:
        folder = tmp_path / name
        folder.mkdir()
        if "eval.every" in overrides:
            held_out = write_jsonl(folder / "held_out.jsonl", [{"prompt": "1*1=", "answer": ""}])
            overrides["data.eval"] = {"source": str(held_out)}
        return str(tiny_config(folder, tiny_model_dir, **overrides))

    return config


@pytest.fixture
def whole(make, tmp_path: Path):
    """The outcome of a run that nothing stops."""

    def train(**overrides) -> dict[str, object]:
        assert main(["train", make("whole", **overrides)]) == 0
        return outcome(tmp_path / "whole/run")

    return train


def assert_same(run: Path, want: dict[str, object]) -> None:
    got = outcome(run)
    assert got.keys() == want.keys()
    assert [key for key in want if got[key] != want[key]] == []
    assert unfinished(run) == []


def resume(run: Path, *overrides: str) -> int:
    return main(["train", "--resume", str(run), *overrides])


def events(run: Path) -> list[tuple[str, int]]:
    lines = (run / "events.jsonl").read_text().splitlines()
    return [(event["kind"], event["step"]) for event in map(json.loads, lines)]


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_t4_a_run_resumed_anywhere_is_the_run_that_was_not_stopped(make, whole, tmp_path, stop: int) -> None:
    """Warm-up, surplus groups, two updates a mini-batch: all of it goes on where it was."""
    want = whole(**EVERYTHING, **{"train.steps": 4})
    config, run = make("stopped", **EVERYTHING, **{"train.steps": 4}), tmp_path / "stopped/run"
    assert main(["train", config, f"train.steps={stop}"]) == 0
    assert resume(run, "train.steps=4") == 0
    assert_same(run, want)
    steps = [row["step"] for row in want["metrics"]]
    assert steps == [1, 2, 3, 4] and want["metrics"][2]["staleness_max"] > 0  # surplus was trained on
    assert len({row["lr"] for row in want["metrics"]}) == 4


def test_t3_a_run_resumed_at_the_end_of_an_epoch_goes_on_with_the_next(make, whole, tmp_path) -> None:
    options = {"algorithm.dynamic_sampling": False, "rollout.prompts_per_step": 4}  # 8 prompts: two steps
    want = whole(**options, **{"train.steps": 4})
    assert [row["epoch"] for row in want["metrics"]] == [0, 0, 1, 1]
    config, run = make("stopped", **options), tmp_path / "stopped/run"
    assert main(["train", config, "train.steps=2"]) == 0
    assert resume(run, "train.steps=4") == 0
    assert_same(run, want)


def test_a_run_that_is_through_says_so(make, tmp_path: Path, capsys) -> None:
    config, run = make("a"), tmp_path / "a/run"
    assert main(["train", config]) == 0
    before = outcome(run)
    assert resume(run) == 2
    error = capsys.readouterr().err
    assert "the run is through, with 2 steps made and train.steps 2" in error and "train.steps=4" in error
    assert outcome(run) == before


def test_a_run_without_a_checkpoint_begins_again(make, whole, tmp_path: Path, monkeypatch) -> None:
    want = whole(**{"train.steps": 2})
    config, run = make("stopped"), tmp_path / "stopped/run"
    run_update = Updater.run
    monkeypatch.setattr(
        Updater, "run", lambda self, groups, step: 1 / 0 if step == 2 else run_update(self, groups, step)
    )
    with pytest.raises(ZeroDivisionError):
        main(["train", config])
    monkeypatch.setattr(Updater, "run", run_update)
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 1
    assert resume(run) == 0
    assert_same(run, want)


@pytest.mark.parametrize("damage", ["cut", "flipped", "missing", "no manifest"])
def test_a_damaged_newest_checkpoint_is_skipped_with_a_warning(
    make, whole, tmp_path: Path, caplog, damage: str
) -> None:
    options = {"checkpoint": {"every": 1, "keep": 3}}
    want = whole(**options, **{"train.steps": 4})
    config, run = make("stopped", **options), tmp_path / "stopped/run"
    assert main(["train", config, "train.steps=3"]) == 0
    folder = run / "checkpoints/step_000003"
    file = next(folder.glob("*.distcp")) if damage != "no manifest" else folder / "manifest.json"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    if damage in ("missing", "no manifest"):
        file.unlink()
    else:
        file.write_bytes(content if damage == "flipped" else content[:-1])
    with caplog.at_level(logging.WARNING):
        assert resume(run, "train.steps=4") == 0
    assert any("step_000003" in message and file.name in message for message in caplog.messages)
    assert ("resumed", 2) in events(run)
    assert_same(run, want)


@pytest.mark.parametrize("during", ["generation", "evaluation"])
def test_t13_a_signal_saves_what_is_finished_and_abandons_the_rest(
    make, whole, tmp_path: Path, monkeypatch, capsys, during: str
) -> None:
    options = {**EVERYTHING, "eval.every": 2}
    want = whole(**options, **{"train.steps": 4})
    config, run = make("stopped", **options, **{"train.steps": 4}), tmp_path / "stopped/run"
    generate_own, evaluate = Sampler._generate_own, dapo.trainer.evaluate

    def signalled_generate(self, batch, asked):
        if during == "generation" and batch.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return generate_own(self, batch, asked)

    def signalled_evaluate(config, step, *arguments):
        if during == "evaluation" and step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(config, step, *arguments)

    monkeypatch.setattr(Sampler, "_generate_own", signalled_generate)
    monkeypatch.setattr(dapo.trainer, "evaluate", signalled_evaluate)
    assert main(["train", config]) == 143
    monkeypatch.undo()
    assert "dapo: terminated after step" in capsys.readouterr().err
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert ("stopped", 2) in events(run) and saved_steps(run / "checkpoints")[-1] == 2
    assert len(lines) == (1 if during == "evaluation" else 2)  # a line waits for its evaluation
    assert len(list((run / "rollouts").iterdir())) == 2
    assert resume(run) == 0
    assert_same(run, want)


def test_t16_a_checkpoint_that_finds_the_disk_full_does_not_end_the_run(
    make, whole, tmp_path: Path, monkeypatch, caplog, capsys
) -> None:
    options = {"checkpoint": {"every": 1}, "train.steps": 3}
    want = whole(**options)
    config, run = make("full", **options), tmp_path / "full/run"
    fsync = os.fsync

    def full(step: int):
        def fail(descriptor):
            if f"step_{step:06d}" in os.readlink(f"/proc/self/fd/{descriptor}"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        return fail

    monkeypatch.setattr(os, "fsync", full(2))
    with caplog.at_level(logging.WARNING):
        assert main(["train", config]) == 0
    assert any("No space left on device" in message for message in caplog.messages)
    assert saved_steps(run / "checkpoints") == [1, 3]
    assert ("checkpoint failed", 3) in events(run)  # noticed when the next one is due
    assert_same(run, want)
    monkeypatch.setattr(os, "fsync", full(4))
    capsys.readouterr()
    assert resume(run, "train.steps=4") == 1  # the last one is what the next run would go on from
    error = capsys.readouterr().err
    assert "No space left on device" in error and error.count("\n") == 1
    assert saved_steps(run / "checkpoints") == [1, 3]


def test_a_run_killed_while_it_saves_its_model_is_finished(make, whole, tmp_path, monkeypatch) -> None:
    """Also one that was finished before, and went on: its old model and report are there."""
    want = whole(**{"train.steps": 4})
    config, run = make("stopped"), tmp_path / "stopped/run"
    assert main(["train", config]) == 0
    monkeypatch.setattr(dapo.trainer, "save_model", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        resume(run, "train.steps=4")
    monkeypatch.undo()
    assert saved_steps(run / "checkpoints")[-1] == 4
    assert resume(run) == 0
    assert_same(run, want)


def test_a_damaged_checkpoint_does_not_crowd_out_the_new_ones(make, tmp_path: Path) -> None:
    config, run = make("a", **{"checkpoint": {"every": 1, "keep": 2}}), tmp_path / "a/run"
    assert main(["train", config, "train.steps=4"]) == 0
    (run / "checkpoints/step_000004/ranks.json").write_text("[")
    assert resume(run, "checkpoint.keep=1") == 0
    assert saved_steps(run / "checkpoints") == [4]
    assert (run / "checkpoints/step_000004.damaged/ranks.json").read_text() == "["
    assert ("damaged checkpoint", 4) in events(run)
    assert load_config(run / "config.yaml").train.steps == 4


@pytest.mark.parametrize("what", ["nothing", "a file", "a link to nothing"])
def test_where_checkpoints_are_missing_nothing_is_erased(make, tmp_path: Path, capsys, what: str) -> None:
    config, run = make("a", **{"checkpoint": {"every": 1}}), tmp_path / "a/run"
    assert main(["train", config]) == 0
    shutil.rmtree(run / "checkpoints")
    if what == "a file":
        (run / "checkpoints").write_text("")
    if what == "a link to nothing":
        (run / "checkpoints").symlink_to(tmp_path / "not mounted")
    before = outcome(run)
    assert resume(run, "train.steps=4") == 2
    error = capsys.readouterr().err
    assert ("holds none to go on from" in error) == (what == "nothing") and "checkpoints" in error
    assert outcome(run) == before


def test_model_and_data_may_be_elsewhere_but_not_others(
    make, whole, tmp_path, tiny_model_dir, capsys
) -> None:
    settings = {"lora": {"rank": 2}}
    want = whole(**settings, **{"train.steps": 3})
    config, run = make("moved", **settings), tmp_path / "moved/run"
    assert main(["train", config]) == 0
    shutil.copytree(tiny_model_dir, tmp_path / "model")
    os.rename(tmp_path / "moved/prompts.jsonl", tmp_path / "prompts.jsonl")
    moved = [f"model.path={tmp_path}/model", f"data.train.source={tmp_path}/prompts.jsonl", "train.steps=3"]
    weights = tmp_path / "model/model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4] + bytes(4))
    assert resume(run, *moved) == 2
    assert "are not those that the run began with" in capsys.readouterr().err
    weights.write_bytes(content)
    assert resume(run, *moved) == 0
    assert_same(run, want)


def test_overrides_may_stand_on_both_sides_and_paths_hold_equals_signs(make, tmp_path: Path) -> None:
    config = Path(make("a=1"))
    run = config.parent / "run"
    assert main(["train", str(config), "train.steps=1"]) == 0
    assert main(["train", str(config), "seed=0", "--resume", str(run), "train.steps=3"]) == 0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3


def test_what_may_change_is_applied_and_noted(make, tmp_path: Path, capsys) -> None:
    config, run = make("a"), tmp_path / "a/run"
    assert main(["train", config]) == 0
    assert resume(run, "train.steps=3", "optimizer.learning_rate=1.0e-5") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "changed on resume: optimizer.learning_rate: 0.001 -> 1e-05" in output
    assert "changed on resume: train.steps: 2 -> 3" in output
    rates = [json.loads(line)["lr"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rates == [1e-3, 1e-3, 1e-5]
    kinds = [kind for kind, _ in events(run)]
    assert kinds == ["started", "finished", "resumed", "changed", "changed", "finished"]
    assert load_config(run / "config.yaml").optimizer.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=1", "seed: 0 -> 1"),
        ("rollout.group_size=8", "rollout.group_size: 4 -> 8"),
        ("model.dtype=bfloat16", "model.dtype: 'float32' -> 'bfloat16'"),
        ("data.prompt_template='{prompt}?'", "data.prompt_template: '{prompt}' -> '{prompt}?'"),
        ("lora.rank=4", "lora.rank: None -> 4"),
    ],
)
def test_what_may_not_change_is_refused_by_name(make, tmp_path: Path, override: str, message: str) -> None:
    config, run = make("a"), tmp_path / "a/run"
    run.mkdir()
    (run / "config.yaml").write_text(Path(config).read_text())
    with pytest.raises(UserError, match="these may not change within a run") as caught:
        resumed_config(run, [override, "train.steps=9"])
    assert message in str(caught.value) and "train.steps" not in str(caught.value)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys) -> None:
    assert resume(tmp_path) == 2
    assert "there is no config.yaml, so it is not a run's folder" in capsys.readouterr().err


def test_a_run_that_is_still_going_is_left_alone(make, tmp_path: Path, capsys) -> None:
    config, run = make("a"), tmp_path / "a/run"
    assert main(["train", config]) == 0
    import fcntl

    with (run / "events.jsonl").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert resume(run, "train.steps=3") == 2
    assert "is being written by another process" in capsys.readouterr().err
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_folder_is_cut_back_to_the_state_that_goes_on(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 0.5}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "lo']))
    for name in ("rollouts/step_000001.jsonl", "rollouts/step_000003.jsonl", "rollouts/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "eval").mkdir()
    for name in ("step_000000.json", "step_000002.json", "step_000002.jsonl"):
        (tmp_path / "eval" / name).write_text("x")
    (tmp_path / "rollouts/.step_000004.12.jsonl").write_text("half")
    (tmp_path / ".model.partial").mkdir()
    cut_back(tmp_path, sampled=2, logged=1)
    assert (tmp_path / "metrics.jsonl").read_text() == lines[0] + "\n"
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == [
        "eval/step_000000.json",
        "metrics.jsonl",
        "rollouts/notes.txt",
        "rollouts/step_000001.jsonl",
    ]
    assert unfinished(tmp_path) == []


def test_updates_skipped_in_a_row_end_the_run(make, tmp_path: Path, monkeypatch, capsys) -> None:
    """A policy that has become NaN does not spin on."""
    config, run = make("a", **{"train.steps": 50, "train.max_skipped_updates": 3}), tmp_path / "a/run"
    run_update = Updater.run

    def spoilt(self, groups, step):
        if step == 3:
            with torch.no_grad():
                next(iter(self.parameters.values())).fill_(torch.nan)
        return run_update(self, groups, step)

    monkeypatch.setattr(Updater, "run", spoilt)
    assert main(["train", config, "algorithm.dynamic_sampling=false"]) == 1
    error = capsys.readouterr().err
    assert "3 updates in a row were skipped" in error and error.count("\n") == 1
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["skipped_updates"] for row in rows] == [0, 0, 1, 1]
    assert [event for event in events(run) if event[0] == "skipped"] == [("skipped", 3), ("skipped", 4)]


def test_abandoned_is_no_error_of_a_library() -> None:
    """What catches errors of scorers, trackers and the like must let the end of a run through."""
    assert not issubclass(Abandoned, (OSError, RuntimeError, ValueError))
