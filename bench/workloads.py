"""Batches as RL training sees them: shapes of real heads, masks, zero advantages, peaked distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from dapo_kernels import fused_linear_policy_loss

MODEL = Path("models/SmolLM2-135M-Instruct")
TEXT = Path(__file__).resolve().parents[1] / "docs" / "kernels.md"


@dataclass
class Batch:
    """What one call is given: sequences of equal length, one advantage each."""

    hidden: Tensor  # [B, T, H]
    weight: Tensor  # [V, H]
    targets: Tensor  # [B, T]
    advantages: Tensor  # [B]
    mask: Tensor  # [B, T] bool
    old_logprobs: Tensor  # [B, T] fp32

    def arguments(self) -> dict[str, Tensor]:
        return dict(vars(self))

    def to(self, dtype: torch.dtype) -> Batch:
        """The same values with hidden and weight in `dtype`, as new leaves; the rest fp64 for fp64."""
        wide = dtype if dtype == torch.float64 else torch.float32
        return Batch(
            self.hidden.detach().to(dtype).requires_grad_(),
            self.weight.detach().to(dtype).requires_grad_(),
            self.targets,
            self.advantages.to(wide),
            self.mask,
            self.old_logprobs.to(wide),
        )


@dataclass(frozen=True)
class Workload:
    name: str
    tokens: int
    hidden_size: int
    vocab: int
    dtype: torch.dtype = torch.bfloat16
    unmasked: float = 1.0
    zero_advantage: float = 0.0
    """Share of the sequences whose advantage is 0."""
    distribution: str = "peaked"
    """`peaked` (like a policy late in training), `uniform` (random noise), `real` (SmolLM2 on text)."""
    length: int = 128
    """Tokens of a sequence."""
    compiled: bool = False
    """Also run what compiles for every shape."""

    @property
    def u(self) -> int:
        """FLOPs of one product of all tokens with the head."""
        return 2 * self.tokens * self.hidden_size * self.vocab

    @property
    def cost(self) -> float:
        """g + 2f: what our loss costs, in u."""
        return self.unmasked * (1 + 2 * (1 - self.zero_advantage))

    @property
    def missing(self) -> str | None:
        """What it needs and is not there."""
        if self.distribution == "real" and not MODEL.exists():
            return f"{MODEL} is not there: python -m dapo.smollm2 {MODEL} (and pip install '.[train]')"
        return None

    def describe(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"N {self.tokens}, H {self.hidden_size}, V {self.vocab}, {dtype}, {self.unmasked:.0%} unmasked, "
            f"{self.zero_advantage:.0%} of the sequences with A = 0, {self.distribution}"
        )

    def make(self, device: torch.device | str = "cpu", seed: int = 0) -> Batch:
        """Old log-probs lie around the current ones, so that ratios are on both sides of the clip range."""
        generator = torch.Generator().manual_seed(seed)
        shape = (self.tokens // self.length, self.length)
        hidden, weight, targets = _DISTRIBUTIONS[self.distribution](self, generator)
        mask = torch.randperm(self.tokens, generator=generator) < round(self.unmasked * self.tokens)
        advantages = torch.randn(shape[0], generator=generator)
        advantages[: round(self.zero_advantage * shape[0])] = 0.0
        batch = Batch(
            hidden.to(device, self.dtype).view(*shape, -1).requires_grad_(),
            weight.to(device, self.dtype).requires_grad_(),
            targets.to(device).view(shape),
            advantages.to(device),
            mask.to(device).view(shape),
            torch.zeros(shape, device=device),
        )
        with torch.no_grad():
            logprobs = fused_linear_policy_loss(**batch.arguments()).logprobs
        noise = 0.2 * torch.randn(shape, generator=generator)
        return replace(batch, old_logprobs=(logprobs + noise.to(device)).clamp(max=0))


def _uniform(workload: Workload, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    hidden = torch.randn(workload.tokens, workload.hidden_size, generator=generator)
    weight = torch.randn(workload.vocab, workload.hidden_size, generator=generator)
    weight *= workload.hidden_size**-0.5
    return hidden, weight, torch.randint(workload.vocab, (workload.tokens,), generator=generator)


ALTERNATIVES = 4
PEAK = 40.0


def _peaked(workload: Workload, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Distributions with the statistics of a policy in training (DAPO, Fig. 7): the sampled token has a mean
    probability of about 0.8, the entropy is about 0.4 nats.

    Most positions are certain; at the others a handful of candidates share the mass: hidden is the
    combination of their weight rows that has the wanted logits.
    """
    n, v, h = workload.tokens, workload.vocab, workload.hidden_size
    weight = torch.nn.functional.normalize(torch.randn(v, h, generator=generator), dim=1)
    candidates = torch.randint(v, (n, ALTERNATIVES), generator=generator)
    certain = torch.rand(n, generator=generator) < 0.72
    spread = torch.rand(n, ALTERNATIVES, generator=generator) + 0.3
    shares = torch.where(certain[:, None], torch.tensor([0.985, 0.005, 0.005, 0.005]), spread)
    shares = shares / shares.sum(1, keepdim=True)
    logits = PEAK * min(1.0, math.sqrt(h / 576)) + shares.log()
    rows = weight[candidates]  # [n, k, h]
    gram = rows @ rows.transpose(1, 2) + 1e-4 * torch.eye(ALTERNATIVES)  # a candidate may be there twice
    hidden = torch.einsum("nk,nkh->nh", torch.linalg.solve(gram, logits), rows)
    pick = torch.multinomial(shares, 1, generator=generator)
    return hidden, weight, candidates.gather(1, pick).squeeze(1)


def _real(workload: Workload, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """The last hidden states of SmolLM2-135M over a text, its head, and tokens it samples there."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ids = AutoTokenizer.from_pretrained(MODEL)(TEXT.read_text(encoding="utf-8"))["input_ids"]
    ids = (ids * (workload.tokens // len(ids) + 1))[: workload.tokens]
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    with torch.no_grad():
        hidden = model.model(torch.tensor(ids).view(-1, workload.length)).last_hidden_state.flatten(0, 1)
        weight = model.lm_head.weight.detach().clone()
        targets = [
            torch.multinomial((rows @ weight.T).softmax(-1), 1, generator=generator)
            for rows in hidden.split(256)
        ]
    return hidden, weight, torch.cat(targets).squeeze(1)


_DISTRIBUTIONS = {"uniform": _uniform, "peaked": _peaked, "real": _real}
