"""Block formats, MX and NVFP4: `block_quantize` and `block_dequantize`, between arrays of floats and narrow elements that share a scale.

Integers only, so that CPU and GPU give the same words. How a scale is found is in `scale_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from tcemu.arithmetic.backends import by_platform
from tcemu.arithmetic.kernels import elementwise
from tcemu.arithmetic.kernels.elementwise import Elements
from tcemu.arithmetic.quotient import multiply, product
from tcemu.bits import Limbs
from tcemu.compilation import compiled_once
from tcemu.formats import (
    ARRAY_FORMATS,
    BF16,
    F16,
    F32,
    F64,
    ROUNDINGS,
    UE4M3,
    UE8M0,
    Format,
    array_codes,
    code_limbs,
    convert,
    decode,
    decode_limbs,
    encode,
)
from tcemu.quantize import kernels
from tcemu.quantize.block_formats import BLOCK_FORMATS, BlockFormat, BlockQuantized, dims
from tcemu.quantize.groups import in_groups, out_of_groups, repeated
from tcemu.quantize.scale_rules import RULES, Rule

# ---- quantise


def block_quantize(
    x: ArrayLike,
    kind: str | BlockFormat,
    *,
    axis: int = -1,
    rule: str | None = None,
    rounding: str = "RN",
    key: PRNGKey | None = None,
    amax: ArrayLike | None = None,
    rows: int = 1,
) -> BlockQuantized:
    """x in blocks along `axis`: element codes, scale codes and, for NVFP4, the tensor's scale.

    x: a float array of any real dtype and one axis or more. The last block may be short: it is quantised as if filled with zeros, and the
    codes keep x's shape. (Before an instruction takes them they are padded with zeros, which is exact.)
    kind: a name of `tcemu.quantize.BLOCK_FORMATS` ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4") or a
    BlockFormat. rule: another rule for the scales than the format's own, of `tcemu.quantize.RULES`.
    rounding: of the elements, "RN", "RZ", "RM", "RP", or "SR", stochastic, with a jax.random `key`; scales follow their rule.
    kind, rule, axis and rounding are static under jit.
    amax: only with NVFP4: the largest magnitude of the tensor, where x is a part of it or it was calibrated. Without it, x is one tensor.
    Its axes are leading axes of x; each place along them is a tensor of its own.
    rows: so many neighbours along the other of x's last two axes share their scales, from the first on: 16 for the 16 x 16 blocks of
    NVFP4's weights (arXiv 2509.25149). `scales` has the scale of each of them; a block is then all that share one.

    Elements beyond the largest finite one saturate, and -0 stays -0, as in PTX cvt.satfinite. An element is x / scale rounded once; in
    NVFP4 x / scale is the rule's own f32 value, which is then rounded to e2m1.
    A block of zeros has the scale 2^-127 (NVFP4: what the rule gives). Scales below 2^-127 become it, those above 2^127 become 2^127.
    Inf or NaN anywhere in a block makes its scale NaN and so, by OCP MX 1.0, 5.1, all of its values, as in microxcaling and torchao. In
    NVFP4 such a block does not count for the tensor's largest magnitude. If that is so small that the tensor's scale is 0, "modelopt" and
    "torchao" divide by 0, as their code does: blocks of zeros then have NaN for a scale.
    Raises ValueError for another kind, rule, rounding, axis, rows, or shape of amax, TypeError for arrays that hold no floats.
    """
    fmt = _block_format(kind, rule)
    source, codes = _floats("x", x)
    ndim = codes.ndim - (source.words - 1)
    if ndim == 0:
        raise ValueError("x: got a scalar; blocks lie along an axis, so wanted an array [..., K]")
    if not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim:
        raise ValueError(f"axis: got {axis!r}; x has {ndim} axes, so wanted an int from {-ndim} to {ndim - 1}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is not one of {', '.join(ROUNDINGS)}")
    if rounding == "SR" and key is None:
        raise ValueError('rounding="SR" needs random bits: give key= (a jax.random key)')
    axis = int(axis) % ndim - ndim
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1 or (rows > 1 and (ndim == 1 or axis < -2)):
        raise ValueError(f"rows: got {rows!r} with axis={axis} of {ndim} axes; wanted 1, or more where axis is one of the last two")
    tensors = None if amax is None else _tensors(fmt, amax, codes.shape[: ndim + axis])
    rule_row = RULES[fmt.rule]
    scaling = rule_row.two_level
    blocking = _Blocking(source, F32 if rule_row.in_f32 or source != F64 else F64, fmt.block, axis, int(rows))
    largest, tensor = _largest(blocking, scaling and scaling.tensor, codes, *(tensors or (None, None)))
    scales, scalers = _scales(rule_row, fmt.element, blocking.arithmetic, largest, tensor)
    key = key if rounding == "SR" else None
    elements = _elements(blocking, fmt.element, rounding, scaling and scaling.apply, codes, scales, scalers, key)
    tensor_scale = lax.bitcast_convert_type(tensor[0], jnp.float32) if tensor else None
    return BlockQuantized(elements, jnp.moveaxis(scales, -1, axis), tensor_scale, fmt, axis)


def block_dequantize(q: BlockQuantized, dtype: DTypeLike = jnp.float32) -> Array:
    """The numbers that a BlockQuantized stands for: element * scale (* tensor scale), exact, then rounded once to `dtype`, RN.

    dtype: float32, float16 or bfloat16. float32 holds every value of the MX formats below 2^128; what is larger becomes Inf. There are
    larger values where x is near the end of f32 and the rule is "ceil", "even" or "rceil", which round up, where x is a larger float64,
    and in codes of other origin. NaN, of a scale or an element, is the canonical NaN.
    Raises TypeError or ValueError if codes or scales have another dtype or shape than the format wants, or the tensor's scale is missing.
    """
    if not isinstance(q, BlockQuantized):
        raise TypeError(f"q: got {type(q).__name__}; wanted a BlockQuantized, as block_quantize gives it")
    target = ARRAY_FORMATS.get(np.dtype(dtype))
    if target not in (F32, F16, BF16):
        raise TypeError(f"dtype: got {np.dtype(dtype)}; wanted float32, float16 or bfloat16")
    _check(q)
    fmt = q.format
    tensor = None if q.tensor_scale is None else array_codes(q.tensor_scale)[1]
    values = _dequantize(fmt.element, fmt.scale, fmt.block, q.axis, target, q.codes, q.scales, tensor)
    return lax.bitcast_convert_type(values, dtype)


def _block_format(kind: str | BlockFormat, rule: str | None) -> BlockFormat:
    fmt = BLOCK_FORMATS.get(kind) if isinstance(kind, str) else kind
    if not isinstance(fmt, BlockFormat):
        raise ValueError(f"kind: got {kind!r}; wanted one of {', '.join(BLOCK_FORMATS)}, or a BlockFormat")
    return fmt if rule is None else replace(fmt, rule=rule)


def _floats(name: str, x: ArrayLike) -> tuple[Format, Array]:
    """The format and the codes of a float array."""
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    try:
        source, codes = array_codes(x)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    if source.is_integer:
        raise TypeError(
            f"{name}: got {x.dtype}{list(x.shape)}; wanted floats (numbers: x.astype('float32'); raw codes: tcemu.formats.to_float)"
        )
    return source, codes


def _tensors(fmt: BlockFormat, amax: ArrayLike, leading: tuple[int, ...]) -> tuple[Format, Array]:
    """The format and the codes of the tensors' largest magnitudes. leading: x's shape before the axis of blocks."""
    if not fmt.two_level:
        raise ValueError(f"amax: {fmt} has no scale for the whole tensor; leave amax out")
    source, codes = _floats("amax", amax)
    shape = codes.shape[: codes.ndim - (source.words - 1)]
    if shape != leading[: len(shape)]:
        raise ValueError(f"amax: got shape {list(shape)}; wanted a scalar, or leading axes of x before that of blocks, {list(leading)}")
    return source, codes


# Each part is compiled apart. In one program XLA would compute the scale of a tensor anew for each block, and that of a block for each
# element.


class _Blocking(NamedTuple):
    """Which array is cut into blocks, and how."""

    source: Format  # of the array
    arithmetic: Format  # F32 or F64: its numbers are converted to it first
    block: int
    axis: int
    rows: int  # that share a scale, along the other of the last two axes

    def limbs(self, codes: Array) -> Limbs:
        """The codes in the format of the arithmetic."""
        return code_limbs(self.arithmetic, codes if self.source == self.arithmetic else convert(self.source, self.arithmetic, codes))

    def in_blocks(self, x: Array) -> Array:
        """[..., blocks, block]"""
        return in_groups(x, self.block, self.axis)


@partial(jax.jit, static_argnames=("blocking", "of_tensor", "amax_source"))
def _largest(
    blocking: _Blocking,
    of_tensor: Callable[[Array], tuple[Array, ...]] | None,
    codes: Array,
    amax_source: Format | None,
    amax: Array | None,
) -> tuple[Limbs, tuple[Array, ...]]:
    """The largest magnitude of each block, as codes in limbs, and what the rule makes of the tensor's: its scale first."""
    largest = _of_blocks(blocking, blocking.limbs(codes))
    if of_tensor is None:
        return largest, ()
    if amax_source is None or amax is None:
        return largest, of_tensor(jnp.max(jnp.where(largest[0] < F32.infinity, largest[0], 0), initial=0))
    return largest, of_tensor(convert(amax_source, F32, amax) & 0x7FFFFFFF)


