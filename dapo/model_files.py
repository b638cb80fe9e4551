"""Model folders of transformers: tokenizer and weights in, a trained model out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .config import ModelConfig
from .errors import UserError, first_line
from .files import replacing_folder
from .model_facts import heed_softcap


@dataclass(frozen=True)
class Loaded:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: list[int]


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Raises `UserError` when the folder lacks one, or there is no folder."""
    path = Path(config.path)
    looks_local = path.exists() or config.path.startswith((".", "/", "~")) or config.path.count("/") != 1
    if looks_local and not path.is_dir():
        raise UserError(
            f"model.path {config.path} is not a folder; `python -m dapo.smollm2 {config.path}` puts a small "
            "model there, any transformers model folder or hub name works"
        )
    try:
        return AutoTokenizer.from_pretrained(config.path)
    except Exception as error:  # whatever is wrong with the folder, only its owner can mend it
        raise UserError(
            f"model.path {config.path}: no tokenizer could be loaded; put the model's tokenizer files into "
            f"that folder ({first_line(error)})"
        ) from None


def load_model(config: ModelConfig) -> Loaded:
    """The model and its tokenizer. Raises `UserError` when the folder lacks either."""
    tokenizer = load_tokenizer(config)
    try:
        model = AutoModelForCausalLM.from_pretrained(config.path, dtype=getattr(torch, config.dtype))
    except Exception as error:
        raise UserError(
            f"model.path {config.path}: no model could be loaded; it needs config.json and safetensors of a "
            f"causal language model ({first_line(error)})"
        ) from None
    heed_softcap(model)
    return Loaded(model, tokenizer, eos_token_ids(model, tokenizer))


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What ends a response. Raises `UserError` when nothing does."""
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    ids = [i for i in dict.fromkeys([tokenizer.eos_token_id, *stops]) if i is not None]
    if not ids:
        raise UserError("the model names no EOS token: set eos_token_id in its generation_config.json")
    return ids


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    out: Path,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Writes a transformers folder, whole or not at all; the weights of `state_dict` where the model holds
    shards or adapters."""
    with replacing_folder(out) as partial:
        write_model(model, tokenizer, partial, state_dict=state_dict)


def write_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, **options: Any
) -> None:
    """Model and tokenizer into a folder that is there; `options` of `save_pretrained`."""
    model.save_pretrained(folder, **options)
    tokenizer.save_pretrained(folder)
    for weights in folder.glob("*.safetensors"):  # made for their owner's eyes alone
        weights.chmod((folder / "config.json").stat().st_mode)


def weights_fingerprint(folder: Path) -> str:
    """16 hex digits that tell a folder's weights from others, without reading all of them: names and sizes of
    the safetensors, and the first and last MiB of each."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for start in (0, max(size - 2**20, 0)):
                file.seek(start)
                digest.update(file.read(2**20))
    return digest.hexdigest()[:16]
