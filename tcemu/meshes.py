"""Arrays on meshes of devices.

Under `jax.shard_map` their types say over which axes of the mesh they vary, and a loop's carry may not change its type. On a mesh with
explicit axes, which `jax.make_mesh` gives, types say how arrays are sharded, and JAX asks to be told so of much that happens to bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec, auto_axes


def with_axes_of(plain: Callable[[Any], Any], call: Callable[[Any], Any], operands: Any) -> Any:
    """call(operands), of any pytree. On a mesh with explicit axes the results are sharded as those of plain(operands), whose rule JAX
    knows; XLA chooses what is within.

    Raises JAX's ShardingTypeError where it has no rule for plain(operands), as for a product whose K is sharded.
    """
    leaves, tree = jax.tree.flatten(operands)
    places = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Array)]
    arrays = [leaves[at] for at in places]
    if not any(map(_has_explicit_axes, arrays)):
        return call(operands)

    def whole(arrays: Any) -> Any:
        """What is no JAX array stays outside: NumPy's 64 bits would be cut."""
        given = dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(tree, [given.get(at, leaf) for at, leaf in enumerate(leaves)])

    wanted = jax.tree.map(lambda one: one.sharding, jax.eval_shape(lambda *arrays: plain(whole(arrays)), *arrays))
    explicit: Callable[..., Any] = auto_axes(lambda *arrays: call(whole(arrays)), out_sharding=wanted)
    return explicit(*arrays)


def _has_explicit_axes(array: Array) -> bool:
    return AxisType.Explicit in jax.typeof(array).sharding.mesh.axis_types


def alike(*arrays: Array) -> tuple[Array, ...]:
    """The same arrays, each said to vary over every mesh axis that one of them varies over. Elsewhere than under shard_map: as they are."""
    axes = [varying_axes(array) for array in arrays]
    together = frozenset().union(*axes)
    return tuple(
        array if own == together else lax.pcast(array, tuple(together - own), to="varying") for array, own in zip(arrays, axes, strict=True)
    )


def varying_axes(array: Array) -> frozenset:
    """The mesh axes along which the array's type says that devices may hold different values. With check_vma=False it says none."""
    kind = jax.typeof(array)
    manual = getattr(kind, "mat", None)  # JAX 0.10.2 and later; before that, `vma` of the type itself
    return getattr(kind, "vma", frozenset()) if manual is None else manual.varying


def cut_along_result(call: Callable[..., Array], operands: Sequence[str], result: str) -> Callable[..., Array]:
    """The call on arrays, which a mesh may cut along those axes of the result that operands have too. Axes are named, as "b m k".

    Every other axis is brought together on each device. JAX's rule alone does not see to that: it says what must be whole, and an operand
    that comes cut is then handed to the call cut.
    """
    cut = {*result.split()} & {name for axes in operands for name in axes.split()}
    whole = custom_partitioning(lambda *arrays: call(*arrays))

    def partition(mesh: Any, arguments: tuple, d: Any) -> tuple:
        along = dict(zip(result.split(), d.sharding.spec, strict=False))

        def sharding(axes: str) -> NamedSharding:
            return NamedSharding(mesh, PartitionSpec(*(along.get(name) if name in cut else None for name in axes.split())))

        return mesh, lambda *arrays: call(*arrays), sharding(result), tuple(map(sharding, operands))

    replicated = tuple(dict.fromkeys(name for axes in (*operands, result) for name in axes.split() if name not in cut))  # in Shardy's order
    rule = f"{', '.join(operands)} -> {result}"
    whole.def_partition(partition=partition, sharding_rule=rule, need_replication_factors=replicated)
    return whole
