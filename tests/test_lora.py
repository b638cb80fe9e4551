"""LoRA: adapters that train, generate, merge and are saved as the mathematics and `peft` have them, on one
process and on two. `lora_cases.py` holds what two processes run, in one torchrun."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lora_cases import LOSS, difference, far, logprobs, samples
from processes import run_cases, shared_launch
from safetensors.torch import load_file
from tiny import of_training, tiny_config, tiny_values, write_jsonl
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from update_cases import assert_close, groups_of, make_updater, plain_loss

from dapo.batching import make_micro_batches
from dapo.config import Config, load_config
from dapo.errors import UserError
from dapo.lora import Adapters, add_adapters, fill_adapters, initial_weight
from dapo.model import Policy
from dapo.parallel import World, full_state_dict
from dapo.policy_setup import build_policy
from dapo.trainer import Trainer

ALONE = World(torch.device("cpu"))
CASES = ("shards", "context", "replicate", "bfloat16", "run")
LORA = {"lora.rank": 4, "lora.alpha": 6.0}
RUN = LORA | {"optimizer.learning_rate": 1e-2, "train.mini_batch_prompts": 1}
NUMBER_OF_ADAPTERS = 2 * 7  # all linear layers of two blocks


def config_of(folder: Path, model_dir: Path, **overrides) -> Config:
    return Config.model_validate(tiny_values(folder, model_dir, **LORA | overrides))


def adapted(model, config: Config, spread: float = 0.1):
    """The model with adapters, of which the B are not zero."""
    add_adapters(model, config)
    fill_adapters(model, config.seed)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            noise = spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.data.copy_(noise)
    return model


def merged_by_hand(model, scale: float) -> dict[str, Tensor]:
    """W + scale B A in fp64, differentiable, under the plain model's names."""
    weights = {name: p.double() for name, p in model.named_parameters()}
    plain = {}
    for name, weight in weights.items():
        if ".lora_" not in name:
            layer = name.removesuffix(".base_layer.weight")
            if layer != name:
                a, b = (weights[f"{layer}.lora_{part}.default.weight"] for part in "AB")
                weight = weight + scale * b @ a
            plain[name.replace(".base_layer", "")] = weight
    return plain


@pytest.fixture(scope="module")
def two(tmp_path_factory, tiny_model_dir):
    """Results of all cases on two processes, and their folder."""

    def launch(folder: Path) -> dict[str, dict]:
        tiny_config(folder, tiny_model_dir, **RUN)
        return run_cases(folder, 2, "lora_cases.py", CASES)

    results, folder = shared_launch(tmp_path_factory, "lora", launch)
    return results | {"folder": folder}


@pytest.fixture(scope="module")
def one(tmp_path_factory, tiny_model_dir):
    """A whole run on one process: its folder, and the policy that it left in memory."""
    folder = tmp_path_factory.mktemp("lora_one")
    trainer = Trainer(load_config(tiny_config(folder, tiny_model_dir, **RUN)))
    first = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    trainer.train()
    trained = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    trainer.finish()
    trainer.close()
    return SimpleNamespace(run=folder / "run", policy=trainer.policy, first=first, trained=trained)


def metrics_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_first_policy_is_the_base_model_bit_by_bit(tmp_path, tiny_model_dir):
    plain = build_policy(config_of(tmp_path, tiny_model_dir, **{"lora.rank": None}), ALONE).policy
    policy = build_policy(config_of(tmp_path, tiny_model_dir), ALONE).policy
    assert len(Adapters(policy.model).layers) == NUMBER_OF_ADAPTERS and not Adapters(plain.model).layers
    assert type(policy.model) is type(plain.model)
    assert torch.equal(logprobs(policy, ALONE), logprobs(plain, ALONE))
    names = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert len(names) == 2 * NUMBER_OF_ADAPTERS and all(".lora_" in name for name in names)
    assert {m.training for m in policy.model.modules()} == {False}


