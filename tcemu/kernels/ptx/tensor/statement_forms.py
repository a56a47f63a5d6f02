"""Statements of tensor-core and asynchronous instructions: their forms, their operands by name, and the registers of whole warps.

A tensor-core statement is bound to an `Instruction` of `tcemu.isa`. The qualifiers of asynchronous instructions and mbarriers, and the
targets that have them, are in `tcemu.engine.isa.statement_table`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array

from tcemu.base.errors import UndefinedBehaviour, Unsupported
from tcemu.engine.isa.families import LANES, Instruction, Mover
from tcemu.engine.isa.grammar import operand_problem
from tcemu.engine.isa.legality import check, manual_section
from tcemu.engine.isa.statement_table import Choices, describe_forms, find_forms, rows_by_name, statement_rows
from tcemu.engine.isa.tcgen05 import Tcgen05Mma
from tcemu.kernels.ptx.instruction_interface import Context
from tcemu.kernels.ptx.operand_classes import check_operand_lists, check_operands, parse_classes
from tcemu.kernels.ptx.simt.device_memory import join_words, split_words
from tcemu.kernels.ptx.simt.faults import Message, register_messages
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.text.module import Address, Integer, Operand, Statement, Vector

Record = TypeVar("Record", bound=Instruction, covariant=True)


class BoundStatement(NamedTuple, Generic[Record]):
    """A statement with its instruction, and its operands by the manual's names, as in `Instruction.operand_forms`."""

    op: Record
    operands: dict[str, Operand]
    statement: Statement
    target: str
    checked: bool

    def integer(self, name: str, default: int) -> int:
        """Return an operand that must be a constant, or the default if the form has no such operand. Raises Unsupported for a register."""
        operand = self.operands.get(name, Integer(default))
        if not isinstance(operand, Integer):
            raise Unsupported(f"{self.op}: {name} must be an integer constant. PTX ISA {manual_section(self.op)}")
        return operand.value


def bind_operands(statement: Statement, context: Context, record: type[Record] = Instruction) -> BoundStatement[Record]:
    """Bind the operands of a statement to the names of the manual.

    Args:
        statement: The statement.
        context: Its context, with the target.
        record: The family that the instruction must belong to.

    Raises:
        Unsupported: There is no such instruction of this family, the target lacks it, or no form of it has these operands.
    """
    op = check(statement.opcode, context.target)
    if not isinstance(op, record):
        raise Unsupported(f"{op} is no {record.__name__}. PTX ISA {manual_section(op)}")
    given = replace(op, arguments=tuple(map(_argument_text, statement.operands)))
    error = operand_problem(given, manual_section(op))
    if not error and not given.argument_form and () not in op.operand_forms:
        error = f"{op} takes {' or '.join(', '.join(form) for form in op.operand_forms)}; got no operand. PTX ISA {manual_section(op)}"
    if error:
        raise Unsupported(error)
    classes = (parse_classes(_operand_word(op, name))[0] for name in given.argument_form)
    check_operands(statement.operands, tuple(classes), context.function.registers)
    operands = dict(zip(given.argument_form, statement.operands, strict=True))
    return BoundStatement(op, operands, statement, context.target, context.checked)


ADDRESSES = ("p", "dst", "mbar", "taddr", "a_tmem")  # operands by the manual's names
TENSOR_ADDRESSES = ("d", "scale_a", "scale_b", "sp_meta")  # operands that are addresses in tensor memory where tcgen05.mma has them
WORDS = {  # classes of the operands that are no matrices
    "scale_d": "pred", "enable_input_d": "pred", "stride": "s32", "columns": "u32", "address": "u32", "idesc": "u32", "cta_mask": "b16",
    "zero_column_mask": "u64", "a_desc": "u64", "b_desc": "u64", "s_desc": "u64", "reduced": "=b32", "selector_a": "<u16*2>",
    "selector_b": "<u16*2>", "e": "b32", "sp_meta": "b32", "scale_a": "b32", "scale_b": "b32",
}  # fmt: skip
CONSTANTS = ("f", "sp_sel", "n", "imm_scale_a", "imm_scale_b", "imm_trans_a", "imm_trans_b", "half_split_offset", "scale_input_d")


