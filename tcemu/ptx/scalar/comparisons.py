"""setp and set, testp and copysign (PTX ISA 9.7.6, 9.7.3.1, 9.7.3.2)."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from tcemu.errors import Unsupported
from tcemu.ptx.context import Operation
from tcemu.ptx.scalar.lanes import halves, number, width
from tcemu.ptx.scalar.number_codes import CANONICAL, code, flushed, magnitude, ordered, sign
from tcemu.ptx.scalar.syntax import Qualifiers, Shape

Comparison = Callable[[Array, Array], Array]

RELATIONS: dict[str, Comparison] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
UNORDERED = {f"{name}u": name for name in RELATIONS}
OF_FLOATS = (*RELATIONS, *UNORDERED, "num", "nan")
BOOLEANS: dict[str, Callable[[Array, Array], Array]] = {"and": jnp.logical_and, "or": jnp.logical_or, "xor": jnp.logical_xor}
PACKED = ("f16x2", "bf16x2")


def compare(name: str, kind: str, ftz: bool) -> Comparison:
    """The comparison on raw bits of one type; of a packed type: bool[2, ...]."""
    if kind in PACKED:
        single = compare(name, kind.removesuffix("x2"), ftz)
        return lambda a, b: single(halves(a), halves(b))
    if kind not in CANONICAL:
        return lambda a, b: RELATIONS[UNSIGNED.get(name, name)](number(a, kind), number(b, kind))

    def of_floats(a: Array, b: Array) -> Array:
        (x, x_nan), (y, y_nan) = (ordered(flushed(v, kind) if ftz else v, kind) for v in (a, b))
        nan = x_nan | y_nan
        if name in ("num", "nan"):
            return nan if name == "nan" else ~nan
        held = RELATIONS[UNORDERED.get(name, name)](x, y)
        return held | nan if name in UNORDERED else held & ~nan

    return of_floats


def _parts(qualifiers: Qualifiers) -> tuple[Comparison, str, str]:
    """The comparison, the type that it takes, and the name of the Boolean operator, or ""."""
    name, kind = qualifiers[0], qualifiers.type
    floats = kind in CANONICAL or kind in PACKED
    known = OF_FLOATS if floats else ("eq", "ne") if kind[0] == "b" else (*RELATIONS, *(UNSIGNED if kind[0] == "u" else ()))
    if name not in known:
        raise Unsupported(f"a comparison .{name} of .{kind}: of this type there are {', '.join(known)} (PTX ISA 9.7.6)")
    return compare(name, kind, "ftz" in qualifiers), kind, qualifiers.one_of(*BOOLEANS)


def set_predicate(qualifiers: Qualifiers, shape: Shape) -> Operation:
    """setp: p, and as a second destination what the negated comparison gives; of a packed type one predicate for each half."""
    holds, kind, boolean = _parts(qualifiers)
    packed, two = kind in PACKED, shape.sizes[0] == 2
    if packed and not two:
        raise Unsupported(f"setp of .{kind} has two destinations, p|q, for the lower and the upper half (PTX ISA 9.7.7.3)")
    if kind in ("f16", "bf16") and two:
        raise Unsupported(f"setp of .{kind} has one destination (PTX ISA 9.7.7.3)")

    def compute(a: Array, b: Array, c: Array | None = None) -> tuple[Array, ...]:
        held = holds(a, b)
        both = (held[0], held[1]) if packed else (held, ~held)[: 1 + two]
        return both if c is None else tuple(BOOLEANS[boolean](p, c) for p in both)

    return Operation(("pred",) * (1 + two), (kind, kind, *("pred",) * bool(boolean)), compute)


def set_value(qualifiers: Qualifiers) -> Operation:
    """set: all ones where the comparison holds, or 1.0 for a float destination; else 0. Each half of a packed type has its own."""
    holds, kind, boolean = _parts(qualifiers)
    result = qualifiers.types[0]
    packed = kind in PACKED
    single = result.removesuffix("x2")
    true = code(single).one if single in CANONICAL else 0xFFFF if packed else (1 << width(result)) - 1

    def compute(a: Array, b: Array, c: Array | None = None) -> tuple[Array]:
        held = holds(a, b)
        held = held if c is None else BOOLEANS[boolean](held, c)
        value = jnp.where(held, jnp.uint32(true), jnp.uint32(0))
        return (value[0] | (value[1] << 16) if packed else value,)

    return Operation((result,), (kind, kind, *("pred",) * bool(boolean)), compute)


TESTS: dict[str, Callable[[Array, int, int], Array]] = {  # by the magnitude's code, Inf's and that of the least normal
    "finite": lambda m, infinity, least: m < infinity,
    "infinite": lambda m, infinity, least: m == infinity,
    "number": lambda m, infinity, least: m <= infinity,
    "notanumber": lambda m, infinity, least: m > infinity,
    "normal": lambda m, infinity, least: ((m >= least) & (m < infinity)) | (m == 0),  # 0 is one on an H200
    "subnormal": lambda m, infinity, least: (m > 0) & (m < least),
}


def test_property(qualifiers: Qualifiers) -> Operation:
    """testp."""
    kind, test = qualifiers.type, TESTS[qualifiers[0]]

    def compute(a: Array) -> tuple[Array]:
        infinity, least = (a.dtype.type(value) for value in (code(kind).infinity, code(kind).hidden))
        return (test(magnitude(a, kind), infinity, least),)

    return Operation(("pred",), (kind,), compute)


def copy_sign(qualifiers: Qualifiers) -> Operation:
    """copysign: the sign of a, the magnitude of b."""
    kind = qualifiers.type
    return Operation((kind,), (kind, kind), lambda a, b: (sign(a, kind) | magnitude(b, kind),))
