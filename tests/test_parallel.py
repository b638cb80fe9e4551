"""FSDP2 on processes that talk through gloo: shards train, load, save and generate as one process does.

`parallel_cases.py` holds what the processes run; each group of cases is one `torchrun`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel_cases import BIG, build
from processes import run_cases, shared_launch
from safetensors.torch import load_file, save_file
from tiny import GENERATION_DEFAULTS
from transformers import AutoModelForCausalLM, GenerationConfig

from dapo.config import ParallelConfig
from dapo.errors import UserError
from dapo.model import Policy
from dapo.parallel import (
    World,
    all_gather_objects,
    all_reduce_sum,
    clip_grad_norm,
    empty_model,
    full_state_dict,
    gather_objects,
    inference_copy,
    load_shards,
    model_folder,
    open_world,
    refresh,
    same_on_all_ranks,
    shard_policy,
    split_across_ranks,
)

TWO = """llama qwen2_tied checkpointed no_samples replicate context gathers mixed_precision loading memory
helpers save stale"""


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Results of all cases on two processes, and the folder with what they read."""

    def launch(folder: Path) -> dict[str, dict]:
        write_weights(folder)
        return run_cases(folder, 2, "parallel_cases.py", TWO.split())

    results, folder = shared_launch(tmp_path_factory, "two", launch)
    return results | {"folder": folder}


def write_weights(folder: Path) -> None:
    """What `case_loading` and `case_memory` read: one file, tied weights, many files, another dtype."""
    for name, kind in (("llama", "llama"), ("qwen2", "qwen2"), ("bfloat16", "qwen2"), ("split", "llama")):
        model = build(kind)
        model.generation_config = GenerationConfig(**GENERATION_DEFAULTS, eos_token_id=1)
        model = model.bfloat16() if name == "bfloat16" else model
        model.save_pretrained(folder / name, max_shard_size="20KB" if name == "split" else "5GB")
    assert len(list((folder / "split").glob("*.safetensors"))) > 2
    build("llama", **BIG).save_pretrained(folder / "big")


def assert_trains_as_one_process(result: dict) -> None:
    for gradient in ("gradient", "clipped"):
        assert result[gradient]["all"] < 1e-5
        assert result[gradient]["worst"] < 3e-5
    norm, want = result["norm"]
    assert want > 0.5  # it was clipped
    assert norm == pytest.approx(want, rel=1e-5)
    assert result["same norm"]
    assert result["weights"]["all"] < 1e-6
    assert result["copy"]["all"] < 1e-6
    assert result["logits"] < 1e-4
    assert result["generated"]


@pytest.mark.parametrize("case", ["llama", "qwen2_tied", "checkpointed", "no_samples"])
def test_two_ranks_train_as_one_process(two, case):
    """Unequal sequences, uneven shards; `no_samples`: one rank has none at all."""
    assert_trains_as_one_process(two[case])
    assert two[case]["tied"] == (case == "qwen2_tied")


def test_checkpointed_blocks_run_again_in_backward(two):
    assert two["checkpointed"]["forwards"] == 2 * two["llama"]["forwards"] > 0


@pytest.mark.parametrize(
    ("case", "mesh", "data_size"), [("replicate", [2, 1, 1], 2), ("context", [1, 1, 2], 1)]
)
def test_other_meshes_train_as_one_process(two, case, mesh, data_size):
    assert (two[case]["mesh"], two[case]["data_size"]) == (mesh, data_size)
    assert_trains_as_one_process(two[case])


@pytest.mark.slow
def test_replicated_shards_train_as_one_process(tmp_path):
    results = run_cases(tmp_path, 4, "parallel_cases.py", ["replicate", "context"])
    for case, mesh, data_size in (("replicate", [2, 2, 1], 4), ("context", [1, 2, 2], 2)):
        assert (results[case]["mesh"], results[case]["data_size"]) == (mesh, data_size)
        assert_trains_as_one_process(results[case])


def test_the_head_is_gathered_once_in_a_forward_and_backward(two):
    """Three blocks twice each, the root with the head once."""
    for kind in ("llama", "qwen2"):
        assert two["gathers"][kind] == {"all": 7, "of the head": 1}


def test_mixed_precision_computes_in_bf16_and_sums_in_fp32(two):
    result = two["mixed_precision"]
    assert result["dtypes"] == ["torch.bfloat16", "torch.bfloat16", "torch.float32"]
    assert result["copy"]
    assert 1e-6 < result["gradient"]["all"] < 0.05


def test_shards_load_what_from_pretrained_loads(two):
    for name in ("llama", "qwen2", "split", "bfloat16"):
        result = dict(two["loading"][name])
        assert result.pop("gradient")["all"] < 1e-5
        assert result == {
            "names": True,
            "parameters": True,
            "buffers": True,
            "generation": True,
            "training": False,
        }, name


def test_no_rank_holds_the_whole_model_while_loading(two):
    result = two["memory"]
    assert result["size"] > 190e6
    assert result["plain"] > 0.9 * result["size"]  # the measure sees a whole model
    assert 0.45 * result["size"] < result["sharded"] < 0.65 * result["size"]


