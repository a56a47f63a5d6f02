"""How the scales of block formats come from the numbers in a block: `RULES`, one row a rule, as published code computes them.

Where that code is f32 arithmetic, each operation is rounded to nearest even as IEEE 754 has it, subnormals kept. It is done on integers, so
that CPU and GPU give the same words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu import bits
from tcemu.arithmetic.backends import by_platform
from tcemu.arithmetic.kernels import elementwise
from tcemu.arithmetic.quotient import divide, multiply
from tcemu.bits import Limbs
from tcemu.formats import E4M3, F32, UE4M3, UE8M0, Format, convert, decode, encode


def _f32(value: float) -> np.uint32:
    return np.float32(value).view(np.uint32)


def largest_value(fmt: Format) -> np.uint32:
    """The largest finite value of a format narrower than f32, as an f32 code."""
    field, fraction = divmod(fmt.greatest_magnitude, 1 << fmt.mantissa_bits)
    return _f32((1 + fraction / (1 << fmt.mantissa_bits)) * 2.0 ** (field - fmt.bias))


# ---- scales that are powers of two: the exponent, from a block's largest magnitude


def _leading(amax: Limbs, arithmetic: Format) -> tuple[Array, Array]:
    """The exponent of the leading one, and the bits that follow it, from bit 31 down; the last is set also where a lower bit was.

    Of a subnormal number these are its fields, which say less than 2^-126: then the scale is 2^-127 by every rule that takes them.
    """
    kept = arithmetic.mantissa_bits % bits.WORD  # bits of the fraction in the upper limb
    fraction = amax[-1] << (bits.WORD - kept)
    if len(amax) == 2:
        fraction = fraction | amax[0] >> kept | (amax[0] << (bits.WORD - kept) != 0)
    return (amax[-1] >> kept).astype(jnp.int32) - arithmetic.bias, fraction


def _floor(amax: Limbs, arithmetic: Format, element: Format) -> Array:
    return _leading(amax, arithmetic)[0] - element.greatest_exponent


def _ceil(amax: Limbs, arithmetic: Format, element: Format) -> Array:
    exponent, fraction = _leading(amax, arithmetic)
    return exponent + (fraction != 0) - element.greatest_exponent


def _even(amax: Limbs, arithmetic: Format, element: Format) -> Array:
    exponent, fraction = _leading(amax, arithmetic)
    rounded_bits = element.mantissa_bits + 1  # all ones: half up reaches the next power of two
    return exponent + (fraction >> (bits.WORD - rounded_bits) == (1 << rounded_bits) - 1) - element.greatest_exponent


def _rceil(amax: Limbs, arithmetic: Format, element: Format) -> Array:
    ratio = divide(amax[0], largest_value(element), arithmetic)
    exponent, fraction = _leading((ratio,), arithmetic)
    least = ratio <= 1 << (F32.mantissa_bits - 1)  # at most 2^-127, which is subnormal
    return jnp.where(least, UE8M0.least_exponent, exponent + (fraction != 0))


# ---- scales of two levels, after the code of NVIDIA and PyTorch: all values are f32 codes without sign, but for the scales


class TwoLevelScaling(NamedTuple):
    """How a tensor's and its blocks' scales are found, and what is done to x before it is rounded to the element."""

    tensor: Callable[[Array], tuple[Array, ...]]  # the tensor's largest magnitude -> its scale, and what its blocks need besides
    block: Callable[..., tuple[Array, Array]]  # (a block's largest magnitude, *tensor(...)) -> its scale, ue4m3; what `apply` takes
    apply: Callable[[Array, Array, Format], Array]  # multiply or divide: (x, what `block` gave, F32)


SIX, SIXTH = _f32(6), _f32(1 / 6)
WHOLE_RANGE = _f32(6 * 448)  # the largest element times the largest scale
ONE, GREATEST = _f32(1), _f32(float(np.finfo(np.float32).max))


def _ue4m3(x: Array) -> Array:
    """Of f32 codes without sign; a kernel may take them for e4m3, whose codes without sign are the same."""
    portable = lambda x: encode(UE4M3, decode(F32, x), overflow="saturate")  # noqa: E731
    return by_platform(elementwise.programs(partial(elementwise.narrowed, E4M3), x), portable, x)


def _inverse_tensor(amax: Array) -> tuple[Array, ...]:
    encode_scale = jnp.minimum(divide(WHOLE_RANGE, amax, F32), GREATEST)
    encode_scale = jnp.where((amax == 0) | (encode_scale == 0), ONE, encode_scale)
    return divide(ONE, encode_scale, F32), multiply(encode_scale, SIXTH, F32)


def _inverse_block(amax: Array, tensor_scale: Array, multiplier: Array) -> tuple[Array, Array]:
    scale = _ue4m3(multiply(amax, multiplier, F32))
    inverse = divide(ONE, multiply(convert(UE4M3, F32, scale), tensor_scale, F32), F32)
    return scale, jnp.minimum(inverse, GREATEST)


def _plain_tensor(amax: Array) -> tuple[Array, ...]:
    return (divide(amax, WHOLE_RANGE, F32),)


def _modelopt_block(amax: Array, tensor_scale: Array) -> tuple[Array, Array]:
    ratio = divide(amax, multiply(SIX, tensor_scale, F32), F32)
    scale = _ue4m3(jnp.maximum(jnp.where(ratio == 0, ONE, ratio), _f32(2**-9)))
    return scale, multiply(convert(UE4M3, F32, scale), tensor_scale, F32)


def _torchao_block(amax: Array, tensor_scale: Array) -> tuple[Array, Array]:
    scale = _ue4m3(jnp.maximum(divide(divide(amax, SIX, F32), tensor_scale, F32), _f32(2**-6)))
    return scale, multiply(tensor_scale, convert(UE4M3, F32, scale), F32)


# ---- the table


@dataclass(frozen=True)
class Rule:
    """How the scales of blocks come from the numbers in them."""

    scale: Format
    # of a ue8m0 scale: (block's largest magnitude, a code in limbs; its format, F32 or F64; element format) -> int32
    exponent: Callable[[Limbs, Format, Format], Array] | None = None
    two_level: TwoLevelScaling | None = None  # for a ue4m3 scale and one of the tensor
    in_f32: bool = True  # the rule is f32 arithmetic: a float64 x is rounded to f32 first
    source: str = ""


def _two_level(tensor: Callable, block: Callable, apply: Callable, source: str) -> Rule:
    return Rule(UE4M3, two_level=TwoLevelScaling(tensor=tensor, block=block, apply=apply), source=source)


RULES = {
    "floor": Rule(UE8M0, _floor, in_f32=False, source="2^floor(log2 amax) / 2^emax: OCP MX 1.0, 6.3; torchao mx_tensor.py FLOOR"),
    "ceil": Rule(UE8M0, _ceil, in_f32=False, source="2^ceil(log2 amax) / 2^emax: torchao 050515e, mx_tensor.py CEIL"),
    "even": Rule(
        UE8M0, _even, in_f32=False, source="floor of amax rounded half up to the element's bits: torchao 050515e, mx_tensor.py EVEN"
    ),
    "rceil": Rule(
        UE8M0,
        _rceil,
        source="amax / largest element in f32, rounded up: TransformerEngine float_to_e8m0, cvt.rp.satfinite.ue8m0x2.f32; torchao RCEIL",
    ),
    "transformer_engine": _two_level(
        _inverse_tensor,
        _inverse_block,
        multiply,
        "arXiv 2509.25149; TransformerEngine 1a4d3b0, custom_recipes/quantization_nvfp4.py; 0718c01, cast/nvfp4/core_nvfp4.cuh",
    ),
    "modelopt": _two_level(_plain_tensor, _modelopt_block, divide, "Model-Optimizer 211c6b3, qtensor/nvfp4_tensor.py, the dynamic path"),
    "torchao": _two_level(_plain_tensor, _torchao_block, divide, "torchao 02a1bc4, mx_formats/nvfp4_tensor.py, with a scale per tensor"),
}
