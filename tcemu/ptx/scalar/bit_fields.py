"""Logic, shifts, and instructions on single bits and bytes (PTX ISA 9.7.1.14 to 9.7.1.22, 9.7.8, 9.7.9.7)."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from tcemu.ptx.context import Operation
from tcemu.ptx.scalar.lanes import cut, ones, signed, width
from tcemu.ptx.scalar.syntax import Qualifiers, Shape
from tcemu.ptx.values import KINDS

NONE = 0xFFFFFFFF  # what bfind and fns give where there is no such bit


def bitwise(compute: Callable[..., Array], count: int) -> Callable[[Qualifiers], Operation]:
    """An operation of `count` values of one type on each bit."""

    def build(qualifiers: Qualifiers) -> Operation:
        kind = qualifiers.type
        return Operation((kind,), (kind,) * count, lambda *values: (cut(compute(*values), kind),))

    return build


def complement(qualifiers: Qualifiers) -> Operation:
    """not (9.7.8.4)."""
    kind = qualifiers.type
    return Operation((kind,), (kind,), lambda a: (~a if kind == "pred" else cut(~a, kind),))


# ---- lop3


def lop3(qualifiers: Qualifiers, shape: Shape) -> Operation:
    """Any function of three bits, by its table; with `.and` or `.or` also whether the result, or a predicate, holds (9.7.8.6)."""
    combine = {"or": jnp.logical_or, "and": jnp.logical_and}.get(qualifiers.one_of("or", "and"))
    if combine is None:
        return Operation(("b32",), ("b32",) * 3 + ("u32",), lambda a, b, c, table: (by_table(a, b, c, table),))

    def compute(a: Array, b: Array, c: Array, table: Array, q: Array) -> tuple[Array, Array]:
        value = by_table(a, b, c, table)
        return value, combine(value != 0, q)

    return Operation(("b32", "pred"), ("b32",) * 3 + ("u32", "pred"), compute)


def by_table(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Bit 4a + 2b + c of the table, for each bit of a, b and c."""

    def choose(by: Array, one: Array, zero: Array) -> Array:
        return zero ^ (by & (one ^ zero))

    rows = [-((table >> i) & 1) for i in range(8)]
    for by in (c, b, a):
        rows = [choose(by, rows[i + 1], rows[i]) for i in range(0, len(rows), 2)]
    return rows[0]


# ---- shifts


def shift_left(qualifiers: Qualifiers) -> Operation:
    """shl: by the width or more gives 0 (9.7.8.8)."""
    kind = qualifiers.type
    return Operation((kind,), (kind, "u32"), lambda a, n: (cut(a << jnp.minimum(n, width(kind)).astype(a.dtype), kind),))


def shift_right(qualifiers: Qualifiers) -> Operation:
    """shr: by the width or more gives 0, or copies of the sign (9.7.8.9)."""
    kind = qualifiers.type
    bits = width(kind)
    if not KINDS[kind].signed:
        return Operation((kind,), (kind, "u32"), lambda a, n: (a >> jnp.minimum(n, bits).astype(a.dtype),))

    def compute(a: Array, n: Array) -> tuple[Array]:
        value = signed(a, kind)
        return (cut(value >> jnp.minimum(n, bits - 1).astype(value.dtype), kind),)

    return Operation((kind,), (kind, "u32"), compute)


def funnel(qualifiers: Qualifiers) -> Operation:
    """shf: the upper word of b:a shifted left, or the lower one of it shifted right (9.7.8.7)."""

    def compute(a: Array, b: Array, n: Array) -> tuple[Array]:
        n = (n & 31 if "wrap" in qualifiers else jnp.minimum(n, 32)).astype(jnp.uint64)
        both = (b.astype(jnp.uint64) << 32) | a
        return (cut(both >> n if "r" in qualifiers else (both << n) >> 32, "b32"),)

    return Operation(("b32",), ("b32", "b32", "u32"), compute)


# ---- counting and finding


def leading_zeros(qualifiers: Qualifiers) -> Operation:
    """clz (9.7.1.15)."""
    return Operation(("u32",), (qualifiers.type,), lambda a: (lax.clz(a).astype(jnp.uint32),))


def population(qualifiers: Qualifiers) -> Operation:
    """popc (9.7.1.14)."""
    return Operation(("u32",), (qualifiers.type,), lambda a: (lax.population_count(a).astype(jnp.uint32),))


def find_leading(qualifiers: Qualifiers) -> Operation:
    """bfind: the place of the most significant bit that is no copy of the sign, or what to shift it left by (9.7.1.16)."""
    kind = qualifiers.type
    bits = width(kind)

    def compute(a: Array) -> tuple[Array]:
        if KINDS[kind].signed:
            a = jnp.where(signed(a, kind) < 0, ~a, a)
        zeros = lax.clz(a).astype(jnp.uint32)
        return (jnp.where(a == 0, NONE, zeros if "shiftamt" in qualifiers else bits - 1 - zeros).astype(jnp.uint32),)

    return Operation(("u32",), (kind,), compute)


