"""ue4m3 scales of blocks below an f32 scale of the tensor: NVFP4 as libraries compute it, and the rule that tries two scales a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.engine.arithmetic.fma import add
from tcemu.engine.arithmetic.special_functions import multiply_f32, rcp
from tcemu.engine.backends.quotients import divide, multiply
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import F16, F32, UE4M3, Format
from tcemu.operations.quantize.scale_factors import INFINITY, MAX_F32, MIN_NORMAL, ONE, SIGN, ZERO, Factor, f32_code
from tcemu.operations.quantize.scale_rules import NVFP4_RANGE, RULES, SIX, SIXTH, decode_tensor, encode_scale


@dataclass(frozen=True)
class TwoLevelScale:
    """ue4m3 scales of blocks below an f32 scale of the tensor.

    Attributes:
        name: One of `TWO_LEVELS`.
    """

    name: str
    format: Format = UE4M3

    def describe(self) -> str:
        """Return the rule in words."""
        return self.steps.text

    @property
    def steps(self) -> TwoLevelSteps:
        """The computation."""
        return TWO_LEVELS[self.name]

    @property
    def has_tensor_scale(self) -> bool:
        """True if the blocks' scales stand below one of the tensor."""
        return self.steps.tensor is not _unit_tensor

    def tensor_scale(self, tensor_amax: Array) -> Array | None:
        """Return the stored scale of the tensor, an f32 code; None where there is none."""
        return self.steps.tensor(tensor_amax)[0] if self.has_tensor_scale else None

    def scale_groups(self, amax: Array, element: Format, source: Format, tensor_amax: Array | None) -> tuple[Array, Factor]:
        """Return the stored scales and the factors of groups. amax: f32 codes without sign."""
        assert tensor_amax is not None
        return self.steps.block(amax, *self.steps.tensor(tensor_amax))


class TwoLevelSteps(NamedTuple):
    """The computation of a tensor's and its blocks' scales."""

    tensor: Callable[[Array], tuple[Array, ...]]  # the tensor's max magnitude -> its stored scale, and further arguments of `block`
    block: Callable[..., tuple[Array, Factor]]  # (a block's max magnitude, *tensor(...)) -> its scale, ue4m3; the factor
    text: str = ""


def _steps_of_rule(name: str, text: str) -> TwoLevelSteps:
    """Returns the steps of a rule of `RULES`."""
    rule = RULES[name].require_two_level()

    def block(amax: Array, *tensor: Array) -> tuple[Array, Factor]:
        scale, scaler = rule.block(amax, *tensor)
        return scale, Factor(scaler, rule.apply is divide)

    return TwoLevelSteps(rule.tensor, block, text)


def _ue4m3(x: Array) -> tuple[Array, Array]:
    """Returns the code and the value of a scale, rounded to nearest and saturated; a NaN is NaN."""
    code = convert(F32, UE4M3, x, saturate=True)
    return code, convert(UE4M3, F32, code)


def _clamp(x: Array, low: float, high: float = 448.0) -> Array:
    return jnp.where(x > INFINITY, x, jnp.clip(x, f32_code(low), f32_code(high)))


def _encode_tensor(amax: Array, least: np.uint32 = ZERO) -> tuple[Array, ...]:
    encode = divide(NVFP4_RANGE, jnp.maximum(amax, least), F32)
    return divide(ONE, encode, F32), encode


def _torchao_block(amax: Array, tensor: Array) -> tuple[Array, Factor]:
    code, value = _ue4m3(_clamp(divide(divide(amax, SIX, F32), tensor, F32), 2.0**-6))
    return code, Factor(divide(divide(ONE, tensor, F32), value, F32), False)


def _approximate_block(flush: bool, guard: str, amax: Array, tensor: Array, encode: Array) -> tuple[Array, Factor]:
    """Returns the scale and the factor. guard: what is 0 where the factor is: "amax", "exact" s, or "rounded" s."""
    product = partial(multiply_f32, flush=flush)
    sixth = rcp(jnp.asarray(SIX), True)
    exact = product(encode, product(amax, sixth))
    code, value = _ue4m3(exact)
    factor = rcp(product(value, rcp(encode, True)), True)
    seen = {"amax": amax, "exact": exact, "rounded": value}[guard]
    none = (seen >> F32.mantissa_bits == 0) if flush else seen == 0
    return code, Factor(jnp.where(none, ZERO, factor), False, flush=flush)


