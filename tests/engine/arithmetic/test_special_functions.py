"""The special function unit against the words of an H200 and against a second implementation in NumPy."""

from __future__ import annotations

import importlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import special_functions_reference as reference
from support.ptx_recorded import array, document
from support.ptx_scalars import FLOAT_EDGES, draw

from tcemu.engine.arithmetic import special_functions
from tcemu.engine.arithmetic.special_function_tables import TANH
from tcemu.engine.arithmetic.special_functions import DIVISIONS, NARROW, UNARY, multiply_f32

BY_PROGRAM = "rsqrt.approx.f64"  # a program of the assembler: tests/kernels/ptx
FORMS = [(name, flush) for name in UNARY for flush in (False, True)]
DIVISION_FORMS = [(name, flush) for name in DIVISIONS for flush in (False, True)]
NAN, INFINITY, NEGATIVE_INFINITY, ZERO, NEGATIVE_ZERO = 0x7FFFFFFF, 0x7F800000, 0xFF800000, 0, 0x80000000
ONE, TINY, NEGATIVE_TINY, PAYLOAD = 0x3F800000, 0x00000001, 0x80400000, 0xFFC0002A


@jax.jit
def all_functions(codes):
    """Every form of every function in one program."""
    return [UNARY[name](codes, flush) for name, flush in FORMS]


@jax.jit
def all_divisions(a, b):
    return [DIVISIONS[name](a, b, flush) for name, flush in DIVISION_FORMS] + [multiply_f32(a, b, flush) for flush in (False, True)]


def recorded(opcode):
    """Return a case's operands and words, as stored."""
    case = next(case for case in document()["cases"] if case["op"] == opcode)
    bits = 64 if opcode.endswith("f64") else 16 if case["sources"] == ["codes"] else 32
    given = [array(document()["codes"] if name == "codes" else document()["operands"][name], bits) for name in case["sources"]]
    return given, array(case["words"][0], bits)[: len(given[0])]


def words_of(opcode):
    """Compute the words of an opcode for its recorded operands."""
    given, _ = recorded(opcode)
    name, *parts = opcode.split(".")
    flush, kind = "ftz" in parts, parts[-1]
    if kind == "f64":
        upper = {"rcp": special_functions.rcp_upper, "rsqrt": special_functions.rsqrt_upper}[name]
        return np.asarray(upper(jnp.asarray((given[0] >> np.uint64(32)).astype(np.uint32)))).astype(np.uint64) << np.uint64(32)
    if name == "div":
        at = DIVISION_FORMS.index((".".join(opcode.split(".")[:2]), flush))
        return np.asarray(all_divisions(*given)[at])
    if kind == "f32":
        return np.asarray(special_functions.tanh(given[0]) if name == "tanh" else all_functions(given[0])[FORMS.index((name, flush))])
    narrow = NARROW[name, kind.removesuffix("x2")]
    if kind.endswith("x2"):
        return np.asarray(narrow(given[0] & 0xFFFF)) | (np.asarray(narrow(given[0] >> 16)) << 16)
    return np.asarray(narrow(given[0]))


def test_the_words_of_an_h200():
    """All recorded words of the unit's functions: 0 mismatches of 2,800."""
    opcodes = [case["op"] for case in document()["cases"] if ".approx" in case["op"] or ".full" in case["op"]]
    opcodes = [opcode for opcode in opcodes if opcode != BY_PROGRAM]
    compared, differing = 0, {}
    for opcode in opcodes:
        ours, theirs = words_of(opcode), recorded(opcode)[1]
        compared += len(theirs)
        if count := int((ours != theirs).sum()):
            differing[opcode] = count
    assert not differing and len(opcodes) == 29 and compared == 3282


def drawn_codes(count, seed):
    """Edge cases, numbers in the range of exponentials and angles, and any codes."""
    rng = np.random.default_rng(seed)
    near = (rng.uniform(-150, 150, count) * rng.choice([1.0, 2.0**-8, 2.0**-20], count)).astype(np.float32).view(np.uint32)
    whole = (rng.integers(-300, 300, 600) / 2).astype(np.float32).view(np.uint32)
    return np.concatenate([np.array(FLOAT_EDGES["f32"], np.uint32), near, whole, draw("f32", count, rng)])


