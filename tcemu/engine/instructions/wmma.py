"""`wmma`: matrices between memory and fragments, and the product of fragments, for any number of warps at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.base.checking import forbid, forbid_concrete
from tcemu.base.errors import Unsupported
from tcemu.base.meshes import shard_like
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.backends.dispatch import move_words
from tcemu.engine.backends.product_requests import StatementLaunch
from tcemu.engine.instructions.operand_checks import (
    check_registers,
    instruction_product,
    pack_matrix,
    resolve_model,
    resolve_mover,
    unpack_matrix,
)
from tcemu.engine.instructions.register_products import Family, compute_registers
from tcemu.engine.instructions.statement_operands import wmma_memory_launch
from tcemu.engine.isa.families import LANES, Instruction, MatrixMultiply, Record, WmmaMemory
from tcemu.engine.isa.operand_fragments import WMMA_SM
from tcemu.engine.isa.targets import TARGETS
from tcemu.engine.layouts.packing import pack_registers, unpack_registers
from tcemu.engine.layouts.strided_memory import StridedLines, as_integers, as_memory, read_runs, write_runs

STORAGE = "PTX ISA 9.7.14.4.2"


def wmma_load(
    op: str | Instruction,
    memory: ArrayLike,
    *,
    offset: ArrayLike = 0,
    stride: ArrayLike | None = None,
    target: str | None = None,
    checked: bool = False,
) -> Array:
    """Load one matrix from memory for each warp of a batch, as `wmma.load` does, and return its fragment.

    Args:
        op: PTX spelling of wmma.load or `Instruction`. Static under `jit`.
        memory: uint32[..., words], little-endian; word 0 is aligned for anything. Leading axes are batch axes; they broadcast.
        offset: Elements from the start of the memory to the matrix: an integer, or int32[...] with one for each warp.
        stride: Elements from one row (".col": column) to the next, likewise. None: the default of PTX.
        target: GPU whose fragments are returned, which must have `op`. None: the fragments of sm_80 and later. Static under `jit`.
        checked: Report traced offsets and strides that are misaligned or lead outside `memory`, and strides below the default. Without it
            the former load zeros. A stride below the default, also 0, is undefined in PTX; the rows then overlap.

    Returns:
        uint32[..., 32, n], lane, then register. Copies of elements that some targets hold are written too.

    Raises:
        Unsupported: PTX does not give `op` to `target`.
        TypeError: An operand has another dtype.
        ValueError: An operand has another shape.
        UndefinedBehaviour: A known offset or stride is misaligned or leads outside `memory`; with `checked`, a traced one too.

    Source: PTX ISA 9.7.14.4.1-3. PTX leaves the fragments open; they are rows of `tcemu.layouts`.
    """
    op, target = resolve_mover(op, target, "wmma_load", WmmaMemory, "wmma.load")
    return _move_lines(op, target, bind_wmma_memory(op, memory, offset=offset, stride=stride, checked=checked), offset, stride, _load)


def wmma_store(
    op: str | Instruction,
    memory: ArrayLike,
    fragment: ArrayLike,
    *,
    offset: ArrayLike = 0,
    stride: ArrayLike | None = None,
    target: str | None = None,
    checked: bool = False,
) -> Array:
    """Store the matrix of a fragment into memory for each warp of a batch, as `wmma.store` does, and return the new memory.

    If rows overlap because the stride is below the default, which is undefined in PTX, the last row (".col": column) stays.

    Args:
        op: PTX spelling of wmma.store or `Instruction`. Static under `jit`.
        memory: As in `wmma_load`. Each warp has a memory of its own.
        fragment: uint32[..., 32, n].
        offset: As in `wmma_load`.
        stride: As in `wmma_load`.
        target: As in `wmma_load`.
        checked: As in `wmma_load`. Without it, traced offsets and strides that are misaligned or lead outside store nothing.

    Returns:
        uint32[..., words]. Memory outside the matrix keeps its bits.

    Raises:
        As `wmma_load`.

    Source: PTX ISA 9.7.14.4.1, 9.7.14.4.2, 9.7.14.4.4.
    """
    op, target = resolve_mover(op, target, "wmma_store", WmmaMemory, "wmma.store")
    operands = bind_wmma_memory(op, memory, fragment, offset=offset, stride=stride, checked=checked)
    return _move_lines(op, target, operands, offset, stride, _store)


def _move_lines(op: WmmaMemory, target: str | None, operands: Any, offset: Any, stride: Any, emulate: Callable[..., Array]) -> Array:
    sm = _generation(target)
    launch = lambda: wmma_memory_launch(_require_current_fragments(op, sm), memory_lines(op), operands, offset, stride)
    return move_words(op, launch, lambda: emulate(replace(op, space=None), sm, operands))


def wmma_mma(
    op: str | Instruction, a: ArrayLike, b: ArrayLike, c: ArrayLike, *, target: str, model: Model | str | None = None, checked: bool = False
) -> Array:
    """Compute one `wmma.mma` for each warp of a batch: D = A·B + C, from fragments to a fragment, bit for bit.

    Args:
        op: PTX spelling, short name or `Instruction`. Static under `jit`.
        a: Fragment of `target`, uint32[..., 32, n]. Leading axes are batch axes; they broadcast. Where a fragment holds copies of an
            element, the first counts.
        b: As `a`.
        c: As `a`.
        target: GPU or target to emulate, as "H100" or "sm_90a". Static under `jit`.
        model: Another arithmetic in place of the target's own. Its fields may be traced (see `tcemu.Model`).
        checked: Report copies of one element that differ, which PTX does not allow.

    Returns:
        The fragment of D, uint32[..., 32, n]. NaN words are the target's own.

    Raises:
        Unsupported: PTX does not give `op` to `target`.
        NotModelled: There is no evidence of the target's arithmetic for `op`.
        TypeError: An operand has another dtype.
        ValueError: An operand has another shape.
        UndefinedBehaviour: With `checked`, copies of one element differ.

    Source: PTX ISA 9.7.14.4.5; the arithmetic is `tcemu.evidence(op, target)`.
    """
    applied = resolve_model(op, target, model, "wmma_mma", "wmma.mma")
    op, sm = applied.op, _generation(applied.target)
    operands = bind_wmma_mma(op, a, b, c)
    if checked:
        for name, registers in operands._asdict().items():
            _forbid_unlike_copies(op, name, registers, sm)

    def call(given: WmmaMmaOperands) -> Array:
        # from sm_75 on fragments do not depend on the layouts in memory, so that one compiled program serves all four layouts
        emulated = replace(applied.decoded_op, alayout="row", blayout="col") if sm >= 75 else None
        return compute_registers(applied, _family(sm), given, lambda: _mma_launch(op, sm, given), emulated)

    return shard_like(lambda given: given.a[..., :1] | given.b[..., :1] | given.c[..., :1], call, operands)


def _mma_launch(op: MatrixMultiply, sm: int, given: WmmaMmaOperands) -> StatementLaunch:
    _require_current_fragments(op, sm)
    return StatementLaunch(0, {}, given._asdict())


def _require_current_fragments(op: Record, sm: int) -> Record:
    """The instruction. Raises Unsupported for a generation whose fragments are not those of the GPUs that run it."""
    if sm != _generation(None):
        raise Unsupported(f"fragments of sm_{sm} hold elements elsewhere than those of sm_80 and later")
    return op


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LinePlacement:
    """The places of a matrix's lines in memory, in words."""

    start: Array  # word of the first line
    step: Array  # words from line to line
    good: Array | None  # bool: where both are legal; None: everywhere
    is_one_run: bool = field(metadata={"static": True})  # known before tracing: the lines of every warp are one run of words


