"""tcemu.formats: what a code means, against ml_dtypes, gfloat and the reference, over all codes of every format of 16 bits or fewer."""

import ast
import copy
import inspect
import pickle
import re
from functools import partial
from itertools import product
from pathlib import Path

import gfloat
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import reference
from oracles.other_formats import DTYPES, GFLOAT, same_floats
from support import random_operands as operands
from support.sampling import sample_cases

from tcemu import formats
from tcemu.engine.arithmetic.reference import exact_values as exact
from tcemu.formats import F32, FORMATS, Format, convert, decode, encode, from_float, round_float, to_float

SMALL = [name for name, fmt in FORMATS.items() if fmt.bits <= 16]
SMALL_FLOATS = [name for name in SMALL if not FORMATS[name].is_integer]


def all_codes(name: str) -> np.ndarray:
    return np.arange(1 << FORMATS[name].bits).astype(operands.storage_dtype(name))


def reference_floats(name: str, codes: np.ndarray) -> np.ndarray:
    return np.array([reference.convert(name, "f32", code) for code in codes.tolist()], np.uint32).view(np.float32)


def test_every_format_is_there_and_has_its_reference_s_fields():
    assert set(FORMATS) == set(reference.FORMATS) - {"e8m13"}
    for name, fmt in FORMATS.items():
        spec = reference.FORMATS[name]
        assert (fmt.name, fmt.bits, fmt.exponent_bits, fmt.mantissa_bits, fmt.signed) == (
            name,
            spec.bits,
            spec.exponent,
            spec.fraction,
            spec.signed,
        )
        if not fmt.is_integer:
            assert (fmt.bias, fmt.unused_bits, fmt.max_magnitude) == (spec.bias, spec.ignored, spec.greatest)
        assert fmt.dtype == (np.uint32 if fmt.bits > 16 else operands.storage_dtype(name))


@pytest.mark.parametrize("name", GFLOAT)
def test_derived_constants_are_gfloat_s(name):
    fmt, info = FORMATS[name], GFLOAT[name]
    largest = reference.decode(name, fmt.max_magnitude << fmt.unused_bits)
    assert largest == info.max and 2.0**fmt.max_exponent <= info.max < 2.0**fmt.max_exponent * 2
    assert 2.0**fmt.min_exponent == (info.smallest_normal if fmt.subnormals else info.smallest)


@pytest.mark.parametrize("name", sample_cases(SMALL, 2))
def test_every_code_by_reference(name):
    codes = all_codes(name)
    assert same_floats(to_float(FORMATS[name], codes), reference_floats(name, codes))


@pytest.mark.parametrize("name", [name for name in SMALL if name in DTYPES])
def test_every_code_by_ml_dtypes(name):
    with np.errstate(invalid="ignore"):  # widening a signalling NaN
        want = all_codes(name).view(DTYPES[name]).astype(np.float32)
    assert same_floats(to_float(FORMATS[name], all_codes(name)), want)


@pytest.mark.parametrize("name", SMALL_FLOATS)
def test_every_code_by_gfloat(name):
    want = gfloat.decode_ndarray(GFLOAT[name], all_codes(name).astype(np.int64))
    assert same_floats(to_float(FORMATS[name], all_codes(name)), want)


@pytest.mark.parametrize("name", ["f32", "tf32", "f64", "s32"])
def test_wide_codes_by_reference(name):
    rng = np.random.default_rng(1)
    if name == "s32":
        codes = operands.integers(name, (2000,), rng)
    else:
        codes = np.concatenate([operands.codes(name, kind, (400,), rng) for kind in operands.CLASSES])
    given = operands.two_words(codes) if name == "f64" else codes
    assert same_floats(to_float(FORMATS[name], given), reference_floats(name, codes))


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.bits < 8])
def test_bits_above_a_code_are_ignored(name):
    bytes_ = np.arange(256).astype(np.uint8)
    inside = bytes_ & ((1 << FORMATS[name].bits) - 1)
    assert same_floats(to_float(FORMATS[name], bytes_), to_float(FORMATS[name], inside))


