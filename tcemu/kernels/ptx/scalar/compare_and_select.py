"""Comparisons and selections: setp, set, testp, copysign, selp and slct (PTX ISA 9.7.6, 9.7.7, 9.7.3.1, 9.7.3.2)."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.kernels.ptx.instruction_interface import Operation
from tcemu.kernels.ptx.scalar.opcode_syntax import OperandShape, Qualifiers
from tcemu.kernels.ptx.scalar.raw_bits import (
    CANONICAL_NAN,
    as_integer,
    as_signed,
    comparison_key,
    element_kind,
    flush_subnormals,
    format_constants,
    join_halves,
    magnitude,
    sign_bit,
    split_halves,
    width,
)

Comparison = Callable[[Array, Array], Array]

RELATIONS: dict[str, Comparison] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip
UNSIGNED_ALIASES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}
UNORDERED_ALIASES = {f"{name}u": name for name in RELATIONS}
FLOAT_RELATION_NAMES = (*RELATIONS, *UNORDERED_ALIASES, "num", "nan")
BOOLEAN_FUNCTIONS: dict[str, Callable[[Array, Array], Array]] = {"and": jnp.logical_and, "or": jnp.logical_or, "xor": jnp.logical_xor}
PACKED_TYPES = ("f16x2", "bf16x2")


def compare(name: str, kind: str, ftz: bool) -> Comparison:
    """Return the comparison on raw bits of one type. A packed type gives bool[2, ...]."""
    if kind in PACKED_TYPES:
        compare_elements = compare(name, element_kind(kind), ftz)
        return lambda a, b: compare_elements(split_halves(a), split_halves(b))
    if kind not in CANONICAL_NAN:
        return lambda a, b: RELATIONS[UNSIGNED_ALIASES.get(name, name)](as_integer(a, kind), as_integer(b, kind))

    def compare_floats(a: Array, b: Array) -> Array:
        (x, x_nan), (y, y_nan) = (comparison_key(flush_subnormals(v, kind) if ftz else v, kind) for v in (a, b))
        nan = x_nan | y_nan
        if name in ("num", "nan"):
            return nan if name == "nan" else ~nan
        result = RELATIONS[UNORDERED_ALIASES.get(name, name)](x, y)
        return result | nan if name in UNORDERED_ALIASES else result & ~nan

    return compare_floats


def _parse_comparison(qualifiers: Qualifiers) -> tuple[Comparison, str, str]:
    """Return the comparison, the type of its operands, and the name of the Boolean operator or ""."""
    name, kind = qualifiers[0], qualifiers.type
    floats = kind in CANONICAL_NAN or kind in PACKED_TYPES
    known = (
        FLOAT_RELATION_NAMES if floats else ("eq", "ne") if kind[0] == "b" else (*RELATIONS, *(UNSIGNED_ALIASES if kind[0] == "u" else ()))
    )
    if name not in known:
        raise Unsupported(f"the comparison .{name} does not exist for .{kind}; known are {', '.join(known)} (PTX ISA 9.7.6)")
    return compare(name, kind, "ftz" in qualifiers), kind, qualifiers.find(*BOOLEAN_FUNCTIONS)


def set_predicate(qualifiers: Qualifiers, shape: OperandShape) -> Operation:
    """Build setp. A second destination takes the negated comparison; a packed type gives one predicate for each half."""
    comparison, kind, boolean = _parse_comparison(qualifiers)
    packed, two = kind in PACKED_TYPES, shape.sizes[0] == 2
    if packed and not two:
        raise Unsupported(f"setp of .{kind} has two destinations, p|q, for the lower and the upper half (PTX ISA 9.7.7.3)")
    if kind in ("f16", "bf16") and two:
        raise Unsupported(f"setp of .{kind} has one destination (PTX ISA 9.7.7.3)")

    def compute(a: Array, b: Array, c: Array | None = None) -> tuple[Array, ...]:
        result = comparison(a, b)
        predicates = (result[0], result[1]) if packed else (result, ~result)[: 1 + two]
        return predicates if c is None else tuple(BOOLEAN_FUNCTIONS[boolean](p, c) for p in predicates)

    return Operation(("pred",) * (1 + two), (kind, kind, *("pred",) * bool(boolean)), compute)


def set_value(qualifiers: Qualifiers) -> Operation:
    """Build set: all ones (1.0 for a float destination) where the comparison is true, else 0. Halves of a packed type are separate."""
    comparison, kind, boolean = _parse_comparison(qualifiers)
    result = qualifiers.types[0]
    packed = kind in PACKED_TYPES
    element = element_kind(result)
    true = format_constants(element).one if element in CANONICAL_NAN else 0xFFFF if packed else (1 << width(result)) - 1

    def compute(a: Array, b: Array, c: Array | None = None) -> tuple[Array]:
        predicate = comparison(a, b)
        predicate = predicate if c is None else BOOLEAN_FUNCTIONS[boolean](predicate, c)
        value = jnp.where(predicate, jnp.uint32(true), jnp.uint32(0))
        return (join_halves(value) if packed else value,)

    return Operation((result,), (kind, kind, *("pred",) * bool(boolean)), compute)


PROPERTY_TESTS: dict[
    str, Callable[[Array, int, int], Array]
] = {  # functions of the codes of a magnitude, of Inf and of the smallest normal
    "finite": lambda m, infinity, least: m < infinity,
    "infinite": lambda m, infinity, least: m == infinity,
    "number": lambda m, infinity, least: m <= infinity,
    "notanumber": lambda m, infinity, least: m > infinity,
    "normal": lambda m, infinity, least: ((m >= least) & (m < infinity)) | (m == 0),  # an H200 counts 0 as normal
    "subnormal": lambda m, infinity, least: (m > 0) & (m < least),
}


def test_property(qualifiers: Qualifiers) -> Operation:
    """Build testp."""
    kind, test = qualifiers.type, PROPERTY_TESTS[qualifiers[0]]

    def compute(a: Array) -> tuple[Array]:
        infinity, least = (a.dtype.type(value) for value in (format_constants(kind).infinity, format_constants(kind).hidden_bit))
        return (test(magnitude(a, kind), infinity, least),)

    return Operation(("pred",), (kind,), compute)


def copy_sign(qualifiers: Qualifiers) -> Operation:
    """Build copysign: the sign of a, the magnitude of b."""
    kind = qualifiers.type
    return Operation((kind,), (kind, kind), lambda a, b: (sign_bit(a, kind) | magnitude(b, kind),))


def select(qualifiers: Qualifiers) -> Operation:
    """Build selp: a where the predicate is true, else b."""
    kind = qualifiers.type
    return Operation((kind,), (kind, kind, "pred"), lambda a, b, c: (jnp.where(c, a, b),))


def select_by_sign(qualifiers: Qualifiers) -> Operation:
    """Build slct: a where c >= 0, else b; -0 counts as 0, and a NaN is not >= 0."""
    kind, selector = qualifiers.types

    def compute(a: Array, b: Array, c: Array) -> tuple[Array]:
        if selector == "s32":
            return (jnp.where(as_signed(c, selector) >= 0, a, b),)
        key, nan = comparison_key(flush_subnormals(c, selector) if "ftz" in qualifiers else c, selector)
        return (jnp.where((key >= 0) & ~nan, a, b),)

    return Operation((kind,), (kind, kind, selector), compute)
