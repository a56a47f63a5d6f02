"""Formulas of a step as NumPy arrays, against others that are proved and against NumPy: what the usual run does not prove."""

import numpy as np
import pytest
from support import numpy_steps
from support.llvm_products import arithmetics
from support.numpy_values import NumpyValue

from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.step import anchored, general, groups, rounding
from tcemu.engine.arithmetic.step.forms import IntegerForm, step_numbers
from tcemu.engine.arithmetic.step.values import F32 as F32_LANE
from tcemu.engine.arithmetic.step.values import I32, I64
from tcemu.formats import F16, F32


@pytest.mark.parametrize("alignment", ["RN", "RZ", "RM", "RP"])
def test_fraction_bits_may_be_values(alignment):
    rng = np.random.default_rng(0)
    sizes, signs, distances = rng.integers(0, 1 << 22, 4000), -rng.integers(0, 2, 4000), rng.integers(0, 60, 4000)
    size, sign, distance = (NumpyValue(side.astype(np.int32)) for side in (sizes, signs, distances))
    align = lambda given: general.align_integer(size, sign, 20, distance, given, alignment, I64)
    for bits in (1, 19, 20, 21, 40):
        one, other = align(bits), align(NumpyValue(np.full(4000, bits, np.int32)))
        np.testing.assert_array_equal(one.array, other.array)


def test_terms_in_two_parts_are_their_sum():
    rng = np.random.default_rng(0)
    aligned = np.concatenate([np.ldexp(rng.uniform(-2, 2, 40).astype(np.float32), e) for e in range(-30, 54)])
    high, low = general.split_term(NumpyValue(aligned))
    np.testing.assert_array_equal(general.join_sums(high, low).array, np.trunc(aligned).astype(np.int64))
    assert (np.abs(low.array) < 1 << general.WIDE_BITS).all()


class FlushingValue(NumpyValue):
    """Arrays of a machine whose floats cannot be trusted with subnormal numbers."""

    keeps_subnormals = False


@pytest.mark.parametrize("fmt, dtype", [(F16, np.float16), (F32, np.float32)], ids=str)
def test_codes_are_added_in_integers(fmt, dtype):
    rng, bits = np.random.default_rng(0), np.dtype(dtype).itemsize * 8
    x, y = rng.integers(0, 1 << bits, (2, 1 << 16)).astype(f"u{bits // 8}")
    near = x ^ rng.choice(np.array([0, 1, 2, 7, 1 << (bits - 1), 3 << (bits - 6)], x.dtype), len(x))  # some cancel, some are nearly equal
    y = np.where(rng.random(len(x)) < 0.5, near, y)
    with np.errstate(all="ignore"):
        total = x.view(dtype) + y.view(dtype)
    expected = np.where(np.isnan(total), fmt.nan, total.view(x.dtype))
    left, right = (FlushingValue(v.astype(np.uint32).view(np.int32)) for v in (x, y))
    got = general.add_codes(fmt, left, right)
    keep = (x | y) != 1 << (bits - 1)  # not both -0
    np.testing.assert_array_equal(numpy_steps.codes_of(fmt, got)[keep], expected[keep])


def test_a_sum_that_does_not_fit_keeps_a_sticky_bit():
    rng = np.random.default_rng(0)
    x, y = (rng.integers(-1 << 31, 1 << 31, 1 << 14) >> rng.integers(0, 31, 1 << 14) for _ in range(2))
    total, unit = general.add_jammed(NumpyValue(x.astype(np.int32)), NumpyValue(y.astype(np.int32)), NumpyValue(np.int32(5)))
    for fmt in (F16, F32):
        own = rounding.encode(fmt, rounding.take_sign(total.resize(I64)), unit - 20, "RN", fmt.mantissa_bits)
        exact = rounding.encode(fmt, rounding.take_sign(NumpyValue(x + y)), NumpyValue(np.int32(-15)), "RN", fmt.mantissa_bits)
        np.testing.assert_array_equal(own.array, exact.array)


def test_truncated_sums_have_the_codes_of_sums_rounded_toward_zero():
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 1 << 32, 1 << 15) >> rng.integers(0, 33, 1 << 15)
    size, negative = numpy_steps.value(sizes), NumpyValue(-rng.integers(0, 2, 1 << 15, np.int32))
    unit = NumpyValue(rng.integers(-200, 140, 1 << 15, np.int32))
    for kept in (23, 13):
        got = rounding.encode_truncated(rounding.Magnitude(negative, size), unit, kept)
        exact = rounding.encode(F32, rounding.Magnitude(negative.resize(I64), NumpyValue(sizes)), unit, "RZ", 23)
        np.testing.assert_array_equal(
            got.array, rounding.cut(exact, kept).array & np.where(rounding.cut(exact, kept).array << 1 == 0, 0, -1)
        )


