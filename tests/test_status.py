"""`dapo status`: what a run's folder says, whole, torn or bare."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import write_jsonl

from dapo.cli import main
from dapo.commands.status import STATES, describe, size
from dapo.status import is_held, read_status

ROOT = Path(__file__).parent.parent
NOW = 1_700_000_000.0
PHASES = ("time_rollout_s", "time_reward_s", "time_train_s", "time_sync_s")


def metrics_row(step: int, seconds: float = 4.0, **values) -> dict:
    figures = {"reward_mean": -0.5, "accuracy": 0.25, "entropy": 1.5, "response_length_mean": 12.0}
    row = {"step": step, **figures, "tokens_per_s": 100.0, "skipped_updates": 0, "reward_failures": 1}
    return row | dict.fromkeys(PHASES, seconds / 4) | values


def event(kind: str, step: int = 0, message: str = "", time: float = NOW) -> dict:
    return {"time": time, "kind": kind, "step": step, "message": message}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three of ten steps, two checkpoints, two evaluations; nothing says why it ended."""
    run = tmp_path / "my run"
    run.mkdir()
    (run / "config.yaml").write_text("train: {steps: 10}\n")
    write_jsonl(run / "metrics.jsonl", [metrics_row(step) for step in (1, 2, 3)])
    write_jsonl(run / "events.jsonl", [])
    for step in (1, 2):
        folder = run / f"checkpoints/step_{step:06d}"
        folder.mkdir(parents=True)
        for name in ("__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"):
            (folder / name).write_bytes(b"x" * 250)
        os.utime(folder / "manifest.json", (NOW, NOW))
    (run / "checkpoints/.step_000003.partial").mkdir()
    (run / "eval").mkdir()
    for step, accuracy in ((0, 0.5), (2, 0.25)):
        figures = {"accuracy": accuracy, "accuracy_low": 0.125, "accuracy_high": 0.75}
        (run / f"eval/step_{step:06d}.json").write_text(json.dumps(figures))
    return run


