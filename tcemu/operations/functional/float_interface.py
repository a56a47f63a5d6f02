"""The way of every function of `tcemu.functional` from floats to f32 codes and back, with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.gradients import straight_through
from tcemu.base.meshes import shard_like
from tcemu.engine.formats.coding import recode
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, F32, Format
from tcemu.operations.products.product_arguments import as_jax_array, float_array

DTYPES = ("float32", "float16", "bfloat16")


def check_dtype(dtype: DTypeLike, name: str) -> np.dtype:
    """Return a dtype that kernels load and store. Raises TypeError, which names the argument, for another dtype."""
    dtype = np.dtype(dtype)
    if dtype.name not in DTYPES:
        raise TypeError(f"{name}: got {dtype}; expected one of {', '.join(DTYPES)}")
    return dtype


def kernel_array(name: str, value: ArrayLike) -> Array:
    """Return an argument as an array of float32, float16 or bfloat16. NumPy's float64 is rounded to float32.

    Raises:
        TypeError: The dtype is another one. The message names the argument.
    """
    array = as_jax_array(float_array(name, value))
    check_dtype(array.dtype, name)
    return array


def array_format(x: Array) -> Format:
    """Return the format of an array's dtype."""
    return ARRAY_FORMATS[np.dtype(x.dtype)]


def own_codes(x: Array) -> Array:
    """Return the codes of an array in its own format."""
    return lax.bitcast_convert_type(x, array_format(x).dtype)


def f32_codes(x: Array) -> Array:
    """Return the codes of an array in f32, exactly."""
    return recode(array_format(x), F32, own_codes(x))


def float_result(codes: Array, source: Format, dtype: np.dtype) -> Array:
    """Return codes of a format as floats of a dtype, each rounded once."""
    return lax.bitcast_convert_type(recode(source, ARRAY_FORMATS[dtype], codes), dtype)


def compute_on_codes(bits: Callable[..., Array], smooth: Callable[..., Array], operands: Sequence[Any]) -> Array:
    """Compute a function of arrays by its bits, with the derivative of another one.

    Args:
        bits: Function that computes the value.
        smooth: Function that is differentiated, and that says how the result is sharded.
        operands: Arguments of both.
    """
    return shard_like(lambda given: smooth(*given), lambda given: straight_through(bits, smooth, *given), tuple(operands))


def widen(x: Array) -> Array:
    """Return floats as float32, for a smooth function."""
    return x.astype(np.float32)


def check_axis(axis: Any, rank: int) -> int:
    """Return an axis from the end, -1 for the last. Raises ValueError where the array has no such axis."""
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or not -rank <= axis < rank:
        raise ValueError(f"axis={axis!r}: expected one of the {rank} axes of x, from {-rank} to {rank - 1}")
    return int(axis) - rank if axis >= 0 else int(axis)


def along_last(function: Callable[[Array], Array], x: Array, axis: int) -> Array:
    """Apply a function of the last axis along another axis."""
    return function(x) if axis == -1 else jax.numpy.moveaxis(function(jax.numpy.moveaxis(x, axis, -1)), -1, axis)
