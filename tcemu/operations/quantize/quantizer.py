"""`Quantizer`: an operand of a product scaled by tensor, row, column or block, and rounded to an instruction's format.

All arithmetic is on integers. The f32 arithmetic of scales is rounded to nearest even, with subnormals kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import lcm
from operator import mul
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.base.compilation import compile_once
from tcemu.base.records import Record, is_count
from tcemu.engine.arithmetic.integer_quotients import divide_on_integers
from tcemu.engine.backends.elementwise_request import ScaleRequest
from tcemu.engine.backends.quotients import divide, divide_by_machine, multiply
from tcemu.engine.formats.coding import convert, round_from_f32, rounds_from_f32
from tcemu.engine.formats.float_arrays import array_codes, to_float
from tcemu.engine.formats.number_formats import F16, F32, UE8M0, Format
from tcemu.engine.formats.rounding import ROUNDINGS
from tcemu.operations.quantize.block_formats import BlockFormat, block_quantize
from tcemu.operations.quantize.hadamard import HADAMARD_SIZES, HadamardTransform
from tcemu.operations.quantize.scale_groups import GroupSizes, broadcast_scales, max_along_rows, split_groups
from tcemu.operations.quantize.scale_rules import RULES, max_finite_code
from tcemu.operations.quantize.scaled_elements import (
    ONE,
    f32_codes,
    max_magnitudes,
    max_of_all,
    round_by_platform,
    round_with_kernel,
    scales_of_magnitudes,
    unsupported_reason,
)

SCALINGS = ("none", "tensor", "row", "column", "block")
SCALES = ("f32", "f16", "power_of_two")
Rule = Callable[[Array], Array]  # from the max magnitudes of groups, float32, to their scales
MIN_SCALE = np.float32(2.0**-126).view(np.uint32)


@dataclass(frozen=True)
class Quantizer(Record):
    """The scaling of one operand and its rounding to an instruction's format: a frozen value.

    An element is x / scale, in f32 and then in the format, each rounded once. Inf or NaN in a group makes its scale Inf or NaN, and its
    elements the results of the division by that.

    Attributes:
        scaling: Elements that share a scale. "none"; "tensor", the whole array, batch axes included; "row", a row of A; "column", a column
            of B; "block", a block of rows of A (columns of B) and elements along K.
        block: (rows of A or columns of B, elements along K) of a "block" whose scale multiplies sums outside the instruction, as (1, 128).
            None: the blocks of an instruction with .block_scale, whose scales are operands of the instruction.
        scale: Scales outside the instruction: "f32", the max magnitude over the format's largest value; "f16", the same rounded to f16;
            "power_of_two", rounded up to a power of two. At least 2^-126, and 1 where all elements are zero.
        rule: Rule of the instruction's blocks, one of `tcemu.quantize.RULES`. None: "floor" (OCP MX 1.0, 6.3) for ue8m0,
            "transformer_engine" for ue4m3, whose tensor scale multiplies the result. Or a rule of your own for any scales: a JAX function
            from the max magnitudes of groups, float32, to their scales, as `lambda amax: 1.1 * amax / 448`. Where all elements are zero the
            scale is 1. Those of the instruction's blocks are rounded to its scale format, and the tensor has no scale then. The function's
            float arithmetic is XLA's, which may divide by multiplying with a reciprocal.
        rounding: Rounding of the elements: "RN", "RZ", "RM", "RP", or "SR", stochastic, which needs a key where the product is computed.
        saturate: Elements out of range become the largest finite value, not Inf or NaN; those of the instruction's blocks always do.
        rows: Rows of A (columns of B) that share each scale of the instruction's blocks, as 16 in the 16 x 16 blocks of NVFP4's weights.
            The instruction gets the scale once per row.
        hadamard: None, or n signs, 1 or -1, n a power of 4 up to 256. First every n elements along K, padded with zeros, are multiplied by
            diag(signs) H / sqrt(n), H the Hadamard matrix of Sylvester's construction, as a kernel does it: rounded to bf16, by the
            target's bf16 instruction with f32 sums, rounded to bf16 again. Both operands of a product need the same signs, which cancel
            there.
        element: None, or a format that the instruction need not have: elements are quantised to it, and the instruction gets
            element * scale, in f32, rounded to its own format. So kernels multiply by quantised weights ("weight-only"), and so a format of
            your own, a `tcemu.formats.Format`, gets into a product. Scales then have no part in the sums, and blocks need no promotion.

    Raises:
        ValueError: a field has another value, or two fields contradict each other.
    """

    scaling: str = "none"
    block: tuple[int, int] | None = None
    scale: str = "f32"
    rule: str | Rule | None = None
    rounding: str = "RN"
    saturate: bool = False
    rows: int = 1
    hadamard: tuple[int, ...] | None = None
    element: Format | None = None

    def __post_init__(self) -> None:
        if isinstance(self.saturate, np.bool_):
            object.__setattr__(self, "saturate", bool(self.saturate))
        rules = (self.rule,) if callable(self.rule) else (None, *RULES)
        self.check_fields(flags="saturate", counts="rows", scaling=SCALINGS, scale=SCALES, rounding=ROUNDINGS, rule=rules)
        if isinstance(self.block, tuple):
            object.__setattr__(self, "block", tuple(int(v) if isinstance(v, np.integer) else v for v in self.block))
        block_fits = self.block is None or (isinstance(self.block, tuple) and len(self.block) == 2 and all(map(is_count, self.block)))
        if not block_fits or (self.block is not None and self.scaling != "block"):
            raise ValueError(
                f"Quantizer(scaling={self.scaling!r}, block={self.block!r}): block is a pair of sizes, (rows of A or columns of B, "
                'elements along K), with scaling="block" only'
            )
        if isinstance(self.rule, str) and (self.scaling != "block" or self.block is not None):
            raise ValueError(f'Quantizer(rule={self.rule!r}): a rule is for the instruction\'s own blocks: scaling="block", block=None')
        if callable(self.rule) and (self.scaling == "none" or self.scale != "f32" or self.rows != 1):
            raise ValueError(
                f"Quantizer(scaling={self.scaling!r}, scale={self.scale!r}, rows={self.rows!r}, rule=a function): the function gives the "
                f"scales; leave scale and rows out, and give a scaling, one of {', '.join(SCALINGS[1:])}"
            )
        if not (self.element is None or isinstance(self.element, Format)):
            raise ValueError(f"Quantizer(element={self.element!r}): expected a tcemu.formats.Format, as tcemu.formats.S4, or None")
        if self.element is not None and (self.scales_in_unit or self.element.bits > 16 or not self.element.signed):
            raise ValueError(
                f"Quantizer(scaling={self.scaling!r}, block={self.block!r}, element={self.element}): an element is of a signed format of "
                "at most 16 bits, with scales outside the instruction; give the sizes of a block, as block=(1, 64), or another scaling"
            )
        if self.element is not None and not self.element.is_integer and not F32.can_represent(self.element):
            top, unit = self.element.max_exponent, self.element.min_exponent - self.element.mantissa_bits
            raise ValueError(
                f"Quantizer(element={self.element}): it has numbers up to 2^{top} in steps of 2^{unit}, and quotients are in f32, which "
                "lacks some of them; take another exponent bias"
            )
        self._check_rows_and_signs()

    def _check_rows_and_signs(self) -> None:
        if self.rows > 1 and not self.scales_in_unit:
            raise ValueError(
                f"Quantizer(rows={self.rows!r}): expected 1, or how many rows share a scale of the instruction's own blocks: "
                'scaling="block", block=None'
            )
        if self.hadamard is None:
            return
        signs = tuple(np.ravel(self.hadamard).tolist()) if isinstance(self.hadamard, tuple | list | np.ndarray) else ()
        if len(signs) not in HADAMARD_SIZES or any(isinstance(sign, bool) or sign not in (1, -1) for sign in signs):
            raise ValueError(
                f"Quantizer(hadamard={self.hadamard!r}): expected None, or {', '.join(map(str, HADAMARD_SIZES))} signs, each 1 or -1, "
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
            words.append("scales powers of two" if self.scale == "power_of_two" else f"scales {self.scale}")
        words = [f"{self.element} {words[0]}", *words[1:], "dequantised"] if self.element is not None else words
        words += [f"by {self.rule if isinstance(self.rule, str) else getattr(self.rule, '__name__', 'a function')!r}"] if self.rule else []
        words += [self.rounding] if self.rounding != "RN" else []
        words += [] if self.saturate or self.scales_in_unit else ["not saturated"]
        words += [f"{self.rows} rows share a scale"] if self.rows > 1 else []
        words += [f"after a Hadamard transform of {len(self.hadamard)}"] if self.hadamard else []
        return ", ".join(words)

    @property
    def scales_in_unit(self) -> bool:
        """True if the scales are operands of the instruction."""
        return self.scaling == "block" and self.block is None

    @property
    def outer_block(self) -> tuple[int, int] | None:
        """The block whose scale multiplies sums outside the instruction, or None."""
        return self.block if self.element is None else None


@dataclass(frozen=True)
class Scheme:
    """The quantisation of one operand of an instruction: the quantiser, and what the instruction fixes. Hashable, so static under jit."""

    format: Format
    quantizer: Quantizer
    scale_format: Format | None = None  # format of the instruction's block scales
    unit_block: int = 0  # elements along K that share a block scale; 0 without block scales
    transform: HadamardTransform | None = None  # the transform by the quantiser's signs on the target

    def require_scale_format(self) -> Format:
        """Return the format of the instruction's block scales.

        Raises:
            ValueError: The instruction has none.
        """
        if self.scale_format is None:
            raise ValueError(f"an instruction without block scales quantises {self.format}")
        return self.scale_format

    @property
    def row_granularity(self) -> int:
        """Neighbouring rows whose scales depend on each other; a part of the operand must hold multiples of them."""
        return self.quantizer.rows if self.quantizer.scales_in_unit else self.group_sizes.rows or 1

    @property
    def depth_granularity(self) -> int:
        """The same along K."""
        return lcm(self.group_sizes.depth or 1, self.transform.size if self.transform else 1)

    @property
    def group_sizes(self) -> GroupSizes:
        """Rows, and elements along K, that share a scale."""
        if self.quantizer.scales_in_unit:
            return GroupSizes(rows=1, depth=self.unit_block)
        if self.quantizer.scaling in ("row", "column"):
            return GroupSizes(rows=1, depth=None)
        return GroupSizes(*(self.quantizer.block or (None, None)))

    @property
    def rule(self) -> str | Rule:
        """The rule that finds the scales of the instruction's blocks, or the user's own for any scales."""
        return self.quantizer.rule or ("floor" if self.scale_format == UE8M0 else "transformer_engine")

    @property
    def is_two_level(self) -> bool:
        """True if a tensor scale multiplies the scales of the instruction's blocks, as in NVFP4."""
        return self.quantizer.scales_in_unit and isinstance(self.rule, str) and RULES[self.rule].two_level is not None

    @property
    def spans_rows(self) -> bool:
        """True if a scale depends on all rows."""
        return self.quantizer.scaling == "tensor" or self.is_two_level

    @property
    def spans_depth(self) -> bool:
        """True if a scale depends on all of K."""
        return self.spans_rows or self.quantizer.scaling in ("row", "column")

    @property
    def rounds_once(self) -> bool:
        """True if elements are rounded from the operand or its quotients by powers of two, and not from quotients in f32."""
        if self.transform is not None:
            return True
        by_exponent = self.quantizer.scales_in_unit and isinstance(self.rule, str) and not RULES[self.rule].in_f32
        return self.quantizer.scaling == "none" or by_exponent

    @property
    def outer_sizes(self) -> GroupSizes:
        """Rows, and elements along K, that share a scale outside the instruction; None: all, as where the scales end before it."""
        return self.group_sizes if self.quantizer.element is None else GroupSizes(None, None)

    @property
    def of_elements(self) -> Scheme:
        """The quantisation to the quantiser's own element format, before elements are dequantised to the instruction's."""
        quantizer = self.quantizer
        return self if quantizer.element is None else replace(self, format=quantizer.element, quantizer=replace(quantizer, element=None))


