"""The compiled loop of a differential run: generate cases, run both implementations, compare, count, keep the first mismatches.

One call computes a chunk of cases on all devices, also on those of several JAX processes. Each process then computes its devices' share of
every chunk, all processes have all counts, and the first process owns the file.
"""

from collections.abc import Callable
from functools import lru_cache, partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec

from tcemu.base.compilation import call_kernel_by_platform, jit_wide_vectors
from tcemu.base.execution import PORTABLE, current_execution
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.arithmetic.small_products import MOST_OUTPUTS
from tcemu.engine.backends.cuda.xla_launch import PLATFORM
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.uses.fuzz.case_generator import OperandCodes, draw_case_kinds, draw_operands
from tcemu.uses.fuzz.case_kinds import Kind
from tcemu.uses.fuzz.coverage import Coverage, count_coverage
from tcemu.uses.fuzz.cuda_comparison import CudaComparison, find_cuda_comparison
from tcemu.uses.fuzz.implementations import Implementation, codes_function
from tcemu.uses.fuzz.llvm.kernel_calls import ComparisonCall, find_comparison_call
from tcemu.uses.fuzz.llvm.kernel_requests import CASES, WORD_BYTES, ComparisonLayout
from tcemu.uses.fuzz.random_words import WordPair, add_offset, case_keys, split_uint64

MAX_FIRST_CASES = 16  # mismatches per chunk and device whose numbers are returned; all are counted
NO_CASE = 2**31 - 1  # an offset that stands for no case
CPU_BATCH_PRODUCTS = 1 << 20  # products that one device computes per iteration on a CPU, as many as fit its cache
BATCH_FACTORS = {"cpu": 1, "gpu": 2048, "tpu": 64}  # factors on other platforms, so that an iteration is long beside its kernel launches
MAX_BATCH_CASES = 1 << 20  # cases per iteration, with about 2 GB of operands and results
COVERAGE_STRIDE = 16  # every 16th case is examined for coverage, which costs as much as an implementation


class ChunkCounts(NamedTuple):
    """Counts of a chunk of cases."""

    cases: int
    outputs: int
    wrong_cases: int
    wrong_outputs: int
    first: tuple[int, ...]  # numbers of the first cases that differ, ascending, at most MAX_FIRST_CASES per device
    by_kind: np.ndarray  # int64 [kinds, 2]: cases, and cases that differ
    coverage: Coverage


class Tally(NamedTuple):
    """Counts of one device so far, int32. Returned counts have a leading axis of devices."""

    wrong_cases: Array
    wrong_outputs: Array
    first: Array  # offsets of cases that differ, or NO_CASE: one per case of an iteration, the MAX_FIRST_CASES smallest of a sum
    by_kind: Array  # [kinds, 2]: cases, and cases that differ
    coverage: Coverage | None  # None: coverage is not counted


class ComparisonTask(NamedTuple):
    """The comparison of a loop: two implementations of an instruction and their operands."""

    op: MatrixMultiply
    left: Implementation
    right: Implementation
    kinds: tuple[Kind, ...]
    model: Model | None  # model whose steps coverage examines; None: coverage is not counted


class CaseBatch(NamedTuple):
    """The cases of one iteration. Arrays are [cases]."""

    keys: WordPair
    number: WordPair
    offset: Array  # uint32: offsets within the chunk
    counted: Array  # uint32 []: number of leading cases of the chunk that count


class ChunkRunner(NamedTuple):
    """A compiled comparison of chunks.

    `compare(seed, first number, cases that count, iterations)` returns counts. A chunk has `cases_per_iteration * iterations` cases
    and at most `max_iterations` iterations.
    """

    compare: Callable[[int, int, int, int], ChunkCounts]
    cases_per_iteration: int
    max_iterations: int


ChunkFunction = Callable[[Any, Any, Any, Any], Tally]  # (seed, first number, cases that count, iterations) -> [devices, ...]


def count_differing_outputs(op: MatrixMultiply, left: Array, right: Array) -> Array:
    """Count the outputs that are not the same word, int32 [cases]."""
    differ = left != right
    if product_spec(op).d.words == 2:
        differ = differ.any(-1)
    sum_outputs = lambda v: jnp.sum(v, axis=(-2, -1), dtype=jnp.int32)
    if op.m * op.n > MOST_OUTPUTS:
        return sum_outputs(differ)
    return lax.platform_dependent(differ, cpu=_add_outputs, default=sum_outputs)


def _add_outputs(differ: Array) -> Array:
    """Count by additions, since XLA:CPU reduces the cases one by one unless the reduced axis is the minor one."""
    for _ in range(2):
        differ = reduce(jnp.add, [differ[:, i].astype(jnp.int32) for i in range(differ.shape[1])])
    return differ


