"""The gradient of an optimizer step against full logits and plain autograd in fp64, and the switches that
change it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, OPTConfig
from update_cases import (
    BATCH,
    DRIFT,
    NUM_TOKENS,
    TEMPERATURE,
    assert_close,
    captured,
    from_rollout,
    groups_of,
    plain_gradients,
    plain_loss,
    token_logprobs,
)

from dapo.batching import TrainSample, make_micro_batches
from dapo.model import Policy, checkpoint_activations
from dapo.sampling import Group, Sample
from dapo.update import Updater
from dapo_kernels import PolicyLossConfig

SMALL = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def spied_batches(updater: Updater) -> list:
    seen = []
    updater.policy.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    return seen


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize(("budget", "micro_batches"), [(1, 12), (24, 4), (10_000, 1)])
def test_gradient_is_that_of_full_logits_however_the_step_is_cut(
    make, model, token_level: bool, budget: int, micro_batches: int
) -> None:
    groups = groups_of(model)
    switches = {"algorithm.token_level_loss": token_level, "train.max_tokens_per_micro_batch": budget}
    updater = make(**switches)
    seen = spied_batches(updater)
    (gradients,), stats = captured(updater, groups)
    assert len(seen) == micro_batches
    assert_close(gradients, plain_gradients(model, groups, token_level=token_level))
    loss = plain_loss(model, groups, token_level=token_level).item()
    assert stats.metrics()["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-7)


def test_switch_of_the_loss_level_changes_the_gradient(make, model) -> None:
    name = "lm_head.weight"
    token, sequence = (
        captured(make(**{"algorithm.token_level_loss": on}), groups_of(model))[0][0][name]
        for on in (True, False)
    )
    assert (token - sequence).norm() > 0.1 * token.norm()


@pytest.mark.parametrize("ratio", [1.25, 0.75])
@pytest.mark.parametrize("clip_higher", [True, False])
def test_clip_higher_moves_the_upper_bound_alone(make, model, ratio: float, clip_higher: bool) -> None:
    """A ratio between 1 + epsilon_low and 1 + epsilon_high, and one under 1 - epsilon_low."""
    groups = groups_of(model, step=0, drift=[-math.log(ratio)])
    (gradients,), stats = captured(make(**{"algorithm.clip_higher": clip_higher}), groups)
    high = 0.28 if clip_higher else 0.2
    assert_close(gradients, plain_gradients(model, groups, old=from_rollout, high=high))
    metrics = stats.metrics()
    assert metrics["ratio_mean"] == pytest.approx(ratio) and metrics["ratio_max"] == pytest.approx(ratio)
    assert metrics["approx_kl"] == pytest.approx(-math.log(ratio))
    right, wrong = 3 + 7 + 1 + 5 + 6 + 2, 6 + 2 + 1 + 3 + 4 + 2
    assert metrics["clip_frac_high"] == pytest.approx(right / 42 if ratio > 1 and not clip_higher else 0)
    assert metrics["clip_frac_low"] == pytest.approx(wrong / 42 if ratio < 1 else 0)


def test_epsilons_and_dual_clip_reach_the_loss(make, model) -> None:
    groups = groups_of(model, step=0, drift=[-math.log(1.5), -math.log(0.6)])
    bounds = {"algorithm.epsilon_low": 0.45, "algorithm.epsilon_high": 0.55}
    (gradients,), _ = captured(make(**bounds), groups)
    assert_close(gradients, plain_gradients(model, groups, old=from_rollout, low=0.45, high=0.55))

    groups = groups_of(model, step=0, drift=[-math.log(12)])  # over the dual clip: nothing is left to learn
    (gradients,), stats = captured(make(**{"algorithm.dual_clip": 10.0}), groups)
    assert max(gradient.abs().max().item() for gradient in gradients.values()) == 0
    assert stats.metrics()["dual_clip_frac"] == pytest.approx(18 / 42)


@pytest.mark.parametrize("token_level", [True, False])
def test_overlong_filtering_leaves_cut_responses_out_of_the_loss_alone(make, model, token_level) -> None:
    """They stay in their group's mean and standard deviation."""
    groups = groups_of(model)
    switches = {"algorithm.overlong_filtering": True, "algorithm.token_level_loss": token_level}
    (gradients,), stats = captured(make(**switches), groups)
    want = plain_gradients(model, groups, token_level=token_level, keep=lambda s: s.completion.finished)
    assert_close(gradients, want)
    assert stats.metrics()["num_tokens"] == NUM_TOKENS - 2 - 7 - 1 - 4


def test_gradient_is_clipped_and_its_norm_before_that_is_logged(make, model) -> None:
    groups = groups_of(model)
    want = plain_gradients(model, groups)
    norm = torch.stack([gradient.norm() for gradient in want.values()]).norm().item()
    (gradients,), stats = captured(make(**{"optimizer.max_grad_norm": norm / 4}), groups)
    assert stats.metrics()["grad_norm"] == pytest.approx(norm, rel=1e-6)
    torch.testing.assert_close(gradients["lm_head.weight"], want["lm_head.weight"] / 4, rtol=1e-4, atol=0)


