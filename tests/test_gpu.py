"""The Triton backend on a GPU, against fp64; `scripts/gpu_check.sh` runs this.

Uninitialised memory is filled with NaN, so that a number which was never written shows. With DAPO_GPU_DRY=1
the same tests run on CPU through the interpreter, at sizes that it can bear.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import replace

import pytest
import torch
from loss_cases import OPTIONS, LossCase, assert_same_bits, check, fast, logprob_gradients, make_case

from dapo_kernels import fused_linear_policy_loss

DRY = os.environ.get("DAPO_GPU_DRY") == "1"
pytestmark = pytest.mark.skipif(
    not (DRY or torch.cuda.is_available()), reason="no GPU (DAPO_GPU_DRY=1 interprets on CPU)"
)
DEVICE = "cpu" if DRY or not torch.cuda.is_available() else "cuda"
fp32, bf16, fp16, fp64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
VOCAB = 4200 if DRY else 152064


@pytest.fixture(autouse=True)
def poisoned_memory():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that have no deterministic version
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            assert torch.empty(2, device=DEVICE).isnan().all()
            yield
        finally:
            torch.use_deterministic_algorithms(False)


if DRY:
    pytestmark = [pytestmark, pytest.mark.usefixtures("interpreter_like_hardware")]


def on_device(case: LossCase) -> LossCase:
    tensors = {k: v.to(DEVICE) for k, v in case.arguments().items() if isinstance(v, torch.Tensor)}
    return replace(case, **tensors)


def check_on_device(case: LossCase, **extra) -> None:
    """Both backends. Tensor cores sum in an order of their own: more slack than on CPU."""
    case = on_device(case)
    for backend in ("triton", "torch"):
        check(case, fast(case, backend=backend, **extra), slack=10.0)


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(option, dtype):
    check_on_device(make_case((5, 7), 64, 131, dtype, **OPTIONS[option]), chunk_tokens=9)


@pytest.mark.parametrize("dtype", [bf16, fp16, fp32], ids=str)
@pytest.mark.parametrize("tokens", [3, 5 if DRY else 300])
@pytest.mark.parametrize("option", ["clip", "entropy_softcap", "sequence"])
def test_large_vocabulary(option, tokens, dtype):
    """Three tokens: rows are cut over programs. Three hundred: a program each, gradients over the logits."""
    check_on_device(make_case((1, tokens), 64, VOCAB, dtype, mask=2.0, **OPTIONS[option]))


@pytest.mark.parametrize("vocab", [1, 2, 129, 1023] + [32003, 151643] * (not DRY))
def test_vocabulary_of_any_size(vocab):
    check_on_device(make_case((70,), 16, vocab, bf16, entropy_coef=0.1))


@pytest.mark.parametrize("dtype", [bf16, fp32], ids=str)
def test_logprobs(dtype):
    case = on_device(make_case((11,), 64, VOCAB, dtype))

    truth = logprob_gradients(case.to(fp64), "torch")
    for ours, true in zip(logprob_gradients(case, "triton"), truth):
        error = (ours.double() - true).norm() / true.norm()
        assert error < (2**-7 if ours.dtype == bf16 else 1e-5)


def test_same_bits_from_run_to_run():
    case = on_device(make_case((4, 30), 64, VOCAB if not DRY else 301, bf16, kl_coef=0.1))
    assert_same_bits(
        fast(case, backend="triton", chunk_tokens=50), fast(case, backend="triton", chunk_tokens=50)
    )


@pytest.mark.skipif(DRY, reason="9 GB of logits")
def test_k14_more_than_two_to_the_31_logits():
    def run(chunk_tokens: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        hidden = torch.randn(14_200, 16, device=DEVICE, dtype=bf16, requires_grad=True)
        weight = torch.randn(152064, 16, device=DEVICE, dtype=bf16)
        ones = torch.ones(14_200, device=DEVICE)
        targets = torch.randint(152064, (14_200,), device=DEVICE)
        options = {"backend": "triton", "chunk_tokens": chunk_tokens}
        output = fused_linear_policy_loss(hidden, weight, targets, ones, ones, **options)
        output.loss.backward()
        return [output.logprobs, hidden.grad]

    whole, cut = run(14_200), run(4096)
    torch.testing.assert_close(whole[0], cut[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(whole[1], cut[1], rtol=2e-2, atol=1e-8)
