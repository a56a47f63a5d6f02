"""The basic blocks of a function, in an order in which diverged threads meet again.

A basic block is numbered after everything that leads to it, except the back edge of a loop, and the basic blocks of a loop are numbered
consecutively. The scheduler runs the basic block with the least number first, so threads that are behind catch up before the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.families import LANES
from tcemu.kernels.ptx.text.module import Function, Guard, Operand, Register, Statement, Symbol, Vector

WARPGROUP = 4 * LANES
MASK_OPERAND = {"shfl": -1, "vote": -1, "match": -1, "redux": -1, "elect": -1, "bar": 0, "barrier": 0}  # position of the member mask
BARRIER_OPCODES = ("bar", "barrier")
BARRIER_COUNT = 16  # barriers of a block
CLUSTER_BARRIER = BARRIER_COUNT  # the number of the cluster's barrier
WAIT_INSTRUCTIONS = ("ld", "atom", "mbarrier")
POLL_QUALIFIERS = {"try_wait", "test_wait", "cas", "exch", "volatile", "acquire", "relaxed"}  # of an access that awaits another thread's


@dataclass(frozen=True)
class ConvergencePoint:
    """A statement that no thread executes before all of its participants have arrived."""

    statement: int  # number in the function
    width: int  # threads: 32, or 128 for a warpgroup
    members: Operand | None = None  # the mask of the participants; None: all
    guard: Guard | None = None
    columns: Operand | None = None  # of tcgen05.alloc: the columns that must be free in tensor memory


@dataclass
class BasicBlock:
    """Consecutive statements that are executed together, and the control flow after them. Statements are numbered in the function."""

    start: int  # first statement
    stop: int  # behind the last statement, without the one that ends the basic block
    ending: str = "next"  # or "branch", "indexed", "call", "return", "exit", "trap", "barrier"
    last_statement: int = -1  # the statement that ends the basic block
    targets: tuple[int, ...] = ()  # basic blocks that a branch may reach
    fallthrough: int = -1  # the next basic block in the text
    convergence_points: list[ConvergencePoint] = field(default_factory=list)
    polls: bool = False  # part of a loop that waits for other threads


def ending_kind(statement: Statement) -> str | None:
    """Return how a statement ends a basic block; None if it does not."""
    name, qualifiers = statement.name, statement.qualifiers
    if name in BARRIER_OPCODES:
        return None if "warp" in qualifiers else "barrier"
    if name == "brx":
        return "indexed"
    return {"bra": "branch", "call": "call", "ret": "return", "exit": "exit", "trap": "trap"}.get(name)


def convergence_point(statement: Statement, number: int) -> ConvergencePoint:
    """Return the participants that a collective statement waits for."""
    if statement.name.startswith("wgmma"):
        return ConvergencePoint(number, WARPGROUP)
    if statement.opcode.startswith("tcgen05.alloc"):
        return ConvergencePoint(number, LANES, guard=statement.guard, columns=statement.operands[-1])
    members = MASK_OPERAND.get(statement.name)
    if members is None or not statement.operands or (statement.name == "elect" and len(statement.operands) < 2):
        return ConvergencePoint(number, LANES)
    operand = statement.operands[members]
    return ConvergencePoint(number, LANES, operand, statement.guard)


def branch_targets(statement: Statement, function: Function) -> tuple[str, ...]:
    """Return the labels that a branch may reach. Raises Unsupported if there are none, or if one is not declared."""
    if statement.name == "brx":
        label_list = statement.operands[1]
        if isinstance(label_list, Vector):
            names = tuple(element.name for element in label_list.elements if isinstance(element, Symbol | Register))
        else:
            names = function.branch_targets.get(getattr(label_list, "name", ""), ())
    else:
        names = tuple(operand.name for operand in statement.operands[:1] if isinstance(operand, Symbol | Register))
    missing = [name for name in names if name not in function.labels]
    if missing or not names:
        raise Unsupported(f"{statement.opcode!r}: {', '.join(missing) or 'its list'} is no label of {function.name}")
    return names


def find_basic_blocks(function: Function, collectives: Mapping[int, ConvergencePoint]) -> list[BasicBlock]:
    """Return the basic blocks of a function, the entry first, in the order in which they should run.

    Args:
        function: The function.
        collectives: The collective statements, by number.
    """
    blocks = _split_statements(function, collectives)
    order, polling = _order_blocks(blocks, function)
    number = {old: new for new, old in enumerate(order)}
    ordered = []
    for old in order:
        block = blocks[old]
        targets, fallthrough = tuple(number[target] for target in block.targets), number.get(block.fallthrough, -1)
        ordered.append(replace(block, targets=targets, fallthrough=fallthrough, polls=old in polling))
    return ordered


def _split_statements(function: Function, collectives: Mapping[int, ConvergencePoint]) -> list[BasicBlock]:
    """Return the basic blocks in the order of the text, and numbered by it. The last one is empty and returns."""
    statements = function.statements
    starts = {0, len(statements), *function.labels.values()}
    for number, statement in enumerate(statements):
        if ending_kind(statement):
            starts.add(number + 1)
        point = collectives.get(number)
        if point and (point.guard or isinstance(point.members, Register) or point.columns):
            starts.add(number)  # its participants are known once its guard, its mask and its columns are
    bounds = sorted(starts)
    block_index = {start: i for i, start in enumerate(bounds)}
    blocks = []
    for i, (start, stop) in enumerate(pairwise(bounds)):
        block = BasicBlock(start, stop, fallthrough=i + 1)
        last = ending_kind(statements[stop - 1])
        if last:
            block.ending, block.last_statement, block.stop = last, stop - 1, stop - 1
            if last in ("branch", "indexed"):
                block.targets = tuple(block_index[function.labels[label]] for label in branch_targets(statements[stop - 1], function))
        points = [collectives[n] for n in range(start, stop) if n in collectives]
        block.convergence_points = list({(each.width, each.members, each.guard, each.columns): each for each in points}.values())
        blocks.append(block)
    blocks.append(BasicBlock(len(statements), len(statements), "return"))
    return blocks


def _successors(block: BasicBlock, function: Function) -> list[int]:
    """Return the basic blocks that may follow one, later ones of the text first."""
    guarded = block.last_statement >= 0 and function.statements[block.last_statement].guard is not None
    falls_through = block.ending in ("next", "call", "barrier") or guarded
    return sorted({*block.targets, *([block.fallthrough] if falls_through and block.fallthrough >= 0 else [])}, reverse=True)


def _order_blocks(blocks: list[BasicBlock], function: Function) -> tuple[list[int], set[int]]:
    """Return the reachable basic blocks in their order, and those of loops that wait for other threads."""
    edges = {i: _successors(block, function) for i, block in enumerate(blocks)}
    order: list[int] = []
    polling: set[int] = set()
    work: list[tuple[list[int], int]] = [(_reachable(edges, 0), 0)]
    while work:
        nodes, head = work.pop()
        if head < 0:
            order += nodes
            continue
        inside = set(nodes)
        inner = {node: [other for other in edges[node] if other in inside and other != head] for node in nodes}
        parts, nested = [], False
        for component in strong_components(inner, [head, *nodes]):
            alone = len(component) == 1
            if alone and component[0] in inner[component[0]]:
                nested = True
                polling |= _polling_blocks(component, blocks, function)
            if alone:
                parts.append((component, -1))
                continue
            nested = True
            entered = [node for node in component if any(node in edges[other] for other in inside - set(component))]
            parts.append((component, min(entered or component)))
        if not nested and any(head in edges[node] for node in nodes):
            polling |= _polling_blocks(nodes, blocks, function)
        work += reversed(parts)
    return order, polling


def _polling_blocks(nodes: Iterable[int], blocks: list[BasicBlock], function: Function) -> set[int]:
    """Return the basic blocks of an innermost loop if it waits for other threads; else nothing."""
    nodes = set(nodes)
    statements = [each for node in nodes for each in function.statements[blocks[node].start : blocks[node].stop]]
    waits = any(
        each.name == "nanosleep" or (each.name in WAIT_INSTRUCTIONS and set(each.qualifiers) & POLL_QUALIFIERS) for each in statements
    )
    return nodes if waits else set()


def _reachable(edges: Mapping[int, list[int]], start: int) -> list[int]:
    seen, work = {start}, [start]
    while work:
        for node in edges[work.pop()]:
            if node not in seen:
                seen.add(node)
                work.append(node)
    return sorted(seen)


def strong_components(edges: Mapping[int, list[int]], roots: Iterable[int]) -> list[list[int]]:
    """Return the strongly connected components in topological order, each sorted (Tarjan's algorithm, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    components: list[list[int]] = []
    for root in roots:
        if root in index:
            continue
        work = [(root, iter(edges[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, rest = work[-1]
            for successor in rest:
                if successor not in index:
                    index[successor] = low[successor] = len(index)
                    stack.append(successor)
                    on_stack.add(successor)
                    work.append((successor, iter(edges[successor])))
                    break
                if successor in on_stack:
                    low[node] = min(low[node], index[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    bottom = stack.index(node)
                    components.append(sorted(stack[bottom:]))
                    on_stack -= set(stack[bottom:])
                    del stack[bottom:]
    return components[::-1]
