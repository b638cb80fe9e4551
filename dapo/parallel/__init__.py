"""Training on many processes: FSDP2 shards, and what processes tell each other (docs/parallel.md)."""

from .collectives import (
    all_gather_objects,
    all_reduce_max,
    all_reduce_sum,
    gather_objects,
    same_on_all_ranks,
    split_across_ranks,
)
from .loading import load_shards
from .meta import empty_model, model_folder
from .sharding import clip_grad_norm, shard_policy, transformer_blocks
from .watchdog import Watchdog, phase
from .weights import full_state_dict, inference_copy, policy_weights, refresh, release, tied_head
from .world import World, open_world

__all__ = [
    "Watchdog",
    "World",
    "all_gather_objects",
    "all_reduce_max",
    "all_reduce_sum",
    "clip_grad_norm",
    "empty_model",
    "full_state_dict",
    "gather_objects",
    "inference_copy",
    "load_shards",
    "model_folder",
    "open_world",
    "phase",
    "policy_weights",
    "refresh",
    "release",
    "same_on_all_ranks",
    "shard_policy",
    "split_across_ranks",
    "tied_head",
    "transformer_blocks",
]
