"""mov with its packs and unpacks, selp and slct (PTX ISA 9.7.9.3, 9.7.9.6, 9.7.7)."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from tcemu.errors import Unsupported
from tcemu.ptx.context import Operation
from tcemu.ptx.scalar.lanes import cut, ones, signed, width
from tcemu.ptx.scalar.number_codes import flushed, ordered
from tcemu.ptx.scalar.syntax import Qualifiers, Shape


def move(qualifiers: Qualifiers, shape: Shape) -> Operation:
    """mov: of a register, a constant or an address; a vector into one register, or one register into a vector, lowest bits first."""
    kind = qualifiers.type
    if len(shape.sizes) != 2:
        raise Unsupported(f"mov.{kind} takes a destination and a source; got {len(shape.sizes)} operands")
    to, of = shape.sizes
    if to == of == 1:
        return Operation((kind,), (kind,), lambda a: (a,))
    count = max(to, of)
    if min(to, of) != 1 or kind not in ("b16", "b32", "b64") or count not in (2, 4) or width(kind) // count < 8:
        raise Unsupported(f"mov.{kind} between {of} and {to} elements: .b16, .b32 and .b64 have 2 or 4 on one side, of 8 bits or more")
    bits = width(kind) // count
    element = f"b{bits}"
    if to == 1:

        def pack(*parts: Array) -> tuple[Array]:
            whole = cut(parts[0], kind)
            for i, part in enumerate(parts[1:], 1):
                whole = whole | (cut(part, kind) << (bits * i))
            return (whole,)

        return Operation((kind,), (element,) * count, pack)
    return Operation((element,) * count, (kind,), lambda a: tuple(cut((a >> (bits * i)) & ones(bits), element) for i in range(count)))


def select(qualifiers: Qualifiers) -> Operation:
    """selp: a where the predicate holds, else b."""
    kind = qualifiers.type
    return Operation((kind,), (kind, kind, "pred"), lambda a, b, c: (jnp.where(c, a, b),))


def select_by_sign(qualifiers: Qualifiers) -> Operation:
    """slct: a where c >= 0, else b; -0 is 0, and a NaN is not >= 0."""
    kind, by = qualifiers.types[0], qualifiers.types[1]

    def compute(a: Array, b: Array, c: Array) -> tuple[Array]:
        if by == "s32":
            return (jnp.where(signed(c, by) >= 0, a, b),)
        key, nan = ordered(flushed(c, by) if "ftz" in qualifiers else c, by)
        return (jnp.where((key >= 0) & ~nan, a, b),)

    return Operation((kind,), (kind, kind, by), compute)
