"""The policy loss as ours and as peers compute it, each behind the same two calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bench import peers
from bench.workloads import Batch
from dapo_kernels import PolicyLossConfig, fused_linear_policy_loss, reference

CONFIG = PolicyLossConfig()


@dataclass(frozen=True)
class Implementation:
    key: str
    """What `--peers` and files call it."""
    name: str
    loss: Callable[[Batch], Tensor]
    """The 0-d policy loss, with a graph to hidden and weight."""
    logprobs: Callable[[Batch], Tensor] | None = None
    """`[B, T]` log-probs alone; None where the library does not give them."""
    package: str | None = None
    """What to install for it."""
    full_logits: bool = False
    """Holds all logits at once."""
    compiles: bool = False
    """Compiles anew for every shape: run where a workload says so."""
    exact_loss: bool = True
    """False: not the policy loss, so its gradient is not compared."""

    @property
    def ours(self) -> bool:
        return self.package is None and not self.full_logits


def fused(batch: Batch, config: PolicyLossConfig = CONFIG, **options) -> Tensor:
    return fused_linear_policy_loss(**batch.arguments(), config=config, **options).loss


def fused_logprobs(batch: Batch, **options) -> Tensor:
    with torch.no_grad():
        return fused_linear_policy_loss(**batch.arguments(), config=CONFIG, **options).logprobs


def plain(batch: Batch) -> Tensor:
    return reference.linear_policy_loss(**batch.arguments(), config=CONFIG).loss


def plain_logprobs(batch: Batch) -> Tensor:
    return reference.linear_policy_loss(**batch.arguments(), config=CONFIG).logprobs


LIGER, CCE, VERL = "liger-kernel==0.8.5", "cut-cross-entropy", "verl ray"
ALL = [
    Implementation(
        "torch",
        "dapo-kernels, torch",
        partial(fused, backend="torch"),
        partial(fused_logprobs, backend="torch"),
    ),
    Implementation(
        "triton",
        "dapo-kernels, Triton",
        partial(fused, backend="triton"),
        partial(fused_logprobs, backend="triton"),
    ),
    Implementation(
        "skip",
        "dapo-kernels, skip_zero_advantage",
        partial(fused, config=replace(CONFIG, skip_zero_advantage=True)),
    ),
    Implementation(
        "lean",
        "dapo-kernels, chunk_tokens=128",
        partial(fused, chunk_tokens=128),
        partial(fused_logprobs, chunk_tokens=128),
    ),
    Implementation("plain", "plain torch", plain, plain_logprobs, full_logits=True),
    Implementation(
        "compiled",
        "plain torch, compiled",
        peers.compiled_loss,
        peers.compiled_logprobs,
        full_logits=True,
        compiles=True,
    ),
    Implementation("trl", "TRL ChunkedLogProbFunction", peers.trl_loss, peers.trl_logprobs, "trl==1.16.0"),
    Implementation("liger", "Liger GRPO", partial(peers.liger_loss, compiled=False), package=LIGER),
    Implementation(
        "liger-compiled",
        "Liger GRPO, compiled",
        partial(peers.liger_loss, compiled=True),
        package=LIGER,
        compiles=True,
    ),
    Implementation(
        "liger-triton", "Liger triton_grpo_loss", peers.liger_triton_loss, package=LIGER, full_logits=True
    ),
    *(
        Implementation(
            impl.replace("_", "-"),
            f"cut-cross-entropy {impl}",
            partial(peers.cce_loss, impl=impl),
            partial(peers.cce_logprobs, impl=impl),
            CCE,
            compiles=impl == "torch_compile",
        )
        for impl in ("cce", "cce_kahan", "torch_compile")
    ),
    Implementation(
        "verl-torch", "verl FusedLinearForPPO", peers.verl_torch_loss, peers.verl_torch_logprobs, VERL
    ),
    Implementation(
        "verl-kernel", "verl linear_cross_entropy", peers.verl_kernel_loss, peers.verl_kernel_logprobs, VERL
    ),
    Implementation(
        "quack",
        "quack, mean cross-entropy only",
        peers.quack_loss,
        package="quack-kernels",
        exact_loss=False,
    ),
]
BY_KEY = {implementation.key: implementation for implementation in ALL}
