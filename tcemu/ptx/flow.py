"""Functions cut into pieces that threads run without parting, in an order in which threads that parted meet again.

A piece is numbered after everything that leads to it, except by the way back of a loop, and the pieces of a loop stand together. So when
the piece with the least number runs first, those who are behind catch up before the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from tcemu.errors import Unsupported
from tcemu.isa.instructions import LANES
from tcemu.ptx.module import Function, Guard, Operand, Register, Statement, Symbol, Vector

WARPGROUP = 4 * LANES
MEMBERS = {"shfl": -1, "vote": -1, "match": -1, "redux": -1, "elect": -1, "bar": 0, "barrier": 0}  # where the member mask stands
BARRIERS = ("bar", "barrier")
WAITING = ("ld", "atom", "mbarrier")
POLLS = {"try_wait", "test_wait", "cas", "exch", "volatile", "acquire", "relaxed"}  # what a thread repeats until another has done something


@dataclass(frozen=True)
class Gathering:
    """Threads that must be at a statement before any of them runs it.

    width: 32, or 128 for a warpgroup; members: the mask, None for all.
    """

    statement: int
    width: int
    members: Operand | None = None
    guard: Guard | None = None


@dataclass
class Piece:
    """Statements start to stop, by their numbers in the function, and what follows.

    ends: "next", "branch", "indexed", "call", "return", "exit", "trap", "barrier". targets: pieces; after: the next one in the text.
    last: the number of the statement that ends it; it is not among start to stop. polls: a loop that waits for other threads.
    """

    start: int
    stop: int
    ends: str = "next"
    last: int = -1
    targets: tuple[int, ...] = ()
    after: int = -1
    gatherings: list[Gathering] = field(default_factory=list)
    polls: bool = False


def ending(statement: Statement) -> str | None:
    """How a statement ends a piece; None: it does not."""
    name, qualifiers = statement.name, statement.qualifiers
    if name in BARRIERS:
        return None if "warp" in qualifiers or (name == "barrier" and "cluster" in qualifiers) else "barrier"
    if name == "brx":
        return "indexed"
    return {"bra": "branch", "call": "call", "ret": "return", "exit": "exit", "trap": "trap"}.get(name)


def gathering(statement: Statement, number: int) -> Gathering:
    """What a statement that threads do together waits for."""
    if statement.name.startswith("wgmma"):
        return Gathering(number, WARPGROUP)
    members = MEMBERS.get(statement.name)
    if members is None or not statement.operands or (statement.name == "elect" and len(statement.operands) < 2):
        return Gathering(number, LANES)
    operand = statement.operands[members]
    return Gathering(number, LANES, operand, statement.guard)


def targets_of(statement: Statement, function: Function) -> tuple[str, ...]:
    """The labels to which a branch may go."""
    if statement.name == "brx":
        listed = statement.operands[1]
        if isinstance(listed, Vector):
            names = tuple(element.name for element in listed.elements if isinstance(element, Symbol | Register))
        else:
            names = function.branch_targets.get(getattr(listed, "name", ""), ())
    else:
        names = tuple(operand.name for operand in statement.operands[:1] if isinstance(operand, Symbol | Register))
    missing = [name for name in names if name not in function.labels]
    if missing or not names:
        raise Unsupported(f"{statement.opcode!r}: {', '.join(missing) or 'its list'} is no label of {function.name}")
    return names


def pieces(function: Function, together: Mapping[int, Gathering]) -> list[Piece]:
    """The pieces of a function, the entry first, in the order in which they should run. together: statements that threads do together."""
    found = _cut(function, together)
    order, polling = _ordered(found, function)
    number = {old: new for new, old in enumerate(order)}
    placed = []
    for old in order:
        piece = found[old]
        targets, after = tuple(number[target] for target in piece.targets), number.get(piece.after, -1)
        placed.append(replace(piece, targets=targets, after=after, polls=old in polling))
    return placed


def _cut(function: Function, together: Mapping[int, Gathering]) -> list[Piece]:
    """The pieces in the order of the text, targets and after by that order. The last one is empty and returns."""
    statements = function.statements
    starts = {0, len(statements), *function.labels.values()}
    for number, statement in enumerate(statements):
        if ending(statement):
            starts.add(number + 1)
        gathers = together.get(number)
        if gathers and (gathers.guard or isinstance(gathers.members, Register)):
            starts.add(number)  # whom it waits for is known when its predicate and its mask are
    bounds = sorted(starts)
    at = {start: i for i, start in enumerate(bounds)}
    found = []
    for i, (start, stop) in enumerate(pairwise(bounds)):
        piece = Piece(start, stop, after=i + 1)
        last = ending(statements[stop - 1])
        if last:
            piece.ends, piece.last, piece.stop = last, stop - 1, stop - 1
            if last in ("branch", "indexed"):
                piece.targets = tuple(at[function.labels[label]] for label in targets_of(statements[stop - 1], function))
        piece.gatherings = [together[n] for n in range(start, stop) if n in together]
        found.append(piece)
    found.append(Piece(len(statements), len(statements), "return"))
    return found


def _followers(piece: Piece, function: Function) -> list[int]:
    """The pieces that may come after one, later ones of the text first."""
    guarded = piece.last >= 0 and function.statements[piece.last].guard is not None
    goes_on = piece.ends in ("next", "call", "barrier") or guarded
    return sorted({*piece.targets, *([piece.after] if goes_on and piece.after >= 0 else [])}, reverse=True)


def _ordered(found: list[Piece], function: Function) -> tuple[list[int], set[int]]:
    """The pieces that can be reached, in their order, and those of loops that wait for other threads."""
    edges = {i: _followers(piece, function) for i, piece in enumerate(found)}
    order: list[int] = []
    polling: set[int] = set()
    work: list[tuple[list[int], int]] = [(_reached(edges, 0), 0)]
    while work:
        nodes, head = work.pop()
        if head < 0:
            order += nodes
            continue
        inside = set(nodes)
        inner = {node: [to for to in edges[node] if to in inside and to != head] for node in nodes}
        parts, nested = [], False
        for component in components(inner, [head, *nodes]):
            alone = len(component) == 1
            if alone and component[0] in inner[component[0]]:
                nested = True
                polling |= _polls(component, found, function)
            if alone:
                parts.append((component, -1))
                continue
            nested = True
            entered = [node for node in component if any(node in edges[other] for other in inside - set(component))]
            parts.append((component, min(entered or component)))
        if not nested and any(head in edges[node] for node in nodes):
            polling |= _polls(nodes, found, function)
        work += reversed(parts)
    return order, polling


def _polls(nodes: Iterable[int], found: list[Piece], function: Function) -> set[int]:
    """The pieces of an innermost loop, if it waits for what other threads do."""
    nodes = set(nodes)
    statements = [each for node in nodes for each in function.statements[found[node].start : found[node].stop]]
    waits = any(each.name == "nanosleep" or (each.name in WAITING and set(each.qualifiers) & POLLS) for each in statements)
    return nodes if waits else set()


def _reached(edges: Mapping[int, list[int]], start: int) -> list[int]:
    seen, work = {start}, [start]
    while work:
        for to in edges[work.pop()]:
            if to not in seen:
                seen.add(to)
                work.append(to)
    return sorted(seen)


def components(edges: Mapping[int, list[int]], roots: Iterable[int]) -> list[list[int]]:
    """The strongly connected components, each sorted, those that lead to others before them (Tarjan's algorithm, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    held: set[int] = set()
    found: list[list[int]] = []
    for root in roots:
        if root in index:
            continue
        work = [(root, iter(edges[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        held.add(root)
        while work:
            node, rest = work[-1]
            for to in rest:
                if to not in index:
                    index[to] = low[to] = len(index)
                    stack.append(to)
                    held.add(to)
                    work.append((to, iter(edges[to])))
                    break
                if to in held:
                    low[node] = min(low[node], index[to])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = stack.index(node)
                    found.append(sorted(stack[at:]))
                    held -= set(stack[at:])
                    del stack[at:]
    return found[::-1]
