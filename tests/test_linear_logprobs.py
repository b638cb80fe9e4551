"""`fused_linear_logprobs` against plain torch over full logits, with losses of the caller's own."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dapo_kernels import fused_linear_logprobs

N, H, V = 53, 17, 129
TRANSFORM = {"temperature": 0.7, "logit_scale": 0.8, "logit_softcap": 4.0}


def plain_logprobs(hidden, weight, targets, bias=None, temperature=1.0, logit_scale=1.0, logit_softcap=None):
    """`[N]` log-probs and entropy over full logits, in the dtype given."""
    z = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    z = z * logit_scale
    if logit_softcap is not None:
        z = logit_softcap * torch.tanh(z / logit_softcap)
    logp = (z / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def leaves(dtype=torch.float64, seed=0, scale=0.4):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64).to(dtype)
    weight = (torch.randn(V, H, generator=generator, dtype=torch.float64) * scale).to(dtype)
    bias = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype)
    return [leaf.requires_grad_() for leaf in (hidden, weight, bias)]


def targets_and_mask(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(V, (N,), generator=generator), torch.rand(N, generator=generator) < 0.6


def own_loss(logprobs, entropy):
    """K6, K7: gradients differ by token, and every token's depends on the others."""
    return (logprobs.cumsum(0) / 10).sin().sum() * logprobs.mean() + (entropy**2).mean() + entropy[::3].sum()


def gradients(loss, tensors):
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("options", [{}, TRANSFORM], ids=["plain", "transform"])
@pytest.mark.parametrize("chunk_tokens", [1, 7, None])
def test_k6_own_loss_has_the_gradient_of_full_logits(options, chunk_tokens):
    (hidden, weight, bias), (targets, mask) = leaves(), targets_and_mask()
    output = fused_linear_logprobs(
        hidden, weight, targets, mask=mask, bias=bias, chunk_tokens=chunk_tokens, **options
    )
    logprobs, entropy = plain_logprobs(hidden[mask], weight, targets[mask], bias, **options)
    torch.testing.assert_close(output.logprobs[mask], logprobs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output.entropy[mask], entropy, rtol=1e-12, atol=1e-12)
    assert not output.logprobs[~mask].any() and not output.entropy[~mask].any()

    ours = gradients(own_loss(output.logprobs[mask], output.entropy[mask]), (hidden, weight, bias))
    truth = gradients(own_loss(logprobs, entropy), (hidden, weight, bias))
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_plain_torch(dtype):
    low, (targets, _) = leaves(dtype), targets_and_mask()
    wide = [leaf.detach().double().requires_grad_() for leaf in low]
    truth = plain_logprobs(wide[0], wide[1], targets, wide[2])
    plain = plain_logprobs(low[0], low[1], targets, low[2])
    ours = fused_linear_logprobs(low[0], low[1], targets, bias=low[2])
    grads = [
        gradients(own_loss(*pair), inputs) for pair, inputs in ((truth, wide), (plain, low), (ours, low))
    ]
    for true, same, mine in zip((*truth, *grads[0]), (*plain, *grads[1]), (*ours, *grads[2])):
        error, allowed = (true - mine.double()).norm(), (true - same.double()).norm()
        assert error <= allowed + 1e-5 * true.norm()
    assert ours.logprobs.dtype == torch.float32 and grads[2][1].dtype == dtype
    assert (ours.logprobs - truth[0]).abs().max() < 1e-4


def test_gradcheck():
    (hidden, weight, bias), (targets, mask) = leaves(), targets_and_mask()

    def call(hidden, weight, bias):
        return fused_linear_logprobs(hidden, weight, targets[:9], mask=mask[:9], bias=bias, **TRANSFORM)

    inputs = (hidden[:9, :5].detach(), weight[:, :5].detach(), bias.detach())
    assert torch.autograd.gradcheck(call, [leaf.requires_grad_() for leaf in inputs])


def test_masked_rows_may_hold_anything():
    (hidden, weight, _), (targets, mask) = leaves(), targets_and_mask()
    clean = fused_linear_logprobs(hidden, weight, targets, mask=mask)
    dirty_hidden, dirty_targets = hidden.detach().clone(), targets.clone()
    dirty_hidden[~mask], dirty_targets[~mask] = torch.nan, -100
    dirty_hidden.requires_grad_()
    dirty = fused_linear_logprobs(dirty_hidden, weight, dirty_targets, mask=mask)
    assert torch.equal(clean.logprobs, dirty.logprobs) and torch.equal(clean.entropy, dirty.entropy)
    (grad,) = gradients(dirty.logprobs.sum() + dirty.entropy.sum(), (dirty_hidden,))
    assert grad.isfinite().all() and not grad[~mask].any()


def flops(call) -> float:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() / (2 * N * H * V)


def test_work_is_one_pass_forward_and_three_for_rows_with_gradient():
    (hidden, weight, _), (targets, _) = leaves(), targets_and_mask()
    output = fused_linear_logprobs(hidden, weight, targets)
    assert flops(lambda: fused_linear_logprobs(hidden, weight, targets)) == 1
    some = torch.arange(N) < 20
    loss = (output.logprobs * some).sum()
    assert flops(lambda: loss.backward(retain_graph=True)) == pytest.approx(3 * 20 / N)
    frozen = weight.detach()
    output = fused_linear_logprobs(hidden, frozen, targets)
    assert flops(lambda: output.logprobs.sum().backward()) == 2


def test_second_backward_and_scaled_gradients_are_exact():
    (hidden, weight, _), (targets, _) = leaves(torch.float32), targets_and_mask()
    loss = fused_linear_logprobs(hidden, weight, targets).logprobs.mean()
    loss.backward(retain_graph=True)
    first = hidden.grad.clone()
    loss.backward(retain_graph=True)
    assert torch.equal(hidden.grad, 2 * first)
    (scaled,) = gradients(loss * 65536, (hidden,))
    assert torch.equal(scaled, 65536 * first)


def test_entropy_alone_and_without_entropy():
    (hidden, weight, _), (targets, _) = leaves(), targets_and_mask()
    ours = gradients(fused_linear_logprobs(hidden, weight, targets).entropy.sum(), (hidden, weight))
    truth = gradients(plain_logprobs(hidden, weight, targets)[1].sum(), (hidden, weight))
    torch.testing.assert_close(ours, truth, rtol=1e-10, atol=1e-12)
    assert fused_linear_logprobs(hidden, weight, targets, return_entropy=False).entropy is None


def test_everything_masked_is_a_connected_zero():
    (hidden, weight, _), (targets, _) = leaves(), targets_and_mask()
    output = fused_linear_logprobs(hidden, weight, targets, mask=torch.zeros(N))
    output.logprobs.sum().backward()
    assert not output.logprobs.any() and not hidden.grad.any() and not weight.grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.full((N,), V)}, r"targets must be in \[0, 129\)"),
        ({"mask": torch.ones(N - 1)}, r"mask must have shape \[53\]"),
        ({"temperature": 0.0}, "temperature must be over 0"),
        ({"backend": "cuda"}, "backend must be"),
        ({"chunk_tokens": 0}, "chunk_tokens must be"),
    ],
)
def test_wrong_arguments(change, message):
    (hidden, weight, _), (targets, _) = leaves(), targets_and_mask()
    with pytest.raises(ValueError, match=message):
        fused_linear_logprobs(**{"hidden": hidden, "weight": weight, "targets": targets} | change)
