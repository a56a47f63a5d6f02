"""Clusters of thread blocks: ranks, addresses of other blocks' shared memory, `barrier.cluster`, and launches that are refused."""

import numpy as np
import pytest
from support.sampling import sample_cases

from tcemu import ptx
from tcemu.base.errors import UndefinedBehaviour, Unsupported

HEAD = ".version 8.6\n.target sm_90a\n.address_size 64\n"
REGISTERS = ".reg .b32 %r<40>; .reg .b64 %rd<20>; .reg .pred %p<8>; .reg .b16 %h<4>; .reg .f32 %f<8>;"


def entry(body, directives="", declared=""):
    """Return a kernel with one output array; %rd1 is the address of the thread's own words there, `words` for each thread of the grid."""
    return f"""{HEAD}{declared}
.visible .entry e(.param .u64 out, .param .u32 words) {directives} {{
    {REGISTERS}
    .shared .align 16 .b8 lead[48];
    .shared .align 128 .b8 tile[1024];
    .shared .align 8 .b64 object;
    ld.param.u64 %rd1, [out]; ld.param.u32 %r39, [words];
    mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x; mov.u32 %r3, %ctaid.y; mov.u32 %r4, %nctaid.x; mov.u32 %r5, %cluster_ctarank;
    mad.lo.u32 %r6, %r3, %r4, %r2; mov.u32 %r7, %ntid.x; mad.lo.u32 %r8, %r6, %r7, %r1; mul.lo.u32 %r8, %r8, %r39;
    mul.wide.u32 %rd2, %r8, 4; add.u64 %rd1, %rd1, %rd2;
    mov.u32 %r9, tile;
    {body}
    ret;
}}"""


def run(body, words=1, grid=(1, 1), block=32, checked=True, directives="", declared="", **launch):
    """Run a kernel; return its output, uint32[blocks in the grid's order, threads, words]."""
    blocks = int(np.prod(grid))
    out = np.zeros((blocks, block, words), np.uint32)
    text = entry(body, directives, declared)
    (found,) = ptx.run(text, grid=grid, block=block, args=[out, words], target="sm_90a", checked=checked, **launch)
    return found


SPELLINGS = [
    (f"barrier.cluster.arrive{arrive};", f"barrier.cluster.wait{wait};")
    for arrive, wait in (
        ("", ""), (".aligned", ".aligned"), (".release", ".acquire"), (".release.aligned", ".acquire.aligned"),
        (".aligned.release", ".aligned.acquire"), (".relaxed", ""), (".relaxed.aligned", ".acquire"),
    )
]  # fmt: skip


@pytest.mark.parametrize("cluster", sample_cases([None, 2], []))
def test_every_spelling_of_the_barrier_of_a_cluster(cluster):
    """All blocks of a cluster, and all threads of a block, see what the others stored before the barrier."""
    size = cluster or 1
    body = "mov.u32 %r10, 0;"
    for number, (arrive, wait) in enumerate(SPELLINGS):
        body += f"""
    mad.lo.u32 %r11, %r1, 4, %r9; mad.lo.u32 %r12, %r5, 100, %r1; add.u32 %r12, %r12, {number}; st.shared.u32 [%r11], %r12;
    {arrive} {wait}
    xor.b32 %r13, %r5, {size - 1}; mapa.shared::cluster.u32 %r14, %r11, %r13; ld.shared::cluster.u32 %r15, [%r14];
    mad.lo.u32 %r10, %r10, 3, %r15;
    {arrive} {wait}"""
    found = run(body + "st.global.u32 [%rd1], %r10;", grid=(2, 1), cluster=cluster, checked=False)  # .relaxed alone orders nothing
    for block in range(2):
        rank = block % size
        wanted = np.zeros(32, np.uint32)
        for number in range(len(SPELLINGS)):
            wanted = wanted * np.uint32(3) + np.uint32(100 * (rank ^ size - 1) + number) + np.arange(32, dtype=np.uint32)
        assert found[block, :, 0].tolist() == wanted.tolist()


@pytest.mark.parametrize("statement", ["barrier.cluster.arrive.acquire;", "barrier.cluster.wait.relaxed;", "barrier.cluster.wait.release;",
                                       "barrier.cluster.arrive.sync;", "barrier.cluster;", "barrier.cluster.arrive 0;"])  # fmt: skip
