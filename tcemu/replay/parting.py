"""Where two kernel recipes part: one output, added up in plain Python numbers by both, and the first sum that differs.

It shares no arithmetic with the engine: instructions by `tcemu.explain`, f32 sums in fractions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from tcemu.explanation.exact import decode, encode, shortest
from tcemu.explanation.explain import explain
from tcemu.explanation.explanation import Explanation
from tcemu.formats import F32, Format
from tcemu.linalg.kernel_order import NONE, additions, lane_order, step_order
from tcemu.linalg.kernel_recipes import KernelRecipe, Lanes, Steps
from tcemu.linalg.kernel_sums import operand_codes
from tcemu.linalg.matmul import matmul

Codes = tuple[list[int], list[int]]  # a row of A and a column of B


class Sum(NamedTuple):
    """One sum on the way to an output."""

    what: str
    places: tuple[int, ...]  # along K: the products that were added in it
    code: int  # of f32, or of the result's format at the end
    before: int  # the running value that it began from, f32

    def __str__(self) -> str:
        return f"{self.what}{f' of {_runs(self.places)}' if self.places else ''}"


@dataclass(frozen=True)
class Parting:
    """Where two recipes part at one output. `str()` says it.

    at: its row and column; number: of the sum, from 0, that is the first to differ, None if none does; explained: that sum, taken apart for
    each recipe that has an instruction there.
    """

    at: tuple[int, int]
    results: tuple[float, float]
    outputs: tuple[int, int]  # that differ, and all
    number: int | None
    sums: tuple[Sum | None, Sum | None]
    explained: tuple[Explanation | None, Explanation | None]

    def __str__(self) -> str:
        wrong, every = self.outputs
        said = [f"{wrong:,} of {every:,} outputs differ"]
        if self.number is None:
            return said[0] if wrong == 0 else f"{said[0]}; none of finite operands"
        (row, column), (x, y) = self.at, self.results
        said += [f"output [{row}, {column}]: {x!r} and {y!r}; the first sum that differs is number {self.number}"]
        for name, one in zip(("left", "right"), self.sums, strict=True):
            value = "has no sum left" if one is None else f"{one}: {shortest(F32, one.code)}"
            said.append(f"  {name}: {value}")
        for name, one in zip(("left", "right"), self.explained, strict=True):
            if one is not None:
                said += ["", f"{name}:", one.text()]
        return "\n".join(said)


def parting(a: Any, b: Any, left: KernelRecipe, right: KernelRecipe) -> Parting:
    """Where two recipes part on these operands: the first output that differs, and the first sum in it.

    a: [M, K]; b: [K, N], floats. Raises ValueError as `tcemu.matmul`, and for recipes that read operands in different formats.
    """
    if any(isinstance(recipe.unit, Lanes) and recipe.unit.flush for recipe in (left, right)):
        raise ValueError("a recipe counts subnormal numbers as zeros; its sums are not taken apart")
    if (left.a, left.b, left.cast) != (right.a, right.b, right.cast):
        raise ValueError("the two recipes multiply operands in different formats; there is no first sum in which they part")
    x, y = (np.asarray(matmul(a, b, recipe=recipe)) for recipe in (left, right))
    differ = (x != y) & ~(np.isnan(x) & np.isnan(y))
    places = np.argwhere(differ & np.isfinite(x) & np.isfinite(y))
    outputs = int(differ.sum()), int(differ.size)
    if not len(places):
        return Parting((0, 0), (0.0, 0.0), outputs, None, (None, None), (None, None))
    row, column = (int(i) for i in places[0])
    of_a, of_b = operand_codes(left.a, left.cast, np.asarray(a)[row]), operand_codes(left.b, left.cast, np.asarray(b)[:, column])
    codes = np.asarray(of_a).tolist(), np.asarray(of_b).tolist()
    sums = [[*found, *_of_epilogue(recipe, found[-1].code)] for recipe in (left, right) for found in [list(sums_of(recipe, *codes))]]
    pairs = enumerate(zip_longest(*sums))
    number, (one, other) = next((n, pair) for n, pair in pairs if pair[0] is None or pair[1] is None or pair[0][1:3] != pair[1][1:3])
    explained = _explained(left, one, codes), _explained(right, other, codes)
    return Parting((row, column), (float(x[row, column]), float(y[row, column])), outputs, number, (one, other), explained)


def sums_of(recipe: KernelRecipe, a: list[int], b: list[int]) -> Iterator[Sum]:
    """Every sum of one output, in the order in which they are made, for finite operands. a, b: codes in the recipe's formats."""
    totals: dict[int, int] = {}
    unit = recipe.unit
    for number, one in _of_steps(recipe, unit, a, b) if isinstance(unit, Steps) else _of_lanes(recipe, unit, a, b):
        totals[number] = one.code
        yield one
    merge = recipe.merge
    pairs = additions(merge.order, len(totals))

    def waiting(code: int) -> int:
        return code if merge.partial == F32 else _cast(merge.partial, F32, _cast(F32, merge.partial, code))

    if pairs or merge.start == "zero":
        first = pairs[0][0] if pairs else 0
        if merge.serial:
            totals[first] = waiting(totals[first])
        else:
            totals = {number: waiting(code) for number, code in totals.items()}
        if merge.start == "zero":
            totals[first] = _added(0, totals[first])
            yield Sum(f"slice {first} and +0", (), totals[first], 0)
    total = totals[pairs[-1][0] if pairs else 0]
    for to, source in pairs:
        before = totals[to]
        total = _added(before, totals[source])
        total = totals[to] = waiting(total) if merge.serial else total
        yield Sum(f"slice {to} and slice {source}", (), total, before)


