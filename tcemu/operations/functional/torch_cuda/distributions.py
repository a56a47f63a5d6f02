"""Exponential and normal numbers, and integers, as PyTorch makes them on a GPU of the words of `random_numbers`.

Source: PyTorch 2.11.0, aten/src/ATen/native/cuda/DistributionTemplates.h and aten/src/ATen/core/TransformationHelper.h; CUDA 13.0,
curand_normal.h. Held to words of PyTorch 2.11.0 on an H200: `tests/operations/functional/test_torch_random.py`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.engine.arithmetic import special_functions
from tcemu.operations.functional.torch_cuda.device_functions import Value, as_value, fma, logf, sqrt, where
from tcemu.operations.functional.torch_cuda.numpy_evaluation import call_by_numpy
from tcemu.operations.functional.torch_cuda.random_numbers import to_uniform

F32 = np.float32
BELOW_ONE = 1 - 2.0**-24
ANGLE = float(F32(6.2831855)) * 2.0**-32  # CURAND_2POW32_INV_2PI
WIDE_RANGE = 1 << 28  # from which integers are made of 64 bits
LOG_TWO = np.uint32(0x3F317218)


def _codes(x: Array) -> Value:
    return Value(lax.bitcast_convert_type(x, jnp.uint32))


def _floats(x: Value) -> Array:
    return lax.bitcast_convert_type(x.codes, jnp.float32)


def exponential_formula(numbers: Array, rate: float) -> Array:
    """Return exponential numbers of uniform ones in (0, 1], f32: -1 / rate times `__logf`, which is no 0."""
    log = Value(special_functions.lg2(_codes(numbers).codes)) * as_value(LOG_TWO)
    log = where(numbers >= BELOW_ONE, -(2.0**-24), log)
    return _floats(as_value(float(F32(-1) / F32(rate))) * log)


def normal_formula(radii: Array, angles: Array) -> tuple[Array, Array]:
    """Return two normal numbers of two uniform words each, f32, by Box and Muller.

    Args:
        radii: Numbers in (0, 1], f32.
        angles: Words as f32.
    """
    angle = fma(_codes(angles), ANGLE, ANGLE / 2).codes
    size = sqrt(logf(_codes(radii)) * -2.0)
    sine, cosine = (Value(function(angle)) * size for function in (special_functions.sin, special_functions.cos))
    return _floats(sine), _floats(cosine)


def to_exponential(words: np.ndarray, rate: float) -> np.ndarray:
    """Return words as exponential numbers, f32 of the same shape."""
    return np.asarray(call_by_numpy(exponential_formula, to_uniform(words), rate))


def to_normal(words: np.ndarray) -> np.ndarray:
    """Return words uint32 [threads, 4] as normal numbers, f32 of the same shape: `curand_normal4`."""
    pairs = words.reshape(-1, 2)
    found = call_by_numpy(normal_formula, to_uniform(pairs[:, 0]), pairs[:, 1].astype(F32))
    return np.stack(found, axis=-1).reshape(words.shape)


def integer_width(span: int) -> int:
    """Return how many integers four words make, by the number of integers in the range: one of 32 bits each, or of 64."""
    return 2 if span >= WIDE_RANGE else 4


def _nearest(number: int, digits: int) -> int:
    """Return an integer rounded to a float of some digits, to nearest even."""
    lost = max(abs(number).bit_length() - digits, 0)
    half, kept = (1 << lost) // 2, abs(number) >> lost
    rest = abs(number) - (kept << lost)
    rounded = (kept + (rest > half or (rest == half and lost > 0 and kept & 1 == 1))) << lost
    return rounded if number >= 0 else -rounded


def held_limits(low: int, high: int, digits: int) -> tuple[int, int]:
    """Return the limits that PyTorch takes for floats of some digits, so that no result is rounded out of `low` and `high`.

    Source: PyTorch 2.11.0, ATen/native/DistributionTemplates.h, update_from and update_to.
    """
    if (above := _nearest(low + 1, digits)) < low:
        low = above + (1 << (abs(low + 1).bit_length() - digits))
    if (below := _nearest(high - 1, digits)) >= high:
        high = below - (1 << (abs(high - 1).bit_length() - digits))
    return low, high


def to_integers(words: np.ndarray, low: int, span: int, each: int) -> np.ndarray:
    """Return words uint32 [threads, 4] as integers from `low` to `low + span - 1`, int64 [threads, each]."""
    wide = words.astype(np.uint64)
    if each == 2:
        wide = wide[:, 0::2] << np.uint64(32) | wide[:, 1::2]
    return (wide % np.uint64(span)).astype(np.int64) + np.int64(low)
