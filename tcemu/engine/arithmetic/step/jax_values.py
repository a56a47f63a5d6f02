"""Lane values as JAX arrays, on any device. Integers of 64 bits are two words, so that no x64 mode is needed.

Only operations that are exact on every device are here, whether or not it flushes subnormals or contracts multiply-adds: a formula that
JAX computes may not use "fma" or "div", nor a subnormal f32.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.base import bits
from tcemu.base.bits import Limbs
from tcemu.engine.arithmetic.step.rounding import signed_truncated_float, truncated_float
from tcemu.engine.arithmetic.step.values import BOOL, F32, I32, I64, Lane, Value

DTYPES = {BOOL: jnp.bool_, I32: jnp.int32, F32: jnp.float32}
INTEGRAL = {"RN": lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), "RM": jnp.floor, "RP": jnp.ceil}


def _logical(x: Any, y: Any) -> Array:
    return lax.shift_right_logical(*jnp.broadcast_arrays(x, y))


WORDS = {  # operations on single arrays
    "add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "and": jnp.bitwise_and, "or": jnp.bitwise_or, "xor": jnp.bitwise_xor,
    "shl": jnp.left_shift, "lshr": _logical, "ashr": jnp.right_shift, "eq": jnp.equal, "lt": jnp.less, "le": jnp.less_equal,
    "ne": lambda x, y: (x < y) | (x > y), "max": jnp.maximum, "min": jnp.minimum,
    "bits": lambda x: lax.bitcast_convert_type(x, jnp.int32), "float": lambda x: lax.bitcast_convert_type(x, jnp.float32),
    "clz": lambda x: lax.clz(jnp.asarray(x)),
}  # fmt: skip


def _less(x: Limbs, y: Limbs) -> Array:
    high, other = x[1].astype(jnp.int32), y[1].astype(jnp.int32)
    return (high < other) | ((high == other) & (x[0] < y[0]))


def _shift_right_signed(x: Limbs, y: Limbs) -> Limbs:
    sign = lax.shift_right_arithmetic(x[1].astype(jnp.int32), np.int32(31)).astype(jnp.uint32)
    return tuple(limb ^ sign for limb in bits.shift_right(tuple(limb ^ sign for limb in x), y[0]))


def _each(combine: Any) -> Any:
    return lambda x, y: tuple(combine(a, b) for a, b in zip(x, y, strict=True))


PAIRS = {  # operations on integers of two words
    "add": bits.add, "sub": bits.subtract, "and": _each(jnp.bitwise_and), "or": _each(jnp.bitwise_or), "xor": _each(jnp.bitwise_xor),
    "shl": lambda x, y: bits.shift_left(x, y[0]), "lshr": lambda x, y: bits.shift_right(x, y[0]), "ashr": _shift_right_signed,
    "eq": lambda x, y: (x[0] == y[0]) & (x[1] == y[1]), "ne": lambda x, y: (x[0] != y[0]) | (x[1] != y[1]),
    "lt": _less, "le": lambda x, y: ~_less(y, x), "clz": lambda x: (bits.leading_zeros(x).astype(jnp.uint32), jnp.zeros_like(x[0])),
}  # fmt: skip


class JaxValue(Value):
    keeps_subnormals = False

    def __init__(self, raw: Any, lane: Lane) -> None:
        self.raw, self._lane = raw, lane

    @property
    def lane(self) -> Lane:
        return self._lane

    def constant(self, number: float, lane: Lane | None = None) -> JaxValue:
        lane = lane or self.lane
        if lane == I64:
            words = int(number) & (1 << 64) - 1
            return JaxValue((np.uint32(words & 0xFFFFFFFF), np.uint32(words >> 32)), lane)
        if lane == I32:
            return JaxValue(np.uint32(int(number) & 0xFFFFFFFF).view(np.int32), lane)
        return JaxValue(np.bool_(number) if lane == BOOL else np.float32(number), lane)

    def apply(self, name: str, lane: Lane, *others: Any, extra: str = "") -> JaxValue:
        raws = [self.raw, *(v.raw for v in others)]
        if name in ("sitofp_rz", "uitofp_rz"):
            return signed_truncated_float(self) if name == "sitofp_rz" else truncated_float(self)
        if name == "select":
            return JaxValue(bits.select(*raws) if lane == I64 else jnp.where(*raws), lane)
        if self.lane == I64 and name in PAIRS:
            return JaxValue(PAIRS[name](*raws), lane)
        if name in WORDS:
            return JaxValue(WORDS[name](*raws), lane)
        if name == "integral":
            return JaxValue(INTEGRAL[extra](self.raw), lane)
        if name == "muladd":
            return JaxValue(raws[0] * raws[1] + raws[2], lane)
        return self._convert(name, lane)

    def _convert(self, name: str, lane: Lane) -> JaxValue:
        if self.lane == BOOL:  # to 0, and 1 or -1
            word = jnp.asarray(self.raw).astype(jnp.int32)
            word = -word if name == "sext" else word
            return JaxValue(word, I32) if lane == I32 else JaxValue(word, I32).resize(I64, signed=name == "sext")
        if lane == I64:
            word = jnp.asarray(self.raw)
            sign = lax.shift_right_arithmetic(word, np.int32(31)).astype(jnp.uint32)
            return JaxValue((word.astype(jnp.uint32), sign if name == "sext" else jnp.zeros_like(sign)), lane)
        if name == "trunc":
            return JaxValue(self.raw[0].astype(jnp.int32), lane)
        raw = jnp.asarray(self.raw)
        return JaxValue((raw.astype(jnp.uint32) if name == "uitofp" else raw).astype(DTYPES[lane]), lane)


def integers(words: ArrayLike) -> JaxValue:
    """Returns an array of integers of at most 32 bits as i32 values."""
    words = jnp.asarray(words)
    return JaxValue(words if words.dtype == jnp.int32 else lax.bitcast_convert_type(words.astype(jnp.uint32), jnp.int32), I32)


def floats(values: ArrayLike) -> JaxValue:
    return JaxValue(values, F32)


def conditions(values: ArrayLike) -> JaxValue:
    return JaxValue(values, BOOL)


def codes_of(value: JaxValue) -> Array:
    return lax.bitcast_convert_type(jnp.asarray(value.raw), jnp.uint32)
