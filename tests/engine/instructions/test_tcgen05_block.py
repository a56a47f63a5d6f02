"""A block that issues tcgen05 instructions on arrays: right programs give what the single functions give, and faults are named."""

import re

import jax
import numpy as np
import pytest
from support.tcgen05_operands import place, result

import tcemu
from tcemu.engine.instructions import tcgen05
from tcemu.engine.instructions.tcgen05_faults import Tcgen05Fault
from tcemu.engine.isa.tcgen05_descriptors import encode_instruction_descriptor
from tcemu.engine.layouts.tcgen05_memory import encode_tcgen05_descriptor
from tcemu.instructions import Tcgen05Block

B200 = "sm_100a"
OP = tcemu.parse("tcgen05.mma.cta_group::1.kind::f16.m128n16k16.f32.f16.f16")
WIDE = tcemu.parse("tcgen05.mma.cta_group::1.kind::f16.m128n32k16.f32.f16.f16")
A, B, C, (SHARED, TMEM), (A_DESC, B_DESC) = place(OP, 0)
LOAD, STORE = "tcgen05.ld.sync.aligned.32x32b.x16.b32", "tcgen05.st.sync.aligned.32x32b.x16.b32"
COPY, SHIFT = "tcgen05.cp.cta_group::1.128x256b", "tcgen05.shift.cta_group::1.down"
ROWS = encode_tcgen05_descriptor(0, 128, 256, 0)


def start(checked=True):
    """A block with 64 columns, whose D is stored and whose operands are in shared memory."""
    block = Tcgen05Block(SHARED, target=B200, checked=checked)
    base, block = block.alloc(64)
    assert base == 0
    for warp in range(4):
        block = block.st(STORE, 0, TMEM[32 * warp : 32 * warp + 32, :16], warp=warp)
    return block.wait_store()


def multiply(block, **changes):
    arguments = {"d": 0, "b_desc": B_DESC, "idesc": None, "a_desc": A_DESC} | changes
    return block.mma(arguments.pop("op", OP), arguments.pop("d"), arguments.pop("b_desc"), arguments.pop("idesc"), **arguments)


def test_a_right_program_gives_the_product():
    block = multiply(start()).commit().wait()
    parts = []
    for warp in range(4):
        part, block = block.ld(LOAD, 0, warp=warp)
        parts.append(np.asarray(part))
    block = block.wait_load().relinquish_alloc_permit().dealloc(0, 64)
    block.exit()
    assert block.notes == ()
    found = np.zeros((128, 512), np.uint32)
    found[:, :16] = np.concatenate(parts)
    want = np.asarray(tcemu.dot(OP, A, B.T.copy(), C, target=B200))
    assert (result(OP, found, 0) == want).all()


def test_a_block_without_checked_mode_may_be_traced():
    def program(shared, address):
        return multiply(Tcgen05Block(shared, TMEM, target=B200), d=address).tmem

    found = jax.jit(program)(SHARED, np.uint32(0))
    assert (np.asarray(found) == np.asarray(tcgen05.mma(OP, 0, B_DESC, None, SHARED, TMEM, a_desc=A_DESC, target=B200))).all()
    with pytest.raises(TypeError, match="known before tracing"):
        jax.jit(lambda address: multiply(start(), d=address).tmem)(np.uint32(0))


