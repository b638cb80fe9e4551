"""The workloads of each suite: shapes of real heads, token counts, live shares."""

from __future__ import annotations

import torch

from bench.workloads import Workload

HEADS = {
    "SmolLM2-135M": (576, 49152),
    "Qwen2.5-0.5B": (896, 151936),
    "Qwen2.5-7B": (3584, 152064),
    "Qwen2.5-32B": (5120, 152064),
    "Llama-3-8B": (4096, 128256),
}
"""(H, V)."""


def on_cpu(name: str, tokens: int, head: str = "SmolLM2-135M", **options) -> Workload:
    return Workload(name, tokens, *HEADS[head], **{"dtype": torch.float32, **options})


def on_gpu(name: str, tokens: int, head: str = "Qwen2.5-32B", **options) -> Workload:
    return Workload(name, tokens, *HEADS[head], length=1024, **options)


def live_shares(make, tokens: int, already: tuple = ()) -> list[Workload]:
    """Every share unmasked with every share of zero advantages, all live and those there `already` apart."""
    return [
        make(f"{unmasked:.0%} unmasked, {zero:.0%} A = 0", tokens, unmasked=unmasked, zero_advantage=zero)
        for unmasked in (1.0, 0.6, 0.3)
        for zero in (0.0, 0.5, 0.75)
        if (unmasked, zero) not in ((1.0, 0.0), *already)
    ]


CPU_SMALL = [
    on_cpu("all tokens", 256, compiled=True),
    on_cpu("60% unmasked, 50% A = 0", 256, unmasked=0.6, zero_advantage=0.5),
    on_cpu("30% unmasked", 256, unmasked=0.3),
    on_cpu("SmolLM2 on text", 256, unmasked=0.6, distribution="real"),
    on_cpu("bf16", 128, dtype=torch.bfloat16),
    on_cpu("N 512", 512),
    on_cpu("N 1024", 1024),
]
"""Fits 8 GB, and ten minutes on two cores."""
CPU_FULL = [
    *CPU_SMALL,
    on_cpu("N 2048", 2048),
    on_cpu("Qwen2.5-0.5B", 256, "Qwen2.5-0.5B"),
    on_cpu("uniform", 256, distribution="uniform"),
    *live_shares(on_cpu, 256, already=((0.6, 0.5), (0.3, 0.0))),
]
GPU_SMALL = [
    on_gpu(f"{head}, N {tokens}", tokens, head, compiled=tokens == 4096)
    for head in ("Qwen2.5-32B", "Llama-3-8B")
    for tokens in (4096, 16384)
]
GPU_FULL = [
    *GPU_SMALL,
    *(on_gpu(f"{head}, N 8192", 8192, head) for head in HEADS),
    *(on_gpu(f"Qwen2.5-7B, N {n}", n, "Qwen2.5-7B") for n in (1024, 2048, 32768, 65536)),
    *live_shares(on_gpu, 16384),
    on_gpu("uniform", 16384, distribution="uniform"),
]
TINY = [Workload("tiny", 64, 32, 512, torch.float32, unmasked=0.6, zero_advantage=0.5, length=16)]
"""Shows that everything runs."""
SUITES = {
    ("cpu", "small"): CPU_SMALL,
    ("cpu", "full"): CPU_FULL,
    ("cuda", "small"): GPU_SMALL,
    ("cuda", "full"): GPU_FULL,
    ("cpu", "tiny"): TINY,
    ("cuda", "tiny"): TINY,
}
