"""Ozaki's second scheme: f64 and f32 products from products modulo small integers, joined by the Chinese remainder theorem.

Each row of A and each column of B is multiplied by a power of two and truncated to integers, so that no sum of their products exceeds
half of P, the product of the moduli. The integers are multiplied modulo each modulus by an int8 or FP8 instruction, without error. The
residues determine the integer sum, which is rounded to f64 once and divided by the powers of two. `MODULAR_ROWS` has the recipes, each with
its source.

The reconstruction is exact: an integer below 20 P in uint32 limbs, as GEMMul8 computes it since 2026. The double-double sums of arXiv
2504.08009 and of older versions of GEMMul8 differ from it in the last bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import gcd, isqrt, prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.base import bits
from tcemu.base.bits import Limbs
from tcemu.base.compilation import jit_wide_vectors
from tcemu.base.meshes import match_varying_axes
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.formats.coding import Number, codes_to_limbs, decode_limbs, encode_limbs, limbs_to_codes
from tcemu.engine.formats.number_formats import F64, Format
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.operations.products.ozaki_slices import FP8, INT8, NO_EXPONENT, ExactProducts, finite_number, multiply_digits, shift_limbs

SCALINGS = ("norm", "product")
MAX_MODULI = 20  # so that the sums of `_reconstruct` fit in uint32
NORM_BITS = 31  # bits to which elements are rounded up for the norm
MAX_ESTIMATE_BITS = 6  # an element's bits in the product that estimates |A|·|B|
KARATSUBA_BASE = 16
MAX_ROOT, MAX_KARATSUBA = 33, 511  # FP8: parts of residues are then integers up to 16, which e4m3 holds
INT8_MODULI = (256, 255, 253, 251, 247, 241, 239, 233, 229, 227, 223, 217, 211, 199, 197, 193, 191, 181, 179, 173)
FP8_MODULI = (1089, 1024, 961, 841, 625, 529, 511, 509, 503, 499, 491, 487, 481, 479, 467, 463, 461, 457, 449, 443)


_GEMMUL8 = "arXiv 2504.08009 and 2508.03984; RIKEN-RCCS/GEMMul8 08e83eb: moduli, scaling and exact reconstruction; "
_NORM = _GEMMUL8 + "fast mode, arXiv 2606.29129. The library's norms and logarithms are approximate, from the safe side"
_PRODUCT = _GEMMUL8 + "accurate mode. The library's logarithms are approximate, from the safe side"
_FP8 = (
    "arXiv 2603.10634; RIKEN-RCCS/GEMMul8 58d57d4: moduli and parts of residues, square moduli first, then Karatsuba's products; 08e83eb: \
the scaling of its fast mode and the exact reconstruction. GEMMul8's later moduli have other parts"
)
MODULAR_ROWS = {  # op, target, moduli, scaling, source of `OzakiModularRecipe`
    "ozaki2_int8": (INT8, "sm_80", INT8_MODULI[:15], "norm", _NORM + ". 14 or 15 moduli by its README"),
    "ozaki2_int8_accurate": (INT8, "sm_80", INT8_MODULI[:15], "product", _PRODUCT + ". 14 or 15 moduli by its README"),
    "ozaki2_int8_fp32": (INT8, "sm_80", INT8_MODULI[:7], "norm", _NORM + ". 7 moduli keep 28 bits by its README"),
    "ozaki2_fp8": (FP8, "sm_100", FP8_MODULI[:13], "norm", _FP8),
}


@dataclass(frozen=True)
class OzakiModularRecipe(ExactProducts):
    """A product of f64 or f32 matrices from products modulo small integers: a frozen value that hashes.

    A row of A is multiplied by 2^s and truncated toward zero, and so is a column of B. s is the greatest integer with 4^s * bound <=
    (P - 1) / 2, where P is the product of the moduli and the bound is
    "norm": the sum of the squares of the row, each element rounded up to 31 bits below the row's greatest power of two;
    "product": the largest element in the row of |A|·|B|, computed by the same instruction from elements that are rounded up to 6 bits
    (fewer for K from 2^19 on); for a column of B, the largest element of that column.

    Residues are from -p/2 to p/2. FP8 instructions multiply them in two parts, high and low. A square modulus p has high parts
    round(residue / sqrt(p)) and needs three products, high·low, low·high and low·low. Another has 16 * high + low, where high is rounded
    away from zero, and Karatsuba's three products.

    The integer sum is rounded to f64, to nearest even, and divided by the powers of two. NaN or Inf makes its whole row or column of the
    result NaN; GEMMul8 leaves that open.

    Attributes:
        op: The instruction: s8 with s32 sums, or e4m3 with f32 sums.
        target: The GPU.
        moduli: Pairwise coprime integers, or how many of the published ones.
        scaling: "norm" (GEMMul8's fast mode) or "product" (its accurate mode; s8 alone).
        model: Another arithmetic of the instruction; None: the target's own.
        name: The recipe's name; ignored by equality.
        source: Where the recipe is described; ignored by equality.

    Raises:
        Unsupported: The target has no such instruction.
        NotModelled: There is no evidence for its arithmetic.
        ValueError: A field has another value, or moduli do not fit the instruction.
    """

    op: MatrixMultiply
    target: str
    moduli: tuple[int, ...]
    scaling: str
    model: Model | None = None
    name: str = field(default="", compare=False)
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_fields(scaling=SCALINGS)
        if self.scaling == "product" and self.is_fp8:
            raise ValueError("scaling='product': with FP8 the sums of the estimate are rounded; use 'norm'")
        moduli: Any = self.moduli
        if isinstance(moduli, int) and not isinstance(moduli, bool) and 1 <= moduli <= MAX_MODULI:
            object.__setattr__(self, "moduli", (FP8_MODULI if self.is_fp8 else INT8_MODULI)[:moduli])
        elif not isinstance(moduli, tuple) or not 1 <= len(moduli) <= MAX_MODULI or not all(type(p) is int for p in moduli):
            raise ValueError(f"moduli={moduli!r}: expected 1 to {MAX_MODULI} integers, or how many of the published moduli")
        for index, p in enumerate(self.moduli):
            if not self._is_exact(p):
                limits = f"squares up to {MAX_ROOT**2}, and numbers up to {MAX_KARATSUBA}" if self.is_fp8 else "numbers up to 256"
                raise ValueError(f"moduli: residues modulo {p} are no exact {self.op.a}; {limits} work, from 3 on")
            if shared := [q for q in self.moduli[:index] if gcd(p, q) > 1]:
                raise ValueError(f"moduli: {shared[0]} and {p} have a common factor; expected pairwise coprime integers")

    def _is_exact(self, p: int) -> bool:
        return 3 <= p <= (MAX_KARATSUBA if self.is_fp8 else 256) or (self.is_fp8 and p == isqrt(p) ** 2 and 3 <= isqrt(p) <= MAX_ROOT)

    @property
    def product_count(self) -> int:
        """Number of products by the instruction."""
        return len(self.moduli) * (3 if self.is_fp8 else 1) + (self.scaling == "product")

    @property
    def max_sum(self) -> int:
        """The largest magnitude of an integer sum that the residues determine."""
        return (prod(self.moduli) - 1) // 2

    def __repr__(self) -> str:
        lines = [
            f"{self.name or 'Ozaki recipe'}: {self.product_count} products by {self.op} on {self.target}",
            f"  modulo {', '.join(map(str, self.moduli))}; scaled by {self.scaling}",
        ]
        return "\n".join(lines)


# ---- scaling


def largest_exponents(limit: int, bounds: Limbs) -> Array:
    """Return the greatest int32 e with 4^e * bound <= limit; 0 for a bound of 0."""
    width = max(len(bounds), -(-limit.bit_length() // bits.LIMB_BITS))
    bounds = bits.extend(bounds, width)
    zeros = bits.leading_zeros(bounds)
    aligned = bits.shift_left(bounds, zeros)
    total = width * bits.LIMB_BITS
    top = _constant_limbs(limit << (total - limit.bit_length()), width, bounds[0])
    binary = limit.bit_length() - (total - zeros) - bits.less(top, aligned).astype(jnp.int32)  # floor(log2(limit / bound))
    return jnp.where(bits.is_zero(bounds), 0, binary >> 1)


def _constant_limbs(value: int, count: int, like: Array) -> Limbs:
    return tuple(jnp.full_like(like, (value >> (bits.LIMB_BITS * i)) & 0xFFFFFFFF) for i in range(count))


class _Rows(NamedTuple):
    """Facts about each row of an operand, [..., R, 1]."""

    top: Array  # int32: exponent of the leading bit of the largest element
    special: Array  # bool: NaN or Inf in the row


def _describe_rows(x: Number) -> _Rows:
    """Finds the rows' facts one row after the other: XLA would recompute a reduction for each element of the result."""
    top = x.exponent + (2 * bits.LIMB_BITS - 1) - bits.leading_zeros(x.magnitude)
    top = jnp.where(bits.is_zero(x.magnitude), NO_EXPONENT, top)
    rows = tuple(jnp.moveaxis(values, -2, 0) for values in (top, x.nan | x.infinite))
    found = lax.map(lambda row: (jnp.max(row[0], axis=-1), jnp.any(row[1], axis=-1)), rows)
    return _Rows(*(jnp.moveaxis(values, 0, -1)[..., None] for values in found))


def _round_up(x: Number, exponent: Array) -> Array:
    """Returns |x| / 2^exponent, rounded up to integers, uint32."""
    shift = exponent - x.exponent
    kept = shift_limbs(x.magnitude, shift)
    inexact = (shift > 0) & ~bits.is_zero(bits.subtract(x.magnitude, shift_limbs(kept, -shift)))
    return kept[0] + inexact.astype(jnp.uint32)


def _norm_exponents(recipe: OzakiModularRecipe, x: Number, top: Array) -> Array:
    """Returns the powers of two of the rows of x [..., R, K] by their norms: int32 [..., R, 1]."""
    unit = top - (NORM_BITS - 1)
    low, high = bits.multiply_words(*(_round_up(x, unit),) * 2)
    columns = [jnp.sum((limb >> shift) & 0xFF, axis=-1, keepdims=True) for limb in (low, high) for shift in range(0, 32, 8)]
    squares = _carry(jnp.stack(columns), 8, 96)
    return largest_exponents(recipe.max_sum, squares) - unit


def _carry(columns: Array, step: int, width: int) -> Limbs:
    """Adds columns of uint32 [columns, ...], each worth 2^step times the one before, to an integer of `width` bits.

    A loop and no unrolled code: XLA would recompute a chain of carries for each of its users.
    """

    def add_column(carry: Array, column: Array) -> tuple[Array, Array]:
        total = carry + column
        return total >> step, total & np.uint32((1 << step) - 1)

    count = width // step
    columns = jnp.pad(columns, [(0, count - columns.shape[0]), *[(0, 0)] * (columns.ndim - 1)])
    start = match_varying_axes(jnp.zeros_like(columns[0]), columns)[0]
    digits = lax.scan(add_column, start, columns)[1]
    per_limb = bits.LIMB_BITS // step
    weights = jnp.asarray([1 << (step * i) for i in range(per_limb)], jnp.uint32)
    return tuple(jnp.tensordot(weights, digits[i : i + per_limb], 1) for i in range(0, count, per_limb))


def _product_exponents(recipe: OzakiModularRecipe, model: Model, a: Number, b: Number, tops: tuple[Array, Array]) -> tuple[Array, Array]:
    """Returns the powers of two of the rows of A [..., M, K] and of B [..., N, K] by an estimate of |A|·|B|."""
    estimate_bits = min(MAX_ESTIMATE_BITS, max(0, 31 - a.exponent.shape[-1].bit_length()) // 2)
    units = [top - (estimate_bits - 1) for top in tops]
    left, right = (_round_up(x, unit) for x, unit in zip((a, b), units, strict=True))
    estimate = multiply_digits(model, product_spec(recipe.op), left, jnp.swapaxes(right, -1, -2)).astype(jnp.uint32)  # not negative
    rows, columns = jnp.max(estimate, axis=-1, keepdims=True), jnp.max(estimate, axis=-2, keepdims=True)
    bounds = ((rows,), (jnp.swapaxes(columns, -1, -2),))
    e_a, e_b = (largest_exponents(recipe.max_sum, bound) - unit for bound, unit in zip(bounds, units, strict=True))
    return e_a, e_b


# ---- residues


def _residues(recipe: OzakiModularRecipe, x: Number, exponents: Array) -> Array:
    """Returns trunc(x * 2^exponents) modulo each modulus, from -p/2 to p/2: int32 [moduli, ..., R, K]."""
    width = -(-(recipe.max_sum.bit_length() // 2 + 1 + MAX_ESTIMATE_BITS) // bits.LIMB_BITS)  # limbs of an integer below 2^7 sqrt(P)
    whole = shift_limbs(bits.extend(x.magnitude, max(width, 2)), -(x.exponent + exponents))[:width]
    halves = [half for limb in whole for half in (limb & 0xFFFF, limb >> 16)]
    moduli = _column(recipe.moduli, x.exponent.ndim)
    powers = [_column([pow(1 << 16, i, p) for p in recipe.moduli], x.exponent.ndim) for i in range(len(halves))]
    total = sum((half * power for half, power in zip(halves[1:], powers[1:], strict=True)), halves[0] * powers[0])
    rest, moduli = (total % moduli).astype(jnp.int32), moduli.astype(jnp.int32)
    rest = jnp.where(x.negative & (rest > 0), moduli - rest, rest)
    return jnp.where(rest > moduli // 2, rest - moduli, rest)


def _column(values: Sequence[int], ndim: int) -> Array:
    """Returns one uint32 for each modulus, to broadcast with [moduli, ...], which has `ndim` axes more."""
    return jnp.asarray(values, jnp.uint32).reshape(-1, *(1,) * ndim)


def _split_residues(recipe: OzakiModularRecipe, residues: Array, is_b: bool) -> Array:
    """Returns the factors of the three FP8 products of each modulus: int32 [moduli * 3, ...]."""
    column = lambda values: _column(values, residues.ndim - 1).astype(jnp.int32)
    square = column([_is_square(p) for p in recipe.moduli]) == 1
    base = column([isqrt(p) if _is_square(p) else KARATSUBA_BASE for p in recipe.moduli])
    size = abs(residues)
    nearest = (2 * size + base) // (2 * base)
    nearest = nearest - ((size % base * 2 == base) & (nearest % 2 == 1))  # ties to even
    high = jnp.sign(residues) * jnp.where(square, nearest, (size + base - 1) // base)
    low = residues - base * high
    first, second = (low, high) if is_b else (high, low)
    parts = jnp.where(square, first, high), jnp.where(square, second, low), jnp.where(square, low, high + low)
    return jnp.stack(parts, axis=1).reshape(-1, *residues.shape[1:])


def _is_square(p: int) -> bool:
    return p == isqrt(p) ** 2


def _join_weights(p: int) -> tuple[int, int, int]:
    """Returns the weights of the three FP8 products in the product of residues."""
    if _is_square(p):
        return isqrt(p), isqrt(p), 1
    base = KARATSUBA_BASE
    return base**2 - base, 1 - base, base


def _multiply_residues(recipe: OzakiModularRecipe, model: Model, a: Array, b: Array) -> Array:
    """Multiplies A [moduli, ..., M, K] and B [moduli, ..., K, N] of residues: uint32 [moduli, ..., M, N], from 0 to p - 1."""
    spec, chunk = product_spec(recipe.op), 1 << (15 if recipe.is_fp8 else 16)  # elements of K whose sums are exact
    moduli = _column(recipe.moduli, a.ndim - 1).astype(jnp.int32)
    total = jnp.zeros((), jnp.int32)
    for start in range(0, a.shape[-1], chunk):
        left, right = a[..., start : start + chunk], b[..., start : start + chunk, :]
        if recipe.is_fp8:
            left, right = _split_residues(recipe, left, False), _split_residues(recipe, right, True)
        sums = multiply_digits(model, spec, left, right)
        if recipe.is_fp8:
            weights = jnp.asarray([_join_weights(p) for p in recipe.moduli], jnp.int32).reshape(-1, 3, *(1,) * (a.ndim - 1))
            sums = jnp.sum(weights * (sums.reshape(-1, 3, *sums.shape[1:]) % moduli[:, None]), axis=1)
        total = (total + sums % moduli) % moduli
    return total.astype(jnp.uint32)


# ---- reconstruction


def _reconstruct(moduli: tuple[int, ...], residues: Array) -> Number:
    """Returns the integers from -P/2 to P/2 with the given residues, uint32 [moduli, ...].

    With t = residue * (P / p)^-1 mod p, the sum of t * (P / p) is the integer plus a multiple of P below 20 P, which is the floor of the
    sum of t / p. That sum is computed with 26 bits, so that its floor may be one too small.
    """
    product = prod(moduli)
    count = -(-(product.bit_length() + 5) // bits.LIMB_BITS)  # limbs; 2^5 > MAX_MODULI
    column = partial(_column, ndim=residues.ndim - 1)
    t = residues * column([pow(product // p, -1, p) for p in moduli]) % column(moduli)
    shares = jnp.asarray([[(product // p >> (16 * i)) & 0xFFFF for p in moduli] for i in range(2 * count)], jnp.uint32)
    total = _carry(jnp.tensordot(shares, t, 1), 16, 32 * count)
    multiple = jnp.sum(t * column([(1 << 26) // p for p in moduli]), axis=0) >> 26
    digits = jnp.asarray([(product >> (16 * i)) & 0xFFFF for i in range(2 * count)], jnp.uint32)
    whole = _carry(digits.reshape(-1, *(1,) * multiple.ndim) * multiple, 16, 32 * count)
    rest = bits.subtract(total, whole)
    modulus = _constant_limbs(product, count, rest[0])
    rest = bits.select(bits.less(rest, modulus), rest, bits.subtract(rest, modulus))
    other = bits.subtract(modulus, rest)
    negative = bits.less(other, rest)
    return finite_number(negative, bits.select(negative, other, rest), 0)


# ---- the product


@jit_wide_vectors(0, 1)
def modular_product_codes(recipe: OzakiModularRecipe, result: Format, model: Model, a: Array, b: Array) -> Array:
    """Compute the codes of A·B in F64 or F32. a: f64 codes [..., M, K, 2]; b: [..., K, N, 2]."""
    batch = jnp.broadcast_shapes(a.shape[:-3], b.shape[:-3])
    a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-3:])) for x in (a, jnp.swapaxes(b, -3, -2)))
    left, right = (decode_limbs(F64, codes_to_limbs(F64, x)) for x in (a, b))
    rows, columns = _describe_rows(left), _describe_rows(right)
    if recipe.scaling == "norm":
        e_a, e_b = _norm_exponents(recipe, left, rows.top), _norm_exponents(recipe, right, columns.top)
    else:
        e_a, e_b = _product_exponents(recipe, model, left, right, (rows.top, columns.top))
    residues = _multiply_residues(recipe, model, _residues(recipe, left, e_a), jnp.swapaxes(_residues(recipe, right, e_b), -1, -2))
    total = decode_limbs(F64, encode_limbs(F64, _reconstruct(recipe.moduli, residues)))
    special = jnp.broadcast_to(rows.special | jnp.swapaxes(columns.special, -1, -2), total.negative.shape)
    exponent = total.exponent - e_a - jnp.swapaxes(e_b, -1, -2)
    return limbs_to_codes(result, encode_limbs(result, total._replace(exponent=exponent, nan=special)))
