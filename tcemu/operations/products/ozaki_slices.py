"""Ozaki's first scheme: f64 and f32 products from exact products of slices, which int8 or FP8 instructions compute.

Each row of A and each column of B is a vector of fixed-point numbers below one power of two. It is cut into slices of a few bits. A product
of two slices is exact in the accumulator of the instruction, and the products are added outside it, with their weights. `SLICE_ROWS` has
the recipes, each with its splitting, order and source. `tcemu.operations.products.ozaki` has the functions that use them.

Integers carry every value: an f64 operand is two uint32 limbs, so that no x64 mode is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base import bits
from tcemu.base.bits import Limbs
from tcemu.base.compilation import jit_wide_vectors
from tcemu.base.meshes import match_varying_axes
from tcemu.base.records import Record
from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.arithmetic.fma import add_limbs
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, product_spec
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.formats.coding import Number, codes_to_limbs, convert, decode_limbs, encode_limbs, limbs_to_codes
from tcemu.engine.formats.float_arrays import from_float
from tcemu.engine.formats.number_formats import F32, F64, S32, Format
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.engine.isa.legality import check
from tcemu.engine.isa.targets import resolve_target
from tcemu.operations.products.product_arguments import pad_k

DIGITS = ("truncated", "nearest", "unsigned")
SUMS = ("f64", "groups", "exact")
NO_EXPONENT = -(1 << 14)  # of a row of zeros; far below every exponent of f64
INT8 = "mma.sync.aligned.m16n8k32.row.col.s32.{a}.{b}.s32"
FP8 = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"


_OZIMMU = "enp1s0/ozIMMU 1c9ebf8, config.cu, split.cu, fp64_int8_8; arXiv 2306.11975"
_GROUPS = "arXiv 2409.13313, ozIMMU_EF: products of equal weight are added as integers; the order is ozIMMU's"
_NEAREST = "arXiv 2409.13313, ozIMMU_H: slices to nearest, with signed digits, and integer sums"
_EXACT = "Ozaki, Ogita, Oishi, Rump, Numer. Algorithms 59, 2012: every product of slices, without error; rounded once here"
_CUBLAS = (
    "cuBLAS 13, FP64 emulation: 55 bits in 7 slices, by RIKEN-RCCS/GEMMul8 08e83eb; digits as in NVIDIA's cuBLASDx example. The order \
and the format of its sums are unpublished: ozIMMU's are taken"
)
_FP8 = "arXiv 2508.00441: slices that e4m3 holds, sums exact in 25-bit accumulators. Here digits to nearest, -16 to 16"
SLICE_ROWS = {  # op, with the formats of A and B as {a} and {b}; target; digits, bits, slices, sums, source of `OzakiSliceRecipe`
    "ozaki_int8": (INT8, "sm_80", "truncated", 7, 8, "f64", _OZIMMU),
    "ozaki_int8_groups": (INT8, "sm_80", "truncated", 7, 8, "groups", _GROUPS),
    "ozaki_int8_nearest": (INT8, "sm_80", "nearest", 7, 8, "groups", _NEAREST),
    "ozaki_int8_exact": (INT8, "sm_80", "truncated", 7, 8, "exact", _EXACT),
    "cublas_fixed_point": (INT8, "sm_100", "unsigned", 8, 7, "f64", _CUBLAS),
    "ozaki_fp8": (FP8, "sm_100", "nearest", 5, 11, "groups", _FP8),
}


def check_operands(op: MatrixMultiply | str, target: str) -> MatrixMultiply:
    """Return the instruction of an op if its sums of small integers are exact. Raises ValueError, and the errors of `check`."""
    instruction = check(op, target)
    exact = (("s8", "s8", "s32"), ("e4m3", "e4m3", "f32"))
    if not isinstance(instruction, MatrixMultiply) or tuple(map(str, (instruction.a, instruction.b, instruction.d))) not in exact:
        raise ValueError(f"op={str(instruction)!r}: expected s8 operands with s32 sums, or e4m3 operands with f32 sums")
    return instruction


class ExactProducts(Record):
    """The base of recipes whose products of small integers are exact in the accumulator of an instruction."""

    op: MatrixMultiply
    target: str
    model: Model | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "target", resolve_target(self.target))
        object.__setattr__(self, "op", check_operands(self.op, self.target))
        resolve_arithmetic(self.op, self.target, self.model)

    @property
    def is_fp8(self) -> bool:
        """True if the factors are e4m3."""
        return str(self.op.a) == "e4m3"

    @property
    def arithmetic(self) -> Model:
        """The model in use."""
        return resolve_arithmetic(self.op, self.target, self.model).model


@dataclass(frozen=True)
class OzakiSliceRecipe(ExactProducts):
    """A product of f64 or f32 matrices from exact products of slices: a frozen value that hashes.

    A row of A whose largest element is below 2^e is the sum of slices d_t * 2^(e - bits * t), t = 1, 2, ..., with integer digits d_t; so
    is a column of B. Digits are
    "truncated": those of the magnitude, with the sign of the element;
    "nearest": the rest is rounded to nearest even at each slice, so that digits are from -2^(bits - 1) to 2^(bits - 1);
    "unsigned": two's complement: the first digit has a sign, the others are from 0 to 2^bits - 1.

    Products of slices t and u with t + u up to slices + 1 are computed, in the order of t + u and then of t, the largest first; with
    sums="exact" it is every product. Their sums are
    "f64": each product is added to an f64 sum, rounded to nearest even;
    "groups": products with equal t + u are added as integers, and these to an f64 sum;
    "exact": all are added without error, and the sum is rounded once to the format of the result.

    NaN or Inf makes its whole row or column of the result NaN: a fixed-point number has no code for them. ozIMMU leaves that open, and
    cuBLAS then computes in native f64.

    Attributes:
        op: The instruction: s8 or u8 with s32 sums, or e4m3 with f32 sums.
        target: The GPU.
        digits: "truncated", "nearest" or "unsigned".
        bits: Bits of a digit.
        slices: Slices of each operand.
        sums: "f64", "groups" or "exact".
        model: Another arithmetic of the instruction; None: the target's own.
        name: The recipe's name; ignored by equality.
        source: Where the recipe is described; ignored by equality.

    Raises:
        Unsupported: The target has no such instruction.
        NotModelled: There is no evidence for its arithmetic.
        ValueError: A field has another value, or digits do not fit the instruction.
    """

    op: MatrixMultiply
    target: str
    digits: str
    bits: int
    slices: int
    sums: str
    model: Model | None = None
    name: str = field(default="", compare=False)
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_fields(counts="bits slices", digits=DIGITS, sums=SUMS)
        for name, most in (("bits", 8), ("slices", 32)):
            if getattr(self, name) > most:
                raise ValueError(f"{name}={getattr(self, name)}: expected a number from 1 to {most}")
        room = 16 if self.is_fp8 else 255 if self.digits == "unsigned" else 127
        if self.largest_digit > room or (self.is_fp8 and self.digits == "unsigned"):
            raise ValueError(
                f"digits={self.digits!r}, bits={self.bits}: digits up to {self.largest_digit} are no exact {self.op.a}; fewer bits work"
            )

    @property
    def largest_digit(self) -> int:
        """The largest magnitude of a digit."""
        return 1 << (self.bits - 1) if self.digits == "nearest" else (1 << self.bits) - 1

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """The pairs of slices that are multiplied, numbered from 1, in the order of addition."""
        last = 2 * self.slices if self.sums == "exact" else self.slices + 1
        slices = range(1, self.slices + 1)
        return tuple((t, total - t) for total in range(2, last + 1) for t in slices if total - t in slices)

    @property
    def product_count(self) -> int:
        """Number of products by the instruction."""
        return len(self.products)

    @property
    def max_k(self) -> int:
        """The greatest K whose integer sums cannot leave the accumulator of the instruction."""
        return ((1 << (24 if self.is_fp8 else 31)) - 1) // self.largest_digit**2

    def __repr__(self) -> str:
        lines = [
            f"{self.name or 'Ozaki recipe'}: {len(self.products)} products by {self.op} on {self.target}",
            f"  {self.slices} slices of {self.bits} bits, {self.digits} digits; sums {self.sums}",
        ]
        return "\n".join(lines)


# ---- slices


class Slices(NamedTuple):
    """An operand [..., R, K] in fixed point."""

    digits: Array  # int32 [slices, ..., R, K]
    exponents: Array  # int32 [..., R, 1]: every element of the row is below 2^exponent
    special: Array  # bool [..., R, 1]: NaN or Inf in the row


def split_in_slices(recipe: OzakiSliceRecipe, limbs: Limbs) -> Slices:
    """Cut f64 numbers [..., R, K], codes in limbs, into digits of a fixed-point number for each row."""
    number = decode_limbs(F64, limbs)
    zero = bits.is_zero(number.magnitude)
    top = number.exponent + (2 * bits.LIMB_BITS - 1) - bits.leading_zeros(number.magnitude)
    above = 1 if recipe.digits == "truncated" else 2  # the others need a bit for the sign
    exponent = jnp.max(jnp.where(zero, NO_EXPONENT, top), axis=-1, keepdims=True, initial=NO_EXPONENT) + above
    numbers = jnp.arange(0 if recipe.digits == "nearest" else 1, recipe.slices + 1).reshape(-1, *(1,) * zero.ndim)
    shift = exponent - recipe.bits * numbers - number.exponent  # bits of the significand below each slice: [slices, ..., R, K]
    magnitude = tuple(jnp.broadcast_to(limb, shift.shape) for limb in number.magnitude)
    negative = jnp.broadcast_to(number.negative, shift.shape)
    kept = shift_limbs(magnitude, shift)
    mask = np.uint32((1 << recipe.bits) - 1)
    if recipe.digits == "truncated":
        digit = (kept[0] & mask).astype(jnp.int32)
        digits = jnp.where(negative, -digit, digit)
    else:
        rest = bits.subtract(magnitude, shift_limbs(kept, -shift))
        inexact = ~bits.is_zero(rest) & (shift > 0)
        if recipe.digits == "nearest":
            half = shift_limbs((jnp.ones_like(kept[0]), jnp.zeros_like(kept[0])), 1 - shift)
            odd = (kept[0] & 1) == 1
            up = inexact & (shift < 2 * bits.LIMB_BITS) & (bits.less(half, rest) | (~bits.less(rest, half) & odd))
            whole = kept[0] + up.astype(jnp.uint32)
            digit = (whole[1:] - (whole[:-1] << recipe.bits)).astype(jnp.int32)  # modulo 2^32, in which a digit is small
            digits = jnp.where(negative[1:], -digit, digit)
        else:
            floor = jnp.where(negative, -(kept[0] + inexact.astype(jnp.uint32)), kept[0]) & mask
            digit = floor.astype(jnp.int32)
            digits = jnp.where((numbers == 1) & (digit >= 1 << (recipe.bits - 1)), digit - (1 << recipe.bits), digit)
    digits = jnp.where(zero, 0, digits)
    return Slices(digits, exponent, jnp.any(number.nan | number.infinite, axis=-1, keepdims=True))


def shift_limbs(x: Limbs, right: Array) -> Limbs:
    """Shift limbs right, or left modulo their width where `right` is negative."""
    width = len(x) * bits.LIMB_BITS
    x = tuple(jnp.broadcast_to(limb, jnp.broadcast_shapes(limb.shape, right.shape)) for limb in x)
    right = jnp.broadcast_to(right, x[0].shape)
    down = bits.shift_right(x, jnp.clip(right, 0, width).astype(jnp.uint32))
    up = bits.shift_left(x, jnp.clip(-right, 0, width).astype(jnp.uint32))
    return bits.select(right >= 0, down, up)


# ---- the product


@jit_wide_vectors(0, 1)
def slice_product_codes(recipe: OzakiSliceRecipe, result: Format, model: Model, a: Array, b: Array) -> Array:
    """Compute the codes of A·B in F64 or F32. a: f64 codes [..., M, K, 2]; b: [..., K, N, 2]."""
    left = split_in_slices(recipe, codes_to_limbs(F64, a))
    right = split_in_slices(recipe, codes_to_limbs(F64, jnp.swapaxes(b, -3, -2)))
    pairs = recipe.products
    sums = _multiply_slices(recipe, model, left.digits, jnp.swapaxes(right.digits, -1, -2), pairs)
    exponents = left.exponents + jnp.swapaxes(right.exponents, -1, -2)
    special = left.special | jnp.swapaxes(right.special, -1, -2)
    special = jnp.broadcast_to(special, sums.shape[1:])
    total = (_add_exactly if recipe.sums == "exact" else _add_in_f64)(recipe, sums, pairs)
    total = total._replace(exponent=total.exponent + exponents, nan=special)
    return limbs_to_codes(result, encode_limbs(result, total))


def _multiply_slices(recipe: OzakiSliceRecipe, model: Model, a: Array, b: Array, pairs: tuple[tuple[int, int], ...]) -> Array:
    """Multiplies pairs of slices by the instruction: int32 [pairs, ..., M, N]."""
    batch = jnp.broadcast_shapes(a.shape[1:-2], b.shape[1:-2])
    a, b = (jnp.broadcast_to(x, (x.shape[0], *batch, *x.shape[-2:])) for x in (a, b))
    signs = [(t > 1 and recipe.digits == "unsigned", u > 1 and recipe.digits == "unsigned") for t, u in pairs]
    results: dict[int, Array] = {}
    for kind in dict.fromkeys(signs):  # an unsigned digit is a u8, which is another instruction
        chosen = [n for n, sign in enumerate(signs) if sign == kind]
        left = jnp.stack([a[pairs[n][0] - 1] for n in chosen])
        right = jnp.stack([b[pairs[n][1] - 1] for n in chosen])
        results |= dict(zip(chosen, multiply_digits(model, _slice_spec(recipe, kind), left, right), strict=True))
    return jnp.stack([results[n] for n in range(len(pairs))])


def _slice_spec(recipe: OzakiSliceRecipe, unsigned: tuple[bool, bool]) -> ProductSpec:
    if not any(unsigned):
        return product_spec(recipe.op)
    a, b = ("u8" if is_unsigned else "s8" for is_unsigned in unsigned)
    return product_spec(check(INT8.format(a=a, b=b), recipe.target))


def multiply_digits(model: Model, spec: ProductSpec, a: Array, b: Array) -> Array:
    """Multiply small integers [..., M, K] and [..., K, N] by an instruction, in whose accumulator they are exact: int32 [..., M, N]."""
    a, b = pad_k(spec, _digit_codes(spec.a, a), _digit_codes(spec.b, b), spec.k)
    codes = multiply_matrices(model, spec, a, b, jnp.zeros((*a.shape[:-1], b.shape[-1]), jnp.uint32))
    return lax.bitcast_convert_type(convert(F32, S32, codes, "RZ") if spec.d == F32 else codes, jnp.int32)


def _digit_codes(fmt: Format, digits: Array) -> Array:
    """Return small integers as codes of s8, u8 or e4m3."""
    return digits.astype(jnp.uint8) if fmt.is_integer else from_float(fmt, digits.astype(jnp.float32))


def finite_number(negative: Array, magnitude: Limbs, exponent: Array | int) -> Number:
    """Return numbers in sign, magnitude and exponent, none of them NaN or infinite."""
    no = jnp.zeros_like(negative)
    return Number(negative, magnitude, jnp.broadcast_to(jnp.int32(exponent), negative.shape), no, no)


def _signed_number(x: Limbs, exponent: Array | int) -> Number:
    """Returns a two's complement integer times a power of two."""
    negative = x[-1] >> (bits.LIMB_BITS - 1) == 1
    return finite_number(negative, bits.select(negative, bits.negate(x), x), exponent)


