"""Compiles every row kernel for GPUs that need not be here, reads the machine code, and writes a table.

    python -m bench.compile_report [--targets sm_90 gfx942] [--sample] [--out docs/compile_report.md]

Exits with 1 when a kernel spills registers, when a sweep loads or stores less than 16 bytes at a time, when
shared memory is over 48 KiB, or when 16-bit dlogits go over the logits without a barrier between load and
store.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)  # before Triton is imported: this is about the compiler

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.kernel_variants import SHORT, Variant, all_variants, sample_variants
from bench.machine_code import MachineCode, read_amdgcn, read_cubin

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = 48 * 2**10


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
    if writes and arguments["OVERLAPS"] and not code.stores_wait(target.backend == "hip"):
        found.append("no barrier between load and store")
    return found


def table_row(variant: Variant, code: MachineCode) -> str:
    def widths(kind: str) -> str:
        return "/".join(str(8 * width) for width in sorted(code.sweep_bytes(kind))) or "–"

    waits = "yes" if any(i.kind == "barrier" for loop in code.loops for i in loop) else "–"
    cells = [variant.name, variant.vocab, code.registers, code.spills, code.shared]
    return "| " + " | ".join(map(str, [*cells, widths("load"), widths("store"), waits])) + " |"


HEADING = f"""# What the row kernels compile to

SUMMARY

Written by `python -m bench.compile_report` without a GPU (Triton {triton.__version__}). Loads and stores:
width in bits of every access to global memory in the sweeps. Spills: bytes of stack, on AMD spilled registers too.
Barrier: one stands in a sweep, as it must where 16-bit dlogits go over the fp32 logits; a cut row's go to memory of
their own. Each program has 512 threads. A dash: none.

Names: *loss* is the one-pass kernel, followed by the dtype of dlogits; *score only* writes none; *every term* has KL,
bonus, dual clip, softcap and all optional arguments; *logprob* and *logprob backward* serve losses of the caller's own;
*8 rows, cut*: so few rows that each is shared by several programs. V 152064 is Qwen2.5-7B to 72B, 151936 Qwen2.5-0.5B,
128256 Llama-3, 256000 Gemma-2; 151643, 1023 and 2 are there because nothing divides them. sm_80 is A100, sm_90 H100 and
H200, sm_100 B200, gfx942 MI300.
"""  # noqa: E501
COLUMNS = (
    "| kernel | V | registers | spills | shared, bytes | loads | stores | barrier |\n" + "|---" * 8 + "|"
)


def lines_of_table(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("| lo")]


def summary(count: int, wrong: list[str]) -> str:
    rule = (
        "no register is spilled, every access in a sweep is 16 bytes wide, shared memory is at most\n"
        "48 KiB, and where 16-bit dlogits go over the logits a barrier stands between load and store"
    )
    if not wrong:
        return f"All {count} pass: {rule}."
    return f"{len(wrong)} of {count} fail ({rule}):\n\n" + "\n".join(f"- {fault}" for fault in wrong)


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
    lines[0] = HEADING.replace("SUMMARY", summary(len(lines_of_table(lines)), wrong))
    options.out.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join([f"wrote {options.out}", *wrong]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
