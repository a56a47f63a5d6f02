"""Warp collectives: shfl, vote, match, redux, activemask, elect (PTX ISA 9.7.9.6, 9.7.13).

The functions take arrays [..., 32], a warp in the last axis. `active` marks the lanes that execute the instruction, and `members` (uint32)
is the membermask of each lane. A lane participates in the group that its own mask names, so two groups of one warp may act at once.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from tcemu.base.errors import UndefinedBehaviour
from tcemu.engine.isa.families import LANES
from tcemu.engine.isa.statement_table import StatementForm, require_form
from tcemu.kernels.ptx.instruction_interface import Context, Prepare, Step
from tcemu.kernels.ptx.operand_classes import check_operand_lists
from tcemu.kernels.ptx.scalar.float_arithmetic import extremum
from tcemu.kernels.ptx.scalar.opcode_syntax import OperandShape, Qualifiers
from tcemu.kernels.ptx.scalar.raw_bits import as_signed
from tcemu.kernels.ptx.simt import faults
from tcemu.kernels.ptx.simt.machine import Machine
from tcemu.kernels.ptx.text.module import Operand, Pair, Sink, Statement
from tcemu.kernels.ptx.text.ptx_types import KINDS

SHUFFLE_MODES = ("up", "down", "bfly", "idx")
VOTE_MODES = ("all", "any", "uni", "ballot")
INTEGER_REDUCTIONS: dict[str, tuple[Callable[..., Array], int]] = {  # reduction, neutral element
    "add": (jnp.sum, 0),
    "and": (lax.reduce_and, 0xFFFFFFFF),
    "or": (lax.reduce_or, 0),
    "xor": (lax.reduce_xor, 0),
}
faults.register_messages(
    member_mask=faults.Message("the membermask {0} lacks the thread's own lane, {1} (PTX ISA 9.7.13)", UndefinedBehaviour),
    absent_source=faults.Message(
        "shfl reads from lane {0}, which is not in the membermask {1} or does not take part (PTX ISA 9.7.9.6)", UndefinedBehaviour
    ),
    absent_member=faults.Message("the membermask {0} names lanes that do not take part: those that do are {1}", UndefinedBehaviour),
)


def lane_numbers() -> Array:
    """Return the lanes' numbers, uint32[32]."""
    return jnp.arange(LANES, dtype=jnp.uint32)


def ballot(predicate: Array) -> Array:
    """Return a mask with a bit for each lane: bool[..., 32] -> uint32[..., 1]."""
    return jnp.sum(predicate.astype(jnp.uint32) << lane_numbers(), axis=-1, keepdims=True, dtype=jnp.uint32)


def source_lanes(mode: str, b: Array, c: Array) -> tuple[Array, Array]:
    """Return the source lane of each lane in a shfl, int32, and whether it is in range; out of range it is the lane itself."""
    lane, segment, bound = lane_numbers(), (c >> 8) & 31, c & 31
    step = b & 31
    least = lane & segment
    most = (least | (bound & ~segment)).astype(jnp.int32)
    signed_lane, signed_step = lane.astype(jnp.int32), step.astype(jnp.int32)
    source = {
        "up": signed_lane - signed_step,
        "down": signed_lane + signed_step,
        "bfly": (lane ^ step).astype(jnp.int32),
        "idx": (least | (step & ~segment)).astype(jnp.int32),
    }[mode]
    inside = source >= most if mode == "up" else source <= most
    return jnp.where(inside, source, signed_lane), inside


def shuffle(mode: str, value: Array, b: Array, c: Array, active: Array) -> tuple[Array, Array]:
    """shfl: return the value of each lane's source lane, and whether that lane is in range; out of range, the lane's own value.

    The manual leaves the value of an inactive source lane, and of one outside the membermask, open. An H200 returns 0 for an inactive lane.
    For `.bfly` from a lane outside the membermask an RTX 3060 (sm_86) was reported to return the lane's own value; here it is that of the
    source lane if that is active. Checked mode raises UndefinedBehaviour for both.
    """
    source, inside = source_lanes(mode, b, c)
    source = jnp.broadcast_to(source, value.shape)
    readable = jnp.where(active, value, jnp.uint32(0))
    return jnp.take_along_axis(readable, source, axis=-1, mode="clip"), jnp.broadcast_to(inside, value.shape)


def vote(mode: str, predicate: Array, active: Array, members: Array) -> Array:
    """vote: test whether the predicate holds for all members, for any, or for all or none; or return a mask of those that it holds for."""
    voters, ayes = members & ballot(active), members & ballot(active & predicate)
    return {"all": ayes == voters, "any": ayes != 0, "uni": (ayes == voters) | (ayes == 0), "ballot": ayes}[mode]


def _participants(active: Array, members: Array) -> Array:
    """Return bool[..., 32, 32]: lane j is a member of lane i's group."""
    return ((members[..., :, None] >> lane_numbers()) & 1 == 1) & active[..., None, :]


