"""`ld`, `ldu` and `st`: every state space, vectors, and the hints and orders that PTX lets a program give (PTX ISA 9.7.9.8 to 9.7.9.11).

What hints at caches changes nothing. What orders accesses does not either: every access is seen by all threads at once.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from tcemu.errors import Unsupported
from tcemu.ptx import checks
from tcemu.ptx.context import Context, Prepare, Step
from tcemu.ptx.module import Address, Operand, Statement, Vector
from tcemu.ptx.values import KINDS

if TYPE_CHECKING:
    from tcemu.ptx.machine import Machine

TYPES = ("b8", "b16", "b32", "b64", "u8", "u16", "u32", "u64", "s8", "s16", "s32", "s64", "f32", "f64", "b128")
ORDER = r"(weak\.|volatile\.|(relaxed|acquire|release)\.(cta|cluster|gpu|sys)\.|mmio\.relaxed\.sys\.)?"
STRONG = {"volatile", "relaxed", "acquire", "release"}  # no race by itself, and it may order others
SPACE = r"((?P<space>global|shared::cta|shared::cluster|shared|local|const\[\d+\]|const|param::entry|param::func|param)\.)?"
CACHE = r"(c[agsv]\.|lu\.|wb\.|wt\.)?"
EVICT = r"((L1|L2)::(evict_\w+|no_allocate)\.)*"
HINT = r"(?P<hint>L2::cache_hint\.)?(L2::\d+B\.)?"
VECTOR = r"((?P<vector>v[248])\.)?"
PATTERNS = {
    "ld": re.compile(rf"{ORDER}{SPACE}{CACHE}(nc\.)?{EVICT}{HINT}{VECTOR}(?P<type>\w+)"),
    "ldu": re.compile(rf"{SPACE}{VECTOR}(?P<type>\w+)"),
    "st": re.compile(rf"{ORDER}{SPACE}{CACHE}{EVICT}{HINT}{VECTOR}(?P<type>\w+)"),
}
# ptxas takes the parts of an opcode in any order; the patterns have those of a class in this one
CLASSES = (
    "mmio", "weak|volatile|relaxed|acquire|release|acq_rel", "cta|cluster|gpu|sys", SPACE, CACHE, "nc",
    r"L[12]::(evict_\w+|no_allocate)", "L2::cache_hint", r"L2::\d+B",
)  # fmt: skip
RANKS = [re.compile(part.replace(r"\.", "")) for part in CLASSES]
MOST_BYTES = 32  # of a vector: 256 bits from PTX ISA 8.8 on
SHARED_FAR = "shared::cluster"  # clusters have one block


class Access(NamedTuple):
    """A load or a store, as its opcode says. space: "" for generic; a b128 element counts as two of b64."""

    space: str
    kind: str
    elements: int
    registers: tuple[Operand, ...]
    address: Address


def in_order(parts: tuple[str, ...]) -> str:
    """The parts of an opcode in the manual's order, joined by dots."""
    return ".".join(sorted(parts, key=lambda part: next((i for i, rank in enumerate(RANKS) if rank.fullmatch(part)), len(RANKS))))


def read_access(statement: Statement) -> Access:
    """The access of an `ld`, `ldu` or `st`. Raises Unsupported."""
    found = PATTERNS[statement.name].fullmatch(in_order(statement.qualifiers))
    kind = found["type"] if found else ""
    if found is None or kind not in TYPES:
        raise Unsupported(
            f"{statement.opcode!r} is not run: it is no {statement.name} whose qualifiers are known, of type {', '.join(TYPES)}"
        )
    count = int((found["vector"] or "v1")[1:])
    operands = statement.operands
    first, second = (operands[:2] if statement.name != "st" else operands[1::-1]) if len(operands) >= 2 else (None, None)
    if not isinstance(second, Address) or second.coordinates is not None or len(operands) != 2 + bool(found.groupdict().get("hint")):
        raise Unsupported(f"{statement.opcode!r} takes a register and an address, and a cache policy if it says .L2::cache_hint")
    registers = first.elements if isinstance(first, Vector) else (first,)
    if len(registers) != count or first is None:
        raise Unsupported(f"{statement.opcode!r} takes {count} registers; got {len(registers)}")
    if count * KINDS.get(kind, KINDS["b64"]).bits // 8 > MOST_BYTES or kind == "b128":
        raise Unsupported(f"{statement.opcode!r} is not run: a load or store has {MOST_BYTES} bytes at most, in elements of 8 to 64 bits")
    space = re.sub(r"::\w+|\[\d+\]", "", found["space"] or "")
    return Access(space, kind, count, tuple(each for each in registers if each is not None), second)


def prepare_load(statement: Statement, context: Context) -> Step:
    """`ld`, `ldu`."""
    access, strong = read_access(statement), bool(STRONG & set(statement.qualifiers))

    def run(machine: Machine) -> Machine:
        machine = checks.forget(machine) if strong else machine
        values, machine = machine.load(access.space, machine.address(access.address), access.kind, access.elements)
        machine = checks.forget(machine) if strong else machine
        for register, value in zip(access.registers, values, strict=True):
            machine = machine.write(register, access.kind, value)
        return machine

    return Step(run)


def prepare_store(statement: Statement, context: Context) -> Step:
    """`st`."""
    access, strong = read_access(statement), bool(STRONG & set(statement.qualifiers))
    if access.space == "const":
        raise Unsupported(f"{statement.opcode!r}: constant memory is not written")

    def run(machine: Machine) -> Machine:
        values = tuple(machine.read(register, access.kind) for register in access.registers)
        machine = checks.forget(machine) if strong else machine
        machine = machine.store(access.space, machine.address(access.address), access.kind, values)
        return checks.forget(machine) if strong else machine

    return Step(run)


PREPARE: dict[str, Prepare] = {"ld": prepare_load, "ldu": prepare_load, "st": prepare_store}
