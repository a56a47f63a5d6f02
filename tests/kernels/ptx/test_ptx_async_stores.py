"""`st.async`, `red.async`, `st.bulk` and `cp.reduce.async.bulk` against Python's integers, and the spellings that the assembler refuses."""

import numpy as np
import pytest
from support.sampling import sample_cases

from tcemu import ptx
from tcemu.base.errors import Unsupported

WIDTHS = {"32": 4, "64": 8}
KERNEL = """.version 8.6
.target {target}
.address_size 64
.visible .entry e(.param .u64 given, .param .u64 out) {{
    .reg .b64 %rd<20>; .reg .b32 %r<20>; .reg .pred %p<3>; .reg .f32 %f<5>; .reg .f64 %fd<3>; .reg .b16 %h<3>;
    .shared .align 16 .b8 tile[1024]; .shared .align 8 .b64 object;
    ld.param.u64 %rd1, [given]; ld.param.u64 %rd2, [out];
    mov.u32 %r1, %tid.x; mov.u32 %r2, %cluster_ctarank; mov.u32 %r3, tile; mov.u32 %r4, object; setp.eq.u32 %p1, %r1, 0;
    mad.lo.u32 %r5, %r2, 32, %r1; mul.wide.u32 %rd3, %r5, 16; add.u64 %rd4, %rd1, %rd3; ld.global.v2.u64 {{%rd5, %rd6}}, [%rd4];
    mad.lo.u32 %r6, %r1, 16, %r3; st.shared.v2.u64 [%r6], {{%rd5, %rd6}}; st.shared.v2.u64 [%r6+512], {{%rd5, %rd6}};
    @%p1 mbarrier.init.shared.b64 [%r4], 1; fence.proxy.async;
    barrier.cluster.arrive; barrier.cluster.wait;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], {bytes};
    xor.b32 %r7, %r2, 1; mapa.shared::cluster.u32 %r8, %r6, %r7; mapa.shared::cluster.u32 %r9, %r4, %r7; mapa.shared::cluster.u32 %r10, %r3,
    %r7; cvt.u32.u64 %r11, %rd5; shr.u64 %rd7, %rd5, 32; cvt.u32.u64 %r12, %rd7; mov.b32 %f1, %r11; mov.b32 %f2, %r12; mov.b64 %fd1, %rd5;
    {body}
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p2, [%r4], 0;
    @!%p2 bra WAIT;
    mul.wide.u32 %rd8, %r2, 1024; add.u64 %rd8, %rd2, %rd8; mul.wide.u32 %rd9, %r1, 16; add.u64 %rd8, %rd8, %rd9;
    ld.shared.v2.u64 {{%rd10, %rd11}}, [%r6]; st.global.v2.u64 [%rd8], {{%rd10, %rd11}};
    ld.shared.v2.u64 {{%rd10, %rd11}}, [%r6+512]; st.global.v2.u64 [%rd8+512], {{%rd10, %rd11}};
    barrier.cluster.arrive; barrier.cluster.wait;
    ret;
}}"""
RNG = np.random.default_rng(11)
GIVEN = RNG.integers(0, 1 << 64, (2, 32, 2), np.uint64)


def run(body, count, target="sm_90a", checked=False):
    """Return each block's 1,024 bytes of shared memory after `body`; its 16 bytes a thread, twice, came from the threads."""
    text = KERNEL.format(body=body, bytes=count, target=target)
    _, found = ptx.run(text, grid=2, block=32, cluster=2, args=[GIVEN, np.zeros((2, 1024), np.uint8)], target=target, checked=checked)
    return found


def before():
    """The 1,024 bytes of each block before `body`."""
    once = GIVEN.view(np.uint8).reshape(2, 512)
    return np.concatenate([once, once], axis=1)


STORES = {  # statement, bytes of a thread, and the words that it stores, by the numbers of the thread's own words of 32 bits
    "b32": ("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r8+512], %r11, [%r9];", (0,)),
    "weak f32": ("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%r8+512], %f2, [%r9];", (1,)),
    "u64": ("st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%r8+512], %rd6, [%r9];", (2, 3)),
    "f64": ("st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [%r8+512], %fd1, [%r9];", (0, 1)),
    "v2 s32": ("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.s32 [%r8+512], {%r12, %r11}, [%r9];", (1, 0)),
    "v4 b32": ("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%r8+512], {%r11, %r12, %r12, %r11}, [%r9];", (0, 1, 1, 0)),
    "v2 b64": ("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%r8+512], {%rd6, %rd5}, [%r9];", (2, 3, 0, 1)),
    "generic": ("cvt.u64.u32 %rd12, %r8; cvta.shared::cluster.u64 %rd12, %rd12; cvt.u64.u32 %rd13, %r9; "
                "cvta.shared::cluster.u64 %rd13, %rd13;"
                "st.async.weak.mbarrier::complete_tx::bytes.b32 [%rd12+512], %r11, [%rd13];", (0,)),
}  # fmt: skip


