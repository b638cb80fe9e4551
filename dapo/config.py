"""The configuration of a run: typed sections, one YAML file, `section.key=value` overrides.

Every key has its meaning under it. Unknown keys and wrong types are `UserError`s that name the key, what was
given, what is allowed, and for a misspelt key the nearest one.
"""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from ruamel.yaml import YAML

from .errors import UserError
from .yaml_values import read_values

Count = Annotated[int, Field(ge=1)]
Weight = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelConfig(Section):
    path: str
    """Folder of a transformers causal language model with its tokenizer, or a hub name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights. Training in bfloat16 needs a larger learning rate than 1e-6 to move them."""
    reference_path: str | None = None
    """The frozen model that `algorithm.kl_coef` holds the policy to, loaded only where that is over 0. Null:
    the model of `path` as it was."""


class SourceConfig(Section):
    source: str
    """`reasoning_gym:TASK`, a path to a `.jsonl`, `.parquet` or `.csv` file, or a data set of the hub:
    `hub:OWNER/NAME`, `hub:OWNER/NAME:SPLIT` or `hub:OWNER/NAME:CONFIG:SPLIT` (the split is else `train`)."""
    task: dict[str, Any] = {}
    """Options of the reasoning_gym task, its `seed` and `size` included."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of `{role, content}` messages. Dots reach into structs."""
    answer_column: str = "answer"
    """Column with the right answer. Dots reach into structs (`reward_model.ground_truth`)."""
    limit: Count | None = None
    """Use only the first so many prompts that pass the filters."""


class DataConfig(Section):
    train: SourceConfig
    """Prompts to train on. Those that are also in `eval` are left out."""
    eval: SourceConfig | None = None
    """Held-out prompts."""
    prompt_template: str = "{prompt}"
    """What a string prompt is wrapped in."""
    chat_template: bool | None = None
    """Whether prompts go through the tokenizer's chat template. Null: message lists do, strings are sent as
    they are. True: strings do too, as one user message. False: none does; a message list is sent as its
    contents, a blank line between them."""
    max_prompt_length: Count = 2048
    """Longer prompts (in tokens) are dropped and counted, never cut."""
    deduplicate: bool = True
    """Keep one of identical prompts (the hub's DAPO-Math-17k holds each about 100 times)."""


class TermConfig(Section):
    """A reward term of your own, logged apart from correctness; the filter of dynamic sampling never sees
    it."""

    function: str
    """`package.module:function`, called as `(response, answer)`, and with `row`, the data's record, where it
    has that parameter; plain or async; returns a number."""
    weight: float = 1.0
    """What the number is multiplied by before it is added to the reward."""


class RewardConfig(Section):
    """A response is right or wrong by its mode; what cannot be judged within the limits is wrong, logged and
    counted in `reward_failures`."""

    mode: str | None = None
    """`math`, `gsm8k`, `exact`, `reasoning_gym`, `math_dapo` (the released scorer, for reproduction),
    `math_dapo_strict_box`, or `package.module:function` of your own, plain or async. `data_source`: each row
    names its mode in the column of that name. Null: `reasoning_gym` for its tasks, else `math`."""
    answer_pattern: str | None = None
    """Regular expression; its last match in the response (group 1, if it has one) is judged in place of the
    response. Null: the mode finds the answer."""
    correct: float = 1.0
    wrong: float = -1.0
    time_limit: Annotated[float, Field(gt=0)] = 5.0
    """Seconds for one verdict."""
    memory_limit_mb: Count = 1024
    """MiB that one verdict may take."""
    workers: Count | None = None
    """Processes that judge what is not decided at once. Null: one a CPU, at most 16."""
    terms: dict[str, TermConfig] = {}


class RolloutConfig(Section):
    """Responses are always sampled from the policy's whole distribution (top_p 1, top_k off, no repetition
    penalty): with any of these the log-probs that training needs would be those of another distribution."""

    engine: Literal["hf"] = "hf"
    """`hf`: `generate` of transformers."""
    prompts_per_step: Count = 512
    """Groups trained on in a step (one rollout batch)."""
    prompts_per_generation: Count | None = None
    """Prompts sampled at a time. Null: `prompts_per_step`. The paper takes three times that, so that one
    generation batch often leaves enough groups after filtering."""
    group_size: Annotated[int, Field(ge=2)] = 16
    """Responses to each prompt; a group of one has no advantage to learn from."""
    max_response_length: Count = 20480
    """Tokens, including the soft overlong punishment's cache."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; the loss uses the same."""
    max_sequences: Count = 128
    """Sequences generated at a time."""


