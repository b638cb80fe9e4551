"""`configs/algorithms`: each preset is the algorithm it names, and trains."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from tiny import tiny_config

from dapo.cli import main
from dapo.config import Config, load_config
from dapo.loss_inputs import loss_config

PRESETS = sorted((Path(__file__).parent.parent / "configs" / "algorithms").glob("*.yaml"))
PRESET_LOSS = {
    "dapo": {"epsilon_low": 0.2, "epsilon_high": 0.28, "reduction": "token-mean"},
    "grpo": {"epsilon_low": 0.2, "epsilon_high": 0.2, "reduction": "seq-mean-token-mean", "kl_coef": 0.04},
    "dr_grpo": {"epsilon_low": 0.2, "epsilon_high": 0.2, "reduction": "constant", "kl_coef": 0.0},
    "cispo": {"objective": "cispo", "cispo_bounds": (0, 5), "reduction": "token-mean"},
    "gspo": {"ratio_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4, "kl_coef": 0.0},
    "sapo": {"objective": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05},
}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda path: path.stem)
def test_presets_train(preset: Path, tmp_path: Path, tiny_model_dir: Path) -> None:
    options = {"train.steps": 2, "train.mini_batch_prompts": 1, "train.save_model": False}
    path = tiny_config(tmp_path, tiny_model_dir, **options)
    override = f"include=[{preset}]"
    config = load_config(path, [override])
    loss = loss_config(config, {})
    assert {key: getattr(loss, key) for key in PRESET_LOSS[preset.stem]} == PRESET_LOSS[preset.stem]
    assert main(["train", str(path), override]) == 0
    saved = (tmp_path / "run/config.yaml").read_text(encoding="utf-8")
    assert load_config(tmp_path / "run/config.yaml") == config
    assert "include" not in YAML(typ="safe", pure=True).load(saved)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [2, 4]
    assert all(math.isfinite(row["loss"]) and row["grad_norm"] > 0 for row in rows)
    assert ("kl" in rows[1]) == (preset.stem == "grpo")


def test_all_presets_are_tested() -> None:
    assert [preset.stem for preset in PRESETS] == sorted(PRESET_LOSS)
    assert load_config_of("dapo").algorithm == load_config_of().algorithm


def load_config_of(*presets: str) -> Config:
    quickstart = PRESETS[0].parent.parent / "quickstart.yaml"
    return load_config(quickstart, [f"include=[{PRESETS[0].parent / name}.yaml]" for name in presets])
