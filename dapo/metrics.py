"""What a step sampled, as the numbers of metrics.jsonl."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Sequence

import torch

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
    gigabytes = peak_memory_bytes() / 1e9
    return gigabytes if torch.cuda.is_available() else float(math.ceil(gigabytes))


def mean(values: Sequence[float]) -> float:
    """0 where there is nothing to take a mean of."""
    return sum(values) / max(len(values), 1)
