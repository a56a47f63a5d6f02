"""Proofs of `tcemu.engine.arithmetic.step.quantizing`: numbers of a format as f32, f32 rounded to a format, and scales."""

from __future__ import annotations

import numpy as np
import pytest
import rules
from numpy_values import NumpyValue
from oracles import reference
from proof_records import ENUMERATION, SOLVER, proves
from proving import prove
from rules import between, widen
from smt_values import Kind, SmtValue, Trace

from tcemu.engine.arithmetic.step import quantizing
from tcemu.engine.arithmetic.step.values import BOOL, I32
from tcemu.engine.formats.coding import nan_code
from tcemu.formats import F32 as BINARY32
from tcemu.formats import FORMATS, UE8M0, Format

TARGETS = [fmt for fmt in FORMATS.values() if not fmt.is_integer and fmt.signed and fmt.bits <= 32 and fmt.specials != "fnuz"]
SOURCES = [fmt for fmt in FORMATS.values() if not fmt.is_integer and fmt.bits <= 16 and fmt.specials != "fnuz" and fmt.subnormals]


@proves(
    "quantizing.decode_number", by=ENUMERATION, domain="every code of every format of at most 16 bits with subnormals; f32 is its own word"
)
@pytest.mark.parametrize("fmt", SOURCES, ids=str)
def test_every_number_is_decoded(fmt):
    codes = np.arange(1 << fmt.bits, dtype=np.int32)
    value = quantizing.decode_number(fmt, NumpyValue(codes)).array
    for code, got in zip(codes.tolist(), value, strict=True):
        wanted = reference.decode(fmt.name, code)
        if wanted == "nan":
            assert np.isnan(got), code
        elif isinstance(wanted, tuple):
            assert got == (-np.inf if wanted[1] else np.inf), code
        else:
            assert float(got) == float(wanted) and np.signbit(got) == bool(reference.sign_bit(fmt.name, code)), code


@proves("quantizing.decode_scale", by=ENUMERATION, domain="all 256 codes of ue8m0")
def test_every_scale_is_decoded():
    value = quantizing.decode_scale(UE8M0, NumpyValue(np.arange(256, dtype=np.int32))).array
    assert np.isnan(value[255]) and value[:255].astype(np.float64).tolist() == [2.0 ** (code - 127) for code in range(255)]


def is_float_kind(x: SmtValue, kind: Kind) -> SmtValue:
    return SmtValue(x.trace, BOOL, x.trace.make(kind, x.term))


@proves(
    "quantizing.round_value",
    by=SOLVER,
    domain="all 2^32 words of f32 to every signed format but fnuz, saturated and not; also where subnormals are flushed",
)
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("fmt", [fmt for fmt in TARGETS if fmt != BINARY32], ids=str)
def test_values_are_rounded_to_the_nearest(fmt: Format, saturate):
    """Subnormal numbers of f32 that the machine takes for zero are far below half of the least number, but for bf16 and tf32."""
    trace = Trace(flushes=True)
    word, leading = trace.variable(I32, "word"), trace.variable(I32, "leading")
    code = quantizing.round_value(fmt, saturate, word.as_float())
    field, fraction = (word >> 23) & 0xFF, word & 0x7FFFFF
    size = (field == 0).select(fraction, fraction | 1 << 23)
    is_leading = between(leading, 0, 23) & ((size == 0) | (widen(size, 40) >> widen(leading, 40) == 1))
    # the rule, with the exponents above the largest number's where there is no Inf
    spare, bits = fmt.mantissa_bits + 2, 64
    last = (leading + field.max(1) - 150).max(fmt.min_exponent) - fmt.mantissa_bits
    drop = rules.clamp(last - (field.max(1) - 150) + spare, 0, bits - 1)
    integer = rules.round_size(widen(size, bits) << spare, widen(drop, bits), word < 0, "RN").resize(I32)
    magnitude = integer + (last + fmt.mantissa_bits - fmt.min_exponent << fmt.mantissa_bits)
    too_large = (magnitude > fmt.max_magnitude) | (field == 255)
    after = fmt.max_magnitude + 1 if fmt.specials != "none" and not saturate else fmt.max_magnitude  # Inf, or NaN where there is no Inf
    magnitude = (size == 0).select(0, too_large.select(after, magnitude))
    exact = magnitude << fmt.unused_bits | (word < 0).select(magnitude.constant(1 << (fmt.bits - 1)), 0)
    exact = ((field == 255) & (fraction != 0)).select(nan_code(fmt), exact)
    prove(trace, code == exact, is_leading)


@proves("quantizing.round_value", by=SOLVER, domain="f32 to f32: all words; a NaN becomes the canonical one")
def test_a_value_of_f32_is_kept():
    trace = Trace()
    word = trace.variable(I32, "word")
    is_nan = is_float_kind(word.as_float(), Kind.FP_IS_NAN)
    prove(trace, quantizing.round_value(BINARY32, False, word.as_float()) == is_nan.select(BINARY32.nan, word))


@proves(
    "quantizing.round_scale",
    by=SOLVER,
    domain="all magnitudes, and 448, 6 and 57344 as the largest number; the least scale 0 and 2^-126; powers of two and any",
)
@pytest.mark.parametrize(
    "largest", [pytest.param(0x43E00000, id="448"), pytest.param(0x40C00000, id="6"), pytest.param(0x47600000, id="57344")]
)
@pytest.mark.parametrize("least", [0, 1 << 23])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_are_rounded(largest, least, power_of_two):
    trace = Trace()
    magnitude = trace.variable(I32, "magnitude")
    code = quantizing.round_scale(magnitude, largest, least, power_of_two)
    quotient = magnitude.as_float() / magnitude.constant(largest).as_float()
    low, scale = magnitude.constant(least).as_float(), code.as_float()
    is_nan, is_infinite = is_float_kind(quotient, Kind.FP_IS_NAN), is_float_kind(quotient, Kind.FP_IS_INF)
    wanted = (quotient > low).select(quotient, low)
    claim = is_nan.select(code == BINARY32.nan, scale == wanted)
    if power_of_two:  # the least power of two that is no less
        half = ((code - (1 << 23)).max(0)).as_float()
        is_power = (code & 0x7FFFFF == 0) & (scale >= wanted) & ((code < 2 << 23) | (half < wanted) | (wanted == 0.0))
        claim = is_nan.select(code == BINARY32.nan, is_infinite.select(code == BINARY32.infinity, is_power))
    prove(trace, claim | (magnitude == 0), magnitude >= 0)
    prove(trace, code == 0x3F800000, magnitude == 0)
