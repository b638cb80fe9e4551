"""The transformers engine against sampling token by token from plain forwards, and its random numbers."""

from __future__ import annotations

import math
import random

import pytest
import torch
from tiny import EOS, GENERATION_DEFAULTS

from dapo.config import ModelConfig
from dapo.model_files import load_model
from dapo.rollout import Completion, HFEngine, Request, SamplingParams
from dapo.rollout import hf as hf_module
from dapo.rollout.hf import KeyedSampler, inverse_transform_sample, keyed_uniforms

PROMPTS = [[9], [40, 41, 5, 6, 7, 8, 11], [9, 12], [0, 9, 12, 13, 50], [41]]
REQUESTS = [Request(prompt, (3, 1, i, sample)) for i, prompt in enumerate(PROMPTS) for sample in range(4)]
SAMPLING = SamplingParams(max_new_tokens=5)


@pytest.fixture
def model(tiny_model_dir):
    return load_model(ModelConfig(path=str(tiny_model_dir))).model


@pytest.fixture
def eos_model(model):
    """EOS is as likely as the most likely token of a prompt: a response of five tokens often ends early."""
    with torch.no_grad():
        model.lm_head.weight[EOS] = model.lm_head.weight[78]
    return model


@torch.no_grad()
def by_hand(model, request: Request, temperature=1.0, eos=(EOS,), max_new_tokens=5) -> Completion:
    """Sampling as it is defined: no cache, no padding, no batch."""
    ids, logprobs, finished = list(request.prompt_ids), [], False
    for uniform in keyed_uniforms(request.noise_key, max_new_tokens):
        logits = model(torch.tensor([ids])).logits[0, -1].double() / (temperature or 1.0)
        distribution = logits.log_softmax(0)
        token = int(distribution.argmax())
        if temperature:
            token = int((distribution.exp().cumsum(0) <= uniform).sum())
        ids.append(token)
        logprobs.append(distribution[token].item())
        finished = token in eos
        if finished:
            break
    return Completion(ids[len(request.prompt_ids) :], logprobs, finished)


