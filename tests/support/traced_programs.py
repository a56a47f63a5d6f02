"""What a traced program (jaxpr) does: its operations on floats, and those of them that are proved exact."""

import jax.numpy as jnp

# Every float operation of the core, with the reason that it is exact
EXACT = {
    "mul": "of significands, at most 24 bits; by powers of two; see the head of arithmetic/fused_dot_add.py",
    "add": "a product and a power of two whose fraction holds it; step/bounded.py",
    "sub": "a term less its own high bits; step/general.py",
    "convert_element_type": "int32 <-> f32 of values that fit 24 bits, or the cut toward zero that the step prescribes; see step",
    "dot_general": "integer: f32 integers of 8 bits, sums below 2^24; integer_dot.py. Or of 0, 1, Inf and NaN; step/specials.py",
    "abs": "the sign bit",
    "lt": "a comparison, of normal numbers, infinities aside, and zero",
    "gt": "a comparison with zero of a sum of zeros and ones",
    "eq": "a comparison with zero: significands are 0 or at least 2^-48",
}
# these move or reinterpret bits
MOVES = {
    "bitcast_convert_type", "broadcast_in_dim", "reshape", "transpose", "slice", "dynamic_slice", "squeeze", "select_n", "pad",
    "jit", "scan", "while", "cond", "custom_jvp_call",
}  # fmt: skip


def equations(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def is_float(variable):
    return jnp.issubdtype(variable.aval.dtype, jnp.inexact)


def float_operations(jaxpr):
    return {e.primitive.name for e in equations(jaxpr) if any(map(is_float, (*e.invars, *e.outvars)))}
