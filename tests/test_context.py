"""Rows that several processes share (`parallel.context`) give what one process gives.

`context_cases.py` holds what the processes run.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from context_cases import LENGTHS
from parallel_cases import build
from processes import environment, run_cases, shared_launch, torchrun
from tiny import of_training, tiny_config, tiny_values

from dapo.config import Config, load_config
from dapo.errors import UserError
from dapo.model import Policy
from dapo.parallel import World
from dapo.parallel.context import check_heads, share_sequences

TWO = "exchange llama qwen2_tied checkpointed one_key_head windowed token_sum bfloat16 refused"
LONGEST = 30  # of a row of 60 tokens, two processes


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Results of all cases on two processes."""

    def launch(folder: Path) -> dict[str, dict]:
        return run_cases(folder, 2, "context_cases.py", TWO.split())

    results, _ = shared_launch(tmp_path_factory, "context", launch)
    return results


def assert_as_one_process(result: dict) -> None:
    assert result["gradient"]["all"] < 1e-5
    assert result["gradient"]["worst"] < 3e-5
    assert result["logprobs"] < 1e-5
    got, want = result["loss"]
    assert got == pytest.approx(want, rel=1e-5)
    got, want = result["sums"]
    assert got == pytest.approx(want, rel=1e-5)
    assert want["num_tokens"] == sum(response for _, response in LENGTHS) - 10
    assert min(want[f"clip_frac_{side}"] for side in ("low", "high")) > 10  # off policy
    assert result["ranks agree"]


@pytest.mark.parametrize(
    "case", ["llama", "qwen2_tied", "checkpointed", "one_key_head", "windowed", "token_sum"]
)
def test_two_processes_share_rows(two, case):
    """Sequences cross the border between the stretches; in one row a stretch has nothing in the loss, in
    another no stretch has. `one_key_head`: fewer key heads than processes."""
    assert_as_one_process(two[case])
    assert two[case]["samples"] == len(LENGTHS)
    assert two[case]["longest stretch"] == LONGEST
    assert two[case]["tied"] == (case in ("qwen2_tied", "checkpointed"))


def test_checkpointed_layers_exchange_heads_again_in_backward(two):
    assert two["checkpointed"]["forwards"] == 2 * two["qwen2_tied"]["forwards"] > 0


def test_bfloat16_rows_are_shared_within_rounding(two):
    result = two["bfloat16"]
    assert 1e-5 < result["gradient"]["all"] < 0.1
    assert 1e-5 < result["logprobs"] < 0.3


def test_exchange_is_of_heads_for_tokens_and_back(two):
    assert {name: value for name, value in two["exchange"].items() if name != "seconds"} == dict.fromkeys(
        ("query", "key", "value", "back", "gradient"), True
    )


def test_calls_that_sharing_would_get_wrong_are_refused(two):
    assert "parallel.context is 2, which takes packed rows" in two["refused"]["padded"]
    assert "'seq-mean-token-mean'" in two["refused"]["mean of a sequence"]
    assert "'sequence'" in two["refused"]["ratio of a sequence"]
    assert "got None" in two["refused"]["no denominator"]


@pytest.mark.slow
def test_four_processes_share_rows(tmp_path):
    """Two samples' shares of two processes each, then four processes to a row and two to a key head."""
    results = run_cases(tmp_path, 4, "context_cases.py", ["qwen2_tied", "checkpointed", "four", "exchange"])
    assert results.pop("exchange")["gradient"] is True
    for name, result in results.items():
        assert_as_one_process(result)
        assert result["longest stretch"] == (LONGEST // 2 if name == "four" else LONGEST)


def trained(folder: Path, model_dir: Path, processes: int, **overrides) -> list[dict]:
    """metrics.jsonl of `dapo train`, without what the machine makes of it."""
    folder.mkdir()
    config = str(tiny_config(folder, model_dir, **overrides))
    command = ("dapo", "train", config)
    if processes > 1:
        command = torchrun(processes, "-m", *command)
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr[-6000:]
    else:
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    lines = (folder / "run/metrics.jsonl").read_text().splitlines()
    return [of_training(json.loads(line)) for line in lines]


# Two updates a step, so that old log-probs come from a scoring pass, and a reference model that scores too.
RUN = {"train.mini_batch_prompts": 1, "algorithm.kl_coef": 0.05, "algorithm.rollout_correction": "truncate"}
RUN |= {"train.save_model": False, "train.gradient_checkpointing": True}


def assert_same_metrics(got: list[dict], want: list[dict]) -> None:
    assert len(got) == len(want) == 2
    for ours, theirs in zip(got, want):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-4)
    assert all(line["num_tokens"] > 20 and line["grad_norm"] > 0.1 for line in want)
    assert want[1]["kl"] > 1e-5


