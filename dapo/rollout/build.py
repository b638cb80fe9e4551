"""The rollout engine that a configuration asks for, bound to the policy it generates with."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from torch import Tensor

from ..config import Config
from ..errors import UserError
from ..parallel import World, model_folder, policy_weights, refresh, tied_head
from ..policy_setup import Built
from .base import RolloutEngine
from .hf import HFEngine


def build_engine(config: Config, built: Built, world: World, longest_prompt: int) -> RolloutEngine:
    """An engine with the policy's weights as they are now.

    Raises:
        UserError: it cannot run here.
    """
    policy, rollout = built.policy, config.rollout
    if rollout.engine == "hf":
        model = built.rollout_model
        return HFEngine(model, built.eos_token_ids, rollout.max_sequences, lambda: refresh(model, policy))
    from .probe import ProvenEngine, probe_length
    from .vllm import VLLMEngine

    def weights() -> Iterator[tuple[str, Tensor]]:
        # Without the head under its own name the engine on CPU keeps the one that it packed before.
        for name, weight in itertools.chain(policy_weights(policy), tied_head(policy)):
            # vLLM holds what it is given until a layer has all of it, where rows are padded until the end;
            # what was gathered is gone by then.
            yield name, weight.clone() if world.distributed else weight

    engine = VLLMEngine(
        model_folder(config.model.path),
        config.parallel.param_dtype or config.model.dtype,
        built.eos_token_ids,
        rollout.max_sequences,
        max(longest_prompt + rollout.max_response_length, probe_length(policy)),
        weights,
        rollout.vllm,
        several=world.distributed,
    )
    return ProvenEngine(engine, policy, world)


def engine_world(config: Config, world: World) -> World:
    """The processes as the engines divide them: those that share one are given the same requests."""
    shared = config.rollout.vllm.tensor_parallel
    if shared == 1:
        return world
    if world.size % shared:
        raise UserError(
            f"rollout.vllm.tensor_parallel ({shared}) must divide the {world.size} processes of the run"
        )
    return dataclasses.replace(world, context=shared)
