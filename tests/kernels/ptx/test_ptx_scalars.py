"""Integer, logic and move instructions of PTX against Python's integers: every opcode of every row."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from oracles.ptx_integer_reference import reference
from support.ptx_opcodes import opcodes
from support.ptx_scalars import draw, operation, run_operations

from tcemu.base.errors import Unsupported
from tcemu.base.numpy_programs import trace_elementwise
from tcemu.kernels.ptx.scalar.scalar_table import INTEGER_ROWS
from tcemu.kernels.ptx.text.ptx_types import storage_dtype

COUNT = 120
ELSEWHERE = ("mov", "testp", "copysign")
INTEGERS = {
    opcode
    for key, row in INTEGER_ROWS.items()
    if key not in ELSEWHERE
    for opcode in opcodes(key)
    if not (key in ("setp", "set", "slct") and opcode.rsplit(".", 1)[1] in ("f16", "f16x2", "bf16", "bf16x2", "f32", "f64"))
}


def _runs_on_host(each):
    return trace_elementwise(each.compute, [jax.ShapeDtypeStruct((), storage_dtype(kind)) for kind in each.sources]) is not None


def legal(opcode):
    try:
        operation(opcode)
    except Unsupported as error:
        assert "comparison" in str(error), opcode
        return False
    return True


def test_integers_are_those_of_python():
    names = sorted(filter(legal, INTEGERS))
    # setp with all operators in all types is 10 times the rest: the usual run has one type for each operator
    names = [name for at, name in enumerate(names) if at % (14 if name.startswith("set") else 4) == 0]
    rng = np.random.default_rng(1)
    operations = [operation(name, *((2, 1, 1) + (1,) * (name.count(".") == 3) if name.startswith("setp") else ())) for name in names]
    operands = [[draw(kind, COUNT, rng) for kind in each.sources] for each in operations]
    found = run_operations(operations, operands)
    assert sum(_runs_on_host(each) for each in operations[::10]) > 5
    wrong = []
    for name, values, words in zip(names, operands, found, strict=True):
        wanted = [reference(name)(*map(int, row)) for row in zip(*values, strict=True)]
        for got, want in zip(zip(*words, strict=True), wanted, strict=True):
            if tuple(map(int, got)) != tuple(map(int, want)):
                wrong.append((name, got, want))
                break
    assert not wrong, f"{len(wrong)} of {len(names)}: {wrong[:20]}"


def test_modifiers_may_stand_in_any_order():
    assert operation("min.f16x2.NaN.xorsign.abs") is operation("min.NaN.xorsign.abs.f16x2")
    assert operation("cvt.rn.relu.satfinite.e4m3x2.f32") is operation("cvt.rn.satfinite.relu.e4m3x2.f32")
    with pytest.raises(Unsupported, match="cvt"):
        operation("cvt.f32.rn.f16.relu")  # an opcode of f32 from f16, which rounds nothing


@pytest.mark.parametrize(
    "opcode", ["add.sat.u32", "shl.s32", "mul.u32", "mov.b128", "popc.b16", "setp.lo.s32", "setp.lt.b32", "add.rn.s32"]
)
def test_what_is_none_is_refused(opcode):
    with pytest.raises(Unsupported, match=opcode.split(".")[-1]):
        operation(opcode)
