"""Checked mode of `tcemu.ptx.run`: the protocol of wgmma, mbarriers, and missing lanes of collectives."""

import re

import numpy as np
import pytest
from support.sampling import sample_cases

from tcemu import ptx
from tcemu.base.errors import UndefinedBehaviour, Unsupported

WGMMA = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %desc, %desc, 1, 1, 1, 0, 0;"
WITH_A = "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, {%r0, %r1, %r2, %r3}, %desc, 1, 1, 1, 0;"
WIDER = "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}, %desc, %desc, 1, 1, 1, 0, 0;"
FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
DESCRIPTOR = 64 << 32 | 8 << 16


def wait(groups):
    return f"wgmma.wait_group.sync.aligned {groups};"


def entry(body, target="sm_90a"):
    """Return a kernel with shared memory and the registers that the bodies name; its result goes to `out`."""
    return f""".version 8.6
.target {target}
.address_size 64
.visible .entry e(.param .u64 out) {{
    .reg .f32 %f<8>; .reg .b32 %r<8>; .reg .b64 %desc, %out, %state; .reg .pred %p, %q;
    .shared .align 1024 .b8 tiles[8192];
    .shared .align 8 .b64 object;
    ld.param.u64 %out, [out];
    mov.b64 %desc, tiles;
    mov.b64 %desc, {DESCRIPTOR};
    mov.u32 %r7, %tid.x;
    {body}
}}"""


def run(body, block=128, checked=True, target="sm_90a"):
    return ptx.run(entry(body, target), grid=2, block=block, args=[np.zeros(64, np.uint32)], target=target, checked=checked)


LOOP = f"mov.u32 %r6, 0; AGAIN: {FENCE} {WGMMA} {COMMIT} BODY add.u32 %r6, %r6, 1; setp.lt.u32 %p, %r6, 3; @%p bra AGAIN; {wait(0)}"
LEGAL = {
    "a product and its wait": f"{FENCE} {WGMMA} {WGMMA} {COMMIT} {wait(0)} add.f32 %f0, %f0, %f1;",
    "one group stays pending": f"{FENCE} {WGMMA} {COMMIT} {WITH_A} {COMMIT} {wait(1)} {wait(0)} add.u32 %r0, %r0, 1;",
    "a loop": LOOP.replace("BODY", ""),
    "a copy between products": f"{FENCE} {WGMMA} {COMMIT} mov.f32 %f5, %f0; mov.f32 %f0, %f5; {wait(0)} add.f32 %f0, %f5, %f1;",
}
HAZARDS = {
    "no fence": (WGMMA, "before any wgmma.fence"),
    "an accumulator is written after the fence": (f"{FENCE} mov.f32 %f2, 0f00000000; {WGMMA}", "used a register of its accumulator"),
    "A is written after the fence": (f"{FENCE} mov.u32 %r2, 5; {WITH_A}", "used a register of its A "),
    "no commit": (f"{FENCE} {WGMMA} {wait(0)} add.f32 %f4, %f0, %f1;", "pending product is used"),
    "one group too few": (f"{FENCE} {WGMMA} {COMMIT} {wait(1)} add.f32 %f4, %f0, %f1;", "wait_group must cover its group"),
    "A is used too early": (f"{FENCE} {WITH_A} {COMMIT} add.u32 %r1, %r1, 1;", "pending product is used"),
    "a copy is used too early": (f"{FENCE} {WGMMA} {COMMIT} mov.f32 %f5, %f0; add.f32 %f4, %f5, %f5;", "pending product is used"),
    "another shape": (f"{FENCE} {WGMMA} {WIDER}", "another shape"),
    "in the second turn of a loop": (LOOP.replace("BODY", "@%p add.f32 %f4, %f0, %f1;"), "pending product is used"),
}


@pytest.mark.parametrize("name", LEGAL)
def test_programs_that_keep_the_protocol(name):
    run(LEGAL[name])


@pytest.mark.parametrize("name", sample_cases(HAZARDS, 2))
def test_hazards_of_the_protocol(name):
    body, message = HAZARDS[name]
    with pytest.raises(UndefinedBehaviour, match=message) as caught:
        run(body)
    assert "line " in str(caught.value) and "block (0, 0, 0), thread (0, 0, 0)" in str(caught.value)
    run(body, checked=False)


