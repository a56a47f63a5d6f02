"""Block formats, MX and NVFP4: arrays of narrow elements that share scales, and their conversion from and to floats.

All arithmetic is on integers, so that CPU and GPU give the same words. The rules that find scales are in `scale_rules`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.bits import Limbs
from tcemu.base.compilation import compile_once
from tcemu.engine.arithmetic.fma import multiply_numbers
from tcemu.engine.backends.quotients import multiply
from tcemu.engine.formats.coding import codes_to_limbs, convert, decode, decode_limbs, encode, nan_code, round_from_f32, rounds_from_f32
from tcemu.engine.formats.float_arrays import array_codes
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, BF16, E2M1, E2M3, E3M2, E4M3, E5M2, F16, F32, F64, UE8M0, Format
from tcemu.engine.formats.rounding import ROUNDINGS
from tcemu.operations.quantize.scale_groups import GroupSizes, join_groups, repeat_scales, split_groups
from tcemu.operations.quantize.scale_rules import RULES, ScaleRule
from tcemu.operations.quantize.scaled_elements import max_magnitudes, round_by_platform, round_with_kernel, unsupported_reason


@dataclass(frozen=True)
class BlockFormat:
    """A block format: the elements, the block size, and the rule that finds a block's scale. Frozen and hashable.

    Attributes:
        name: The format's name.
        element: Signed float format of at most 16 bits that holds 2.
        block: Elements per block, at least 1.
        rule: One of `tcemu.quantize.RULES`, which determines the scale: a power of two (ue8m0: "floor", "ceil", "even", "rceil"), or ue4m3
            times an f32 for the whole tensor ("transformer_engine", "modelopt", "torchao", for elements of e2m1 only).
        source: Where the format is defined; ignored by equality.

    Raises:
        ValueError: a field has another value, or the rule does not fit the element.
    """

    name: str
    element: Format
    block: int
    rule: str
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"{self.name}: rule {self.rule!r} is not one of {', '.join(RULES)}")
        if self.element.is_integer or not self.element.signed or self.element.bits > 16 or self.element.max_exponent < 1:
            expected = "a signed float format of at most 16 bits that holds 2, as e4m3 or e2m1"
            raise ValueError(f"{self.name}: an element is {expected}, not {self.element}")
        if not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"{self.name}: block is {self.block!r}; expected the number of elements in a block, 1 or more")
        if self.two_level and self.element != E2M1:
            fitting = ", ".join(name for name, rule in RULES.items() if rule.exponent)
            raise ValueError(f"{self.name}: the rule {self.rule!r} is for elements of e2m1, not {self.element}; use one of {fitting}")

    def __repr__(self) -> str:
        return f"{self.name} (blocks of {self.block} {self.element}, scale {self.scale} by {self.rule!r})"

    @property
    def scale(self) -> Format:
        return RULES[self.rule].scale

    @property
    def two_level(self) -> bool:
        """True if an f32 scale of the whole tensor multiplies the block scales."""
        return RULES[self.rule].two_level is not None


BLOCK_FORMATS = {
    row.name: row
    for row in (
        BlockFormat("mxfp8_e4m3", E4M3, 32, "floor", "OCP MX 1.0, 5.2"),
        BlockFormat("mxfp8_e5m2", E5M2, 32, "floor", "OCP MX 1.0, 5.2"),
        BlockFormat("mxfp6_e3m2", E3M2, 32, "floor", "OCP MX 1.0, 5.2"),
        BlockFormat("mxfp6_e2m3", E2M3, 32, "floor", "OCP MX 1.0, 5.2"),
        BlockFormat("mxfp4", E2M1, 32, "floor", "OCP MX 1.0, 5.2"),
        BlockFormat("nvfp4", E2M1, 16, "transformer_engine", "arXiv 2509.25149; PTX ISA 9.7.14.3, .kind::mxf4nvf4.scale_vec::4X"),
    )
}


@partial(jax.tree_util.register_dataclass, data_fields=["codes", "scales", "tensor_scale"], meta_fields=["format", "axis"])
@dataclass(frozen=True)
class BlockQuantized:
    """An array in blocks: a pytree of its arrays, for jit, vmap and scan.

    Attributes:
        codes: Raw codes of the elements, in the array's own shape and the smallest unsigned dtype.
        scales: Raw codes of the scales, uint8, in the same shape, except that `axis` counts blocks.
        tensor_scale: None, or float32 whose axes are leading (batch) axes of codes.
        format: The block format.
        axis: The axis of the blocks, counted from the end.
    """

    codes: Array
    scales: Array
    tensor_scale: Array | None
    format: BlockFormat
    axis: int = -1

    def __repr__(self) -> str:
        fmt, axis = self.format, "" if self.axis == -1 else f" along axis {self.axis}"
        text = f"{fmt.name}: {describe_array(self.codes)} {fmt.element} in blocks of {fmt.block}{axis}"
        text += f", scales {describe_array(self.scales)} {fmt.scale}"
        if self.tensor_scale is None:
            return text
        value = self.tensor_scale
        known = isinstance(value, jax.Array | np.ndarray | np.generic) and not isinstance(value, Tracer) and value.ndim == 0
        return f"{text}, tensor scale {float(value) if known else describe_array(value)}"


def describe_array(x: Array) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "shape") else repr(x)


# ---- quantisation


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
    """Quantise an array in blocks along `axis`: element codes, scale codes and, for NVFP4, the tensor's scale.

    Elements beyond the largest finite one saturate, and -0 stays -0, as in PTX cvt.satfinite. An element is x / scale rounded once; in
    NVFP4 x / scale is the rule's own f32 value, which is then rounded to e2m1. A block of zeros has the scale 2^-127 (NVFP4: the rule's
    result). Scales are clamped to 2^-127 and 2^127. Inf or NaN anywhere in a block makes its scale NaN and so, by OCP MX 1.0, 5.1, all of
    its values, as in microxcaling; torchao does so for NaN alone. NVFP4 ignores such a block in the tensor's max magnitude. Where that is
    so small that the tensor's scale is 0, "modelopt" and "torchao" divide by 0, as their code does: blocks of zeros then have NaN scales.

    Args:
        x: Float array of any real dtype, with one axis or more. The last block may be short: it is quantised as if padded with zeros, and
            the codes keep x's shape. (For an instruction codes are padded with zeros, which is exact.)
        kind: A name of `tcemu.quantize.BLOCK_FORMATS` ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4", "nvfp4") or a
            `BlockFormat`. Static under `jit`.
        axis: The axis of the blocks. Static under `jit`.
        rule: Another rule for the scales, of `tcemu.quantize.RULES`. Static under `jit`.
        rounding: Rounding of the elements: "RN", "RZ", "RM", "RP", or "SR", stochastic, with a key. Static under `jit`.
        key: JAX random key for "SR".
        amax: With NVFP4 only: the max magnitude of the tensor, where x is a part of it or it was calibrated. Its axes are leading axes of
            x; each index along them is a tensor. None: x is one tensor.
        rows: Neighbours along the other of x's last two axes that share their scales: 16 for the 16 x 16 blocks of NVFP4's weights (arXiv
            2509.25149). `scales` repeats the scale for each of them; a block is then all elements that share one.

    Returns:
        A `BlockQuantized`.

    Raises:
        ValueError: another kind, rule, rounding, axis, rows, or shape of amax.
        TypeError: an array holds no floats.
    """
    fmt = _resolve_block_format(kind, rule)
    source, codes = _float_codes("x", x)
    ndim = codes.ndim - (source.words - 1)
    if ndim == 0:
        raise ValueError("x: got a scalar; blocks need an axis, so expected an array [..., K]")
    if not isinstance(axis, int | np.integer) or not -ndim <= axis < ndim:
        raise ValueError(f"axis: got {axis!r}; x has {ndim} axes, so expected an int from {-ndim} to {ndim - 1}")
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding={rounding!r} is not one of {', '.join(ROUNDINGS)}")
    if rounding == "SR" and key is None:
        raise ValueError('rounding="SR" needs random bits: give key= (a jax.random key)')
    axis = int(axis) % ndim - ndim
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1 or (rows > 1 and (ndim == 1 or axis < -2)):
        raise ValueError(f"rows: got {rows!r} with axis={axis} of {ndim} axes; expected 1, or more where axis is one of the last two")
    tensors = None if amax is None else _tensor_amax_codes(fmt, amax, codes.shape[: ndim + axis])
    rule_row = RULES[fmt.rule]
    scaling = rule_row.two_level
    blocking = _Blocking(source, F32 if rule_row.in_f32 or source != F64 else F64, fmt.block, axis, int(rows))
    codes = _materialize(codes)
    largest, tensor = _find_amax(blocking, scaling and scaling.tensor, codes, *(tensors or (None, None)))
    scales, scalers = _block_scales(rule_row, fmt.element, blocking.arithmetic, largest, tensor)
    key = key if rounding == "SR" else None
    encoding = _Encoding(blocking.arithmetic, fmt.element, rule_row.scale, rounding, scaling and scaling.apply)
    elements = _encode_elements(blocking, encoding, codes, scales, scalers, key)
    tensor_scale = lax.bitcast_convert_type(tensor[0], jnp.float32) if tensor else None
    return BlockQuantized(elements, jnp.moveaxis(scales, -1, axis), tensor_scale, fmt, axis)


def block_dequantize(q: BlockQuantized, dtype: DTypeLike = jnp.float32) -> Array:
    """Convert a BlockQuantized to floats: element * scale (* tensor scale), exact, then rounded once to `dtype`, to nearest even.

    Args:
        q: The array in blocks.
        dtype: float32, float16 or bfloat16. float32 holds every value of the MX formats below 2^128; larger ones become Inf. Larger values
            occur where x is near the end of f32 and the rule is "ceil", "even" or "rceil", which round up, where x is a larger float64, and
            in codes of other origin.

    Returns:
        Array of `dtype` in the shape of the codes. NaN, of a scale or an element, is the canonical NaN.

    Raises:
        TypeError, ValueError: codes or scales have another dtype or shape, or the tensor's scale is missing.
    """
    if not isinstance(q, BlockQuantized):
        raise TypeError(f"q: got {type(q).__name__}; expected a BlockQuantized, as block_quantize gives it")
    target = ARRAY_FORMATS.get(np.dtype(dtype))
    if target not in (F32, F16, BF16):
        raise TypeError(f"dtype: got {np.dtype(dtype)}; expected float32, float16 or bfloat16")
    _check_block_quantized(q)
    fmt = q.format
    tensor = None if q.tensor_scale is None else array_codes(q.tensor_scale)[1]
    values = _dequantize(fmt.element, fmt.scale, fmt.block, q.axis, target, q.codes, q.scales, tensor)
    return lax.bitcast_convert_type(values, dtype)


def _resolve_block_format(kind: str | BlockFormat, rule: str | None) -> BlockFormat:
    fmt = BLOCK_FORMATS.get(kind) if isinstance(kind, str) else kind
    if not isinstance(fmt, BlockFormat):
        raise ValueError(f"kind: got {kind!r}; expected one of {', '.join(BLOCK_FORMATS)}, or a BlockFormat")
    return fmt if rule is None else replace(fmt, rule=rule)


def _float_codes(name: str, x: ArrayLike) -> tuple[Format, Array]:
    """Returns the format and the codes of a float array."""
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    try:
        source, codes = array_codes(x)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    if source.is_integer:
        raise TypeError(
            f"{name}: got {x.dtype}{list(x.shape)}; expected floats (numbers: x.astype('float32'); raw codes: tcemu.formats.to_float)"
        )
    return source, codes


def _tensor_amax_codes(fmt: BlockFormat, amax: ArrayLike, leading: tuple[int, ...]) -> tuple[Format, Array]:
    """Returns the format and the codes of the tensors' max magnitudes. leading: x's shape before the axis of blocks."""
    if not fmt.two_level:
        raise ValueError(f"amax: {fmt} has no scale for the whole tensor; leave amax out")
    source, codes = _float_codes("amax", amax)
    shape = codes.shape[: codes.ndim - (source.words - 1)]
    if shape != leading[: len(shape)]:
        raise ValueError(f"amax: got shape {list(shape)}; expected a scalar, or leading axes of x before that of blocks, {list(leading)}")
    return source, codes


# Each part is compiled separately. In one program XLA would compute the scale of a tensor again for each block, and that of a block for
# each element.


class _Blocking(NamedTuple):
    """An array's division into blocks."""

    source: Format  # format of the array
    arithmetic: Format  # F32 or F64, to which the numbers are converted first
    block: int
    axis: int
    rows: int  # neighbours that share a scale, along the other of the last two axes

    def limbs(self, codes: Array) -> Limbs:
        """Returns the codes in the format of the arithmetic."""
        return codes_to_limbs(self.arithmetic, codes if self.source == self.arithmetic else convert(self.source, self.arithmetic, codes))

    def split_blocks(self, x: Array) -> Array:
        """Splits an array into [..., blocks, block]."""
        return split_groups(x, self.block, self.axis)


