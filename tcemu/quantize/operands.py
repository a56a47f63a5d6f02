"""How an operand of a matrix product is brought to an instruction's format: scaled by tensor, row, column or block, and rounded.

Integers only. The f32 arithmetic of a scale is stated in `Quantizer` and rounded to nearest even, subnormals kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.arithmetic.backends import by_platform
from tcemu.arithmetic.kernels import elementwise
from tcemu.arithmetic.quotient import divide
from tcemu.formats import BF16, F32, ROUNDINGS, UE8M0, Format, array_codes, convert, to_float
from tcemu.quantize import kernels
from tcemu.quantize.block_formats import BlockFormat
from tcemu.quantize.blocks import block_quantize
from tcemu.quantize.groups import GroupSizes, in_groups, spread
from tcemu.quantize.hadamard import SIZES, Transform
from tcemu.quantize.scale_rules import RULES, largest_value

SCALINGS = ("none", "tensor", "row", "column", "block")
SCALES = ("f32", "power_of_two")
ONE, LEAST_SCALE = (np.float32(value).view(np.uint32) for value in (1.0, 2.0**-126))


def is_count(value: Any) -> bool:
    """An int of 1 or more; True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


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
    rows: of blocks that go into the instruction: so many rows of A (columns of B) share each scale, as 16 in the 16 x 16 blocks of NVFP4's
        weights. The instruction gets it once for each of them.
    hadamard: None, or n signs, 1 or -1, n a power of 4 up to 256: before all else every n elements along K, filled up with zeros, are
        multiplied by diag(signs) H / sqrt(n), H the Hadamard matrix of Sylvester's construction, as a kernel does it: rounded to bf16,
        by the target's bf16 instruction with f32 sums, rounded to bf16 again. A product wants it of both operands alike: there it cancels.

    An element is x / scale, in f32 and then in the format, each rounded once. Inf or NaN in a group makes its scale Inf or NaN, and its
    elements what the division by that gives. Raises ValueError for other words.
    """

    scaling: str = "none"
    block: tuple[int, int] | None = None
    scale: str = "f32"
    rule: str | None = None
    rounding: str = "RN"
    saturate: bool = False
    rows: int = 1
    hadamard: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field, wanted in (("scaling", SCALINGS), ("scale", SCALES), ("rule", (None, *RULES)), ("rounding", ROUNDINGS)):
            value = getattr(self, field)
            if not (value is None or isinstance(value, str)) or value not in wanted:
                raise ValueError(f"Quantizer({field}={value!r}): wanted one of {', '.join(map(str, wanted))}")
        if isinstance(self.saturate, np.bool_):
            object.__setattr__(self, "saturate", bool(self.saturate))
        if not isinstance(self.saturate, bool):
            raise ValueError(f"Quantizer(saturate={self.saturate!r}): wanted True or False")
        if isinstance(self.block, tuple):
            object.__setattr__(self, "block", tuple(int(v) if isinstance(v, np.integer) else v for v in self.block))
        block_fits = self.block is None or (isinstance(self.block, tuple) and len(self.block) == 2 and all(map(is_count, self.block)))
        if not block_fits or (self.block is not None and self.scaling != "block"):
            raise ValueError(
                f"Quantizer(scaling={self.scaling!r}, block={self.block!r}): block is a pair of sizes, (rows of A or columns of B, "
                'elements along K), with scaling="block" only'
            )
        if self.rule is not None and (self.scaling != "block" or self.block is not None):
            raise ValueError(f'Quantizer(rule={self.rule!r}): a rule is for the instruction\'s own blocks: scaling="block", block=None')
        self._check_rows_and_signs()

    def _check_rows_and_signs(self) -> None:
        if isinstance(self.rows, np.integer):
            object.__setattr__(self, "rows", int(self.rows))
        if not is_count(self.rows) or (self.rows > 1 and not self.in_unit):
            raise ValueError(
                f"Quantizer(rows={self.rows!r}): wanted 1, or how many rows share a scale of the instruction's own blocks: "
                'scaling="block", block=None'
            )
        if self.hadamard is None:
            return
        signs = tuple(np.ravel(self.hadamard).tolist()) if isinstance(self.hadamard, tuple | list | np.ndarray) else ()
        if len(signs) not in SIZES or any(isinstance(sign, bool) or sign not in (1, -1) for sign in signs):
            raise ValueError(
                f"Quantizer(hadamard={self.hadamard!r}): wanted None, or {', '.join(map(str, SIZES))} signs, each 1 or -1, "
                "as tcemu.quantize.SIGNS_16; the root of their number is a power of two, so that dividing by it loses nothing"
            )
        object.__setattr__(self, "hadamard", tuple(int(sign) for sign in signs))

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
        words += [f"{self.rows} rows share a scale"] if self.rows > 1 else []
        words += [f"after a Hadamard transform of {len(self.hadamard)}"] if self.hadamard else []
        return ", ".join(words)

    @property
    def in_unit(self) -> bool:
        """The scales go into the instruction."""
        return self.scaling == "block" and self.block is None


@dataclass(frozen=True)
class Scheme:
    """How one operand of an instruction is quantised: its quantiser, and what the instruction fixes. Hashable, so static under jit."""

    format: Format
    quantizer: Quantizer
    scale_format: Format | None = None  # of the scales of the instruction's blocks, and
    unit_block: int = 0  # how many elements along K share one; None and 0 if it has none
    transform: Transform | None = None  # what the quantiser's signs mean on the target

    @property
    def rows_together(self) -> int:
        """Neighbouring rows whose scales depend on each other, of which a part must have all."""
        return self.quantizer.rows if self.quantizer.in_unit else self.group_sizes.rows or 1

    @property
    def depth_together(self) -> int:
        """Neighbours along K that depend on each other in the same way."""
        return lcm(self.group_sizes.depth or 1, self.transform.size if self.transform else 1)

    @property
    def group_sizes(self) -> GroupSizes:
        """How many rows and elements along K share a scale."""
        if self.quantizer.in_unit:
            return GroupSizes(rows=1, depth=self.unit_block)
        if self.quantizer.scaling in ("row", "column"):
            return GroupSizes(rows=1, depth=None)
        return GroupSizes(*(self.quantizer.block or (None, None)))

    @property
    def rule(self) -> str:
        """How the scales of the instruction's blocks are found."""
        return self.quantizer.rule or ("floor" if self.scale_format == UE8M0 else "transformer_engine")

    @property
    def is_two_level(self) -> bool:
        """The scales of the instruction's blocks have one of the whole tensor above them, as NVFP4's."""
        return self.quantizer.in_unit and RULES[self.rule].two_level is not None

    @property
    def spans_rows(self) -> bool:
        """A scale is of all rows, so that one of a part of them needs the others."""
        return self.quantizer.scaling == "tensor" or self.is_two_level

    @property
    def spans_depth(self) -> bool:
        """A scale is of all of K, so that one of a part of K needs the rest."""
        return self.spans_rows or self.quantizer.scaling in ("row", "column")

    @property
    def rounds_once(self) -> bool:
        """Elements are rounded from the operand itself, or its quotients by powers of two, and not from quotients in f32."""
        if self.transform is not None:
            return True
        return self.quantizer.scaling == "none" or (self.quantizer.in_unit and not RULES[self.rule].in_f32)


