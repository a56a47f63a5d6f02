"""The first sum in which two kernel recipes differ, found by adding one output in plain Python numbers by both.

The module shares no arithmetic with the engine: instructions are computed by `tcemu.explain`, f32 sums in fractions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from tcemu.engine.arithmetic.reference.exact_values import decode, encode, shortest_text
from tcemu.engine.arithmetic.sum_tree import EMPTY, ordered_pairs
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.operations.products.library.kernel_order import lane_order, step_order
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Lanes, Steps
from tcemu.operations.products.library.kernel_sums import operand_codes
from tcemu.operations.products.matmul import matmul
from tcemu.uses.explanation.explain import explain
from tcemu.uses.explanation.explanation_results import Explanation

Codes = tuple[list[int], list[int]]  # a row of A and a column of B


class PartialSum(NamedTuple):
    """One sum on the way to an output."""

    label: str
    k_indices: tuple[int, ...]  # indices along K of the products added in this sum
    code: int  # code of f32, or of the result's format at the end
    start: int  # running value before the sum, f32

    def __str__(self) -> str:
        return f"{self.label}{f' of {_format_indices(self.k_indices)}' if self.k_indices else ''}"


@dataclass(frozen=True)
class RecipeDivergence:
    """The divergence of two recipes at one output. `str()` is a report for people.

    Attributes:
        position: Row and column of the output.
        results: The output by the left and the right recipe.
        outputs: Number of outputs that differ, and of all outputs.
        sum_index: Index of the first sum that differs, or None.
        sums: That sum by both recipes.
        explanations: That sum, explained for each recipe that computes it by an instruction.
    """

    position: tuple[int, int]
    results: tuple[float, float]
    outputs: tuple[int, int]
    sum_index: int | None
    sums: tuple[PartialSum | None, PartialSum | None]
    explanations: tuple[Explanation | None, Explanation | None]

    def __str__(self) -> str:
        wrong, total = self.outputs
        lines = [f"{wrong:,} of {total:,} outputs differ"]
        if self.sum_index is None:
            return lines[0] if wrong == 0 else f"{lines[0]}; none of them is finite in both"
        (row, column), (x, y) = self.position, self.results
        lines += [f"output [{row}, {column}]: {x!r} and {y!r}; the first sum that differs is number {self.sum_index}"]
        for name, item in zip(("left", "right"), self.sums, strict=True):
            value = "has no further sum" if item is None else f"{item}: {shortest_text(F32, item.code)}"
            lines.append(f"  {name}: {value}")
        for name, item in zip(("left", "right"), self.explanations, strict=True):
            if item is not None:
                lines += ["", f"{name}:", item.text()]
        return "\n".join(lines)


def find_divergence(a: Any, b: Any, left: KernelRecipe, right: KernelRecipe) -> RecipeDivergence:
    """Find the first output in which two recipes differ on these operands, and the first sum that differs in it.

    Args:
        a: Float array [M, K].
        b: Float array [K, N].
        left: One recipe.
        right: The other recipe.

    Returns:
        The divergence.

    Raises:
        ValueError: An argument is invalid for `tcemu.matmul`, the recipes read operands in different formats, or one flushes subnormal
            numbers.
    """
    if any(isinstance(recipe.unit, Lanes) and recipe.unit.flush for recipe in (left, right)):
        raise ValueError("a recipe flushes subnormal numbers to zero, and its sums cannot be traced")
    if (left.a, left.b, left.cast) != (right.a, right.b, right.cast):
        raise ValueError("the two recipes multiply operands in different formats, so that no first sum can differ")
    x, y = (np.asarray(matmul(a, b, recipe=recipe)) for recipe in (left, right))
    differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
    positions = np.argwhere(differ & np.isfinite(x) & np.isfinite(y))
    outputs = int(differ.sum()), int(differ.size)
    if not len(positions):
        return RecipeDivergence((0, 0), (0.0, 0.0), outputs, None, (None, None), (None, None))
    row, column = (int(i) for i in positions[0])
    of_a, of_b = operand_codes(left.a, left.cast, np.asarray(a)[row]), operand_codes(left.b, left.cast, np.asarray(b)[:, column])
    codes = np.asarray(of_a).tolist(), np.asarray(of_b).tolist()
    sums = [[*found, *_epilogue_sums(recipe, found[-1].code)] for recipe in (left, right) for found in [list(trace_sums(recipe, *codes))]]
    pairs = enumerate(zip_longest(*sums))
    number, (one, other) = next((n, pair) for n, pair in pairs if pair[0] is None or pair[1] is None or pair[0][1:3] != pair[1][1:3])
    explained = _explain_sum(left, one, codes), _explain_sum(right, other, codes)
    return RecipeDivergence((row, column), (float(x[row, column]), float(y[row, column])), outputs, number, (one, other), explained)


def trace_sums(recipe: KernelRecipe, a: list[int], b: list[int]) -> Iterator[PartialSum]:
    """Yield every sum of one output in the order of computation, for finite operands as codes in the recipe's formats."""
    totals: dict[int, int] = {}
    unit = recipe.unit
    for number, partial_sum in _step_sums(recipe, unit, a, b) if isinstance(unit, Steps) else _lane_sums(recipe, unit, a, b):
        totals[number] = partial_sum.code
        yield partial_sum
    merge = recipe.merge
    pairs = ordered_pairs(merge.order, len(totals))

    def stored(code: int) -> int:
        return code if merge.partial == F32 else _cast(merge.partial, F32, _cast(F32, merge.partial, code))

    if pairs or merge.start == "zero":
        first = pairs[0][0] if pairs else 0
        totals = {number: stored(code) if merge.rounds_slices or number == first else code for number, code in totals.items()}
        if merge.start == "zero":
            totals[first] = _add_f32(0, totals[first])
            yield PartialSum(f"slice {first} and +0", (), totals[first], 0)
    total = totals[pairs[-1][0] if pairs else 0]
    for to, source in pairs:
        before = totals[to]
        total = _add_f32(before, totals[source])
        total = totals[to] = stored(total) if merge.rounds_running else total
        yield PartialSum(f"slice {to} and slice {source}", (), total, before)


