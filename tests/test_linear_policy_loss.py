"""The fused linear policy loss against its definition: values, gradients, cost, memory, and the ways it is
called."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from loss_cases import (
    BOUNDS,
    HEAD,
    OPTIONS,
    LiveBytes,
    assert_same_bits,
    check,
    fast,
    make_case,
    run,
)
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bench.measure import gemm_flops
from dapo_kernels import (
    FusedLinearPolicyLoss,
    fused_linear_logprobs,
    fused_linear_policy_loss,
    linear_logprobs,
    reference,
    selection,
)

fp64, fp32, bf16, fp16 = BOUNDS


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_agrees_with_the_definition(option, dtype):
    """Padded and packed, in one chunk and in chunks that do not divide."""
    padded = make_case((5, 7), dtype=dtype, **OPTIONS[option])
    packed = make_case((29,), 19, 131, dtype, seed=1, **OPTIONS[option])
    for case in (padded, packed):
        check(case)
        check(case, fast(case, chunk_tokens=4))


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("scale", [1e-3, -3.0, 65536.0])
def test_any_incoming_gradient(scale, dtype):
    case = make_case(dtype=dtype, entropy_coef=0.02)
    case.advantages /= 4  # fp16 ends at 65504
    check(case, scale=scale)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (), (3, 1), (1, 6)], ids=str)
@pytest.mark.parametrize("vocab, hidden_size", [(2, 1), (507, 123), (64, 8)])
def test_shapes(shape, vocab, hidden_size):
    case = make_case(shape or (1,), hidden_size, vocab, kl_coef=0.1)
    check(case if shape else case.pick(0), scale=2.0)


def test_optional_arguments_left_out():
    for name in ("old_logprobs", "ref_logprobs", "token_weights", "entropy_weights", "bias"):
        check(replace(make_case(entropy_coef=0.1), **{name: None}))
    bare = dict.fromkeys(("ref_logprobs", "token_weights", "entropy_weights", "bias", "sequence_ids"))
    check(replace(make_case(reduction="seq-mean-token-mean"), **bare))


def test_advantages_per_sequence():
    case = make_case(entropy_coef=0.1)
    column = case.advantages[:, 0]
    full = fast(replace(case, advantages=column[:, None].expand(case.targets.shape)))
    for advantages in (column, column[:, None]):
        short = replace(case, advantages=advantages, entropy_weights=torch.tensor(0.5).double())
        check(short)
        assert_same_bits(full, fast(replace(case, advantages=advantages)))


@pytest.mark.parametrize("shape", [(5, 7), (29,)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_masked_positions_may_hold_anything(option, shape):
    case = make_case(shape, dtype=bf16, **OPTIONS[option])
    for mask in (case.mask, case.mask.float(), case.mask.long()):
        clean, dirty = replace(case, mask=mask), replace(case, mask=mask).with_garbage()
        assert dirty.hidden.isnan().any() and dirty.hidden.isinf().any()
        assert_same_bits(fast(clean, chunk_tokens=5), fast(dirty, chunk_tokens=5))


@pytest.mark.parametrize("option", ["clip", "entropy", "token_sum"])
def test_selection_given(option):
    """Masked tokens are all left out, in whatever order the others are named, and ids are not looked at."""
    case = make_case(**OPTIONS[option])
    index = case.mask.reshape(-1).nonzero().squeeze(1)
    check(case, fast(case.with_garbage(), selection=index, chunk_tokens=4))
    check(case, fast(case, selection=index.flip(0)))


@pytest.mark.parametrize("option", ["skip", "sequence_skip"])
def test_selection_given_where_zero_advantages_are_skipped(option):
    """The unmasked tokens are named; what is skipped is as if it had not been."""
    case = make_case((6, 9), **OPTIONS[option])
    case.advantages[1:3] = 0.0
    case.token_weights[4, :3] = 0.0
    index = case.mask.reshape(-1).nonzero().squeeze(1)
    check(case, fast(case, selection=index, chunk_tokens=4))


def test_non_contiguous_arguments():
    case = make_case((6, 5), kl_coef=0.1)
    every_second = {
        name: value.repeat_interleave(2, -1)[..., ::2]
        for name, value in case.arguments().items()
        if isinstance(value, torch.Tensor)
    }
    transposed = {
        "hidden": case.hidden.transpose(0, 1).contiguous().transpose(0, 1),
        "weight": case.weight.T.contiguous().T,
    }
    for other in (replace(case, **every_second), replace(case, **{**every_second, **transposed})):
        assert not any(getattr(other, name).is_contiguous() for name in every_second)
        check(case, fast(other, chunk_tokens=7))


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients(guard):
    case = make_case(entropy_coef=0.1, kl_coef=0.1)
    with guard():
        scored = fast(case)
    assert not scored.output.loss.requires_grad
    assert_same_bits(scored, fast(case, needs=()))
    trained = fast(case)
    assert all(torch.equal(a, b) for a, b in zip(scored.output[:4], trained.output[:4]))


@pytest.mark.parametrize(
    "needs", [("hidden",), ("weight",), ("bias",), ("hidden", "bias"), ("weight", "bias")]
)
def test_frozen_inputs_get_none(needs):
    case = make_case(entropy_coef=0.1)
    some, everything = fast(case, needs=needs, chunk_tokens=6), fast(case, chunk_tokens=6)
    for name in HEAD:
        assert (some.grads[name] is not None) == (name in needs)
        assert name not in needs or torch.equal(some.grads[name], everything.grads[name])


@pytest.mark.parametrize("dtype", [fp32, bf16], ids=str)
def test_autocast_and_matmul_precision_change_nothing(dtype):
    case = make_case(hidden_size=256, dtype=dtype)
    plain = fast(case)
    with torch.autocast("cpu", dtype=bf16):
        assert_same_bits(plain, fast(case))
    torch.set_float32_matmul_precision("medium")
    try:
        assert_same_bits(plain, fast(case))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("dynamic", [None, True])
def test_inside_torch_compile(dynamic):
    """Correct with one graph break, and a new N recompiles nothing once N is known to change."""
    counter = CompileCounter()

    @torch.compile(backend=counter, dynamic=dynamic)
    def step(hidden, **arguments):
        return fused_linear_policy_loss(hidden * 2, **arguments).loss * 3

    frames = []
    for n in (5, 7, 9, 12):
        case = make_case((n,), dtype=fp32)
        arguments = case.arguments()
        leaf = arguments["hidden"].clone().requires_grad_()
        step(**{**arguments, "hidden": leaf}).backward()
        want = fast(replace(case, hidden=case.hidden * 2), scale=3.0)
        torch.testing.assert_close(leaf.grad, 2 * want.grads["hidden"])
        frames.append(counter.frame_count)
    assert frames[0] == 2, "one graph before the loss, one after it"
    assert frames[1 - bool(dynamic)] == frames[-1]


class NoHostReads(TorchDispatchMode):
    """Refuses what would wait for a device, `read_back` apart (`tolist` is not dispatched on CPU)."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.name() not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("option", OPTIONS)
