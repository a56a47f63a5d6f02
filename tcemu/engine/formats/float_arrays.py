"""Arrays of numbers and their codes: `number_array`, `array_codes`, `from_float`, `to_float`, `round_float`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.gradients import no_gradient, straight_through
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, S32, Format
from tcemu.engine.formats.rounding import Rounding

NO_GRADIENT = (
    "the bits of a float have no gradient, and JAX would use zero: differentiate tcemu.gemm with float results, tcemu.matmul, "
    "tcemu.dot_general or tcemu.formats.round_float, or wrap the values that need no gradient in jax.lax.stop_gradient"
)
# dtypes with integers that s32 cannot hold. No instruction takes them; their values are rounded to a format that an instruction takes
WIDE_INTEGERS = {
    np.dtype(np.uint32): Format("u32", 32, signed=False),
    np.dtype(np.int64): Format("s64", 64),
    np.dtype(np.uint64): Format("u64", 64, signed=False),
}
# float dtypes that no instruction has. float32 holds all their values
OTHER_FLOATS = tuple(map(np.dtype, (ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3b11fnuz)))


def number_array(value: ArrayLike, name: str = "array") -> Array | np.ndarray:
    """Return an argument as a JAX array, or as a NumPy array in the machine's byte order. No value changes.

    Args:
        value: Array, nested lists or a number; also an object with `__jax_array__`, such as a parameter of flax.
        name: Name of the argument in error messages.

    Returns:
        Array [...] of a dtype that `array_format` takes, unless it is complex or not numeric. The float8 dtypes that no instruction has
        become float32.

    Raises:
        TypeError: The array hides elements behind a mask, or its elements are wider than float64.
        ValueError: Nested lists are ragged.
    """
    if hasattr(value, "__jax_array__") and not isinstance(value, jax.Array):
        value = jnp.asarray(value)
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        raise TypeError(f"{name}: a masked array; what its mask hides has no value: give x.filled(VALUE)")
    if not isinstance(value, jax.Array):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{name}: no array can be made of it: {error}") from None
        if not value.dtype.isnative:
            value = value.astype(value.dtype.newbyteorder("="))
        if value.dtype.kind == "f" and value.dtype.itemsize > 8:
            raise TypeError(f"{name}: got {value.dtype}, which is wider than float64; x.astype('float64') rounds it")
    return value.astype(np.float32) if value.dtype in OTHER_FLOATS else value


def array_format(dtype: DTypeLike) -> Format:
    """Return the format that `array_codes` uses for arrays of a dtype.

    Args:
        dtype: Any dtype of floats, integers or booleans.

    Returns:
        The format of the array's codes.

    Raises:
        TypeError: The dtype is complex or not numeric.
    """
    dtype = np.dtype(dtype)
    fmt = ARRAY_FORMATS.get(dtype)
    if fmt is not None:
        return fmt
    if dtype != np.bool_ and not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"an array of dtype {dtype} holds no real numbers; give floats, integers or booleans")
    return WIDE_INTEGERS.get(dtype, S32)


def array_codes(x: ArrayLike) -> tuple[Format, Array]:
    """Reinterpret an array as the format of its dtype and raw codes; no value changes.

    Booleans and integers of at most 16 bits become s32 if PTX has no such format. Integers of 32 and 64 bits that s32 cannot hold have the
    formats u32, s64 and u64, so that a later conversion rounds or saturates the number itself, once.

    A NumPy array keeps its 64 bits even where JAX would truncate it to 32. An argument of `jax.jit` or of another transformation does not:
    while x64 mode is off, JAX truncates float64 to float32, and integers to 32 bits, before this function sees them.

    Args:
        x: Array of floats, integers or booleans [...]. A float6 array must be a NumPy array, because XLA on CPU cannot hold it.

    Returns:
        The format and the codes [...]; uint32[..., 2] for a 64-bit format.

    Raises:
        TypeError: The dtype is complex or not numeric, or the function is differentiated: bits have no gradient.
    """
    x = no_gradient(x, NO_GRADIENT) if isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.floating) else x
    x = number_array(x)
    fmt = array_format(x.dtype)
    if fmt == S32 and x.dtype != np.int32:
        x = x.astype(np.int32)
    if isinstance(x, jax.Array):
        if fmt.bits >= 8:
            return fmt, lax.bitcast_convert_type(x, fmt.dtype)
        raw = x.astype(jnp.int8).astype(jnp.uint8) if fmt.is_integer else lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
    else:
        raw = np.asarray(x, order="C").reshape((*x.shape, *(1,) * (fmt.words - 1))).view(fmt.dtype)
    codes = raw & raw.dtype.type((1 << min(fmt.bits, 32)) - 1)
    return fmt, jnp.asarray(codes, codes.dtype)  # without its dtype it compiles an identity for each shape of a NumPy array


def from_float(fmt: Format, x: ArrayLike, rounding: Rounding = "RN", saturate: bool = False, key: PRNGKey | None = None) -> Array:
    """Convert an array of numbers to codes of a format, each rounded once.

    Args:
        fmt: Format of the result.
        x: Array of any real dtype, [...].
        rounding: As in `convert`.
        saturate: As in `convert`.
        key: As in `convert`.

    Returns:
        Codes [...]; uint32[..., 2] for a 64-bit format.

    Raises:
        TypeError: The dtype is complex or not numeric, or the function is differentiated.
        ValueError: The rounding is unknown, or "SR" lacks a key.
    """
    source, codes = array_codes(x)
    return convert(source, fmt, codes, rounding, saturate, key)


def to_float(fmt: Format, codes: ArrayLike, dtype: DTypeLike = jnp.float32) -> Array:
    """Convert codes to a float array, exactly where the dtype can represent the value, else rounded to nearest even.

    Args:
        fmt: Format of the codes.
        codes: Unsigned [...]; uint32[..., 2] for a 64-bit format.
        dtype: float32, float16 or bfloat16.

    Returns:
        Array [...] of `dtype`.
    """
    target = ARRAY_FORMATS[np.dtype(dtype)]
    return lax.bitcast_convert_type(convert(fmt, target, codes), dtype)


def round_float(fmt: Format, x: ArrayLike, rounding: Rounding = "RN", saturate: bool = False, key: PRNGKey | None = None) -> Array:
    """Round every element of a float array to a value of a format; the dtype stays the same.

    The derivative is the straight-through estimate: rounding counts as the identity. A NumPy float64 array is rounded once from its 64
    bits, and the result is float32 unless x64 mode is on.

    Args:
        fmt: Format to round to. The result is exact if x's dtype can represent the format's values.
        x: float32, float16, bfloat16 or float64 [...].
        rounding: As in `convert`.
        saturate: As in `convert`.
        key: As in `convert`.

    Returns:
        Array [...] of x's dtype.

    Raises:
        TypeError: The dtype is complex or not numeric.
        ValueError: The rounding is unknown, or "SR" lacks a key.
    """

    static_rounding, traced_rounding = (rounding, None) if isinstance(rounding, str) else ("RN", rounding)

    def rounded_values(x: Array | np.ndarray, traced: Array | None, key: PRNGKey | None) -> Array:
        source, codes = array_codes(x)
        rounded = convert(source, fmt, codes, static_rounding if traced is None else traced, saturate, key)
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return lax.bitcast_convert_type(convert(fmt, ARRAY_FORMATS[dtype], rounded), dtype)

    x = number_array(x)
    if not isinstance(x, jax.Array) and x.dtype == np.float64:
        return rounded_values(x, traced_rounding, key)  # JAX would truncate it to 32 bits
    return straight_through(rounded_values, lambda x, *_: x, jnp.asarray(x), traced_rounding, key)