def assert_same(completions: list[Completion], expected: list[Completion]) -> None:
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]
    assert [c.finished for c in completions] == [c.finished for c in expected]
    for a, b in zip(completions, expected):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_policys_whole_distribution_reaches_the_sampler(model, monkeypatch, temperature):
    """Not cut by the model's own top_k 50, top_p 0.9, T 0.3 and penalty 1.5: V finite log-probs."""
    assert model.generation_config.to_dict().items() >= GENERATION_DEFAULTS.items()
    seen = []

    def spy(logprobs, uniform):
        seen.append(logprobs)
        return inverse_transform_sample(logprobs, uniform)

    monkeypatch.setattr(hf_module, "inverse_transform_sample", spy)
    request = Request([9, 9, 9, 40, 40], (5,))
    (completion,) = HFEngine(model, [EOS], 8).generate([request], SamplingParams(5, temperature))
    assert len(completion.token_ids) == len(seen) == 5
    with torch.no_grad():
        logits = model(torch.tensor([request.prompt_ids + completion.token_ids])).logits[0, 4:-1]
    expected = (logits / temperature).log_softmax(-1)
    assert expected.exp().min() > 0 and expected.shape == (5, 99)
    torch.testing.assert_close(torch.cat(seen), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_completions_and_logprobs_are_those_of_plain_forwards(model, temperature):
    """Prompts of 1 to 7 tokens in one batch, four samples of each."""
    completions = HFEngine(model, [EOS], 64).generate(REQUESTS, SamplingParams(5, temperature))
    assert_same(completions, [by_hand(model, request, temperature) for request in REQUESTS])


@pytest.mark.parametrize("prompts", [[[9]], [[9], [41]]])
def test_prompts_of_one_token_only(model, prompts):
    requests = [Request(prompt, (i, s)) for i, prompt in enumerate(prompts) for s in range(3)]
    assert_same(
        HFEngine(model, [EOS], 64).generate(requests, SAMPLING), [by_hand(model, r) for r in requests]
    )


@pytest.mark.parametrize("max_sequences", [1, 3, 64])
def test_neither_order_nor_batch_nor_neighbours_matter(eos_model, max_sequences):
    expected = {r.noise_key: by_hand(eos_model, r) for r in REQUESTS}
    engine = HFEngine(eos_model, [EOS], max_sequences)
    for requests in (REQUESTS, random.Random(1).sample(REQUESTS, len(REQUESTS)), REQUESTS[5:12:3]):
        assert_same(engine.generate(requests, SAMPLING), [expected[r.noise_key] for r in requests])
    assert engine.generate([], SAMPLING) == []


@pytest.mark.parametrize("max_sequences, parts", [(8, [8, 8, 4]), (64, [20])])
def test_completions_are_handed_over_part_by_part(model, monkeypatch, max_sequences, parts):
    """Each request once, before the next part is generated, with what `generate` returns for it."""
    seen, seen_before = {}, []
    generate_batch = HFEngine._generate_batch

    def spy(self, requests, sampling, check):
        seen_before.append(len(seen))
        return generate_batch(self, requests, sampling, check)

    def on_completion(i, completion):
        assert i not in seen
        seen[i] = completion

    monkeypatch.setattr(HFEngine, "_generate_batch", spy)
    completions = HFEngine(model, [EOS], max_sequences).generate(REQUESTS, SAMPLING, on_completion)
    assert [seen[i] for i in range(len(REQUESTS))] == completions
    assert seen_before == [sum(parts[:i]) for i in range(len(parts))]


def test_what_the_receiver_raises_ends_the_generation(model):
    def full_disk(i, completion):
        raise OSError("full")

    model.train()
    with pytest.raises(OSError, match="full"):
        HFEngine(model, [EOS], 8).generate(REQUESTS, SAMPLING, full_disk)
    assert model.training and model.generation_config.to_dict().items() >= GENERATION_DEFAULTS.items()


def test_noise_depends_on_the_key_only(model):
    requests = [Request([9, 12], (0, step, 4, sample)) for step in (1, 2) for sample in range(10)]
    completions = HFEngine(model, [EOS], 64).generate(requests + requests, SAMPLING)
    assert completions[:20] == completions[20:]
    assert len({tuple(completion.token_ids) for completion in completions}) == 20


def test_shared_prefill_changes_nothing(model, monkeypatch):
    lengths = []
    prefill = HFEngine._prefill

    def spy(self, input_ids, attention_mask, rows):
        cache = prefill(self, input_ids, attention_mask, rows)
        lengths.append((len(input_ids), len(rows), cache.get_seq_length()))
        return cache

    monkeypatch.setattr(HFEngine, "_prefill", spy)
    shared = HFEngine(model, [EOS], 64).generate(REQUESTS, SAMPLING)
    assert lengths == [(5, 20, 6)]  # five prompts for twenty responses, all but the last of seven tokens
    monkeypatch.setattr(HFEngine, "_prefill", lambda *_: None)
    assert_same(shared, HFEngine(model, [EOS], 64).generate(REQUESTS, SAMPLING))


def test_new_weights_count_at_once(model):
    """T12: no prefix of an earlier call is used again. Training mode stays what it was."""
    engine = HFEngine(model, [EOS], 64)
    before = engine.generate(REQUESTS, SAMPLING)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.8)
    model.train()
    engine.sync_weights()
    after = engine.generate(REQUESTS, SAMPLING)
    assert model.training
    assert_same(after, [by_hand(model, request) for request in REQUESTS])
    assert [c.token_ids for c in after] != [c.token_ids for c in before]


def test_responses_end_with_their_eos(eos_model):
    """T8: padding has the id of EOS. The EOS is part of the response, what follows is not."""
    requests = [Request(PROMPTS[i % 5], (i,)) for i in range(60)]
    completions = HFEngine(eos_model, [EOS], 64).generate(requests, SAMPLING)
    assert_same(completions, [by_hand(eos_model, request) for request in requests])
    for completion in completions:
        ids = completion.token_ids
        assert len(completion.logprobs) == len(ids) and EOS not in ids[:-1]
        assert completion.finished == (ids[-1] == EOS) and (completion.finished or len(ids) == 5)
    lengths = {len(completion.token_ids) for completion in completions if completion.finished}
    assert lengths >= {1, 3, 5}  # from at once to just in time
    assert sum(not completion.finished for completion in completions) > 5


def test_every_eos_of_several_ends_a_response(model):
    eos = (EOS, 78, 68, 47)
    completions = HFEngine(model, eos, 64).generate(REQUESTS, SAMPLING)
    assert_same(completions, [by_hand(model, request, eos=eos) for request in REQUESTS])
    assert len({c.token_ids[-1] for c in completions if c.finished}) > 1


def test_greedy_takes_the_most_likely_token(model):
    completions = HFEngine(model, [EOS], 64).generate(REQUESTS, SamplingParams(5, temperature=0))
    assert_same(completions, [by_hand(model, request, temperature=0) for request in REQUESTS])
    assert len({tuple(c.token_ids) for c in completions}) == len(PROMPTS)  # whatever the key


PROBABILITIES = [0.0, 0.5, 0.0, 0.25, 0.15, 0.07, 0.03, 0.0]


def assert_frequencies(tokens: torch.Tensor, probabilities: list[float]) -> None:
    """Within four standard deviations; what has no probability does not occur."""
    counts = tokens.flatten().bincount(minlength=len(probabilities)).tolist()
    n = sum(counts)
    for count, p in zip(counts, probabilities):
        assert abs(count - n * p) <= 4 * math.sqrt(n * p * (1 - p))


