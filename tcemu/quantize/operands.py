"""How an operand of a matrix product is brought to an instruction's format: scaled by tensor, row, column or block, and rounded.

Integers only. The f32 arithmetic of a scale is stated in `Quantizer` and rounded to nearest even, subnormals kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax

from tcemu.arithmetic.quotient import divide
from tcemu.formats import F32, ROUNDINGS, UE8M0, Format, array_codes, convert, to_float
from tcemu.quantize.blocks import BlockFormat, block_quantize
from tcemu.quantize.scale_rules import RULES

SCALINGS = ("none", "tensor", "row", "column", "block")
SCALES = ("f32", "power_of_two")
ONE, LEAST = (np.float32(value).view(np.uint32) for value in (1.0, 2.0**-126))


@dataclass(frozen=True)
class Quantizer:
    """How one operand is scaled and rounded to its format.

    scaling: what shares a scale. "none"; "tensor", the whole array, batch axes included; "row", a row of A; "column", a column of B;
        "block", so many rows of A (columns of B) times so many elements along K.
    block: (rows of A or columns of B, elements along K) of a "block" whose scale multiplies sums outside the instruction, as (1, 128);
        None: the blocks of an instruction with .block_scale, whose scales go into it.
    scale: of what multiplies outside: "f32", the largest magnitude over the format's largest value; "power_of_two", the same rounded up to
        a power of two. At least 2^-126, and 1 where all is zero.
    rule: of blocks that go into the instruction: one of `tcemu.quantize.RULES`; None: "floor" (OCP MX 1.0, 6.3) for ue8m0,
        "transformer_engine" for ue4m3, whose tensor scale multiplies the result.
    rounding: of the elements, "RN", "RZ", "RM", "RP", or "SR", stochastic, which needs a key where the product is computed.
    saturate: elements out of range become the largest finite value, not Inf or NaN; those of the instruction's own blocks always do.

    An element is x / scale, in f32 and then in the format, each rounded once. Inf or NaN in a group makes all of it Inf, NaN or zero as
    that division does. Raises ValueError for other words.
    """

    scaling: str = "none"
    block: tuple[int, int] | None = None
    scale: str = "f32"
    rule: str | None = None
    rounding: str = "RN"
    saturate: bool = False

    def __post_init__(self) -> None:
        for field, wanted in (("scaling", SCALINGS), ("scale", SCALES), ("rule", (None, *RULES)), ("rounding", ROUNDINGS)):
            if getattr(self, field) not in wanted:
                raise ValueError(f"Quantizer({field}={getattr(self, field)!r}): wanted one of {', '.join(map(str, wanted))}")
        sizes = self.block is None or (
            isinstance(self.block, tuple) and len(self.block) == 2 and all(isinstance(v, int) and v > 0 for v in self.block)
        )
        if not sizes or (self.block is not None and self.scaling != "block"):
            raise ValueError(
                f"Quantizer(scaling={self.scaling!r}, block={self.block!r}): block is a pair of sizes, (rows of A or columns of B, "
                'elements along K), with scaling="block" only'
            )
        if self.rule is not None and (self.scaling != "block" or self.block is not None):
            raise ValueError(f'Quantizer(rule={self.rule!r}): a rule is for the instruction\'s own blocks: scaling="block", block=None')

    def __str__(self) -> str:
        per = {
            "none": "unscaled",
            "block": f"per block of {' x '.join(map(str, self.block or ()))}" if self.block else "in the unit's blocks",
        }
        words = [per.get(self.scaling, f"per {self.scaling}")]
        if self.scaling != "none" and (self.scaling != "block" or self.block):
            words.append("scales f32" if self.scale == "f32" else "scales powers of two")
        words += [f"by {self.rule!r}"] if self.rule else []
        words += [self.rounding] if self.rounding != "RN" else []
        words += [] if self.saturate or self.in_unit else ["not saturated"]
        return ", ".join(words)

    @property
    def in_unit(self) -> bool:
        """The scales go into the instruction."""
        return self.scaling == "block" and self.block is None


class Quantized(NamedTuple):
    """An operand [..., R, K], R the rows of A or the columns of B, in an instruction's format."""

    codes: Array  # [..., R, K]
    unit_scales: Array | None = None  # codes of the instruction's scale format, [..., R, blocks along K]
    scales: Array | None = None  # f32 codes that multiply sums, [..., groups of rows, blocks along K], 1 where all share one
    tensor_scale: Array | None = None  # f32 code, a scalar


def shared_by(quantizer: Quantizer, unit_block: int) -> tuple[int | None, int | None]:
    """How many rows and elements along K share a scale; None: all."""
    if quantizer.in_unit:
        return 1, unit_block
    return {"row": (1, None), "column": (1, None), "block": quantizer.block or (1, 1)}.get(quantizer.scaling, (None, None))