@compiled_once(0)
def _of_blocks(blocking: _Blocking, limbs: Limbs) -> Limbs:
    """The largest magnitude of each block, of those that share a scale."""
    largest = _greatest(tuple(map(blocking.in_blocks, (*limbs[:-1], limbs[-1] & 0x7FFFFFFF))))
    if blocking.rows == 1:
        return largest
    count = largest[0].shape[-2]
    together = _greatest(tuple(in_groups(limb, blocking.rows, -2) for limb in largest))
    return tuple(repeated(jnp.swapaxes(limb, -1, -2), blocking.rows, count, -2) for limb in together)


@partial(jax.jit, static_argnames=("rule", "element", "arithmetic"))
def _scales(rule: Rule, element: Format, arithmetic: Format, largest: Limbs, tensor: tuple[Array, ...]) -> tuple[Array, Array]:
    """Each block's scale, and its scaler, what its elements are scaled by: the exponent of a power of two, or what `apply` takes."""
    if rule.exponent is not None:
        return _powers_of_two(rule.exponent, element, arithmetic, largest)
    assert rule.two_level is not None
    tensor = tuple(t.reshape(t.shape + (1,) * (largest[0].ndim - t.ndim)) for t in tensor)
    scales, scalers = rule.two_level.block(largest[0], *tensor)
    return _nan_if_special(rule.scale, arithmetic, largest, scales), scalers


