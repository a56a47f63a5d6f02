"""Sums in NumPy's f32 in the order of a tree, and products by a kernel recipe whose instructions alone are a compiled program.

NumPy's f32 additions are single IEEE operations, which nothing contracts or flushes. A product of NumPy's arrays so takes one program for
each shape of a slice, which is a kernel and no more: XLA compiles it in some 0.05 s, and a program with the merge and the epilogue in 1 s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax import Array

from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import ProductSpec, product_spec
from tcemu.engine.arithmetic.sum_tree import EMPTY, Algebra, Chain, Turn, evaluate
from tcemu.engine.backends.dispatch import multiply_matrices
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, BF16, F16, F32, Format
from tcemu.operations.products.library.kernel_order import recipe_tree
from tcemu.operations.products.library.kernel_recipe import Epilogue, KernelRecipe, Steps

TERMS_AT_ONCE = 1 << 16  # terms that are read before they are added
FLOATS = {F32: np.dtype(np.float32), F16: np.dtype(np.float16), BF16: np.dtype(ml_dtypes.bfloat16)}  # by the format of sums


def round_floats(x: np.ndarray, dtype: np.dtype | None) -> np.ndarray:
    """Round f32 values to a dtype and back; None: they stay as they are."""
    return x if dtype is None else x.astype(dtype).astype(np.float32)


def flush_floats(x: np.ndarray) -> np.ndarray:
    """Replace subnormal f32 values by zeros of their sign."""
    small = np.abs(x) < np.float32(2.0**-126)
    return np.where(small, np.copysign(np.float32(0), x), x)


class FloatSums(Algebra):
    """The algebra of sums in NumPy's f32: values [*grid, *outputs].

    Attributes:
        terms: The terms [K, *outputs], f32; the last one for EMPTY.
        outputs: Shape of the sums of one order.
        flush: Subnormal sums count as zeros.
        narrow: Format to which every sum is rounded, or None.
    """

    def __init__(self, terms: np.ndarray, outputs: tuple[int, ...], *, flush: bool = False, narrow: np.dtype | None = None) -> None:
        self.terms, self.outputs, self.flush, self.narrow = terms, outputs, flush, narrow

    def settle(self, x: np.ndarray) -> np.ndarray:
        """Return an f32 sum as an accumulator keeps it."""
        return round_floats(flush_floats(x) if self.flush else x, self.narrow)

    def zeros(self, grid: tuple[int, ...], negative: Any) -> np.ndarray:
        signs = np.where(negative, np.float32(-0.0), np.float32(0))
        return np.broadcast_to(signs.reshape(signs.shape + (1,) * len(self.outputs) * (signs.ndim > 0)), (*grid, *self.outputs)).copy()

    def read(self, places: np.ndarray) -> Iterable[Any]:
        """Return the elements of some turns, as `accumulate` takes them."""
        return self.terms[places]

    def scan(self, turn: Callable[[Any, Turn], Any], state: Any, chain: Chain) -> Any:
        size = math.prod((*chain.grid, *self.outputs))
        turns = max(1, min(TERMS_AT_ONCE // max(size, 1), len(chain.places)))
        closing = np.zeros(0) if chain.closes is None else chain.closes.any(axis=tuple(range(1, chain.closes.ndim)))
        for start in range(0, len(chain.places), turns):
            for number, elements in enumerate(self.read(chain.places[start : start + turns]), start):
                closes = chain.closes[number] if chain.closes is not None and closing[number] else None
                state = turn(state, Turn(elements, closes, None))
            self.end_block()
        return state

    def end_block(self) -> None:
        """Called after the turns of one `read`."""

    def accumulate(self, running: np.ndarray, elements: Any) -> np.ndarray:
        return self.settle(running + elements)

    def add(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return self.settle(x + y)

    def round(self, fmt: Format, x: np.ndarray) -> np.ndarray:
        return round_floats(x, FLOATS[fmt])


class InstructionSums(FloatSums):
    """Sums of products by an instruction, whose accumulators run one after the other; the instructions up to a close are one call."""

    def scan(self, turn: Callable[[Any, Turn], Any], state: Any, chain: Chain) -> Any:
        edges = [0, *(np.nonzero(chain.closes)[0] + 1)]
        for start, stop in pairwise(edges):
            state = turn(state, Turn(chain.places[start:stop].reshape(-1), chain.closes[stop - 1], chain.slots[start]))
        return state

    def where(self, mask: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (x if mask else y) if np.ndim(mask) == 0 else super().where(mask, x, y)


class MatrixSums(InstructionSums):
    """Sums of products by an instruction, of codes a [..., M, K] and b [..., K, N]; values [*grid, ..., M, N]."""

    def __init__(self, recipe: KernelRecipe, a: np.ndarray, b: np.ndarray) -> None:
        assert isinstance(recipe.unit, Steps)
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        super().__init__(a, (*batch, a.shape[-2], b.shape[-1]))
        self.a, self.b, self.fill = a, b, 1 << (recipe.a.bits - 1)  # -0: the product with +0 changes no sum
        self.model, self.spec = recipe.unit.arithmetic, product_spec(recipe.unit.op)

    def accumulate(self, running: np.ndarray, elements: np.ndarray) -> np.ndarray:
        return self.multiply(*self.take(elements), running)

    def take(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the codes of A and B at some places along K; products of -0 and +0 for EMPTY."""
        first, count = int(places[0]), len(places)
        if first != EMPTY and np.array_equal(places, np.arange(first, first + count)):
            return self.a[..., first : first + count], self.b[..., first : first + count, :]
        absent = places == EMPTY
        a, b = self.a[..., places], self.b[..., places, :]
        a[..., absent], b[..., absent, :] = self.fill, 0
        return a, b

    def multiply(self, a: np.ndarray, b: np.ndarray, running: np.ndarray) -> np.ndarray:
        """Return A·B + running by a chain of instructions; running and result in f32."""
        *_, of_k, of_n = b.strides
        by_columns = of_k < of_n  # the elements of a column lie side by side
        b = np.ascontiguousarray(b.swapaxes(-1, -2) if by_columns else b)
        codes = _multiply_codes(self.model, self.spec, by_columns, np.ascontiguousarray(a), b, running.view(np.uint32))
        return np.asarray(codes).view(np.float32)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _multiply_codes(model: Model, spec: ProductSpec, by_columns: bool, a: Array, b: Array, c: Array) -> Array:
    return multiply_matrices(model, spec, a, b.swapaxes(-1, -2) if by_columns else b, c, by_columns=by_columns)


