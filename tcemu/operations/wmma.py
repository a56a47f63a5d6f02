"""`wmma`: matrices between memory and fragments, and the product of fragments, for any number of warps at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.arithmetic.model import Model
from tcemu.checking import forbid, refuse
from tcemu.errors import Unsupported
from tcemu.isa.instructions import LANES, Instruction
from tcemu.memory import Lines, as_integers, as_memory, read_at, read_lines, write_at, write_lines
from tcemu.meshes import with_axes_of
from tcemu.operations.fragments import WMMA_SM
from tcemu.operations.launches import computed, moved, of_wmma_memory, of_wmma_mma
from tcemu.operations.operands import instruction_product, modelled, moving, pack_matrix, register_words, unpack_matrix
from tcemu.packing import pack_registers, unpack_registers

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
    """One `wmma.load` for each batch element: a matrix in memory -> the fragment that the warp holds of it.

    op: a spelling of wmma.load or an Instruction. target: the GPU whose fragments are wanted, which must have `op`; None: fragments as
    sm_80 and later hold them. Both are static under `jit`.
    memory: uint32[..., words], little-endian, whose word 0 is aligned for anything. offset: where the matrix begins; stride: from one row
    (".col": column) to the next, by default what PTX says. Both in elements: integers, or int32[...] with one for each batch element.
    Leading axes are batch axes and broadcast.
    Returns uint32[..., 32, n], lane, then register; copies of elements that some targets hold are written too.
    Raises Unsupported if PTX does not give `op` to `target`, TypeError or ValueError for another dtype or shape, and UndefinedBehaviour for
    an offset or stride that is misaligned or leads outside `memory`. Those that are traced are reported if `checked`; without it they
    load zeros. A stride below the default, also 0, is undefined in PTX (reported if `checked`); here the rows overlap.
    Source: PTX ISA 9.7.14.4.1-3; the fragments, which PTX leaves open, are rows of `tcemu.layouts`.
    """
    op, target = moving(op, target, "wmma_load", "wmma.load")
    operands = bind_wmma_load(op, memory, offset=offset, stride=stride, checked=checked)
    sm, lines = _generation(target), memory_lines(op)
    launch = lambda: of_wmma_memory(_held_alike(op, sm), lines, operands, offset, stride)  # noqa: E731
    return moved(op, launch, lambda: _load(replace(op, space=None), sm, operands))


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
    """One `wmma.store` for each batch element: the new memory, in which the matrix of the fragment stands.

    op: a spelling of wmma.store or an Instruction. fragment: uint32[..., 32, n]. The rest is as in `wmma_load`; a batch element has a
    memory of its own. Returns uint32[..., words]; what is not of the matrix keeps its bits.
    Raises as `wmma_load`. Traced offsets and strides that are misaligned or lead outside store nothing. If rows overlap because the stride
    is below the default (undefined in PTX, reported if `checked`), the last row (".col": column) stays.
    Source: PTX ISA 9.7.14.4.1, 9.7.14.4.2, 9.7.14.4.4.
    """
    op, target = moving(op, target, "wmma_store", "wmma.store")
    operands = bind_wmma_store(op, memory, fragment, offset=offset, stride=stride, checked=checked)
    sm, lines = _generation(target), memory_lines(op)
    launch = lambda: of_wmma_memory(_held_alike(op, sm), lines, operands, offset, stride)  # noqa: E731
    return moved(op, launch, lambda: _store(replace(op, space=None), sm, operands))


def wmma_mma(
    op: str | Instruction, a: ArrayLike, b: ArrayLike, c: ArrayLike, *, target: str, model: Model | None = None, checked: bool = False
) -> Array:
    """One `wmma.mma` for each batch element: D = A·B + C, fragments in, fragment out, bit for bit.

    op: a PTX spelling or an Instruction; target: the GPU to imitate. Both are static under `jit`.
    model: another arithmetic in place of the target's own; its fields may be traced (see `tcemu.Model`).
    a, b, c: uint32[..., 32, n], fragments of `target`. Leading axes are batch axes and broadcast. Where a fragment holds copies of an
    element, the first counts. PTX wants them equal: `checked` reports copies that differ.
    Returns uint32[..., 32, n]: the fragment of D. NaN words are the target's own.
    Raises Unsupported if PTX does not give `op` to `target`, NotModelled if nobody has evidence of its arithmetic there, TypeError or
    ValueError if registers have another dtype or shape.
    Source: PTX ISA 9.7.14.4.5; for the arithmetic `tcemu.evidence`, and `tcemu.model` gives it.
    """
    applied = modelled(op, target, model, "wmma_mma", "wmma.mma")
    op, model = applied.op, applied.model
    sm = _generation(applied.target)
    operands = bind_wmma_mma(op, a, b, c)
    if checked:
        for name, registers in operands._asdict().items():
            _forbid_unlike_copies(op, name, registers, sm)
    # from sm_75 on fragments do not depend on the layouts in memory, so that one compiled program does for all four
    program = replace(op, alayout="row", blayout="col") if sm >= 75 else op

    def call(given: WmmaMmaOperands) -> Array:
        return computed(op, applied, lambda: of_wmma_mma(_held_alike(op, sm), given), lambda: _mma(program, sm, model, given))

    return with_axes_of(lambda given: given.a[..., :1] | given.b[..., :1] | given.c[..., :1], call, operands)


def _held_alike(op: Instruction, sm: int) -> Instruction:
    """The instruction. Raises Unsupported for a generation whose fragments are not those of the GPUs that run it."""
    if sm != _generation(None):
        raise Unsupported(f"fragments of sm_{sm} hold elements elsewhere than those of sm_80 and later")
    return op


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Place:
    """Where the lines of a matrix lie in memory, in words."""

    start: Array  # of the first line
    step: Array  # from line to line
    good: Array | None  # bool: where both are legal; None: everywhere
    known_step: int | None = field(metadata={"static": True})  # the step, if it is one number and known before tracing


class WmmaLoadOperands(NamedTuple):
    """The operands of a wmma.load. memory: uint32[..., words]."""

    memory: Array
    place: Place


class WmmaStoreOperands(NamedTuple):
    """The operands of a wmma.store. memory: uint32[..., words]; fragment: uint32[..., 32, n]."""

    memory: Array
    fragment: Array
    place: Place


class WmmaMmaOperands(NamedTuple):
    """The operands of a wmma.mma, each uint32[..., 32, n]."""

    a: Array
    b: Array
    c: Array


def bind_wmma_load(
    op: Instruction, memory: ArrayLike, *, offset: ArrayLike = 0, stride: ArrayLike | None = None, checked: bool = False
) -> WmmaLoadOperands:
    """The operands of a wmma.load, checked. Arguments and errors are those of `wmma_load`."""
    words = as_memory("memory", memory)
    return WmmaLoadOperands(memory=words, place=_bind_place(op, words.shape[-1], offset, stride, checked))


def bind_wmma_store(
    op: Instruction,
    memory: ArrayLike,
    fragment: ArrayLike,
    *,
    offset: ArrayLike = 0,
    stride: ArrayLike | None = None,
    checked: bool = False,
) -> WmmaStoreOperands:
    """The operands of a wmma.store, checked. Arguments and errors are those of `wmma_store`."""
    words = as_memory("memory", memory)
    registers = register_words(op, "r", fragment, "fragment")
    return WmmaStoreOperands(memory=words, fragment=registers, place=_bind_place(op, words.shape[-1], offset, stride, checked))


def bind_wmma_mma(op: Instruction, a: ArrayLike, b: ArrayLike, c: ArrayLike) -> WmmaMmaOperands:
    """The operands of a wmma.mma, checked. Arguments and errors are those of `wmma_mma`."""
    return WmmaMmaOperands(a=register_words(op, "a", a), b=register_words(op, "b", b), c=register_words(op, "c", c))


def memory_lines(op: Instruction) -> Lines:
    """The matrix of a load or store as lines of memory: rows if ".row", else columns."""
    rows, columns = op.matrix("r")
    count, length = (rows, columns) if op.layout == "row" else (columns, rows)
    bits = getattr(op, op.operand or "").bits
    # A line is aligned to the size of a lane's fragment. An f16 fragment with four copies is longer than its line, and the default stride,
    # one line, is legal all the same
    return Lines(count, length, bits, min(op.registers("r") * 32, length * bits) // bits)


def _generation(target: str | None) -> int:
    """The number of the oldest target whose fragments are those of `target`, so that later ones share its programs: see `wmma_fragment`."""
    number = WMMA_SM if target is None else int("".join(filter(str.isdigit, target)))
    return max(first for first in (70, 75, 80) if first <= number)


def _bind_place(op: Instruction, words: int, offset: ArrayLike, stride: ArrayLike | None, checked: bool) -> Place:
    """Where the lines lie in a memory of so many words, or an error."""
    lines, least = memory_lines(op), op.default_stride
    start, step = as_integers("offset", offset), as_integers("stride", least if stride is None else stride)
    for name, value in (("offset", start), ("stride", step)):
        misaligned = f"{op}: {name} {{value}} is no multiple of {lines.alignment} elements, the size of a lane's fragment. {STORAGE}"
        refuse(value % lines.alignment != 0, misaligned, checked, value=value)
    room = f"{op}: {lines.count} lines of {lines.length} elements from offset {{offset}}, {{stride}} apart, are not in {words} words"
    # If one of the two is known and the other is traced, the known one may be too large by itself: with 0, the best case, for the other
    best = [value if isinstance(value, np.ndarray) else np.zeros((), np.int64) for value in (start, step)]
    for first, apart in (best, (start, step)):
        refuse(lines.outside(first, apart, words), f"{room}. {STORAGE}", checked, offset=first, stride=apart)
    if checked:
        below = f"{op}: stride {{stride}} is below {least}, the length of a line, which PTX leaves open. {STORAGE}"
        forbid(step < least, below, stride=step)
    good = None
    if isinstance(start, Tracer) or isinstance(step, Tracer):
        good = ~(lines.misaligned(start, step) | lines.outside(start, step, words))
        start = jnp.where(good, start, 0)
        step = step if isinstance(step, np.ndarray) else jnp.where(good, step, 0)
    return Place(
        start=jnp.asarray(lines.words(start), jnp.int32),
        step=jnp.asarray(lines.words(step), jnp.int32),
        good=good,
        known_step=int(lines.words(step)) if isinstance(step, np.ndarray) and step.ndim == 0 else None,
    )


def _forbid_unlike_copies(op: Instruction, name: str, registers: Array, sm: int) -> None:
    """Checked mode: raises UndefinedBehaviour where a fragment's copies of one element differ."""
    uniform = pack_matrix(op, name, unpack_matrix(op, name, registers, sm), sm)
    differ = f"{op}: {name} holds copies of one element that differ, in lane {{lane}}: fragments may be changed uniformly only"
    forbid(uniform != registers, f"{differ}. PTX ISA 9.7.14.4.1", lane=np.arange(LANES)[:, None])


