"""Packed rows give the gradient of padded ones and of sequences alone, and no sequence sees another."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from update_cases import assert_close, captured, groups_of, make_updater, plain_gradients

from dapo.attention import PACKED_SDPA, window_mask
from dapo.batching import TrainSample, make_micro_batches
from dapo.errors import UserError
from dapo.model import Policy, checkpoint_activations
from dapo.packing_trial import can_pack
from dapo_kernels import PolicyLossConfig

CPU = torch.device("cpu")
LENGTHS = [
    (1, 2),
    (30, 370),
    (3, 14),
    (20, 44),
    (2, 3),
    (70, 50),
    (11, 22),
    (4, 5),
    (1, 90),
]  # prompt, response
SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
SMALL |= {"max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
TIED_QWEN2 = {"tie_word_embeddings": True}
WINDOWED = {"sliding_window": 6}
TOKEN = PolicyLossConfig()
SEQUENCE = PolicyLossConfig(reduction="seq-mean-token-mean")


def model_of(name: str, **options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(
            getattr(transformers, f"{name}Config")(**SMALL | options)
        ).eval()


def samples_of(lengths=LENGTHS, seed: int = 0) -> list[TrainSample]:
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for prompt, response in lengths:
        ids = torch.randint(64, (prompt + response,), generator=generator).tolist()
        advantage = torch.randn((), generator=generator).item()
        samples.append(TrainSample(ids[:prompt], ids[prompt:], [0.0] * response, advantage, True))
    return samples


def logprobs_of(policy: Policy, samples: Sequence[TrainSample], packed: bool) -> list[Tensor]:
    """Of each sample's response, in one micro-batch, in the samples' order."""
    (batch,) = make_micro_batches(samples, 10**9, CPU, packed=packed)
    with torch.no_grad():
        values = batch.split(policy(batch, TOKEN).logprobs)
    found = {id(sample): value for sample, value in zip(batch.samples, values)}
    return [found[id(sample)] for sample in samples]


def off_policy(policy: Policy, samples: list[TrainSample]) -> list[TrainSample]:
    """Gives the samples old and reference log-probs near the policy's own, and token weights."""
    generator = torch.Generator().manual_seed(1)
    for sample, logprobs in zip(samples, logprobs_of(policy, samples, packed=False)):
        noise = torch.randn(3, len(logprobs), generator=generator)
        sample.old_logprobs, sample.ref_logprobs = logprobs + 0.3 * noise[0], logprobs + 0.5 * noise[1]
        sample.token_weights = noise[2].exp()
    return samples


def gradients(
    policy: Policy, samples, config: PolicyLossConfig, budget: int, packed: bool, count: int | None = None
) -> dict[str, Tensor]:
    by_token = config.reduction == "token-mean"
    denominator = sum(sample.num_loss_tokens for sample in samples) if by_token else len(samples)
    policy.zero_grad()
    for batch in make_micro_batches(samples, budget, CPU, packed=packed, count=count):
        policy(batch, config, float(denominator)).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert_close(got, want, 3e-5)
    difference = torch.cat([(got[name] - want[name]).flatten() for name in want])
    assert difference.norm() <= 1e-5 * torch.cat([value.flatten() for value in want.values()]).norm()


@pytest.mark.parametrize("config", [TOKEN, SEQUENCE], ids=lambda config: config.reduction)
@pytest.mark.parametrize(("name", "options"), [("Llama", {}), ("Qwen2", TIED_QWEN2), ("Mistral", WINDOWED)])
def test_gradient_is_the_same_however_the_step_is_cut(name: str, options: dict, config) -> None:
    """On policy. One sequence at a time, its attention as transformers has it, is what all are held to."""
    samples = samples_of()
    want = gradients(Policy(model_of(name, **options)), samples, config, 1, packed=False)
    policy = Policy(model_of(name, **options), packing=True)
    for count in (1, 3, 7, len(samples) + 1):  # the last micro-batch of the last cut is empty
        assert_same(gradients(policy, samples, config, 10**9, packed=True, count=count), want)
    assert_same(gradients(policy, samples, config, 500, packed=False), want)


@pytest.mark.parametrize(
    "config",
    [
        PolicyLossConfig(kl_coef=0.1),
        PolicyLossConfig(reduction="seq-mean-token-mean", entropy_coef=0.01),
        PolicyLossConfig(reduction="seq-mean-token-sum", ratio_level="sequence"),
    ],
    ids=["kl", "entropy", "sequence ratio"],
)
def test_off_policy_gradient_is_the_same_however_the_step_is_cut(config) -> None:
    """With old and reference log-probs, token weights, and tokens left out of the loss."""
    policy = Policy(model_of("Qwen2"), packing=True)
    samples = off_policy(policy, samples_of())
    samples[5].rollout_logprobs[3:9] = [float("nan")] * 6
    want = gradients(policy, samples, config, 1, packed=False)
    for count in (1, 3, 7):
        assert_same(gradients(policy, samples, config, 10**9, packed=True, count=count), want)
    assert_same(gradients(policy, samples, config, 500, packed=False), want)
    for sample in samples:
        sample.token_weights = None
    with pytest.raises(AssertionError):
        assert_same(gradients(policy, samples, config, 500, packed=True), want)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_layers_computed_again_in_backward_see_the_same_boundaries(name: str) -> None:
    options = WINDOWED if name == "Mistral" else {}
    want = gradients(Policy(model_of(name, **options)), samples_of(), TOKEN, 1, packed=False)
    model = model_of(name, **options)
    checkpoint_activations(model)
    policy = Policy(model, packing=True)
    calls = []
    handle = model.model.layers[1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    assert_same(gradients(policy, samples_of(), TOKEN, 10**9, packed=True, count=3), want)
    handle.remove()
    assert len(calls) == 6  # once forward and once again in backward, for each of three micro-batches


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {}),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
        ("Qwen3", {"head_dim": 16}),
        ("Gemma3Text", {"head_dim": 16, "sliding_window": 7}),
        ("Mistral", WINDOWED),
        ("GPT2", {}),
        ("GPTNeoX", {}),
    ],
)
def test_a_sequence_s_logprobs_are_those_it_has_alone_whatever_lies_beside_it(
    name: str, options: dict
) -> None:
    lengths = [(4, 30), (3, 20), (2, 25)]
    samples, others = samples_of(lengths), samples_of(lengths, seed=1)
    plain = Policy(model_of(name, **options))
    alone = [logprobs_of(plain, [sample], packed=False)[0] for sample in samples]
    policy = Policy(model_of(name, **options), packing=True)
    assert policy.packed
    first = logprobs_of(policy, samples, packed=True)
    torch.testing.assert_close(torch.cat(first), torch.cat(alone), rtol=0, atol=1e-5)
    for kept in range(3):
        mixed = [samples[i] if i == kept else others[i] for i in range(3)]
        now = logprobs_of(policy, mixed, packed=True)[kept]
        torch.testing.assert_close(now, first[kept], rtol=0, atol=1e-6)


