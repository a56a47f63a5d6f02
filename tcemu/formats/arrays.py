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


def array_codes(x: ArrayLike) -> tuple[Format, Array]:
    """The format that an array's dtype stands for, and its raw codes: a reinterpretation, no arithmetic.

    A NumPy float64 array keeps its 64 bits even where JAX would cut it to 32. Booleans and the integers that are no format of PTX become
    s32, clamped to its range. float6 arrays must be NumPy's, since XLA on CPU cannot hold them.
    Raises TypeError for complex and non-numeric dtypes, and where it is differentiated: bits have no gradient.
    """
    x = no_gradient(x, NO_GRADIENT) if isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.floating) else x
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
    fmt = ARRAY_FORMATS.get(np.dtype(x.dtype))
    if fmt is None:
        if x.dtype != np.bool_ and not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"an array of dtype {x.dtype} holds no real numbers; give floats, integers or booleans")
        fmt, x = S32, _clamped_to_s32(x)
    if isinstance(x, jax.Array):
        if fmt.bits >= 8:
            return fmt, lax.bitcast_convert_type(x, fmt.dtype)
        raw = x.astype(jnp.int8).astype(jnp.uint8) if fmt.is_integer else lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
    else:
        raw = np.asarray(x, order="C").reshape((*x.shape, *(1,) * (fmt.words - 1))).view(fmt.dtype)
    return fmt, jnp.asarray(raw & raw.dtype.type((1 << min(fmt.bits, 32)) - 1))


def _clamped_to_s32(x: Array | np.ndarray) -> Array | np.ndarray:
    xp = jnp if isinstance(x, jax.Array) else np
    if x.dtype.itemsize >= 4:
        x = xp.minimum(x, 2**31 - 1)
        x = xp.maximum(x, -(2**31)) if jnp.issubdtype(x.dtype, jnp.signedinteger) else x
    return x.astype(np.int32)


def from_float(fmt: Format, x: ArrayLike, rounding: Rounding = "RN", saturate: bool = False, key: PRNGKey | None = None) -> Array:
    """An array of numbers (any real dtype) -> codes of `fmt`, [...] (f64: uint32[..., 2]), each rounded once. Arguments as in `convert`."""
    source, codes = array_codes(x)
    return convert(codes, source, fmt, rounding, saturate, key)


def to_float(fmt: Format, codes: ArrayLike, dtype: DTypeLike = jnp.float32) -> Array:
    """Codes -> an array of `dtype` (float32, float16 or bfloat16), exact where the dtype holds the value, else rounded to nearest even."""
    target = ARRAY_FORMATS[np.dtype(dtype)]
    return lax.bitcast_convert_type(convert(codes, fmt, target), dtype)


def round_to(fmt: Format, x: ArrayLike, rounding: Rounding = "RN", saturate: bool = False, key: PRNGKey | None = None) -> Array:
    """x with every element rounded to a value of `fmt`, in x's own float dtype (which must hold fmt's values to be exact).

    x: float32, float16, bfloat16 or, in x64 mode, float64 [...]. Arguments as in `convert`. Its derivative counts the rounding as identity
    (straight-through).
    """

    def bits_of(x: Array, traced: Array | None, key: PRNGKey | None) -> Array:
        own, codes = array_codes(x)
        rounded = convert(codes, own, fmt, rounding if traced is None else traced, saturate, key)
        return lax.bitcast_convert_type(convert(rounded, fmt, own), x.dtype)

    return stand_in(bits_of, lambda x, *_: x, jnp.asarray(x), None if isinstance(rounding, str) else rounding, key)
