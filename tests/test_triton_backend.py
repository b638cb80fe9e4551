"""`backend="triton"` through the public calls: kernels interpreted, 16-bit products as on CUDA."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from loss_cases import BOUNDS, HEAD, OPTIONS, assert_same_bits, check, fast, logprob_gradients, make_case, run

from dapo_kernels import (
    FusedLinearPolicyLoss,
    PolicyLossConfig,
    fused_linear_policy_loss,
    gemm,
    reference,
)

pytest.importorskip("triton")

from dapo_kernels.kernels import launch

fp64, fp32, bf16, fp16 = BOUNDS
pytestmark = pytest.mark.usefixtures("interpreter_like_hardware")


@pytest.fixture
def mixed_gemm(monkeypatch):
    """Products as CUDA has them: 16-bit numbers in, fp32 sums out, and nothing else is taken."""

    def mixed_mm(a, b, out):
        assert a.dtype == b.dtype and a.dtype in (bf16, fp16) and out.dtype == fp32
        out.copy_(a.float() @ b.float())

    def mixed_addmm_(total, a, b):
        assert a.dtype == b.dtype and a.dtype in (bf16, fp16) and total.dtype == fp32
        total += a.float() @ b.float()

    monkeypatch.setattr(gemm, "has_mixed_gemm", lambda device_type: True)
    monkeypatch.setattr(gemm, "mixed_mm", mixed_mm)
    monkeypatch.setattr(gemm, "mixed_addmm_", mixed_addmm_)


@pytest.fixture(params=["one pass", "cut rows"])
def large_vocab(request, monkeypatch):
    """A vocabulary of two tiles, where few rows either are cut or not."""
    monkeypatch.setattr(launch, "FEW_PROGRAMS", 1 if request.param == "one pass" else 256)
    return 4200


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_agrees_with_the_definition(option, dtype):
    padded = make_case((5, 7), dtype=dtype, **OPTIONS[option])
    packed = make_case((29,), 19, 131, dtype, seed=1, **OPTIONS[option])
    for case in (padded, packed):
        check(case, fast(case, backend="triton"))
        check(case, fast(case, backend="triton", chunk_tokens=4))


@pytest.mark.parametrize("option", ["clip", "entropy_softcap", "k3_ratio", "sequence"])
def test_long_rows(option, large_vocab):
    case = make_case((2, 4), 16, large_vocab, fp32, **OPTIONS[option])
    check(case, fast(case, backend="triton"))


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [bf16, fp16], ids=str)
@pytest.mark.parametrize("option", ["clip", "entropy_softcap", "skip", "token_sum", "sequence", "k1_ratio"])
def test_gemms_of_16_bit_numbers(option, dtype, backend, mixed_gemm):
    """dlogits are rounded once to the dtype of the GEMM; log-probs stay those of fp32 logits."""
    case = make_case((5, 7), 24, 131, dtype, **OPTIONS[option])
    for scale in (1.0, 1024.0):
        result = fast(case, scale, backend=backend, chunk_tokens=9)
        # one rounding more than on CPU: of dlogits
        check(case, result, scale, slack=3.0)


def test_gemms_of_16_bit_numbers_on_long_rows(large_vocab, mixed_gemm):
    case = make_case((2, 4), 16, large_vocab, bf16, entropy_coef=0.1)
    check(case, fast(case, backend="triton"), slack=3.0)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("hidden, weight", [(bf16, fp32), (fp32, bf16), (bf16, fp16)], ids=str)
def test_k8_dtypes_that_differ_meet_in_fp32(hidden, weight, backend, mixed_gemm):
    """The fixture refuses a 16-bit product of different dtypes, and of fp32."""
    case = make_case((5, 7), 24, 131, fp32, entropy_coef=0.1)
    case = replace(case, hidden=case.hidden.to(hidden), weight=case.weight.to(weight))
    result = fast(case, backend=backend, chunk_tokens=9)
    assert result.grads["hidden"].dtype == hidden and result.grads["weight"].dtype == weight
    truth = fast(case.to(fp64))
    torch.testing.assert_close(result.output.logprobs.double(), truth.output.logprobs, rtol=0, atol=1e-5)
    for name in HEAD:
        error = (result.grads[name].double() - truth.grads[name]).abs().max()
        assert error < 2**-7 * truth.grads[name].abs().max(), name


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean"])
def test_fp16_gradients_do_not_flush_to_zero(reduction, mixed_gemm):
    """With 1 / denominator in the dlogits, most of their mass would be under fp16's smallest number."""
    case = make_case((2, 300), 16, 2000, fp16, mask=2.0, reduction=reduction)
    case.weight *= 0.02  # nearly uniform: every p is about 1 / 2000
    case.old_logprobs = None
    case.token_weights = None
    tokens = 3e5 if reduction == "token-mean" else 1e3
    scale = 2.0**16
    result = fast(case, scale, backend="triton", denominator=tokens)
    truth = run(reference.linear_policy_loss, case.to(fp64), scale, denominator=tokens)
    for name in ("weight", "bias"):
        error = (result.grads[name].double() - truth.grads[name]).norm() / truth.grads[name].norm()
        assert error < 2e-3, name


