"""Ragged products of any axes, on small integers."""

import numpy as np
from jax import lax


def case(rng):
    """Small integers, whose sums any order gives exactly, and the arguments of `lax.ragged_dot_general`."""
    kind = ("rows", "depth", "batch")[rng.integers(3)]
    groups = int(rng.integers(1, 4))
    batch, rows, depth, columns = (rng.integers(1, 4, n).tolist() for n in rng.integers(0, 3, 4))
    own = {"rows": rows, "depth": depth, "batch": batch}[kind]
    own.insert(ragged := int(rng.integers(len(own) + 1)), int(rng.integers(3, 9)))
    left, right = batch + rows + depth, ([groups] if kind == "rows" else []) + batch + depth + columns
    order = [rng.permutation(len(shape)) for shape in (left, right)]
    at = [np.argsort(o).tolist() for o in order]  # where each axis of the above stands
    first = len(right) - len(batch + depth + columns)
    b, k = len(batch), len(depth)
    lhs_batch, lhs_rows, lhs_k = at[0][:b], at[0][b : len(left) - k], at[0][len(left) - k :]
    rhs_batch, rhs_k = at[1][first : first + b], at[1][first + b : first + b + k]
    if kind == "rows":
        lhs_rows = sorted(lhs_rows)  # the order in which the result has them
        axis = lhs_rows[ragged]
        outer = lhs_rows[:ragged]
    else:
        axis, outer = (lhs_k[ragged], lhs_k[:ragged]) if kind == "depth" else (lhs_batch[ragged], lhs_batch[:ragged])
    numbers = lax.RaggedDotDimensionNumbers(((lhs_k, rhs_k), (lhs_batch, rhs_batch)), [axis], at[1][:first])
    lhs, rhs = (rng.integers(-4, 5, np.array(shape)[o]).astype(np.float32) for shape, o in zip((left, right), order, strict=True))
    front = [lhs.shape[i] for i in ([] if kind == "batch" else lhs_batch) + list(outer)]
    shape = (groups,) if rng.integers(2) else (*front, groups)
    return lhs, rhs, rng.integers(0, 4, shape).astype(np.int32), {"ragged_dot_dimension_numbers": numbers}
