"""`wgmma.mma_async`, dense and sparse, and its fence, commit and wait.

A product is computed at once, when it is issued: one of the outcomes that the asynchronous protocol allows. Each warp takes its own rows of
D from a product of its warpgroup, so that warps which come one after the other get the same words.
Source: PTX ISA 9.7.15.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from tcemu.errors import Unsupported
from tcemu.isa.catalog import section
from tcemu.isa.instructions import LANES, Instruction
from tcemu.operations.selected import Metadata, metadata_fields, sparsity_selector
from tcemu.operations.wgmma import operand_addresses, wgmma
from tcemu.ptx.context import Context, Prepare, Step
from tcemu.ptx.faults import Message, OutOfBounds
from tcemu.ptx.module import Integer, Operand, Statement
from tcemu.ptx.tensor.statements import Bound, bind, fault, of_warpgroups, registers, split, undefined, warpgroups, whole_warps, write
from tcemu.shared_memory import outside, strays
from tcemu.sparsity import undefined as undefined_fields

if TYPE_CHECKING:
    from tcemu.ptx.machine import Machine

LEGAL = {"imm_scale_a": (1, -1), "imm_scale_b": (1, -1), "imm_trans_a": (0, 1), "imm_trans_b": (0, 1)}  # the first is the default


class Immediates(NamedTuple):
    """The constants of a wgmma, as `tcemu.wgmma` takes them."""

    imm_scale_a: int
    imm_scale_b: int
    imm_trans_a: int
    imm_trans_b: int


def prepare_wgmma(statement: Statement, context: Context) -> Step:
    """`wgmma.mma_async` by `tcemu.wgmma`; `wgmma.fence`, `wgmma.commit_group`, `wgmma.wait_group`."""
    bound = bind(statement, context)
    if bound.op.family not in ("wgmma", "wgmma.sp"):
        if bound.integer("n", 0) < 0:
            raise Unsupported(f"how many groups may stay pending is 0 or more. PTX ISA {section(bound.op)}")
        return Step(lambda machine: whole_warps(machine, bound), together=True)
    return _prepare_product(bound)


def _prepare_product(bound: Bound) -> Step:
    op = bound.op
    fixed = _immediates(bound)
    selector = bound.integer("sp_sel", 0)
    if op.sparse and selector not in op.selectors:
        raise Unsupported(f"sp_sel is {selector}; wanted one of {op.selectors}. PTX ISA {section(op)}")

    def run(machine: Machine) -> Machine:
        machine = whole_warps(machine, bound)
        words = {name: warpgroups(registers(machine, bound, name)) for name in ("d", "a") if name in bound.operands}
        for name in ("a_desc", "b_desc"):
            if name in bound.operands:
                value, machine = _uniform(machine, bound, name, "b64")
                words[name] = jnp.stack(split(value), axis=-1)
                machine = _inside(machine, bound, fixed, name, words[name])
        if op.sparse:
            words["sp_meta"] = warpgroups(machine.warps(machine.read(bound.operands["sp_meta"], "b32")))
            machine = _defined_metadata(machine, bound, words["sp_meta"], selector)
        if bound.operands["scale_d"] != Integer(1):
            words["scale_d"], machine = _uniform(machine, bound, "scale_d", "pred")
        words["shared"] = machine.shared[:, None]
        result = _wgmma(op, bound.target, fixed, selector, words)
        return write(machine, bound, "d", of_warpgroups(result, machine.warps(machine.active).shape[1]))

    return Step(run, together=True)


def _wgmma(op: Instruction, target: str, fixed: Immediates, selector: int, words: dict[str, Array]) -> Array:
    given: dict[str, Any] = dict(words)
    d, b_desc, shared = given.pop("d"), given.pop("b_desc"), given.pop("shared")
    sparse = {"sp_sel": selector} if op.sparse else {}
    return wgmma(op, d, b_desc, shared, target=target, **fixed._asdict(), **sparse, **given)


def _immediates(bound: Bound) -> Immediates:
    """The constants of the statement, or Unsupported for a value that they may not have."""
    values = {name: bound.integer(name, legal[0]) for name, legal in LEGAL.items()}
    for name, value in values.items():
        if value not in LEGAL[name]:
            raise Unsupported(f"{name} is {value}; wanted {LEGAL[name][0]} or {LEGAL[name][1]}. PTX ISA {section(bound.op)}")
    return Immediates(**values)


def _uniform(machine: Machine, bound: Bound, name: str, kind: str) -> tuple[Array, Machine]:
    """A value that is the same in a warpgroup, [blocks, warpgroups]: that of its first active thread. Checked: others differ at a fault."""
    operand: Operand = bound.operands[name]
    if kind == "pred" and isinstance(operand, Integer):
        value = jnp.full(machine.active.shape, operand.value != 0)
    else:
        value = machine.read(operand, kind)
    shape = machine.active.shape
    each, active = (warpgroups(machine.warps(x)).reshape(shape[0], -1, 4 * LANES) for x in (value, machine.active))
    first = jnp.take_along_axis(each, jnp.argmax(active, axis=-1)[..., None], axis=-1)
    if bound.checked:
        unlike = (active & (each != first)).reshape(shape[0], -1, 4, LANES)
        where = machine.threads(of_warpgroups(unlike, shape[1] // LANES))
        message = f"{name} must be the same in all threads of the warpgroup. PTX ISA {section(bound.op)}"
        machine = undefined(machine, where, message, bound.statement)
    return first[..., 0], machine


def _inside(machine: Machine, bound: Bound, fixed: Immediates, name: str, words: Array) -> Machine:
    """A fault where a descriptor leads beyond the block's shared memory, or, checked, has bits that belong to no field."""
    op, matrix = bound.op, name[0]
    major = "mn" if getattr(fixed, f"imm_trans_{matrix}") else "k"
    addresses = operand_addresses(op, matrix, major, words)
    beyond = outside(addresses, machine.shared.shape[-1]).any((-1, -2))
    at = jnp.max(addresses, axis=(-1, -2)).astype(jnp.uint64)
    message = f"{name} leads beyond the block's shared memory. PTX ISA 9.7.15.5.1.2"
    where = _of_threads(machine, beyond) & machine.active
    machine = fault(machine, where, Message(message, OutOfBounds, "shared"), bound.statement, _of_threads(machine, at))
    if not bound.checked:
        return machine
    stray = _of_threads(machine, strays(words)) & machine.active
    return undefined(machine, stray, f"{name} has bits that belong to no field. PTX ISA 9.7.15.5.1.2.2", bound.statement)


def _defined_metadata(machine: Machine, bound: Bound, metadata: Array, selector: int) -> Machine:
    """Checked mode: metadata that PTX does not define is a fault."""
    op = bound.op
    if not bound.checked:
        return machine
    fields = metadata_fields(op, Metadata(metadata, sparsity_selector(op, selector)))  # [blocks, warpgroups, 64, chunks]
    wrong = undefined_fields(fields, op.chunk, op.ordered).any(-1).reshape(*fields.shape[:2], 4, -1).any(-1)
    lanes = jnp.broadcast_to(wrong[..., None], metadata.shape)
    where = machine.threads(of_warpgroups(lanes, machine.active.shape[1] // LANES)) & machine.active
    return undefined(machine, where, "a field of the sparsity metadata is not defined. PTX ISA 9.7.15.6.1", bound.statement)


def _of_threads(machine: Machine, value: Array) -> Array:
    """[blocks, warpgroups] -> [blocks, threads]."""
    return jnp.repeat(value, 4 * LANES, axis=1)[:, : machine.active.shape[1]]


PREPARE: dict[str, Prepare] = {"wgmma": prepare_wgmma}
