"""The table of hypotheses: ways in which the arithmetic of an operation may differ, each with the programs that it applies to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations

import numpy as np

from tcemu.operations.products.library.kernel_recipe import Lanes
from tcemu.uses.drift.programs import Choices, Program
from tcemu.uses.drift.summation import Summation

NARROW = ("bfloat16", "float16")
FUNCTIONS = {  # special functions other than the exact ones, rounded once
    "xla": "special functions of XLA on this machine", "gpu": "approximate special functions of a GPU",
    "cuda": "exponentials of CUDA's device library",
    "expanded": "sigmoids and reciprocal roots as quotients, each step rounded to its result's format",
}  # fmt: skip
MAX_SUBSETS = 5  # nodes up to which every subset of their roundings is tried


def _narrow_nodes(program: Program, internal: bool) -> list[int]:
    """Nodes whose recorded rounding a fused operation may skip; or nodes within an operation that may be rounded to its dtype."""
    return [i for i, node in enumerate(program.nodes[:-1]) if node.internal == internal and node.dtype.name in NARROW]


def _subsets(nodes: list[int]) -> Iterator[frozenset[int]]:
    if len(nodes) <= MAX_SUBSETS:
        yield from (frozenset(chosen) for count in range(1, len(nodes) + 1) for chosen in combinations(nodes, count))
        return
    yield from (frozenset([node]) for node in nodes)
    yield frozenset(nodes)
    yield from (frozenset(nodes) - {node} for node in nodes)


def _more_roundings(program: Program) -> Iterator[Choices]:
    for fmt in NARROW if any(node.dtype == np.float32 for node in program.nodes) else ():
        for number, node in enumerate(program.nodes):
            if node.dtype == np.float32 and node.kind not in ("convert", "reshape", "broadcast", "transpose"):
                yield Choices(extra=(("node", number, fmt),))
        for number, given in enumerate(program.inputs):
            if not isinstance(given, np.ndarray) and number in program.f32_inputs:
                yield Choices(extra=(("input", number, fmt),))


def _fused_additions(program: Program) -> list[int]:
    """Additions of a product of two nodes that may be one fma."""
    multiplied = {i for i, node in enumerate(program.nodes) if node.kind == "mul"}
    return [
        number
        for number, node in enumerate(program.nodes)
        if node.kind in ("add", "sub") and any(kind == "node" and i in multiplied for kind, i in node.inputs)
    ]


def _contractions(program: Program) -> Iterator[Choices]:
    additions = _fused_additions(program)
    if additions:
        yield Choices(contracted=frozenset(additions))
    yield from (Choices(contracted=chosen) for chosen in _subsets(additions) if len(chosen) < len(additions))


TABLE: tuple[Callable[[Program], Iterable[Choices]], ...] = (  # the variants of a program, none where a hypothesis does not apply to it
    lambda program: (Choices(unrounded=chosen) for chosen in _subsets(_narrow_nodes(program, False))),
    lambda program: (Choices(rounded=chosen) for chosen in _subsets(_narrow_nodes(program, True))),
    _more_roundings,
    _contractions,
    lambda program: [Choices(functions=name) for name in FUNCTIONS if program.has_special],
    lambda program: [Choices(reciprocal=True)] if any(node.kind == "div" for node in program.nodes) else [],
    lambda program: [Choices(flushed=True)],
)


def single_variants(program: Program) -> list[Choices]:
    """Return the plain arithmetic and every variant of one row of the table."""
    return [Choices(), *(choices for variants in TABLE for choices in variants(program))]


def moment_variants(program: Program) -> Iterator[Choices]:
    """Yield what is combined with each arithmetic of moments: fma and special functions."""
    functions = [Choices(), *(Choices(functions=name) for name in FUNCTIONS if name != "cuda")]
    yield from (merge(x, y) for x in (Choices(), *_contractions(program)) for y in functions)


def paired_variants(program: Program) -> Iterator[Choices]:
    """Yield the variants of two rows at once."""
    for left, right in combinations([list(variants(program)) for variants in TABLE], 2):
        yield from (merge(x, y) for x in left for y in right)


def merge(x: Choices, y: Choices) -> Choices:
    """Return both changes of the plain arithmetic."""
    plain = Choices()._asdict()
    return x._replace(**{name: value for name, value in y._asdict().items() if value != plain[name]})


# ---- words


def features(choices: Choices) -> dict[str, str]:
    """Return the distinguishing choices of an arithmetic by the name of the hypothesis. `describe` puts them into words."""
    found = {
        "a rounding less": ",".join(map(str, sorted(choices.unrounded))),
        "a rounding more": ",".join([*map(str, sorted(choices.rounded)), *map(str, choices.extra)]),
        "fma": ",".join(map(str, sorted(choices.contracted))),
        "special functions": choices.functions,
        "reciprocal": str(choices.reciprocal),
        "subnormal numbers": str(choices.flushed),
        "scale before or after": choices.order,
        "mean and variance": "two passes" if choices.moments is None else str(choices.moments),
    }
    if choices.quantization is not None:
        found |= choices.quantization.features()
    how = choices.summation
    if how is None:
        return found
    summed = _summation_features(how)
    if how.accumulator == "float64":  # what f32 sums may choose does not apply to it
        found = {name: value for name, value in found.items() if name not in ("fma", "subnormal numbers") or value not in ("", "False")}
    return found | summed | {name: f"{found[name]} {summed[name]}" for name in summed.keys() & found.keys()}


def _summation_features(how: Summation) -> dict[str, str]:
    order = how.order
    if how.accumulator == "float64":
        return {"accumulator": "float64"}
    if how.library:
        return {"order of the sum": how.library, "accumulator": how.accumulator, "fma": "True", "subnormal numbers": "False"}
    unit, merge = order.unit, order.merge
    if isinstance(unit, Lanes):
        core, promotion, flushed, fused = "", "None", unit.flush, how.fused or how.of_terms
        schedule = "" if unit == Lanes(fused=unit.fused, flush=unit.flush) else f"{unit.lanes} {unit.vector} {unit.chunk} {unit.join} "
    else:
        core, promotion, flushed, fused = f"{unit.op} on {unit.target}", str(unit.restart), False, True
        schedule = "" if unit.residue is None else f"{unit.residue} first "
    return {
        "order of the sum": f"{schedule}{order.slices} {merge.order}",
        "tensor core": core,
        "promotion": promotion,
        "partial sums": f"{merge.partial} {merge.serial} {merge.atomic} {merge.start}",
        "accumulator": how.accumulator,
        "operands rounded": f"{order.a} {order.cast}",
        "fma": str(fused),
        "subnormal numbers": str(flushed),
        "bias": str(how.bias_first),
    }


def differing_features(left: Choices, right: Choices) -> tuple[str, ...]:
    """Return the names of the hypotheses in which two arithmetics differ. A sum that one of them has not is left out."""
    if left.summation is None or right.summation is None:
        left, right = left._replace(summation=None), right._replace(summation=None)
    x, y = features(left), features(right)
    names = [name for name in dict.fromkeys((*x, *y)) if name in x and name in y and x[name] != y[name]]
    return tuple(names)


def describe(program: Program, choices: Choices) -> str:
    """Describe an arithmetic in words. The plain one is "as recorded"."""
    words = []
    name = lambda i: f"{program.nodes[i].kind} (operation {program.nodes[i].operation})"
    if choices.unrounded:
        words.append(f"not rounded to {program.nodes[min(choices.unrounded)].dtype}: {', '.join(map(name, sorted(choices.unrounded)))}")
    if choices.rounded:
        words.append(f"also rounded to {program.nodes[min(choices.rounded)].dtype}: {', '.join(map(name, sorted(choices.rounded)))}")
    for kind, index, fmt in choices.extra:
        what = name(index) if kind == "node" else f"operand {program.operand_name(index)}"
        words.append(f"also rounded to {fmt}: {what}")
    if choices.contracted:
        some = "" if choices.contracted == frozenset(_fused_additions(program)) else f": {', '.join(map(name, sorted(choices.contracted)))}"
        words.append(f"a product and its addition are one fma{some}")
    if choices.functions != "exact":
        words.append(FUNCTIONS[choices.functions])
    if choices.reciprocal:
        words.append("division by a product with the rounded reciprocal")
    if choices.flushed:
        words.append("subnormal numbers count as zeros")
    if choices.order:
        words.append(choices.order)
    if choices.quantization is not None:
        words.append(str(choices.quantization))
    if choices.moments is not None:
        words.append(str(choices.moments))
    if choices.summation is not None:
        words.append(str(choices.summation))
    return "; ".join(words) or ("exact special functions, as recorded" if program.has_special else "as recorded")
