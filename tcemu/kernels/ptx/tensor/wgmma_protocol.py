"""Checked mode: the asynchronous protocol of wgmma, in the order in which warps execute statements.

A product is computed when it is issued, so values do not show its hazards. The host therefore follows, statement by statement and also
through loops, which registers are used and which warps have executed which fence, commit and wait. Only statements that use a register of
some product are followed. The rules are those of `tcemu.instructions.Warpgroup`. Source: PTX ISA 9.7.15.7.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tcemu.base.errors import UndefinedBehaviour
from tcemu.engine.isa.families import LANES, Wgmma
from tcemu.kernels.ptx.linker.linked_kernel import Kernel, LinkedStatement
from tcemu.kernels.ptx.runtime.tracing import ExecutedStatement, qualified_registers
from tcemu.kernels.ptx.tensor.statement_forms import BoundStatement, bind_operands, vector_elements
from tcemu.kernels.ptx.text.module import Register, Vector

FENCE_SECTION, WAIT_SECTION = "PTX ISA 9.7.15.7.1", "PTX ISA 9.7.15.7.3"
WAIT = f"wait for its group. {WAIT_SECTION}"
DescribePlace = Callable[[LinkedStatement, int, int], str]  # describes a line, a block and a thread
# NVRTC moves the zeros of an accumulator behind a fence whose asm statement does not name it
REMEDY = (
    "write it before the fence, or fence again. In CUDA C++ name the registers as operands of the fence, "
    'asm volatile("wgmma.fence.sync.aligned;" : "+f"(c[0]), ... :: "memory"), so that the compiler moves nothing across it'
)


@dataclass(frozen=True)
class RegisterUse:
    """The accesses of a line to registers of products, by the indices of the registers."""

    bound: BoundStatement | None = None  # a wgmma statement
    d: tuple[int, ...] = ()  # accumulator of a product
    a: tuple[int, ...] = ()  # A of a product
    uses: tuple[int, ...] = ()  # registers of another statement
    copied: tuple[int, int] | None = None  # source and destination of a `mov`


@dataclass
class WgmmaProtocol:
    """The protocol state of the warps of a chunk of blocks.

    Register state, arrays [registers, blocks, warps]:
        accumulator_group, a_group: number, from 1, of the group of the last product that uses it as accumulator or as A; 0 for none.
        shape: n of the product's shape since the last fence; 0 for none.
        touched: threads have used it since the last fence.
    Warp state, arrays [blocks, warps]:
        groups: number of committed groups.
        done: number of groups that the warp has waited for.
        fenced: the warp has executed a fence.
    """

    lines: dict[int, RegisterUse]  # by line number
    count: int  # number of registers
    where: DescribePlace
    blocks: tuple[int, int]  # blocks of the chunk, warps of a block
    state: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        register_shape = (self.count, *self.blocks)
        self.state = {name: np.zeros(register_shape, np.int64) for name in ("accumulator_group", "a_group", "shape")}
        self.state |= {"touched": np.zeros(register_shape, bool), "fenced": np.zeros(self.blocks, bool)}
        self.state |= {name: np.zeros(self.blocks, np.int64) for name in ("groups", "done")}

    def __call__(self, event: ExecutedStatement) -> None:
        """Follow a statement that threads have executed. Raises UndefinedBehaviour."""
        line = event.linked
        use = self.lines.get(line.number)
        if use is None:
            return
        warps = np.asarray(event.executing().reshape(*self.blocks, LANES).any(-1))
        if use.bound is None:
            self._check_use(line, use, warps)
        elif use.bound.op.family in ("wgmma", "wgmma.sp"):
            self._check_product(line, use, use.bound, warps)
        else:
            self._apply_ordering(use.bound, warps)

    def _apply_ordering(self, bound: BoundStatement, warps: np.ndarray) -> None:
        state, family = self.state, bound.op.family
        if family == "wgmma.fence":
            state["fenced"] |= warps
            state["touched"] &= ~warps
            state["shape"] *= ~warps
        elif family == "wgmma.commit_group":
            state["groups"] += warps
        else:
            waited = state["groups"] - bound.integer("n", 0)
            state["done"] = np.where(warps, np.maximum(state["done"], waited), state["done"])

    def _check_product(self, line: LinkedStatement, use: RegisterUse, bound: BoundStatement, warps: np.ndarray) -> None:
        state, op, d, a = self.state, bound.op, list(use.d), list(use.a)
        shape = state["shape"][d]
        touched = "a thread has used a register of its {} since the last wgmma.fence; " + f"{REMEDY}. {FENCE_SECTION}"
        other_shape = f"its accumulator belonged to a product of another shape since the last wgmma.fence. {FENCE_SECTION}"
        for wrong, message in (
            (~state["fenced"], f"it is issued before any wgmma.fence. {FENCE_SECTION}"),
            (state["touched"][d].any(0), touched.format("accumulator")),
            (state["touched"][a].any(0), touched.format("A")),
            (((shape != 0) & (shape != op.n)).any(0), other_shape),
            (self._is_pending("accumulator_group", a), f"its A is the accumulator of a pending product; {WAIT}"),
            (self._is_pending("a_group", d), f"its accumulator holds the A of a pending product; {WAIT}"),
        ):
            self._forbid(line, warps & wrong, message)
        group = state["groups"] + 1
        for name, registers in (("accumulator_group", d), ("a_group", a)):
            state[name][registers] = np.where(warps, group, state[name][registers])
        state["shape"][d] = np.where(warps, op.n, shape)

    def _is_pending(self, name: str, registers: list[int]) -> np.ndarray:
        """Return bool[blocks, warps], True where a product that the warp has not waited for uses one of the registers."""
        return np.asarray((self.state[name][registers] > self.state["done"]).any(0))

    def _check_use(self, line: LinkedStatement, use: RegisterUse, warps: np.ndarray) -> None:
        """Check the use of registers by threads. A `mov` between registers, which compilers insert, copies the state of its source."""
        state, uses, must_wait = self.state, list(use.uses), f"wgmma.wait_group must cover its group. {WAIT_SECTION}"
        if use.copied is not None:
            source, target = use.copied
            for name in ("accumulator_group", "a_group"):
                overwritten = self._is_pending(name, [target]) & ~self._is_pending(name, [source])
                self._forbid(line, warps & overwritten, f"a register of a pending product is written; {must_wait}")
            for name in ("accumulator_group", "a_group", "shape", "touched"):
                state[name][target] = np.where(warps, state[name][source], state[name][target])
            return
        pending = self._is_pending("accumulator_group", uses) | self._is_pending("a_group", uses)
        self._forbid(line, warps & pending, f"a register of a pending product is used; {must_wait}")
        state["touched"][uses] |= warps

    def _forbid(self, line: LinkedStatement, wrong: np.ndarray, message: str) -> None:
        if wrong.any():
            block, warp = np.argwhere(wrong)[0]
            raise UndefinedBehaviour(f"{self.where(line, int(block), int(warp) * LANES)}: {message}")


def wgmma_protocol(kernel: Kernel, shape: tuple[int, int], where: DescribePlace) -> WgmmaProtocol | None:
    """Return the protocol state of a chunk of `shape` (blocks, threads), or None if the kernel is not checked or has no wgmma products."""
    if not kernel.checked:
        return None
    bound = {line.number: bind_operands(line.statement, line.context) for line in kernel.statements if line.statement.name == "wgmma"}
    if not any(isinstance(statement.op, Wgmma) for statement in bound.values()):
        return None
    operands: dict[int, list[list[str]]] = {}  # the registers of D and of A
    for line in kernel.statements:
        if line.number in bound:
            given = [bound[line.number].operands.get(name, Vector(())) for name in "da"]
            registers = [[each for each in vector_elements(operand) if isinstance(each, Register)] for operand in given]
            operands[line.number] = [list(map(line.names.qualified_name, each)) for each in registers]
    tracked = {name for both in operands.values() for names in both for name in names}
    copies = {line.number: names for line in kernel.statements if (names := _copied_registers(line)) is not None}
    while True:
        reached = {name for pair in copies.values() if tracked & set(pair) for name in pair} - tracked
        if not reached:
            break
        tracked |= reached
    index = {name: i for i, name in enumerate(sorted(tracked))}
    lines: dict[int, RegisterUse] = {}
    for line in kernel.statements:
        if line.number in bound:
            d, a = (tuple(index[name] for name in names) for names in operands[line.number])
            lines[line.number] = RegisterUse(bound[line.number], d, a)
            continue
        uses = tuple(index[name] for name in qualified_registers(line.statement, line.names) if name in index)
        if uses:
            pair = copies.get(line.number)
            copied = (index[pair[1]], index[pair[0]]) if pair is not None and pair[0] in index else None
            lines[line.number] = RegisterUse(uses=uses, copied=copied)
    return WgmmaProtocol(lines, len(index), where, (shape[0], shape[1] // LANES))


def _copied_registers(line: LinkedStatement) -> tuple[str, str] | None:
    """Return the destination and the source of a `mov` between two registers, or None for another statement."""
    operands = line.statement.operands
    if line.statement.name != "mov" or not all(isinstance(operand, Register) for operand in operands):
        return None
    target, source = (line.names.qualified_name(operand) for operand in operands if isinstance(operand, Register))
    return target, source
