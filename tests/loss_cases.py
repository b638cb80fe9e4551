"""Random cases of the policy loss, three ways to run them, and how far apart the results may lie."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dapo_kernels import (
    PolicyLossConfig,
    PolicyLossOutput,
    fused_linear_logprobs,
    fused_linear_policy_loss,
    reference,
)

HEAD = ("hidden", "weight", "bias")

OPTIONS = {
    "clip": {},
    "dual": {"dual_clip": 1.5},
    "cispo": {"objective": "cispo"},
    "cispo_bounds": {"objective": "cispo", "cispo_bounds": (0.9, 1.1)},
    "sapo": {"objective": "sapo", "sapo_temperature_neg": 1.4},
    "k3": {"kl_coef": 0.3},
    "k2": {"kl_coef": 0.3, "kl_estimator": "k2"},
    "k1_ratio": {"kl_coef": 0.3, "kl_estimator": "k1", "kl_ratio_correction": True},
    "k3_ratio": {"kl_coef": 0.3, "kl_ratio_correction": True, "reduction": "seq-mean-token-mean"},
    "entropy": {"entropy_coef": 0.2},
    "entropy_softcap": {"entropy_coef": 0.2, "logit_softcap": 2.5, "temperature": 0.7, "logit_scale": 0.6},
    "softcap": {"logit_softcap": 1.5},
    "scale": {"logit_scale": -1.7, "temperature": 1.3},
    "skip": {"skip_zero_advantage": True, "reduction": "seq-mean-token-mean"},
    "token_sum": {"reduction": "seq-mean-token-sum", "epsilon_low": 0.1},
    "sequence": {"ratio_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.05},
    "sequence_sapo": {"ratio_level": "sequence", "objective": "sapo", "reduction": "seq-mean-token-mean"},
    "sequence_k3_ratio": {"ratio_level": "sequence", "kl_coef": 0.3, "kl_ratio_correction": True},
    "sequence_skip": {"ratio_level": "sequence", "skip_zero_advantage": True},
}
"""Configs that between them use every field."""


@dataclass
class LossCase:
    """The arguments of one call, all of them given, plus what the shapes mean."""

    hidden: Tensor  # [..., H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [...]
    advantages: Tensor  # [...]
    mask: Tensor  # [...]
    old_logprobs: Tensor | None
    ref_logprobs: Tensor | None
    token_weights: Tensor | None
    entropy_weights: Tensor | None
    bias: Tensor | None
    sequence_ids: Tensor | None
    config: PolicyLossConfig

    def arguments(self) -> dict:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def to(self, dtype: torch.dtype) -> LossCase:
        """The same values with every float in `dtype`."""
        floats = {
            name: value.to(dtype)
            for name, value in self.arguments().items()
            if isinstance(value, Tensor) and value.is_floating_point()
        }
        return replace(self, **floats)

    def pick(self, part) -> LossCase:
        """Some of the tokens or sequences: every per-token argument indexed by `part`."""
        kept = ("weight", "bias", "config")
        return replace(
            self, **{k: v[part] for k, v in self.arguments().items() if v is not None and k not in kept}
        )

    def with_garbage(self) -> LossCase:
        """Masked positions hold what would ruin everything if it were looked at."""
        masked = self.mask == 0
        names = ("hidden", "advantages", "old_logprobs", "ref_logprobs", "token_weights", "entropy_weights")
        dirty = {name: getattr(self, name).clone() for name in names}
        for i, value in enumerate(dirty.values()):
            value[masked] = (math.nan, math.inf, -math.inf)[i % 3]
        dirty["hidden"][..., 0][masked] = math.inf
        targets, ids = self.targets.clone(), self.sequence_ids.clone()
        targets[masked] = torch.where(torch.arange(int(masked.sum())) % 2 == 0, -100, len(self.weight) + 7)
        ids[masked] = -(2**40)
        return replace(self, targets=targets, sequence_ids=ids, **dirty)


def make_case(
    shape: tuple[int, ...] = (5, 7),
    hidden_size: int = 16,
    vocab: int = 53,
    dtype: torch.dtype = torch.float64,
    mask: float = 0.7,
    seed: int = 0,
    **config,
) -> LossCase:
    """Every third advantage is 0, ratios lie on both sides of every clip bound but not close to one.
    `mask`: the share that counts. Packed (1-D) batches get interleaved sequences with gaps in their ids."""
    g = torch.Generator().manual_seed(seed)
    config = PolicyLossConfig(**config)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=g, dtype=torch.float64)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    rows = torch.arange(math.prod(shape[:-1]))
    ids = rows.repeat_interleave(shape[-1]).view(shape)
    if len(shape) == 1:
        ids = 3 * torch.randint(0, 4, shape, generator=g) - 2
    case = LossCase(
        hidden=normal(*shape, hidden_size).to(dtype),
        weight=(normal(vocab, hidden_size) * 2 / hidden_size**0.5).to(dtype),
        targets=torch.randint(0, vocab, shape, generator=g),
        advantages=torch.where(torch.rand(shape, generator=g) < 0.33, 0, normal(*shape)).to(wide),
        mask=torch.rand(shape, generator=g) < mask,
        old_logprobs=None,
        ref_logprobs=None,
        token_weights=(torch.rand(shape, generator=g) + 0.5).to(wide),
        entropy_weights=(torch.rand(shape, generator=g) + 0.5).to(wide),
        bias=normal(vocab).to(dtype),
        sequence_ids=ids,
        config=config,
    )
    logprobs, _ = plain_logprobs(case.to(torch.float64))
    log_ratio = torch.rand(shape, generator=g, dtype=torch.float64) * 1.4 - 0.7
    for bound in (1 - config.epsilon_low, 1 + config.epsilon_high, config.dual_clip or 9):
        distance = log_ratio - torch.tensor(max(bound, 1e-3)).log()
        log_ratio += torch.where(distance.abs() < 0.03, 0.06 * distance.sign(), 0.0)
    case.old_logprobs = (logprobs - log_ratio).to(wide)
    case.ref_logprobs = (logprobs + 0.5 * normal(*shape)).to(wide)
    return case


def plain_logprobs(case: LossCase) -> tuple[Tensor, Tensor]:
    """Log-probs and entropy of every token by `log_softmax`, for cases whose masked tokens are clean."""
    c = case.config
    z = (case.hidden @ case.weight.T + (0 if case.bias is None else case.bias)) * c.logit_scale
    if c.logit_softcap is not None:
        z = c.logit_softcap * torch.tanh(z / c.logit_softcap)
    logp = torch.log_softmax(z / c.temperature, -1)
    return logp.gather(-1, case.targets[..., None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


class Result(NamedTuple):
    output: PolicyLossOutput
    grads: dict[str, Tensor | None]

    def quantities(self) -> dict[str, Tensor]:
        """Every tensor there is, by name."""
        out = self.output
        named = {"loss": out.loss.detach(), "token_loss": out.token_loss}
        named |= {"logprobs": out.logprobs, "entropy": out.entropy}
        named |= {f"metrics.{k}": v for k, v in out.metrics.items()}
        named |= {f"sums.{k}": v for k, v in out.sums.items()}
        return named | {f"grad.{k}": v for k, v in self.grads.items() if v is not None}


def run(loss: Callable, case: LossCase, scale: float = 1.0, needs=HEAD, **extra) -> Result:
    """One forward and, where anything in `needs` is given, one backward of `loss * scale`."""
    arguments = case.arguments()
    leaves = {n: arguments[n].detach().requires_grad_(n in needs) for n in HEAD if arguments[n] is not None}
    output = loss(**{**arguments, **leaves, **extra})
    if output.loss.requires_grad:
        (output.loss * scale).backward()
    return Result(output, {name: leaf.grad for name, leaf in leaves.items()})


def fast(case: LossCase, scale: float = 1.0, needs=HEAD, **extra) -> Result:
    return run(fused_linear_policy_loss, case, scale, needs, **extra)


def logprob_gradients(case: LossCase, backend: str, **options) -> list[Tensor]:
    """Log-probs, entropy and the head's gradients under a loss of one's own, whose gradient differs by token
    and depends on the other tokens."""
    leaves = [getattr(case, name).detach().clone().requires_grad_() for name in HEAD]
    output = fused_linear_logprobs(
        leaves[0], leaves[1], case.targets, mask=case.mask, bias=leaves[2], backend=backend, **options
    )
    loss = (output.logprobs.cumsum(0) / 10).sin().sum() + (output.entropy**2).mean()
    return [output.logprobs, output.entropy, *torch.autograd.grad(loss, leaves)]


# Largest error against fp64 on the same inputs, as a share of the largest value: of what is returned, and of
# gradients, which round to their own dtype once (of a bf16 hidden: twice).
BOUNDS = {
    torch.float64: (1e-12, 1e-12, 1e-12),
    torch.float32: (4e-6, 4e-6, 4e-6),
    torch.bfloat16: (4e-6, 2**-8 + 1e-5, 2**-7),
    torch.float16: (4e-6, 2**-11 + 1e-5, 2**-11 + 1e-5),
}


def check(case: LossCase, result: Result | None = None, scale=1.0, slack=1.0, **shared) -> None:
    """|truth - fast| <= |truth - plain torch in the same dtype| + tol, and within `slack` times BOUNDS."""
    truth = run(reference.linear_policy_loss, case.to(torch.float64), scale, **shared).quantities()
    plain = run(reference.linear_policy_loss, case, scale, **shared).quantities()
    result = fast(case, scale, **shared) if result is None else result
    seen = result.quantities()
    assert seen.keys() == truth.keys()
    for name, want in truth.items():
        assert seen[name].shape == want.shape, name
        if not want.numel():
            continue
        gradient = name.startswith("grad.")
        size = max(want.abs().max().item(), 0.05 * abs(scale) if gradient or name == "loss" else 1.0)
        if name == "loss":  # what it is a mean of, and the terms of that, may cancel
            size = max(size, truth["token_loss"].abs().mean().item(), 0.3)
        if name.startswith("sums."):
            size = max(size, truth["sums.num_scored"].item())
        error, allowed = ((x.double() - want).abs().max().item() for x in (seen[name], plain[name]))
        rounding = torch.finfo(seen[name].dtype)
        bound = BOUNDS[case.hidden.dtype][gradient + (name == "grad.hidden")] * size * slack
        bound += rounding.tiny * rounding.eps
        if math.isfinite(allowed):  # in fp16 plain torch overflows at some scales
            # A bf16 gradient is rounded once more when the incoming scale is applied.
            tolerance = 1e-3 if gradient and seen[name].dtype == torch.bfloat16 else 1e-6
            assert error <= allowed + tolerance * size * slack, (
                f"{name}: error {error:.2e}, plain torch {allowed:.2e}"
            )
        assert error <= bound, f"{name}: error {error:.2e} over {bound:.2e}"


def assert_same_bits(a: Result, b: Result) -> None:
    left, right = a.quantities(), b.quantities()
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors made inside: now (`live`), at most (`peak`), and each `sizes` ever made."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.sizes: list[int] = []
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage(), 0)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self._see(storage, storage.nbytes())
        return result

    def _see(self, storage, size: int) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        self.sizes.append(size)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size
