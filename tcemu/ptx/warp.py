"""Instructions that threads of a warp do together: shfl, vote, match, redux, activemask, elect (PTX ISA 9.7.9.6, 9.7.13).

The functions take arrays [..., 32], a warp in the last axis; `active` says which lanes execute the instruction, `members` (uint32) is what
each lane gives as its membermask. A lane takes part in what its own mask names, so that two groups of one warp may act at once.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from tcemu.errors import UndefinedBehaviour, Unsupported
from tcemu.isa.instructions import LANES
from tcemu.ptx import faults
from tcemu.ptx.context import Context, Prepare, Step
from tcemu.ptx.machine import Machine
from tcemu.ptx.module import Operand, Pair, Sink, Statement
from tcemu.ptx.scalar.floats import extremum
from tcemu.ptx.scalar.lanes import signed
from tcemu.ptx.scalar.syntax import Qualifiers, Shape
from tcemu.ptx.values import KINDS

MODES = ("up", "down", "bfly", "idx")
VOTES = ("all", "any", "uni", "ballot")
INTEGER_REDUCTIONS: dict[str, tuple[tuple[str, ...], Callable[..., Array], int]] = {  # types, the sum, and what changes nothing in it
    "add": (("u32", "s32"), jnp.sum, 0),
    "and": (("b32",), lax.reduce_and, 0xFFFFFFFF),
    "or": (("b32",), lax.reduce_or, 0),
    "xor": (("b32",), lax.reduce_xor, 0),
}
faults.add(
    member_mask=faults.Message("the membermask {0} lacks the thread's own lane, {1} (PTX ISA 9.7.13)", UndefinedBehaviour),
    absent_member=faults.Message("the membermask {0} names lanes that do not take part: those that do are {1}", UndefinedBehaviour),
)


def lanes() -> Array:
    """uint32 [32]: the number of each lane."""
    return jnp.arange(LANES, dtype=jnp.uint32)


def ballot(held: Array) -> Array:
    """bool [..., 32] -> uint32 [..., 1]: a bit for each lane."""
    return jnp.sum(held.astype(jnp.uint32) << lanes(), axis=-1, keepdims=True, dtype=jnp.uint32)


def shuffle(mode: str, value: Array, b: Array, c: Array, active: Array) -> tuple[Array, Array]:
    """shfl: each lane's value of another lane, and whether that lane is in range; else its own.

    Of a lane that is not active the manual promises nothing; an H200 gives 0.
    """
    lane, segment, bound = lanes(), (c >> 8) & 31, c & 31
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
    source = jnp.broadcast_to(jnp.where(inside, source, signed_lane), value.shape)
    given = jnp.where(active, value, jnp.uint32(0))
    return jnp.take_along_axis(given, source, axis=-1, mode="clip"), jnp.broadcast_to(inside, value.shape)


def vote(mode: str, held: Array, active: Array, members: Array) -> Array:
    """vote: whether the predicate holds for all members, for any, or for all or none; or a bit for each that it holds for."""
    here, those = members & ballot(active), members & ballot(active & held)
    return {"all": those == here, "any": those != 0, "uni": (those == here) | (those == 0), "ballot": those}[mode]


def _others(active: Array, members: Array) -> Array:
    """bool [..., 32, 32]: lane j takes part in what lane i does."""
    return ((members[..., :, None] >> lanes()) & 1 == 1) & active[..., None, :]


def match_any(value: Array, active: Array, members: Array) -> Array:
    """match.any: a bit for each member with the lane's own value."""
    same = (value[..., :, None] == value[..., None, :]) & _others(active, members)
    return ballot(same)[..., 0]


def match_all(value: Array, active: Array, members: Array) -> tuple[Array, Array]:
    """match.all: the members if all have one value, else 0; and whether they have."""
    here = members & ballot(active)
    every = match_any(value, active, members) == here
    return jnp.where(every, here, jnp.uint32(0)), every


def reduce_integers(operator: str, kind: str, value: Array, active: Array, members: Array) -> Array:
    """redux of integers and bits, over the members."""
    others = _others(active, members)
    if operator in ("min", "max"):
        number = signed(value, kind) if KINDS[kind].signed else value
        limits = jnp.iinfo(number.dtype)
        nothing = limits.max if operator == "min" else limits.min
        spread = jnp.where(others, number[..., None, :], jnp.asarray(nothing, number.dtype))
        return (jnp.min if operator == "min" else jnp.max)(spread, axis=-1).astype(jnp.uint32)
    _, fold, nothing = INTEGER_REDUCTIONS[operator]
    spread = jnp.where(others, value[..., None, :], jnp.uint32(nothing))
    if operator == "add":
        return jnp.sum(spread, axis=-1, dtype=jnp.uint32)
    return fold(spread, axes=(spread.ndim - 1,))