class QuantizedOperand(NamedTuple):
    """An operand [..., R, K], R the rows of A or the columns of B, in an instruction's format.

    After a transform K is padded to whole groups of the transform.
    """

    codes: Array  # [..., R, K]
    unit_scales: Array | None = None  # codes of the instruction's scale format, [..., R, blocks along K]
    scales: Array | None = None  # f32 codes that multiply sums, [..., groups of rows, blocks along K]; size 1 where all share one
    tensor_scale: Array | None = None  # f32 code, a scalar
    fields: Array | None = None  # of a sparse A: which elements are kept, 4-bit fields [..., R, chunks]; codes are dense all the same


def quantize(
    scheme: Scheme,
    x: Array,
    *,
    scales: Array | None = None,
    key: PRNGKey | None = None,
    axis_name: str | None = None,
    amax: Array | None = None,
) -> QuantizedOperand:
    """Quantises floats x [..., R, K] as an operand of the instruction.

    Args:
        scheme: The quantisation.
        x: Floats.
        scales: Float scales that replace those computed from x, in their shape; those of the instruction's blocks are rounded to its
            format.
        key: JAX random key, where the quantiser rounds stochastically.
        axis_name: Mesh axis along which K is sharded; scales of rows or of the tensor are found over all devices.
        amax: Where x is a part, `amax_codes` of the whole: the maximum over the parts.
    """
    quantizer = scheme.quantizer
    if quantizer.element is not None:
        q = quantize(scheme.of_elements, x, key=key, axis_name=axis_name, amax=amax)
        return QuantizedOperand(codes=_dequantize_elements(scheme, q))
    x = x if scheme.transform is None else scheme.transform.apply(x)
    key = key if quantizer.rounding == "SR" else None
    source, codes = array_codes(x)
    if quantizer.scaling == "none":
        return QuantizedOperand(codes=_round_elements(scheme, source, codes, None, key))
    if quantizer.scales_in_unit and scales is None and isinstance(rule := scheme.rule, str):
        return _quantize_unit_blocks(scheme, rule, x, key, axis_name, amax)
    if scales is None and axis_name is None and key is None and not quantizer.scales_in_unit:
        return _quantize_in_f32(scheme, source, codes, amax)
    unit_scales = None
    if scales is None:
        scale_codes = _compute_scales(scheme, source, codes, axis_name, amax)
    else:
        scale_source, scale_codes = array_codes(scales)
        scale_codes = convert(scale_source, F32, scale_codes)
    if quantizer.scales_in_unit:
        scale_format = scheme.require_scale_format()
        unit_scales = convert(F32, scale_format, scale_codes, saturate=True)
        scale_codes = convert(scale_format, F32, unit_scales)
    elements = _round_elements(scheme, source, codes, scale_codes, key)
    if quantizer.scales_in_unit:
        return QuantizedOperand(codes=elements, unit_scales=unit_scales)
    return QuantizedOperand(codes=elements, scales=scale_codes)


