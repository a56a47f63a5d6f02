"""Kernels with one planted hazard each, and their right twins: what every row of `tcemu.kernels.ptx.hazards.promises` finds, and what it
must not.

A kernel is the body of an entry. In its right form the words between "<" and ">" stand as they are; in its wrong form they are left out, or
replaced by those behind "|": `<bar.sync 0;>` and `<96|128>`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from tcemu import ptx
from tcemu.engine.layouts.shared_memory import descriptor

HEAD = """.version 8.6
.target sm_90a
.address_size 64
.visible .entry e(.param .u64 out, .param .u64 given, .param .align 64 .b8 map[128]) {{
    .reg .f32 %f<8>; .reg .b32 %r<32>; .reg .b64 %rd<16>; .reg .pred %p<8>;
    .shared .align 1024 .b8 tile[16384];
    .shared .align 8 .b64 object[2];
    ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [given]; mov.b64 %rd9, map; cvta.param.u64 %rd9, %rd9;
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, tile; mov.u32 %r4, object; mov.u32 %r10, 0;
    setp.eq.u32 %p1, %r1, 0; setp.lt.u32 %p2, %r1, 32; setp.lt.u32 %p3, %r1, 64; setp.eq.u32 %p4, %r2, 0;
    mad.lo.u32 %r5, %r1, 4, %r3;                      // %r5: this thread's word of the tile; %r6: that of its mirror image
    sub.u32 %r6, 127, %r1; mad.lo.u32 %r6, %r6, 4, %r3;
    mul.wide.u32 %rd3, %r1, 4; add.u64 %rd4, %rd1, %rd3; add.u64 %rd5, %rd2, %rd3;
    sub.u32 %r7, 127, %r1; mul.wide.u32 %rd6, %r7, 4; add.u64 %rd7, %rd1, %rd6;   // %rd4: its word of `out`; %rd7: the mirror image's
    {body}
    ret;
}}"""
INIT = "@%p1 mbarrier.init.shared.b64 [%r4], 1;"
WAIT = "{0}: mbarrier.try_wait.parity.shared.b64 %p5, [%r4], {1}; @!%p5 bra {0};"
FETCH = """@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], {1};
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r3], [{0}], {1}, [%r4];"""
BOX = """@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r4], 8192;
    @%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [{0}], [%rd9, {{%r10, %r10}}], [%r4];"""
PUT = "@%p1 cp.async.bulk.global.shared::cta.bulk_group [%rd1], [%r3], 512; @%p1 cp.async.bulk.commit_group;"
GROUP = "@%p1 cp.async.bulk.wait_group.read 0;"
FILL = "mad.lo.u32 %r8, %r1, 16, %r3; st.shared.v4.u32 [%r8], {%r1, %r1, %r1, %r1};"
OPERAND, PLAIN = descriptor(0, 16, 1024, 128), descriptor(0, 128, 256, 0)
WGMMA = """mov.b64 %rd8, {0}; wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%f0, %f1, %f2, %f3}}, %rd8, %rd8, 0, 1, 1, 0, 0; wgmma.commit_group.sync.aligned;"""
DONE = "wgmma.wait_group.sync.aligned 0;"


class HazardKernel(NamedTuple):
    """A right kernel with one place that can be spoilt."""

    body: str
    message: str  # words of what the wrong form raises or notes
    is_note: bool = False
    grid: int = 1

    def text(self, right: bool) -> str:
        """Return the PTX of the right or of the wrong form."""
        body = re.sub(r"<([^<>|]*)(?:\|([^<>|]*))?>", lambda found: found[1] if right else found[2] or "", self.body)
        return HEAD.format(body=body)

    def run(self, right: bool, **options) -> ptx.KernelOutputs:
        """Run a form in checked mode, by 128 threads in each block."""
        given = np.arange(4096, dtype=np.float32)
        tensor = ptx.TensorMap(np.zeros((64, 64), np.float16), "f16", [64, 64], [64, 64], swizzle=128)
        args = [np.zeros(1024, np.uint32), given, tensor]
        return ptx.run(self.text(right), grid=self.grid, block=128, args=args, target="sm_90a", checked=True, **options)


def fetch(size: int | str = 512, source: str = "%rd2") -> str:
    return FETCH.format(source, size)


KERNELS = {
    "shared memory: threads of a block": HazardKernel(
        "st.shared.u32 [%r5], %r1; bar.sync 0; ld.shared.u32 %r8, [%r6]; <bar.sync 0;> st.shared.u32 [%r5], %r8;",
        "writes shared memory that another thread reads",
    ),
    "shared memory: a named barrier of other threads": HazardKernel(
        "@!%p3 bra OTHERS; st.shared.u32 [%r5], %r1; bar.sync 1, <128|64>; bra END;"
        "OTHERS: bar.sync <1|2>, <128|64>; ld.shared.u32 %r8, [%r6]; st.global.u32 [%rd4], %r8; END:",
        "reads shared memory that another thread wrote",
    ),
    "shared memory: lanes of a warp": HazardKernel(
        "@!%p2 bra END; st.shared.u32 [%r5], %r1; <bar.warp.sync 0xFFFFFFFF;> xor.b32 %r8, %r5, 4; ld.shared.u32 %r9, [%r8];"
        "st.global.u32 [%rd4], %r9; END:",
        "reads shared memory that another thread wrote",
    ),
    "shared memory: wmma.load and wmma.store": HazardKernel(
        f"{FILL} <bar.sync 0;> wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {{%r12, %r13, %r14, %r15, %r16, %r17, %r18, %r19}}, [%r3];"
        "st.global.u32 [%rd4], %r12;",
        "reads shared memory that another thread wrote",
    ),
    "global memory: threads of a block": HazardKernel(
        "st.global.u32 [%rd4], %r1; <bar.sync 0;> ld.global.u32 %r8, [%rd7]; st.global.u32 [%rd4+512], %r8;",
        "reads global memory that another thread wrote",
    ),
    "global memory: a place that all threads read and one writes": HazardKernel(
        "ld.global.u32 %r8, [%rd1]; <bar.sync 0;> add.u32 %r8, %r8, 1; @%p1 st.global.u32 [%rd1], %r8; st.global.u32 [%rd4+512], %r8;",
        "many threads of the block read by one statement",
        True,
    ),
    "global memory: blocks that write one place": HazardKernel(
        "<mad.lo.u32 %r8, %r2, 128, %r1; mul.wide.u32 %rd3, %r8, 4; add.u64 %rd4, %rd1, %rd3;> st.global.u32 [%rd4], %r2;",
        "another thread wrote another value",
        grid=2,
    ),
    "global memory: a block that reads what another writes": HazardKernel(
        "@!%p4 bra READ; st.global.u32 [%rd4], %r1; bra END; READ: ld.global.u32 %r8, [%rd4<+512>]; st.global.u32 [%rd4+1024], %r8; END:",
        "memory that another thread (reads|wrote)",
        grid=2,
    ),
    "global memory: a flag without its fence": HazardKernel(
        "@!%p1 bra END; @!%p4 bra READ; st.global.u32 [%rd1], 7; <fence.acq_rel.gpu;> st.relaxed.gpu.global.u32 [%rd1+64], 1; bra END;"
        "READ: ld.acquire.gpu.global.u32 %r8, [%rd1+64]; setp.eq.u32 %p5, %r8, 0; @%p5 bra READ;"
        "ld.global.u32 %r9, [%rd1]; st.global.u32 [%rd1+128], %r9; END:",
        "reads global memory that another thread wrote",
        grid=2,
    ),
    "global memory: an atomic without its barrier": HazardKernel(
        "@!%p4 bra READ; st.global.u32 [%rd4], %r1; <bar.sync 0;> @!%p1 bra END;"
        "atom.add.release.gpu.global.u32 %r8, [%rd1+1024], 1; bra END;"
        "READ: ld.acquire.gpu.global.u32 %r8, [%rd1+1024]; setp.eq.u32 %p5, %r8, 0; @%p5 bra READ;"
        "ld.global.u32 %r9, [%rd7]; st.global.u32 [%rd4+2048], %r9; END:",
        "reads global memory that another thread wrote",
        grid=2,
    ),
    "barrier: a warp that diverges": HazardKernel(
        "setp.lt.u32 %p5, %r1, <96|100>; @!%p5 bra OTHERS; bar.sync 0; bra END; OTHERS: st.global.u32 [%rd4], %r1; END:",
        "only some threads of a warp",
    ),
    "barrier: a count that does not cover all": HazardKernel("bar.sync 1, <128|96>;", "128 threads arrive at barrier 1, which expects 96"),
    "barrier: counts that differ": HazardKernel(
        "@!%p3 bra OTHERS; bar.arrive 1, 128; bra END; OTHERS: bar.sync 1, <128|96>; END:", "expects 96 threads here and 128"
    ),
    "barrier: statements that differ": HazardKernel(
        "@!%p3 bra OTHERS; <bra END;|bar.sync 0;> bra END; OTHERS: <st.global.u32 [%rd4], %r1;|bar.sync 0;> END:",
        "different statements",
        True,
    ),
    "mbarrier: used with no barrier after its initialisation": HazardKernel(
        f"{INIT} <bar.sync 0;> setp.eq.u32 %p6, %r1, 64; @%p6 mbarrier.arrive.shared.b64 _, [%r4];",
        "another thread initialised the mbarrier",
    ),
    "bulk copy: read before its mbarrier's phase": HazardKernel(
        f"{INIT} bar.sync 0; {fetch()} <{WAIT.format('W', 0)}> ld.shared.u32 %r8, [%r5]; {WAIT.format('X', 0)} st.global.u32 [%rd4], %r8;",
        "a copy still writes",
    ),
    "bulk copy: over what threads still read": HazardKernel(
        f"{INIT} bar.sync 0; {fetch()} {WAIT.format('W', 0)} ld.shared.u32 %r8, [%r5]; <bar.sync 0;> {fetch()} {WAIT.format('X', 1)}"
        "st.global.u32 [%rd4], %r8;",
        "writes shared memory that another thread reads",
    ),
    "bulk store: no proxy fence": HazardKernel(
        f"st.shared.u32 [%r5], %r1; <fence.proxy.async.shared::cta;> bar.sync 0; {PUT} {GROUP}", "fence.proxy.async must follow the write"
    ),
    "bulk store: no barrier": HazardKernel(
        f"st.shared.u32 [%r5], %r1; fence.proxy.async.shared::cta; <bar.sync 0;> {PUT} {GROUP}",
        "reads shared memory that another thread wrote",
    ),
    "bulk store: no wait before the memory is used again": HazardKernel(
        f"st.shared.u32 [%r5], %r1; fence.proxy.async.shared::cta; bar.sync 0; {PUT} <{GROUP}> bar.sync 0; st.shared.u32 [%r5], 5; {GROUP}",
        "a bulk copy or a product still reads",
    ),
    "bulk store: no wait before the exit": HazardKernel(
        f"st.shared.u32 [%r5], %r1; fence.proxy.async.shared::cta; bar.sync 0; {PUT} <{GROUP}>", "exits while its bulk copy"
    ),
    "bulk store: its target is read before the wait": HazardKernel(
        f"st.shared.u32 [%r5], %r1; fence.proxy.async.shared::cta; bar.sync 0; {PUT} @%p1 cp.async.bulk.wait_group<|.read> 0;"
        "@%p1 ld.global.u32 %r8, [%rd1+4]; @%p1 st.global.u32 [%rd1+1024], %r8;",
        "a copy still writes",
    ),
    "wgmma: no proxy fence": HazardKernel(
        f"{FILL} <fence.proxy.async;> bar.sync 0; {WGMMA.format(PLAIN)} {DONE}",
        "fence.proxy.async must follow the write",
    ),
    "wgmma: an operand that is written before the wait": HazardKernel(
        f"{FILL} fence.proxy.async; bar.sync 0; {WGMMA.format(PLAIN)} <{DONE}> bar.sync 0;"
        f"st.shared.u32 [%r5], 5; {DONE}",
        "a bulk copy or a product still reads",
    ),
    "cp.async: no wait": HazardKernel(
        "mad.lo.u32 %r8, %r1, 16, %r3; mul.wide.u32 %rd3, %r1, 16; add.u64 %rd5, %rd2, %rd3;"
        "cp.async.cg.shared.global [%r8], [%rd5], 16; cp.async.commit_group; <cp.async.wait_group 0;>"
        "ld.shared.u32 %r9, [%r8]; st.global.u32 [%rd4], %r9;",
        "a copy still writes",
    ),
    "cp.async: no barrier": HazardKernel(
        "mad.lo.u32 %r8, %r1, 16, %r3; mul.wide.u32 %rd3, %r1, 16; add.u64 %rd5, %rd2, %rd3;"
        "cp.async.cg.shared.global [%r8], [%rd5], 16; cp.async.commit_group; cp.async.wait_group 0; <bar.sync 0;>"
        "xor.b32 %r8, %r8, 512; ld.shared.u32 %r9, [%r8]; st.global.u32 [%rd4], %r9;",
        "reads shared memory that another thread wrote",
    ),
    "operand: memory that nothing has written": HazardKernel(
        f"{INIT} bar.sync 0; {BOX.format('%r3')} {WAIT.format('W', 0)} {WGMMA.format(f'<{OPERAND}|{OPERAND + 64}>')} {DONE}",
        "that nothing has written",
        True,
    ),
    "operand: another swizzle than that of the copy": HazardKernel(
        f"{INIT} bar.sync 0; {BOX.format('%r3')} {WAIT.format('W', 0)} {WGMMA.format(f'<{OPERAND}|{descriptor(0, 16, 512, 64)}>')} {DONE}",
        "with a swizzle of 64 bytes, what a copy wrote with a swizzle of 128",
        True,
    ),
    "operand: rows that overlap": HazardKernel(
        f"{INIT} bar.sync 0; {BOX.format('%r3')} {WAIT.format('W', 0)} {WGMMA.format(f'<{OPERAND}|{descriptor(0, 16, 512, 128)}>')} {DONE}",
        "more than once",
        True,
    ),
    "operand: a stage of which the newest copy wrote only a part": HazardKernel(
        f"{INIT} bar.sync 0; {fetch(8192)} {WAIT.format('W', 0)} bar.sync 0; {fetch('<8192|4096>')} {WAIT.format('X', 1)}"
        f"{WGMMA.format(OPERAND)} {DONE}",
        "the newest copy to its stage did not write",
        True,
    ),
    "tensor copy: a stage where its swizzle does not begin": HazardKernel(
        f"add.u32 %r8, %r3, <0|512>; {INIT} bar.sync 0; {BOX.format('%r8')} {WAIT.format('W', 0)}",
        "no multiple of 1024 bytes",
        True,
    ),
}  # fmt: skip
