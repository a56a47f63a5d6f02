"""atom.exch.b128 and atom.cas.b128 against Python's integers, thread by thread."""

import numpy as np
import pytest

from tcemu.base.errors import Unsupported
from tcemu.ptx import Misaligned, OutOfBounds, PtxError, run

HEAD = """.version 8.4
.target sm_90
.address_size 64
.visible .entry k(.param .u64 memory, .param .u64 data) {
.reg .b32 %r<9>; .reg .b64 %d<12>; .reg .b128 %q<4>; .shared .align 16 .b8 tile[256];
mov.u32 %r0, %tid.x; ld.param.u64 %d0, [memory]; ld.param.u64 %d1, [data]; mul.wide.u32 %d2, %r0, 64; add.u64 %d1, %d1, %d2;
ld.global.v2.u64 {%d3, %d4}, [%d1]; ld.global.v2.u64 {%d5, %d6}, [%d1+16]; ld.global.u64 %d7, [%d1+32]; add.u64 %d7, %d7, %d0;
mov.b128 %q1, {%d3, %d4}; mov.b128 %q2, {%d5, %d6};
"""
TAIL = "mov.b128 {%d8, %d9}, %q0; st.global.v2.u64 [%d1+48], {%d8, %d9}; ret; }"
THREADS = 40


def drawn():
    """Memory, and for each thread two values of 128 bits and an offset; few values, so that some comparisons hold."""
    rng = np.random.default_rng(4)
    memory, data = rng.integers(0, 2, (4, 2)).astype(np.uint64) << np.uint64(63), np.zeros((THREADS, 8), np.uint64)
    data[:, :4] = rng.integers(0, 2, (THREADS, 4)).astype(np.uint64) << np.uint64(63)
    data[:, 4] = 16 * rng.integers(0, 4, THREADS)
    return memory, data


@pytest.mark.parametrize("order", ["", ".acq_rel.gpu", ".relaxed.sys"])
@pytest.mark.parametrize("operation", ["exch", "cas"])
def test_atomics_of_128_bits(operation, order):
    memory, data = drawn()
    statement = f"atom{order}.global.{operation}.b128 %q0, [%d7], %q1{', %q2' * (operation == 'cas')};"
    after, found = run(HEAD + statement + TAIL, grid=1, block=THREADS, args=[memory, data], target="H100", checked=True)
    words, stored = [tuple(row) for row in memory.tolist()], 0
    for thread, (b0, b1, c0, c1, offset, *_) in enumerate(data.tolist()):
        at = offset // 16
        assert tuple(found[thread, 6:].tolist()) == words[at], thread
        if operation == "exch" or words[at] == (b0, b1):
            words[at], stored = ((b0, b1) if operation == "exch" else (c0, c1)), stored + 1
    assert [tuple(row) for row in after.tolist()] == words
    assert stored == THREADS if operation == "exch" else 3 < stored < THREADS - 3


def test_shared_memory_guards_and_sinks():
    body = """mov.u32 %r1, tile; mov.b64 %d10, 0; st.shared.v2.u64 [%r1], {%d10, %d10}; bar.sync 0;
    setp.lt.u32 %p, %r0, 3; @%p atom.shared.exch.b128 _, [%r1], %q1; bar.sync 0; atom.shared.cas.b128 %q0, [%r1], %q1, %q1;"""
    text = (HEAD + body + TAIL).replace(".reg .b32 %r<9>;", ".reg .b32 %r<9>; .reg .pred %p;")
    memory, data = drawn()
    data[:, :2] = np.arange(2 * THREADS).reshape(-1, 2)
    found = run(text, grid=1, block=32, args=[memory, data[:32]], target="H100")[1]
    assert found[:, 6:].tolist() == [[4, 5]] * 32


@pytest.mark.parametrize(
    ("statement", "error", "said"),
    [
        ("atom.global.exch.b128 %q0, [%d0+8], %q1;", Misaligned, "16 bytes of global memory must lie at a multiple of 16"),
        ("atom.global.exch.b128 %q0, [%d7+4096], %q1;", OutOfBounds, "16 bytes of global memory"),
        ("atom.global.add.b128 %q0, [%d7], %q1;", Unsupported, "not supported"),
        ("atom.global.exch.b128 %q0, [%d7], %d1;", Unsupported, "operand 3 is %d1"),
        ("atom.global.exch.b128 %r1, [%d7], %q1;", Unsupported, "operand 1 is %r1"),
        ("add.u64 %q0, %q1, %q1;", (Unsupported, PtxError), "128 bits is not supported"),
        ("red.global.add.b128 [%d7], %q1;", (Unsupported, PtxError), "128 bits is not supported"),
    ],
)
def test_what_is_wrong_is_named(statement, error, said):
    memory, data = drawn()
    with pytest.raises(error, match=said):
        run(HEAD + statement + TAIL, grid=1, block=THREADS, args=[memory, data], target="H100")
