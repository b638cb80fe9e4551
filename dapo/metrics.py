"""What a step sampled, and what it asked of the machine, as the numbers of metrics.jsonl."""

from __future__ import annotations

import math
import os
import re
import resource
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from .sampling import RolloutBatch


def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Over all groups sampled in the step, before filtering. Means are NaN (null in the file) where a step
    lived on surplus groups alone."""
    samples = [sample for group in batch.sampled for sample in group.samples]
    count = len(samples) or math.nan
    lengths = [len(sample.completion.token_ids) for sample in samples]
    accuracies = [group.accuracy for group in batch.sampled]
    terms = dict.fromkeys(name for sample in samples for name in sample.verdict.terms)
    return {
        "reward_mean": sum(sample.reward for sample in samples) / count,
        "accuracy": sum(sample.verdict.correct for sample in samples) / count,
        "response_length_mean": sum(lengths) / count,
        "response_length_max": max(lengths, default=0),
        "truncated_frac": sum(not sample.completion.finished for sample in samples) / count,
        "overlong_penalty_mean": sum(sample.penalty for sample in samples) / count,
        **{
            f"reward_term_{name}_mean": sum(sample.verdict.terms[name] for sample in samples) / count
            for name in terms
        },
        "reward_failures": sum(sample.verdict.failed for sample in samples),
        "num_gen_batches": batch.num_gen_batches,
        "groups_sampled": len(batch.sampled),
        "groups_kept": sum(batch.qualified),
        "groups_all_correct": sum(accuracy == 1 for accuracy in accuracies),
        "groups_all_wrong": sum(accuracy == 0 for accuracy in accuracies),
        "staleness_max": batch.staleness_max,
    }


def peak_memory_bytes() -> int:
    """Highest memory so far: allocated on the GPU, or resident of the process where there is none."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def peak_memory_gb() -> float:
    """For metrics.jsonl. A process's resident memory wavers from run to run, so on CPU it is rounded up to
    whole GB: two runs of one seed write the same file."""
    return _gigabytes(peak_memory_bytes())


def memory_gb() -> float:
    """What is held now, for metrics.jsonl: allocated on the GPU, or resident of the process where there is
    none (the highest so far where the system does not say), rounded as `peak_memory_gb`."""
    if torch.cuda.is_available():
        return _gigabytes(torch.cuda.memory_allocated())
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux
        return peak_memory_gb()
    return _gigabytes(pages * os.sysconf("SC_PAGE_SIZE"))


def _gigabytes(size: int) -> float:
    return size / 1e9 if torch.cuda.is_available() else float(math.ceil(size / 1e9))


PEAK_BF16_TFLOPS = {
    r"A100": 312.0,
    r"H100(?!.*(PCIe|NVL))": 989.0,
    r"H200(?!.*NVL)": 989.0,
    r"\bB200": 2250.0,
}
"""Dense bf16 peaks by the device's name, from NVIDIA's data sheets."""


def peak_flops(device: str) -> float | None:
    """FLOP/s of a GPU by its name; None where it is not known."""
    return next((peak * 1e12 for name, peak in PEAK_BF16_TFLOPS.items() if re.search(name, device)), None)


def mfu(flops: float, seconds: float) -> dict[str, float]:
    """Model FLOPs utilization, `flops` over what the device could have done in that time in bf16; empty on
    CPU and on devices whose peak is not known."""
    peak = peak_flops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return {} if peak is None else {"mfu": flops / (seconds * peak)}


@dataclass(frozen=True)
class ModelFlops:
    """What a decoder costs (PaLM, arXiv 2204.02311, appendix B, with causal attention): 2 FLOPs a parameter
    and token forward, and 2 * width * length^2 a layer for a sequence's attention. Backward is twice that."""

    parameters: int
    """Without the input embedding, which is a look-up, unless the head shares it."""
    layers: int
    width: int
    """Heads times their dimension."""

    @classmethod
    def of(cls, model: nn.Module) -> ModelFlops:
        config = model.config.get_text_config()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        heads = getattr(config, "num_attention_heads", None) or 0
        dimension = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
        return cls(
            parameters if embedding is head else parameters - embedding.numel(),
            config.num_hidden_layers,
            heads * dimension,
        )

    def forward(self, lengths: Iterable[int]) -> float:
        """Of sequences of these lengths."""
        return float(sum(2 * n * (self.parameters + self.layers * self.width * n) for n in lengths))


def mean(values: Sequence[float]) -> float:
    """0 where there is nothing to take a mean of."""
    return sum(values) / max(len(values), 1)
