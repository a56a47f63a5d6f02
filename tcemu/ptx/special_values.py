"""Special registers: what `%tid.x` and the like read, from what a `tcemu.ptx.machine.Machine` holds, traced or on the host.

Source: PTX ISA chapter 10.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tcemu.isa.instructions import LANES
from tcemu.ptx.special import SPECIAL as TYPES

DIMENSIONS = ("ntid.x", "ntid.y", "ntid.z", "nctaid.x", "nctaid.y", "nctaid.z", "total_smem_size", "dynamic_smem_size")
WARPS_OF_A_PROCESSOR, PROCESSORS = 64, 132  # of an H100; what %nwarpid and %nsmid read


def _linear(machine: Any) -> Any:
    """The number of each thread in its block."""
    return np.broadcast_to(np.arange(machine.active.shape[1], dtype=np.uint32), machine.active.shape)


def _tid(axis: int) -> Callable[[Any], Any]:
    def value(machine: Any) -> Any:
        x, y = machine.dimensions[0], machine.dimensions[1]
        thread = _linear(machine)
        return (thread % x, thread // x % y, thread // (x * y))[axis]

    return value


def _dimension(name: str) -> Callable[[Any], Any]:
    return lambda machine: machine.dimensions[DIMENSIONS.index(name)]


def _block(axis: int) -> Callable[[Any], Any]:
    return lambda machine: machine.blocks[:, axis, None]


def _number(machine: Any) -> Any:
    """The number of each block in the grid."""
    x, y, z = (machine.blocks[:, axis, None] for axis in range(3))
    return x + machine.dimensions[3] * (y + machine.dimensions[4] * z)


def _mask(low: int, high: int) -> Callable[[Any], Any]:
    """Bits of lanes from this one plus `low` up to it plus `high`; -32 and 32 stand for the first and the last."""

    def value(machine: Any) -> Any:
        lane = (_linear(machine) % np.uint32(LANES)).astype(np.int64)
        first, last = (lane + low).clip(0, LANES), (lane + high + 1).clip(0, LANES)
        return ((np.int64(1) << last) - (np.int64(1) << first)).clip(0).astype(np.uint32)

    return value


def _fixed(value: int) -> Callable[[Any], Any]:
    return lambda _machine: np.uint32(value)


def _axes(name: str, values: tuple[Callable[[Any], Any], ...]) -> dict[str, Callable[[Any], Any]]:
    return {f"%{name}.{axis}": value for axis, value in zip("xyzw", (*values, _fixed(0)), strict=True)}


VALUES: dict[str, Callable[[Any], Any]] = {
    **_axes("tid", tuple(map(_tid, range(3)))),
    **_axes("ntid", tuple(_dimension(f"ntid.{axis}") for axis in "xyz")),
    **_axes("ctaid", tuple(map(_block, range(3)))),
    **_axes("nctaid", tuple(_dimension(f"nctaid.{axis}") for axis in "xyz")),
    **_axes("clusterid", tuple(map(_block, range(3)))),  # clusters of one block
    **_axes("nclusterid", tuple(_dimension(f"nctaid.{axis}") for axis in "xyz")),
    **_axes("cluster_ctaid", (_fixed(0),) * 3),
    **_axes("cluster_nctaid", (_fixed(1),) * 3),
    "%cluster_ctarank": _fixed(0),
    "%cluster_nctarank": _fixed(1),
    "%is_explicit_cluster": lambda _machine: np.bool_(False),
    "%laneid": lambda machine: _linear(machine) % np.uint32(LANES),
    "%warpid": lambda machine: _linear(machine) // np.uint32(LANES),
    "%nwarpid": _fixed(WARPS_OF_A_PROCESSOR),
    "%smid": lambda machine: _number(machine) % np.uint32(PROCESSORS),
    "%nsmid": _fixed(PROCESSORS),
    "%gridid": lambda _machine: np.uint64(1),
    "%lanemask_eq": _mask(0, 0),
    "%lanemask_le": _mask(-LANES, 0),
    "%lanemask_lt": _mask(-LANES, -1),
    "%lanemask_ge": _mask(0, LANES),
    "%lanemask_gt": _mask(1, LANES),
    "%clock": lambda machine: machine.clock.astype(np.uint32),
    "%clock_hi": lambda machine: (machine.clock >> np.uint64(32)).astype(np.uint32),
    "%clock64": lambda machine: machine.clock,
    "%globaltimer": lambda machine: machine.clock,
    "%globaltimer_lo": lambda machine: machine.clock.astype(np.uint32),
    "%globaltimer_hi": lambda machine: (machine.clock >> np.uint64(32)).astype(np.uint32),
    "%total_smem_size": _dimension("total_smem_size"),
    "%aggr_smem_size": _dimension("total_smem_size"),
    "%dynamic_smem_size": _dimension("dynamic_smem_size"),
}
SPECIAL = {name: (TYPES[name], value) for name, value in VALUES.items()}  # those that are run: the type, and what it reads
TIMERS = ("%clock", "%clock_hi", "%clock64", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
