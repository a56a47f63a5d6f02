"""Logic, shifts, moves, and instructions on single bits and bytes (PTX ISA 9.7.1.14 to 9.7.1.22, 9.7.8, 9.7.9.3, 9.7.9.7)."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from tcemu.base.errors import Unsupported
from tcemu.kernels.ptx.instruction_interface import Operation
from tcemu.kernels.ptx.scalar.opcode_syntax import OperandShape, Qualifiers
from tcemu.kernels.ptx.scalar.raw_bits import as_signed, ones, truncate, width
from tcemu.kernels.ptx.text.ptx_types import KINDS

NOT_FOUND = 0xFFFFFFFF  # result of bfind and fns if there is no such bit


def bitwise_operation(compute: Callable[..., Array], count: int) -> Callable[[Qualifiers], Operation]:
    """Return the builder of an operation on `count` values of one type that acts on each bit."""

    def build(qualifiers: Qualifiers) -> Operation:
        kind = qualifiers.type
        return Operation((kind,), (kind,) * count, lambda *values: (truncate(compute(*values), kind),))

    return build


def complement(qualifiers: Qualifiers) -> Operation:
    """Build not (9.7.8.4)."""
    kind = qualifiers.type
    return Operation((kind,), (kind,), lambda a: (~a if kind == "pred" else truncate(~a, kind),))


def lop3(qualifiers: Qualifiers, shape: OperandShape) -> Operation:
    """Build lop3, any function of three bits given by its table (9.7.8.6).

    With `.and` or `.or` the operation also combines the predicate "the result is not 0" with another one.
    """
    combine = {"or": jnp.logical_or, "and": jnp.logical_and}.get(qualifiers.find("or", "and"))
    if combine is None:
        return Operation(("b32",), ("b32",) * 3 + ("u32",), lambda a, b, c, table: (lookup_bits(a, b, c, table),), constants=(3,))

    def compute(a: Array, b: Array, c: Array, table: Array, q: Array) -> tuple[Array, Array]:
        value = lookup_bits(a, b, c, table)
        return value, combine(value != 0, q)

    return Operation(("b32", "pred"), ("b32",) * 3 + ("u32", "pred"), compute, constants=(3,))


def lookup_bits(a: Array, b: Array, c: Array, table: Array) -> Array:
    """Return bit 4a + 2b + c of the table, for each bit of a, b and c."""

    def choose(selector: Array, if_one: Array, if_zero: Array) -> Array:
        return if_zero ^ (selector & (if_one ^ if_zero))

    rows = [-((table >> i) & 1) for i in range(8)]
    for selector in (c, b, a):
        rows = [choose(selector, rows[i + 1], rows[i]) for i in range(0, len(rows), 2)]
    return rows[0]


# ---- shifts


def shift_left(qualifiers: Qualifiers) -> Operation:
    """Build shl; a shift by the width or more gives 0 (9.7.8.8)."""
    kind = qualifiers.type
    return Operation((kind,), (kind, "u32"), lambda a, n: (truncate(a << jnp.minimum(n, width(kind)).astype(a.dtype), kind),))


def shift_right(qualifiers: Qualifiers) -> Operation:
    """Build shr; a shift by the width or more gives 0, or copies of the sign (9.7.8.9)."""
    kind = qualifiers.type
    bits = width(kind)
    if not KINDS[kind].signed:
        return Operation((kind,), (kind, "u32"), lambda a, n: (a >> jnp.minimum(n, bits).astype(a.dtype),))

    def compute(a: Array, n: Array) -> tuple[Array]:
        value = as_signed(a, kind)
        return (truncate(value >> jnp.minimum(n, bits - 1).astype(value.dtype), kind),)

    return Operation((kind,), (kind, "u32"), compute)


def funnel_shift(qualifiers: Qualifiers) -> Operation:
    """Build shf: the upper word of b:a shifted left, or its lower word shifted right (9.7.8.7)."""

    def compute(a: Array, b: Array, n: Array) -> tuple[Array]:
        n = (n & 31 if "wrap" in qualifiers else jnp.minimum(n, 32)).astype(jnp.uint64)
        both = (b.astype(jnp.uint64) << 32) | a
        return (truncate(both >> n if "r" in qualifiers else (both << n) >> 32, "b32"),)

    return Operation(("b32",), ("b32", "b32", "u32"), compute)


# ---- counting and finding


def leading_zeros(qualifiers: Qualifiers) -> Operation:
    """Build clz (9.7.1.15)."""
    return Operation(("u32",), (qualifiers.type,), lambda a: (lax.clz(a).astype(jnp.uint32),))


def population_count(qualifiers: Qualifiers) -> Operation:
    """Build popc (9.7.1.14)."""
    return Operation(("u32",), (qualifiers.type,), lambda a: (lax.population_count(a).astype(jnp.uint32),))


def find_leading_one(qualifiers: Qualifiers) -> Operation:
    """Build bfind: the position of the most significant bit that differs from the sign, or its distance from the top (9.7.1.16)."""
    kind = qualifiers.type
    bits = width(kind)

    def compute(a: Array) -> tuple[Array]:
        if KINDS[kind].signed:
            a = jnp.where(as_signed(a, kind) < 0, ~a, a)
        zeros = lax.clz(a).astype(jnp.uint32)
        return (jnp.where(a == 0, NOT_FOUND, zeros if "shiftamt" in qualifiers else bits - 1 - zeros).astype(jnp.uint32),)

    return Operation(("u32",), (kind,), compute)


def find_nth_set(mask: Array, base: Array, offset: Array) -> Array:
    """Compute fns: the position of the n-th set bit of the mask, counted from the base (9.7.1.17).

    The count goes upward for n > 0 and downward for n < 0. n = 0 gives the base itself if its bit is set. A base above 31 finds no bit.
    n = -2^31 gives 0, as on an H200.
    """
    n = as_signed(offset, "s32")
    start = base & 31
    up = mask & (jnp.uint32(ones(32)) << start)
    down = mask & (jnp.uint32(ones(32)) >> (31 - start))
    down = reverse_order(down)  # so that both are counted from bit 0
    candidates = jnp.where(n < 0, down, up)
    count = jnp.where(n < 0, -n, n).astype(jnp.uint32)
    position = jnp.zeros_like(mask)
    for step in (16, 8, 4, 2, 1):  # find the last position with fewer than n set bits below it
        below = lax.population_count(candidates & ((jnp.uint32(1) << (position + step)) - 1))
        position = jnp.where(below < count, position + step, position)
    found = (count <= lax.population_count(candidates)) & (n != 0)
    position = jnp.where(n < 0, 31 - position, position)
    here = (n == 0) & ((mask >> start) & 1 == 1)
    result = jnp.where(base > 31, jnp.uint32(NOT_FOUND), jnp.where(found, position, jnp.where(here, base, jnp.uint32(NOT_FOUND))))
    return jnp.where(offset == 1 << 31, 0, result).astype(jnp.uint32)


FIND_NTH = Operation(("b32",), ("b32", "b32", "b32"), lambda *values: (find_nth_set(*values),))


def reverse_order(a: Array) -> Array:
    """Reverse the order of the bits of uint32 or uint64."""
    bits = a.dtype.itemsize * 8
    step = 1
    while step < bits:
        mask = a.dtype.type(ones(bits) // (ones(step) + 2))  # `step` ones, `step` zeros, and so on
        a = ((a >> step) & mask) | ((a & mask) << step)
        step *= 2
    return a


def reverse_bits(qualifiers: Qualifiers) -> Operation:
    """Build brev (9.7.1.18)."""
    kind = qualifiers.type
    return Operation((kind,), (kind,), lambda a: (reverse_order(a),))


# ---- bit fields


def field_bounds(start: Array, length: Array, like: Array) -> tuple[Array, Array]:
    """Return the start and length of a field as the instruction reads them.

    Operations of 32 bits read 8 bits of both; those of 64 bits read all bits, as on an H200 (the manual says 0 to 255).
    """
    mask = 0xFF if like.dtype.itemsize == 4 else ones(32)
    return (start & mask).astype(like.dtype), (length & mask).astype(like.dtype)


def extract_field(qualifiers: Qualifiers) -> Operation:
    """Build bfe, which extracts `length` bits from `start` on (9.7.1.19).

    A signed field is extended by its sign, or by the sign of `a` where the field reaches beyond `a`.
    """
    kind = qualifiers.type
    bits = width(kind)

    def compute(a: Array, start: Array, length: Array) -> tuple[Array]:
        start, length = field_bounds(start, length, a)
        field = jnp.minimum(length, bits)
        value = (a >> jnp.minimum(start, bits)) & _low_ones(field, a)
        if KINDS[kind].signed:
            last = jnp.minimum(start + length - 1, bits - 1)  # not used if the length is 0
            sign = (a >> last) & 1
            beyond = ~_low_ones(jnp.minimum(field, bits - jnp.minimum(start, bits)), a)
            value = jnp.where((sign == 1) & (length != 0), value | beyond, value)
        return (value,)

    return Operation((kind,), (kind, "u32", "u32"), compute)


def _low_ones(count: Array, like: Array) -> Array:
    """Return values of the dtype of `like` with the lowest `count` bits set; count: at most the width."""
    return ~(jnp.full_like(like, ones(width(f"b{like.dtype.itemsize * 8}"))) << count)


def insert_field(qualifiers: Qualifiers) -> Operation:
    """Build bfi, which inserts the lowest `length` bits of a into b from `start` on (9.7.1.20)."""
    kind = qualifiers.type
    bits = width(kind)

    def compute(a: Array, b: Array, start: Array, length: Array) -> tuple[Array]:
        start, length = field_bounds(start, length, a)
        offset = jnp.minimum(start, bits)
        mask = _low_ones(jnp.minimum(length, bits), a) << offset
        return ((b & ~mask) | ((a << offset) & mask),)

    return Operation((kind,), (kind, kind, "u32", "u32"), compute)


def make_mask(qualifiers: Qualifiers) -> Operation:
    """Build bmsk, which sets b bits from bit a on (9.7.1.22)."""

    def compute(a: Array, b: Array) -> tuple[Array]:
        if "wrap" in qualifiers:
            a, b = a & 31, b & 31
        return (_low_ones(jnp.minimum(b, 32), a) << jnp.minimum(a, 32),)

    return Operation(("u32",), ("u32", "u32"), compute)


def extend_field(qualifiers: Qualifiers) -> Operation:
    """Build szext, which extends the lowest n bits by zeros or by the sign (9.7.1.21)."""
    kind = qualifiers.type

    def compute(a: Array, n: Array) -> tuple[Array]:
        n = n & 31 if "wrap" in qualifiers else jnp.minimum(n, 32)
        low = _low_ones(n, a)
        value = a & low
        if KINDS[kind].signed:
            sign = (value << (32 - n)) >> 31
            value = jnp.where((sign == 1) & (n != 0), value | ~low, value)
        return (value,)

    return Operation((kind,), (kind, "u32"), compute)


# ---- moves


def move(qualifiers: Qualifiers, shape: OperandShape) -> Operation:
    """Build mov of a register, a constant or an address (9.7.9.3).

    Between a vector and one register mov packs or unpacks the elements, lowest bits first.
    """
    kind = qualifiers.type
    if len(shape.sizes) != 2:
        raise Unsupported(f"mov.{kind} takes a destination and a source; got {len(shape.sizes)} operands")
    results, sources = shape.sizes
    if results == sources == 1:
        return Operation((kind,), (kind,), lambda a: (a,))
    count = max(shape.sizes)
    if min(shape.sizes) != 1 or kind not in ("b16", "b32", "b64") or count not in (2, 4) or width(kind) // count < 8:
        raise Unsupported(
            f"mov.{kind} from {sources} to {results} elements: .b16, .b32 and .b64 pack or unpack 2 or 4 elements of 8 bits or more"
        )
    bits = width(kind) // count
    element = f"b{bits}"
    if results == 1:

        def pack(*elements: Array) -> tuple[Array]:
            value = truncate(elements[0], kind)
            for i, x in enumerate(elements[1:], 1):
                value = value | (truncate(x, kind) << (bits * i))
            return (value,)

        return Operation((kind,), (element,) * count, pack)
    return Operation((element,) * count, (kind,), lambda a: tuple(truncate((a >> (bits * i)) & ones(bits), element) for i in range(count)))


PERMUTE_MODES = {  # byte of b:a for each byte of the result, indexed by the lowest two bits of the selector
    "f4e": ((0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)),
    "b4e": ((0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)),
    "rc8": ((0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 2, 2), (3, 3, 3, 3)),
    "ecl": ((0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)),
    "ecr": ((0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)),
    "rc16": ((0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)),
}


def permute_bytes(qualifiers: Qualifiers) -> Operation:
    """Build prmt, which selects bytes of b:a (9.7.9.7).

    The selector has four bits for each byte of the result; the highest of them replicates the sign of the byte. A mode uses its table.
    """
    mode = PERMUTE_MODES.get(qualifiers.find(*PERMUTE_MODES))

    def compute(a: Array, b: Array, selector: Array) -> tuple[Array]:
        both = (b.astype(jnp.uint64) << 32) | a
        result = jnp.zeros_like(a)
        for i in range(4):
            if mode is None:
                index = (selector >> (4 * i)) & 15
            else:
                index = sum(jnp.where(selector & 3 == number, row[i], 0) for number, row in enumerate(mode))
            byte = truncate(both >> (jnp.asarray(index & 7, jnp.uint64) * 8), "b8")
            if mode is None:
                byte = jnp.where(index > 7, (byte >> 7) * 0xFF, byte)
            result = result | (byte << (8 * i))
        return (result,)

    return Operation(("b32",), ("b32",) * 3, compute)
