"""One batch through the trainer's own update, cut as each row of a table says, its gradients kept.

test_gradient_table.py runs the rows of one process itself, those of two as `torchrun --nproc_per_node 2
tests/gradient_table_cases.py FOLDER`. Rank 0 writes FOLDER/ROW.pt; a row that fails ends its process, and
torchrun ends the other.
"""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from parallel_cases import build, whole_gradients
from tiny import tiny_values
from transformers import Qwen2ForCausalLM
from update_cases import TEMPERATURE, token_logprobs

from dapo.attention import use_packed_attention
from dapo.batching import TrainSample
from dapo.config import Config, ParallelConfig
from dapo.model import Policy
from dapo.parallel import World, all_gather_objects, open_world, shard_policy
from dapo.parallel.world import arrange
from dapo.update import Updater
from dapo.update_stats import UpdateStats

# Prompt and response: 3 to 400 tokens.
LENGTHS = [(9, 88), (1, 2), (90, 240), (5, 9), (60, 145), (4, 5), (40, 33), (50, 350)]
LENGTHS += [(3, 19), (12, 148), (2, 3), (1, 58), (30, 95), (20, 11), (25, 235), (8, 36)]
UNTRAINED = 2  # long: shares of like length differ in tokens of the loss
WITHOUT_LOGPROBS = 8  # trained, but none of its tokens is in the loss
SHIFTS = torch.tensor([-0.4, -0.1, 0.0, 0.1, 0.4])  # of log-probs; no ratio is near a bound of the clip
REDUCTIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum")


@dataclass(frozen=True)
class Row:
    """A way to cut the batch."""

    processes: int
    micro_batches: int  # of each process
    packed: bool
    max_tokens: int
    mesh: str = "shard"  # what lies along the second process

    @property
    def name(self) -> str:
        mesh = f"-{self.mesh}" if self.processes > 1 else ""
        return f"{self.processes}x{self.micro_batches}{mesh}-{'packed' if self.packed else 'padded'}"

    @property
    def parallel(self) -> dict[str, int]:
        return {} if self.mesh == "shard" else {self.mesh: self.processes}

    @property
    def reductions(self) -> tuple[str, ...]:
        """Where processes share a row, none of them knows a sequence's mean."""
        return tuple(r for r in REDUCTIONS if self.mesh != "context" or r != "seq-mean-token-mean")


REFERENCE = Row(1, 1, packed=False, max_tokens=6000)
ROWS = (
    REFERENCE,
    Row(1, 1, packed=True, max_tokens=6000),
    Row(1, 7, packed=False, max_tokens=280),
    Row(1, 7, packed=True, max_tokens=200),
    Row(2, 1, packed=False, max_tokens=6000),
    Row(2, 1, packed=True, max_tokens=6000),
    # One process has samples for fewer micro-batches than the other from here on.
    Row(2, 4, packed=False, max_tokens=340),
    Row(2, 4, packed=True, max_tokens=240),
    Row(2, 3, packed=False, max_tokens=560, mesh="replicate"),
    Row(2, 3, packed=True, max_tokens=400, mesh="replicate"),
    # Both hold all samples.
    Row(2, 1, packed=True, max_tokens=6000, mesh="context"),
    Row(2, 4, packed=True, max_tokens=400, mesh="context"),
)


def qwen2() -> Qwen2ForCausalLM:
    """Four query heads, two key heads, tied weights, 32768 positions; the same weights on every call."""
    return build("qwen2")


@torch.no_grad()
def samples() -> list[TrainSample]:
    """Off policy, with advantages of both signs, and with tokens that are not in the loss."""
    model, generator = qwen2().double(), torch.Generator().manual_seed(1)
    made = []
    for prompt, response in LENGTHS:
        ids = torch.randint(3, 99, (prompt + response,), generator=generator).tolist()
        sample = TrainSample(ids[:prompt], ids[prompt:], [-1.0] * response, 0.0, fresh=False)
        sample.advantage = torch.randn((), generator=generator).item()
        shift = SHIFTS[torch.randint(len(SHIFTS), (response,), generator=generator)]  # [R]
        sample.old_logprobs = token_logprobs(model, sample.prompt_ids, sample.response_ids) - shift
        made.append(sample)
    made[UNTRAINED].trained = False
    made[WITHOUT_LOGPROBS].rollout_logprobs = [float("nan")] * LENGTHS[WITHOUT_LOGPROBS][1]
    for sample in made[::4]:
        sample.rollout_logprobs[::17] = [float("nan")] * len(sample.rollout_logprobs[::17])
    for sample in made:
        sample.old_logprobs[torch.tensor(sample.rollout_logprobs).isnan()] = torch.nan
    return made


def updates(row: Row, batch: list[TrainSample], folder: Path, world: World) -> dict[str, dict]:
    """By reduction: whole gradients as the optimizer is given them, the loss, and how many samples were in
    each of every share's micro-batches. All updates are of the same weights: no step is taken."""
    policy = Policy(qwen2())
    policy.register_forward_pre_hook(lambda _, args: forwards.append(len(args[0].samples)))
    shard_policy(policy, ParallelConfig(**row.parallel), world)
    if row.packed:
        use_packed_attention(policy.model)
        policy.packed = True
    results = {}
    for reduction in row.reductions:
        forwards, taken, stats = [], [], UpdateStats()
        options = {"train.max_tokens_per_micro_batch": row.max_tokens, "algorithm.reduction": reduction}
        options |= {"rollout.temperature": TEMPERATURE, "optimizer.max_grad_norm": 1e9}
        options |= {f"parallel.{key}": value for key, value in row.parallel.items()}
        updater = Updater(Config.model_validate(tiny_values(folder, folder, **options)), policy, world)
        updater.optimizer.step = lambda taken=taken: taken.append(whole_gradients(policy))
        updater._update(updater._share(batch), stats)
        results[reduction] = {
            "gradient": taken[0],
            "loss": stats.losses[0],
            "forwards": all_gather_objects(forwards, world),
        }
    return results


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    world = open_world(ParallelConfig(timeout=60))
    batch = samples()
    for row in ROWS:
        if row.processes != world.size:
            continue
        try:
            mesh = arrange(ParallelConfig(**row.parallel), world.device)
            results = updates(row, batch, folder, mesh)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # without waiting for the other rank
        if world.is_main:
            torch.save(results, folder / f"{row.name}.pt")
    world.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