class _Encoding(NamedTuple):
    """The static part of the encoding of elements."""

    arithmetic: Format
    element: Format
    scale: Format
    rounding: str
    apply: Callable[[Array, Array, Format], Array] | None  # that of the rule's two levels; None where scales are powers of two


@partial(jax.jit, static_argnames=("blocking", "of_tensor", "amax_source"))
def _find_amax(
    blocking: _Blocking,
    of_tensor: Callable[[Array], tuple[Array, ...]] | None,
    codes: Array,
    amax_source: Format | None,
    amax: Array | None,
) -> tuple[Limbs, tuple[Array, ...]]:
    """Returns the max magnitude of each block, codes in limbs, and the rule's values for the tensor: its scale first."""
    largest = _block_amax(blocking, codes)
    if of_tensor is None:
        return largest, ()
    if amax_source is None or amax is None:
        return largest, of_tensor(jnp.max(jnp.where(largest[0] < F32.infinity, largest[0], 0), initial=0))
    return largest, of_tensor(convert(amax_source, F32, amax) & 0x7FFFFFFF)


@compile_once()
def _materialize(codes: Array) -> Array:
    """Returns the codes. What a unit returns is computed once: else XLA:CPU would transpose B for each kernel that reads it."""
    return codes


@compile_once(0)
def _block_amax(blocking: _Blocking, codes: Array) -> Limbs:
    """Returns the max magnitude of each block, over the rows that share a scale."""
    if blocking.arithmetic == F32 and blocking.axis == -1:
        largest: Limbs = (max_magnitudes(blocking.source, codes, blocking.block),)
    else:
        limbs = blocking.limbs(codes)
        largest = _max_limbs(tuple(map(blocking.split_blocks, (*limbs[:-1], limbs[-1] & 0x7FFFFFFF))))
    if blocking.rows == 1:
        return largest
    count = largest[0].shape[-2]
    together = _max_limbs(tuple(split_groups(limb, blocking.rows, -2) for limb in largest))
    return tuple(repeat_scales(jnp.swapaxes(limb, -1, -2), blocking.rows, count, -2) for limb in together)


