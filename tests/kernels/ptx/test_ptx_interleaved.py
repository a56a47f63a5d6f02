"""Interleaved tensor maps: boxes of random tensors are loaded, stored and added, and compared with what an H100 moved.

The recording has runs of 16-bit words: where a run begins, its first word, and its length. The words of a run count up, but for zeros. A
load reads 1, 2, 3, ... from global memory, and the runs are those of shared memory after it. A store or an addition moves 1, 2, 3, ... from
shared to global memory, which held 0xffff or zeros.
"""

import json
import lzma
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from tcemu import ptx

RECORDING = Path(__file__).parents[2] / "golden" / "interleaved_h100.json.xz"
WORDS, SHARED_BYTES = 65536, 32768
HEAD = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry e(.param .align 64 .b8 map[128], .param .u64 words, .param .u64 moved,
    .param .u64 numbers) {{
    .reg .b64 %rd<6>; .reg .b32 %r<12>; .reg .b32 %at<6>; .reg .pred %p<4>; .shared .align 1024 .b8 box[32768];
    .shared .align 8 .b64 object;
    ld.param.u64 %rd2, [moved]; cvta.to.global.u64 %rd2, %rd2; mov.b64 %rd1, map; cvta.param.u64 %rd1, %rd1; mov.u32 %r1, %tid.x;
    mov.u32 %r2, box; mov.u32 %r3, object; setp.eq.u32 %p1, %r1, 0; mad.lo.u32 %r4, %r1, 16, %r2; mul.wide.u32 %rd3, %r1, 16;
    add.u64 %rd2, %rd2, %rd3; mov.u32 %r5, 0; ld.param.u64 %rd5, [numbers]; ld.global.u32 %r10, [%rd5+20];
    ld.global.v4.u32 {{%at0, %at1, %at2, %at3}}, [%rd5]; ld.global.u32 %at4, [%rd5+16];
"""
EACH = """{label}: ld.{from_}.v4.b32 {{{{%r6, %r7, %r8, %r9}}}}, [{source}]; st.{to}.v4.b32 [{target}], {{{{%r6, %r7, %r8, %r9}}}};
    add.u32 %r5, %r5, 1; add.u32 %r4, %r4, 16384; add.u64 %rd2, %rd2, 16384; setp.lt.u32 %p2, %r5, 2; @%p2 bra {label};
"""
TO_SHARED = EACH.format(label="FILL", from_="global", source="%rd2", to="shared", target="%r4")
TO_GLOBAL = EACH.format(label="READ", from_="shared", source="%r4", to="global", target="%rd2")
BACK = "mov.u32 %r5, 0; sub.u32 %r4, %r4, 32768; sub.u64 %rd2, %rd2, 32768;\n"
LOAD = """@%p1 mbarrier.init.shared.b64 [%r3], 1; bar.sync 0;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd4, [%r3], %r10;
    @%p1 cp.async.bulk.tensor.{rank}d.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [%rd1, {at}], [%r3];
WAIT: mbarrier.try_wait.parity.shared.b64 %p3, [%r3], 0; @!%p3 bra WAIT;
"""
STORE = """fence.proxy.async; bar.sync 0;
    @%p1 cp{reduce}.async.bulk.tensor.{rank}d.global.shared::cta{add}.bulk_group [%rd1, {at}], [%r2];
    @%p1 cp.async.bulk.commit_group;
    @%p1 cp.async.bulk.wait_group 0;
"""


@cache
def recording():
    return json.loads(lzma.decompress(RECORDING.read_bytes()))["cases"]


def move(case):
    """Returns the words of shared memory after a load, or those of global memory after a store or an addition."""
    rank = len(case["dims"])
    at = "{{" + ", ".join(f"%at{i}" for i in range(rank)) + "}}"
    reduce, add = (".reduce", ".add") if case["copy"] == "add" else ("", "")
    copy = (LOAD if case["copy"] == "load" else STORE).format(rank=rank, at=at, reduce=reduce, add=add)
    text = (HEAD + TO_SHARED + (BACK + copy + TO_GLOBAL if case["copy"] == "load" else copy) + "ret;\n}}").format()
    counted = (np.arange(WORDS) + 1).astype(np.uint16)
    counted[-1] = 0
    given = {"load": counted, "store": np.full(WORDS, 0xFFFF, np.uint16), "add": np.zeros(WORDS, np.uint16)}[case["copy"]]
    moved = np.full(SHARED_BYTES // 2, 0xFFFF, np.uint16) if case["copy"] == "load" else counted[: SHARED_BYTES // 2]
    numbers = np.array([*case["at"], *[0] * (5 - rank), case["bytes"]], np.int32)
    tensor_map = ptx.TensorMap(
        given, case["dtype"], case["dims"], case["box"], case["strides"], case["steps"], case["swizzle"], interleave=case["interleave"]
    )
    words, moved = ptx.run(text, grid=1, block=1024, args=[tensor_map, given, moved, numbers], target="sm_90a")[-3:-1]
    return np.asarray(moved if case["copy"] == "load" else words)


def recorded(case):
    words = np.full(SHARED_BYTES // 2, 0xFFFF) if case["copy"] == "load" else np.full(WORDS, 0 if case["copy"] == "add" else 0xFFFF)
    for first, value, count in case["runs"]:
        words[first : first + count] = 0 if value == 0 else value + np.arange(count)
    return words.astype(np.uint16)


def pytest_generate_tests(metafunc):
    if "number" in metafunc.fixturenames:
        sample = (1,)
        numbers = [number if number in sample else pytest.param(number, marks=pytest.mark.full) for number in range(len(recording()))]
        metafunc.parametrize("number", numbers)


def test_the_words_of_an_h100(number):
    case = recording()[number]
    assert np.count_nonzero(move(case) != recorded(case)) == 0


def test_maps_that_are_no_interleaved_tensors():
    data = np.zeros(4096, np.uint16)
    for options, message in (
        ({"interleave": 8}, "expected one of 0, 16, 32"),
        ({"interleave": 16, "global_dims": (8, 8), "box_dims": (8, 1)}, "has 3 to 5"),
        ({"interleave": 32, "global_strides": (48, 480)}, "multiples of 32"),
        ({"interleave": 16, "corners": ((0,), (0,)), "box_dims": (8, 8)}, "nothing is recorded of im2col"),
        ({"interleave": 16, "dtype": "b4x16", "box_dims": (32, 1, 1)}, "nothing is recorded of elements of b4x16"),
    ):
        given = {"dtype": "f16", "global_dims": (8, 4, 4), "box_dims": (8, 1, 1)} | options
        with pytest.raises(ValueError, match=message):
            ptx.TensorMap(data, **given)
