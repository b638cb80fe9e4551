"""Faults that users of fused losses reported, one test a row (K-numbers as in the project's fault list)."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from unittest import mock

import pytest
import torch
from loss_cases import HEAD, LiveBytes, assert_same_bits, check, fast, make_case, plain_logprobs

from bench.measure import gemm_flops
from dapo_kernels import PolicyLossConfig, fused_linear_policy_loss, gemm
from dapo_kernels.objective import TokenInputs

fp64, fp32, bf16 = torch.float64, torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
@pytest.mark.parametrize("vocab", [1, 2, 129, 1023, 32003, 129920, 151643])
def test_k1_vocabulary_of_any_size(vocab, dtype):
    case = make_case((11,), 8, vocab, dtype, entropy_coef=0.1)
    result = fast(case, chunk_tokens=4)
    assert (result.output.logprobs <= 0).all()
    check(case, result, slack=max(1, vocab / 2000))  # a long fp32 product


@pytest.mark.parametrize("offset", [-300.0, 1e4, -1e4])
def test_k2_common_offset_of_all_logits(offset):
    """Everything lies on a grid of 1/256, so that fp32 holds the shifted logits exactly."""
    case = make_case((3, 5), 4, 37, fp32, entropy_coef=0.1)
    case.hidden, case.weight = (case.hidden * 16).round() / 16, (case.weight * 16).round() / 16
    case.bias = (case.bias * 256).round() / 256
    moved = replace(case, bias=case.bias + offset)
    plain, shifted = fast(case).quantities(), fast(moved).quantities()
    for name in ("logprobs", "entropy", "loss", "grad.hidden", "grad.weight", "grad.bias"):
        torch.testing.assert_close(shifted[name], plain[name], rtol=2e-6, atol=2e-7)
    check(moved)


def test_k2_target_so_far_down_that_its_exponential_is_0():
    """Then its softcap's slope cannot come from the exponential; gradient 1 - p = 1 flows through it."""
    case = make_case((3, 4), 4, 7, torch.float32, logit_softcap=50.0, temperature=0.5)
    case.bias[:2] += torch.tensor([60.0, -60.0])
    case = replace(case, targets=torch.ones_like(case.targets), old_logprobs=None)
    result = fast(case)
    assert result.output.logprobs[case.mask].max() < -104 and result.grads["bias"][1].abs() > 0.01
    check(case, result, slack=8)  # |z| is about 100


@pytest.mark.parametrize("shape", [(3, 5), (15,), (0,), (2, 0)], ids=str)
@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_k3_everything_masked(shape, reduction):
    case = make_case(shape, dtype=bf16, mask=0.0, entropy_coef=0.1, reduction=reduction)
    result = fast(case.with_garbage())
    assert result.output.loss == 0 and result.output.loss.requires_grad
    for name in HEAD:
        assert torch.equal(result.grads[name], torch.zeros_like(getattr(case, name)))
    assert all(value == 0 for value in result.output.metrics.values())


def test_k4_gradient_where_the_target_is_nearly_certain():
    """p(y) = 0.9995 and beyond: the target's gradient is p - 1, which bf16 and even fp32 round away."""
    for gap in (7.6, 16.0, 24.0):
        hidden = torch.tensor([[gap]], dtype=bf16, requires_grad=True)
        weight = torch.tensor([[1.0], [0.0]], dtype=bf16, requires_grad=True)
        bias = torch.zeros(2, requires_grad=True)
        one = torch.ones(1)
        output = fused_linear_policy_loss(hidden, weight, torch.tensor([0]), one, one, bias=bias)
        output.loss.backward()
        right = math.exp(-hidden.item()) / (1 + math.exp(-hidden.item()))  # 1 - p
        assert output.logprobs.item() == pytest.approx(-math.log1p(math.exp(-hidden.item())), rel=1e-5)
        assert bias.grad.tolist() == pytest.approx([-right, right], rel=1e-5)
        assert hidden.grad.item() == pytest.approx(-right, rel=0.01)
        assert weight.grad.flatten().tolist() == pytest.approx([-right * gap, right * gap], rel=0.01)


def test_k5_weight_gradient_over_many_chunks():
    case = make_case((640,), 16, 67, bf16)
    truth = fast(case.to(fp64)).grads["weight"]
    one, many = (fast(case, chunk_tokens=n).grads["weight"].double() for n in (640, 10))
    assert (many - truth).norm() <= (one - truth).norm() + 1e-3 * truth.norm()
    bias = [fast(case, chunk_tokens=n).grads["bias"].double() for n in (640, 10)]
    torch.testing.assert_close(bias[1], bias[0], rtol=2**-7, atol=1e-6)


