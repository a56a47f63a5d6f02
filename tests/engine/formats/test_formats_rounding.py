"""tcemu.formats: rounding to a narrower format, against ml_dtypes (to nearest), gfloat (four modes) and the reference.

All 2^16 f16 and all 2^16 bf16 values; f32 and f64 at random and at every rounding boundary, with the neighbours just beside it.
"""

from fractions import Fraction
from functools import partial
from itertools import product

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import reference
from oracles.other_formats import CAST_BY_ML_DTYPES, DTYPES, GFLOAT, round_with_gfloat, same_floats
from oracles.reference import MODES
from support import random_operands as operands
from support.ptx_scalars import operation, run_operations
from support.sampling import sample_cases

from tcemu.engine.formats.coding import rounds_from_f32
from tcemu.formats import F32, FORMATS, convert, decode, encode, from_float, to_float

NARROW = ["e5m2", "e4m3", "e3m2", "e2m3", "e2m1", "ue8m0", "ue4m3", "ue5m3"]
TARGETS = {"f16": ["bf16", *NARROW], "bf16": ["f16", *NARROW]}
FROM_HALVES = [(source, target) for source, targets in TARGETS.items() for target in targets]
WAYS = [(mode, saturate) for mode in MODES for saturate in (False, True)]
HALVES = np.arange(1 << 16).astype(np.uint16)


