"""`wmma`: matrices between memory and fragments, and the product of fragments, for any number of warps at once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from tcemu.arithmetic.model import Model
from tcemu.checking import forbid, refuse
from tcemu.isa.catalog import check
from tcemu.isa.instructions import LANES, Instruction
from tcemu.memory import Lines, as_integers, as_memory, read_at, read_lines, write_at, write_lines
from tcemu.operations.operands import modelled, multiply_add, of_family, pack_matrix, register_words, unpack_matrix
from tcemu.packing import pack_registers, unpack_registers

STORAGE = "PTX ISA 9.7.14.4.2"


def wmma_load(
    op: str | Instruction,
    memory: ArrayLike,
    *,
    offset: ArrayLike = 0,
    stride: ArrayLike | None = None,
    target: str = "sm_90",
    checked: bool = False,
) -> Array:
    """One `wmma.load` for each batch element: a matrix in memory -> the fragment that the warp holds of it.

    op: a spelling of wmma.load or an Instruction; target: the GPU whose fragments are wanted. Both are static under `jit`.
    memory: uint32[..., words], little-endian, whose word 0 is aligned for anything. offset: where the matrix begins; stride: from one row
    (".col": column) to the next, by default what PTX says. Both in elements: integers, or int32[...] with one for each batch element.
    Leading axes are batch axes and broadcast.
    Returns uint32[..., 32, n], lane, then register; copies of elements that some targets hold are written too.
    Raises Unsupported if PTX does not give `op` to `target`, TypeError or ValueError for another dtype or shape, and UndefinedBehaviour for
    an offset or stride that is misaligned or leads outside `memory`. Those that are traced are reported if `checked`; without it they
    load zeros. A stride below the default, also 0, is undefined in PTX (reported if `checked`); here the rows overlap.
    Source: PTX ISA 9.7.14.4.1-3; the fragments, which PTX leaves open, are rows of `tcemu.layouts`.
    """
    op = check(op, target)
    of_family(op, "wmma_load", "wmma.load")
    memory = as_memory("memory", memory)
    return _load(replace(op, space=None), _generation(target), memory, *_place(op, memory.shape[-1], offset, stride, checked))


def wmma_store(
    op: str | Instruction,
    memory: ArrayLike,
    fragment: ArrayLike,
    *,
    offset: ArrayLike = 0,
    stride: ArrayLike | None = None,
    target: str = "sm_90",
    checked: bool = False,
) -> Array:
    """One `wmma.store` for each batch element: the new memory, in which the matrix of the fragment stands.

    op: a spelling of wmma.store or an Instruction. fragment: uint32[..., 32, n]. The rest is as in `wmma_load`; a batch element has a
    memory of its own. Returns uint32[..., words]; what is not of the matrix keeps its bits.
    Raises as `wmma_load`. Traced offsets and strides that are misaligned or lead outside store nothing. If rows overlap because the stride
    is below the default (undefined in PTX, reported if `checked`), the last row (".col": column) stays.
    Source: PTX ISA 9.7.14.4.1, 9.7.14.4.2, 9.7.14.4.4.
    """
    op = check(op, target)
    of_family(op, "wmma_store", "wmma.store")
    memory = as_memory("memory", memory)
    registers = register_words(op, "r", fragment, "fragment")
    return _store(replace(op, space=None), _generation(target), memory, registers, *_place(op, memory.shape[-1], offset, stride, checked))


def wmma_mma(
    op: str | Instruction, a: ArrayLike, b: ArrayLike, c: ArrayLike, *, target: str, model: Model | None = None, checked: bool = False
) -> Array:
    """One `wmma.mma` for each batch element: D = A·B + C, fragments in, fragment out, bit for bit.

    op: a PTX spelling or an Instruction; target: the GPU to imitate. Both are static under `jit`.
    model: another arithmetic in place of the target's own; its fields may be traced (see `tcemu.Model`).
    a, b, c: uint32[..., 32, n], fragments of `target`. Leading axes are batch axes and broadcast. Where a fragment holds copies of an
    element, the first counts; `checked` reports copies that differ, since a fragment may only be changed uniformly.
    Returns uint32[..., 32, n]: the fragment of D. NaN words are the target's own.
    Raises Unsupported if PTX does not give `op` to `target`, NotModelled if nobody has evidence of its arithmetic there, TypeError or
    ValueError if registers have another dtype or shape.
    Source: PTX ISA 9.7.14.4.5; the arithmetic, with its evidence, is a row of `tcemu.models`.
    """
    applied = modelled(op, target, model, "wmma_mma", "wmma.mma")
    op, model = applied.op, applied.model
    sm = _generation(target)
    registers = {name: register_words(op, name, value) for name, value in (("a", a), ("b", b), ("c", c))}
    if checked:
        for name, held in registers.items():
            _same_copies(op, name, held, sm)
    if sm >= 75:  # the layouts in memory leave no trace in the fragments, so that one program does for all four
        op = replace(op, alayout="row", blayout="col")
    return _mma(op, sm, model, *registers.values())


def _generation(target: str) -> int:
    """The number of the oldest target whose fragments are those of `target`, so that later ones share its programs: see `wmma_fragment`."""
    number = int("".join(filter(str.isdigit, target)))
    return max(first for first in (70, 75, 80) if first <= number)


def _lines(op: Instruction) -> Lines:
    """The matrix of a load or store as lines of memory, rows if ".row"."""
    rows, columns = op.matrix("r")
    count, length = (rows, columns) if op.layout == "row" else (columns, rows)
    bits = getattr(op, op.operand or "").bits
    # lines are aligned as a fragment is long; f16 fragments with four copies are longer than their lines, whose default stride is good
    return Lines(count, length, bits, min(op.registers("r") * 32, length * bits) // bits)


def _place(
    op: Instruction, words: int, offset: ArrayLike, stride: ArrayLike | None, checked: bool
) -> tuple[int | None, Array, Array, Array | None]:
    """Where the lines lie, in words: the step if it is one known number, the start, the step, and where both are good (None: always)."""
    lines, least = _lines(op), op.default_stride
    from_, step = as_integers("offset", offset), as_integers("stride", least if stride is None else stride)
    for name, value in (("offset", from_), ("stride", step)):
        aligned = f"{op}: {name} {{value}} is no multiple of {lines.alignment} elements, the size of a lane's fragment. {STORAGE}"
        refuse(value % lines.alignment != 0, aligned, checked, value=value)
    room = f"{op}: {lines.count} lines of {lines.length} elements from offset {{offset}}, {{stride}} apart, are not in {words} words"
    # first what is known, as if what is traced were as good as it can be
    known = tuple(x if isinstance(x, np.ndarray) else np.zeros((), np.int64) for x in (from_, step))
    for at, by in (known, (from_, step)):
        refuse(lines.outside(at, by, words), f"{room}. {STORAGE}", checked, offset=at, stride=by)
    if checked:
        below = f"{op}: stride {{stride}} is below {least}, the length of a line, which PTX leaves open. {STORAGE}"
        forbid(step < least, below, stride=step)
    good = None
    if isinstance(from_, Tracer) or isinstance(step, Tracer):
        good = ~(lines.misaligned(from_, step) | lines.outside(from_, step, words))
        from_ = jnp.where(good, from_, 0)
        step = step if isinstance(step, np.ndarray) else jnp.where(good, step, 0)
    one = int(lines.words(step)) if isinstance(step, np.ndarray) and step.ndim == 0 else None
    return one, jnp.asarray(lines.words(from_), jnp.int32), jnp.asarray(lines.words(step), jnp.int32), good


def _same_copies(op: Instruction, name: str, registers: Array, sm: int) -> None:
    uniform = pack_matrix(op, name, unpack_matrix(op, name, registers, sm), sm)
    differ = f"{op}: {name} holds copies of one element that differ, in lane {{lane}}: fragments may be changed uniformly only"
    forbid(uniform != registers, f"{differ}. PTX ISA 9.7.14.4.1", lane=np.arange(LANES)[:, None])


@partial(jax.jit, static_argnames=("op", "sm", "step"))
def _load(op: Instruction, sm: int, memory: Array, step: int | None, start: Array, steps: Array, good: Array | None) -> Array:
    lines, fmt = _lines(op), getattr(op, op.operand or "")
    length = lines.words(lines.length)
    if step is not None and start.ndim == 0:
        found = read_lines(memory, start, step, lines.count, length)
        found = found if good is None else jnp.where(good, found, 0)
    else:
        found = read_at(memory, *_each(start, steps, good, lines.count), length=length)
    codes = unpack_registers(found, fmt)
    axis = codes.ndim - fmt.words
    return pack_matrix(op, op.operand or "", codes if op.layout == "row" else jnp.swapaxes(codes, axis - 1, axis), sm)


@partial(jax.jit, static_argnames=("op", "sm", "step"))
def _store(
    op: Instruction, sm: int, memory: Array, registers: Array, step: int | None, start: Array, steps: Array, good: Array | None
) -> Array:
    lines, fmt = _lines(op), getattr(op, op.operand or "")
    matrix = unpack_matrix(op, op.operand or "", registers, sm)
    axis = matrix.ndim - fmt.words
    runs = pack_registers(matrix if op.layout == "row" else jnp.swapaxes(matrix, axis - 1, axis), fmt)
    if step is None or start.ndim > 0:
        starts, good = _each(start, steps, good, lines.count)
        return write_at(memory, starts, runs, good)
    if good is not None:
        runs = jnp.where(good, runs, read_lines(memory, start, step, *runs.shape[-2:]))
    return write_lines(memory, start, step, runs)


def _each(start: Array, steps: Array, good: Array | None, count: int) -> tuple[Array, Array | None]:
    """Where each line starts, [..., count], and whether it is good."""
    starts = start[..., None] + steps[..., None] * jnp.arange(count)
    return starts, None if good is None else jnp.broadcast_to(good[..., None], starts.shape)


@partial(jax.jit, static_argnames=("op", "sm"))
def _mma(op: Instruction, sm: int, model: Model, a: Array, b: Array, c: Array) -> Array:
    matrices = (unpack_matrix(op, name, held, sm) for name, held in (("a", a), ("b", b), ("c", c)))
    return pack_matrix(op, "d", multiply_add(op, model, *matrices), sm)
