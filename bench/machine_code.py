"""Reads compiled kernels: registers, spills, and what the loops of the machine code load, store and wait for.

The sweeps over a row are the loops of a kernel, so an access inside a loop is a sweep's; the few scalars of
each row stand outside.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

BINARIES = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Instruction(NamedTuple):
    position: int
    kind: str
    """`load`, `store`, `barrier`, `wait` (for all loads), or empty."""
    bytes: int
    """Width of a load or store to global memory."""


class MachineCode(NamedTuple):
    registers: int
    spills: int
    """Bytes of stack, or spilled registers."""
    shared: int
    """Bytes of shared memory."""
    loops: list[list[Instruction]]
    """What stands between the start of each loop and its jump back, in order of position."""

    def sweep_bytes(self, kind: str) -> set[int]:
        """The widths of all loads or stores in the loops."""
        return {i.bytes for loop in self.loops for i in loop if i.kind == kind}

    def stores_wait(self, loads_must_land: bool = False) -> bool:
        """Whether in every loop that stores a barrier stands between its loads and its stores, and, if asked,
        a wait for the loads before it."""
        storing = [loop for loop in self.loops if any(i.kind == "store" for i in loop)]
        return bool(storing) and all(_barrier_before_stores(loop, loads_must_land) for loop in storing)


def _barrier_before_stores(loop: list[Instruction], loads_must_land: bool) -> bool:
    def positions(kind: str) -> list[int]:
        return [i.position for i in loop if i.kind == kind]

    last_load, first_store = max(positions("load")), min(positions("store"))
    barriers = [b for b in positions("barrier") if last_load < b < first_store]
    if not loads_must_land:
        return bool(barriers)
    return any(last_load < wait < max(barriers, default=-1) for wait in positions("wait"))


def _loops(code: list[Instruction], jumps: list[tuple[int, int]], ends: list[int]) -> list[list[Instruction]]:
    """What stands inside each loop. jumps: (from, to) positions; ends: where control does not fall through.

    A jump back closes a loop if it can be reached from where it leads (a jump to itself is the trap at the
    end of a program)."""
    spans = {(to, source) for source, to in jumps if to < source and source in _reached(to, jumps, ends)}
    return [[i for i in code if i.kind and first <= i.position <= last] for first, last in sorted(spans)]


def _reached(start: int, jumps: list[tuple[int, int]], ends: list[int]) -> set[int]:
    """Positions of the jumps that control can come to from `start`."""
    reached, seen, todo = set(), set(), [start]
    while todo:
        position = todo.pop()
        if position not in seen:
            seen.add(position)
            stop = min((end for end in ends if end >= position), default=position)
            passed = [(source, to) for source, to in jumps if position <= source <= stop]
            reached.update(source for source, _ in passed)
            todo += [to for _, to in passed]
    return reached


SASS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")


def read_cubin(cubin: bytes, shared: int) -> MachineCode:
    """NVIDIA: `cuobjdump -res-usage` and `-sass`."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = _cuobjdump("-res-usage", file.name)
        sass = _cuobjdump("-sass", file.name)
    counts = {name: int(count) for name, count in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    code, jumps, ends = [], [], []
    for address, predicate, name, operands in SASS.findall(sass):
        position = int(address, 16)
        code.append(_sass_instruction(position, name))
        conditional = predicate or re.match(r"!?U?P\d", operands)
        if name.split(".")[0] in ("BRA", "EXIT", "RET") and not conditional:
            ends.append(position)
        if name.startswith("BRA"):
            jumps += [(position, int(target, 16)) for target in re.findall(r"0x([0-9a-f]+)", operands)[-1:]]
    if not code:
        raise RuntimeError("cuobjdump -sass gave no instruction that could be read")
    return MachineCode(
        counts["REG"], counts["STACK"] + counts.get("LOCAL", 0), shared, _loops(code, jumps, ends)
    )


def _cuobjdump(option: str, file: str) -> str:
    command = [str(BINARIES / "cuobjdump"), option, file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _sass_instruction(position: int, name: str) -> Instruction:
    parts = name.split(".")
    kind = {"LDG": "load", "STG": "store", "BAR": "barrier"}.get(parts[0], "")
    bits = [int(part) for part in parts if part in ("64", "128", "256")]
    narrow = {"U8": 1, "S8": 1, "U16": 2, "S16": 2}
    small = [narrow[part] for part in parts if part in narrow]
    width = small[0] if small else (bits[0] // 8 if bits else 4)
    return Instruction(position, kind, width if kind in ("load", "store") else 0)


AMD_ACCESS = re.compile(r"(?:global|buffer|flat)_(load|store)_(\w+)")
AMD_BYTES = {"dwordx4": 16, "b128": 16, "dwordx3": 12, "dwordx2": 8, "b64": 8, "dword": 4, "b32": 4}


def read_amdgcn(assembly: str, shared: int) -> MachineCode:
    """AMD: the assembly text and its metadata."""
    code, jumps, ends, labels = [], [], [], {}
    for position, line in enumerate(assembly.splitlines()):
        words = line.split()
        if not words:
            continue
        if label := re.match(r"(\.LBB\w+):", line):
            labels[label[1]] = position
        elif access := AMD_ACCESS.match(words[0]):
            width = AMD_BYTES.get(access[2], 2)  # what is left is a short or a byte
            code.append(Instruction(position, access[1], width))
        elif words[0] == "s_barrier":
            code.append(Instruction(position, "barrier", 0))
        elif words[0] == "s_waitcnt" and "vmcnt(0)" in line:
            code.append(Instruction(position, "wait", 0))
        elif words[0] == "s_branch" or words[0].startswith("s_cbranch"):
            jumps.append((position, words[1]))
        if words[0] in ("s_branch", "s_endpgm", "s_setpc_b64"):
            ends.append(position)
    back = [(source, labels[label]) for source, label in jumps if label in labels]

    def count(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1])

    spills = count("vgpr_spill_count") + count("sgpr_spill_count") + count("private_segment_fixed_size")
    return MachineCode(count("vgpr_count"), spills, shared, _loops(code, back, ends))
