"""The core of every evaluation: responses are judged while the next are generated. And the held-out
evaluation of a training run: avg@k, pass@k and maj@k of sampled responses, and one greedy response each."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from .config import Config
from .data import Prompt
from .metrics import mean
from .parallel import World, split_across_ranks
from .rewards import Scorer, Verdict
from .rewards.scorer import contains_answer
from .rollout import Completion, Request, RolloutEngine, SamplingParams
from .statistics import avg_at_k, bootstrap_interval, maj_at_k, mean_pass_at_k
from .stopping import work_of_all_ranks

EVAL_NOISE = -1
"""Stands where training has its step in the noise key: every evaluation draws the same noise."""
RIGHT = "\0right"
"""The vote of every right response, however it writes its answer; no answer is written like this."""


@dataclass(frozen=True)
class Task:
    """One response to ask for and to judge."""

    prompt: Prompt
    noise_key: tuple[int, ...]


@dataclass(frozen=True)
class Judged:
    text: str
    length: int
    """Tokens, EOS included."""
    truncated: bool
    verdict: Verdict

    @property
    def vote(self) -> str | None:
        return RIGHT if self.verdict.correct else self.verdict.answer


def respond(
    tasks: Sequence[Task],
    sampling: SamplingParams,
    engine: RolloutEngine,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    on_judged: Callable[[int, Judged], None],
    check: Callable[[], None] | None = None,
) -> None:
    """Generates and judges a response to each task. `on_judged(i, ...)` gets each as soon as it is judged,
    one at a time, from another thread; what it raises is raised here. After an interrupt it is not called
    any more, so that a verdict which the interrupt itself spoilt is not taken for one."""
    stopped = threading.Event()
    waiting: deque[Future] = deque()

    def collect(i: int, text: str, completion: Completion, verdict: Future[Verdict]) -> None:
        judged = Judged(
            text=text,
            length=len(completion.token_ids),
            truncated=not completion.finished,
            verdict=verdict.result(),
        )
        if not stopped.is_set():
            on_judged(i, judged)

    def on_completion(i: int, completion: Completion) -> None:
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        verdict = scorer.submit(text, tasks[i].prompt)
        waiting.append(collector.submit(collect, i, text, completion, verdict))
        while waiting and waiting[0].done():
            waiting.popleft().result()

    requests = [Request(task.prompt.ids, task.noise_key) for task in tasks]
    with ThreadPoolExecutor(max_workers=1) as collector:
        try:
            engine.generate(requests, sampling, on_completion, check)
            for collected in waiting:
                collected.result()
        except BaseException:
            stopped.set()
            collector.shutdown(wait=False, cancel_futures=True)
            raise


@dataclass(frozen=True)
class EvalResponse:
    prompt: str
    response: str
    answer: str
    extracted: str | None
    """The response's final answer, as it votes."""
    accuracy: int
    """1 right, 0 wrong."""
    answer_anywhere: int
    """1 when the right answer stands anywhere in the response."""
    length: int
    truncated: bool
    greedy: bool


@dataclass(frozen=True)
class EvalResult:
    step: int
    prompts: int
    samples_per_prompt: int
    temperature: float
    top_p: float
    accuracy: float
    """avg@k of the sampled responses."""
    accuracy_low: float
    accuracy_high: float
    """95 % interval of `accuracy`, over prompts and samples."""
    pass_at_k: float
    """Share of prompts with at least one right among their k sampled responses."""
    maj_at_k: float
    """Share of prompts whose k sampled responses have the right answer as their most frequent one."""
    answer_anywhere: float
    greedy_accuracy: float | None
    greedy_answer_anywhere: float | None
    response_length_mean: float
    truncated_frac: float
    no_answer_frac: float


def evaluate(
    config: Config,
    step: int,
    prompts: Sequence[Prompt],
    engine: RolloutEngine,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    world: World | None = None,
    check: Callable[[], None] | None = None,
) -> tuple[EvalResult, list[EvalResponse]]:
    """Samples `eval.samples_per_prompt` responses to each prompt, and a greedy one if configured. Each rank
    generates a part, and all end up with the whole result.

    Raises:
        Abandoned: on all ranks, when `check`, called while responses are generated, raised it on one.
    """
    world = world or World(torch.device("cpu"))
    settings, longest = config.eval, config.rollout.max_response_length
    k = settings.samples_per_prompt

    def ask(samples: int, sampling: SamplingParams) -> tuple[list[Judged], list[EvalResponse]]:
        tasks = [
            Task(prompt, (config.seed, EVAL_NOISE, prompt.index, sample))
            for prompt in prompts
            for sample in range(samples)
        ]
        judged: dict[int, Judged] = {}
        own = split_across_ranks(tasks, world)

        def respond_to_own() -> list[Judged]:
            respond(own, sampling, engine, scorer, tokenizer, judged.__setitem__, check)
            return [judged[i] for i in range(len(own))]

        parts = work_of_all_ranks(respond_to_own, world)
        ordered = [one for part in parts for one in part]
        greedy = sampling.temperature == 0
        return ordered, [_response(task.prompt, one, greedy) for task, one in zip(tasks, ordered)]

    judged, sampled = ask(k, SamplingParams(longest, settings.temperature, settings.top_p))
    greedy = ask(1, SamplingParams(longest, temperature=0))[1] if settings.greedy else []
    groups = [judged[i * k : (i + 1) * k] for i in range(len(prompts))]
    right = [[int(one.verdict.correct) for one in group] for group in groups]
    low, high = bootstrap_interval(right)
    result = EvalResult(
        step=step,
        prompts=len(prompts),
        samples_per_prompt=k,
        temperature=settings.temperature,
        top_p=settings.top_p,
        accuracy=avg_at_k(right),
        accuracy_low=low,
        accuracy_high=high,
        pass_at_k=mean_pass_at_k([(k, sum(group)) for group in right], k),
        maj_at_k=mean([maj_at_k([one.vote for one in group], RIGHT) for group in groups]),
        answer_anywhere=mean([r.answer_anywhere for r in sampled]),
        greedy_accuracy=mean([r.accuracy for r in greedy]) if greedy else None,
        greedy_answer_anywhere=mean([r.answer_anywhere for r in greedy]) if greedy else None,
        response_length_mean=mean([r.length for r in sampled]),
        truncated_frac=mean([r.truncated for r in sampled]),
        no_answer_frac=mean([one.vote is None for one in judged]),
    )
    return result, greedy + sampled


def _response(prompt: Prompt, judged: Judged, greedy: bool) -> EvalResponse:
    return EvalResponse(
        prompt=prompt.text,
        response=judged.text,
        answer=prompt.row.answer,
        extracted=judged.verdict.answer,
        accuracy=int(judged.verdict.correct),
        answer_anywhere=int(contains_answer(judged.text, prompt.row.answer)),
        length=judged.length,
        truncated=judged.truncated,
        greedy=greedy,
    )