def test_random_operands_against_the_reference():
    codes = drawn_codes(4000, 1)
    for (name, flush), ours in zip(FORMS, all_functions(codes), strict=True):
        differs = np.flatnonzero(np.asarray(ours) != reference.unary(name, codes, flush))
        assert differs.size == 0, (name, flush, differs.size, hex(codes[differs[0]]))


def test_divisions_against_the_reference():
    rng = np.random.default_rng(2)
    edges = np.array(FLOAT_EDGES["f32"], np.uint32)
    a = np.concatenate([rng.choice(edges, 3000), drawn_codes(3000, 3)])
    b = rng.permutation(np.concatenate([rng.choice(edges, len(a) - 2000), draw("f32", 2000, rng)]))
    results = all_divisions(a, b)
    for (name, flush), ours in zip(DIVISION_FORMS, results, strict=False):
        differs = np.flatnonzero(np.asarray(ours) != reference.divide(name, a, b, flush))
        assert differs.size == 0, (name, flush, differs.size, hex(a[differs[0]]), hex(b[differs[0]]))
    x, y = a.view(np.float32), b.view(np.float32)
    with np.errstate(all="ignore"):
        product = np.where(np.isnan(x * y), np.uint32(NAN), (x * y).view(np.uint32))
    assert np.array_equal(results[-2], product)


# operand: NaN with a payload, +Inf, -Inf, +0, -0, 2^-149, -2^-127; of each function without .ftz and with it
SPECIALS = {
    ("ex2", False): (NAN, INFINITY, ZERO, ONE, ONE, ONE, ONE),
    ("ex2", True): (NAN, INFINITY, ZERO, ONE, ONE, ONE, ONE),
    ("lg2", False): (NAN, INFINITY, NAN, NEGATIVE_INFINITY, NEGATIVE_INFINITY, 0xC3150000, NAN),
    ("lg2", True): (NAN, INFINITY, NAN, NEGATIVE_INFINITY, NEGATIVE_INFINITY, NEGATIVE_INFINITY, NEGATIVE_INFINITY),
    ("rcp", False): (NAN, ZERO, NEGATIVE_ZERO, INFINITY, NEGATIVE_INFINITY, INFINITY, 0xFF000000),
    ("rcp", True): (NAN, ZERO, NEGATIVE_ZERO, INFINITY, NEGATIVE_INFINITY, INFINITY, NEGATIVE_INFINITY),
    ("rsqrt", False): (NAN, ZERO, NAN, INFINITY, NEGATIVE_INFINITY, 0x64B504F2, NAN),
    ("rsqrt", True): (NAN, ZERO, NAN, INFINITY, NEGATIVE_INFINITY, INFINITY, NEGATIVE_INFINITY),
    ("sqrt", False): (NAN, INFINITY, NAN, ZERO, NEGATIVE_ZERO, 0x1A3504F3, NAN),
    ("sqrt", True): (NAN, INFINITY, NAN, ZERO, NEGATIVE_ZERO, ZERO, NEGATIVE_ZERO),
    ("sin", False): (NAN, NAN, NAN, ZERO, NEGATIVE_ZERO, ZERO, NEGATIVE_ZERO),
    ("sin", True): (NAN, NAN, NAN, ZERO, NEGATIVE_ZERO, ZERO, NEGATIVE_ZERO),
    ("cos", False): (NAN, NAN, NAN, ONE, ONE, ONE, ONE),
    ("cos", True): (NAN, NAN, NAN, ONE, ONE, ONE, ONE),
}


def test_special_operands():
    codes = np.array([PAYLOAD, INFINITY, NEGATIVE_INFINITY, ZERO, NEGATIVE_ZERO, TINY, NEGATIVE_TINY], np.uint32)
    found = {form: tuple(int(x) for x in words) for form, words in zip(FORMS, all_functions(codes), strict=True)}
    assert found == SPECIALS


