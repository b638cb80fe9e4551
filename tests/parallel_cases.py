"""What test_parallel.py runs on several processes: `torchrun ... tests/parallel_cases.py FOLDER CASE...`.

Rank 0 writes each case's result to FOLDER/CASE.json; a case that fails ends its process, and so all of them.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import torch
from processes import serve_cases
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from dapo.batching import TrainSample, make_micro_batches
from dapo.config import ParallelConfig
from dapo.model import Policy, checkpoint_activations
from dapo.parallel import (
    World,
    all_gather_objects,
    all_reduce_max,
    all_reduce_sum,
    clip_grad_norm,
    empty_model,
    full_state_dict,
    gather_objects,
    inference_copy,
    load_shards,
    open_world,
    refresh,
    same_on_all_ranks,
    shard_policy,
    split_across_ranks,
)
from dapo.parallel.world import arrange
from dapo_kernels import PolicyLossConfig

SIZES = {
    "vocab_size": 99,  # over two ranks: uneven
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
LENGTHS = [(3, 9), (5, 2), (1, 14), (4, 4), (2, 1), (6, 7), (3, 3)]  # prompt and response
LOSS = PolicyLossConfig(epsilon_low=0.2, epsilon_high=0.28)
MAX_TOKENS = 24
BIG = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3, "vocab_size": 8000}


def build(kind: str, **sizes) -> LlamaForCausalLM | Qwen2ForCausalLM:
    """The same weights on every call."""
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES | sizes, tie_word_embeddings=False)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**SIZES | sizes, tie_word_embeddings=True)).eval()


def samples() -> list[TrainSample]:
    """Unequal sequences with old log-probs near enough to the policy's that some tokens are clipped."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for prompt, response in LENGTHS:
        ids = torch.randint(3, 99, (prompt + response,), generator=generator).tolist()
        advantage = torch.randn((), generator=generator).item()
        old = torch.randn(response, generator=generator) * 0.3 - 5
        made.append(
            TrainSample(ids[:prompt], ids[prompt:], [0.0] * response, advantage, True, old_logprobs=old)
        )
    return made


def backward(policy: Policy, world: World, mine: list[TrainSample], total: int) -> None:
    """Gradients of the mean over `total` tokens of all ranks' samples, in as many micro-batches on each."""
    count = len(make_micro_batches(mine, MAX_TOKENS, world.device))
    count = int(all_reduce_max({"count": count}, world)["count"])
    for batch in make_micro_batches(mine, MAX_TOKENS, world.device, count=count):
        policy(batch, LOSS, total / world.data_size).loss.backward()


def whole_gradients(policy: Policy) -> dict[str, Tensor]:
    return {
        name: getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
        for name, p in policy.model.named_parameters()
    }


def difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """Relative L2 over all tensors, and of the worst one."""
    assert got.keys() == want.keys()
    each = {name: ((got[name] - value).norm(), value.norm()) for name, value in want.items()}
    error, norm = (torch.stack(values).norm() for values in zip(*each.values()))
    return {
        "all": (error / norm).item(),
        "worst": max((e / n.clamp(min=1e-30)).item() for e, n in each.values()),
    }


