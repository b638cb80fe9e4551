"""Compiles every row kernel for GPUs that need not be here, reads the machine code, and writes a table.

    python -m bench.compile_report [--targets sm_90 gfx942] [--sample] [--out docs/compile_report.md]

Exits with 1 when a kernel spills registers, when a sweep loads or stores less than 16 bytes at a time, when
shared memory is over 48 KiB, or when dlogits go over the logits without a barrier between load and store.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported: this is about the compiler

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.machine_code import MachineCode, read_amdgcn, read_cubin
from dapo_kernels import PolicyLossConfig
from dapo_kernels.kernels import logprob_rows, loss_rows
from dapo_kernels.kernels.launch import alias_rows, empty_rows
from dapo_kernels.objective import TokenInputs
from dapo_kernels.row_ops import RowStatistics

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
ROWS = 16384
SHARED_LIMIT = 48 * 2**10
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


def column(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(ROWS, dtype=dtype, device="meta")


def dlogits_like(logits: Tensor, dtype: torch.dtype | None, aliased: bool) -> Tensor | None:
    if dtype is None:
        return None
    if aliased:
        return alias_rows(logits, dtype)
    return empty_rows(*logits.shape, dtype=dtype, device="meta")


def loss_variant(
    vocab: int, dtype: torch.dtype | None, aliased: bool = True, optional: bool = False, **config
) -> Variant:
    """`optional`: all the arguments that may be left out are given."""

    def arguments(amd: bool) -> dict:
        logits = empty_rows(ROWS, vocab, device="meta")
        extra = column() if optional else None
        ref = column() if config.get("kl_coef") else None
        inputs = TokenInputs(column(), column(), ref, extra, extra)
        dlogits = dlogits_like(logits, dtype, aliased)
        return loss_rows.launch_arguments(
            logits,
            column(torch.int64),
            inputs,
            PolicyLossConfig(**config),
            dlogits,
            extra,
            amd=amd,
        )[0]

    where = "score only" if dtype is None else f"{SHORT[dtype]} {'in place' if aliased else 'apart'}"
    words = ["every term"] if config == EVERYTHING else [f"{k} {v}" for k, v in config.items()]
    name = ", ".join(["loss", where, *words])
    return Variant(name, vocab, loss_rows._loss_rows_kernel, arguments)


def forward_variant(vocab: int, **config) -> Variant:
    def arguments(amd: bool) -> dict:
        logits = empty_rows(ROWS, vocab, device="meta")
        return logprob_rows.forward_arguments(
            logits, column(torch.int64), PolicyLossConfig(**config), amd=amd
        )[0]

    name = ", ".join(["logprob", *(f"{k} {v}" for k, v in config.items())])
    return Variant(name, vocab, logprob_rows._logprob_rows_kernel, arguments)


def backward_variant(
    vocab: int, dtype: torch.dtype, entropy: bool, aliased: bool = True, **config
) -> Variant:
    def arguments(amd: bool) -> dict:
        logits = empty_rows(ROWS, vocab, device="meta")
        statistics = RowStatistics(*(column() for _ in RowStatistics._fields))
        return logprob_rows.backward_arguments(
            logits,
            column(torch.int64),
            statistics,
            column(),
            column() if entropy else None,
            PolicyLossConfig(**config),
            dlogits_like(logits, dtype, aliased),
            amd=amd,
        )[0]

    words = [f"{SHORT[dtype]} {'in place' if aliased else 'apart'}", *["entropy"] * entropy]
    name = ", ".join(["logprob backward", *words, *(f"{k} {v}" for k, v in config.items())])
    return Variant(name, vocab, logprob_rows._logprob_rows_backward_kernel, arguments)


def all_variants() -> list[Variant]:
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    variants = []
    for head, vocab in HEADS.items():
        config = {"logit_softcap": 30.0} if head == "Gemma-2" else {}
        variants += [loss_variant(vocab, dtype, **config) for dtype in (bf16, fp32)]
        variants.append(forward_variant(vocab, **config))
        variants += [backward_variant(vocab, dtype, True, **config) for dtype in (bf16, fp32)]
    vocab = HEADS["Qwen2.5-32B"]
    variants += [
        loss_variant(vocab, None),
        loss_variant(vocab, fp16),
        loss_variant(vocab, bf16, aliased=False),
        loss_variant(vocab, fp32, aliased=False),
        loss_variant(vocab, bf16, optional=True, **EVERYTHING),
        loss_variant(vocab, fp32, optional=True, **EVERYTHING),
        loss_variant(vocab, bf16, objective="cispo", kl_coef=0.1, kl_estimator="k2"),
        loss_variant(vocab, bf16, objective="sapo", kl_coef=0.1, kl_estimator="k1"),
        loss_variant(vocab, bf16, entropy_coef=0.01),
        backward_variant(vocab, bf16, False),
        backward_variant(vocab, fp16, True, aliased=False),
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
    ]


def compile_variant(variant: Variant, target: GPUTarget):
    """What Triton's launcher would compile for these arguments on that target."""
    arguments = variant.arguments(target.backend == "hip")
    signature, constants, attributes = {}, {}, {}
    for parameter in variant.kernel.params:
        value = arguments[parameter.name]
        position = (parameter.num,)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[position] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[parameter.name] = "*i64" if value.dtype == torch.int64 else f"*{SHORT[value.dtype]}"
            attributes[position] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[position] = [["tt.divisibility", 16]]
    source = ASTSource(variant.kernel, signature, constants, attributes)
    options = {name: arguments[name] for name in ("num_warps", "enable_fp_fusion")}
    return triton.compile(source, target=target, options=options)


