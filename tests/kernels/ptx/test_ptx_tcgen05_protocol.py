"""Checked mode follows the protocol of tcgen05: 200 planted faults are found by name, and right kernels have none."""

import re

import numpy as np
import pytest
from support.sampling import sample_cases
from support.tcgen05_kernels import KERNELS, launch_kernel
from support.tcgen05_protocol_kernels import (
    EDITS,
    TARGET,
    Line,
    Variant,
    expected_result,
    kernel_lines,
    kernel_text,
    planted_faults,
    run_kernel,
    variants,
)

from tcemu import ptx
from tcemu.base.errors import UndefinedBehaviour
from tcemu.engine.instructions.tcgen05_faults import Tcgen05Fault

PLANTED, BATCH = 200, 20


def pattern(fault):
    """Return a regular expression of a fault's text."""
    return re.sub(r"\\\{\\\}", ".*", re.escape(fault.value.text))


def find(variant, lines):
    """Return the fault or the notes of a kernel, in words."""
    try:
        return "\n".join(run_kernel(variant, lines).notes)
    except UndefinedBehaviour as error:
        return str(error)


def test_every_kind_of_fault_has_a_row_and_is_planted():
    """A warp that lacks threads has the message of all collectives, and no row."""
    assert {fault.value.kind for fault in Tcgen05Fault} == set(range(1, 11))
    elsewhere = {Tcgen05Fault.UNDEFINED_METADATA, Tcgen05Fault.OPEN_SCALED_INPUT}  # test_ptx_tcgen05_products, test_ptx_tcgen05
    assert {edit.fault for edit in EDITS} | {fault for _, fault in FAST.values() if fault} == set(Tcgen05Fault) - elsewhere
    assert all(re.fullmatch(r"9\.7(\.\d+)+", fault.value.section) for fault in Tcgen05Fault)


@pytest.mark.parametrize("batch", sample_cases(range(PLANTED // BATCH), ()))
def test_planted_faults_are_found_by_name(batch):
    planted = list(planted_faults(PLANTED))
    assert len({(edit.name, variant) for edit, variant in planted}) == PLANTED
    for edit, variant in planted[BATCH * batch : BATCH * (batch + 1)]:
        right = kernel_lines(variant)
        wrong = edit.change(variant, right)
        assert wrong != right, edit.name
        said = find(variant, wrong)
        assert re.search(pattern(edit.fault), said), f"{edit.name}, {variant}: {said}"
        assert f"PTX ISA {edit.fault.value.section}" in said


@pytest.mark.parametrize("batch", sample_cases(range(6), ()))
def test_right_kernels_have_no_fault_and_give_the_product(batch):
    for variant in variants()[batch::6]:
        found = run_kernel(variant, kernel_lines(variant))
        assert found.notes == (), variant
        wrong = int((found[2].view(np.uint32) != expected_result(variant).view(np.uint32)).sum())
        assert wrong == 0, f"{variant}: {wrong} of {found[2].size}"


@pytest.mark.full
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_compilers_have_no_fault(name):
    launch, found = launch_kernel(name, checked=True)
    assert int((found.view(np.uint8) != launch.expected.view(np.uint8)).sum()) == 0


# ---- without products, which compile fast

FREE = "@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 32;"
SMALL = """mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 32; mov.u32 %r1, place;
    @%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
    bar.sync 0; ld.shared.b32 %r7, [place]; shr.u32 %r8, %r0, 5; shl.b32 %r8, %r8, 21; add.u32 %r8, %r8, %r7;
    BODY
    bar.sync 0; FREE ret;"""
STORE, LOAD = "tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8], {%r0};", "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r9}, [%r8];"
WAIT_ST, WAIT_LD = "tcgen05.wait::st.sync.aligned;", "tcgen05.wait::ld.sync.aligned;"
FAST = {
    "no wait::st": (f"{STORE} {LOAD} {WAIT_LD}", Tcgen05Fault.STORE_WITHOUT_WAIT),
    "no wait::ld": (f"{STORE} {WAIT_ST} {LOAD} {STORE} {WAIT_ST} {WAIT_LD}", Tcgen05Fault.LOAD_WITHOUT_WAIT),
    "a load is not waited for": (f"{STORE} {WAIT_ST} {LOAD}", Tcgen05Fault.FREED_IN_USE),
    "nothing is stored": (f"{LOAD} {WAIT_LD}", Tcgen05Fault.UNWRITTEN_CELLS),
    "nothing frees the columns": (f"{STORE} {WAIT_ST}", Tcgen05Fault.NOT_FREED),
    "two groups": (f"{STORE} {WAIT_ST} tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned;", Tcgen05Fault.MIXED_GROUPS),
    "right": (f"{STORE} {WAIT_ST} {LOAD} {WAIT_LD}", None),
    "the register of a load is used": (f"{STORE} {WAIT_ST} {LOAD} add.u32 %r9, %r9, 1;", Tcgen05Fault.LOADED_TOO_EARLY),
    "it is used, and the wait is behind a barrier": (
        f"{STORE} {WAIT_ST} {LOAD} add.u32 %r9, %r9, 1; bar.sync 0; {WAIT_LD}", Tcgen05Fault.LOADED_TOO_EARLY,
    ),
    "it is written": (f"{STORE} {WAIT_ST} {LOAD} mov.b32 %r9, 1;", Tcgen05Fault.LOADED_TOO_EARLY),
    "it is used before the wait that follows, as by Triton": (f"{STORE} {WAIT_ST} {LOAD} add.u32 %r9, %r9, 1; {WAIT_LD}", None),
    "it is used after the wait": (f"{STORE} {WAIT_ST} {LOAD} {WAIT_LD} add.u32 %r9, %r9, 1;", None),
    "a second load after a use": (f"{STORE} {WAIT_ST} {LOAD} {WAIT_LD} add.u32 %r9, %r9, 1; {LOAD} {WAIT_LD}", None),
}  # fmt: skip


def launch(name, checked):
    """Run a kernel; return its notes."""
    body, fault = FAST[name]
    text = kernel_text([Line(SMALL.replace("BODY", body).replace("FREE", "" if fault is Tcgen05Fault.NOT_FREED else FREE))])
    return ptx.run(text, grid=1, block=64, args=[np.zeros(64, np.uint32)] * 3, target=TARGET, checked=checked).notes


@pytest.mark.parametrize("name", FAST)
def test_loads_stores_and_allocations(name):
    fault = FAST[name][1]
    if fault is None:
        assert launch(name, checked=True) == ()
        return
    if fault.value.is_note:
        (note,) = launch(name, checked=True)
        assert re.search(pattern(fault), note)
        return
    with pytest.raises(UndefinedBehaviour, match=pattern(fault)):
        launch(name, checked=True)


@pytest.mark.full
@pytest.mark.parametrize("name", FAST)
def test_nothing_is_found_without_checked_mode(name):
    assert launch(name, checked=False) == ()


def test_the_variants_are_as_many_as_they_say():
    assert len(variants()) == len(set(variants())) == 120
    assert Variant() in variants()
