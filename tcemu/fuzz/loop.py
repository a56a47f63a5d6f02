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
from tcemu.fuzz.coverage import Coverage, count
from tcemu.fuzz.generators import kind_of, operands
from tcemu.fuzz.kinds import Kind
from tcemu.fuzz.sides import Side, as_codes
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import signature_of

KEPT = 16  # mismatches of a chunk and device whose numbers come back; all are counted
NEVER = 2**31 - 1  # the offset of no case
WORK = 1 << 20  # products that one device computes in one turn of the loop on a CPU: what fits its cache
AHEAD = {"cpu": 1, "gpu": 256, "tpu": 64}  # times as many elsewhere, so that a turn is long beside the starts of its kernels
LOOKED_AT = 16  # one of so many cases is looked at for the coverage, which would take as long as a side


class Found(NamedTuple):
    """What a chunk of cases showed."""

    cases: int
    outputs: int
    wrong_cases: int
    wrong_outputs: int
    first: tuple[int, ...]  # numbers of the first cases that differ, ascending, at most KEPT of each device
    by_kind: np.ndarray  # int64 [kinds, 2]: cases, and those that differ
    coverage: Coverage


def differing(op: Instruction, left: Array, right: Array) -> Array:
    """int32 [cases]: outputs that are not the same word."""
    differ = left != right
    if signature_of(op).d.words == 2:
        differ = differ.any(-1)
    return jnp.sum(differ, axis=(-2, -1), dtype=jnp.int32)