@partial(jax.jit, static_argnames=("op", "sm"))
def _load(op: Instruction, sm: int, operands: WmmaLoadOperands) -> Array:
    lines, fmt = memory_lines(op), getattr(op, op.operand or "")
    memory, place, length = operands.memory, operands.place, lines.words(lines.length)
    if place.known_step is not None and place.start.ndim == 0:
        runs = read_lines(memory, place.start, place.known_step, lines.count, length)
        runs = runs if place.good is None else jnp.where(place.good, runs, 0)
    else:
        runs = read_at(memory, *_line_starts(place, lines.count), length=length)
    codes = unpack_registers(runs, fmt)
    axis = codes.ndim - fmt.words
    return pack_matrix(op, op.operand or "", codes if op.layout == "row" else jnp.swapaxes(codes, axis - 1, axis), sm)


@partial(jax.jit, static_argnames=("op", "sm"))
def _store(op: Instruction, sm: int, operands: WmmaStoreOperands) -> Array:
    lines, fmt = memory_lines(op), getattr(op, op.operand or "")
    memory, place = operands.memory, operands.place
    matrix = unpack_matrix(op, op.operand or "", operands.fragment, sm)
    axis = matrix.ndim - fmt.words
    runs = pack_registers(matrix if op.layout == "row" else jnp.swapaxes(matrix, axis - 1, axis), fmt)
    if place.known_step is None or place.start.ndim > 0:
        starts, good = _line_starts(place, lines.count)
        return write_at(memory, starts, runs, good)
    if place.good is not None:
        runs = jnp.where(place.good, runs, read_lines(memory, place.start, place.known_step, *runs.shape[-2:]))
    return write_lines(memory, place.start, place.known_step, runs)


def _line_starts(place: Place, count: int) -> tuple[Array, Array | None]:
    """Where each line starts, [..., count], and whether it is good."""
    starts = place.start[..., None] + place.step[..., None] * jnp.arange(count)
    return starts, None if place.good is None else jnp.broadcast_to(place.good[..., None], starts.shape)


@partial(jax.jit, static_argnames=("op", "sm"))
def _mma(op: Instruction, sm: int, model: Model, operands: WmmaMmaOperands) -> Array:
    a, b, c = (unpack_matrix(op, name, registers, sm) for name, registers in operands._asdict().items())
    return pack_matrix(op, "d", instruction_product(op, model, a, b, c), sm)