def _operand_word(op: Instruction, name: str) -> str:
    """Return the class of an operand, as a word of `tcemu.kernels.ptx.operand_classes`."""
    if name in ADDRESSES or (isinstance(op, Tcgen05Mma) and name in TENSOR_ADDRESSES):
        return "[]"
    if name in CONSTANTS:
        return "#"
    if name in WORDS:
        return WORDS[name]
    if isinstance(op, Mover) and op.name == "movmatrix":
        return "=b32" if name == "d" else "%b32"
    count = op.register_count(name)
    bits = 32 if name == "disable_output_lane" else op.register_bits(name)
    written = name == "d" or (name == "r" and op.operand_forms[0][0] == "r")
    return f"<{'=' if written else '%'}b{bits}*{count * 32 // bits}>"


def _argument_text(operand: Operand) -> str:
    """Return the text that `operand_problem` checks: the brackets, the braces with the number of registers within, and constants."""
    if isinstance(operand, Vector):
        return "{" + ",".join("r" * len(operand.elements)) + "}"
    if isinstance(operand, Address):
        return "[r]"
    return str(operand.value) if isinstance(operand, Integer) else "r"


def vector_elements(operand: Operand) -> Sequence[Operand]:
    """Return the registers of a vector operand; a register without braces is one element."""
    return operand.elements if isinstance(operand, Vector) else (operand,)


def read_registers(machine: Machine, bound: BoundStatement, name: str) -> Array:
    """Read an operand of all warps, uint32[blocks, warps, 32, n]; a 64-bit register is two words, low first."""
    kind = f"b{bound.op.register_bits(name)}"
    values = [machine.warps(machine.read(element, kind)) for element in vector_elements(bound.operands[name])]
    return jnp.stack([word for value in values for word in split_words(value)], axis=-1)


def write_registers(machine: Machine, bound: BoundStatement, name: str, words: Array) -> Machine:
    """Write words uint32[blocks, warps, 32, n] to an operand's registers, where threads are active."""
    kind = f"b{bound.op.register_bits(name)}"
    for i, element in enumerate(vector_elements(bound.operands[name])):
        value = join_words(words[..., 2 * i], words[..., 2 * i + 1]) if kind == "b64" else words[..., i]
        machine = machine.write(element, kind, machine.threads(value))
    return machine


def group_warps(words: Array) -> Array:
    """Group [blocks, warps, ...] into [blocks, warpgroups, 4, ...]: warps 0 to 3, 4 to 7, ... The last group is padded with zeros."""
    missing = -words.shape[1] % 4
    words = jnp.pad(words, ((0, 0), (0, missing)) + ((0, 0),) * (words.ndim - 2))
    return words.reshape(words.shape[0], -1, 4, *words.shape[2:])


def ungroup_warps(words: Array, warps: int) -> Array:
    """Invert `group_warps`."""
    return words.reshape(words.shape[0], -1, *words.shape[3:])[:, :warps]


def require_whole_warps(machine: Machine, bound: BoundStatement) -> Machine:
    """Note a fault for each warp of which only some threads execute the instruction, in checked mode."""
    if not bound.checked:
        return machine
    active = machine.warps(machine.active)
    incomplete = active & ~active.all(-1, keepdims=True)
    message = f"all {LANES} threads of the warp must execute it. PTX ISA {manual_section(bound.op)}"
    return note_undefined(machine, machine.threads(incomplete), message)


def read_uniform(machine: Machine, bound: BoundStatement, value: Array, width: int, message: str) -> tuple[Array, Machine]:
    """Return a value that is uniform in groups of `width` threads, [blocks, groups], from the first active thread of each.

    In checked mode threads with another value note a fault with the message.
    """
    blocks, threads = machine.active.shape
    values, active = (jnp.pad(x, ((0, 0), (0, -threads % width))).reshape(blocks, -1, width) for x in (value, machine.active))
    first = jnp.take_along_axis(values, jnp.argmax(active, axis=-1)[..., None], axis=-1)
    if bound.checked:
        machine = note_undefined(machine, (active & (values != first)).reshape(blocks, -1)[:, :threads], message)
    return first[..., 0], machine


