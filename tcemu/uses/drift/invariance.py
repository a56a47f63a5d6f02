"""`invariance` finds the batch sizes at which the rows of a function change their bits, and the operations that change them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.base.results import Result, Table
from tcemu.operations.products.library.kernel_recipe import KernelRecipe
from tcemu.operations.products.matmul import matmul
from tcemu.uses.drift.drift_results import Line
from tcemu.uses.drift.locate import locate
from tcemu.uses.drift.recorder import Recording, record
from tcemu.uses.drift.records import Operation, read_record
from tcemu.uses.replay.kernel_profiles import get_kernel_recipe
from tcemu.uses.replay.order_candidates import TARGETS

RecipeChoice = Callable[[int, int, int], KernelRecipe | None]  # from M, N and K of a product


class BatchChange(NamedTuple):
    """An operation that gives the rows of a smaller batch other bits than the same rows of the largest batch.

    Attributes:
        batch: Size of the smaller batch.
        line: The operation, with the size of the difference and its cause; left is the smaller batch.
        kernels: The kernel recipes of both products in words, where recipes were given; else "".
    """

    batch: int
    line: Line
    kernels: tuple[str, str]


@dataclass(frozen=True)
class Invariance(Result):
    """The batch sizes at which the bits of a row change, and the operations that change them.

    Attributes:
        batches: The batch sizes, ascending. Each is compared with the last one.
        changes: The sources of each difference, in order.
        differing: The batch sizes at which the results differ.
        missing: Products (M, N, K) for which no recipe was found; they were computed by JAX.
    """

    batches: tuple[int, ...]
    changes: tuple[BatchChange, ...]
    differing: tuple[int, ...]
    missing: tuple[tuple[int, int, int], ...] = ()

    @property
    def is_invariant(self) -> bool:
        """True if the results of all batch sizes have the same bits."""
        return not self.differing

    def __str__(self) -> str:
        lines = []
        for batch in self.batches[:-1]:
            same = "same bits" if batch not in self.differing else "OTHER BITS"
            lines.append(f"batch {batch} against {self.batches[-1]}: {same}")
            for change in self.changes:
                if change.batch == batch:
                    line = change.line
                    size = f"{line.difference.changed} of {line.difference.elements} elements" if line.difference else "not kept"
                    lines.append(f"  {line.left} {line.path}: {line.name} ({line.source}), {size}")
                    if change.kernels != ("", ""):
                        lines += [f"    batch {batch}: {change.kernels[0]}", f"    batch {self.batches[-1]}: {change.kernels[1]}"]
                    elif line.cause is not None:
                        lines.append(f"    {line.cause}")
        if self.missing:
            lines.append(f"no recipe for {', '.join(' x '.join(map(str, shape)) for shape in self.missing)} (M x N x K): computed by JAX")
        return "\n".join(lines)

    def table(self) -> Table:
        """Return a table with a row for each operation that changes bits."""
        columns = ("batch", "operation", "path", "name", "source", "changed", "elements", "cause", "left_kernel", "right_kernel")
        rows = []
        for batch, line, kernels in self.changes:
            size = (line.difference.changed, line.difference.elements) if line.difference is not None else (None, None)
            cause = None if line.cause is None else ", ".join(line.cause.kinds) or "unexplained"
            rows.append((batch, line.left, line.path, line.name, line.source, *size, cause, *kernels))
        return Table(f"batches {', '.join(map(str, self.batches))}", columns, tuple(rows), {"invariant": self.is_invariant})


def invariance(
    fn: Callable[[Any], Any],
    x: Any,
    *,
    batches: Sequence[int] = (1, 2, 8, 32),
    recipes: str | RecipeChoice | None = None,
    targets: Sequence[str] = TARGETS,
) -> Invariance:
    """Find at which batch sizes the bits of a row change, and by which operation.

    The function is run operation by operation on the first rows of `x`, for each batch size, and each run is compared with that of the
    largest batch.

    Args:
        fn: A function of JAX of one array; the first axes of the array and of the result count independent rows.
        x: Array with at least max(batches) rows.
        batches: Batch sizes.
        recipes: The kernel recipes of products A [..., K] times B [K, N], by M, N and K: the name of a profile of `tcemu.replay`, such as
            "torch-bf16", or a function from (m, n, k) to a kernel recipe or None. With None, JAX computes the products on this machine.
        targets: GPUs whose tensor cores are tried as causes; see `locate`.

    Returns:
        An `Invariance`.

    Raises:
        ValueError: batches or x do not fit.
    """
    sizes = sorted(set(batches))
    if len(sizes) < 2 or sizes[0] < 1 or sizes[-1] > np.shape(x)[0]:
        raise ValueError(f"batches={tuple(batches)}: expected at least two sizes from 1 to the {np.shape(x)[0]} rows of x")
    missing: dict[tuple[int, int, int], None] = {}
    runs = {size: _run(fn, jnp.asarray(x)[:size], recipes, missing) for size in sizes}
    records = {size: read_record(run) for size, run in runs.items()}
    changes, differing = [], []
    for size in sizes[:-1]:
        drift = locate(records[size], records[sizes[-1]], targets=() if recipes is not None else targets)
        for line in drift.sources:
            pair = [records[s].operations[n] for s, n in ((size, line.left), (sizes[-1], line.right))]
            kernels = [_kernel_words(recipes, operation) for operation in pair]
            changes.append(BatchChange(size, line, (kernels[0], kernels[1])))
        small, large = (jax.tree.leaves(runs[s].result) for s in (size, sizes[-1]))
        share = [(a, b[: b.shape[0] * size // sizes[-1]]) for a, b in zip(small, large, strict=True) if b.ndim]
        if any(np.asarray(a).tobytes() != np.asarray(b).tobytes() for a, b in share):
            differing.append(size)
    return Invariance(tuple(sizes), tuple(changes), tuple(differing), tuple(missing))


def _run(fn: Callable, x: Any, recipes: str | RecipeChoice | None, missing: dict) -> Recording:
    if recipes is None:
        return record(fn)(x)
    shapes = iter(_products(fn, x))

    def substitute(number: int, name: str, operands: list[np.ndarray], results: list[np.ndarray]) -> list[np.ndarray] | None:
        shape = next(shapes) if name == "dot_general" else None
        if shape is None:
            return None
        recipe = _recipe(recipes, shape)
        if recipe is None:
            missing[shape] = None
            return None
        a = operands[0].reshape(-1, shape[2])
        product = matmul(a, operands[1], recipe=recipe.without_shape(), dtype=results[0].dtype)
        return [np.asarray(product).reshape(results[0].shape)]

    return record(fn, substitute=substitute)(x)


def _products(fn: Callable, x: Any) -> list[tuple[int, int, int] | None]:
    """Return M, N and K of each product of a function, or None for products with other axes."""
    return [_shape(operation) for operation in read_record(record(fn, budget=0)(x)).operations if operation.name == "dot_general"]


def _shape(operation: Operation) -> tuple[int, int, int] | None:
    a, b = (tensor.shape for tensor in operation.operands)
    if operation.name != "dot_general" or len(b) != 2 or operation.attributes["dimension_numbers"] != [[[len(a) - 1], [0]], [[], []]]:
        return None
    return prod(a[:-1]), b[1], b[0]


def _recipe(recipes: str | RecipeChoice, shape: tuple[int, int, int]) -> KernelRecipe | None:
    if not isinstance(recipes, str):
        return recipes(*shape)
    try:
        return get_kernel_recipe(recipes, *shape)
    except NotModelled:
        return None


def _kernel_words(recipes: str | RecipeChoice | None, operation: Operation) -> str:
    shape = _shape(operation) if recipes is not None and operation.name == "dot_general" else None
    recipe = None if shape is None or recipes is None else _recipe(recipes, shape)
    return "" if recipe is None else f"{recipe.slices}, by {recipe.unit}"
