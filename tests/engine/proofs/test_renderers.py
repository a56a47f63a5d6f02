"""The renderers of the proofs: each has every operation, and both compute what Python's integers and NumPy's floats do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy_values
import pytest
import smt_values
from numpy_values import NumpyValue
from proving import Refuted, is_satisfiable, prove
from smt_values import Kind, SmtValue, Trace

from tcemu.engine.arithmetic.step.values import BOOL, F32, I8, I32, I64, OPERATIONS, Lane

WORDS = [
    0,
    1,
    -1,
    2,
    7,
    -8,
    1 << 23,
    (1 << 24) + 1,
    (1 << 31) - 1,
    -(1 << 31),
    0x3F800000,
    0x3F7FFFFF,
    0x00800000,
    0x007FFFFF,
    0x4EFFFFFF,
    0x40490FDB,
]
MOST_LINES = 200


def test_every_operation_has_a_row():
    rows = smt_values.COMMON | smt_values.CONDITIONS | smt_values.INTEGERS | smt_values.FLOATS
    assert set(rows) == set(OPERATIONS)
    assert {name.split()[0] for name in numpy_values.ROWS} == set(OPERATIONS) - {"fma", "muladd", "add_rz"}


def test_a_renderer_is_short():
    assert len(Path(smt_values.__file__).read_text().splitlines()) <= MOST_LINES


def words(x: NumpyValue) -> list[int]:
    array = x.array
    return (array if array.dtype == np.bool_ else array.view(f"u{array.dtype.itemsize}")).astype(object).tolist()


FORMULAS = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "and, or, xor": lambda x, y: (x & y) | (x ^ 5),
    "shl": lambda x, y: x << (y & 31), "lshr": lambda x, y: x >> (y & 31), "ashr": lambda x, y: x.shift_right_signed(y & 31),
    "eq": lambda x, y: x == y, "ne": lambda x, y: x != y, "lt": lambda x, y: x < y, "le": lambda x, y: x >= y,
    "select, max, min": lambda x, y: (x < y).select(x.max(3), y.min(9)), "clz": lambda x, y: x.leading_zeros(),
    "trunc, sext, zext": lambda x, y: x.resize(I8).resize(I64) + y.resize(I64, signed=False) + (x < y).resize(I64),
    "conditions": lambda x, y: ((x < y) ^ (x == 7)) & ~((y <= 1) | x.never()),
    "floats": lambda x, y: (x.as_float() + y.as_float() * x.as_float() - y.as_float()).bits(),
    "div": lambda x, y: (x.as_float() / y.as_float()).bits(),
    "float eq, ne": lambda x, y: (x.as_float() == y.as_float()) | (x.as_float() != y.as_float()),
    "float lt, le": lambda x, y: (x.as_float() < y.as_float()) ^ (x.as_float() <= y.as_float()),
    "sitofp": lambda x, y: x.to_float().bits(), "uitofp": lambda x, y: x.to_float(signed=False).bits(),
    "sitofp_rz": lambda x, y: x.to_float(toward_zero=True).bits(),
    "uitofp_rz": lambda x, y: x.to_float(signed=False, toward_zero=True).bits(),
    "fpext, fptrunc": lambda x, y: (x.as_float().widen() * 1.25).narrow("RN").bits() & (x.as_float().widen() * 1.25).narrow("RZ").bits(),
    "fptosi": lambda x, y: (x & 0x4EFFFFFF).as_float().to_integer(),
    "integral": lambda x, y: sum((x.as_float().to_integral(mode).bits() for mode in ("RM", "RP")), x.as_float().to_integral("RN").bits()),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_both_renderers_compute_alike(name):
    formula, trace = FORMULAS[name], Trace()
    x, y = (np.array(side, np.int32).reshape(-1) for side in np.meshgrid(WORDS, WORDS))
    got = words(formula(NumpyValue(x), NumpyValue(y)))
    claim = SmtValue(trace, BOOL, trace.terms.mk_true())
    for at in range(len(x)):
        one, other = (SmtValue(trace, I32, trace.constant(int(side[at]), I32)) for side in (x, y))
        is_nan = name in ("floats", "div", "integral", "fpext, fptrunc") and np.isnan(np.array(got[at], np.uint32).view(np.float32))
        claim = claim & (formula(one, other) == got[at]) if not is_nan else claim
    prove(trace, claim)


def test_a_wrong_claim_is_refuted_with_its_values():
    trace = Trace()
    x = trace.variable(I32, "x")
    with pytest.raises(Refuted, match="x = #b01111111111111111111111111111111"):
        prove(trace, x + 1 > x)
    prove(trace, x + 1 > x, x < (1 << 31) - 1)
    with pytest.raises(AssertionError, match="contradict"):
        prove(trace, x == x + 1, x < x)
    assert not is_satisfiable(trace, x < x)


def test_what_operations_demand_is_shown():
    trace = Trace()
    x = trace.variable(I32, "x")
    shifted = x >> x
    prove(trace, shifted == shifted, x >= 0, x < 32)
    with pytest.raises(Refuted):
        prove(trace, shifted == shifted, x >= 0)
    trace = Trace()
    y = trace.variable(F32, "y")
    prove(trace, y.to_integer() <= 100, y < 101.0, y > 0.0)
    with pytest.raises(Refuted):
        prove(trace, y.to_integer() == y.to_integer())


def test_what_operations_leave_open_is_open():
    """The bits of a NaN, whether a product is rounded before it is added, and whether a subnormal number is flushed."""
    trace = Trace()
    x = trace.variable(F32, "x")
    nan = SmtValue(trace, BOOL, trace.make(Kind.FP_IS_NAN, x.term))
    with pytest.raises(Refuted):
        prove(trace, (x + x).bits() == 0x7FC00000, nan)
    trace = Trace()
    x, y, z = (trace.variable(F32, name) for name in "xyz")
    for exact in ((x * y) + z, x.multiply_add(y, z)):
        with pytest.raises(Refuted):
            prove(trace, x.multiply_add_exact(y, z) == exact, x == 1.0 + 2.0**-23, y == 1.0 - 2.0**-23, z == -1.0)
    trace = Trace(flushes=True)
    x = trace.variable(F32, "x")
    for claim in ((x * 1.0 == x), (x * 1.0 == 0.0)):
        with pytest.raises(Refuted):
            prove(trace, claim, x.bits() == 5)
    prove(trace, x * 1.0 == x, x >= 2.0**-126, x < 2.0**100)


def test_lanes_of_any_width():
    trace = Trace()
    x = trace.variable(Lane("int", 44), "x")
    prove(trace, x.resize(Lane("int", 45)) + x.resize(Lane("int", 45)) == x.resize(Lane("int", 45)) << 1)
