"""`tcemu.ptx.run`: a kernel launched, its blocks run in chunks that fit memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.errors import Unsupported
from tcemu.isa.instructions import LANES
from tcemu.isa.targets import named_target
from tcemu.ptx import checks, faults, pending
from tcemu.ptx.arguments import Buffer, Launched, place
from tcemu.ptx.chunk import Chunk
from tcemu.ptx.link import Kernel, Line, aligned, link
from tcemu.ptx.machine import Machine
from tcemu.ptx.memory import Rooms
from tcemu.ptx.module import Function, Module
from tcemu.ptx.parser import parse
from tcemu.ptx.scheduler import Schedule, Watch
from tcemu.ptx.tensor.protocol import protocol
from tcemu.ptx.tracing import Arrays, Keep, Tracer
from tcemu.ptx.values import dtype

MOST_THREADS = 1024  # of a block
CHUNK_BYTES = 1 << 30  # of the registers, the local and the shared memory of the blocks that run at once
STEP_LIMIT = 5_000_000


def run(
    text: str | Module,
    *,
    entry: str | None = None,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any] = (),
    target: str,
    shared_bytes: int = 0,
    checked: bool = False,
    step_limit: int = STEP_LIMIT,
    cases: int | None = None,
    trace: Keep | Sequence[Keep] = (),
    watch: Watch | None = None,
) -> Arrays:
    """Runs a kernel, bit for bit, and returns what it leaves in each argument that is an array. The inputs stay as they are.

    text: PTX, or a module from `tcemu.ptx.parse`. entry: its name; None: the only one. grid, block: one to three numbers, x first.
    args: in the order of the entry's parameters. For a pointer an array of any dtype, NumPy's or JAX's, which becomes a buffer of its own,
    at an address that is a multiple of 256; for a number a Python or NumPy scalar in the range of the parameter's type; for a struct by
    value its bytes, or a NumPy value of as many bytes.
    target: whose arithmetic the tensor-core instructions have, as "sm_90a" or "H100". shared_bytes: of dynamic shared memory.
    checked: what PTX leaves undefined raises. step_limit: how many statements a chunk of blocks may execute, each for all threads at once.
    cases: so many launches in one call. Every argument has a first axis more, also numbers; each case has buffers of its own. So an array
    with that axis alone holds numbers.
    trace: what to keep on the way, see `tcemu.ptx.Keep`; what was kept is `visits` of the list that comes back.
    watch: called after each statement with it, the chunk and the threads that executed it.

    Blocks that wait for each other must run at once: those whose registers and memory fit into 1 GiB do.
    Raises `PtxError` for text that is no PTX; `Unsupported`, with line and column, for what is not run, before anything runs; `OutOfBounds`
    and `Misaligned` for accesses, `Trapped` for `trap`, with block, thread, line and address; `UndefinedBehaviour` for a deadlock, and in
    checked mode for what PTX leaves undefined; `StepLimit`; TypeError and ValueError for arguments.
    """
    module = parse(text) if isinstance(text, str) else text
    function = _entry(module, entry)
    target = _fitting_target(module, target)
    blocks, threads = _three("grid", grid), _three("block", block)
    _check_block(function, threads)
    if cases is not None and cases < 1:
        raise ValueError(f"cases: got {cases}; wanted 1 or more, or None")
    with jax.enable_x64(True):
        kernel = link(module, function, target, checked)
        launched = place(kernel, args, cases)
        launch = _Launch(kernel, launched, blocks, threads, shared_bytes)
        tracer = Tracer((trace,) if isinstance(trace, Keep) else trace, kernel, launch.threads, launched.results)
        arrays = Arrays(launched.results(launch.run(step_limit, _both(tracer if tracer.asked else None, watch))))
    arrays.visits = tuple(tracer.visits)
    return arrays


def _both(one: Watch | None, other: Watch | None) -> Watch | None:
    """What watches for both."""
    if one is None or other is None:
        return one or other

    def watched(line: Line, chunk: Chunk, active: np.ndarray) -> None:
        one(line, chunk, active)
        other(line, chunk, active)

    return watched


# ---- what a launch is told


def _entry(module: Module, name: str | None) -> Function:
    if module.address_size != 64:
        raise Unsupported(
            f"the module has addresses of {module.address_size} bits, as PTX has without .address_size 64; those of 64 are run"
        )
    entries = module.entries
    if name is None and len(entries) == 1:
        return next(iter(entries.values()))
    if name is None or name not in entries:
        raise ValueError(f"entry: got {name!r}; the module has {', '.join(entries) or 'none'}")
    return entries[name]


def _fitting_target(module: Module, target: str) -> str:
    """The target by its name. Raises Unsupported if PTX for the module's target does not run there."""
    named = named_target(target)
    have, want = named.removeprefix("sm_"), module.target.removeprefix("sm_")
    number = int(want.rstrip("af"))
    runs = have == want or int(have.rstrip("af")) >= number
    if want.endswith("a"):
        runs = have == want
    elif want.endswith("f"):
        runs = int(have.rstrip("af")) // 10 == number // 10 and int(have.rstrip("af")) >= number and have[-1] in "af"
    if not runs:
        raise Unsupported(f"target: got {named}; the module is for .target {module.target}, which does not run there. PTX ISA 11.1.2")
    return named


