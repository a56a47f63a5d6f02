"""The gradient of PyTorch's embedding as its CUDA kernels compute it, and accumulation by indices where its order is fixed.

Up to 3,072 indices one kernel takes 32 at a time: equal indices among them are added in f32, the sum is rounded, and added to the row of
the result. More indices are sorted: 10 rows of one index are added in f32 at a time, and their sums are added.

Source: PyTorch 2.11.0, aten/src/ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu. Held to words of PyTorch 2.11.0 on an H200:
`tests/operations/functional/test_torch_cuda.py`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.base.errors import NotModelled
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.functional.torch_cuda.device_functions import Value
from tcemu.operations.functional.torch_cuda.elementwise import round_value
from tcemu.operations.functional.torch_cuda.rows import operand_codes, result_array

MAX_UNSORTED = 3072  # indices up to which they are not sorted
CHUNK = 32  # indices that a block takes at a time
SEGMENT = 10  # rows of one index that a thread adds


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
        NotModelled: The dtype is another one, or float32 has more than 3,072 indices: their sums are added atomically.
    """
    fmt, codes = operand_codes("embedding_dense_backward", grad)
    values = convert(fmt, F32, codes).reshape(-1, codes.shape[-1])
    indices = jnp.asarray(indices).reshape(-1)
    if len(indices) > MAX_UNSORTED:
        raise NotModelled(f"embedding_dense_backward: {len(indices)} indices; known are {MAX_UNSORTED} (torch_cuda/embeddings.py)")
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
