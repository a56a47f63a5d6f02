"""The engine of `tcemu.ptx`: memory, control flow, calls, barriers, atomics, arguments and errors, against NumPy and Python."""

from __future__ import annotations

import re
import sys
from itertools import pairwise

import numpy as np
import pytest
from support import ptx_run_kernels as kernels
from support.ptx_run_kernels import module

from tcemu import ptx
from tcemu.base.errors import UndefinedBehaviour, Unsupported
from tcemu.kernels.ptx.linker.linked_kernel import link
from tcemu.kernels.ptx.runtime.launch_shape import LaunchShape
from tcemu.kernels.ptx.runtime.scheduler import StepLimit
from tcemu.kernels.ptx.simt.faults import Misaligned, OutOfBounds, Trapped

GIVEN = np.random.default_rng(5).integers(0, 1 << 32, 128, dtype=np.uint32)
THREAD = np.arange(128) % 64
SHARED = ".shared .align 8 .b8 bytes[256]; .shared .align 4 .b32 word[4];"


def launch_text(text, given=GIVEN, n=77, **more):
    return ptx.run(text, grid=2, block=64, args=[given, np.zeros(128, np.uint32), n], target="sm_80", **more)[1]


def equal(found, wanted):
    wanted = np.asarray(wanted).astype(np.uint64).astype(np.uint32)
    wrong = np.flatnonzero(found != wanted)
    assert wrong.size == 0, f"{wrong.size} of {found.size}: {wrong[:5]} {found[wrong[:5]]} {wanted[wrong[:5]]}"


# ---- what kernels compute


def test_calls_constants_and_variables():
    given = GIVEN % 100
    first = np.where(given > 50, 2 * given, given + 9).astype(np.int64)
    wanted = np.where(THREAD < 32, first, 2 * first) + THREAD + np.array([3, 1, 4, 1])[THREAD % 4] * 1000 + 700000
    equal(launch_text(module(kernels.CALLS, kernels.FUNCTIONS), given), wanted)


def test_threads_part_and_meet_again():
    def one(x):
        result = 0
        while True:
            result = (result + 1, result * 3, result ^ x, result - 5)[x & 3] & 0xFFFFFFFF
            x >>= 2
            if not x:
                return result

    equal(launch_text(module(kernels.SWITCH)), [one(int(x)) for x in GIVEN])