def test_helpers_agree_across_ranks(two):
    result = two["helpers"]
    assert result["sum"] == {"b": 1e12 + 1, "a": 1.5}
    assert result["max"] == {"x": -3.0, "y": 1.0}
    assert result["same"] == [{"stop": True}] * 2
    assert result["parts"] == [[0, 1, 2], [3, 4, 5, 6]]
    assert sorted(result["few"]) == [[], ["only"]]
    assert result["by cost"] == [[9], [1, 1, 1, 5, 1]]
    assert result["gathered"] == ["rank 0", "rank 1"]
    assert "different names" in result["error"]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_saved_shards_are_a_transformers_folder(two, kind):
    assert "save" in two
    saved = AutoModelForCausalLM.from_pretrained(two["folder"] / f"saved_{kind}").state_dict()
    want = build(kind).state_dict()
    assert saved.keys() == want.keys()
    assert all(torch.equal(saved[name], value) for name, value in want.items())


def test_the_copy_is_never_stale(two):
    assert two["stale"]["copy"]["all"] == 0


def test_one_process_is_left_as_it_is(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    world = open_world(ParallelConfig())
    assert (world.rank, world.size, world.data_size, world.is_main, world.mesh) == (0, 1, 1, True, None)
    policy = Policy(build("llama"))
    before = {name: type(module) for name, module in policy.named_modules()}
    assert shard_policy(policy, ParallelConfig(), world) is policy
    assert {name: type(module) for name, module in policy.named_modules()} == before
    assert inference_copy(policy, ParallelConfig(), world) is policy.model
    refresh(policy.model, policy)
    assert full_state_dict(policy, world).keys() == policy.model.state_dict().keys()
    assert all_reduce_sum({"a": torch.tensor(2)}, world) == {"a": 2.0}
    assert same_on_all_ranks("x", world) == "x"
    assert gather_objects("x", world) == all_gather_objects("x", world) == ["x"]
    assert split_across_ranks([3, 1, 2], world) == split_across_ranks([3, 1, 2], world, float) == [3, 1, 2]
    world.close()


def test_clip_grad_norm_is_torchs_on_one_process():
    ours, theirs = (torch.nn.Parameter(torch.ones(7)) for _ in range(2))
    for parameter in (ours, theirs):
        parameter.grad = torch.linspace(0, 3, 7)
    want = torch.nn.utils.clip_grad_norm_([theirs], 0.5).item()
    assert clip_grad_norm([ours], 0.5) == want
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_shares_are_a_partition(size):
    items = [7, 7, 1, 9, 2, 2, 2]
    for cost in (None, float):
        worlds = [World(torch.device("cpu"), rank=rank, size=size) for rank in range(size)]
        shares = [split_across_ranks(items, world, cost) for world in worlds]
        assert sorted(item for share in shares for item in share) == sorted(items)
    sums = [sum(share) for share in shares]
    assert max(sums) - min(sums) <= max(items)  # no rank waits long for another


@pytest.mark.parametrize(
    ("size", "options", "message"),
    [
        (4, {"replicate": 3}, r"parallel\.replicate \(3\) must divide the 4 processes"),
        (4, {"context": 8}, r"parallel\.context \(8\) must divide the 4 processes"),
        (
            6,
            {"replicate": 2, "context": 6},
            r"parallel\.replicate \(2\) times parallel\.context \(6\) must divide",
        ),
        (1, {"replicate": 2}, r"parallel\.replicate is 2, but there is one process: .*torchrun"),
        (1, {"context": 2}, r"parallel\.context is 2, but there is one process"),
        (1, {"param_dtype": "bfloat16"}, r"parallel\.param_dtype is bfloat16, .*model\.dtype"),
        (1, {"offload": True}, r"parallel\.offload is True, which takes two processes"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(monkeypatch, size, options, message):
    monkeypatch.setenv("WORLD_SIZE", str(size))
    with pytest.raises(UserError, match=message):
        open_world(ParallelConfig(**options))


def unsharded_load(folder: Path) -> None:
    """As far as `load_shards` gets without a mesh: through its checks of names."""
    load_shards(Policy(empty_model(folder, torch.float32)), folder, torch.device("cpu"))


def test_folders_of_another_model_are_refused(tmp_path):
    build("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)

    def refused(tensors: dict, message: str) -> None:
        save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            unsharded_load(tmp_path)

    name = "model.layers.1.mlp.up_proj.weight"
    lacking = {key: value for key, value in weights.items() if key != name}
    refused(lacking, rf"lacks parameters of LlamaForCausalLM: {name}$")
    refused(
        weights | {"stranger": torch.ones(1)}, "holds tensors that LlamaForCausalLM does not have: stranger$"
    )
    refused(weights | {name: torch.ones(3, 2)}, rf"{name} has shape \[3, 2\] in the file and \[64, 32\] in")
    path.write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        unsharded_load(tmp_path)
    path.unlink()
    with pytest.raises(
        UserError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        unsharded_load(tmp_path)
    with pytest.raises(UserError, match="neither a folder nor a hub model"):
        model_folder("no/such-model")
    with pytest.raises(UserError, match=r"no model could be built; it needs the config\.json"):
        empty_model(tmp_path / "none", torch.float32)
