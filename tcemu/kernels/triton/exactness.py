"""Why the bits of a launch may not be those of the GPU: evidence below recorded words, and what PTX leaves open."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.engine.architectures.lookup import evidence, target_rows
from tcemu.engine.architectures.special_function_rows import special_function_evidence
from tcemu.kernels.ptx.simt.special_registers import TIMERS

RECORDED = ("silicon", "published")  # levels of evidence with words of a GPU
FLOATS = ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64")


def bit_doubts(opcodes: Iterable[str], registers: Iterable[str], target: str) -> tuple[str, ...]:
    """Return the reasons for which executed statements may not have the GPU's bits; empty if there are none.

    Args:
        opcodes: Opcodes of the statements.
        registers: Special registers that they read.
        target: The GPU.
    """
    opcodes = sorted(set(opcodes))
    doubts = [doubt for opcode in opcodes if (doubt := _doubt(opcode, target))]
    timers = sorted({*registers} & {*TIMERS})
    if timers:
        doubts.append(f"{', '.join(timers)}: the emulation counts statements")
    return tuple(dict.fromkeys(doubts))


def _doubt(opcode: str, target: str) -> str:
    name, *parts = opcode.split(".")
    if name in ("atom", "red") and "add" in parts and {*parts} & {*FLOATS}:
        return f"{name}.add of floats: the order of the threads is open"
    if opcode.startswith("tcgen05.mma"):
        levels = {row.evidence.level for row in target_rows(target) if row.family.startswith("tcgen05")}
        return _level_text("tcgen05.mma", target, next(iter(sorted(levels - {*RECORDED})), ""))
    with suppress(NotModelled, Unsupported, ValueError):
        if name in ("mma", "wmma", "wgmma"):
            return _level_text(name, target, evidence(opcode, target).level)
        return _level_text(opcode, target, special_function_evidence(opcode, target).level)
    return ""


def _level_text(what: str, target: str, level: str) -> str:
    return "" if not level or level in RECORDED else f"{what} on {target}: the evidence is {level}"
