"""The row kernels as calls launch them: which are compiled for the report."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dapo_kernels import PolicyLossConfig
from dapo_kernels.kernels import logprob_rows, loss_rows
from dapo_kernels.objective import TokenInputs
from dapo_kernels.row_layout import empty_rows
from dapo_kernels.row_statistics import RowStatistics

ROWS = 16384
HEADS = {"Qwen2.5-32B": 152064, "Llama-3": 128256, "Qwen2.5-0.5B": 151936, "Gemma-2": 256000}
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
EVERYTHING = {
    "dual_clip": 3.0,
    "kl_coef": 0.1,
    "kl_ratio_correction": True,
    "entropy_coef": 0.01,
    "logit_softcap": 30.0,
    "temperature": 0.6,
}


class Variant(NamedTuple):
    """A kernel as some call would launch it."""

    name: str
    vocab: int
    kernel: triton.JITFunction
    arguments: Callable[[bool], dict]
    """Whether for AMD -> the arguments of the launch, tensors without memory."""


def column(dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Tensor:
    return torch.empty(rows, dtype=dtype, device="meta")


def loss_variant(vocab: int, dtype: torch.dtype | None, optional: bool = False, **config) -> Variant:
    """`optional`: all the arguments that may be left out are given."""

    def arguments(amd: bool) -> dict:
        logits = empty_rows(ROWS, vocab, device="meta")
        extra = column() if optional else None
        ref = column() if config.get("kl_coef") else None
        inputs = TokenInputs(column(), column(), ref, extra, extra)
        parsed, ids = PolicyLossConfig(**config), column(torch.int64)
        return loss_rows.launch_arguments(logits, ids, inputs, parsed, column(), dtype, amd=amd)[0]

    words = ["every term"] if config == EVERYTHING else [f"{k} {v}" for k, v in config.items()]
    name = ", ".join(["loss", "score only" if dtype is None else SHORT[dtype], *words])
    return Variant(name, vocab, loss_rows._loss_rows_kernel, arguments)


def forward_variant(vocab: int, rows: int = ROWS, **config) -> Variant:
    def arguments(amd: bool) -> dict:
        logits, ids = empty_rows(rows, vocab, device="meta"), column(torch.int64, rows)
        return logprob_rows.forward_arguments(logits, ids, PolicyLossConfig(**config), amd=amd)[0]

    name = ", ".join(["logprob", *_rows_named(rows), *(f"{k} {v}" for k, v in config.items())])
    return Variant(name, vocab, logprob_rows._logprob_rows_kernel, arguments)


def backward_variant(vocab: int, dtype: torch.dtype, entropy: bool, rows: int = ROWS, **config) -> Variant:
    def arguments(amd: bool) -> dict:
        logits, ids = empty_rows(rows, vocab, device="meta"), column(torch.int64, rows)
        statistics = RowStatistics(*(column(rows=rows) for _ in RowStatistics._fields))
        grads = column(rows=rows), column(rows=rows) if entropy else None
        parsed = PolicyLossConfig(**config)
        return logprob_rows.backward_arguments(logits, ids, statistics, *grads, parsed, dtype, amd=amd)[0]

    words = [SHORT[dtype], *["entropy"] * entropy, *_rows_named(rows)]
    name = ", ".join(["logprob backward", *words, *(f"{k} {v}" for k, v in config.items())])
    return Variant(name, vocab, logprob_rows._logprob_rows_backward_kernel, arguments)


def _rows_named(rows: int) -> list[str]:
    return [] if rows == ROWS else [f"{rows} rows, cut"]


def all_variants() -> list[Variant]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    variants = []
    for head, vocab in HEADS.items():
        config = {"logit_softcap": 30.0} if head == "Gemma-2" else {}
        variants += [loss_variant(vocab, dtype, **config) for dtype in (bf16, fp32)]
        variants.append(forward_variant(vocab, **config))
        variants += [backward_variant(vocab, dtype, True, **config) for dtype in (bf16, fp32)]
        variants += [forward_variant(vocab, 8, **config), backward_variant(vocab, bf16, True, 8, **config)]
    vocab = HEADS["Qwen2.5-32B"]
    variants += [
        loss_variant(vocab, None),
        loss_variant(vocab, fp16),
        loss_variant(vocab, bf16, optional=True, **EVERYTHING),
        loss_variant(vocab, fp32, optional=True, **EVERYTHING),
        loss_variant(vocab, bf16, objective="cispo", kl_coef=0.1, kl_estimator="k2"),
        loss_variant(vocab, bf16, objective="sapo", kl_coef=0.1, kl_estimator="k1"),
        loss_variant(vocab, bf16, entropy_coef=0.01),
        backward_variant(vocab, bf16, False),
        backward_variant(vocab, fp16, True),
        backward_variant(vocab, fp32, True, 8),
    ]
    for vocab in (151643, 1023, 2):  # ragged; several rows a program
        variants += [loss_variant(vocab, bf16, optional=True, **EVERYTHING), forward_variant(vocab)]
        variants.append(backward_variant(vocab, fp32, True))
    return variants


def sample_variants() -> list[Variant]:
    """One of each kernel, with what is hardest on registers and on alignment."""
    return [
        loss_variant(152064, torch.bfloat16),
        loss_variant(151643, torch.bfloat16, optional=True, **EVERYTHING),
        loss_variant(1023, torch.float32, entropy_coef=0.01),
        forward_variant(256000, logit_softcap=30.0),
        backward_variant(256000, torch.bfloat16, True, logit_softcap=30.0),
        backward_variant(151643, torch.bfloat16, True, 8),
    ]
