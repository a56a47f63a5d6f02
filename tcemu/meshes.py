"""Arrays under `jax.shard_map`. Their types say over which axes of the mesh they vary, and a loop's carry may not change its type."""

import jax
from jax import Array, lax


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
