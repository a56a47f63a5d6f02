"""Consecutive operations of a basic block that NumPy executes as one program, which spares what each statement costs besides its work.

The program is joined from those of the operations, so that nothing is traced or compiled for it. Observers see single statements: runs are
not used beside them, nor in checked mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tcemu.base.numpy_programs import NumpyProgram
from tcemu.kernels.ptx.linker.compiled_statements import BoundOperation
from tcemu.kernels.ptx.simt.chunk import Chunk, ChunkLayout

if TYPE_CHECKING:
    from tcemu.kernels.ptx.linker.linked_kernel import LinkedStatement

ACTIVE = "active+"  # the name of the threads that execute the statements; no name in PTX has a plus sign


class OperationRun:
    """Operations that are executed together."""

    def __init__(self, operations: Sequence[BoundOperation]) -> None:
        self.operations, self.count = operations, len(operations)
        self.kinds = {name: kind for each in operations for name, kind in each.named_registers()}
        self.joined: dict[bool, tuple[NumpyProgram, list[str], list[str]]] = {}  # by whether all threads are active

    def execute(self, chunk: Chunk) -> None:
        """Execute the operations for the active threads of a chunk."""
        found = self.joined.get(chunk.all_active)
        if found is None:
            calls = [each.program_call(chunk.all_active, ACTIVE) for each in self.operations]
            found = self.joined[chunk.all_active] = NumpyProgram.join(calls)
        program, read, written = found
        values = program(*(chunk["active"] if name == ACTIVE else chunk.register(name, self.kinds[name]) for name in read))
        for name, value in zip(written, values, strict=True):
            chunk.registers[name] = value if value.shape == chunk.shape else np.full(chunk.shape, value)  # pyright: ignore[reportArgumentType]


def join_operations(statements: Sequence[LinkedStatement], layout: ChunkLayout) -> list[LinkedStatement | OperationRun]:
    """Return what is executed for statements: runs of operations, and the other statements."""
    plan: list[LinkedStatement | OperationRun] = []
    run: list[BoundOperation] = []
    for each in (*statements, None):
        bound = None if each is None else each.bind()
        if isinstance(bound, BoundOperation) and bound.joins_others(layout):
            run.append(bound)
            continue
        plan += [OperationRun(run)] if run else []
        plan += [each] if each is not None else []
        run = []
    return plan