@compiled_once(0, 1, 2)
def _powers_of_two(exponent: Callable[..., Array], element: Format, arithmetic: Format, largest: Limbs) -> tuple[Array, Array]:
    """`_scales` where they are ue8m0."""
    scalers = exponent(largest, arithmetic, element)
    scalers = jnp.clip(scalers, UE8M0.least_exponent, UE8M0.greatest_exponent)
    return _nan_if_special(UE8M0, arithmetic, largest, (scalers + UE8M0.bias).astype(jnp.uint8)), scalers


def _nan_if_special(scale: Format, arithmetic: Format, largest: Limbs, scales: Array) -> Array:
    special = largest[-1] >= np.uint32(arithmetic.infinity >> 32 * (arithmetic.words - 1))  # magnitudes: Inf or NaN
    return jnp.where(special, scale.nan, scales).astype(jnp.uint8)


@partial(jax.jit, static_argnames=("blocking", "element", "rounding", "apply"))
def _elements(
    blocking: _Blocking,
    element: Format,
    rounding: str,
    apply: Callable[[Array, Array, Format], Array] | None,
    codes: Array,
    scales: Array,
    scalers: Array,
    key: PRNGKey | None,
) -> Array:
    """The codes of x / scale; apply: that of the rule's two levels, None where scales are powers of two."""

    def portable(codes: Array, scales: Array, scalers: Array) -> Array:
        limbs = blocking.limbs(codes)
        shape = limbs[0].shape
        random = None if key is None else blocking.in_blocks(jax.random.bits(key, shape, jnp.uint32))
        limbs = tuple(map(blocking.in_blocks, limbs))
        if apply is not None:
            limbs = (apply(limbs[0], scalers[..., None], F32),)
        elements = _rounded(blocking.arithmetic, element, rounding, limbs, scales, scalers if apply is None else None, random)
        return out_of_groups(elements, shape[blocking.axis], blocking.axis)

    small_is_zero = element.least_exponent - element.mantissa_bits > F32.least_exponent
    in_last = jnp.moveaxis(codes, blocking.axis, -1)
    if blocking.arithmetic != F32 or not small_is_zero or kernels.missing(blocking.source, element, rounding, in_last, scaled=True):
        return portable(codes, scales, scalers)
    by_kernel = partial(_elements_by_kernel, blocking, element, apply)
    return by_platform({elementwise.PLATFORM: by_kernel}, portable, codes, scales, scalers)


