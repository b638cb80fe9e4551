"""Memory that does not suffice ends a run with one line of advice; what was saved stays whole."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import tiny_config
from update_cases import groups_of

from dapo.batching import make_micro_batches
from dapo.checkpoint import saved_steps
from dapo.cli import main
from dapo.errors import TrainingStopped
from dapo.loss_inputs import train_samples
from dapo.memory_advice import OutOfMemory, is_out_of_memory, micro_batch_advice
from dapo.model import Policy
from dapo.parallel import World
from dapo.rollout import HFEngine
from dapo.update import Updater

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.25 "
    "GiB is free. Including non-PyTorch memory, this process has 77.80 GiB memory in use. Of the allocated "
    "memory 70.01 GiB is allocated by PyTorch, and 6.50 GiB is reserved by PyTorch but unallocated."
)


def run_out(*args, **kwargs):
    raise torch.OutOfMemoryError(CUDA)


def really_run_out(*args, **kwargs):
    return torch.empty(1 << 50, dtype=torch.uint8)  # a petabyte of address space: no machine grants it


def message(updater: Updater, model, packed: bool = True) -> str:
    updater.policy.packed = packed
    with pytest.raises(TrainingStopped) as caught:
        updater.run(groups_of(model), step=1)
    return str(caught.value)


def test_a_micro_batch_that_does_not_fit_says_what_to_change(make, model, monkeypatch) -> None:
    updater = make(**{"train.max_tokens_per_micro_batch": 24})
    monkeypatch.setattr(Policy, "forward", run_out)
    text = message(updater, model)
    # Twelve sequences of 5 to 12 tokens: 88 in all, cut into at least four micro-batches.
    assert text.startswith("out of memory in the update: a micro-batch of 2")
    assert "the longest of 12)" in text and "rank" not in text
    assert "asked for 2.00 GiB, free 1.25 GiB of 79.10 GiB, 6.50 GiB in pieces too small" in text
    assert "train.max_tokens_per_micro_batch=12 (now 24)" in text
    assert "train.gradient_checkpointing=true" in text and "parallel.context=2 on two processes" in text
    assert "`dapo train --resume" in text and "\n" not in text
    assert "offload" not in text  # of no effect on CPUs


def test_fewer_tokens_are_never_fewer_than_the_longest_sequence(make, model, monkeypatch) -> None:
    monkeypatch.setattr(Policy, "forward", run_out)
    assert "train.max_tokens_per_micro_batch=12 (now 18)" in message(
        make(**{"train.max_tokens_per_micro_batch": 18}), model
    )
    alone = message(make(**{"train.max_tokens_per_micro_batch": 9}), model)
    assert "one sequence, the longest of 12)" in alone  # half of it could not be
    assert "max_tokens_per_micro_batch" not in alone


def test_what_is_on_is_not_advised(make, model, monkeypatch) -> None:
    monkeypatch.setattr(Policy, "forward", run_out)
    options = {"train.gradient_checkpointing": True, "algorithm.reduction": "seq-mean-token-mean"}
    text = message(make(**options), model)
    assert "gradient_checkpointing" not in text and "parallel.context" not in text
    text = message(make(), model, packed=False)
    assert "padding included)" in text and "parallel.context" not in text


@pytest.mark.parametrize("size", [2, 3])
def test_on_many_gpus_it_names_the_rank_and_what_goes_to_the_host(make, model, size: int) -> None:
    config = make().config
    (batch,) = make_micro_batches(
        train_samples(groups_of(model), 1, config.algorithm)[0], 64, torch.device("cpu")
    )
    world = World(torch.device("cuda"), rank=1, size=size)
    with pytest.raises(OutOfMemory) as caught, micro_batch_advice(batch, config, world):
        run_out()
    text = str(caught.value)
    assert "out of memory on rank 1 in the update" in text
    assert "train.offload_activations=true" in text and "parallel.offload=true" in text
    with (
        pytest.raises(OutOfMemory) as caught,
        micro_batch_advice(replace(batch, lengths=(9,)), config, world),
    ):
        run_out()
    assert ("parallel.context=2" in str(caught.value)) == (size == 2)  # it must divide the processes


@pytest.mark.parametrize("where", ["scoring", "backward", "optimizer"])
def test_other_places_of_the_update(make, model, monkeypatch, where: str) -> None:
    updater = make(**{"algorithm.num_iterations": 2} if where == "scoring" else {})
    if where == "scoring":  # the first forward is of the old log-probs
        monkeypatch.setattr(Policy, "forward", really_run_out)
    elif where == "backward":
        monkeypatch.setattr(torch.Tensor, "backward", really_run_out)
    else:
        updater.optimizer.step = really_run_out
    text = message(updater, model)
    assert "asked for 1048576.00 GiB)" in text and "more processes" in text
    assert ("a micro-batch of" in text) == (where != "optimizer")
    assert ("lora.rank" in text) == (where == "optimizer")


def test_other_errors_pass(make, model, monkeypatch) -> None:
    def wrong(*args, **kwargs):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(Policy, "forward", wrong)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        make().run(groups_of(model), step=1)


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory: ..."
            ),
            True,
        ),
        (
            RuntimeError(
                "[...] data. DefaultCPUAllocator: not enough memory: you tried to allocate 5 bytes."
            ),
            True,
        ),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("out of resource: shared memory, Required: 1, Hardware limit: 0"), False),
        (TrainingStopped("out of memory in the update"), False),
        (OSError(12, "Cannot allocate memory"), False),
    ],
)
def test_errors_of_allocators_are_known(error: Exception, memory: bool) -> None:
    assert is_out_of_memory(error) is memory


@pytest.mark.parametrize("what", ["generation", "evaluation"])
def test_sequences_that_do_not_fit_say_how_many_to_try(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch, capsys, what: str
) -> None:
    options = {"rollout.max_sequences": 7}
    if what == "evaluation":
        held_out = tmp_path / "held_out.jsonl"
        held_out.write_text(json.dumps({"prompt": "1*1=", "answer": ""}) + "\n")
        options |= {"data.eval": {"source": str(held_out)}}
    config = str(tiny_config(tmp_path, tiny_model_dir, **options))

    def no_memory(*args):
        raise MemoryError

    monkeypatch.setattr(HFEngine, "_generate_batch", no_memory)
    assert main(["train", config]) == 1
    error = capsys.readouterr().err
    count, fewer = (7, 3) if what == "generation" else (3, 1)
    assert f"out of memory in {what}: {count} sequences at a time" in error and error.count("\n") == 1
    assert f"rollout.max_sequences={fewer} (now 7)" in error and "max_response_length (now 5)" in error


def test_earlier_checkpoints_are_whole_and_the_advice_works(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch, capsys
) -> None:
    """From the second step on memory suffices for 45 tokens at a time only."""
    options = {"checkpoint": {"every": 1}, "train.steps": 3, "train.max_tokens_per_micro_batch": 128}
    config = str(tiny_config(tmp_path, tiny_model_dir, **options))
    run, forward, update = tmp_path / "run", Policy.forward, Updater.run
    room = {1: 1 << 30, 2: 45, 3: 45}

    def run_update(self, groups, step):
        monkeypatch.setattr(
            Policy, "forward", lambda self, batch, *rest: limited(self, batch, room[step], *rest)
        )
        return update(self, groups, step)

    def limited(self, batch, tokens, *rest):
        return run_out() if batch.input_ids.numel() > tokens else forward(self, batch, *rest)

    monkeypatch.setattr(Updater, "run", run_update)
    assert main(["train", config]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and saved_steps(run / "checkpoints") == [1]
    (advised,) = re.findall(r"train.max_tokens_per_micro_batch=\d+", error)
    assert main(["train", "--resume", str(run), advised]) == 0
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