def test_barriers_of_clusters_that_the_assembler_refuses(statement):
    with pytest.raises(Unsupported, match="line 15"):
        run(statement)


@pytest.mark.full
def test_ranks_of_addresses():
    """getctarank in its three forms: of a 32-bit and a 64-bit register, and of a generic address."""
    body = """
    mov.u32 %r10, 1; mapa.shared::cluster.u32 %r11, %r9, %r10; getctarank.shared::cluster.u32 %r12, %r11;
    cvta.shared.u64 %rd3, tile; mapa.u64 %rd4, %rd3, 1; getctarank.u64 %r13, %rd4; getctarank.u64 %r14, %rd3;
    mov.u64 %rd5, tile; mapa.shared::cluster.u64 %rd6, %rd5, 0; getctarank.shared::cluster.u64 %r15, %rd6;
    getctarank.shared::cluster.u32 %r16, %r9;
    st.global.u32 [%rd1], %r12; st.global.u32 [%rd1+4], %r13; st.global.u32 [%rd1+8], %r14; st.global.u32 [%rd1+12], %r15;
    st.global.u32 [%rd1+16], %r16;"""
    found = run(body, 5, grid=(2, 1), cluster=2)
    assert found[:, 0].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 1]]


def test_special_registers_of_clusters():
    """A grid of 4 x 4 blocks in clusters of 2 x 2: every coordinate, extent and rank, block by block."""
    names = ("cluster_ctaid.x", "cluster_ctaid.y", "cluster_ctaid.z", "cluster_nctaid.x", "cluster_nctaid.y", "cluster_nctaid.z",
             "cluster_ctarank", "cluster_nctarank", "clusterid.x",
             "clusterid.y", "nclusterid.x", "nclusterid.y", "nclusterid.z")  # fmt: skip
    body = "".join(f"mov.u32 %r10, %{name}; st.global.u32 [%rd1+{4 * i}], %r10;" for i, name in enumerate(names))
    body += f"mov.pred %p1, %is_explicit_cluster; selp.u32 %r11, 1, 0, %p1; st.global.u32 [%rd1+{4 * len(names)}], %r11;"
    found = run(body, 14, grid=(4, 4), cluster=(2, 2))[:, 0]
    for y in range(4):
        for x in range(4):
            wanted = [x % 2, y % 2, 0, 2, 2, 1, x % 2 + 2 * (y % 2), 4, x // 2, y // 2, 2, 2, 1, 1]
            assert found[x + 4 * y].tolist() == wanted
    assert run(body, 14, grid=(2, 1))[1, 0].tolist() == [0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 2, 1, 1, 0]


EXCHANGE = """
    mad.lo.u32 %r11, %r1, 4, %r9; add.u32 %r12, %r5, 1; {store}
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    add.u32 %r13, %r5, 1; rem.u32 %r13, %r13, 4; mapa.shared::cluster.u32 %r14, %r11, %r13;
    cvt.u64.u32 %rd5, %r11; cvta.shared.u64 %rd6, %rd5; mapa.u64 %rd7, %rd6, %r13;
    {use}
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    ld.shared.u32 %r15, [%r11]; st.global.u32 [%rd1], %r15; st.global.u32 [%rd1+4], %r16;"""
STORE = "mad.lo.u32 %r12, %r5, 1000, %r1; st.shared.u32 [%r11], %r12;"
LANES = np.arange(32)
USES = {  # statements on the memory of the next rank, what they leave in the own block, and what they return, as functions of the rank
    "a store": ("st.shared::cluster.u32 [%r14], %r5; mov.u32 %r16, 0;", lambda rank: (rank - 1) % 4 + 0 * LANES, lambda rank: 0 * LANES),
    "a generic store": ("st.u32 [%rd7], %r5; mov.u32 %r16, 0;", lambda rank: (rank - 1) % 4 + 0 * LANES, lambda rank: 0 * LANES),
    "a generic load": ("ld.u32 %r16, [%rd7];", lambda rank: 1000 * rank + LANES, lambda rank: 1000 * ((rank + 1) % 4) + LANES),
    "a vector": ("and.b32 %r17, %r1, 28; shl.b32 %r17, %r17, 2; mapa.shared::cluster.u32 %r18, %r9, %r13; and.b32 %r17, %r17, 127; "
                 "add.u32 %r18, %r18, %r17; ld.shared::cluster.v4.u32 {%r20, %r21, %r22, %r16}, [%r18];",
                 lambda rank: 1000 * rank + LANES, lambda rank: 1000 * ((rank + 1) % 4) + (LANES & 28) * 4 % 128 // 4 + 3),
    "an atomic": ("atom.shared::cluster.add.u32 %r16, [%r14], 7;", lambda rank: 1000 * rank + LANES + 7,
                  lambda rank: 1000 * ((rank + 1) % 4) + LANES),
    "a reduction of all blocks": ("mapa.shared::cluster.u32 %r18, %r9, 2; red.shared::cluster.add.u32 [%r18], 1; mov.u32 %r16, 0;",
                                  lambda rank: 1000 * rank + LANES + 128 * (rank == 2) * (LANES == 0), lambda rank: 0 * LANES),
    "a generic atomic": ("atom.exch.b32 %r16, [%rd7], 5;", lambda rank: 0 * LANES + 5, lambda rank: 1000 * ((rank + 1) % 4) + LANES),
}  # fmt: skip


@pytest.mark.parametrize("name", sample_cases(USES, {"a reduction of all blocks"}))
def test_the_memory_of_other_blocks(name):
    """Eight blocks in two clusters of four: what is left in each block, and what each block finds."""
    use, left, returned = USES[name]
    found = run(EXCHANGE.format(store=STORE, use=use), 2, grid=(8, 1), cluster=4)
    wanted = np.array([[left(rank), returned(rank)] for rank in (0, 1, 2, 3) * 2]).transpose(0, 2, 1)
    assert np.count_nonzero(found != wanted) == 0


@pytest.mark.full
def test_tests_of_spaces():
    """A generic address of another block is in shared::cluster, and not in shared::cta."""
    body = """
    cvta.shared.u64 %rd3, tile; mapa.u64 %rd4, %rd3, 0; mov.u32 %r10, 0;
    isspacep.shared::cta %p1, %rd4; selp.u32 %r11, 1, 0, %p1; isspacep.shared::cluster %p1, %rd4; selp.u32 %r12, 2, 0, %p1;
    isspacep.shared %p1, %rd4; selp.u32 %r13, 4, 0, %p1; isspacep.global %p1, %rd4; selp.u32 %r14, 8, 0, %p1;
    add.u32 %r11, %r11, %r12; add.u32 %r11, %r11, %r13; add.u32 %r11, %r11, %r14; st.global.u32 [%rd1], %r11;"""
    assert run(body, grid=(2, 1), cluster=2)[:, 0, 0].tolist() == [7, 2]


COPY = """
    .shared .align 8 .b64 mbar;
    mov.u32 %r10, mbar; setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared.b64 [%r10], 1; @%p1 fence.mbarrier_init.release.cluster;
    mad.lo.u32 %r11, %r1, 4, %r9; mad.lo.u32 %r12, %r5, 100, %r1; st.shared.u32 [%r11], %r12; st.shared.u32 [%r11+128], 0;
    fence.proxy.async.shared::cta;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r10], 128;
    xor.b32 %r13, %r5, 1; mapa.shared::cluster.u32 %r14, %r9, %r13; mapa.shared::cluster.u32 %r15, %r10, %r13;
    @%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r14+128], [%r9], 128, [%r15];
WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [%r10], 0;
    @!%p2 bra WAIT;
    ld.shared.u32 %r16, [%r11+128]; st.global.u32 [%rd1], %r16;
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"""


def test_a_bulk_copy_to_another_block():
    found = run(COPY, grid=(4, 1), cluster=2)[..., 0]
    assert found.tolist() == [[100 * (block & 1 ^ 1) + lane for lane in range(32)] for block in range(4)]


REMOTE = """
    .shared .align 8 .b64 mbar;
    mov.u32 %r10, mbar; setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared.b64 [%r10], 66;
    barrier.cluster.arrive; barrier.cluster.wait;
    mapa.shared::cluster.u32 %r11, %r10, 1; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11];
    @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r11], 1;
    mapa.shared::cluster.u32 %r12, %r10, %r5;
    setp.ne.u32 %p3, %r5, 1;
    @%p3 bra LAST;
WAIT: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p2, [%r10], 0;
    @!%p2 bra WAIT;
LAST:
    barrier.cluster.arrive; barrier.cluster.wait;
    mov.u32 %r13, 1; mbarrier.test_wait.parity.shared.b64 %p2, [%r10], 0; selp.u32 %r13, 7, 3, %p2; st.global.u32 [%rd1], %r13;"""


@pytest.mark.full
def test_arrivals_at_the_barrier_of_another_block():
    """Two blocks arrive at the barrier of rank 1, 66 times in all: its phase ends and that of rank 0 does not."""
    assert run(REMOTE, grid=(2, 1), cluster=2)[..., 0].tolist() == [[3] * 32, [7] * 32]


WRONG_LAUNCHES = {
    "a grid of other multiples": ({"grid": (3, 1), "cluster": 2}, "", ValueError, "multiples of the cluster's size"),
    "another size than declared": ({"grid": (4, 1), "cluster": 2}, ".reqnctapercluster 4", ValueError, "says .reqnctapercluster 4"),
    "no size for .explicitcluster": ({"grid": (4, 1)}, ".explicitcluster", ValueError, "must name the size"),
    "more blocks than declared": ({"grid": (8, 1), "cluster": 8}, ".maxclusterrank 4", ValueError, "takes 4 at most"),
    "more blocks than there are": ({"grid": (32, 1), "cluster": 32}, "", ValueError, "takes 16 at most"),
    "four numbers": ({"grid": (4, 1), "cluster": (1, 1, 1, 1)}, "", ValueError, "cluster: got"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_LAUNCHES)
def test_launches_that_are_refused(name):
    launch, directives, error, message = WRONG_LAUNCHES[name]
    with pytest.raises(error, match=message):
        run("", directives=directives, **launch)


def test_a_target_without_clusters():
    with pytest.raises(Unsupported, match="sm_80 has no clusters"):
        ptx.run(entry("").replace("sm_90a", "sm_80"), grid=2, block=32, args=[np.zeros(64, np.uint32), 1], target="sm_80", cluster=2)


@pytest.mark.full
def test_directives_of_clusters():
    """`.reqnctapercluster` alone makes clusters; `.blocksareclusters` makes the grid count clusters."""
    body = "mov.u32 %r10, %cluster_nctarank; st.global.u32 [%rd1], %r10;"
    assert run(body, grid=(4, 1), directives=".reqnctapercluster 2")[:, 0, 0].tolist() == [2] * 4
    text = entry(body, ".reqntid 32 .reqnctapercluster 2 .blocksareclusters")
    (found,) = ptx.run(text, grid=2, block=32, args=[np.zeros((4, 32), np.uint32), 1], target="sm_90a")
    assert found[:, 0].tolist() == [2] * 4


@pytest.mark.full
def test_clusters_of_several_chunks(monkeypatch):
    """Chunks hold whole clusters, and each block has its own number, also where a cluster's blocks are no neighbours in the grid."""
    monkeypatch.setattr("tcemu.kernels.ptx.runtime.kernel_runner.CHUNK_BYTES", 50_000)
    body = "mad.lo.u32 %r10, %r2, 10, %r3; mad.lo.u32 %r10, %r5, 100, %r10; st.global.u32 [%rd1], %r10;"
    found = run(body, grid=(3, 4), cluster=(1, 2))[:, 0, 0]
    assert found.tolist() == [10 * x + y + 100 * (y % 2) for y in range(4) for x in range(3)]
    seen = []
    run(body, grid=(3, 4), cluster=(1, 2), watch=lambda event: seen.append(tuple(map(int, event.block_numbers))))
    assert len(set(seen)) > 1 and sorted(number for numbers in set(seen) for number in numbers) == list(range(12))
    assert all(len(numbers) % 2 == 0 for numbers in seen)
    seen.clear()
    run(body, grid=(3, 4), cluster=(1, 2), cooperative=True, watch=lambda event: seen.append(len(event.block_numbers)))
    assert set(seen) == {12}


BARRIER = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
NEXT = "mad.lo.u32 %r11, %r1, 4, %r9; xor.b32 %r13, %r5, 1; mapa.shared::cluster.u32 %r14, %r11, %r13;"
INIT = """.shared .align 8 .b64 mbar; mov.u32 %r10, mbar; setp.eq.u32 %p1, %r1, 0; setp.eq.u32 %p3, %r5, 0;
    @%p1 mbarrier.init.shared.b64 [%r10], 1; mapa.shared::cluster.u32 %r15, %r10, 1;"""
FAULTS = {
    "a read that no barrier orders": (f"{NEXT} st.shared.u32 [%r11], %r1; bar.sync 0; ld.shared::cluster.u32 %r15, [%r14]; {BARRIER}",
                                      r"reads shared memory that another thread wrote.*block \(1, 0, 0\)"),
    "a write that no barrier orders": (f"{NEXT} st.shared.u32 [%r11], %r1; bar.sync 0; st.shared::cluster.u32 [%r14], 77; {BARRIER}",
                                       r"another thread wrote another value.*block \(1, 0, 0\)"),
    "a reuse that no barrier orders": (f"{NEXT} st.shared.u32 [%r11], %r1; {BARRIER} ld.shared::cluster.u32 %r15, [%r14]; bar.sync 0;"
                                       f"st.shared.u32 [%r11], 77; {BARRIER}", r"that another thread reads.*block \(1, 0, 0\)"),
    "an exit before the others have read": (f"{NEXT} st.shared.u32 [%r11], %r1; {BARRIER} ld.shared::cluster.u32 %r15, [%r14];",
                                            "exits while the block of rank 1"),
    "a block that has exited": (f"{NEXT} st.shared.u32 [%r11], %r1; {BARRIER} setp.eq.u32 %p1, %r5, 1; @%p1 exit; bar.sync 0;"
                                "ld.shared::cluster.u32 %r15, [%r14];", "block of rank 1 has exited"),
    "an mbarrier whose making no barrier orders": (
        f"{INIT} @%p3 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r15]; {BARRIER}",
        r"another thread initialised the mbarrier.*block \(1, 0, 0\)"),
    "an own access at the address of another block": (f"{NEXT} st.shared.u32 [%r11], %r1; {BARRIER} ld.shared.u32 %r15, [%r14]; {BARRIER}",
                                                      "shared::cta access reaches the block of rank 1"),
    "a wait without an arrival": ("barrier.cluster.wait;", "waits without a barrier.cluster.arrive"),
    "two arrivals": ("barrier.cluster.arrive; barrier.cluster.arrive; barrier.cluster.wait;", "arrives a second time"),
    "a read of what nothing has written": (f"{NEXT} {BARRIER} ld.shared::cluster.u32 %r15, [%r14]; {BARRIER}", "nothing has written"),
}  # fmt: skip


@pytest.mark.parametrize("name", sample_cases(FAULTS, {"a reuse that no barrier orders", "a block that has exited"}))
def test_faults_between_the_blocks_of_a_cluster(name):
    body, message = FAULTS[name]
    with pytest.raises(UndefinedBehaviour, match=message):
        run(body, grid=(2, 1), cluster=2)
    run(body, grid=(2, 1), cluster=2, checked=False)


ALWAYS = {  # found outside checked mode too
    "a rank that the cluster does not have": (f"{NEXT} mapa.shared::cluster.u32 %r14, %r11, 2; ld.shared::cluster.u32 %r15, [%r14];",
                                              ptx.OutOfBounds, "out of bounds"),
    "a multicast mask of other blocks": (
        f"{INIT} mov.u64 %rd4, %rd1; mov.u16 %h1, 5; {BARRIER} @%p1 cp.async.bulk.shared::cluster.global"
        ".mbarrier::complete_tx::bytes.multicast::cluster [%r9], [%rd4], 16, [%r10], %h1;", ptx.OutOfBounds, "the cluster does not have"),
    "a barrier that one block lacks": ("setp.eq.u32 %p1, %r5, 1; @%p1 bra WAIT; barrier.cluster.arrive; barrier.cluster.wait; ret; WAIT: "
                                       ".shared .align 8 .b64 mbar; mov.u32 %r10, mbar; mbarrier.init.shared.b64 [%r10], 99; AGAIN: "
                                       "bar.sync 1, 64;", UndefinedBehaviour, "deadlock"),
}  # fmt: skip


@pytest.mark.parametrize("name", sample_cases(ALWAYS, {}))
def test_wrong_uses_of_clusters(name):
    body, error, message = ALWAYS[name]
    for checked in (False, True):
        with pytest.raises(error, match=message):
            run(body, grid=(2, 1), cluster=2, checked=checked)
