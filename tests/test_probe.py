"""The proof that an engine has the policy's weights, with an engine made of a second model."""

from __future__ import annotations

import copy
import math
import re

import pytest
import torch

from dapo.errors import TrainingStopped
from dapo.model import Policy
from dapo.parallel import World, policy_weights
from dapo.rollout import Completion, Request, SamplingParams, probe
from dapo.rollout.probe import ProvenEngine, policy_logprobs, probe_ids

WORLD = World(torch.device("cpu"))
LAYER = "model.layers.1.mlp.down_proj.weight"


class CopyEngine:
    """Has the policy's weights as they were at the last sync, but for those that are left out."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.model = policy, copy.deepcopy(policy.model)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=1e-3)
        self.left_out: set[str] = set()
        self.calls: list[str] = []

    @torch.no_grad()
    def sync_weights(self) -> None:
        for name, weight in policy_weights(self.policy):
            if name not in self.left_out:
                self.model.get_parameter(name).copy_(weight)

    @torch.no_grad()
    def score(self, token_ids: list[int]) -> list[float]:
        logprobs = self.model(torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
        return logprobs.gather(1, torch.tensor(token_ids[1:])[:, None]).squeeze(1).tolist()

    def generate(self, requests, sampling, on_completion=None, check=None) -> list[Completion]:
        self.calls.append(f"{len(requests)} of {sampling.max_new_tokens}")
        return [Completion([1], [-0.5], True) for _ in requests]

    def rest(self) -> None:
        self.calls.append("rest")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def policy(model) -> Policy:
    return Policy(model.float(), packing=None)


@pytest.fixture
def engine(policy: Policy) -> CopyEngine:
    return CopyEngine(policy)


@pytest.fixture
def proven(engine: CopyEngine, policy: Policy) -> ProvenEngine:
    return ProvenEngine(engine, policy, WORLD)


@torch.no_grad()
def train(policy: Policy, by: float = 1e-2) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.model.parameters():
        parameter.add_(by * torch.randn(parameter.shape, generator=generator))


def test_weights_come_at_once_and_after_every_update(proven: ProvenEngine, policy: Policy, engine) -> None:
    for _ in range(2):
        train(policy)
        proven.sync_weights()
    for name, weight in policy.model.named_parameters():
        assert torch.equal(engine.model.get_parameter(name), weight)


@pytest.mark.parametrize("left_out", [LAYER, "lm_head.weight", "model.embed_tokens.weight"])
def test_what_is_left_behind_stops_training(proven: ProvenEngine, policy, engine, left_out: str) -> None:
    engine.left_out = {left_out}
    proven.sync_weights()  # nothing has changed yet
    train(policy)
    with pytest.raises(TrainingStopped) as stopped:
        proven.sync_weights()
    found = re.match(
        r"after a sync the rollout engine's log-probs differ from the policy's by up to ([\d.]+) "
        r"\(token (\d+): (-[\d.]+) and (-[\d.]+) on rank 0; allowed: 0.002\): it does not have the policy's",
        str(stopped.value),
    )
    worst, token, theirs, ours = map(float, found.groups())
    assert worst == pytest.approx(abs(theirs - ours), abs=1e-3) and worst > 0.002
    at = probe_ids(policy).index(int(token)) - 1
    engines, policys = engine.score(probe_ids(policy))[at], policy_logprobs(policy, probe_ids(policy))[at]
    assert [theirs, ours] == pytest.approx([engines, policys.item()], abs=1e-4)
    engine.left_out = set()
    proven.sync_weights()


def test_what_never_comes_stops_training_before_it_begins(policy: Policy, engine: CopyEngine) -> None:
    engine.left_out = {LAYER}
    with pytest.raises(TrainingStopped):
        ProvenEngine(engine, policy, WORLD)


def test_what_another_rank_sees_stops_this_one(proven: ProvenEngine, monkeypatch) -> None:
    monkeypatch.setattr(probe, "all_reduce_max", lambda values, world: {"difference": 0.7})
    with pytest.raises(TrainingStopped, match=r"by up to 0\.7 .* on rank 0"):
        proven.sync_weights()


def test_a_policy_of_nan_is_what_its_engine_has(proven: ProvenEngine, policy: Policy, engine) -> None:
    with torch.no_grad():
        policy.model.get_parameter("model.norm.weight")[0] = math.nan
    proven.sync_weights()
    assert all(map(math.isnan, engine.score(probe_ids(policy))))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_engine_alone_in_nan_stops_training(proven: ProvenEngine, engine, monkeypatch, value) -> None:
    score = engine.score
    monkeypatch.setattr(engine, "score", lambda ids: [value, *score(ids)[1:]])
    with pytest.raises(TrainingStopped, match="by up to inf"):
        proven.sync_weights()


def test_in_bfloat16_more_is_allowed(model) -> None:
    policy = Policy(model.bfloat16())
    engine = CopyEngine(policy)
    proven = ProvenEngine(engine, policy, WORLD)
    engine.left_out = {"lm_head.weight"}
    train(policy, 1e-3)
    proven.sync_weights()
    train(policy, 1.0)
    with pytest.raises(TrainingStopped, match=r"allowed: 0\.3"):
        proven.sync_weights()


def test_the_probe_fits_the_model(policy: Policy) -> None:
    assert len(probe_ids(policy)) == 63 and set(probe_ids(policy)) <= set(range(99))
    assert probe_ids(policy) == probe_ids(policy) and len(set(probe_ids(policy))) > 30
    policy.model.config.max_position_embeddings = 16
    assert len(probe_ids(policy)) == 15


def test_the_rest_is_the_engines(proven: ProvenEngine, engine: CopyEngine) -> None:
    assert len(proven.generate([Request([5], (1,))] * 3, SamplingParams(7))) == 3
    proven.rest()
    proven.close()
    assert engine.calls == ["3 of 7", "rest", "close"]
