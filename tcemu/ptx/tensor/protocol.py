"""Checked mode: the asynchronous protocol of wgmma, watched along the order in which warps execute statements.

A product is computed when it is issued, so its hazards cannot be seen in values. They are in the names of registers, and in which warps
have passed which fence, commit and wait: so the host follows them, statement by statement, also through loops. Only statements that use a
register which some product of the function uses are looked at. The rules are those of `tcemu.Warpgroup`. Source: PTX ISA 9.7.15.7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tcemu.errors import UndefinedBehaviour
from tcemu.isa.instructions import LANES
from tcemu.ptx.chunk import Chunk
from tcemu.ptx.context import Context
from tcemu.ptx.link import Kernel, Line
from tcemu.ptx.module import Address, Negated, Operand, Pair, Register, Vector
from tcemu.ptx.tensor.statements import Bound, bind, elements

FENCE, WAIT = "PTX ISA 9.7.15.7.1", "PTX ISA 9.7.15.7.3"
Where = Callable[[Line, int, int], str]  # a line, a block and a thread, in words


@dataclass(frozen=True)
class Use:
    """What a line does with registers that products use, by their numbers.

    bound: of a wgmma; d, a: of a product; uses: of another statement; copied: of a `mov`, its source and its destination.
    """

    bound: Bound | None = None
    d: tuple[int, ...] = ()
    a: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()
    copied: tuple[int, int] | None = None


@dataclass
class Protocol:
    """The warps of a chunk of blocks. A register's numbers are [registers, blocks, warps], a warp's [blocks, warps].

    pending, held: the group, counted from 1, of the last product that uses a register as accumulator, and as A; 0: none. shape: n of that
    product's shape since the last fence. touched: threads have used the register since the last fence. groups: committed so far; done: of
    these, those that were waited for. fenced: there has been a fence.
    """

    lines: dict[int, Use]
    count: int
    where: Where
    blocks: tuple[int, int]
    state: dict[str, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        of_register = (self.count, *self.blocks)
        self.state = {name: np.zeros(of_register, np.int64) for name in ("pending", "held", "shape")}
        self.state |= {"touched": np.zeros(of_register, bool), "fenced": np.zeros(self.blocks, bool)}
        self.state |= {name: np.zeros(self.blocks, np.int64) for name in ("groups", "done")}

    def __call__(self, line: Line, chunk: Chunk, mask: np.ndarray) -> None:
        """Follows a statement that the threads of a mask have executed. Raises UndefinedBehaviour."""
        use = self.lines.get(line.number)
        if use is None:
            return
        guard = line.statement.guard
        if guard is not None:
            mask = mask & (np.asarray(chunk.register(line.names.held(Register(guard.register)), "pred")) != guard.negated)
        warps = np.asarray(mask.reshape(*self.blocks, LANES).any(-1))
        if use.bound is None:
            self._used(line, use, warps)
        elif use.bound.op.family in ("wgmma", "wgmma.sp"):
            self._issued(line, use, warps)
        else:
            self._ordered(use.bound, warps)

    def _ordered(self, bound: Bound, warps: np.ndarray) -> None:
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

    def _issued(self, line: Line, use: Use, warps: np.ndarray) -> None:
        assert use.bound is not None
        state, op, d, a = self.state, use.bound.op, list(use.d), list(use.a)
        self._forbid(line, warps & ~state["fenced"], f"it is issued before any wgmma.fence. {FENCE}")
        for registers, role in ((d, "accumulator"), (a, "A")):
            touched = state["touched"][registers].any(0)
            self._forbid(line, warps & touched, f"a register of its {role} was used by a thread since the last wgmma.fence. {FENCE}")
        last = state["shape"][d]
        other = ((last != 0) & (last != op.n)).any(0)
        self._forbid(line, warps & other, f"its accumulator was that of a product of another shape since the last wgmma.fence. {FENCE}")
        self._forbid(
            line, warps & self._under_way("pending", a), f"its A is the accumulator of a pending product; wait for its group. {WAIT}"
        )
        self._forbid(
            line, warps & self._under_way("held", d), f"its accumulator holds the A of a pending product; wait for its group. {WAIT}"
        )
        group = state["groups"] + 1
        for name, registers in (("pending", d), ("held", a)):
            state[name][registers] = np.where(warps, group, state[name][registers])
        state["shape"][d] = np.where(warps, op.n, last)

    def _under_way(self, name: str, registers: list[int]) -> np.ndarray:
        """bool[blocks, warps]: whether a product that was not waited for has one of the registers."""
        return np.asarray((self.state[name][registers] > self.state["done"]).any(0))

    def _used(self, line: Line, use: Use, warps: np.ndarray) -> None:
        """A thread's use of registers. A `mov` of a register, as compilers write between statements, hands on what is known of it."""
        state, uses = self.state, list(use.uses)
        if use.copied is not None:
            source, target = use.copied
            for name in ("pending", "held"):
                lost = self._under_way(name, [target]) & ~self._under_way(name, [source])
                self._forbid(
                    line, warps & lost, f"a register of a pending product is written; wgmma.wait_group must cover its group. {WAIT}"
                )
            for name in ("pending", "held", "shape", "touched"):
                state[name][target] = np.where(warps, state[name][source], state[name][target])
            return
        under_way = self._under_way("pending", uses) | self._under_way("held", uses)
        self._forbid(line, warps & under_way, f"a register of a pending product is used; wgmma.wait_group must cover its group. {WAIT}")
        state["touched"][uses] |= warps

    def _forbid(self, line: Line, wrong: np.ndarray, message: str) -> None:
        if wrong.any():
            block, warp = np.argwhere(wrong)[0]
            raise UndefinedBehaviour(f"{self.where(line, int(block), int(warp) * LANES)}: {message}")


