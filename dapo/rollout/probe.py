"""Proof that an engine generates with the policy's weights: both score the same tokens after every sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from dapo_kernels import PolicyLossConfig

from ..batching import TrainSample, make_micro_batches
from ..errors import TrainingStopped
from ..model import Policy
from ..model_facts import max_positions
from ..parallel import World, all_reduce_max, release
from .base import Completion, OnCompletion, Request, RolloutEngine, SamplingParams

PROBE_TOKENS = 64


class ScoringEngine(RolloutEngine, Protocol):
    def score(self, token_ids: list[int]) -> list[float]: ...


class ProvenEngine:
    """An engine whose weights are proven after every sync.

    Args:
        engine: has no weights yet; they are brought at once.
    """

    def __init__(self, engine: ScoringEngine, policy: Policy, world: World) -> None:
        self.engine, self.policy, self.world = engine, policy, world
        self.sync_weights()

    def generate(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        on_completion: OnCompletion | None = None,
        check: Callable[[], None] | None = None,
    ) -> list[Completion]:
        return self.engine.generate(requests, sampling, on_completion, check)

    def sync_weights(self) -> None:
        """Raises `TrainingStopped`, on all ranks, when the engine's log-probs are not the policy's: a head or
        a layer that was left behind."""
        self.engine.sync_weights()
        ids = probe_ids(self.policy)
        ours, theirs = policy_logprobs(self.policy, ids), torch.tensor(self.engine.score(ids))
        # A policy of which only NaN comes is trained no further, but it is what the engine has too.
        same = (ours == theirs) | (ours.isnan() & theirs.isnan())
        differences = (ours - theirs).abs().nan_to_num(torch.inf, posinf=torch.inf).masked_fill(same, 0.0)
        worst = all_reduce_max({"difference": differences.max()}, self.world)["difference"]
        if worst > tolerance(self.policy):
            at = int(differences.argmax())
            raise TrainingStopped(
                f"after a sync the rollout engine's log-probs differ from the policy's by up to {worst:.3g} "
                f"(token {ids[at + 1]}: {theirs[at]:.4f} and {ours[at]:.4f} on rank {self.world.rank}; "
                f"allowed: {tolerance(self.policy):g}): it does not have the policy's weights"
            )

    def rest(self) -> None:
        self.engine.rest()

    def close(self) -> None:
        self.engine.close()


def probe_length(policy: Policy) -> int:
    """Tokens of the probe and of the one that engines add to it."""
    return min(PROBE_TOKENS, max_positions(policy.model) or PROBE_TOKENS)


def probe_ids(policy: Policy) -> list[int]:
    """The same for every call: tokens from all over the vocabulary."""
    config = policy.model.config.get_text_config()
    length = probe_length(policy) - 1
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config.vocab_size, (length,), generator=generator).tolist()


@torch.no_grad()
def policy_logprobs(policy: Policy, ids: list[int]) -> torch.Tensor:
    """`[len(ids) - 1]` log-probs of every token but the first, on CPU. Every rank calls it."""
    sample = TrainSample(ids[:1], ids[1:], [0.0] * (len(ids) - 1), 1.0, fresh=True)
    device = next(policy.parameters()).device
    (batch,) = make_micro_batches([sample], len(ids), device, packed=policy.packed)
    output = policy(batch, PolicyLossConfig(**policy.head_options), 1.0)
    release(policy)  # an optimizer made after it is to train the shards
    return batch.split(output.logprobs)[0].float().cpu()


def tolerance(policy: Policy) -> float:
    """Nats. Of the engine's and the trainer's kernels in the same dtype; a stale layer is far beyond in fp32.
    In bf16 rounding alone may come to 0.1, and only what is wrong at large is seen."""
    return 2e-3 if policy.model.dtype == torch.float32 else 0.3
