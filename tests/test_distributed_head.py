"""Heads on two processes (gloo): cut by vocabulary (K20), and DTensors of a data-parallel mesh."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from loss_cases import OPTIONS, make_case, run
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dapo_kernels import fused_linear_logprobs, fused_linear_policy_loss

WORLD, V = 2, 54


def shard_of(case, rank: int):
    rows = slice(rank * V // WORLD, (rank + 1) * V // WORLD)
    return replace(case, weight=case.weight[rows], bias=case.bias[rows])


def cases():
    for name, options in OPTIONS.items():
        yield name, make_case(vocab=V, **options)
    banned = make_case(vocab=V, entropy_coef=0.2)
    banned.bias[: V // 2] = -torch.inf  # a whole shard has no chance
    banned.targets = banned.targets % (V // 2) + V // 2
    banned.old_logprobs = None
    yield "banned shard", banned
    yield "far apart", replace(make_case(vocab=V), bias=torch.linspace(-400, 400, V, dtype=torch.float64))


def policy_loss_result(case, group=None, hidden_grad="complete", **extra):
    """Everything that the loss returns and its gradients."""
    extra |= {} if group is None else {"vocab_group": group, "hidden_grad": hidden_grad}
    result = run(fused_linear_policy_loss, case, chunk_tokens=7, **extra)
    return result.quantities()


def logprobs_result(case, group=None, **extra):
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    extra |= {"mask": case.mask, "bias": case.bias, "chunk_tokens": 7, "vocab_group": group}
    output = fused_linear_logprobs(hidden, weight, case.targets, **extra)
    (output.logprobs.tanh().sum() + (output.entropy**2).sum()).backward()
    named = {"logprobs": output.logprobs.detach(), "entropy": output.entropy.detach()}
    return named | {"grad.hidden": hidden.grad, "grad.weight": weight.grad}


def compare(name: str, sharded: dict, whole: dict, rank: int, rtol: float = 1e-9) -> None:
    rows = slice(rank * V // WORLD, (rank + 1) * V // WORLD)
    for key, want in whole.items():
        want = want[rows] if key in ("grad.weight", "grad.bias") else want
        torch.testing.assert_close(
            sharded[key], want, rtol=rtol, atol=rtol / 100, msg=lambda text, key=key: f"{name} {key}: {text}"
        )


def worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    group = dist.group.WORLD
    for name, case in cases():
        compare(name, policy_loss_result(shard_of(case, rank), group), policy_loss_result(case), rank)
    case = make_case(vocab=V)
    compare("logprobs", logprobs_result(shard_of(case, rank), group), logprobs_result(case), rank)
    _triton_kernels_on_shards(group, rank)

    partial = policy_loss_result(shard_of(case, rank), group, "partial")["grad.hidden"]
    dist.all_reduce(partial)
    torch.testing.assert_close(partial, policy_loss_result(case)["grad.hidden"], rtol=1e-9, atol=1e-11)
    _wrong_targets_are_refused_on_every_rank(case, group, rank)
    dist.destroy_process_group()


def _triton_kernels_on_shards(group, rank: int) -> None:
    """K20 for the row kernels: interpreted, in fp32."""
    if find_spec("triton") is None:
        return
    for name in ("clip", "entropy_softcap", "sequence"):
        case = make_case(vocab=V, dtype=torch.float32, **OPTIONS[name])
        truth = policy_loss_result(case.to(torch.float64))
        sharded = policy_loss_result(shard_of(case, rank), group, backend="triton")
        compare(f"triton {name}", {k: v.double() for k, v in sharded.items()}, truth, rank, 1e-4)
    case = make_case(vocab=V, dtype=torch.float32)
    sharded = logprobs_result(shard_of(case, rank), group, backend="triton")
    compare("triton logprobs", sharded, logprobs_result(case), rank, 1e-4)


def _wrong_targets_are_refused_on_every_rank(case, group, rank: int) -> None:
    case = replace(shard_of(case, rank), targets=torch.full_like(case.targets, V), mask=torch.ones(5, 7))
    with pytest.raises(ValueError, match=rf"targets must be in \[0, {V}\)"):
        run(fused_linear_policy_loss, case, vocab_group=group)


def test_k20_sharded_head_gives_what_the_whole_head_gives(tmp_path):
    mp.spawn(worker, (str(tmp_path / "store"),), nprocs=WORLD)


def data_parallel_worker(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    mine, other = (make_case(vocab=V + 1, seed=seed) for seed in (rank, 1 - rank))  # an uneven cut
    weight, bias = make_case(vocab=V + 1).weight, make_case(vocab=V + 1).bias
    want = [policy_loss_result(replace(case, weight=weight, bias=bias)) for case in (mine, other)]
    for placement in (Shard(0), Replicate()):
        head = [distribute_tensor(value, mesh, [placement]).requires_grad_() for value in (weight, bias)]
        hidden = mine.hidden.clone().requires_grad_()
        arguments = mine.arguments() | {"hidden": hidden, "weight": head[0], "bias": head[1]}
        loss = fused_linear_policy_loss(**arguments).loss
        loss.backward()
        torch.testing.assert_close(loss.detach(), want[0]["loss"])
        torch.testing.assert_close(hidden.grad, want[0]["grad.hidden"])
        for name, value in zip(("weight", "bias"), head):
            assert value.grad.placements == value.placements
            average = (want[0][f"grad.{name}"] + want[1][f"grad.{name}"]) / 2
            torch.testing.assert_close(value.grad.full_tensor(), average)
    dist.destroy_process_group()


def test_dtensor_head_is_gathered_and_its_gradient_averaged_in_place(tmp_path):
    mp.spawn(data_parallel_worker, (str(tmp_path / "store"),), nprocs=WORLD)


def test_hidden_grad_is_checked():
    case = make_case()
    with pytest.raises(ValueError, match="hidden_grad must be 'complete' or 'partial', got 'none'"):
        run(fused_linear_policy_loss, case, hidden_grad="none")
