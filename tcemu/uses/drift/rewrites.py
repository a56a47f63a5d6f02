"""Programs that are equal but for roundings: scales in another place or order, and a mean and a variance in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tcemu.uses.drift.programs import Node, Program, Ref

MULTIPLIED = ("mul", "div")


def rewritten_programs(program: Program, inputs: Sequence[np.ndarray]) -> Iterator[tuple[str, Program]]:
    """Yield programs that are equal but for roundings, with the change in words.

    Args:
        program: The program as it was recorded.
        inputs: The arrays that it reads.
    """
    scalars = frozenset(i for i, x in enumerate(inputs) if x.size == 1)
    for number, node in enumerate(program.nodes):
        if node.kind in MULTIPLIED:
            yield from _scale_operands(program, number, scalars, inputs)
            yield from _swap_factors(program, number)
        elif node.kind in ("product", "sum"):
            yield from _scale_sums(program, number, scalars)


def one_pass_program(program: Program) -> Program | None:
    """Return a program whose mean and variance are moments of one pass; None if it has no such pair in two passes."""
    nodes = program.nodes
    reads = lambda number, kind: [i for i, node in enumerate(nodes) if node.kind == kind and ("node", number) in node.inputs]
    for mean, node in enumerate(nodes):
        if node.kind != "sum" or not node.attributes.get("divisor"):
            continue
        for centred in reads(mean, "sub"):
            for squares in reads(centred, "mul"):
                variances = [i for i in reads(squares, "sum") if nodes[i].attributes.get("divisor") == node.attributes["divisor"]]
                if nodes[centred].inputs == (node.inputs[0], ("node", mean)) and len(set(nodes[squares].inputs)) == 1 and variances:
                    facts = {name: node.attributes.get(name) for name in ("axes", "keepdims", "inner")}
                    moments = [node._replace(kind="moment", attributes={**facts, "moment": which}) for which in (0, 1)]
                    return _without_unread(_replaced(program, {mean: moments[0], variances[0]: moments[1]}, {}))
    return None


def _without_unread(program: Program) -> Program:
    """Return a program without the nodes that its result does not depend on."""
    read = {len(program.nodes) - 1}
    for number in range(len(program.nodes) - 1, -1, -1):
        if number in read:
            read |= {index for kind, index in program.nodes[number].inputs if kind == "node"}
    places = {number: i for i, number in enumerate(sorted(read))}
    renumber = lambda ref: ref if ref[0] == "input" else ("node", places[ref[1]])
    nodes = [program.nodes[number] for number in sorted(read)]
    nodes = [node._replace(inputs=tuple(renumber(ref) for ref in node.inputs)) for node in nodes]
    return Program(nodes, program.inputs, program.shape, program.f32_inputs)


def _is_scalar(ref: Ref, scalars: frozenset[int]) -> bool:
    return ref[0] == "input" and ref[1] in scalars


def _readers(program: Program, number: int) -> int:
    return sum(ref == ("node", number) for node in program.nodes for ref in node.inputs)


def _replaced(program: Program, changes: dict[int, Node], inserted: dict[int, list[Node]]) -> Program:
    """Return the program with changed nodes, and nodes inserted before some.

    References are those of the old program; -1 is the inserted node before.
    """
    places: dict[int, int] = {}
    nodes: list[Node] = []
    renumber = lambda ref: ref if ref[0] == "input" else ("node", len(nodes) - 1 if ref[1] == -1 else places[ref[1]])
    for number, old in enumerate(program.nodes):
        for node in inserted.get(number, ()):
            nodes.append(node._replace(inputs=tuple(renumber(ref) for ref in node.inputs)))
        node = changes.get(number, old)
        nodes.append(node._replace(inputs=tuple(renumber(ref) for ref in node.inputs)))
        places[number] = len(nodes) - 1
    return Program(nodes, program.inputs, program.shape, program.f32_inputs)


def _scale_operands(program: Program, number: int, scalars: frozenset[int], given: Sequence[np.ndarray]) -> Iterator[tuple[str, Program]]:
    """A scale of a product or a sum multiplies an operand of it instead."""
    node = program.nodes[number]
    pairs = [(x, s) for x, s in (node.inputs, node.inputs[::-1]) if x[0] == "node" and _is_scalar(s, scalars)]
    for x, s in pairs[: 1 if node.kind == "div" else 2]:
        total = program.nodes[x[1]]
        if total.kind not in ("product", "sum") or _readers(program, x[1]) != 1 or (node.kind == "div" and node.inputs[1] != s):
            continue
        for place, operand in enumerate(total.inputs[: 2 if total.kind == "product" else 1]):
            dtype = given[operand[1]].dtype if operand[0] == "input" else program.nodes[operand[1]].dtype
            for rounded in (False, True)[: 1 if dtype == np.float32 else 2]:
                scaled = Node(node.kind, (operand, s), dtype, {}, not rounded, total.operation)
                inputs = tuple(("node", -1) if i == place else ref for i, ref in enumerate(total.inputs))
                moved = _replaced(
                    program,
                    {x[1]: total._replace(inputs=inputs), number: Node("convert", (x,), node.dtype, {}, node.internal, node.operation)},
                    {x[1]: [scaled]},
                )
                yield f"the scale multiplies operand {place} before the sum" + (f", rounded to {dtype}" if rounded else ""), moved


def _scale_sums(program: Program, number: int, scalars: frozenset[int]) -> Iterator[tuple[str, Program]]:
    """A scale of an operand multiplies the sum instead."""
    total = program.nodes[number]
    for place, ref in enumerate(total.inputs[: 2 if total.kind == "product" else 1]):
        if ref[0] != "node" or program.nodes[ref[1]].kind not in MULTIPLIED or _readers(program, ref[1]) != 1:
            continue
        scaling = program.nodes[ref[1]]
        x, s = scaling.inputs
        if scaling.kind == "mul" and _is_scalar(x, scalars):
            x, s = s, x
        if not _is_scalar(s, scalars):
            continue
        plain = total._replace(inputs=tuple(x if i == place else other for i, other in enumerate(total.inputs)), internal=True)
        scaled = Node(scaling.kind, (("node", -1), s), total.dtype, {}, total.internal, scaling.operation)
        yield "the scale multiplies the sum", _without_unread(_replaced(program, {number: scaled}, {number: [plain]}))


def _swap_factors(program: Program, number: int) -> Iterator[tuple[str, Program]]:
    """Yield (t · r) · s and t · (s · r) for (t · s) · r."""
    node = program.nodes[number]
    if node.kind != "mul":
        return
    for inner, r in (node.inputs, node.inputs[::-1]):
        if inner[0] != "node" or program.nodes[inner[1]].kind != "mul" or _readers(program, inner[1]) != 1:
            continue
        before = program.nodes[inner[1]]
        for t, s in (before.inputs, before.inputs[::-1]):
            if r[0] == "input" or r[1] < inner[1]:
                swapped = _replaced(program, {inner[1]: before._replace(inputs=(t, r)), number: node._replace(inputs=(inner, s))}, {})
                yield "the scales multiply in the other order", swapped
                folded = _replaced(program, {inner[1]: before._replace(inputs=(s, r)), number: node._replace(inputs=(t, inner))}, {})
                yield "the scales multiply each other first", folded