def test_attention_as_transformers_has_it_lets_sequences_see_each_other() -> None:
    """That the test above would fail for a leak: positions alone, on the same packed row."""
    lengths = [(4, 30), (3, 20)]
    samples, others = samples_of(lengths), samples_of(lengths, seed=1)
    model = model_of("Llama")

    def second(first: TrainSample) -> Tensor:
        (batch,) = make_micro_batches([first, samples[1]], 10**9, CPU, packed=True)
        with torch.no_grad():
            logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
        logprobs = logits[:, :-1].log_softmax(-1).gather(2, batch.targets[..., None])[..., 0]
        return batch.split(logprobs)[1]

    assert (second(samples[0]) - second(others[0])).abs().max() > 0.1


def test_window_mask_is_the_last_tokens() -> None:
    want = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert window_mask(4, 2, CPU).int().tolist() == [[want]]
    assert window_mask(4, 4, CPU) is None and window_mask(4, None, CPU) is None


def test_an_update_on_packed_rows_is_that_of_full_logits(tmp_path: Path, tiny_model_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64)
    groups = groups_of(model)
    updater = make_updater(tmp_path, model, **{"train.max_tokens_per_micro_batch": 30})
    updater.policy.packed = can_pack(updater.policy, required=True)
    seen = []
    updater.policy.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].lengths))
    (taken,), _ = captured(updater, groups)
    assert_close(taken, plain_gradients(model, groups))
    assert [sum(lengths) for lengths in seen] == [27, 24, 24]


def test_padded_batches_and_generation_are_as_before_once_attention_is_switched() -> None:
    samples = samples_of()
    plain, policy = (
        Policy(model_of("Mistral", **WINDOWED)),
        Policy(model_of("Mistral", **WINDOWED), packing=None),
    )
    assert policy.packed and policy.model.config._attn_implementation == PACKED_SDPA
    for a, b in zip(logprobs_of(plain, samples, packed=False), logprobs_of(policy, samples, packed=False)):
        assert torch.equal(a, b)
    ids = torch.tensor([[0, 0, 5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18, 19, 20]])
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    texts = [m.generate(**inputs, max_new_tokens=8, do_sample=False) for m in (plain.model, policy.model)]
    assert torch.equal(*texts)
    assert PACKED_SDPA not in str(policy.model.config.to_dict())  # nothing of it goes into a saved model


def window_in_its_mask_alone():
    """A model whose attention is not told of the window that its mask has."""
    model = model_of("Mistral", sliding_window=100)
    untold = copy.copy(model.config)
    untold.sliding_window, untold._attn_implementation = None, PACKED_SDPA
    for layer in model.model.layers:
        layer.self_attn.config = untold
    return model


RECURRENT = {"lru_width": 32, "attention_window_size": 16, "block_types": ("recurrent", "attention")}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: model_of("RecurrentGemma", **RECURRENT), "log-probs in a packed row and alone differ by"),
        (
            lambda: model_of("RecurrentGemma", **RECURRENT).bfloat16(),
            "one sequence of a packed row moves another's",
        ),
        (lambda: model_of("Gemma2", head_dim=16), "soft-capped attention scores"),
        (lambda: model_of("Bloom"), "its attention is 'eager'"),
        (lambda: model_of("StableLm"), "never told where sequences begin"),
        (window_in_its_mask_alone, "local attention over 100 tokens is in its mask alone"),
    ],
    ids=["recurrent", "recurrent bf16", "softcap", "eager", "boundaries lost", "window lost"],
)
def test_a_model_that_cannot_be_packed_is_padded_or_an_error(make, reason: str, caplog) -> None:
    model = make()
    given = model.config._attn_implementation
    with caplog.at_level(logging.WARNING, logger="dapo"):
        policy = Policy(model, packing=None)
    assert not policy.packed and model.config._attn_implementation == given
    assert len(caplog.messages) == 1 and reason in caplog.messages[0]
    with pytest.raises(
        UserError, match=f"train.packing is true, but {type(model).__name__} cannot be packed"
    ):
        Policy(model, packing=True)
    assert not Policy(model, packing=False).packed and model.config._attn_implementation == given


def test_packing_off_leaves_the_model_as_it_is() -> None:
    model = model_of("Llama")
    assert not Policy(model, packing=False).packed and model.config._attn_implementation == "sdpa"


def test_bfloat16_model_is_packed() -> None:
    assert Policy(model_of("Llama").bfloat16(), packing=True).packed
