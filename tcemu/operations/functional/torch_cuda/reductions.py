"""Reductions on f32 codes in JAX: the algebras of sums, products, extremes and moments, and the walk of a reduction's tree by them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.engine.arithmetic.f32_arithmetic import add_f32, fma_f32, is_nan_f32, less_f32
from tcemu.engine.arithmetic.special_functions import INFINITY, MAGNITUDE, NAN, SIGN, multiply_f32
from tcemu.engine.arithmetic.sum_tree import Node, evaluate
from tcemu.operations.functional.torch_cuda.reduce_plans import ReduceCall, reduce_tree
from tcemu.operations.products.library.kernel_sums import CodeSums

ONE = np.uint32(0x3F800000)
# Nonzero terms of at least 2^-100 are multiples of 2^-123, and so is every partial sum, which then is no subnormal: the addition of the
# device, which may flush those, is exact but for its rounding.
LEAST_EXACT = np.uint32((127 - 100) << 23)


def add_by_device(x: Array, y: Array) -> Array:
    """Add f32 codes by the device's addition."""
    total = lax.bitcast_convert_type(x, jnp.float32) + lax.bitcast_convert_type(y, jnp.float32)
    return jnp.where(jnp.isnan(total), NAN, lax.bitcast_convert_type(total, jnp.uint32))


def _largest(x: Array, y: Array) -> Array:
    """Return the larger number as PyTorch's maximum does: a NaN stays, and of equal numbers the second one is taken."""
    return jnp.where(is_nan_f32(x) | less_f32(y, x), x, y)


class Reduction(NamedTuple):
    """How a reduction takes a term and joins two values.

    Attributes:
        identity: Code of a value without a term.
        padding: Code of a term that changes no value.
        take: Takes a term.
        join: Joins two values.
    """

    identity: np.uint32
    padding: np.uint32
    take: Callable[[Array, Array], Array]
    join: Callable[[Array, Array], Array]


ZERO = np.uint32(0)
REDUCTIONS = {
    "sum": Reduction(ZERO, SIGN, add_f32, add_f32),
    "sum by device": Reduction(ZERO, SIGN, add_by_device, add_by_device),
    "squares": Reduction(ZERO, ZERO, lambda total, x: fma_f32(x, x, total), add_f32),
    "product": Reduction(ONE, ONE, multiply_f32, multiply_f32),
    "largest": Reduction(SIGN | INFINITY, SIGN | INFINITY, _largest, _largest),
}


class TermSums(CodeSums):
    """The algebra of a reduction of terms [K + 1], the last one for places without an element; values [*grid]."""

    def __init__(self, how: Reduction, terms: Array) -> None:
        super().__init__()
        self.how, self.terms = how, terms

    def zeros(self, grid: tuple[int, ...], negative: Any) -> Array:
        return jnp.full(grid, self.how.identity)

    def read(self, places: Array) -> Array:
        return self.terms[places]  # EMPTY is the last one

    def accumulate(self, running: Array, elements: Array) -> Array:
        return self.how.take(running, elements)

    def add(self, x: Array, y: Array) -> Array:
        return self.how.join(x, y)

    def extend(self, sums: Array, count: int) -> Array:
        return jnp.concatenate([sums, jnp.full((count, *sums.shape[1:]), self.how.identity)])


def _is_exact_by_device(codes: Array) -> bool:
    """Return whether the device's addition gives these terms' sums; False under a trace."""
    if isinstance(codes, jax.core.Tracer):
        return False
    size = np.asarray(codes) & MAGNITUDE
    return bool(((size == 0) | (size >= LEAST_EXACT)).all())


def reduce_elements(kind: str, call: ReduceCall, elements: Array) -> Array:
    """Reduce the f32 codes of an operand, flat as they lie in memory, to [outputs] in the order of a call.

    Args:
        kind: A key of REDUCTIONS.
        call: The call.
        elements: The operand's elements [outputs * terms].
    """
    if kind == "sum" and _is_exact_by_device(elements):
        kind = "sum by device"
    return _walk(kind, jax.tree.map(jnp.asarray, reduce_tree(call)), elements)


@partial(jax.jit, static_argnums=0)
def _walk(kind: str, tree: Node, elements: Array) -> Array:
    how = REDUCTIONS[kind]
    return evaluate(tree, TermSums(how, jnp.append(elements, how.padding)))