class Quantized(NamedTuple):
    """An operand [..., R, K], R the rows of A or the columns of B, in an instruction's format.

    Of one that was transformed, K is filled up to whole groups of the transform.
    """

    codes: Array  # [..., R, K]
    unit_scales: Array | None = None  # codes of the instruction's scale format, [..., R, blocks along K]
    scales: Array | None = None  # f32 codes that multiply sums, [..., groups of rows, blocks along K], 1 where all share one
    tensor_scale: Array | None = None  # f32 code, a scalar


def quantize(
    scheme: Scheme,
    x: Array,
    *,
    scales: Array | None = None,
    key: PRNGKey | None = None,
    axis_name: str | None = None,
    amax: Array | None = None,
) -> Quantized:
    """x [..., R, K] of floats -> an operand of the instruction.

    scales: floats in place of the scales that x asks for, in their shape; those of the instruction's blocks are rounded to its format.
    key: where the quantiser rounds stochastically. axis_name: a mesh axis along which K is cut; scales that rows or the tensor share are
    then found over all of it. amax: where x is a part, what `largest` gives for the whole, the greatest of what it gives for the parts.
    """
    quantizer = scheme.quantizer
    x = x if scheme.transform is None else scheme.transform.of(x)
    key = key if quantizer.rounding == "SR" else None
    source, codes = array_codes(x)
    if quantizer.scaling == "none":
        return Quantized(codes=_elements(scheme, source, codes, None, key))
    if quantizer.in_unit and scales is None:
        return _in_unit_blocks(scheme, x, key, axis_name, amax)
    unit_scales = None
    if scales is None:
        scale_codes = _scales_of(scheme, _magnitudes(source, codes), axis_name, amax)
    else:
        scale_source, scale_codes = array_codes(scales)
        scale_codes = convert(scale_source, F32, scale_codes)
        if quantizer.in_unit:
            assert scheme.scale_format is not None
            unit_scales = convert(F32, scheme.scale_format, scale_codes, saturate=True)
            scale_codes = convert(scheme.scale_format, F32, unit_scales)
    elements = _elements(scheme, source, codes, scale_codes, key)
    if quantizer.in_unit:
        return Quantized(codes=elements, unit_scales=unit_scales)
    return Quantized(codes=elements, scales=scale_codes)


