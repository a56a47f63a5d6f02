"""Hazards by the happens-before relation: every promise of checked mode has a planted kernel that is found and a right one that is not."""

import re
from pathlib import Path

import numpy as np
import pytest
from support.hazard_kernels import HEAD, INIT, KERNELS
from support.sampling import sample_cases

from tcemu import ptx
from tcemu.base.errors import UndefinedBehaviour
from tcemu.kernels.ptx.hazards.promises import PROMISES, Scope

ROOT = Path(__file__).parents[3]


def test_every_promise_has_its_kernels():
    promised = {promise.fault: promise for promise in PROMISES if promise.scope in (Scope.ALWAYS, Scope.NOTE) and not promise.test}
    assert set(promised) == set(KERNELS)
    assert {name for name, kernel in KERNELS.items() if kernel.is_note} == {n for n, p in promised.items() if p.scope is Scope.NOTE}
    assert len({promise.fault for promise in PROMISES}) == len(PROMISES)
    for promise in PROMISES:
        path, _, test = promise.test.partition("::")
        assert not path or f"\ndef {test}(" in (ROOT / path).read_text()
        assert path or promise.scope is not Scope.THIS_RUN


@pytest.mark.parametrize("name", sample_cases(KERNELS, 8))
def test_planted_hazards_are_found_and_right_twins_are_not(name):
    kernel = KERNELS[name]
    assert kernel.text(right=True) != kernel.text(right=False)
    assert kernel.run(right=True).notes == ()
    if kernel.is_note:
        (note,) = kernel.run(right=False).notes
        assert re.search(kernel.message, note) and re.search(r"PTX ISA (8|9)\.", note)
    else:
        with pytest.raises(UndefinedBehaviour, match=kernel.message):
            kernel.run(right=False)


def test_a_race_between_blocks_names_both_statements():
    kernel = KERNELS["global memory: a block that reads what another writes"]
    lines = kernel.text(right=False).splitlines()
    with pytest.raises(UndefinedBehaviour) as caught:
        kernel.run(right=False)
    found = re.findall(r"line (\d+): (\S+): block \((\d), 0, 0\), thread", str(caught.value))
    assert [block for *_, block in found] in (["0", "1"], ["1", "0"])
    assert all(opcode in lines[int(line) - 1] for line, opcode, _ in found)


def test_a_race_in_shared_memory_is_found_in_any_number_of_blocks():
    """An access of a kernel with mbarriers tells 1,023 groups of blocks apart; the block of a place in shared memory is known."""
    kernel = KERNELS["shared memory: threads of a block"]
    late = kernel._replace(body=f"{INIT} bar.sync 0; setp.lt.u32 %p6, %r2, 1050; @%p6 bra END; {kernel.body} END:", grid=1060)
    assert late.run(right=True).notes == ()
    with pytest.raises(UndefinedBehaviour, match=r"block \(1050, 0, 0\).*that is line.*block \(1050, 0, 0\)"):
        late.run(right=False)


def test_a_product_by_one_warp_of_a_warpgroup_is_no_error_of_the_tracker():
    kernel = KERNELS["wgmma: no proxy fence"]
    tensor = ptx.TensorMap(np.zeros((64, 64), np.float16), "f16", [64, 64], [64, 64])
    args = [np.zeros(1024, np.uint32), np.zeros(4096, np.float32), tensor]
    found = ptx.run(kernel.text(right=True), grid=1, block=32, args=args, target="sm_90a", checked=True)
    assert any("a-desc reads bytes of shared memory that nothing has written" in note for note in found.notes)
    with pytest.raises(UndefinedBehaviour, match=kernel.message):
        ptx.run(kernel.text(right=False), grid=1, block=32, args=args, target="sm_90a", checked=True)


def test_nothing_is_found_outside_checked_mode():
    kernel = KERNELS["global memory: threads of a block"]
    tensor = ptx.TensorMap(np.zeros((64, 64), np.float16), "f16", [64, 64], [64, 64])
    args = [np.zeros(1024, np.uint32), np.zeros(4096, np.float32), tensor]
    out, *_ = ptx.run(kernel.text(right=False), grid=1, block=128, args=args, target="sm_90a")
    assert out[128:256].tolist() == list(range(127, -1, -1))


