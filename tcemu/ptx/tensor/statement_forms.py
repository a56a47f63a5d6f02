"""Statements of tensor-core and asynchronous instructions: their forms, their operands by name, and the registers of whole warps.

A tensor-core statement is bound to an `Instruction` of `tcemu.isa`. The forms of asynchronous instructions and mbarriers are written down
here, as slots with their choices and the first target that has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array

from tcemu.base.errors import UndefinedBehaviour, Unsupported
from tcemu.isa.families import LANES, Instruction
from tcemu.isa.grammar import operand_problem
from tcemu.isa.legality import check, manual_section
from tcemu.ptx.instruction_interface import Context
from tcemu.ptx.simt.faults import Message, register_messages
from tcemu.ptx.text.module import Address, Integer, Operand, Statement, Vector

if TYPE_CHECKING:
    from tcemu.ptx.simt.machine import Machine
from collections.abc import Mapping
from types import MappingProxyType

from tcemu.isa.targets import resolve_target

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
    if error:
        raise Unsupported(error)
    operands = dict(zip(given.argument_form, statement.operands, strict=True))
    return BoundStatement(op, operands, statement, context.target, context.checked)


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


def _register_kind(op: Instruction, name: str) -> str:
    """Return the type of one register of an operand."""
    return f"b{op.register_bits(name)}"


def read_registers(machine: Machine, bound: BoundStatement, name: str) -> Array:
    """Read an operand of all warps, uint32[blocks, warps, 32, n]; a 64-bit register is two words, low first."""
    kind = _register_kind(bound.op, name)
    values = [machine.warps(machine.read(element, kind)) for element in vector_elements(bound.operands[name])]
    if kind == "b64":
        values = [word for value in values for word in split_words(value)]
    return jnp.stack(values, axis=-1)


def write_registers(machine: Machine, bound: BoundStatement, name: str, words: Array) -> Machine:
    """Write words uint32[blocks, warps, 32, n] to an operand's registers, where threads are active."""
    kind = _register_kind(bound.op, name)
    for i, element in enumerate(vector_elements(bound.operands[name])):
        value = join_words(words[..., 2 * i], words[..., 2 * i + 1]) if kind == "b64" else words[..., i]
        machine = machine.write(element, kind, machine.threads(value))
    return machine


def split_words(value: Array) -> tuple[Array, Array]:
    """Split uint64 into its low and its high word."""
    return value.astype(jnp.uint32), (value >> 32).astype(jnp.uint32)


def join_words(low: Array, high: Array) -> Array:
    """Join a low and a high word into uint64."""
    return low.astype(jnp.uint64) | high.astype(jnp.uint64) << 32


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
    return note_undefined(machine, machine.threads(incomplete), message, bound.statement)


def note_undefined(machine: Machine, where: Array, text: str, statement: Statement, address: Array | None = None) -> Machine:
    """Note undefined behaviour as a fault of the threads bool[blocks, threads]."""
    return note_fault(machine, where, Message(text, UndefinedBehaviour), statement, address)


def note_fault(machine: Machine, where: Array, message: Message, statement: Statement, address: Array | None = None) -> Machine:
    """Note a fault of the threads bool[blocks, threads]. The text of the message is also its key."""
    register_messages(**{message.text: message})
    return machine.fault(where, message.text, address)


# ---- forms of asynchronous instructions and mbarriers


class Slot(NamedTuple):
    """A position for one qualifier."""

    name: str
    choices: tuple[str, ...]
    required: bool = False


class InstructionForm(NamedTuple):
    """The form of an instruction."""

    head: str  # first parts of the opcode
    slots: tuple[Slot, ...]  # further qualifiers
    operand_counts: tuple[int, ...]
    min_target: int  # number of the first target that has the instruction, as 90
    section: str
    refused: Mapping[str, str] = MappingProxyType({})  # unsupported qualifiers of GPUs, with the reason and an alternative


def slot(name: str, choices: str, *, required: bool = False) -> Slot:
    """Make a slot from its choices, separated by spaces."""
    return Slot(name, tuple(choices.split()), required)


Choices = dict[str, str | None]  # qualifier of a statement in each slot; None if omitted


def match_form(statement: Statement, context: Context, forms: tuple[InstructionForm, ...]) -> tuple[InstructionForm, Choices]:
    """Return the form of a statement, and its qualifiers by slot.

    Raises:
        Unsupported: No form has this head, or the form does not have a qualifier, the number of operands or the target.
    """
    parts = statement.opcode.split(".")
    matches = [form for form in forms if parts[: form.head.count(".") + 1] == form.head.split(".")]
    if not matches:
        known = ", ".join(dict.fromkeys(form.head for form in forms))
        raise Unsupported(f"tcemu.ptx does not support it; the supported forms of {statement.name} are {known}")
    form = max(matches, key=lambda form: len(form.head))
    choices = _assign_qualifiers(parts[form.head.count(".") + 1 :], form)
    if len(statement.operands) not in form.operand_counts:
        expected = " or ".join(map(str, form.operand_counts))
        raise Unsupported(f"it has {len(statement.operands)} operands; expected {expected}. {form.section}")
    target = resolve_target(context.target)
    if int("".join(filter(str.isdigit, target))) < form.min_target:
        raise Unsupported(f"it needs sm_{form.min_target} or later; the target is {target}. {form.section}")
    return form, choices


def _assign_qualifiers(qualifiers: list[str], form: InstructionForm) -> Choices:
    choices: Choices = {slot.name: None for slot in form.slots}
    for qualifier in qualifiers:
        if qualifier in form.refused:
            raise Unsupported(f".{qualifier} is not supported: {form.refused[qualifier]}. {form.section}")
        free = next((slot for slot in form.slots if qualifier in slot.choices and choices[slot.name] is None), None)
        if free is None:
            known = ", ".join(f".{choice}" for slot in form.slots for choice in slot.choices)
            raise Unsupported(f".{qualifier} is not a supported qualifier of {form.head}; known are {known}. {form.section}")
        choices[free.name] = qualifier
    missing = [slot for slot in form.slots if slot.required and choices[slot.name] is None]
    if missing:
        expected = " or ".join(f".{choice}" for choice in missing[0].choices)
        raise Unsupported(f"it lacks {expected}. {form.section}")
    return choices


def constant_operand(operand: Operand, description: str, section: str) -> int:
    """Return the value of an operand that must be a constant. Raises Unsupported."""
    if not isinstance(operand, Integer):
        raise Unsupported(f"{description} must be an integer constant. {section}")
    return operand.value
