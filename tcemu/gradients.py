"""Derivatives where a value goes through bits: those of a stand-in, or a refusal. Never a silent zero.

A bitcast has derivative 0 in JAX. So every function of this package that takes floats to floats or to codes goes through `stand_in` or
`no_gradient`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.custom_derivatives import SymbolicZero


@partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def stand_in(bits: Callable, smooth: Callable, *operands: Any) -> Any:
    """bits(*operands), differentiated as smooth(*operands): in forward and reverse mode, to any order.

    The outputs have the same shapes; those of `smooth` are cast to the dtypes of `bits`.
    """
    return bits(*operands)


@stand_in.defjvp
def _(bits: Callable, smooth: Callable, primals: tuple, tangents: tuple) -> tuple[Any, Any]:
    value = stand_in(bits, smooth, *primals)
    dtype = value.dtype
    return value, jax.jvp(lambda *operands: smooth(*operands).astype(dtype), primals, tangents)[1]


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def no_gradient(x: Array, message: str) -> Array:
    """x itself; differentiating it raises TypeError with the message. `jax.lax.stop_gradient` before it says that none is wanted."""
    return x


def _refuse(message: str, primals: tuple, tangents: tuple) -> tuple[Array, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        raise TypeError(message)
    return primals[0], tangents[0]


no_gradient.defjvp(_refuse, symbolic_zeros=True)
