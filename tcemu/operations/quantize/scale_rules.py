"""`RULES` for the scales of block formats, one row per rule, as published code computes them from the numbers of a block.

Where that code is f32 arithmetic, each operation is rounded to nearest even as in IEEE 754, with subnormals kept. It is done on integers,
so that CPU and GPU give the same words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.base import bits
from tcemu.base.bits import Limbs
from tcemu.base.compilation import call_kernel_by_platform
from tcemu.engine.backends import elementwise
from tcemu.engine.backends.quotients import divide, multiply
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import E4M3, F32, UE4M3, UE8M0, Format
from tcemu.operations.quantize.scale_factors import MAX_F32, ONE, f32_code


def max_finite_code(fmt: Format) -> np.uint32:
    """Returns the largest finite value of a format narrower than f32, an f32 code."""
    field, fraction = divmod(fmt.max_magnitude, 1 << fmt.mantissa_bits)
    return f32_code((1 + fraction / (1 << fmt.mantissa_bits)) * 2.0 ** (field - fmt.bias))


# ---- scales that are powers of two: the exponent, from a block's largest magnitude


def _leading_exponent(amax: Limbs, arithmetic: Format) -> tuple[Array, Array]:
    """Returns the exponent of the leading one and the bits below it, from bit 31 down; the last bit is sticky.

    For a subnormal number these are its fields, which mean less than 2^-126: the scale is then 2^-127 by every rule that uses them.
    """
    kept = arithmetic.mantissa_bits % bits.LIMB_BITS  # bits of the fraction in the upper limb
    fraction = amax[-1] << (bits.LIMB_BITS - kept)
    if len(amax) == 2:
        fraction = fraction | amax[0] >> kept | (amax[0] << (bits.LIMB_BITS - kept) != 0)
    return (amax[-1] >> kept).astype(jnp.int32) - arithmetic.bias, fraction


def _floor(amax: Limbs, arithmetic: Format, element: Format) -> Array:
    return _leading_exponent(amax, arithmetic)[0] - element.max_exponent


def _ceil(amax: Limbs, arithmetic: Format, element: Format) -> Array:
    exponent, fraction = _leading_exponent(amax, arithmetic)
    return exponent + (fraction != 0) - element.max_exponent


def _even(amax: Limbs, arithmetic: Format, element: Format) -> Array:
    exponent, fraction = _leading_exponent(amax, arithmetic)
    rounded_bits = element.mantissa_bits + 1  # all ones: half up reaches the next power of two
    return exponent + (fraction >> (bits.LIMB_BITS - rounded_bits) == (1 << rounded_bits) - 1) - element.max_exponent


def _rceil(amax: Limbs, arithmetic: Format, element: Format) -> Array:
    ratio = divide(amax[0], max_finite_code(element), arithmetic)
    exponent, fraction = _leading_exponent((ratio,), arithmetic)
    least = ratio <= 1 << (F32.mantissa_bits - 1)  # at most 2^-127, which is subnormal
    return jnp.where(least, UE8M0.min_exponent, exponent + (fraction != 0))


# ---- scales of two levels, after the code of NVIDIA and PyTorch: all values except scales are f32 codes without sign


class TwoLevelScaling(NamedTuple):
    """The computation of a tensor's and its blocks' scales, and of x before it is rounded to the element."""

    tensor: Callable[[Array], tuple[Array, ...]]  # the tensor's max magnitude -> its scale, and further arguments of `block`
    block: Callable[..., tuple[Array, Array]]  # (a block's max magnitude, *tensor(...)) -> its scale, ue4m3; the argument of `apply`
    apply: Callable[[Array, Array, Format], Array]  # multiply or divide: (x, second result of `block`, F32)


SIX, SIXTH = f32_code(6), f32_code(1 / 6)
NVFP4_RANGE = f32_code(6 * 448)  # the largest element times the largest scale


def _encode_ue4m3(x: Array) -> Array:
    """Rounds f32 codes without sign to ue4m3. A kernel may use e4m3, whose codes without sign are the same."""
    portable = lambda x: convert(F32, UE4M3, x, saturate=True)
    return call_kernel_by_platform(elementwise.kernel_programs(partial(elementwise.narrow, E4M3), x), portable, x)


def _multiply_to_ue4m3(x: Array, y: Array) -> Array:
    """Rounds the f32 product of codes without sign to ue4m3."""
    portable = lambda x, y: _encode_ue4m3(multiply(x, y, F32))
    by_kernel = partial(elementwise.multiply_codes, F32, E4M3)
    return call_kernel_by_platform(elementwise.kernel_programs(by_kernel, x, y, of_scales=True), portable, x, y)


def _multiply_ue4m3(scale: Array, y: Array) -> Array:
    """Computes the f32 product of a code of ue4m3 and an f32 code."""
    portable = lambda scale, y: multiply(convert(UE4M3, F32, scale), y, F32)
    by_kernel = partial(elementwise.multiply_codes, E4M3, F32)
    return call_kernel_by_platform(elementwise.kernel_programs(by_kernel, scale, y, of_scales=True), portable, scale, y)


def encode_scale(largest: np.uint32, amax: Array) -> Array:
    """Returns the factor that brings a tensor's max magnitude to `largest`, finite, and 1 where there is none; f32 codes."""
    scale = jnp.minimum(divide(largest, amax, F32), MAX_F32)
    return jnp.where((amax == 0) | (scale == 0), ONE, scale)


