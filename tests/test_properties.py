"""Any options on any shapes, dtypes and masks: the fused loss is as near to fp64 as plain torch."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_cases import BOUNDS, LossCase, check, fast, make_case

fp64, fp32, bf16, fp16 = BOUNDS

SLACK = 5.0
"""Large ratios and KL terms multiply the rounding of a log-prob: more than BOUNDS allow for."""
OPTIONAL = ("old_logprobs", "ref_logprobs", "token_weights", "entropy_weights", "bias")


def nullable(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | values


@st.composite
def configs(draw) -> dict:
    epsilon_high = draw(st.sampled_from([0.05, 0.28, 0.5]))
    return {
        "epsilon_low": draw(st.sampled_from([0.05, 0.2, 0.5])),
        "epsilon_high": epsilon_high,
        "dual_clip": draw(nullable(st.sampled_from([1.5, 1.7]))),
        "objective": draw(st.sampled_from(["clip", "clip", "cispo", "sapo"])),
        "cispo_bounds": draw(nullable(st.just((0.9, 1.1)))),
        "sapo_temperature_pos": draw(st.sampled_from([0.5, 1.0])),
        "sapo_temperature_neg": draw(st.sampled_from([1.05, 2.0])),
        "ratio_level": draw(st.sampled_from(["token", "token", "sequence"])),
        "reduction": draw(st.sampled_from(["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])),
        "kl_coef": draw(st.sampled_from([0.0, 0.0, 0.1])),
        "kl_estimator": draw(st.sampled_from(["k3", "k2", "k1"])),
        "kl_ratio_correction": draw(st.booleans()),
        "entropy_coef": draw(st.sampled_from([0.0, 0.0, 0.01, -0.1])),
        "temperature": draw(st.sampled_from([0.6, 1.0, 1.7])),
        "logit_scale": draw(st.sampled_from([1.0, 0.5, -1.3])),
        "logit_softcap": draw(nullable(st.sampled_from([4.0, 30.0]))),
        "skip_zero_advantage": draw(st.booleans()),
    }


@st.composite
def cases(draw, dtypes, vocabs) -> LossCase:
    shape = draw(st.sampled_from([(1,), (9,), (37,), (1, 8), (5, 1), (4, 9), (2, 3, 4)]))
    case = make_case(
        shape,
        hidden_size=draw(st.sampled_from([1, 5, 16, 33])),
        vocab=draw(st.sampled_from(vocabs)),
        dtype=draw(st.sampled_from(dtypes)),
        mask=draw(st.sampled_from([0.0, 0.3, 0.7, 1.1])),
        seed=draw(st.integers(0, 1000)),
        **draw(configs()),
    )
    needed = {"ref_logprobs"} if case.config.kl_coef else set()
    left_out = draw(st.sets(st.sampled_from(OPTIONAL), max_size=3)) - needed
    return replace(case, **dict.fromkeys(left_out))


def calls(**extra) -> st.SearchStrategy:
    return st.fixed_dictionaries({"chunk_tokens": nullable(st.integers(1, 40)), **extra})


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases(list(BOUNDS), [1, 2, 3, 53, 129, 1023]), calls(), st.sampled_from([1.0, -0.5, 128.0]))
def test_torch_backend(case, call, scale):
    check(case, fast(case, scale, **call), scale, SLACK)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases([fp32, bf16, fp16], [1, 2, 53, 129, 1023]), calls())
def test_triton_backend(case, call):
    rows = pytest.importorskip("row_cases")
    with rows.rounding_interpreter():
        check(case, fast(case, backend="triton", **call), slack=SLACK)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(cases([fp64], [2, 53]), st.integers(1, 8))
def test_the_order_and_the_cut_of_tokens_do_not_matter(case, chunk_tokens):
    """Sequences in another order, in chunks of another size: the same loss and the same gradient."""
    order = torch.arange(case.targets.shape[0]).flip(0)
    turned = fast(case.pick(order), chunk_tokens=chunk_tokens)
    straight = fast(case)
    torch.testing.assert_close(turned.output.loss, straight.output.loss, rtol=1e-10, atol=1e-13)
    for name, grad in straight.grads.items():
        if grad is not None:
            other = turned.grads[name][order] if name == "hidden" else turned.grads[name]
            torch.testing.assert_close(other, grad, rtol=1e-9, atol=1e-12)
