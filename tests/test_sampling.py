"""Dynamic sampling on a scripted engine: which groups are trained on, what was asked of the engine, and the
metrics of what it answered."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

import pytest
from tiny import tiny_values

from dapo.config import Config
from dapo.data import Prompt
from dapo.errors import TrainingStopped
from dapo.metrics import rollout_metrics
from dapo.rewards import Verdict
from dapo.rollout import Completion, SamplingParams
from dapo.sampling import Sampler

R, W = "R", "W"
MIXED, RIGHT, WRONG = [R, W], [R, R], [W, W]
CAP = 20  # generation batches no test comes near: an engine asked more often is being spun


class ScriptedEngine:
    """Answers with scripted texts, a token a character: sample i of a prompt is its script's entry i."""

    def __init__(self, script: dict[int, list[str]]) -> None:
        self.script, self.batches = script, []

    def generate(self, requests, sampling, on_completion=None, check=None):
        self.batches.append(list(requests))
        self.sampling = sampling
        assert len(self.batches) <= CAP, "spinning"
        completions = [self.complete(request, sampling) for request in requests]
        for i in reversed(range(len(requests))):  # engines finish in an order of their own
            on_completion(i, completions[i])
        return completions

    def complete(self, request, sampling):
        responses = self.script[request.prompt_ids[0]]
        _seed, step, _index, sample = request.noise_key
        tokens = [ord(character) for character in responses[sample % len(responses)]]
        logprobs = [-step - sample / 8 - position / 64 for position in range(len(tokens))]
        return Completion(tokens, logprobs, finished=len(tokens) < sampling.max_new_tokens)

    def sync_weights(self) -> None: ...

    def close(self) -> None: ...

    @property
    def keys(self) -> list[tuple[int, ...]]:
        return [request.noise_key for batch in self.batches for request in batch]

    @property
    def prompts(self) -> list[int]:
        """Of each group asked for, in order."""
        return [request.prompt_ids[0] for batch in self.batches for request in batch[::2]]


class InOrder:
    """The prompts 0, 1, 2, ... of a script, over and over."""

    def __init__(self, script: dict[int, list[str]]) -> None:
        self.order = (Prompt(100 + i % len(script), f"prompt {i}", [i % len(script)], None) for i in count())

    def take(self, number: int) -> list[Prompt]:
        return [next(self.order) for _ in range(number)]

    def state_dict(self) -> dict:
        return {}


class Text:
    @staticmethod
    def decode(token_ids, skip_special_tokens):
        assert skip_special_tokens
        return "".join(map(chr, token_ids))


