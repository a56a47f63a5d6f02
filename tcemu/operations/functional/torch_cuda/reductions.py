"""Reductions on f32 codes in JAX: the algebras of sums, products, extremes and moments, and the walk of a reduction's tree by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer

from tcemu.engine.arithmetic.f32_arithmetic import add_f32, fma_f32, is_nan_f32, less_f32
from tcemu.engine.arithmetic.special_functions import INFINITY, MAGNITUDE, NAN, SIGN
from tcemu.engine.arithmetic.sum_tree import EMPTY, Chain, Node, Turn, evaluate
from tcemu.operations.functional.torch_cuda.device_functions import Value, fma, product_f32, where
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
        take: Takes a term; with several operands, a tuple of their elements.
        join: Joins two values.
    """

    identity: np.uint32
    padding: np.uint32
    take: Callable[[Array, Any], Array]
    join: Callable[[Array, Array], Array]


ZERO = np.uint32(0)
REDUCTIONS = {
    "sum": Reduction(ZERO, SIGN, add_f32, add_f32),
    "sum by device": Reduction(ZERO, SIGN, add_by_device, add_by_device),
    "squares": Reduction(ZERO, ZERO, lambda total, x: fma_f32(x, x, total), add_f32),
    "products": Reduction(ZERO, ZERO, lambda total, pair: fma_f32(*pair, total), add_f32),  # of two operands
    "product": Reduction(ONE, ONE, product_f32, product_f32),
    "sizes": Reduction(ZERO, ZERO, lambda total, x: add_f32(total, x & MAGNITUDE), add_f32),
    "largest size": Reduction(ZERO, ZERO, lambda total, x: _largest(total, x & MAGNITUDE), _largest),
    "largest": Reduction(SIGN | INFINITY, SIGN | INFINITY, _largest, _largest),
}


class ElementSums(CodeSums):
    """Sums of elements [K + 1, ...], the last one for places without an element."""

    def __init__(self, outputs: tuple[int, ...], elements: tuple[Array, ...]) -> None:
        super().__init__(outputs)
        self.terms = elements

    def scan(self, turn: Callable[[Any, Turn], Any], state: Any, chain: Chain) -> Any:
        if any(isinstance(x, Tracer) for x in self.terms) or chain.closes is not None:
            return super().scan(turn, state, chain)
        for places in chain.places:  # without a trace no program is compiled for a number of turns
            state = turn(state, Turn(self.read(places), None, None))
        return state


class TermSums(ElementSums):
    """The algebra of a reduction of terms; values [*grid, *outputs]."""

    def __init__(self, how: Reduction, elements: tuple[Array, ...]) -> None:
        super().__init__(elements[0].shape[1:], elements)
        self.how = how

    def zeros(self, grid: tuple[int, ...], negative: Any) -> Array:
        return jnp.full((*grid, *self.outputs), self.how.identity)

    def read(self, places: Array) -> tuple[Array, ...]:
        return tuple(x[places] for x in self.terms)  # EMPTY is the last one

    def accumulate(self, running: Array, elements: tuple[Array, ...]) -> Array:
        return self.how.take(running, elements[0] if len(self.terms) == 1 else elements)

    def add(self, x: Array, y: Array) -> Array:
        return self.how.join(x, y)

    def extend(self, sums: Array, count: int) -> Array:
        return jnp.concatenate([sums, jnp.full((count, *sums.shape[1:]), self.how.identity)])


def _is_exact_by_device(codes: Array) -> bool:
    """Return whether the device's addition gives these terms' sums; False under a trace."""
    if isinstance(codes, Tracer):
        return False
    size = np.asarray(codes) & MAGNITUDE
    return bool(((size == 0) | (size >= LEAST_EXACT)).all())


def reduce_tree_values(kind: str | Reduction, tree: Node, *elements: Array) -> Array:
    """Reduce the f32 codes of an operand in the order of a tree whose places are along the operand's first axis.

    Args:
        kind: A key of REDUCTIONS, or a reduction.
        tree: The tree.
        *elements: f32 codes [K, *outputs], one array for each operand of the kind.

    Returns:
        f32 codes [*grid of the tree, *outputs].
    """
    if kind == "sum" and _is_exact_by_device(elements[0]):
        kind = "sum by device"
    how = REDUCTIONS[kind] if isinstance(kind, str) else kind
    return evaluate(tree, TermSums(how, tuple(_with_padding(x, how.padding) for x in elements)))