def _epilogue_sums(recipe: KernelRecipe, total: int) -> Iterator[PartialSum]:
    """Yield the sums after the total, without scales and bias, for finite results."""
    if recipe.epilogue.scaled:
        before, factor = total, _exact_value(F32, encode(F32, Fraction(recipe.epilogue.alpha)))
        total = encode(F32, _exact_value(F32, total) * factor)
        yield PartialSum("the total times alpha", (), total, before)
    if recipe.dtype != F32:
        yield PartialSum(f"the total in {recipe.dtype}", (), _cast(recipe.dtype, F32, _cast(F32, recipe.dtype, total)), total)


def _step_sums(recipe: KernelRecipe, unit: Steps, a: list[int], b: list[int]) -> Iterator[tuple[int, PartialSum]]:
    order, totals, running = step_order(unit, recipe.slices), {}, 0
    for places, closes, number in zip(order.indices.tolist(), order.closes.tolist(), order.slices.tolist(), strict=True):
        indices = tuple(p for p in places if p != EMPTY)
        before, running = running, _explain_instruction(unit, indices, (a, b), running).result
        yield number, PartialSum(f"slice {number}, instruction", indices, running, before)
        if closes and order.restarted:
            before = totals.get(number, 0)
            totals[number] = _add_f32(before, running)
            yield number, PartialSum(f"slice {number}, its accumulators", (), totals[number], before)
        running = 0 if closes else running


def _lane_sums(recipe: KernelRecipe, unit: Lanes, a: list[int], b: list[int]) -> Iterator[tuple[int, PartialSum]]:
    order = lane_order(unit, recipe.slices)
    for number in range(order.indices.shape[1]):
        lanes: dict[int, int] = {}
        for lane in range(unit.lanes):
            total, running = None, 0
            for place, closes in zip(order.indices[:, number, lane].tolist(), order.closes[:, number, lane].tolist(), strict=True):
                if place == EMPTY:
                    continue
                product = _exact_value(recipe.a, a[place]) * _exact_value(recipe.b, b[place])
                for narrower in () if unit.fused else filter(None, (F32, unit.product)):
                    product = _exact_value(narrower, encode(narrower, product))
                before, running = running, encode(F32, product + _exact_value(F32, running))
                yield number, PartialSum(f"slice {number}, lane {lane}, fma", (place,), running, before)
                if closes:
                    total, running = running if total is None else _add_f32(total, running), 0
            lanes[lane] = total or 0
        for to, source in ordered_pairs(unit.join, unit.lanes):
            before = lanes[to]
            lanes[to] = _add_f32(before, lanes[source])
            yield number, PartialSum(f"slice {number}, lane {to} and lane {source}", (), lanes[to], before)
        last = ordered_pairs(unit.join, unit.lanes)[-1][0] if unit.lanes > 1 else 0
        yield number, PartialSum(f"slice {number}", (), lanes[last], lanes[last])


def _explain_instruction(unit: Steps, indices: tuple[int, ...], codes: Codes, running: int) -> Explanation:
    a, b = ([v[p] for p in indices] for v in codes)
    found = explain(unit.op, a, b, running, target=unit.target, model=unit.model, codes=True)
    assert isinstance(found, Explanation)
    return found


def _explain_sum(recipe: KernelRecipe, partial_sum: PartialSum | None, codes: Codes) -> Explanation | None:
    if partial_sum is None or not partial_sum.k_indices or not isinstance(recipe.unit, Steps):
        return None
    return _explain_instruction(recipe.unit, partial_sum.k_indices, codes, partial_sum.start)


def _exact_value(fmt: Format, code: int) -> Fraction:
    value = decode(fmt, code).value
    assert isinstance(value, Fraction), "finite operands give finite sums"
    return value


def _add_f32(x: int, y: int) -> int:
    return encode(F32, _exact_value(F32, x) + _exact_value(F32, y))


def _cast(source: Format, target: Format, code: int) -> int:
    return encode(target, _exact_value(source, code))


def _format_indices(indices: tuple[int, ...]) -> str:
    """Format indices along K: "k 16 to 31" for neighbours, otherwise the first ones."""
    if len(indices) == 1:
        return f"k {indices[0]}"
    together = indices[-1] - indices[0] == len(indices) - 1
    return f"k {indices[0]} to {indices[-1]}" if together else f"k {', '.join(map(str, indices[:4]))}, ..."