def widen(name: str, codes: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        return codes.view(DTYPES[name]).astype(np.float64)


@partial(jax.jit, static_argnums=(0, 1, 3))
def convert_every_way(source: str, target: str, codes: np.ndarray, ways: tuple) -> list[jax.Array]:
    """`convert` in each of the ways: one program, which compiles in half the time of as many."""
    return [convert(FORMATS[source], FORMATS[target], codes, mode, saturate) for mode, saturate in ways]


@partial(jax.jit, static_argnums=0)
def there_and_back(target: str, x: np.ndarray) -> list[jax.Array]:
    """`to_float` of `from_float` in each of the ways."""
    return [to_float(FORMATS[target], from_float(FORMATS[target], x, mode, saturate)) for mode, saturate in WAYS]


def agrees_with_gfloat(source: str, target: str, codes: np.ndarray, step: int = 1) -> int:
    """How many values were compared in each of the ways, at least; as floats, a zero's sign included. step: every one of so many values."""
    compared = []
    for number, ((mode, saturate), got) in enumerate(zip(WAYS, there_and_back(target, codes.view(DTYPES[source])), strict=True)):
        chosen = slice(number % step, None, step)
        want, valid = round_with_gfloat(target, widen(source, codes[chosen]), mode, saturate)
        assert same_floats(np.asarray(got)[chosen][valid], want[valid]), (mode, saturate)
        compared.append(int(valid.sum()))
    return min(compared)


def agrees_with_reference(source: str, target: str, codes: np.ndarray, ways=WAYS) -> None:
    given = operands.two_words(codes) if source == "f64" else codes
    for (mode, saturate), found in zip(ways, convert_every_way(source, target, given, tuple(ways)), strict=True):
        got = operands.one_code(np.asarray(found)) if target == "f64" else np.asarray(found)
        want = [reference.convert(source, target, code, mode, saturate) for code in codes.tolist()]
        wrong = [
            f"{source} {code:#x} -> {target} {mode} saturate={saturate}: {x:#x}, not {y:#x}"
            for code, x, y in zip(codes.tolist(), got.tolist(), want, strict=True)
            if x != y
        ]
        assert wrong == [], f"{len(wrong)} of {len(codes)}: {wrong[:5]}"


# ---- all f16 and all bf16


@pytest.mark.parametrize("source, target", [pair for pair in FROM_HALVES if pair[1] in CAST_BY_ML_DTYPES])
def test_every_half_to_nearest_by_ml_dtypes(source, target):
    x = HALVES.view(DTYPES[source])
    with np.errstate(over="ignore", invalid="ignore"):
        want = x.astype(np.float32).astype(DTYPES[target]).view(operands.storage_dtype(target))
    number = ~np.isnan(widen(source, HALVES))  # ml_dtypes has NaNs of its own
    assert (np.asarray(from_float(FORMATS[target], x))[number] == want[number]).all()


ALTERNATELY = FROM_HALVES[0:9:4] + FROM_HALVES[11::4]


@pytest.mark.parametrize("case", sample_cases(FROM_HALVES, ALTERNATELY, "-".join))
@pytest.mark.parametrize("step", sample_cases([3, 1], [3]))
def test_every_half_in_every_mode_by_gfloat(case, step):
    """A third of the halves in each of the ways, other ones in the next (`full`: all)."""
    source, target = case
    assert step * agrees_with_gfloat(source, target, HALVES, step) >= (1 << 15 if FORMATS[target].signed else 1 << 14)


@pytest.mark.parametrize("case", sample_cases(FROM_HALVES, 24, "-".join))
def test_halves_by_reference(case):
    """To nearest every one; in the other ways one in 23, and always the ends."""
    source, target = case
    agrees_with_reference(source, target, HALVES, [("RN", False)])
    ends = [
        code
        for sign in (0, 0x8000)
        for near in (0, 0x400, 0x3C00, 0x3F80, 0x7B00, 0x7C00, 0x7F00, 0x7F80)
        for code in range(near + sign, near + sign + 9)
    ]
    agrees_with_reference(source, target, np.unique(np.concatenate([HALVES[::23], np.array(ends, np.uint16)])), WAYS[1:])


@pytest.mark.parametrize("target", sample_cases(["tf32", "f16", "bf16", "s8", *NARROW], ["tf32", "e4m3", "e2m1", "ue8m0", "s8"]))
def test_ties_away_from_zero(target):
    """At every value and every middle of two, and one ulp to both sides."""
    ways = [("RNA", False), ("RNA", True)]
    near = f32_boundaries(target) if target != "s8" else np.arange(-300, 300, 0.25, np.float32).view(np.uint32)
    codes = np.random.default_rng(5).choice(near, 2000)
    agrees_with_reference("f32", target, codes, ways)
    found = [np.asarray(convert(FORMATS["f32"], FORMATS[target], near, mode)) for mode in ("RNA", "RN")]
    assert (found[0] != found[1]).any()


def test_zero_in_ue8m0_is_nan_or_the_least_by_name():
    """ml_dtypes makes it NaN; PTX's cvt makes it 2^-127, and so does `saturate`."""
    zeros = np.array([0.0, -0.0], np.float32)
    assert np.asarray(from_float(FORMATS["ue8m0"], zeros)).tolist() == [0xFF, 0xFF]
    assert zeros.astype(ml_dtypes.float8_e8m0fnu).view(np.uint8).tolist() == [0xFF, 0xFF]
    assert np.asarray(from_float(FORMATS["ue8m0"], zeros, saturate=True)).tolist() == [0, 0]
    opcodes = ("cvt.rz.satfinite.ue8m0x2.f32", "cvt.rp.satfinite.ue8m0x2.f32", "cvt.rz.ue8m0x2.f32")
    words = zeros.view(np.uint32)
    for (found,) in run_operations([operation(opcode) for opcode in opcodes], [[words, words]] * len(opcodes)):
        assert found.tolist() == [0, 0]


@pytest.mark.parametrize("source", sample_cases(["f16", "bf16"], ["f16"]))
@pytest.mark.parametrize("target", ["f32", "tf32", "f64"])
def test_every_half_widens_exactly(source, target):
    codes = HALVES if target == "f32" else HALVES[::7]
    agrees_with_reference(source, target, codes, [("RN", False)])


# ---- f32


def f32_boundaries(name: str) -> np.ndarray:
    """f32 words at every value of a format and at every middle between two, one ulp to both sides, both signs; of tf32 one in 61."""
    spec = reference.FORMATS[name]
    step = 61 if name == "tf32" else 1
    magnitudes = np.unique(np.concatenate([np.arange(0, spec.greatest + 1, step), [0, 1, spec.greatest - 1, spec.greatest]]))
    field, low = magnitudes >> spec.fraction, magnitudes & ((1 << spec.fraction) - 1)
    normal = (field > 0) | (name == "ue8m0")
    unit = np.ldexp(1.0, np.where(normal, field - spec.bias, spec.least) - spec.fraction)
    values = unit * np.where(normal, low + (1 << spec.fraction), low)
    points = np.concatenate([values, values + unit / 2, values + unit])
    with np.errstate(over="ignore"):
        words = points[np.abs(points) < 2.0**128].astype(np.float32).view(np.uint32).astype(np.int64)
    beside = np.unique(np.clip(np.concatenate([words - 1, words, words + 1]), 0, 0x7F800001))
    return np.concatenate([beside, beside | 1 << 31]).astype(np.uint32)


def f32_at_random(count: int) -> np.ndarray:
    rng = np.random.default_rng(7)
    return np.concatenate([operands.codes("f32", kind, (count // len(operands.CLASSES),), rng) for kind in operands.CLASSES])


@pytest.mark.parametrize("target", sample_cases(["tf32", "f16", "bf16", *NARROW], 16))
def test_f32(target):
    codes = np.concatenate([f32_boundaries(target), f32_at_random(200_000)])
    assert agrees_with_gfloat("f32", target, codes) > (100_000 if FORMATS[target].signed else 90_000)
    if target in CAST_BY_ML_DTYPES:
        with np.errstate(over="ignore", invalid="ignore"):
            want = codes.view(np.float32).astype(DTYPES[target]).view(operands.storage_dtype(target))
        number = ~np.isnan(widen("f32", codes))
        assert (np.asarray(from_float(FORMATS[target], codes.view(np.float32)))[number] == want[number]).all()
    agrees_with_reference("f32", target, np.random.default_rng(8).choice(codes, 1500))


SHORT_WAY = [fmt for fmt in FORMATS.values() if rounds_from_f32(F32, fmt)]


@pytest.mark.parametrize("fmt", sample_cases(SHORT_WAY, 3, str))
def test_the_short_way_from_f32_is_the_long_one(fmt):
    """All upper halves of words, with lower halves next to ties."""
    lower = np.array([0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    words = jnp.asarray((np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | lower).ravel())
    for saturate in (False, True):
        long_way = jax.jit(lambda words, end=("ieee", "saturate")[saturate]: encode(fmt, decode(F32, words), overflow=end))(words)
        chex.assert_trees_all_equal(convert(F32, fmt, words, saturate=saturate), long_way)


def test_formats_that_the_short_way_serves():
    assert {str(fmt) for fmt in SHORT_WAY} == {"f32", "tf32", "f16", "bf16", "e5m2", "e4m3", "e3m2", "e2m3", "e2m1", "ue4m3", "ue5m3"}


def test_f32_boundaries_are_boundaries():
    """The list holds each value of e4m3 and each point where rounding to nearest changes its mind."""
    words = set(f32_boundaries("e4m3").tolist())
    for code in range(0x7E):
        low, high = (reference.decode("e4m3", x) for x in (code, code + 1))
        assert {reference.encode("f32", x) for x in (low, high, (low + high) / 2)} <= words


# ---- f64


def f64_traps(name: str, count: int) -> np.ndarray:
    """f64 words at middles between two values of a format, and so little beside them that a rounding to f32 on the way would hide it."""
    spec, rng = reference.FORMATS[name], np.random.default_rng(9)
    found = []
    for magnitude in [0, 1, spec.greatest - 1, *rng.integers(0, spec.greatest, count).tolist()]:
        low, high = (reference.decode(name, x << spec.ignored) for x in (magnitude, magnitude + 1))
        if isinstance(low, Fraction) and isinstance(high, Fraction):
            middle = (low + high) / 2
            found += [
                reference.encode("f64", middle * (1 + offset))
                for offset in (0, Fraction(1, 1 << 30), -Fraction(1, 1 << 30), Fraction(1, 1 << 52))
            ]
    return np.array([word | sign for word in found for sign in (0, 1 << 63)], np.uint64)


@pytest.mark.parametrize("target", sample_cases(["f32", "tf32", "f16", "bf16", *NARROW], 6))
def test_f64_to_others(target):
    rng = np.random.default_rng(10)
    drawn = [operands.codes("f64", kind, (60,), rng) for kind in operands.CLASSES]
    in_range = [
        np.array([reference.convert("f32", "f64", int(x)) for x in f32_at_random(300)], np.uint64)
        + rng.integers(0, 1 << 29, 297, np.uint64)
    ]
    agrees_with_reference("f64", target, np.concatenate([f64_traps(target, 40), *drawn, *in_range]))


@pytest.mark.parametrize("source", sample_cases(["f64", "f32", "tf32", *NARROW, "s32", "s8", "u4"], ["f64", "tf32", "ue8m0", "s32"]))
def test_f64_to_itself_and_others_to_f64(source):
    rng = np.random.default_rng(11)
    draw = operands.integers if FORMATS[source].is_integer else lambda name, shape, rng: operands.codes(name, "raw", shape, rng)
    agrees_with_reference(source, "f64", draw(source, (500,), rng), [("RN", False), ("RM", True)])


def test_ml_dtypes_rounds_f64_twice_and_tcemu_does_not():
    """The trap that f64 has in other libraries: 1.0625 + 2^-40 is nearer to e4m3's 1.125."""
    x = np.array([1.0625 + 2.0**-40])
    assert float(x.astype(DTYPES["e4m3"])[0]) == 1.0
    assert float(to_float(FORMATS["e4m3"], from_float(FORMATS["e4m3"], x))[0]) == 1.125


# ---- integers


INTEGERS = ["s32", "s8", "u8", "s4", "u4", "b1"]
TO_INTEGERS = list(product(["f64", "f32", "f16", "e4m3", "s32", "u8"], INTEGERS))
FROM_INTEGERS = list(product(INTEGERS, ["f32", "f16", "bf16", "e5m2", "e4m3", "e2m1", "ue8m0", "ue4m3"]))


@pytest.mark.parametrize("case", sample_cases(TO_INTEGERS, 14, "-".join))  # each format in every run
def test_to_integers(case):
    (source, target), rng = case, np.random.default_rng(12)
    if FORMATS[source].is_integer:
        codes = operands.integers(source, (500,), rng)
    else:
        drawn = [operands.codes(source, kind, (80,), rng) for kind in operands.CLASSES]
        ends = [
            Fraction(side) + Fraction(part, 4)
            for bits in (1, 4, 7, 8, 31, 32)
            for side in (-(1 << bits), 1 << bits)
            for part in range(-9, 10)
        ]
        near = [value + extra for value in ends for extra in (0, Fraction(1, 1 << 20))]
        codes = np.concatenate(
            [*drawn, np.array([reference.encode(source, x, "RZ") for x in near], np.uint64).astype(operands.storage_dtype(source))]
        )
    agrees_with_reference(source, target, codes)


@pytest.mark.parametrize("case", sample_cases(FROM_INTEGERS, 10, "-".join))  # each format in every run
def test_from_integers(case):
    source, target = case
    bits = FORMATS[source].bits
    codes = np.arange(1 << bits).astype(np.uint8) if bits <= 8 else operands.integers(source, (400,), np.random.default_rng(13))
    agrees_with_reference(source, target, codes)


# ---- anything to anything


@pytest.mark.parametrize("examples", sample_cases([20, 400], [20]))
def test_any_code_of_any_format_to_any_other(examples):
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(st.data(), st.sampled_from(sorted(FORMATS)), st.sampled_from(sorted(FORMATS)), st.sampled_from(WAYS))
    def check(data, source, target, way):
        agrees_with_reference(source, target, data.draw(operands.array_strategy(source, (8,))), [way])

    check()


def test_gfloat_has_all_our_floats():
    assert set(GFLOAT) == {name for name, fmt in FORMATS.items() if not fmt.is_integer}
