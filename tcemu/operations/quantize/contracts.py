"""Quantisers by contract: how a library finds its scales and rounds its elements, as a value that computes the library's words.

A contract is a row of `contract_rows.CONTRACTS`. All arithmetic is on f32 codes in integers, each operation rounded once, as the library's
code rounds it. What a row does to zeros, NaN, Inf and subnormal numbers follows from its steps; `contract_matrix` compares rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.base.compilation import compile_once
from tcemu.base.errors import NotModelled
from tcemu.engine.arithmetic.fma import add
from tcemu.engine.arithmetic.special_functions import multiply_f32, rcp
from tcemu.engine.backends.quotients import divide, multiply
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes
from tcemu.engine.formats.number_formats import F32, UE8M0, Format
from tcemu.operations.quantize.philox import triton_randint
from tcemu.operations.quantize.scale_factors import FRACTION, INFINITY, MAX_F32, MIN_NORMAL, NAN, ONE, SIGN, ZERO, Factor, f32_code
from tcemu.operations.quantize.scale_groups import broadcast_scales, join_groups, split_groups
from tcemu.operations.quantize.scale_rules import max_finite_code
from tcemu.operations.quantize.two_level_scales import FourOverSixScale, TwoLevelScale

NOISE_ROUNDS, ELEMENT_SEED = 7, np.uint32(0x5A5A5A5A)  # rounds of Philox; XORed with the seed for the elements' bits
VERSION = re.compile(r"\b(?:(?=[0-9a-f]*\d)[0-9a-f]{7}|\d+\.\d+\.\d+|(?:release|MX) \d+\.\d+)\b")  # commits and releases in a source
LIMIT = 254  # exponent field of 2^127, and the largest finite ue8m0


# ---- one f32 scale per group


def _field(ratio: Array) -> Array:
    return (ratio >> F32.mantissa_bits).astype(jnp.int32)


def _has_fraction(ratio: Array) -> Array:
    return (ratio & FRACTION) != 0


def _shifted(code: Array) -> Array:
    return code.astype(jnp.uint32) << F32.mantissa_bits


def _field_above(ratio: Array) -> Array:
    return _field(ratio) + _has_fraction(ratio)


@lru_cache(maxsize=1)
def _log2_thresholds() -> tuple[np.ndarray, np.ndarray]:
    """Returns, for each exponent field, the largest fraction whose log2 rounds to the exponent, and the least that rounds to the next.

    log2 is rounded to f32 once, as torch's is near powers of two; `tests/operations/quantize/test_contracts.py` compares them. A subnormal
    number has the exponent of 2^-127, the least that ue8m0 has; one below counts as 2^-127.
    """
    near = np.arange(1 << 10, dtype=np.uint32)
    fields = np.arange(255, dtype=np.uint32)[:, None] << np.uint32(23)
    powers = np.where(fields == 0, np.uint32(1 << 22), fields)
    log2 = lambda codes: np.log2(codes.view(np.float32).astype(np.float64)).astype(np.float32)
    exponent = (np.arange(255) - 127)[:, None]
    low = (powers & FRACTION)[:, 0] + (log2(powers + near) <= exponent).sum(1) - 1
    high = FRACTION + 1 - (log2(fields | (FRACTION - near)) >= exponent + 1).sum(1)
    return np.append(low, 0).astype(np.uint32), np.append(high, FRACTION + 1).astype(np.uint32)


def _log2_down(scale: Array) -> Array:
    """2^floor(log2 scale) with log2 rounded to f32. A subnormal scale, which no row has, would keep its exponent field."""
    field = scale >> F32.mantissa_bits
    bump = (scale & FRACTION) >= jnp.asarray(_log2_thresholds()[1])[field]
    return jnp.where(scale >= INFINITY, scale, (field + bump) << F32.mantissa_bits)


POWERS = {
    "2^ceil(log2 s)": lambda scale: _shifted(_field_above(scale)),
    "2^ceil(log2 s), 2^-126 to 2^127": lambda scale: _shifted(jnp.clip(_field_above(scale), 1, LIMIT)),
    "2^floor(log2 e)": lambda scale: scale & ~FRACTION,
    "2^floor(log2 e), log2 rounded to f32": _log2_down,
}


class Ratio(StrEnum):
    """How s, the stored scale, and e, its reciprocal, come from amax. The text is what tables show."""

    STORED = "s = amax / max"
    RECIPROCAL = "e = max / amax"  # s is 1 / e
    STORED_BY_INVERSE = "s = amax * (1 / max), e = max / amax"


class Application(StrEnum):
    """How an element is scaled. The text is what tables show."""

    DIVIDE = "x / s"
    MULTIPLY_BY_INVERSE = "x * (1 / s)"
    MULTIPLY_BY_INVERSE_OR_ZERO = "x * (1 / s), 0 for s = 0"
    MULTIPLY = "x * e"
    MULTIPLY_BY_POWER = "x * 2^-log2(s)"


@dataclass(frozen=True)
class FloatScale:
    """One f32 scale for each group: s is stored, and e is what elements are multiplied by.

    Attributes:
        ratio: How s and e come from amax. max is the largest element.
        apply: How an element is scaled.
        least_amax: A smaller max magnitude is replaced by this.
        least_scale: A smaller s is replaced by this, before it is rounded to a power of two.
        zero_scale: s where amax / max is 0; None: 0.
        power: Rounding to a power of two, of `POWERS`, or None.
        in_f64: The quotient is computed in f64 from an f64 least_amax, then rounded to f32.
        special_is_one: e is 1 where amax is 0, Inf or NaN, and the largest f32 where the quotient overflows.
        exact_elements: With "x * e": e is that of the exact scale, while a power of two is stored. Says so in words.
        in_input_dtype: s is rounded to the dtype of x.
        largest: The max of the rule, to which elements are clamped too; None: the largest element.
        delayed: amax is that of earlier steps, which the caller gives as `tensor_amax`.
    """

    ratio: Ratio
    apply: Application
    least_amax: float = 0.0
    least_scale: float = 0.0
    zero_scale: float | None = None
    power: str | None = None
    in_f64: bool = False
    special_is_one: bool = False
    exact_elements: bool = False
    in_input_dtype: bool = False
    largest: float | None = None
    delayed: bool = False
    format: Format = F32

    def __post_init__(self) -> None:
        assert isinstance(self.ratio, Ratio) and isinstance(self.apply, Application) and (self.power is None or self.power in POWERS)

    def describe(self) -> str:
        """Return the rule in words."""
        parts = [self.ratio + (" in f64" if self.in_f64 else "")]
        parts += [f"max {self.largest:g}"] if self.largest else []
        parts += ["amax of earlier steps"] if self.delayed else []
        parts += [f"amax at least {self.least_amax:g}"] if self.least_amax else []
        parts += [f"s at least {self.least_scale:g}"] if self.least_scale else []
        parts += [f"{self.zero_scale:g} for s = 0"] if self.zero_scale is not None else []
        parts += ["e = 1 for amax 0, Inf, NaN"] if self.special_is_one else []
        parts += [self.power + (", in the stored scale only" if self.exact_elements else "")] if self.power else []
        parts += ["in the dtype of x"] if self.in_input_dtype else []
        return "; ".join([*parts, self.apply])

    def scale_groups(self, amax: Array, element: Format, source: Format, tensor_amax: Array | None) -> tuple[Array, Factor]:
        """Return the stored scales and the factors of groups. amax: f32 codes without sign."""
        largest = f32_code(self.largest) if self.largest else max_finite_code(element)
        amax = amax if not self.delayed or tensor_amax is None else jnp.broadcast_to(tensor_amax, amax.shape)
        power = POWERS[self.power] if self.power else lambda scale: scale
        clamped = jnp.maximum(amax, f32_code(self.least_amax))
        quotient = divide(largest, clamped, F32)
        if self.in_f64:  # 53 bits suffice for f32 quotients to be rounded twice without harm
            threshold = np.float32(self.least_amax)
            threshold = threshold if float(threshold) >= self.least_amax else np.nextafter(threshold, np.float32(np.inf))
            constant = f32_code(float(largest.view(np.float32)) / self.least_amax)
            quotient = jnp.where(amax < threshold.view(np.uint32), constant, divide(largest, amax, F32))
        if self.special_is_one:
            quotient = jnp.where(quotient == INFINITY, MAX_F32, quotient)
            quotient = jnp.where((clamped == 0) | (clamped >= INFINITY), ONE, power(quotient))
            return divide(ONE, quotient, F32), Factor(quotient, False)
        if self.ratio is Ratio.RECIPROCAL:
            quotient = power(quotient)
            return divide(ONE, quotient, F32), Factor(quotient, False)
        inverse = divide(ONE, largest, F32)
        scale = multiply(clamped, inverse, F32) if self.ratio is Ratio.STORED_BY_INVERSE else divide(clamped, largest, F32)
        if self.in_input_dtype and source != F32:
            scale = convert(source, F32, convert(F32, source, scale))
        scale = jnp.maximum(scale, f32_code(self.least_scale))
        if self.zero_scale is not None:
            scale = jnp.where(scale == 0, f32_code(self.zero_scale), scale)
        stored = power(scale)
        if self.apply is Application.MULTIPLY_BY_POWER:
            return stored, Factor(np.uint32(LIMIT << F32.mantissa_bits) - stored, False)  # wraps, as the library's integers do
        if self.apply is Application.MULTIPLY:
            return stored, Factor(quotient, False)
        if self.apply is Application.DIVIDE:
            return stored, Factor(stored, True)
        inverse = divide(ONE, stored, F32)
        if self.apply is Application.MULTIPLY_BY_INVERSE_OR_ZERO:
            inverse = jnp.where(stored == 0, ZERO, inverse)
        return stored, Factor(inverse, False)


# ---- scales that are powers of two, stored as ue8m0


def _rounded_up_by_cvt(ratio: Array) -> Array:
    """Rounds as cvt.rp.satfinite.ue8m0x2.f32 does."""
    field = _field(ratio)
    tiny = (field == 0) & ((ratio & FRACTION) <= 1 << (F32.mantissa_bits - 1))
    return jnp.where(ratio == INFINITY, LIMIT, field + (_has_fraction(ratio) & (field < LIMIT) & ~tiny))


def _log2_up(ratio: Array) -> Array:
    field = _field(ratio)
    return field + ((ratio & FRACTION) > jnp.asarray(_log2_thresholds()[0])[field])


def _add_bits(added: int) -> Callable[[Array], Array]:
    return lambda ratio: _field(ratio + np.uint32(added))


def _ceil_or_zero(ratio: Array) -> Array:
    """Rounds up to any power of two of f32, 2^-149 as field -22; 0 becomes 2^0."""
    below = 32 - lax.clz(jnp.maximum(ratio, 1) - 1).astype(jnp.int32) - 22  # of a subnormal number
    exponent = jnp.where(ratio < MIN_NORMAL, below, _field_above(ratio))
    return jnp.where(ratio == 0, F32.bias, exponent)


ROUNDINGS_TO_POWERS = {  # f32 code -> exponent field, the code of ue8m0
    "floor": _field,
    "ceil": _field_above,
    "ceil of normal numbers": lambda ratio: jnp.where(_field(ratio) > 0, _field_above(ratio), 0),
    "ceil by cvt.rp.satfinite": _rounded_up_by_cvt,
    "ceil of log2 rounded to f32": _log2_up,
    "half up to 3 bits": _add_bits(1 << 19),
    "half up to 2 bits": _add_bits(1 << 20),
    "half up to 1 bit": _add_bits(1 << 21),
    "half down to 1 bit": _add_bits((1 << 21) - 1),
    "ceil, 2^0 for 0": _ceil_or_zero,
}


def _subnormal_power(code: Array) -> Array:
    """Returns 2^(code - 127) as f32; NaN for 255."""
    power = jnp.where(code == 0, np.uint32(1 << (F32.mantissa_bits - 1)), code.astype(jnp.uint32) << F32.mantissa_bits)
    return jnp.where(code == UE8M0.nan, NAN, power)


def _wide_power(code: Array) -> Array:
    """Returns 2^(code - 127) as f32, for codes from -22 on."""
    return jnp.where(code > 0, code.astype(jnp.uint32) << F32.mantissa_bits, jnp.uint32(1) << jnp.clip(code + 22, 0, 22).astype(jnp.uint32))


def _reversed_field(code: Array) -> Array:
    """Returns the word ((254 - code) << 23): 2^(127 - code), but 0 for 254 and -Inf for 255; 1 for 0."""
    return jnp.where(code == 0, ONE, (LIMIT - code).astype(jnp.uint32) << F32.mantissa_bits)


def _reciprocal_or_one(code: Array) -> Array:
    """Returns 2^(127 - code), exactly; 1 for 0, NaN for 255."""
    power = jnp.where(code == LIMIT, np.uint32(1 << (F32.mantissa_bits - 1)), (LIMIT - code).astype(jnp.uint32) << F32.mantissa_bits)
    return jnp.where(code == 0, ONE, jnp.where(code == UE8M0.nan, NAN, power))


def _flushed_reciprocal(code: Array) -> Array:
    """Returns rcp.approx.ftz of the scale, and 0 where the scale is flushed to 0."""
    return jnp.where(code == 0, ZERO, rcp(_subnormal_power(code), True))


class PowerFactor(NamedTuple):
    """How an element is scaled by a power of two."""

    of_code: Callable[[Array], Factor]  # of the scale's code
    zero_of_zero: bool = False  # the factor is 0 where amax is 0


FACTORS: dict[str, PowerFactor] = {  # by the words that tables show
    "x / 2^e": PowerFactor(lambda code: Factor(_subnormal_power(code), True)),
    "x / 2^e, Inf for e = 128": PowerFactor(lambda code: Factor(jnp.where(code == UE8M0.nan, INFINITY, _subnormal_power(code)), True)),
    "x / 2^e, e from -149": PowerFactor(lambda code: Factor(_wide_power(code), True)),
    "x / max(2^e, 2^-126)": PowerFactor(lambda code: Factor(jnp.maximum(_shifted(code), MIN_NORMAL), True)),
    "x * (254 - code) << 23, 1 for code 0": PowerFactor(lambda code: Factor(_reversed_field(code), False)),
    "x * 2^-e, 1 for code 0": PowerFactor(lambda code: Factor(_reciprocal_or_one(code), False)),
    "x * (1 / 2^e)": PowerFactor(lambda code: Factor(divide(ONE, _subnormal_power(code), F32), False)),
    "x * rcp.approx.ftz(2^e), 0 for code 0": PowerFactor(lambda code: Factor(_flushed_reciprocal(code), False, flush=True)),
    "x * rcp.approx.ftz(2^e), 0 for amax 0": PowerFactor(lambda code: Factor(rcp(_subnormal_power(code), True), False), zero_of_zero=True),
    "x * 2^-e by ex2, 1 for code 0, 0 for amax 0": PowerFactor(
        lambda code: Factor(_reciprocal_or_one(code), False, flush=True), zero_of_zero=True
    ),
}


class PowerRatio(NamedTuple):
    """What is rounded to a power of two."""

    of_amax: Callable[[Array, Format], Array]  # of f32 codes and the format of elements
    less_max_exponent: bool = False  # the exponent of the largest element is subtracted after rounding


POWER_RATIOS: dict[str, PowerRatio] = {  # by the words that tables show
    "amax": PowerRatio(lambda amax, element: amax, less_max_exponent=True),
    "amax / 2^emax": PowerRatio(lambda amax, element: divide(amax, f32_code(2.0**element.max_exponent), F32)),
    "amax / max": PowerRatio(lambda amax, element: divide(amax, max_finite_code(element), F32)),
    "amax * (1 / max)": PowerRatio(lambda amax, element: multiply(amax, divide(ONE, max_finite_code(element), F32), F32)),
    "amax * rcp.approx.ftz(max), subnormal numbers kept": PowerRatio(
        lambda amax, element: multiply(amax, rcp(jnp.asarray(max_finite_code(element)), True), F32)
    ),
    "amax * rcp.approx.ftz(max)": PowerRatio(
        lambda amax, element: multiply_f32(amax, rcp(jnp.asarray(max_finite_code(element)), True), flush=True)
    ),
}


@dataclass(frozen=True)
class PowerScale:
    """Scales that are powers of two, stored as ue8m0 codes.

    Attributes:
        ratio: One of `POWER_RATIOS`, rounded to f32.
        rounding: From the ratio to the exponent, one of `ROUNDINGS_TO_POWERS`.
        apply: One of `FACTORS`.
        least_amax: A smaller max magnitude is replaced by this.
        zero_amax: A max magnitude of 0 is replaced by this.
        codes: The least and the largest code of a finite scale.
        of_nan: Code where amax is NaN; None: as computed.
        of_infinity: Code where amax is Inf, or is rounded to the exponent of Inf; None: as computed.
    """

    ratio: str
    rounding: str
    apply: str
    least_amax: float = 0.0
    zero_amax: float = 0.0
    codes: tuple[int, int] = (0, LIMIT)
    of_nan: int | None = UE8M0.nan
    of_infinity: int | None = None
    format: Format = UE8M0

    def __post_init__(self) -> None:
        assert self.ratio in POWER_RATIOS and self.rounding in ROUNDINGS_TO_POWERS and self.apply in FACTORS

    def describe(self) -> str:
        """Return the rule in words."""
        parts = [f"{self.ratio}, {self.rounding}" + (", less emax" if POWER_RATIOS[self.ratio].less_max_exponent else "")]
        parts += [f"amax at least {self.least_amax:g}"] if self.least_amax else []
        parts += [f"amax {self.zero_amax:g} for 0"] if self.zero_amax else []
        parts += [f"codes {self.codes[0]} to {self.codes[1]}"] if self.codes != (0, LIMIT) else []
        return "; ".join([*parts, self.apply])

    def scale_groups(self, amax: Array, element: Format, source: Format, tensor_amax: Array | None) -> tuple[Array, Factor]:
        """Return the stored scales and the factors of groups. amax: f32 codes without sign."""
        of, apply = POWER_RATIOS[self.ratio], FACTORS[self.apply]
        amax_or_least = jnp.maximum(amax, f32_code(self.least_amax))
        ratio = of.of_amax(jnp.where(amax_or_least == 0, f32_code(self.zero_amax), amax_or_least), element)
        code = ROUNDINGS_TO_POWERS[self.rounding](ratio)
        overflowed = (amax == INFINITY) | ((code == UE8M0.nan) & (amax <= INFINITY))
        code = code - element.max_exponent if of.less_max_exponent else code
        code = jnp.clip(code, *self.codes)
        if self.of_infinity is not None:
            code = jnp.where(overflowed, self.of_infinity, code)
        if self.of_nan is not None:
            code = jnp.where(amax > INFINITY, self.of_nan, code)
        factor = apply.of_code(code)
        if apply.zero_of_zero:
            factor = factor._replace(code=jnp.where(ratio == 0, ZERO, factor.code))
        return code.astype(jnp.uint8), factor


# ---- a contract


class QuantizedGroups(NamedTuple):
    """The words of a quantised array."""

    codes: Array  # of the elements, in the array's shape
    scales: Array  # f32 codes, or ue8m0 or ue4m3 codes, [..., groups of rows, groups along K]
    tensor_scale: Array | None  # f32 code of the scale of the tensor; None: the contract has none


@dataclass(frozen=True)
class QuantizerContract:
    """A library's way of quantising: a frozen value that hashes, and computes the library's words.

    Attributes:
        name: The contract's name.
        libraries: The functions that compute these words, each as "library: function".
        element: Format of the elements.
        extents: What shares a scale: "tensor", "row", or "rows x elements along K". The first is the default of `quantize`.
        scale: The rule that finds scales, with its format.
        ignores_nan: NaN takes no part in amax, as in fmaxf.
        nan_element: Code of an element that is NaN before the cast; None: NaN, or the largest element where the format has none.
        drops_zero_sign: +0 is added before the cast, so that -0 becomes +0.
        drops_sign_of_small: Elements that round to zero become +0.
        ties_to_zero: Elements in the middle of two codes of e2m1 are rounded to the smaller one, not to the even one.
        first_nearest: Elements take the first code whose difference from them, rounded to f32, is the least. A number far beyond the
            largest element, or NaN, is equally near to all codes and takes code 0.
        open_specials: The library leaves open what becomes of a block with Inf or NaN; the row's words are no claim there.
        overflows_to_nan: The cast gives NaN for elements beyond the largest one; False: it saturates.
        noise_bits: Random bits that are added to the code of amax, and, less half of their maximum, to that of each quotient before the
            cast, as integers; 0: none. They are `tl.randint(seed, number of the group, 7)` and `tl.randint(seed ^ 0x5A5A5A5A, number of the
            element, 7)` of Triton, counted in row-major order.
        only: The one format of x for which the row holds; the library computes otherwise on others, or does not take them. None: any.
        source: Where the facts were read.
        note: What else is known, or is not.
    """

    name: str
    libraries: tuple[str, ...]
    element: Format
    extents: tuple[str, ...]
    scale: FloatScale | PowerScale | TwoLevelScale | FourOverSixScale
    ignores_nan: bool = True
    nan_element: int | None = None
    drops_zero_sign: bool = False
    drops_sign_of_small: bool = False
    ties_to_zero: bool = False
    first_nearest: bool = False
    open_specials: bool = False
    overflows_to_nan: bool = False
    noise_bits: int = 0
    only: Format | None = None
    source: str = field(default="", compare=False)
    note: str = field(default="", compare=False)

    @property
    def takes_tensor_amax(self) -> bool:
        """True for scales of two levels and for delayed scaling."""
        return self.has_two_levels or (isinstance(self.scale, FloatScale) and self.scale.delayed)

    @property
    def has_two_levels(self) -> bool:
        """True for ue4m3 scales, which may stand below a scale of the tensor."""
        return isinstance(self.scale, TwoLevelScale | FourOverSixScale)

    @property
    def versions(self) -> str:
        """The releases or commits of the libraries whose code the row states, from its source."""
        return ", ".join(dict.fromkeys(VERSION.findall(self.source)))

    @property
    def family(self) -> str:
        """The elements and the scales, which words of two contracts must share to be compared."""
        return f"{self.element} with {self.scale.format} scales"

    def quantize(
        self, x: ArrayLike, *, extent: str | None = None, tensor_amax: ArrayLike | None = None, seed: int | None = None
    ) -> QuantizedGroups:
        """Quantise an array as the library does.

        Args:
            x: float32 or bfloat16 array [..., R, K]; for extents of one row also [K].
            extent: What shares a scale, one of `extents`; None: the first. Static under `jit`.
            tensor_amax: Max magnitude of the tensor, a scalar, for contracts of two levels; None: that of x, without NaN and Inf. For
                delayed scaling, the one that the history of earlier steps gives; needed there.
            seed: The library's seed, for contracts that round stochastically; needed there.

        Returns:
            The codes of the elements and of the scales.

        Raises:
            TypeError: x has another dtype.
            NotModelled: The contract is known for float32 only.
            ValueError: The extent is none of the contract's, tensor_amax or seed has no use, or the seed is missing.

        Source: the contract's `source`.
        """
        source, codes = array_codes(jnp.asarray(x))
        if source.name not in ("f32", "bf16", "f16"):
            raise TypeError(f"x: got {source}; expected float32, bfloat16 or float16, as the libraries take")
        if self.only not in (None, source):
            raise NotModelled(f"{self.name}: the rule is known for {self.only} x alone; got {source}. Source: {self.source}")
        extent = self.extents[0] if extent is None else extent
        if extent not in self.extents:
            raise ValueError(f"extent={extent!r}: {self.name} has {', '.join(self.extents)}")
        two_level = self.has_two_levels
        delayed = isinstance(self.scale, FloatScale) and self.scale.delayed
        if delayed and tensor_amax is None:
            raise ValueError(f"tensor_amax: {self.name} scales by the magnitudes of earlier steps; give the one that the history yields")
        if tensor_amax is not None and not two_level and not delayed:
            raise ValueError(f"tensor_amax: {self.name} has no scale for the whole tensor; leave it out")
        if codes.ndim < 2 and extent not in ("tensor", "row") and not extent.startswith("1 x"):
            raise ValueError(f"x: got one axis; groups of {extent} need two")
        whole = None if tensor_amax is None else array_codes(jnp.asarray(tensor_amax, jnp.float32))[1]
        return _quantize(self, source, extent, codes, whole, self._seed_words(seed, group_shape(extent)[1], codes.shape[-1]))

    def _seed_words(self, seed: int | None, depth: int | None, k: int) -> np.ndarray | None:
        """Return a checked seed as `seed_words` does, or None without noise."""
        if not self.noise_bits:
            if seed is not None:
                raise ValueError(f"seed={seed}: {self.name} rounds to nearest; leave it out")
            return None
        if seed is None:
            raise ValueError(
                f"seed: {self.name} rounds stochastically. Give the seed of the library's call; without one, the library takes "
                "torch.cuda.default_generators[device].initial_seed()"
            )
        if k % (depth or 1):
            raise ValueError(f"x: got K = {k}; the library, which numbers its random words by group, needs a multiple of {depth}")
        return seed_words(seed)


def seed_words(seed: int) -> np.ndarray:
    """Return the lower 63 bits of a seed as uint32 [2], low word first."""
    return np.array([seed & 0xFFFFFFFF, seed >> 32 & 0x7FFFFFFF], np.uint32)


def group_shape(extent: str) -> tuple[int | None, int | None]:
    """Return rows and elements along K that share a scale; None: all."""
    if extent in ("tensor", "row"):
        return (None, None) if extent == "tensor" else (1, None)
    rows, _, depth = extent.partition(" x ")
    return int(rows), int(depth)


@partial(jax.jit, static_argnums=0)
def quantize_blocks(contract: QuantizerContract, blocks: Array, tensor_amax: Array) -> QuantizedGroups:
    """Quantise blocks [..., block] that share a scale each: f32 codes. tensor_amax: of the tensor of each block, f32 codes [..., 1].

    The seed of stochastic rounding is 0.
    """
    magnitude = blocks & ~SIGN
    seen = jnp.where(magnitude > INFINITY, ZERO, magnitude) if contract.ignores_nan else magnitude
    amax = jnp.max(seen, axis=-1, keepdims=True)
    if isinstance(contract.scale, FourOverSixScale):
        scales, elements = contract.scale.quantize_blocks(blocks, amax, contract.element, tensor_amax)
        return QuantizedGroups(elements, scales, contract.scale.tensor_scale(tensor_amax))
    key = seed_words(0)
    scales, factor = contract.scale.scale_groups(_add_noise(contract, amax, key), contract.element, F32, tensor_amax)
    elements = round_elements(contract, blocks, factor._replace(code=jnp.broadcast_to(factor.code, blocks.shape)), key)
    return QuantizedGroups(elements, scales, _stored_tensor_scale(contract, tensor_amax))


def _stored_tensor_scale(contract: QuantizerContract, tensor_amax: Array | None) -> Array | None:
    if tensor_amax is None or not isinstance(contract.scale, TwoLevelScale | FourOverSixScale):
        return None
    return contract.scale.tensor_scale(tensor_amax)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _quantize(
    contract: QuantizerContract, source: Format, extent: str, codes: Array, whole: Array | None, key: Array | None
) -> QuantizedGroups:
    shape, wide = codes.shape, convert(source, F32, codes) if source != F32 else codes
    wide = wide.reshape(1, -1) if wide.ndim == 1 else wide
    magnitude = wide & ~SIGN
    finite = jnp.where(magnitude >= INFINITY, ZERO, magnitude)
    seen = jnp.where(magnitude > INFINITY, ZERO, magnitude) if contract.ignores_nan else magnitude
    rows, depth = group_shape(extent)
    amax = _group_max(_group_max(seen, rows, -2), depth, -1)
    if extent == "tensor":
        amax = jnp.max(amax, initial=0).reshape((1,) * wide.ndim)
    tensor = whole
    if contract.has_two_levels:
        tensor = jnp.max(finite, initial=0) if whole is None else whole & ~SIGN
    if isinstance(contract.scale, FourOverSixScale):
        assert depth is not None and tensor is not None
        scales, blocks = contract.scale.quantize_blocks(split_groups(wide, depth, -1), amax[..., None], contract.element, tensor)
        elements = join_groups(blocks, wide.shape[-1], -1)
        return QuantizedGroups(elements.reshape(shape), scales[..., 0], contract.scale.tensor_scale(tensor))
    scales, factor = contract.scale.scale_groups(_add_noise(contract, amax, key), contract.element, source, tensor)
    spread = broadcast_scales(factor.code, wide.shape, (rows, depth))
    elements = round_elements(contract, wide, factor._replace(code=spread), key)
    return QuantizedGroups(elements.reshape(shape), scales, _stored_tensor_scale(contract, tensor))


def _group_max(x: Array, size: int | None, axis: int) -> Array:
    if size == 1:
        return x
    if size is None:
        return jnp.max(x, axis=axis, keepdims=True, initial=0)
    return jnp.moveaxis(jnp.max(split_groups(x, size, axis), axis=-1, initial=0), -1, axis)


def _draw_noise(contract: QuantizerContract, key: Array, shape: tuple[int, ...]) -> Array:
    """Return the random bits of groups or elements, uint32, which are numbered in row-major order."""
    numbers = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    return triton_randint(key, numbers, NOISE_ROUNDS) & np.uint32((1 << contract.noise_bits) - 1)


def _add_noise(contract: QuantizerContract, amax: Array, key: ArrayLike | None) -> Array:
    """Return amax with the random bits of its group, where the contract has any."""
    if not contract.noise_bits or key is None:
        return amax
    assert isinstance(contract.scale, PowerScale)
    nonzero = jnp.where(amax == 0, f32_code(contract.scale.zero_amax), amax)
    return nonzero + _draw_noise(contract, jnp.asarray(key), amax.shape)


def round_elements(contract: QuantizerContract, x: Array, factor: Factor, key: ArrayLike | None = None) -> Array:
    """Return the codes of f32 numbers, scaled by factors of their shape and rounded to the contract's elements.

    key: the seed of stochastic rounding, as `seed_words` gives it.
    """
    scaled = factor.apply(x)
    if contract.noise_bits and key is not None:
        noise = _draw_noise(contract, jnp.asarray(key) ^ np.array([ELEMENT_SEED, 0], np.uint32), x.shape)
        scaled = scaled + noise - np.uint32((1 << contract.noise_bits) - 1 >> 1)  # wraps, as the library's integers do
    return _cast(contract, scaled)


@compile_once(0)
def _cast(contract: QuantizerContract, scaled: Array) -> Array:
    element = contract.element
    if contract.drops_zero_sign:
        scaled = jnp.where(scaled == SIGN, ZERO, scaled)
    if contract.first_nearest:
        return _first_nearest(element, scaled)
    if contract.ties_to_zero:
        upward = jnp.isin(scaled & ~SIGN, np.array([f32_code(0.75), f32_code(1.75), f32_code(3.5)]))  # ties that go to the larger code
        scaled = scaled - upward.astype(jnp.uint32)
    magnitude = scaled & ~SIGN
    if isinstance(contract.scale, FloatScale) and contract.scale.largest:
        limit = f32_code(contract.scale.largest)
        scaled = jnp.where((magnitude > limit) & (magnitude <= INFINITY), (scaled & SIGN) | limit, scaled)
    codes = convert(F32, element, scaled, saturate=not contract.overflows_to_nan)
    if contract.drops_sign_of_small:
        codes = jnp.where(codes == element.negative_zero, 0, codes)
    if contract.nan_element is not None:
        codes = jnp.where(magnitude > INFINITY, contract.nan_element, codes)
    return codes.astype(element.dtype)


def _first_nearest(element: Format, scaled: Array) -> Array:
    values = convert(element, F32, jnp.arange(1 << element.bits).astype(element.dtype))
    return jnp.argmin(add(scaled[..., None], values ^ SIGN, F32) & ~SIGN, axis=-1).astype(element.dtype)


def dequantize_groups(contract: QuantizerContract, words: QuantizedGroups, extent: str | None = None) -> Array:
    """Return the values of a quantised array in float32: element * scale * tensor scale, each product rounded to f32."""
    sizes = group_shape(contract.extents[0] if extent is None else extent)
    values = convert(contract.element, F32, words.codes)
    scales = words.scales if contract.scale.format == F32 else convert(contract.scale.format, F32, words.scales)
    values = multiply(values, broadcast_scales(scales, values.shape, sizes), F32)
    if words.tensor_scale is not None:
        values = multiply(values, words.tensor_scale, F32)
    return lax.bitcast_convert_type(values, jnp.float32)