def largest(scheme: Scheme, x: Array) -> Array:
    """The magnitude that a scale of all of x [..., R, K] comes from, an f32 code: of rows [..., R, 1], of the tensor a scalar.

    A scalar 0 where no scale is of more than a block. As in `block_quantize`, what is in blocks with Inf or NaN does not count for NVFP4.
    """
    if not scheme.spans_depth:
        return jnp.zeros((), jnp.uint32)
    magnitudes = _magnitudes(*array_codes(x if scheme.transform is None else scheme.transform.of(x)))
    if scheme.is_two_level:
        of_blocks = _largest_of_groups(_largest_of_groups(magnitudes, scheme.unit_block, -1), scheme.quantizer.rows, -2)
        return jnp.max(jnp.where(of_blocks < F32.infinity, of_blocks, 0), initial=0)
    return jnp.max(magnitudes, initial=0) if scheme.spans_rows else jnp.max(magnitudes, axis=-1, keepdims=True, initial=0)


def scale_of_largest(scheme: Scheme, amax: Array) -> Array:
    """The scales, f32 codes, that follow from `largest`, in its shape."""
    two_level = RULES[scheme.rule].two_level if scheme.quantizer.in_unit else None
    if two_level is not None:
        return two_level.tensor(amax)[0]
    scale = jnp.maximum(divide(amax, largest_value(scheme.format), F32), LEAST_SCALE)
    if scheme.quantizer.scale == "power_of_two":
        up = (scale + ((1 << F32.mantissa_bits) - 1)) >> F32.mantissa_bits << F32.mantissa_bits
        scale = jnp.where(scale >= F32.infinity, scale, up)
    return jnp.where(amax == 0, ONE, scale)


def dequantized(scheme: Scheme, q: Quantized, depth: int) -> Array:
    """The numbers that an operand [..., R, depth] stands for, in plain float32: for derivatives, not for results. A transform is undone."""
    values = to_float(F32, convert(scheme.format, F32, q.codes))
    if q.unit_scales is not None and scheme.scale_format is not None:
        values = values * spread(to_float(scheme.scale_format, q.unit_scales), values.shape, scheme.group_sizes)
    if q.scales is not None:
        values = values * spread(to_float(F32, q.scales), values.shape, scheme.group_sizes)
    values = values if q.tensor_scale is None else values * to_float(F32, q.tensor_scale)
    return values if scheme.transform is None else scheme.transform.undone(values, depth)