def _inverse_tensor(amax: Array) -> tuple[Array, ...]:
    scale = encode_scale(NVFP4_RANGE, amax)
    return divide(ONE, scale, F32), multiply(scale, SIXTH, F32)


def _inverse_block(amax: Array, tensor_scale: Array, multiplier: Array) -> tuple[Array, Array]:
    scale = _multiply_to_ue4m3(amax, multiplier)
    inverse = divide(ONE, _multiply_ue4m3(scale, tensor_scale), F32)
    return scale, jnp.minimum(inverse, MAX_F32)


def decode_tensor(amax: Array) -> tuple[Array, ...]:
    """Returns the scale that brings the largest product of element and scale to a tensor's max magnitude."""
    return (divide(amax, NVFP4_RANGE, F32),)


def _modelopt_block(amax: Array, tensor_scale: Array) -> tuple[Array, Array]:
    ratio = divide(amax, multiply(SIX, tensor_scale, F32), F32)
    scale = _encode_ue4m3(jnp.maximum(jnp.where(ratio == 0, ONE, ratio), f32_code(2**-9)))
    return scale, _multiply_ue4m3(scale, tensor_scale)


def _torchao_block(amax: Array, tensor_scale: Array) -> tuple[Array, Array]:
    scale = _encode_ue4m3(jnp.maximum(divide(divide(amax, SIX, F32), tensor_scale, F32), f32_code(2**-6)))
    return scale, _multiply_ue4m3(scale, tensor_scale)


# ---- the table


@dataclass(frozen=True)
class ScaleRule:
    """The computation of block scales from the numbers of a block."""

    scale: Format
    # ue8m0: (block's max magnitude, a code in limbs; its format, F32 or F64; element format) -> exponent, int32
    exponent: Callable[[Limbs, Format, Format], Array] | None = None
    two_level: TwoLevelScaling | None = None  # ue4m3, with a scale of the tensor
    in_f32: bool = True  # the rule is f32 arithmetic; a float64 x is rounded to f32 first
    source: str = ""

    def require_exponent(self) -> Callable[[Limbs, Format, Format], Array]:
        """Return the computation of the exponents of scales that are powers of two.

        Raises:
            ValueError: The scales are no powers of two.
        """
        if self.exponent is None:
            raise ValueError(f"the scales of this rule are {self.scale}, no powers of two; source: {self.source}")
        return self.exponent

    def require_two_level(self) -> TwoLevelScaling:
        """Return the computation of the scales of a tensor and of its blocks.

        Raises:
            ValueError: The rule has no scale of the tensor.
        """
        if self.two_level is None:
            raise ValueError(f"this rule has no scale of the tensor; source: {self.source}")
        return self.two_level


def _two_level_rule(tensor: Callable, block: Callable, apply: Callable, source: str) -> ScaleRule:
    return ScaleRule(UE4M3, two_level=TwoLevelScaling(tensor=tensor, block=block, apply=apply), source=source)


RULES = {
    "floor": ScaleRule(UE8M0, _floor, in_f32=False, source="2^floor(log2 amax) / 2^emax: OCP MX 1.0, 6.3; torchao mx_tensor.py FLOOR"),
    "ceil": ScaleRule(UE8M0, _ceil, in_f32=False, source="2^ceil(log2 amax) / 2^emax: torchao 050515e, mx_tensor.py CEIL"),
    "even": ScaleRule(UE8M0, _even, in_f32=False,
        source="floor of amax rounded half up to the element's bits: torchao 050515e, mx_tensor.py EVEN"),
    "rceil": ScaleRule(UE8M0, _rceil,
        source="amax / largest element in f32, rounded up by cvt.rp.satfinite.ue8m0x2.f32: torchao RCEIL, compiled; TransformerEngine's "
        "product by 1 / largest has the same power of two, but for subnormal numbers"),
    "transformer_engine": _two_level_rule(_inverse_tensor, _inverse_block, multiply,
        "arXiv 2509.25149; TransformerEngine 1a4d3b0, custom_recipes/quantization_nvfp4.py; 0718c01, cast/nvfp4/core_nvfp4.cuh"),
    "modelopt": _two_level_rule(decode_tensor, _modelopt_block, divide,
        "Model-Optimizer 211c6b3, qtensor/nvfp4_tensor.py, the dynamic path"),
    "torchao": _two_level_rule(decode_tensor, _torchao_block, divide,
        "torchao 02a1bc4, mx_formats/nvfp4_tensor.py, with a scale per tensor"),
}  # fmt: skip
