"""The configuration of a run: typed sections, one YAML file, `section.key=value` overrides.

Every key has its meaning under it. Unknown keys and wrong types are `UserError`s that name the key, what was
given, what is allowed, and for a misspelt key the nearest one.
"""

from .algorithm import AlgorithmConfig
from .base import Section
from .files import load_config, save_config
from .run import Config
from .sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    SourceConfig,
    TermConfig,
    TrainConfig,
    VllmConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "RewardConfig",
    "RolloutConfig",
    "Section",
    "SourceConfig",
    "TermConfig",
    "TrainConfig",
    "VllmConfig",
    "load_config",
    "save_config",
]
