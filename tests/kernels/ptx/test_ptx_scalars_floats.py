"""Floating-point instructions of PTX against fractions: every opcode of every row that promises bits."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from oracles import special_functions_reference as unit_reference
from oracles.ptx_float_reference import reference
from support.ptx_opcodes import opcodes
from support.ptx_scalars import draw, operation, run_operations

from tcemu.base.errors import Unsupported
from tcemu.kernels.ptx.scalar.scalar_table import FLOAT_ROWS

FLOAT = re.compile(r"\.(f16|bf16|f32|f64)(x2)?$")
ARITHMETIC = sorted(
    opcode
    for key, row in FLOAT_ROWS.items()
    if not key.startswith("cvt")
    for opcode in opcodes(key)
    if ".approx" not in opcode and ".full" not in opcode
)
COMPARISONS = sorted(opcode for key in ("setp", "set", "testp", "copysign", "slct") for opcode in opcodes(key) if FLOAT.search(opcode))


def sizes(name):
    """Return the sizes of setp's operands; it has two destinations except for f16 and bf16."""
    parts = name.split(".")
    two = parts[0] == "setp" and parts[-1] not in ("f16", "bf16")
    return (2,) + (1,) * (3 if parts[2] in ("and", "or", "xor") else 2) if two else ()


def operations(names):
    """The operations of the opcodes; some combinations are none, and their `Prepare` says so."""
    found = {}
    for name in names:
        try:
            made = operation(name, *sizes(name))
        except Unsupported as error:
            assert "three operands" in str(error), name
            continue
        found[name] = made
    return found


def differing(found, count, seed):
    """Count the values of all opcodes that differ from the reference, and name the first of each opcode that does."""
    rng = np.random.default_rng(seed)
    operands = [[draw(kind, count, rng) for kind in each.sources] for each in found.values()]
    wrong, seen = [], 0
    for name, values, words in zip(found, operands, run_operations(list(found.values()), operands), strict=True):
        wanted = reference(name)
        for row, got in zip(zip(*values, strict=True), zip(*words, strict=True), strict=True):
            seen += 1
            expected = tuple(map(int, wanted(*map(int, row))))
            if tuple(map(int, got)) != expected:
                wrong.append((name, *(list(map(hex, map(int, values))) for values in (row, got, expected))))
                break
    assert not wrong, f"{len(wrong)} of {len(found)} opcodes: {wrong[:12]}"
    return seen


def test_arithmetic_is_that_of_fractions():
    """One opcode of sixteen, without what rounds as .rn if told nothing, and where the other roundings go the same way as those of f32."""
    told = [name for name in ARITHMETIC if name.replace(".", ".rn.", 1) not in ARITHMETIC]
    some = [name for name in told if not re.search(r"\.r[zmp]\..*(sat|f32x2|bf16$)|^mad", name)][::16]
    found = operations(some)
    assert differing(found, 60, 2) == 60 * len(found) and len(found) > 6


def test_comparisons_are_those_of_fractions():
    found = operations([name for at, name in enumerate(COMPARISONS) if at % 48 == 0])
    assert differing(found, 60, 3) == 60 * len(found) and len(found) > 12


@pytest.mark.full
def test_many_operands_of_arithmetic_and_comparisons():
    found = operations(ARITHMETIC) | operations(COMPARISONS)
    assert differing(found, 300, 4) == 300 * len(found)


# ---- approximations


def seed_of_root(x):
    """1 / sqrt(x) of a normal f64 as the unit's f64 seed: from the f32 with the same upper 20 fraction bits in [1, 4)."""
    mantissa, exponent = math.frexp(x)
    mantissa, exponent = mantissa * 2, exponent - 1
    odd = exponent % 2
    near = np.float32(math.floor(mantissa * 2**20) * 2.0**-20 * (1 + odd)).view(np.uint32)
    root = unit_reference.unary("rsqrt", np.array([near]), True)[0]
    upper = np.uint32(root & 0xFFFFFFF8)  # 20 of 23 fraction bits
    return math.ldexp(float(upper.view(np.float32)), -(exponent - odd) // 2)


def test_the_root_of_f64_is_the_program_of_the_assembler():
    """rsqrt.approx.f64: a seed and four multiply-adds, in fractions."""
    found = operation("rsqrt.approx.f64")
    rng = np.random.default_rng(10)
    exponents = np.concatenate([rng.integers(1, 2046, 200), rng.integers(1020, 1027, 100)])
    codes = rng.integers(0, 1 << 52, 300, dtype=np.uint64) | (exponents.astype(np.uint64) << np.uint64(52))
    codes = np.concatenate([codes, np.array([1, (1 << 52) - 1, 1 << 51, 0x123456789], np.uint64)])
    ((words,),) = run_operations([found], [[codes]])
    for code, word in zip(codes, words, strict=True):
        x = float(code.view(np.float64))
        small = x < 2.0**-1022
        x = x * 2.0**54 if small else x
        seed = seed_of_root(x)
        square = float(Fraction(seed) ** 2)
        error = float(1 - Fraction(x) * Fraction(square))
        factor = float(Fraction(error) * Fraction(3, 8) + Fraction(1, 2))
        correction = float(Fraction(seed) * Fraction(error))
        root = float(Fraction(factor) * Fraction(correction) + Fraction(seed)) * (2.0**27 if small else 1)
        assert float(word.view(np.float64)) == root, (hex(code), hex(word))