def test_parts_of_words_and_address_spaces():
    found = launch_text(module(SHARED + kernels.BYTES))
    blocks = GIVEN.reshape(2, 64)
    byte, half = blocks.astype(np.uint8), blocks.astype(np.uint16).astype(np.int64)
    thread = np.arange(64)
    wanted = (
        byte[:, ::-1].astype(np.int8).astype(np.int64) + half[:, ::-1] + 3 * half[:, thread // 4 * 4 + 2] + 5 * byte.astype(np.int64) + 1
    )
    equal(found, (wanted + 7 * thread).ravel() % 2**32)


def test_barriers():
    given = np.where(np.arange(128) < 64, GIVEN % 100, 5).astype(np.uint32)
    below = (given < 77).reshape(2, 64)
    wanted = below.sum(1) + 1000 * below.all(1) + 2000 * (~below).any(1)
    wanted = wanted[:, None] + 10000 * np.where(np.arange(64) < 32, 1, 77)
    wanted[:, 63] = 0  # exits before the last barrier
    equal(launch_text(module(SHARED + kernels.MEETING), given), wanted.ravel())


def test_blocks_take_turns_by_a_lock():
    declared = ".global .align 4 .b32 lock[2];"
    found = launch_text(module(kernels.LOCK, declared))
    holders = THREAD % 16 == 0
    assert int(GIVEN[holders].astype(np.uint64).sum() % 2**32) in found[holders]  # the last holder's sum has all: none was lost
    assert not found[~holders].any()


def test_who_waits_lets_the_others_go_on():
    found = launch_text(module(kernels.TURNS, ".global .align 4 .b32 lock[3];"))
    assert int(GIVEN.astype(np.uint64).sum() % 2**32) in found


def test_atomics_go_one_after_the_other():
    found = launch_text(module(SHARED + kernels.ATOMS))
    wanted = []
    for block in GIVEN.reshape(2, 64):
        total, ring, largest = 0, 5, 0
        for x in map(int, block):
            wanted.append((ring * 65536 + total) % 2**32 ^ largest)
            total, ring, largest = (total + x) % 2**32, 0 if ring >= 9 else ring + 1, max(largest, x - (x >> 31 << 32))
    equal(found, wanted)


def test_of_threads_that_store_in_one_place_the_last_one_wins():
    equal(launch_text(module(SHARED + "st.shared.u32 [word], %r1; bar.sync 0; ld.shared.u32 %r5, [word];")), np.full(128, 63))


def test_an_address_may_begin_with_a_special_register():
    body = "mov.u32 %r6, bytes; shr.u32 %r6, %r6, 31; st.shared.u8 [%tid.x], %r3; bar.sync 0; ld.shared.u8 %r5, [%laneid+32];"
    equal(launch_text(module(SHARED + body)), (GIVEN & 0xFF).reshape(2, 2, 32)[:, [1, 1]].ravel())


def test_special_registers():
    thread = THREAD
    equal(launch_text(module(kernels.REGISTERS)), thread % 32 + thread // 32 * 100 + 2000 + thread % 32 * 10000 + 1000000 + 1)


def test_cases_are_launches_of_their_own():
    text = module("mad.lo.u32 %r5, %r3, 3, %r4;")
    given = np.stack([GIVEN, GIVEN[::-1], GIVEN ^ 5])
    numbers = np.array([1, 2, 3], np.uint32)
    before = given.copy()
    out = ptx.run(text, grid=2, block=64, args=[given, np.zeros_like(given), numbers], target="H100", cases=3)
    equal(out[1].ravel(), (given.astype(np.uint64) * 3 + numbers[:, None]).ravel() % 2**32)
    assert (given == before).all() and out[0].dtype == given.dtype


def test_blocks_in_chunks(monkeypatch):
    monkeypatch.setattr(sys.modules["tcemu.kernels.ptx.runtime.kernel_runner"], "CHUNK_BYTES", 1)  # one block at a time
    declared = ".global .align 4 .b32 counter[1];"
    body = "atom.global.add.u32 %r6, [counter], 1; mov.u32 %r7, %ctaid.x; sub.u32 %r5, %r6, %r1; mad.lo.u32 %r5, %r7, 1000, %r5;"
    equal(launch_text(module(body, declared)), np.where(np.arange(128) < 64, 0, 1064))
    with pytest.raises(Trapped, match=r"block \(1, 0, 0\), thread \(6, 0, 0\)"):
        launch_text(module("setp.eq.u32 %p1, %r2, 70; @%p1 trap;"))


STRUCT = (
    kernels.HEAD
    + """.entry k(.param .align 8 .b8 s[16], .param .f32 f, .param .u8 flag, .param .u64 out) {
    .reg .b32 %r<8>; .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [out]; ld.param.v2.u32 {%r1, %r2}, [s+8]; ld.param.f32 %r3, [f]; ld.param.s8 %r4, [flag]; ld.param.u16 %r5, [s];
    st.global.v4.u32 [%rd1], {%r1, %r2, %r3, %r4}; st.global.u32 [%rd1+16], %r5; }"""
)


def test_numbers_and_structs_by_value():
    struct = np.array([(7, 3, 0xFFFFFFFE)], np.dtype([("a", "<u8"), ("b", "<u4"), ("c", "<u4")]))[0]
    (out,) = ptx.run(STRUCT, grid=1, block=1, args=[struct, 1.5, -2, np.zeros(5, np.int32)], target="sm_80")
    assert out.tolist() == [3, -2, 0x3FC00000, -2, 7]


# ---- errors

SMALL = ".shared .align 4 .b8 s[250]; mov.u32 %r6, s; mad.lo.u32 %r6, %r1, 4, %r6;"
LOUD = {
    "above": (OutOfBounds, "ld.global.u32 %r5, [%rd1+260];",
              r"line 11: ld.global.u32: block \(0, 0, 0\), thread \(63, .*byte 512 of in, which has 512"),
    "below": (OutOfBounds, "ld.global.u32 %r5, [%rd1-4];", r"block \(0, 0, 0\), thread \(0, 0, 0\).*4 bytes before in"),
    "shared": (OutOfBounds, SMALL + "st.shared.u32 [%r6], 1;", r"thread \(62, 0, 0\).*0xf8; the block has 250 bytes"),
    "null": (OutOfBounds, "ld.u32 %r5, [16];", "near no buffer"),
    "misaligned": (Misaligned, "ld.global.v2.u32 {%r5, %r6}, [%rd1];",
                   r"thread \(1, 0, 0\): 8 bytes .* must lie at a multiple of 8"),
    "trap": (Trapped, "setp.eq.u32 %p1, %r2, 70; @%p1 trap;", r"block \(1, 0, 0\), thread \(6, 0, 0\)"),
    "deadlock": (UndefinedBehaviour, "setp.gt.u32 %p1, %r1, 5; @%p1 bar.sync 0, 64;", "deadlock.*116.*at a barrier"),
    "barrier": (UndefinedBehaviour, "bar.sync 0, 33;", "multiple of 32"),
    "endless": (StepLimit, "LOOP: setp.gt.u32 %p1, %r1, 5; @%p1 bra LOOP;", "step_limit=500.*before line 11"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOUD)
def test_faults_say_who_and_where(name):
    error, body, said = LOUD[name]
    with pytest.raises(error, match=said):
        launch_text(module(body), step_limit=500)


REFUSED = {
    "frobnicate.u32 %r5, %r3;": r"line 12, column 1: frobnicate.u32: 'frobnicate'",
    "add.u32 %r5, %nothing, 1;": "%nothing",
    "ld.global.u33 %r5, [%rd1];": "ld.global.u33",
    "st.const.u32 [%rd1], %r5;": "no qualifier const",
    "atom.global.add.b32 %r5, [%rd1], 1;": "u32 or s32 or u64",
    "call vprintf;": "CUDA runtime",
    "bar.sync.sideways 0;": "sideways",
    "mov.u32 %r5, %envreg3;": "envreg3",
    "@%r1 add.u32 %r5, %r3, 1;": ".pred",
    "red.global.cas.b32 [%rd1], 1;": "cas",
}


@pytest.mark.parametrize("body", REFUSED)
def test_what_is_not_run_is_refused_before_anything_runs(body):
    with pytest.raises((Unsupported, ptx.PtxError), match=REFUSED[body]):
        launch_text(module("trap;\n" + body, ".extern .func vprintf;"))


def test_recursion_without_an_end_is_named():
    declared = ".func again();\n.func again() { call again; ret; }\n"
    with pytest.raises(UndefinedBehaviour, match=r"call: .*calls are nested deeper than 1024"):
        launch_text(module("call again;", declared), step_limit=100_000)


def call_chain(count, last):
    """Return a kernel that calls functions, each of which calls the next one."""
    names = [f"f{i}" for i in range(count)]
    declared = [f".func {name}();" for name in names]
    bodies = [f".func {name}() {{ call {following}; ret; }}" for name, following in pairwise(names)]
    return module("call f0;", "\n".join([*declared, *bodies, f".func {names[-1]}() {{ {last} ret; }}\n"]))


def test_a_chain_of_1500_functions_links():
    text = ptx.parse(call_chain(1500, ""))
    kernel = link(text, next(iter(text.entries.values())), "sm_80", checked=True)
    assert kernel.call_depth == 1500 and len(kernel.blocks) > 3000


LEGALITY = {  # statements that PTX has on another target or in another version than the module's
    "cvt.f32.bf16 %f1, %h1;": ("sm_75", "8.8", "needs sm_80 or later"),
    "redux.sync.min.f32 %f1, %f1, 7;": ("sm_120", "8.8", "needs sm_100a or sm_100f"),
    "cvt.rn.satfinite.e2m1x2.f32 %c1, %f1, %f1;": ("sm_120", "8.8", "needs sm_100a or sm_120a"),
    "elect.sync %r1|%p1, 7;": ("sm_80", "8.8", "needs sm_90 or later"),
    "mapa.u64 %d1, %d1, %r1;": ("sm_80", "8.8", "needs sm_90 or later"),
    "add.f32x2 %d1, %d1, %d1;": ("sm_90", "8.8", "needs sm_100 or later"),
    "barrier.cluster.wait.aligned;": ("sm_80", "8.8", "needs sm_90 or later"),
    "cp.async.wait_all;": ("sm_75", "8.8", "needs sm_80 or later"),
    "elect.sync %r1|%p1, 8;": ("sm_90", "7.8", "needs PTX ISA 8.0 or newer; the version is 7.8"),
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f1,%f1,%f1,%f1}, {%r1,%r1,%r1,%r1}, {%r1,%r1}, {%f1,%f1,%f1,%f1};": (
        "sm_89", "8.0", "needs PTX ISA 8.4 or newer",
    ),
    "add.u32 %r1, %r1, %r1;": ("sm_80", "6.5", "needs PTX ISA 7.0 or newer"),
}  # fmt: skip


@pytest.mark.parametrize("statement", LEGALITY)
def test_what_the_target_or_the_version_of_the_module_lacks_is_refused(statement):
    """The module's own .target and .version count, also where the launch names a later GPU."""
    target, version, said = LEGALITY[statement]
    registers = ".reg .pred %p<2>; .reg .b8 %c<2>; .reg .b16 %h<2>; .reg .b32 %r<2>; .reg .f32 %f<2>; .reg .b64 %d<2>;"
    text = f".version {version}\n.target {target}\n.address_size 64\n.entry k() {{ {registers}\ntrap;\n{statement}\nret; }}"
    for launched in (target, "sm_120") if target != "sm_120" else (target,):
        with pytest.raises(Unsupported, match=f"line [56], .*{said}.*PTX ISA 9.7"):
            ptx.run(text, grid=1, block=32, target=launched)


ARGUMENTS = {
    "args: got 1": {"args": [GIVEN]},
    "n: got array": {"args": [GIVEN, GIVEN, GIVEN]},
    "n: got float": {"args": [GIVEN, GIVEN, 1.0]},
    "n: got 4294967296": {"args": [GIVEN, GIVEN, 1 << 32]},
    "grid: got 0": {"grid": 0},
    "grid: got 1.5": {"grid": 1.5},
    "grid: got 2147483648; a GPU takes 2147483647 x 65535 x 65535 at most": {"grid": 2**31},
    "block: got .*; a GPU takes 1024 x 1024 x 64 at most": {"block": (1, 1, 65)},
    "block: got": {"block": (64, 64)},
    "entry: got 'x'": {"entry": "x"},
    "does not run there": {"target": "sm_75"},
    "PTX runs on NVIDIA's GPUs alone": {"target": "MI300X"},
    "shared_bytes: got -1": {"shared_bytes": -1},
    "sm_86 gives 101376 at most": {"target": "RTX 3090", "shared_bytes": 100 * 1024},
    "expected an integer, or for a pointer a NumPy or JAX array": {"args": [[1, 2], GIVEN, 1]},
    "got a masked array": {"args": [np.ma.array(GIVEN, mask=GIVEN > 5), GIVEN, 1]},
    "got an array of Python objects": {"args": [GIVEN.astype(object), GIVEN, 1]},
    "first axis of 3": {"cases": 3},
}


@pytest.mark.parametrize("said", ARGUMENTS)
def test_arguments_are_checked(said):
    launch = {"grid": 2, "block": 64, "args": [GIVEN, GIVEN, 1], "target": "sm_80"} | ARGUMENTS[said]
    with pytest.raises((TypeError, ValueError), match=said.replace("got array", "got an array")):
        ptx.run(module("mov.u32 %r5, 0;"), **launch)


def test_a_text_is_a_string_and_a_float_fits():
    for text in (None, b"text", 3):
        with pytest.raises(TypeError, match=r"text: got .*; expected PTX or CUDA"):
            ptx.run(text, grid=1, block=1, target="sm_80")
    text = """.version 8.0 .target sm_80 .address_size 64 .entry k(.param .f32 f) { ret; }"""
    with pytest.raises(ValueError, match=r"f: got 1e\+300; a parameter of type \.f32 does not reach it"):
        ptx.run(text, grid=1, block=1, args=[1e300], target="sm_80")
    ptx.run(text, grid=1, block=1, args=[float("-inf")], target="sm_80")


def test_an_array_in_the_other_byte_order_is_its_values():
    text = module("mov.u32 %r5, %r3;")
    equal(launch_text(text, GIVEN.astype(">u4")), GIVEN)


def test_blocks_run_cluster_by_cluster():
    order = LaunchShape((4, 4, 1), (1, 1, 1), (2, 2, 1)).block_numbers(np.arange(16))
    assert order.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]
    largest = LaunchShape((2**31 - 1, 65535, 2), (1, 1, 1))  # no array has all its blocks
    assert largest.block_numbers(np.array([2**40])).tolist() == [2**40]


