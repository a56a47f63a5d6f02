"""Warp collectives: against plain Python, against the words of an H200, and as statements on a machine."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import ptx_warp_reference as plain
from support.ptx_machine import initial_machine
from support.ptx_recorded import warps as recorded
from support.sampling import sample_cases

from tcemu.base.errors import UndefinedBehaviour, Unsupported
from tcemu.kernels.ptx.instruction_interface import Context
from tcemu.kernels.ptx.simt import faults
from tcemu.kernels.ptx.simt import warp_collectives as warp
from tcemu.kernels.ptx.text.module import Function, Integer, Module, Negated, Pair, Position, Register, Sink, Statement

WARPS = 24


@pytest.fixture(autouse=True)
def wide_integers():
    with jax.enable_x64(True):
        yield


def mask_lanes(mask):
    return (mask[:, None] >> np.arange(32, dtype=np.uint32)) & 1 == 1


def draw_masks(seed=3):
    """Draw active lanes and membermasks: all active lanes for half of the warps, two simultaneous groups for the others."""
    rng = np.random.default_rng(seed)
    mask = rng.integers(1, 1 << 32, WARPS, dtype=np.uint32)
    mask[:3] = 0xFFFFFFFF, 1, 0x80000000
    active = mask_lanes(mask)
    masks = np.where(active, mask[:, None], np.uint32(0))
    group = rng.integers(0, 1 << 32, (WARPS, 1), dtype=np.uint32)
    mine = np.where(mask_lanes(group[:, 0]), mask[:, None] & group, mask[:, None] & ~group)
    masks[WARPS // 2 :] = np.where(active, mine, 0)[WARPS // 2 :]
    return rng, active, masks.astype(np.uint32)


def same(found, wanted, active):
    """Assert equality where lanes are active."""
    wanted = np.array(wanted)
    assert active.sum() > 200 and (np.asarray(found)[active] == wanted[active]).all()


@pytest.mark.parametrize("mode", warp.SHUFFLE_MODES)
def test_shfl(mode):
    rng, active, _ = draw_masks()
    a, b = rng.integers(0, 1 << 32, (2, WARPS, 32), dtype=np.uint32)
    c = rng.integers(0, 1 << 13, (WARPS, 32), dtype=np.uint32)
    value, inside = warp.shuffle(mode, a, b, c, active)
    wanted = [plain.shfl(mode, *rows) for rows in zip(a.tolist(), b.tolist(), c.tolist(), active, strict=True)]
    same(value, [[x for x, _ in row] for row in wanted], active)
    same(inside, [[p for _, p in row] for row in wanted], active)


@pytest.mark.parametrize("mode", warp.VOTE_MODES)
def test_vote(mode):
    rng, active, masks = draw_masks()
    p = rng.integers(0, 8, (WARPS, 32)) < rng.integers(0, 9, (WARPS, 1))
    same(warp.vote(mode, p, active, masks), [plain.vote(mode, *rows) for rows in zip(p, active, masks.tolist(), strict=True)], active)


def test_match():
    rng, active, masks = draw_masks()
    a = rng.integers(0, 1 + np.arange(WARPS)[:, None] % 4, (WARPS, 32)).astype(np.uint64) << np.uint64(33)
    rows = list(zip(a.tolist(), active, masks.tolist(), strict=True))
    same(warp.match_any(a, active, masks), [plain.match("any", *row) for row in rows], active)
    found, every = warp.match_all(a, active, masks)
    wanted = [plain.match("all", *row) for row in rows]
    same(found, [[x for x, _ in row] for row in wanted], active)
    same(every, [[p for _, p in row] for row in wanted], active)


@pytest.mark.parametrize("operator", ["add", "min", "max", "and", "or", "xor"])
def test_redux(operator):
    rng, active, masks = draw_masks()
    a = rng.integers(0, 1 << 32, (WARPS, 32), dtype=np.uint32)
    for kind in ("u32", "s32") if operator in ("add", "min", "max") else ("b32",):
        found = warp.reduce_integers(operator, kind, a, active, masks)
        same(found, [plain.redux(operator, kind, *rows) for rows in zip(a.tolist(), active, masks.tolist(), strict=True)], active)


def compute_reference(parts, given, active):
    """Compute an instruction, given by the parts of its opcode, on operands of warps, the membermask last."""
    masks = given[-1]
    if parts[0] == "shfl":
        return warp.shuffle(parts[2], *given[:3], active)
    if parts[0] == "vote":
        return (warp.vote(parts[2], given[0], active, masks),)
    if parts[0] == "match":
        return (warp.match_any(given[0], active, masks),) if parts[1] == "any" else warp.match_all(given[0], active, masks)
    if parts[0] == "redux":
        return (warp.reduce_integers(parts[2], parts[3], given[0], active, masks),)
    if parts[0] == "activemask":
        return (np.broadcast_to(warp.ballot(active), masks.shape),)
    leader = np.broadcast_to(warp.elect_leader(active, masks), masks.shape)
    return leader, leader == warp.lane_numbers()


def test_words_are_those_of_the_gpu():
    """Compare the active lanes, since the recording program skipped the others."""
    seen = 0
    for opcode, given, wanted in recorded():
        active = mask_lanes(given[-1][:, 0])
        for got, words in zip(compute_reference(opcode.split("."), given, active), wanted, strict=True):
            assert (np.asarray(got)[active] == words[active]).all(), opcode
            seen += int(active.sum())
    assert seen == 9990


# ---- statements


KINDS = {"%d": "b32", "%p": "pred", "%a": "b32", "%q": "pred", "%mask": "b32", "%x": "b64"}


def surroundings(checked=False):
    """Return the context of a statement in a function that has the registers."""
    function = Function("k", True, (), (), KINDS, (), (), {}, Position(1, 1))
    return Context(Module((9, 0), "sm_90a", 64, {}, ()), function, "sm_90a", checked)


def machine_after(opcode, *operands, checked=False, **registers):
    """Return the machine after a statement: one block, 64 threads."""
    machine = initial_machine(KINDS, 64)
    held = {**machine.registers, **{f"%{name}": jnp.asarray(value).reshape(1, 64) for name, value in registers.items() if name != "active"}}
    active = jnp.asarray(registers.get("active", np.ones(64, bool))).reshape(1, 64)
    machine = replace(machine, registers=held, active=active)
    statement = Statement(opcode, operands, None, Position(1, 1))
    step = warp.PREPARE[statement.name](statement, surroundings(checked))
    return step.apply(machine)


D, P, A, Q, MASK, X = (Register(name) for name in ("%d", "%p", "%a", "%q", "%mask", "%x"))
FULL = Integer(0xFFFFFFFF)


def test_statements_read_and_write_registers():
    a = np.arange(100, 164, dtype=np.uint32)
    machine = machine_after("shfl.sync.bfly.b32", Pair(D, P), A, Integer(1), Integer(31), FULL, a=a)
    assert (machine.registers["%d"][0] == (np.arange(64) ^ 1) + 100).all() and machine.registers["%p"].all()
    machine = machine_after("shfl.down.b32", D, A, Integer(30), Integer(31), a=a)
    assert machine.registers["%d"][0, 0] == 130 and machine.registers["%d"][0, 5] == 105 and not machine.registers["%p"].any()
    machine = machine_after("vote.sync.ballot.b32", D, Negated(Q), FULL, q=np.arange(64) % 2 == 0)
    assert (machine.registers["%d"] == 0xAAAAAAAA).all()
    assert machine_after("vote.any.pred", P, Q, q=np.arange(64) == 40).registers["%p"].sum() == 32
    machine = machine_after("match.all.sync.b64", Pair(D, P), X, FULL, x=(np.arange(64) // 32).astype(np.uint64))
    assert machine.registers["%p"].all() and (machine.registers["%d"] == 0xFFFFFFFF).all()
    machine = machine_after("elect.sync", Pair(Sink(), P), Integer(0xFFFFFFF0))
    assert np.flatnonzero(machine.registers["%p"][0]).tolist() == [4, 36]


def test_inactive_threads_keep_their_registers():
    active = np.arange(64) % 4 == 1
    machine = machine_after(
        "redux.sync.add.u32", D, A, MASK, a=np.ones(64, np.uint32), mask=np.full(64, 0x22222222, np.uint32), active=active
    )
    assert (machine.registers["%d"][0] == np.where(active, 8, 0)).all()
    machine = machine_after("activemask.b32", D, active=active)
    assert (machine.registers["%d"][0] == np.where(active, 0x22222222, 0)).all()


REDUCED = [("min.abs", 0.5), ("max.NaN", None), ("min", -3.0), ("max", 2.0), ("min.abs.NaN", None)]


@pytest.mark.parametrize("case", sample_cases(REDUCED, REDUCED[:2], lambda case: case[0]))
def test_redux_of_floats(case):
    name, wanted = case
    a = np.full(64, 0.5, np.float32)
    a[[1, 2, 7, 33, 34, 40]] = -3, 2, np.nan, -3, 2, np.nan
    found = np.asarray(machine_after(f"redux.sync.{name}.f32", D, A, FULL, a=a.view(np.uint32)).registers["%d"])
    assert (found == (0x7FFFFFFF if wanted is None else np.float32(wanted).view(np.uint32))).all()


def test_masks_are_checked():
    mask = np.full(64, 0xFFFFFFFE, np.uint32)
    machine = machine_after("redux.sync.add.u32", D, A, MASK, mask=mask, checked=True)
    noted = faults.first_fault(machine.faults)
    assert noted is not None and noted.message is faults.MESSAGES["member_mask"] and noted.message.error is UndefinedBehaviour
    assert noted.values == (0xFFFFFFFE, 0)
    noted = faults.first_fault(machine_after("redux.sync.add.u32", D, A, FULL, active=np.arange(64) != 3, checked=True).faults)
    assert noted is not None and noted.message is faults.MESSAGES["absent_member"]
    assert faults.first_fault(machine_after("redux.sync.add.u32", D, A, FULL, active=np.arange(64) != 3).faults) is None
    assert faults.first_fault(machine_after("redux.sync.add.u32", D, A, FULL, checked=True).faults) is None


@pytest.mark.parametrize(
    ("mode", "step", "lane"), [("bfly", 16, 16), ("down", 4, 16), ("idx", 20, 20), ("up", 1, None), ("bfly", 8, None), ("down", 0, None)]
)
def test_a_shuffle_from_a_lane_outside_the_membermask_is_undefined(mode, step, lane):
    """The source lane takes part in the statement with a membermask of its own, which the reader's does not name."""
    mask = np.where(np.arange(64) % 32 < 16, 0x0000FFFF, 0xFFFF0000).astype(np.uint32)
    active = np.arange(64) % 32 < 16 if mode == "up" else np.ones(64, bool)
    a, bound = np.arange(100, 164, dtype=np.uint32), Integer(0 if mode == "up" else 31)
    operands = f"shfl.sync.{mode}.b32", D, A, Integer(step), bound, MASK
    noted = faults.first_fault(machine_after(*operands, a=a, mask=mask, active=active, checked=True).faults)
    if lane is None:
        assert noted is None
        return
    assert noted is not None and noted.message.error is UndefinedBehaviour and noted.message is faults.MESSAGES["absent_source"]
    assert noted.values[0] == lane
    machine = machine_after(*operands, a=a, mask=mask)
    assert faults.first_fault(machine.faults) is None and machine.registers["%d"][0, noted.thread] == 100 + lane


@pytest.mark.parametrize(
    ("opcode", "operands"),
    [
        ("shfl.sync.left.b32", (D, A, A, A, A)), ("shfl.sync.idx.b32", (D, A, A, A)), ("vote.sync.some.pred", (P, Q, FULL)),
        ("vote.sync.all.b32", (P, Q, FULL)), ("match.any.b32", (D, A, FULL)), ("match.any.sync.b32", (Pair(D, P), A, FULL)),
        ("redux.sync.add.b32", (D, A, FULL)), ("redux.sync.add.f32", (D, A, FULL)), ("redux.sync.min.NaN.u32", (D, A, FULL)),
        ("activemask.b64", (D,)), ("elect.sync", (D, FULL)),
    ],
)  # fmt: skip
def test_what_is_none_is_refused(opcode, operands):
    statement = Statement(opcode, operands, None, Position(1, 1))
    with pytest.raises(Unsupported, match=r"not supported|expected|here the instruction takes"):
        warp.PREPARE[statement.name](statement, surroundings())
