"""Approximate instructions: `.approx`, `.full` (PTX ISA 9.7.3.7, 9.7.3.13 to 9.7.3.22, 9.7.4.9, 9.7.4.10).

All have the GPU's bits, by `tcemu.engine.arithmetic.special_functions`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array

from tcemu.engine.arithmetic import special_functions
from tcemu.kernels.ptx.instruction_interface import Operation
from tcemu.kernels.ptx.scalar import float_arithmetic as floats
from tcemu.kernels.ptx.scalar.opcode_syntax import Qualifiers
from tcemu.kernels.ptx.scalar.raw_bits import element_kind, elementwise_operation, format_constants, magnitude, sign_bit

F64_CODES = {name: int(value) << 52 for name, value in {"one": 1023, "two^54": 1023 + 54, "two^27": 1023 + 27}.items()}
HALF, THREE_EIGHTHS = 0x3FE0000000000000, 0x3FD8000000000000  # f64 codes of 0.5 and 0.375


def unit_function(name: str) -> Callable[[Qualifiers], Operation]:
    """Return the builder of a function of one f32, by its name in `special_functions.UNARY`."""

    def build(qualifiers: Qualifiers) -> Operation:
        flush = "ftz" in qualifiers
        return elementwise_operation("f32", 1, lambda x: special_functions.UNARY[name](x, flush))

    return build


def exponential(qualifiers: Qualifiers) -> Operation:
    """Build ex2, of f32 or of narrow floats, whose results are those of f32 truncated."""
    kind = element_kind(qualifiers.type)
    if kind == "f32":
        return unit_function("ex2")(qualifiers)
    return elementwise_operation(qualifiers.type, 1, special_functions.NARROW["ex2", kind])


def hyperbolic_tangent(qualifiers: Qualifiers) -> Operation:
    """Build tanh, of f32 or of narrow floats, whose results are those of f32 truncated."""
    kind = element_kind(qualifiers.type)
    return elementwise_operation(qualifiers.type, 1, special_functions.tanh if kind == "f32" else special_functions.NARROW["tanh", kind])


def division(name: str) -> Callable[[Qualifiers], Operation]:
    """Return the builder of a division by a reciprocal, by its name in `special_functions.DIVISIONS`."""

    def build(qualifiers: Qualifiers) -> Operation:
        flush = "ftz" in qualifiers
        return elementwise_operation("f32", 2, lambda a, b: special_functions.DIVISIONS[name](a, b, flush))

    return build


def upper_word_function(compute: Callable[[Array], Array]) -> Callable[[Qualifiers], Operation]:
    """Return the builder of rcp or rsqrt `.approx.ftz.f64`, whose operand and result have 32 low bits of 0 (9.7.3.14, 9.7.3.17)."""

    def apply_upper(x: Array) -> Array:
        return compute((x >> 32).astype(jnp.uint32)).astype(jnp.uint64) << 32

    return lambda qualifiers: elementwise_operation("f64", 1, apply_upper)


reciprocal_seed = upper_word_function(special_functions.rcp_upper)
root_seed = upper_word_function(special_functions.rsqrt_upper)


def reciprocal_square_root(qualifiers: Qualifiers) -> Operation:
    """Build rsqrt.

    `.approx.f64` is a program of ptxas 13.0: the seed of the unit, and one step of third order by fused multiply-adds. A subnormal is
    scaled by 2^54 before it and by 2^27 after it.
    """
    return unit_function("rsqrt")(qualifiers) if qualifiers.type == "f32" else elementwise_operation("f64", 1, _root_f64)


def _root_f64(x: Array) -> Array:
    multiply, add = (build(Qualifiers(("rn", "f64"))).compute for build in (floats.multiply, floats.multiply_add))
    constant = lambda code: jnp.full_like(x, jnp.uint64(code))
    subnormal = magnitude(x, "f64") < jnp.uint64(format_constants("f64").hidden_bit)
    operand = jnp.where(subnormal, multiply(x, constant(F64_CODES["two^54"]))[0], x)
    seed = special_functions.rsqrt_upper((operand >> 32).astype(jnp.uint32)).astype(jnp.uint64) << 32
    (square,) = multiply(seed, seed)
    (error,) = add(operand, floats.flip_sign(square, "f64"), constant(F64_CODES["one"]))
    (factor,) = add(error, constant(THREE_EIGHTHS), constant(HALF))
    (correction,) = multiply(seed, error)
    (root,) = add(factor, correction, seed)
    root = jnp.where(subnormal, multiply(root, constant(F64_CODES["two^27"]))[0], root)
    infinity, negative = jnp.uint64(format_constants("f64").infinity), sign_bit(x, "f64")
    root = jnp.where(x == infinity, jnp.uint64(0), root)
    root = jnp.where(negative != 0, jnp.uint64(0xFFF8000000000000), root)
    root = jnp.where(magnitude(x, "f64") == 0, infinity | negative, root)
    return floats.propagate_first_nan(root, x)
