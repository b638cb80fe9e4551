"""A checkpoint as a plain transformers folder, by one process and without a GPU."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .checkpoint import (
    Checkpoint,
    DamagedCheckpoint,
    latest_checkpoint,
    open_checkpoint,
    saved_steps,
    step_folder,
)
from .config import Config, ModelConfig, load_config
from .errors import UserError, first_line
from .files import replacing_folder
from .lora import Adapters, add_adapters, require_peft
from .model_card import write_card
from .model_files import load_model, load_tokenizer, write_model
from .parallel import World, empty_model, model_folder
from .report.data import number, read_evals

ALONE = World(torch.device("cpu"))


def export(
    source: Path,
    out: Path,
    dtype: str = "bfloat16",
    max_shard_size: str | None = None,
    model: str | None = None,
    best: bool = False,
    overwrite: bool = False,
) -> int:
    """Writes `out`, whole or not at all: weights, configuration, tokenizer, and a model card. Returns the
    checkpoint's step.

    Args:
        source: a checkpoint, or a run's folder for its newest whole one.
        dtype: of the weights that are written.
        max_shard_size: of a file of weights, as "5GB". None: what transformers takes.
        model: where the base model is, if no longer at the run's `model.path`.
        best: the checkpoint of the run's best evaluation.
        overwrite: replace a model's folder.

    Raises:
        UserError: there is no such checkpoint, `out` is in use, the base model is missing or another one.
        DamagedCheckpoint: the checkpoint is not what was written.
        OSError: `out` could not be written.
    """
    run, folder = _locate(source, best)
    config = load_config(run / "config.yaml")
    config = config.model_copy(update={"model": _base_model(config.model, run, model)})
    out = _free(out.resolve(), [run, Path(config.model.path)], overwrite)
    if folder is not None:
        checkpoint = open_checkpoint(folder, ALONE)
    elif (checkpoint := latest_checkpoint(run / "checkpoints", ALONE)) is None:
        raise UserError(f"{run} has no checkpoint yet: the first comes after checkpoint.every steps")
    trained, tokenizer = trained_model(config, checkpoint)
    for parameter in trained.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    sizes = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    try:
        with replacing_folder(out) as partial:
            write_model(trained, tokenizer, partial, **sizes)
            write_card(partial, out.name, run, config, checkpoint, dtype)
    except SafetensorError as error:  # its own, also for a full disk
        raise OSError(f"weights could not be written: {first_line(error)}") from None
    return checkpoint.step


def trained_model(config: Config, checkpoint: Checkpoint) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The policy as the run left it, on CPU in its own dtype, adapters merged; and its tokenizer. The base
    model's weights are read only where they are part of it. Memory is that of one copy.

    Raises:
        UserError: the checkpoint is of another model.
    """
    try:
        model, tokenizer = _base(config)
    except UserError as error:
        raise UserError(f"{error}; --model gives the folder of the base model") from None
    model.requires_grad_(False)
    adapters = Adapters(model)
    own = dict(model.named_parameters())
    names = [name for name in own if not adapters.layers or adapters.plain_name(name) is None]
    _allocate(model, {id(own[name]) for name in names})
    _load(checkpoint, {f"model/{name}": model.get_parameter(name) for name in names}, config.model.path)
    _merge(model, adapters)
    return model, tokenizer


def _base(config: Config) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """What the checkpoint goes into, on meta as far as it does."""
    dtype = getattr(torch, config.model.dtype)
    if config.lora.rank is not None:
        require_peft(config)
        loaded = load_model(config.model)
        add_adapters(loaded.model, config)
        return loaded.model, loaded.tokenizer
    tokenizer = load_tokenizer(config.model)
    model = empty_model(model_folder(config.model.path), dtype)
    if model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
        return load_model(config.model).model, tokenizer  # its buffers are part of it, and not trained
    return model, tokenizer


def _allocate(model: PreTrainedModel, wanted: set[int]) -> None:
    """Gives those parameters (by id) memory where they are on meta, the tied ones the same."""
    made: dict[int, nn.Parameter] = {}
    state = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in wanted and parameter.is_meta:
            if id(parameter) not in made:
                values = torch.empty_like(parameter, device="cpu")
                made[id(parameter)] = nn.Parameter(values, requires_grad=False)
            state[name] = made[id(parameter)]
    model.load_state_dict(state, strict=False, assign=True)