class AlgorithmConfig(Section):
    """DAPO's four techniques are switches. All off is naive GRPO without a KL term; other objectives are
    under `configs/algorithms`."""

    clip_higher: bool = True
    """Off: the upper clip range is `epsilon_low` too."""
    epsilon_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    epsilon_high: Weight = 0.28
    dual_clip: float | None = None
    """Bound on the ratio where the advantage is negative (the released script has 10)."""
    dynamic_sampling: bool = True
    """Drop groups that are all right or all wrong, and sample until the batch is full."""
    max_generation_batches: Count = 10
    """Generation batches a step may take to fill the batch."""
    on_too_few_groups: Literal["stop", "train"] = "stop"
    """After `max_generation_batches`: stop with a message, or train on the groups there are."""
    surplus_groups: Literal["discard", "keep"] = "discard"
    """Qualified groups beyond the batch: discard as the released run did, or keep for the next step, with
    the log-probs of the policy that generated them as old log-probs."""
    token_level_loss: bool = True
    """Mean over all tokens of the optimizer step. Off: mean over sequences of their token means (GRPO)."""
    reduction: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant", None] = None
    """How token losses become one number. Null: as `token_level_loss` says. `constant` divides their sum by
    `rollout.max_response_length` times the number of responses (Dr. GRPO)."""
    soft_overlong_punishment: bool = True
    """Eq. 13: a penalty that grows over the last `overlong_cache_length` tokens."""
    overlong_cache_length: Count = 4096
    overlong_penalty_factor: Weight = 1.0
    overlong_filtering: bool = False
    """Leave truncated responses out of the loss (they still count in their group's advantages)."""
    num_iterations: Count = 1
    """Passes over each rollout batch (the paper's mu)."""
    advantage_eps: Annotated[float, Field(gt=0)] = 1e-6
    advantage_std: bool = True
    """Divide by the group's standard deviation. Off: rewards minus their mean (Dr. GRPO)."""
    objective: Literal["clip", "cispo", "sapo"] = "clip"
    """`clip`: PPO's and DAPO's. `cispo`: the clipped ratio as a constant weight on the log-prob. `sapo`: a
    soft gate around ratio 1."""
    cispo_bounds: list | None = None
    """`[low, high]` of CISPO's weight. Null: `[0, 1 + epsilon_high]`."""
    sapo_temperature_pos: Annotated[float, Field(gt=0)] = 1.0
    """Of SAPO's gate where the advantage is positive."""
    sapo_temperature_neg: Annotated[float, Field(gt=0)] = 1.05
    """Of SAPO's gate elsewhere."""
    ratio_level: Literal["token", "sequence"] = "token"
    """`sequence`: one ratio a response, the exponential of its mean log-ratio (GSPO)."""
    kl_coef: Weight = 0.0
    """Weight of the KL term to the model of `model.reference_path`. DAPO has none."""
    kl_estimator: Literal["k3", "k2", "k1"] = "k3"
    """With q = reference log-prob - log-prob: `k3` is exp(q) - q - 1, `k2` q^2 / 2, `k1` -q."""
    kl_ratio_correction: bool = False
    """Multiply the KL term by the ratio, which makes its gradient unbiased off policy."""
    entropy_coef: Weight = 0.0
    """Weight of the entropy bonus."""
    rollout_correction: Literal["off", "truncate", "mask"] = "off"
    """Weigh each token's loss by its probability under the trainer over that under the rollout engine, before
    the step's updates. `truncate`: at most `rollout_correction_cap` (TIS). `mask`: 0 outside of
    `rollout_correction_floor` to `rollout_correction_cap` (MIS, IcePop)."""
    rollout_correction_level: Literal["token", "sequence"] = "token"
    """`sequence`: one weight a response, the product of its tokens' (as in verl and TRL)."""
    rollout_correction_cap: Annotated[float, Field(gt=0)] = 2.0
    rollout_correction_floor: Weight = 0.5
    """Of `mask` alone."""

    @field_validator("cispo_bounds")
    @classmethod
    def _bounds(cls, bounds: list | None) -> list[float] | None:
        numbers = [bound for bound in bounds or [] if type(bound) in (int, float) and math.isfinite(bound)]
        if bounds is not None and not (len(bounds) == len(numbers) == 2 and 0 <= numbers[0] <= numbers[1]):
            raise ValueError("must be null or [low, high] with 0 <= low <= high")
        return None if bounds is None else [float(bound) for bound in numbers]

    @property
    def loss_reduction(self) -> str:
        return self.reduction or ("token-mean" if self.token_level_loss else "seq-mean-token-mean")


