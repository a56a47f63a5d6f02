"""The special functions that a kernel may use, by name: exponentials, divisions, reciprocal square roots, logarithms; f32 codes."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.engine.arithmetic.exponential import exp2
from tcemu.engine.arithmetic.f32_arithmetic import add_f32, f32_code, fma_f32
from tcemu.engine.arithmetic.libdevice import log_f32
from tcemu.engine.arithmetic.special_functions import divide_approx, divide_full, ex2, lg2, multiply_f32, rcp, rsqrt, sqrt
from tcemu.engine.backends.quotients import divide
from tcemu.engine.formats.number_formats import F32

LOG2_E, LN_2 = np.uint32(0x3FB8AA3B), np.uint32(0x3F317218)
ONE = f32_code(1.0)


def _with_ftz(name: str, function: Callable[..., Array]) -> dict[str, Callable[..., Array]]:
    """Return a function of codes and `flush` under its name and, with flushing, under the name with ".ftz"."""
    return {name: lambda *x: function(*x, False), f"{name}.ftz": lambda *x: function(*x, True)}


POWERS = _with_ftz("ex2.approx", ex2) | {"exact": exp2}  # 2^x; the operand of an exponential is first multiplied by log2 e and rounded
DIVISIONS = (
    _with_ftz("div.full", divide_full)
    | _with_ftz("div.approx", divide_approx)
    | _with_ftz("rcp.approx", lambda x, y, flush: multiply_f32(x, rcp(y, flush)))
    | {"rn": lambda x, y: divide(x, y, F32)}
)
ROOTS = _with_ftz("sqrt.approx", sqrt)  # a division follows
RECIPROCAL_ROOTS = _with_ftz("rsqrt.approx", rsqrt)
LOGARITHMS = {"logf": log_f32} | _with_ftz("lg2.approx", lambda x, flush: multiply_f32(lg2(x, flush), jnp.full_like(x, LN_2)))


def exponential(x: Array, choice: str) -> Array:
    """Compute e^x as 2^(x * log2 e), the product rounded to f32."""
    flush = choice.endswith(".ftz")
    return POWERS[choice](multiply_f32(x, jnp.full_like(x, LOG2_E), flush))


def divide_f32(x: Array, y: Array, choice: str) -> Array:
    """Divide x by y, which broadcast against each other."""
    return DIVISIONS[choice](*jnp.broadcast_arrays(x, y))


def divide_and_add(x: Array, count: int, addend: Array, choice: str) -> Array:
    """Divide x by a number of columns and add. ptxas fuses the last product of a division without `.ftz` or `.rn` into the sum.

    Source: `tcemu.kernels.ptx.linker.contraction`.
    """
    divisor = jnp.full_like(x, f32_code(count))
    if choice in ("div.full", "div.approx", "rcp.approx"):  # nothing is scaled: a count is a normal number, and at most 2^126
        return fma_f32(*jnp.broadcast_arrays(x, rcp(divisor, True), addend))
    return add_f32(*jnp.broadcast_arrays(divide_f32(x, divisor, choice), addend))


def reciprocal_root(x: Array, choice: str, division: str) -> Array:
    """Compute 1 / sqrt(x): by one instruction, or by a square root and a division."""
    if choice in RECIPROCAL_ROOTS:
        return RECIPROCAL_ROOTS[choice](x)
    return divide_f32(jnp.full_like(x, ONE), ROOTS[choice](x), division)


def sigmoid(x: Array, power: str, division: str) -> Array:
    """Compute 1 / (1 + e^-x). The sign goes into the product with log2 e."""
    one = jnp.full_like(x, ONE)
    return divide_f32(one, add_f32(exponential(x ^ np.uint32(1 << 31), power), one), division)
