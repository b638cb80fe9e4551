"""`dapo export`: what comes out is the policy that was trained, with a card that says where it is from."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from lora_cases import far, logprobs
from processes import environment, torchrun
from safetensors.torch import load_file
from tiny import EOS, tiny_config, write_jsonl
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dapo.export
import dapo.model_card
from dapo.checkpoint import DamagedCheckpoint, saved_steps, write_checkpoint
from dapo.cli import main
from dapo.config import Config, load_config
from dapo.errors import UserError
from dapo.export import ALONE, export
from dapo.model import Policy
from dapo.model_card import write_card
from dapo.parallel import full_state_dict
from dapo.trainer import Trainer

KINDS = {"untied": {}, "tied": {}, "LoRA": {"lora.rank": 4, "optimizer.learning_rate": 1e-2}}
STEPS = 3


def options(folder: Path) -> dict:
    """Every step is evaluated and saved."""
    held_out = write_jsonl(folder / "held_out.jsonl", [{"prompt": f"{a}*{a}=", "answer": ""} for a in "123"])
    task = {"data.eval": {"source": str(held_out)}, "eval.every": 1, "train.steps": STEPS}
    return task | {"checkpoint": {"every": 1, "keep": STEPS}, "train.mini_batch_prompts": 1}


def tied_model(base: Path, folder: Path) -> Path:
    """The tiny model with one matrix as embedding and head."""
    config = AutoConfig.from_pretrained(base)
    config.tie_word_embeddings = True
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config = AutoModelForCausalLM.from_pretrained(base).generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    return folder


def train(folder: Path, model: Path, **overrides) -> SimpleNamespace:
    """A whole run in `folder`/run, and the policy that it left in memory."""
    trainer = Trainer(load_config(tiny_config(folder, model, **options(folder), **overrides)))
    trainer.train()
    trainer.close()
    state = {name: value.clone() for name, value in full_state_dict(trainer.policy, ALONE).items()}
    return SimpleNamespace(
        run=folder / "run", base=model, state=state, logprobs=logprobs(trainer.policy, ALONE)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model_dir: Path):
    """By kind, each trained once."""
    runs: dict[str, SimpleNamespace] = {}

    def of(kind: str) -> SimpleNamespace:
        if kind not in runs:
            folder = tmp_path_factory.mktemp("run")
            model = tied_model(tiny_model_dir, folder / "tied") if kind == "tied" else tiny_model_dir
            runs[kind] = train(folder, model, **KINDS[kind])
        return runs[kind]

    return of


@pytest.fixture
def run(trained, tmp_path: Path) -> Path:
    """A copy of the plain run, to be damaged."""
    return Path(shutil.copytree(trained("untied").run, tmp_path / "run"))


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch) -> None:
    """Most of a small export's time goes into its picture: only tests of the card have one."""
    if "card" not in request.node.name:
        monkeypatch.setattr(dapo.model_card, "save_figure", lambda metrics, evals, out: out.write_bytes(b""))


@pytest.mark.parametrize("kind", KINDS)
def test_the_export_is_the_policy_that_was_trained(trained, tmp_path: Path, kind: str) -> None:
    it, out = trained(kind), tmp_path / "out"
    assert export(it.run, out, "float32") == STEPS
    model = AutoModelForCausalLM.from_pretrained(out)
    assert far(logprobs(Policy(model), ALONE), it.logprobs) < 1e-5
    base = AutoModelForCausalLM.from_pretrained(it.base)
    assert far(logprobs(Policy(base), ALONE), it.logprobs) > 0.01
    files, base_files = (load_file(folder / "model.safetensors") for folder in (out, it.base))
    assert files.keys() == base_files.keys()  # no adapters, no second copy of a tied head
    assert all(torch.equal(values, it.state[name]) for name, values in files.items())
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    assert tied == (kind == "tied") == model.config.tie_word_embeddings
    assert not dist.is_initialized()


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_the_default_and_rounds_once(trained, tmp_path: Path, kind: str) -> None:
    it, out = trained(kind), tmp_path / "out"
    export(it.run, out)
    files = load_file(out / "model.safetensors")
    assert all(torch.equal(values, it.state[name].bfloat16()) for name, values in files.items())
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert model.dtype == torch.bfloat16 and model.config.architectures == ["LlamaForCausalLM"]
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {
        (out / "README.md").stat().st_mode & 0o777
    }


