"""Models without weights: parameters on `meta`, buffers computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..errors import UserError, first_line
from ..model_facts import heed_softcap


def model_folder(path: str) -> Path:
    """The folder with a model's files; those of a hub name are downloaded. Ranks that share a
    cache may all call it: the first downloads, the others wait for its lock.

    Raises:
        UserError: it is neither a folder nor a hub name that can be reached.
    """
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt"]))
    except Exception as error:
        raise UserError(
            f"model.path {path} is neither a folder nor a hub model ({first_line(error)})"
        ) from None


def empty_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The folder's model in eval mode, as `from_pretrained` builds it, but with parameters on `meta`, tied
    where the configuration ties them. Buffers are on CPU with what the modules' own constructors put there.

    Raises:
        UserError: the folder has no configuration of a causal language model.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        model = _build(config, dtype)
    except Exception as error:
        raise UserError(
            f"model.path {folder}: no model could be built; it needs the config.json of a causal language "
            f"model ({first_line(error)})"
        ) from None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def empty_like(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Another model of the same configuration, as `empty_model` makes it."""
    other = _build(model.config, dtype)
    other.generation_config = model.generation_config
    return other


def _build(config, dtype: torch.dtype) -> PreTrainedModel:
    with no_init_weights(), _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.tie_weights()
    return heed_softcap(model).eval()


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Moves each parameter to `meta` as it is registered; nothing has been written to it until then, so no
    memory was ever touched. Under torch.device("meta") buffers would lose their values as well."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