def test_one_update_without_a_scoring_pass_is_that_with_one(make, model) -> None:
    """Two passes over the batch need a scoring pass; as no step is taken, all gradients are the same."""
    groups = groups_of(model)
    (short,), short_stats = captured(make(), groups)
    (first, second), stats = captured(make(**{"algorithm.num_iterations": 2}), groups)
    assert_close(first, short)
    assert_close(second, short)
    assert stats.metrics() == pytest.approx(short_stats.metrics(), rel=1e-6, abs=1e-6)


def test_metrics_of_the_policy_before_the_update(make, model) -> None:
    groups = groups_of(model)
    with torch.no_grad():
        logits, chosen = [], []
        for prompt, responses in BATCH:
            for tokens, *_ in responses:
                logits.append(
                    model(input_ids=torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
                )
                chosen.append(token_logprobs(model, prompt, tokens))
    p = (torch.cat(logits) / TEMPERATURE).softmax(-1)
    _, stats = captured(make(), groups)
    metrics = stats.metrics()
    drifts = [DRIFT[t % 3] for _, rs in BATCH for tokens, *_ in rs for t in range(len(tokens))]
    assert len(drifts) == metrics["num_tokens"] == NUM_TOKENS
    assert metrics["entropy"] == pytest.approx(-(p * p.log()).sum(-1).mean().item(), rel=1e-6)
    assert metrics["mean_prob"] == pytest.approx(torch.cat(chosen).exp().mean().item(), rel=1e-6)
    k3 = sum(math.exp(-drift) + drift - 1 for drift in drifts) / NUM_TOKENS
    assert metrics["rollout_mismatch_kl"] == pytest.approx(k3, rel=1e-4)
    assert metrics["rollout_mismatch_max"] == pytest.approx(0.2, rel=1e-5)
    assert metrics["ratio_mean"] == metrics["ratio_max"] == 1 and metrics["approx_kl"] == 0


def test_old_logprobs_are_the_rollout_s_where_stale_and_the_policy_s_where_fresh(make, model) -> None:
    stale, fresh = groups_of(model, BATCH[:2], step=3), groups_of(model, BATCH[2:], step=4, drift=[0.7])
    (gradients,), stats = captured(make(), stale + fresh, step=4)

    def old(group: Group, sample: Sample) -> Tensor | None:
        return from_rollout(group, sample) if group.step == 3 else None

    assert_close(gradients, plain_gradients(model, stale + fresh, old=old))
    assert stats.metrics()["rollout_mismatch_max"] == pytest.approx(0.7, rel=1e-5)  # of fresh tokens alone
    assert stats.metrics()["rollout_mismatch_kl"] == pytest.approx(math.exp(-0.7) + 0.7 - 1, rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**SMALL, num_key_value_heads=1, attention_dropout=0.5),
        GPT2Config(**SMALL, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5),
        pytest.param(
            OPTConfig(**SMALL, ffn_dim=32, word_embed_proj_dim=16, dropout=0.5),
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_checkpointed_activations_are_those_without_dropout(config) -> None:
    """Dropout in the trainer alone would make the ratio to the sampling policy noise."""
    policy = Policy(AutoModelForCausalLM.from_config(config).eval())
    sample = TrainSample([3, 4, 5], [6, 7, 8, 9, 10, 11], [0.0] * 6, 1.0, True)
    (batch,) = make_micro_batches([sample], 100, torch.device("cpu"))
    want = policy(batch, PolicyLossConfig()).logprobs
    checkpoint_activations(policy.model)
    torch.testing.assert_close(policy(batch, PolicyLossConfig()).logprobs, want)


def test_offloaded_activations_give_the_same_gradient(monkeypatch) -> None:
    """What waits in host memory is what enters each block, never a weight."""
    kept: list[torch.Size] = []

    class Spy(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            assert not pin_memory  # on CPU
            super().__init__(
                lambda tensor: kept.append(tensor.shape) or tensor.clone(), lambda copied: copied
            )

    policy = Policy(AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).eval())
    checkpoint_activations(policy.model)
    sample = TrainSample([3, 4, 5], [6, 7, 8, 9, 10, 11], [0.0] * 6, 1.0, True)
    (batch,) = make_micro_batches([sample], 100, torch.device("cpu"))

    def gradients() -> dict[str, Tensor]:
        policy.zero_grad()
        policy(batch, PolicyLossConfig()).loss.backward()
        return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}

    want = gradients()
    policy.offload_activations = True
    assert all(torch.equal(value, want[name]) for name, value in gradients().items())
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Spy)
    assert all(torch.equal(value, want[name]) for name, value in gradients().items())
    hidden = torch.Size([1, 9, SMALL["hidden_size"]])
    assert kept.count(hidden) >= SMALL["num_hidden_layers"]
    weights = {parameter.shape for parameter in policy.parameters() if parameter.dim() > 1}
    assert not weights & set(kept)
