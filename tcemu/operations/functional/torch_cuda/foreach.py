"""PyTorch's `_foreach_norm` and clipping by the norm of all gradients as its CUDA kernels compute them.

Other `_foreach` operators compute the formulas of `elementwise.OPERATORS` on each tensor; their quotient by a number is a quotient.

Source: PyTorch 2.11.0, aten/src/ATen/native/cuda/ForeachReduceOp.cu; torch/nn/utils/clip_grad.py. Held to words of PyTorch 2.11.0 on an
H200: `tests/operations/functional/test_torch_cuda.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.errors import NotModelled
from tcemu.engine.arithmetic.sum_tree import Chain, Join, Node
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.functional.torch_cuda.device_functions import Value, as_value, sqrt, where
from tcemu.operations.functional.torch_cuda.elementwise import round_value
from tcemu.operations.functional.torch_cuda.reduce_plans import MAX_THREADS, WARP, strided_places, thread_tree, unrolled_places
from tcemu.operations.functional.torch_cuda.reductions import reduce_tree_values
from tcemu.operations.functional.torch_cuda.rows import operand_codes, operand_values, result_array, vector_norm

CHUNK, VECTOR = 1 << 16, 4  # elements of a block, and accumulators of a thread
KINDS = {2.0: ("squares", "sum"), 1.0: ("sizes", "sum"), math.inf: ("largest size", "largest size")}  # of a chunk, and of the chunks


@lru_cache(maxsize=64)
def chunk_tree(length: int, size: int) -> Node:
    """Return the sum of a chunk by places in it: threads load vectors if the tensor's rest is a multiple of 4, else single elements.

    Args:
        length: Elements of the chunk.
        size: Elements of the tensor from the chunk on.
    """
    loads_vectors = size % VECTOR == 0
    places = strided_places(length, MAX_THREADS * VECTOR) if loads_vectors else unrolled_places(length, MAX_THREADS, VECTOR)
    return Join(Join(Join(Chain(places.astype(np.int32).reshape(-1, MAX_THREADS // WARP, WARP, VECTOR))), "folded"), "folded")


def foreach_norm(tensors: Sequence[ArrayLike], order: float = 2.0) -> list[Array]:
    """Return the norm of each tensor as PyTorch's `_foreach_norm` on a GPU computes it.

    Args:
        tensors: bfloat16, float16 or float32.
        order: 2, 1 or infinity.

    Returns:
        A scalar for each tensor, of its dtype.

    Raises:
        NotModelled: The order or a dtype is another one.
    """
    if order not in KINDS:
        raise NotModelled(f"foreach_norm: got order {order}; known are 2, 1 and infinity (torch_cuda/foreach.py, KINDS)")
    of_chunk, of_chunks = KINDS[order]
    chunks = max(-(-int(np.size(x)) // CHUNK) for x in tensors)
    join = thread_tree(strided_places(chunks, MAX_THREADS).astype(np.int32))
    found = []
    for x in tensors:
        fmt, codes = operand_codes("foreach_norm", x)
        flat = convert(fmt, F32, codes).reshape(-1)
        starts = range(0, flat.size, CHUNK)
        trees = [chunk_tree(min(CHUNK, flat.size - start), flat.size - start) for start in starts]
        partial = [reduce_tree_values(of_chunk, tree, flat[start : start + CHUNK]) for tree, start in zip(trees, starts, strict=True)]
        partial += [jnp.zeros((), jnp.uint32)] * (chunks - len(partial))
        total = Value(reduce_tree_values(of_chunks, join, jnp.stack(partial)))
        found.append(result_array(sqrt(total) if order == 2.0 else total, fmt))
    return found


def clip_grad_norm(grads: Sequence[ArrayLike], max_norm: float, order: float = 2.0) -> tuple[Array, list[Array]]:
    """Clip gradients by the norm of all as PyTorch's `clip_grad_norm_` on a GPU does.

    Args:
        grads: Gradients of one dtype: bfloat16, float16 or float32.
        max_norm: The largest norm.
        order: As in `foreach_norm`.

    Returns:
        The norm of all gradients before, and the clipped gradients.

    Raises:
        NotModelled: The order or a dtype is another one.
    """
    norms = jnp.stack(foreach_norm(grads, order))
    total = vector_norm(norms, order)
    fmt, value = operand_values("clip_grad_norm", total)
    inverse = round_value(1.0 / round_value(value + 1e-6, fmt), fmt)
    factor = round_value(inverse * max_norm, fmt)
    factor = where(as_value(1.0) < factor, 1.0, factor)
    clipped = [result_array(operand_values("clip_grad_norm", grad)[1] * factor, fmt) for grad in grads]
    return total, clipped
