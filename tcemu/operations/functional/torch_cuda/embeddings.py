"""The gradient of PyTorch's embedding as its CUDA kernels compute it, and accumulation by indices where its order is fixed.

Up to 3,072 indices one kernel takes 32 at a time: equal indices among them are added in f32, the sum is rounded, and added to the row of
the result. More indices are sorted: 10 rows of one index are added in f32 at a time, and their sums are added.

Source: PyTorch 2.11.0, aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu. Held to words of PyTorch 2.11.0 on an H200:
`tests/operations/functional/test_torch_cuda.py`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.base.errors import NotModelled
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.functional.torch_cuda.device_functions import Value
from tcemu.operations.functional.torch_cuda.elementwise import round_value
from tcemu.operations.functional.torch_cuda.reduce_plans import WARP
from tcemu.operations.functional.torch_cuda.rows import operand_codes, result_array

MAX_UNSORTED = 3072  # indices up to which they are not sorted
CHUNK = 32  # indices that a block takes at a time
SEGMENT = 10  # rows of one index that a thread adds


@partial(jax.jit, static_argnames=("rows", "padding_idx"))
def embedding_backward(grad: ArrayLike, indices: ArrayLike, rows: int, padding_idx: int = -1) -> Array:
    """Compute the gradient of an embedding's table as PyTorch's `embedding_dense_backward` on a GPU does.

    Args:
        grad: Gradient of the result [count, width], bfloat16, float16 or float32.
        indices: Integers [count].
        rows: Rows of the table.
        padding_idx: An index whose row has no gradient.

    Returns:
        The gradient [rows, width] in grad's dtype.

    Raises:
        NotModelled: The dtype is another one, or float32 has more than 3,072 indices: its sums are added atomically.
    """
    fmt, codes = operand_codes("embedding_dense_backward", grad)
    values = convert(fmt, F32, codes).reshape(-1, codes.shape[-1])
    indices = jnp.asarray(indices).reshape(-1)
    if len(indices) > MAX_UNSORTED and fmt == F32:
        raise NotModelled(
            f"embedding_dense_backward: got {len(indices)} indices with f32; beyond {MAX_UNSORTED} the partial sums are added atomically, "
            "and their order is open; known are bf16 and f16 (torch_cuda/embeddings.py)"
        )
    if len(indices) > MAX_UNSORTED:
        return result_array(Value(_sum_sorted(values, jnp.where(indices == padding_idx, rows, indices), rows)), fmt)
    missing = -len(indices) % CHUNK
    chunks = jnp.pad(indices, (0, missing), constant_values=rows).reshape(-1, CHUNK)
    terms = jnp.pad(values, ((0, missing), (0, 0))).reshape(-1, CHUNK, values.shape[1])
    ignored = (chunks == padding_idx) | (chunks >= rows)

    def take_chunk(table: Array, chunk: tuple[Array, Array, Array]) -> tuple[Array, None]:
        own, grads, skipped = chunk
        same = own[:, None] == own[None]  # [leader, peer]
        leads = ~(same & (jnp.arange(CHUNK)[None] < jnp.arange(CHUNK)[:, None])).any(1) & ~skipped

        def add_peer(i: int, total: Array) -> Array:
            is_peer = same[:, i] & (jnp.arange(CHUNK) < i)
            return jnp.where(is_peer[:, None], (Value(total) + Value(jnp.broadcast_to(grads[i], total.shape))).codes, total)

        total = lax.fori_loop(0, CHUNK, add_peer, grads)
        target = jnp.where(leads, own, rows)
        old = Value(table[target])
        return table.at[target].set(round_value(old + round_value(Value(total), fmt), fmt).codes), None

    table = jnp.zeros((rows + 1, values.shape[1]), jnp.uint32)
    table, _ = lax.scan(take_chunk, table, (chunks, terms, ignored))
    return result_array(Value(table[:rows]), fmt)


def _sum_sorted(values: Array, indices: Array, rows: int) -> Array:
    """Return the sums of rows with equal indices, f32 codes [rows, width]: 10 rows at a time, in the order of a stable sort."""
    order = jnp.argsort(indices, stable=True)
    sorted_indices = indices[order]
    rank = jnp.arange(len(order)) - jnp.searchsorted(sorted_indices, sorted_indices)

    def take(state: tuple[Array, Array, Array], entry: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array, Array], None]:
        table, partial, before = state
        row, term, begins = entry
        table = jnp.where(begins, table.at[before].set((Value(table[before]) + Value(partial)).codes), table)
        partial = (Value(jnp.where(begins, jnp.uint32(0), partial)) + Value(term)).codes
        return (table, partial, row), None

    zeros = jnp.zeros(values.shape[1], jnp.uint32)
    begin = jnp.zeros((rows + 1, values.shape[1]), jnp.uint32), zeros, jnp.asarray(rows, sorted_indices.dtype)
    (table, partial, last), _ = lax.scan(take, begin, (sorted_indices, values[order], rank % SEGMENT == 0))
    return table.at[last].set((Value(table[last]) + Value(partial)).codes)[:rows]


@jax.jit
def index_put_accumulate(base: ArrayLike, indices: ArrayLike, values: ArrayLike) -> Array:
    """Add rows to the rows of a table as PyTorch's `index_put_` with `accumulate=True` on a GPU does; also the gradient of `base[indices]`.

    Args:
        base: The table [rows, width], bfloat16, float16 or float32.
        indices: Integers [count].
        values: Rows [count, width] of the table's dtype.

    Returns:
        The table after. Rows wider than 32 elements are rounded after each addition; of others the sum is added.

    Raises:
        NotModelled: The dtype is another one, or a row has one element.
    """
    fmt, codes = operand_codes("index_put_", base)
    _, given = operand_codes("index_put_", values)
    if codes.ndim != 2 or codes.shape[1] == 1:
        raise NotModelled(f"index_put_: got a table {codes.shape}; known are rows of at least 2 elements (torch_cuda/embeddings.py)")
    is_narrow = codes.shape[1] <= WARP
    table, terms = (convert(fmt, F32, v) for v in (codes, given))

    def take(table: Array, entry: tuple[Array, Array]) -> tuple[Array, None]:
        row, term = entry
        total = Value(table[row]) + Value(term)
        return table.at[row].set((total if is_narrow else round_value(total, fmt)).codes), None

    found, _ = lax.scan(take, jnp.zeros_like(table) if is_narrow else table, (jnp.asarray(indices), terms))
    return result_array(Value(table) + Value(found) if is_narrow else Value(found), fmt)


def index_add(base: ArrayLike, indices: ArrayLike, values: ArrayLike) -> Array:
    """Refuse `index_add_` and `scatter_add_`, whose atomic additions have no fixed order.

    Raises:
        NotModelled: Always; `index_put_accumulate` has an order.
    """
    raise NotModelled(
        "index_add_ and scatter_add_: PyTorch adds atomically on a GPU, and the order is open; known is index_put_ with accumulate=True "
        "(torch_cuda/embeddings.py, index_put_accumulate)"
    )


scatter_add = index_add