# ---- checked mode

WORD = ".shared .align 4 .b32 w[64]; mov.u32 %r6, w; mad.lo.u32 %r7, %r1, 4, %r6; st.shared.u32 [%r7], %r3; "
OTHER = "xor.b32 %r8, %r1, 32; mad.lo.u32 %r8, %r8, 4, %r6; ld.shared.u32 %r5, [%r8];"
NEXT = "xor.b32 %r8, %r1, 1; mad.lo.u32 %r8, %r8, 4, %r6; ld.shared.u32 %r5, [%r8];"
CHECKED = {
    "": WORD + "bar.sync 0;" + OTHER,
    " ": WORD + "bar.warp.sync -1;" + NEXT,
    "  ": WORD + "st.shared.u32 [w], 3; bar.sync 0;" + OTHER.replace("32;", "32; or.b32 %r8, %r8, 2;"),
    "another thread wrote.*thread .32, 0, 0.": WORD + OTHER,
    "another thread wrote, and nothing orders.*thread .32, 0, 0.": WORD + "bar.warp.sync -1;" + OTHER,
    "another thread wrote.*thread .1, 0, 0.": WORD + NEXT,
    "nothing has written": ".shared .align 4 .b32 w[64]; mov.u32 %r6, w;" + OTHER,
    "wrote another value": ".shared .align 4 .b32 w[64]; st.shared.u32 [w], %r1;",
    "that another thread reads": WORD + "bar.sync 0;" + OTHER + "st.shared.u32 [%r7], 4;",
}


