"""Tiny models that vLLM's CPU attention runs (heads of 32), and what a policy and its engine have to do with
each other."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from processes import TESTS, environment
from tiny import BOS, EOS, _tokenizer, tiny_values
from torch import Tensor

from dapo.config import Config
from dapo.data import Prompt
from dapo.parallel import World
from dapo.policy_setup import build_policy
from dapo.rewards import Verdict
from dapo.rollout import Completion, Request, SamplingParams
from dapo.rollout.build import build_engine
from dapo.rollout.hf import distribution_processors
from dapo.sampling import Group, Sample
from dapo.update import Updater

SMOLLM2 = TESTS.parent / "models" / "SmolLM2-135M-Instruct"
SCRIPTS = {
    "vllm_cases.py": "qwen2 llama smollm2 bfloat16 cached proof tied_head",
    "vllm_generation_cases.py": "lengths distributions order nan memory cannot_run",
}
ENGINE = {"rollout.engine": "vllm", "rollout.vllm": {"cpu_kv_cache_gb": 1}}
PROMPTS = [[9], [40, 41, 5, 6, 7, 8, 11], [9, 12], [0, 9, 12, 13, 50], [(7 * i) % 97 + 2 for i in range(280)]]
"""The last one is longer than two blocks of vLLM's cache."""
LONGEST, RESPONSE = 280, 12


def build_vllm_model(folder: Path, kind: str) -> Path:
    """Writes `qwen2`, whose head is its own, or `llama`, whose head is the input embedding; 99 tokens, the
    same weights on every call."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer(chat=False)
    tokenizer.save_pretrained(folder)
    classes = {"qwen2": (Qwen2Config, Qwen2ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
    of_config, of_model = classes[kind]
    config = of_config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.2,  # large enough that the distribution depends on the context
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=EOS,
        tie_word_embeddings=kind == "llama",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        of_model(config).save_pretrained(folder)
    return folder


def launch_cases(folder: Path) -> dict[str, dict]:
    """All cases; the two scripts run beside each other."""
    for kind in ("qwen2", "llama"):
        build_vllm_model(folder / kind, kind)
    if not (SMOLLM2 / "config.json").exists():
        from dapo.smollm2 import convert

        convert(SMOLLM2)
    processes = [
        subprocess.Popen(
            [sys.executable, str(TESTS / script), str(folder), *cases.split()],
            env=environment(),
            stdout=(folder / f"{script}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for script, cases in SCRIPTS.items()
    ]
    for process in processes:
        process.wait(400)
    for error in folder.glob("*.error"):
        print(f"{error.name}:\n{error.read_text()}")
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


class Pair:
    """A policy with its optimizer, and the engine that `dapo train` would give it."""

    def __init__(self, folder: Path, model_dir: Path, **overrides) -> None:
        values = {**ENGINE, "data.max_prompt_length": LONGEST, "rollout.max_response_length": RESPONSE}
        values["rollout.prompts_per_step"] = len(PROMPTS)  # one update a batch
        values |= {"optimizer.learning_rate": 3e-3, "train.max_tokens_per_micro_batch": 1200}
        config = Config.model_validate(tiny_values(folder, model_dir, **values | overrides))
        self.built = build_policy(config, World(torch.device("cpu")))
        self.policy, self.model = self.built.policy, self.built.policy.model
        self.updater = Updater(config, self.policy)
        self.engine = build_engine(config, self.built, World(torch.device("cpu")), LONGEST)
        self.inner = self.engine.engine

    def ask(
        self, prompts: Sequence[list[int]] = PROMPTS, samples: int = 4, tokens: int = RESPONSE, **sampling
    ) -> list[tuple[Request, Completion]]:
        requests = [Request(prompt, (1, i, j)) for i, prompt in enumerate(prompts) for j in range(samples)]
        return list(zip(requests, self.engine.generate(requests, SamplingParams(tokens, **sampling))))

    @torch.no_grad()
    def own(self, request: Request, completion: Completion, **sampling) -> Tensor:
        """What the policy itself gives each token, from a plain forward; `[T]`."""
        prompt, tokens = request.prompt_ids, completion.token_ids
        logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        logits = distribution_processors(SamplingParams(1, **sampling))(None, logits)
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)

    def difference(self, answers, **sampling) -> float:
        """Between the engine's log-probs and the policy's as it is now: the largest; inf if one is NaN."""
        assert all(len(completion.logprobs) == len(completion.token_ids) for _, completion in answers)
        each = [
            (self.own(*answer, **sampling) - torch.tensor(answer[1].logprobs)).abs() for answer in answers
        ]
        return torch.cat(each).nan_to_num(math.inf).max().item()

    def update(self, answers, times: int = 1):
        """Real updates on what the engine answered: every second response is right."""
        groups: dict[tuple[int, ...], Group] = {}
        for i, (request, completion) in enumerate(answers):
            prompt = Prompt(i, "", request.prompt_ids, None)
            group = groups.setdefault(tuple(request.prompt_ids), Group(prompt, [], 1))
            right = i % 2 == 0
            group.samples.append(Sample(completion, "", Verdict(right), 0.0, 1.0 if right else -1.0))
        for _ in range(times):
            stats = self.updater.run(list(groups.values()), 1)
        return stats

    def close(self) -> None:
        self.engine.close()


def plain(answers) -> list[list]:
    return [[c.token_ids, c.logprobs, c.finished] for _, c in answers]