@compile_once(0)
def _dequantize_elements(scheme: Scheme, q: QuantizedOperand) -> Array:
    """Returns element * scale, rounded to f32 and then to the instruction's format, for elements of the quantiser's own format."""
    elements = scheme.of_elements
    values = convert(elements.format, F32, q.codes)
    if q.scales is not None:
        values = multiply(values, broadcast_scales(q.scales, values.shape, elements.group_sizes), F32)
    return values if scheme.format == F32 else convert(F32, scheme.format, values, saturate=scheme.quantizer.saturate)


@compile_once(0, 1)
def _quantize_in_f32(scheme: Scheme, source: Format, codes: Array, amax: Array | None) -> QuantizedOperand:
    """Quantises by f32 scales that are computed here."""
    scales = _compute_scales(scheme, source, codes, None, amax)
    return QuantizedOperand(codes=_round_elements(scheme, source, codes, scales, None), scales=scales)


def amax_codes(scheme: Scheme, x: Array) -> Array:
    """Returns the max magnitude for a scale of all of x [..., R, K], f32 codes: per row [..., R, 1], or a scalar for the tensor.

    A scalar 0 where every scale is of a block. As in `block_quantize`, NVFP4 ignores blocks with Inf or NaN.
    """
    if not scheme.spans_depth:
        return jnp.zeros((), jnp.uint32)
    source, codes = array_codes(x if scheme.transform is None else scheme.transform.apply(x))
    if scheme.is_two_level:
        block_amax = _group_amax(max_magnitudes(source, codes, scheme.unit_block), scheme.quantizer.rows)
        return jnp.max(jnp.where(block_amax < F32.infinity, block_amax, 0), initial=0)
    return max_of_all(source, codes)[0, 0] if scheme.spans_rows else max_magnitudes(source, codes, None)