# ---- other legal orders

SWAPS = "atom.exch.global.b32 %r8, [%rd1], %r1; st.global.u32 [%rd4+1024], %r8;"
VOLATILE = """st.shared.u32 [%r5], %r1; bar.sync 0; @!%p2 bra END;
    ld.volatile.shared.u32 %r8, [%r5+64]; st.volatile.shared.u32 [%r5], %r8; ORDER
    ld.volatile.shared.u32 %r8, [%r5+32]; st.global.u32 [%rd4], %r8; END:"""
SUM = "atom.add.global.u32 %r8, [%rd1], %r1; bar.sync 0;"


def run_adversarial(body, seed=0, grid=2):
    tensor = ptx.TensorMap(np.zeros((64, 64), np.float16), "f16", [64, 64], [64, 64])
    args = [np.zeros(1024, np.uint32), np.zeros(4096, np.float32), tensor]
    text = HEAD.format(body=body)
    return ptx.run(text, grid=grid, block=128, args=args, target="sm_90a", checked=True, schedule="adversarial", seed=seed)


@pytest.mark.parametrize("seed", [0, 1])
def test_words_that_depend_on_the_schedule_are_named(seed):
    found = run_adversarial(SWAPS, seed, grid=1)
    (difference,) = found.differences
    first = found[0].reshape(-1)
    assert difference.array == 0 and difference.total == 1024 and len(difference.words)
    assert (first[difference.words] == difference.first).all() and (difference.first != difference.second).all()
    assert f"{len(difference.words)} of 1024 words depend on the schedule, seed {seed}: {difference.words[0]}: " in found.notes[-1]


def test_lanes_that_do_not_synchronise_come_in_any_order():
    wrong = [len(run_adversarial(VOLATILE.replace("ORDER", ""), seed, grid=1).differences) for seed in range(4)]
    right = [len(run_adversarial(VOLATILE.replace("ORDER", "bar.warp.sync 0xFFFFFFFF;"), seed, grid=1).differences) for seed in range(2)]
    assert any(wrong) and not any(right)


@pytest.mark.parametrize("name", ["shared memory: a named barrier of other threads", "bulk copy: over what threads still read"])
def test_right_kernels_give_the_same_words_in_other_orders(name):
    found = KERNELS[name].run(right=True, schedule="adversarial", seed=3)
    assert found.differences == () and found.notes == ()
    assert run_adversarial(SUM).differences == ()


def test_a_schedule_has_a_name():
    with pytest.raises(ValueError, match="adversarial"):
        KERNELS["barrier: counts that differ"].run(right=True, schedule="random")


RELAXED = """
.version 8.3 .target sm_90a .address_size 64
.visible .entry k() {{
    .reg .b32 %r<4>; .reg .pred %p<2>; .shared .align 8 .b64 bar;
    mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; mov.u32 %r1, bar; mov.u32 %r2, %cluster_ctarank; xor.b32 %r2, %r2, 1;
    {before} barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;
    mapa.shared::cluster.u32 %r3, %r1, %r2; @%p0 mbarrier.arrive.shared::cluster.b64 _, [%r3];
    barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ret; }}
"""


BAR_INIT, BAR_FENCE = "@%p0 mbarrier.init.shared::cta.b64 [%r1], 1;", "fence.mbarrier_init.release.cluster;"


@pytest.mark.parametrize("before", [BAR_INIT + BAR_FENCE, BAR_INIT + "fence.acq_rel.cluster;", BAR_INIT, BAR_FENCE + BAR_INIT])
def test_a_relaxed_arrival_passes_on_what_a_fence_before_it_ordered(before):
    """As CUTLASS orders the initialisation of mbarriers before their use by the other block of a pair."""
    launch = lambda: ptx.run(RELAXED.format(before=before), grid=2, block=32, cluster=2, target="H100", checked=True)
    if before.endswith(BAR_INIT):
        with pytest.raises(UndefinedBehaviour, match="another thread initialised the mbarrier"):
            launch()
    else:
        assert launch().notes == ()
