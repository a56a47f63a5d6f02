"""Arrays of numbers, and their codes: `array_codes`, `from_float`, `to_float`, `round_to`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from tcemu.formats.coding import convert
from tcemu.formats.rounding import Rounding
from tcemu.formats.table import ARRAY_FORMATS, S32, Format
from tcemu.gradients import no_gradient, stand_in

NO_GRADIENT = (
    "the bits of a float have no gradient, and JAX would take it for zero: differentiate tcemu.gemm with float results, tcemu.matmul, "
    "tcemu.dot_general or tcemu.formats.round_to, or put jax.lax.stop_gradient around what is not to be differentiated"
)
# integers that s32 may not hold: no instruction takes them, but their numbers are rounded to what one takes
WIDE_INTEGERS = {
    np.dtype(np.uint32): Format("u32", 32, signed=False),
    np.dtype(np.int64): Format("s64", 64),
    np.dtype(np.uint64): Format("u64", 64, signed=False),
}


def array_format(dtype: DTypeLike) -> Format:
    """The format that a dtype stands for, as `array_codes` takes it. Raises TypeError for complex and non-numeric dtypes."""
    dtype = np.dtype(dtype)
    fmt = ARRAY_FORMATS.get(dtype)
    if fmt is not None:
        return fmt
    if dtype != np.bool_ and not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(f"an array of dtype {dtype} holds no real numbers; give floats, integers or booleans")
    return WIDE_INTEGERS.get(dtype, S32)


def array_codes(x: ArrayLike) -> tuple[Format, Array]:
    """The format that an array's dtype stands for, and its raw codes: a reinterpretation, no arithmetic.

    No value changes here. Booleans and integers of 16 bits or less that are no format of PTX become s32; those of 32 and 64 bits that s32
    may not hold have formats of their own (u32, s64, u64), so that what follows rounds or saturates the number itself, once.
    A NumPy array keeps its 64 bits even where JAX would cut it to 32. What goes through `jax.jit` or another transformation as an argument
    does not: while x64 mode is off, JAX has cut float64 to float32, and integers to 32 bits, before anything here sees them.
    float6 arrays must be NumPy's, since XLA on CPU cannot hold them.
    Raises TypeError for complex and non-numeric dtypes, and where it is differentiated: bits have no gradient.
    """
    x = no_gradient(x, NO_GRADIENT) if isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.floating) else x
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
    fmt = array_format(x.dtype)
    if fmt == S32 and x.dtype != np.int32:
        x = x.astype(np.int32)
    if isinstance(x, jax.Array):
        if fmt.bits >= 8:
            return fmt, lax.bitcast_convert_type(x, fmt.dtype)
        raw = x.astype(jnp.int8).astype(jnp.uint8) if fmt.is_integer else lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
    else:
        raw = np.asarray(x, order="C").reshape((*x.shape, *(1,) * (fmt.words - 1))).view(fmt.dtype)
    return fmt, jnp.asarray(raw & raw.dtype.type((1 << min(fmt.bits, 32)) - 1))


def from_float(fmt: Format, x: ArrayLike, rounding: Rounding = "RN", saturate: bool = False, key: PRNGKey | None = None) -> Array:
    """An array of numbers (any real dtype) -> codes of `fmt`, [...] (f64: uint32[..., 2]), each rounded once. Arguments as in `convert`."""
    source, codes = array_codes(x)
    return convert(source, fmt, codes, rounding, saturate, key)


def to_float(fmt: Format, codes: ArrayLike, dtype: DTypeLike = jnp.float32) -> Array:
    """Codes -> an array of `dtype` (float32, float16 or bfloat16), exact where the dtype holds the value, else rounded to nearest even."""
    target = ARRAY_FORMATS[np.dtype(dtype)]
    return lax.bitcast_convert_type(convert(fmt, target, codes), dtype)


def round_to(fmt: Format, x: ArrayLike, rounding: Rounding = "RN", saturate: bool = False, key: PRNGKey | None = None) -> Array:
    """x with every element rounded to a value of `fmt`, in x's own float dtype (which must hold fmt's values to be exact).

    x: float32, float16, bfloat16 or float64 [...]. Arguments as in `convert`. Its derivative counts the rounding as identity
    (straight-through). A NumPy float64 array is rounded once from its 64 bits, and comes back as float32 unless x64 mode is on.
    """

    word, mode = (rounding, None) if isinstance(rounding, str) else ("RN", rounding)

    def bits_of(x: Array | np.ndarray, traced: Array | None, key: PRNGKey | None) -> Array:
        own, codes = array_codes(x)
        rounded = convert(own, fmt, codes, word if traced is None else traced, saturate, key)
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return lax.bitcast_convert_type(convert(fmt, ARRAY_FORMATS[dtype], rounded), dtype)

    if not isinstance(x, jax.Array) and np.asarray(x).dtype == np.float64:
        return bits_of(np.asarray(x), mode, key)  # JAX would cut it
    return stand_in(bits_of, lambda x, *_: x, jnp.asarray(x), mode, key)