def _in_limbs(x: Array) -> Limbs:
    """Returns int32 as 64-bit integers."""
    return lax.bitcast_convert_type(x, jnp.uint32), lax.bitcast_convert_type(x >> 31, jnp.uint32)


def _add_in_f64(recipe: OzakiSliceRecipe, sums: Array, pairs: tuple[tuple[int, int], ...]) -> Number:
    """Adds the products, or the groups of equal weight, to an f64 sum."""
    weights = [t + u for t, u in pairs]
    terms = _in_limbs(sums)
    if recipe.sums == "groups":
        members = {weight: [n for n, w in enumerate(weights) if w == weight] for weight in dict.fromkeys(weights)}
        groups = [reduce(bits.add, [tuple(limb[n] for limb in terms) for n in group]) for group in members.values()]
        terms, weights = tuple(map(jnp.stack, zip(*groups, strict=True))), list(members)

    def add_term(total: Limbs, term: tuple[Limbs, Array]) -> tuple[Limbs, None]:
        value, weight = term
        return add_limbs(total, encode_limbs(F64, _signed_number(value, -recipe.bits * weight)), F64), None

    start = match_varying_axes(*(jnp.zeros(sums.shape[1:], jnp.uint32),) * 2, sums)[:2]
    total, _ = lax.scan(add_term, start, (terms, jnp.asarray(weights, jnp.int32)))
    return decode_limbs(F64, total)


def _add_exactly(recipe: OzakiSliceRecipe, sums: Array, pairs: tuple[tuple[int, int], ...]) -> Number:
    """Adds the products without error, in two's complement."""
    last = 2 * recipe.slices
    width = (recipe.bits * last + 40) // bits.LIMB_BITS + 1

    def add_term(total: Limbs, term: tuple[Array, Array]) -> tuple[Limbs, None]:
        low, high = _in_limbs(term[0])
        limbs = (low, *(high,) * (width - 1))
        return bits.add(total, bits.shift_left(limbs, jnp.broadcast_to(term[1], low.shape))), None

    shifts = jnp.asarray([recipe.bits * (last - t - u) for t, u in pairs], jnp.uint32)
    start = match_varying_axes(*(jnp.zeros(sums.shape[1:], jnp.uint32),) * width, sums)[:width]
    total, _ = lax.scan(add_term, start, (sums, shifts))
    return _signed_number(total, -recipe.bits * last)