def _load(checkpoint: Checkpoint, tensors: dict[str, nn.Parameter], path: str) -> None:
    strangers = sorted(name for name in checkpoint.names if name.startswith("model/") and name not in tensors)
    hint = f"model.path is {path}: give the model that the run began with by --model"
    if strangers:
        raise UserError(f"checkpoint {checkpoint.path} holds {strangers[0]}, which the model lacks; {hint}")
    try:
        checkpoint.load({name: parameter.detach() for name, parameter in tensors.items()})
    except DamagedCheckpoint:
        raise
    except UserError as error:
        raise UserError(f"{error}; {hint}") from None


def _merge(model: PreTrainedModel, adapters: Adapters) -> None:
    """Puts plain layers in place of adapted ones, one at a time."""
    for name, layer in adapters.layers.items():
        plain = layer.base_layer
        plain.weight.data = adapters.merged(f"{name}.base_layer.weight", model.get_parameter)
        model.set_submodule(name, plain)


def _locate(source: Path, best: bool) -> tuple[Path, Path | None]:
    """The run's folder, and the checkpoint's; None: the newest whole one."""
    source = Path(os.path.abspath(source))
    if not source.is_dir():
        raise UserError(f"CHECKPOINT {source} is not a folder")
    if (source / "config.yaml").is_file():
        return source, _best(source) if best else None
    if source.parent.name != "checkpoints" or not source.name.startswith("step_"):
        raise UserError(
            f"{source} is neither a checkpoint (RUN/checkpoints/step_000010) nor a run's folder: it holds "
            "no config.yaml"
        )
    if best:
        raise UserError(f"--best chooses among a run's checkpoints: give {source.parent.parent} for it")
    run = source.parent.parent
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run / 'config.yaml'} is missing, which says what {source.name} is a checkpoint of")
    return run, source


def _best(run: Path) -> Path:
    """As the trainer has it: of the same accuracy the first, and none before training."""
    accuracies = {row["step"]: number(row.get("accuracy")) for row in read_evals(run, []) if row["step"] > 0}
    accuracies = {step: accuracy for step, accuracy in accuracies.items() if not math.isnan(accuracy)}
    if not accuracies:
        raise UserError(f"--best: {run} has no evaluation of a trained model yet (eval.every)")
    step = max(accuracies, key=accuracies.__getitem__)
    root = run / "checkpoints"
    if step not in saved_steps(root):
        there = ", ".join(map(str, saved_steps(root))) or "none"
        raise UserError(f"--best: step {step}, the best evaluation's, has no checkpoint (there are: {there})")
    return step_folder(root, step)


def _base_model(config: ModelConfig, run: Path, instead: str | None) -> ModelConfig:
    path = config.path if instead is None else instead
    hub_name = not path.startswith((".", "/", "~")) and path.count("/") == 1
    if not Path(path).is_dir() and not hub_name:
        key = "--model" if instead is not None else f"model.path of {run / 'config.yaml'}"
        raise UserError(
            f"{key} is {path}, which is no folder: config.json, tokenizer and, with LoRA, weights come from "
            "there; give the base model's folder by --model"
        )
    return config.model_copy(update={"path": path})


def _free(out: Path, sources: list[Path], overwrite: bool) -> Path:
    """`out`, if it may be written."""
    if out.exists() and not out.is_dir():
        raise UserError(f"OUT {out} is a file: name a folder")
    for source in (source.resolve() for source in sources if source.exists()):
        if out == source or out in source.parents:
            raise UserError(f"OUT {out} holds what is exported: name another folder")
    if (sources[0] / "checkpoints").resolve() in (out, *out.parents):
        raise UserError(f"OUT {out} is among the run's checkpoints: name another folder")
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            raise UserError(f"OUT {out} is not empty: name another folder, or give --overwrite")
        if not (out / "config.json").is_file():
            raise UserError(f"OUT {out} is no model's folder, which --overwrite would replace: name another")
    return out
