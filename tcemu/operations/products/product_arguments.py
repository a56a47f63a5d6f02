"""Arguments of products: floats as JAX arrays, shapes and dtypes checked, K padded to whole instructions, random keys."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.compilation import outside_traces
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes, number_array, to_float
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, F32, F64, Format

Shape = tuple[int, ...]
OperandPair = tuple[Array, Array]  # of A and of B


# ---- arrays and dtypes


def float_array(name: str, value: ArrayLike) -> Array | np.ndarray:
    """Returns an argument as an array of floats. NumPy's float64 stays NumPy's where JAX would truncate it to 32 bits.

    Raises:
        TypeError: the values are no floats. The message names the argument.
    """
    array = number_array(value, name)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name}: got {array.dtype}{list(array.shape)}; expected floats, as recipes quantise them (x.astype('float32'))")
    if array.dtype in (ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn):
        array = array.astype(np.float32)  # XLA on a CPU holds no float6
    if isinstance(array, jax.Array) or (array.dtype == np.float64 and jax.dtypes.canonicalize_dtype(np.float64) != np.float64):
        return array
    return jnp.asarray(array, array.dtype)  # without its dtype it compiles an identity for each shape of a NumPy array


def as_jax_array(x: Array | np.ndarray, round_to_odd: bool = False) -> Array:
    """Returns floats as a JAX array. NumPy's float64, where JAX has none, is rounded to float32: to nearest even, or to odd.

    Rounding to odd truncates and sets the last bit where something was lost. Such a value rounds on to any format of at most 22 bits of
    significand as its 64 bits would, in every rounding mode: nothing is rounded twice.
    """
    if isinstance(x, jax.Array):
        return x
    _, codes = array_codes(x)
    if not round_to_odd:
        return lax.bitcast_convert_type(convert(F64, F32, codes), jnp.float32)
    truncated = convert(F64, F32, codes, "RZ")
    inexact = jnp.any(convert(F32, F64, truncated) != codes, axis=-1)
    return lax.bitcast_convert_type(truncated | inexact.astype(jnp.uint32), jnp.float32)


def check_scale_numbers(name: str, value: ArrayLike, fmt: Format) -> None:
    """Raise ValueError for the first float that a format of scales does not have. Values under a trace are unknown, and pass.

    Args:
        name: The argument's name.
        value: Floats.
        fmt: An unsigned format of 8 bits, as ue8m0 or ue4m3.
    """
    if isinstance(value, Tracer):
        return
    given, numbers = np.asarray(value).astype(np.float64), _scale_numbers(fmt)
    above = np.minimum(np.searchsorted(numbers, given), len(numbers) - 1)  # index of the least number that is not smaller
    wrong = np.argwhere((numbers[above] != given) & ~np.isnan(given))
    if len(wrong):
        place = tuple(wrong[0].tolist())
        near = " and ".join(f"{number:g}" for number in numbers[max(above[place] - 1, 0) : above[place] + 1])
        raise ValueError(
            f"{name}: got {given[place]:g} at {list(place)}; expected numbers of {fmt}, from {numbers[0]:g} to {numbers[-1]:g}, of which "
            f"{near} would be nearest ({len(wrong)} of {given.size} scales are not). Round scales as your kernel does before the elements "
            "are divided by them, or give raw codes, unsigned integers: tcemu.quantize.block_quantize makes them"
        )


@lru_cache(maxsize=8)
@outside_traces  # scales that are constants of a traced function are checked while it is traced
def _scale_numbers(fmt: Format) -> np.ndarray:
    """Returns the finite numbers of a format of 8 bits or fewer, ascending."""
    numbers = np.asarray(to_float(fmt, np.arange(1 << fmt.bits, dtype=fmt.dtype)), np.float64)
    return np.unique(numbers[np.isfinite(numbers)])


def check_float_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype of a result. Raises TypeError for a dtype that is no float dtype of the package."""
    dtype = np.dtype(dtype)
    fmt = ARRAY_FORMATS.get(dtype)
    if fmt is None or fmt.is_integer:
        raise TypeError(f"dtype: got {dtype}; expected a float dtype")
    return dtype


def promoted_dtype(lhs: Any, rhs: Any, preferred_element_type: DTypeLike | None) -> np.dtype:
    """Returns the dtype that `jax.lax.dot_general` gives a result. Raises TypeError where it is no float dtype."""
    dtype = np.dtype(jnp.result_type(lhs, rhs) if preferred_element_type is None else preferred_element_type)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"preferred_element_type: got {dtype}; a recipe's products are floats: take a float dtype and cast")
    return dtype


# ---- shapes


