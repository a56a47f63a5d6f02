"""The hazards that checked mode finds by the happens-before relation, as rows of one table. Source: the sections that the rows name."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

MODEL, PROXY, BULK, BARRIER, MBARRIER, CLUSTER = "8.10", "9.7.13.4", "9.7.9.25.2", "9.7.13.1", "9.7.13.15", "9.7.13.4"


class HazardRow(NamedTuple):
    """A row of the table.

    Args:
        text: What is wrong, and what would be right; {} stands for what the access knows.
        section: Section of the PTX ISA.
        is_note: It is collected and does not raise.
    """

    text: str
    section: str
    is_note: bool = False


class Hazard(Enum):
    """The hazards by name."""

    UNORDERED_READ = HazardRow("it reads {} memory that another thread wrote, and nothing orders the read after the write; {}", MODEL)
    UNORDERED_WRITE = HazardRow("it writes {} memory to which another thread wrote another value, and nothing orders the two; {}", MODEL)
    UNORDERED_OVERWRITE = HazardRow("it writes {} memory that another thread reads, and nothing orders the write after the read; {}", MODEL)
    REPLICATED_READ = HazardRow(
        "it writes {} memory that many threads of the block read by one statement, and nothing orders the write after the reads: right "
        "if the others do not use what they read, as in Triton's kernels; {}",
        MODEL,
        True,
    )
    PENDING_COPY = HazardRow(
        "it uses {} memory that a copy still writes for this thread: wait for the phase of its mbarrier, or for its group; {}",
        BULK,
    )
    COPY_READS = HazardRow(
        "it writes {} memory that a bulk copy or a product still reads for this thread: wait for its group, then pass a barrier; {}", BULK
    )
    PROXY_FENCE_MISSING = HazardRow(
        "it reads {} memory by the async proxy that a thread wrote by the generic proxy: fence.proxy.async must follow the write; {}", PROXY
    )
    UNWAITED_EXIT = HazardRow(
        "the thread exits while its bulk copy may still read shared memory: cp.async.bulk.wait_group.read 0 must precede the exit", BULK
    )
    UNORDERED_INIT = HazardRow(
        "another thread initialised the mbarrier, and no barrier and no fence orders this use after that; {}", MBARRIER
    )
    UNWRITTEN_READ = HazardRow("it reads {} bytes of shared memory that nothing has written, the first at {:#x}", "5.4.4")
    FOREIGN_BLOCK = HazardRow("a .shared::cta access reaches the block of rank {}; expected .shared::cluster", "5.1.7")
    EXITED_BLOCK = HazardRow(
        "the block of rank {} has exited; a barrier of the cluster must keep it until others have used its memory", CLUSTER
    )
    USED_AT_EXIT = HazardRow(
        "the block exits while the block of rank {} of its cluster may still use its shared memory: no barrier of the cluster and no "
        "mbarrier orders that use before the exit; {}",
        CLUSTER,
    )
    DIVERGENT_BARRIER = HazardRow(
        "only some threads of a warp execute this barrier, which is .aligned: all must, or use barrier.sync",
        BARRIER,
    )
    TOO_MANY_ARRIVALS = HazardRow("{} threads arrive at barrier {}, which expects {}: the count must cover all that take part", BARRIER)
    DIFFERENT_COUNTS = HazardRow("barrier {} expects {} threads here and {} in other threads that have arrived", BARRIER)
    OTHER_BARRIER_STATEMENT = HazardRow(
        "threads of the block meet at barrier {} by different statements, lines {}: legal in PTX, an error in CUDA C++", BARRIER, True
    )
    OTHER_SWIZZLE = HazardRow(
        "{} reads, with a swizzle of {} bytes, what a copy wrote with a swizzle of {} bytes; the copy is line {}", "9.7.15.5.1.2", True
    )
    UNWRITTEN_CELLS = HazardRow("{} reads bytes of shared memory that nothing has written, the first is {:#x}", "9.7.15.5.1.2", True)
    OLDER_COPY = HazardRow(
        "{} reads bytes, the first is {:#x}, that the newest copy to its stage did not write; an earlier one did",
        "9.7.15.5.1.2",
        True,
    )
    REPEATED_CELLS = HazardRow(
        "{} reads {} runs of 16 bytes more than once: the rows that its strides lead to overlap", "9.7.15.5.1.2", True
    )
    STAGE_ALIGNMENT = HazardRow(
        "the box lies at {:#x}, which is no multiple of {} bytes: its swizzle repeats at such addresses, and descriptors assume them",
        "9.7.9.25.5.2",
        True,
    )

    def message(self, *words: object) -> str:
        """Return the text of the hazard with its words and its section."""
        return f"{self.value.text.format(*words)}. PTX ISA {self.value.section}"