def find_nth(mask: Array, base: Array, offset: Array) -> Array:
    """fns: the place of the n-th set bit of the mask from the base on, upward for n > 0, downward for n < 0 (9.7.1.17).

    For n = 0 the base itself, if its bit is set. A base above 31 has no bit. n = -2^31 gives 0, as on an H200.
    """
    n = signed(offset, "s32")
    at = base & 31
    up = mask & (jnp.uint32(NONE) << at)
    down = mask & (jnp.uint32(NONE) >> (31 - at))
    down = reverse(down)  # so that both are counted from bit 0
    counted = jnp.where(n < 0, down, up)
    wanted = jnp.where(n < 0, -n, n).astype(jnp.uint32)
    place = jnp.zeros_like(mask)
    for step in (16, 8, 4, 2, 1):  # the last place with fewer than n bits below it
        below = lax.population_count(counted & ((jnp.uint32(1) << (place + step)) - 1))
        place = jnp.where(below < wanted, place + step, place)
    found = (wanted <= lax.population_count(counted)) & (n != 0)
    place = jnp.where(n < 0, 31 - place, place)
    here = (n == 0) & ((mask >> at) & 1 == 1)
    result = jnp.where(base > 31, jnp.uint32(NONE), jnp.where(found, place, jnp.where(here, base, jnp.uint32(NONE))))
    return jnp.where(offset == 1 << 31, 0, result).astype(jnp.uint32)


FIND_NTH = Operation(("u32",), ("b32", "b32", "s32"), lambda *values: (find_nth(*values),))


def reverse(a: Array) -> Array:
    """The bits in the opposite order; uint32 or uint64."""
    bits = a.dtype.itemsize * 8
    step = 1
    while step < bits:
        mask = a.dtype.type(ones(bits) // (ones(step) + 2))  # `step` ones, `step` zeros, and so on
        a = ((a >> step) & mask) | ((a & mask) << step)
        step *= 2
    return a


def reverse_bits(qualifiers: Qualifiers) -> Operation:
    """brev (9.7.1.18)."""
    kind = qualifiers.type
    return Operation((kind,), (kind,), lambda a: (reverse(a),))


# ---- fields


def places(start: Array, length: Array, like: Array) -> tuple[Array, Array]:
    """Start and length, of which 32-bit fields take 8 bits; those of 64 bits take all, as on an H200 (the manual: 0 to 255)."""
    mask = 0xFF if like.dtype.itemsize == 4 else NONE
    return (start & mask).astype(like.dtype), (length & mask).astype(like.dtype)


def extract(qualifiers: Qualifiers) -> Operation:
    """bfe: `length` bits from `start` on; a signed one is filled with its sign, or with a's where it reaches beyond (9.7.1.19)."""
    kind = qualifiers.type
    bits = width(kind)

    def compute(a: Array, start: Array, length: Array) -> tuple[Array]:
        start, length = places(start, length, a)
        field = jnp.minimum(length, bits)
        value = (a >> jnp.minimum(start, bits)) & _low(field, a)
        if KINDS[kind].signed:
            last = jnp.minimum(start + length - 1, bits - 1)  # of a length 0 nothing is used
            sign = (a >> last) & 1
            beyond = ~_low(jnp.minimum(field, bits - jnp.minimum(start, bits)), a)
            value = jnp.where((sign == 1) & (length != 0), value | beyond, value)
        return (value,)

    return Operation((kind,), (kind, "u32", "u32"), compute)


def _low(count: Array, like: Array) -> Array:
    """So many ones, of the dtype of `like`; count: at most its width."""
    return ~(jnp.full_like(like, ones(width(f"b{like.dtype.itemsize * 8}"))) << count)


def insert(qualifiers: Qualifiers) -> Operation:
    """bfi: b with the lowest `length` bits of a from `start` on (9.7.1.20)."""
    kind = qualifiers.type
    bits = width(kind)

    def compute(a: Array, b: Array, start: Array, length: Array) -> tuple[Array]:
        start, length = places(start, length, a)
        at = jnp.minimum(start, bits)
        mask = _low(jnp.minimum(length, bits), a) << at
        return ((b & ~mask) | ((a << at) & mask),)

    return Operation((kind,), (kind, kind, "u32", "u32"), compute)


def mask(qualifiers: Qualifiers) -> Operation:
    """bmsk: b ones from bit a on (9.7.1.22)."""

    def compute(a: Array, b: Array) -> tuple[Array]:
        if "wrap" in qualifiers:
            a, b = a & 31, b & 31
        return (_low(jnp.minimum(b, 32), a) << jnp.minimum(a, 32),)

    return Operation(("b32",), ("u32", "u32"), compute)


def extend(qualifiers: Qualifiers) -> Operation:
    """szext: the lowest n bits, extended by zeros or by the sign (9.7.1.21)."""
    kind = qualifiers.type

    def compute(a: Array, n: Array) -> tuple[Array]:
        n = n & 31 if "wrap" in qualifiers else jnp.minimum(n, 32)
        low = _low(n, a)
        value = a & low
        if KINDS[kind].signed:
            sign = (value << (32 - n)) >> 31
            value = jnp.where((sign == 1) & (n != 0), value | ~low, value)
        return (value,)

    return Operation((kind,), (kind, "u32"), compute)


# ---- prmt

MODES = {  # the byte of b:a that each byte of the result takes, for the lowest two bits of the selector
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def permute(qualifiers: Qualifiers) -> Operation:
    """prmt: bytes of b:a by a selector, four bits each, of which the highest copies the byte's sign; or by a mode (9.7.9.7)."""
    mode = MODES.get(qualifiers.one_of(*MODES))

    def compute(a: Array, b: Array, selector: Array) -> tuple[Array]:
        both = (b.astype(jnp.uint64) << 32) | a
        result = jnp.zeros_like(a)
        for i in range(4):
            if mode is None:
                at = (selector >> (4 * i)) & 15
            else:
                at = sum(jnp.where(selector & 3 == turn, chosen[i], 0) for turn, chosen in enumerate(mode))
            byte = cut(both >> (jnp.asarray(at & 7, jnp.uint64) * 8), "b8")
            if mode is None:
                byte = jnp.where(at > 7, (byte >> 7) * 0xFF, byte)
            result = result | (byte << (8 * i))
        return (result,)

    return Operation(("b32",), ("b32",) * 3, compute)