COPY = "mov.u32 %r0, tiles; mad.lo.u32 %r0, %r7, 16, %r0; cp.async.cg.shared.global [%r0], [%out], 16;"
READ = "ld.shared.u32 %r1, [%r0];"
INIT = "mov.u32 %r0, object; setp.eq.u32 %p, %r7, 0; @%p mbarrier.init.shared.b64 [%r0], {}; bar.sync 0;"
UNDEFINED = {
    "a barrier that was not made": ("mov.u32 %r0, object; mbarrier.arrive.shared.b64 _, [%r0];", "before mbarrier.init"),
    "more arrivals than expected": (INIT.format(16) + "mbarrier.arrive.shared.b64 _, [%r0], 17;", "more arrivals"),
    "a count of 0": (INIT.format(0), "1 to 1048575"),
    "a test of nothing": ("mov.u32 %r0, object; mbarrier.test_wait.parity.shared.b64 %q, [%r0], 0;", "not initialised"),
    "a copy that nobody waits for": (f"{COPY} cp.async.commit_group; {READ}", "a copy still writes"),
    "a wait for the group before": (
        f"{COPY} cp.async.commit_group; {COPY} cp.async.commit_group; cp.async.wait_group 1; {READ}",
        "a copy still writes",
    ),
    "half a warp": (
        "setp.lt.u32 %p, %r7, 16; @%p mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r0, %r1}, {%r2}, {%r3}, {%r0, %r1};",
        "all 32 threads",
    ),
    "descriptors that differ": (f"cvt.u64.u32 %state, %r7; add.u64 %desc, %desc, %state; {FENCE} {WGMMA}", "a_desc .* same"),
    "metadata that means nothing": (
        "mma.sp.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%r0, %r1}, {%r2, %r3}, {%r2, %r3}, {%r0, %r1}, %r4, 0;",
        "sparsity metadata is not defined",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sample_cases(UNDEFINED, 4))
def test_what_is_undefined_raises_in_checked_mode(name):
    body, message = UNDEFINED[name]
    with pytest.raises(UndefinedBehaviour, match=message):
        run(body)
    run(body, checked=False)


@pytest.mark.parametrize("wait_", ["cp.async.commit_group; cp.async.wait_group 0;", "cp.async.wait_all;"])
def test_copies_that_are_waited_for(wait_):
    run(f"{COPY} {wait_} {READ}")


def test_arrivals_of_many_threads_end_phases_exactly():
    """96 threads of each block arrive with counts 1 and 4 where 60 end a phase: 8 phases end; then each lane of a warp finds one less."""
    body = f"""
    {INIT.format(60)}
    mbarrier.arrive.shared.b64 %state, [%r0];
    mbarrier.arrive.shared.b64 %state, [%r0], 4;
    bar.sync 0;
    setp.lt.u32 %p, %r7, 32;
    @%p mbarrier.arrive.noComplete.shared.b64 %state, [%r0], 1;
    mbarrier.pending_count.b64 %r1, %state;
    mbarrier.test_wait.parity.shared.b64 %q, [%r0], 1;
    selp.u32 %r2, 1000, 0, %q;
    add.u32 %r1, %r1, %r2;
    mov.u32 %r3, %ctaid.x;
    mad.lo.u32 %r3, %r3, 32, %r7;
    mul.wide.u32 %state, %r3, 4;
    add.u64 %out, %out, %state;
    @%p st.global.u32 [%out], %r1;"""
    (found,) = run(body, 96, checked=False)
    assert found.tolist() == [1060 - lane for lane in range(32)] * 2


BOX = "cp.async.bulk.tensor.{} [%r0], [%out, {{%r1, %r2}}], [%r3]{};"
F32, S8 = "{%f0, %f1, %f2, %f3}", "{%r0, %r1}"
REFUSED = {
    BOX.format("2d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes", ""): "im2col cannot be combined",
    BOX.format("2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster", ""): "it has 3 operands; expected 4",
    BOX.format("2d.shared::cluster.global.mbarrier::complete_tx::bytes.cta_group::2", ""): "needs sm_100a",
    BOX.format("3d.shared::cluster.global.mbarrier::complete_tx::bytes", ""): "3 coordinates",
    "cp.async.ca.shared.global [%r0], [%out], 12;": "cp-size is 12.*4 or 8 or 16",
    "cp.async.cg.shared.global.L3 [%r0], [%out], 16;": "no qualifier L3; known are",
    "mbarrier.arrive.b32 %r0, [%out];": "needs b64 in place of b32",
    "mbarrier.init.shared.b64 [%r0];": "1 operands.* 2",
    f"mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {S8}, {S8}, {{%r0}}, {F32};": "operand d has 2",
    f"mma.sync.aligned.m16n8k15.row.col.f32.f16.f16.f32 {F32}, {S8}, {S8}, {F32};": "nearest legal spelling",
    f"mma.sp.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {S8}, {S8}, {S8}, {S8}, %r4, 4;": "sparsity selector is 4",
    "setmaxnreg.inc.sync.aligned.u32 233;": "multiple of 8 from 24 to 256",
    WGMMA.replace("1, 1, 1, 0", "1, 2, 1, 0"): "imm_scale_a is 2.*1 or -1",
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r0], 32;": "tcgen05.alloc.*not exist|sm_100",
}


@pytest.mark.parametrize("statement", REFUSED, ids=lambda statement: statement.partition(" ")[0])
def test_what_is_refused_before_anything_runs(statement):
    with pytest.raises(Unsupported, match="line 12, column ") as caught:
        run(statement)
    assert re.search(REFUSED[statement], str(caught.value))


def test_what_the_target_lacks_is_refused():
    for statement, message in (
        ("cp.async.bulk.commit_group;", "needs sm_90 or later; the target is sm_80"),
        (FENCE, "needs sm_90a"),
        (
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%f0,%f1,%f2,%f3}, {%r0,%r1,%r2,%r3}, {%r0,%r1}, {%f0,%f1,%f2,%f3};",
            "needs sm_89",
        ),
    ):
        with pytest.raises(Unsupported, match=message):
            run(statement, target="sm_80")
