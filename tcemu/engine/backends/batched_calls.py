"""Batches and meshes: the one wrapper that turns a launch on one device into a JAX function of any batch axes.

A kernel takes one batch axis. `call_batched` brings the operands to it, `jax.vmap` makes it longer, and a mesh may shard it and the axes
that the result shares with the operands.
"""

from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.base.meshes import match_varying_axes, shard_along_result

MAX_PROGRAMS = 1024  # calls whose programs are remembered


class BatchedCall(Protocol):
    """A launch on one device. Hashable: a compiled program belongs to each.

    Each operand comes with one batch axis in front. Operands of one sharing group have equal batch axes, which may have length 1: they then
    serve the whole batch.
    """

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the other axes of each operand, and last those of the result, as "m k". A mesh may shard axes that stand in both."""
        ...

    @property
    def sharing(self) -> tuple[str, ...]:
        """The sharing group of each operand; "" for an operand that has the whole batch."""
        ...

    def __call__(self, *operands: Array) -> Array: ...


def call_batched(call: BatchedCall, *operands: Array) -> Array:
    """Runs the call on operands with any batch axes, which broadcast, in front of their own axes."""
    operands = match_varying_axes(*operands)
    ranks = [len(axes.split()) for axes in call.axes[: len(operands)]]
    own_shapes = [v.shape[v.ndim - rank :] for v, rank in zip(operands, ranks, strict=True)]
    batches = [v.shape[: v.ndim - rank] for v, rank in zip(operands, ranks, strict=True)]
    batch = jnp.broadcast_shapes(*batches)
    flat = []
    for group, v, own in zip(call.sharing, operands, own_shapes, strict=True):
        shared = jnp.broadcast_shapes(*(axes for name, axes in zip(call.sharing, batches, strict=True) if group and name == group))
        whole = shared if group and prod(shared) == 1 else batch
        flat.append(jnp.broadcast_to(v, (*whole, *own)).reshape(prod(whole), *own))
    d = _batched(call)(*flat)
    return d.reshape(*batch, *d.shape[1:])


def require_known_sizes(*operands: Array) -> None:
    """Raises Unsupported for a size that is a symbol of `jax.export`: a launch has a number of blocks."""
    for operand in operands:
        if symbols := [size for size in operand.shape if not isinstance(size, int)]:
            raise Unsupported(f"{symbols[0]} is a symbol of jax.export, and a launch has a number of blocks; export with numbers")


def launch_numbers(*values: int) -> Array:
    """int32 numbers for a kernel, stacked from scalars, since `custom_partitioning` takes no array constants."""
    return jnp.stack([jnp.full((), value, jnp.int32) for value in values])


@lru_cache(maxsize=MAX_PROGRAMS)
def _batched(call: BatchedCall) -> Callable:
    """The call on one batch axis. `jax.vmap` makes that axis longer and adds no other."""

    @jax.custom_batching.custom_vmap
    def batched(*operands: Array) -> Array:
        batch = max(len(v) for v in operands)
        alone = tuple(bool(group) and len(v) == 1 < batch for group, v in zip(call.sharing, operands, strict=True))
        return _sharded(call, alone)(*operands)

    @batched.def_vmap
    def rule(size: int, mapped: tuple[bool, ...], *operands: Array) -> tuple[Array, bool]:
        lengths = [v.shape[is_mapped] for v, is_mapped in zip(operands, mapped, strict=True)]
        batch = max(lengths)
        stacked_groups = {
            group for group, is_mapped, length in zip(call.sharing, mapped, lengths, strict=True) if not group or is_mapped or length > 1
        }
        longer = []
        for group, v, is_mapped in zip(call.sharing, operands, mapped, strict=True):
            if group in stacked_groups:
                own = v.shape[1 + is_mapped :]
                v = jnp.broadcast_to(v if is_mapped else v[None], (size, batch, *own)).reshape(size * batch, *own)
            longer.append(v)
        d = batched(*longer)
        return d.reshape(size, batch, *d.shape[1:]), True

    return batched


@lru_cache(maxsize=MAX_PROGRAMS)
def _sharded(call: BatchedCall, alone: tuple[bool, ...]) -> Callable:
    """The call, which a mesh may shard. alone: the operands that serve the whole batch."""
    *axes_of_operands, result = call.axes
    operands = [f"{f'u{i}' if one else 'b'} {axes}".strip() for i, (one, axes) in enumerate(zip(alone, axes_of_operands, strict=True))]
    return shard_along_result(call, operands, f"b {result}".strip())