def _three(name: str, value: int | Sequence[int]) -> tuple[int, int, int]:
    numbers = (value,) if isinstance(value, int | np.integer) else tuple(value)
    if not 1 <= len(numbers) <= 3 or any(not isinstance(each, int | np.integer) or each < 1 for each in numbers):
        raise ValueError(f"{name}: got {value}; wanted one to three numbers of 1 or more, x first")
    return tuple(map(int, (*numbers, 1, 1)[:3]))  # type: ignore[return-value]


def _check_block(function: Function, threads: tuple[int, int, int]) -> None:
    count = threads[0] * threads[1] * threads[2]
    most = MOST_THREADS
    for name in ("maxntid", "reqntid"):
        limit = function.directives.get(name)
        if limit:
            most = min(most, int(np.prod(limit)))
    required = function.directives.get("reqntid")
    if required and tuple((*required, 1, 1)[:3]) != threads:
        raise ValueError(f"block: got {threads}; {function.name} says .reqntid {', '.join(map(str, required))}")
    if count > most:
        raise ValueError(f"block: got {threads}, {count} threads; {function.name} takes {most} at most")


# ---- the launch


class _Launch:
    """The blocks of a launch, in chunks."""

    def __init__(
        self, kernel: Kernel, launched: Launched, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int
    ) -> None:
        self.kernel, self.launched, self.grid, self.block = kernel, launched, grid, block
        self.threads = int(np.prod(block))
        self.padded = aligned(self.threads, LANES)
        self.per_case = int(np.prod(grid))
        self.blocks = self.per_case * len(launched.parameters)
        self.shared_bytes = (kernel.dynamic + shared_bytes) if shared_bytes or kernel.dynamic > kernel.shared else kernel.shared
        self.shared_words = aligned(self.shared_bytes, 16) // 4
        self.dynamic_bytes = shared_bytes

    def chunk_blocks(self) -> int:
        """How many blocks run at once."""
        kinds = [
            kind for linked in {each.names.prefix: each.names for each in self.kernel.pieces}.values() for kind in linked.kinds.values()
        ]
        of_thread = sum(dtype(kind).itemsize for kind in kinds) + self.kernel.local
        return int(np.clip(CHUNK_BYTES // (of_thread * self.padded + 4 * self.shared_words + 1), 1, self.blocks))

    def run(self, step_limit: int, watch: Watch | None) -> np.ndarray:
        """The words of global memory that the kernel leaves."""
        memory = jnp.asarray(self.launched.memory())
        starts, sizes = self.launched.rooms()
        rooms = Rooms(jnp.asarray(starts), jnp.asarray(sizes))
        size = self.chunk_blocks()
        for first in range(0, self.blocks, size):
            numbers = np.arange(first, min(first + size, self.blocks))
            chunk = Chunk(self._machine(memory, rooms, numbers))
            present = np.zeros((len(numbers), self.padded), bool)
            present[:, : self.threads] = True
            report = _Report(self, numbers)
            watched = _both(protocol(self.kernel, present.shape, report.where), watch)
            Schedule(self.kernel, chunk, present, step_limit, report, watched).run()
            memory = chunk["memory"]
        return np.asarray(memory)

    def _machine(self, memory: Any, rooms: Rooms, numbers: np.ndarray) -> Machine:
        shape = (len(numbers), self.padded)
        x, y, _ = self.grid
        at = numbers % self.per_case
        blocks = np.stack([at % x, at // x % y, at // (x * y)], axis=-1)
        parameters = np.ascontiguousarray(self.launched.parameters[numbers // self.per_case]).view(np.uint32)
        sizes = (*self.block, *self.grid, self.shared_bytes, self.dynamic_bytes)
        return Machine(
            active=jnp.ones(shape, bool),
            registers={},
            memory=memory,
            rooms=rooms,
            shared=jnp.zeros((len(numbers), self.shared_words), jnp.uint32),
            local=jnp.zeros((*shape, aligned(self.kernel.local, 16) // 4), jnp.uint32),
            parameters=jnp.asarray(parameters),
            blocks=jnp.asarray(blocks, jnp.uint32),
            dimensions=jnp.asarray(sizes, jnp.uint32),
            statement=jnp.int32(0),
            clock=jnp.uint64(0),
            faults=faults.none_noted(shape),
            extra=self._extra(len(numbers)),
        )

    def _extra(self, blocks: int) -> dict[str, Any]:
        """What checked mode keeps. Of bulk copies into shared memory it is not followed when they end."""
        if not self.kernel.checked or not self.shared_words:
            return {}
        copies = any(line.statement.name == "cp" for line in self.kernel.lines)
        kept: dict[str, Any] = {checks.KEY: checks.shadow(blocks, 4 * self.shared_words, initialised=copies)}
        if any(line.statement.opcode.startswith("cp.async.c") for line in self.kernel.lines):
            kept[pending.KEY] = pending.none_pending(blocks, self.shared_words, self.padded)
        return kept

    def coordinates(self, number: int) -> str:
        """A block by its place in the grid, and its case."""
        x, y, _ = self.grid
        at = number % self.per_case
        place = f"block ({at % x}, {at // x % y}, {at // (x * y)})"
        return place if len(self.launched.parameters) == 1 else f"case {number // self.per_case}, {place}"

    def thread(self, number: int) -> str:
        """A thread by its place in the block."""
        x, y, _ = self.block
        return f"thread ({number % x}, {number // x % y}, {number // (x * y)})"


class _Report:
    """What a chunk's faults are called. numbers: of its blocks in the launch."""

    def __init__(self, launch: _Launch, numbers: np.ndarray) -> None:
        self.launch, self.numbers = launch, numbers

    def where(self, line: Line, block: int, thread: int) -> str:
        """A statement, and who executed it."""
        statement = line.statement
        who = f"{self.launch.coordinates(int(self.numbers[block]))}, {self.launch.thread(thread)}"
        return f"line {statement.place.line}: {statement.opcode}: {who}"

    def check(self, chunk: Chunk) -> None:
        """Raises the fault that the chunk has noted, if there is one."""
        found = faults.found(chunk.faults)
        if found is None:
            return
        where = self.where(self.launch.kernel.lines[found.statement], found.block, found.thread)
        said = f"{where}: {found.message.text.format(*found.values)}"
        if found.address is not None:
            said += f"; address {found.address:#x}{self._near(found.address, found.message.space)}"
        raise found.message.error(said)

    def _near(self, address: int, space: str) -> str:
        """The buffer that is nearest to an address."""
        if space in ("shared", "local", "param"):
            sizes = {"shared": self.launch.shared_bytes, "local": self.launch.kernel.local, "param": self.launch.kernel.parameter_bytes}
            return f"; the block has {sizes[space]} bytes of {space} memory"
        buffers = [buffer for buffer in self.launch.launched.buffers if buffer.data.size]
        if not buffers:
            return ""

        def distance(buffer: Buffer) -> int:
            return max(buffer.address - address, address - (buffer.address + buffer.data.nbytes - 1), 0)

        buffer = min(buffers, key=distance)
        at = address - buffer.address
        if abs(at) >= 1 << 39:
            return ", near no buffer"
        where = f"{-at} bytes before" if at < 0 else f"byte {at} of"
        return f", {where} {buffer.name}, which has {buffer.data.nbytes} bytes"