def _te_exact_block(amax: Array, tensor: Array, encode: Array) -> tuple[Array, Factor]:
    product = partial(multiply_f32, flush=True)
    none = amax >> F32.mantissa_bits == 0
    code, value = _ue4m3(jnp.where(none, ZERO, product(amax, product(encode, jnp.asarray(SIXTH)))))
    factor = divide(ONE, product(value, divide(ONE, encode, F32)), F32)
    return code, Factor(jnp.where(none, ZERO, factor), False, flush=True)


def _mslk_block(precise: bool, amax: Array, tensor: Array, encode: Array) -> tuple[Array, Factor]:
    sixth = divide(amax, SIX, F32) if precise else multiply(amax, SIXTH, F32)
    code, value = _ue4m3(_clamp(multiply(sixth, encode, F32), 2.0**-16))
    return code, Factor(divide(encode, value, F32), False)


def _compressed_tensors_block(amax: Array, tensor: Array, encode: Array) -> tuple[Array, Factor]:
    code, value = _ue4m3(multiply(encode, divide(amax, SIX, F32), F32))
    eighth = convert(F32, UE4M3, jnp.asarray(f32_code(0.125)))
    code, value = jnp.where(value == 0, eighth, code), jnp.where(value == 0, f32_code(0.125), value)
    return code, Factor(divide(value, encode, F32), True)


def _single_level_block(amax: Array, tensor: Array, *, divides: bool = False, clamps: bool = False) -> tuple[Array, Factor]:
    sixth = divide(amax, SIX, F32)
    code, value = _ue4m3(_clamp(sixth, 2.0**-6) if clamps else sixth)
    return code, Factor(value, True) if divides else Factor(divide(ONE, value, F32), False)


def _unit_tensor(amax: Array) -> tuple[Array, ...]:
    return (jnp.full_like(amax, ONE),)


TWO_LEVELS = {
    "transformer_engine": _steps_of_rule("transformer_engine",
        "g = 2688 / amax; s = block amax * (g * (1 / 6)); x * min(1 / (s * (1 / g)), largest f32)"),
    "modelopt": _steps_of_rule("modelopt", "t = amax / 2688; s = max(block amax / (6 * t), 2^-9), 1 for block amax 0; x / (s * t)"),
    "torchao": _steps_of_rule("torchao", "t = amax / 2688; s = max((block amax / 6) / t, 2^-6); x / (t * s)"),
    "torchao 0.18": TwoLevelSteps(decode_tensor, _torchao_block,
        "t = amax / 2688; s = clamp((block amax / 6) / t, 2^-6, 448); x * ((1 / t) / s)"),
    "one level, division": TwoLevelSteps(_unit_tensor, partial(_single_level_block, divides=True), "s = block amax / 6; x / s"),
    "one level, reciprocal": TwoLevelSteps(_unit_tensor, _single_level_block, "s = block amax / 6; x * (1 / s)"),
    "one level": TwoLevelSteps(_unit_tensor, partial(_single_level_block, clamps=True),
        "s = clamp(block amax / 6, 2^-6, 448); x * (1 / s)"),
    "rcp.approx, fast math": TwoLevelSteps(_encode_tensor, partial(_approximate_block, True, "amax"),
        "g = 2688 / amax; s = g * (block amax * rcp(6)); x * rcp(s * rcp(g)), 0 for block amax 0; all .ftz"),
    "rcp.approx": TwoLevelSteps(_encode_tensor, partial(_approximate_block, False, "rounded"),
        "g = 2688 / amax; s = g * (block amax * rcp(6)); x * rcp(s * rcp(g)), 0 for s = 0"),
    "rcp.approx, guard before rounding": TwoLevelSteps(_encode_tensor, partial(_approximate_block, False, "exact"),
        "g = 2688 / amax; s = g * (block amax * rcp(6)); x * rcp(s * rcp(g)), 0 for s = 0 before it is rounded"),
    "exact, fast math": TwoLevelSteps(_encode_tensor, _te_exact_block,
        "g = 2688 / amax; s = block amax * (g * (1 / 6)); x * (1 / (s * (1 / g))), 0 for block amax 0; products .ftz"),
    "mslk": TwoLevelSteps(_encode_tensor, partial(_mslk_block, True),
        "g = 2688 / amax; s = clamp((block amax / 6) * g, 2^-16, 448); x * (g / s)"),
    "mslk, reciprocals": TwoLevelSteps(_encode_tensor, partial(_mslk_block, False),
        "g = 2688 / amax; s = clamp(block amax * (1 / 6) * g, 2^-16, 448); x * (g / s)"),
    "compressed-tensors": TwoLevelSteps(partial(_encode_tensor, least=MIN_NORMAL), _compressed_tensors_block,
        "g = 2688 / max(amax, 2^-126); s = g * (block amax / 6), 0.125 for s = 0; x / (s / g)"),
}  # fmt: skip