def scale_from_amax(scheme: Scheme, amax: Array) -> Array:
    """Computes the scales, f32 codes, from the result of `amax_codes`, in its shape."""
    if not isinstance(scheme.rule, str):
        scales = jnp.broadcast_to(jnp.asarray(scheme.rule(to_float(F32, amax)), jnp.float32), amax.shape)
        codes = lax.bitcast_convert_type(scales, jnp.uint32)  # XLA flushes subnormal scales to zero
        return jnp.where(amax == 0, ONE, jnp.maximum(codes, MIN_SCALE))
    two_level = RULES[scheme.rule].two_level if scheme.quantizer.scales_in_unit else None
    if two_level is not None:
        return two_level.tensor(amax)[0]
    scales = scales_of_magnitudes(_scale_request(scheme), amax)
    if scheme.quantizer.scale != "f16":
        return scales
    halves = jnp.maximum(convert(F32, F16, scales, saturate=True), np.uint16(1))  # a scale that f16 does not hold becomes its least number
    return jnp.where(scales < F32.infinity, convert(F16, F32, halves), scales)


def _scale_request(scheme: Scheme) -> ScaleRequest:
    """Returns the request for f32 scales outside the instruction."""
    return ScaleRequest(int(_largest(scheme.format)), int(MIN_SCALE), scheme.quantizer.scale == "power_of_two")


