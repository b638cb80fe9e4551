"""A rollout batch of four groups, and what an update on it should be: full logits, one term after another."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from tiny import EOS, tiny_values
from torch import Tensor

from dapo.config import Config
from dapo.data import Prompt
from dapo.model import Policy
from dapo.rewards import Verdict
from dapo.rollout import Completion
from dapo.sampling import Group, Sample
from dapo.update import Updater

TEMPERATURE = 0.7
CUT = False
# Prompt, then (response, shaped reward, ended by itself). 0 is what rows are padded with; EOS pads elsewhere.
BATCH = [
    ([5, 6, 7], [([20, 30, EOS], 1.0, True), ([21, 0, 33, 44, 50, EOS], -1.0, True), ([60, 61], -1.5, CUT)]),
    ([8, EOS, 0, 9, 10], [([EOS], -1.0, True), ([70, 71, 72, 73, 74, 75, 76], 1.0, CUT), ([80], 1.0, CUT)]),
    ([11], [([40, 41, 42, 43, EOS], 1.0, True), ([40, 45, EOS], -1.0, True), ([46, 47, 48, 49], -1.0, CUT)]),
    ([12, 13], [([90, EOS], -1.0, True), ([91, 92, 93, 0, 0, EOS], 0.5, True), ([94, EOS], 1.0, True)]),
]
NUM_TOKENS = 42
DRIFT = (0.1, -0.2, 0.05)  # rollout log-probs minus the policy's, token by token


def make_updater(folder: Path, model, **overrides) -> Updater:
    """Of one update on the whole batch, without gradient clipping."""
    values = {"rollout.prompts_per_step": 4, "rollout.temperature": TEMPERATURE}
    values |= {"optimizer.max_grad_norm": 1e9}
    config = Config.model_validate(tiny_values(folder, folder, **values | overrides))
    return Updater(config, Policy(model))


def token_logprobs(model, prompt: list[int], response: list[int]) -> Tensor:
    logits = model(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1)


@torch.no_grad()
def groups_of(model, batch=BATCH, step: int = 1, drift=DRIFT) -> list[Group]:
    groups = []
    for i, (prompt, responses) in enumerate(batch):
        samples = []
        for tokens, reward, finished in responses:
            at = token_logprobs(model, prompt, tokens).tolist()
            at = [logprob + drift[t % len(drift)] for t, logprob in enumerate(at)]
            samples.append(Sample(Completion(tokens, at, finished), "", Verdict(reward > 0), 0.0, reward))
        groups.append(Group(Prompt(i, "", prompt, None), samples, step))
    return groups


def plain_loss(model, groups, old=None, low=0.2, high=0.28, token_level=True, keep=lambda s: True) -> Tensor:
    """Eq. 12; `old` gives a sample's old log-probs, None where they are the policy's own."""
    terms = []
    for group in groups:
        rewards = torch.tensor([sample.reward for sample in group.samples], dtype=torch.float64)
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for sample, advantage in zip(group.samples, advantages):
            if keep(sample):
                logprobs = token_logprobs(model, group.prompt.ids, sample.completion.token_ids)
                before = None if old is None else old(group, sample)
                ratio = torch.exp(logprobs - (logprobs.detach() if before is None else before))
                clipped = ratio.clamp(1 - low, 1 + high)
                terms.append(-torch.minimum(ratio * advantage, clipped * advantage))
    return torch.cat(terms).mean() if token_level else torch.stack([term.mean() for term in terms]).mean()


def from_rollout(group: Group, sample: Sample) -> Tensor:
    return torch.tensor(sample.completion.logprobs, dtype=torch.float64)


def plain_gradients(model, *args, **options) -> dict[str, Tensor]:
    other = copy.deepcopy(model)
    plain_loss(other, *args, **options).backward()
    return {name: parameter.grad for name, parameter in other.named_parameters()}


def captured(updater: Updater, groups, step: int = 1):
    """The gradients that each optimizer step is given, without taking it; and the run's stats."""
    taken = []
    parameters = dict(updater.policy.model.named_parameters())
    updater.optimizer.step = lambda: taken.append({name: p.grad.clone() for name, p in parameters.items()})
    stats = updater.run(groups, step)
    return taken, stats


def parameters_of(model) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def unchanged(model, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in parameters_of(model).items())


def assert_close(gradients: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-6) -> None:
    """Each parameter's own relative error."""
    assert gradients.keys() == want.keys()
    for name, gradient in gradients.items():
        assert (gradient - want[name]).norm() <= tolerance * want[name].norm(), name