@pytest.mark.parametrize("name", sample_cases(STORES, {"v4 b32"}))
def test_stores_that_signal_a_barrier_of_another_block(name):
    body, words = STORES[name]
    wanted = before()
    mine = GIVEN.view(np.uint32).reshape(2, 32, 4)
    for rank in range(2):
        for thread in range(32):
            for i, word in enumerate(words):
                wanted[rank ^ 1, 512 + 16 * thread + 4 * i :][:4] = mine[rank, thread, word : word + 1].view(np.uint8)
    found = run(body, 128 * len(words), checked=True)
    assert np.count_nonzero(found != wanted) == 0


def signed(value, bits):
    return value - (value >> bits - 1 << bits)


OPERATIONS = {  # on unsigned integers of the type's width
    "inc": lambda old, b, bits: 0 if old >= b else old + 1,
    "dec": lambda old, b, bits: b if old == 0 or old > b else old - 1,
    "add": lambda old, b, bits: (old + b) % (1 << bits),
    "and": lambda old, b, bits: old & b,
    "or": lambda old, b, bits: old | b,
    "xor": lambda old, b, bits: old ^ b,
}


def apply_operation(operation, kind, old, b):
    """Return the new value, as unsigned integer."""
    bits = int(kind[1:])
    if operation in ("min", "max"):
        key = (lambda value: signed(value, bits)) if kind[0] == "s" else (lambda value: value)
        return (min if operation == "min" else max)(old, b, key=key)
    return OPERATIONS[operation](old, b, bits)


REDUCTIONS = [
    *(("inc", "u32"), ("dec", "u32"), ("add", "u32"), ("add", "s32"), ("add", "u64"), ("add", "s64")),
    *(("min", "u32"), ("min", "s32"), ("max", "u32"), ("max", "s32"), ("and", "b32"), ("or", "b32"), ("xor", "b32")),
]


@pytest.mark.parametrize("operation, kind", [pytest.param(*case, marks=pytest.mark.full) for case in REDUCTIONS])
def test_reductions_that_signal_a_barrier_of_another_block(operation, kind):
    """All 32 threads of a block reduce into one number of the other block, and into one each."""
    size = int(kind[1:]) // 8
    value = "%rd5" if size == 8 else "%r11"
    form = f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{operation}.{kind}"
    found = run(f"{form} [%r10+512], {value}, [%r9]; {form} [%r8], {value}, [%r9];", 64 * size, checked=True)
    wanted = before()
    dtype = np.dtype(f"u{size}")
    for rank in range(2):
        for thread in range(32):
            b = int(GIVEN[rank, thread, 0]) % (1 << 8 * size)
            for place in (512, 16 * thread):
                cell = wanted[rank ^ 1, place : place + size]
                cell[:] = np.array([apply_operation(operation, kind, int(cell.view(dtype)[0]), b)], dtype).view(np.uint8)
    assert np.count_nonzero(found != wanted) == 0


ARRIVE = "@%p1 mbarrier.complete_tx.shared.b64 [%r4], 8;"


@pytest.mark.full
def test_zeros_in_bulk():
    """A thread of each block fills 200 bytes from byte 24 on; sizes of 0 fill nothing."""
    body = f"mov.u64 %rd12, 200; @%p1 st.bulk.weak.shared::cta [%r3+24], %rd12, 0; @%p1 st.bulk.shared::cta [%r3+600], 0, 0; {ARRIVE}"
    wanted = before()
    wanted[:, 24:224] = 0
    assert np.count_nonzero(run(body, 8, "sm_100a") != wanted) == 0


ASYNC, RELAXED = (
    "st.async.shared::cluster.mbarrier::complete_tx::bytes",
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes",
)
REFUSED = {  # what ptxas 13.0 refuses for sm_90a, too
    f"{ASYNC}.v4.b64 [%r8], {{%rd1, %rd2, %rd3, %rd4}}, [%r9];": "v4 cannot be combined",
    f"{ASYNC}.b16 [%r8], %h1, [%r9];": "in place of b16",
    f"{ASYNC}.b32 [%r8], %r11;": "2 operands",
    "st.async.mmio.release.sys.global.b32 [%rd1], %r11;": "mmio is not supported",
    "red.async.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r8], %r11, [%r9];": "needs relaxed",
    f"{RELAXED}.add.f32 [%r8], %f1, [%r9];": "in place of f32",
    f"{RELAXED}.max.u64 [%r8], %rd5, [%r9];": "needs u32 or s32 in place",
    "st.bulk.weak.shared::cta [%r8], %rd5, 0;": "needs sm_100",
}


