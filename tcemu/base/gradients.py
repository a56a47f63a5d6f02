"""Derivatives of functions that compute on bits: a straight-through estimate or an error, but never a silent zero.

A bitcast has derivative 0 in JAX. So every function of this package that maps floats to floats or to codes uses `straight_through`,
`no_gradient`, or a `jax.custom_vjp` after `reverse_mode_only`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero

from tcemu.base.jax_internals import refuse_forward_mode


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def straight_through(bits: Callable, smooth: Callable, *operands: Any) -> Any:
    """Compute one function and differentiate another, in forward and reverse mode and to any order.

    Args:
        bits: Function that computes the value.
        smooth: Function that is differentiated. Its output has the shape of the value, and is cast to the dtype of the value.
        *operands: Arguments of both functions.

    Returns:
        bits(*operands), with the derivatives of smooth(*operands).
    """
    return bits(*operands)


@straight_through.defjvp
def _(bits: Callable, smooth: Callable, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    value = straight_through(bits, smooth, *primals)
    dtype = value.dtype
    return value, jax.jvp(lambda *operands: smooth(*operands).astype(dtype), primals, tangents)[1]


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def no_gradient(x: Array, message: str) -> Array:
    """Return x unchanged, and raise an error when it is differentiated.

    Args:
        x: Array. Apply `jax.lax.stop_gradient` to it first where no gradient is needed; then nothing is raised.
        message: Text of the error.

    Returns:
        x.

    Raises:
        TypeError: Raised when x is differentiated.
    """
    return x


def _refuse(message: str, primals: tuple, tangents: tuple) -> tuple[Array, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        raise TypeError(message)
    return primals[0], tangents[0]


no_gradient.defjvp(_refuse, symbolic_zeros=True)


def reverse_mode_only(operands: Any, message: str) -> Any:
    """Mark the operands of a `jax.custom_vjp`, so that forward mode raises an error that says what would work.

    JAX's own error names neither the function nor a way round.

    Args:
        operands: Pytree of the operands.
        message: Text of the error.

    Returns:
        The operands, unchanged. Reverse mode passes through them.

    Raises:
        TypeError: Raised when a tangent is computed, as by `jax.jvp`, `jax.jacfwd` and `jax.hessian`.
    """
    is_differentiable = lambda x: isinstance(x, Tracer) and jnp.issubdtype(x.dtype, jnp.floating)
    return jax.tree.map(lambda x: refuse_forward_mode(x, message) if is_differentiable(x) else x, operands)