def _of_epilogue(recipe: KernelRecipe, total: int) -> Iterator[Sum]:
    """What becomes of the total where there are no scales and no bias, for finite results."""
    if recipe.epilogue.scaled:
        before, factor = total, _value(F32, encode(F32, Fraction(recipe.epilogue.alpha)))
        total = encode(F32, _value(F32, total) * factor)
        yield Sum("the total times alpha", (), total, before)
    if recipe.out != F32:
        yield Sum(f"the total in {recipe.out}", (), _cast(recipe.out, F32, _cast(F32, recipe.out, total)), total)


def _of_steps(recipe: KernelRecipe, unit: Steps, a: list[int], b: list[int]) -> Iterator[tuple[int, Sum]]:
    order, totals, running = step_order(unit, recipe.slices), {}, 0
    for places, closes, number in zip(order.places.tolist(), order.closes.tolist(), order.slices.tolist(), strict=True):
        own = tuple(p for p in places if p != NONE)
        before, running = running, _instruction(unit, own, (a, b), running).result
        yield number, Sum(f"slice {number}, instruction", own, running, before)
        if closes and order.restarted:
            before = totals.get(number, 0)
            totals[number] = _added(before, running)
            yield number, Sum(f"slice {number}, its accumulators", (), totals[number], before)
        running = 0 if closes else running


def _of_lanes(recipe: KernelRecipe, unit: Lanes, a: list[int], b: list[int]) -> Iterator[tuple[int, Sum]]:
    order = lane_order(unit, recipe.slices)
    for number in range(order.places.shape[1]):
        lanes: dict[int, int] = {}
        for lane in range(unit.lanes):
            total, running = None, 0
            for place, closes in zip(order.places[:, number, lane].tolist(), order.closes[:, number, lane].tolist(), strict=True):
                if place == NONE:
                    continue
                product = _value(recipe.a, a[place]) * _value(recipe.b, b[place])
                for narrower in () if unit.fused else filter(None, (F32, unit.product)):
                    product = _value(narrower, encode(narrower, product))
                before, running = running, encode(F32, product + _value(F32, running))
                yield number, Sum(f"slice {number}, lane {lane}, fma", (place,), running, before)
                if closes:
                    total, running = running if total is None else _added(total, running), 0
            lanes[lane] = total or 0
        for to, source in additions(unit.join, unit.lanes):
            before = lanes[to]
            lanes[to] = _added(before, lanes[source])
            yield number, Sum(f"slice {number}, lane {to} and lane {source}", (), lanes[to], before)
        last = additions(unit.join, unit.lanes)[-1][0] if unit.lanes > 1 else 0
        yield number, Sum(f"slice {number}", (), lanes[last], lanes[last])


def _instruction(unit: Steps, places: tuple[int, ...], codes: Codes, running: int) -> Explanation:
    a, b = ([v[p] for p in places] for v in codes)
    found = explain(unit.op, a, b, running, target=unit.target, model=unit.model, codes=True)
    assert isinstance(found, Explanation)
    return found


def _explained(recipe: KernelRecipe, one: Sum | None, codes: Codes) -> Explanation | None:
    if one is None or not one.places or not isinstance(recipe.unit, Steps):
        return None
    return _instruction(recipe.unit, one.places, codes, one.before)


def _value(fmt: Format, code: int) -> Fraction:
    value = decode(fmt, code).value
    assert isinstance(value, Fraction), "finite operands give finite sums"
    return value


def _added(x: int, y: int) -> int:
    return encode(F32, _value(F32, x) + _value(F32, y))


def _cast(source: Format, target: Format, code: int) -> int:
    return encode(target, _value(source, code))


def _runs(places: tuple[int, ...]) -> str:
    """ "k 16 to 31" for neighbours; else the first ones."""
    if len(places) == 1:
        return f"k {places[0]}"
    together = places[-1] - places[0] == len(places) - 1
    return f"k {places[0]} to {places[-1]}" if together else f"k {', '.join(map(str, places[:4]))}, ..."
