"""A kernel's call as a JAX function: `vmap` gives it a longer batch, and a mesh may cut it along the batch."""

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.errors import Unsupported
from tcemu.meshes import cut_along_result

PROGRAMS = 1024  # calls whose programs are remembered


class Call(Protocol):
    """What runs on one device. Hashable: a compiled program belongs to each.

    Every operand has one batch axis in front; that of an operand which may serve the whole batch may have length 1.
    """

    @property
    def axes(self) -> tuple[str, ...]:
        """The other axes of each operand, and last those of the result, named: "m k". A mesh may cut those that stand in both."""
        ...

    @property
    def shared(self) -> tuple[bool, ...]:
        """Which operands may serve the whole batch."""
        ...

    def __call__(self, *operands: Array) -> Array: ...


def run(call: Call, *operands: Array) -> Array:
    """The call on operands with one batch axis each, under `vmap` and sharding too."""
    return _batched(call)(*operands)


def known_sizes(*operands: Array) -> None:
    """Raises Unsupported for a size that is a symbol of `jax.export`: a launch has a number of blocks."""
    for operand in operands:
        if symbols := [size for size in operand.shape if not isinstance(size, int)]:
            raise Unsupported(f"{symbols[0]} is a symbol of jax.export, and a launch has a number of blocks; export with numbers")


def numbers(*values: int) -> Array:
    """int32 for a kernel; made of single numbers, since `custom_partitioning` takes no array constants."""
    return jnp.stack([jnp.full((), value, jnp.int32) for value in values])


@lru_cache(maxsize=PROGRAMS)
def _batched(call: Call) -> Callable:
    """`_sharded`, which `vmap` gives a longer batch, not another axis."""

    @jax.custom_batching.custom_vmap
    def batched(*operands: Array) -> Array:
        batch = max(len(v) for v in operands)
        alone = tuple(may and len(v) == 1 < batch for may, v in zip(call.shared, operands, strict=True))
        return _sharded(call, alone)(*operands)

    @batched.def_vmap
    def rule(size: int, mapped: tuple[bool, ...], *operands: Array) -> tuple[Array, bool]:
        lengths = [v.shape[given] for v, given in zip(operands, mapped, strict=True)]
        batch = max(lengths)
        longer = []
        for v, given, length, may in zip(operands, mapped, lengths, call.shared, strict=True):
            if given or not may or length > 1:
                v = jnp.broadcast_to(v if given else v[None], (size, batch, *v.shape[1 + given :])).reshape(-1, *v.shape[1 + given :])
            longer.append(v)
        d = run(call, *longer)
        return d.reshape(size, batch, *d.shape[1:]), True

    return batched


@lru_cache(maxsize=PROGRAMS)
def _sharded(call: Call, alone: tuple[bool, ...]) -> Callable:
    """The call, which a mesh may cut. alone: the operands that serve the whole batch."""
    *given, result = call.axes
    operands = [f"{f'u{at}' if one else 'b'} {axes}".strip() for at, (one, axes) in enumerate(zip(alone, given, strict=True))]
    return cut_along_result(call, operands, f"b {result}".strip())