def read_machine_code(compiled) -> MachineCode:
    shared = compiled.metadata.shared
    if "cubin" in compiled.asm:
        return read_cubin(compiled.asm["cubin"], shared)
    return read_amdgcn(compiled.asm["amdgcn"], shared)


def faults(variant: Variant, code: MachineCode, target: GPUTarget) -> list[str]:
    """What is wrong with this machine code, in words."""
    arguments = variant.arguments(target.backend == "hip")
    writes = arguments.get("dlogits_ptr") is not None
    found = []
    if code.spills:
        found.append(f"spills ({code.spills})")
    if code.shared > SHARED_LIMIT:
        found.append(f"{code.shared} bytes of shared memory")
    for kind, expected in (("load", True), ("store", writes)):
        widths = code.sweep_bytes(kind)
        if expected != bool(widths):
            found.append(f"{kind}s in the sweeps: {sorted(widths)}")
        found += [f"{width}-byte {kind} in a sweep" for width in sorted(widths) if width < 16]
    # PTX's barrier orders loads that are still in flight; AMD's only those that were waited for.
    if writes and arguments["ALIASED"] and not code.stores_wait(target.backend == "hip"):
        found.append("no barrier between load and store")
    return found


def table_row(variant: Variant, code: MachineCode) -> str:
    def widths(kind: str) -> str:
        return "/".join(str(8 * width) for width in sorted(code.sweep_bytes(kind))) or "–"

    waits = "yes" if any(i.kind == "barrier" for loop in code.loops for i in loop) else "–"
    cells = [variant.name, variant.vocab, code.registers, code.spills, code.shared]
    return "| " + " | ".join(map(str, [*cells, widths("load"), widths("store"), waits])) + " |"


HEADING = f"""# What the row kernels compile to

Written by `python -m bench.compile_report` without a GPU (Triton {triton.__version__}). Loads and stores:
width in bits of every access to global memory in the sweeps. Spills: bytes of stack (NVIDIA), registers and
bytes (AMD). Barrier: one stands in a sweep, as it must where dlogits go over the logits ("in place").
"""
COLUMNS = (
    "| kernel | V | registers | spills | shared, bytes | loads | stores | barrier |\n" + "|---" * 8 + "|"
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--sample", action="store_true", help="a few variants only")
    parser.add_argument("--out", type=Path, default=Path("docs/compile_report.md"))
    options = parser.parse_args(argv)

    lines, wrong = [HEADING], []
    for name in options.targets:
        lines += [f"## {name}", "", COLUMNS]
        for variant in sample_variants() if options.sample else all_variants():
            code = read_machine_code(compile_variant(variant, TARGETS[name]))
            lines.append(table_row(variant, code))
            for fault in faults(variant, code, TARGETS[name]):
                wrong.append(f"{name}: {variant.name}, V {variant.vocab}: {fault}")
        lines.append("")
    options.out.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join([f"wrote {options.out}", *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
