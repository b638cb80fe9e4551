"""What test_context.py runs on several processes: `torchrun ... tests/context_cases.py FOLDER CASE...`.

Most compare rows that processes share with the same rows on one process. Rank 0 writes each case's result to
FOLDER/CASE.json; a case that fails ends its process, and torchrun ends the others.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from parallel_cases import SIZES, build, difference, whole_gradients
from processes import serve_cases
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from dapo.batching import TrainSample, make_micro_batches, micro_batch_count
from dapo.config import ParallelConfig
from dapo.errors import UserError
from dapo.model import Policy, checkpoint_activations
from dapo.parallel import (
    World,
    all_gather_objects,
    all_reduce_max,
    all_reduce_sum,
    open_world,
    shard_policy,
    split_across_ranks,
)
from dapo.parallel.context import ContextGroup, share_sequences
from dapo.parallel.world import arrange
from dapo_kernels import PolicyLossConfig

# Prompt and response. 56 + 4 fill a row alone, of which the first process has nothing in the loss.
LENGTHS = [(1, 2), (20, 40), (3, 14), (56, 4), (2, 3), (7, 31), (11, 22), (4, 5), (1, 28)]
MAX_TOKENS = 60
LOSS = PolicyLossConfig(kl_coef=0.1, entropy_coef=0.01, dual_clip=1.5)


def mistral() -> MistralForCausalLM:
    """Local attention, over 6 tokens."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=6)).eval()


def samples() -> list[TrainSample]:
    """Off policy, with reference log-probs and token weights, and with tokens that are not in the loss."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for prompt, response in LENGTHS:
        ids = torch.randint(3, 99, (prompt + response,), generator=generator).tolist()
        noise = torch.randn(4, response, generator=generator)
        sample = TrainSample(ids[:prompt], ids[prompt:], [0.0] * response, noise[0, 0].item(), True)
        sample.old_logprobs, sample.ref_logprobs = 0.3 * noise[1] - 5, 0.3 * noise[2] - 5
        sample.token_weights = noise[3].exp()
        made.append(sample)
    made[1].rollout_logprobs[10:20] = [float("nan")] * 10
    return made


def run(policy: Policy, world: World, mine: list[TrainSample], total: float, loss=LOSS) -> dict:
    """Gradients are left in the policy; the loss, the sums and each sample's log-probs are returned."""
    count = micro_batch_count(mine, MAX_TOKENS, packed=True) + 1  # the last one has no samples
    count = int(all_reduce_max({"count": count}, world)["count"])
    losses, sums, logprobs = 0.0, {}, {}
    for batch in make_micro_batches(mine, MAX_TOKENS, world.device, packed=True, count=count):
        output = policy(batch, loss, total / world.data_size)
        output.loss.backward()
        losses += output.loss.item()
        for name, value in output.sums.items():
            add = max if name == "ratio_max" else float.__add__
            sums[name] = add(sums.get(name, 0.0), value.item())
        for sample, values in zip(batch.samples, batch.split(output.logprobs)):
            logprobs["".join(map(chr, sample.response_ids))] = values.tolist()
    largest = all_reduce_max({"ratio_max": sums.pop("ratio_max")}, world)
    sums = all_reduce_sum(sums, world) | largest
    losses = all_reduce_sum({"loss": losses}, world)["loss"] / world.data_size
    logprobs = {name: values for part in all_gather_objects(logprobs, world) for name, values in part.items()}
    return {"loss": losses, "sums": sums, "logprobs": logprobs}


def furthest(got: dict[str, list[float]], want: dict[str, list[float]]) -> float:
    assert got.keys() == want.keys()
    return max((Tensor(got[name]) - Tensor(want[name])).abs().max().item() for name in want)


