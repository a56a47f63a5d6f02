"""Tensor maps that a kernel writes: `tensormap.replace` and `tensormap.cp_fenceproxy` (PTX ISA 9.7.9.28, 9.7.13.17).

Triton fills an object of 128 bytes with zeros and then replaces every field, CUTLASS copies a map of the host and replaces addresses, sizes
and strides. An object of zeros therefore counts as a map of tcemu once a field is replaced.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.targets import TARGETS, resolve_target
from tcemu.kernels.ptx.instruction_interface import Context, Prepare, Step
from tcemu.kernels.ptx.simt import tensor_maps as maps
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.tensor.statement_forms import InstructionForm, constant_operand, match_form, note_undefined
from tcemu.kernels.ptx.text.module import Address, Integer, Operand, Statement

SECTION, COPY_SECTION = "PTX ISA 9.7.9.28", "PTX ISA 9.7.13.17"
WIDE_FIELDS = {"global_address": maps.ADDRESS_WORD, "global_stride": maps.STRIDE_WORDS}  # fields of 64 bits, by their first words
AXIS_FIELDS = {  # fields with one value for each dimension, by their first words
    "box_dim": maps.BOX_WORDS, "global_dim": maps.DIMENSION_WORDS, "element_stride": maps.ELEMENT_STRIDE_WORDS,
    "global_stride": maps.STRIDE_WORDS,
}  # fmt: skip
WORD_FIELDS = {"fill_mode": maps.FILL_WORD, "interleave_layout": maps.INTERLEAVE_WORD}  # fields with a word each
LIMITS = {  # greatest values of the fields that are constants
    "interleave_layout": 2, "swizzle_mode": 3, "swizzle_atomicity": 3, "fill_mode": 1,
}  # fmt: skip
REPLACE_FORM = InstructionForm("tensormap.replace", ("[] {type}", "[] # {type}"))
COPY_FORM = InstructionForm("tensormap.cp_fenceproxy", ("[] [] #",))


def prepare_tensor_map_edit(statement: Statement, context: Context) -> Step:
    """Prepare `tensormap.replace` or `tensormap.cp_fenceproxy`."""
    form, choices = match_form(statement, context, (REPLACE_FORM, COPY_FORM))
    target = resolve_target(context.target)
    if form is COPY_FORM:
        return _prepare_copy(statement)
    field = choices["field"] or ""
    operands = list(statement.operands)
    if len(operands) != 2 + (field in AXIS_FIELDS):
        raise Unsupported(f".{field} has {2 + (field in AXIS_FIELDS)} operands; got {len(operands)}. {SECTION}")
    axis = 0
    if field in AXIS_FIELDS:
        axis, most = constant_operand(operands.pop(1), "the dimension", SECTION), 3 if field == "global_stride" else 4
        if not 0 <= axis <= most:
            raise Unsupported(f"the dimension of .{field} is {axis}; expected 0 to {most}. {SECTION}")
    address, value = operands
    assert isinstance(address, Address)
    if field in LIMITS or field == "elemtype":
        _check_constant(field, value, target)
    space = {"shared::cta": "shared"}.get(choices["space"] or "", choices["space"] or "")
    return Step(lambda machine: _replace_field(machine, space, address, field, axis, value, context.checked))


def _check_constant(field: str, value: Operand, target: str) -> None:
    number = constant_operand(value, f"the value of .{field}", SECTION)
    most = TARGETS[target].map_types if field == "elemtype" else LIMITS[field]
    if not 0 <= number <= most:
        raise Unsupported(f"the value of .{field} is {number}; expected 0 to {most}. {SECTION}")


def _replace_field(machine: Machine, space: str, address: Address, field: str, axis: int, value: Operand, checked: bool) -> Machine:
    start = machine.address(address)
    (first,), machine = machine.load(space, start, "b32")
    if checked:
        message = f"the object is neither a tensor map nor zeros. {SECTION}"
        machine = note_undefined(machine, (first != 0) & (first != maps.MAGIC), message, start)
    machine = machine.store(space, start, "b32", (jnp.full(first.shape, maps.MAGIC, jnp.uint32),))
    at = lambda word: start + np.uint64(4 * word)
    if field in WIDE_FIELDS:
        number = machine.read(value, "b64")
        words = number.astype(jnp.uint32), (number >> np.uint64(32)).astype(jnp.uint32)
        return machine.store(space, at(WIDE_FIELDS[field] + 2 * axis), "b32", words, alignment=4)
    number = machine.read(value, "b32")
    if field in AXIS_FIELDS:
        return machine.store(space, at(AXIS_FIELDS[field] + axis), "b32", (number,))
    if field in WORD_FIELDS:
        return machine.store(space, at(WORD_FIELDS[field]), "b32", (number,))
    shift = np.uint32(maps.FIELD_SHIFTS[field])
    (old,), machine = machine.load(space, at(maps.KIND_WORD), "b32")
    number = number + np.uint32(field == "rank")  # the instruction counts ranks from 0
    fresh = old & ~(np.uint32(0xFF) << shift) | (number & np.uint32(0xFF)) << shift
    return machine.store(space, at(maps.KIND_WORD), "b32", (fresh,))


def _prepare_copy(statement: Statement) -> Step:
    """Prepare `tensormap.cp_fenceproxy`: the copy of a map from shared to global memory."""
    target, source, size = statement.operands
    if size != Integer(maps.MAP_BYTES) or not isinstance(target, Address) or not isinstance(source, Address):
        raise Unsupported(f"the operands are [dst], [src], {maps.MAP_BYTES}. {COPY_SECTION}")
    count = maps.MAP_BYTES // 4

    def execute(machine: Machine) -> Machine:
        words, machine = machine.load("shared", machine.address(source), "b32", count, maps.ALIGNMENT)
        return machine.store("global", machine.address(target), "b32", words, maps.ALIGNMENT)

    return Step(execute, collective=True)


PREPARE: dict[str, Prepare] = {"tensormap": prepare_tensor_map_edit}