# dividend, divisor, and the words of div.approx, div.approx.ftz, div.full and div.full.ftz
SPECIAL_QUOTIENTS = (
    (ONE, ZERO, INFINITY, INFINITY, INFINITY, INFINITY),
    (ONE, NEGATIVE_ZERO, NEGATIVE_INFINITY, NEGATIVE_INFINITY, NEGATIVE_INFINITY, NEGATIVE_INFINITY),
    (ZERO, ZERO, NAN, NAN, NAN, NAN),
    (INFINITY, INFINITY, NAN, NAN, NAN, NAN),
    (ONE, NEGATIVE_INFINITY, NEGATIVE_ZERO, NEGATIVE_ZERO, NEGATIVE_ZERO, NEGATIVE_ZERO),
    (INFINITY, ONE, INFINITY, INFINITY, INFINITY, INFINITY),
    (PAYLOAD, ONE, NAN, NAN, NAN, NAN),
    (ONE, PAYLOAD, NAN, NAN, NAN, NAN),
    (0x7F000000, 0x7F000000, ZERO, ZERO, ONE, ONE),  # 2^127 / 2^127: the reciprocal is a subnormal, which the unit takes to zero
    (INFINITY, 0x7F000000, NAN, NAN, INFINITY, INFINITY),
    (TINY, TINY, ONE, NAN, ONE, NAN),
    (NEGATIVE_TINY, 0x40000000, 0x80200000, NEGATIVE_ZERO, 0x80200000, NEGATIVE_ZERO),
    (TINY, ZERO, INFINITY, NAN, INFINITY, NAN),
    (NEGATIVE_ZERO, ONE, NEGATIVE_ZERO, NEGATIVE_ZERO, NEGATIVE_ZERO, NEGATIVE_ZERO),
)


def test_special_quotients():
    a, b, *expected = np.array(SPECIAL_QUOTIENTS, np.uint64).T.astype(np.uint32)
    for form, words, wanted in zip(DIVISION_FORMS, all_divisions(a, b), expected, strict=False):
        assert np.asarray(words).tolist() == wanted.tolist(), form


def test_special_operands_of_narrow_forms_and_seeds():
    """NaN, +Inf, -Inf, +0, -0, a subnormal of either sign: 2^x of f16 and bf16, and the upper words of 1 / x and 1 / sqrt(x) of f64."""
    for kind, one, infinity, subnormal in (("f16", 0x3C00, 0x7C00, 0x03FF), ("bf16", 0x3F80, 0x7F80, 0x007F)):
        sign = 1 << 15
        codes = np.array([infinity | 1, infinity, sign | infinity, 0, sign, subnormal, sign | subnormal], np.uint16)
        below = 0x3BFF if kind == "f16" else one  # 2^-6.1e-5 is below one, and is truncated; the unit takes the operand of bf16 as a zero
        found = np.asarray(NARROW["ex2", kind](codes)).tolist()
        assert found == [0x7FFF, infinity, 0, one, one, one, below], kind
    upper = np.array([0x7FF00001, 0x7FF00000, 0xFFF00000, 0, 0x80000000, 0x00000001, 0x80000001], np.uint32)
    positive, negative = 0x7FF00000, 0xFFF00000
    assert np.asarray(special_functions.rcp_upper(upper)).tolist() == [NAN, 0, 0x80000000, positive, negative, positive, negative]
    assert np.asarray(special_functions.rsqrt_upper(upper)).tolist() == [NAN, 0, NAN, positive, negative, positive, negative]


def test_any_shape_vmap_and_x64_mode():
    codes = drawn_codes(64, 4)[:128]
    flat = np.asarray(special_functions.ex2(codes, True))
    assert np.array_equal(special_functions.ex2(codes.reshape(2, 4, 16), True), flat.reshape(2, 4, 16))
    assert np.array_equal(jax.vmap(lambda x: special_functions.ex2(x, True))(codes.reshape(8, 16)), flat.reshape(8, 16))
    with jax.enable_x64(True):
        assert np.array_equal(special_functions.ex2(codes, True), flat)
        assert special_functions.ex2(codes, True).dtype == np.uint32


def test_a_changed_coefficient_is_seen(monkeypatch):
    """Control: one unit of one coefficient of the reference's table differs in some significands of its row alone."""
    table = reference.TABLES["rcp"]
    rows = list(table.rows)
    rows[5] = (rows[5][0], rows[5][1] + 1, rows[5][2])
    codes = (np.uint32(127 << 23) + np.arange(0, 1 << 23, 997, dtype=np.uint32)).astype(np.uint32)
    ours = np.asarray(special_functions.rcp(codes, True))
    assert np.array_equal(ours, reference.unary("rcp", codes, True))
    monkeypatch.setitem(reference.TABLES, "rcp", table._replace(rows=tuple(rows)))
    differs = np.flatnonzero(ours != reference.unary("rcp", codes, True))
    assert differs.size > 5 and set((codes[differs] >> 16) & 127) == {5}


