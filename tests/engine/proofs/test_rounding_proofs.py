"""Proofs of `tcemu.engine.arithmetic.step.rounding`: rounding of integers and of sums, and their codes."""

from __future__ import annotations

from functools import reduce
from operator import add

import pytest
import rules
from proof_records import SOLVER, proves
from proving import Refuted, prove
from rules import between, widen
from smt_values import SmtValue, Trace

from tcemu.engine.arithmetic.step import rounding
from tcemu.engine.arithmetic.step.values import BOOL, I32, I64, Lane
from tcemu.formats import F16, ROUNDINGS, Format
from tcemu.formats import F32 as BINARY32

MODES = ROUNDINGS[:-1]
UNITS = -(1 << 30), 1 << 30  # exponents of units: all that no sum of exponents can wrap


@proves("rounding.truncated_float", by=SOLVER, domain="all 2^32 words")
def test_conversion_to_nearest_of_the_kept_bits_truncates():
    trace = Trace()
    size = trace.variable(I32, "size")
    prove(trace, rounding.truncated_float(size).bits() == size.to_float(signed=False, toward_zero=True).bits())


@proves("rounding.signed_truncated_float", by=SOLVER, domain="all 2^32 words")
def test_conversion_of_signed_numbers_truncates():
    trace = Trace()
    total = trace.variable(I32, "total")
    prove(trace, rounding.signed_truncated_float(total).bits() == total.to_float(toward_zero=True).bits())


@proves("rounding.take_sign", "rounding.with_sign", by=SOLVER, domain="i32 and i64, all values")
@pytest.mark.parametrize("lane", [I32, I64])
def test_a_number_is_its_sign_and_its_magnitude(lane):
    trace = Trace()
    total = trace.variable(lane, "total")
    sign, size, _ = rounding.take_sign(total)
    exact = widen(total, lane.bits + 1, signed=True)
    is_size = widen(size, lane.bits + 1) == (exact < 0).select(0 - exact, exact)
    prove(trace, is_size & (sign == (total < 0).resize(lane)) & (rounding.with_sign(size, sign) == total))


# ---- integers


@proves("rounding.round_integer", by=SOLVER, domain="32 and 64 bits, all sizes and distances, four roundings, with `drops` too")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("lane", [I32, pytest.param(I64, marks=pytest.mark.full)])
@pytest.mark.parametrize("drops", [False, True])
def test_integers_are_rounded(lane, mode, drops):
    trace = Trace()
    size, drop, negative = trace.variable(lane, "size"), trace.variable(lane, "drop"), trace.variable(BOOL, "negative")
    rounded = rounding.round_integer(size, drop, negative.resize(lane), mode, drops)
    exact = rules.round_size(size, drop, negative, mode)
    prove(trace, rounded == exact, between(size, 0, (1 << (lane.bits - 2)) - 1), between(drop, int(drops), lane.bits - 1))


@proves("rounding.round_integer", by=SOLVER, domain="32 and 64 bits, a rounding that is a value")
@pytest.mark.parametrize("lane", [I32, I64])
def test_a_rounding_may_be_an_index(lane):
    trace = Trace()
    size, drop, negative = trace.variable(lane, "size"), trace.variable(lane, "drop"), trace.variable(BOOL, "negative")
    index = trace.variable(I32, "index")
    by_index = rounding.round_integer(size, drop, negative.resize(lane), index)
    claim = index == index
    for number, name in enumerate(MODES):
        claim = claim & ((index != number) | (by_index == rounding.round_integer(size, drop, negative.resize(lane), name)))
    prove(trace, claim, between(drop, 0, lane.bits - 1))


# ---- codes


def prove_encode(fmt: Format, lane: Lane, mode: str, leading: int, kept: int | None = None) -> None:
    """Sums whose leading bit is this one. kept: None is all numbers of kept fraction bits."""
    trace = Trace()
    size, negative = trace.variable(lane, "size"), trace.variable(BOOL, "negative")
    size = size & ((1 << leading) - 1) | (1 << leading)
    unit, of_kept = trace.variable(I32, "unit"), trace.variable(I32, "kept")
    assumed = [between(unit, *UNITS), between(of_kept, 0, fmt.mantissa_bits) if kept is None else of_kept == kept]
    exact = rules.encode_size(fmt, size, unit.constant(leading), negative, unit, of_kept, mode)
    total = rounding.Magnitude(negative.resize(lane), size)
    prove(trace, rounding.encode(fmt, total, unit, mode, of_kept if kept is None else kept) == exact, *assumed)


ENCODED = [(fmt, mode) for fmt in (F16, BINARY32) for mode in MODES]


@proves("rounding.encode", by=SOLVER, domain="f16 and f32, i32 and i64, four roundings: the three highest leading bits, all kept bits")
@pytest.mark.parametrize("fmt, mode", ENCODED)
@pytest.mark.parametrize(
    "lane, leading", [pytest.param(lane, lane.bits - at, marks=pytest.mark.full) for lane in (I32, I64) for at in (1, 2, 3)]
)
def test_large_sums_are_encoded(fmt, mode, lane, leading):
    prove_encode(fmt, lane, mode, leading)


@proves("rounding.encode", by=SOLVER, domain="the same in the usual run: f16 in RN, i32, with all fraction bits")
def test_a_sum_is_encoded_in_f16():
    prove_encode(F16, I32, "RN", 29, 10)


