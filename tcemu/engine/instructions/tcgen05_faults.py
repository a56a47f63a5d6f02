"""The faults of the protocol of `tcgen05` that checked mode finds, as rows of one table.

A fault raises `UndefinedBehaviour`. A note is collected instead, in the attribute `notes` of what `tcemu.ptx.run` returns: the manual asks
for the fence or the order, but CUTLASS and Triton leave it out. Source: PTX ISA 9.7.16.6 and the sections that the rows name.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

ALLOCATION, ORDER, WAIT, PROXY = "9.7.16.7", "9.7.16.6", "9.7.16.8.5", "9.7.13"


class FaultRow(NamedTuple):
    """A row of the table.

    Args:
        kind: Number of the kind, 1 to 10.
        text: What is wrong, and what would be right; {} stands for what the statement knows.
        section: Section of the PTX ISA.
        is_note: It is collected and does not raise.
    """

    kind: int  # number of the kind, 1 to 10
    text: str  # what is wrong, and what would be right; {} stands for what the statement knows
    section: str  # of the PTX ISA
    is_note: bool = False  # it is collected and does not raise


class Tcgen05Fault(Enum):
    """The faults by name."""

    # 1: registers and tensor memory meet work that is not known to be complete
    UNFINISHED_WORK = FaultRow(
        1, "a {} still uses the cells: a tcgen05.commit must follow it in its thread, and the mbarrier's phase must be seen", "9.7.16.12.1"
    )
    MISSING_FENCE = FaultRow(
        1,
        "the cells are ordered by waiting alone; tcgen05.fence::before_thread_sync and ::after_thread_sync are missing",
        "9.7.16.11.1",
        True,
    )
    # 2: loads and stores that are not waited for
    STORE_WITHOUT_WAIT = FaultRow(
        2, "a tcgen05.st of warp {} to the cells has not ended for this thread: tcgen05.wait::st must follow it", WAIT
    )
    LOAD_WITHOUT_WAIT = FaultRow(
        2, "a tcgen05.ld of warp {} from the cells has not ended for this thread: tcgen05.wait::ld must follow it", WAIT
    )
    LOADED_TOO_EARLY = FaultRow(
        2, "it uses a register of a tcgen05.ld that is not waited for: tcgen05.wait::ld must come between", WAIT, True
    )
    # 3: products, copies and shifts among each other
    UNORDERED_WORK = FaultRow(
        3, "a {} used the cells before, and nothing orders the two: commit the first and wait for its mbarrier", ORDER
    )
    UNPROMISED_ORDER = FaultRow(
        3, "a {} of the same thread reads the cells; the manual does not promise that it does so first", ORDER, True
    )
    # 4: shared memory
    SHARED_MEMORY_IN_USE = FaultRow(
        4, "a {} still reads the shared memory that is written: commit it and wait for its mbarrier first", ORDER
    )
    PROXY_FENCE_MISSING = FaultRow(
        4, "it reads shared memory that a thread has written by the generic proxy: fence.proxy.async must follow the store", PROXY
    )
    # 5: allocation
    UNWRITTEN_CELLS = FaultRow(5, "{} reads cells that nothing has written since their allocation", ORDER)
    UNALLOCATED_COLUMNS = FaultRow(5, "it uses columns of tensor memory that the block has not allocated, or has freed", ALLOCATION)
    FREED_IN_USE = FaultRow(5, "a {} still uses the columns that it frees: wait for it first", ALLOCATION)
    UNKNOWN_ALLOCATION = FaultRow(5, "it frees columns that the block has not allocated, or an address that alloc did not give", ALLOCATION)
    OTHER_SIZE = FaultRow(5, "nCols is not that of the allocation", ALLOCATION)
    NOT_FREED = FaultRow(5, "{} exits and has not freed {} columns of tensor memory; tcgen05.dealloc frees them", ALLOCATION)
    NO_PERMIT = FaultRow(5, "the block has given up its right to allocate by relinquish_alloc_permit", ALLOCATION)
    LARGER_ALLOCATION = FaultRow(5, "nCols must not be larger than in the block's last allocation", ALLOCATION)
    ILLEGAL_SIZE = FaultRow(5, "nCols must be a power of 2 from {} to {}", ALLOCATION)
    # 6: the threads of a warp
    OTHER_QUARTER = FaultRow(6, "the lane of the address is not in the quarter of the warp", "9.7.16.8")
    LANE_OF_FIRST_QUARTER = FaultRow(
        6,
        "the lane of the address is in the first quarter, which this warp may not reach; its own lanes begin at {}. GPUs take the lane "
        "modulo 32",
        "9.7.16.8",
        True,
    )
    DIFFERENT_VALUES = FaultRow(6, "{} must be the same in all threads of the warp", ALLOCATION)
    # 7: addresses and descriptors
    ILLEGAL_DESCRIPTOR = FaultRow(7, "{}: {}", "9.7.16.4.1")
    LANE_OF_D = FaultRow(
        7, "the lane of the address of D must be 0, or may be 16 where the rows of D lie in halves of the quarters", "9.7.16.10.5"
    )
    LANE_OF_SHIFT = FaultRow(7, "the lane of the address must be a multiple of 32", "9.7.16.9.3")
    # 8: values that must agree
    SCALES_DIFFER = FaultRow(8, "{}: the copies of the scales in the quarters of the lanes differ", "9.7.16.10.7")
    UNDEFINED_METADATA = FaultRow(8, "sp-meta-tmem: a field of the sparsity metadata is {}, which is not defined", "9.7.16.10.8")
    OPEN_SCALED_INPUT = FaultRow(8, "scale-input-d makes an element of D subnormal; nobody has published how it is rounded", "9.7.16.10.9")
    # 9: groups
    MIXED_GROUPS = FaultRow(9, "it has cta_group::{}, but line {} has another: all tcgen05 of a kernel must have the same", "9.7.16.5")
    # 10: collectors
    COLLECTOR_NOT_FILLED = FaultRow(10, "it uses collector buffer {}, which no product of its thread has filled", "9.7.16.10.9", True)

    def message(self, *words: object) -> str:
        """Return the text of the fault with its words and its section."""
        return f"{self.value.text.format(*words)}. PTX ISA {self.value.section}"


# pairs that the tensor core executes in order by themselves: PTX ISA 9.7.16.6.2
PIPELINED = frozenset({("copy", "product"), ("shift", "product"), ("shift", "copy"), ("product", "shift")})


def is_pipelined(first: tuple, second: tuple, *, is_read: bool) -> bool:
    """Return True if the second statement, of the same thread, comes after what the first writes.

    Args:
        first: What the first one is: ("product", kind, .ws, M, N, address of D), ("copy", shape) or ("shift",).
        second: What the second one is.
        is_read: The second one reads the cells, and does not accumulate into them.
    """
    if first[0] == second[0] == "product":
        return not is_read and first == second
    if (first[0], second[0]) == ("shift", "copy"):
        return second[1] == "4x256b"
    return first[:1] == second[:1] or (first[0], second[0]) in PIPELINED
