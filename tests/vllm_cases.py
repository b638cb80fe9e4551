"""What test_vllm.py runs with the real engine: `python tests/vllm_cases.py FOLDER CASE...`, one process for
all of them: weights and what proves them. A case's result is FOLDER/CASE.json; one that fails leaves
FOLDER/CASE.error."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from vllm_models import PROMPTS, SMOLLM2, Pair, plain

import dapo.rollout.build
from dapo.errors import TrainingStopped

LAYER = "model.layers.1.mlp.down_proj.weight"


def trained(pair: Pair, updates: list[int], **asked) -> dict:
    """Differences before and after each number of updates, and how far these moved the policy."""
    answers = pair.ask(**asked)
    differences, moved = [pair.difference(answers)], []
    for count in updates:
        pair.update(answers, count)
        moved.append(pair.difference(answers))
        pair.engine.sync_weights()
        answers = pair.ask(**asked)
        differences.append(pair.difference(answers))
    pair.close()
    return {"differences": differences, "moved": moved, "updates": pair.updater.updates}


def case_qwen2(folder: Path) -> dict:
    return trained(Pair(folder, folder / "qwen2"), [1, 4])


def case_llama(folder: Path) -> dict:
    return trained(Pair(folder, folder / "llama"), [1, 4])


def case_smollm2(folder: Path) -> dict:
    pair = Pair(folder, SMOLLM2, **{"optimizer.learning_rate": 1e-5, "train.packing": False})
    prompts = [pair.built.tokenizer(text)["input_ids"] for text in ("3 + 4 =", "The capital of France is")]
    return trained(pair, [1], prompts=prompts, tokens=8)


def case_bfloat16(folder: Path) -> dict:
    """The proof passes; and without a layer that is far off it does not."""
    pair = Pair(folder, folder / "qwen2", **{"model.dtype": "bfloat16", "optimizer.learning_rate": 1e-3})
    result = {"difference": pair.difference(pair.ask())}
    pair.update(pair.ask())
    result["passes"] = [stopped(pair, lambda: None)]
    with torch.no_grad():
        pair.model.get_parameter(LAYER).mul_(-1)
    result["left out"] = stopped(pair, lambda: without(pair, LAYER))
    pair.close()
    return result


def without(pair: Pair, name: str) -> None:
    """A stream that lacks a tensor."""
    whole = pair.inner.weights
    pair.inner.weights = lambda: ((key, value) for key, value in whole() if key != name)


def stopped(pair: Pair, spoil: Callable[[], None]) -> str:
    """What a sync says when something was spoiled; the next one, as it should be, passes."""
    sync, weights = pair.inner.sync_weights, pair.inner.weights
    try:
        spoil()
        pair.engine.sync_weights()
        return ""
    except TrainingStopped as error:
        return str(error)
    finally:
        pair.inner.sync_weights, pair.inner.weights = sync, weights


def case_cached(folder: Path) -> dict:
    """t12: a prompt of which two blocks are in the prefix cache, before and after an update."""
    pair, hits = Pair(folder, folder / "llama"), []
    step = pair.inner.engine.step

    def noting():
        outputs = step()
        hits.extend(output.num_cached_tokens for output in outputs if output.finished)
        return outputs

    pair.inner.engine.step = noting
    long = {"prompts": PROMPTS[-1:]}
    before, again = pair.ask(**long), pair.ask(**long)
    pair.update(before)
    moved = pair.difference(before)
    pair.engine.sync_weights()
    after = pair.ask(**long)
    result = {"hits": hits, "moved": moved, "before and after": [pair.difference(after)]}
    result["again"] = plain(before) == plain(again)
    # What it is that the reset prevents.
    pair.inner.llm.reset_prefix_cache = lambda: True
    pair.update(after)
    pair.inner.sync_weights()
    result["without reset"] = pair.difference(pair.ask(**long))
    del pair.inner.llm.reset_prefix_cache
    pair.engine.sync_weights()
    result["reset"] = pair.difference(pair.ask(**long))
    pair.close()
    return result


def case_proof(folder: Path) -> dict:
    pair = Pair(folder, folder / "qwen2", **{"optimizer.learning_rate": 1e-3})
    answers, weights = pair.ask(), pair.inner.weights
    original = pair.model.get_parameter(LAYER).detach().clone()

    def perturb() -> None:
        pair.inner.weights = lambda: (
            (name, value * (1.01 if name == LAYER else 1.0)) for name, value in weights()
        )

    result = {"passes": [stopped(pair, lambda: None)], "perturbed": stopped(pair, perturb)}
    result["passes"].append(stopped(pair, lambda: None))
    pair.update(answers)
    change = (pair.model.get_parameter(LAYER) - original).abs().max().item()
    result["not updated"] = stopped(pair, lambda: setattr(pair.inner, "sync_weights", lambda: None))
    result["passes"].append(stopped(pair, lambda: None))
    pair.update(answers)
    result["left out"] = stopped(pair, lambda: without(pair, LAYER))
    result["passes"].append(stopped(pair, lambda: None))
    pair.close()
    return result | {"change": change}


def case_tied_head(folder: Path) -> dict:
    """Left out from the beginning, and from the second sync on."""
    tied_head = dapo.rollout.build.tied_head
    dapo.rollout.build.tied_head = lambda policy: iter(())
    try:
        Pair(folder, folder / "llama")
        said = ""
    except TrainingStopped as error:
        said = str(error)
    dapo.rollout.build.tied_head = tied_head
    pair = Pair(folder, folder / "llama", **{"optimizer.learning_rate": 1e-3})
    pair.update(pair.ask())
    result = {"never": said, "once": stopped(pair, lambda: without(pair, "lm_head.weight"))}
    result["passes"] = [stopped(pair, lambda: None)]
    pair.close()
    return result


def serve(functions: Mapping[str, Any]) -> None:
    """Runs the cases that the command line names."""
    torch.set_num_threads(1)
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for name in names:
        started = time.perf_counter()
        try:
            result = functions[f"case_{name}"](folder)
        except Exception:
            (folder / f"{name}.error").write_text(traceback.format_exc())
            continue
        result["seconds"] = time.perf_counter() - started
        (folder / f"{name}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    serve(globals())