@proves("rounding.encode", by=SOLVER, domain="f16 and f32, i32 and i64, four roundings: all smaller sums, shifted to bit W - 3")
@pytest.mark.full
@pytest.mark.parametrize("fmt, mode", ENCODED)
@pytest.mark.parametrize("lane", [I32, I64])
def test_the_code_of_a_sum_is_that_of_a_multiple_in_a_smaller_unit(fmt, mode, lane):
    """The number is the same, so with the proof for leading bit W - 3 this is the rule for all smaller leading bits."""
    trace, high = Trace(), lane.bits - 3
    size, shift, negative = trace.variable(lane, "size"), trace.variable(lane, "shift"), trace.variable(BOOL, "negative")
    unit, kept = trace.variable(I32, "unit"), trace.variable(I32, "kept")
    multiple = size << shift
    sign = negative.resize(lane)
    one = rounding.encode(fmt, rounding.Magnitude(sign, size), unit, mode, kept)
    other = rounding.encode(fmt, rounding.Magnitude(sign, multiple), unit - shift.resize(I32), mode, kept)
    assumed = [
        size > 0, between(shift, 0, high), multiple >> shift == size, between(multiple, 1 << high, (2 << high) - 1),
        between(unit, *UNITS), between(kept, 0, fmt.mantissa_bits),
    ]  # fmt: skip
    prove(trace, one == other, *assumed, demands=False)


@proves("rounding.encode", by=SOLVER, domain="f16 and f32, i32 and i64, four roundings: a sum of zero")
@pytest.mark.parametrize("lane", [I32, I64])
def test_a_sum_of_zero_is_positive(lane):
    for fmt, mode in ENCODED:
        trace = Trace()
        unit, kept = trace.variable(I32, "unit"), trace.variable(I32, "kept")
        sign = trace.variable(lane, "sign")
        code = rounding.encode(fmt, rounding.Magnitude(sign, sign.constant(0)), unit, mode, kept)
        prove(trace, code == 0, between(unit, *UNITS), between(kept, 0, fmt.mantissa_bits))


def truncated(trace: Trace, exact_bits: int = 33) -> tuple[SmtValue, SmtValue, SmtValue, SmtValue, SmtValue, list[SmtValue]]:
    size, leading, negative = trace.variable(I32, "size"), trace.variable(I32, "leading"), trace.variable(BOOL, "negative")
    unit, kept = trace.variable(I32, "unit"), trace.variable(I32, "kept")
    is_leading = widen(size, exact_bits) >> widen(leading, exact_bits) == 1
    return size, leading, negative, unit, kept, [between(leading, 0, 31), is_leading, between(unit, *UNITS), between(kept, 0, 23)]


@proves("rounding.encode_truncated", by=SOLVER, domain="f32, all sizes below 2^32 and all kept bits, which is also `encode` in RZ")
@pytest.mark.full
def test_truncated_sums_are_encoded():
    trace = Trace()
    size, leading, negative, unit, kept, assumed = truncated(trace)
    exact = rules.encode_size(BINARY32, widen(size, 33), leading, negative, unit, kept, "RZ")
    prove(trace, rounding.encode_truncated(rounding.Magnitude(negative.resize(I32), size), unit, kept) == exact, *assumed)


@proves("rounding.encode_truncated", by=SOLVER, domain="f32, a magnitude with `up`, and zero")
def test_a_larger_unit_of_a_truncated_sum_counts_and_zero_is_positive():
    trace = Trace()
    size, negative, unit, up = (trace.variable(I32, name) for name in ("size", "negative", "unit", "up"))
    kept = trace.variable(I32, "kept")
    with_up = rounding.encode_truncated(rounding.Magnitude(negative, size, up), unit, kept)
    without = rounding.encode_truncated(rounding.Magnitude(negative, size), unit + up, kept)
    prove(trace, (with_up == without) & ((size != 0) | (with_up == 0)), between(kept, 0, 23))


@proves("rounding.cut", by=SOLVER, domain="f32, all codes and kept bits, as a number and as a value")
def test_bits_are_cut():
    trace = Trace()
    code, kept = trace.variable(I32, "code"), trace.variable(I32, "kept")
    dropped = (code.constant(1) << (23 - kept)) - 1
    prove(trace, rounding.cut(code, kept) == code - (code & dropped), between(kept, 0, 23))
    for number in range(24):
        trace = Trace()
        code = trace.variable(I32, "code")
        prove(trace, rounding.cut(code, number) == code - (code & (1 << (23 - number)) - 1))


# ---- sums


@proves("rounding.add_two", by=SOLVER, domain="all pairs of i32 but -2^31 twice")
def test_two_words_are_added():
    trace = Trace()
    x, y = trace.variable(I32, "x"), trace.variable(I32, "y")
    negative, size, _ = rounding.add_two(x, y)
    total = widen(x, 34, signed=True) + widen(y, 34, signed=True)
    claim = (widen(size, 34) == (total < 0).select(0 - total, total)) & (negative == (total < 0).resize(I32))
    prove(trace, claim, ~((x == -(1 << 31)) & (y == -(1 << 31))))
    with pytest.raises(Refuted, match=r"x = #b10*, y = #b10*$"):
        prove(trace, claim)


@proves("rounding.add_wide", by=SOLVER, domain="two to four i32 addends; what is dropped lies below the 24 highest bits")
@pytest.mark.parametrize("count", [2, 3, 4])
def test_words_are_added_but_for_bits_that_no_f32_keeps(count):
    trace = Trace()
    addends = [trace.variable(I32, f"x{at}") for at in range(count)]
    negative, size, up = rounding.add_wide(addends)
    assert up is not None
    total = reduce(add, (widen(x, 64, signed=True) for x in addends))
    exact = (total < 0).select(0 - total, total)
    is_cut = (up == 0) | ((up == 8) & (widen(size, 64) >= 1 << 24))
    prove(trace, is_cut & (widen(size, 64) == exact >> widen(up, 64)) & (negative == (total < 0).resize(I32)))