def multiply_by_numpy(recipe: KernelRecipe, a: np.ndarray, b: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray | None:
    """Compute A·B as the recipe's kernel adds it, as `tcemu.matmul` does.

    Args:
        recipe: The recipe. Its slices are those of the operands' K.
        a: Array [..., M, K].
        b: Array [..., K, N], of any strides.
        bias: Array that broadcasts against [..., M, N], or None.

    Returns:
        An array in the recipe's format; None where a compiled program has to compute: for sums in lanes, scales, conversions of operands,
        and results of 8 bits.
    """
    formats, plain = [ARRAY_FORMATS.get(x.dtype) for x in (a, b)], Epilogue(between=recipe.epilogue.between)
    if not isinstance(recipe.unit, Steps) or formats != [recipe.a, recipe.b] or recipe.dtype not in FLOATS or recipe.epilogue != plain:
        return None
    codes = [x.view(f"u{x.dtype.itemsize}") for x in (a, b)]
    with np.errstate(invalid="ignore", over="ignore"):
        total = evaluate(recipe_tree(recipe), MatrixSums(recipe, *codes))
        if bias is not None:
            total = round_floats(total, None if recipe.epilogue.between is None else FLOATS[recipe.epilogue.between])
            total = total + bias.astype(np.float32)
        found = total.astype(FLOATS[recipe.dtype])
    invalid = np.isnan(total)
    if invalid.any():
        found.view(recipe.dtype.dtype)[invalid] = recipe.dtype.nan
    return found