def _largest(fmt: Format) -> np.uint32:
    """Returns the largest value of a format, an f32 code; of an integer 2^(bits - 1) - 1, so that quantisation is symmetric."""
    return np.float32(2 ** (fmt.bits - 1) - 1).view(np.uint32) if fmt.is_integer else max_finite_code(fmt)


def dequantize(scheme: Scheme, q: QuantizedOperand, depth: int) -> Array:
    """Returns the values of an operand [..., R, depth] in plain float32, for derivatives, not for results. A transform is inverted."""
    values = reduce(mul, exact_factors(scheme, q))
    return values if scheme.transform is None else scheme.transform.invert(values, depth)


def exact_factors(scheme: Scheme, q: QuantizedOperand) -> list[Array]:
    """Returns an operand's elements and scales, float32 arrays that broadcast. Their product, of at most 30 bits, is its value."""
    shape, factors = q.codes.shape, [convert(scheme.format, F32, q.codes)]
    if q.unit_scales is not None and scheme.scale_format is not None:
        factors.append(broadcast_scales(convert(scheme.scale_format, F32, q.unit_scales), shape, scheme.group_sizes))
    if q.scales is not None:
        factors.append(broadcast_scales(q.scales, shape, scheme.group_sizes))
    factors += [] if q.tensor_scale is None else [q.tensor_scale]
    return [to_float(F32, factor) for factor in factors]


def exact_values(factors: Sequence[ArrayLike]) -> np.ndarray:
    """Multiplies `exact_factors` in float64."""
    values = np.float64(1)
    with np.errstate(invalid="ignore", over="ignore"):
        for factor in factors:
            values = values * np.asarray(factor, np.float64)
    return np.asarray(values)


