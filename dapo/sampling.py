"""Dynamic sampling: generate, judge, drop groups without signal, until the batch is full (Algorithm 1)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedTokenizerBase

from .algorithm import keep_group, soft_overlong_penalty
from .config import Config
from .data import Prompt, PromptStream
from .errors import TrainingStopped
from .memory_advice import generation_advice
from .parallel import World, phase, split_across_ranks
from .rewards import Scorer, Verdict
from .rollout import Completion, Request, RolloutEngine, SamplingParams
from .stopping import Abandoned, work_of_all_ranks


@dataclass(frozen=True)
class Sample:
    """One judged response."""

    completion: Completion
    text: str
    verdict: Verdict
    penalty: float
    """Soft overlong punishment, at most 0."""
    reward: float
    """Of the verdict, plus the penalty and the weighted terms: what advantages are made of."""


@dataclass(frozen=True)
class Group:
    """All responses to one prompt."""

    prompt: Prompt
    samples: list[Sample]
    step: int
    """The step whose policy generated it."""

    @property
    def accuracy(self) -> float:
        return sum(sample.verdict.correct for sample in self.samples) / len(self.samples)


@dataclass
class RolloutBatch:
    """What one step samples and what of it is trained on."""

    step: int
    groups: list[Group] = field(default_factory=list)
    """To train on."""
    sampled: list[Group] = field(default_factory=list)
    """Everything generated in this step, before filtering."""
    qualified: list[bool] = field(default_factory=list)
    """Of each sampled group, whether it passed the filter."""
    num_gen_batches: int = 0
    time_rollout_s: float = 0.0
    time_reward_s: float = 0.0

    @property
    def staleness_max(self) -> int:
        """Steps between generation and training of the oldest group."""
        return max((self.step - group.step for group in self.groups), default=0)


@dataclass(frozen=True)
class Position:
    """Where a sampler stands: what it draws and trains on next follows from it."""

    stream: dict[str, int | str]
    surplus: list[Group]


class Sampler:
    """Fills rollout batches. Holds the surplus groups between steps when they are kept.

    Args:
        check: called while responses are generated; may raise `Abandoned`, on one rank or on several.
    """

    def __init__(
        self,
        config: Config,
        stream: PromptStream,
        engine: RolloutEngine,
        scorer: Scorer,
        tokenizer: PreTrainedTokenizerBase,
        world: World | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.config, self.stream, self.engine, self.check = config, stream, engine, check
        self.scorer, self.tokenizer = scorer, tokenizer
        self.world = world or World(torch.device("cpu"))
        self.surplus: list[Group] = []

    def fill(
        self, step: int, on_progress: Callable[[RolloutBatch], None] = lambda batch: None
    ) -> RolloutBatch:
        """One rollout batch.

        Raises:
            TrainingStopped: it cannot be filled and is configured to stop.
            Abandoned: on all ranks, when `check` raised it on one; the sampler stands where it stood before.
        """
        before = self.position
        try:
            return self._fill(step, on_progress)
        except Abandoned:
            self.position = before
            raise

    @property
    def position(self) -> Position:
        return Position(self.stream.state_dict(), list(self.surplus))

    @position.setter
    def position(self, position: Position) -> None:
        self.stream.load_state_dict(position.stream)
        self.surplus = list(position.surplus)

    def _fill(self, step: int, on_progress: Callable[[RolloutBatch], None]) -> RolloutBatch:
        algorithm, wanted = self.config.algorithm, self.config.rollout.prompts_per_step
        batch = RolloutBatch(step, groups=self.surplus[:wanted])
        self.surplus = self.surplus[wanted:]
        served: Counter[int] = Counter()
        while len(batch.groups) < wanted:
            if batch.num_gen_batches == algorithm.max_generation_batches:
                if algorithm.on_too_few_groups == "stop":
                    raise TrainingStopped(self._too_few(batch))
                break
            count = self.config.prompts_per_generation if algorithm.dynamic_sampling else wanted
            for group in self._generate(batch, self.stream.take(count), served):
                qualified = not algorithm.dynamic_sampling or keep_group(
                    [sample.verdict.correct for sample in group.samples]
                )
                batch.sampled.append(group)
                batch.qualified.append(qualified)
                if not qualified:
                    continue
                if len(batch.groups) < wanted:
                    batch.groups.append(group)
                elif algorithm.surplus_groups == "keep":
                    self.surplus.append(group)
            on_progress(batch)
        return batch

    def _generate(self, batch: RolloutBatch, prompts: list[Prompt], served: Counter[int]) -> list[Group]:
        """Groups of the prompts, in order. All ranks draw the same prompts, generate a part each, and end up
        with all groups: each then filters alike."""
        size = self.config.rollout.group_size
        asked = []
        for prompt in prompts:
            # A prompt that comes up again within a step (a small data set) gets fresh noise.
            asked.append((prompt, size * served[prompt.index]))
            served[prompt.index] += 1
        own = split_across_ranks(asked, self.world)
        parts = work_of_all_ranks(lambda: self._generate_own(batch, own), self.world)
        batch.num_gen_batches += 1
        return [group for part in parts for group in part]

    def _generate_own(self, batch: RolloutBatch, asked: list[tuple[Prompt, int]]) -> list[Group]:
        """Groups of prompts, each given with the number of its first sample."""
        config, size = self.config, self.config.rollout.group_size
        prompts = [prompt for prompt, _ in asked]
        requests = [
            Request(prompt.ids, (config.seed, batch.step, prompt.index, sample))
            for prompt, first in asked
            for sample in range(first, first + size)
        ]
        sampling = SamplingParams(config.rollout.max_response_length, config.rollout.temperature)
        judged: dict[int, tuple[str, Future[Verdict]]] = {}
        judging = 0.0

        def judge(index: int, completion: Completion) -> None:
            """Hands a response to the scorer while others are still being generated."""
            nonlocal judging
            began = time.perf_counter()
            text = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            judged[index] = text, self.scorer.submit(text, prompts[index // size])
            judging += time.perf_counter() - began

        started = time.perf_counter()
        with generation_advice(config, len(requests), "generation", self.world):
            completions = self.engine.generate(requests, sampling, judge, self.check)
        generated = time.perf_counter()
        with phase("reward"):
            samples = [self._sample(completion, *judged[i]) for i, completion in enumerate(completions)]
        batch.time_rollout_s += generated - started - judging
        batch.time_reward_s += time.perf_counter() - generated + judging
        return [Group(p, samples[i * size : (i + 1) * size], batch.step) for i, p in enumerate(prompts)]

    def _sample(self, completion: Completion, text: str, judged: Future[Verdict]) -> Sample:
        """Waits for the verdict and makes the shaped reward of it."""
        algorithm, reward = self.config.algorithm, self.config.reward
        verdict = judged.result()
        penalty = 0.0
        if algorithm.soft_overlong_punishment:
            penalty = soft_overlong_penalty(
                len(completion.token_ids),
                self.config.rollout.max_response_length,
                algorithm.overlong_cache_length,
                algorithm.overlong_penalty_factor,
            )
        rule = reward.correct if verdict.correct else reward.wrong
        terms = sum(reward.terms[name].weight * value for name, value in verdict.terms.items())
        return Sample(completion, text, verdict, penalty, rule + penalty + terms)

    def _too_few(self, batch: RolloutBatch) -> str:
        algorithm, rollout = self.config.algorithm, self.config.rollout
        bins = Counter(_solve_rate_bin(group.accuracy) for group in batch.sampled)
        histogram = ", ".join(f"{name}: {bins[name]}" for name in SOLVE_RATE_BINS)
        easy, hard = bins["all right"], bins["none right"]
        advice = "easier prompts or a larger rollout.group_size" if hard >= easy else "harder prompts"
        verdicts = [sample.verdict for group in batch.sampled for sample in group.samples]
        failures = [verdict.failure for verdict in verdicts if verdict.failed]
        if failures:
            advice = (
                f"a reward that works ({len(failures)} of {len(verdicts)} responses could not be judged: "
                f"{failures[-1]}), {advice}"
            )
        return (
            f"step {batch.step}: after {batch.num_gen_batches} generation batches only {len(batch.groups)} "
            f"groups of rollout.prompts_per_step={rollout.prompts_per_step} have right and wrong responses; "
            f"solve rates of the {len(batch.sampled)} groups sampled: {histogram}. Use {advice}, raise "
            f"algorithm.max_generation_batches ({algorithm.max_generation_batches}), or set "
            "algorithm.on_too_few_groups=train to train on the groups there are"
        )


SOLVE_RATE_BINS = ("none right", "under 25%", "25-50%", "50-75%", "75% and more", "all right")


def _solve_rate_bin(accuracy: float) -> str:
    if accuracy in (0, 1):
        return SOLVE_RATE_BINS[0] if accuracy == 0 else SOLVE_RATE_BINS[-1]
    return SOLVE_RATE_BINS[1 + int(accuracy * 4)]
