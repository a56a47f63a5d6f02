"""A machine on which tests execute single statements."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from tcemu.kernels.ptx.simt.device_memory import Rooms
from tcemu.kernels.ptx.simt.faults import no_faults
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.simt.special_registers import DIMENSIONS
from tcemu.kernels.ptx.text.ptx_types import storage_dtype


def initial_machine(kinds: Mapping[str, str], threads: int) -> Machine:
    """Return one block without memory, all threads active, all registers zero. kinds: the registers' types. Needs 64-bit integers."""
    nothing = jnp.zeros((1, 0), jnp.uint32)
    return Machine(
        active=jnp.ones((1, threads), bool),
        registers={name: jnp.zeros((1, threads), storage_dtype(kind)) for name, kind in kinds.items()},
        memory=jnp.zeros(1, jnp.uint32),
        rooms=Rooms(jnp.zeros(1, jnp.int64), jnp.zeros(1, jnp.uint64)),
        shared=nothing,
        local=jnp.zeros((1, threads, 0), jnp.uint32),
        parameters=nothing,
        blocks=jnp.zeros((1, 3), jnp.uint32),
        dimensions=jnp.asarray(np.array([threads, *(1,) * 5, *(0,) * (len(DIMENSIONS) - 6)], np.uint32)),
        statement=jnp.int32(0),
        clock=jnp.uint64(0),
        faults=no_faults((1, threads)),
        kinds=tuple(kinds.items()),
    )