def _quantize_unit_blocks(
    scheme: Scheme, rule: str, x: Array, key: PRNGKey | None, axis_name: str | None, amax: Array | None
) -> QuantizedOperand:
    """Quantises by the rule of a block format."""
    block = BlockFormat(f"{scheme.format} by {scheme.unit_block}", scheme.format, scheme.unit_block, rule)
    if axis_name is not None and block.two_level:
        amax = lax.pmax(max_of_all(*array_codes(x))[0, 0], axis_name)
    tensor_amax = None if amax is None or not block.two_level else to_float(F32, amax)
    quantizer = scheme.quantizer
    q = block_quantize(x, block, rounding=quantizer.rounding, key=key, amax=tensor_amax, rows=quantizer.rows)
    tensor_scale = None if q.tensor_scale is None else lax.bitcast_convert_type(q.tensor_scale, jnp.uint32)
    return QuantizedOperand(codes=q.codes, unit_scales=q.scales, tensor_scale=tensor_scale)


def _round_elements(scheme: Scheme, source: Format, codes: Array, scales: Array | None, key: PRNGKey | None) -> Array:
    """Rounds x / scale, in f32 and then in the instruction's format; without scales rounds x once."""
    quantizer, target = scheme.quantizer, scheme.format
    saturate = quantizer.saturate or quantizer.scales_in_unit

    def portable(codes: Array, scales: Array | None) -> Array:
        if scales is None:
            return codes if source == target else convert(source, target, codes, quantizer.rounding, saturate, key)
        numbers = f32_codes(source, codes)

        def round_quotients(numbers: Array, scales: Array, divide: Callable[..., Array] = divide) -> Array:
            quotients = divide(numbers, broadcast_scales(scales, numbers.shape, scheme.group_sizes), F32)
            return quotients if target == F32 else convert(F32, target, quotients, quantizer.rounding, saturate, key)

        if quantizer.rounding != "RN" or not rounds_from_f32(F32, target):
            return round_quotients(numbers, scales)
        by_machine = partial(_round_quotients_by_machine, target, saturate, scheme.group_sizes)
        on_integers = partial(round_quotients, divide=divide_on_integers)  # the kernel serves the other platform
        return lax.platform_dependent(numbers, scales, cpu=by_machine, default=on_integers)

    reason = unsupported_reason(source, target, quantizer.rounding, codes, scaled=scales is not None)
    kernel = partial(round_with_kernel, source, target, saturate, scheme.group_sizes)
    return round_by_platform(reason, kernel, portable, codes, scales)


@compile_once(0, 1, 2)
def _round_quotients_by_machine(target: Format, saturate: bool, sizes: GroupSizes, numbers: Array, scales: Array) -> Array:
    """Divides f32 codes by their scales, and rounds the quotients to the nearest numbers of the target."""
    subnormals_are_zero = target.min_exponent - target.mantissa_bits > F32.min_exponent + 1
    quotients = divide_by_machine(numbers, broadcast_scales(scales, numbers.shape, sizes), flush=subnormals_are_zero)
    return round_from_f32(target, saturate, quotients)


def _compute_scales(scheme: Scheme, source: Format, codes: Array, axis_name: str | None, amax: Array | None) -> Array:
    """Computes the scales, f32 codes, from the max magnitude of each group. amax: that of the whole, where these are a part."""
    rows, depth = scheme.group_sizes
    shape = (1,) * (codes.ndim - (source.words - 1))
    if amax is not None and scheme.spans_depth:
        return scale_from_amax(scheme, amax.reshape(shape) if rows is None else amax)
    over_devices = axis_name is not None and depth is None
    computed_here = not isinstance(scheme.rule, str) or scheme.quantizer.scale == "f16"
    request = None if over_devices or computed_here or (rows or 1) > 1 else _scale_request(scheme)
    if rows is None:
        found = max_of_all(source, codes, request).reshape(shape)
    else:
        found = _group_amax(max_magnitudes(source, codes, depth, request), rows)
    if request is not None:
        return found
    return scale_from_amax(scheme, lax.pmax(found, axis_name) if over_devices else found)


def _group_amax(x: Array, rows: int) -> Array:
    """Returns the maximum of each group of neighbouring rows."""
    return x if rows == 1 else jnp.moveaxis(max_along_rows(split_groups(x, rows, -2)), -1, -2)
