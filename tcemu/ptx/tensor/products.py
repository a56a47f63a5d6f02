"""`mma`, `mma.sp` and `wmma.mma`: products of fragments that warps hold in registers. Source: PTX ISA 9.7.14."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.errors import Unsupported
from tcemu.isa.catalog import section
from tcemu.isa.instructions import Instruction
from tcemu.operations.mma import mma, mma_sp
from tcemu.operations.selected import Metadata, metadata_fields, sparsity_selector
from tcemu.operations.wmma import wmma_mma
from tcemu.ptx.context import Context, Prepare, Step
from tcemu.ptx.module import Integer, Operand, Statement, Vector
from tcemu.ptx.tensor.movement import prepare_wmma_memory
from tcemu.ptx.tensor.statements import Bound, bind, registers, undefined, whole_warps, write
from tcemu.sparsity import undefined as undefined_fields

if TYPE_CHECKING:
    from tcemu.ptx.machine import Machine

SCALES, SELECTORS = ("scale_a", "scale_b"), ("selector_a", "selector_b")


class Selectors(NamedTuple):
    """The selectors of an instruction that are constants. scales: (byte-id, thread-id) of A and of B."""

    sparsity: int = 0
    scales: tuple[tuple[int, int], ...] | None = None


def prepare_mma(statement: Statement, context: Context) -> Step:
    """`mma` and `mma.sp`: D = A·B + C by `tcemu.mma` and `tcemu.mma_sp`, one product for each warp."""
    bound = bind(statement, context)
    op = bound.op
    fixed = Selectors(bound.integer("f", 0), _constant_pairs(bound))
    if op.sparse and fixed.sparsity not in op.selectors:
        raise Unsupported(f"the sparsity selector is {fixed.sparsity}; wanted one of {op.selectors}. PTX ISA {section(op)}")

    def run(machine: Machine) -> Machine:
        machine = whole_warps(machine, bound)
        words = {name: registers(machine, bound, name) for name in ("a", "b", "c", "e", *SCALES) if name in bound.operands}
        if op.sparse and bound.checked:
            machine = _defined_metadata(machine, bound, words["e"][..., 0], fixed.sparsity)
        chosen = None if fixed.scales is not None or not op.block_scale else _read_pairs(machine, bound)
        return write(machine, bound, "d", _mma(op, bound.target, fixed, words, chosen))

    return Step(run, together=True)


def _mma(op: Instruction, target: str, fixed: Selectors, words: dict[str, Array], chosen: Array | None) -> Array:
    """D of every warp. chosen: int32[blocks, warps, 4], the selectors of the scales where registers hold them."""

    def product(words: dict[str, Array], pairs: Any) -> Array:
        scales: dict[str, Any] = {name: words[name][..., 0] for name in SCALES if name in words}
        if pairs is not None:
            scales |= {"selector_a": tuple(pairs[0]), "selector_b": tuple(pairs[1])}
        operands = words["a"], words["b"], words["c"]
        if op.sparse:
            return mma_sp(op, *operands, words["e"][..., 0], selector=fixed.sparsity, target=target, **scales)
        return mma(op, *operands, target=target, **scales)

    if chosen is None:
        return product(words, fixed.scales)
    each = jax.vmap(jax.vmap(lambda words, four: product(words, ((four[0], four[1]), (four[2], four[3])))))
    return each(words, chosen)


def _constant_pairs(bound: Bound) -> tuple[tuple[int, int], ...] | None:
    """The selectors of the scales if all are constants, or an error if they name what is not there; else None."""
    op, pairs = bound.op, [_pair(bound, name) for name in SELECTORS if name in bound.operands]
    if not pairs or not all(isinstance(number, Integer) for pair in pairs for number in pair):
        return None
    values = tuple((byte.value, thread.value) for byte, thread in pairs)  # pyright: ignore[reportAttributeAccessIssue]
    for name, (byte_id, thread_id), threads in zip(SELECTORS, values, (op.thread_ids_a, op.thread_ids_b), strict=True):
        if byte_id not in op.byte_ids or thread_id not in threads:
            raise Unsupported(
                f"{name} is {{{byte_id}, {thread_id}}}; byte-id may be {op.byte_ids}, thread-id {threads}. PTX ISA {section(op)}"
            )
    return values


def _pair(bound: Bound, name: str) -> tuple[Operand, ...]:
    operand = bound.operands[name]
    if not isinstance(operand, Vector) or len(operand.elements) != 2:
        raise Unsupported(f"{name} must be a pair {{byte-id, thread-id}}. PTX ISA {section(bound.op)}")
    return operand.elements


def _read_pairs(machine: Machine, bound: Bound) -> Array:
    """The selectors of the scales, of each warp's first lane: int32[blocks, warps, 4]."""
    numbers = [number for name in SELECTORS for number in _pair(bound, name)]
    return jnp.stack([machine.warps(machine.read(number, "u16"))[..., 0].astype(jnp.int32) for number in numbers], axis=-1)


def _defined_metadata(machine: Machine, bound: Bound, metadata: Array, selector: int) -> Machine:
    """Checked mode: metadata that PTX does not define is a fault."""
    op = bound.op
    fields = metadata_fields(op, Metadata(metadata, sparsity_selector(op, selector)))
    wrong = undefined_fields(fields, op.chunk, op.ordered).any((-1, -2))
    where = machine.threads(jnp.broadcast_to(wrong[..., None], metadata.shape)) & machine.active
    return undefined(machine, where, "a field of the sparsity metadata is not defined. PTX ISA 9.7.14.6.1", bound.statement)


# ---- wmma


def prepare_wmma(statement: Statement, context: Context) -> Step:
    """`wmma.mma`, `wmma.load` and `wmma.store`."""
    bound = bind(statement, context)
    return _prepare_wmma_mma(bound) if bound.op.family == "wmma.mma" else prepare_wmma_memory(bound)


def _prepare_wmma_mma(bound: Bound) -> Step:
    def run(machine: Machine) -> Machine:
        machine = whole_warps(machine, bound)
        a, b, c = (registers(machine, bound, name) for name in "abc")
        return write(machine, bound, "d", _wmma(bound.op, bound.target, a, b, c))

    return Step(run, together=True)


def _wmma(op: Instruction, target: str, a: Array, b: Array, c: Array) -> Array:
    return wmma_mma(op, a, b, c, target=target)


PREPARE: dict[str, Prepare] = {"mma": prepare_mma, "wmma": prepare_wmma}