def test_inverse_transform_sampling_has_the_right_frequencies():
    uniform = torch.rand(100_000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logprobs = torch.tensor(PROBABILITIES).log().expand(len(uniform), -1)
    tokens = inverse_transform_sample(logprobs, uniform)
    assert tokens.shape == (100_000, 1)
    assert_frequencies(tokens, PROBABILITIES)


def test_rare_tokens_keep_their_probability():
    """Summed in fp32, all of these would vanish beside the first."""
    logprobs = torch.tensor([1.0] + [2e-8] * 5000).log()[None]
    total = 1 + 5000 * 2e-8
    uniform = torch.tensor([(1 + (i + 0.5) * 2e-8) / total for i in range(0, 5000, 7)], dtype=torch.float64)
    tokens = inverse_transform_sample(logprobs.expand(len(uniform), -1), uniform[:, None])
    expected = torch.arange(1, 5001, 7)
    assert (tokens[:, 0] - expected).abs().max() <= 1


@pytest.mark.parametrize("seed", range(5))
def test_tokens_without_probability_are_never_chosen(seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(200, 50, generator=generator)
    logits[torch.rand(200, 50, generator=generator) < 0.6] = -torch.inf
    logits[:, 0] = logits[:, -1] = -torch.inf
    logits[:, 25] = 0
    logprobs = logits.log_softmax(-1)
    for uniform in (0.0, 2.0**-53, 0.5, 1 - 2.0**-53):
        tokens = inverse_transform_sample(logprobs, torch.full((200, 1), uniform, dtype=torch.float64))
        assert logprobs.gather(1, tokens).isfinite().all()
    first = inverse_transform_sample(logprobs, torch.zeros(200, 1, dtype=torch.float64))
    assert (first[:, 0] == logprobs.isfinite().int().argmax(1)).all()


def test_keyed_uniforms():
    key = (1, 2, 3)
    numbers = keyed_uniforms(key, 1000)
    assert numbers.dtype == torch.float64 and 0 <= numbers.min() < numbers.max() < 1
    for count in (1, 7, 15, 16, 17, 100):
        assert torch.equal(keyed_uniforms(key, count), numbers[:count])
    others = [(1, 2, 4), (1, 2), (12, 3), (1, 23), (3, 2, 1), (0, 1, 2, 3), (-1, 2, 3)]
    firsts = {keyed_uniforms(other, 1).item() for other in [key, *others]}
    assert len(firsts) == 8
    state = torch.get_rng_state()
    keyed_uniforms(key, 5)
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_of_neighbouring_keys_are_uniform_together():
    numbers = torch.stack([keyed_uniforms((0, step, 7, s), 2) for step in range(50) for s in range(40)])
    for position in (0, 1):
        assert_frequencies((numbers[:, position] * 10).long(), [0.1] * 10)
    assert abs(torch.corrcoef(numbers.T)[0, 1]) < 4 / math.sqrt(len(numbers))


@pytest.mark.parametrize(
    "settings, kept",
    [
        ({}, {1: 0.5, 3: 0.25, 4: 0.15, 5: 0.07, 6: 0.03}),
        ({"top_p": 0.8}, {1: 0.5, 3: 0.25, 4: 0.15}),
        ({"top_p": 0.6}, {1: 0.5, 3: 0.25}),
        ({"top_p": 0.4}, {1: 0.5}),
        ({"top_k": 2}, {1: 0.5, 3: 0.25}),
        ({"top_k": 4, "top_p": 0.6}, {1: 0.5, 3: 0.25}),
        ({"temperature": 0.5}, {1: 0.25, 3: 0.0625, 4: 0.0225, 5: 0.0049, 6: 0.0009}),
        ({"temperature": 0.5, "top_p": 0.8}, {1: 0.25, 3: 0.0625}),  # top_p is of the cooled distribution
    ],
)
def test_top_p_and_top_k_keep_the_right_support(settings, kept):
    """And log-probs are those of the distribution that was sampled from."""
    rows = 4000
    sampler = KeyedSampler([(row,) for row in range(rows)], SamplingParams(1, **settings), prompt_length=1)
    scores = torch.tensor(PROBABILITIES).log().expand(rows, -1)
    chosen = sampler(torch.zeros(rows, 1, dtype=torch.int64), scores)
    tokens = chosen.argmax(1)
    assert (chosen.isfinite().sum(1) == 1).all()
    share = [kept.get(token, 0.0) / sum(kept.values()) for token in range(len(PROBABILITIES))]
    assert_frequencies(tokens, share)
    torch.testing.assert_close(sampler.logprobs[0], torch.tensor(share).log()[tokens], atol=1e-5, rtol=0)
