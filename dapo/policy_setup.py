"""The policy that is trained and the model that generates: one and the same in one process, shards and a
plain copy in many."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .attention import use_packed_attention
from .config import Config
from .lora import add_adapters, fill_adapters, require_peft
from .model import Policy, checkpoint_activations, verify_head
from .model_files import eos_token_ids, load_model, load_tokenizer
from .parallel import (
    World,
    empty_model,
    inference_copy,
    load_shards,
    model_folder,
    refresh,
    shard_policy,
)


@dataclass(frozen=True)
class Built:
    policy: Policy
    rollout_model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: list[int]


def build_policy(config: Config, world: World) -> Built:
    """Loads the model. Raises `UserError` when it cannot be trained here as configured."""
    if config.lora.rank is not None:
        require_peft(config)
    if world.distributed:
        return _build_sharded(config, world)
    loaded = load_model(config.model)
    model = loaded.model.to(world.device)
    if config.lora.rank is not None:
        add_adapters(model, config)
        fill_adapters(model, config.seed)
    if config.train.gradient_checkpointing:
        checkpoint_activations(model)
    policy = Policy(model, packing=config.train.packing)
    verify_head(policy)
    return Built(policy, model, loaded.tokenizer, loaded.eos_token_ids)


def _build_sharded(config: Config, world: World) -> Built:
    """Each rank reads its own shards: no rank ever holds the whole model in the optimizer's dtype."""
    tokenizer = load_tokenizer(config.model)
    folder = model_folder(config.model.path)
    model = empty_model(folder, getattr(torch, config.model.dtype))
    if config.lora.rank is not None:
        add_adapters(model, config)
    if config.train.gradient_checkpointing:
        checkpoint_activations(model)
    policy = shard_policy(Policy(model), config.parallel, world)
    storage = torch.device("cpu") if config.parallel.offload else world.device
    load_shards(policy, folder, storage, config.seed)
    rollout_model = inference_copy(policy, config.parallel, world)
    refresh(rollout_model, policy)
    # What has to be tried out is tried on the plain copy: only the root's own forward works in shards.
    whole = Policy(rollout_model, packing=config.train.packing)
    verify_head(whole)
    if whole.packed:
        use_packed_attention(policy.model)
        policy.packed = True
    return Built(policy, rollout_model, tokenizer, eos_token_ids(rollout_model, tokenizer))
