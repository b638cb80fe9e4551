"""Memory that did not suffice, as one line that says what to change."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator

import torch

from .batching import MicroBatch
from .config import Config
from .errors import TrainingStopped
from .parallel import World

SAYS_SO = re.compile(
    r"out of memory|DefaultCPUAllocator: (can't allocate|not enough) memory|STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
SIZE = r"([\d.]+ \w*B)"


class OutOfMemory(TrainingStopped):
    """With what did not fit, and what to change."""

    kind = "out of memory"
    """Processes that run out together say the same, whatever their numbers are."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is that of an allocator, of the GPU's or the host's memory."""
    if isinstance(error, TrainingStopped):
        return False
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(SAYS_SO.search(str(error)))


def without_advice(error: BaseException, place: str) -> OutOfMemory:
    """What to say of memory that ended at a place that nothing better is known of."""
    return OutOfMemory(f"out of memory in {place}{_numbers(error)}")


@contextlib.contextmanager
def micro_batch_advice(batch: MicroBatch, config: Config, world: World) -> Iterator[None]:
    """Around what is computed of one micro-batch of the update.

    Raises:
        OutOfMemory: it did not fit; with what the micro-batch was, and what would be smaller.
    """

    def advice() -> tuple[str, list[str]]:
        tokens = batch.input_ids.numel()
        lengths = [sample.length for sample in batch.samples] or [tokens]
        padded = "" if batch.lengths is not None else ", padding included"
        count = f"{len(lengths)} sequences" if len(lengths) > 1 else "one sequence"
        what = (
            f"a micro-batch of {tokens} tokens ({count}, the longest of {max(lengths)}{padded}) does not fit"
        )
        return f"the update: {what}", [_fewer_tokens(batch, config), *_less_per_token(batch, config, world)]

    with _advising(advice, config, world):
        yield


@contextlib.contextmanager
def generation_advice(config: Config, sequences: int, phase: str, world: World) -> Iterator[None]:
    """Around the generation of so many sequences. Raises as `micro_batch_advice` does."""

    def advice() -> tuple[str, list[str]]:
        limit, longest = config.rollout.max_sequences, config.rollout.max_response_length
        at_once = min(sequences, limit)
        fewer = f"rollout.max_sequences={at_once // 2} (now {limit})" if at_once > 1 else ""
        what = f"{phase}: {at_once} sequences at a time, with responses of up to {longest} tokens, do not fit"
        return what, [fewer, f"a lower rollout.max_response_length (now {longest})"]

    with _advising(advice, config, world):
        yield


@contextlib.contextmanager
def optimizer_advice(config: Config, world: World) -> Iterator[None]:
    """Around an optimizer step, the first of which makes the optimizer's state. Raises as
    `micro_batch_advice` does."""

    def advice() -> tuple[str, list[str]]:
        lora = "lora.rank=16 (in a new run)" if config.lora.rank is None else ""
        return "the optimizer step: its state does not fit", [*_more_room(config, world), lora]

    with _advising(advice, config, world):
        yield


@contextlib.contextmanager
def _advising(advice: Callable[[], tuple[str, list[str]]], config: Config, world: World) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        what, changes = advice()
        tried = ", or ".join(change for change in changes if change)
        rank = f" on rank {world.rank}" if world.distributed else ""
        raise OutOfMemory(
            f"out of memory{rank} in {what}{_numbers(error)}. Try {tried}; `dapo train --resume "
            f"{config.run_dir} KEY=VALUE` goes on from the newest checkpoint"
        ) from None


def _fewer_tokens(batch: MicroBatch, config: Config) -> str:
    """Half of the tokens, but room for the longest sequence: nothing is gained below."""
    limit, tokens = config.train.max_tokens_per_micro_batch, batch.input_ids.numel()
    longest = max((sample.length for sample in batch.samples), default=tokens)
    fewer = max(tokens // 2, longest)
    return f"train.max_tokens_per_micro_batch={fewer} (now {limit})" if fewer < min(tokens, limit) else ""


def _less_per_token(batch: MicroBatch, config: Config, world: World) -> list[str]:
    changes = []
    if not config.train.gradient_checkpointing:
        changes.append("train.gradient_checkpointing=true")
    if not config.train.offload_activations and _on_gpu(world):
        changes.append("train.offload_activations=true")
    if batch.lengths is not None and _could_be_cut(config, world):
        alone = "" if world.distributed else " on two processes (torchrun)"
        changes.append(f"parallel.context=2{alone}")
    changes += _more_room(config, world)
    longest = config.rollout.max_response_length
    return changes or [f"more processes, or a lower rollout.max_response_length (now {longest})"]


def _could_be_cut(config: Config, world: World) -> bool:
    """Whether two processes could share each packed row."""
    algorithm, parallel = config.algorithm, config.parallel
    whole = algorithm.loss_reduction == "seq-mean-token-mean" or algorithm.ratio_level == "sequence"
    fits = not world.distributed or world.size % (2 * parallel.replicate) == 0
    return parallel.context == 1 and fits and not whole


def _more_room(config: Config, world: World) -> list[str]:
    """What is kept beside the activations, kept elsewhere."""
    if not world.distributed:
        return ["more processes (torchrun), which share the optimizer's state"]
    if config.parallel.offload or not _on_gpu(world):  # on CPUs it is in host memory anyway
        return ["more processes"]
    return ["parallel.offload=true", "more processes"]


def _on_gpu(world: World) -> bool:
    return world.device.type == "cuda"


def _numbers(error: BaseException) -> str:
    """What the allocator says of sizes, in the order asked for, free, total."""
    text = str(error)
    asked = re.search(rf"tried to allocate {SIZE}", text, re.IGNORECASE)
    counted = re.search(r"tried to allocate (\d+) bytes", text)
    room = re.search(rf"total capacity of {SIZE} of which {SIZE} is free", text)
    unused = re.search(rf"{SIZE} is reserved by PyTorch but unallocated", text)
    parts = []
    if counted:
        parts.append(f"asked for {int(counted[1]) / 2**30:.2f} GiB")
    elif asked:
        parts.append(f"asked for {asked[1]}")
    if room:
        parts.append(f"free {room[2]} of {room[1]}")
    if unused:
        parts.append(f"{unused[1]} in pieces too small")
    return f" ({', '.join(parts)})" if parts else ""
