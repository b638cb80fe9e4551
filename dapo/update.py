"""The policy update of one rollout batch: old log-probs, then optimizer steps over its mini-batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dapo_kernels import PolicyLossConfig, PolicyLossOutput
from dapo_kernels.output import metrics_from_sums

from .algorithm import group_advantages
from .batching import MicroBatch, TrainSample, make_micro_batches
from .config import AlgorithmConfig, Config
from .metrics import mean
from .model import Policy
from .sampling import Group

logger = logging.getLogger(__name__)


@dataclass
class UpdateStats:
    """Sums over one rollout batch's scoring pass and updates."""

    num_tokens: int = 0
    entropy: float = 0.0
    prob: float = 0.0
    mismatch_tokens: int = 0
    mismatch_k3: float = 0.0
    mismatch_max: float = 0.0
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    loss_sums: dict[str, Tensor] = field(default_factory=dict)
    skipped_updates: int = 0

    def add_loss_sums(self, sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            known = self.loss_sums.get(name)
            if known is None:
                self.loss_sums[name] = value
            else:
                self.loss_sums[name] = torch.maximum(known, value) if name == "ratio_max" else known + value

    def metrics(self) -> dict[str, float]:
        """Means under the names of metrics.jsonl; 0 where there was nothing to take a mean of."""
        tokens = max(self.num_tokens, 1)
        means = (
            {name: value.item() for name, value in metrics_from_sums(self.loss_sums).items()}
            if (self.loss_sums)
            else {}
        )
        names = ("ratio_mean", "ratio_max", "approx_kl", "clip_frac_low", "clip_frac_high", "dual_clip_frac")
        return {
            "loss": mean(self.losses),
            "grad_norm": mean(self.grad_norms),
            "num_tokens": self.num_tokens,
            "entropy": self.entropy / tokens,
            "mean_prob": self.prob / tokens,
            **{name: means.get(name, 0.0) for name in names},
            "rollout_mismatch_kl": self.mismatch_k3 / max(self.mismatch_tokens, 1),
            "rollout_mismatch_max": self.mismatch_max,
            "skipped_updates": self.skipped_updates,
        }


def loss_config(config: Config, head_options: dict[str, float]) -> PolicyLossConfig:
    """The loss that the algorithm's switches ask for, at the rollout's temperature."""
    algorithm = config.algorithm
    return PolicyLossConfig(
        epsilon_low=algorithm.epsilon_low,
        epsilon_high=algorithm.epsilon_high if algorithm.clip_higher else algorithm.epsilon_low,
        dual_clip=algorithm.dual_clip,
        reduction="token-mean" if algorithm.token_level_loss else "seq-mean-token-mean",
        temperature=config.rollout.temperature,
        **head_options,
    )


def train_samples(groups: Sequence[Group], step: int, algorithm: AlgorithmConfig) -> list[list[TrainSample]]:
    """Groups to training samples, with advantages from the shaped rewards of each group."""
    if not groups:
        return []
    size = len(groups[0].samples)
    rewards = torch.tensor(
        [sample.reward for group in groups for sample in group.samples], dtype=torch.float64
    )
    advantages = iter(group_advantages(rewards, size, algorithm.advantage_eps).tolist())
    return [
        [
            TrainSample(
                prompt_ids=group.prompt.ids,
                response_ids=sample.completion.token_ids,
                rollout_logprobs=sample.completion.logprobs,
                advantage=next(advantages),
                fresh=group.step == step,
                trained=sample.completion.finished or not algorithm.overlong_filtering,
            )
            for sample in group.samples
        ]
        for group in groups
    ]


class Updater:
    """Holds the policy and its optimizer."""

    def __init__(self, config: Config, policy: Policy) -> None:
        self.config, self.policy = config, policy
        self.loss_config = loss_config(config, policy.head_options)
        settings = config.optimizer
        self.optimizer = torch.optim.AdamW(
            policy.parameters(),
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.updates = 0

    def learning_rate(self, step: int) -> float:
        """Of all updates of a rollout step (1-based): linear warm-up, then constant."""
        settings = self.config.optimizer
        return settings.learning_rate * min(1.0, step / max(settings.warmup_steps, 1))

    def run(self, groups: Sequence[Group], step: int) -> UpdateStats:
        """Scores the batch under the policy as it is, then takes all of its optimizer steps."""
        stats = UpdateStats()
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = self.learning_rate(step)
        samples = train_samples(groups, step, self.config.algorithm)
        mini = self.config.mini_batch_prompts
        starts = [*range(0, len(samples), mini)] * self.config.algorithm.num_iterations
        if len(starts) > 1 or any(not sample.fresh for group in samples for sample in group):
            self._score([sample for group in samples for sample in group], stats)
        for start in starts:
            self._update([s for group in samples[start : start + mini] for s in group], stats)
        return stats

    def _micro_batches(self, samples: list[TrainSample]) -> list[MicroBatch]:
        device = next(self.policy.parameters()).device
        return make_micro_batches(samples, self.config.train.max_tokens_per_micro_batch, device)

    @torch.no_grad()
    def _score(self, samples: list[TrainSample], stats: UpdateStats) -> None:
        """Old log-probs from before the first update. A batch's only update, on fresh samples, does without:
        its own log-probs are the old ones."""
        for batch in self._micro_batches(samples):
            self._record(batch, self.policy(batch, self.loss_config), stats)

    def _record(self, batch: MicroBatch, output: PolicyLossOutput, stats: UpdateStats) -> None:
        """Keeps what the policy made of the batch before any update: for fresh samples its log-probs are the
        old log-probs, for older ones those they were generated at."""
        stats.num_tokens += int(output.sums["num_tokens"])
        stats.entropy += output.sums["entropy"].item()
        stats.prob += torch.where(batch.mask, output.logprobs.exp(), 0).sum().item()
        for sample, logprobs in zip(batch.samples, batch.split(output.logprobs)):
            generated = torch.tensor(sample.rollout_logprobs)
            sample.old_logprobs = logprobs.cpu() if sample.fresh else generated
            if sample.fresh:
                difference = (sample.old_logprobs - generated).double()
                stats.mismatch_tokens += difference.numel()
                stats.mismatch_k3 += (difference.exp() - difference - 1).sum().item()
                stats.mismatch_max = max(stats.mismatch_max, difference.abs().max().item())

    def _update(self, samples: list[TrainSample], stats: UpdateStats) -> None:
        """One optimizer step; the denominator is that of the whole step, however it is cut."""
        if self.loss_config.reduction == "token-mean":
            denominator = sum(sample.num_loss_tokens for sample in samples)
        else:
            denominator = sum(sample.num_loss_tokens > 0 for sample in samples)
        loss = 0.0
        for batch in self._micro_batches(samples):
            output = self.policy(batch, self.loss_config, float(denominator))
            if batch.old_logprobs is None:
                self._record(batch, output, stats)
            output.loss.backward()
            loss += output.loss.item()
            stats.add_loss_sums(output.sums)
        if denominator == 0:
            logger.warning("every response of the mini-batch was cut and left out: no update")
            stats.skipped_updates += 1
            return
        grad_norm = torch.nn.utils.clip_grad_norm_(
            self.policy.parameters(), self.config.optimizer.max_grad_norm
        ).item()
        if math.isfinite(grad_norm) and math.isfinite(loss):
            self.optimizer.step()
            self.updates += 1
            stats.losses.append(loss)
            stats.grad_norms.append(grad_norm)
        else:
            logger.warning("update skipped: loss %s, gradient norm %s", loss, grad_norm)
            stats.skipped_updates += 1
        self.optimizer.zero_grad(set_to_none=True)