def protocol(kernel: Kernel, shape: tuple[int, int], where: Where) -> Protocol | None:
    """What watches a chunk of so many blocks and threads; None if the kernel is not checked, or has no products of warpgroups."""
    if not any(line.context.checked for line in kernel.lines):
        return None
    bound = {line.number: _bound(line) for line in kernel.lines if line.statement.name == "wgmma"}
    if not any(each.op.k for each in bound.values()):
        return None
    of_products = {
        line.number: [
            tuple(_names(line, elements(bound[line.number].operands[name]))) if name in bound[line.number].operands else () for name in "da"
        ]
        for line in kernel.lines
        if line.number in bound
    }
    tracked = {name for registers in of_products.values() for each in registers for name in each}
    copies = {line.number: names for line in kernel.lines if (names := _copied(line)) is not None}
    while True:
        more = {name for pair in copies.values() if tracked & set(pair) for name in pair} - tracked
        if not more:
            break
        tracked |= more
    number = {name: at for at, name in enumerate(sorted(tracked))}
    lines: dict[int, Use] = {}
    for line in kernel.lines:
        if line.number in bound:
            d, a = (tuple(number[name] for name in names) for names in of_products[line.number])
            lines[line.number] = Use(bound[line.number], d, a)
            continue
        uses = tuple(dict.fromkeys(number[name] for name in _names(line, line.statement.operands) if name in number))
        if uses:
            pair = copies.get(line.number)
            copied = (number[pair[1]], number[pair[0]]) if pair is not None and pair[0] in number else None
            lines[line.number] = Use(uses=uses, copied=copied)
    return Protocol(lines, len(number), where, (shape[0], shape[1] // LANES))


def _bound(line: Line) -> Bound:
    context: Context = line.context
    return bind(line.statement, context)


def _copied(line: Line) -> tuple[str, str] | None:
    """The destination and the source of a `mov` between two registers."""
    operands = line.statement.operands
    if line.statement.name != "mov" or not all(isinstance(operand, Register) for operand in operands):
        return None
    target, source = _names(line, operands)
    return target, source


def _names(line: Line, operands: Iterable[Operand]) -> list[str]:
    """The registers of operands, as a chunk holds them."""
    return [line.names.held(register) for operand in operands for register in _registers(operand)]


def _registers(operand: Operand | None) -> Iterator[Register]:
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Vector):
        for element in operand.elements:
            yield from _registers(element)
    elif isinstance(operand, Pair):
        yield from _registers(operand.first)
        yield from _registers(operand.second)
    elif isinstance(operand, Negated):
        yield operand.register
    elif isinstance(operand, Address):
        yield from _registers(operand.base if isinstance(operand.base, Register) else None)
        yield from _registers(operand.coordinates)
