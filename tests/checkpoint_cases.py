"""What test_checkpoint_store.py runs on several processes: `torchrun ... checkpoint_cases.py FOLDER CASE...`.

Rank 0 writes each case's result to FOLDER/CASE.json; a case that fails ends its process, and so all of them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from processes import serve_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from dapo.checkpoint import (
    BackgroundWriter,
    CheckpointFailed,
    DamagedCheckpoint,
    latest_checkpoint,
    open_checkpoint,
    saved_steps,
    write_checkpoint,
)
from dapo.config import ParallelConfig
from dapo.parallel import World, all_gather_objects, open_world

SHAPES = {"even": (8, 3), "uneven": (7, 5), "narrow": (1, 4), "long": (33,), "none": (0, 2)}


def values(seed: int = 0) -> dict[str, Tensor]:
    """The same on every call: fp32 and bf16 to be cut, and plain ones of all kinds."""
    generator = torch.Generator().manual_seed(seed)
    cut = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    cut |= {f"{name}.bf16": value.bfloat16() for name, value in cut.items()}
    plain = {
        "step": torch.tensor(seed + 3.0),
        "count": torch.arange(4) + seed,
        "flag": torch.tensor([True, False]),
        "bytes": torch.arange(256, dtype=torch.uint8),
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    }
    return cut | plain


def placed(tensors: dict[str, Tensor], mesh, *placements) -> dict[str, Tensor]:
    return {
        name: distribute_tensor(value, mesh, placements) if name.split(".")[0] in SHAPES else value.clone()
        for name, value in tensors.items()
    }


def blank(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.full_like(value, 1) for name, value in tensors.items()}


def bits(tensor: Tensor) -> bytes:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def same_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(bits(got[name]) == bits(want[name]) for name in want)


def loads(folder: Path, world: World, mesh, *placements) -> bool:
    """Whether the checkpoint holds `values()`, seen from every rank, in these placements."""
    got = placed(blank(values()), mesh, *placements)
    open_checkpoint(folder, world).load(got)
    return all(all_gather_objects(same_bits(got, values()), world))


def error_of(work, *kinds: type[Exception]) -> str:
    try:
        work()
    except kinds as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@contextmanager
def full_disk(this_rank: bool, calls: int = 0) -> Iterator[None]:
    """`os.fsync` fails, after so many calls."""
    real, left = os.fsync, [calls]

    def fsync(descriptor: int) -> None:
        if this_rank and left[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        real(descriptor)

    os.fsync = fsync
    try:
        yield
    finally:
        os.fsync = real


def case_round_trip(folder: Path, world: World) -> dict:
    mesh = init_device_mesh("cpu", (world.size,))
    path = write_checkpoint(
        folder / "shards",
        10,
        placed(values(), mesh, Shard(0)),
        {"rank": world.rank},
        {"rank": world.rank},
        world,
    )
    checkpoint = open_checkpoint(path, world)
    mine = placed(values(), mesh, Shard(0))
    return {
        "same": loads(path, world, mesh, Shard(0)),
        "whole": loads(path, world, mesh, Replicate()),
        "from one": loads(folder / "one" / "step_000001", world, mesh, Shard(0)),
        "state": checkpoint.state,
        "rank states": checkpoint.rank_states,
        "shapes": {name: list(shape) for name, shape in checkpoint.shapes.items()},
        "want shapes": {name: list(value.shape) for name, value in mine.items()},
        "files": sorted(os.listdir(path)),
        "refused": error_of(lambda: checkpoint.load({"even": mine["uneven"]}), ValueError),
    }


def case_fsdp(folder: Path, world: World) -> dict:
    """A model that FSDP2 cut, with its optimizer's state, into another one; training goes on alike."""

    def model(seed: int):
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        fully_shard(made, mesh=init_device_mesh("cpu", (world.size,)))
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
        step(made, optimizer)
        return made, optimizer

    def step(made, optimizer) -> None:
        made(torch.linspace(-1, 1, 20).view(4, 5)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def tensors(made, optimizer) -> dict[str, Tensor]:
        found = dict(made.state_dict())
        for name, parameter in made.named_parameters():
            found |= {f"optimizer.{name}.{key}": value for key, value in optimizer.state[parameter].items()}
        return found

    first, second = model(0), model(1)
    different = not same_bits(tensors(*first), tensors(*second))
    path = write_checkpoint(folder / "fsdp", 1, tensors(*first), {}, {}, world)
    open_checkpoint(path, world).load(tensors(*second))
    step(*first)
    step(*second)
    return {"different": different, "same": same_bits(tensors(*first), tensors(*second))}


def case_hsdp(folder: Path, world: World) -> dict:
    mesh = init_device_mesh("cpu", (2, world.size // 2))
    path = write_checkpoint(folder / "hsdp", 1, placed(values(), mesh, Replicate(), Shard(0)), {}, {}, world)
    sizes = [file.stat().st_size for file in sorted(path.glob("*.distcp"))]
    alone = folder / "one" / "step_000001" / "__0_0.distcp"
    return {
        "same": loads(path, world, mesh, Replicate(), Shard(0)),
        "shards": loads(path, world, mesh, Shard(0), Replicate()),
        "from one": loads(folder / "one" / "step_000001", world, mesh, Replicate(), Shard(0)),
        "sizes": sizes,
        "alone": alone.stat().st_size,
    }


def case_from_two(folder: Path, world: World) -> dict:
    """What two ranks saved, on more of them."""
    path = folder / "shards" / "step_000010"
    return {
        "shards": loads(path, world, init_device_mesh("cpu", (world.size,)), Shard(0)),
        "hsdp": loads(path, world, init_device_mesh("cpu", (2, 2)), Replicate(), Shard(0)),
    }


def case_failure(folder: Path, world: World) -> dict:
    root, mesh = folder / "failure", init_device_mesh("cpu", (world.size,))
    tensors = placed(values(), mesh, Shard(0))

    def write(step: int, **changes) -> None:
        arguments = {"state": {}, "rank_state": {}} | changes
        write_checkpoint(root, step, tensors, world=world, **arguments)

    write(1)
    errors = {}
    for name, rank, calls in (("rank 1", 1, 0), ("rank 0", 0, 0), ("metadata", 0, 1), ("manifest", 0, 4)):
        with full_disk(world.rank == rank, calls):
            errors[name] = error_of(lambda: write(2), CheckpointFailed)
    odd = {"state": object()} if world.rank == 1 else {}
    errors["not JSON"] = error_of(lambda: write(2, rank_state=odd), CheckpointFailed)
    dist.barrier()
    left = sorted(os.listdir(root))
    kept = latest_checkpoint(root, world).step
    with full_disk(world.rank == 1):
        errors["replacing"] = error_of(lambda: write(1, state={"new": 1}), CheckpointFailed)
    return {
        "errors": all_gather_objects(errors, world),
        "left": left,
        "kept": kept,
        "old": open_checkpoint(root / "step_000001", world).state,
        "loads": loads(root / "step_000001", world, mesh, Shard(0)),
    }


def case_damage(folder: Path, world: World) -> dict:
    root = folder / "damage"
    for step in (1, 2):
        path = write_checkpoint(root, step, {"a": torch.arange(3)}, {}, {}, world)
    dist.barrier()
    if world.is_main:
        (path / "ranks.json").write_bytes((path / "ranks.json").read_bytes()[::-1])
    dist.barrier()
    error = error_of(lambda: open_checkpoint(path, world), DamagedCheckpoint)
    step = latest_checkpoint(root, world).step
    nothing = latest_checkpoint(folder / "nowhere", world)
    return {"seen": all_gather_objects([error, step, nothing], world)}


def case_background(folder: Path, world: World) -> dict:
    root, mesh = folder / "background", init_device_mesh("cpu", (world.size,))
    tensors, done = placed(values(), mesh, Shard(0)), []
    writer = BackgroundWriter(root, world)
    for step in (1, 2):
        for name, value in placed(values(), mesh, Shard(0)).items():
            tensors[name].copy_(value)
        writer.save(step, tensors, {}, {}, done.append)
        for value in tensors.values():
            value.zero_()
        for _ in range(50):  # training's own collectives meanwhile
            dist.all_reduce(torch.ones(1))
    writer.wait()
    with full_disk(world.rank == 1):
        writer.save(3, tensors, {}, {})
        first = error_of(writer.wait, CheckpointFailed)
    second = error_of(writer.wait, CheckpointFailed)
    writer.save(4, tensors, {}, {})
    writer.close()
    return {
        "first": loads(root / "step_000001", world, mesh, Shard(0)),
        "second": loads(root / "step_000002", world, mesh, Shard(0)),
        "errors": all_gather_objects([first, second], world),
        "done": all_gather_objects([path.name for path in done], world),
        "steps": saved_steps(root),
    }


if __name__ == "__main__":
    serve_cases(globals(), open_world(ParallelConfig(timeout=60)))
