"""Checkpoints on disk: written whole or not at all, verified before anything of them is used.

A folder `step_000010` holds tensors as torch.distributed.checkpoint writes them (`__0_0.distcp`,
`.metadata`), `state.json` (the same on all ranks), `ranks.json` (a list, by rank) and `manifest.json`, which
gives every other file's size and digest.
"""

from .background import BackgroundWriter
from .errors import CheckpointFailed, DamagedCheckpoint
from .folders import prune, saved_steps, set_aside, step_folder
from .read import Checkpoint, latest_checkpoint, open_checkpoint
from .write import write_checkpoint

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointFailed",
    "DamagedCheckpoint",
    "latest_checkpoint",
    "open_checkpoint",
    "prune",
    "saved_steps",
    "set_aside",
    "step_folder",
    "write_checkpoint",
]