def reduce_floats(fold: Callable[[Array, Array], Array], nothing: int, value: Array, active: Array, members: Array) -> Array:
    """redux of f32, over the members, by halves; fold: min or max of raw bits, for which the order does not matter."""
    spread = jnp.where(_others(active, members), value[..., None, :], jnp.uint32(nothing))
    while spread.shape[-1] > 1:
        half = spread.shape[-1] // 2
        spread = fold(spread[..., :half], spread[..., half:])
    return fold(spread[..., 0], spread[..., 0])


# ---- statements


def _refused(statement: Statement, known: str) -> Unsupported:
    return Unsupported(f"{statement.opcode!r} with {len(statement.operands)} operands is not run; known is: {known}")


def _two(operand: Operand) -> tuple[Operand, Operand]:
    """The destinations of `d|p` or `d`."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())


class _Warps:
    """A machine's values by warps, for one statement. mask: its membermask operand; None: all threads that are active."""

    def __init__(self, machine: Machine, mask: Operand | None, checked: bool) -> None:
        self.active = machine.warps(machine.active)
        here = jnp.broadcast_to(ballot(self.active), self.active.shape)
        self.members = here if mask is None else machine.warps(machine.read(mask, "b32"))
        if checked and mask is not None:
            own = jnp.broadcast_to(lanes(), here.shape)
            lacks = (self.members >> own) & 1 == 0
            machine = machine.fault(machine.threads(lacks), "member_mask", None, None, machine.threads(self.members), machine.threads(own))
            absent = (self.members & ~here) != 0
            told = machine.threads(self.members), machine.threads(here)
            machine = machine.fault(machine.threads(absent), "absent_member", None, None, *told)
        self.machine = machine

    def read(self, operand: Operand, kind: str) -> Array:
        return self.machine.warps(self.machine.read(operand, kind))

    def write(self, *results: tuple[Operand, str, Array]) -> Machine:
        machine = self.machine
        for operand, kind, value in results:
            machine = machine.write(operand, kind, machine.threads(jnp.broadcast_to(value, self.active.shape)))
        return machine


def prepare_shfl(statement: Statement, context: Context) -> Step:
    """shfl.sync.mode.b32 d[|p], a, b, c, membermask; without .sync also, with the active threads as members."""
    parts = statement.qualifiers
    sync = parts[:1] == ("sync",)
    if parts[sync:] not in [(mode, "b32") for mode in MODES] or len(statement.operands) != 4 + sync:
        raise _refused(statement, "shfl.sync.{up|down|bfly|idx}.b32 d[|p], a, b, c, membermask")
    mode = parts[sync]
    (value, inside), (a, b, c), mask = _two(statement.operands[0]), statement.operands[1:4], statement.operands[4] if sync else None

    def run(machine: Machine) -> Machine:
        warps = _Warps(machine, mask, context.checked)
        found, held = shuffle(mode, warps.read(a, "b32"), warps.read(b, "b32"), warps.read(c, "b32"), warps.active)
        return warps.write((value, "b32", found), (inside, "pred", held))

    return Step(run, together=True)


def prepare_vote(statement: Statement, context: Context) -> Step:
    """vote.sync.{all|any|uni}.pred p, [!]a, membermask; vote.sync.ballot.b32 d, [!]a, membermask; without .sync also."""
    parts = statement.qualifiers
    sync = parts[:1] == ("sync",)
    if parts[sync:] not in [(mode, "b32" if mode == "ballot" else "pred") for mode in VOTES] or len(statement.operands) != 2 + sync:
        raise _refused(statement, "vote.sync.{all|any|uni}.pred p, a, membermask; vote.sync.ballot.b32 d, a, membermask")
    mode, kind = parts[sync:]
    target, a, mask = statement.operands[0], statement.operands[1], statement.operands[2] if sync else None

    def run(machine: Machine) -> Machine:
        warps = _Warps(machine, mask, context.checked)
        return warps.write((target, kind, vote(mode, warps.read(a, "pred"), warps.active, warps.members)))

    return Step(run, together=True)


