"""What test_lora.py runs on two processes: `torchrun ... tests/lora_cases.py FOLDER CASE...`.

FOLDER holds `config.yaml`, of a run with adapters. Rank 0 writes each case's result to FOLDER/CASE.json; a
case that fails ends its process, and torchrun ends the others.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from parallel_cases import LOSS, difference, samples
from processes import serve_cases
from torch import Tensor

import dapo.trainer
from dapo.batching import make_micro_batches, micro_batch_count
from dapo.config import Config, load_config
from dapo.lora import Adapters, save_adapter
from dapo.model import Policy
from dapo.model_files import save_model
from dapo.parallel import (
    World,
    all_reduce_max,
    clip_grad_norm,
    full_state_dict,
    open_world,
    refresh,
    split_across_ranks,
)
from dapo.parallel.context import share_sequences
from dapo.parallel.weights import adapter_state_dict
from dapo.parallel.world import arrange
from dapo.policy_setup import Built, build_policy
from dapo_kernels import PolicyLossConfig

MAX_TOKENS = 30


def backward(policy: Policy, world: World) -> None:
    """Gradients of the mean over the tokens of all samples, of which this process has its share."""
    batch = samples()
    total = sum(sample.num_loss_tokens for sample in batch)
    mine = split_across_ranks(batch, world, lambda sample: sample.length)
    count = int(all_reduce_max({"n": micro_batch_count(mine, MAX_TOKENS, policy.packed)}, world)["n"])
    for part in make_micro_batches(mine, MAX_TOKENS, world.device, packed=policy.packed, count=count):
        policy(part, LOSS, total / world.data_size).loss.backward()


def gradients(parameters: dict[str, torch.nn.Parameter]) -> dict[str, Tensor]:
    """Whole ones, not those that will be clipped in place."""
    whole = {name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for name, p in parameters.items()}
    return {name: gradient.clone() for name, gradient in whole.items()}


@torch.no_grad()
def logprobs(policy: Policy, world: World) -> Tensor:
    """Of all samples' responses, in one micro-batch, the same on all ranks."""
    (batch,) = make_micro_batches(samples(), 10**6, world.device, packed=policy.packed)
    return torch.cat(batch.split(policy(batch, PolicyLossConfig(), 1.0).logprobs))


def far(one: Tensor, other: Tensor) -> float:
    return (one - other).abs().max().item()


@dataclass
class Steps:
    """Two steps of gradient descent on the adapters."""

    built: Built
    shards: dict[str, torch.nn.Parameter]
    """Taken before any forward, which may put gathered parameters in their place."""
    first: dict[str, Tensor]
    """What would be saved, before and after, whole on every rank."""
    merged: dict[str, Tensor]
    gradients: list[dict[str, Tensor]]
    norms: list[float]
    logprobs: Tensor
    """After the steps."""
    frozen: bool
    """The other weights are, bit by bit, what they were, and got no gradient."""


def take_steps(config: Config, world: World) -> Steps:
    built = build_policy(config, world)
    policy = share_sequences(built.policy, world)
    shards = dict(policy.model.named_parameters())
    trained = {name: p for name, p in shards.items() if p.requires_grad}
    others = {name: (p, local(p).clone()) for name, p in shards.items() if not p.requires_grad}
    steps = Steps(built, shards, whole(policy, world), {}, [], [], torch.empty(0), True)
    optimizer = torch.optim.SGD(trained.values(), lr=0.3)
    for _ in range(2):
        backward(policy, world)
        steps.gradients.append(gradients(trained))
        steps.norms.append(clip_grad_norm(trained.values(), 0.5))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    steps.merged, steps.logprobs = whole(policy, world), logprobs(policy, world)
    steps.frozen = all(p.grad is None and torch.equal(local(p), before) for p, before in others.values())
    return steps


@functools.cache
def one_process(folder: Path) -> Steps:
    return take_steps(load_config(folder / "config.yaml"), World(torch.device("cpu")))


def against_one_process(folder: Path, world: World, *overrides: str) -> dict:
    config = load_config(folder / "config.yaml", list(overrides))
    world = arrange(config.parallel, world.device)
    alone, steps = one_process(folder), take_steps(config, world)
    built = steps.built
    refresh(built.rollout_model, built.policy)
    copied = logprobs(Policy(built.rollout_model), World(world.device))
    return {
        "first": difference(steps.first, alone.first),
        "gradients": [difference(*pair) for pair in zip(steps.gradients, alone.gradients)],
        "norms": [steps.norms, alone.norms],
        "merged": difference(steps.merged, alone.merged),
        "alone": far(steps.logprobs, alone.logprobs),
        "copy": far(copied, steps.logprobs),
        "plain copy": not Adapters(built.rollout_model).layers,
        "frozen": steps.frozen and alone.frozen,
        "trained": list(steps.gradients[0]),
        "untouched": save(steps, folder / "_".join(["saved", *overrides]), world),
        "logprobs": steps.logprobs.tolist(),
    }


def whole(policy: Policy, world: World) -> dict[str, Tensor]:
    """All that is saved, on every rank: merged weights and the adapters."""
    state = [full_state_dict(policy, world) | adapter_state_dict(policy, world)]
    if world.distributed:
        dist.broadcast_object_list(state, src=0)
    return {name: value.clone() for name, value in state[0].items()}


def save(steps: Steps, out: Path, world: World) -> bool:
    """Whether the policy is the same afterwards, bit by bit."""
    before = {name: local(p).clone() for name, p in steps.shards.items()}
    policy = steps.built.policy
    state, adapter = full_state_dict(policy, world), adapter_state_dict(policy, world)
    if world.is_main:
        out.mkdir()
        save_model(policy.model, steps.built.tokenizer, out / "model", state)
        save_adapter(policy.model, adapter, out / "adapter")
    return all(torch.equal(local(p), before[name]) for name, p in steps.shards.items())


def local(value: Tensor) -> Tensor:
    return getattr(value, "to_local", lambda: value)().detach()


def case_shards(folder: Path, world: World) -> dict:
    return against_one_process(folder, world)


def case_context(folder: Path, world: World) -> dict:
    return against_one_process(folder, world, "parallel.context=2", "train.gradient_checkpointing=true")


def case_replicate(folder: Path, world: World) -> dict:
    return against_one_process(folder, world, "parallel.replicate=2")


def case_bfloat16(folder: Path, world: World) -> dict:
    return against_one_process(folder, world, "parallel.param_dtype=bfloat16")


def case_run(folder: Path, world: World) -> dict:
    """A whole run; the process group stays for the cases after it."""
    dapo.trainer.open_world = lambda config: arrange(config, world.device)
    trainer = dapo.trainer.Trainer(load_config(folder / "config.yaml", [f"run_dir={folder / 'two'}"]))
    trainer.train()
    trainer.finish()
    trainer.world = World(world.device)
    trainer.close()
    return {}


if __name__ == "__main__":
    settings = load_config(Path(sys.argv[1]) / "config.yaml", ["parallel.timeout=60"]).parallel
    serve_cases(globals(), open_world(settings))