# ---- two scales that are tried for each block

ERRORS = {  # what is subtracted from what, by the words that tables show; q are elements, s is the scale of a block
    "amax": "q * s * amax / (6 * max) - x",
    "tensor scale": "q * s * (1 / g) - x",
    "f16": "q * s in f16 - x * g",
}


@dataclass(frozen=True)
class FourOverSixScale:
    """NVFP4 with the rule "four over six": each block takes the scale that maps its max magnitude to 6, or 1.5 of it, which maps it to 4.

    Both candidates are rounded. The one with the smaller error is taken, and in a tie the one that maps to 6.

    Attributes:
        error: The error of an element, one of `ERRORS`.
        squared: Squares of the errors are added in ascending order; False: their magnitudes.
        largest: The largest scale that g aims at, 448 or 256.

    Source: arXiv 2512.02010; TransformerEngine, common/cast/nvfp4/quantize_4over6_nvfp4.cuh.
    """

    error: str
    squared: bool
    largest: int = 448
    format: Format = UE4M3

    def __post_init__(self) -> None:
        assert self.error in ERRORS and self.largest in (448, 256)

    @property
    def has_tensor_scale(self) -> bool:
        """True: the blocks' scales stand below one of the tensor."""
        return True

    def describe(self) -> str:
        """Return the rule in words."""
        total = "sum of squares" if self.squared else "sum of magnitudes"
        return (
            f"g = {6 * self.largest} / amax; s = (block amax / 6) * g, or 1.5 of it where the {total} of {ERRORS[self.error]} is smaller, "
            "at most 448; x * min(1 / (s * (1 / g)), largest f32)"
        )

    def tensor_scale(self, tensor_amax: Array) -> Array:
        """Return the stored scale of the tensor, an f32 code."""
        return divide(ONE, encode_scale(f32_code(6 * self.largest), tensor_amax), F32)

    def quantize_blocks(self, x: Array, amax: Array, element: Format, tensor_amax: Array) -> tuple[Array, Array]:
        """Quantise blocks.

        Args:
            x: f32 codes [..., block].
            amax: Max magnitudes of the blocks, f32 codes without sign [..., 1].
            element: Format of the elements.
            tensor_amax: Max magnitude of the tensor, an f32 code that broadcasts against `amax`.

        Returns:
            The scales, ue4m3 codes [..., 1], and the elements' codes [..., block].
        """
        encode = encode_scale(f32_code(6 * self.largest), tensor_amax)
        base = multiply(divide(amax, SIX, F32), encode, F32)
        candidates = []
        for factor in (1.5, 1.0):
            limited = jnp.minimum(multiply(base, f32_code(factor), F32), f32_code(448))  # drops NaN, as fminf does
            scale, value = _ue4m3(limited)
            inverse = divide(ONE, multiply(value, divide(ONE, encode, F32), F32), F32)
            codes = convert(F32, element, multiply(x, jnp.minimum(inverse, MAX_F32), F32), saturate=True)
            candidates.append((scale, codes, self._total_error(convert(element, F32, codes), x, value, encode, tensor_amax)))
        (scale, codes, four), (other_scale, other_codes, six) = candidates
        smaller = (four < six) & (six <= INFINITY)  # codes without sign; a NaN is neither smaller nor larger
        return jnp.where(smaller, scale, other_scale), jnp.where(smaller, codes, other_codes)

    def _total_error(self, q: Array, x: Array, scale: Array, encode: Array, tensor_amax: Array) -> Array:
        """Return the sum over a block, an f32 code without sign [..., 1]."""
        if self.error == "f16":
            found = convert(F16, F32, convert(F32, F16, multiply(q, scale, F32)))  # 2 and 4 bits: f32 and f16 represent the product
            wanted = multiply(x, encode, F32)
        else:
            found, wanted = multiply(q, scale, F32), x
            if self.error == "amax":
                found = divide(multiply(found, tensor_amax, F32), f32_code(6 * self.largest), F32)
            else:
                found = multiply(found, divide(ONE, encode, F32), F32)
        difference = add(found, wanted ^ SIGN, F32)
        errors = multiply(difference, difference, F32) if self.squared else difference & ~SIGN
        start = jnp.zeros_like(errors[..., 0])
        total, _ = lax.scan(lambda total, error: (add(total, error, F32), None), start, jnp.moveaxis(errors, -1, 0))
        return total[..., None]