def test_k7_entropy_gradient():
    """Of the bonus alone: dH/dz_j = -p_j (log p_j + H), through every token and not 0."""
    case = make_case((4, 5), mask=1.1, entropy_coef=0.5)
    case = replace(case, advantages=torch.zeros_like(case.advantages), entropy_weights=None)
    z = case.hidden @ case.weight.T + case.bias
    logp = torch.log_softmax(z, -1)
    p = logp.exp()
    entropy = -(p * logp).sum(-1, keepdim=True)
    grad = 0.5 * p * (logp + entropy) / case.mask.sum()
    assert grad.norm() > 0.01
    torch.testing.assert_close(fast(case).grads["hidden"], grad @ case.weight, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(fast(case).grads["bias"], grad.sum((0, 1)), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(
    "hidden, weight, bias", [(bf16, fp32, fp32), (fp32, bf16, bf16), (torch.float16, bf16, fp64)]
)
def test_k8_mixed_dtypes(hidden, weight, bias):
    case = make_case(dtype=bf16, entropy_coef=0.1)
    mixed = replace(
        case, hidden=case.hidden.to(hidden), weight=case.weight.to(weight), bias=case.bias.to(bias)
    )
    result, truth = fast(mixed), fast(case.to(fp64))
    with torch.autocast("cpu", dtype=bf16):
        assert_same_bits(result, fast(mixed))
    torch.testing.assert_close(result.output.logprobs.double(), truth.output.logprobs, rtol=0, atol=1e-5)
    for name in HEAD:
        grad, leaf = result.grads[name], getattr(mixed, name)
        assert grad.dtype == leaf.dtype
        bound = 2 * torch.finfo(leaf.dtype).eps if leaf.dtype in (bf16, torch.float16) else 1e-5
        assert (grad.double() - truth.grads[name]).abs().max() <= bound * truth.grads[name].abs().max()


def test_k9_huge_log_ratio():
    case = make_case((2, 2), mask=1.1)
    logprobs = plain_logprobs(case)[0]
    case.mask = torch.tensor([[True, True], [False, True]])
    case.advantages = torch.tensor([[-1.0, 1.0], [-1.0, -1.0]], dtype=fp64)
    case.token_weights = None
    for log_ratio in (200.0, -200.0):
        case.old_logprobs = logprobs - log_ratio
        result = fast(case)
        check(case, result)
        assert result.output.token_loss[1, 0] == 0 and not result.grads["hidden"][1, 0].any()
        # The ratio stops at exp(20), and no gradient goes through it any more.
        ratio = math.exp(math.copysign(20, log_ratio))
        want = [max(ratio, 0.8), -min(ratio, 1.28), 0, max(ratio, 0.8)]
        assert result.output.token_loss.flatten().tolist() == pytest.approx(want, rel=1e-12)
        assert not result.grads["hidden"].any() and not result.grads["weight"].any()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [fp64, fp32, bf16], ids=str)
def test_k10_banned_token(dtype, softcap):
    """A logit of -inf that was not chosen: probability 0, and the same result as without its column."""
    case = make_case((3, 4), vocab=9, dtype=dtype, entropy_coef=0.2, logit_softcap=softcap)
    case.targets = case.targets % 8
    case.bias[8] = -math.inf
    result = fast(case)
    check(case, result)
    assert all(value.isfinite().all() for value in result.quantities().values())
    if softcap is None:  # a softcap makes -cap of -inf: not banned any more
        small = fast(replace(case, weight=case.weight[:8], bias=case.bias[:8]))
        torch.testing.assert_close(result.grads["hidden"], small.grads["hidden"])
        torch.testing.assert_close(result.output.entropy, small.output.entropy)
        assert not result.grads["weight"][8].any() and result.grads["bias"][8] == 0


def test_k11_temperature_of_sampling():
    case = make_case((6, 9), dtype=bf16, temperature=0.6)
    case.old_logprobs = plain_logprobs(case.to(fp64))[0].float()
    metrics = fast(case).output.metrics
    assert metrics["ratio_mean"].item() == pytest.approx(1, abs=1e-4)
    assert metrics["ratio_max"].item() == pytest.approx(1, abs=1e-4)
    other = fast(replace(case, config=replace(case.config, temperature=1.0))).output.metrics
    assert abs(other["ratio_max"].item() - 1) > 0.1


@pytest.mark.parametrize("target", [-100, -1, 53, 60])
def test_k12_target_outside_the_vocabulary(target):
    case = make_case((3, 4), mask=1.1)
    case.targets[1, 2] = target
    with pytest.raises(ValueError, match=rf"targets must be in \[0, 53\) where mask is 1, .* {target}$"):
        fast(case)
    case.mask[1, 2] = False
    assert_same_bits(fast(case), fast(replace(case, targets=case.targets.clamp(0, 52))))


def test_k13_long_sequence():
    case = make_case((1, 70_000), 2, 5, fp32, reduction="seq-mean-token-mean")
    check(case)
    if find_spec("triton"):
        from dapo_kernels.kernels.loss_rows import launch_arguments
        from dapo_kernels.row_layout import empty_rows

        column = torch.empty(70_000, device="meta")
        inputs = TokenInputs(column, None, None, None, None)
        logits, targets = empty_rows(70_000, 5000, device="meta"), column.long()
        _, grid = launch_arguments(logits, targets, inputs, PolicyLossConfig(), column, fp32)
        assert grid == (70_000,), "the x axis, which goes to 2**31"


def test_k15_no_advantage_anywhere():
    case = make_case((4, 6), dtype=bf16)
    truth = fast(case).output
    result = fast(replace(case, advantages=torch.zeros_like(case.advantages)))
    assert result.output.loss == 0
    assert not any(result.grads[name].any() for name in HEAD)
    assert truth.logprobs.any()
    # Other rows share a GEMM now: bits may differ.
    torch.testing.assert_close(result.output.logprobs, truth.logprobs)
    torch.testing.assert_close(result.output.entropy, truth.entropy)


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_k16_backward_twice_and_scaled(dtype):
    case = make_case(dtype=dtype, kl_coef=0.1)
    once, scaled = fast(case).grads, fast(case, scale=65536.0).grads
    leaf = case.hidden.clone().requires_grad_()
    weight = case.weight.clone().requires_grad_()
    loss = fused_linear_policy_loss(**{**case.arguments(), "hidden": leaf, "weight": weight}).loss
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(leaf.grad, 2 * once["hidden"]) and torch.equal(weight.grad, 2 * once["weight"])
    for name in HEAD:
        assert torch.equal(scaled[name], 65536 * once[name])
    with pytest.raises(RuntimeError, match="second time"):  # what it saved is freed
        loss.backward()


def test_k16_gradients_changed_between_two_backwards():
    """Clipping what the first backward left must not reach what the second one gives."""
    case = make_case(dtype=fp32)
    weight = case.weight.clone().requires_grad_()
    loss = fused_linear_policy_loss(**{**case.arguments(), "weight": weight}).loss
    loss.backward(retain_graph=True)
    want = weight.grad.clone()
    weight.grad.zero_()
    loss.backward(retain_graph=True)
    assert torch.equal(weight.grad, want)
    weight.grad = None
    loss.backward()
    assert torch.equal(weight.grad, want)
    weight.grad.zero_()


def test_precision_settings_survive_threads():
    """fp32 products stay fp32 in every thread, and the program's own setting is back afterwards."""
    setting = torch.backends.mkldnn.matmul
    before, seen = setting.fp32_precision, set()
    case = make_case((64,), dtype=fp32)
    product = gemm.logits_gemm

    def watched(*arguments, **named):
        seen.add(setting.fp32_precision)
        product(*arguments, **named)

    setting.fp32_precision = "bf16"
    try:
        with mock.patch("dapo_kernels.head.logits_gemm", watched), ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: fast(case, chunk_tokens=4), range(12)))
        assert seen == {"ieee"} and setting.fp32_precision == "bf16"
    finally:
        setting.fp32_precision = before


