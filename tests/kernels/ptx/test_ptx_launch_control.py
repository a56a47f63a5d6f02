"""Registers of 128 bits, and clusters that take over the work of others: `clusterlaunchcontrol`."""

import numpy as np
import pytest

from tcemu import ptx
from tcemu.base.errors import Unsupported

HEAD = ".version 8.7\n.target sm_100a\n.address_size 64\n"
MOVES = """.visible .entry e(.param .u64 out) {
    .reg .b128 %q<4>; .reg .b64 %rd<12>; .reg .b32 %r<4>; .shared .align 16 .b8 tile[1024];
    ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mul.wide.u32 %rd2, %r1, 16; add.u64 %rd1, %rd1, %rd2; mad.lo.u32 %r2, %r1, 16, 0;
    mov.u32 %r3, tile; add.u32 %r2, %r2, %r3;
    ld.global.b128 %q0, [%rd1]; mov.b128 {%rd3, %rd4}, %q0; add.u64 %rd3, %rd3, 1; mov.b128 %q1, {%rd4, %rd3};
    st.shared.b128 [%r2], %q1; ld.shared.b128 %q2, [%r2]; mov.b128 %q3, %q2; st.global.b128 [%rd1], %q3; ret;
}"""


@pytest.mark.full
def test_moves_of_128_bits():
    given = np.random.default_rng(2).integers(0, 1 << 63, (32, 2), np.uint64)
    (found,) = ptx.run(HEAD + MOVES, grid=1, block=32, args=[given], target="sm_100a", checked=True)
    assert np.array_equal(found, np.stack([given[:, 1], given[:, 0] + np.uint64(1)], axis=-1))


def test_wide_registers_elsewhere_are_refused():
    text = HEAD + MOVES.replace("mov.b128 %q3, %q2;", "shl.b64 %q3, %q2, 1;")
    with pytest.raises(Unsupported, match=r"line 9.*register of 128 bits"):
        ptx.run(text, grid=1, block=32, args=[np.zeros((32, 2), np.uint64)], target="sm_100a")


# every cluster counts itself and every cluster that it cancels, at the place of the cluster's first block
PERSISTENT = """.visible .entry e(.param .u64 out, .param .u32 width) {
    .reg .b128 %q; .reg .b64 %rd<12>; .reg .b32 %r<20>; .reg .pred %p<6>;
    .shared .align 16 .b8 response[16]; .shared .align 8 .b64 object;
    ld.param.u64 %rd1, [out]; ld.param.u32 %r9, [width]; mov.u32 %r1, response; mov.u32 %r2, object; mov.u32 %r3, %tid.x;
    mov.u32 %r13, %cluster_ctarank; setp.eq.u32 %p1, %r3, 0; setp.eq.and.u32 %p3, %r13, 0, %p1;
    @%p1 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r4, %ctaid.x; mov.u32 %r5, %ctaid.y; mov.u32 %r6, 0; mov.u32 %r14, %cluster_ctaid.x; mov.u32 %r10, %ctaid.x;
    mov.u32 %r15, %ctaid.y;
LOOP:
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16;
    barrier.cluster.arrive; barrier.cluster.wait;
    @%p3 clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.multicast::cluster::all.b128 [%r1], [%r2];
    mad.lo.u32 %r7, %r5, %r9, %r4; mul.wide.u32 %rd2, %r7, 8; add.u64 %rd2, %rd1, %rd2;
    mad.lo.u32 %r8, %r15, %r9, %r10; add.u32 %r8, %r8, 1;
    @%p1 red.global.add.u32 [%rd2], 1; @%p1 st.global.u32 [%rd2+4], %r8;
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r2], %r6;
    @!%p2 bra WAIT;
    xor.b32 %r6, %r6, 1;
    ld.shared.b128 %q, [%r1]; clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p4, %q;
    @!%p4 bra LAST;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r4, %r5, _, _}, %q;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r11, %q;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::y.b32.b128 %r5, %q;
    add.u32 %r4, %r11, %r14; bra LOOP;
LAST: barrier.cluster.arrive; barrier.cluster.wait; ret;
}"""


@pytest.mark.parametrize("sms", [4, pytest.param(64, marks=pytest.mark.full)])
def test_clusters_that_take_over_others(monkeypatch, sms):
    """Each cluster's work is done once. With 4 multiprocessors two clusters run at first, and between them they cancel the rest."""
    monkeypatch.setattr("tcemu.kernels.ptx.runtime.kernel_runner.SM_COUNT", sms)
    width, height = (4, 2) if sms == 4 else (6, 3)
    text, out = HEAD + PERSISTENT, np.zeros((height, width, 2), np.uint32)
    (found,) = ptx.run(text, grid=(width, height), block=32, cluster=2, args=[out, width], target="sm_100a", checked=True)
    own = np.arange(width * height).reshape(height, width) + 1
    assert (found[..., 0] == 1).all()
    moved = found[..., 1] != own
    assert moved.sum() == (0 if sms == 64 else width * height - 4)
    assert (found[..., 1][moved] <= 4).all()


def test_a_target_without_launch_control():
    with pytest.raises(Unsupported, match="needs sm_100"):
        ptx.run(
            (HEAD + PERSISTENT).replace("sm_100a", "sm_90a"), grid=2, block=32, args=[np.zeros((1, 2, 2), np.uint32), 2], target="sm_90a"
        )