def match_any(value: Array, active: Array, members: Array) -> Array:
    """match.any: return a mask of the members that have the lane's own value."""
    same = (value[..., :, None] == value[..., None, :]) & _participants(active, members)
    return ballot(same)[..., 0]


def match_all(value: Array, active: Array, members: Array) -> tuple[Array, Array]:
    """match.all: return the members if all have one value, else 0; and whether they have."""
    here = members & ballot(active)
    every = match_any(value, active, members) == here
    return jnp.where(every, here, jnp.uint32(0)), every


def reduce_integers(operator: str, kind: str, value: Array, active: Array, members: Array) -> Array:
    """Reduce integers or bits over the members."""
    others = _participants(active, members)
    if operator in ("min", "max"):
        number = as_signed(value, kind) if KINDS[kind].signed else value
        limits = jnp.iinfo(number.dtype)
        neutral = limits.max if operator == "min" else limits.min
        spread = jnp.where(others, number[..., None, :], jnp.asarray(neutral, number.dtype))
        return (jnp.min if operator == "min" else jnp.max)(spread, axis=-1).astype(jnp.uint32)
    fold, neutral = INTEGER_REDUCTIONS[operator]
    spread = jnp.where(others, value[..., None, :], jnp.uint32(neutral))
    if operator == "add":
        return jnp.sum(spread, axis=-1, dtype=jnp.uint32)
    return fold(spread, axes=(spread.ndim - 1,))


def reduce_floats(fold: Callable[[Array, Array], Array], neutral: int, value: Array, active: Array, members: Array) -> Array:
    """Reduce f32 over the members, by halves. fold: min or max of raw bits, which are independent of the order."""
    spread = jnp.where(_participants(active, members), value[..., None, :], jnp.uint32(neutral))
    while spread.shape[-1] > 1:
        half = spread.shape[-1] // 2
        spread = fold(spread[..., :half], spread[..., half:])
    return fold(spread[..., 0], spread[..., 0])


# ---- statements


def _match(statement: Statement, context: Context, operands: str) -> StatementForm:
    """Return the form of a statement. Raises Unsupported for an opcode or operands that it does not have."""
    form = require_form(statement.opcode)
    check_operand_lists(statement, context, operands.format_map(form.choices))
    return form


