"""The optimizer steps of a rollout batch: how many, at which learning rate, against which old log-probs;
batches that cannot be trained on; and models that reshape their logits."""

from __future__ import annotations

import copy
import logging
import math
from dataclasses import replace

import pytest
import torch
import transformers
from tiny import EOS
from transformers import AutoModelForCausalLM
from update_cases import (
    BATCH,
    NUM_TOKENS,
    assert_close,
    captured,
    from_rollout,
    groups_of,
    parameters_of,
    plain_gradients,
    plain_loss,
    token_logprobs,
    unchanged,
)

from dapo.batching import TrainSample, make_micro_batches
from dapo.model import Policy
from dapo_kernels import PolicyLossConfig

SETTINGS = {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.95, "eps": 1e-5, "weight_decay": 0.3}
SETTINGS |= {"warmup_steps": 4, "max_grad_norm": 0.5}


def test_all_steps_of_a_batch_are_those_of_plain_adamw(make, model) -> None:
    """Two passes of two mini-batches at step 3 of a warm-up of 4, stale groups in each. The old log-probs are
    those from before the first step, or the rollout's, through all of them."""
    stale, fresh = groups_of(model, BATCH[::2], step=2), groups_of(model, BATCH[1::2], step=3)
    groups = [stale[0], fresh[0], stale[1], fresh[1]]
    other, start = copy.deepcopy(model), parameters_of(model)
    with torch.no_grad():
        before = {
            id(sample): from_rollout(group, sample)
            if group.step == 2
            else token_logprobs(other, group.prompt.ids, sample.completion.token_ids)
            for group in groups
            for sample in group.samples
        }
    optimizer = torch.optim.AdamW(
        other.parameters(), lr=0.01 * 3 / 4, betas=(0.8, 0.95), eps=1e-5, weight_decay=0.3
    )
    losses, norms = [], []
    for first in (0, 2, 0, 2):
        loss = plain_loss(other, groups[first : first + 2], old=lambda group, sample: before[id(sample)])
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(other.parameters(), 0.5).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()

    twice = {"train.mini_batch_prompts": 2, "algorithm.num_iterations": 2}
    updater = make(**twice, **{f"optimizer.{key}": value for key, value in SETTINGS.items()})
    metrics = updater.run(groups, step=3).metrics()
    moved = {name: value - start[name] for name, value in parameters_of(model).items()}
    assert_close(moved, {name: value - start[name] for name, value in parameters_of(other).items()}, 1e-5)
    assert updater.updates == 4 and metrics["skipped_updates"] == 0
    assert metrics["loss"] == pytest.approx(sum(losses) / 4, rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-5)
    assert metrics["num_tokens"] == NUM_TOKENS  # of the batch, however often it is passed over
    assert metrics["ratio_max"] > 1.28 and metrics["clip_frac_high"] > 0 and metrics["clip_frac_low"] > 0


@pytest.mark.parametrize(
    ("warmup", "want"), [(4, {1: 0.02, 2: 0.04, 4: 0.08, 5: 0.08}), (1, {1: 0.08}), (0, {1: 0.08, 9: 0.08})]
)
def test_one_learning_rate_for_all_updates_of_a_step(make, model, warmup: int, want: dict) -> None:
    updater = make(
        **{"optimizer.learning_rate": 0.08, "optimizer.warmup_steps": warmup, "train.mini_batch_prompts": 1}
    )
    used = []
    updater.optimizer.step = lambda: used.append(updater.optimizer.param_groups[0]["lr"])
    for step, rate in want.items():
        updater.run(groups_of(model, step=step), step)
        assert used == pytest.approx([rate] * 4) and updater.learning_rate(step) == pytest.approx(rate)
        used.clear()


@pytest.mark.parametrize(
    ("mini", "iterations", "groups", "updates"),
    [(None, 1, 4, 1), (2, 1, 4, 2), (1, 3, 4, 12), (2, 2, 3, 4), (4, 1, 1, 1), (2, 2, 0, 0)],
)
def test_number_of_updates(make, model, mini, iterations: int, groups: int, updates: int) -> None:
    """Also when a step goes on with fewer groups than asked for."""
    updater = make(**{"train.mini_batch_prompts": mini, "algorithm.num_iterations": iterations})
    before = parameters_of(model)
    taken, stats = captured(updater, groups_of(model, BATCH[:groups]))
    assert len(taken) == updater.updates == updates
    if not groups:
        assert set(stats.metrics().values()) == {0} and unchanged(model, before)


@pytest.mark.parametrize("iterations", [1, 2])
def test_t6_every_response_cut_and_filtered_is_no_update(make, model, caplog, iterations: int) -> None:
    batch = [(prompt, [(tokens, reward, False) for tokens, reward, _ in rest]) for prompt, rest in BATCH]
    updater = make(**{"algorithm.overlong_filtering": True, "algorithm.num_iterations": iterations})
    before = parameters_of(model)
    with caplog.at_level(logging.WARNING):
        metrics = updater.run(groups_of(model, batch), 1).metrics()
    assert metrics.pop("skipped_updates") == iterations and set(metrics.values()) == {0}
    assert updater.updates == 0 and unchanged(model, before)
    assert caplog.messages == ["no token of the mini-batch is in the loss: no update"] * iterations


