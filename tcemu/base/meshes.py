"""Arrays on meshes of devices.

Under `jax.shard_map` the type of an array says over which axes of the mesh it varies, and a loop's carry must keep its type. On a mesh with
explicit axes, as `jax.make_mesh` makes it, the type says how the array is sharded, and JAX needs the output sharding of many operations on
bits to be given.

Under `jax.distributed` several processes run one program, and each must compile the same text. `jax.devices` begins with the devices of
process 0, on which no other process can compute; `local_device` is for small programs of one process.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from jax import Array, lax
from jax.core import Tracer
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes
from jax.tree_util import SequenceKey

from tcemu.base.jax_internals import varying_axes


def local_device(platform: str) -> Any:
    """Return this process's first device of a platform.

    Args:
        platform: The platform's name, such as "cpu" or "cuda".

    Returns:
        The device, a `jax.Device`.

    Raises:
        RuntimeError: JAX has no such platform.
    """
    return jax.local_devices(backend=platform)[0]


def on_local_device(platform: str) -> AbstractContextManager:
    """Return a context in which this process computes on its first device of a platform; raises as `local_device`."""
    return jax.default_device(local_device(platform))


def shard_like(plain: Callable[[Any], Any], call: Callable[[Any], Any], operands: Any) -> Any:
    """Call a function and, on a mesh with explicit axes, shard its results as those of a simpler function.

    XLA chooses the sharding of the intermediate values.

    Args:
        plain: Function whose results have the same tree and shapes, and for which JAX has sharding rules. It is not computed.
        call: Function to compute.
        operands: Pytree, the one argument of both functions.

    Returns:
        call(operands).

    Raises:
        ShardingTypeError: JAX has no sharding rule for plain(operands), as for a product whose K is sharded.
        ValueError: Two arrays are on different devices.
    """
    check_devices(operands)
    leaves, tree = jax.tree.flatten(operands)
    indices = [number for number, leaf in enumerate(leaves) if isinstance(leaf, Array)]
    arrays = [leaves[number] for number in indices]
    if not any(map(_has_explicit_axes, arrays)):
        return call(operands)

    def restore_tree(arrays: Any) -> Any:
        """Put the JAX arrays back among the other leaves. NumPy leaves are not traced, since JAX would narrow 64-bit values."""
        traced = dict(zip(indices, arrays, strict=True))
        return jax.tree.unflatten(tree, [traced.get(number, leaf) for number, leaf in enumerate(leaves)])

    shapes = jax.eval_shape(lambda *arrays: plain(restore_tree(arrays)), *arrays)
    shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
    explicit: Callable[..., Any] = auto_axes(lambda *arrays: call(restore_tree(arrays)), out_sharding=shardings)
    return explicit(*arrays)


def check_devices(operands: Any) -> None:
    """Raise ValueError if two arrays were put on different devices. JAX's own error names internals, and nothing that would help."""
    placed = {
        jax.tree_util.keystr(path).lstrip(".")
        if path and not isinstance(path[0], SequenceKey)
        else f"operand {number}": leaf.sharding.device_set
        for number, (path, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(operands), 1)
        if isinstance(leaf, Array) and not isinstance(leaf, Tracer) and leaf.committed
    }
    if len(set(map(frozenset, placed.values()))) < 2:
        return
    first, *others = placed
    other = next(name for name in others if placed[name] != placed[first])
    shown = lambda name: ", ".join(sorted(map(str, placed[name])))
    raise ValueError(
        f"{first} is on {shown(first)} and {other} on {shown(other)}: JAX computes with arrays of one device, or of one mesh. Move one to "
        "the other's device: jax.device_put(x, y.sharding)"
    )


def _has_explicit_axes(array: Array) -> bool:
    return AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types


def match_varying_axes(*arrays: Array) -> tuple[Array, ...]:
    """Mark each array as varying over every mesh axis over which any of them varies.

    Args:
        *arrays: Arrays, under `jax.shard_map` or not.

    Returns:
        The same values with matched types. Outside `jax.shard_map`, the arrays are unchanged.
    """
    axes = [varying_axes(array) for array in arrays]
    union = frozenset().union(*axes)
    return tuple(
        array if varying == union else lax.pcast(array, tuple(sorted(union - varying)), to="varying")
        for array, varying in zip(arrays, axes, strict=True)
    )


def shard_along_result(call: Callable[..., Array], operands: Sequence[str], result: str) -> Callable[..., Array]:
    """Make a function shardable along the axes that its result shares with its operands.

    Every other axis is gathered on each device. JAX's sharding rule alone does not ensure this: the rule says which axes must be
    replicated, but an operand that arrives sharded along such an axis is passed to the function sharded.

    Args:
        call: Function of arrays that returns one array.
        operands: Names of each operand's axes, separated by spaces, such as "b m k".
        result: Names of the result's axes, likewise.

    Returns:
        A function with the same arguments and result.
    """
    shared = {*result.split()} & {name for axes in operands for name in axes.split()}
    sharded = custom_partitioning(lambda *arrays: call(*arrays))

    def partition(mesh: Any, arguments: tuple, d: Any) -> tuple:
        along = dict(zip(result.split(), d.sharding.spec, strict=False))

        def sharding(axes: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(along.get(name) if name in shared else None for name in axes.split())))

        return mesh, lambda *arrays: call(*arrays), sharding(result), tuple(map(sharding, operands))

    replicated = tuple(
        dict.fromkeys(name for axes in (*operands, result) for name in axes.split() if name not in shared)
    )  # in Shardy's order
    rule = f"{', '.join(operands)} -> {result}"
    sharded.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=replicated)
    return sharded
