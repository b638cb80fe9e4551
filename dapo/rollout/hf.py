"""Rollouts by `generate` of transformers: KV cache, left padding, on the policy's own weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .base import Completion, OnCompletion, Request, SamplingParams, noise_seed


class HFEngine:
    """Generates with a model in this process.

    Args:
        refresh: brings the policy's weights into the model. Default: it is the trained model itself.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        eos_token_ids: Sequence[int],
        max_sequences: int,
        refresh: Callable[[], None] = lambda: None,
    ) -> None:
        self.model, self.max_sequences, self.refresh = model, max_sequences, refresh
        self.eos_token_ids = list(eos_token_ids)
        self.config = GenerationConfig(
            eos_token_id=self.eos_token_ids,
            pad_token_id=self.eos_token_ids[0],
            # KeyedSampler applies the sampling parameters and chooses; generate takes its one candidate.
            do_sample=False,
            repetition_penalty=1.0,
        )

    @torch.no_grad()
    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        on_completion: OnCompletion | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """One completion for each request, in order; prompts of like length are generated together, and
        `on_completion` is called after each part of `max_sequences`."""
        order = sorted(
            range(len(requests)), key=lambda i: (len(requests[i].prompt_ids), requests[i].prompt_ids)
        )
        completions: dict[int, Completion] = {}
        training, defaults = self.model.training, self.model.generation_config
        self.model.eval()
        # `generate` fills whatever is unset from the model's own defaults (top_k 50, penalties).
        self.model.generation_config = self.config
        try:
            for start in range(0, len(order), self.max_sequences):
                part = order[start : start + self.max_sequences]
                batch = self._generate_batch([requests[i] for i in part], sampling, check)
                completions.update(zip(part, batch))
                for i in part if on_completion else ():
                    on_completion(i, completions[i])
        finally:
            self.model.train(training)
            self.model.generation_config = defaults
        return [completions[i] for i in range(len(requests))]

    def _generate_batch(
        self, requests: list[Request], sampling: SamplingParams, check: Callable[[], None] | None
    ) -> list[Completion]:
        prompts = list(dict.fromkeys(tuple(request.prompt_ids) for request in requests))
        row_of = {prompt: row for row, prompt in enumerate(prompts)}
        rows = torch.tensor([row_of[tuple(request.prompt_ids)] for request in requests])  # [B]
        input_ids, attention_mask = self._pad_left(prompts)
        longest = input_ids.shape[1]
        rows = rows.to(input_ids.device)
        # Recurrent models keep a state of their own kind, which is not copied to rows like keys and values.
        shared = len(prompts) < len(requests) and not getattr(self.model, "_is_stateful", False)
        cache = self._prefill(input_ids, attention_mask, rows) if shared else None
        sampler = KeyedSampler([request.noise_key for request in requests], sampling, longest, check)
        config = copy.copy(self.config)
        config.max_new_tokens = sampling.max_new_tokens
        output = self.model.generate(
            input_ids=input_ids[rows],
            attention_mask=attention_mask[rows],
            past_key_values=cache,
            generation_config=config,
            logits_processor=LogitsProcessorList([sampler]),
        )
        responses = output[:, longest:].tolist()
        logprobs = torch.stack(sampler.logprobs, 1).tolist()  # [B, T_new]
        return [self._cut(*pair) for pair in zip(responses, logprobs)]

    def _pad_left(self, prompts: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask of the prompts, `[U, T]` each."""
        longest = max(map(len, prompts))
        input_ids = torch.full((len(prompts), longest), self.config.pad_token_id)
        attention_mask = torch.zeros_like(input_ids)
        for row, prompt in enumerate(prompts):
            input_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            attention_mask[row, longest - len(prompt) :] = 1
        return input_ids.to(self.model.device), attention_mask.to(self.model.device)

    def _prefill(self, input_ids: Tensor, attention_mask: Tensor, rows: Tensor) -> DynamicCache | None:
        """Keys and values of each prompt but its last token, computed once and copied to its samples."""
        if input_ids.shape[1] == 1:
            return None
        cache = DynamicCache(config=self.model.config)
        self.model.get_decoder()(
            input_ids=input_ids[:, :-1],
            attention_mask=attention_mask[:, :-1],
            position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0)[:, :-1],
            past_key_values=cache,
            use_cache=True,
        )
        cache.batch_select_indices(rows)
        return cache

    def _cut(self, token_ids: list[int], logprobs: list[float]) -> Completion:
        """Ends a row at its first EOS: what follows is padding, even where padding and EOS share an id."""
        stops = set(self.eos_token_ids)
        end = next((i + 1 for i, token in enumerate(token_ids) if token in stops), None)
        return Completion(token_ids[:end], logprobs[:end], finished=end is not None)

    def sync_weights(self) -> None:
        self.refresh()

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


class KeyedSampler(LogitsProcessor):
    """Chooses each next token by inverse transform sampling, from one uniform number a token.

    A row's numbers come from its own key, so its tokens depend on the policy, the prompt and the key alone.
    `logprobs` collects `[B]` log-probs a step, of the distribution that was sampled from.
    """

    def __init__(
        self,
        keys: Sequence[tuple[int, ...]],
        sampling: SamplingParams,
        prompt_length: int,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.check = check
        self.greedy = sampling.temperature == 0
        self.warpers = distribution_processors(sampling)
        self.prompt_length = prompt_length
        self.logprobs: list[Tensor] = []
        rows = [keyed_uniforms(key, sampling.max_new_tokens) for key in keys]
        self.uniforms = torch.stack(rows)  # [B, max_new_tokens] fp64

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.check is not None:
            self.check()
        scores = self.warpers(input_ids, scores.float())
        logprobs = scores.log_softmax(-1)  # [B, V]
        if self.greedy:
            token = logprobs.argmax(-1, keepdim=True)
        else:
            position = input_ids.shape[1] - self.prompt_length
            uniform = self.uniforms[:, position, None].to(scores.device)
            token = inverse_transform_sample(logprobs, uniform)
        self.logprobs.append(logprobs.gather(1, token).squeeze(1).cpu())
        return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


def distribution_processors(sampling: SamplingParams) -> LogitsProcessorList:
    """What turns logits into the logits of the sampling distribution; empty for the policy's own."""
    processors = LogitsProcessorList()
    if sampling.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature not in (0, 1.0):
        processors.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors


def keyed_uniforms(key: tuple[int, ...], count: int) -> Tensor:
    """`[count]` fp64 numbers in [0, 1) that depend on the key alone; a prefix does not depend on `count`."""
    generator = torch.Generator().manual_seed(noise_seed(key))
    return torch.rand(count, generator=generator, dtype=torch.float64)


def inverse_transform_sample(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """The token `[B, 1]` whose stretch of the cumulative distribution of logprobs `[B, V]` holds uniform
    `[B, 1]`. Summed in fp64, so that rare tokens keep their probability; a token of none is never chosen."""
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    return token.clamp_(max=logprobs.shape[1] - 1)
