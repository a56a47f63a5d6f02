"""Memory as `uint32[..., words]`, little-endian: reads and writes of runs of words, and checks of their addresses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

Integers = np.ndarray | Array  # NumPy int64 if concrete, else a Tracer


def as_memory(name: str, value: ArrayLike) -> Array:
    """Check a memory operand.

    Args:
        name: Name of the argument, for the messages.
        value: The operand.

    Returns:
        uint32[..., words].

    Raises:
        TypeError: The dtype is not uint32.
        ValueError: The operand has no axis.
    """
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if value.dtype != jnp.uint32:
        raise TypeError(f"{name}: got {value.dtype}{list(value.shape)}; memory is raw words, uint32[..., words], little-endian")
    if value.ndim < 1:
        raise ValueError(f"{name}: got a single uint32; memory is uint32[..., words]")
    return jnp.asarray(value)


def as_integers(name: str, value: ArrayLike) -> Integers:
    """Check offsets, strides or addresses.

    Args:
        name: Name of the argument, for the message.
        value: The integers.

    Returns:
        NumPy int64 if the values are concrete, also under a trace; else a tracer of int32 or int64.

    Raises:
        TypeError: The values are not integers.
    """
    value = value if isinstance(value, jax.Array) else np.asarray(value)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name}: got {value.dtype}{list(value.shape)}; expected integers")
    if isinstance(value, Tracer):
        # a uint32 of 2^31 or more becomes negative, which is outside any memory
        return value.astype(jnp.int64 if value.dtype.itemsize == 8 else jnp.int32)
    return np.asarray(value).astype(np.int64)


@dataclass(frozen=True)
class StridedLines:
    """A strided matrix in memory. A line is a whole number of words, and so is the alignment."""

    count: int  # lines, at least 2
    length: int  # elements of a line
    bits: int  # bits of an element
    alignment: int  # alignment of a line's start, in elements

    def is_misaligned(self, offset: Integers, stride: Integers) -> Any:
        """Return True where the start of a line is not a multiple of the alignment.

        Args:
            offset: Start of the first line, in elements.
            stride: Distance of the starts of two lines, in elements.

        Returns:
            bool of the arguments' broadcast shape.
        """
        return (offset % self.alignment != 0) | (stride % self.alignment != 0)

    def is_outside(self, offset: Integers, stride: Integers, words: int) -> Any:
        """Return True where a line is not entirely inside the memory. A negative stride counts as outside.

        Args:
            offset: Start of the first line, in elements.
            stride: Distance of the starts of two lines, in elements.
            words: Size of the memory in words.

        Returns:
            bool of the arguments' broadcast shape.
        """
        room = min(words * 32 // self.bits, 2**31 - 1) - self.length
        return (offset < 0) | (offset > room) | (stride < 0) | (stride > (room - offset) // (self.count - 1))

    def words(self, elements: Any) -> Any:
        """Convert a number of elements to words.

        Args:
            elements: Number of elements.

        Returns:
            Number of words, rounded down.
        """
        return elements * (self.bits // 32) if self.bits > 32 else elements // (32 // self.bits)


def read_runs(memory: Array, starts: Array, good: Array | None = None, *, length: int) -> Array:
    """Read runs of words at given addresses.

    Args:
        memory: uint32[..., words].
        starts: First word of each run, [..., n].
        good: bool [..., n], False where the result is zeros. None: all True.
        length: Words of a run.

    Returns:
        uint32[..., n, length]; leading axes broadcast.
    """

    def read(memory: Array, starts: Array) -> Array:
        return jax.vmap(lambda start: lax.dynamic_slice(memory, (start,), (length,)))(starts)

    runs = _batched(read, (1, 1), memory, starts)
    return runs if good is None else jnp.where(good[..., None], runs, 0)


def write_runs(memory: Array, starts: Array, runs: Array, good: Array | None = None) -> Array:
    """Write runs of words at given addresses, in order. If two runs overlap, the later one wins.

    Args:
        memory: uint32[..., words].
        starts: First word of each run, [..., n].
        runs: uint32[..., n, length].
        good: bool [..., n], False where nothing is written. None: all True.

    Returns:
        The written memory, uint32[..., words]; leading axes broadcast.
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
    """Map `fn` over the broadcast leading axes of its operands, without copying an operand along an axis that it lacks."""
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