@pytest.mark.parametrize("said", CHECKED)
def test_checked_mode_finds_races_and_what_nothing_has_written(said):
    text = module(CHECKED[said])
    plain = launch_text(text)
    if said.strip():
        with pytest.raises(UndefinedBehaviour, match=said):
            launch_text(text, checked=True)
    elif said != "  ":
        equal(launch_text(text, checked=True), plain)
    else:
        with pytest.raises(UndefinedBehaviour, match="another value"):
            launch_text(text, checked=True)


def test_memory_that_no_machine_has_is_refused_with_its_size():
    head = ".version 7.8 .target sm_80 .address_size 64\n"
    huge = head + ".global .align 8 .b8 table[1099511627776];\n.visible .entry k() { .reg .b64 %r<2>; mov.u64 %r0, table; ret; }"
    with pytest.raises(ValueError, match=r"table has 1,099,511,627,776 bytes.*at most 34,359,738,368"):
        ptx.run(huge, grid=1, block=1, args=[], target="A100")
    plain = head + ".visible .entry k(.param .u64 out, .param .u64 n) { .reg .b64 %r<1>; ld.param.u64 %r0, [n]; ret; }"
    with pytest.raises(ValueError, match=r"out: got shape \[4, 8\]; with cases=1000000000"):
        ptx.run(plain, grid=1, block=1, args=[np.zeros((4, 8), np.uint32), 1], target="A100", cases=10**9)
    with pytest.raises(ValueError, match=r"parameters of 10,000,000,000 cases has 160,000,000,000 bytes"):
        ptx.run(head + ".visible .entry k() { ret; }", grid=1, block=1, args=[], target="A100", cases=10**10)