@partial(jax.jit, static_argnames=("rule", "element", "arithmetic"))
def _block_scales(
    rule: ScaleRule, element: Format, arithmetic: Format, largest: Limbs, tensor: tuple[Array, ...]
) -> tuple[Array, Array | None]:
    """Returns each block's scale, and the argument of `apply`; None for powers of two."""
    if rule.exponent is not None:
        return _power_of_two_scales(rule.exponent, element, arithmetic, largest), None
    return _two_level_scales(rule.require_two_level().block, rule.scale, largest, tensor)


@compile_once(0, 1)
def _two_level_scales(
    block: Callable[..., tuple[Array, Array]], scale: Format, largest: Limbs, tensor: tuple[Array, ...]
) -> tuple[Array, Array]:
    """Computes `_block_scales` under a scale of the tensor."""
    tensor = tuple(t.reshape(t.shape + (1,) * (largest[0].ndim - t.ndim)) for t in tensor)
    scales, scalers = block(largest[0], *tensor)
    return _nan_if_special(scale, F32, largest, scales), scalers


@compile_once(0, 1, 2)
def _power_of_two_scales(exponent: Callable[..., Array], element: Format, arithmetic: Format, largest: Limbs) -> Array:
    """Computes scales in ue8m0."""
    exponents = jnp.clip(exponent(largest, arithmetic, element), UE8M0.min_exponent, UE8M0.max_exponent)
    return _nan_if_special(UE8M0, arithmetic, largest, (exponents + UE8M0.bias).astype(jnp.uint8))


