"""Divisions by constants, which ptxas turns into products: `div.full.f32` and `div.approx.f32`.

ptxas multiplies by the divisor's reciprocal, rounded to nearest, where the unit's own reciprocal of a variable may be another: 1/37 is
0x3CDD67C9, and `rcp.approx` gives 0x3CDD67C8. Dividends are scaled as for a variable: by 1/4 for divisors above 2^126 (`div.full`), by 2^24
for those below 2^-126.

Source: the machine code that ptxas 12.9 makes for sm_90a of 16 divisors by three forms each, also under --fmad=false (`nvdisasm -c`). Of
5,000 means over 37 elements, 7 differ from an H200's without this pass, and none with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from tcemu.kernels.ptx.text.module import Float, Function, Module, Operand, Register, Statement, nested_operands

LARGE, NORMAL = np.float32(2.0**126), np.float32(2.0**-126)
SCALED = "%scaled"  # the register of a scaled dividend


def fold_constant_divisions(module: Module) -> Module:
    """Return the module with products in place of the divisions by constants that ptxas replaces."""
    return replace(module, functions={name: _fold_in_function(function) for name, function in module.functions.items()})


def _fold_in_function(function: Function) -> Function:
    if not function.defined or not any(map(_is_division, function.statements)):
        return function
    constants = _find_constants(function)
    statements: list[Statement] = []
    starts = []  # of each old statement among the new ones
    for statement in function.statements:
        starts.append(len(statements))
        divisor = statement.operands[-1] if _is_division(statement) else None
        divisor = constants.get(divisor.name) if isinstance(divisor, Register) else divisor
        statements += [statement] if not isinstance(divisor, Float) else _multiply(statement, divisor)
    starts.append(len(statements))
    labels = {name: starts[index] for name, index in function.labels.items()}
    registers = {**function.registers, SCALED: "f32"} if len(statements) > len(function.statements) else function.registers
    return replace(function, statements=tuple(statements), labels=labels, registers=registers)


def _is_division(statement: Statement) -> bool:
    return statement.name == "div" and statement.qualifiers[-1] == "f32" and statement.qualifiers[0] in ("full", "approx")


def _find_constants(function: Function) -> dict[str, Float]:
    """Return the registers that one `mov` of a constant alone writes, with or without copies in between."""
    written = Counter(
        operand.name for each in function.statements for operand in nested_operands(each.operands[:1]) if isinstance(operand, Register)
    )
    found: dict[str, Float] = {}
    for statement in function.statements:
        if statement.name == "mov" and statement.guard is None and isinstance(statement.operands[0], Register):
            name, value = statement.operands[0].name, statement.operands[1]
            value = found.get(value.name) if isinstance(value, Register) else value
            if written[name] == 1 and isinstance(value, Float):
                found[name] = value
    return found


def _multiply(division: Statement, divisor: Float) -> list[Statement]:
    """Return the product in place of a division, after the scaling of its dividend where there is one."""
    value = np.uint32(divisor.bits).view(np.float32) if divisor.width == 32 else np.float32(np.uint64(divisor.bits).view(np.float64))
    if np.isnan(value):
        return [division]
    ftz, dividend = "ftz" in division.qualifiers, division.operands[1]
    suffix = ".ftz.f32" if ftz else ".f32"
    factor = 1.0
    if abs(value) > LARGE and "full" in division.qualifiers:
        factor = 0.25
    elif abs(value) < NORMAL:
        factor = 1.0 if ftz else 2.0**24
        value = value if not ftz else np.copysign(np.float32(0), value)
    with np.errstate(divide="ignore"):
        reciprocal = np.float32(1) / (value * np.float32(factor))
    if abs(reciprocal) < NORMAL:
        reciprocal = np.copysign(np.float32(0), reciprocal)
    product = (
        [Statement(f"mul.rn{suffix}", (Register(SCALED), dividend, _constant(factor)), None, division.position)] if factor != 1.0 else []
    )
    operands = (division.operands[0], Register(SCALED) if product else dividend, _constant(reciprocal))
    return [*product, replace(division, opcode=f"mul{suffix}", operands=operands)]


def _constant(value: float | np.float32) -> Operand:
    return Float(int(np.float32(value).view(np.uint32)), 32)