class BeginsWithR:
    """Right is what begins with R. Judges in threads of its own, the first response last."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(8)

    def submit(self, text: str, prompt: Prompt) -> Future[Verdict]:
        return self.threads.submit(self.judge, text)

    def judge(self, text: str) -> Verdict:
        return Verdict(text[0] == R)


@pytest.fixture
def make(tmp_path):
    """A sampler over scripts, by default of 2 groups a step, 3 a generation batch, 2 responses a group."""

    def build(scripts: list[list[str]], scorer=None, **overrides) -> Sampler:
        rollout = {"prompts_per_step": 2, "prompts_per_generation": 3, "group_size": 2}
        values = {f"rollout.{key}": value for key, value in rollout.items()}
        values |= {"rollout.max_response_length": 8, "algorithm.overlong_cache_length": 4}
        config = Config.model_validate(tiny_values(tmp_path, tmp_path, **values | overrides))
        script = dict(enumerate(scripts))
        return Sampler(config, InOrder(script), ScriptedEngine(script), scorer or BeginsWithR(), Text)

    return build


def used(groups) -> list[int]:
    return [group.prompt.ids[0] for group in groups]


def test_samples_until_the_batch_is_full(make) -> None:
    sampler = make([RIGHT, WRONG, MIXED, WRONG, MIXED, RIGHT, MIXED])
    seen = []
    batch = sampler.fill(1, lambda batch: seen.append((batch.num_gen_batches, len(batch.groups))))
    assert used(batch.groups) == [2, 4]
    assert used(batch.sampled) == sampler.engine.prompts == [0, 1, 2, 3, 4, 5]
    assert batch.qualified == [False, False, True, False, True, False]
    assert seen == [(1, 1), (2, 2)] and [len(b) for b in sampler.engine.batches] == [6, 6]
    assert [sample.text for sample in batch.groups[0].samples] == MIXED
    assert [group.accuracy for group in batch.sampled] == [1, 0, 0.5, 0, 0.5, 1]
    assert batch.step == 1 and {group.step for group in batch.sampled} == {1} and batch.staleness_max == 0


def test_engine_is_asked_for_the_policy_s_own_distribution(make) -> None:
    sampler = make([MIXED], **{"rollout.temperature": 0.7})
    sampler.fill(1)
    want = SamplingParams(8, temperature=0.7, top_p=1.0, top_k=0, repetition_penalty=1.0)
    assert sampler.engine.sampling == want


def test_t2_filter_looks_at_raw_accuracy_never_at_the_shaped_reward(make) -> None:
    """Prompt 0: all wrong, told apart by their lengths alone. Prompt 1: one right, which its length brings
    down to the reward of a wrong one."""
    sampler = make([["W", "W" * 8], ["R" * 8, "W"], MIXED], **{"algorithm.overlong_penalty_factor": 2.0})
    batch = sampler.fill(1)
    rewards = [[sample.reward for sample in group.samples] for group in batch.sampled]
    assert rewards == [[-1, -3], [-1, -1], [1, -1]]
    assert batch.qualified == [False, True, True] and used(batch.groups) == [1, 2]


def test_surplus_is_discarded_by_default(make) -> None:
    sampler = make([MIXED] * 9)
    assert used(sampler.fill(1).groups) == [0, 1]
    second = sampler.fill(2)
    assert used(second.groups) == [3, 4] and second.staleness_max == 0
    assert sampler.surplus == [] and len(sampler.engine.batches) == 2


def test_kept_surplus_comes_first_and_is_generated_once(make) -> None:
    keep = {"algorithm.surplus_groups": "keep", "rollout.prompts_per_generation": 5}
    sampler = make([MIXED] * 10, **keep)
    first = sampler.fill(1)
    assert used(first.groups) == [0, 1] and used(sampler.surplus) == [2, 3, 4]

    second = sampler.fill(2)
    assert used(second.groups) == [2, 3] and [group.step for group in second.groups] == [1, 1]
    assert second.staleness_max == 1 and second.num_gen_batches == 0 and second.sampled == []
    assert second.groups[0] is first.sampled[2]
    metrics = rollout_metrics(second)  # nothing was sampled: no mean, rather than a dip to 0
    assert math.isnan(metrics["accuracy"]) and math.isnan(metrics["reward_mean"])
    assert metrics["groups_sampled"] == metrics["response_length_max"] == 0
    assert [sample.completion.logprobs for sample in second.groups[1].samples] == [[-1.0], [-1.125]]

    third = sampler.fill(3)
    assert used(third.groups) == [4, 5] and [group.step for group in third.groups] == [1, 3]
    assert third.staleness_max == 2 and used(third.sampled) == [5, 6, 7, 8, 9]
    assert used(sampler.surplus) == [6, 7, 8, 9]
    assert sampler.engine.prompts == list(range(10)) and len(set(sampler.engine.keys)) == 20


SCRIPTS_T1 = [["W" * 3], ["R"], [R] + [W] * 7, [R] * 2 + [W] * 6, [R] * 4 + [W] * 4, [R] * 7 + [W]]


@pytest.mark.parametrize(
    ("more", "advice"),
    [
        ([WRONG, WRONG, RIGHT], "Use easier prompts or a larger rollout.group_size, "),
        ([RIGHT, WRONG, RIGHT], "Use harder prompts, "),
    ],
)
def test_t1_too_few_groups_stop_with_the_solve_rates(make, more: list, advice: str) -> None:
    shape = {"rollout.prompts_per_step": 5, "rollout.group_size": 8, "algorithm.max_generation_batches": 3}
    sampler = make(SCRIPTS_T1 + more, **shape)
    with pytest.raises(TrainingStopped) as stop:
        sampler.fill(4)
    hard, easy = (3, 2) if more[0] is WRONG else (2, 3)
    assert str(stop.value) == (
        "step 4: after 3 generation batches only 4 groups of rollout.prompts_per_step=5 have right and wrong "
        f"responses; solve rates of the 9 groups sampled: none right: {hard}, under 25%: 1, 25-50%: 1, "
        f"50-75%: 1, 75% and more: 1, all right: {easy}. {advice}raise algorithm.max_generation_batches (3), "
        "or set algorithm.on_too_few_groups=train to train on the groups there are"
    )
    assert len(sampler.engine.batches) == 3


@pytest.mark.parametrize(("scripts", "kept"), [([WRONG, WRONG, MIXED], [2]), ([WRONG, RIGHT], [])])
def test_too_few_groups_can_be_trained_on(make, scripts: list, kept: list) -> None:
    less = {"algorithm.on_too_few_groups": "train", "algorithm.max_generation_batches": 1}
    sampler = make(scripts, **less)
    for step in (1, 2):
        sampler.engine.batches.clear()
        batch = sampler.fill(step)
        assert len(batch.sampled) == 3 and batch.num_gen_batches == len(sampler.engine.batches) == 1
        assert used(batch.groups) == kept and batch.staleness_max == 0


def test_last_allowed_generation_batch_may_fill_the_step(make) -> None:
    """Two are needed in each step; the count starts anew in the second."""
    script = [WRONG, WRONG, MIXED]
    sampler = make(script, **{"algorithm.max_generation_batches": 2})
    assert [sampler.fill(step).num_gen_batches for step in (1, 2)] == [2, 2]
    with pytest.raises(TrainingStopped, match="after 1 generation batches only 1 groups"):
        make(script, **{"algorithm.max_generation_batches": 1}).fill(1)


def test_without_dynamic_sampling_one_batch_is_taken_whole(make) -> None:
    off = {"algorithm.dynamic_sampling": False, "algorithm.surplus_groups": "keep"}
    sampler = make([RIGHT, WRONG, MIXED], **off)
    batch = sampler.fill(1)
    assert used(batch.groups) == used(batch.sampled) == sampler.engine.prompts == [0, 1]
    assert batch.qualified == [True, True] and batch.num_gen_batches == 1 and sampler.surplus == []


def test_a_small_data_set_gets_fresh_noise_each_time_round(make) -> None:
    sampler = make([WRONG, [W, W, R, W]], seed=5)
    sampler.fill(7)
    assert sampler.engine.prompts == [0, 1, 0, 1, 0, 1, 0, 1, 0]
    assert len(set(sampler.engine.keys)) == 18
    assert sampler.engine.keys[:8:2] == [(5, 7, 100, 0), (5, 7, 101, 0), (5, 7, 100, 2), (5, 7, 101, 2)]


def test_noise_keys_and_choice_do_not_depend_on_the_generation_batch(make) -> None:
    shape = {"algorithm.max_generation_batches": CAP}

    def run(size: int):
        sampler = make([WRONG, [W, W, R, W], RIGHT], **shape | {"rollout.prompts_per_generation": size})
        batch = sampler.fill(1)
        completions = [sample.completion for group in batch.groups for sample in group.samples]
        return sampler.engine.keys, completions

    (keys, completions), *others = [run(size) for size in (9, 1, 2, 4)]
    assert len(keys) == 18 + 18 and len(completions) == 4
    for other_keys, other_completions in others:
        assert other_keys == keys[: len(other_keys)] and other_completions == completions


@pytest.mark.parametrize(("on", "penalties"), [(True, [0.0, -0.75, -3.0]), (False, [0.0, 0.0, 0.0])])
def test_soft_overlong_punishment_is_a_switch(make, on: bool, penalties: list) -> None:
    switch = {"algorithm.soft_overlong_punishment": on, "algorithm.overlong_penalty_factor": 3.0}
    rewards = {"reward.correct": 10.0, "reward.wrong": 2.0, "rollout.group_size": 3}
    batch = make([["R" * 4, "W" * 5, "W" * 8]], **switch | rewards).fill(1)
    samples = batch.groups[0].samples
    assert [sample.penalty for sample in samples] == penalties
    assert [sample.reward for sample in samples] == [10 + penalties[0], 2 + penalties[1], 2 + penalties[2]]


def test_metrics_are_over_all_sampled_groups(make) -> None:
    """Lengths 8 (cut), 1, 6, 6, 1, 1 of the first batch, 1, 3 and 1, 1, 1, 1 of the second."""
    scripts = [["W" * 8, W], ["R" * 6, "R" * 6], MIXED, [W, "RRR"], RIGHT, RIGHT]
    metrics = rollout_metrics(make(scripts).fill(1))
    rewards = [-2, -1, 0.5, 0.5, 1, -1, -1, 1, 1, 1, 1, 1]
    assert metrics == {
        **{"reward_mean": sum(rewards) / 12, "accuracy": 8 / 12},
        **{"response_length_mean": 31 / 12, "response_length_max": 8, "truncated_frac": 1 / 12},
        **{"overlong_penalty_mean": -2 / 12, "reward_failures": 0, "num_gen_batches": 2},
        **{"groups_sampled": 6, "groups_kept": 2, "groups_all_correct": 3, "groups_all_wrong": 1},
        "staleness_max": 0,
    }


def test_responses_are_judged_while_others_are_generated(make) -> None:
    """A verdict that only the end of generation lets through would wait for ever for it."""
    judged = threading.Event()

    class Impatient(BeginsWithR):
        def judge(self, text: str) -> Verdict:
            judged.set()
            return super().judge(text)

    class Patient(ScriptedEngine):
        def generate(self, requests, sampling, on_completion=None, check=None):
            completions = [self.complete(request, sampling) for request in requests]
            on_completion(0, completions[0])
            assert judged.wait(10), "nothing is judged before the last response is there"
            for i, completion in enumerate(completions[1:], start=1):
                on_completion(i, completion)
            return completions

    sampler = make([MIXED], scorer=Impatient())
    sampler.engine = Patient(sampler.engine.script)
    assert [sample.text for sample in sampler.fill(1).groups[0].samples] == MIXED


def test_terms_shape_the_reward_and_leave_the_filter_alone(make) -> None:
    class WithTerms(BeginsWithR):
        def judge(self, text: str) -> Verdict:
            return Verdict(text[0] == R, terms={"length": float(len(text)), "half": 0.5})

    terms = {"length": {"function": "any:thing", "weight": 0.25}, "half": {"function": "any:thing"}}
    batch = make([[R, "RRRR"], MIXED], scorer=WithTerms(), **{"reward.terms": terms}).fill(1)
    samples = batch.groups[0].samples, batch.sampled[0].samples
    assert [sample.reward for sample in samples[0]] == [1.75, -0.25]
    assert [sample.reward for sample in samples[1]] == [1.75, 2.5] and not batch.qualified[0]
    metrics = rollout_metrics(batch)
    lengths = [len(sample.text) for group in batch.sampled for sample in group.samples]
    assert metrics["reward_term_length_mean"] == sum(lengths) / len(lengths)
    assert metrics["reward_term_half_mean"] == 0.5 and metrics["accuracy"] == 0.75


def test_a_scorer_that_cannot_judge_counts_as_wrong_and_is_counted(make) -> None:
    class Failing(BeginsWithR):
        def judge(self, text: str) -> Verdict:
            return Verdict(False, failure="no such answer") if text == "RX" else super().judge(text)

    batch = make([["RX", R], ["RX", W], MIXED], scorer=Failing()).fill(1)
    assert batch.qualified == [True, False, True]
    assert batch.sampled[0].samples[0].verdict == Verdict(correct=False, failure="no such answer")
    assert batch.sampled[0].samples[0].reward == -1
    assert rollout_metrics(batch)["reward_failures"] == 2


def test_a_reward_that_never_works_is_named_when_the_run_stops(make) -> None:
    class Failing(BeginsWithR):
        def judge(self, text: str) -> Verdict:
            return Verdict(False, failure="TypeError: no such thing")

    sampler = make([MIXED], scorer=Failing(), **{"algorithm.max_generation_batches": 1})
    with pytest.raises(
        TrainingStopped, match=r"Use a reward that works \(6 of 6 responses could not be judged: TypeE"
    ):
        sampler.fill(1)
