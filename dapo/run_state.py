"""All that a run's future follows from, as tensors and plain values, and back: what a checkpoint holds."""

from __future__ import annotations

import base64
import json
import random
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .data import Prompt
from .rewards import Verdict
from .rollout import Completion
from .sampling import Group, Position, Sample
from .update import Updater

ADAM = ("exp_avg", "exp_avg_sq", "step")


def training_tensors(updater: Updater) -> dict[str, Tensor]:
    """What is trained and the optimizer's state, shards where the policy is in shards; not copied.

    Names: `model/NAME` and `optimizer/KIND/NAME` with NAME as transformers has it. A parameter that was never
    updated has no optimizer state.
    """
    tensors = {}
    for name, parameter in updater.parameters.items():
        tensors[f"model/{name}"] = parameter.detach()
        state = updater.optimizer.state.get(parameter, {})
        tensors |= {f"optimizer/{kind}/{name}": state[kind] for kind in ADAM if kind in state}
    return tensors


def tensors_to_fill(updater: Updater, saved: frozenset[str]) -> dict[str, Tensor]:
    """As `training_tensors`, with optimizer state for what had some in the checkpoint of these names."""
    for name, parameter in updater.parameters.items():
        kinds = [kind for kind in ADAM if f"optimizer/{kind}/{name}" in saved]
        updater.optimizer.state[parameter] = {
            # AdamW(fused=True) counts steps in an fp32 tensor beside the parameter.
            kind: torch.zeros((), device=parameter.device)
            if kind == "step"
            else torch.zeros_like(parameter, memory_format=torch.preserve_format)
            for kind in kinds
        }
        if not kinds:
            del updater.optimizer.state[parameter]
    return training_tensors(updater)


def position_to_json(position: Position) -> dict[str, Any]:
    return {"stream": position.stream, "surplus": [_group_to_json(group) for group in position.surplus]}


def position_from_json(values: dict[str, Any], prompts: list[Prompt]) -> Position:
    by_index = {prompt.index: prompt for prompt in prompts}
    return Position(values["stream"], [_group_from_json(group, by_index) for group in values["surplus"]])


def _group_to_json(group: Group) -> dict[str, Any]:
    samples = [asdict(sample) for sample in group.samples]
    return {"prompt": group.prompt.index, "step": group.step, "samples": samples}


def _group_from_json(values: dict[str, Any], prompts: dict[int, Prompt]) -> Group:
    samples = [
        Sample(
            **sample
            | {"completion": Completion(**sample["completion"]), "verdict": Verdict(**sample["verdict"])}
        )
        for sample in values["samples"]
    ]
    return Group(prompts[values["prompt"]], samples, values["step"])


def random_states() -> dict[str, Any]:
    """Of this process's generators: Python's, numpy's, torch's on CPU and on its GPU."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    states = {
        "python": random.getstate(),
        "numpy": [kind, keys.tolist(), position, has_gauss, gauss],
        "torch": _to_text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        states["cuda"] = _to_text(torch.cuda.get_rng_state())
    return json.loads(json.dumps(states))


def set_random_states(states: dict[str, Any]) -> None:
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(states["numpy"]))
    torch.set_rng_state(_from_text(states["torch"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(_from_text(states["cuda"]))


def _to_text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
