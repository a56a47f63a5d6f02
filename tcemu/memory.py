"""Memory as `uint32[..., words]`, little-endian: runs of words read and written at addresses, and whether those addresses are good.

An address that is traced, or that differs within the batch, is data: reading there is a gather. An address known before tracing is a slice.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

Integers = np.ndarray | Array  # int64 in NumPy if concrete; otherwise a Tracer


def as_memory(name: str, value: ArrayLike) -> Array:
    """The memory operand, or TypeError or ValueError that names it."""
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if value.dtype != jnp.uint32:
        raise TypeError(f"{name}: got {value.dtype}{list(value.shape)}; memory is raw words, uint32[..., words], little-endian")
    if value.ndim < 1:
        raise ValueError(f"{name}: got a single uint32; memory is uint32[..., words]")
    return jnp.asarray(value)


def as_integers(name: str, value: ArrayLike) -> Integers:
    """Offsets, strides or addresses: int64 in NumPy where they are concrete, also under a trace. TypeError if they are no integers."""
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name}: got {value.dtype}{list(value.shape)}; wanted integers")
    if isinstance(value, Tracer):
        # a uint32 of 2^31 or more becomes negative, which is outside any memory
        return value.astype(jnp.int64 if value.dtype.itemsize == 8 else jnp.int32)
    return np.asarray(value).astype(np.int64)


@dataclass(frozen=True)
class Lines:
    """A strided matrix in memory: `count` lines of `length` elements of `bits` bits; both a line and an aligned place are whole words."""

    count: int
    length: int
    bits: int
    alignment: int  # in elements

    def misaligned(self, offset: Integers, stride: Integers) -> Any:
        """bool: some line starts at no multiple of the alignment."""
        return (offset % self.alignment != 0) | (stride % self.alignment != 0)

    def outside(self, offset: Integers, stride: Integers, words: int) -> Any:
        """bool: some line is not in a memory of so many words. A stride below 0 counts as outside."""
        room = min(words * 32 // self.bits, 2**31 - 1) - self.length
        return (offset < 0) | (offset > room) | (stride < 0) | (stride > (room - offset) // (self.count - 1))

    def words(self, elements: Any) -> Any:
        """So many elements in words."""
        return elements * (self.bits // 32) if self.bits > 32 else elements // (32 // self.bits)


def read_lines(memory: Array, start: Array, step: int, count: int, length: int) -> Array:
    """Runs of `length` words, the first at word `start` (a scalar), each `step` after the last: [..., words] -> [..., count, length]."""
    if step < length:
        return jnp.stack([lax.dynamic_slice_in_dim(memory, start + i * step, length, axis=-1) for i in range(count)], axis=-2)
    whole = lax.dynamic_slice_in_dim(memory, start, (count - 1) * step + length, axis=-1)
    padded = jnp.pad(whole, [(0, 0)] * (memory.ndim - 1) + [(0, step - length)])
    return padded.reshape(*memory.shape[:-1], count, step)[..., :length]


def write_lines(memory: Array, start: Array, step: int, lines: Array) -> Array:
    """Memory with `lines` [..., count, length] where `read_lines` reads them; of lines that overlap, the later one stays."""
    count, length = lines.shape[-2:]
    batch = jnp.broadcast_shapes(memory.shape[:-1], lines.shape[:-2])
    memory = jnp.broadcast_to(memory, (*batch, memory.shape[-1]))
    lines = jnp.broadcast_to(lines, (*batch, count, length))
    if step == length:
        return lax.dynamic_update_slice_in_dim(memory, lines.reshape(*batch, count * length), start, axis=-1)

    def write(i: Array, memory: Array) -> Array:
        line = lax.dynamic_index_in_dim(lines, i, axis=lines.ndim - 2, keepdims=False)
        return lax.dynamic_update_slice_in_dim(memory, line, start + i * step, axis=-1)

    return lax.fori_loop(0, count, write, memory)


def read_at(memory: Array, starts: Array, good: Array | None = None, *, length: int) -> Array:
    """Runs of `length` words at the words `starts` [..., n]: [..., words] -> [..., n, length]. Where not `good` [..., n], zeros."""

    def read(memory: Array, starts: Array) -> Array:
        return jax.vmap(lambda start: lax.dynamic_slice(memory, (start,), (length,)))(starts)

    runs = _batched(read, (1, 1), memory, starts)
    return runs if good is None else jnp.where(good[..., None], runs, 0)


def write_at(memory: Array, starts: Array, runs: Array, good: Array | None = None) -> Array:
    """Memory with runs [..., n, length] at the words `starts` [..., n], written in order: of two that overlap, the later one stays.

    Where not `good` [..., n], nothing is written.
    """

    def write_all(memory: Array, *written: Array) -> Array:
        def write(memory: Array, run: tuple[Array, ...]) -> tuple[Array, None]:
            start, words, *keep = run
            if keep:
                words = jnp.where(keep[0], words, lax.dynamic_slice(memory, (start,), words.shape))
            return lax.dynamic_update_slice(memory, words, (start,)), None

        return lax.scan(write, memory, written)[0]

    if good is None:
        return _batched(write_all, (1, 1, 2), memory, starts, runs)
    return _batched(write_all, (1, 1, 2, 1), memory, starts, runs, good)


def _batched(fn: Callable[..., Array], ranks: tuple[int, ...], *operands: Array) -> Array:
    """`fn` over the leading axes of its operands, which broadcast; an operand that lacks an axis is not copied along it."""
    leads = [x.shape[: x.ndim - rank] for x, rank in zip(operands, ranks, strict=True)]
    batch = jnp.broadcast_shapes(*leads)
    leads = [(1,) * (len(batch) - len(lead)) + lead for lead in leads]
    squeezed = [
        x.reshape(*(n for n in lead if n != 1), *x.shape[x.ndim - rank :]) for x, lead, rank in zip(operands, leads, ranks, strict=True)
    ]
    for axis in reversed(range(len(batch))):
        axes = tuple(None if lead[axis] == 1 else 0 for lead in leads)
        if any(mapped == 0 for mapped in axes):
            fn = jax.vmap(fn, axes)
    result = fn(*squeezed)
    mapped = sum(n != 1 for n in batch)
    return result.reshape(*batch, *result.shape[mapped:])
