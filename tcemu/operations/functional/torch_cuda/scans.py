"""PyTorch's cumulative sums and products as its CUDA kernels compute them.

Along the last axis a block scans 2 * threads elements by Sklansky's method, and adds the total to the first element of the next block.
Along another axis a thread takes the elements in turn. Every operation is rounded to the operand's dtype.

Source: PyTorch 2.13.0, aten/src/ATen/native/cuda/ScanUtils.cuh; PyTorch 2.11.0, CumsumKernel.cu, CumprodKernel.cu. Held to words of
PyTorch 2.11.0 on an H200: `tests/operations/functional/test_torch_cuda.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.base.errors import NotModelled
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.operations.functional.torch_cuda.device_functions import Value, as_value
from tcemu.operations.functional.torch_cuda.elementwise import round_value
from tcemu.operations.functional.torch_cuda.rows import operand_codes, result_array

LOG_THREADS, LEAST_LOG, MOST_LOG = 9, 4, 9  # threads of a block, and those along a row
Step = Callable[[Value, Value], Value]


def log_row_threads(rows: int, length: int) -> int:
    """Return the binary logarithm of the threads that scan a row of the last axis."""
    across, down = (max(n - 1, 0).bit_length() for n in (length, rows))
    # the difference is unsigned in PyTorch: more rows than columns wrap around and are halved
    return min(max(((LOG_THREADS + across - down) % (1 << 32)) // 2, LEAST_LOG), MOST_LOG)


@partial(jax.jit, static_argnames=("axis",))
def cumsum(x: ArrayLike, axis: int = -1) -> Array:
    """Compute the cumulative sum along an axis as PyTorch's kernel does.

    Args:
        x: bfloat16, float16 or float32, with more than one row.
        axis: The axis.

    Returns:
        An array of x's shape and dtype.

    Raises:
        NotModelled: The dtype is another one, or x has one row, which CUB scans in an order that depends on the time.
    """
    return _scan("cumsum", x, axis, 0.0, lambda a, b: a + b)


@partial(jax.jit, static_argnames=("axis",))
def cumprod(x: ArrayLike, axis: int = -1) -> Array:
    """Compute the cumulative product along an axis as PyTorch's kernel does; arguments, result and errors as in `cumsum`."""
    return _scan("cumprod", x, axis, 1.0, lambda a, b: a * b)


def _scan(name: str, x: ArrayLike, axis: int, start: float, step: Step) -> Array:
    fmt, codes = operand_codes(name, x)
    axis = axis % max(codes.ndim, 1)
    length = codes.shape[axis] if codes.ndim else 1
    if codes.size == length and length > 1:
        raise NotModelled(f"{name}: got one row; CUB scans it, and where its tiles meet is open (torch_cuda/scans.py)")
    values = jnp.moveaxis(convert(fmt, F32, codes), axis, 0)
    rows = values.reshape(length, -1)
    rounded = lambda a, b: round_value(step(a, b), fmt)
    found = _scan_rows(rows, fmt, start, rounded) if axis == codes.ndim - 1 else _scan_in_turn(rows, start, rounded)
    return result_array(Value(jnp.moveaxis(found.reshape(values.shape), 0, axis)), fmt)


def _scan_in_turn(rows: Array, start: float, step: Step) -> Array:
    def take(running: Array, element: Array) -> tuple[Array, Array]:
        total = step(Value(running), Value(element)).codes
        return total, total

    begin = jnp.full(rows.shape[1:], as_value(start).codes)
    return lax.scan(take, begin, rows)[1]


def _scan_rows(rows: Array, fmt: Format, start: float, step: Step) -> Array:
    """Scan codes [length, rows] along their first axis, in blocks."""
    length, count = rows.shape
    log = log_row_threads(count, length)
    width = 2 << log
    blocks = -(-length // width)
    fill = as_value(start).codes
    padded = jnp.concatenate([rows, jnp.full((blocks * width - length, count), fill)]).reshape(blocks, width, count)

    def scan_block(total: Array, block: Array) -> tuple[Array, Array]:
        block = jnp.concatenate([step(Value(block[:1]), Value(total[None])).codes, block[1:]])
        for level in range(log + 1):
            parts = block.reshape(width >> (level + 1), 2, 1 << level, count)
            upper = step(Value(parts[:, 1]), Value(jnp.broadcast_to(parts[:, 0, -1:], parts[:, 1].shape))).codes
            block = jnp.stack([parts[:, 0], upper], axis=1).reshape(width, count)
        return block[-1], block

    begin = jnp.broadcast_to(fill, (count,))
    return lax.scan(scan_block, begin, padded)[1].reshape(blocks * width, count)[:length]
