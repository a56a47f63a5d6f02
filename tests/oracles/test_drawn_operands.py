"""The generators reach what they promise: a class that never produced its corner would test nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from support import random_operands as operands

from oracles import reference
from oracles.reference import FORMATS

FLOATS = [name for name, spec in FORMATS.items() if spec.exponent]


@pytest.mark.parametrize("name", FLOATS)
def test_classes_are_seeded_and_in_range(name):
    for kind in operands.CLASSES:
        drawn = operands.codes(name, kind, (50, 16), np.random.default_rng(1))
        again = operands.codes(name, kind, (50, 16), np.random.default_rng(1))
        assert (drawn == again).all() and drawn.dtype == operands.storage_dtype(name) and drawn.shape == (50, 16)
        assert int(drawn.max()) < 1 << FORMATS[name].bits
        values = [reference.decode(name, code) for code in drawn.reshape(-1).tolist()]
        finite = [not isinstance(value, str | tuple) for value in values]
        if kind not in ("raw", "special"):
            assert all(finite)
        elif FORMATS[name].top != "finite" and kind == "special":
            assert not all(finite)


@pytest.mark.parametrize("name", [name for name in FLOATS if FORMATS[name].signed])
def test_classes_reach_their_corner(name):
    spec, rng = FORMATS[name], np.random.default_rng(2)
    hidden = 1 << spec.fraction

    def drawn(kind: str) -> list[tuple]:
        return [reference.parts(name, code) for code in operands.codes(name, kind, (500, 8), rng).reshape(-1).tolist()]

    tiny = drawn("subnormal")
    assert any(0 < significand < hidden for _, _, significand, _ in tiny) and any(significand == 0 for _, _, significand, _ in tiny)
    assert {sign for _, sign, significand, _ in tiny if significand == 0} == ({0} if spec.top == "fnuz" else {0, 1})
    all_exponents = set(range(spec.least, (spec.greatest >> spec.fraction) - spec.bias + 1))
    assert len({exponent for *_, exponent in drawn("full")} & all_exponents) >= min(len(all_exponents), 1000)
    assert all(bin(significand).count("1") <= 3 for _, _, significand, _ in drawn("sparse"))
    pairs = operands.codes(name, "cancelling", (500, 8), rng).reshape(-1, 2).tolist()
    sums = [reference.decode(name, x) + reference.decode(name, y) for x, y in pairs]
    assert any(total == 0 for total in sums) and any(total != 0 for total in sums)


@pytest.mark.parametrize("types", [("f16", "f16", "f32"), ("e4m3", "e5m2", "f16"), ("bf16", "bf16", "f32"), ("tf32", "tf32", "f32")])
def test_dots_have_shapes_and_ties(types):
    for kind in operands.CLASSES:
        a, b, c = operands.dot_operands(*types, kind, 20, 8, np.random.default_rng(3))
        assert a.shape == b.shape == (20, 8) and c.shape == (20,)
    a, b, c = operands.dot_operands("f16", "f16", "f16", "ties", 3000, 2, np.random.default_rng(4))
    ties = 0
    for row, column, start in zip(a.tolist(), b.tolist(), c.tolist(), strict=True):
        total = sum(
            (reference.decode("f16", x) * reference.decode("f16", y) for x, y in zip(row, column, strict=True)),
            reference.decode("f16", start),
        )
        down, up = (reference.decode("f16", reference.encode("f16", total, mode)) for mode in ("RM", "RP"))
        ties += down != up and not isinstance(down, tuple) and not isinstance(up, tuple) and total - down == up - total
    assert ties >= 20


@settings(max_examples=30, deadline=None)
@given(operands.array_strategy("e4m3", (2, 3)), operands.code_strategy("f64"), operands.registers((32, 2)))
def test_strategies_draw_codes(small, wide, registers):
    assert small.dtype == np.uint8 and small.shape == (2, 3)
    assert 0 <= wide < 1 << 64
    assert registers.dtype == np.uint32
    assert (operands.one_code(operands.two_words(np.array([wide], np.uint64))) == wide).all()
