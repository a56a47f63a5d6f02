"""A statement of a tensor-core instruction: which `Instruction` it is, which operand has which name, and the registers of whole warps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
from jax import Array

from tcemu.errors import UndefinedBehaviour, Unsupported
from tcemu.isa.catalog import check, section
from tcemu.isa.diagnosis import wrong_arguments
from tcemu.isa.instructions import LANES, Instruction
from tcemu.ptx.context import Context
from tcemu.ptx.faults import Message, add
from tcemu.ptx.module import Integer, Operand, Statement, Vector

if TYPE_CHECKING:
    from tcemu.ptx.machine import Machine


class Bound(NamedTuple):
    """An instruction of the target, and the statement's operands by the names of the manual, as in `Instruction.forms`."""

    op: Instruction
    operands: dict[str, Operand]
    statement: Statement
    target: str
    checked: bool

    def integer(self, name: str, default: int) -> int:
        """An operand that must be a constant; `default` where the form has none. Raises Unsupported for a register."""
        operand = self.operands.get(name, Integer(default))
        if not isinstance(operand, Integer):
            raise Unsupported(f"{self.op}: {name} must be an integer constant. PTX ISA {section(self.op)}")
        return operand.value


def bind(statement: Statement, context: Context) -> Bound:
    """The statement with its operands named.

    Raises Unsupported if there is no such instruction, if the target lacks it, or if no form of it has these operands.
    """
    op = check(statement.opcode, context.target)
    wrong = wrong_arguments(replace(op, arguments=tuple(map(_text, statement.operands))), section(op))
    if wrong:
        raise Unsupported(wrong)
    forms = [form for form in op.forms if len(form) == len(statement.operands)]
    # the two forms of wgmma may have one length; that with A in registers has a vector
    in_registers = len(statement.operands) > 1 and isinstance(statement.operands[1], Vector)
    form = next((form for form in forms if ("a_desc" in form) != in_registers), forms[0])
    return Bound(op, dict(zip(form, statement.operands, strict=True)), statement, context.target, context.checked)


def _text(operand: Operand) -> str:
    """What `wrong_arguments` looks at: the braces, and how many registers they hold."""
    return "{" + ",".join("r" * len(operand.elements)) + "}" if isinstance(operand, Vector) else "r"


def elements(operand: Operand) -> Sequence[Operand]:
    """The registers of a vector operand; a register without braces is one."""
    return operand.elements if isinstance(operand, Vector) else (operand,)


def _kind(op: Instruction, name: str) -> str:
    """The type of one register of an operand."""
    fmt = getattr(op, op.operand or name, None)
    return "b64" if fmt is not None and fmt.bits == 64 else "b32"


def registers(machine: Machine, bound: Bound, name: str) -> Array:
    """An operand of a warp, uint32[blocks, warps, 32, n]; a register of 64 bits is two words, low first."""
    kind = _kind(bound.op, name)
    values = [machine.warps(machine.read(element, kind)) for element in elements(bound.operands[name])]
    if kind == "b64":
        values = [word for value in values for word in split(value)]
    return jnp.stack(values, axis=-1)


def write(machine: Machine, bound: Bound, name: str, words: Array) -> Machine:
    """The machine with words uint32[blocks, warps, 32, n] in an operand's registers, where active."""
    kind = _kind(bound.op, name)
    width = 2 if kind == "b64" else 1
    for at, element in enumerate(elements(bound.operands[name])):
        value = join(words[..., 2 * at], words[..., 2 * at + 1]) if width == 2 else words[..., at]
        machine = machine.write(element, kind, machine.threads(value))
    return machine


def split(value: Array) -> tuple[Array, Array]:
    """uint64 -> its low and its high word."""
    return value.astype(jnp.uint32), (value >> 32).astype(jnp.uint32)


def join(low: Array, high: Array) -> Array:
    """The inverse of `split`."""
    return low.astype(jnp.uint64) | high.astype(jnp.uint64) << 32


def warpgroups(words: Array) -> Array:
    """[blocks, warps, ...] -> [blocks, warpgroups, 4, ...]: warps 0 to 3, 4 to 7, ... The last one is filled with zeros."""
    missing = -words.shape[1] % 4
    words = jnp.pad(words, ((0, 0), (0, missing)) + ((0, 0),) * (words.ndim - 2))
    return words.reshape(words.shape[0], -1, 4, *words.shape[2:])


def of_warpgroups(words: Array, warps: int) -> Array:
    """The inverse of `warpgroups`."""
    return words.reshape(words.shape[0], -1, *words.shape[3:])[:, :warps]


def whole_warps(machine: Machine, bound: Bound) -> Machine:
    """Checked mode: a warp of which only a part executes the instruction is a fault. Else the machine as it is."""
    if not bound.checked:
        return machine
    active = machine.warps(machine.active)
    part = active & ~active.all(-1, keepdims=True)
    message = f"all {LANES} threads of the warp must execute it. PTX ISA {section(bound.op)}"
    return undefined(machine, machine.threads(part), message, bound.statement)


def undefined(machine: Machine, where: Array, text: str, statement: Statement, address: Array | None = None) -> Machine:
    """The machine with a fault at the threads bool[blocks, threads]: what they do is undefined in PTX."""
    return fault(machine, where, Message(text, UndefinedBehaviour), statement, address)


def fault(machine: Machine, where: Array, message: Message, statement: Statement, address: Array | None = None) -> Machine:
    """The machine with a fault of this message; the message is its own key."""
    add(**{message.text: message})
    return machine.fault(where, message.text, statement, address)