LOCATED = """.version 8.0
.target sm_80
.address_size 64
.visible .entry k(.param .u64 p) {
.reg .b64 %d<3>; .reg .b32 %r<3>;
.loc 1 7 3
ld.param.u64 %d0, [p];
.loc 2 40 5, function_name $name, inlined_at 1 9 11
FIRST
.loc 1 0 0
ret;
$name: }
.file 1 "/home/me/kernel.cu"
.file 2 "/home/me/help.cuh"
"""


@pytest.mark.parametrize(
    ("statement", "error", "said"),
    [
        (
            "ld.global.u32 %r0, [%d0+64];",
            OutOfBounds,
            r"line 9 \(/home/me/help\.cuh:40, inlined at /home/me/kernel\.cu:9\): ld\.global\.u32: block",
        ),
        ("add.f32 %r0, %r1, %d0;", Unsupported, r"line 9, column 1 \(/home/me/help\.cuh:40, inlined at /home/me/kernel\.cu:9\): add\.f32"),
        ("again: bra again;", UndefinedBehaviour, r"before line 9 \(/home/me/help\.cuh:40"),
    ],
)
def test_errors_name_the_line_of_the_source(statement, error, said):
    with pytest.raises(error, match=said):
        ptx.run(LOCATED.replace("FIRST", statement), grid=1, block=1, args=[np.zeros(4, np.uint32)], target="sm_80")


def test_lines_of_the_source_change_nothing_else():
    with_lines, without = (
        ptx.parse(LOCATED.replace("FIRST", "")),
        ptx.parse(re.sub(r"(?m)^\.(loc|file).*$", "", LOCATED).replace("FIRST", "")),
    )
    assert with_lines == without and ptx.parse(str(with_lines)) == with_lines
    assert [statement.source for statement in with_lines.functions["k"].statements] == ["/home/me/kernel.cu:7", ""]