def exact_factors(scheme: Scheme, q: Quantized) -> list[Array]:
    """An operand's elements and its scales, float32 arrays that broadcast. Their product, of 30 bits at most, is what it stands for."""
    shape, factors = q.codes.shape, [convert(scheme.format, F32, q.codes)]
    if q.unit_scales is not None and scheme.scale_format is not None:
        factors.append(spread(convert(scheme.scale_format, F32, q.unit_scales), shape, scheme.group_sizes))
    if q.scales is not None:
        factors.append(spread(q.scales, shape, scheme.group_sizes))
    factors += [] if q.tensor_scale is None else [q.tensor_scale]
    return [to_float(F32, factor) for factor in factors]


def exact_values(factors: Sequence[ArrayLike]) -> np.ndarray:
    """What `exact_factors` multiply to, float64."""
    values = np.float64(1)
    with np.errstate(invalid="ignore", over="ignore"):
        for factor in factors:
            values = values * np.asarray(factor, np.float64)
    return np.asarray(values)


def _in_unit_blocks(scheme: Scheme, x: Array, key: PRNGKey | None, axis_name: str | None, amax: Array | None) -> Quantized:
    """By the rule of a block format."""
    assert scheme.scale_format is not None
    block = BlockFormat(f"{scheme.format} by {scheme.unit_block}", scheme.format, scheme.unit_block, scheme.rule)
    if axis_name is not None and block.two_level:
        amax = lax.pmax(_magnitudes(*array_codes(x)).max(initial=0), axis_name)
    of_tensor = None if amax is None or not block.two_level else to_float(F32, amax)
    quantizer = scheme.quantizer
    q = block_quantize(x, block, rounding=quantizer.rounding, key=key, amax=of_tensor, rows=quantizer.rows)
    tensor_scale = None if q.tensor_scale is None else lax.bitcast_convert_type(q.tensor_scale, jnp.uint32)
    return Quantized(codes=q.codes, unit_scales=q.scales, tensor_scale=tensor_scale)


def _elements(scheme: Scheme, source: Format, codes: Array, scales: Array | None, key: PRNGKey | None) -> Array:
    """x / scale, in f32 and then in the instruction's format, each rounded once; without scales x itself, rounded once."""
    quantizer, target = scheme.quantizer, scheme.format
    saturate = quantizer.saturate or quantizer.in_unit

    def portable(codes: Array, scales: Array | None) -> Array:
        own = source
        if scales is not None:
            numbers, own = _in_f32(source, codes), F32
            codes = divide(numbers, spread(scales, numbers.shape, scheme.group_sizes), F32)
        return codes if own == target else convert(own, target, codes, quantizer.rounding, saturate, key)

    if kernels.missing(source, target, quantizer.rounding, codes, scaled=scales is not None):
        return portable(codes, scales)
    by_kernel = partial(kernels.elements, source, target, saturate, scheme.group_sizes)
    return by_platform({elementwise.PLATFORM: by_kernel}, portable, codes, scales)


def _in_f32(source: Format, codes: Array) -> Array:
    """f32 codes of the same numbers. A NaN may keep its payload, for which nothing here asks."""
    if source in (F32, BF16):
        return codes.astype(jnp.uint32) << (F32.bits - source.bits)
    return convert(source, F32, codes)


def _magnitudes(source: Format, codes: Array) -> Array:
    """f32 codes without their signs."""
    return _in_f32(source, codes) & 0x7FFFFFFF


def _scales_of(scheme: Scheme, magnitudes: Array, axis_name: str | None, amax: Array | None) -> Array:
    """f32 codes of the scales that the largest magnitude of each group asks for; amax: that of a whole of which these are a part."""
    rows, depth = scheme.group_sizes
    if amax is not None and scheme.spans_depth:
        found = amax.reshape((1,) * magnitudes.ndim) if rows is None else amax
    elif rows is None:
        found = jnp.max(magnitudes, initial=0).reshape((1,) * magnitudes.ndim)
    else:
        found = _largest_of_groups(_largest_of_groups(magnitudes, rows, -2), depth or max(1, magnitudes.shape[-1]), -1)
    if axis_name is not None and depth is None:
        found = lax.pmax(found, axis_name)
    return scale_of_largest(scheme, found)


def _largest_of_groups(x: Array, size: int, axis: int) -> Array:
    return x if size == 1 else jnp.moveaxis(jnp.max(in_groups(x, size, axis), axis=-1, initial=0), -1, axis)