@pytest.mark.parametrize("vocab, dtype", [(53, fp32), (53, bf16), (4200, fp32)], ids=str)
def test_masked_positions_may_hold_anything(vocab, dtype):
    case = make_case((3, 7), vocab=vocab, dtype=dtype, kl_coef=0.1, entropy_coef=0.1)
    dirty = case.with_garbage()
    assert_same_bits(fast(case, backend="triton"), fast(dirty, backend="triton"))


@pytest.mark.parametrize("objective", ["clip", "cispo", "sapo"])
@pytest.mark.parametrize("name", ["hidden", "old_logprobs", "ref_logprobs", "token_weights"])
def test_nan_reaches_the_loss(name, objective, monkeypatch):
    """As in torch: a guard that looks at the loss must see it. Ids that nobody checks (`selection`) too."""
    case = make_case((5, 7), mask=2.0, dtype=fp32, kl_coef=0.1, objective=objective)
    case.advantages[2, 3] = 1.0
    getattr(case, name)[2, 3] = torch.nan
    result = fast(case, backend="triton")
    assert result.output.loss.isnan() and fast(case).output.loss.isnan()
    assert result.output.token_loss.isnan().sum() == 1
    case = make_case((5, 7), mask=2.0, dtype=fp32, objective=objective)
    case.advantages[2, 3] = 1.0
    case.targets[2, 3] = 60
    assert fast(case, backend="triton", selection=torch.arange(35)).output.loss.isnan()


@pytest.mark.parametrize("softcap", [0.5, 30.0, 1e3, 1e6])
def test_softcap_of_any_size(softcap):
    """Far from saturation tanh(u) is u: no digits are lost on the way."""
    case = make_case((11,), 16, 1000, fp32, logit_softcap=softcap)
    for backend in ("torch", "triton"):
        logprobs = fast(case, backend=backend).output.logprobs
        truth = fast(case.to(fp64)).output.logprobs
        torch.testing.assert_close(logprobs.double(), truth, rtol=1e-6, atol=2e-6)


def test_one_launch_and_no_other_row_operation(monkeypatch):
    """Token level, rows enough: the loss row kernel does it all, once a chunk, scored tokens included."""
    from dapo_kernels.kernels import triton_rows

    launches = []
    loss_rows = triton_rows.loss_rows
    monkeypatch.setattr(triton_rows, "loss_rows", lambda *a: launches.append(a[5]) or loss_rows(*a))
    monkeypatch.setattr(triton_rows.TritonRows, "statistics", None)
    case = make_case((5, 7), mask=2.0)
    case.advantages[:2] = 0.0
    case.advantages[2:] += 10.0
    fast(case.to(fp32), backend="triton", chunk_tokens=7)
    assert launches == [fp32] * 3 + [None] * 2


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7, "logit_softcap": 4.0}], ids=["plain", "softcap"]
)
@pytest.mark.parametrize("vocab", [129, 4200])
@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_logprobs_of_a_loss_of_ones_own(dtype, vocab, options, mixed_gemm):
    """K6, K7, as near to fp64 as the torch backend, which other tests hold to the truth."""
    case = make_case((11,), 16, vocab, dtype)

    truth = logprob_gradients(case.to(fp64), "torch", **options)
    for ours, torchs, true in zip(
        logprob_gradients(case, "triton", **options), logprob_gradients(case, "torch", **options), truth
    ):
        allowed = (torchs.double() - true).norm() + 1e-5 * true.norm()
        if ours.dtype == bf16:
            allowed += 2**-9 * true.norm()  # which way dlogits round is a matter of luck
        assert (ours.double() - true).norm() <= allowed