def test_a_run_on_two_processes_is_that_of_one(tmp_path, tiny_model_dir):
    want = trained(tmp_path / "one", tiny_model_dir, 1, **RUN)
    got = trained(tmp_path / "two", tiny_model_dir, 2, **RUN, **{"parallel.context": 2})
    assert_same_metrics(got, want)


@pytest.mark.slow
def test_a_run_on_four_processes_is_that_of_one(tmp_path, tiny_model_dir):
    want = trained(tmp_path / "one", tiny_model_dir, 1, **RUN)
    assert_same_metrics(trained(tmp_path / "four", tiny_model_dir, 4, **RUN, **{"parallel.context": 2}), want)


@pytest.mark.parametrize(("heads", "key_heads", "context"), [(4, 2, 2), (4, 2, 4), (32, 8, 8), (8, 1, 4)])
def test_heads_that_can_be_dealt(heads, key_heads, context):
    check_heads(heads, key_heads, context)


@pytest.mark.parametrize(("heads", "key_heads", "context"), [(4, 2, 3), (2, 2, 4), (12, 3, 2), (12, 4, 6)])
def test_heads_that_cannot_be_dealt(heads, key_heads, context):
    message = rf"parallel\.context is {context}, .* {heads} query heads and {key_heads} key and value heads"
    with pytest.raises(UserError, match=message):
        check_heads(heads, key_heads, context)


@pytest.mark.parametrize(
    ("context", "options", "packing", "message"),
    [
        (3, {}, True, r"parallel\.context is 3, and the model has 4 query heads and 2 key and value heads"),
        (
            2,
            {},
            False,
            r"parallel\.context is 2, which takes packed rows, and LlamaForCausalLM runs on padded",
        ),
        (
            2,
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            True,
            r"parallel\.context is 2, but LlamaForCausalLM has dynamic RoPE",
        ),
    ],
)
def test_models_that_cannot_share_are_refused(context, options, packing, message):
    policy = Policy(build("llama", **options), packing=packing)
    world = World(torch.device("cpu"), size=context, context=context)
    with pytest.raises(UserError, match=message):
        share_sequences(policy, world)
    assert policy.context is None


def test_one_process_to_a_row_leaves_the_policy_as_it_is():
    policy = Policy(build("llama"))
    assert share_sequences(policy, World(torch.device("cpu"))) is policy
    assert policy.context is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"algorithm.token_level_loss": False},
            r"parallel\.context \(2\) .*algorithm\.reduction seq-mean-token-mean \(token_level_loss: false\)",
        ),
        (
            {"algorithm.reduction": "seq-mean-token-mean"},
            r"parallel\.context \(2\) .*set algorithm\.reduction to token-mean",
        ),
        ({"algorithm.ratio_level": "sequence"}, r"parallel\.context \(2\) .*algorithm\.ratio_level sequence"),
        ({"train.packing": False}, r"parallel\.context \(2\) .*train\.packing is false"),
    ],
)
def test_what_takes_whole_sequences_is_a_configuration_error(tmp_path, overrides, message):
    path = tiny_config(tmp_path, tmp_path, **overrides, **{"parallel.context": 2})
    with pytest.raises(UserError, match=message):
        load_config(path)
    load_config(path, ["parallel.context=1"])


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-sum", "constant"])
def test_sums_over_tokens_can_be_cut(tmp_path, reduction):
    overrides = {"algorithm.reduction": reduction, "parallel.context": 2}
    assert Config.model_validate(tiny_values(tmp_path, tmp_path, **overrides)).parallel.context == 2