def compute_by_shift(compute: Callable[[int, Array], Array], codes: Array, vector: int) -> Array:
    """Compute the sums of the columns of codes [terms, outputs], which lie one after the other in memory; those that begin alike together.

    Args:
        compute: Computes the sums of some columns, given the number of elements by which their first term lies after a vector's boundary.
        codes: The codes.
        vector: Elements of a vector.
    """
    terms, outputs = codes.shape
    period = min(vector // int(np.gcd(vector, max(terms, 1))), outputs)
    if period <= 1:
        return compute(0, codes)
    found = [compute(first * terms % vector, codes[:, first::period]) for first in range(period)]
    return jnp.concatenate(found)[np.argsort(np.concatenate([np.arange(first, outputs, period) for first in range(period)]))]


def _with_padding(elements: Array, padding: np.uint32) -> Array:
    return jnp.concatenate([elements, jnp.full((1, *elements.shape[1:]), padding)])


# ---- moments


Parts = tuple[Any, Any, Any]  # mean, sum of squared differences, count


class Arithmetic(NamedTuple):
    """The functions besides operators that compute moments, of f32 values in JAX or of NumPy's f32."""

    fma: Callable[..., Any]
    where: Callable[..., Any]


DEVICE = Arithmetic(fma, where)


class Moments(NamedTuple):
    """The forms of Welford's update and of Chan's join in a kernel.

    Attributes:
        join: Joins two moments.
        reciprocal: An update multiplies by the reciprocal of the count; else it divides.
        fused: An update's product of two differences is part of an fma.
    """

    join: Callable[[Arithmetic, Parts, Parts], Parts]
    reciprocal: bool
    fused: bool = True

    def update(self, by: Arithmetic, parts: Parts, x: Any) -> Parts:
        """Return the moments with one more element."""
        mean, squares, count = parts
        after, delta = count + 1.0, x - mean
        new = by.fma(delta, 1.0 / after, mean) if self.reciprocal else mean + delta / after
        more = by.fma(delta, x - new, squares) if self.fused else squares + delta * (x - new)
        return new, more, after


def _join_welford_ops(by: Arithmetic, own: Parts, other: Parts) -> Parts:
    """Join as SharedReduceOps.h, WelfordOps.combine."""
    total = own[2] + other[2]
    share, delta = other[2] / by.where(total < 1.0, 1.0, total), other[0] - own[0]
    joined = by.fma(delta, share, own[0]), by.fma(delta * delta * own[2], share, own[1] + other[1]), total
    pick = lambda x, y, z: by.where(own[2] < 1.0, y, by.where(other[2] < 1.0, x, z))
    return pick(own[0], other[0], joined[0]), pick(own[1], other[1], joined[1]), total


def _join_vectorised(by: Arithmetic, own: Parts, other: Parts) -> Parts:
    """Join as layer_norm_kernel.cu, cuWelfordCombine."""
    total, scale = own[2] + other[2], _reciprocal_count(by, own, other)
    share, delta = own[2] * scale, own[0] - other[0]
    mean = by.fma(other[2] * scale, other[0], share * own[0])
    squares = by.fma(delta * delta * other[2], share, other[1] + own[1])
    return by.where(total > 0.0, mean, 0.0), by.where(total > 0.0, squares, 0.0), total


def _join_batch_norm(by: Arithmetic, own: Parts, other: Parts) -> Parts:
    """Join as Normalization.cuh, batch_norm_collect_statistics_kernel."""
    factor, delta = _reciprocal_count(by, own, other), own[0] - other[0]
    squares = own[1] + by.fma(delta * delta * own[2] * other[2], factor, other[1])
    return by.fma(own[0], own[2], other[0] * other[2]) * factor, squares, own[2] + other[2]


def _join_chains(by: Arithmetic, own: Parts, other: Parts) -> Parts:
    """Join a thread's chains as Normalization.cuh, welford_merge_element. Words of [700, 33] decided which product is fused."""
    mean = by.fma(other[0], other[2], own[0] * own[2]) * _reciprocal_count(by, own, other)
    return mean, *_join_batch_norm(by, own, other)[1:]


def _reciprocal_count(by: Arithmetic, own: Parts, other: Parts) -> Any:
    total = own[2] + other[2]
    return 1.0 / by.where(total < 1.0, 1.0, total)


WELFORD_OPS, VECTORISED = Moments(_join_welford_ops, False), Moments(_join_vectorised, True)  # VECTORISED: cuWelfordOnlineSum
BATCH_NORM, CHANNELS_LAST = Moments(_join_batch_norm, False), Moments(_join_chains, True, fused=False)


class MomentSums(ElementSums):
    """The algebra of moments: values [*grid, *outputs, 3], the f32 codes of mean, sum of squared differences and count."""

    def __init__(self, how: Moments, elements: Array) -> None:
        super().__init__((*elements.shape[1:], 3), (elements,))
        self.how = how

    def zeros(self, grid: tuple[int, ...], negative: Any) -> Array:
        return jnp.zeros((*grid, *self.outputs), jnp.uint32)

    def read(self, places: Array) -> tuple[Array, Array]:
        (terms,) = self.terms
        given = jnp.asarray(places != EMPTY)
        return terms[places], given.reshape(given.shape + (1,) * (terms.ndim - 1))

    def accumulate(self, running: Array, elements: tuple[Array, Array]) -> Array:
        x, given = elements
        return jnp.where(given[..., None], self._stack(*self.how.update(DEVICE, self._parts(running), Value(x))), running)

    def add(self, x: Array, y: Array) -> Array:
        return self._stack(*self.how.join(DEVICE, self._parts(x), self._parts(y)))

    def _parts(self, values: Array) -> Parts:
        return Value(values[..., 0]), Value(values[..., 1]), Value(values[..., 2])

    def _stack(self, *parts: Value) -> Array:
        return jnp.stack([part.codes for part in parts], axis=-1)


def tree_moments(how: Moments, tree: Node, elements: Array) -> tuple[Value, Value, Value]:
    """Return mean, sum of squared differences and count of an operand's f32 codes [K, *outputs] in the order of a tree."""
    found = evaluate(tree, MomentSums(how, _with_padding(elements, ZERO)))
    return Value(found[..., 0]), Value(found[..., 1]), Value(found[..., 2])