def test_module_and_checks():
    case = make_case(dtype=fp32)
    arguments = case.arguments()
    config = arguments.pop("config")
    module = FusedLinearPolicyLoss(config, backend="triton", chunk_tokens=5)
    assert torch.equal(module(**arguments).loss, fast(case, backend="triton", chunk_tokens=5).output.loss)
    with pytest.raises(ValueError, match="backend 'triton' computes in fp32: for fp64 inputs use 'torch'"):
        fast(make_case(), backend="triton")
    with pytest.raises(ValueError, match="targets must be in"):
        fast(replace(case, targets=case.targets + 53), backend="triton")


def test_without_interpreter_or_without_triton():
    """A process of its own, because this one imports Triton as an interpreter."""
    code = """
import sys, torch
if {hidden}: sys.modules["triton"] = None
from dapo_kernels import fused_linear_logprobs
try:
    fused_linear_logprobs(torch.ones(2, 4), torch.ones(3, 4), torch.zeros(2).long(), backend="triton")
except Exception as error:
    print(type(error).__name__, error)
"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    for hidden, want in ((0, "ValueError backend 'triton' needs tensors on a GPU, got hidden on cpu"),
                         (1, "ImportError backend 'triton' needs Triton: pip install triton")):  # fmt: skip
        program = [sys.executable, "-c", code.format(hidden=hidden)]
        assert want in subprocess.run(program, env=env, capture_output=True, text=True).stdout


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
@pytest.mark.parametrize("option", ["clip", "entropy_softcap", "sequence", "skip"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_tensors_without_memory(backend, option, dtype, monkeypatch):
    """Shapes alone, on a device that is not the CPU: with `selection` nothing is read back to the host."""
    monkeypatch.setattr(gemm, "has_mixed_gemm", lambda device_type: True)
    case = make_case((5, 7), 16, 131, dtype, **OPTIONS[option])
    arguments = {
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in case.arguments().items()
    }
    leaves = {name: arguments[name].requires_grad_() for name in HEAD}
    index = torch.empty(20, dtype=torch.int64, device="meta")
    output = fused_linear_policy_loss(**{**arguments, **leaves}, selection=index, backend=backend)
    output.loss.backward()
    assert all(leaf.grad.shape == leaf.shape and leaf.grad.dtype == dtype for leaf in leaves.values())
    assert output.logprobs.shape == (5, 7) and output.loss.dtype == fp32


def test_budget_on_a_gpu():
    """At least 4096 tokens a chunk; 1 GiB where that holds more."""
    from dapo_kernels.backends import TorchRows
    from dapo_kernels.head import Head, logits_buffer

    def chunk(vocab: int, hidden_size: int) -> tuple[int, int]:
        hidden = torch.empty(65536, hidden_size, device="meta")
        head = Head(hidden, hidden.new_empty(vocab, hidden_size), None, None)
        buffer = logits_buffer(head, 65536, None, TorchRows(PolicyLossConfig(), None, fp32))
        return buffer.shape[0], buffer.stride(0)

    assert chunk(152064, 5120) == (4096, 152064)
    assert chunk(151643, 5120) == (4096, 151680)
    tokens, _ = chunk(32000, 4096)
    assert 4096 < tokens <= 2**30 / (32000 * 4)