@pytest.mark.parametrize("statement", REFUSED)
def test_stores_that_are_refused(statement):
    with pytest.raises(Unsupported, match=REFUSED[statement]):
        run(statement, 8)


# ---- cp.reduce.async.bulk

BULK = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry e(.param .u64 given, .param .u64 out) {{
    .reg .b64 %rd<9>; .reg .b32 %r<9>; .reg .pred %p<3>;
    .shared .align 16 .b8 tile[512];
    ld.param.u64 %rd1, [given]; ld.param.u64 %rd2, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, tile; mov.u32 %r3, %ctaid.x;
    mad.lo.u32 %r4, %r3, 32, %r1; mul.wide.u32 %rd3, %r4, 16; add.u64 %rd3, %rd1, %rd3; ld.global.v2.u64 {{%rd4, %rd5}}, [%rd3];
    mad.lo.u32 %r5, %r1, 16, %r2; st.shared.v2.u64 [%r5], {{%rd4, %rd5}}; fence.proxy.async.shared::cta; bar.sync 0;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 cp.reduce.async.bulk.global.shared::cta.bulk_group.{form} [%rd2+16], [%r2], 480;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; ret;
}}"""
BULK_CASES = [
    *((operation, kind) for operation in ("min", "max") for kind in ("u32", "s32", "u64", "s64")),
    *(("add", "u32"), ("add", "s32"), ("add", "u64"), ("inc", "u32"), ("dec", "u32")),
    *((operation, kind) for operation in ("and", "or", "xor") for kind in ("b32", "b64")),
]


def reduce_bulk(form, given, out):
    return ptx.run(BULK.format(form=form), grid=3, block=32, args=[given, out], target="sm_90a")[1]


@pytest.mark.parametrize(
    "operation, kind", [pytest.param(*case, marks=[] if case == ("add", "u32") else [pytest.mark.full]) for case in BULK_CASES]
)
def test_bulk_reductions_of_integers(operation, kind):
    """Three blocks reduce 480 bytes each into the same memory, whose edges stay."""
    dtype = np.dtype(f"u{int(kind[1:]) // 8}")
    given = np.random.default_rng(5).integers(0, 256, (3, 512), np.uint8)
    out = np.random.default_rng(6).integers(0, 256, 512, np.uint8)
    wanted = out[16:496].view(dtype).tolist()
    for block in given:
        wanted = [apply_operation(operation, kind, old, b) for old, b in zip(wanted, block[:480].view(dtype).tolist(), strict=True)]
    found = reduce_bulk(f"{operation}.{kind}", given, out)
    assert np.array_equal(found[16:496].view(dtype), np.array(wanted, dtype))
    assert np.array_equal(found[:16], out[:16]) and np.array_equal(found[496:], out[496:])


@pytest.mark.full
@pytest.mark.parametrize(
    "form, dtype", [("add.f32", np.float32), ("add.f64", np.float64), ("add.noftz.f16", np.float16), ("max.f16", np.float16)]
)
def test_bulk_reductions_of_floats(form, dtype):
    """Normal numbers: each sum is rounded to nearest, block after block."""
    rng = np.random.default_rng(8)
    given = rng.standard_normal((3, 512 // np.dtype(dtype).itemsize)).astype(dtype)
    out = rng.standard_normal(512 // np.dtype(dtype).itemsize).astype(dtype)
    first, count = 16 // np.dtype(dtype).itemsize, 480 // np.dtype(dtype).itemsize
    wanted = out.copy()
    for block in given:
        part = wanted[first : first + count]
        part[:] = np.maximum(part, block[:count]) if "max" in form else part + block[:count]
    assert reduce_bulk(form, given, out).tobytes() == wanted.tobytes()


@pytest.mark.full
def test_a_bulk_reduction_into_another_block():
    form = "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32"
    found = run(f"@%p1 {form} [%r10+512], [%r3], 512, [%r9];", 512)
    wanted = before().view(np.uint32)
    mine = GIVEN.view(np.uint32).reshape(2, 128)
    wanted[:, 128:] += mine[::-1]
    assert np.array_equal(found.view(np.uint32), wanted)


BULK_REFUSED = {  # what ptxas 13.0 refuses, too
    "add.s64": "u32 or s32 or u64 or f32",
    "min.f32": "in place of f32",
    "add.f16": "needs noftz",
    "max.noftz.f16": "noftz cannot be combined",
    "xor.u32": "needs b32 or b64",
}


@pytest.mark.parametrize("form", BULK_REFUSED)
def test_bulk_reductions_that_are_refused(form):
    with pytest.raises(Unsupported, match=BULK_REFUSED[form]):
        reduce_bulk(form, np.zeros((3, 512), np.uint8), np.zeros(512, np.uint8))
