"""`tcemu.ptx.run`: a kernel launched, its blocks run in chunks that fit memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.base.errors import UndefinedBehaviour, Unsupported
from tcemu.base.execution import current_execution
from tcemu.engine.instructions.tcgen05_faults import Tcgen05Fault
from tcemu.engine.isa.families import LANES
from tcemu.engine.isa.targets import TARGETS, parse_target_name, resolve_target
from tcemu.kernels.ptx.cuda_source import Source, read_module
from tcemu.kernels.ptx.hazards.hazard_tracker import HazardTracker
from tcemu.kernels.ptx.linker.compiled_statements import forget_cleared_programs
from tcemu.kernels.ptx.linker.constant_divisions import fold_constant_divisions
from tcemu.kernels.ptx.linker.contraction import fuse_products
from tcemu.kernels.ptx.linker.linked_kernel import Kernel, LinkedStatement, align_up, link
from tcemu.kernels.ptx.runtime.kernel_arguments import Buffer, LaunchInputs, place_arguments
from tcemu.kernels.ptx.runtime.launch_records import is_recording, record_launch
from tcemu.kernels.ptx.runtime.launch_shape import LaunchShape, check_shared_size, coordinates, launch_shape, read_dimensions
from tcemu.kernels.ptx.runtime.runtime_functions import RuntimeFunctions, add_heap
from tcemu.kernels.ptx.runtime.scheduler import Schedule
from tcemu.kernels.ptx.runtime.tracing import KernelOutputs, Observer, Tracepoint, Tracer, compare_schedules
from tcemu.kernels.ptx.simt import faults
from tcemu.kernels.ptx.simt.chunk import Chunk
from tcemu.kernels.ptx.simt.device_memory import Rooms
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.simt.special_registers import SM_COUNT
from tcemu.kernels.ptx.simt.tensor_memory_state import FREE, PIECE, TENSOR_MEMORY_KEY, block_bytes, new_tensor_memory
from tcemu.kernels.ptx.tensor.launch_control import LAUNCH_KEY, PendingClusters
from tcemu.kernels.ptx.tensor.tcgen05_protocol import Tcgen05Protocol
from tcemu.kernels.ptx.tensor.wgmma_protocol import wgmma_protocol
from tcemu.kernels.ptx.text.module import Function, Module
from tcemu.kernels.ptx.text.ptx_types import storage_dtype

CHUNK_BYTES = 1 << 30  # registers, local and shared memory of the blocks that run at once
STEP_LIMIT = 5_000_000
KEPT_KERNELS = 128  # modules and linked kernels that later launches share
IN_ORDER, ADVERSARIAL = "in order", "adversarial"  # the schedules of a launch
WORKSPACE_BYTES = 8  # cooperative_groups/details/driver_abi.h: struct grid_workspace


def run(
    text: Source,
    *,
    entry: str | None = None,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    args: Sequence[Any] = (),
    target: str,
    shared_bytes: int = 0,
    checked: bool = False,
    schedule: str = IN_ORDER,
    seed: int = 0,
    cluster: int | Sequence[int] | None = None,
    cooperative: bool = False,
    fmad: bool = True,
    step_limit: int = STEP_LIMIT,
    cases: int | None = None,
    options: Sequence[str] = (),
    trace: Tracepoint | Sequence[Tracepoint] = (),
    watch: Observer | Sequence[Observer] = (),
) -> KernelOutputs:
    """Run a kernel, bit for bit, and return the arrays that it leaves in its arguments. The inputs are not changed.

    Blocks that wait for each other must run at once. The blocks of a cluster do; others do if `cooperative` is True, or if the registers
    and memory of all fit in 1 GiB.

    Args:
        text: PTX or CUDA C++; the path of a file of either (*.cu: CUDA C++); or a module from `tcemu.ptx.parse` or `tcemu.ptx.compile`.
        entry: Name of the kernel, in CUDA C++ as "axpy<float>"; None: the only one.
        grid: Blocks, one to three numbers, x first.
        block: Threads of a block, one to three numbers, x first.
        args: Arguments in the order of the entry's parameters. For a pointer: a NumPy or JAX array of any dtype, which becomes a buffer of
            its own at a multiple of 256, a `BufferPointer` into one, or a `PointerTable`. For a number: a Python or NumPy scalar in the
            range of the parameter's type. For a struct by value: its bytes, a NumPy or ctypes value of as many bytes, or, with pointers
            and tensor maps in it, a `Struct`. A parameter `.b8 x[8]`, as CuTe DSL declares pointers, takes what a pointer does.
        target: GPU whose arithmetic the tensor-core instructions have, as "sm_90a" or "H100".
        shared_bytes: Dynamic shared memory.
        checked: Raise for what PTX leaves undefined.
        schedule: "in order", or "adversarial": run a second time with warps, blocks and lanes in another legal order, and compare all words
            of the outputs. Those that differ are in `differences`, and a note names them. The outputs are those of the first run.
        seed: Seed of the second order.
        cluster: Blocks of a cluster, one to three numbers, x first; None: what `.reqnctapercluster` says, else 1.
        cooperative: All blocks of the grid run at once, as by cudaLaunchCooperativeKernel.
        fmad: Fuse products and sums whose rounding the text leaves open into multiply-adds, as ptxas does unless `--fmad=false` is given.
        step_limit: Statements that a chunk of blocks may execute, each for all threads at once.
        cases: Number of launches in one call. Every argument, also a number, then has an additional first axis, and each case has buffers
            of its own. An array with that axis alone holds numbers.
        options: Options of NVRTC for CUDA C++, as "-DN=4".
        trace: Tracepoints; see `tcemu.ptx.Tracepoint`.
        watch: Functions that are called with an `ExecutedStatement` after each statement.

    Returns:
        The arrays among the arguments as the kernel leaves them. The attribute `snapshots` has what `trace` recorded, and `printed` the
        text of the kernel's `printf`; `notes` has what checked mode remarks on and does not forbid, and `differences` the words that depend
        on the schedule.

    Raises:
        PtxError: The text is not PTX, or NVRTC is missing or rejects the source.
        Unsupported: A statement is not supported, with line and column. Nothing has run.
        OutOfBounds, Misaligned: An access is wrong, with block, thread, line and address.
        Trapped: The kernel executed `trap`.
        UndefinedBehaviour: A deadlock; in checked mode also what PTX leaves undefined.
        StepLimit: The kernel executed more statements than `step_limit`.
        TypeError, ValueError: An argument does not fit.
    """
    module = _prepare_module(_Identity(read_module(text, target, entry, options)), fmad)
    function = find_entry(module, entry)
    target = _compatible_target(module, target)
    shape = launch_shape(function, target, grid, block, cluster)
    if schedule not in (IN_ORDER, ADVERSARIAL):
        raise ValueError(f"schedule: got {schedule!r}; expected {IN_ORDER!r} or {ADVERSARIAL!r}")
    if cases is not None and cases < 1:
        raise ValueError(f"cases: got {cases}; expected 1 or more, or None")
    with jax.enable_x64(True):
        if forget_cleared_programs():
            _link_once.cache_clear()
        kernel = _link_once(_Identity(module), function.name, target, checked, shape.cluster_size, current_execution())
        inputs = place_arguments(kernel, args, cases)
        launch = _Launch(kernel, inputs, shape, shared_bytes, cooperative)
        check_shared_size(target, launch.shared_bytes, shared_bytes)
        tracer = Tracer((trace,) if isinstance(trace, Tracepoint) else trace, kernel, launch.threads, inputs.read_outputs)
        watching = (watch,) if callable(watch) else tuple(watch)
        observers = (tracer, *watching) if tracer.tracepoints else watching
        outputs = KernelOutputs(inputs.read_outputs(launch.execute(step_limit, observers)))
        if is_recording():
            sizes = {
                "grid": read_dimensions("grid", grid),
                "block": shape.block,
                "cluster": shape.cluster if shape.explicit_cluster else None,
            }
            record_launch(module, kernel, inputs, outputs, **sizes, shared_bytes=shared_bytes, cooperative=cooperative, fmad=fmad)
        if schedule == ADVERSARIAL:
            inputs = place_arguments(kernel, args, cases)
            again = _Launch(kernel, inputs, shape, shared_bytes, cooperative)
            try:
                others = inputs.read_outputs(again.execute(step_limit, (), np.random.default_rng(seed)))
            except ValueError as error:
                raise type(error)(f"in the schedule of seed {seed}: {error}") from None
            outputs.differences = compare_schedules(outputs, others)
            launch.notes += [each.describe(seed) for each in outputs.differences]
    outputs.snapshots = tuple(tracer.snapshots)
    outputs.printed = launch.runtime.printed
    outputs.notes = tuple(dict.fromkeys(launch.notes))
    return outputs


# ---- modules and kernels, which later launches share


class _Identity:
    """A module as a key of a cache. Modules are values, but comparing them takes as long as linking them."""

    def __init__(self, module: Module) -> None:
        self.module = module

    def __hash__(self) -> int:
        return id(self.module)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and other.module is self.module


@lru_cache(maxsize=KEPT_KERNELS)
def _prepare_module(key: _Identity, fmad: bool) -> Module:
    """Return the module that is linked."""
    module = fold_constant_divisions(key.module)
    return fuse_products(module) if fmad else module


@lru_cache(maxsize=KEPT_KERNELS)
def _link_once(key: _Identity, entry: str, target: str, checked: bool, cluster_size: int, chosen: str) -> Kernel:
    """Link a kernel. chosen: the choice of `tcemu.execution`, to which its statements are bound."""
    return link(key.module, key.module.functions[entry], target, checked, cluster_size)


# ---- arguments of the launch


def find_entry(module: Module, name: str | None) -> Function:
    """Return the kernel of a name or a name expression; None: the only one. Raises ValueError."""
    if module.address_size != 64:
        raise Unsupported(
            f"the module has addresses of {module.address_size} bits, the default without .address_size 64; only 64 bits are supported"
        )
    entries = module.entries
    name = module.name_expressions.get(name, name) if name is not None else None
    if name is None and len(entries) == 1:
        return next(iter(entries.values()))
    if name is None or name not in entries:
        raise ValueError(f"entry: got {name!r}; the module has {', '.join(entries) or 'none'}")
    return entries[name]


def _compatible_target(module: Module, target: str) -> str:
    """Return the target by its name. Raises Unsupported if PTX for the module's target does not run there."""
    named = resolve_target(target)
    if named not in TARGETS:
        raise Unsupported(f"target: got {named}; PTX runs on NVIDIA's GPUs alone")
    have, want = parse_target_name(named), parse_target_name(module.target)
    runs = have == want or have.number >= want.number
    if want.suffix == "a":
        runs = have == want
    elif want.suffix == "f":
        runs = have.family == want.family and have.number >= want.number and have.suffix != ""
    if not runs:
        raise Unsupported(f"target: got {named}; the module is for .target {module.target}, which does not run there. PTX ISA 11.1.2")
    return named


