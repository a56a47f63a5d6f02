"""Integer arithmetic (PTX ISA 9.7.1) and extended-precision arithmetic with a carry flag (9.7.2)."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from tcemu.kernels.ptx.instruction_interface import Operation
from tcemu.kernels.ptx.scalar.opcode_syntax import Qualifiers
from tcemu.kernels.ptx.scalar.raw_bits import (
    as_integer,
    as_signed,
    as_wide_integer,
    element_kind,
    elementwise_operation,
    ones,
    truncate,
    width,
)
from tcemu.kernels.ptx.text.ptx_types import KINDS

PRODUCT_PARTS = ("lo", "hi", "wide")


def integer_operation(compute: Callable[..., Array], count: int) -> Callable[[Qualifiers], Operation]:
    """Return the builder of an operation on `count` values of one type, given a function of integers."""

    def build(qualifiers: Qualifiers) -> Operation:
        kind = qualifiers.type
        element = element_kind(kind)

        def compute_bits(*values: Array) -> Array:
            return truncate(compute(*(as_integer(value, element) for value in values)), element)

        return elementwise_operation(kind, count, compute_bits)

    return build


# ---- sums and differences


def saturate_s32(total: Array) -> Array:
    """Clamp int64 values to s32 and return raw bits."""
    return truncate(jnp.clip(total, -(1 << 31), ones(31)), "s32")


def add(qualifiers: Qualifiers, sign: int = 1) -> Operation:
    """Build add, or sub if `sign` is -1; `.sat` clamps s32 (9.7.1.1)."""
    if "sat" in qualifiers:
        return Operation(("s32",), ("s32",) * 2, lambda a, b: (saturate_s32(as_wide_integer(a, "s32") + sign * as_wide_integer(b, "s32")),))
    return integer_operation(lambda a, b: a + b if sign == 1 else a - b, 2)(qualifiers)


def high_product_64(a: Array, b: Array, is_signed: bool) -> Array:
    """Return the upper 64 bits of the product of two 64-bit values, uint64 in and out."""
    half = jnp.uint64(ones(32))
    a0, a1, b0, b1 = a & half, a >> 32, b & half, b >> 32
    middle = (a0 * b0 >> 32) + a1 * b0
    second = (middle & half) + a0 * b1
    high = a1 * b1 + (middle >> 32) + (second >> 32)
    if is_signed:  # the unsigned interpretation of a negative value is 2^64 too large
        high = high - jnp.where(a.astype(jnp.int64) < 0, b, 0) - jnp.where(b.astype(jnp.int64) < 0, a, 0)
    return high


def product_function(part: str, kind: str) -> Callable[[Array, Array], Array]:
    """Return the function that multiplies raw bits and keeps the lower half ("lo"), the upper half ("hi") or all bits ("wide")."""
    bits = width(kind)
    if part == "lo":
        return lambda a, b: truncate(a * b, kind)
    if part == "wide":
        return lambda a, b: truncate(as_wide_integer(a, kind) * as_wide_integer(b, kind), double_width(kind))
    if bits == 64:
        return lambda a, b: high_product_64(a, b, KINDS[kind].signed)
    return lambda a, b: truncate((as_wide_integer(a, kind) * as_wide_integer(b, kind)) >> bits, kind)


def double_width(kind: str) -> str:
    """Return the type of twice the width."""
    return f"{kind[0]}{2 * width(kind)}"


def multiply(qualifiers: Qualifiers) -> Operation:
    """Build mul (9.7.1.3)."""
    kind, part = qualifiers.type, qualifiers.find(*PRODUCT_PARTS)
    product = product_function(part, kind)
    return Operation((double_width(kind) if part == "wide" else kind,), (kind,) * 2, lambda a, b: (product(a, b),))


def multiply_add(qualifiers: Qualifiers) -> Operation:
    """Build mad, also `.hi.sat.s32` (9.7.1.4)."""
    kind, part = qualifiers.type, qualifiers.find(*PRODUCT_PARTS)
    product, result = product_function(part, kind), double_width(kind) if part == "wide" else kind

    def compute(a: Array, b: Array, c: Array) -> tuple[Array]:
        if "sat" in qualifiers:
            return (saturate_s32(as_wide_integer(product(a, b), "s32") + as_wide_integer(c, "s32")),)
        return (truncate(product(a, b) + c, result),)

    return Operation((result,), (kind, kind, result), compute)


def multiply_24(qualifiers: Qualifiers, add: bool = False) -> Operation:
    """Build mul24 or mad24: the lowest or highest 32 bits of the 48-bit product of the lowest 24 bits (9.7.1.5, 9.7.1.6)."""
    kind, shift = qualifiers.type, 16 if "hi" in qualifiers else 0

    def low_24(x: Array) -> Array:
        return as_wide_integer(x << 8, kind) >> 8

    def compute(a: Array, b: Array, c: Array | None = None) -> tuple[Array]:
        value = truncate((low_24(a) * low_24(b)) >> shift, kind)
        if c is None:
            return (value,)
        return (saturate_s32(as_wide_integer(value, kind) + as_wide_integer(c, kind)) if "sat" in qualifiers else value + c,)

    return Operation((kind,), (kind,) * (3 if add else 2), compute)


def sad(a: Array, b: Array, c: Array) -> Array:
    """Return c + |a - b| (9.7.1.7)."""
    return c + jnp.where(a < b, b - a, a - b)


# ---- quotients


def divide(a: Array, b: Array) -> Array:
    """Return a / b, rounded toward zero (9.7.1.8). A division by zero gives all ones, as on an H200."""
    zero = b == 0
    b = jnp.where(zero, 1, b)
    if not jnp.issubdtype(a.dtype, jnp.signedinteger):
        return jnp.where(zero, ~jnp.zeros_like(a), a // b)
    wraps = b == -1  # the most negative integer divided by -1 is itself; XLA does not specify it
    return jnp.where(zero, -1, jnp.where(wraps, -a, _truncated_quotient(a, jnp.where(wraps, 1, b))))


def _truncated_quotient(a: Array, b: Array) -> Array:
    """Return a / b, rounded toward zero; `//` rounds down."""
    floor = a // b
    return floor + ((floor * b != a) & ((a < 0) != (b < 0))).astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    """Return a - b * (a / b) (9.7.1.9). A division by zero gives all ones, as on an H200."""
    return jnp.where(b == 0, ~jnp.zeros_like(a), a - b * divide(a, b))


def absolute(a: Array) -> Array:
    """Return |a|; the most negative integer gives itself (9.7.1.10)."""
    return jnp.where(a < 0, -a, a)


def extremum(qualifiers: Qualifiers, choose: Callable[[Array, Array], Array]) -> Operation:
    """Build min or max; `.relu` replaces negative results by 0 (9.7.1.12, 9.7.1.13)."""
    relu = "relu" in qualifiers
    return integer_operation(lambda a, b: jnp.maximum(choose(a, b), 0) if relu else choose(a, b), 2)(qualifiers)


# ---- dot products


def dp4a(qualifiers: Qualifiers) -> Operation:
    """Build dp4a: c + the sum of the products of four bytes (9.7.1.23)."""
    return _dot_operation(qualifiers, [(8 * i, 8 * i) for i in range(4)], 8)


def dp2a(qualifiers: Qualifiers) -> Operation:
    """Build dp2a: c + the sum of the products of two halves of a and two bytes of b, the lower or the upper ones (9.7.1.24)."""
    first = 16 if "hi" in qualifiers else 0
    return _dot_operation(qualifiers, [(0, first), (16, first + 8)], 16)


def _dot_operation(qualifiers: Qualifiers, offsets: list[tuple[int, int]], a_bits: int) -> Operation:
    """Build a dot product of the elements of `a_bits` bits of a and the bytes of b at the bit offsets of each pair."""
    a_kind, b_kind = qualifiers.types
    result = "u32" if a_kind == b_kind == "u32" else "s32"

    def element(x: Array, offset: int, bits: int, kind: str) -> Array:
        field = (x >> offset) & ones(bits)
        return truncate(as_signed(field, f"s{bits}"), "b32") if KINDS[kind].signed else field

    def compute(a: Array, b: Array, c: Array) -> tuple[Array]:
        for a_offset, b_offset in offsets:
            c = c + element(a, a_offset, a_bits, a_kind) * element(b, b_offset, 8, b_kind)
        return (c,)

    return Operation((result,), (a_kind, b_kind, result), compute)


# ---- extended precision


def add_carry(qualifiers: Qualifiers, carry_in: bool, subtract: bool = False) -> Operation:
    """Build add.cc, addc, sub.cc or subc (9.7.2). The flag of a subtraction is its borrow."""
    kind, carry_out = qualifiers.type, "cc" in qualifiers

    def compute(a: Array, b: Array, flag: Array | None = None) -> tuple[Array, ...]:
        total, carry = _sum_and_carry(a, b, flag, subtract)
        return (total, carry) if carry_out else (total,)

    results, sources = (kind, *("pred",) * carry_out), (kind, kind, *("pred",) * carry_in)
    return Operation(results, sources, compute, carry_in=carry_in, carry_out=carry_out)


def _sum_and_carry(a: Array, b: Array, flag: Array | None, subtract: bool = False) -> tuple[Array, Array]:
    """Return a + b + flag, or a - b - flag, and the carry or borrow."""
    first = a - b if subtract else a + b
    carry = a < b if subtract else first < a
    if flag is None:
        return first, carry
    increment = flag.astype(a.dtype)
    total = first - increment if subtract else first + increment
    return total, carry | (first < increment if subtract else total < first)


def multiply_add_carry(qualifiers: Qualifiers, carry_in: bool) -> Operation:
    """Build mad.cc or madc (9.7.2.5, 9.7.2.6)."""
    kind, carry_out = qualifiers.type, "cc" in qualifiers
    product = product_function(qualifiers.find(*PRODUCT_PARTS), kind)

    def compute(a: Array, b: Array, c: Array, flag: Array | None = None) -> tuple[Array, ...]:
        total, carry = _sum_and_carry(product(a, b), c, flag)
        return (total, carry) if carry_out else (total,)

    results, sources = (kind, *("pred",) * carry_out), (kind,) * 3 + ("pred",) * carry_in
    return Operation(results, sources, compute, carry_in=carry_in, carry_out=carry_out)