def prepare_match(statement: Statement, context: Context) -> Step:
    """match.any.sync.type d, a, membermask; match.all.sync.type d[|p], a, membermask; type b32 or b64."""
    parts, operands = statement.qualifiers, statement.operands
    known = [(mode, "sync", kind) for mode in ("any", "all") for kind in ("b32", "b64")]
    if parts not in known or len(operands) != 3 or (parts[0] == "any" and isinstance(operands[0], Pair)):
        raise _refused(statement, "match.any.sync.{b32|b64} d, a, membermask; match.all.sync.{b32|b64} d[|p], a, membermask")
    target, every = _two(operands[0])

    def run(machine: Machine) -> Machine:
        warps = _Warps(machine, operands[2], context.checked)
        value = warps.read(operands[1], parts[2])
        if parts[0] == "any":
            return warps.write((target, "b32", match_any(value, warps.active, warps.members)))
        found, held = match_all(value, warps.active, warps.members)
        return warps.write((target, "b32", found), (every, "pred", held))

    return Step(run, together=True)


def prepare_redux(statement: Statement, context: Context) -> Step:
    """redux.sync.op.type d, a, membermask: add, min, max of u32 and s32; and, or, xor of b32; min, max[.abs][.NaN] of f32."""
    parts, operands = statement.qualifiers, statement.operands
    reduction = _reduction(parts)
    if reduction is None or len(operands) != 3:
        raise _refused(statement, "redux.sync.{add|min|max}.{u32|s32}, .{and|or|xor}.b32, .{min|max}[.abs][.NaN].f32 d, a, membermask")

    def run(machine: Machine) -> Machine:
        warps = _Warps(machine, operands[2], context.checked)
        return warps.write((operands[0], parts[-1], reduction(warps.read(operands[1], parts[-1]), warps.active, warps.members)))

    return Step(run, together=True)


def _reduction(parts: tuple[str, ...]) -> Callable[[Array, Array, Array], Array] | None:
    """The reduction that the qualifiers name, or None."""
    if len(parts) < 3 or parts[0] != "sync":
        return None
    operator, kind = parts[1], parts[-1]
    if len(parts) == 3 and kind in INTEGER_REDUCTIONS.get(operator, (("u32", "s32") if operator in ("min", "max") else (),))[0]:
        return lambda *values: reduce_integers(operator, kind, *values)
    if kind != "f32" or operator not in ("min", "max") or sorted(parts[2:-1]) not in ([], ["abs"], ["NaN"], ["NaN", "abs"]):
        return None
    nan = "NaN" in parts
    fold = extremum(Qualifiers((*("NaN",) * nan, "f32")), Shape((1, 1, 1)), operator == "min").compute
    size = (lambda x: x & 0x7FFFFFFF) if "abs" in parts else lambda x: x
    # what changes nothing: a NaN, where NaNs are passed over; else the farthest number
    nothing = 0x7FFFFFFF if not nan else 0x7F800000 if operator == "min" else 0 if "abs" in parts else 0xFF800000
    return lambda value, *rest: reduce_floats(lambda a, b: fold(a, b)[0], nothing, size(value), *rest)


def prepare_activemask(statement: Statement, context: Context) -> Step:
    """activemask.b32 d: a bit for each active thread of the warp."""
    if statement.opcode != "activemask.b32" or len(statement.operands) != 1:
        raise _refused(statement, "activemask.b32 d")

    def run(machine: Machine) -> Machine:
        warps = _Warps(machine, None, False)
        return warps.write((statement.operands[0], "b32", warps.members))

    return Step(run)


def prepare_elect(statement: Statement, context: Context) -> Step:
    """elect.sync d|p, membermask: the lowest member is the leader, d its lane; p holds for it alone."""
    if statement.opcode != "elect.sync" or len(statement.operands) != 2 or not isinstance(statement.operands[0], Pair):
        raise _refused(statement, "elect.sync d|p, membermask")
    lane, leads = _two(statement.operands[0])

    def run(machine: Machine) -> Machine:
        warps = _Warps(machine, statement.operands[1], context.checked)
        leader = leader_of(warps.active, warps.members)
        return warps.write((lane, "b32", leader), (leads, "pred", leader == lanes()))

    return Step(run, together=True)


def leader_of(active: Array, members: Array) -> Array:
    """uint32: the lowest member."""
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
