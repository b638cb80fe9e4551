"""The README.md of an exported model: what it is, how it was trained, how far it came; and its curves."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from .checkpoint import Checkpoint
from .config import AlgorithmConfig, Config, SourceConfig
from .records import counted
from .report.curves import save_figure
from .report.data import Rows, as_text, number, read_evals, read_jsonl, read_metrics
from .report.page import evaluation_settings, interval, percent

CURVES = "curves.png"
ON = {True: "on", False: "off"}
METRICS = {  # key: (name, share)
    "reward_mean": ("Mean reward", False),
    "accuracy": ("Right responses", True),
    "response_length_mean": ("Mean response length, tokens", False),
    "truncated_frac": ("Cut at the limit", True),
    "entropy": ("Entropy, nats per token", False),
    "mean_prob": ("Mean probability of a token", False),
    "clip_frac_low": ("Clipped below", True),
    "clip_frac_high": ("Clipped above", True),
    "grad_norm": ("Gradient norm", False),
}
EVALUATION = {  # key: name; all are shares
    "pass_at_k": "pass@k",
    "maj_at_k": "maj@k",
    "greedy_accuracy": "greedy",
    "truncated_frac": "cut",
}
TOLD = {  # settings of the algorithm that have a line of their own
    *("clip_higher", "epsilon_low", "epsilon_high", "dynamic_sampling", "token_level_loss", "reduction"),
    *("soft_overlong_punishment", "overlong_cache_length", "overlong_penalty_factor", "num_iterations"),
}


def write_card(
    folder: Path, name: str, run: Path, config: Config, checkpoint: Checkpoint, dtype: str
) -> None:
    """Writes README.md into a folder, and the curves beside it where there is something to draw.

    Args:
        name: the model's.
        run: the folder of the run, of which steps after the checkpoint's do not count.
        dtype: of the exported weights.
    """
    step = checkpoint.step
    metrics = _metrics_until(run, checkpoint)
    evals = [row for row in read_evals(run, metrics) if row["step"] <= step]
    if metrics or evals:
        save_figure(metrics, evals, folder / CURVES)
    whole = config.model_dump(mode="json", exclude={"run_dir", "logging"})
    parts = [
        f"---\n{_yaml(_front_matter(config))}---",
        f"# {name}",
        _what_it_is(config, step, dtype),
        f"![Accuracy, reward, response length and entropy by step]({CURVES})" if metrics or evals else "",
        _evaluations(evals),
        _training(metrics),
        _settings(config, checkpoint),
        _changes(run),
        f"<details><summary>The whole configuration</summary>\n\n````yaml\n{_yaml(whole)}````\n\n</details>",
    ]
    text = "\n\n".join(filter(None, parts)) + "\n"
    (folder / "README.md").write_bytes(text.encode("utf-8", "backslashreplace"))


def _metrics_until(run: Path, checkpoint: Checkpoint) -> list[dict]:
    rows = read_metrics(run) if (run / "metrics.jsonl").is_file() else []
    rows = [row for row in rows if row["step"] <= checkpoint.step]
    unlogged = checkpoint.state.get("unlogged")  # of a run that was stopped before the line was written
    if unlogged and all(row["step"] != checkpoint.step for row in rows):
        rows.append({**unlogged, "step": checkpoint.step})
    return rows


def _base(config: Config) -> str:
    """The name of the hub, or of the folder: paths of a machine concern nobody else."""
    path = Path(config.model.path)
    return path.resolve().name if path.is_dir() else config.model.path


def _front_matter(config: Config) -> dict[str, Any]:
    front: dict[str, Any] = {
        "base_model": _base(config),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["dapo", "reinforcement-learning", *(["lora"] if config.lora.rank is not None else [])],
    }
    source = config.data.train.source
    return front | ({"datasets": [source.split(":")[1]]} if source.startswith("hub:") else {})


def _what_it_is(config: Config, step: int, dtype: str) -> str:
    text = (
        f"{_base(config)}, trained by reinforcement learning with DAPO "
        f"([arXiv 2503.14476](https://arxiv.org/abs/2503.14476)): the state after step {step} of "
        f"{config.train.steps}."
    )
    if config.lora.rank is not None:
        text += f" LoRA adapters of rank {config.lora.rank} were trained, and are merged into the weights."
    return text + f" Trained in {config.model.dtype}, saved in {dtype}; a plain transformers model."


def _evaluations(evals: Rows) -> str:
    if not evals:
        return ""
    keys = [key for key in EVALUATION if any(_is_number(row.get(key)) for row in evals)]
    head = ["step", "avg@k", "95 % interval", *(EVALUATION[key] for key in keys)]
    rows = (
        [str(row["step"]), _share(row.get("accuracy")), interval(row) or "–"]
        + [_share(row.get(key)) for key in keys]
        for row in evals
    )
    settings = "; ".join(dict.fromkeys(filter(None, map(evaluation_settings, evals))))
    return f"## Held-out evaluations\n\n{_table(head, rows)}" + (f"\n\n{settings}." if settings else "")


def _training(metrics: Rows) -> str:
    if not metrics:
        return ""
    ends = [metrics[0], metrics[-1]] if len(metrics) > 1 else [metrics[0]]
    rows = (
        [name, *(_share(row.get(key)) if share else _figure(row.get(key)) for row in ends)]
        for key, (name, share) in METRICS.items()
        if any(_is_number(row.get(key)) for row in ends)
    )
    head = ["", *(f"step {row['step']}" for row in ends)]
    return f"## In training\n\nFigures of single steps, the run's first and this one.\n\n{_table(head, rows)}"


def _settings(config: Config, checkpoint: Checkpoint) -> str:
    rows = [
        *_data_settings(config),
        *_algorithm_settings(config),
        ("optimizer", _optimizer(config)),
        ("seed", str(config.seed)),
        ("processes", str(len(checkpoint.rank_states))),
    ]
    return f"## Settings\n\n{_table(['', ''], rows)}"


def _data_settings(config: Config) -> Iterable[tuple[str, str]]:
    data, reward, rollout = config.data, config.reward, config.rollout
    yield "trained on", _source(data.train)
    if data.eval is not None:
        yield "held out", _source(data.eval)
    yield (
        "prompt",
        f"{_code(data.prompt_template)}, chat template: "
        + ("for message lists" if data.chat_template is None else "yes" if data.chat_template else "no"),
    )
    yield "reward", f"{reward.mode or 'of the data'}: {reward.correct:g} right, {reward.wrong:g} wrong"
    for name, term in reward.terms.items():
        yield f"reward term {name}", f"{_code(term.function)}, weight {term.weight:g}"
    yield "step", f"{counted(rollout.prompts_per_step, 'prompt')} x {rollout.group_size} responses"
    longest = counted(rollout.max_response_length, "token")
    yield "response", f"at most {longest}, temperature {rollout.temperature:g}"


def _algorithm_settings(config: Config) -> Iterable[tuple[str, str]]:
    algorithm, mini = config.algorithm, config.train.mini_batch_prompts
    high = algorithm.epsilon_high if algorithm.clip_higher else algorithm.epsilon_low
    yield "clip-higher", f"{ON[algorithm.clip_higher]}: 1 − {algorithm.epsilon_low:g} to 1 + {high:g}"
    yield "dynamic sampling", ON[algorithm.dynamic_sampling]
    yield "loss", algorithm.loss_reduction
    factor, cache = algorithm.overlong_penalty_factor, counted(algorithm.overlong_cache_length, "token")
    punished = algorithm.soft_overlong_punishment
    yield "soft overlong punishment", ON[punished] + f": factor {factor:g}, last {cache}" * punished
    prompts = counted(mini or config.rollout.prompts_per_step, "prompt")
    passes = counted(algorithm.num_iterations, "pass", "passes")
    yield "updates", f"mini-batches of {prompts}, {passes} over a step's responses"
    for key, field in AlgorithmConfig.model_fields.items():
        value = getattr(algorithm, key)
        if key not in TOLD and value != field.default:
            yield f"algorithm.{key}", _code(value)


def _optimizer(config: Config) -> str:
    own, lora = config.optimizer, config.lora
    warmup = counted(own.warmup_steps, "step")
    text = (
        f"AdamW, learning rate {own.learning_rate:g} after {warmup} of warm-up, betas {own.beta1:g} and "
        f"{own.beta2:g}, weight decay {own.weight_decay:g}, gradients cut to norm {own.max_grad_norm:g}"
    )
    if lora.rank is not None:
        text += f"; LoRA of rank {lora.rank}, alpha {lora.alpha:g} on {_code(lora.target_modules)}"
    return text


def _changes(run: Path) -> str:
    path = run / "events.jsonl"
    events = read_jsonl(path) if path.is_file() else []
    lines = [
        f"- after step {as_text(event.get('step'))}: {_code(event.get('message'))}"
        for event in events
        if event.get("kind") == "changed"
    ]
    said = "Changed within the run; the settings here are the last ones:"
    return "\n".join([said, "", *lines]) if lines else ""


def _source(source: SourceConfig) -> str:
    options = {"first": source.limit} if source.limit is not None else {}
    given = ", ".join(f"{key} {value}" for key, value in (source.task | options).items())
    return _code(source.source) + (f" ({_plain(given)})" if given else "")


def _is_number(value: object) -> bool:
    return number(value) == number(value)  # not NaN


def _share(value: object) -> str:
    return percent(number(value)) if _is_number(value) else "–"


def _figure(value: object) -> str:
    return f"{number(value):.4g}".replace("-", "−") if _is_number(value) else "–"


def _table(head: list[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(value: object) -> str:
    return as_text(value).replace("\\", "\\\\").replace("|", "\\|").replace("\n", "\\n")


def _code(value: object) -> str:
    """As code that may stand in a table."""
    text = as_text(value).replace("\n", "\\n").replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def _yaml(values: dict[str, Any]) -> str:
    text = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump(values, text)
    return text.getvalue()
