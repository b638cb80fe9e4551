"""LoRA (arXiv 2106.09685) through `peft`: low-rank adapters are trained and the model's own weights are not.

A linear layer of weight W `[out, in]` becomes W x + scale * B (A x), with A `[rank, in]` and B `[out, rank]`.
The model stays what transformers made it; the layer's parameters gain names: `base_layer.weight` is W,
`lora_A.default.weight` is A. `peft` is optional, and imported where adapters are made or written.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .config import Config
from .errors import UserError, first_line
from .files import replacing_folder

ADAPTER = "default"
ALL_LINEAR = "all-linear"


def require_peft(config: Config) -> ModuleType:
    """Raises `UserError` where `peft` is missing."""
    try:
        import peft
    except ImportError as error:
        raise UserError(
            f"lora.rank is {config.lora.rank}, which takes peft: pip install peft, or set lora.rank to null "
            f"and train all weights ({first_line(error)})"
        ) from None
    return peft


def add_adapters(model: PreTrainedModel, config: Config) -> None:
    """Puts adapters into the model, in place, and freezes all else. They are on `meta`, in the dtype of the
    weights they adapt, until `fill_adapters` or `load_shards` gives them numbers.

    Raises:
        UserError: `peft` is missing, or `lora.target_modules` names what cannot be adapted.
    """
    peft, lora = require_peft(config), config.lora
    names = _targets(model, lora.target_modules)
    settings = peft.LoraConfig(
        r=lora.rank,
        # Some readers of adapter_config.json take whole numbers only.
        lora_alpha=int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        target_modules=lora.target_modules,
        use_rslora=lora.rslora,
        base_model_name_or_path=config.model.path,
        task_type="CAUSAL_LM",
    )
    # On meta no number is drawn: sampling goes on as it would without adapters.
    peft.inject_adapter_in_model(settings, model, ADAPTER, low_cpu_mem_usage=True)
    layers = Adapters(model).layers
    if layers.keys() != names:  # peft renames targets of some models
        other = ", ".join(sorted(layers.keys() ^ names)[:3])
        raise UserError(
            f"lora.target_modules: peft takes {type(model).__name__}'s {other} otherwise than we do"
        )
    for layer in layers.values():
        for linear in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
            linear.to(layer.base_layer.weight.dtype)
        layer.train(model.training)


def _targets(model: PreTrainedModel, targets: str | list[str]) -> set[str]:
    """The names of the layers that get adapters. `peft` itself passes over names that match nothing where
    others do, and takes embeddings and heads."""
    modules = {name: module for name, module in model.named_modules() if name}
    head = model.get_output_embeddings()
    linear = {name: None for name, part in modules.items() if _is_linear(part) and part is not head}
    if targets == ALL_LINEAR:
        return set(linear)
    ends = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in linear))
    found: set[str] = set()
    for target in [targets] if isinstance(targets, str) else targets:
        if isinstance(targets, str):
            matched = {name for name in modules if re.fullmatch(target, name)}
        else:
            matched = {name for name in modules if f".{name}".endswith(f".{target}")}
        if not matched:
            hint = "a string is a regular expression for whole names, a list holds what they end in"
            raise UserError(
                f"lora.target_modules: {target} matches no module of {type(model).__name__}, whose linear "
                f"layers end in {ends}; {hint}"
            )
        found |= matched
    if strangers := sorted(found - linear.keys()):
        raise UserError(
            f"lora.target_modules matches {strangers[0]}, which is {_what(model, modules[strangers[0]])}: "
            f"name linear layers of the blocks ({ends}), or set {ALL_LINEAR}"
        )
    return found


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, (nn.Linear, Conv1D))


def _what(model: PreTrainedModel, module: nn.Module) -> str:
    """A module that cannot be adapted, in words."""
    if module is model.get_output_embeddings():
        return "the output head, whose weight the loss takes as it is"  # it would pass the adapter by
    if module is model.get_input_embeddings():
        return "the input embedding"
    return f"a {type(module).__name__}, and not a linear layer"


def initial_weight(name: str, shape: Iterable[int], seed: int) -> Tensor:
    """An adapter's weight before training, fp32 on CPU: zeros for B, so that the model begins as it was, and
    for A the uniform numbers within ±1/sqrt(in) that `peft` draws too.

    They depend on the seed and the parameter's name alone: every rank makes the same, however many there are.
    """
    shape = tuple(shape)
    if ".lora_B." in name:
        return torch.zeros(shape, dtype=torch.float32)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    bound = shape[1] ** -0.5
    return torch.empty(shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator)


def fill_adapters(model: PreTrainedModel, seed: int) -> None:
    """Gives adapters on `meta` their initial weights, on the model's device."""
    adapters = Adapters(model)
    for name, parameter in list(model.named_parameters()):
        if adapters.plain_name(name) is None:
            weight = initial_weight(name, parameter.shape, seed).to(model.device, parameter.dtype)
            model.get_submodule(name.rpartition(".")[0]).weight = nn.Parameter(weight)


class Adapters:
    """The adapted layers of a model; without LoRA there are none, and this changes no name and no weight."""

    def __init__(self, model: nn.Module) -> None:
        self.layers: dict[str, nn.Module] = {
            name: module
            for name, module in model.named_modules()
            if hasattr(module, "lora_A") and hasattr(module, "base_layer")
        }

    def plain_name(self, name: str) -> str | None:
        """What a parameter or buffer is called in the model without adapters; None: it belongs to one."""
        if name.rpartition(".lora_")[0] in self.layers:
            return None
        layer, _, own = name.rpartition(".base_layer.")
        return f"{layer}.{own}" if layer in self.layers else name

    def merged(self, name: str, whole: Callable[[str], Tensor]) -> Tensor:
        """A parameter as the model without adapters would need it: W + scale * B A, in a new tensor, where it
        is an adapted weight. The sum is in fp32 or better, the result in the dtype of W.

        Args:
            name: in the model with adapters.
            whole: gives a parameter by such a name, not in shards.
        """
        weight = whole(name)
        layer = name.removesuffix(".base_layer.weight")
        if layer == name or layer not in self.layers:
            return weight
        dtype, module = torch.promote_types(weight.dtype, torch.float32), self.layers[layer]
        a, b = (whole(f"{layer}.{part}.{ADAPTER}.weight").to(dtype) for part in ("lora_A", "lora_B"))
        delta = module.scaling[ADAPTER] * (b @ a)  # [out, in]
        delta = delta.T if module.fan_in_fan_out else delta  # GPT-2's layers keep W as [in, out]
        return (weight.to(dtype) + delta).to(weight.dtype)


def save_adapter(model: PreTrainedModel, weights: dict[str, Tensor], out: Path) -> None:
    """Writes a folder that `PeftModel.from_pretrained(base, out)` reads, whole or not at all.

    Args:
        model: with adapters, whose weights may be in shards.
        weights: the adapters' own, whole, by their names in the model.
    """
    settings = model.peft_config[ADAPTER]
    if not isinstance(settings.target_modules, str):
        settings.target_modules = sorted(settings.target_modules)  # of a set: one seed, one file
    named = {
        f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}": weight.contiguous()
        for name, weight in weights.items()
    }
    with replacing_folder(out) as partial:
        settings.save_pretrained(partial)
        save_file(named, partial / "adapter_model.safetensors", metadata={"format": "pt"})
