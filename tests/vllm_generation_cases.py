"""What test_vllm.py runs with the real engine, as vllm_cases.py does: what is generated, and what stays."""

from __future__ import annotations

import gc
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from tiny import build_tiny_model
from vllm_cases import serve
from vllm_models import LONGEST, PROMPTS, RESPONSE, Pair, plain

from dapo.config import VllmConfig
from dapo.errors import UserError
from dapo.rollout import Completion, Request, SamplingParams
from dapo.rollout.vllm import VLLMEngine
from dapo.stopping import Abandoned

REQUESTS = [Request(prompt, (1, i, j)) for i, prompt in enumerate(PROMPTS) for j in range(4)]


def failing(pair: Pair, call: Callable[[], object]) -> dict:
    """What it raises, and whether something is left in the engine."""
    try:
        call()
        said = ""
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return {"said": said, "left": pair.inner.engine.has_unfinished_requests()}


def case_lengths(folder: Path) -> dict:
    """Of responses that end by themselves and of others, and of prompts that leave no room."""
    pair = Pair(folder, folder / "qwen2")
    result = {"own EOS": plain(pair.ask(samples=16))}
    pair.inner.eos_token_ids = list(range(20, 40))
    answers = pair.ask(samples=8)
    result |= {"difference": pair.difference(answers), "answers": plain(answers)}
    result["again"] = {
        limit: plain(pair.ask(samples=8, tokens=limit)) for limit in range(1, RESPONSE)
    }  # the same noise: each is cut sooner
    pair.inner.eos_token_ids = [1]
    limit = LONGEST + RESPONSE
    filled = {
        tokens: pair.ask([([3, 5, 7, 9] * 100)[: limit - tokens]], tokens=tokens) for tokens in (RESPONSE, 1)
    }
    result["filled"] = {tokens: plain(answers) for tokens, answers in filled.items()}
    result["filled difference"] = max(map(pair.difference, filled.values()))
    result["too long"] = failing(pair, lambda: pair.ask([[9], [3] * limit]))
    result["after it"] = plain(pair.ask(samples=16)) == result["own EOS"]
    result["none"] = pair.engine.generate([], SamplingParams(4))
    pair.close()
    return result


def case_distributions(folder: Path) -> dict:
    pair, differences = Pair(folder, folder / "qwen2"), {}
    for options in ({"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.6, "top_p": 0.7}):
        answers = pair.ask(**options)
        differences[str(options)] = [pair.difference(answers, **options), pair.difference(answers)]
    greedy = pair.ask(samples=2, temperature=0)
    result = {"differences": differences, "greedy difference": pair.difference(greedy)}
    result["greedy"] = [[c.token_ids, best(pair, r, c)] for r, c in greedy]
    result["seeds"] = len({tuple(c.token_ids) for _, c in pair.ask()})
    result["same tokens"] = same_tokens_in_other_company(pair)
    pair.close()
    return result


def best(pair: Pair, request: Request, completion) -> list[int]:
    ids = request.prompt_ids + completion.token_ids
    with torch.no_grad():
        return pair.model(torch.tensor([ids])).logits[0].argmax(-1)[len(request.prompt_ids) - 1 : -1].tolist()


def same_tokens_in_other_company(pair: Pair) -> list[bool]:
    """One request at a time, and in the other order among strangers."""
    sampling = SamplingParams(RESPONSE)
    want = [c.token_ids for c in pair.engine.generate(REQUESTS, sampling)]
    alone = [pair.engine.generate([request], sampling)[0].token_ids for request in REQUESTS]
    strangers = [Request([7, 8, 9], (9, i)) for i in range(20)]
    mixed = pair.engine.generate(strangers + REQUESTS[::-1], sampling)[len(strangers) :]
    return [alone == want, [c.token_ids for c in mixed[::-1]] == want]


def case_order(folder: Path) -> dict:
    """Completions are told as each ends; what is abandoned leaves nothing behind."""
    pair, sampling = Pair(folder, folder / "llama"), SamplingParams(RESPONSE)
    pair.inner.eos_token_ids = list(range(20, 40))
    told: list[tuple[int, bool, Completion]] = []

    def note(i: int, completion: Completion) -> None:
        told.append((i, pair.inner.engine.has_unfinished_requests(), completion))

    completions = pair.engine.generate(REQUESTS, sampling, note)
    result = {"told": [i for i, _, _ in told], "lengths": [len(c.token_ids) for c in completions]}
    result["while others went on"] = [unfinished for _, unfinished, _ in told]
    result["as returned"] = all(completions[i] is completion for i, _, completion in told)
    for name, calls in {"at once": 1, "midway": 5}.items():
        countdown = iter(range(calls - 1, -1, -1))

        def check(countdown=countdown) -> None:
            if next(countdown) == 0:
                raise Abandoned

        result[name] = failing(
            pair, lambda check=check: pair.engine.generate(REQUESTS, sampling, check=check)
        )
        result[name]["same after it"] = pair.engine.generate(REQUESTS, sampling) == completions

    def refuse(i: int, completion: Completion) -> None:
        raise ValueError(f"no use for {i}")

    result["refused"] = failing(pair, lambda: pair.engine.generate(REQUESTS, sampling, refuse))
    result["refused"]["same after it"] = pair.engine.generate(REQUESTS, sampling) == completions
    pair.engine.sync_weights()
    result["same after a sync"] = pair.engine.generate(REQUESTS, sampling) == completions
    pair.close()
    return result


def case_nan(folder: Path) -> dict:
    """A policy of NaN: what it generates is left out of training."""
    pair = Pair(folder, folder / "qwen2")
    weight = pair.model.get_parameter("model.norm.weight")
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[3] = torch.nan
    pair.engine.sync_weights()
    answers = pair.ask()
    logprobs = torch.cat([torch.tensor(completion.logprobs) for _, completion in answers])
    result = {"tokens": len(logprobs), "nan": logprobs.isnan().sum().item()}
    with torch.no_grad():
        weight.copy_(kept)
    before = pair.model.get_parameter("lm_head.weight").detach().clone()
    stats = pair.update(answers).metrics()
    result |= {"trained": stats["num_tokens"], "skipped": stats["skipped_updates"]}
    result["unchanged"] = torch.equal(before, pair.model.get_parameter("lm_head.weight"))
    pair.engine.sync_weights()
    result["difference after it"] = pair.difference(pair.ask())
    pair.close()
    return result


def case_memory(folder: Path) -> dict:
    pair, resident = Pair(folder, folder / "llama"), []
    for _ in range(30):
        pair.ask()
        with torch.no_grad():
            for parameter in pair.model.parameters():
                parameter.mul_(1.001)
        pair.engine.sync_weights()
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident.append(pages * os.sysconf("SC_PAGE_SIZE"))
    pair.close()
    return {"resident": resident}


def case_cannot_run(folder: Path) -> dict:
    """Heads of 8 are loaded and not run; an architecture of no one; more tokens than positions."""
    model_dir, said = build_tiny_model(folder / "heads of 8"), {}
    unknown = folder / "unknown"
    shutil.copytree(model_dir, unknown)
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"architectures": ["NobodysForCausalLM"]}))
    for name, path, length in (("heads", model_dir, 80), ("unknown", unknown, 80), ("long", model_dir, 999)):
        try:
            VLLMEngine(path, "float32", [1], 8, length, lambda: iter(()), VllmConfig(cpu_kv_cache_gb=1))
        except UserError as error:
            said[name] = str(error)
    return said


if __name__ == "__main__":
    serve(globals())