def batch_size(op: MatrixMultiply, platform: str) -> int:
    """Return the number of cases that one device computes per iteration."""
    ahead = BATCH_FACTORS.get(platform, 1)
    size = min(MAX_BATCH_CASES, ahead * CPU_BATCH_PRODUCTS // (op.m * op.n * op.k))
    return size // COVERAGE_STRIDE * COVERAGE_STRIDE or max(1, size)


@lru_cache(maxsize=64)
def make_chunk_runner(
    op: MatrixMultiply, left: Implementation, right: Implementation, kinds: tuple[Kind, ...], model: Model | None, devices: tuple[Any, ...]
) -> ChunkRunner:
    """Compile a comparison. A chunk is divided evenly among the devices.

    Args:
        op: The instruction.
        left: One implementation.
        right: The other implementation.
        kinds: Kinds of cases.
        model: Model whose steps coverage examines. None: coverage is not counted.
        devices: Devices that share the cases.

    Returns:
        The chunk runner. The same arguments give the same runner.
    """
    task, outputs = ComparisonTask(op, left, right, kinds, model), op.m * op.n
    if left.traceable and right.traceable:
        size, sharing = batch_size(op, devices[0].platform), len(devices)
        call, most = _compile_traceable(task, size, devices), (2**31 - 1) // (size * outputs)
    else:
        size, sharing = min(batch_size(op, "cpu"), 64), 1
        call, most = _compile_external(task, size), 1

    def compare(seed: int, start: int, counted: int, iterations: int) -> ChunkCounts:
        # NumPy numbers, since each of several processes may pass these to a program of all of them
        words_of_seed, words_of_start = jax.tree.map(np.asarray, (split_uint64(seed), split_uint64(start)))
        tally = jax.tree.map(np.asarray, call(words_of_seed, words_of_start, np.uint32(counted), np.int32(iterations)))

        def over_devices(x):
            return x.sum(0, dtype=np.int64)

        return ChunkCounts(
            cases=counted,
            outputs=counted * outputs,
            wrong_cases=int(over_devices(tally.wrong_cases)),
            wrong_outputs=int(over_devices(tally.wrong_outputs)),
            first=tuple(sorted(start + int(offset) for offset in tally.first.ravel() if offset < NO_CASE)),
            by_kind=over_devices(tally.by_kind),
            coverage=Coverage.empty() if tally.coverage is None else jax.tree.map(over_devices, tally.coverage),
        )

    return ChunkRunner(compare=compare, cases_per_iteration=size * sharing, max_iterations=max(1, most))


def _count_batch(task: ComparisonTask, cases: CaseBatch, wrong: Array, operands: OperandCodes, x: Array) -> Tally:
    """Count the results of one iteration.

    Args:
        task: The comparison.
        cases: The cases.
        wrong: int32 [cases], outputs that differ.
        operands: Operands of the examined cases, every n-th one.
        x: Left results of the examined cases.
    """
    valid = cases.offset < cases.counted
    wrong = jnp.where(valid, wrong, 0)
    coverage = None
    if task.model is not None:
        low, high, examined = (v[:: len(v) // len(x)] for v in (*cases.number, valid))
        coverage = count_coverage(task.op, task.model, operands, x, (low, high), examined)
    return Tally(
        wrong_cases=(wrong > 0).sum(dtype=jnp.int32),
        wrong_outputs=wrong.sum(dtype=jnp.int32),
        first=jnp.where(wrong > 0, cases.offset.astype(jnp.int32), NO_CASE),
        by_kind=_count_by_kind(task, cases, valid, wrong > 0),
        coverage=coverage,
    )


def _count_results(task: ComparisonTask, cases: CaseBatch, operands: OperandCodes, x: Array, y: Array) -> Tally:
    """Count the results of one iteration: `x` of the left implementation, `y` of the right one."""
    wrong = count_differing_outputs(task.op, x, y)
    return _count_batch(task, cases, wrong, *jax.tree.map(lambda v: v[:: _examined_step(len(v))], (operands, x)))


def _examined_step(cases: int) -> int:
    return COVERAGE_STRIDE if cases % COVERAGE_STRIDE == 0 else 1


def _count_by_kind(task: ComparisonTask, cases: CaseBatch, valid: Array, wrong: Array) -> Array:
    """Count the valid cases of each kind, and those of them that differ, int32 [kinds, 2]."""
    kind = draw_case_kinds(cases.keys, task.kinds)
    of_kind = (kind[:, None] == jnp.arange(len(task.kinds))) & valid[:, None]
    return jnp.stack([of_kind.sum(0, dtype=jnp.int32), (of_kind & wrong[:, None]).sum(0, dtype=jnp.int32)], axis=-1)


def _zero_tally(like: Tally) -> Tally:
    """Return the tally of no iteration, with the shapes and dtypes of one iteration's tally."""
    zeros = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), like)
    return zeros._replace(first=jnp.full(MAX_FIRST_CASES, NO_CASE, like.first.dtype))


def _add_tally(before: Tally, iteration: Tally) -> Tally:
    """Add one more iteration to a tally. Of the cases that differ it keeps the MAX_FIRST_CASES smallest offsets.

    Offsets are sorted only if the iteration has a smaller one than the last one kept, which is rare.
    """

    def merge():
        return jnp.sort(jnp.concatenate([before.first, iteration.first]))[:MAX_FIRST_CASES]

    first = lax.cond(iteration.first.min() < before.first[-1], merge, lambda: before.first)
    return jax.tree.map(jnp.add, before._replace(first=first), iteration._replace(first=0))


def _compile_traceable(task: ComparisonTask, size: int, devices: tuple[Any, ...]) -> ChunkFunction:
    """Compile everything into one loop, in which each device computes its share of the iterations."""
    left, right = codes_function(task.op, task.left), codes_function(task.op, task.right)
    kernels = _find_kernels(task, size, devices[0].platform)

    def compute(keys: WordPair) -> tuple[OperandCodes, Array, Array]:
        operands = draw_operands(task.op, keys, task.kinds)
        return operands, *lax.optimization_barrier((left(operands), right(operands)))

    def iterate(seed: WordPair, start: WordPair, counted: Array, offset: Array) -> Tally:
        # these barriers, like the one in `draw_operands`, keep a fusion from recomputing all this for each user
        number = add_offset(start, offset)
        keys = lax.optimization_barrier(case_keys(seed, number))
        cases = CaseBatch(keys, number, offset, counted)
        if not kernels:
            return _count_results(task, cases, *compute(keys))
        (layout,) = {call.layout for call in kernels.values()}
        by_operands = lambda keys: _pack_results(task, layout, *compute(keys))
        calls = {platform: partial(lambda call, keys: call(*keys), call) for platform, call in kernels.items()}
        words = call_kernel_by_platform(calls, by_operands, keys)
        return _count_batch(task, cases, *_unpack_results(layout, words))

    def device(seed: WordPair, start: WordPair, counted: Array, iterations: Array) -> Tally:
        first_iteration = lax.axis_index("cases").astype(jnp.uint32) * iterations.astype(jnp.uint32)

        def offsets(t):
            return (first_iteration + t.astype(jnp.uint32)) * np.uint32(size) + jnp.arange(size, dtype=jnp.uint32)

        shapes = jax.eval_shape(iterate, seed, start, counted, offsets(jnp.int32(0)))
        total = lax.fori_loop(
            0, iterations, lambda t, before: _add_tally(before, iterate(seed, start, counted, offsets(t))), _zero_tally(shapes)
        )
        # each of several processes needs the counts of all of them
        return jax.tree.map(lambda v: lax.all_gather(v, "cases") if several else v[None], total)

    several = spans_processes(devices)
    replicated, mesh = PartitionSpec(), Mesh(np.array(devices), ("cases",))
    outcome = replicated if several else PartitionSpec("cases")
    return jit_wide_vectors()(jax.shard_map(device, mesh=mesh, in_specs=(replicated,) * 4, out_specs=outcome, check_vma=False))


def _find_kernels(task: ComparisonTask, size: int, platform: str) -> dict[str, ComparisonCall | CudaComparison]:
    """Return the kernel that draws the cases of an iteration, computes both sides and compares them, by its platform, if there is one."""
    if current_execution() == PORTABLE or size % CASES:
        return {}
    find, own = {"cpu": (find_comparison_call, "cpu"), "gpu": (find_cuda_comparison, PLATFORM)}.get(platform, (None, ""))
    call = None if find is None else find(task.op, task.kinds, (task.left.emulated, task.right.emulated), task.model is not None)
    return {} if call is None else {own: call}


def _pack_results(task: ComparisonTask, layout: ComparisonLayout, operands: OperandCodes, x: Array, y: Array) -> Array:
    """Return what the kernel of a layout returns."""
    wrong = count_differing_outputs(task.op, x, y).astype(jnp.uint32).reshape(-1, CASES)
    copied = [{**operands, "d": x}[name][::CASES].reshape(len(wrong), -1) for name in layout.copied]
    per_word = [WORD_BYTES // v.dtype.itemsize for v in copied]
    words = [v if n == 1 else lax.bitcast_convert_type(v.reshape(len(v), -1, n), jnp.uint32) for v, n in zip(copied, per_word, strict=True)]
    return jnp.concatenate([wrong, *words], axis=1)


def _unpack_results(layout: ComparisonLayout, words: Array) -> tuple[Array, OperandCodes, Array]:
    """Return the numbers of outputs that differ, int32 [cases], and operands and left results of every CASES-th case."""
    wrong, copied, start = words[:, :CASES].astype(jnp.int32).reshape(-1), {}, CASES
    for name in layout.copied:
        stop = start + layout.bytes(name) // WORD_BYTES
        codes = lax.bitcast_convert_type(words[:, start:stop], layout.request.format(name).dtype)
        copied[name], start = codes.reshape(-1, *layout.request.shape(name)), stop
    d = copied.pop("d", words[:, :0])
    return wrong, copied, d


def _compile_external(task: ComparisonTask, size: int) -> ChunkFunction:
    """Compile generation and comparison apart, for implementations that are called from Python between the two."""
    op = task.op

    def cases(seed: WordPair, start: WordPair, counted: Array) -> CaseBatch:
        offset = jnp.arange(size, dtype=jnp.uint32)
        number = add_offset(start, offset)
        return CaseBatch(case_keys(seed, number), number, offset, counted)

    @jax.jit
    def make(seed: WordPair, start: WordPair) -> OperandCodes:
        return draw_operands(op, cases(seed, start, jnp.uint32(size)).keys, task.kinds)

    @jax.jit
    def compare(seed: WordPair, start: WordPair, counted: Array, operands: OperandCodes, x: Array, y: Array) -> Tally:
        tally = _count_results(task, cases(seed, start, counted), operands, x, y)
        return jax.tree.map(lambda v: v[None], _add_tally(_zero_tally(tally), tally))

    def call(seed: WordPair, start: WordPair, counted: Array, iterations: Array) -> Tally:
        operands = make(seed, start)
        needed = jax.tree.map(lambda v: v[: int(counted)], operands)  # cases that do not count are not computed
        results = [compute_result(op, side, needed) for side in (task.left, task.right)]
        filled = [jnp.zeros((size, *r.shape[1:]), r.dtype).at[: len(r)].set(r) for r in results]
        return compare(seed, start, counted, operands, *filled)

    return call


def compute_result(op: MatrixMultiply, implementation: Implementation, operands: OperandCodes) -> Array:
    """Compute D's codes by one implementation.

    Raises:
        ValueError: The implementation returned another shape or dtype.
    """
    arguments: Any = operands if implementation.traceable or implementation.level == "registers" else jax.tree.map(np.asarray, operands)
    codes = jnp.asarray(codes_function(op, implementation)(arguments))
    d = product_spec(op).d
    expected = (*operands["c"].shape[:1], op.m, op.n, *((2,) if d.words == 2 else ()))
    if codes.shape != expected or codes.dtype != d.dtype:
        raise ValueError(
            f"{implementation.name}: returned {codes.dtype}{list(codes.shape)} for {op}; expected D's codes, {d.dtype}{list(expected)}"
        )
    return codes


def spans_processes(devices: tuple[Any, ...]) -> bool:
    """Return whether some of the devices belong to another process."""
    return any(device.process_index != jax.process_index() for device in devices)


class Processes(NamedTuple):
    """The JAX processes that share a run. `several` is True if there are others than this one."""

    several: bool

    @property
    def is_first(self) -> bool:
        """Return whether this process reads and writes the file."""
        return not self.several or jax.process_index() == 0

    def agree(self, iterations: int, stop: int) -> tuple[int, int]:
        """Return the first process's iterations and the largest `stop` of all processes, so that the next chunk is the same everywhere."""
        if not self.several:
            return iterations, stop
        gathered = np.asarray(multihost_utils.process_allgather(np.array([iterations, stop], np.int32)))
        return int(gathered[0, 0]), int(gathered[:, 1].max())

    def broadcast_from_first(self, make: Callable[[], bytes]) -> bytes:
        """Return the bytes that the first process makes.

        A ValueError or OSError of the first process is raised in all processes, so that no process waits for the others.
        """
        content, error = b"", None
        if self.is_first:
            try:
                content = make()
            except (ValueError, OSError) as raised:
                error = raised
        if self.several:
            message = b"e" + str(error).encode() if error is not None else b"c" + content
            size = int(multihost_utils.broadcast_one_to_all(np.int32(len(message))))
            room = np.frombuffer(message if self.is_first else bytes(size), np.uint8)
            message = np.asarray(multihost_utils.broadcast_one_to_all(room)).astype(np.uint8).tobytes()
            content = message[1:]
            if message[:1] == b"e" and error is None:
                error = ValueError(content.decode())
        if error is not None:
            raise error
        return content
