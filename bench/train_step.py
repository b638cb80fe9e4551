"""One optimizer step of SmolLM2-135M on given rollouts: this trainer against TRL's GRPOTrainer.

    python -m bench.train_step [--rounds 5] [--sequences 8] [--model models/SmolLM2-135M-Instruct]

Each side holds a model and an AdamW of its own, is given the same tokens, and takes turns with the
other. `loss` is forward and backward less those of the model's body alone; a step adds clipping and the
optimizer. TRL on CPU scores prompts and padding too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.measure import Timer, peak_bytes
from dapo.batching import TrainSample, make_micro_batches
from dapo.model import Policy
from dapo_kernels import PolicyLossConfig

LEARNING_RATE = 1e-6
CONFIG = PolicyLossConfig()
PAD = 0


class Side(NamedTuple):
    """What is timed of one trainer."""

    gradient: Callable[[], Tensor]
    """Forward and backward; returns the loss."""
    body: Callable[[], None]
    """The same without head and loss."""
    step: Callable[[], None]
    parameters: list[Tensor]


def make_samples(count: int, vocab: int, longest: int = 128) -> list[TrainSample]:
    """Prompts of 16 to 48 tokens, responses of up to `longest`, most of them shorter; random ids."""
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(1, vocab, (length,), generator=generator).tolist()

    samples = []
    for row in range(count):
        prompt = int(torch.randint(16, 49, (), generator=generator))
        share = 1.0 if row == 0 else float(torch.rand((), generator=generator))
        response = max(8, int(longest * share))
        old = -9.0 + torch.randn(response, generator=generator)
        samples.append(
            TrainSample(
                prompt_ids=ids(prompt),
                response_ids=ids(response),
                rollout_logprobs=old.tolist(),
                advantage=float(torch.randn((), generator=generator)),
                fresh=True,
                old_logprobs=old,
            )
        )
    return samples


def body_pass(model, input_ids: Tensor, attention_mask: Tensor | None = None) -> None:
    hidden = model.get_decoder()(
        input_ids=input_ids, attention_mask=attention_mask, use_cache=False
    ).last_hidden_state
    hidden.backward(torch.full_like(hidden, 1e-6))
    model.zero_grad(set_to_none=True)


def finish_step(gradient: Callable[[], Tensor], model, optimizer) -> None:
    gradient()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def our_side(model, samples: list[TrainSample]) -> Side:
    policy = Policy(model)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE, fused=True)
    (batch,) = make_micro_batches(samples, 10**9, torch.device("cpu"))
    tokens = float(sum(sample.num_loss_tokens for sample in samples))

    def gradient() -> Tensor:
        loss = policy(batch, CONFIG, tokens).loss
        loss.backward()
        return loss.detach()

    body = partial(body_pass, model, batch.input_ids)
    return Side(gradient, body, partial(finish_step, gradient, model, optimizer), list(model.parameters()))


def trl_inputs(samples: list[TrainSample]) -> dict[str, Tensor | int]:
    """As TRL lays a batch out: prompts padded on the left, completions on the right."""
    prompts = max(len(s.prompt_ids) for s in samples)
    responses = max(len(s.response_ids) for s in samples)
    rows = len(samples)
    inputs = {
        "prompt_ids": torch.full((rows, prompts), PAD),
        "prompt_mask": torch.zeros(rows, prompts, dtype=torch.int64),
        "completion_ids": torch.full((rows, responses), PAD),
        "completion_mask": torch.zeros(rows, responses, dtype=torch.int64),
        "old_per_token_logps": torch.zeros(rows, responses),
    }
    for row, sample in enumerate(samples):
        left, right = prompts - len(sample.prompt_ids), len(sample.response_ids)
        inputs["prompt_ids"][row, left:] = torch.tensor(sample.prompt_ids)
        inputs["prompt_mask"][row, left:] = 1
        inputs["completion_ids"][row, :right] = torch.tensor(sample.response_ids)
        inputs["completion_mask"][row, :right] = 1
        inputs["old_per_token_logps"][row, :right] = sample.old_logprobs
    inputs["advantages"] = torch.tensor([sample.advantage for sample in samples])
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    return inputs


def trl_side(model, samples: list[TrainSample], path: str, folder: str) -> Side:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=len(samples),
        num_generations=len(samples),
        epsilon=CONFIG.epsilon_low,
        epsilon_high=CONFIG.epsilon_high,
        beta=0.0,
        loss_type="dapo",
        learning_rate=LEARNING_RATE,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * len(samples)),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    inputs = trl_inputs(samples)
    optimizer = trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = 1
    model.train()

    def gradient() -> Tensor:
        loss = trainer._compute_loss(model, inputs)
        loss.backward()
        return loss.detach()

    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    step = partial(finish_step, gradient, model, optimizer)
    return Side(gradient, partial(body_pass, model, ids, mask), step, list(model.parameters()))


def compare_gradients(ours: Side, theirs: Side) -> float:
    """Relative difference of the two gradients before any step: that both compute the same."""
    ours.gradient(), theirs.gradient()
    difference = sum((a.grad - b.grad).square().sum() for a, b in zip(ours.parameters, theirs.parameters))
    size = sum(b.grad.square().sum() for b in theirs.parameters)
    for parameter in (*ours.parameters, *theirs.parameters):
        parameter.grad = None
    return (difference / size).sqrt().item()


def gradient_only(side: Side) -> None:
    side.gradient()
    for parameter in side.parameters:
        parameter.grad = None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of which the median is taken")
    parser.add_argument("--sequences", type=int, default=8, help="responses in the step")
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct", help="a transformers folder")
    options = parser.parse_args(argv)
    if not Path(options.model).exists():
        parser.error(f"--model {options.model} is not there: python -m dapo.smollm2 {options.model}")
    models = [AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32) for _ in range(2)]
    samples = make_samples(options.sequences, models[0].config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        try:
            sides = {
                "dapo": our_side(models[0], samples),
                "TRL": trl_side(models[1], samples, options.model, folder),
            }
        except ImportError as error:
            print(f"TRL is missing ({error}): pip install trl==1.16.0", file=sys.stderr)
            return 2
        difference = compare_gradients(sides["dapo"], sides["TRL"])
        memory = {name: peak_bytes(side.step) / 1e6 for name, side in sides.items()}
        calls = {}
        for name, side in sides.items():
            calls |= {("gradient", name): partial(gradient_only, side), ("body", name): side.body}
            calls |= {("step", name): side.step}
        timed = Timer(torch.device("cpu")).rounds(calls, options.rounds)
        seconds = {key: statistics.median(values) for key, values in timed.items()}

    tokens = sum(sample.num_loss_tokens for sample in samples)
    print(f"{len(samples)} sequences, {tokens} response tokens; gradients differ by {difference:.1e}\n")
    print("| | dapo | TRL | ratio |\n|---|---|---|---|")
    loss = {name: seconds["gradient", name] - seconds["body", name] for name in sides}
    step = {name: seconds["step", name] for name in sides}
    rows = (("loss, s", loss, ".2f"), ("step, s", step, ".2f"), ("peak memory, MB", memory, ".0f"))
    for what, values, form in rows:
        ours, theirs = values["dapo"], values["TRL"]
        print(f"| {what} | {ours:{form}} | {theirs:{form}} | {ours / theirs:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
