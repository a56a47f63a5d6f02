"""Several JAX processes on one run: each computes its devices' share of every chunk, all have all counts, the first one has the file."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils


def in_several_processes(devices: tuple[Any, ...]) -> bool:
    """Whether some of the devices belong to another process."""
    return any(device.process_index != jax.process_index() for device in devices)


class Processes(NamedTuple):
    """Those that share a run. several: there are others than this one."""

    several: bool

    @property
    def first(self) -> bool:
        """Whether this is the one that reads and writes the file."""
        return not self.several or jax.process_index() == 0

    def agreed(self, turns: int, stop: int) -> tuple[int, int]:
        """The first process's turns, and the largest `stop` of all: the next chunk must be the same everywhere."""
        if not self.several:
            return turns, stop
        every = np.asarray(multihost_utils.process_allgather(np.array([turns, stop], np.int32)))
        return int(every[0, 0]), int(every[:, 1].max())

    def of_first(self, make: Callable[[], bytes]) -> bytes:
        """What the first process makes. Its ValueError or OSError is raised in all, so that none waits for the others."""
        made, error = b"", None
        if self.first:
            try:
                made = make()
            except (ValueError, OSError) as raised:
                error = raised
        if self.several:
            message = b"e" + str(error).encode() if error is not None else b"c" + made
            size = int(multihost_utils.broadcast_one_to_all(np.int32(len(message))))
            room = np.frombuffer(message if self.first else bytes(size), np.uint8)
            message = np.asarray(multihost_utils.broadcast_one_to_all(room)).astype(np.uint8).tobytes()
            made = message[1:]
            if message[:1] == b"e" and error is None:
                error = ValueError(made.decode())
        if error is not None:
            raise error
        return made