def turn_size(op: Instruction, platform: str) -> int:
    """Cases in one turn of the loop on one device."""
    ahead = AHEAD.get(platform, 1)
    size = min(4096 * ahead, ahead * WORK // (op.m * op.n * op.k))
    return size // LOOKED_AT * LOOKED_AT or max(1, size)


class Chunks(NamedTuple):
    """run(seed, first number, cases that count, turns) -> Found; a chunk has `per_turn * turns` cases, of at most `most` turns."""

    run: Callable[[int, int, int, int], Found]
    per_turn: int
    most: int


@lru_cache(maxsize=64)
def chunks(op: Instruction, left: Side, right: Side, kinds: tuple[Kind, ...], model: Model | None, devices: tuple[Any, ...]) -> Chunks:
    """model: whose steps the coverage looks at; None: it is not counted. A chunk is cut evenly among the devices."""
    traced = left.traced and right.traced
    outputs = op.m * op.n
    if traced:
        size, count = turn_size(op, devices[0].platform), len(devices)
        call, most = _fused(op, left, right, kinds, model, size, devices), (2**31 - 1) // (size * outputs)
    else:
        size, count = min(turn_size(op, "cpu"), 64), 1
        call, most = _apart(op, left, right, kinds, model, size), 1

    def run(seed: int, start: int, counted: int, turns: int) -> Found:
        given = pair(seed), pair(start), jnp.uint32(counted), jnp.int32(turns)
        wrong_cases, wrong_outputs, first, *counts = jax.tree.map(np.asarray, call(*given))
        numbers = sorted(start + int(offset) for offset in first.ravel() if offset < NEVER)
        by_kind, *seen = (x.sum(0, dtype=np.int64) for x in counts)  # over devices
        covered = Coverage(*seen) if model is not None else Coverage.none()
        return Found(
            counted, counted * outputs, int(wrong_cases.sum(dtype=np.int64)), int(wrong_outputs.sum(dtype=np.int64)), tuple(numbers),
            by_kind, covered,
        )  # fmt: skip

    return Chunks(run, size * count, max(1, most))


Tally = tuple[Array, ...]  # cases that differ, outputs that do, the former's offsets, by kind, and the fields of Coverage


def _tally(
    op: Instruction, kinds: tuple[Kind, ...], model: Model | None, given: Any, x: Array, y: Array, keys: Pair, number: Pair, offset: Array,
    counted: Array,
) -> Tally:  # fmt: skip
    """What one turn's results show. offset: uint32[cases], the cases' places in the chunk, of which the first `counted` count."""
    valid = offset < counted
    wrong = jnp.where(valid, differing(op, x, y), 0)
    kind = kind_of(keys, kinds)
    of_kind = (kind[:, None] == jnp.arange(len(kinds))) & valid[:, None]
    by_kind = jnp.stack([of_kind.sum(0, dtype=jnp.int32), (of_kind & (wrong > 0)[:, None]).sum(0, dtype=jnp.int32)], axis=-1)
    at = jnp.where(wrong > 0, offset.astype(jnp.int32), NEVER)
    seen: tuple[Array, ...] = ()
    if model is not None:
        every = slice(None, None, LOOKED_AT if len(offset) % LOOKED_AT == 0 else 1)
        given, x, number, looked_at = jax.tree.map(lambda v: v[every], (given, x, number, valid))
        seen = count(op, model, given, x, number, looked_at)
    return (wrong > 0).sum(dtype=jnp.int32), wrong.sum(dtype=jnp.int32), at, by_kind, *seen


def _nothing(like: Any) -> Tally:
    """The tally of no turn. like: has the shapes and dtypes of one."""
    return tuple(jnp.full(KEPT, NEVER, v.dtype) if i == 2 else jnp.zeros(v.shape, v.dtype) for i, v in enumerate(like))


def _joined(x: Tally, y: Tally) -> Tally:
    """What was found before, and one more turn, of all whose offsets the least stay: few turns have such, so few sort."""
    first = lax.cond(y[2].min() < x[2][-1], lambda: jnp.sort(jnp.concatenate([x[2], y[2]]))[:KEPT], lambda: x[2])
    return tuple(first if i == 2 else one + other for i, (one, other) in enumerate(zip(x, y, strict=True)))


def _fused(
    op: Instruction, left: Side, right: Side, kinds: tuple[Kind, ...], model: Model | None, size: int, devices: tuple[Any, ...]
) -> Callable:
    one, other = as_codes(op, left), as_codes(op, right)

    def turn(seed: Pair, start: Pair, counted: Array, offset: Array) -> Tally:
        number = plus(start, offset)
        # the barriers, as that of `operands`, keep a fusion from making all this again for each of its users
        keys = lax.optimization_barrier(case_keys(seed, number))
        given = operands(op, keys, kinds)
        x, y = lax.optimization_barrier((one(given), other(given)))
        return _tally(op, kinds, model, given, x, y, keys, number, offset, counted)

    def device(seed: Pair, start: Pair, counted: Array, turns: Array) -> Tally:
        own = lax.axis_index("cases").astype(jnp.uint32) * turns.astype(jnp.uint32)  # the device's first turn
        offsets = lambda t: (own + t.astype(jnp.uint32)) * np.uint32(size) + jnp.arange(size, dtype=jnp.uint32)  # noqa: E731
        shapes = jax.eval_shape(turn, seed, start, counted, offsets(jnp.int32(0)))
        found = lax.fori_loop(0, turns, lambda t, total: _joined(total, turn(seed, start, counted, offsets(t))), _nothing(shapes))
        return jax.tree.map(lambda v: v[None], found)

    whole, mesh = PartitionSpec(), Mesh(np.array(devices), ("cases",))
    return jax.jit(jax.shard_map(device, mesh=mesh, in_specs=(whole,) * 4, out_specs=PartitionSpec("cases"), check_vma=False))


def _apart(op: Instruction, left: Side, right: Side, kinds: tuple[Kind, ...], model: Model | None, size: int) -> Callable:
    """The same with sides that are called from Python, between the compiled generation and the compiled comparison."""

    @jax.jit
    def make(seed: Pair, start: Pair) -> dict[str, Array]:
        return operands(op, case_keys(seed, plus(start, jnp.arange(size, dtype=jnp.uint32))), kinds)

    @jax.jit
    def compare(seed: Pair, start: Pair, counted: Array, given: dict[str, Array], x: Array, y: Array) -> Tally:
        offset = jnp.arange(size, dtype=jnp.uint32)
        number = plus(start, offset)
        found = _tally(op, kinds, model, given, x, y, case_keys(seed, number), number, offset, counted)
        return jax.tree.map(lambda v: v[None], _joined(_nothing(found), found))

    def call(seed: Pair, start: Pair, counted: Array, turns: Array) -> Tally:
        given = make(seed, start)
        needed = jax.tree.map(lambda v: v[: int(counted)], given)  # nothing is asked for that does not count
        results = [result(op, side, needed) for side in (left, right)]
        filled = [jnp.zeros((size, *r.shape[1:]), r.dtype).at[: len(r)].set(r) for r in results]
        return compare(seed, start, counted, given, *filled)

    return call


def result(op: Instruction, side: Side, given: dict[str, Array]) -> Array:
    """D's codes by one side; an error that says whose they are if it returns another shape or dtype."""
    handed = given if side.traced or side.level == "registers" else jax.tree.map(np.asarray, given)
    found = jnp.asarray(as_codes(op, side)(handed))
    d = signature_of(op).d
    wanted = (*given["c"].shape[:1], op.m, op.n, *((2,) if d.words == 2 else ()))
    if found.shape != wanted or found.dtype != d.dtype:
        raise ValueError(f"{side.name}: returned {found.dtype}{list(found.shape)} for {op}; wanted D's codes, {d.dtype}{list(wanted)}")
    return found
