"""The compiled loop: generate, run both sides, compare, count, keep the first mismatches; one call a chunk, on all devices."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, PartitionSpec

from tcemu.arithmetic.model import Model
from tcemu.fuzz.counter import Pair, case_keys, pair, plus
from tcemu.fuzz.counts import Coverage
from tcemu.fuzz.coverage import count
from tcemu.fuzz.generators import kind_of, operands
from tcemu.fuzz.kinds import Kind
from tcemu.fuzz.operands import Operands
from tcemu.fuzz.processes import in_several_processes
from tcemu.fuzz.sides import Side, as_codes
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import signature_of

KEPT = 16  # mismatches of a chunk and device whose numbers come back; all are counted
NEVER = 2**31 - 1  # the offset of no case
WORK = 1 << 20  # products that one device computes in one turn of the loop on a CPU: what fits its cache
AHEAD = {"cpu": 1, "gpu": 2048, "tpu": 64}  # times as many elsewhere, so that a turn is long beside the starts of its kernels
MOST_CASES = 1 << 20  # of a turn: some 2 GB of operands and results
LOOKED_AT = 16  # one of so many cases is looked at for the coverage, which would take as long as a side


class ChunkCounts(NamedTuple):
    """What a chunk of cases showed."""

    cases: int
    outputs: int
    wrong_cases: int
    wrong_outputs: int
    first: tuple[int, ...]  # numbers of the first cases that differ, ascending, at most KEPT of each device
    by_kind: np.ndarray  # int64 [kinds, 2]: cases, and those that differ
    coverage: Coverage


class Tally(NamedTuple):
    """The counts so far of one device, int32; a leading axis of devices once they come back."""

    wrong_cases: Array
    wrong_outputs: Array
    first: Array  # offsets of cases that differ: of a turn, one for each case; of several turns, the KEPT least; NEVER where there is none
    by_kind: Array  # [kinds, 2]: cases, and those that differ
    coverage: Coverage | None  # None: it is not counted


class Task(NamedTuple):
    """What is compared."""

    op: Instruction
    left: Side
    right: Side
    kinds: tuple[Kind, ...]
    model: Model | None  # whose steps the coverage looks at; None: it is not counted


class Cases(NamedTuple):
    """The cases of one turn. Arrays [cases]."""

    keys: Pair
    number: Pair
    offset: Array  # uint32: their places in the chunk
    counted: Array  # uint32 []: so many places of the chunk count, the first ones


class Chunks(NamedTuple):
    """compare(seed, first number, cases that count, turns) -> counts; a chunk has `per_turn * turns` cases, of at most `most` turns."""

    compare: Callable[[int, int, int, int], ChunkCounts]
    per_turn: int
    most: int


def differing(op: Instruction, left: Array, right: Array) -> Array:
    """int32 [cases]: outputs that are not the same word."""
    differ = left != right
    if signature_of(op).d.words == 2:
        differ = differ.any(-1)
    return jnp.sum(differ, axis=(-2, -1), dtype=jnp.int32)


def turn_size(op: Instruction, platform: str) -> int:
    """Cases in one turn of the loop on one device."""
    ahead = AHEAD.get(platform, 1)
    size = min(MOST_CASES, ahead * WORK // (op.m * op.n * op.k))
    return size // LOOKED_AT * LOOKED_AT or max(1, size)


@lru_cache(maxsize=64)
def chunks(op: Instruction, left: Side, right: Side, kinds: tuple[Kind, ...], model: Model | None, devices: tuple[Any, ...]) -> Chunks:
    """model: whose steps the coverage looks at; None: it is not counted. A chunk is cut evenly among the devices."""
    task, outputs = Task(op, left, right, kinds, model), op.m * op.n
    if left.traced and right.traced:
        size, sharing = turn_size(op, devices[0].platform), len(devices)
        call, most = _fused(task, size, devices), (2**31 - 1) // (size * outputs)
    else:
        size, sharing = min(turn_size(op, "cpu"), 64), 1
        call, most = _apart(task, size), 1

    def compare(seed: int, start: int, counted: int, turns: int) -> ChunkCounts:
        # NumPy's numbers, which every one of several processes may hand to a program of them all
        words_of_seed, words_of_start = jax.tree.map(np.asarray, (pair(seed), pair(start)))
        tally = jax.tree.map(np.asarray, call(words_of_seed, words_of_start, np.uint32(counted), np.int32(turns)))
        over_devices = lambda x: x.sum(0, dtype=np.int64)  # noqa: E731
        return ChunkCounts(
            cases=counted,
            outputs=counted * outputs,
            wrong_cases=int(over_devices(tally.wrong_cases)),
            wrong_outputs=int(over_devices(tally.wrong_outputs)),
            first=tuple(sorted(start + int(offset) for offset in tally.first.ravel() if offset < NEVER)),
            by_kind=over_devices(tally.by_kind),
            coverage=Coverage.none() if tally.coverage is None else jax.tree.map(over_devices, tally.coverage),
        )

    return Chunks(compare=compare, per_turn=size * sharing, most=max(1, most))


def _tally(task: Task, cases: Cases, given: Operands, x: Array, y: Array) -> Tally:
    """What one turn's results show: x of the left side, y of the right."""
    valid = cases.offset < cases.counted
    wrong = jnp.where(valid, differing(task.op, x, y), 0)
    return Tally(
        wrong_cases=(wrong > 0).sum(dtype=jnp.int32),
        wrong_outputs=wrong.sum(dtype=jnp.int32),
        first=jnp.where(wrong > 0, cases.offset.astype(jnp.int32), NEVER),
        by_kind=_by_kind(task, cases, valid, wrong > 0),
        coverage=None if task.model is None else _coverage(task.op, task.model, cases, given, x, valid),
    )