def test_initial_weights_follow_from_seed_and_name():
    name = "model.layers.0.self_attn.q_proj.lora_A.default.weight"
    a = initial_weight(name, (4, 25), seed=1)
    assert torch.equal(a, initial_weight(name, [4, 25], seed=1))
    assert not torch.equal(a, initial_weight(name, (4, 25), seed=2))
    assert not torch.equal(a, initial_weight(name.replace("layers.0", "layers.1"), (4, 25), seed=1))
    assert a.abs().max() < 0.2 < a.abs().max() + 0.01  # 1 / sqrt(25)
    assert initial_weight(name.replace("lora_A", "lora_B"), (9, 4), seed=1).count_nonzero() == 0


def test_sampling_noise_does_not_depend_on_adapters(tmp_path, tiny_model_dir):
    drawn = []
    for rank in (None, 4):
        torch.manual_seed(3)
        build_policy(config_of(tmp_path, tiny_model_dir, **{"lora.rank": rank}), ALONE)
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)


@pytest.mark.parametrize("rslora", [False, True])
def test_gradients_are_those_of_w_plus_scale_b_a(tmp_path, model_fp64, rslora):
    """In fp64, by the fused loss through peft's layers and by plain autograd through merged weights."""
    model = adapted(copy.deepcopy(model_fp64), config_of(tmp_path, tmp_path, **{"lora.rslora": rslora}))
    updater = make_updater(tmp_path, model)
    assert len(updater.optimizer.param_groups[0]["params"]) == 2 * NUMBER_OF_ADAPTERS
    groups = groups_of(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    taken = {}
    updater.optimizer.step = lambda: taken.update({name: p.grad.clone() for name, p in trained.items()})
    updater.run(groups, 1)

    merged = merged_by_hand(model, scale=6 / math.sqrt(4) if rslora else 6 / 4)

    def plain(input_ids: Tensor):
        return torch.func.functional_call(model_fp64, merged, kwargs={"input_ids": input_ids})

    gradients = torch.autograd.grad(plain_loss(plain, groups), list(trained.values()))
    assert_close(taken, dict(zip(trained, gradients)))
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_checkpointed_blocks_have_the_same_gradients(tmp_path, tiny_model_dir):
    gradients = []
    for checkpointed in (False, True):
        options = {"train.gradient_checkpointing": checkpointed}
        policy = build_policy(config_of(tmp_path, tiny_model_dir, **options), ALONE).policy
        (batch,) = make_micro_batches(samples(), 10**6, ALONE.device, packed=policy.packed)
        policy(batch, LOSS).loss.backward()
        named = policy.model.named_parameters()
        gradients.append({name: p.grad for name, p in named if p.requires_grad})
        assert sum(gradient.norm() for gradient in gradients[-1].values()) > 0
    assert difference(*gradients)["all"] < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_is_exact_and_leaves_the_policy_alone(tmp_path, model_fp64, dtype):
    model = adapted(copy.deepcopy(model_fp64).to(dtype), config_of(tmp_path, tmp_path))
    assert {p.dtype for p in model.parameters()} == {dtype}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = full_state_dict(Policy(model), ALONE)
    want = {name: weight.to(dtype) for name, weight in merged_by_hand(model, 6 / 4).items()}
    assert state.keys() == want.keys() == dict(model_fp64.named_parameters()).keys()
    # One rounding of W: at most the nearest numbers on both sides of a tie.
    assert difference(state, want)["worst"] < (1e-7 if dtype == torch.float32 else 1e-4)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_weights_that_are_stored_transposed_are_merged(tmp_path):
    """GPT-2's, and its tied embedding."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 12, "n_layer": 1, "n_head": 2}
    plain = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    with pytest.warns(UserWarning, match="fan_in_fan_out"):
        model = adapted(copy.deepcopy(plain), config_of(tmp_path, tmp_path))
    ids = torch.arange(1, 10)[None]
    want = model(input_ids=ids).logits
    assert far(plain(input_ids=ids).logits, want) > 1e-2
    plain.load_state_dict(full_state_dict(Policy(model), ALONE))
    assert far(plain(input_ids=ids).logits, want) < 1e-5


def test_a_run_trains_adapters_and_nothing_else(one, tiny_model_dir):
    rows = metrics_of(one.run)
    assert [row["update"] for row in rows] == [2, 4]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(row["grad_norm"] > 0 and row["rollout_mismatch_max"] < 1e-4 for row in rows)
    base = load_file(tiny_model_dir / "model.safetensors")
    for name, value in one.trained.items():
        if ".lora_" in name:
            assert not torch.equal(value, one.first[name]), name
        else:
            assert torch.equal(value, base[name.replace(".base_layer", "")]), name
    after = dict(one.policy.model.named_parameters())  # saved, and as before
    assert all(torch.equal(after[name], value) for name, value in one.trained.items())


def assert_saved(folder: Path, base: Path, want: Tensor, tolerance: float) -> None:
    """`folder`/model and the base with `folder`/adapter have the log-probs; and they are not the base's."""
    from peft import PeftModel

    plain = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert not Adapters(plain).layers
    assert far(logprobs(Policy(plain), ALONE), want) < tolerance
    model = AutoModelForCausalLM.from_pretrained(base)
    assert far(logprobs(Policy(model), ALONE), want) > 0.1
    wrapped = PeftModel.from_pretrained(model, folder / "adapter").get_base_model()
    assert far(logprobs(Policy(wrapped), ALONE), want) < tolerance


def test_a_run_leaves_a_plain_model_and_an_adapter(one, tiny_model_dir):
    assert_saved(one.run, tiny_model_dir, logprobs(one.policy, ALONE), 1e-5)
    saved = load_file(one.run / "model" / "model.safetensors")
    base = load_file(tiny_model_dir / "model.safetensors")
    assert saved.keys() == base.keys()
    moved = {name for name in base if not torch.equal(saved[name], base[name])}
    assert moved == {name for name in base if "_proj" in name}
    names = load_file(one.run / "adapter" / "adapter_model.safetensors").keys()
    assert len(names) == 2 * NUMBER_OF_ADAPTERS
    assert "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight" in names
    settings = json.loads((one.run / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["lora_dropout"]) == (4, 6, 0.0)
    assert settings["base_model_name_or_path"] == str(tiny_model_dir)
    assert settings["target_modules"] == sorted(settings["target_modules"])
    assert sorted(path.name for path in (one.run / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_adapters_learn(tmp_path, tiny_model_dir):
    """The last digit of a response must be 7: about 1 in 17 responses at first."""
    rows = [{"prompt": f"{a}{b}=", "answer": "7"} for a in "abcd" for b in "xy"]
    task = {"data.train": {"source": str(write_jsonl(tmp_path / "seven.jsonl", rows))}}
    task |= {"reward": {"mode": "exact", "answer_pattern": r"\d", "workers": 1}}
    sizes = {"prompts_per_step": 8, "prompts_per_generation": 8, "group_size": 16, "max_response_length": 4}
    task |= {f"rollout.{key}": value for key, value in sizes.items()}
    task |= {"algorithm": {"soft_overlong_punishment": False, "dynamic_sampling": False}}
    task |= {"train": {"steps": 10, "mini_batch_prompts": 4, "max_tokens_per_micro_batch": 4096}}
    task |= {"train.save_model": False, "optimizer.learning_rate": 2e-2}
    trainer = Trainer(load_config(tiny_config(tmp_path, tiny_model_dir, **LORA | task)))
    trainer.train()
    trainer.close()
    accuracies = [row["accuracy"] for row in metrics_of(tmp_path / "run")]
    assert sum(accuracies[:2]) / 2 < 0.25 and sum(accuracies[-2:]) / 2 > 0.6, accuracies


@pytest.mark.parametrize("case", ["shards", "context", "replicate"])
def test_two_ranks_train_adapters_as_one_process(two, case):
    result = two[case]
    assert result["first"]["worst"] == 0  # the same initial numbers
    for gradient in result["gradients"]:
        assert gradient["all"] < 1e-5 and gradient["worst"] < 3e-5
    norms, want = result["norms"]
    assert norms == pytest.approx(want, rel=1e-5) and min(want) > 0.5
    assert result["merged"]["worst"] < 1e-5 and result["alone"] < 1e-5
    assert len(result["trained"]) == 2 * NUMBER_OF_ADAPTERS
    assert result["frozen"]


@pytest.mark.parametrize(("case", "tolerance"), [*((c, 1e-5) for c in CASES[:3]), ("bfloat16", 0.3)])
def test_the_rollout_copy_is_plain_and_has_the_policys_logprobs(two, case, tolerance):
    assert two[case]["plain copy"]
    assert two[case]["copy"] < tolerance


@pytest.mark.parametrize("case", ["shards", "context", "replicate"])
def test_shards_are_saved_as_a_plain_model_and_an_adapter(two, case, tiny_model_dir):
    (folder,) = [path for path in two["folder"].glob("saved*") if case in path.name or case == "shards"][:1]
    assert_saved(folder, tiny_model_dir, torch.tensor(two[case]["logprobs"]), 1e-5)
    assert two[case]["untouched"]


def test_mixed_precision_trains_fp32_adapters_in_bf16(two):
    result = two["bfloat16"]
    assert all(1e-6 < gradient["all"] < 0.1 for gradient in result["gradients"])
    assert result["first"]["worst"] == 0 and result["frozen"]


def test_a_run_on_two_processes_is_that_on_one(two, one):
    run = two["folder"] / "two"
    for ours, theirs in zip(metrics_of(one.run), metrics_of(run), strict=True):
        assert of_training(theirs) == pytest.approx(of_training(ours), rel=1e-4, abs=1e-5)
    for name in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert difference(load_file(run / name), load_file(one.run / name))["worst"] < 1e-3
    config = Path("adapter/adapter_config.json")
    assert (run / config).read_text() == (one.run / config).read_text()


TARGETS = {
    "lm_head": (["lm_head", "q_proj"], r"matches lm_head, which is the output head, whose weight the loss"),
    "embedding": (["embed_tokens"], r"matches model\.embed_tokens, which is the input embedding: .*q_proj"),
    "norm": (["norm"], r"matches model\.norm, which is a LlamaRMSNorm, and not a linear layer"),
    "regular expression": (r".*lm_head|.*q_proj", r"matches lm_head, which is the output head"),
    "nothing": (
        ["q_proj", "query"],
        r"query matches no module of LlamaForCausalLM, .* end in q_proj, k_proj",
    ),
    "a name as an expression": ("q_proj", r"q_proj matches no module .* regular expression for whole names"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_targets_that_cannot_be_adapted_are_refused(tmp_path, model, name):
    targets, message = TARGETS[name]
    with pytest.raises(UserError, match=rf"^lora\.target_modules:? .*{message}"):
        add_adapters(model, config_of(tmp_path, tmp_path, **{"lora.target_modules": targets}))
    assert not Adapters(model).layers


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], r".*\.(q|up)_proj", ["layers.0.mlp.up_proj"]])
def test_targets_choose_layers(tmp_path, model, targets):
    add_adapters(model, config_of(tmp_path, tmp_path, **{"lora.target_modules": targets}))
    names = Adapters(model).layers.keys()
    assert len(names) == (1 if isinstance(targets, list) and len(targets) == 1 else 4)
    assert all(re.search(r"(q|up)_proj$", name) for name in names)


def test_a_missing_peft_is_named_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"^lora\.rank is 4, which takes peft: pip install peft"):
        build_policy(config_of(tmp_path, tmp_path / "no model"), ALONE)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("lora.rank=0", "lora.rank: input should be greater than or equal to 1, got 0 (int)"),
        ("lora.alpha=0", "lora.alpha: input should be greater than 0, got 0 (int)"),
        ("lora.target_modules=[]", "lora.target_modules: must be all-linear, a list of what names end in"),
        ("lora.target_modules=[3]", "lora.target_modules: must be all-linear, a list of what names end in"),
        (
            "lora.target_modules='(q'",
            "lora.target_modules: must be all-linear, a list or a regular expression",
        ),
        ("lora.dropout=0.1", "unknown key lora.dropout;"),
    ],
)
def test_wrong_values_are_refused(tmp_path, override, message):
    with pytest.raises(UserError, match=re.escape(message)):
        load_config(tiny_config(tmp_path, tmp_path), [override])