@pytest.mark.parametrize("toward_zero", [False, True])
def test_sums_of_groups_in_two_parts_are_truncated(toward_zero):
    rng = np.random.default_rng(0)
    sums = rng.integers(-1 << 49, 1 << 49, 1 << 15) >> rng.integers(0, 50, 1 << 15)
    carried = rng.integers(-4, 5, 1 << 15)  # lower parts of several groups
    high, low = (NumpyValue(v.astype(np.int32)) for v in ((sums >> 25) - carried, (sums & (1 << 25) - 1) + (carried << 25)))
    one = high.constant(1.0, F32_LANE)
    got = groups.round_parts(high, low, one, 23, toward_zero)
    exact = rounding.encode(F32, rounding.take_sign(NumpyValue(sums)), high.constant(0, I32), "RZ", 23)
    np.testing.assert_array_equal(np.where(got.array << 1 == 0, 0, got.array), exact.array)


@pytest.mark.parametrize("mode", ["RN", "RM", "RP"])
@pytest.mark.parametrize("fmt", [F16, F32], ids=str)
def test_all_bits_of_a_word_decide_how_a_sum_is_rounded(fmt, mode):
    """Near ties: of an i64 that holds the same sum, no bit is lost where the leading one is found."""
    rng, dropped = np.random.default_rng(0), 31 - fmt.mantissa_bits
    kept = rng.integers(1 << fmt.mantissa_bits, 2 << fmt.mantissa_bits, 400)[:, None] << dropped
    sizes = (kept + np.array([0, 1, 2, 3, *((1 << (dropped - 1)) + more for more in range(-4, 5))])).reshape(-1)
    negative, unit = NumpyValue(-rng.integers(0, 2, len(sizes), np.int32)), NumpyValue(np.int32(-24))
    one = rounding.encode(fmt, rounding.Magnitude(negative, numpy_steps.value(sizes)), unit, mode, fmt.mantissa_bits)
    other = rounding.encode(fmt, rounding.Magnitude(negative.resize(I64), NumpyValue(sizes)), unit, mode, fmt.mantissa_bits)
    np.testing.assert_array_equal(one.array, other.array)


ENDS = {"f16": {}, "few bits": {"fraction_bits": 13, "kept": 13}, "many bits": {"fraction_bits": 28}, "to nearest": {"rounding": "RN"}}


@pytest.mark.parametrize("fields", ENDS.values(), ids=list(ENDS))
def test_both_ends_of_a_step_agree(fields):
    """`end_in_f64`, and `end_step`, which is proved: accumulators and sums of every exponent, also those that leave f32."""
    arithmetic = arithmetics()["f16 in steps of 16 by 25"]
    numbers = step_numbers(*specialize(arithmetic.model, arithmetic.spec, None))
    assert numbers is not None
    form = IntegerForm(numbers._replace(**fields), F16, F16, F32)
    assert form.ends_in_f64
    rng, bits = np.random.default_rng(0), form.numbers.fraction_bits
    most = min(bits + 5, 29)
    sums = np.array([sign * (size << at) + more for at in range(most) for size in (0, 1, 3) for sign in (1, -1) for more in (0, 1, -1)])
    top, total, repeat = (side.reshape(-1) for side in np.meshgrid(np.arange(-280, 130), sums, np.arange(4)))
    total = np.where(repeat < 2, total, rng.integers(-1 << most, 1 << most, total.shape))
    field = top + 127 - rng.choice([0, 1, 2, 8, bits, bits + 1, bits + 2], top.shape)
    fraction = rng.integers(0, 1 << 23, top.shape) & rng.choice([0, 1 << 22, -1 << 10, 0x7FFFFF], top.shape)
    own = np.where((field < 0) | (field > 254) | (repeat % 3 == 0), 0, field << 23 | fraction)
    own = np.where((own >> 23 == 0) & (top < -126), 0, own) | rng.integers(0, 2, top.shape) << 31
    codes, tops = numpy_steps.value(own), NumpyValue(top.astype(np.int32))
    for lane in (I32, I64):
        one = anchored.end_in_f64(form, NumpyValue(total).resize(lane), codes, (tops + 1023) << 20)
        other = general.end_step(form, NumpyValue(total), codes, tops)
        np.testing.assert_array_equal(one.array, other.array)
