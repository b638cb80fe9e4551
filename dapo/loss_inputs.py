"""What the algorithm's settings make of a batch: the loss they ask for, and samples with their advantages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dapo_kernels import PolicyLossConfig

from .algorithm import group_advantages
from .batching import TrainSample
from .config import AlgorithmConfig, Config
from .sampling import Group


def loss_config(config: Config, head_options: dict[str, float]) -> PolicyLossConfig:
    """The loss that the algorithm's switches ask for, at the rollout's temperature."""
    algorithm = config.algorithm
    return PolicyLossConfig(
        epsilon_low=algorithm.epsilon_low,
        epsilon_high=algorithm.epsilon_high if algorithm.clip_higher else algorithm.epsilon_low,
        dual_clip=algorithm.dual_clip,
        objective=algorithm.objective,
        cispo_bounds=None if algorithm.cispo_bounds is None else tuple(algorithm.cispo_bounds),
        sapo_temperature_pos=algorithm.sapo_temperature_pos,
        sapo_temperature_neg=algorithm.sapo_temperature_neg,
        ratio_level=algorithm.ratio_level,
        reduction=algorithm.loss_reduction,
        kl_coef=algorithm.kl_coef,
        kl_estimator=algorithm.kl_estimator,
        kl_ratio_correction=algorithm.kl_ratio_correction,
        entropy_coef=algorithm.entropy_coef,
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
    shape = size, algorithm.advantage_eps, algorithm.advantage_std
    advantages = iter(group_advantages(rewards, *shape).tolist())
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
