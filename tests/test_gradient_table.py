"""The trainer's gradient does not depend on how a batch is cut: into micro-batches, padded or packed, and
over processes that share the parameters, hold copies of them, or share each sequence. Every row of the table
is one cut, held against the whole batch on one process and against the definition in fp64.

`gradient_table_cases.py` makes the rows; those of two processes are one `torchrun`.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gradient_table_cases import (
    LENGTHS,
    REDUCTIONS,
    REFERENCE,
    ROWS,
    UNTRAINED,
    WITHOUT_LOGPROBS,
    Row,
    qwen2,
    samples,
    updates,
)
from parallel_cases import LOSS, difference
from processes import TESTS, environment, shared_launch, torchrun
from update_cases import TEMPERATURE

from dapo.parallel import World, split_across_ranks
from dapo_kernels.reference import linear_policy_loss

CPU = torch.device("cpu")
LIVE = len(LENGTHS) - 2  # samples with tokens in the loss


@pytest.fixture(scope="module")
def true() -> dict[str, dict]:
    """By reduction: the gradient, the loss and its metrics, one sequence after another, in fp64 (norms and
    rotations, which transformers computes in fp32, apart)."""
    model, batch, results = qwen2().double(), samples(), {}
    for reduction in REDUCTIONS:
        hidden = []
        for sample in batch:
            ids = torch.tensor([sample.prompt_ids + sample.response_ids])
            states = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0]
            hidden.append(states[len(sample.prompt_ids) - 1 : -1])  # [R, H]
        lengths = torch.tensor([len(sample.response_ids) for sample in batch])
        kept = [[sample.trained and not math.isnan(x) for x in sample.rollout_logprobs] for sample in batch]
        output = linear_policy_loss(
            torch.cat(hidden),  # [N, H]
            model.get_output_embeddings().weight,
            torch.tensor([token for sample in batch for token in sample.response_ids]),
            torch.tensor([sample.advantage for sample in batch]).repeat_interleave(lengths),
            torch.tensor([token for tokens in kept for token in tokens]),
            torch.cat([sample.old_logprobs for sample in batch]),
            sequence_ids=torch.arange(len(batch)).repeat_interleave(lengths),
            config=replace(LOSS, reduction=reduction, temperature=TEMPERATURE),
        )
        model.zero_grad()
        output.loss.backward()
        gradient = {name: parameter.grad for name, parameter in model.named_parameters()}
        results[reduction] = {"gradient": gradient, "loss": output.loss.item(), "metrics": output.metrics}
    return results


@pytest.fixture(scope="module")
def results_of(tmp_path_factory) -> Callable[[Row], dict[str, dict]]:
    """What `updates` returns, of a row made when it is asked for."""
    known: dict[str, dict] = {}

    def launch(folder: Path) -> dict[str, str]:
        command = torchrun(2, str(TESTS / "gradient_table_cases.py"), str(folder))
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
        return {"stderr": done.stderr[-6000:]}

    def made(row: Row) -> dict[str, dict]:
        if row.processes == 1:
            return updates(row, samples(), tmp_path_factory.mktemp(row.name), World(CPU))
        launched, folder = shared_launch(tmp_path_factory, "gradient_table", launch)
        path = folder / f"{row.name}.pt"
        assert path.exists(), f"{row.name} did not come to its end: {launched['stderr']}"
        return torch.load(path)

    def results(row: Row) -> dict[str, dict]:
        if row.name not in known:
            known[row.name] = made(row)
        return known[row.name]

    return results


def test_the_batch_is_one_that_could_go_wrong(true) -> None:
    """Clipped on both sides, with tokens and whole sequences that are not in the loss, and of two shares
    neither has half of the tokens or half of the sequences."""
    metrics, batch = true["token-mean"]["metrics"], samples()
    lengths = sorted(sample.length for sample in batch)
    assert (lengths[0], lengths[-1]) == (3, 400)
    assert min(metrics["clip_frac_low"], metrics["clip_frac_high"]) > 0.05
    responses = [len(sample.response_ids) for sample in batch]
    assert metrics["num_tokens"] == sum(responses) - responses[UNTRAINED] - responses[WITHOUT_LOGPROBS] - 21
    worlds = [World(CPU, rank=rank, size=2) for rank in range(2)]
    shares = [split_across_ranks(batch, world, lambda sample: sample.length) for world in worlds]
    tokens = [[sample.num_loss_tokens for sample in share] for share in shares]
    assert abs(sum(tokens[0]) - sum(tokens[1])) > 100
    assert abs(tokens[0].count(0) - tokens[1].count(0)) == 2


@pytest.mark.parametrize(
    ("row", "reduction"),
    [pytest.param(row, each, id=f"{row.name}-{each}") for row in ROWS for each in row.reductions],
)
def test_gradient_is_that_of_the_whole_batch(true, results_of, row: Row, reduction: str) -> None:
    result, want = results_of(row)[reduction], true[reduction]
    for name, gradient in (
        ("one process", results_of(REFERENCE)[reduction]["gradient"]),
        ("fp64", want["gradient"]),
    ):
        off = difference(result["gradient"], gradient)
        assert off["all"] <= 1e-5, name
        assert off["worst"] <= 3e-5, name
    assert result["loss"] == pytest.approx(want["loss"], rel=1e-5, abs=1e-6)
    shares = 1 if row.mesh == "context" else row.processes
    assert [len(share) for share in result["forwards"]] == [row.micro_batches] * shares
    assert sum(map(sum, result["forwards"])) == LIVE