def test_one_host_read_a_call(option, monkeypatch):
    reads = []
    for module in (selection, linear_logprobs):
        monkeypatch.setattr(module, "read_back", lambda values: reads.append(1) or values.tolist())
    case = make_case(**OPTIONS[option])
    leaves = {name: getattr(case, name).requires_grad_() for name in HEAD}
    with NoHostReads():
        output = fused_linear_policy_loss(**{**case.arguments(), **leaves}, chunk_tokens=3)
        assert len(reads) == 1
        scored = fused_linear_logprobs(
            leaves["hidden"], leaves["weight"], case.targets.clamp(0), chunk_tokens=3
        )
        assert len(reads) == 2
        scored.logprobs.sum().backward()
    assert len(reads) == 3
    output.loss.backward()


@pytest.mark.parametrize("option", OPTIONS)
def test_fake_tensors_run_through(option):
    """What memory estimates run on: shapes alone, with the selection given."""
    case = make_case(dtype=bf16, **OPTIONS[option])
    with FakeTensorMode() as mode:
        arguments = {
            name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for name, value in case.arguments().items()
        }
        leaves = {name: arguments[name].requires_grad_() for name in HEAD}
        index = torch.arange(20)
        fused_linear_policy_loss(**{**arguments, **leaves}, selection=index).loss.backward()
        assert all(leaf.grad.shape == leaf.shape and leaf.grad.dtype == bf16 for leaf in leaves.values())


def test_inside_activation_checkpointing_and_as_a_module():
    case = make_case()
    module = FusedLinearPolicyLoss(case.config, chunk_tokens=4)

    def checkpointed(**arguments):
        del arguments["config"]
        return checkpoint(lambda: module(**arguments), use_reentrant=False)

    assert_same_bits(fast(case, chunk_tokens=4), run(checkpointed, case))
    assert "chunk_tokens=4" in repr(module)


def test_same_bits_from_run_to_run():
    for option in ("clip", "entropy_softcap", "k3_ratio"):
        case = make_case((40, 30), 32, 301, bf16, **OPTIONS[option])
        assert_same_bits(fast(case, chunk_tokens=100), fast(case, chunk_tokens=100))


def pieces_of(case, parts, denominator, **extra):
    grads = {name: 0 for name in HEAD}
    for part in parts:
        for name, grad in fast(case.pick(part), denominator=denominator, **extra).grads.items():
            if name == "hidden":
                whole = torch.zeros_like(case.hidden)
                whole[part] = grad
                grad = whole
            grads[name] = grads[name] + grad
    return grads