def _nan_if_special(scale: Format, arithmetic: Format, largest: Limbs, scales: Array) -> Array:
    special = largest[-1] >= np.uint32(arithmetic.infinity >> 32 * (arithmetic.words - 1))  # magnitudes: Inf or NaN
    return jnp.where(special, scale.nan, scales).astype(jnp.uint8)


@partial(jax.jit, static_argnums=(0, 1))
def _encode_elements(
    blocking: _Blocking, encoding: _Encoding, codes: Array, scales: Array, scalers: Array | None, key: PRNGKey | None
) -> Array:
    """Computes the codes of x / scale. scalers: the argument of `encoding.apply`."""

    def portable(codes: Array, scales: Array, scalers: Array | None) -> Array:
        limbs = blocking.limbs(codes)
        shape = limbs[0].shape
        random = None if key is None else blocking.split_blocks(jax.random.bits(key, shape, jnp.uint32))
        limbs = tuple(map(blocking.split_blocks, limbs))
        elements = _scale_and_encode(encoding, limbs, scales, scalers, random)
        return join_groups(elements, shape[blocking.axis], blocking.axis)

    element = encoding.element
    small_is_zero = element.min_exponent - element.mantissa_bits > F32.min_exponent
    in_last = jnp.moveaxis(codes, blocking.axis, -1)
    reason = "" if blocking.arithmetic == F32 and small_is_zero else f"{element} from {blocking.arithmetic} may differ from f32 quotients"
    reason = reason or unsupported_reason(blocking.source, element, encoding.rounding, in_last, scaled=True)
    return round_by_platform(reason, partial(_encode_with_kernel, blocking, encoding), portable, codes, scales, scalers)