def product_shape(a: Shape, b: Shape, addend: Shape | None = None, *, names: tuple[str, str, str] = ("a", "b", "c")) -> Shape:
    """Returns the shape [..., M, N] of D = A·B + addend.

    All sizes but K may be symbols of `jax.export`.

    Args:
        a: Shape [..., M, K].
        b: Shape [..., K, N].
        addend: A shape that broadcasts to D's, or None.
        names: Names of the three arguments in error messages.

    Raises:
        ValueError: the shapes do not fit.
    """
    for name, shape, expected in ((names[0], a, "[..., M, K]"), (names[1], b, "[..., K, N]")):
        if len(shape) < 2:
            raise ValueError(f"{name}: got shape {list(shape)}; expected a matrix, {expected}, with any batch axes in front")
    left, right = names[:2]
    for name, k in ((left, a[-1]), (right, b[-2])):
        if not isinstance(k, int):
            raise ValueError(
                f"{name}: K is {k}, a symbol of jax.export, and its steps must be known before tracing; export with K as a number (M, N "
                'and batch axes may be symbols). In a gradient, M of the product is the K of dB: a recipe with backward="exact" accepts it'
            )
    if a[-1] != b[-2]:
        hint = f"; {right} transposed would fit" if a[-1] == b[-1] else ""
        raise ValueError(
            f"{left} is [..., M, K] = {list(a)} and {right} is [..., K, N] = {list(b)}: K is {a[-1]} in {left} and {b[-2]} in {right}; "
            f"they must be equal{hint}"
        )
    try:
        d = (*jnp.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])
    except ValueError:
        raise ValueError(f"the batch axes of {left}, {list(a[:-2])}, and of {right}, {list(b[:-2])}, do not broadcast") from None
    if addend is not None and not is_broadcastable(addend, d):
        raise ValueError(f"{names[2]}: got shape {list(addend)}; expected one that broadcasts to D, [..., M, N] = {list(d)}")
    return d


def is_broadcastable(shape: Shape, target: Shape) -> bool:
    """Returns True if an array of this shape broadcasts to the target shape."""
    try:
        return jnp.broadcast_shapes(shape, target) == target
    except ValueError:
        return False


# ---- K padded to whole instructions


def pad_k(spec: ProductSpec, a: Array, b: Array, multiple: int, before: int = 0) -> OperandPair:
    """Pads K to a multiple of `multiple`, whole instructions: A with -0 (integers: 0), B with 0. This changes no bit of the product.

    The padding is `before` in front, and the rest at the end.

    In a fused step a zero product takes part neither in the max exponent nor in the sum. A step of zeros alone rounds a value that already
    has the result's format, +0 included: a step never leaves -0. (A what-if model that keeps fewer fraction bits than its result truncates
    the running value there once, as an instruction of zeros does.) A rounded addition of the product -0 returns the other operand, -0
    included, in RN, which every chain of multiply-adds uses. Integer zeros add nothing.
    """
    added = before, -(before + (a.shape[-1] if spec.a.words == 1 else a.shape[-2])) % multiple
    if added == (0, 0):
        return a, b
    words = [(0, 0)] * (spec.a.words - 1)  # the axis of a 64-bit code's words
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1 - len(words)) + [added, *words], constant_values=np.array(spec.a.negative_zero, spec.a.dtype))
    return a, jnp.pad(b, [(0, 0)] * (b.ndim - 2 - len(words)) + [added, (0, 0), *words])


def pad_scales(spec: ProductSpec, scales: OperandPair, multiple: int) -> OperandPair:
    """Pads the scales of an instruction's blocks with ones, to those of a K that is a multiple of `multiple`."""
    scale = spec.require_scale()
    missing = -scales[0].shape[-1] % (multiple // spec.k * spec.scale_vec)
    return pad_along_k(scales, missing, scale.bias << scale.mantissa_bits)


def pad_along_k(pair: OperandPair, missing: int, value: int) -> OperandPair:
    """Pads [..., M, K] and [..., K, N] with `missing` elements along K, each `value`."""
    a, b = pair
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, missing)], constant_values=value)
    return a, jnp.pad(b, [(0, 0)] * (b.ndim - 2) + [(0, missing), (0, 0)], constant_values=value)


# ---- random keys


class ProductKeys(NamedTuple):
    """The random bits of one product and of its gradients: a JAX random key per operand and per product of the backward pass."""

    a: PRNGKey | None
    b: PRNGKey | None
    da: PRNGKey | None
    db: PRNGKey | None


def product_keys(key: PRNGKey | None) -> ProductKeys:
    """Splits one key into the keys of a product; all are None without a key."""
    return ProductKeys(*((None,) * 4 if key is None else jax.random.split(key, 4)))
