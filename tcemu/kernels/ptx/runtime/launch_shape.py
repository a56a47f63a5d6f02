"""The shape of a launch: blocks of the grid, threads of a block, blocks of a cluster, and what a kernel's directives say of them.

Source: PTX ISA 11.4 and 11.7; CUDA C++ programming guide, thread block clusters.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.targets import TARGETS, resolve_target
from tcemu.kernels.ptx.text.module import Function

MAX_BLOCK_THREADS = 1024
MAX_CLUSTER_BLOCKS = 16  # 8 are portable; an H100 and a B200 take 16 with cudaFuncAttributeNonPortableClusterSizeAllowed
# CUDA C++ programming guide, technical specifications per compute capability
LARGEST = {"grid": (2**31 - 1, 65535, 65535), "block": (1024, 1024, 64)}
Dimensions = tuple[int, int, int]


class LaunchShape(NamedTuple):
    """The shape of a launch, each part x first."""

    grid: Dimensions  # blocks
    block: Dimensions  # threads
    cluster: Dimensions = (1, 1, 1)  # blocks
    explicit_cluster: bool = False  # the launch or the kernel names the size of clusters

    @property
    def cluster_size(self) -> int:
        """Blocks of a cluster."""
        return prod(self.cluster)

    def block_numbers(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers of the blocks at these positions of the order of execution.

        The order is cluster by cluster, and within a cluster by the ranks.
        """
        clusters: Dimensions = tuple(n // size for n, size in zip(self.grid, self.cluster, strict=True))  # type: ignore[assignment]
        outside = coordinates(positions // self.cluster_size, clusters)
        within = coordinates(positions % self.cluster_size, self.cluster)
        x, y, z = (c * size + w for c, size, w in zip(outside, self.cluster, within, strict=True))
        return x + self.grid[0] * (y + self.grid[1] * z)


def coordinates(number: Any, shape: Dimensions) -> tuple[Any, Any, Any]:
    """Return the coordinates of a number, or of an array of numbers, that counts x first."""
    x, y, _ = shape
    return number % x, number // x % y, number // (x * y)


def read_dimensions(name: str, value: int | Sequence[int]) -> Dimensions:
    """Return one to three numbers, x first, as three. Raises ValueError that names the argument."""
    numbers = (value,) if isinstance(value, int | float | np.integer | np.floating) else tuple(value)
    if not 1 <= len(numbers) <= 3 or any(not isinstance(each, int | np.integer) or each < 1 for each in numbers):
        raise ValueError(f"{name}: got {value}; expected one to three numbers of 1 or more, x first")
    if any(each > most for each, most in zip(numbers, LARGEST.get(name, numbers), strict=False)):
        raise ValueError(f"{name}: got {value}; a GPU takes {' x '.join(map(str, LARGEST[name]))} at most")
    return tuple(map(int, (*numbers, 1, 1)[:3]))  # type: ignore[return-value]


def launch_shape(
    function: Function, target: str, grid: int | Sequence[int], block: int | Sequence[int], cluster: int | Sequence[int] | None
) -> LaunchShape:
    """Return the shape of a launch.

    Args:
        function: The entry, whose directives may name the sizes of blocks and clusters.
        target: The GPU.
        grid: Blocks; clusters if the entry says `.blocksareclusters`.
        block: Threads of a block.
        cluster: Blocks of a cluster; None: as the entry says, else 1.

    Raises:
        ValueError: The numbers do not fit each other or the entry's directives.
        Unsupported: The target has no clusters.
    """
    blocks, threads = read_dimensions("grid", grid), read_dimensions("block", block)
    _check_block_size(function, threads)
    required = function.directives.get("reqnctapercluster")
    shape = None if cluster is None else read_dimensions("cluster", cluster)
    if required:
        declared: Dimensions = tuple((*required, 1, 1)[:3])  # type: ignore[assignment]
        if shape is not None and shape != declared:
            raise ValueError(f"cluster: got {shape}; {function.name} says .reqnctapercluster {', '.join(map(str, required))}")
        shape = declared
    if shape is None:
        if "explicitcluster" in function.directives:
            raise ValueError(f"cluster: got None; {function.name} says .explicitcluster, so that its launch must name the size of clusters")
        return LaunchShape(blocks, threads)
    _check_cluster_size(function, target, shape)
    if "blocksareclusters" in function.directives:
        blocks = blocks[0] * shape[0], blocks[1] * shape[1], blocks[2] * shape[2]
    if any(n % size for n, size in zip(blocks, shape, strict=True)):
        raise ValueError(f"grid: got {blocks}; expected multiples of the cluster's size {shape}")
    return LaunchShape(blocks, threads, shape, True)


def _check_block_size(function: Function, threads: Dimensions) -> None:
    count = prod(threads)
    most = MAX_BLOCK_THREADS
    for name in ("maxntid", "reqntid"):
        limit = function.directives.get(name)
        if limit:
            most = min(most, prod(limit))
    required = function.directives.get("reqntid")
    if required and tuple((*required, 1, 1)[:3]) != threads:
        raise ValueError(f"block: got {threads}; {function.name} says .reqntid {', '.join(map(str, required))}")
    if count > most:
        raise ValueError(f"block: got {threads}, {count} threads; {function.name} takes {most} at most")


def check_shared_size(target: str, size: int, dynamic: int) -> None:
    """Raise ValueError if a block has more shared memory than the target gives.

    Args:
        target: The GPU.
        size: Bytes of a block, with the dynamic ones.
        dynamic: Bytes that the launch asks for.
    """
    most = 1024 * TARGETS[resolve_target(target)].shared_kib
    if dynamic < 0 or size > most:
        raise ValueError(f"shared_bytes: got {dynamic}; a block has {size} bytes of shared memory, and {target} gives {most} at most")


def _check_cluster_size(function: Function, target: str, cluster: Dimensions) -> None:
    count = prod(cluster)
    if not TARGETS[resolve_target(target)].has_clusters:
        first = min(row.number for row in TARGETS.values() if row.has_clusters)
        raise Unsupported(f"cluster: got {cluster}; the target {target} has no clusters, sm_{first} and later have")
    limit = function.directives.get("maxclusterrank")
    most = min(MAX_CLUSTER_BLOCKS, limit[0]) if limit else MAX_CLUSTER_BLOCKS
    if count > most:
        raise ValueError(f"cluster: got {cluster}, {count} blocks; {function.name} takes {most} at most")