def _by_kind(task: Task, cases: Cases, valid: Array, wrong: Array) -> Array:
    """int32 [kinds, 2]: the valid cases of each kind, and those of them that are wrong."""
    kind = kind_of(cases.keys, task.kinds)
    of_kind = (kind[:, None] == jnp.arange(len(task.kinds))) & valid[:, None]
    return jnp.stack([of_kind.sum(0, dtype=jnp.int32), (of_kind & wrong[:, None]).sum(0, dtype=jnp.int32)], axis=-1)


def _coverage(op: Instruction, model: Model, cases: Cases, given: Operands, x: Array, valid: Array) -> Coverage:
    """Counted on one of LOOKED_AT cases."""
    every = slice(None, None, LOOKED_AT if len(cases.offset) % LOOKED_AT == 0 else 1)
    given, x, number, valid = jax.tree.map(lambda v: v[every], (given, x, cases.number, valid))
    return count(op, model, given, x, number, valid)


def _nothing(like: Tally) -> Tally:
    """The tally of no turn. like: has the shapes and dtypes of one turn's."""
    zeros = jax.tree.map(lambda v: jnp.zeros(v.shape, v.dtype), like)
    return zeros._replace(first=jnp.full(KEPT, NEVER, like.first.dtype))


def _joined(before: Tally, turn: Tally) -> Tally:
    """The tally with one more turn added. Of the cases that differ it keeps the KEPT least offsets.

    They are sorted only where the turn has one that is less than the last one kept. Few turns do.
    """
    merged = lambda: jnp.sort(jnp.concatenate([before.first, turn.first]))[:KEPT]  # noqa: E731
    first = lax.cond(turn.first.min() < before.first[-1], merged, lambda: before.first)
    return jax.tree.map(jnp.add, before._replace(first=first), turn._replace(first=0))


Call = Callable[[Any, Any, Any, Any], Tally]  # (seed, first number, cases that count, turns), [devices, ...] comes back


def _fused(task: Task, size: int, devices: tuple[Any, ...]) -> Call:
    """All in one compiled loop, on each device its share of the turns."""
    left, right = as_codes(task.op, task.left), as_codes(task.op, task.right)

    def turn(seed: Pair, start: Pair, counted: Array, offset: Array) -> Tally:
        # the barriers, as that of `operands`, keep a fusion from making all this again for each of its users
        number = plus(start, offset)
        keys = lax.optimization_barrier(case_keys(seed, number))
        given = operands(task.op, keys, task.kinds)
        x, y = lax.optimization_barrier((left(given), right(given)))
        return _tally(task, Cases(keys, number, offset, counted), given, x, y)

    def device(seed: Pair, start: Pair, counted: Array, turns: Array) -> Tally:
        first_turn = lax.axis_index("cases").astype(jnp.uint32) * turns.astype(jnp.uint32)  # the device's own
        offsets = lambda t: (first_turn + t.astype(jnp.uint32)) * np.uint32(size) + jnp.arange(size, dtype=jnp.uint32)  # noqa: E731
        shapes = jax.eval_shape(turn, seed, start, counted, offsets(jnp.int32(0)))
        total = lax.fori_loop(0, turns, lambda t, before: _joined(before, turn(seed, start, counted, offsets(t))), _nothing(shapes))
        # of several processes each must have the counts of all
        return jax.tree.map(lambda v: lax.all_gather(v, "cases") if several else v[None], total)

    several = in_several_processes(devices)
    whole, mesh = PartitionSpec(), Mesh(np.array(devices), ("cases",))
    outcome = whole if several else PartitionSpec("cases")
    return jax.jit(jax.shard_map(device, mesh=mesh, in_specs=(whole,) * 4, out_specs=outcome, check_vma=False))


def _apart(task: Task, size: int) -> Call:
    """The same with sides that are called from Python, between the compiled generation and the compiled comparison."""
    op = task.op

    def cases(seed: Pair, start: Pair, counted: Array) -> Cases:
        offset = jnp.arange(size, dtype=jnp.uint32)
        number = plus(start, offset)
        return Cases(case_keys(seed, number), number, offset, counted)

    @jax.jit
    def make(seed: Pair, start: Pair) -> Operands:
        return operands(op, cases(seed, start, jnp.uint32(size)).keys, task.kinds)

    @jax.jit
    def compare(seed: Pair, start: Pair, counted: Array, given: Operands, x: Array, y: Array) -> Tally:
        turn = _tally(task, cases(seed, start, counted), given, x, y)
        return jax.tree.map(lambda v: v[None], _joined(_nothing(turn), turn))

    def call(seed: Pair, start: Pair, counted: Array, turns: Array) -> Tally:
        given = make(seed, start)
        needed = jax.tree.map(lambda v: v[: int(counted)], given)  # nothing is asked for that does not count
        results = [result(op, side, needed) for side in (task.left, task.right)]
        filled = [jnp.zeros((size, *r.shape[1:]), r.dtype).at[: len(r)].set(r) for r in results]
        return compare(seed, start, counted, given, *filled)

    return call


def result(op: Instruction, side: Side, given: Operands) -> Array:
    """D's codes by one side; an error that says whose they are if it returns another shape or dtype."""
    handed: Any = given if side.traced or side.level == "registers" else jax.tree.map(np.asarray, given)
    codes = jnp.asarray(as_codes(op, side)(handed))
    d = signature_of(op).d
    wanted = (*given["c"].shape[:1], op.m, op.n, *((2,) if d.words == 2 else ()))
    if codes.shape != wanted or codes.dtype != d.dtype:
        raise ValueError(f"{side.name}: returned {codes.dtype}{list(codes.shape)} for {op}; wanted D's codes, {d.dtype}{list(wanted)}")
    return codes
