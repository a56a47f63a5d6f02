"""The factor by which elements are scaled before they are rounded, and the f32 codes that rules of scales share."""

from typing import NamedTuple

import numpy as np
from jax import Array

from tcemu.engine.arithmetic.special_functions import multiply_f32
from tcemu.engine.backends.quotients import divide, multiply
from tcemu.engine.formats.number_formats import F32

ZERO, ONE = np.uint32(0), np.float32(1).view(np.uint32)
INFINITY, NAN, SIGN = np.uint32(F32.infinity), np.uint32(F32.nan), np.uint32(0x80000000)
MAX_F32, MIN_NORMAL = (np.float32(value).view(np.uint32) for value in (np.finfo(np.float32).max, 2.0**-126))
FRACTION = np.uint32((1 << F32.mantissa_bits) - 1)


def f32_code(value: float) -> np.uint32:
    """Return the code of a number, rounded to f32."""
    return np.float32(value).view(np.uint32)


class Factor(NamedTuple):
    """The number by which each element of a group is multiplied or divided."""

    code: Array  # f32
    divides: bool  # x / code, not x * code
    flush: bool = False  # subnormal operands and products are zeros, as with `.ftz`

    def apply(self, x: Array) -> Array:
        """Return x * code or x / code."""
        if self.divides:
            return divide(x, self.code, F32)
        return multiply_f32(x, self.code, flush=True) if self.flush else multiply(x, self.code, F32)