def _destinations(operand: Operand) -> tuple[Operand, Operand]:
    """Return the two destinations of `d|p` or `d`."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())


class _WarpView:
    """The registers of a machine by warps, for one statement.

    mask: The membermask operand; None: the active threads.
    """

    def __init__(self, machine: Machine, mask: Operand | None, checked: bool) -> None:
        self.active = machine.warps(machine.active)
        here = jnp.broadcast_to(ballot(self.active), self.active.shape)
        self.members = here if mask is None else machine.warps(machine.read(mask, "b32"))
        if checked and mask is not None:
            own = jnp.broadcast_to(lane_numbers(), here.shape)
            lacks = (self.members >> own) & 1 == 0
            members = machine.threads(self.members)
            machine = machine.fault(machine.threads(lacks), "member_mask", None, members, machine.threads(own))
            absent = (self.members & ~here) != 0
            machine = machine.fault(machine.threads(absent), "absent_member", None, members, machine.threads(here))
        self.machine = machine

    def check_sources(self, source: Array) -> None:
        """Note as a fault each lane whose source lane is outside its membermask, or does not take part."""
        source = jnp.broadcast_to(source, self.active.shape)
        missing = (self.members >> source.astype(jnp.uint32)) & 1 == 0
        missing |= ~jnp.take_along_axis(self.active, source, axis=-1)
        threads = self.machine.threads
        self.machine = self.machine.fault(
            threads(missing), "absent_source", None, threads(source.astype(jnp.uint32)), threads(self.members)
        )

    def read(self, operand: Operand, kind: str) -> Array:
        return self.machine.warps(self.machine.read(operand, kind))

    def write(self, *results: tuple[Operand, str, Array]) -> Machine:
        machine = self.machine
        for operand, kind, value in results:
            machine = machine.write(operand, kind, machine.threads(jnp.broadcast_to(value, self.active.shape)))
        return machine


def prepare_shfl(statement: Statement, context: Context) -> Step:
    """Prepare shfl.sync.mode.b32 d[|p], a, b, c, membermask, or the form without .sync, whose members are the active threads."""
    choices = require_form(statement.opcode).choices
    mode, sync = choices["mode"] or "", choices["sync"]
    check_operand_lists(statement, context, f"=b32_|pred b32 b32 b32{' u32' if sync else ''}")
    (value, inside), (a, b, c), mask = (
        _destinations(statement.operands[0]),
        statement.operands[1:4],
        statement.operands[4] if sync else None,
    )

    def apply(machine: Machine) -> Machine:
        warps = _WarpView(machine, mask, context.checked)
        step, bounds = warps.read(b, "b32"), warps.read(c, "b32")
        found, flags = shuffle(mode, warps.read(a, "b32"), step, bounds, warps.active)
        if context.checked:
            warps.check_sources(source_lanes(mode, step, bounds)[0])
        return warps.write((value, "b32", found), (inside, "pred", flags))

    return Step(apply, collective=True)


def prepare_vote(statement: Statement, context: Context) -> Step:
    """Prepare vote.sync.{all|any|uni}.pred p, [!]a, membermask or vote.sync.ballot.b32 d, [!]a, membermask, or a form without .sync."""
    choices = require_form(statement.opcode).choices
    mode, kind = choices["mode"] or "", choices["type"] or ""
    check_operand_lists(statement, context, f"={kind} pred{' u32' if choices['sync'] else ''}")
    target, a, mask = statement.operands[0], statement.operands[1], statement.operands[2] if choices["sync"] else None

    def apply(machine: Machine) -> Machine:
        warps = _WarpView(machine, mask, context.checked)
        return warps.write((target, kind, vote(mode, warps.read(a, "pred"), warps.active, warps.members)))

    return Step(apply, collective=True)


def prepare_match(statement: Statement, context: Context) -> Step:
    """Prepare match.any.sync.type d, a, membermask or match.all.sync.type d[|p], a, membermask; type b32 or b64."""
    operands = statement.operands
    choices = require_form(statement.opcode).choices
    mode, kind = choices["mode"], choices["type"] or ""
    check_operand_lists(statement, context, f"=u32{'_|pred' if mode == 'all' else ''} {kind} u32")
    target, every = _destinations(operands[0])

    def apply(machine: Machine) -> Machine:
        warps = _WarpView(machine, operands[2], context.checked)
        value = warps.read(operands[1], kind)
        if mode == "any":
            return warps.write((target, "b32", match_any(value, warps.active, warps.members)))
        found, flags = match_all(value, warps.active, warps.members)
        return warps.write((target, "b32", found), (every, "pred", flags))

    return Step(apply, collective=True)


def prepare_redux(statement: Statement, context: Context) -> Step:
    """Prepare redux.sync.op.type d, a, membermask: add, min, max of u32, s32; and, or, xor of b32; min, max[.abs][.NaN] of f32."""
    form = require_form(statement.opcode)
    operands, kind = statement.operands, form.choices["type"] or ""
    check_operand_lists(statement, context, "=f32 f32 u32" if kind == "f32" else "=u32 u32 u32")
    reduction = _find_reduction(form.choices["mode"] or "", kind, form.qualifiers)

    def apply(machine: Machine) -> Machine:
        warps = _WarpView(machine, operands[2], context.checked)
        return warps.write((operands[0], kind, reduction(warps.read(operands[1], kind), warps.active, warps.members)))

    return Step(apply, collective=True)


def _find_reduction(operator: str, kind: str, parts: tuple[str, ...]) -> Callable[[Array, Array, Array], Array]:
    if kind != "f32":
        return lambda *values: reduce_integers(operator, kind, *values)
    nan = "NaN" in parts
    fold = extremum(Qualifiers((*("NaN",) * nan, "f32")), OperandShape((1, 1, 1)), operator == "min").compute
    size = (lambda x: x & 0x7FFFFFFF) if "abs" in parts else lambda x: x
    # the neutral element: a NaN where NaNs are ignored, else the farthest number
    neutral = 0x7FFFFFFF if not nan else 0x7F800000 if operator == "min" else 0 if "abs" in parts else 0xFF800000
    return lambda value, *rest: reduce_floats(lambda a, b: fold(a, b)[0], neutral, size(value), *rest)


def prepare_activemask(statement: Statement, context: Context) -> Step:
    """Prepare activemask.b32 d: a mask of the active threads of the warp."""
    _match(statement, context, "=b32")

    def apply(machine: Machine) -> Machine:
        warps = _WarpView(machine, None, False)
        return warps.write((statement.operands[0], "b32", warps.members))

    return Step(apply)


def prepare_elect(statement: Statement, context: Context) -> Step:
    """Prepare elect.sync d|p, membermask: the lowest member is the leader; d is its lane, and p holds for it alone."""
    _match(statement, context, "=b32|pred! u32")
    lane, leads = _destinations(statement.operands[0])

    def apply(machine: Machine) -> Machine:
        warps = _WarpView(machine, statement.operands[1], context.checked)
        leader = elect_leader(warps.active, warps.members)
        return warps.write((lane, "b32", leader), (leads, "pred", leader == lane_numbers()))

    return Step(apply, collective=True)


def elect_leader(active: Array, members: Array) -> Array:
    """Return the lowest member, uint32."""
    here = members & ballot(active)
    return lax.population_count((here & -here) - 1).astype(jnp.uint32)


PREPARE: dict[str, Prepare] = {
    "shfl": prepare_shfl,
    "vote": prepare_vote,
    "match": prepare_match,
    "redux": prepare_redux,
    "activemask": prepare_activemask,
    "elect": prepare_elect,
}