def _elements_by_kernel(
    blocking: _Blocking, element: Format, apply: Callable[[Array, Array, Format], Array] | None, codes: Array, scales: Array, scalers: Array
) -> Array:
    """`_elements` by the kernel, which divides by powers of two. A quotient too small for f32 is zero in an element's format."""
    if apply is None:
        scalers = jnp.maximum((scalers + F32.bias) << F32.mantissa_bits, 1 << F32.mantissa_bits - 1).astype(jnp.uint32)  # 2^-127: subnormal
    scalers = jnp.where(scales == (UE8M0 if apply is None else UE4M3).nan, F32.nan, scalers)
    call = Elements(blocking.source, element, True, None, multiplied=apply is multiply)
    elements = elementwise.rounded(call, jnp.moveaxis(codes, blocking.axis, -1), scalers, blocking.block)
    return jnp.moveaxis(elements, -1, blocking.axis)


@compiled_once(0, 1, 2)
def _rounded(
    arithmetic: Format, element: Format, rounding: str, limbs: Limbs, scales: Array, exponents: Array | None, random: Array | None
) -> Array:
    """Numbers [..., blocks, block], divided by 2^exponents [..., blocks] if there are any, as codes of the element."""
    number = decode_limbs(arithmetic, limbs)
    if exponents is not None:
        number = number._replace(exponent=number.exponent - exponents[..., None])
    scale_is_nan = scales == (UE4M3 if exponents is None else UE8M0).nan
    number = number._replace(nan=number.nan | scale_is_nan[..., None])
    return encode(element, number, rounding, overflow="saturate", random=random)


def _greatest(x: Limbs) -> Limbs:
    """The largest along the last axis."""
    if len(x) == 1:
        return (jnp.max(x[0], axis=-1),)
    top = jnp.max(x[1], axis=-1)
    return jnp.max(jnp.where(x[1] == top[..., None], x[0], 0), axis=-1), top


# ---- dequantise


def _check(q: BlockQuantized) -> None:
    fmt = q.format
    for name, value, dtype in (("codes", q.codes, fmt.element.dtype), ("scales", q.scales, fmt.scale.dtype)):
        if value.dtype != dtype:
            raise TypeError(f"{name}: got {dims(value)}; wanted {dtype}, raw codes, for {fmt}")
    ndim = q.codes.ndim
    if not -ndim <= q.axis < 0:
        raise ValueError(f"axis: got {q.axis}; codes have {ndim} axes, so wanted one from {-ndim} to -1")
    wanted = list(q.codes.shape)
    wanted[q.axis] = -(-wanted[q.axis] // fmt.block)
    if list(q.scales.shape) != wanted:
        raise ValueError(f"scales: got {dims(q.scales)} for codes {dims(q.codes)}; wanted {wanted}, one for each block of {fmt.block}")
    if fmt.two_level != (q.tensor_scale is not None):
        raise ValueError(f"tensor_scale: got {q.tensor_scale}; {fmt} {'needs one, float32' if fmt.two_level else 'has none'}")
    if q.tensor_scale is not None:
        shape = q.tensor_scale.shape
        if q.tensor_scale.dtype != jnp.float32 or shape != q.codes.shape[: len(shape)] or len(shape) > ndim + q.axis:
            raise ValueError(f"tensor_scale: got {dims(q.tensor_scale)}; wanted float32, a scalar or with leading axes of {dims(q.codes)}")


@compiled_once(0, 1, 2, 3, 4)
def _dequantize(
    element: Format, scale: Format, block: int, axis: int, target: Format, codes: Array, scales: Array, tensor_scale: Array | None
) -> Array:
    elements = decode(element, in_groups(codes, block, axis))
    scales = jnp.broadcast_to(jnp.moveaxis(scales, axis, -1)[..., None], elements.exponent.shape)
    number = product(elements, decode(scale, scales))
    number = number._replace(magnitude=number.magnitude[:1])  # at most 11 and 4 bits
    if tensor_scale is not None:
        whole = tensor_scale.reshape(tensor_scale.shape + (1,) * (scales.ndim - tensor_scale.ndim))
        whole = jnp.broadcast_to(whole, scales.shape)
        number = product(number, decode(F32, whole))
    return out_of_groups(encode(target, number), codes.shape[axis], axis)
