"""The objective in numbers worked out by hand, `policy_loss` against the definition, and every refusal."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import HEAD, OPTIONS, Result, check, fast, make_case, plain_logprobs, run

from dapo_kernels import PolicyLossConfig, fused_linear_policy_loss, policy_loss, reference

fp64 = torch.float64


def from_logprobs(case, scale=1.0, **extra):
    """`policy_loss` behind plain `log_softmax`, with gradients of hidden, weight and bias."""

    def loss(hidden, weight, bias, targets, **arguments):
        logprobs, entropy = plain_logprobs(replace(case, hidden=hidden, weight=weight, bias=bias))
        return policy_loss(logprobs, entropy=entropy, **arguments)

    return run(loss, case, scale, **extra)


@pytest.mark.parametrize("shape", [(5, 7), (29,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_policy_loss_agrees_with_the_definition(option, shape):
    case = make_case(shape, **OPTIONS[option])
    check(case, from_logprobs(case, scale=3.0), scale=3.0)
    check(case, from_logprobs(case, denominator=11.5), denominator=11.5)
    on_policy = replace(case, old_logprobs=None)
    check(on_policy, from_logprobs(on_policy))


@pytest.mark.parametrize("option", ["clip", "k1_ratio", "entropy", "skip"])
def test_policy_loss_ignores_masked_positions(option):
    case = make_case(**OPTIONS[option])
    dirty = case.with_garbage()
    results = []
    for one in (case, dirty):
        logprobs, entropy = plain_logprobs(case)
        if one is dirty:
            logprobs[~case.mask], entropy[~case.mask] = math.nan, math.inf
        leaves = {"hidden": logprobs.requires_grad_(), "weight": entropy.requires_grad_()}
        arguments = {k: v for k, v in one.arguments().items() if k not in (*HEAD, "targets")}
        output = policy_loss(logprobs, entropy=entropy, **arguments)
        output.loss.backward()
        results.append(Result(output, {name: leaf.grad for name, leaf in leaves.items()}).quantities())
    for name in results[0]:
        assert torch.equal(results[0][name], results[1][name]), name


@st.composite
def any_case(draw):
    """A case with any options, shape and mask, and any of the optional arguments left out."""

    def some(*values):
        return draw(st.sampled_from(values))

    case = make_case(
        some((1,), (9,), (2, 5), (4, 1), (2, 2, 3)),
        some(1, 5, 8),
        some(1, 2, 3, 17, 129),
        mask=some(0.0, 0.5, 1.1),
        seed=draw(st.integers(0, 99)),
        objective=some("clip", "cispo", "sapo"),
        dual_clip=some(None, 1.5),
        reduction=some("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "constant"),
        kl_coef=some(0.0, 0.5),
        kl_estimator=some("k3", "k2", "k1"),
        kl_ratio_correction=some(False, True),
        entropy_coef=some(0.0, 0.3),
        temperature=some(1.0, 0.6),
        logit_softcap=some(None, 2.0),
        skip_zero_advantage=some(False, True),
    )
    names = ["old_logprobs", "token_weights", "entropy_weights", "bias"]
    names += ["ref_logprobs"] if case.config.kl_coef == 0 else []
    return replace(case, **{name: None for name in names if draw(st.booleans())})


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    case=any_case(), chunk_tokens=st.sampled_from([None, 1, 3, 64]), denominator=st.sampled_from([None, 7.5])
)
def test_all_three_agree_on_any_options_shapes_and_masks(case, chunk_tokens, denominator):
    if case.config.reduction == "constant":
        denominator = 7.5
    check(case, fast(case, denominator=denominator, chunk_tokens=chunk_tokens), denominator=denominator)
    check(case, from_logprobs(case, denominator=denominator), denominator=denominator)


@pytest.mark.parametrize("option", ["clip", "dual", "sapo", "k3_ratio", "k2", "k1_ratio", "entropy_softcap"])
def test_gradcheck(option):
    """Against finite differences of the loss itself, at points that are not kinks."""
    case = make_case((2, 3), 3, 5, mask=0.8, **OPTIONS[option])
    leaves = [getattr(case, name).requires_grad_() for name in HEAD]

    def loss(hidden, weight, bias):
        head = {"hidden": hidden, "weight": weight, "bias": bias}
        return fused_linear_policy_loss(**{**case.arguments(), **head}, chunk_tokens=2).loss

    assert torch.autograd.gradcheck(loss, leaves)


# (config, A, ratio, reference ratio exp(q)) -> (loss, d loss / d logp), by hand.
LN2 = math.log(2)
BY_HAND = [
    ({}, 2, 1.1, 1, -2.2, -2.2),
    ({}, 2, 1.5, 1, -2 * 1.28, 0),
    ({}, 2, 0.5, 1, -1, -1),
    ({}, -2, 0.9, 1, 1.8, 1.8),
    ({}, -2, 0.5, 1, 1.6, 0),
    ({}, -2, 1.5, 1, 3, 3),
    ({"epsilon_low": 0.6, "epsilon_high": 0.6}, 2, 1.5, 1, -3, -3),
    ({"dual_clip": 1.4}, -2, 1.5, 1, 2.8, 0),
    ({"dual_clip": 1.4}, -2, 1.3, 1, 2.6, 2.6),
    ({"dual_clip": 1.4}, 2, 0.5, 1, -1, -1),
    ({"objective": "cispo"}, 2, 1.5, 1, -2 * 1.28 * -LN2, -2 * 1.28),
    ({"objective": "cispo"}, -2, 0.5, 1, 2 * 0.5 * -LN2, 1),
    ({"objective": "cispo", "cispo_bounds": (0.8, 9)}, 2, 0.5, 1, -2 * 0.8 * -LN2, -1.6),
    ({"objective": "sapo"}, 2, 1, 1, -4, -2),
    ({"objective": "sapo", "sapo_temperature_neg": 4}, -2, 1, 1, 1, 2),
    ({"objective": "sapo"}, 2, 1 + LN2, 1, -2 * 4 * 2 / 3, -2 * 4 * (2 / 9) * (1 + LN2)),
    ({"kl_coef": 3}, 0, 1, 2, 3 * (2 - LN2 - 1), 3 * (1 - 2)),
    ({"kl_coef": 3, "kl_estimator": "k2"}, 0, 1, 2, 1.5 * LN2**2, -3 * LN2),
    ({"kl_coef": 3, "kl_estimator": "k1"}, 0, 1, 2, -3 * LN2, 3),
    ({"kl_coef": 3, "kl_estimator": "k1", "kl_ratio_correction": True}, 0, 2, 2, -6 * LN2, 6 - 6 * LN2),
    ({"entropy_coef": 3}, 0, 1, 1, -3 * LN2, 0),
]


@pytest.mark.parametrize("name", ["fused", "reference"])
@pytest.mark.parametrize("config, advantage, ratio, ref_ratio, loss, grad", BY_HAND)
def test_by_hand(name, config, advantage, ratio, ref_ratio, loss, grad):
    """Two tokens with equal logits: p = 1/2, logp = -ln 2 and d logp / d hidden = 1 - p = 1/2."""
    call = fused_linear_policy_loss if name == "fused" else reference.linear_policy_loss
    hidden = torch.zeros(1, 1, dtype=fp64, requires_grad=True)
    weight = torch.tensor([[1.0], [0.0]], dtype=fp64)
    ratio, ref_ratio, advantages = (torch.tensor([x], dtype=fp64) for x in (ratio, ref_ratio, advantage))
    old, ref = -LN2 - ratio.log(), -LN2 + ref_ratio.log()
    output = call(
        hidden, weight, torch.tensor([0]), advantages, torch.tensor([1]), old,
        ref_logprobs=ref, config=PolicyLossConfig(**config),
    )  # fmt: skip
    output.loss.backward()
    assert output.loss.item() == pytest.approx(loss, rel=1e-12)
    assert output.token_loss.item() == pytest.approx(loss, rel=1e-12)
    assert hidden.grad.item() == pytest.approx(grad / 2, rel=1e-12, abs=1e-15)
    assert output.metrics["ratio_max"].item() == pytest.approx(ratio.item())
    assert output.metrics["approx_kl"].item() == pytest.approx(-math.log(ratio.item()))
    assert output.metrics["entropy"].item() == pytest.approx(LN2)


# Token losses 1, 2, 4, 8, 16, 32 (A = -loss, ratio 1); sequence 5 has one token that counts, 9 has none.
IDS = torch.tensor([7, 5, 7, 9, 5, 7])
MASK = torch.tensor([1, 0, 1, 0, 1, 1])
REDUCTIONS = {
    "token-mean": (None, (1 + 4 + 16 + 32) / 4),
    "seq-mean-token-mean": (None, ((1 + 4 + 32) / 3 + 16) / 2),
    "seq-mean-token-sum": (None, (1 + 4 + 32 + 16) / 2),
    "constant": (10, 5.3),
}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions_by_hand(reduction):
    """Interleaved sequences, one of them empty; then the default and a given denominator."""
    default, want = REDUCTIONS[reduction]
    config = PolicyLossConfig(reduction=reduction)
    tokens = -(2.0 ** torch.arange(6)), MASK
    count = {"token-mean": 4, "constant": 10}.get(reduction, 2)
    for denominator, right in ((default, want), (count * 4, want / 4), (torch.tensor(2 * count), want / 2)):
        shared = {"denominator": denominator, "sequence_ids": IDS, "config": config}
        head = torch.zeros(6, 1), torch.zeros(2, 1), torch.zeros(6, dtype=torch.long)
        assert fused_linear_policy_loss(*head, *tokens, **shared).loss.item() == pytest.approx(right)
        assert reference.linear_policy_loss(*head, *tokens, **shared).loss.item() == pytest.approx(right)
        assert policy_loss(torch.zeros(6), *tokens, **shared).loss.item() == pytest.approx(right)


def test_loss_is_fp32_whatever_the_denominator():
    for denominator in (3, 3.0, torch.tensor(3), torch.tensor(3.0, dtype=fp64)):
        case = make_case(dtype=torch.bfloat16)
        for result in (fast(case, denominator=denominator), from_logprobs(case, denominator=denominator)):
            assert {value.dtype for value in result.output[:4]} == {torch.float32}
        assert {value.dtype for value in fast(case).output.metrics.values()} == {torch.float32}
        assert {value.dtype for value in fast(case.to(fp64), denominator=denominator).output[:4]} == {fp64}


BAD_CONFIG = [
    {"objective": "ppo"}, {"objective": []}, {"reduction": "mean"}, {"kl_estimator": "k4"},
    {"epsilon_low": -0.1}, {"epsilon_low": 1.1}, {"epsilon_high": -0.1}, {"epsilon_high": math.nan},
    {"dual_clip": 1.2}, {"dual_clip": math.inf}, {"cispo_bounds": (2, 1)}, {"cispo_bounds": (-1, 1)},
    {"cispo_bounds": (1,)}, {"cispo_bounds": 5}, {"cispo_bounds": ("0", "1")}, {"cispo_bounds": (0, None)},
    {"sapo_temperature_pos": 0}, {"sapo_temperature_neg": -1}, {"temperature": 0}, {"logit_scale": 0},
    {"logit_softcap": 0}, {"kl_coef": math.nan}, {"kl_coef": None}, {"entropy_coef": "0.01"},
    {"epsilon_low": "1e-6"}, {"temperature": None}, {"dual_clip": True}, {"kl_ratio_correction": "no"},
    {"skip_zero_advantage": 1},
]  # fmt: skip


@pytest.mark.parametrize("bad", BAD_CONFIG, ids=str)
def test_config_refuses(bad):
    (name,) = bad
    with pytest.raises(ValueError, match=rf"^PolicyLossConfig\.{name} must be .*, got ") as error:
        PolicyLossConfig(**bad)
    assert repr(bad[name]) in str(error.value)


X, I = torch.zeros, torch.zeros(5, 6, dtype=torch.int64)  # noqa: E741
SEQUENCES = {"config": PolicyLossConfig(reduction="seq-mean-token-mean")}
PER_TOKEN = ("advantages", "mask", "old_logprobs", "ref_logprobs", "token_weights", "entropy_weights")
BAD_TOKENS = [
    *(({name: X(5, 6)}, rf"{name} must have shape \[5, 7\].*, got \[5, 6\]") for name in PER_TOKEN),
    *(({name: 0.5}, f"{name} must be a tensor, got float") for name in PER_TOKEN),
    ({"advantages": X(7)}, r"advantages must have shape \[5, 7\] or \[5\] or \[5, 1\].*, got \[7\]"),
    ({"mask": None}, "mask must be a tensor, got NoneType"),
    ({"token_weights": X(5)}, r"token_weights must have shape \[5, 7\] or \[5, 1\].*, got \[5\]"),
    ({"entropy_weights": X(5)}, r"entropy_weights must have shape \[5, 7\] or 0-d.*, got \[5\]"),
    ({"ref_logprobs": None, "config": PolicyLossConfig(kl_coef=0.5)}, "ref_logprobs is required when .*0.5"),
    ({"denominator": 0}, "denominator must be over 0, got 0"),
    ({"denominator": math.nan}, "denominator must be over 0, got nan"),
    ({"denominator": X(2)}, r"denominator must be a number or 0-d.*, got shape \[2\]"),
    ({"denominator": "3"}, "denominator must be a number or 0-d tensor, got str"),
    ({"config": PolicyLossConfig(reduction="constant")}, "denominator is required"),
    ({"sequence_ids": X(5, 7), **SEQUENCES}, "sequence_ids must be int64, got torch.float32"),
    ({"sequence_ids": [1], **SEQUENCES}, "sequence_ids must be a tensor, got list"),
    ({"sequence_ids": I, **SEQUENCES}, r"sequence_ids must have shape \[5, 7\].*, got \[5, 6\]"),
    ({"config": {}}, "config must be a PolicyLossConfig, got dict"),
]
BAD_HEAD = [
    ({"hidden": X(5, 7, 9)}, r"hidden must be .* = \[5, 7, 16\] .*\[5, 7\] .*\[53, 16\], got \[5, 7, 9\]"),
    ({"hidden": X(5, 16)}, r"hidden must be .*, got \[5, 16\]"),
    ({"hidden": I}, "hidden must be one of .*, got torch.int64"),
    ({"weight": X(53)}, r"weight must be \[V, H\], got \[53\]"),
    ({"weight": None}, "weight must be a tensor, got NoneType"),
    ({"bias": X(52)}, r"bias must be \[V\] = \[53\], got \[52\]"),
    ({"bias": 1.0}, "bias must be a tensor, got float"),
    ({"targets": X(5, 7)}, "targets must be int64, got torch.float32"),
    ({"targets": I}, r"hidden must be .* for targets \[5, 6\]"),
    ({"selection": X(3)}, r"selection must be \[n\] int64, got \[3\] torch.float32"),
    ({"selection": I}, r"selection must be \[n\] int64, got \[5, 6\]"),
    ({"selection": [1]}, "selection must be a tensor, got list"),
    ({"weight": X(53, 16).to("meta")}, "weight must be on cpu like the other arguments, got meta"),
    ({"mask": X(5, 7).to("meta")}, "mask must be on cpu like the other arguments, got meta"),
    ({"mask": X(5, 7) + 3}, "mask must be bool or 0/1, got .* values that are neither"),
    ({"weight": X(53, 16).to(torch.float8_e4m3fn)}, "weight must be one of .*, got torch.float8_e4m3fn"),
    ({"vocab_group": 5}, "vocab_group must be a ProcessGroup, got int"),
    ({"backend": "cuda"}, "backend must be one of .*'triton'.*, got 'cuda'"),
    ({"chunk_tokens": 0}, "chunk_tokens must be .* at least 1, got 0"),
    ({"chunk_tokens": 2.5}, "chunk_tokens must be .*, got 2.5"),
]
BAD_LOGPROBS = [
    ({"logprobs": I}, "logprobs must be a floating point tensor, got torch.int64"),
    ({"logprobs": 3}, "logprobs must be a floating point tensor, got 3"),
    ({"entropy": X(5, 6)}, r"entropy must have shape \[5, 7\], got \[5, 6\]"),
    ({"entropy": 1.0}, "entropy must be a tensor, got float"),
    ({"entropy": None, "config": PolicyLossConfig(entropy_coef=0.1)}, "entropy is required when .*0.1"),
]


@pytest.mark.parametrize("bad, message", BAD_TOKENS + BAD_HEAD)
def test_fused_call_refuses(bad, message):
    with pytest.raises((ValueError, TypeError), match="^" + message):
        fused_linear_policy_loss(**{**make_case(dtype=torch.float32).arguments(), **bad})


@pytest.mark.parametrize("bad, message", BAD_TOKENS + BAD_LOGPROBS)
def test_policy_loss_refuses(bad, message):
    tokens = {k: v for k, v in make_case().arguments().items() if k not in (*HEAD, "targets")}
    with pytest.raises((ValueError, TypeError), match="^" + message):
        policy_loss(**{"logprobs": X(5, 7), **tokens, **bad})


def test_packed_batch_needs_sequence_ids():
    with pytest.raises(ValueError, match=r"^sequence_ids is required for a packed batch \[9\]"):
        fast(replace(make_case((9,)), sequence_ids=None, **SEQUENCES))