def test_a_mini_batch_of_cut_responses_does_not_stop_the_others(make, model) -> None:
    cut = [(prompt, [(tokens, reward, False) for tokens, reward, _ in rest]) for prompt, rest in BATCH[:2]]
    updater = make(**{"algorithm.overlong_filtering": True, "train.mini_batch_prompts": 2})
    (gradients,), stats = captured(updater, groups_of(model, cut + BATCH[2:]))
    want = plain_gradients(model, groups_of(model, BATCH[2:]), keep=lambda s: s.completion.finished)
    assert_close(gradients, want)
    assert stats.metrics()["skipped_updates"] == 1 and updater.updates == 1


def test_t8_eos_is_trained_and_padding_is_not(model) -> None:
    """Whatever id pads: targets in the loss are the responses, EOS included, and nothing else."""
    samples = [
        TrainSample(prompt, tokens, [0.0] * len(tokens), 1.0, True)
        for prompt, responses in BATCH
        for tokens, _, _ in responses
    ]
    for budget in (1, 24, 10_000):
        for batch in make_micro_batches(samples, budget, torch.device("cpu")):
            for row, sample in enumerate(batch.samples):
                assert batch.targets[row][batch.mask[row]].tolist() == sample.response_ids
                whole = sample.prompt_ids + sample.response_ids
                assert batch.input_ids[row].tolist()[: len(whole)] == whole
                assert batch.targets[row].tolist() == batch.input_ids[row].tolist()[1:]
    assert sum(sample.response_ids[-1] == EOS for sample in samples) == 8


def with_reward(group, value: float):
    """The group with the reward of its first response set to `value`."""
    first, *rest = group.samples
    return replace(group, samples=[replace(first, reward=value), *rest])


@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_an_update_that_is_not_finite_is_skipped_and_leaves_no_trace(make, model, caplog, fault: str) -> None:
    """The second of two mini-batches is sound: it is trained on as if the first had not been."""
    groups = groups_of(model, step=0)
    want = plain_gradients(model, groups[2:], old=from_rollout)
    updater = make(**{"train.mini_batch_prompts": 2})
    before = parameters_of(model)
    handle = None
    if fault == "loss":
        groups[0] = with_reward(groups[0], math.nan)
    else:
        spoilt = iter([math.inf] + [1.0] * 9)
        handle = model.model.norm.weight.register_hook(lambda gradient: gradient * next(spoilt))
    with caplog.at_level(logging.WARNING):
        (gradients,), stats = captured(updater, groups)
    assert_close(gradients, want)
    metrics = stats.metrics()
    assert metrics["skipped_updates"] == 1 and updater.updates == 1 and unchanged(model, before)
    assert math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"])
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith("update skipped: loss")
    if handle:
        handle.remove()


def test_a_skipped_update_does_not_decay_the_weights(make, model) -> None:
    updater, before = make(**{"optimizer.weight_decay": 0.5}), parameters_of(model)
    groups = groups_of(model, step=0)
    updater.run([with_reward(groups[0], math.nan), *groups[1:]], 1)
    assert updater.updates == 0 and unchanged(model, before) and not updater.optimizer.state
    updater.run(groups, 2)
    assert updater.updates == 1 and not unchanged(model, before)


SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5}
SMALL |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
RECURRENT = {"lru_width": 32, "attention_window_size": 16, "block_types": ("recurrent", "attention")}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {}),
        ("Phi", {}),  # its head has a bias
        ("Gemma2", {"head_dim": 16, "final_logit_softcapping": 3.0}),
        ("Cohere", {"logit_scale": 3.0}),
        ("Granite", {"logits_scaling": 4.0}),  # divides
        pytest.param("HyperCLOVAX", {"logits_scaling": 4.0}),  # multiplies
        pytest.param("FalconH1", {"lm_head_multiplier": 0.3, **MAMBA}),
        pytest.param("RecurrentGemma", {"logits_soft_cap": 3.0, **RECURRENT}),
    ],
)
def test_policy_s_logprobs_are_those_of_the_model_s_own_logits(name: str, options: dict) -> None:
    config = getattr(transformers, f"{name}Config")(**SMALL | options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).double().eval()
        if name == "Phi":
            torch.nn.init.normal_(model.lm_head.bias)
    policy = Policy(model)
    samples = [
        TrainSample(prompt, tokens, [0.0] * len(tokens), 1.0, True)
        for prompt, tokens in (([3, 4, 5], [6, 7, 8, 9, 1]), ([9], [10, 11, 1]))
    ]
    (batch,) = make_micro_batches(samples, 100, torch.device("cpu"))
    with torch.no_grad():
        output = policy(batch, PolicyLossConfig(temperature=0.7, **policy.head_options))
        for sample, logprobs in zip(samples, batch.split(output.logprobs)):
            want = token_logprobs(model, sample.prompt_ids, sample.response_ids)
            torch.testing.assert_close(logprobs, want.double(), rtol=1e-5, atol=1e-5)