class WmmaMemoryOperands(NamedTuple):
    memory: Array  # uint32[..., words]
    fragment: Any  # of a wmma.store, uint32[..., 32, n]
    place: LinePlacement


class WmmaMmaOperands(NamedTuple):
    """The operands of a wmma.mma, each uint32[..., 32, n]."""

    a: Array
    b: Array
    c: Array


def bind_wmma_memory(
    op: WmmaMemory,
    memory: ArrayLike,
    fragment: ArrayLike | None = None,
    *,
    offset: ArrayLike = 0,
    stride: ArrayLike | None = None,
    checked: bool = False,
) -> WmmaMemoryOperands:
    """The operands of a wmma.load or wmma.store, checked. Arguments and errors are those of `wmma_load` and `wmma_store`."""
    words = as_memory("memory", memory)
    registers = None if fragment is None else check_registers(op, "r", fragment, "fragment")
    return WmmaMemoryOperands(words, registers, _bind_place(op, words.shape[-1], offset, stride, checked))


def bind_wmma_mma(op: Instruction, a: ArrayLike, b: ArrayLike, c: ArrayLike) -> WmmaMmaOperands:
    """The operands of a wmma.mma, checked. Arguments and errors are those of `wmma_mma`."""
    return WmmaMmaOperands(a=check_registers(op, "a", a), b=check_registers(op, "b", b), c=check_registers(op, "c", c))


