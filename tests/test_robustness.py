"""What runs meet: full disks, closed pipes, broken text, models that are too short."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import pytest
import torch
from loss_cases import HEAD, fast, make_case
from tiny import tiny_config, write_jsonl

from dapo.cli import main
from dapo.logging import RunLogger
from dapo_kernels import fused_linear_policy_loss


def one_line(capsys) -> str:
    err = capsys.readouterr().err
    assert err.startswith("dapo: ") and err.count("\n") == 1, err
    return err


def test_t16_full_disk_is_one_line_and_leaves_the_earlier_steps(
    tmp_path, tiny_model_dir, monkeypatch, capsys
):
    log_step = RunLogger.log_step

    def fail_at_step_2(self, metrics):
        if metrics["step"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device", str(self.run / "metrics.jsonl"))
        log_step(self, metrics)

    monkeypatch.setattr(RunLogger, "log_step", fail_at_step_2)
    assert main(["train", str(tiny_config(tmp_path, tiny_model_dir))]) == 1
    assert "No space left on device" in (line := one_line(capsys)) and "metrics.jsonl" in line
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1]


def test_training_goes_on_when_the_reader_of_its_output_leaves(tmp_path, tiny_model_dir):
    config = tiny_config(tmp_path, tiny_model_dir, **{"train.steps": 4})
    command = f"{sys.executable} -m dapo train {config} | head -n 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_half_a_surrogate_pair(tmp_path, tiny_model_dir, capsys):
    """In a prompt it is refused; in an answer, which is only compared and written, it does no harm."""
    config = tiny_config(tmp_path, tiny_model_dir)
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "1+1=\ud83d", "answer": "2"}])
    assert main(["train", str(config)]) == 2
    assert "row 1 is not valid Unicode" in one_line(capsys)
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": f"{i}+1=", "answer": "\ud83d"} for i in range(4)])
    assert main(["train", str(config), "algorithm.dynamic_sampling=false", "train.steps=1"]) == 0
    row = (tmp_path / "run" / "rollouts" / "step_000001.jsonl").read_text(encoding="utf-8").splitlines()[0]
    assert json.loads(row)["answer"] == "\ud83d"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["rollout.max_response_length=253"], "rollout.max_response_length (253) go beyond the model's 256"),
        (["reward.correct=-1.0"], "reward.correct (-1.0) must be over reward.wrong (-1.0)"),
        ([f"seed={2**64}"], "seed: input should be less than"),
    ],
)
def test_settings_that_cannot_work(tmp_path, tiny_model_dir, capsys, overrides, expected):
    assert main(["train", str(tiny_config(tmp_path, tiny_model_dir)), *overrides]) == 2
    assert expected in one_line(capsys)
    assert not (tmp_path / "run").exists()


def test_a_count_of_no_tokens_makes_a_loss_of_zero():
    case = make_case()
    case.mask = torch.zeros_like(case.mask)
    result = fast(case, denominator=case.mask.sum())
    assert result.output.loss == 0
    assert all(not result.grads[name].any() for name in HEAD)


def test_the_caller_s_count_may_change_between_forward_and_backward():
    case, count = make_case(), torch.tensor(10.0, dtype=torch.float64)
    want = fast(case, denominator=10.0).grads["weight"]
    weight = case.weight.clone().requires_grad_()
    loss = fused_linear_policy_loss(**case.arguments() | {"weight": weight}, denominator=count).loss
    count.zero_()
    loss.backward()
    torch.testing.assert_close(weight.grad, want)


def test_sums_and_metrics_share_no_memory():
    output = fast(make_case()).output
    output.sums["num_tokens"] += 100
    assert output.metrics["num_tokens"] == output.sums["num_tokens"] - 100