def lines(run: Path, capsys) -> dict[str, str]:
    """What is printed where there is no terminal; of a repeated label the last one."""
    assert main(["status", str(run)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return dict(line.split(": ", 1) for line in out.splitlines())


def test_a_run_explains_itself(run: Path, capsys) -> None:
    write_jsonl(
        run / "metrics.jsonl", [metrics_row(1, skipped_updates=2), metrics_row(2), metrics_row(3, 8.0)]
    )
    shown = lines(run, capsys)
    assert shown["state"].startswith("killed: it is not running, and did not say why it ended; last written ")
    assert shown["step"] == "3 of 10"
    assert shown["pace"] == "4.0 s a step, 28.0 s left, evaluations apart"
    assert re.fullmatch(r"step 2, .* h ago, 1.0 kB, of 2 processes, also 1", shown["checkpoint"])
    assert shown["best evaluation"] == "50.0% at step 0 (95 % interval 12.5 to 75.0)"
    assert shown["last evaluation"] == "25.0% at step 2 (95 % interval 12.5 to 75.0)"
    assert shown["last step"] == "reward -0.50, accuracy 25.0%, entropy 1.50, length 12.0, 100 tokens/s"
    assert (shown["skipped updates"], shown["reward failures"]) == ("2", "3")
    assert shown["events"] == "none"
    assert shown["disk"].startswith("2.9 kB: checkpoints 2.0 kB, metrics.jsonl 750 bytes")
    assert shown["go on"] == f"torchrun --nproc_per_node 2 -m dapo train --resume '{run}'"


def test_json_has_the_keys_that_are_documented(run: Path, capsys) -> None:
    write_jsonl(run / "events.jsonl", [event("resumed", 1), event("a new kind", 2, "said")])
    assert main(["status", str(run), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    section = (ROOT / "docs/run.md").read_text().split("## Status")[1].split("\n## ")[0]
    documented = re.findall(r"^\| (`.*?) \|", section, re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(documented))) == status.keys()
    assert (status["state"], status["step"], status["steps"]) == ("killed", 3, 10)
    assert (status["step_seconds"], status["seconds_left"]) == (4.0, 28.0)
    assert status["checkpoint"] == {
        "step": 2,
        "path": str(run / "checkpoints/step_000002"),
        "written": NOW,
        "bytes": 1000,
        "processes": 2,
        "kept": [1, 2],
    }
    assert status["best_evaluation"]["step"] == 0 and status["last_evaluation"]["accuracy"] == 0.25
    assert status["events"]["counts"] == {"resumed": 1, "a new kind": 1}
    assert status["events"]["last"][-1] == event("a new kind", 2, "said")
    assert status["disk"]["bytes"] == sum(status["disk"]["parts"].values())
    assert status["disk"]["parts"]["checkpoints"] == 2000


@pytest.mark.parametrize(
    ("kinds", "state"),
    [
        ([], "killed"),
        (["resumed"], "killed"),
        (["stopped"], "stopped"),
        (["stopped", "resumed"], "killed"),
        (["stopped", "resumed", "changed", "finished", "a new kind"], "finished"),
        (["resumed", "failed"], "failed"),
    ],
)
def test_the_last_event_that_tells_says_how_it_ended(run: Path, kinds: list[str], state: str) -> None:
    write_jsonl(run / "events.jsonl", [event(kind, 3) for kind in kinds])
    assert read_status(run)["state"] == state in STATES
    with (run / "events.jsonl").open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        status = read_status(run)
        assert status["state"] == "running" and status["go_on"] is None
    assert read_status(run)["state"] == state


def test_looking_disturbs_neither_the_run_nor_another_look(run: Path) -> None:
    events = run / "events.jsonl"
    with events.open("rb") as other:  # another `dapo status` at the same moment
        fcntl.flock(other, fcntl.LOCK_SH)
        assert is_held(events) is False
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    read_status(run)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    with events.open("a") as claimed:  # and nothing is held afterwards
        fcntl.flock(claimed, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_file_system_without_locks_leaves_it_open(run: Path, monkeypatch, capsys) -> None:
    def refuse(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert lines(run, capsys)["state"].startswith("unfinished: nothing tells whether it is running")
    write_jsonl(run / "events.jsonl", [event("finished", 10)])
    assert read_status(run)["state"] == "finished"


def test_a_folder_of_an_older_version_has_no_events(run: Path) -> None:
    (run / "events.jsonl").unlink()
    assert read_status(run)["state"] == "unfinished"
    write_jsonl(run / "metrics.jsonl", [metrics_row(10)])
    assert read_status(run)["state"] == "unfinished"
    (run / "report.html").write_text("")
    status = read_status(run)
    assert status["state"] == "finished" and status["seconds_left"] is None
    assert status["go_on"].endswith("train.steps=20")


def test_what_is_torn_or_missing_is_left_out(run: Path, capsys) -> None:
    rows = [metrics_row(1), metrics_row(2, entropy=None, accuracy=None, reward_mean="?", time_train_s=None)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "metrics.jsonl").write_text(text + '{"step": 3, "acc')
    (run / "events.jsonl").write_text('{"kind": 3}\n[1]\n{"time": 1e300, "step": "x", "kind": "odd"}\n{"ti')
    (run / "eval/step_000002.json").write_text("{")
    (run / "checkpoints/step_000002/manifest.json").unlink()
    shown = lines(run, capsys)
    assert shown["step"] == "2 of 10" and shown["pace"].startswith("3.5 s a step")
    assert shown["last step"] == "reward –, accuracy –, entropy –, length 12.0, 100 tokens/s"
    assert shown["checkpoint"].startswith("step 2, not whole: it has no manifest, ")
    assert shown["last evaluation"].endswith("at step 0 (95 % interval 12.5 to 75.0)")
    assert shown["events"] == "odd"
    assert read_status(run)["events"]["counts"] == {"3": 1, "odd": 1}


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "events.jsonl"])
def test_a_run_that_has_only_begun(tmp_path: Path, capsys, name: str) -> None:
    """Or whose other files are lost."""
    (tmp_path / name).write_text("train: {steps: 10}\n" if name == "config.yaml" else "")
    shown = lines(tmp_path, capsys)
    assert shown["step"] == "0 of " + ("10" if name == "config.yaml" else "an unknown number")
    assert shown["checkpoint"] == "none yet" and shown["events"] == "none"
    assert ("go on" in shown) == (name == "config.yaml")
    assert not {"pace", "last step", "best evaluation"} & shown.keys()


@pytest.mark.parametrize("text", ["train: [\n", "train: 3\n", "- 1\n", "train: {steps: many}\n", "\0"])
def test_a_configuration_that_cannot_be_read(run: Path, text: str) -> None:
    (run / "config.yaml").write_text(text)
    status = read_status(run)
    assert status["steps"] is None and status["go_on"] is None and status["step"] == 3


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        assert main(["status", str(folder)]) == 2
        error = capsys.readouterr().err
        assert f"{folder} is no run's folder" in error and error.count("\n") == 1


def test_events_are_counted_and_the_last_few_shown_as_text(run: Path, capsys) -> None:
    """What a message holds does nothing to the terminal."""
    many = [event("checkpoint_failed", step, "disk full") for step in range(7)]
    write_jsonl(run / "events.jsonl", [*many, event("warning", 8, "\x1b[31mred\nand more")])
    assert main(["status", str(run)]) == 0
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("events")]
    assert shown[0] == "events: 7 checkpoint_failed, 1 warning" and len(shown) == 6
    assert shown[-1].endswith("step 8  warning  ␛[31mred and more")
    assert re.match(r"events: 2023-11-1\d \d\d:\d\d:\d\d  step 6  checkpoint_failed  disk full$", shown[-2])


def test_the_pace_is_the_median_of_the_last_steps(run: Path) -> None:
    rows = [metrics_row(step, 1000.0) for step in range(1, 31)]
    rows += [metrics_row(step, seconds) for step, seconds in zip(range(31, 51), [2.0] * 11 + [500.0] * 9)]
    write_jsonl(run / "metrics.jsonl", rows)
    assert read_status(run)["step_seconds"] == 2.0 and read_status(run)["seconds_left"] == 0


def test_a_terminal_gets_a_table(run: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dapo", "status", str(run)]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    subprocess.run(command, stdout=theirs, env=environment, check=True, timeout=60)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "\x1b[1;31mstate" in shown and "state:" not in shown
    assert re.search(r"step +\x1b\[0m.*3 of 10", shown)


def test_it_starts_without_what_training_takes(run: Path) -> None:
    code = (
        "import sys; from dapo.cli import main; main(sys.argv[1:]); "
        "print([name for name in ('torch', 'transformers', 'pyarrow') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, "status", str(run)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.endswith("\n[]\n")


def test_every_state_and_size_has_words(run: Path) -> None:
    status = read_status(run)
    for state, (_, meaning) in STATES.items():
        said = dict(describe(status | {"state": state, "written": NOW}, now=NOW + 90))["state"]
        assert said == f"{state}{': ' * bool(meaning)}{meaning}; last written 1 min 30 s ago"
    sizes = {0: "0 bytes", 999: "999 bytes", 1.25e6: "1.2 MB", 3e9: "3.0 GB", 2e12: "2.0 TB"}
    assert {count: size(count) for count in sizes} == sizes