def quantize(
    fmt: Format,
    quantizer: Quantizer,
    x: Array,
    given: Array | None,
    key: PRNGKey | None,
    *,
    stype: Format | None = None,
    unit_block: int = 0,
    axis_name: str | None = None,
) -> Quantized:
    """x [..., R, K] of floats -> an operand in format `fmt`.

    given: float scales in place of those that x asks for, in their shape; those of the instruction's blocks are rounded to `stype`.
    stype, unit_block: the instruction's scale format, and the elements along K that share one. axis_name: a mesh axis along which K is cut,
    so that what rows or the tensor share is found over all of it.
    """
    key = key if quantizer.rounding == "SR" else None
    source, codes = array_codes(x)
    if quantizer.scaling == "none":
        return Quantized(_rounded(fmt, quantizer, source, codes, key))
    if quantizer.in_unit and given is None:
        assert stype is not None
        rule = quantizer.rule or ("floor" if stype == UE8M0 else "transformer_engine")
        block = BlockFormat(f"{fmt} by {unit_block}", fmt, unit_block, rule)
        amax = None
        if axis_name is not None and block.two_level:
            amax = to_float(F32, lax.pmax(_magnitudes(source, codes).max(initial=0), axis_name))
        q = block_quantize(x, block, rounding=quantizer.rounding, key=key, amax=amax)
        tensor = None if q.tensor_scale is None else lax.bitcast_convert_type(q.tensor_scale, jnp.uint32)
        return Quantized(q.codes, q.scales, None, tensor)
    rows, depth = shared_by(quantizer, unit_block)
    unit_scales = None
    if given is None:
        scales = _found(fmt, quantizer, _magnitudes(source, codes), rows, depth, axis_name)
    else:
        scales = convert(array_codes(given)[1], array_codes(given)[0], F32)
        if quantizer.in_unit:
            assert stype is not None
            unit_scales = convert(scales, F32, stype, saturate=True)
            scales = convert(unit_scales, stype, F32)
    values = divide(convert(codes, source, F32), spread(scales, x.shape, rows, depth), F32)
    elements = _rounded(fmt, quantizer, F32, values, key)
    return Quantized(elements, unit_scales) if quantizer.in_unit else Quantized(elements, None, scales)


def spread(scales: Array, shape: tuple[int, ...], rows: int | None, depth: int | None) -> Array:
    """A scale for each element of [..., R, K]. rows, depth: as `shared_by` gives them."""
    for axis, size in ((-2, rows), (-1, depth)):
        if size is not None and size > 1:
            scales = lax.slice_in_dim(jnp.repeat(scales, size, axis=axis), 0, shape[axis], axis=axis % scales.ndim)
    return jnp.broadcast_to(scales, shape)


def dequantized(fmt: Format, q: Quantized, quantizer: Quantizer, stype: Format | None, unit_block: int) -> Array:
    """The numbers that an operand stands for, in plain float32: for derivatives, not for results."""
    values, (rows, depth) = to_float(F32, convert(q.codes, fmt, F32)), shared_by(quantizer, unit_block)
    if q.unit_scales is not None and stype is not None:
        values = values * spread(to_float(stype, q.unit_scales), values.shape, rows, depth)
    if q.scales is not None:
        values = values * spread(to_float(F32, q.scales), values.shape, rows, depth)
    return values if q.tensor_scale is None else values * to_float(F32, q.tensor_scale)


def _rounded(fmt: Format, quantizer: Quantizer, source: Format, codes: Array, key: PRNGKey | None) -> Array:
    return codes if source == fmt else convert(codes, source, fmt, quantizer.rounding, quantizer.saturate or quantizer.in_unit, key)


def _magnitudes(source: Format, codes: Array) -> Array:
    return convert(codes, source, F32) & 0x7FFFFFFF


def _found(fmt: Format, quantizer: Quantizer, magnitudes: Array, rows: int | None, depth: int | None, axis_name: str | None) -> Array:
    """f32 codes of the scales that the largest magnitudes ask for."""
    if rows is None:
        amax = jnp.max(magnitudes, initial=0).reshape((1,) * magnitudes.ndim)
    else:
        amax = _in_groups(_in_groups(magnitudes, rows, -2), depth or max(1, magnitudes.shape[-1]), -1)
    if axis_name is not None and depth is None:
        amax = lax.pmax(amax, axis_name)
    scale = jnp.maximum(divide(amax, greatest(fmt), F32), LEAST)
    if quantizer.scale == "power_of_two":
        up = (scale + ((1 << F32.mantissa_bits) - 1)) >> F32.mantissa_bits << F32.mantissa_bits
        scale = jnp.where(scale >= F32.infinity, scale, up)
    return jnp.where(amax == 0, ONE, scale)


def greatest(fmt: Format) -> Array:
    """f32 code of a format's largest value."""
    return convert(np.array(fmt.greatest_magnitude << fmt.unused_bits, fmt.dtype), fmt, F32)


def _in_groups(x: Array, size: int, axis: int) -> Array:
    """The largest of each group of `size` along an axis, the last perhaps not full."""
    if size == 1:
        return x
    x = jnp.moveaxis(x, axis, -1)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])
    return jnp.moveaxis(jnp.max(x.reshape(*x.shape[:-1], -1, size), axis=-1, initial=0), -1, axis)


def own_keys(key: PRNGKey | None) -> tuple[PRNGKey | None, ...]:
    """A key for A, for B, and for each of the two products of the backward pass."""
    return (None,) * 4 if key is None else tuple(jax.random.split(key, 4))
