"""The KL term to a reference model: its gradient, which model it is, and what cannot be one."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from objective_cases import (
    DRIFT,
    apart,
    plain_gradients,
)
from tiny import tiny_values
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from update_cases import (
    BATCH,
    assert_close,
    captured,
    groups_of,
    token_logprobs,
)

from dapo.config import Config
from dapo.errors import UserError
from dapo.model import Policy
from dapo.update import Updater


@pytest.fixture(scope="module")
def reference_dir(model_fp64, tmp_path_factory) -> Path:
    """The tiny model with other weights in its first layer."""
    folder, other = tmp_path_factory.mktemp("reference"), copy.deepcopy(model_fp64)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for parameter in other.model.layers[0].parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    other.float().save_pretrained(folder)
    return folder


KL = {
    "k3": lambda q: q.exp() - q - 1,
    "k2": lambda q: q.square() / 2,
    "k1": lambda q: -q,
}


@pytest.mark.parametrize("estimator", KL)
@pytest.mark.parametrize("corrected", [False, True])
def test_kl_term_to_a_reference_model(make, model, reference_dir, estimator: str, corrected: bool) -> None:
    reference = AutoModelForCausalLM.from_pretrained(reference_dir, dtype=torch.float64)
    kls = []

    def penalty(ids, response, logprobs, old) -> Tensor:
        with torch.no_grad():
            q_of = token_logprobs(reference, ids, response)
        kl = KL[estimator](q_of - logprobs)
        kls.append(kl.detach())
        return 0.7 * (kl * (logprobs - old).exp() if corrected else kl)

    groups = groups_of(model, step=0, drift=DRIFT)
    switches = {"kl_coef": 0.7, "kl_estimator": estimator, "kl_ratio_correction": corrected}
    updater = make(
        **{f"algorithm.{key}": value for key, value in switches.items()},
        **{"model.reference_path": str(reference_dir)},
    )
    (gradients,), stats = captured(updater, groups)
    want = plain_gradients(model, groups, more=penalty)
    assert_close(gradients, want, 1e-5)  # the reference is fp32, as the tiny configuration says
    assert apart(gradients, plain_gradients(model, groups))
    assert stats.metrics()["kl"] == pytest.approx(torch.cat(kls).mean().item(), rel=1e-5)
    assert all(parameter.grad is None for parameter in updater.reference.parameters())


def test_without_a_path_the_reference_is_the_initial_model_and_stays_it(
    make, model, tiny_model_dir: Path
) -> None:
    """Its log-probs come from a pass of its own; the only update on fresh samples still needs none of the
    policy."""
    options = {"algorithm.kl_coef": 0.5, "model.path": str(tiny_model_dir)}
    updater = make(**options, **{"optimizer.learning_rate": 0.05, "train.max_tokens_per_micro_batch": 10_000})
    forwards = []
    updater.policy.register_forward_pre_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    groups = groups_of(model)
    assert updater.run(groups, 1).metrics()["kl"] == pytest.approx(0, abs=1e-9) and forwards == [True]
    with torch.no_grad():
        initial = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64)
        pairs = [
            [token_logprobs(m, prompt, tokens) for m in (initial, model)]
            for prompt, responses in BATCH
            for tokens, *_ in responses
        ]
    q = torch.cat([before - after for before, after in pairs])
    kl = updater.run(groups_of(model), 2).metrics()["kl"]
    assert kl == pytest.approx((q.exp() - q - 1).mean().item(), rel=1e-4) and kl > 0.01


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_packed_rows_have_the_gradient_of_padded_ones(
    tmp_path, model_fp64, reference_dir, level: str
) -> None:
    values = tiny_values(tmp_path, tmp_path, **{"rollout.prompts_per_step": 4, "algorithm.kl_coef": 0.3})
    values["model"]["reference_path"] = str(reference_dir)
    values["algorithm"] |= {"ratio_level": level, "rollout_correction": "truncate"}
    values["algorithm"] |= {"token_level_loss": False}
    values["optimizer"]["max_grad_norm"] = 1e9
    config = Config.model_validate(values)
    taken = []
    for packing in (False, True):
        model = copy.deepcopy(model_fp64)
        groups = groups_of(model, BATCH[:2], step=0, drift=DRIFT) + groups_of(model, BATCH[2:], drift=DRIFT)
        updater = Updater(config, Policy(model, packing=packing))
        taken += captured(updater, groups)[0]
        assert updater.reference.packed == packing
    assert_close(taken[1], taken[0], 1e-5)


def test_a_reference_that_cannot_be_used_is_named(make, model, tmp_path: Path) -> None:
    kl = {"algorithm.kl_coef": 0.1}
    with pytest.raises(
        UserError, match=r"model\.reference_path \S+/none: no reference model could be loaded"
    ):
        make(**kl, **{"model.reference_path": str(tmp_path / "none")})
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes)).save_pretrained(tmp_path / "small")
    with pytest.raises(UserError, match=r"vocabulary of 50 tokens, the policy one of 99"):
        make(**kl, **{"model.reference_path": str(tmp_path / "small")})
    assert make(**{"model.reference_path": str(tmp_path / "none")}).reference is None  # not asked for