def against_one_process(make, world: World, *, checkpointed: bool = False, loss=LOSS, **mesh) -> dict:
    config = ParallelConfig(**{"context": 2} | mesh)
    world = arrange(config, world.device)
    alone, model = Policy(make(), packing=True), make()
    shapes, blocks = set(), []
    whole = Policy(make(), packing=True)  # as on a rollout copy: whether it can be packed, before it is cut
    if checkpointed:
        checkpoint_activations(model)
    policy = shard_policy(Policy(model), config, world)
    policy.packed = whole.packed
    model.set_attn_implementation(whole.model.config._attn_implementation)
    share_sequences(policy, world)
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, args: shapes.add(args[0].shape[1]))
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: blocks.append(1))
    batch = samples()
    total = float(sum(sample.num_loss_tokens for sample in batch))
    mine = split_across_ranks(batch, world, lambda sample: sample.length)
    want = run(alone, World(world.device), batch, total, loss)
    got = run(policy, world, mine, total, loss)
    counts = all_gather_objects(len(mine), world)
    seen = [None] * world.size  # of all ranks, not of the data ranks alone
    dist.all_gather_object(seen, got)
    return {
        "gradient": difference(whole_gradients(policy), whole_gradients(alone)),
        "logprobs": furthest(got["logprobs"], want["logprobs"]),
        "loss": [got["loss"], want["loss"]],
        "sums": [got["sums"], want["sums"]],
        "ranks agree": all(each == got for each in seen),
        "samples": sum(counts),
        "longest stretch": max(shapes),
        "forwards": len(blocks),
        "tied": model.config.tie_word_embeddings,
    }


def case_llama(folder: Path, world: World) -> dict:
    return against_one_process(lambda: build("llama"), world)


def case_qwen2_tied(folder: Path, world: World) -> dict:
    return against_one_process(lambda: build("qwen2"), world)


def case_checkpointed(folder: Path, world: World) -> dict:
    return against_one_process(lambda: build("qwen2"), world, checkpointed=True)


def case_one_key_head(folder: Path, world: World) -> dict:
    return against_one_process(lambda: build("llama", num_key_value_heads=1), world)


def case_windowed(folder: Path, world: World) -> dict:
    return against_one_process(mistral, world)


def case_token_sum(folder: Path, world: World) -> dict:
    loss = PolicyLossConfig(reduction="seq-mean-token-sum")
    return against_one_process(lambda: build("llama"), world, loss=loss)


def case_four(folder: Path, world: World) -> dict:
    """All four processes share each row, and two key heads."""
    return against_one_process(lambda: build("qwen2"), world, context=4, checkpointed=True)


def case_bfloat16(folder: Path, world: World) -> dict:
    return against_one_process(lambda: build("llama"), world, param_dtype="bfloat16")


def case_exchange(folder: Path, world: World) -> dict:
    """Each element says where it comes from: 1000 * token + head. And the gradient goes back where it came
    from: that of sum(weight * exchanged) is the weight, exchanged back."""
    group = ContextGroup(None)
    n, c, r = 3, group.size, group.rank
    token, head = torch.arange(n) + n * r, torch.arange(4)
    x = (1000.0 * token + head[:, None])[None, :, :, None].requires_grad_()  # [1, 4, n, 1]
    key = x[:, ::2].repeat(1, 1, 1, 2)  # two heads, named 0 and 2, of dimension 2
    q, k, v = group.to_heads(x, key, x[:, ::2])
    per = 4 // c
    own = torch.arange(per * r, per * (r + 1))
    everywhere = 1000.0 * torch.arange(n * c) + own[:, None]  # [heads / c, c n]
    result = {
        "query": torch.equal(q[0, :, :, 0], everywhere),
        "key": torch.equal(k[0, :, :, 1], everywhere[::2]),
        "value": torch.equal(v[0, :, :, 0], everywhere[::2]),
    }
    back = group.to_tokens(q.transpose(1, 2))  # [1, n, 4, 1]
    result["back"] = torch.equal(back, x.transpose(1, 2))
    weight = torch.randn(1, n, 4, 1, generator=torch.Generator().manual_seed(r))
    (gradient,) = torch.autograd.grad((back * weight).sum(), x)
    result["gradient"] = torch.equal(gradient, weight.transpose(1, 2))
    return result


def case_refused(folder: Path, world: World) -> dict:
    """Calls of a shared policy that would be wrong."""
    world = arrange(ParallelConfig(context=2), world.device)
    policy = share_sequences(Policy(build("llama"), packing=True), world)
    result = {}
    for name, packed, loss, denominator in (
        ("padded", False, LOSS, 1.0),
        ("mean of a sequence", True, PolicyLossConfig(reduction="seq-mean-token-mean"), 1.0),
        ("ratio of a sequence", True, PolicyLossConfig(ratio_level="sequence"), 1.0),
        ("no denominator", True, LOSS, None),
    ):
        (batch,) = make_micro_batches(samples(), 10**6, world.device, packed=packed)
        try:
            policy(batch, loss, denominator)
        except (UserError, ValueError) as error:
            result[name] = f"{type(error).__name__}: {error}"
    return result


if __name__ == "__main__":
    serve_cases(globals(), open_world(ParallelConfig(timeout=60)))
