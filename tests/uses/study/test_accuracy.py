"""The figures of `tcemu gemm`, held against exact rational arithmetic and NumPy's own idea of an ulp."""

import copy
from fractions import Fraction
from math import isinf, log2

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcemu.formats import BF16, E4M3, F16, F32, F64, S8, S32
from tcemu.uses.study.accuracy import MEASURES, ErrorTally, Reference, lowest_bit_exponent, round_values, ulp


def matrices(seed: int, m: int, k: int, n: int, spread: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A, B and C of float64 with significands of `bits` bits and exponents within `spread`."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return np.ldexp(rng.integers(-(2**bits) + 1, 2**bits, shape).astype(np.float64), rng.integers(-spread, spread + 1, shape))

    return draw(m, k), draw(k, n), draw(m, n)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    k=st.integers(0, 40),
    spread=st.sampled_from([0, 1, 5, 20, 100, 480]),
    bits=st.sampled_from([1, 4, 11, 24, 53]),
    with_c=st.booleans(),
)
def test_the_reference_is_within_its_bound(seed, k, spread, bits, with_c):
    a, b, c = matrices(seed, 3, k, 2, spread, bits)
    reference = Reference.from_arrays(a, b, c if with_c else None)
    value, bound = reference.compute_rows(1, 3)
    for row in range(2):
        for column in range(2):
            terms = [Fraction(x) * Fraction(y) for x, y in zip(a[row + 1].tolist(), b[:, column].tolist(), strict=True)]
            exact = sum(terms, Fraction(c[row + 1, column]) if with_c else Fraction())
            assert reference.exact_element((row + 1, column)) == exact
            if not isinf(value[row, column]):
                assert abs(Fraction(float(value[row, column])) - exact) <= Fraction(float(bound[row, column]))


@pytest.mark.parametrize("fmt", [F64, S32, F32, E4M3])
def test_a_copied_format_rounds_as_the_format(fmt):
    x = np.array([1 / 3, 1e300, -1e-310, 2.0**31 - 1, 3e9, np.inf])
    np.testing.assert_array_equal(round_values(x, copy.deepcopy(fmt), "RZ"), round_values(x, fmt, "RZ"))


@pytest.mark.parametrize(("bits", "spread", "exact"), [(11, 3, True), (24, 0, True), (24, 4, False), (53, 0, False)])
def test_the_reference_knows_when_it_is_exact(bits, spread, exact):
    _, bound = Reference.from_arrays(*matrices(0, 8, 30, 8, spread, bits)).compute_rows(0, 8)
    assert (bound == 0).all() == exact


def test_an_element_of_a_batch():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(5, 1, 2, 3)), rng.normal(size=(4, 3, 2))
    product = Reference.from_arrays(a, b, None)
    for index in np.ndindex(5, 4, 2, 2):
        i, j, row, column = index
        assert product.exact_element(index) == sum(
            Fraction(x) * Fraction(y) for x, y in zip(a[i, 0, row].tolist(), b[j, :, column].tolist(), strict=True)
        )


def test_last_bit():
    x = np.array([0.0, 3.0, -0.375, np.inf, np.nan, 5e-324, 2.0**1000])
    assert lowest_bit_exponent(x) == -1074
    assert lowest_bit_exponent(x[1:3]) == -3
    assert lowest_bit_exponent(x[1:2]) == 0
    assert lowest_bit_exponent(x[:1]) == lowest_bit_exponent(x[:0]) == 0


@pytest.mark.parametrize(("fmt", "dtype"), [(F16, np.float16), (BF16, ml_dtypes.bfloat16), (F32, np.float32), (F64, np.float64)])
def test_an_ulp_is_the_distance_to_the_next_value(fmt, dtype):
    words = np.random.default_rng(1).integers(0, 2**64, 4000, dtype=np.uint64)
    if fmt.bits == 16:
        words = np.arange(2**16, dtype=np.uint64)
    codes = words.astype(f"u{fmt.bits // 8}")
    x = codes.view(dtype)
    beyond = (codes + codes.dtype.type(1)).view(dtype)  # the next value away from zero
    with np.errstate(all="ignore"):
        counted = np.isfinite(x) & np.isfinite(beyond)
        distance = np.abs(beyond[counted].astype(np.longdouble) - x[counted].astype(np.longdouble)).astype(np.float64)
    assert counted.sum() > 3000
    assert np.array_equal(ulp(x[counted].astype(np.float64), fmt), distance)


def test_an_ulp_of_an_integer_is_one():
    assert ulp(np.array([0.0, 1e9]), S32).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("fmt", "dtype"), [(F16, np.float16), (BF16, ml_dtypes.bfloat16), (E4M3, ml_dtypes.float8_e4m3fn), (F64, np.float64), (F32, np.float32)]
)
def test_inputs_are_rounded_as_other_libraries_round_them(fmt, dtype):
    x = np.random.default_rng(2).normal(size=3000).astype(np.float32) * np.float32(30)
    assert np.array_equal(round_values(x, fmt, "RN"), x.astype(dtype).astype(np.float64))


@pytest.mark.parametrize(
    ("rounding", "wanted"), [("RN", [2, -2, 2, 7]), ("RZ", [1, -1, 2, 7]), ("RM", [1, -2, 2, 7]), ("RP", [2, -1, 3, 7])]
)
@pytest.mark.parametrize("fmt", [S8, S32])
def test_inputs_become_whole_numbers(fmt, rounding, wanted):
    assert round_values(np.array([1.75, -1.75, 2.5, 7], np.float32), fmt, rounding).tolist() == wanted


def test_inputs_stop_at_the_ends_of_an_integer_format():
    assert round_values(np.array([3e9, -3e9, 2147483520.0]), S32, "RN").tolist() == [2**31 - 1, -(2**31), 2147483520]
    assert round_values(np.array([300, -300]), S8, "RN").tolist() == [127, -128]


def test_a_tally_of_pieces():
    tally = ErrorTally(F32)
    assert all(np.isnan(tally.figures))
    tally.add(np.array([2.0**-20, 0.0]), np.array([1.0, 2.0]))  # 8 ulps and none
    tally.add(np.array([-(2.0**-22), 0.5]), np.array([-4.0, 0.0]))  # half an ulp; and one that has no ulp
    largest, mean, largest_ulps, mean_ulps, bits, mean_bits = tally.figures
    assert (largest, mean) == (0.5, (2.0**-20 + 2.0**-22 + 0.5) / 4)
    assert (largest_ulps, mean_ulps) == (8.0, 8.5 / 3)
    assert (bits, mean_bits) == (log2(8), 1.0)
    tally.add(np.array([1e30]), np.array([1.0]))
    assert tally.figures[4] == 24  # no more than the format has


@pytest.mark.parametrize("name", MEASURES)
def test_a_measure_of_nothing_is_nan(name):
    """Where no element is finite, an error of 0 would be a lie."""
    nothing = np.zeros(0)
    assert np.isnan(MEASURES[name](nothing, nothing))
    assert np.isfinite(MEASURES[name](np.array([1.5]), np.array([1.0])))
