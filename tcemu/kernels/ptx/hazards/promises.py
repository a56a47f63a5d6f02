"""The promises of checked mode: each fault, and whether it is found always, only if it changes this run, or not at all.

A fault that is found always is found by the order of accesses, whatever the run computes. The tests have a kernel with the fault and
a right twin for every row that promises something (`tests/support/hazard_kernels.py` and the tests that a row names).
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Scope(Enum):
    """When a fault is found."""

    ALWAYS = "always"
    NOTE = "always, as a note"  # in `notes` of the result: legal, and hardly meant
    THIS_RUN = "if it changes this run"
    NOT = "not looked for"


class Promise(NamedTuple):
    """A row of the table."""

    fault: str
    scope: Scope
    test: str = ""  # a test that plants the fault; "": the kernel of this name in `tests/support/hazard_kernels.py`


FOLDER = "tests/kernels/ptx"
BLOCK = f"{FOLDER}/test_ptx_run.py::test_faults_say_who_and_where"
UNWRITTEN = f"{FOLDER}/test_ptx_run.py::test_checked_mode_finds_races_and_what_nothing_has_written"
REGISTERS = f"{FOLDER}/test_ptx_protocol.py::test_hazards_of_the_protocol"
MBARRIERS = f"{FOLDER}/test_ptx_protocol.py::test_what_is_undefined_raises_in_checked_mode"
CLUSTERS = f"{FOLDER}/test_ptx_clusters.py::test_faults_between_the_blocks_of_a_cluster"
PIPELINES = f"{FOLDER}/test_ptx_cluster_kernels.py::test_planted_faults_are_found"
LOADS = f"{FOLDER}/test_ptx_tcgen05_protocol.py::test_loads_stores_and_allocations"
TENSOR = f"{FOLDER}/test_ptx_tcgen05_protocol.py::test_planted_faults_are_found_by_name"
ORDERS = f"{FOLDER}/test_hazards.py::test_words_that_depend_on_the_schedule_are_named"
PROMISES = (
    Promise("shared memory: threads of a block", Scope.ALWAYS),
    Promise("shared memory: a named barrier of other threads", Scope.ALWAYS),
    Promise("shared memory: lanes of a warp", Scope.ALWAYS),
    Promise("shared memory: wmma.load and wmma.store", Scope.ALWAYS),
    Promise("shared memory: blocks of a cluster", Scope.ALWAYS, CLUSTERS),
    Promise("global memory: threads of a block", Scope.ALWAYS),
    Promise("global memory: a place that all threads read and one writes", Scope.NOTE),
    Promise("global memory: blocks that write one place", Scope.ALWAYS),
    Promise("global memory: a block that reads what another writes", Scope.ALWAYS),
    Promise("global memory: a flag without its fence", Scope.ALWAYS),
    Promise("global memory: an atomic without its barrier", Scope.ALWAYS),
    Promise("barrier: a warp that diverges", Scope.ALWAYS),
    Promise("barrier: a count that does not cover all", Scope.ALWAYS),
    Promise("barrier: counts that differ", Scope.ALWAYS),
    Promise("barrier: statements that differ", Scope.NOTE),
    Promise("mbarrier: used with no barrier after its initialisation", Scope.ALWAYS),
    Promise("mbarrier: used before its initialisation, or with more arrivals than it expects", Scope.THIS_RUN, MBARRIERS),
    Promise("bulk copy: read before its mbarrier's phase", Scope.ALWAYS),
    Promise("bulk copy: over what threads still read", Scope.ALWAYS),
    Promise("bulk store: no proxy fence", Scope.ALWAYS),
    Promise("bulk store: no barrier", Scope.ALWAYS),
    Promise("bulk store: no wait before the memory is used again", Scope.ALWAYS),
    Promise("bulk store: no wait before the exit", Scope.ALWAYS),
    Promise("bulk store: its target is read before the wait", Scope.ALWAYS),
    Promise("cp.async: no wait", Scope.ALWAYS),
    Promise("cp.async: no barrier", Scope.ALWAYS),
    Promise("wgmma: no proxy fence", Scope.ALWAYS),
    Promise("wgmma: an operand that is written before the wait", Scope.ALWAYS),
    Promise("wgmma: registers without fence, commit or wait", Scope.ALWAYS, REGISTERS),
    Promise("tcgen05: registers of a load without wait::ld, as in CuTe's kernels", Scope.NOTE, LOADS),
    Promise("tcgen05: such a use before a wait::ld that follows in the same basic block, as in Triton's kernels", Scope.NOT),
    Promise("tcgen05: work without commit, wait, barrier, allocation or proxy fence", Scope.ALWAYS, TENSOR),
    Promise("tcgen05: lanes that the warp may not reach", Scope.ALWAYS, TENSOR),
    Promise("tcgen05: lane 0 from a warp of another quarter; a missing tcgen05.fence", Scope.NOTE, TENSOR),
    Promise("operand: memory that nothing has written", Scope.NOTE),
    Promise("operand: another swizzle than that of the copy", Scope.NOTE),
    Promise("operand: rows that overlap", Scope.NOTE),
    Promise("operand: a stage of which the newest copy wrote only a part", Scope.NOTE),
    Promise("tensor copy: a stage where its swizzle does not begin", Scope.NOTE),
    Promise("an access out of bounds or misaligned; a deadlock", Scope.THIS_RUN, BLOCK),
    Promise("a read of shared memory that nothing has written, in kernels without asynchronous copies", Scope.THIS_RUN, UNWRITTEN),
    Promise("a wrong parity, a wrong count of bytes or of arrivals: a deadlock, or a step limit", Scope.THIS_RUN, PIPELINES),
    Promise("strong accesses whose order decides the result: schedule='adversarial' shows some", Scope.THIS_RUN, ORDERS),
    Promise("races of wmma.load, wmma.store, im2col and gathered boxes in global memory; races of red.async", Scope.NOT),
    Promise("a strong read without .acquire and without a fence behind it, as in NVIDIA's examples", Scope.NOT),
    Promise("the scope of a fence, as .cta where .gpu is needed", Scope.NOT),
    Promise("lanes of one warp of which only some release: all count as released", Scope.NOT),
    Promise("wgmma: no proxy fence between cp.async and the product, as in Triton's kernels", Scope.NOT),
    Promise("a write by the async proxy after one by the generic proxy, without a proxy fence", Scope.NOT),
    Promise("two blocks that do not run at once, above 1 GiB of registers and memory", Scope.NOT),
    Promise("Triton: a read of the bytes before a tensor that keep its alignment, which are 0", Scope.NOT),
)
