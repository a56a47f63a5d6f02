"""In which order a kernel recipe adds, as probes see it: which terms are lost beside a pair of large ones, and which orders are one.

A term is lost if it is added before the two large ones, +L and -L, have met: the swamping of FPRev (arXiv 2411.00442).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tcemu.formats import BF16, F32, TF32
from tcemu.linalg.kernel_order import NONE, additions, lane_order, lanes_and_turns, places_of_slices, step_order
from tcemu.linalg.kernel_recipes import KernelRecipe, Lanes, Merge, Slices, Steps

PRODUCT = 22  # bits of the longest product of a tensor core's formats, f16's and tf32's
INEXACT = (F32, TF32, BF16)  # formats whose products an f32 may have to round, or has below its range


class Level(NamedTuple):
    """One level of the tree: which member each place along K is of; members of a chain are added in ascending order."""

    members: np.ndarray  # int [K]; -1 for products that are left out
    order: str | None  # of their sums, or None: a chain of running values
    size: int


@lru_cache(maxsize=1 << 16)
def lost_members(order: str, count: int, x: int, y: int) -> np.ndarray:
    """Which of `count` sums are lost when large ones are in the sums x and y, as bool [count]."""
    if order == "ascending":
        return np.arange(count) <= max(x, y)
    sums = [{i} for i in range(count)]
    for to, source in additions(order, count):
        sums[to] = sums[to] | sums[source]
        if x in sums[to] and y in sums[to]:
            return np.array([i in sums[to] for i in range(count)])
    raise AssertionError(f"{order} of {count} never adds {x} and {y}")


def levels_of_slices(slices: Slices, order: str) -> Level:
    """The outermost level."""
    members = np.full(slices.k, -1)
    parts = places_of_slices(slices)
    for number, places in enumerate(parts):
        members[places] = number
    return Level(members, order, len(parts))


def levels_of_unit(unit: Steps | Lanes, slices: Slices) -> list[Level]:
    """The levels inside slices, the innermost last."""
    if isinstance(unit, Steps):
        order = step_order(unit, slices)
        terms = unit.arithmetic.terms
        assert isinstance(terms, int)
        per = -(-unit.op.k // terms)
        block = np.concatenate([[0], np.cumsum(order.closes)[:-1]])
        row, slot = np.nonzero(order.places != NONE)
        at = order.places[row, slot]
        blocks, steps = np.full(slices.k, -1), np.full(slices.k, -1)
        blocks[at], steps[at] = block[row], row * per + slot // terms
        inner = [Level(steps, None, 0)]
        return [Level(blocks, None, 0), *inner] if order.restarted else inner
    lanes, turns = _dealt(unit.lanes, unit.vector, slices)
    found = [Level(lanes, unit.join, unit.lanes)] if unit.lanes > 1 else []
    if unit.chunk is not None:
        found.append(Level(np.where(turns < 0, -1, turns // unit.chunk), None, 0))
    return [*found, Level(turns, None, 0)]


@lru_cache(maxsize=16)
def _dealt(lanes: int, vector: int, slices: Slices) -> tuple[np.ndarray, np.ndarray]:
    """The lane and the turn of each place along K; -1 for products that are left out."""
    lane, turn = np.full(slices.k, -1), np.full(slices.k, -1)
    for part in places_of_slices(slices):
        lane[part], turn[part] = lanes_and_turns(Lanes(lanes, vector), len(part))
    return lane, turn


def levels(recipe: KernelRecipe) -> list[Level]:
    """All levels, the outermost first."""
    return [levels_of_slices(recipe.slices, recipe.merge.order), *levels_of_unit(recipe.unit, recipe.slices)]


def lost(tree: list[Level], i: int, j: int) -> np.ndarray:
    """Which terms are lost beside large ones at places i and j, as bool [K]."""
    same = tree[0].members >= 0
    for level in tree[:-1]:
        x, y = int(level.members[i]), int(level.members[j])
        if x != y:
            if level.order is None:
                return same & (level.members <= max(x, y))
            return same & lost_members(level.order, level.size, x, y)[level.members]
        same = same & (level.members == x)
    last = tree[-1].members
    return same & (last <= max(last[i], last[j]))


# ---- which orders are one


def class_of(recipe: KernelRecipe) -> Any:
    """A value that is equal for recipes that give the same bits for all operands, whatever they are called.

    It errs on one side only: recipes with equal values are one; some with unequal ones may be one too.
    """
    recipe = _as_one_slice(recipe)
    exact = recipe.a not in INEXACT
    unit, merge = recipe.unit, recipe.merge
    signed = isinstance(unit, Lanes) and unit.start == "first"  # whose sums of negative zeros are negative
    places = places_of_slices(recipe.slices)
    waits = merge.partial != F32 and not merge.serial and (exact or merge.start == "zero")
    one = isinstance(unit, Lanes) and signed and recipe.slices.used == 1 and unit.product in (None, recipe.out) and merge.start == "first"

    def node(*what: Any) -> int:
        return hash(what)

    def added(x: int | None, y: int) -> int:
        return y if x is None else node("add", frozenset((x, y)) if x != y else x)

    if one or (waits and not signed and all(len(part) == 1 for part in places)):  # products rounded alone, whatever multiplies them
        sums = [node("product", int(part[0])) for part in places]
    else:
        sums = _steps(recipe, unit, exact, node, added) if isinstance(unit, Steps) else _lanes(recipe, unit, exact, node, added)
    zero_matters = signed or (not exact and isinstance(unit, Lanes) and unit.product is None) or (merge.partial != F32 and not merge.serial)
    total = _merged(recipe, sums, node, added, zero_matters)
    if isinstance(unit, Lanes) and unit.product is not None and unit.start == "zero":  # at the start of each slice: it is the same once
        total = node("from zero", total)
    flush = isinstance(unit, Lanes) and unit.flush
    return (recipe.a, recipe.b, recipe.out, recipe.cast, recipe.epilogue, flush, signed, total)


def _as_one_slice(recipe: KernelRecipe) -> KernelRecipe:
    """Slices of one element that are added to +0 in turn, each a product rounded alone: the chain of products and sums that they are."""
    slices, merge = recipe.slices, recipe.merge
    alone = slices.used == recipe.k > 1 and all(len(part) == 1 for part in places_of_slices(slices))
    plain = isinstance(recipe.unit, Lanes) and recipe.unit in (Lanes(), Lanes(fused=False))
    if not (alone and plain and merge == Merge(start="zero")):
        return recipe
    return recipe.replace(slices=Slices.whole(recipe.k), unit=Lanes(fused=False), merge=Merge())


def _steps(recipe: KernelRecipe, unit: Steps, exact: bool, node: Any, added: Any) -> list[int]:
    order, model = step_order(unit, recipe.slices), unit.arithmetic
    assert isinstance(model.terms, int)
    sums: dict[int, int | None] = {}
    running: int | None = None
    same = {"terms": 1} | ({"floor": 0} if exact else {})  # the terms of a step are in the nodes; exact products are above every floor
    arithmetic = node(model.replace(**same))
    whole = exact or (model.rounding == "RZ" and (model.fraction_bits or 0) >= PRODUCT)  # a product alone is cut as f32 is
    for places, closes, number in zip(order.places.tolist(), order.closes.tolist(), order.slices.tolist(), strict=True):
        for at in range(0, len(places), model.terms):
            step = tuple(sorted(p for p in places[at : at + model.terms] if p != NONE))
            if not step:
                continue
            alone = running is None and len(step) == 1 and whole
            running = node("product" if exact else "product, cut", step[0]) if alone else node("step", arithmetic, running, step)
        if closes:
            assert running is not None
            sums[number] = added(sums.get(number), running) if order.restarted else running
            running = None
    return [s for s in sums.values() if s is not None]


def _lanes(recipe: KernelRecipe, unit: Lanes, exact: bool, node: Any, added: Any) -> list[int]:
    order, sums = lane_order(unit, recipe.slices), []
    for number in range(order.places.shape[1]):
        lanes: list[int | None] = []
        for lane in range(order.places.shape[2]):
            total, running = None, None
            for place, closes in zip(order.places[:, number, lane].tolist(), order.closes[:, number, lane].tolist(), strict=True):
                if place == NONE:
                    continue
                apart = exact or not unit.fused  # the product is a number of its own
                one = node("product", place) if unit.product is None else node("rounded", unit.product, node("product", place))
                running = added(running, one) if apart else node("fma", running, place)
                if closes:
                    total, running = added(total, running), None
            lanes.append(total)
        for to, source in additions(unit.join, len(lanes)):
            x, y = lanes[to], lanes[source]
            some = y if x is None else x
            if x is None or y is None:  # a lane without products has +0, which makes a -0 of the other one +0
                lanes[to] = some if exact or some is None else node("plus zero", some)
            else:
                lanes[to] = added(x, y)
        last = additions(unit.join, len(lanes))[-1][0] if len(lanes) > 1 else 0
        total = lanes[last]
        assert total is not None
        sums.append(total)
    return sums


def _merged(recipe: KernelRecipe, sums: list[int], node: Any, added: Any, zero_matters: bool) -> int:
    merge = recipe.merge
    if len(sums) == 1 and merge.start != "zero":
        return sums[0]

    def waiting(x: int) -> int:
        return x if merge.partial == F32 else node("rounded", merge.partial, x)

    pairs = additions(merge.order, len(sums))
    first = pairs[0][0] if pairs else 0
    if merge.serial:
        sums[first] = waiting(sums[first])
    else:
        sums = [waiting(x) for x in sums]
    started = merge.start == "zero" and zero_matters
    if started and merge.serial:
        sums[first] = node("from zero", sums[first])
    for to, source in pairs:
        total = added(sums[to], sums[source])
        sums[to] = waiting(total) if merge.serial else total
    total = sums[pairs[-1][0] if pairs else 0]
    return node("from zero", total) if started and not merge.serial else total  # +0 at the start changes what is -0 to the end
