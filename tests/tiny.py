"""A random Llama of 25k parameters with a character tokenizer, and run configurations that train on it."""

from __future__ import annotations

import json
import string
from pathlib import Path

BOS, EOS, UNK = 0, 1, 2
CHARACTERS = "\n" + string.digits + string.ascii_letters + string.punctuation + " "
# Hostile on purpose: whoever samples from the model must not fall back on its own generation settings.
GENERATION_DEFAULTS = {"do_sample": True, "top_k": 50, "top_p": 0.9, "temperature": 0.3}
GENERATION_DEFAULTS |= {"repetition_penalty": 1.5}
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
# A response that holds a digit is right: about a third of the tiny model's are, so most groups have a signal.
ANY_DIGIT = {"mode": "exact", "answer_pattern": r"\d()", "workers": 1}
PROMPTS = [{"prompt": f"{a}+{b}=", "answer": ""} for a in range(4) for b in range(2)]


def build_tiny_model(folder: Path, chat: bool = False) -> Path:
    """Writes a transformers folder: 99 tokens, `<eos>` pads too, the same weights on every call.

    Args:
        chat: the tokenizer begins every text with `<bos>`, and has a chat template that writes one as well.
    """
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer(chat)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,  # large enough that the distribution depends on the context
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS}
    model.generation_config = GenerationConfig(**GENERATION_DEFAULTS, **ids)
    model.save_pretrained(folder)
    return folder


def _tokenizer(chat: bool):
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate(["<bos>", "<eos>", "<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Fuse()
    if chat:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", BOS)]
        )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )
    if chat:
        wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tiny_values(folder: Path, model_dir: Path, **overrides) -> dict:
    """The values of a configuration that trains two steps in about a second; its data are `PROMPTS`.

    Args:
        folder: gets `prompts.jsonl`; the run goes to its `run`.
        overrides: by dotted key, as in `**{"train.steps": 3, "data.eval": {...}}`; `...` removes a key.
    """
    data = write_jsonl(folder / "prompts.jsonl", PROMPTS)
    values = {
        "run_dir": str(folder / "run"),
        "model": {"path": str(model_dir)},
        "data": {"train": {"source": str(data)}, "max_prompt_length": 32},
        "reward": dict(ANY_DIGIT),
        "rollout": {
            "prompts_per_step": 2,
            "prompts_per_generation": 4,
            "group_size": 4,
            "max_response_length": 5,
        },
        "algorithm": {"overlong_cache_length": 2},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 0},
        "train": {"steps": 2, "max_tokens_per_micro_batch": 64},
        "eval": {"samples_per_prompt": 2},
        "logging": {"tensorboard": False},  # its import alone takes seconds
    }
    for name, value in overrides.items():
        *parents, key = name.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        if value is ...:
            section.pop(key, None)
        else:
            section[key] = value
    return values


def tiny_config(folder: Path, model_dir: Path, **overrides) -> Path:
    """Writes `tiny_values` to `folder`/config.yaml and returns its path."""
    from ruamel.yaml import YAML

    path = folder / "config.yaml"
    with path.open("w", encoding="utf-8") as file:
        YAML(typ="safe", pure=True).dump(tiny_values(folder, model_dir, **overrides), file)
    return path


# Of metrics.jsonl: of the machine, not of the training.
MACHINE = ("time_", "tokens_per_s", "peak_memory_gb", "memory_", "mfu")


def of_training(row: dict) -> dict:
    """What of a step's metrics two runs of one seed share."""
    return {key: value for key, value in row.items() if not key.startswith(MACHINE)}


def unfinished(run: Path) -> list[Path]:
    """What only a process at work may leave in a run's folder."""
    hidden = [path for path in run.rglob("*") if path.name.startswith(".") or ".partial" in path.name]
    return [path for path in hidden if not path.match("checkpoints/step_*/.metadata")]


def outcome(run: Path) -> dict[str, object]:
    """All that must not depend on whether, and where, a run was stopped."""
    files = [*run.glob("rollouts/*"), *run.glob("eval/*"), run / "model/model.safetensors"]
    contents = {str(path.relative_to(run)): path.read_bytes() for path in files}
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return contents | {"metrics": [of_training(json.loads(line)) for line in lines]}