@pytest.mark.parametrize("name", sample_cases(SMALL_FLOATS, ["e5m2", "ue8m0"]))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_to_narrower_floats_rounds_to_nearest(name, dtype):
    target = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    got = to_float(FORMATS[name], all_codes(name), jnp.dtype(dtype))
    assert got.dtype == dtype
    words = np.asarray(got).view(np.uint16)
    assert words.tolist() == [reference.convert(name, target, code) for code in all_codes(name).tolist()]


@pytest.mark.parametrize("name", sample_cases(SMALL_FLOATS, 12))
def test_every_code_by_its_fields(name):
    """To f32, where `convert` takes a short way: as by numbers. And as many codes again with bits above them."""
    fmt = FORMATS[name]
    codes = jnp.arange(1 << min(fmt.bits, 16), dtype=jnp.uint32)
    codes = jnp.concatenate([codes, codes | 1 << fmt.bits if fmt.bits < 16 else codes]).astype(fmt.dtype)
    for saturate, end in ((False, "ieee"), (True, "saturate")):
        wanted = np.asarray(jax.jit(lambda codes, end=end: encode(F32, decode(fmt, codes), overflow=end))(codes))
        assert (np.asarray(convert(fmt, F32, codes, saturate=saturate)) == wanted).all() and len(np.unique(wanted)) > min(fmt.bits, 8)


@pytest.mark.parametrize("name", sample_cases(SMALL, 2))
def test_every_code_survives_a_round_trip(name):
    """Through f32 and back each code is itself; NaNs become the canonical one."""
    fmt, codes = FORMATS[name], all_codes(name)
    back = np.asarray(from_float(fmt, to_float(fmt, codes)))
    nan = np.array([reference.decode(name, code) == "nan" for code in codes.tolist()])
    assert back.dtype == fmt.dtype
    assert (back[~nan] == codes[~nan]).all()
    assert (back[nan] == reference.FORMATS[name].nan).all()


# ---- arrays of every kind as sources


@pytest.mark.parametrize(
    "dtype", sample_cases(["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"], 2)
)
def test_a_numpy_array_and_a_jax_array_say_the_same(dtype):
    name = next(name for name, other in DTYPES.items() if np.dtype(other) == np.dtype(jnp.dtype(dtype)))
    codes = np.concatenate([operands.codes(name, kind, (60,), np.random.default_rng(2)) for kind in operands.CLASSES])
    array = codes.view(jnp.dtype(dtype))
    want = [reference.convert(name, "e5m2", code) for code in codes.tolist()]
    assert np.asarray(from_float(FORMATS["e5m2"], array)).tolist() == want
    if dtype != "float64":  # JAX would cut it to 32 bits
        assert np.asarray(from_float(FORMATS["e5m2"], jnp.asarray(array))).tolist() == want


@pytest.mark.parametrize("name", ["e3m2", "e2m3", "e2m1", "s4", "u4"])
def test_arrays_of_less_than_a_byte(name):
    array = all_codes(name).view(DTYPES[name])
    want = [reference.convert(name, "f16", code) for code in all_codes(name).tolist()]
    assert np.asarray(from_float(FORMATS["f16"], array)).tolist() == want