def memory_lines(op: WmmaMemory) -> StridedLines:
    """The matrix of a load or store as lines of memory: rows if ".row", else columns."""
    rows, columns = op.matrix_shape("r")
    count, length = (rows, columns) if op.layout == "row" else (columns, rows)
    bits = op.format.bits
    # A line is aligned to the size of a lane's fragment. An f16 fragment with four copies is longer than its line, and the default stride,
    # one line, is legal all the same
    return StridedLines(count, length, bits, min(op.register_count("r") * 32, length * bits) // bits)


def _generation(target: str | None) -> int:
    """The number of the oldest target whose fragments are those of `target`, so that later ones share its programs: see `wmma_fragment`."""
    number = WMMA_SM if target is None else TARGETS[target].number
    return max(first for first in (70, 75, 80) if first <= number)


def _bind_place(op: WmmaMemory, words: int, offset: ArrayLike, stride: ArrayLike | None, checked: bool) -> LinePlacement:
    """Return the places of the lines in a memory of `words` words, or raise."""
    lines, least = memory_lines(op), op.default_stride
    start, step = as_integers("offset", offset), as_integers("stride", least if stride is None else stride)
    for name, value in (("offset", start), ("stride", step)):
        misaligned = f"{op}: {name} {{value}} is no multiple of {lines.alignment} elements, the size of a lane's fragment. {STORAGE}"
        forbid_concrete(value % lines.alignment != 0, misaligned, checked, value=value)
    room = f"{op}: {lines.count} lines of {lines.length} elements from offset {{offset}}, {{stride}} apart, are not in {words} words"
    # If one of the two is known and the other is traced, the known one may be too large by itself: with 0, the best case, for the other
    best = [value if isinstance(value, np.ndarray) else np.zeros((), np.int64) for value in (start, step)]
    for first, apart in (best, (start, step)):
        forbid_concrete(lines.is_outside(first, apart, words), f"{room}. {STORAGE}", checked, offset=first, stride=apart)
    if checked:
        below = f"{op}: stride {{stride}} is below {least}, the length of a line, which PTX leaves open. {STORAGE}"
        forbid(step < least, below, stride=step)
    good = None
    if isinstance(start, Tracer) or isinstance(step, Tracer):
        good = ~(lines.is_misaligned(start, step) | lines.is_outside(start, step, words))
        start = jnp.where(good, start, 0)
        step = step if isinstance(step, np.ndarray) else jnp.where(good, step, 0)
    return LinePlacement(
        start=jnp.asarray(lines.words(start), jnp.int32),
        step=jnp.asarray(lines.words(step), jnp.int32),
        good=good,
        is_one_run=isinstance(step, np.ndarray) and step.shape == start.shape == () and step == lines.length,
    )


def _forbid_unlike_copies(op: Instruction, name: str, registers: Array, sm: int) -> None:
    """Checked mode: raises UndefinedBehaviour where a fragment's copies of one element differ."""
    uniform = pack_matrix(op, name, unpack_matrix(op, name, registers, sm), sm)
    differ = f"{op}: {name} holds copies of one element that differ, in lane {{lane}}: fragments may be changed uniformly only"
    forbid(uniform != registers, f"{differ}. PTX ISA 9.7.14.4.1", lane=np.arange(LANES)[:, None])


@partial(jax.jit, static_argnames=("op", "sm"))
def _load(op: WmmaMemory, sm: int, operands: WmmaMemoryOperands) -> Array:
    lines, fmt = memory_lines(op), op.format
    memory, place, length = operands.memory, operands.place, lines.words(lines.length)
    if place.is_one_run:
        runs = _read_whole(memory, place, lines.count, length)
        runs = runs if place.good is None else jnp.where(place.good, runs, 0)
    else:
        runs = read_runs(memory, *_line_starts(place, lines.count), length=length)
    codes = unpack_registers(runs, fmt)
    axis = codes.ndim - fmt.words
    return pack_matrix(op, op.operand, codes if op.layout == "row" else jnp.swapaxes(codes, axis - 1, axis), sm)


@partial(jax.jit, static_argnames=("op", "sm"))
def _store(op: WmmaMemory, sm: int, operands: WmmaMemoryOperands) -> Array:
    lines, fmt = memory_lines(op), op.format
    memory, place = operands.memory, operands.place
    matrix = unpack_matrix(op, op.operand, operands.fragment, sm)
    axis = matrix.ndim - fmt.words
    runs = pack_registers(matrix if op.layout == "row" else jnp.swapaxes(matrix, axis - 1, axis), fmt)
    if not place.is_one_run:
        starts, good = _line_starts(place, lines.count)
        return write_runs(memory, starts, runs, good)
    if place.good is not None:
        runs = jnp.where(place.good, runs, _read_whole(memory, place, *runs.shape[-2:]))
    batch = jnp.broadcast_shapes(memory.shape[:-1], runs.shape[:-2])
    words = jnp.broadcast_to(runs, (*batch, *runs.shape[-2:])).reshape(*batch, runs.shape[-2] * runs.shape[-1])
    return lax.dynamic_update_slice_in_dim(jnp.broadcast_to(memory, (*batch, memory.shape[-1])), words, place.start, axis=-1)


def _read_whole(memory: Array, place: LinePlacement, count: int, length: int) -> Array:
    return lax.dynamic_slice_in_dim(memory, place.start, count * length, axis=-1).reshape(*memory.shape[:-1], count, length)


def _line_starts(place: LinePlacement, count: int) -> tuple[Array, Array | None]:
    """Returns the start of each line, [..., count], and whether it is legal."""
    starts = place.start[..., None] + place.step[..., None] * jnp.arange(count)
    return starts, None if place.good is None else jnp.broadcast_to(place.good[..., None], starts.shape)


@cache
def _family(sm: int) -> Family:
    def by_matrices(op: MatrixMultiply, clamped: bool, model: Model, operands: WmmaMmaOperands) -> Array:
        a, b, c = (unpack_matrix(op, name, registers, sm) for name, registers in operands._asdict().items())
        return pack_matrix(op, "d", instruction_product(op, model, a, b, c), sm)

    return Family(by_matrices)
