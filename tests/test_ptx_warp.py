"""Instructions that a warp does together: against plain Python, against the words of an H200, and as statements on a machine."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ptx_warp_reference as plain
from support.ptx_recorded import warps as recorded

from tcemu.errors import UndefinedBehaviour, Unsupported
from tcemu.ptx import faults, warp
from tcemu.ptx.context import Context
from tcemu.ptx.machine import begin
from tcemu.ptx.module import Integer, Negated, Pair, Place, Register, Sink, Statement

WARPS = 24


@pytest.fixture(autouse=True)
def wide_integers():
    with jax.enable_x64(True):
        yield


def lanes_of(mask):
    return (mask[:, None] >> np.arange(32, dtype=np.uint32)) & 1 == 1


def drawn(seed=3):
    """Active lanes, and masks: of half the warps all active lanes, of the others two groups that act at once."""
    rng = np.random.default_rng(seed)
    mask = rng.integers(1, 1 << 32, WARPS, dtype=np.uint32)
    mask[:3] = 0xFFFFFFFF, 1, 0x80000000
    active = lanes_of(mask)
    masks = np.where(active, mask[:, None], np.uint32(0))
    group = rng.integers(0, 1 << 32, (WARPS, 1), dtype=np.uint32)
    mine = np.where(lanes_of(group[:, 0]), mask[:, None] & group, mask[:, None] & ~group)
    masks[WARPS // 2 :] = np.where(active, mine, 0)[WARPS // 2 :]
    return rng, active, masks.astype(np.uint32)


def same(found, wanted, active):
    """Equal where lanes are active."""
    wanted = np.array(wanted)
    assert active.sum() > 200 and (np.asarray(found)[active] == wanted[active]).all()


@pytest.mark.parametrize("mode", warp.MODES)
def test_shfl(mode):
    rng, active, _ = drawn()
    a, b = rng.integers(0, 1 << 32, (2, WARPS, 32), dtype=np.uint32)
    c = rng.integers(0, 1 << 13, (WARPS, 32), dtype=np.uint32)
    value, inside = warp.shuffle(mode, a, b, c, active)
    wanted = [plain.shfl(mode, *rows) for rows in zip(a.tolist(), b.tolist(), c.tolist(), active, strict=True)]
    same(value, [[x for x, _ in row] for row in wanted], active)
    same(inside, [[p for _, p in row] for row in wanted], active)


@pytest.mark.parametrize("mode", warp.VOTES)
def test_vote(mode):
    rng, active, masks = drawn()
    p = rng.integers(0, 8, (WARPS, 32)) < rng.integers(0, 9, (WARPS, 1))
    same(warp.vote(mode, p, active, masks), [plain.vote(mode, *rows) for rows in zip(p, active, masks.tolist(), strict=True)], active)


def test_match():
    rng, active, masks = drawn()
    a = rng.integers(0, 1 + np.arange(WARPS)[:, None] % 4, (WARPS, 32)).astype(np.uint64) << np.uint64(33)
    rows = list(zip(a.tolist(), active, masks.tolist(), strict=True))
    same(warp.match_any(a, active, masks), [plain.match("any", *row) for row in rows], active)
    found, every = warp.match_all(a, active, masks)
    wanted = [plain.match("all", *row) for row in rows]
    same(found, [[x for x, _ in row] for row in wanted], active)
    same(every, [[p for _, p in row] for row in wanted], active)


@pytest.mark.parametrize("operator", ["add", "min", "max", "and", "or", "xor"])
def test_redux(operator):
    rng, active, masks = drawn()
    a = rng.integers(0, 1 << 32, (WARPS, 32), dtype=np.uint32)
    for kind in ("u32", "s32") if operator in ("add", "min", "max") else ("b32",):
        found = warp.reduce_integers(operator, kind, a, active, masks)
        same(found, [plain.redux(operator, kind, *rows) for rows in zip(a.tolist(), active, masks.tolist(), strict=True)], active)


def computed(parts, given, active):
    """What an instruction, by the parts of its opcode, makes of the operands of warps, the membermask last."""
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
    leader = np.broadcast_to(warp.leader_of(active, masks), masks.shape)
    return leader, leader == warp.lanes()


def test_words_are_those_of_the_gpu():
    """Of the lanes that are active: the program that recorded them had the others pass by."""
    seen = 0
    for opcode, given, wanted in recorded():
        active = lanes_of(given[-1][:, 0])
        for got, words in zip(computed(opcode.split("."), given, active), wanted, strict=True):
            assert (np.asarray(got)[active] == words[active]).all(), opcode
            seen += int(active.sum())
    assert seen == 9990


# ---- statements


KINDS = {"%d": "b32", "%p": "pred", "%a": "b32", "%q": "pred", "%mask": "b32", "%x": "b64"}


def stepped(opcode, *operands, checked=False, **registers):
    """The machine after a statement: one block, 64 threads."""
    machine = begin(KINDS, threads=64)
    held = {**machine.registers, **{f"%{name}": jnp.asarray(value).reshape(1, 64) for name, value in registers.items() if name != "active"}}
    active = jnp.asarray(registers.get("active", np.ones(64, bool))).reshape(1, 64)
    machine = replace(machine, registers=held, active=active)
    statement = Statement(opcode, operands, None, Place(1, 1))
    step = warp.PREPARE[statement.name](statement, Context(None, None, "sm_90a", checked))  # type: ignore[arg-type]
    return step.run(machine)


D, P, A, Q, MASK, X = (Register(name) for name in ("%d", "%p", "%a", "%q", "%mask", "%x"))
FULL = Integer(0xFFFFFFFF)


def test_statements_read_and_write_registers():
    a = np.arange(100, 164, dtype=np.uint32)
    machine = stepped("shfl.sync.bfly.b32", Pair(D, P), A, Integer(1), Integer(31), FULL, a=a)
    assert (machine.registers["%d"][0] == (np.arange(64) ^ 1) + 100).all() and machine.registers["%p"].all()
    machine = stepped("shfl.down.b32", D, A, Integer(30), Integer(31), a=a)
    assert machine.registers["%d"][0, 0] == 130 and machine.registers["%d"][0, 5] == 105 and not machine.registers["%p"].any()
    machine = stepped("vote.sync.ballot.b32", D, Negated(Q), FULL, q=np.arange(64) % 2 == 0)
    assert (machine.registers["%d"] == 0xAAAAAAAA).all()
    assert stepped("vote.any.pred", P, Q, q=np.arange(64) == 40).registers["%p"].sum() == 32
    machine = stepped("match.all.sync.b64", Pair(D, P), X, FULL, x=(np.arange(64) // 32).astype(np.uint64))
    assert machine.registers["%p"].all() and (machine.registers["%d"] == 0xFFFFFFFF).all()
    machine = stepped("elect.sync", Pair(Sink(), P), Integer(0xFFFFFFF0))
    assert np.flatnonzero(machine.registers["%p"][0]).tolist() == [4, 36]


def test_inactive_threads_keep_their_registers():
    active = np.arange(64) % 4 == 1
    machine = stepped("redux.sync.add.u32", D, A, MASK, a=np.ones(64, np.uint32), mask=np.full(64, 0x22222222, np.uint32), active=active)
    assert (machine.registers["%d"][0] == np.where(active, 8, 0)).all()
    machine = stepped("activemask.b32", D, active=active)
    assert (machine.registers["%d"][0] == np.where(active, 0x22222222, 0)).all()


@pytest.mark.parametrize(("name", "wanted"), [("min", -3.0), ("min.abs", 0.5), ("max", 2.0), ("max.NaN", None), ("min.abs.NaN", None)])
def test_redux_of_floats(name, wanted):
    a = np.full(64, 0.5, np.float32)
    a[[1, 2, 7, 33, 34, 40]] = -3, 2, np.nan, -3, 2, np.nan
    found = np.asarray(stepped(f"redux.sync.{name}.f32", D, A, FULL, a=a.view(np.uint32)).registers["%d"])
    assert (found == (0x7FFFFFFF if wanted is None else np.float32(wanted).view(np.uint32))).all()


def test_masks_are_checked():
    mask = np.full(64, 0xFFFFFFFE, np.uint32)
    machine = stepped("redux.sync.add.u32", D, A, MASK, mask=mask, checked=True)
    noted = faults.found(machine.faults)
    assert noted is not None and noted.message is faults.MESSAGES["member_mask"] and noted.message.error is UndefinedBehaviour
    assert noted.values == (0xFFFFFFFE, 0)
    noted = faults.found(stepped("redux.sync.add.u32", D, A, FULL, active=np.arange(64) != 3, checked=True).faults)
    assert noted is not None and noted.message is faults.MESSAGES["absent_member"]
    assert faults.found(stepped("redux.sync.add.u32", D, A, FULL, active=np.arange(64) != 3).faults) is None
    assert faults.found(stepped("redux.sync.add.u32", D, A, FULL, checked=True).faults) is None


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
    statement = Statement(opcode, operands, None, Place(1, 1))
    with pytest.raises(Unsupported, match="known is"):
        warp.PREPARE[statement.name](statement, Context(None, None, "sm_90a", False))  # type: ignore[arg-type]