@pytest.mark.parametrize("dtype", sample_cases(["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"], 2))
def test_arrays_of_integers(dtype):
    info = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    array = np.array([0, 1, info[0], info[1], info[1] // 2, info[1] // 3], dtype)
    clamped = [min(max(int(x), -(1 << 31)), (1 << 31) - 1) for x in array]
    for mode in reference.MODES:
        got = np.asarray(from_float(FORMATS["f16"], array, mode))
        assert got.tolist() == [reference.encode("f16", x, mode) for x in clamped]


def test_leading_axes_and_dtypes():
    """Of every format, by tracing alone: other tests have the values."""
    shape = (2, 3, 4)
    for fmt in FORMATS.values():
        codes = jax.eval_shape(partial(from_float, fmt), jax.ShapeDtypeStruct(shape, jnp.float32))
        assert codes.shape == ((*shape, 2) if fmt == FORMATS["f64"] else shape) and codes.dtype == fmt.dtype
        back = jax.eval_shape(partial(to_float, fmt), codes)
        assert back.shape == shape and back.dtype == jnp.float32
    for name, dtype in product(("e4m3", "f16", "s8"), (jnp.float32, jnp.float16, jnp.bfloat16)):
        assert jax.eval_shape(partial(round_float, FORMATS[name]), jax.ShapeDtypeStruct(shape, dtype)).dtype == dtype
    for number in (1.5, np.float32(1.5), jnp.float32(1.5)):
        assert from_float(FORMATS["f16"], number) == 0x3E00


@pytest.mark.parametrize("name", sample_cases(["e4m3", "e2m1", "f16", "bf16", "tf32", "ue8m0", "s8"], ["e2m1", "ue8m0", "s8"]))
@pytest.mark.parametrize("dtype", sample_cases(["f16", "bf16", "f32"], ("bf16",)))
def test_round_to_is_there_and_back(name, dtype):
    codes = np.concatenate([operands.codes(dtype, kind, (100,), np.random.default_rng(3)) for kind in operands.CLASSES])
    x = jnp.asarray(codes.view(DTYPES[dtype]))
    ways = list(product(reference.MODES, (False, True)))
    rounded = jax.jit(lambda x: [round_float(FORMATS[name], x, mode, saturate) for mode, saturate in ways])(x)
    for (mode, saturate), got in zip(ways, rounded, strict=True):
        middle = [reference.convert(dtype, name, code, mode, saturate) for code in codes.tolist()]
        assert np.asarray(got).view(codes.dtype).tolist() == [reference.convert(name, dtype, code) for code in middle]


# ---- tracing


def test_a_traced_rounding_is_the_named_one():
    codes = np.concatenate([operands.codes("f32", kind, (300,), np.random.default_rng(4)) for kind in operands.CLASSES])
    key = jax.random.key(1)
    for name in ("e4m3", "s8"):
        swept = jax.jit(jax.vmap(lambda mode, name=name: convert(FORMATS["f32"], FORMATS[name], codes, mode, key=key)))(jnp.arange(5))
        in_each = lambda codes, name=name: [convert(FORMATS["f32"], FORMATS[name], codes, mode, key=key) for mode in formats.ROUNDINGS]
        for mode, got, want in zip(formats.ROUNDINGS, swept, jax.jit(in_each)(codes), strict=True):
            assert (got == want).all(), f"{name} {mode}"


def test_jit_and_vmap_change_nothing():
    codes = operands.codes("f32", "full", (4, 50), np.random.default_rng(5))
    plain = convert(FORMATS["f32"], FORMATS["e4m3"], codes)
    assert (jax.jit(convert, static_argnums=(0, 1))(FORMATS["f32"], FORMATS["e4m3"], codes) == plain).all()
    assert (jax.vmap(lambda row: convert(FORMATS["f32"], FORMATS["e4m3"], row))(codes) == plain).all()


# ---- formats that are copies


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copied_format_is_the_format(copied):
    for fmt in FORMATS.values():
        assert copied(fmt) is not fmt
        assert copied(fmt) == fmt and hash(copied(fmt)) == hash(fmt) and [f for f in FORMATS.values() if f == copied(fmt)] == [fmt]


def identity_comparisons(source: str) -> list[str]:
    """The comparisons that a copied format would not pass: `is` with a format's name. A text without both side by side is not parsed."""
    names = {name.upper() for name in FORMATS}
    one = rf"\b({'|'.join(names)})\b"
    if re.search(rf"{one}[\s)\\]+is\b|\bis\b[\s(\\]+(not\b[\s(\\]+)?[\w.]*{one}", source) is None:
        return []
    compared = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    last = lambda node: getattr(node, "id", getattr(node, "attr", None))
    return [
        ast.unparse(node)
        for node in compared
        if any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops) and names & set(map(last, (node.left, *node.comparators)))
    ]


def test_formats_are_compared_by_their_fields():
    package = Path(formats.__file__).parent
    found = {path.name: identity_comparisons(path.read_text()) for path in package.rglob("*.py")}
    assert {name: comparisons for name, comparisons in found.items() if comparisons} == {}
    planted = "a is F64 or b == F64\nx = F16 is not c\nd is None\ne is formats.E4M3"
    assert sorted(identity_comparisons(planted)) == ["F16 is not c", "a is F64", "e is formats.E4M3"]


# ---- one order of arguments


@pytest.mark.parametrize("place", [formats, exact])
def test_the_formats_come_first(place):
    """In every function that takes formats."""
    functions = {name: f for name, f in vars(place).items() if inspect.isfunction(f)}
    is_format = {
        name: [p.annotation in (Format, "Format") for p in inspect.signature(f).parameters.values()] for name, f in functions.items()
    }
    assert sum(is_format["convert"]) == 2 and sum(map(any, is_format.values())) >= 8
    assert [name for name, flags in is_format.items() if sorted(flags, reverse=True) != flags] == []


# ---- errors


def test_errors_say_what_is_wanted():
    x = jnp.ones(3)
    with pytest.raises(ValueError, match=r"'RU'.*RN, RZ, RM, RP, SR"):
        from_float(FORMATS["e4m3"], x, "RU")
    with pytest.raises(ValueError, match=r"SR.*key"):
        from_float(FORMATS["e4m3"], x, "SR")
    with pytest.raises(TypeError, match="complex64"):
        from_float(FORMATS["e4m3"], x.astype(jnp.complex64))
    with pytest.raises(TypeError, match="dtype"):
        from_float(FORMATS["e4m3"], np.array(["one"]))


def test_ue5m3_has_the_range_that_most_sources_give():
    """arXiv 2609.02846 reserves the top exponent instead, so that 61440 would be the largest: the codes above are disputed."""
    values = np.asarray(to_float(FORMATS["ue5m3"], jnp.arange(256).astype(jnp.uint8)))
    assert values[1] == 2.0**-17 and values[0xF7] == 61440 and values[0xFE] == 114688 and np.isnan(values[0xFF])
    assert (np.diff(values[:0xFF]) > 0).all()


def test_a_format_of_one_s_own_is_consistent():
    for fields, word in (
        ({"bits": 8, "exponent_bits": 3, "mantissa_bits": 2, "bias": 3}, "are 6 bits"),
        ({"bits": 6, "mantissa_bits": 2}, "an integer"),
        ({"bits": 6, "exponent_bits": 5, "bias": 15, "specials": "ieee"}, "a NaN has fraction bits"),
        ({"bits": 6, "exponent_bits": 5, "bias": 15, "specials": "NaN"}, "expected one of 'ieee', 'nan'"),
        ({"bits": 6, "exponent_bits": 3, "mantissa_bits": 2, "bias": 3, "subnormals": False}, "powers of two alone"),
    ):
        with pytest.raises(ValueError, match=f"Format.'mine'.*{word}"):
            Format("mine", **fields)


@pytest.mark.parametrize("bias", [122, 123, 124, 127, 139])
def test_numbers_as_small_as_subnormal_ones_of_f32_are_rounded_right(bias):
    """f32's subnormal numbers have no hidden bit; a conversion in few operations once gave them one."""
    fmt = Format("small", 8, 4, 3, bias)
    codes = np.arange(128, dtype=np.uint8)
    numbers = ((codes & 7) + 8 * (codes >= 8)) * 2.0 ** (np.maximum(codes >> 3, 1).astype(np.float64) - bias - 3)
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, middles, middles - 2.0**-149, middles + 2.0**-149, np.arange(64) * 2.0**-149])
    x = x[x.astype(np.float32) == x]
    above = np.minimum(np.searchsorted(numbers, x), 127)
    below = np.maximum(above - 1, 0)
    gaps = numbers[above] - x, x - numbers[below]
    wanted = np.where(gaps[0] < gaps[1], above, np.where(gaps[0] > gaps[1], below, np.where(above % 2 == 0, above, below)))
    wanted = np.where(numbers[above] == x, above, wanted)
    np.testing.assert_array_equal(convert(F32, fmt, x.astype(np.float32).view(np.uint32)), wanted)