def note_undefined(machine: Machine, where: Array, text: str, address: Array | None = None) -> Machine:
    """Note undefined behaviour as a fault of the threads bool[blocks, threads]."""
    return note_fault(machine, where, Message(text, UndefinedBehaviour), address)


def note_fault(machine: Machine, where: Array, message: Message, address: Array | None = None) -> Machine:
    """Note a fault of the threads bool[blocks, threads]. The text of the message is also its key."""
    register_messages(**{message.text: message})
    return machine.fault(where, message.text, address)


def require(machine: Machine, good: Array, message: Message, address: Array | None = None) -> Machine:
    """Note a fault of the active threads for which a condition does not hold, and keep the others active."""
    return note_fault(machine, ~good, message, address).restrict_active(good)


# ---- forms of asynchronous instructions and mbarriers


class InstructionForm(NamedTuple):
    """The form of an instruction, whose qualifiers are in `tcemu.engine.isa.statement_table`."""

    head: str  # first parts of the opcode
    operands: tuple[str, ...]  # the operand lists that it may have, as classes of `tcemu.kernels.ptx.operand_classes`; see `_operand_words`
    refused: Mapping[str, str] = MappingProxyType({})  # unsupported qualifiers of GPUs, with the reason and an alternative

    @property
    def section(self) -> str:
        """The manual's section, as messages name it."""
        return f"PTX ISA {next(row.section for row in rows_by_name()[self.head.partition('.')[0]] if row.head == self.head)}"


def match_form(statement: Statement, context: Context, forms: tuple[InstructionForm, ...]) -> tuple[InstructionForm, Choices]:
    """Return the form of a statement, and its qualifiers by slot.

    Raises:
        Unsupported: No form has this head, or the form does not have a qualifier or the operands.
    """
    parts = statement.opcode.split(".")
    matches = [form for form in forms if parts[: form.head.count(".") + 1] == form.head.split(".")]
    if not matches:
        known = ", ".join(dict.fromkeys(form.head for form in forms))
        raise Unsupported(f"tcemu.ptx does not support it; the supported forms of {statement.name} are {known}")
    form = max(matches, key=lambda form: len(form.head))
    for qualifier in parts:
        if qualifier in form.refused:
            raise Unsupported(f".{qualifier} is not supported: {form.refused[qualifier]}. {form.section}")
    choices = _find_choices(statement.opcode, form.head)
    words = _operand_words(choices)
    check_operand_lists(statement, context, *(text.format_map(words) for text in form.operands))
    return form, choices


def _operand_words(choices: Choices) -> dict[str, str]:
    """Return the words of the operands that depend on qualifiers, each with a space before it where it may be missing."""
    mode, vector = choices.get("mode") or "", choices.get("vector") or "v1"
    rank = int((choices.get("dim") or "2d")[0])
    halo = 2 if mode.startswith("im2col::") else rank - 2 if mode == "im2col" else 0
    return {
        "type": choices.get("type") or "",
        "count": vector[1:],
        "hint": " u64" if choices.get("hint") else "",
        "multicast": " b16" if choices.get("multicast") else "",
        "mask": " b16" if choices.get("mask") else "",
        "moved": "[,] []" if choices.get("to") == "global" else "[] [,] []",
        "barrier": " []" if (choices.get("completion") or "").startswith("mbarrier") else "",
        "offsets": f" <b16*{halo}>" if halo else "",
        "phase": "u32" if choices.get("parity") else "u64",
    }


def _find_choices(opcode: str, head: str) -> Choices:
    """Return the qualifiers of an opcode by slot; None for the slots that its line or another line of its head leaves out."""
    found = next((form for form in find_forms(opcode) if form.row.head == head), None)
    if found is None:
        raise Unsupported(describe_forms(opcode))
    return _slot_names(head) | found.choices


@lru_cache(maxsize=4096)
def _slot_names(head: str) -> Choices:
    """Return the named slots of all lines of a head, without a choice."""
    return {slot.name: None for row in statement_rows() if row.head == head for slot in row.slots if slot.name}


def constant_operand(operand: Operand, description: str, section: str) -> int:
    """Return the value of an operand that must be a constant. Raises Unsupported."""
    if not isinstance(operand, Integer):
        raise Unsupported(f"{description} must be an integer constant. {section}")
    return operand.value