def _encode_with_kernel(
    blocking: _Blocking, encoding: _Encoding, platform: str, codes: Array, scales: Array, scalers: Array | None
) -> Array:
    """Encodes elements by a kernel, which divides by powers of two. A quotient too small for f32 is zero in the element's format."""
    element, scale = encoding.element, encoding.scale
    if scalers is not None:
        scales = jnp.where(scales == scale.nan, F32.nan, scalers)
    sizes, codes = GroupSizes(rows=1, depth=blocking.block), jnp.moveaxis(codes, blocking.axis, -1)
    multiplied, divisor = encoding.apply is multiply, scale if scalers is None else F32
    elements = round_with_kernel(blocking.source, element, True, sizes, platform, codes, scales, multiplied=multiplied, scale=divisor)
    return jnp.moveaxis(elements, -1, blocking.axis)


@compile_once(0)
def _scale_and_encode(encoding: _Encoding, limbs: Limbs, scales: Array, scalers: Array | None, random: Array | None) -> Array:
    """Encodes numbers [..., blocks, block] as elements: divided by scales [..., blocks] in ue8m0, or scaled by `apply`."""
    arithmetic, element, scale, rounding, apply = encoding
    scale_is_nan = (scales == scale.nan)[..., None]
    if apply is not None and scalers is not None:
        limbs = (apply(limbs[0], scalers[..., None], F32),)
        if rounding == "RN" and rounds_from_f32(F32, element):
            return jnp.where(scale_is_nan, element.dtype.type(nan_code(element)), round_from_f32(element, True, limbs[0]))
    number = decode_limbs(arithmetic, limbs)
    if apply is None:
        number = number._replace(exponent=number.exponent - (scales.astype(jnp.int32) - UE8M0.bias)[..., None])
    return encode(element, number._replace(nan=number.nan | scale_is_nan), rounding, overflow="saturate", random=random)