def test_tokenizer_and_generation_config_come_along(trained, tmp_path: Path) -> None:
    it, out = trained("untied"), tmp_path / "out"
    export(it.run, out)
    text = "12+3=<eos>"
    ours, base = (AutoTokenizer.from_pretrained(folder) for folder in (out, it.base))
    assert ours(text).input_ids == base(text).input_ids and ours.eos_token_id == EOS
    settings, wanted = (
        json.loads((folder / "generation_config.json").read_text()) for folder in (out, it.base)
    )
    assert settings == wanted


def test_weights_are_cut_into_shards(trained, tmp_path: Path) -> None:
    it, out = trained("untied"), tmp_path / "out"
    export(it.run, out, "float32", max_shard_size="50KB")
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    assert (out / "model.safetensors.index.json").is_file()
    model = AutoModelForCausalLM.from_pretrained(out)
    assert all(torch.equal(values, it.state[name]) for name, values in model.state_dict().items())


def test_dapo_eval_takes_it(trained, tmp_path: Path, capsys) -> None:
    out, data = tmp_path / "out", write_jsonl(tmp_path / "data.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    assert main(["export", str(trained("untied").run), str(out)]) == 0
    assert capsys.readouterr().out == f"step {STEPS} in bfloat16: {out}\n"
    options = [
        "--max-tokens",
        "3",
        "--answer-pattern",
        r"\d",
        "--mode",
        "exact",
        "--out",
        str(tmp_path / "e"),
    ]
    assert main(["eval", str(out), str(data), *options]) == 0


def test_a_checkpoint_is_named_by_its_folder_or_by_the_best_evaluation(run: Path, tmp_path: Path) -> None:
    assert saved_steps(run / "checkpoints") == [1, 2, 3]
    assert export(run / "checkpoints/step_000002", tmp_path / "second") == 2
    for step, accuracy in ((0, 1.0), (1, 0.5), (2, 0.5), (3, 0.25)):
        path = run / f"eval/step_{step:06d}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"accuracy": accuracy}))
    assert export(run, tmp_path / "best", best=True) == 1  # of two alike the first; none before training
    shutil.rmtree(run / "checkpoints/step_000001")
    with pytest.raises(
        UserError, match=r"step 1, the best evaluation's, has no checkpoint \(there are: 2, 3"
    ):
        export(run, tmp_path / "none", best=True)


def test_the_newest_whole_checkpoint_is_taken(run: Path, tmp_path: Path, caplog) -> None:
    weights = next((run / "checkpoints/step_000003").glob("*.distcp"))
    weights.write_bytes(weights.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING):
        assert export(run, tmp_path / "out") == 2
    assert any("step_000003" in message for message in caplog.messages)
    with pytest.raises(DamagedCheckpoint, match=weights.name):
        export(run / "checkpoints/step_000003", tmp_path / "damaged")
    assert not (tmp_path / "damaged").exists()


def test_a_checkpoint_that_is_damaged_meanwhile_is_no_other_model(
    run: Path, tmp_path: Path, monkeypatch
) -> None:
    def fail(*arguments):
        raise DamagedCheckpoint("it was changed")

    monkeypatch.setattr(dapo.export.Checkpoint, "load", fail)
    with pytest.raises(DamagedCheckpoint, match=r"^it was changed$"):
        export(run, tmp_path / "out")


def test_base_weights_are_read_for_lora_alone(trained, tmp_path: Path) -> None:
    it = trained("untied")
    bare = tmp_path / "bare"
    shutil.copytree(it.base, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    (bare / "model.safetensors").write_bytes(b"")  # where it would be read, it would be found wanting
    export(it.run, tmp_path / "out", "float32", model=str(bare))
    assert all(
        torch.equal(values, it.state[name])
        for name, values in load_file(tmp_path / "out/model.safetensors").items()
    )
    with pytest.raises(UserError, match=r"no model could be loaded.*; --model gives the folder of the base"):
        export(trained("LoRA").run, tmp_path / "lora", model=str(bare))


def test_buffers_that_no_checkpoint_holds_come_from_the_base_model(tmp_path: Path, tiny_model_dir) -> None:
    """Of DeepSeek's router: saved, and not trained by gradients."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"vocab_size": 99, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"moe_intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "n_group": 1}
    sizes |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 0, "topk_group": 1}
    sizes |= {"kv_lora_rank": 4, "q_lora_rank": 4, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, v_head_dim=4, bos_token_id=0, eos_token_id=EOS))
    (buffer,) = [value for name, value in model.state_dict().items() if name.endswith("correction_bias")]
    buffer.copy_(torch.arange(4.0))
    base = tmp_path / "base"
    model.save_pretrained(base)
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(base)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(tiny_config(tmp_path, base).read_text())
    moved = {f"model/{name}": value.detach() + 1 for name, value in model.named_parameters()}
    write_checkpoint(run / "checkpoints", 1, moved, {}, {"rank": 0}, ALONE)
    export(run, tmp_path / "out", "float32")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(exported.get_buffer("model.layers.0.mlp.gate.e_score_correction_bias"), buffer)
    assert all(torch.equal(p, moved[f"model/{name}"]) for name, p in exported.named_parameters())


def test_the_card_tells_the_run_up_to_the_step(trained, tmp_path: Path) -> None:
    run, out = trained("untied").run, tmp_path / "out"
    export(run / "checkpoints/step_000002", out)
    card = ModelCard.load(out / "README.md")
    assert card.data.base_model == trained("untied").base.name and card.data.library_name == "transformers"
    assert "dapo" in card.data.tags and "lora" not in card.data.tags
    text = card.text
    assert "# out" in text and "the state after step 2 of 3" in text
    assert "| step 1 | step 2 |" in text and "clip-higher | on: 1 − 0.2 to 1 + 0.28" in text
    assert str(run.parent / "prompts.jsonl") in text and "learning rate 0.001" in text
    evaluation = json.loads((run / "eval/step_000002.json").read_text())
    low, high = (100 * evaluation[f"accuracy_{end}"] for end in ("low", "high"))
    assert f"| 2 | {evaluation['accuracy']:.1%} | {low:.1f} – {high:.1f}% |" in text
    assert [line[:4] for line in text.splitlines() if line[:3] in ("| 0", "| 1", "| 2", "| 3")] == [
        "| 0 ",
        "| 1 ",
        "| 2 ",
    ]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert f"| Right responses | {metrics[0]['accuracy']:.1%} | {metrics[1]['accuracy']:.1%} |" in text
    assert "](curves.png)" in text and (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert str(run) not in text


def test_the_card_says_that_adapters_were_trained(trained, tmp_path: Path) -> None:
    export(trained("LoRA").run, tmp_path / "out")
    card = ModelCard.load(tmp_path / "out/README.md")
    assert "lora" in card.data.tags
    assert "LoRA adapters of rank 4 were trained, and are merged" in card.text
    assert "LoRA of rank 4, alpha 32 on `all-linear`" in card.text


def test_the_card_of_a_run_that_was_stopped_has_the_line_that_is_not_written(tmp_path: Path) -> None:
    """And takes any text that settings hold, and a run without metrics, and what was changed on resume."""
    prompt = "a | b\n`{prompt}`\n```\n"
    values = {"data.prompt_template": prompt, "data.train": {"source": "hub:o/n:test", "limit": 5}}
    config = load_config(tiny_config(tmp_path, tmp_path / "gone/Base", **values | {"reward.mode": None}))
    assert isinstance(config, Config)
    run = tmp_path / "run"
    run.mkdir()
    state = {"unlogged": {"step": 4, "accuracy": 0.125, "entropy": None}}
    checkpoint = SimpleNamespace(step=4, state={}, rank_states=[{}, {}])
    write_card(tmp_path, "name", run, config, checkpoint, "bfloat16")
    text = (tmp_path / "README.md").read_text()
    assert "curves" not in text and "In training" not in text and not (tmp_path / "curves.png").exists()
    assert r"| prompt | `` a \| b\n`{prompt}`\n```\n ``, chat template: for message lists |" in text
    assert "`hub:o/n:test` (first 5)" in text and ModelCard(text).data.datasets == ["o/n"]
    assert "| processes | 2 |" in text
    lines = [{"step": 3, "accuracy": 0.5}, {"step": 5, "accuracy": 1.0}]
    write_jsonl(run / "metrics.jsonl", lines)
    write_jsonl(run / "events.jsonl", [{"kind": "changed", "step": 3, "message": "seed: 1 -> 2"}])
    checkpoint.state = state
    write_card(tmp_path, "name", run, config, checkpoint, "bfloat16")
    text = (tmp_path / "README.md").read_text()
    assert "| Right responses | 50.0% | 12.5% |" in text and "Entropy" not in text
    assert "- after step 3: `seed: 1 -> 2`" in text


def complaint(capsys, *arguments: object) -> str:
    assert main(["export", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dapo: ") and error.count("\n") == 1, error
    return error


def test_what_is_no_checkpoint_is_said(run: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert "none is not a folder" in complaint(capsys, tmp_path / "none", out)
    for folder in (run / "checkpoints", run / "eval"):
        assert f"{folder} is neither a checkpoint" in complaint(capsys, folder, out)
    newest = run / "checkpoints/step_000003"
    assert f"--best chooses among a run's checkpoints: give {run}" in complaint(capsys, newest, out, "--best")
    (run / "config.yaml").rename(run / "config")
    assert f"{run}/config.yaml is missing, which says what step_000003" in complaint(capsys, newest, out)
    (run / "config").rename(run / "config.yaml")
    shutil.rmtree(run / "checkpoints")
    assert f"{run} has no checkpoint yet" in complaint(capsys, run, out)
    shutil.rmtree(run / "eval")
    assert f"--best: {run} has no evaluation" in complaint(capsys, run, out, "--best")
    assert not out.exists()


def test_a_base_model_that_is_gone_or_another_is_said(trained, run: Path, tmp_path: Path, capsys) -> None:
    out, other = tmp_path / "out", tmp_path / "other"
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace(str(trained("untied").base), str(tmp_path / "gone")))
    error = complaint(capsys, run, out)
    assert f"model.path of {run}/config.yaml is {tmp_path}/gone, which is no folder" in error
    assert "--model" in error
    shutil.copytree(trained("untied").base, other)
    settings = json.loads((other / "config.json").read_text())
    for change, message in (
        ({"hidden_size": 64}, "is of another model: model/lm_head.weight"),
        ({"num_hidden_layers": 3}, "lacks model/model.layers.2"),
        (
            {"num_hidden_layers": 1},
            "holds model/model.layers.1.input_layernorm.weight, which the model lacks",
        ),
    ):
        (other / "config.json").write_text(json.dumps(settings | change))
        error = complaint(capsys, run, out, "--model", other)
        assert message in error and f"model.path is {other}" in error
    assert not out.exists()


def test_an_output_in_use_is_left_alone(run: Path, trained, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("mine")
    assert f"OUT {out} is not empty" in complaint(capsys, run, out)
    assert f"OUT {out} is no model's folder" in complaint(capsys, run, out, "--overwrite")
    assert f"OUT {out}/precious is a file" in complaint(capsys, run, out / "precious")
    base = trained("untied").base
    for holder in (run, tmp_path, base):
        assert f"OUT {holder} holds what is exported" in complaint(capsys, run, holder, "--overwrite")
    inside = run / "checkpoints/step_000003/out"
    assert f"OUT {inside} is among the run's checkpoints" in complaint(capsys, run, inside)
    assert (out / "precious").read_text() == "mine"
    (out / "config.json").write_text("{}")
    assert main(["export", str(run), str(out), "--overwrite"]) == 0
    assert (out / "model.safetensors").is_file() and not (out / "precious").exists()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_an_export_that_failed(
    run: Path, tmp_path: Path, capsys, monkeypatch, error
) -> None:
    before = sorted(tmp_path.rglob("*"))

    def fail(*arguments):
        raise error

    monkeypatch.setattr(dapo.export, "write_card", fail)
    assert main(["export", str(run), str(tmp_path / "out")]) == (1 if isinstance(error, OSError) else 130)
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("size", ["5", "0GB", "five"])
def test_a_size_that_is_none_is_refused(tmp_path: Path, capsys, size: str) -> None:
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path), str(tmp_path / "out"), "--max-shard-size", size])
    assert "must be a size such as 5GB or 500MB" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "LoRA"])
def test_what_two_processes_saved_is_exported_by_one(tmp_path: Path, tiny_model_dir, kind: str) -> None:
    model = tied_model(tiny_model_dir, tmp_path / "tied") if kind == "tied" else tiny_model_dir
    config = tiny_config(tmp_path, model, **options(tmp_path), **KINDS[kind])
    command = torchrun(2, "-m", "dapo", "train", str(config))
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-6000:]
    run, out = tmp_path / "run", tmp_path / "out"
    assert len(list((run / f"checkpoints/step_{STEPS:06d}").glob("*.distcp"))) == 2
    assert export(run, out, "float32") == STEPS
    files, saved = (load_file(folder / "model.safetensors") for folder in (out, run / "model"))
    assert files.keys() == saved.keys()
    assert all(torch.equal(values, saved[name]) for name, values in files.items())
    assert "| processes | 2 |" in (out / "README.md").read_text()
