"""One forward and backward of a policy on responses of very different lengths: packed or padded rows.

    OMP_NUM_THREADS=2 python -m bench.packing [--rounds 3] [--sequences 8] [--shortest 12] [--budget 512]

All ways of cutting have the same budget of tokens, padding included, and the same gradient; they take turns.
`as they come` pads rows in the order of the samples, as trainers do that do not sort; `sorted` pads rows
of like length, as this trainer does where it cannot pack.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from bench.measure import interleaved_medians
from dapo.batching import MicroBatch, TrainSample, make_micro_batches
from dapo.model import Policy
from dapo_kernels import PolicyLossConfig

CPU = torch.device("cpu")
CONFIG = PolicyLossConfig()
PROMPT = 16


def spread_samples(count: int, vocab: int, shortest: int, skewed: bool) -> list[TrainSample]:
    """Random ids; responses of `shortest` to ten times as many tokens, in random order, evenly spread or
    `skewed`: each longer than the one before by the same factor."""
    generator = torch.Generator().manual_seed(0)
    steps = torch.linspace(0, 1, count)
    lengths = (shortest * (10**steps if skewed else 1 + 9 * steps)).round().int()
    samples = []
    for length in lengths[torch.randperm(count, generator=generator)].tolist():
        ids = torch.randint(1, vocab, (PROMPT + length,), generator=generator).tolist()
        advantage = torch.randn((), generator=generator).item()
        samples.append(TrainSample(ids[:PROMPT], ids[PROMPT:], [-9.0] * length, advantage, fresh=True))
    return samples


def as_they_come(samples: Sequence[TrainSample], budget: int) -> list[MicroBatch]:
    """Padded rows in the order given, within the budget."""
    parts: list[list[TrainSample]] = []
    for sample in samples:
        wider = [*parts[-1], sample] if parts else []
        if wider and len(wider) * max(s.length for s in wider) <= budget:
            parts[-1] = wider
        else:
            parts.append([sample])
    return [batch for part in parts for batch in make_micro_batches(part, 10**9, CPU)]


def load(path: str) -> PreTrainedModel:
    """The model there, or one of SmolLM2-135M's shape with random weights."""
    if Path(path).is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    print(f"{path} is not there: random weights of the same shape", file=sys.stderr)
    shape = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    return AutoModelForCausalLM.from_config(LlamaConfig(**shape, **heads, max_position_embeddings=8192))


def step(policy: Policy, batches: list[MicroBatch], tokens: float) -> None:
    policy.zero_grad(set_to_none=True)
    for batch in batches:
        policy(batch, CONFIG, tokens).loss.backward()


def gradient(policy: Policy, batches: list[MicroBatch], tokens: float) -> torch.Tensor:
    step(policy, batches, tokens)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of which the median is taken")
    parser.add_argument("--sequences", type=int, default=8, help="responses in the step")
    parser.add_argument("--shortest", type=int, default=12, help="tokens of the shortest response")
    parser.add_argument("--skewed", action="store_true", help="lengths in a geometric series")
    parser.add_argument("--budget", type=int, default=512, help="tokens of a micro-batch")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="a transformers folder")
    options = parser.parse_args(argv)
    model = load(options.model)
    samples = spread_samples(options.sequences, model.config.vocab_size, options.shortest, options.skewed)
    tokens = float(sum(sample.num_loss_tokens for sample in samples))
    padded = Policy(model)
    cuts = {
        "padded, as they come": as_they_come(samples, options.budget),
        "padded, sorted": make_micro_batches(samples, options.budget, CPU),
        "packed": make_micro_batches(samples, options.budget, CPU, packed=True),
    }
    wanted = gradient(padded, cuts["padded, sorted"], tokens)
    policy = Policy(model, packing=True)  # on padded rows its attention is the one it had
    difference = (gradient(policy, cuts["packed"], tokens) - wanted).norm() / wanted.norm()
    calls = {name: partial(step, policy, batches, tokens) for name, batches in cuts.items()}
    seconds = interleaved_medians(calls, options.rounds)
    real = sum(sample.length for sample in samples)
    print(f"{len(samples)} sequences, {real} tokens, {options.budget} a micro-batch", end="; ")
    print(f"gradients differ by {difference:.1e}\n")
    print("| | micro-batches | tokens and padding | forward + backward, s | packed / this |")
    print("|---|---|---|---|---|")
    for name, batches in cuts.items():
        computed = sum(batch.input_ids.numel() for batch in batches)
        ratio = f"{seconds['packed'] / seconds[name]:.2f}"
        cells = (name, len(batches), computed, f"{seconds[name]:.2f}", ratio)
        print(f"| {' | '.join(map(str, cells))} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