def _max_limbs(x: Limbs) -> Limbs:
    """Returns the maximum along the last axis."""
    if len(x) == 1:
        return (jnp.max(x[0], axis=-1),)
    top = jnp.max(x[1], axis=-1)
    return jnp.max(jnp.where(x[1] == top[..., None], x[0], 0), axis=-1), top


# ---- dequantisation


def _check_block_quantized(q: BlockQuantized) -> None:
    fmt = q.format
    for name, value, dtype in (("codes", q.codes, fmt.element.dtype), ("scales", q.scales, fmt.scale.dtype)):
        if value.dtype != dtype:
            raise TypeError(f"{name}: got {describe_array(value)}; expected {dtype}, raw codes, for {fmt}")
    ndim = q.codes.ndim
    if not -ndim <= q.axis < 0:
        raise ValueError(f"axis: got {q.axis}; codes have {ndim} axes, so expected one from {-ndim} to -1")
    expected = list(q.codes.shape)
    expected[q.axis] = -(-expected[q.axis] // fmt.block)
    if list(q.scales.shape) != expected:
        raise ValueError(
            f"scales: got {describe_array(q.scales)} for codes {describe_array(q.codes)}; expected {expected}, "
            f"one for each block of {fmt.block}"
        )
    if fmt.two_level != (q.tensor_scale is not None):
        raise ValueError(f"tensor_scale: got {q.tensor_scale}; {fmt} {'needs one, float32' if fmt.two_level else 'has none'}")
    if q.tensor_scale is not None:
        shape = q.tensor_scale.shape
        if q.tensor_scale.dtype != jnp.float32 or shape != q.codes.shape[: len(shape)] or len(shape) > ndim + q.axis:
            raise ValueError(
                f"tensor_scale: got {describe_array(q.tensor_scale)}; expected float32, a scalar or with leading axes "
                f"of {describe_array(q.codes)}"
            )


@compile_once(0, 1, 2, 3, 4)
def _dequantize(
    element: Format, scale: Format, block: int, axis: int, target: Format, codes: Array, scales: Array, tensor_scale: Array | None
) -> Array:
    elements = decode(element, split_groups(codes, block, axis))
    scales = jnp.broadcast_to(jnp.moveaxis(scales, axis, -1)[..., None], elements.exponent.shape)
    number = multiply_numbers(elements, decode(scale, scales))
    number = number._replace(magnitude=number.magnitude[:1])  # at most 11 and 4 bits
    if tensor_scale is not None:
        whole = tensor_scale.reshape(tensor_scale.shape + (1,) * (scales.ndim - tensor_scale.ndim))
        whole = jnp.broadcast_to(whole, scales.shape)
        number = multiply_numbers(number, decode(F32, whole))
    return join_groups(encode(target, number), codes.shape[axis], axis)