class OptimizerConfig(Section):
    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Weight = 0.1
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    """Linear warm-up, in rollout steps; all updates of a step share its learning rate."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0


class TrainConfig(Section):
    steps: Count
    """Rollout batches to train on."""
    mini_batch_prompts: Count | None = None
    """Groups of one optimizer step. Null: `rollout.prompts_per_step`, one update a step."""
    max_tokens_per_micro_batch: Count = 22528
    """Tokens of one forward and backward, padding included where there is any. Changes memory and speed, not
    the gradient."""
    packing: bool | None = None
    """Put sequences one after another into a micro-batch, without padding. Null: where the model's attention
    can keep them apart, which is tried at start. True: it is an error if it cannot. False: pad."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, more time."""
    save_model: bool = True
    """Write the trained model to `RUN/model` at the end, as a transformers folder."""


class ParallelConfig(Section):
    """Processes that train together, started by `torchrun --nproc_per_node N -m dapo train CONFIG`: FSDP2
    cuts parameters, gradients and optimizer state over them. Plain `dapo train` is one process."""

    replicate: Count = 1
    """Copies of the sharded policy (HSDP). Each is cut over processes / `replicate` of them: one machine's
    processes, say, so that parameters never travel between machines."""
    context: Count = 1
    """Processes that share each sequence and so hold the same samples."""
    param_dtype: Literal["bfloat16"] | None = None
    """Dtype that parameters are gathered and used in; the optimizer keeps `model.dtype`, gradients are summed
    in float32. Null: `model.dtype`."""
    offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory between uses."""
    timeout: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds that a process waits for the others, whose rollouts may take longer, before the run fails."""


class EvalConfig(Section):
    """Needs `data.eval`. Runs before the first and after the last step."""

    every: Annotated[int, Field(ge=0)] = 0
    """Also every so many steps. 0: no."""
    samples_per_prompt: Count = 32
    """avg@k: responses to each prompt."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.7
    greedy: bool = True
    """One greedy response to each prompt besides."""


class LoggingConfig(Section):
    tensorboard: bool = True
    rollouts: bool = True
    """Write every response to `RUN/rollouts`."""
    wandb: str | None = None
    """Weights & Biases project to log to as well; needs `pip install wandb`. Null: none."""
    wandb_mode: Literal["online", "offline"] = "online"
    """`offline` writes to `RUN/wandb` and needs no account; `wandb sync` uploads it later."""


class Config(Section):
    run_dir: str
    """Folder of the run; must not hold one already."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of sampling noise and data order."""
    model: ModelConfig
    data: DataConfig
    reward: RewardConfig = RewardConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig
    parallel: ParallelConfig = ParallelConfig()
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


def load_config(path: str | Path, overrides: list[str] | None = None) -> Config:
    """Reads a YAML file and what it includes, applies `section.key=value` overrides (values are YAML) and
    validates."""
    values = read_values(Path(path), overrides or [])
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise UserError(f"{path}: " + "; ".join(_describe(item) for item in error.errors())) from None


def save_config(config: Config, path: Path) -> None:
    """Writes the fully resolved configuration; `load_config` reads it back to the same."""
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(config.model_dump(mode="json"), file)


def _describe(error: dict) -> str:
    keys = [str(key) for key in error["loc"]]
    name = ".".join(keys)
    if error["type"] == "extra_forbidden":
        return f"unknown key {name}; {_nearest(keys)}"
    if error["type"] == "missing":
        return f"{name} is required"
    message = error["msg"].removeprefix("Value error, ")
    if not name:
        return message
    message = message[0].lower() + message[1:]
    return f"{name}: {message}, got {error['input']!r} ({type(error['input']).__name__})"


def _nearest(keys: list[str]) -> str:
    known = _all_keys(Config)
    name = ".".join(keys)
    close = [other for other in known if other.split(".")[-1] == keys[-1]][:1]  # in the wrong section
    close = close or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    siblings = [other.split(".")[-1] for other in known if other.split(".")[:-1] == keys[:-1]]
    return f"did you mean {close[0]}?" if close else f"allowed here: {', '.join(siblings)}"


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        inner = "NAME." if get_origin(field.annotation) is dict else ""
        for kind in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(kind, type) and issubclass(kind, Section):
                keys += _all_keys(kind, f"{prefix}{name}.{inner}")
    return keys
