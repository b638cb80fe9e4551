"""Held-out accuracy: avg@k and pass@k of sampled responses, and of one greedy response to each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .config import Config
from .data import Prompt
from .metrics import mean
from .rewards import Scorer
from .rewards.scorer import contains_answer
from .rollout import Request, RolloutEngine, SamplingParams

EVAL_NOISE = -1
"""Stands where training has its step in the noise key: every evaluation draws the same noise."""


@dataclass(frozen=True)
class EvalResponse:
    prompt: str
    response: str
    answer: str
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
    pass_at_k: float
    """Share of prompts with at least one right among their k sampled responses."""
    answer_anywhere: float
    greedy_accuracy: float | None
    greedy_answer_anywhere: float | None
    response_length_mean: float


def evaluate(
    config: Config,
    step: int,
    prompts: Sequence[Prompt],
    engine: RolloutEngine,
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[EvalResult, list[EvalResponse]]:
    """Samples `eval.samples_per_prompt` responses to each prompt, and a greedy one if configured."""
    settings, longest = config.eval, config.rollout.max_response_length
    sampling = SamplingParams(longest, settings.temperature, settings.top_p)
    k = settings.samples_per_prompt
    sampled = _respond(config, prompts, k, sampling, engine, scorer, tokenizer)
    greedy = []
    if settings.greedy:
        greedy = _respond(
            config, prompts, 1, SamplingParams(longest, temperature=0), engine, scorer, tokenizer
        )
    solved = [any(r.accuracy for r in sampled[i * k : (i + 1) * k]) for i in range(len(prompts))]
    result = EvalResult(
        step=step,
        prompts=len(prompts),
        samples_per_prompt=k,
        temperature=settings.temperature,
        top_p=settings.top_p,
        accuracy=mean([r.accuracy for r in sampled]),
        pass_at_k=mean(solved),
        answer_anywhere=mean([r.answer_anywhere for r in sampled]),
        greedy_accuracy=mean([r.accuracy for r in greedy]) if greedy else None,
        greedy_answer_anywhere=mean([r.answer_anywhere for r in greedy]) if greedy else None,
        response_length_mean=mean([r.length for r in sampled]),
    )
    return result, greedy + sampled


def _respond(config, prompts, k, sampling, engine, scorer, tokenizer) -> list[EvalResponse]:
    requests = [
        Request(prompt.ids, (config.seed, EVAL_NOISE, prompt.index, sample))
        for prompt in prompts
        for sample in range(k)
    ]
    responses = []
    for i, completion in enumerate(engine.generate(requests, sampling)):
        prompt = prompts[i // k]
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        responses.append(
            EvalResponse(
                prompt=prompt.text,
                response=text,
                answer=prompt.row.answer,
                accuracy=int(scorer(text, prompt).correct),
                answer_anywhere=int(contains_answer(text, prompt.row.answer)),
                length=len(completion.token_ids),
                truncated=not completion.finished,
                greedy=sampling.temperature == 0,
            )
        )
    return responses
