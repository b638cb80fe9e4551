"""Tokens a second that vLLM generates, against `generate` of transformers, in turns within one process.

    python -m bench.rollout [--rounds 3] [--threads 2] [--model models/SmolLM2-135M-Instruct]

64 responses, eight to a prompt: all of 64 tokens, or of 8 to 64 tokens. In a batch of transformers those that
have ended wait for the longest, and what they generate meanwhile is not counted; vLLM drops them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dapo.config import VllmConfig
from dapo.model import Policy
from dapo.parallel import policy_weights, tied_head
from dapo.rollout import HFEngine, Request, RolloutEngine, SamplingParams
from dapo.rollout.vllm import VLLMEngine

RESPONSES, SHORTEST, LONGEST = 64, 8, 64
UNSAID = [3]  # an EOS that SmolLM2 does not generate
TEXTS = [f"Question: what is {17 * i + 3} + {23 * i + 8}? Think step by step. Answer:" for i in range(8)]
LENGTHS = {
    "equal": [LONGEST] * RESPONSES,
    "spread": torch.linspace(SHORTEST, LONGEST, RESPONSES).round().int().tolist(),
}


class CutEngine(VLLMEngine):
    """Ends each response at a length of its own."""

    lengths: Sequence[int]

    def _sampling(self, sampling: SamplingParams, request: Request) -> Any:
        params = super()._sampling(sampling, request)
        params.max_tokens = self.lengths[request.noise_key[0]]
        return params


def vllm_engine(path: str, dtype: str, model, longest: int) -> CutEngine:
    policy = Policy(model)

    def weights() -> Iterator[tuple[str, Tensor]]:
        return itertools.chain(policy_weights(policy), tied_head(policy))

    engine = CutEngine(Path(path), dtype, UNSAID, RESPONSES, longest + LONGEST, weights, VllmConfig())
    engine.sync_weights()
    return engine


def measure(engine: RolloutEngine, requests: Sequence[Request], lengths: Sequence[int]) -> float:
    """Tokens a second, of those that are kept."""
    started = time.perf_counter()
    completions = engine.generate(requests, SamplingParams(LONGEST))
    seconds = time.perf_counter() - started
    return sum(min(len(c.token_ids), length) for c, length in zip(completions, lengths)) / seconds


def compare(path: str, dtype: str, rounds: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    prompts = AutoTokenizer.from_pretrained(path)(TEXTS)["input_ids"]
    # A prompt's responses are of all lengths.
    requests = [Request(prompts[i % len(prompts)], (i,)) for i in range(RESPONSES)]
    ours = vllm_engine(path, dtype, model, max(map(len, prompts)))
    theirs = HFEngine(model, UNSAID, RESPONSES)
    for name, lengths in LENGTHS.items():
        ours.lengths = lengths
        for engine in (ours, theirs):  # warm up
            engine.generate(requests, SamplingParams(4))
        speeds = [[measure(engine, requests, lengths) for engine in (ours, theirs)] for _ in range(rounds)]
        ratios = [mine / other for mine, other in speeds]
        mine, other = (statistics.median(column) for column in zip(*speeds))
        print(
            f"{dtype:9} {name:7} vLLM {mine:7.1f} tokens/s, transformers {other:7.1f}: "
            f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})",
            flush=True,
        )
    ours.close()
    del ours, theirs, model
    gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for dtype in ("float32", "bfloat16"):
        compare(arguments.model, dtype, arguments.rounds)


if __name__ == "__main__":
    main()