def test_k17_micro_batches_of_10_and_1000_tokens():
    case = make_case((1010,), 8, 31, mask=1.1)
    whole = fast(case, denominator=1010)
    parts = [fast(case.pick(part), denominator=1010) for part in (slice(0, 10), slice(10, 1010))]
    assert whole.output.loss.item() == pytest.approx(
        sum(part.output.loss.item() for part in parts), rel=1e-12
    )
    torch.testing.assert_close(torch.cat([part.grads["hidden"] for part in parts]), whole.grads["hidden"])
    for name in ("weight", "bias"):
        total = parts[0].grads[name] + parts[1].grads[name]
        torch.testing.assert_close(total, whole.grads[name], rtol=1e-10, atol=1e-15)
    sums = [{k: v for k, v in x.output.sums.items() if k != "ratio_max"} for x in (whole, *parts)]
    for name, value in sums[0].items():
        torch.testing.assert_close(sums[1][name] + sums[2][name], value, rtol=1e-10, atol=1e-12)


def test_k18_rollout_weights():
    case = make_case((2, 6), mask=1.1, entropy_coef=0.01)
    weights = torch.tensor([[0.01], [0.02]], dtype=fp64)
    per_row, per_token = (replace(case, token_weights=w) for w in (weights, weights.expand(2, 6)))
    assert_same_bits(fast(per_row), fast(per_token))
    check(per_row)
    bare = replace(case, token_weights=None, config=replace(case.config, entropy_coef=0.0))
    weighted = fast(replace(per_row, config=bare.config)).grads["hidden"]
    torch.testing.assert_close(weighted, fast(bare).grads["hidden"] * weights[..., None])


def test_k19_frozen_inputs_cost_nothing(monkeypatch):
    """Neither a buffer as large as the gradient that nobody asked for, nor its product."""
    monkeypatch.setattr("dapo_kernels.head.CPU_WORKSPACE_BYTES", 4 * 260 * 4)
    case = make_case((512,), 16, 260, fp32, mask=1.1)
    case.advantages = case.advantages.abs() + 1
    sizes = {"weight": case.weight.nbytes, "hidden": case.hidden.nbytes}
    for needs, frozen in (("hidden", "weight"), ("weight", "hidden")):
        with LiveBytes() as memory:
            flops = gemm_flops(lambda needs=needs: fast(case, needs=(needs,)))
        assert sizes[needs] in memory.sizes and sizes[frozen] not in memory.sizes
        assert 2 <= flops / (2 * 512 * 16 * 260) <= 2 + 1 / 16