# ---- the launch


class _Launch:
    """The blocks of a launch, which run in chunks."""

    def __init__(self, kernel: Kernel, inputs: LaunchInputs, shape: LaunchShape, shared_bytes: int, cooperative: bool) -> None:
        self.kernel, self.inputs, self.shape, self.cooperative = kernel, inputs, shape, cooperative
        self.grid, self.block = shape.grid, shape.block
        self.threads = int(np.prod(shape.block))
        self.padded_threads = align_up(self.threads, LANES)
        self.blocks_per_case = int(np.prod(shape.grid))
        self.blocks = self.blocks_per_case * len(inputs.parameters)
        dynamic = shared_bytes > 0 or kernel.dynamic_start > kernel.shared_bytes
        self.shared_bytes = kernel.dynamic_start + shared_bytes if dynamic else kernel.shared_bytes
        self.shared_words = align_up(self.shared_bytes, 16) // 4
        self.dynamic_bytes = shared_bytes
        self.notes: list[str] = []
        self.workspace = self._add_workspace() if cooperative and kernel.reads("%envreg2") else 0
        self.runtime = RuntimeFunctions(inputs, add_heap(inputs) if "malloc" in kernel.runtime_functions else 0)

    def _add_workspace(self) -> int:
        """Add the memory of a cooperative launch that the driver gives to cooperative groups: its size and a barrier of the grid.

        Returns:
            Its address.
        """
        if len(self.inputs.parameters) > 1:
            raise Unsupported("cases: a barrier of the grid serves one launch; run the cases one by one")
        room = max(buffer.room for buffer in self.inputs.buffers) + 1
        return self.inputs.add_buffer("the grid's workspace", room, np.array([WORKSPACE_BYTES, 0], np.uint32).view(np.uint8)).address

    def blocks_per_chunk(self) -> int:
        """Return the number of blocks that run at once, whole clusters."""
        tables = {linked.names.prefix: linked.names for linked in self.kernel.blocks}.values()
        registers = sum(storage_dtype(kind).itemsize for names in tables for kind in names.kinds.values())
        bytes_per_thread = registers + self.kernel.local_bytes
        bytes_per_block = 4 * self.shared_words + (block_bytes(self.kernel.target) if self.kernel.uses("tcgen05") else 0)
        clusters = CHUNK_BYTES // (bytes_per_thread * self.padded_threads + bytes_per_block + 1) // self.shape.cluster_size
        count = int(np.clip(clusters * self.shape.cluster_size, self.shape.cluster_size, self.blocks))
        return -(-count // self.blocks_per_case) * self.blocks_per_case if self.cooperative else count

    def execute(self, step_limit: int, observers: Sequence[Observer], chooser: np.random.Generator | None = None) -> np.ndarray:
        """Run all blocks, and return the words of global memory afterwards. chooser: what draws the order of threads; none is checked."""
        memory = jax.device_put(self.inputs.initial_memory())  # unlike jnp.asarray and jnp.zeros, device_put compiles nothing
        starts, sizes = self.inputs.room_table()
        rooms = Rooms(jax.device_put(starts), jax.device_put(sizes))
        size, first = self.blocks_per_chunk(), 0
        while first < self.blocks:
            case, position = np.divmod(np.arange(first, self._chunk_end(first, size)), self.blocks_per_case)
            numbers = case * self.blocks_per_case + self.shape.block_numbers(position)
            chunk = Chunk(self._machine(memory, rooms, numbers, first))
            present = np.zeros((len(numbers), self.padded_threads), bool)
            present[:, : self.threads] = True
            reporter = _FaultReporter(self, numbers)
            watching, at_barriers = self._checkers(present.shape, chunk, reporter) if chooser is None else ([], [])
            watching += observers
            schedule = Schedule(self.kernel, chunk, present, step_limit, reporter, watching, numbers, self.runtime, at_barriers, chooser)
            schedule.run_to_completion()
            for each in (*at_barriers, schedule.barriers):
                self.notes += each.notes.values()
            self._check_freed_columns(chunk, reporter)
            memory = jax.device_put(chunk["memory"])  # NumPy may have made it
            first += len(numbers) + self._cancelled_blocks(chunk)
        return np.asarray(memory)

    def _checkers(
        self, shape: tuple[int, int], chunk: Chunk, reporter: _FaultReporter
    ) -> tuple[list[Observer], list[Tcgen05Protocol | HazardTracker]]:
        """Return the observers of checked mode for a chunk of `shape` (blocks, threads), and those of them that observe barriers."""
        protocol = wgmma_protocol(self.kernel, shape, reporter.describe)
        at_barriers: list[Tcgen05Protocol | HazardTracker] = []
        if self.kernel.checked:
            hazards = HazardTracker(self.kernel, shape, self.shape.cluster_size, self.shared_bytes, chunk, reporter)
            at_barriers = [hazards]
            if self.kernel.uses("tcgen05"):
                tensor = Tcgen05Protocol(self.kernel, shape, self.shared_bytes, self.shape.cluster_size, reporter, hazards)
                at_barriers = [tensor, hazards]
        return [*([] if protocol is None else [protocol]), *at_barriers], at_barriers

    def _check_freed_columns(self, chunk: Chunk, reporter: _FaultReporter) -> None:
        """Raise UndefinedBehaviour, in checked mode, for a block that has exited and has not freed its tensor memory."""
        state = chunk.tensor_memory
        if state is None or not self.kernel.checked:
            return
        left = (np.asarray(state.owners) != FREE).sum(1)
        if left.any():
            row = int(left.argmax())
            raise UndefinedBehaviour(Tcgen05Fault.NOT_FREED.message(reporter.block_name(row), PIECE * int(left[row])))

    @property
    def _cancels(self) -> bool:
        """The kernel may cancel clusters that have not begun."""
        return any(linked.statement.opcode.startswith("clusterlaunchcontrol.try_cancel") for linked in self.kernel.statements)

    def _chunk_end(self, first: int, size: int) -> int:
        """Return the number, in the order of execution, behind the last block of the chunk that begins at `first`."""
        if not self._cancels:
            return min(first + size, self.blocks)
        count = max(min(size, SM_COUNT) // self.shape.cluster_size, 1) * self.shape.cluster_size
        return min(first + count, (first // self.blocks_per_case + 1) * self.blocks_per_case)

    def _pending_clusters(self, first: int, count: int) -> PendingClusters:
        """Return the clusters that may be cancelled while the `count` blocks from `first` on run: those after them, of the same case."""
        size, case = self.shape.cluster_size, first // self.blocks_per_case
        places = np.stack(coordinates(self.shape.block_numbers(np.arange(0, self.blocks_per_case, size)), self.grid), axis=-1)
        begun = (first + count - case * self.blocks_per_case) // size
        return PendingClusters(jnp.int64(begun), jnp.int64(len(places)), jnp.asarray(places, jnp.uint32))

    def _cancelled_blocks(self, chunk: Chunk) -> int:
        """Return the number of blocks that the chunk has cancelled."""
        leaves = chunk.layout.leaves_below("extra", LAUNCH_KEY)
        return (
            (int(PendingClusters(*(chunk.leaves[index] for index in leaves)).next) - self._begun) * self.shape.cluster_size if leaves else 0
        )

    def _machine(self, memory: Any, rooms: Rooms, numbers: np.ndarray, first: int) -> Machine:
        shape = (len(numbers), self.padded_threads)
        blocks = np.stack(coordinates(numbers % self.blocks_per_case, self.grid), axis=-1)
        parameters = np.ascontiguousarray(self.inputs.parameters[numbers // self.blocks_per_case]).view(np.uint32)
        sizes = (*self.block, *self.grid, self.shared_bytes, self.dynamic_bytes, self.workspace % 2**32, self.workspace >> 32)
        return Machine(
            active=jax.device_put(np.ones(shape, bool)),
            registers={},
            memory=memory,
            rooms=rooms,
            shared=jax.device_put(np.zeros((len(numbers), self.shared_words), np.uint32)),
            local=jax.device_put(np.zeros((*shape, align_up(self.kernel.local_bytes, 16) // 4), np.uint32)),
            parameters=jax.device_put(parameters),
            blocks=jax.device_put(blocks.astype(np.uint32)),
            dimensions=jax.device_put(np.array(sizes, np.uint32)),
            statement=jax.device_put(np.int32(0)),
            clock=jax.device_put(np.uint64(0)),
            faults=faults.no_faults(shape),
            extra=self._launch_state(first, len(numbers)),
            cluster=self.shape.cluster,
            explicit_cluster=self.shape.explicit_cluster,
        )

    def _launch_state(self, first: int, count: int) -> dict[str, Any]:
        """Return the tensor memory of the blocks, and the clusters that may be cancelled, as far as the kernel uses them."""
        extra: dict[str, Any] = {TENSOR_MEMORY_KEY: new_tensor_memory(count, self.kernel.target)} if self.kernel.uses("tcgen05") else {}
        if self._cancels:
            extra[LAUNCH_KEY] = pending = self._pending_clusters(first, count)
            self._begun = int(pending.next)
        return extra

    def block_name(self, number: int) -> str:
        """Return the name of a block: its coordinates in the grid, and its case."""
        place = f"block {coordinates(number % self.blocks_per_case, self.grid)}"
        return place if len(self.inputs.parameters) == 1 else f"case {number // self.blocks_per_case}, {place}"

    def thread_name(self, number: int) -> str:
        """Return the name of a thread: its coordinates in the block."""
        return f"thread {coordinates(number, self.block)}"


class _FaultReporter:
    """Names of a chunk's places, and its faults as exceptions."""

    def __init__(self, launch: _Launch, numbers: np.ndarray) -> None:
        self.launch, self.numbers = launch, numbers  # numbers: of the chunk's blocks in the launch

    def describe(self, linked: LinkedStatement, block: int, thread: int) -> str:
        """Return a statement and the thread that executed it in words."""
        statement = linked.statement
        place = f"{self.launch.block_name(int(self.numbers[block]))}, {self.launch.thread_name(thread)}"
        return f"{statement.line_text}: {statement.opcode}: {place}"

    def block_name(self, row: int) -> str:
        """Return the name of a block of the chunk."""
        return self.launch.block_name(int(self.numbers[row]))

    def raise_fault(self, chunk: Chunk) -> None:
        """Raise the first fault of the chunk, if there is one."""
        fault = faults.first_fault(chunk.faults)
        if fault is None:
            return
        place = self.describe(self.launch.kernel.statements[fault.statement], fault.block, fault.thread)
        message = f"{place}: {fault.message.text.format(*fault.values)}"
        if fault.address is not None:
            message += f"; address {fault.address:#x}{self.nearest_buffer(fault.address, fault.message.space)}"
        raise fault.message.error(message)

    def absent_blocks(self) -> int:
        """Return the number of the launch's blocks that are not in the chunk."""
        return self.launch.blocks_per_case - len(self.numbers) if len(self.numbers) < self.launch.blocks_per_case else 0

    def nearest_buffer(self, address: int, space: str) -> str:
        """Return the buffer that is nearest to an address, or the size of the space, in words."""
        kernel = self.launch.kernel
        sizes = {"shared": self.launch.shared_bytes, "local": kernel.local_bytes, "param": kernel.parameter_bytes}
        if space in sizes:
            return f"; the block has {sizes[space]} bytes of {space} memory"
        buffers = [buffer for buffer in self.launch.inputs.buffers if buffer.data.size]
        if not buffers:
            return ""

        def distance(buffer: Buffer) -> int:
            return max(buffer.address - address, address - (buffer.address + buffer.data.nbytes - 1), 0)

        buffer = min(buffers, key=distance)
        offset = address - buffer.address
        if abs(offset) >= 1 << 39:
            return ", near no buffer"
        where = f"{-offset} bytes before" if offset < 0 else f"byte {offset} of"
        return f", {where} {buffer.name}, which has {buffer.data.nbytes} bytes"
