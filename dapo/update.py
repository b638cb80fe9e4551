"""The policy update of one rollout batch: old log-probs, then optimizer steps over its mini-batches."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dapo_kernels import PolicyLossOutput

from .batching import MicroBatch, TrainSample, make_micro_batches, micro_batch_count
from .config import Config
from .errors import TrainingStopped
from .loss_inputs import loss_config, train_samples
from .memory_advice import micro_batch_advice, optimizer_advice
from .metrics import ModelFlops, memory_gb, mfu
from .mismatch import correction_weights
from .model import Policy
from .parallel import (
    World,
    all_reduce_max,
    all_reduce_sum,
    clip_grad_norm,
    shard_policy,
    split_across_ranks,
)
from .parallel.context import share_sequences
from .parallel.watchdog import each
from .reference import load_reference
from .sampling import Group
from .update_stats import UpdateStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """One rank's part of an optimizer step."""

    own: list[TrainSample]
    denominator: int
    """Of the whole step, over all ranks."""


class Updater:
    """Holds the policy, its optimizer, and the reference model where there is a KL term."""

    def __init__(self, config: Config, policy: Policy, world: World | None = None) -> None:
        self.world = world or World(next(policy.parameters()).device)
        self.config, self.policy = config, share_sequences(policy, self.world)
        self.policy.offload_activations = config.train.offload_activations
        self.loss_config = loss_config(config, policy.head_options)
        self.reference = self._load_reference() if config.algorithm.kl_coef else None
        # Between a forward and its backward, policy.parameters() may be gathered ones.
        self.parameters = {
            name.removeprefix("model."): parameter
            for name, parameter in policy.named_parameters()
            if parameter.requires_grad
        }
        """What is trained, by its name in the model."""
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.model_flops = ModelFlops.of(policy.model)
        self.updates = 0
        self.skipped_in_a_row = 0

    def _load_reference(self) -> Policy:
        reference = load_reference(self.config.model, self.policy)
        return share_sequences(shard_policy(reference, self.config.parallel, self.world), self.world)

    def learning_rate(self, step: int) -> float:
        """Of all updates of a rollout step (1-based): linear warm-up, then constant."""
        settings = self.config.optimizer
        return settings.learning_rate * min(1.0, step / max(settings.warmup_steps, 1))

    def run(self, groups: Sequence[Group], step: int) -> UpdateStats:
        """Scores the batch under the policy as it is, then takes all of its optimizer steps."""
        started = time.perf_counter()
        stats = UpdateStats(has_reference=self.reference is not None)
        stats.machine["memory_rollout_gb"] = memory_gb()
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = self.learning_rate(step)
        groups_of_samples = train_samples(groups, step, self.config.algorithm)
        _warn_of_missing_logprobs([sample for group in groups_of_samples for sample in group])
        mini = self.config.mini_batch_prompts
        steps = [
            self._share([sample for group in groups_of_samples[start : start + mini] for sample in group])
            for start in range(0, len(groups_of_samples), mini)
        ]
        samples = [sample for share in steps for sample in share.own]
        if self.reference is not None:
            self._score_reference(samples)
        if self._needs_scoring(groups, step, len(steps)):
            self._score(samples, stats)
        for share in steps * self.config.algorithm.num_iterations:
            self._update(share, stats)
        if not steps:
            self._count_skipped("no group was left to train on")
        stats.reduce(self.world)
        stats.machine["memory_train_gb"] = memory_gb()
        stats.machine |= mfu(stats.flops / self.world.size, time.perf_counter() - started)
        return stats

    def _share(self, samples: list[TrainSample]) -> Share:
        """One optimizer step's samples, which all ranks know, as this rank's part of them."""
        own = split_across_ranks(samples, self.world, cost=lambda sample: sample.length)
        return Share(own, self._denominator(samples))

    def _needs_scoring(self, groups: Sequence[Group], step: int, steps: int) -> bool:
        """A batch's only update, on fresh samples, does without: its own log-probs are the old ones.
        Importance weights must be there before the forward that they weigh."""
        if self.config.algorithm.rollout_correction != "off":
            return True
        updates = steps * self.config.algorithm.num_iterations
        return updates > 1 or any(group.step != step for group in groups)

    def _micro_batches(self, samples: list[TrainSample], policy: Policy) -> Iterator[MicroBatch]:
        """As many on every rank: each forward and backward gathers shards, which takes all ranks."""
        budget, count = self.config.train.max_tokens_per_micro_batch, None
        if self.world.distributed:
            own = micro_batch_count(samples, budget, policy.packed)
            count = int(all_reduce_max({"count": max(own, 1)}, self.world)["count"])
        return each(make_micro_batches(samples, budget, self.world.device, packed=policy.packed, count=count))

    @torch.no_grad()
    def _score_reference(self, samples: list[TrainSample]) -> None:
        scoring = replace(loss_config(self.config, self.reference.head_options), kl_coef=0.0)
        for batch in self._micro_batches(samples, self.reference):
            with micro_batch_advice(batch, self.config, self.world):
                output = self.reference(batch, scoring, 1.0)
            for sample, logprobs in zip(batch.samples, batch.split(output.logprobs)):
                sample.ref_logprobs = logprobs.cpu()

    @torch.no_grad()
    def _score(self, samples: list[TrainSample], stats: UpdateStats) -> None:
        """Old log-probs, from before the first update."""
        for batch in self._micro_batches(samples, self.policy):
            with micro_batch_advice(batch, self.config, self.world):
                output = self.policy(batch, self.loss_config, 1.0)
            if batch.samples:
                self._record(batch, output, stats)
            stats.flops += self.model_flops.forward(sample.length for sample in batch.samples)

    def _record(self, batch: MicroBatch, output: PolicyLossOutput, stats: UpdateStats) -> None:
        """Keeps what the policy made of the batch before any update: for fresh samples its log-probs are the
        old log-probs, for older ones those they were generated at, which need no correction: their ratio is
        to the rollout engine."""
        stats.num_tokens += int(output.sums["num_tokens"])
        stats.entropy += output.sums["entropy"].item()
        stats.prob += torch.where(batch.mask, output.logprobs.exp(), 0).sum().item()
        algorithm = self.config.algorithm
        for sample, logprobs in zip(batch.samples, batch.split(output.logprobs)):
            generated = torch.tensor(sample.rollout_logprobs, dtype=torch.float64)
            sample.old_logprobs = logprobs.cpu() if sample.fresh else generated
            weights = torch.ones_like(generated)
            if sample.fresh:
                differences = sample.old_logprobs - generated
                weights, cut = correction_weights(differences, algorithm)
                stats.mismatch.add(differences, cut)
            if algorithm.rollout_correction != "off":
                sample.token_weights = weights

    def _denominator(self, samples: list[TrainSample]) -> int:
        """Of the whole optimizer step, however it is cut; 0 where there is no token to train on."""
        tokens = sum(sample.num_loss_tokens for sample in samples)
        if self.loss_config.reduction == "token-mean" or not tokens:
            return tokens
        if self.loss_config.reduction == "constant":
            return len(samples) * self.config.rollout.max_response_length
        return sum(sample.num_loss_tokens > 0 for sample in samples)

    def _update(self, share: Share, stats: UpdateStats) -> None:
        """One optimizer step."""
        # FSDP averages gradients over the ranks: see World.data_size.
        denominator = share.denominator / self.world.data_size
        loss = 0.0
        for batch in self._micro_batches(share.own, self.policy):
            with micro_batch_advice(batch, self.config, self.world):
                output = self.policy(batch, self.loss_config, denominator)
                if batch.old_logprobs is None and batch.samples:
                    self._record(batch, output, stats)
                output.loss.backward()
                loss += output.loss.item()
            stats.add_loss_sums(output.sums)
            stats.flops += 3 * self.model_flops.forward(sample.length for sample in batch.samples)
        if share.denominator == 0:
            logger.warning("no token of the mini-batch is in the loss: no update")
            self._skip("no token was in the loss", stats)
            return
        self._step(all_reduce_sum({"loss": loss}, self.world)["loss"] / self.world.data_size, stats)

    def _step(self, loss: float, stats: UpdateStats) -> None:
        """Clips the gradients and steps, unless something is not finite."""
        grad_norm = clip_grad_norm(self.parameters.values(), self.config.optimizer.max_grad_norm)
        if math.isfinite(grad_norm) and math.isfinite(loss):
            with optimizer_advice(self.config, self.world):
                self.optimizer.step()
            self.updates += 1
            stats.losses.append(loss)
            stats.grad_norms.append(grad_norm)
            self.skipped_in_a_row = 0
            self.optimizer.zero_grad(set_to_none=True)
        else:
            logger.warning("update skipped: loss %s, gradient norm %s", loss, grad_norm)
            self._skip(f"loss {loss}, gradient norm {grad_norm}", stats)

    def _skip(self, reason: str, stats: UpdateStats) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        stats.skipped_updates += 1
        self._count_skipped(reason)

    def _count_skipped(self, reason: str) -> None:
        """Raises `TrainingStopped` when it was one too many: on all ranks, which see the same numbers."""
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= self.config.train.max_skipped_updates:
            raise TrainingStopped(
                f"{self.skipped_in_a_row} updates in a row were skipped, the last because {reason}: the "
                "policy cannot be trained like this. Resume from an earlier checkpoint with a lower "
                "optimizer.learning_rate or optimizer.max_grad_norm, or raise train.max_skipped_updates"
            )


def _warn_of_missing_logprobs(samples: list[TrainSample]) -> None:
    tokens = sum(len(sample.response_ids) for sample in samples if sample.trained)
    missing = tokens - sum(sample.num_loss_tokens for sample in samples)
    if missing:
        logger.warning(
            "%d of %d response tokens have no rollout log-prob (NaN): they are left out of the loss",
            missing,
            tokens,
        )