def adamw(policy: Policy) -> torch.optim.Optimizer:
    return torch.optim.AdamW(policy.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


def step_against_one_process(kind: str, config: ParallelConfig, world: World, **options) -> dict:
    """Two updates on shards and on one process: gradients, their norm, weights, log-probs of the copy."""
    share, checkpointed = options.get("share"), options.get("checkpointed", False)
    alone, model = Policy(build(kind)), build(kind)
    if checkpointed:
        checkpoint_activations(model)
    policy = shard_policy(Policy(model), config, world)
    batch = samples()
    total = sum(sample.num_loss_tokens for sample in batch)
    mine = share(batch, world) if share else split_across_ranks(batch, world, lambda s: s.length)
    whole_world = World(world.device)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    optimizers, parameters = [adamw(alone), adamw(policy)], list(policy.parameters())
    rollout_model = inference_copy(policy, config, world)
    for _ in range(2):
        backward(alone, whole_world, batch, total)
        backward(policy, world, mine, total)
        result = {"gradient": difference(whole_gradients(policy), whole_gradients(alone))}
        want = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5).item()
        result["norm"] = [clip_grad_norm(parameters, 0.5), want]
        result["clipped"] = difference(whole_gradients(policy), whole_gradients(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        refresh(rollout_model, policy)
    want = alone.model.state_dict()
    state = full_state_dict(policy, world)
    if world.is_main:
        result["weights"] = difference(state, want)
    result["copy"] = difference(rollout_model.state_dict(), want)
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        result["logits"] = (rollout_model(ids).logits - alone.model(ids).logits).abs().max().item()
    tokens = [
        m.generate(ids, max_new_tokens=4, do_sample=False).tolist() for m in (rollout_model, alone.model)
    ]
    result["generated"] = tokens[0] == tokens[1] and len(tokens[0][0]) > 10
    result["forwards"] = len(calls)
    result["tied"] = alone.model.config.tie_word_embeddings
    result["same norm"] = len(set(all_gather_objects(result["norm"][0], world))) == 1
    return result


def case_llama(folder: Path, world: World) -> dict:
    return step_against_one_process("llama", ParallelConfig(), world)


def case_qwen2_tied(folder: Path, world: World) -> dict:
    return step_against_one_process("qwen2", ParallelConfig(offload=True), world)


def case_checkpointed(folder: Path, world: World) -> dict:
    return step_against_one_process("llama", ParallelConfig(), world, checkpointed=True)


def case_no_samples(folder: Path, world: World) -> dict:
    """One rank holds everything, the other nothing."""
    return step_against_one_process(
        "llama", ParallelConfig(), world, share=lambda batch, world: batch if world.data_rank == 0 else []
    )


def on_another_mesh(world: World, **options) -> dict:
    config = ParallelConfig(**options)
    world = arrange(config, world.device)
    result = step_against_one_process("qwen2", config, world)
    return result | {"mesh": list(world.mesh.shape), "data_size": world.data_size}


def case_replicate(folder: Path, world: World) -> dict:
    return on_another_mesh(world, replicate=2)


def case_context(folder: Path, world: World) -> dict:
    return on_another_mesh(world, context=2)


class Gathers(TorchDispatchMode):
    """Elements of each all-gather."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.c10d._allgather_base_.default:  # what FSDP calls; its output comes first
            self.sizes.append(args[0].numel())
        return func(*args, **kwargs or {})


def case_gathers(folder: Path, world: World) -> dict:
    result = {}
    for kind in ("llama", "qwen2"):
        model = build(kind, vocab_size=1000)  # the head is larger than a block
        head = model.get_output_embeddings().weight.numel()
        policy = shard_policy(Policy(model), ParallelConfig(), world)
        (batch,) = make_micro_batches(samples(), 1000, world.device)
        with Gathers() as seen:
            policy(batch, LOSS, 1.0).loss.backward()
        result[kind] = {"all": len(seen.sizes), "of the head": sum(size >= head for size in seen.sizes)}
    return result


def case_mixed_precision(folder: Path, world: World) -> dict:
    """bf16 parameters in the forward, fp32 ones in the optimizer, fp32 sums of gradients."""
    config = ParallelConfig(param_dtype="bfloat16")
    policy = shard_policy(Policy(build("llama")), config, world)
    seen = {}
    head, decoder = policy.model.get_output_embeddings(), policy.model.model
    decoder.layers[0].mlp.register_forward_hook(lambda m, a, out: seen.update(hidden=out.dtype))
    decoder.norm.register_forward_hook(lambda m, a, out: seen.update(head=head.weight.dtype))
    batch = samples()
    total = sum(sample.num_loss_tokens for sample in batch)
    backward(policy, world, split_across_ranks(batch, world), total)
    rounded = Policy(build("llama").bfloat16())
    backward(rounded, World(world.device), batch, total)
    rollout_model = inference_copy(policy, config, world)
    refresh(rollout_model, policy)
    want = {name: value.bfloat16() for name, value in build("llama").state_dict().items()}
    copied = rollout_model.state_dict()
    return {
        "gradient": difference(whole_gradients(policy), whole_gradients(rounded)),
        "dtypes": [str(seen["hidden"]), str(seen["head"]), str(next(policy.parameters()).grad.dtype)],
        "copy": all(torch.equal(copied[name], value) for name, value in want.items()),
    }


def case_loading(folder: Path, world: World) -> dict:
    """Folders that `folder_of_weights` wrote, loaded in shards and plainly."""
    result = {}
    for name in ("llama", "qwen2", "split", "bfloat16"):
        model = empty_model(folder / name, torch.float32)
        policy = shard_policy(Policy(model), ParallelConfig(), world)
        load_shards(policy, folder / name, world.device)
        plain = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        parameters, whole = dict(model.named_parameters()), dict(plain.named_parameters())
        buffers, want = dict(model.named_buffers()), dict(plain.named_buffers())
        result[name] = {
            "names": list(parameters) == list(whole),
            "parameters": all(torch.equal(parameters[k].full_tensor(), whole[k]) for k in whole),
            "buffers": buffers.keys() == want.keys() and all(torch.equal(buffers[k], want[k]) for k in want),
            "generation": model.generation_config.to_dict() == plain.generation_config.to_dict(),
            "training": model.training,
        }
        backward(policy, world, split_across_ranks(samples(), world), 40)
        backward(Policy(plain), World(world.device), samples(), 40)
        result[name]["gradient"] = difference(whole_gradients(policy), whole_gradients(Policy(plain)))
    return result


class AnonymousMemory(threading.Thread):
    """The most anonymous memory (bytes) over that at the start: pages of mapped files do not count."""

    def __enter__(self):
        self.ending, self.first, self.peak = threading.Event(), self.now(), 0
        self.start()
        return self

    def run(self):
        while not self.ending.wait(0.001):
            self.peak = max(self.peak, self.now() - self.first)

    def __exit__(self, *_):
        self.peak = max(self.peak, self.now() - self.first)
        self.ending.set()
        self.join()

    @staticmethod
    def now() -> int:
        status = Path("/proc/self/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def case_memory(folder: Path, world: World) -> dict:
    with AnonymousMemory() as sharded:
        model = empty_model(folder / "big", torch.float32)
        policy = shard_policy(Policy(model), ParallelConfig(), world)
        load_shards(policy, folder / "big", world.device)
    with AnonymousMemory() as plain:
        whole = AutoModelForCausalLM.from_pretrained(folder / "big", dtype=torch.float32)
        whole = copy.deepcopy(whole)  # from_pretrained may leave the weights mapped to the file
    size = sum(p.numel() * 4 for p in whole.parameters())
    peaks = all_gather_objects(sharded.peak, world)
    return {"size": size, "sharded": max(peaks), "plain": plain.peak}


def case_helpers(folder: Path, world: World) -> dict:
    r = world.rank
    costs = [9, 1, 1, 1, 5, 1]
    result = {
        "sum": all_reduce_sum({"b": 1e12 if r == 0 else 1, "a": torch.tensor(r + 0.25)}, world),
        "max": all_reduce_max({"x": -3.0 - r, "y": r}, world),
        "same": all_gather_objects(same_on_all_ranks({"stop": r == 0}, world), world),
        "parts": all_gather_objects(split_across_ranks(list(range(7)), world), world),
        "few": all_gather_objects(split_across_ranks(["only"], world), world),
        "by cost": all_gather_objects(split_across_ranks(costs, world, float), world),
        "gathered": gather_objects(f"rank {r}", world),
    }
    assert (result["gathered"] is None) == (r != 0)
    try:
        all_reduce_sum({f"name {r}": 1.0}, world)
    except RuntimeError as error:
        result["error"] = str(error)
    return result


def case_save(folder: Path, world: World) -> dict:
    for kind in ("llama", "qwen2"):
        policy = shard_policy(Policy(build(kind)), ParallelConfig(), world)
        (batch,) = make_micro_batches(samples(), 1000, world.device)
        with torch.no_grad():
            policy(batch, LOSS, 1.0)  # leaves the root gathered
        state = full_state_dict(policy, world)
        if world.is_main:
            policy.model.save_pretrained(folder / f"saved_{kind}", state_dict=state)
    return {}


def case_stale(folder: Path, world: World) -> dict:
    """Weights change while a forward without backward has left the root gathered."""
    policy = shard_policy(Policy(build("llama")), ParallelConfig(), world)
    shards = list(policy.parameters())
    rollout_model = inference_copy(policy, ParallelConfig(), world)
    (batch,) = make_micro_batches(samples(), 1000, world.device)
    with torch.no_grad():
        policy(batch, LOSS, 1.0)
        for shard in shards:
            shard.mul_(2)
    refresh(rollout_model, policy)
    want = {name: value * 2 for name, value in build("llama").state_dict().items()}
    return {"copy": difference(rollout_model.state_dict(), want)}


if __name__ == "__main__":
    serve_cases(globals(), open_world(ParallelConfig(timeout=60)))
