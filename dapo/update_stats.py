"""What the update of one rollout batch was like: sums while it runs, the metrics of the step at the end."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dapo_kernels.output import metrics_from_sums

from .metrics import mean
from .mismatch import MismatchStats
from .parallel import World, all_reduce_max, all_reduce_sum

LOSS_METRICS = ("ratio_mean", "ratio_max", "approx_kl", "clip_frac_low", "clip_frac_high", "dual_clip_frac")


@dataclass
class UpdateStats:
    """Sums over one rollout batch's scoring pass and updates."""

    num_tokens: int = 0
    entropy: float = 0.0
    prob: float = 0.0
    mismatch: MismatchStats = field(default_factory=MismatchStats)
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    loss_sums: dict[str, Tensor] = field(default_factory=dict)
    skipped_updates: int = 0
    has_reference: bool = False
    flops: float = 0.0
    """Of the model, over the scoring pass and the updates; what is computed twice counts once."""
    machine: dict[str, float] = field(default_factory=dict)
    """Of the machine, not of the training: memory after each phase, and MFU where it is known."""

    def add_loss_sums(self, sums: dict[str, Tensor]) -> None:
        for name, value in sums.items():
            known = self.loss_sums.get(name)
            if known is None:
                self.loss_sums[name] = value
            else:
                self.loss_sums[name] = torch.maximum(known, value) if name == "ratio_max" else known + value

    def reduce(self, world: World) -> None:
        """Sums and maxima over the ranks, in place; losses and gradient norms are the same on all of them."""
        if not world.distributed:
            return
        sums = {name: value for name, value in self.loss_sums.items() if name != "ratio_max"}
        own = {name: getattr(self, name) for name in ("num_tokens", "entropy", "prob", "flops")}
        mismatch = {f"mismatch_{name}": getattr(self.mismatch, name) for name in ("tokens", "k3", "cut")}
        total = all_reduce_sum({**sums, **own, **mismatch}, world)
        largest = all_reduce_max(
            {"ratio_max": self.loss_sums.get("ratio_max", 0.0), "mismatch": self.mismatch.largest}, world
        )
        if self.loss_sums:
            self.loss_sums = {name: torch.tensor(total[name], dtype=torch.float64) for name in sums}
            self.loss_sums["ratio_max"] = torch.tensor(largest["ratio_max"], dtype=torch.float64)
        self.num_tokens, self.mismatch.tokens = int(total["num_tokens"]), int(total["mismatch_tokens"])
        self.entropy, self.prob, self.flops = total["entropy"], total["prob"], total["flops"]
        self.mismatch.k3, self.mismatch.cut = total["mismatch_k3"], int(total["mismatch_cut"])
        self.mismatch.largest = largest["mismatch"]

    def metrics(self) -> dict[str, float]:
        """Means under the names of metrics.jsonl; 0 where there was nothing to take a mean of."""
        tokens = max(self.num_tokens, 1)
        sums = metrics_from_sums(self.loss_sums) if self.loss_sums else {}
        names = (*LOSS_METRICS, "kl") if self.has_reference else LOSS_METRICS
        return {
            "loss": mean(self.losses),
            "grad_norm": mean(self.grad_norms),
            "num_tokens": self.num_tokens,
            "entropy": self.entropy / tokens,
            "mean_prob": self.prob / tokens,
            **{name: sums[name].item() if name in sums else 0.0 for name in names},
            **self.mismatch.metrics(),
            "skipped_updates": self.skipped_updates,
        }
