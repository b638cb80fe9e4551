"""Weights from a folder's safetensors into shards: each rank reads its own rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..errors import UserError
from ..lora import Adapters, initial_weight
from ..model import Policy

IGNORED = (r"rotary_emb\.inv_freq$",)
"""Buffers that old files hold, and that models compute."""


def load_shards(policy: Policy, folder: Path, device: torch.device, seed: int = 0) -> None:
    """Fills a policy that was sharded on `meta`. A rank reads the rows that are its own and converts them to
    the parameters' dtype; nothing is communicated.

    Args:
        policy: after `shard_policy`, of a model from `empty_model(folder, ...)`.
        device: where the shards go: the world's device, or the CPU with `parallel.offload`.
        seed: of the adapters' initial weights, where the model has adapters: no folder holds those.

    Raises:
        UserError: the folder has no safetensors, lacks a parameter, or holds one of another model.
    """
    model = policy.model
    parameters = dict(model.named_parameters(remove_duplicate=False))
    adapters = Adapters(model)
    plain = {name: adapters.plain_name(name) for name in parameters}
    wanted = {plain[name]: value for name, value in parameters.items() if plain[name] is not None}
    buffers = {name: value for name, value in model.named_buffers(remove_duplicate=False)}
    with ExitStack() as stack:
        files = _Files(folder, stack)
        names = _names_in_files(model, wanted, files)
        _check_unexpected(model, {*wanted, *buffers}, files)
        _check_shapes(wanted.values(), names, files)
        filled: dict[int, nn.Parameter] = {}  # by the parameter on meta: tied ones stay one
        state = {}
        for name, parameter in parameters.items():
            if id(parameter) not in filled:
                if plain[name] is None:
                    rows = initial_weight(name, parameter.shape, seed)
                else:
                    rows = files.slice(names[id(parameter)])
                filled[id(parameter)] = _filled(parameter, rows, device)
            state[name] = filled[id(parameter)]
        model.load_state_dict(state, strict=False, assign=True)
        with torch.no_grad():
            for name, buffer in buffers.items():
                if name in files.keys:
                    buffer.copy_(files.slice(name)[...])


def _names_in_files(model: PreTrainedModel, wanted: dict[str, Tensor], files: _Files) -> dict[int, str]:
    """For each distinct parameter (by id) its name in the files: of tied ones any will do."""
    names: dict[int, str] = {}
    aliases: dict[int, str] = {}
    for name, parameter in wanted.items():
        aliases.setdefault(id(parameter), name)
        found = next((key for key in (name, files.short(name, model)) if key in files.keys), None)
        if found is not None:
            names.setdefault(id(parameter), found)
    missing = [name for key, name in aliases.items() if key not in names]
    if missing:
        raise UserError(f"{files.folder} lacks parameters of {type(model).__name__}: {_some(missing)}")
    return names


def _check_unexpected(model: PreTrainedModel, known: set[str], files: _Files) -> None:
    patterns = [*IGNORED, *(model._keys_to_ignore_on_load_unexpected or ())]
    known = known | {files.short(name, model) for name in known}
    strangers = [
        key for key in files.keys if key not in known and not any(re.search(p, key) for p in patterns)
    ]
    if strangers:
        raise UserError(
            f"{files.folder} holds tensors that {type(model).__name__} does not have: {_some(strangers)}"
        )


def _check_shapes(parameters: Iterable[Tensor], names: dict[int, str], files: _Files) -> None:
    for parameter in parameters:
        name = names[id(parameter)]
        shape = files.slice(name).get_shape()
        if list(shape) != list(parameter.shape):
            raise UserError(
                f"{files.folder}: {name} has shape {shape} in the file and {list(parameter.shape)} in the "
                "model that config.json describes"
            )


def _filled(parameter: DTensor, rows, device: torch.device) -> nn.Parameter:
    """The parameter with this rank's of all `rows`, a tensor or a slice of a file, in place of those on
    meta."""
    local = torch.empty(parameter.to_local().shape, dtype=parameter.dtype, device=device)
    if local.numel():
        first = _first_row(parameter)
        # A slice is read from the mapped file as it is copied: no more than it in host memory.
        local.copy_(rows[first : first + len(local)])
    sharded = DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return nn.Parameter(sharded, parameter.requires_grad)


def _first_row(parameter: DTensor) -> int:
    """Of this rank's rows: parameters are cut like `torch.chunk`, over the mesh's last dimension."""
    mesh = parameter.device_mesh
    size, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    return -(-parameter.shape[0] // size) * rank


class _Files:
    """The tensors of a folder, one file or several, mapped to memory and not read until sliced."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.keys: dict[str, object] = {}
        """Each tensor's name and its opened file."""
        for path in _paths(folder):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path} cannot be read as safetensors ({error})") from None
            self.keys |= dict.fromkeys(file.keys(), file)

    def slice(self, name: str):
        return self.keys[name].get_slice(name)

    @staticmethod
    def short(name: str, model: PreTrainedModel) -> str:
        """The name in files that were saved from the model without its head."""
        return name.removeprefix(f"{model.base_model_prefix}.")


def _paths(folder: Path) -> list[Path]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        absent = [name for name in names if not (folder / name).is_file()]
        if absent:
            raise UserError(f"{folder} lacks files that {index.name} names: {_some(absent)}")
        return [folder / name for name in names]
    if not single.is_file():
        raise UserError(
            f"{folder} has neither {single.name} nor {index.name}: with several processes each reads its "
            "rows from safetensors; save the model once with save_pretrained"
        )
    return [single]


def _some(names: Iterable[str]) -> str:
    names = sorted(names)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
