"""Integer arithmetic (PTX ISA 9.7.1), and extended precision with its carry (9.7.2)."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from tcemu.ptx.context import Operation
from tcemu.ptx.scalar.lanes import cut, number, ones, paired, signed, wide, width
from tcemu.ptx.scalar.syntax import Qualifiers
from tcemu.ptx.values import KINDS

ALL = "u16|u32|u64|s16|s32|s64"
WORDS = "u32|u64|s32|s64"
PLACES = ("lo", "hi", "wide")


def of_numbers(compute: Callable[..., Array], count: int) -> Callable[[Qualifiers], Operation]:
    """An operation of `count` values of one type, by a function of the integers that they stand for. A packed type goes by halves."""

    def build(qualifiers: Qualifiers) -> Operation:
        kind = qualifiers.type
        single = kind.removesuffix("x2")

        def one(*values: Array) -> Array:
            return cut(compute(*(number(value, single) for value in values)), single)

        whole = paired(one) if kind != single else one
        return Operation((kind,), (kind,) * count, lambda *values: (whole(*values),))

    return build


# ---- sums and differences


def saturated(total: Array) -> Array:
    """int64 -> the nearest s32, as raw bits."""
    return cut(jnp.clip(total, -(1 << 31), ones(31)), "s32")


def add(qualifiers: Qualifiers, sign: int = 1) -> Operation:
    """add, and with sign -1 sub; `.sat` of s32 (9.7.1.1)."""
    if "sat" in qualifiers:
        return Operation(("s32",), ("s32",) * 2, lambda a, b: (saturated(wide(a, "s32") + sign * wide(b, "s32")),))
    return of_numbers(lambda a, b: a + b if sign == 1 else a - b, 2)(qualifiers)


def high_64(a: Array, b: Array, is_signed: bool) -> Array:
    """The upper 64 bits of the product of two 64-bit values, uint64 in and out."""
    half = jnp.uint64(ones(32))
    a0, a1, b0, b1 = a & half, a >> 32, b & half, b >> 32
    middle = (a0 * b0 >> 32) + a1 * b0
    second = (middle & half) + a0 * b1
    high = a1 * b1 + (middle >> 32) + (second >> 32)
    if is_signed:  # a negative value is 2^64 too large when taken as unsigned
        high = high - jnp.where(a.astype(jnp.int64) < 0, b, 0) - jnp.where(b.astype(jnp.int64) < 0, a, 0)
    return high


def product(place: str, kind: str) -> Callable[[Array, Array], Array]:
    """a * b: its lower or upper half ("lo", "hi"), or all of it ("wide"); raw bits."""
    bits = width(kind)
    if place == "lo":
        return lambda a, b: cut(a * b, kind)
    if place == "wide":
        return lambda a, b: cut(wide(a, kind) * wide(b, kind), doubled(kind))
    if bits == 64:
        return lambda a, b: high_64(a, b, KINDS[kind].signed)
    return lambda a, b: cut((wide(a, kind) * wide(b, kind)) >> bits, kind)


def doubled(kind: str) -> str:
    """The type of twice the width."""
    return f"{kind[0]}{2 * width(kind)}"


def multiply(qualifiers: Qualifiers) -> Operation:
    """mul (9.7.1.3)."""
    kind, place = qualifiers.type, qualifiers.one_of(*PLACES)
    times = product(place, kind)
    return Operation((doubled(kind) if place == "wide" else kind,), (kind,) * 2, lambda a, b: (times(a, b),))


def multiply_add(qualifiers: Qualifiers) -> Operation:
    """mad; `.hi.sat.s32` (9.7.1.4)."""
    kind, place = qualifiers.type, qualifiers.one_of(*PLACES)
    times, result = product(place, kind), doubled(kind) if place == "wide" else kind

    def compute(a: Array, b: Array, c: Array) -> tuple[Array]:
        if "sat" in qualifiers:
            return (saturated(wide(times(a, b), "s32") + wide(c, "s32")),)
        return (cut(times(a, b) + c, result),)

    return Operation((result,), (kind, kind, result), compute)


def multiply_24(qualifiers: Qualifiers, add: bool = False) -> Operation:
    """mul24, mad24: of the 48-bit product of the lowest 24 bits the lowest or the highest 32 (9.7.1.5, 9.7.1.6)."""
    kind, move = qualifiers.type, 16 if "hi" in qualifiers else 0

    def part(x: Array) -> Array:
        return wide(x << 8, kind) >> 8

    def compute(a: Array, b: Array, c: Array | None = None) -> tuple[Array]:
        value = cut((part(a) * part(b)) >> move, kind)
        if c is None:
            return (value,)
        return (saturated(wide(value, kind) + wide(c, kind)) if "sat" in qualifiers else value + c,)

    return Operation((kind,), (kind,) * (3 if add else 2), compute)


def sad(a: Array, b: Array, c: Array) -> Array:
    """c + |a - b| (9.7.1.7)."""
    return c + jnp.where(a < b, b - a, a - b)


# ---- quotients


def divide(a: Array, b: Array) -> Array:
    """a / b, cut toward zero (9.7.1.8). Over zero: what an H200 gives, all ones."""
    zero = b == 0
    b = jnp.where(zero, 1, b)
    if not jnp.issubdtype(a.dtype, jnp.signedinteger):
        return jnp.where(zero, ~jnp.zeros_like(a), a // b)
    wraps = b == -1  # the least integer over -1 is itself, and XLA need not say so
    return jnp.where(zero, -1, jnp.where(wraps, -a, _quotient(a, jnp.where(wraps, 1, b))))


def _quotient(a: Array, b: Array) -> Array:
    """a / b, cut toward zero: `//` goes down."""
    down = a // b
    return down + ((down * b != a) & ((a < 0) != (b < 0))).astype(a.dtype)


def remainder(a: Array, b: Array) -> Array:
    """a - b * (a / b) (9.7.1.9). Over zero: what an H200 gives, all ones."""
    return jnp.where(b == 0, ~jnp.zeros_like(a), a - b * divide(a, b))


def absolute(a: Array) -> Array:
    """|a|; of the least integer itself (9.7.1.10)."""
    return jnp.where(a < 0, -a, a)


def extremum(qualifiers: Qualifiers, pick: Callable[[Array, Array], Array]) -> Operation:
    """min, max; `.relu` clamps to 0 (9.7.1.12, 9.7.1.13)."""
    relu = "relu" in qualifiers
    return of_numbers(lambda a, b: jnp.maximum(pick(a, b), 0) if relu else pick(a, b), 2)(qualifiers)


# ---- dot products


def dp4a(qualifiers: Qualifiers) -> Operation:
    """c + the sum of the products of four bytes (9.7.1.23)."""
    return _dot(qualifiers, [(8 * i, 8 * i) for i in range(4)], 8)


def dp2a(qualifiers: Qualifiers) -> Operation:
    """c + the sum of the products of two halves of a and two bytes of b, the lower or the upper ones (9.7.1.24)."""
    first = 16 if "hi" in qualifiers else 0
    return _dot(qualifiers, [(0, first), (16, first + 8)], 16)


def _dot(qualifiers: Qualifiers, places: list[tuple[int, int]], bits_of_a: int) -> Operation:
    a_kind, b_kind = qualifiers.types
    result = "u32" if a_kind == b_kind == "u32" else "s32"

    def part(x: Array, at: int, bits: int, kind: str) -> Array:
        piece = (x >> at) & ones(bits)
        return cut(signed(piece, f"s{bits}"), "b32") if KINDS[kind].signed else piece

    def compute(a: Array, b: Array, c: Array) -> tuple[Array]:
        for of_a, of_b in places:
            c = c + part(a, of_a, bits_of_a, a_kind) * part(b, of_b, 8, b_kind)
        return (c,)

    return Operation((result,), (a_kind, b_kind, result), compute)


# ---- extended precision


def add_carry(qualifiers: Qualifiers, takes: bool, subtract: bool = False) -> Operation:
    """add.cc, addc, sub.cc, subc (9.7.2). The flag of a subtraction is its borrow. takes: the flag comes in."""
    kind, gives = qualifiers.type, "cc" in qualifiers

    def compute(a: Array, b: Array, flag: Array | None = None) -> tuple[Array, ...]:
        total, out = _with_carry(a, b, flag, subtract)
        return (total, out) if gives else (total,)

    return Operation(
        (kind, *("pred",) * gives), (kind, kind, *("pred",) * takes), compute, carry_in=takes, carry_out=gives
    )  # fmt: skip


def _with_carry(a: Array, b: Array, flag: Array | None, subtract: bool = False) -> tuple[Array, Array]:
    """a + b + flag, or a - b - flag, and whether it left the width."""
    first = a - b if subtract else a + b
    out = a < b if subtract else first < a
    if flag is None:
        return first, out
    more = flag.astype(a.dtype)
    total = first - more if subtract else first + more
    return total, out | (first < more if subtract else total < first)


def multiply_add_carry(qualifiers: Qualifiers, takes: bool) -> Operation:
    """mad.cc, madc (9.7.2.5, 9.7.2.6)."""
    kind, gives = qualifiers.type, "cc" in qualifiers
    times = product(qualifiers.one_of(*PLACES), kind)

    def compute(a: Array, b: Array, c: Array, flag: Array | None = None) -> tuple[Array, ...]:
        total, out = _with_carry(times(a, b), c, flag)
        return (total, out) if gives else (total,)

    return Operation((kind, *("pred",) * gives), (kind,) * 3 + ("pred",) * takes, compute, carry_in=takes, carry_out=gives)
