"""Values of special registers, as `%tid.x`, from the fields of a `Machine`, traced or on the host. Source: PTX ISA chapter 10."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

import numpy as np

from tcemu.engine.isa.families import LANES
from tcemu.kernels.ptx.text.module import SPECIAL_REGISTERS as TYPES

# envreg1 and envreg2 are the address of the workspace of a cooperative launch, as the headers of cooperative groups read it
DIMENSIONS = (
    "ntid.x", "ntid.y", "ntid.z", "nctaid.x", "nctaid.y", "nctaid.z", "total_smem_size", "dynamic_smem_size", "envreg2", "envreg1",
)  # fmt: skip
WARPS_PER_SM, SM_COUNT = 64, 132  # an H100's %nwarpid and %nsmid


Reader = Callable[[Any], Any]  # of a `Machine`, or of an object with the same fields on the host


def _thread_index(machine: Any) -> Any:
    """Return the number of each thread in its block."""
    return np.broadcast_to(np.arange(machine.active.shape[1], dtype=np.uint32), machine.active.shape)


def _thread_coordinate(axis: int, machine: Any) -> Any:
    x, y, thread = machine.dimensions[0], machine.dimensions[1], _thread_index(machine)
    return (thread % x, thread // x % y, thread // (x * y))[axis]


def _cluster_coordinate(axis: int, machine: Any) -> Any:
    """Return each block's coordinate in its cluster."""
    return machine.blocks[:, axis, None] % np.uint32(machine.cluster[axis])


def _cluster_rank(machine: Any) -> Any:
    """Return the rank of each block in its cluster, which counts x first."""
    x, y, z = (_cluster_coordinate(axis, machine) for axis in range(3))
    return x + np.uint32(machine.cluster[0]) * (y + np.uint32(machine.cluster[1]) * z)


def _block_index(machine: Any) -> Any:
    """Return the number of each block in the grid."""
    x, y, z = (machine.blocks[:, axis, None] for axis in range(3))
    return x + machine.dimensions[3] * (y + machine.dimensions[4] * z)


def _lane_mask(low: int, high: int) -> Reader:
    """Return the reader of a mask of lanes: from the own lane plus `low` to the own lane plus `high`, cut to the warp."""

    def value(machine: Any) -> Any:
        lane = (_thread_index(machine) % np.uint32(LANES)).astype(np.int64)
        first, last = (lane + low).clip(0, LANES), (lane + high + 1).clip(0, LANES)
        return ((np.int64(1) << last) - (np.int64(1) << first)).clip(0).astype(np.uint32)

    return value


def _constant(value: int) -> Reader:
    return lambda _machine: np.uint32(value)


def _dimension(name: str) -> Reader:
    return lambda machine: machine.dimensions[DIMENSIONS.index(name)]


def _axes(name: str, read: Callable[[int, Any], Any]) -> dict[str, Reader]:
    """Return the readers of a vector register, given that of one axis; w is 0."""
    return {f"%{name}.{axis}": partial(read, number) for number, axis in enumerate("xyz")} | {f"%{name}.w": _constant(0)}


READERS: dict[str, Reader] = {
    **_axes("tid", _thread_coordinate),
    **_axes("ntid", lambda axis, machine: machine.dimensions[axis]),
    **_axes("ctaid", lambda axis, machine: machine.blocks[:, axis, None]),
    **_axes("nctaid", lambda axis, machine: machine.dimensions[3 + axis]),
    **_axes("clusterid", lambda axis, machine: machine.blocks[:, axis, None] // np.uint32(machine.cluster[axis])),
    **_axes("nclusterid", lambda axis, machine: machine.dimensions[3 + axis] // np.uint32(machine.cluster[axis])),
    **_axes("cluster_ctaid", _cluster_coordinate),
    **_axes("cluster_nctaid", lambda axis, machine: np.uint32(machine.cluster[axis])),
    "%cluster_ctarank": _cluster_rank,
    "%cluster_nctarank": lambda machine: np.uint32(prod(machine.cluster)),
    "%is_explicit_cluster": lambda machine: np.bool_(machine.explicit_cluster),
    "%laneid": lambda machine: _thread_index(machine) % np.uint32(LANES),
    "%warpid": lambda machine: _thread_index(machine) // np.uint32(LANES),
    "%nwarpid": _constant(WARPS_PER_SM),
    "%smid": lambda machine: _block_index(machine) % np.uint32(SM_COUNT),
    "%nsmid": _constant(SM_COUNT),
    "%gridid": lambda _machine: np.uint64(1),
    "%lanemask_eq": _lane_mask(0, 0),
    "%lanemask_le": _lane_mask(-LANES, 0),
    "%lanemask_lt": _lane_mask(-LANES, -1),
    "%lanemask_ge": _lane_mask(0, LANES),
    "%lanemask_gt": _lane_mask(1, LANES),
    **dict.fromkeys(("%clock", "%globaltimer_lo"), lambda machine: machine.clock.astype(np.uint32)),
    **dict.fromkeys(("%clock_hi", "%globaltimer_hi"), lambda machine: (machine.clock >> np.uint64(32)).astype(np.uint32)),
    **dict.fromkeys(("%clock64", "%globaltimer"), lambda machine: machine.clock),
    **dict.fromkeys(("%total_smem_size", "%aggr_smem_size"), _dimension("total_smem_size")),
    **{f"%{name}": _dimension(name) for name in ("envreg1", "envreg2", "dynamic_smem_size")},
}
SPECIAL_VALUES = {name: (TYPES[name], value) for name, value in READERS.items()}  # type and reader of each supported register
TIMERS = ("%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
