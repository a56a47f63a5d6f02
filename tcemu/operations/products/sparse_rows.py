"""Products with a sparse A: each row of A meets the rows of B that its metadata selects, so that a row is a product of its own."""

from collections.abc import Callable
from math import prod

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from tcemu.engine.layouts.sparsity import compress, gather
from tcemu.operations.products.product_arguments import OperandPair

MAX_GATHERED = 1 << 24  # elements of B that are gathered at once
FIRST_TWO = 0b0100  # the field that keeps the first two units of a chunk


def multiply_sparse_rows(multiply: Callable[..., Array], operands: OperandPair, fields: Array, chunk: int, c: Array | None = None) -> Array:
    """Multiply a sparse A by B with a function for dense products, some rows at a time.

    Args:
        multiply: Computes D [..., R, 1, N] from A [..., R, 1, K/2], B [..., R, K/2, N] and, if it is given, C [..., R, 1, N]. D may have
            further leading axes.
        operands: Codes of A [..., M, K], whose elements that are not kept are ignored, and of B [..., K, N].
        fields: 4-bit fields of A's metadata, [..., M, K / chunk].
        chunk: Elements of a chunk along K.
        c: Codes [..., M, N], or None.

    Returns:
        D [..., M, N].
    """
    a, b = operands
    (*_, m, k), n = a.shape, b.shape[-1]
    stored = compress(a, fields, chunk)
    batch = prod(jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    rows = max(1, min(m, MAX_GATHERED // max(1, batch * k // 2 * n)))

    def product(given: tuple[Array, ...]) -> Array:
        stored, fields, *c = (jnp.moveaxis(x, 0, -2) for x in given)
        d = multiply(stored[..., None, :], gather(b, fields, chunk), *(x[..., None, :] for x in c))
        return jnp.moveaxis(d[..., 0, :], -2, 0)

    given = tuple(jnp.moveaxis(x, -2, 0) for x in (stored, fields, *(() if c is None else (c,))))
    if rows == m:
        return jnp.moveaxis(product(given), 0, -2)
    missing = -m % rows  # rows of zeros, whose results are dropped
    blocks = tuple(jnp.pad(x, [(0, missing), *[(0, 0)] * (x.ndim - 1)]).reshape(-1, rows, *x.shape[1:]) for x in given)
    d = lax.map(product, blocks)
    return jnp.moveaxis(d.reshape(-1, *d.shape[2:])[:m], 0, -2)


def pad_fields(fields: Array, count: int) -> Array:
    """Append fields of chunks of zeros, up to `count` chunks."""
    missing = count - fields.shape[-1]
    return jnp.pad(fields, [(0, 0)] * (fields.ndim - 1) + [(0, missing)], constant_values=np.uint8(FIRST_TWO))
