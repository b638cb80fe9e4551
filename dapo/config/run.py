"""The configuration of a run as a whole, and what its sections ask of each other."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from .algorithm import AlgorithmConfig
from .base import Section
from .sections import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)


class Config(Section):
    run_dir: str
    """Folder of the run. A new run's must not hold one already."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of sampling noise, data order and LoRA's first weights."""
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    logging: LoggingConfig = LoggingConfig()
    include: Annotated[list[str], Field(exclude=True)] = []
    """YAML files whose keys come first, those of this file over them; paths are relative to this file. On the
    command line, `include=[FILE]` lays a file's keys over the configuration. The run's own `config.yaml` has
    everything resolved."""

    @model_validator(mode="after")
    def _sections_fit(self) -> Config:
        rollout, algorithm = self.rollout, self.algorithm
        mini = self.train.mini_batch_prompts
        if mini is not None and rollout.prompts_per_step % mini:
            raise ValueError(
                f"train.mini_batch_prompts ({mini}) must divide rollout.prompts_per_step "
                f"({rollout.prompts_per_step})"
            )
        if rollout.vllm.tensor_parallel > 1 and rollout.engine != "vllm":
            raise ValueError("rollout.vllm.tensor_parallel takes rollout.engine vllm")
        if self.train.offload_activations and not self.train.gradient_checkpointing:
            # Without it, what a block keeps includes its gathered weights.
            raise ValueError("train.offload_activations takes train.gradient_checkpointing: set that to true")
        cache, longest = algorithm.overlong_cache_length, rollout.max_response_length
        if algorithm.soft_overlong_punishment and cache >= longest:
            raise ValueError(
                f"algorithm.overlong_cache_length ({cache}) must be under rollout.max_response_length "
                f"({longest})"
            )
        if algorithm.dual_clip is not None and algorithm.dual_clip < 1 + algorithm.epsilon_high:
            raise ValueError(
                f"algorithm.dual_clip must be null or at least 1 + epsilon_high, got {algorithm.dual_clip}"
            )
        floor, cap = algorithm.rollout_correction_floor, algorithm.rollout_correction_cap
        if algorithm.rollout_correction == "mask" and floor > cap:
            raise ValueError(
                f"algorithm.rollout_correction_floor ({floor}) must be at most "
                f"algorithm.rollout_correction_cap ({cap})"
            )
        if self.reward.correct <= self.reward.wrong:
            raise ValueError(
                f"reward.correct ({self.reward.correct}) must be over reward.wrong ({self.reward.wrong})"
            )
        if "{prompt}" not in self.data.prompt_template:
            raise ValueError(
                f"data.prompt_template must contain {{prompt}}, got {self.data.prompt_template!r}"
            )
        return self

    @model_validator(mode="after")
    def _sequences_can_be_cut(self) -> Config:
        """With `parallel.context` no process sees a whole sequence when it computes the loss."""
        algorithm, context = self.algorithm, self.parallel.context
        if context == 1:
            return self
        cut = f"parallel.context ({context}) cuts sequences into stretches"
        if algorithm.loss_reduction == "seq-mean-token-mean":
            raise ValueError(
                f"{cut}, and algorithm.reduction seq-mean-token-mean (token_level_loss: false) takes whole "
                "ones: set algorithm.reduction to token-mean, seq-mean-token-sum or constant, or "
                "parallel.context to 1"
            )
        if algorithm.ratio_level == "sequence":
            raise ValueError(
                f"{cut}, and algorithm.ratio_level sequence takes whole ones: set it to token, or "
                "parallel.context to 1"
            )
        if self.train.packing is False:
            raise ValueError(
                f"{cut} of packed rows, and train.packing is false: set it to null or true, or "
                "parallel.context to 1"
            )
        return self

    @property
    def mini_batch_prompts(self) -> int:
        return self.train.mini_batch_prompts or self.rollout.prompts_per_step

    @property
    def prompts_per_generation(self) -> int:
        return self.rollout.prompts_per_generation or self.rollout.prompts_per_step
