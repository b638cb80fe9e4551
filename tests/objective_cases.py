"""What every objective, reduction and KL term should be: formulas over full logits, one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from update_cases import from_rollout, token_logprobs

DRIFT = (0.3, -0.4, 0.05, -0.1)  # of stale groups: log of old over new probability, token by token


# A token's loss from its log-prob, old log-prob and advantage, `[n]` each of one response.
def clip(logprobs, old, advantage, low=0.2, high=0.28) -> Tensor:
    ratio = (logprobs - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def cispo(logprobs, old, advantage, low=0.0, high=1.28) -> Tensor:
    return -(logprobs - old).exp().clamp(low, high).detach() * advantage * logprobs


def sapo(logprobs, old, advantage, positive=1.0, negative=1.05) -> Tensor:
    temperature = positive if advantage > 0 else negative
    return -advantage * torch.sigmoid(temperature * ((logprobs - old).exp() - 1)) * 4 / temperature


def gspo(logprobs, old, advantage, low=0.2, high=0.28) -> Tensor:
    ratio = (logprobs - old).mean().exp().expand_as(logprobs)
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def token_mean(losses: list[Tensor]) -> Tensor:
    return torch.cat(losses).mean()


def sequence_mean(losses: list[Tensor]) -> Tensor:
    return torch.stack([loss.mean() for loss in losses]).mean()


def sequence_sum(losses: list[Tensor]) -> Tensor:
    return torch.stack([loss.sum() for loss in losses]).mean()


def plain_gradients(
    model,
    groups,
    term: Callable = clip,
    reduce: Callable = token_mean,
    keep: Callable = lambda sample: True,
    divide: bool = True,
    more: Callable = lambda ids, response, logprobs, old: 0.0,
) -> dict[str, Tensor]:
    """Gradients of `term` plus `more`, both of each token; stale groups have the rollout's old log-probs."""
    other = copy.deepcopy(model)
    losses = []
    for group in groups:
        rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / ((rewards.std() + 1e-6) if divide else 1)
        for sample, advantage in zip(group.samples, advantages):
            if keep(sample):
                ids, response = group.prompt.ids, sample.completion.token_ids
                logprobs = token_logprobs(other, ids, response)
                old = from_rollout(group, sample) if group.step == 0 else logprobs.detach()
                losses.append(term(logprobs, old, advantage) + more(ids, response, logprobs, old))
    reduce(losses).backward()
    return {name: parameter.grad for name, parameter in other.named_parameters()}


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all((a[name] - b[name]).norm() > 0.02 * a[name].norm() for name in a)
