"""What `dapo eval` is asked: its options, the presets, and which model and data they mean."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ..config import DataConfig, ModelConfig, RewardConfig, SourceConfig
from ..errors import UserError

DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 0.7, "max_tokens": 2048, "seed": 0}
DEFAULTS |= {"mode": None, "chat_template": "auto", "template": "{prompt}", "dtype": "float32"}
DEFAULTS |= {"max_sequences": 128, "samples": 1}
PRESETS: dict[str, dict[str, Any]] = {
    # arXiv 2503.14476, section 4.1: avg@32 at T = 1, top_p 0.7; the released script cuts at 20480 tokens.
    "aime": {"temperature": 1.0, "top_p": 0.7, "max_tokens": 20480, "samples_per_problem": 32},
}
WEIGHTS_AND_TOKENIZER = (".safetensors", ".bin", ".json", ".jinja", ".model", ".txt")
NO_LIMIT = 2**62
# How the configuration calls what an option sets.
OPTION_OF = {
    "data.max_prompt_length": "--max-prompt-tokens",
    "rollout.max_response_length": "--max-tokens",
    "reward.answer_pattern": "--answer-pattern",
    "data.chat_template=false": "--chat-template no",
    "data.chat_template": "--chat-template",
    "data.prompt_template": "--template",
    "prompt_column": "--prompt-column",
    "answer_column": "--answer-column",
    "reward.mode": "--mode",
    "model.path": "MODEL",
    "data.eval": "DATA",
}


@dataclass(frozen=True)
class EvalOptions:
    """As the command line gives them, a preset's and the default values filled in."""

    model: str
    data: str
    temperature: float
    top_p: float
    max_tokens: int
    seed: int
    mode: str | None
    """None: the source's own."""
    chat_template: str
    template: str
    dtype: str
    max_sequences: int
    samples: int | None = None
    """Responses to each row."""
    samples_per_problem: int | None = None
    """Responses to each problem, on however many rows it stands: a preset's, where `samples` is not given."""
    answer_pattern: str | None = None
    limit: int | None = None
    max_prompt_tokens: int | None = None
    prompt_column: str | None = None
    answer_column: str | None = None
    ks: tuple[int, ...] | None = None
    out: Path | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def folder(self) -> Path:
        return self.out or Path("evals") / f"{name_of(self.model)}-{name_of(self.data)}"


def make_options(given: Mapping[str, Any], preset: str | None = None) -> EvalOptions:
    """Explicit values over a preset's over the defaults; None counts as not given. Raises `UserError` when a
    value is not allowed."""
    explicit = {key: value for key, value in given.items() if value is not None}
    values = DEFAULTS | (PRESETS[preset] if preset else {}) | explicit
    if "samples_per_problem" in values and "samples" not in explicit:
        values["samples"] = None
    else:
        values.pop("samples_per_problem", None)
    options = EvalOptions(**{f.name: values[f.name] for f in fields(EvalOptions) if f.name in values})
    _check(options, "samples" in explicit)
    return options


def _check(options: EvalOptions, samples_given: bool) -> None:
    if not 0 <= options.temperature < float("inf"):
        raise UserError(f"--temperature must be 0 (greedy) or more, got {options.temperature}")
    if not 0 < options.top_p <= 1:
        raise UserError(f"--top-p must be over 0 and at most 1, got {options.top_p}")
    if not 0 <= options.seed < 2**63:
        raise UserError(f"--seed must be 0 to 2^63 - 1, got {options.seed}")
    counts = {"--samples": options.samples, "--max-tokens": options.max_tokens, "--limit": options.limit}
    counts |= {"--max-sequences": options.max_sequences, "--max-prompt-tokens": options.max_prompt_tokens}
    counts |= {"-k": min(options.ks) if options.ks else None}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UserError(f"{name} must be at least 1, got {count}")
    if options.greedy and samples_given and options.samples != 1:
        raise UserError(
            f"--samples {options.samples} with --temperature 0: greedy responses to a prompt are all alike; "
            "use --samples 1, or a temperature over 0"
        )
    if "{prompt}" not in options.template:
        raise UserError(f"--template must contain {{prompt}}, got {options.template!r}")


def name_of(path: str) -> str:
    """The last part of a path or name, as part of a folder's name; a run's model goes by the run's name."""
    if path.startswith("hub:"):
        return path.rpartition("/")[2].replace(":", "-")
    parts = [part for part in Path(path).parts if part not in ("/", ".", "..")]
    if len(parts) > 1 and parts[-1] == "model":
        parts.pop()
    name = parts[-1] if parts else Path(path).resolve().name or "unnamed"
    for suffix in (".jsonl", ".parquet", ".csv"):
        name = name.removesuffix(suffix)
    return name.rpartition(":")[2]


def find_model(model: str) -> str:
    """The transformers folder or hub name that MODEL means. Raises `UserError` that says where it looked."""
    folder = Path(model)
    for candidate in (folder, folder / "model"):
        if (candidate / "config.json").is_file():
            return str(candidate)
    if folder.is_dir():
        raise UserError(
            f"MODEL {model}: neither {folder / 'config.json'} (a transformers folder) nor "
            f"{folder / 'model' / 'config.json'} (a training run that saved its model) is there"
        )
    if folder.exists() or model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise UserError(
            f"MODEL {model} is not a folder: name a transformers folder, a hub name such as "
            "Qwen/Qwen2.5-0.5B, or the folder of a training run"
        )
    return model


def fingerprint(model: str) -> str:
    """Changes with the model: names, sizes and times of a folder's weights and tokenizer, or a hub commit."""
    folder = Path(model)
    if not folder.is_dir():
        from transformers import AutoConfig

        return str(getattr(AutoConfig.from_pretrained(model), "_commit_hash", None))
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS_AND_TOKENIZER)
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def data_config(options: EvalOptions, source: SourceConfig) -> DataConfig:
    """How prompts are made: rows that repeat are kept, for they are samples of one problem."""
    return make_section(
        DataConfig,
        train=source,
        prompt_template=options.template,
        chat_template={"auto": None, "yes": True, "no": False}[options.chat_template],
        max_prompt_length=options.max_prompt_tokens or NO_LIMIT,
        deduplicate=False,
    )


def reward_config(options: EvalOptions) -> RewardConfig:
    return make_section(RewardConfig, mode=options.mode, answer_pattern=options.answer_pattern)


def model_config(options: EvalOptions, model: str) -> ModelConfig:
    return make_section(ModelConfig, path=model, dtype=options.dtype)


def make_section(section: type[BaseModel], **values: Any) -> Any:
    """A section of the configuration. Raises `UserError` that names the option whose value is not allowed."""
    try:
        return section(**values)
    except ValidationError as error:
        item = error.errors()[0]
        key = ".".join(map(str, item["loc"]))
        name = f"--{key.replace('_', '-')}" if key else "options"
        raise UserError(
            f"{name}: {item['msg'].removeprefix('Value error, ')}, got {item['input']!r}"
        ) from None


@contextmanager
def words_of_options() -> Iterator[None]:
    """Complaints about the configuration leave it in the words of the command line."""
    try:
        yield
    except UserError as error:
        message = str(error)
        for key, option in OPTION_OF.items():
            message = message.replace(key, option)
        raise UserError(message) from None