@pytest.mark.parametrize("option", OPTIONS)
def test_cut_into_pieces_with_the_global_denominator(option):
    """The step's gradient does not depend on how its batch was cut into micro-batches."""
    case = make_case((7, 9), **OPTIONS[option])
    case.mask[2] = False
    by_sequence = case.config.reduction.startswith("seq")
    count = int(case.mask.any(1).sum() if by_sequence else case.mask.sum())
    whole = fast(case).grads
    for denominator in (count, torch.tensor(float(count)), torch.tensor(count)):
        grads = pieces_of(case, [slice(0, 1), slice(1, 3), slice(3, 7)], denominator, chunk_tokens=5)
        for name in HEAD:
            torch.testing.assert_close(grads[name], whole[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("call", ["loss", "logprobs"])
def test_shifted_hidden_is_not_copied(call):
    """`hidden[:, :-1]` has no flat view: its rows are gathered a chunk at a time."""
    whole = torch.randn(8, 257, 64)
    hidden = whole[:, :-1].requires_grad_()
    weight, targets = torch.randn(96, 64), torch.randint(96, (8, 256))
    mask = torch.rand(8, 256) < 0.1
    with LiveBytes() as memory:
        if call == "loss":
            loss = fused_linear_policy_loss(
                hidden, weight, targets, torch.ones(8), mask, chunk_tokens=32
            ).loss
        else:
            loss = fused_linear_logprobs(hidden, weight, targets, mask=mask, chunk_tokens=32).logprobs.sum()
        loss.backward()
    gradient = hidden.nbytes
    assert memory.sizes.count(gradient) == 1 and memory.peak < 1.5 * gradient


# Cost, in u = 2 N H V: g + 2f. Entropy may cost one multiply-add a logit more, 1/64 u here.
N, H, V = 64, 64, 96
HALF = torch.arange(N) % 2 == 0
COST = {
    "full": (3, {}, {}, HEAD),
    "half_masked": (1.5, {"mask": HALF}, {}, HEAD),
    "half_zero_advantage": (2, {"advantages": HALF.float()}, {}, HEAD),
    "half_zero_weight": (2, {"token_weights": HALF.float()}, {}, HEAD),
    "half_zero_but_bonus": (3, {"advantages": HALF.float()}, {"entropy_coef": 0.1}, HEAD),
    "half_zero_but_kl": (3, {"advantages": HALF.float()}, {"kl_coef": 0.1}, HEAD),
    "half_skipped": (1.5, {"advantages": HALF.float()}, {"skip_zero_advantage": True}, HEAD),
    "masked_and_zero": (0.5, {"mask": HALF, "advantages": torch.zeros(N)}, {}, HEAD),
    "no_gradient": (1, {}, {}, ()),
    "weight_frozen": (2, {}, {}, ("hidden",)),
    "hidden_frozen": (2, {}, {}, ("weight", "bias")),
}


@pytest.mark.parametrize("name", COST)
def test_cost(name):
    u, changes, config, needs = COST[name]
    case = make_case((N,), H, V, fp32, mask=1.1, **config)
    case.advantages = case.advantages.abs() + 1
    case = replace(case, **changes)
    for chunk_tokens in (None, 12):
        cost = gemm_flops(partial(fast, case, needs=needs, chunk_tokens=chunk_tokens)) / (2 * N * H * V)
        assert u <= cost <= u + 1 / 64
    if name == "full":
        assert gemm_flops(partial(run, reference.linear_policy_loss, case)) == 6 * N * H * V


@pytest.mark.parametrize("config", [{}, OPTIONS["entropy_softcap"], OPTIONS["k3_ratio"]], ids=str)
def test_memory(config, monkeypatch):
    """Beyond inputs and gradients: the budget, and at most 64 bytes a token. After backward: the outputs."""
    vocab, budget = 260, 64 * 260 * 4
    monkeypatch.setattr("dapo_kernels.head.CPU_WORKSPACE_BYTES", budget)
    peaks = {}
    for n in (1024, 4096):
        case = make_case((8, n // 8), 8, vocab, fp32, **config)
        wide = case.to(fp64)  # so that every per-token input needs a copy in fp32
        leaves = {name: getattr(case, name).requires_grad_() for name in HEAD}
        with LiveBytes() as memory:
            output = fused_linear_policy_loss(**{**wide.arguments(), **leaves})
            peaks[n] = memory.peak
            output.loss.backward()
        # hidden's gradient, or a chunk that fills the budget with its hidden rows; never [N, V]
        assert n * 8 * 4 <= max(memory.sizes) <= max(n * 8 * 4, budget)
        gradients = sum(leaf.nbytes for leaf in leaves.values())
        assert memory.live <= n * 3 * 4 + gradients + 1024  # log-probs, entropy, token loss
    assert (peaks[4096] - peaks[1024]) / 3072 <= 64 + 8 * 4  # 8 * 4: of hidden's gradient
    assert peaks[1024] <= 1024 * (64 + 8 * 4) + 8 * budget + vocab * 9 * 4