SWEPT = {  # the exponent fields and signs of which all 2^23 significands are compared
    "ex2": ((127, 0), (127, 1), (121, 1), (133, 1), (133, 0)),
    "lg2": ((126, 0), (127, 0), (3, 0), (140, 0)),
    "rcp": ((127, 0), (253, 1)),
    "rsqrt": ((127, 0), (128, 0)),
    "sqrt": ((127, 0), (128, 0)),
    "sin": ((118, 0), (126, 0), (127, 1), (128, 0), (129, 0), (131, 1), (140, 0)),
    "cos": ((118, 0), (126, 0), (127, 1), (128, 0), (129, 0), (131, 1), (140, 0)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SWEPT)
def test_all_significands(name):
    """Every significand at some exponents, without .ftz: the table, the sums and their truncation are those of the reference."""
    chunk = 1 << 20
    compute = jax.jit(lambda x: UNARY[name](x, False))
    for field, sign in SWEPT[name]:
        for first in range(0, 1 << 23, chunk):
            codes = np.uint32((sign << 31) | (field << 23) | first) + np.arange(chunk, dtype=np.uint32)
            assert np.array_equal(compute(codes), reference.unary(name, codes, False)), (name, field, sign, first)


@pytest.mark.full
def test_all_significands_of_tanh():
    """Every significand of every exponent that has rows, and of one below and one above, of either sign."""
    for exponent in range(min(TANH) - 1, max(TANH) + 2):
        codes = np.uint32(((exponent & 1) << 31) | ((exponent + 127) << 23)) + np.arange(1 << 23, dtype=np.uint32)
        assert np.array_equal(special_functions.tanh(codes), reference.unary("tanh", codes, False)), exponent


def test_tanh_is_that_of_an_h100():
    """512 operands of each of 11 exponents, and all of f16 and bf16: 0 mismatches of 136,704 words, and the reference agrees."""
    with np.load(Path(__file__).parents[2] / "golden" / "tanh.npz") as file:
        words = dict(file)
    assert np.array_equal(special_functions.tanh(words["f32_operands"]), words["f32"])
    assert np.array_equal(reference.unary("tanh", words["f32_operands"], False), words["f32"])
    codes = np.arange(1 << 16, dtype=np.uint16)
    for kind in ("f16", "bf16"):
        assert np.array_equal(NARROW["tanh", kind](codes), words[kind]), kind
    assert sum(words[name].size for name in ("f32", "f16", "bf16")) == 136_704


def test_tanh_of_special_operands_and_any_code():
    special = np.array([PAYLOAD, INFINITY, NEGATIVE_INFINITY, ZERO, NEGATIVE_ZERO, TINY, NEGATIVE_TINY], np.uint32)
    expected = [NAN, ONE, ONE | 1 << 31, ZERO, NEGATIVE_ZERO, TINY, NEGATIVE_TINY]
    assert np.asarray(special_functions.tanh(special)).tolist() == expected
    codes = drawn_codes(4000, 5)
    assert np.array_equal(special_functions.tanh(codes), reference.unary("tanh", codes, False))


@pytest.mark.full
def test_the_sweep_on_a_gpu_sees_a_wrong_word(monkeypatch):
    """The comparison with a stand-in for the GPU, equal and with one bit of one word flipped."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    script = importlib.import_module("special_function_sweep")
    monkeypatch.setattr(script, "CHUNK", 1 << 10)
    monkeypatch.setattr(script, "instruction", lambda opcode, operands: special_functions.tanh)
    assert script.compare("tanh.approx.f32", special_functions.tanh, 2) == (0, "")
    monkeypatch.setattr(script, "instruction", lambda opcode, operands: lambda x: special_functions.tanh(x) ^ (x == 7).astype(np.uint32))
    assert script.compare("tanh.approx.f32", special_functions.tanh, 2) == (1, "0x00000007 0x00000007 0x00000006")