def test_copies_shifts_and_stores_to_shared_memory():
    words = np.arange(1024, dtype=np.uint32)
    block = start().store_shared(0, words).fence_proxy_async().cp(COPY, 32, ROWS).commit().wait().shift(SHIFT, 32).commit().wait()
    part, block = block.ld("tcgen05.ld.sync.aligned.32x32b.x8.b32", 32 | 32 << 16, warp=1)
    row = lambda i: np.concatenate([words[(16 * (i % 8) + 256 * (i // 8) + 128 * u) // 4 :][:4] for u in range(2)])
    assert (np.asarray(part) == [row(min(lane + 1, 63)) for lane in range(32, 64)]).all()
    assert block.wait_load().dealloc(0, 64).notes == ()


PAIR = tcemu.parse("tcgen05.mma.cta_group::2.kind::f16.m256n16k16.f32.f16.f16")


@pytest.mark.full
def test_a_pair_of_blocks():
    a, b, c, (shared, tmem), (a_desc, b_desc) = place(PAIR, 0)
    address, block = Tcgen05Block(shared, tmem, target=B200, cta_group=2, checked=True).alloc(32)
    for warp in range(4):
        registers = tmem[:, 32 * warp : 32 * warp + 32, :16]
        block = block.st(STORE, address, registers, warp=warp)
    block = block.wait_store().mma(PAIR, address, b_desc, a_desc=a_desc).commit().wait()
    parts = [block.ld(LOAD, address, warp=warp)[0] for warp in range(4)]
    found = np.zeros((2, 128, 512), np.uint32)
    found[:, :, :16] = np.concatenate([np.asarray(part) for part in parts], axis=1)
    assert (result(PAIR, found, 0) == np.asarray(tcemu.dot(PAIR, a, b.T.copy(), c, target=B200))).all()


def store(block, column=0, warp=0):
    return block.st(STORE, column, np.zeros((32, 16), np.uint32), warp=warp)


WORDS = np.zeros(4, np.uint32)
FAULTS = {
    "a load before the commit": (lambda: multiply(start()).ld(LOAD, 0, warp=0), Tcgen05Fault.UNFINISHED_WORK),
    "a load before the wait": (lambda: multiply(start()).commit().ld(LOAD, 0, warp=0), Tcgen05Fault.UNFINISHED_WORK),
    "a wait for work after the commit": (lambda: multiply(start().commit()).wait().ld(LOAD, 0, warp=0), Tcgen05Fault.UNFINISHED_WORK),
    "a store over A of a product": (
        lambda: store(multiply(store(start(), 32).wait_store(), a_tmem=32, a_desc=None), 32), Tcgen05Fault.UNFINISHED_WORK,
    ),
    "a shift of what is being copied": (lambda: start().cp(COPY, 32, ROWS).shift(SHIFT, 32), Tcgen05Fault.UNORDERED_WORK),
    "a product of what is being stored": (lambda: multiply(store(start())), Tcgen05Fault.STORE_WITHOUT_WAIT),
    "a product over what is being loaded": (lambda: multiply(start().ld(LOAD, 0, warp=0)[1]), Tcgen05Fault.LOAD_WITHOUT_WAIT),
    "a load of what is being stored": (lambda: store(start()).ld(LOAD, 0, warp=0), Tcgen05Fault.STORE_WITHOUT_WAIT),
    "a store over what is being loaded": (lambda: store(start().ld(LOAD, 0, warp=0)[1]), Tcgen05Fault.LOAD_WITHOUT_WAIT),
    "another shape of the accumulator": (
        lambda: multiply(multiply(start()), op=WIDE, enable_input_d=False, b_desc=ROWS), Tcgen05Fault.UNORDERED_WORK,
    ),
    "D is A of the next product": (
        lambda: multiply(multiply(start()), a_tmem=0, a_desc=None, d=32, enable_input_d=False), Tcgen05Fault.UNORDERED_WORK,
    ),
    "shared memory that a product reads": (lambda: multiply(start()).store_shared(16384, WORDS), Tcgen05Fault.SHARED_MEMORY_IN_USE),
    "no fence.proxy.async": (lambda: multiply(start().store_shared(16384, WORDS)), Tcgen05Fault.PROXY_FENCE_MISSING),
    "a load of what nothing has written": (lambda: start().ld(LOAD, 32, warp=0), Tcgen05Fault.UNWRITTEN_CELLS),
    "D that nothing has written": (lambda: multiply(start(), d=32), Tcgen05Fault.UNWRITTEN_CELLS),
    "columns beyond the allocation": (lambda: start().ld(LOAD, 56, warp=0), Tcgen05Fault.UNALLOCATED_COLUMNS),
    "columns that are freed while a product uses them": (lambda: multiply(start()).dealloc(0, 64), Tcgen05Fault.FREED_IN_USE),
    "an address that alloc has not given": (lambda: start().dealloc(32, 32), Tcgen05Fault.UNKNOWN_ALLOCATION),
    "a part of an allocation": (lambda: start().dealloc(0, 32), Tcgen05Fault.OTHER_SIZE),
    "columns left at the exit": (lambda: start().exit(), Tcgen05Fault.NOT_FREED),
    "no permit": (lambda: start().relinquish_alloc_permit().alloc(32), Tcgen05Fault.NO_PERMIT),
    "a larger allocation": (lambda: start().alloc(128), Tcgen05Fault.LARGER_ALLOCATION),
    "48 columns": (lambda: start().alloc(48), Tcgen05Fault.ILLEGAL_SIZE),
    "the quarter of another warp": (lambda: start().ld(LOAD, 32 << 16, warp=2), Tcgen05Fault.OTHER_QUARTER),
    "a descriptor of wgmma": (lambda: multiply(start(), b_desc=B_DESC & ~(1 << 46)), Tcgen05Fault.ILLEGAL_DESCRIPTOR),
    "a lane of D": (lambda: multiply(start(), d=16 << 16), Tcgen05Fault.LANE_OF_D),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_by_name(name):
    program, fault = FAULTS[name]
    with pytest.raises(tcemu.UndefinedBehaviour, match=re.sub(r"\\\{\\\}", ".*", re.escape(fault.value.text))):
        program()


def test_a_collector_that_nothing_has_filled_is_a_note():
    filled = ["tcgen05.mma.cta_group::1.kind::f16" + use for use in (".collector::a::fill", ".collector::a::lastuse")]
    idesc = encode_instruction_descriptor(OP)
    right = multiply(multiply(start(), op=filled[0], idesc=idesc), op=filled[1], idesc=idesc)
    assert right.notes == ()
    assert "collector buffer a" in multiply(start(), op=filled[1], idesc=idesc).notes[0]


def test_an_allocation_that_waits_for_ever():
    with pytest.raises(tcemu.UndefinedBehaviour, match="waits for ever"):
        Tcgen05Block(SHARED, target=B200).alloc(512)[1].alloc(32)
