"""The order in which a kernel recipe adds, as probes see it: terms lost beside a pair of large terms, and equivalent recipes.

A term is lost if it is added before the two large terms, +L and -L, have met. This is the swamping of FPRev (arXiv 2411.00442).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tcemu.engine.arithmetic.order import Order
from tcemu.engine.formats.number_formats import BF16, F32, TF32
from tcemu.operations.products.library.kernel_order import EMPTY, additions, lane_order, lane_schedule, slice_indices, step_order
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Lanes, Merge, Slices, Steps

PRODUCT_BITS = 22  # bits of the longest product of tensor-core formats, f16 and tf32
INEXACT_FORMATS = (F32, TF32, BF16)  # formats whose products f32 may have to round, or cannot represent


class Level(NamedTuple):
    """One level of a summation tree: the member to which each index along K belongs. A chain adds its members in ascending order."""

    members: np.ndarray  # int [K]; -1 for omitted products
    order: str | None  # merge order of the members' sums, or None for a chain of running values
    size: int


@lru_cache(maxsize=1 << 16)
def lost_sums(order: str, count: int, x: int, y: int) -> np.ndarray:
    """Return which of `count` sums are lost if the large terms are in the sums x and y, as bool [count]."""
    if order == "ascending":
        return np.arange(count) <= max(x, y)
    sums = [{i} for i in range(count)]
    for to, source in additions(order, count):
        sums[to] = sums[to] | sums[source]
        if x in sums[to] and y in sums[to]:
            return np.array([i in sums[to] for i in range(count)])
    raise AssertionError(f"{order} of {count} never adds {x} and {y}")


def slice_level(slices: Slices, order: str) -> Level:
    """Return the outermost level, the slices of K."""
    members = np.full(slices.k, -1)
    parts = slice_indices(slices)
    for number, places in enumerate(parts):
        members[places] = number
    return Level(members, order, len(parts))


def unit_levels(unit: Steps | Lanes, slices: Slices) -> list[Level]:
    """Return the levels inside a slice, the innermost last."""
    if isinstance(unit, Steps):
        order, model, k = step_order(unit, slices), unit.arithmetic, unit.op.k
        within = Order.from_model(model, k)
        per, chain = within.steps_per_instruction(k), within.steps_per_chain(k)
        step_of = np.zeros(k, int)  # step of each product of an instruction
        for number, step in enumerate(within.steps(k)):
            step_of[step] = number
        block = np.concatenate([[0], np.cumsum(order.closes)[:-1]])
        row, slot = np.nonzero(order.indices != EMPTY)
        indices = order.indices[row, slot]
        blocks, steps = np.full(slices.k, -1), np.full(slices.k, -1)
        blocks[indices], steps[indices] = block[row], row * per + step_of[slot]
        inner = [Level(steps, None, 0)]
        if chain is not None:
            chains = np.where(steps < 0, -1, steps // chain)
            if within.together:
                count = -(-per // chain)
                rows = np.where(steps < 0, -1, steps // per)
                inner = [Level(rows, None, 0), Level(np.where(steps < 0, -1, chains % count), "ascending", count), *inner]
            else:
                inner = [Level(chains, None, 0), *inner]
        return [Level(blocks, None, 0), *inner] if order.restarted else inner
    lanes, iterations = _lane_indices(unit.lanes, unit.vector, slices)
    levels = [Level(lanes, unit.join, unit.lanes)] if unit.lanes > 1 else []
    if unit.chunk is not None:
        levels.append(Level(np.where(iterations < 0, -1, iterations // unit.chunk), None, 0))
    return [*levels, Level(iterations, None, 0)]


@lru_cache(maxsize=16)
def _lane_indices(lanes: int, vector: int, slices: Slices) -> tuple[np.ndarray, np.ndarray]:
    """Return the lane and the iteration of each index along K, or -1 for omitted products."""
    lane, iteration = np.full(slices.k, -1), np.full(slices.k, -1)
    for part in slice_indices(slices):
        lane[part], iteration[part] = lane_schedule(Lanes(lanes, vector), len(part))
    return lane, iteration


def recipe_levels(recipe: KernelRecipe) -> list[Level]:
    """Return all levels of a recipe, the outermost first."""
    return [slice_level(recipe.slices, recipe.merge.order), *unit_levels(recipe.unit, recipe.slices)]


def lost_terms(tree: list[Level], i: int, j: int) -> np.ndarray:
    """Return which terms are lost beside large terms at indices i and j, as bool [K]."""
    same = tree[0].members >= 0
    for level in tree[:-1]:
        x, y = int(level.members[i]), int(level.members[j])
        if x != y:
            if level.order is None:
                return same & (level.members <= max(x, y))
            return same & lost_sums(level.order, level.size, x, y)[level.members]
        same = same & (level.members == x)
    last = tree[-1].members
    return same & (last <= max(last[i], last[j]))


# ---- equivalent recipes


def equivalence_key(recipe: KernelRecipe) -> Any:
    """Return a value that is equal for recipes that give the same bits for all operands.

    The key errs on one side only: recipes with equal keys are equivalent, but some with different keys may be equivalent too.
    """
    recipe = _normalize_single_products(recipe)
    exact = recipe.a not in INEXACT_FORMATS
    unit, merge = recipe.unit, recipe.merge
    signed = isinstance(unit, Lanes) and unit.start == "first"  # sums of negative zeros are negative
    places = slice_indices(recipe.slices)
    stored_narrow = merge.partial != F32 and not merge.serial and (exact or merge.start == "zero")
    single_chain = (
        isinstance(unit, Lanes) and signed and recipe.slices.used == 1 and unit.product in (None, recipe.dtype) and merge.start == "first"
    )

    def node(*what: Any) -> int:
        return hash(what)

    def added(x: int | None, y: int) -> int:
        return y if x is None else node("add", frozenset((x, y)) if x != y else x)

    if single_chain or (
        stored_narrow and not signed and all(len(part) == 1 for part in places)
    ):  # products rounded alone, whatever multiplies them
        sums = [node("product", int(part[0])) for part in places]
    else:
        sums = _step_sums(recipe, unit, exact, node, added) if isinstance(unit, Steps) else _lane_sums(recipe, unit, exact, node, added)
    zero_matters = signed or (not exact and isinstance(unit, Lanes) and unit.product is None) or (merge.partial != F32 and not merge.serial)
    total = _merge_sums(recipe, sums, node, added, zero_matters)
    if isinstance(unit, Lanes) and unit.product is not None and unit.start == "zero":  # once is the same as in each slice
        total = node("from zero", total)
    flush = isinstance(unit, Lanes) and unit.flush
    return (recipe.a, recipe.b, recipe.dtype, recipe.cast, recipe.epilogue, flush, signed, total)


def _normalize_single_products(recipe: KernelRecipe) -> KernelRecipe:
    """Rewrite one-element slices that are added to +0 in turn, each a product rounded alone, as one chain of products and sums."""
    slices, merge = recipe.slices, recipe.merge
    alone = slices.used == recipe.k > 1 and all(len(part) == 1 for part in slice_indices(slices))
    plain = isinstance(recipe.unit, Lanes) and recipe.unit in (Lanes(), Lanes(fused=False))
    if not (alone and plain and merge == Merge(start="zero")):
        return recipe
    return recipe.replace(slices=Slices.single(recipe.k), unit=Lanes(fused=False), merge=Merge())


def _step_sums(recipe: KernelRecipe, unit: Steps, exact: bool, node: Any, added: Any) -> list[int]:
    order, model = step_order(unit, recipe.slices), unit.arithmetic
    assert isinstance(model.terms, int)
    sums: dict[int, int | None] = {}
    running: int | None = None
    same = {"terms": 1} | ({"floor": 0} if exact else {})  # the nodes have a step's terms; exact products lie above every floor
    other = model.step_kind is not None or model.flush is not None or model.groups > 1 or model.chain is not None
    arithmetic = node(model, unit.op.k) if other else node(model.replace(**same))
    unchanged = not other and (
        exact or (model.rounding == "RZ" and (model.fraction_bits or 0) >= PRODUCT_BITS)
    )  # a single product is truncated as in f32
    for places, closes, number in zip(order.indices.tolist(), order.closes.tolist(), order.slices.tolist(), strict=True):
        for start in range(0, len(places), model.terms):
            step = tuple(sorted(p for p in places[start : start + model.terms] if p != EMPTY))
            if not step:
                continue
            alone = running is None and len(step) == 1 and unchanged
            running = node("product" if exact else "product, cut", step[0]) if alone else node("step", arithmetic, running, step)
        if closes:
            assert running is not None
            sums[number] = added(sums.get(number), running) if order.restarted else running
            running = None
    return [s for s in sums.values() if s is not None]


def _lane_sums(recipe: KernelRecipe, unit: Lanes, exact: bool, node: Any, added: Any) -> list[int]:
    order, sums = lane_order(unit, recipe.slices), []
    for number in range(order.indices.shape[1]):
        lanes: list[int | None] = []
        for lane in range(order.indices.shape[2]):
            total, running = None, None
            for place, closes in zip(order.indices[:, number, lane].tolist(), order.closes[:, number, lane].tolist(), strict=True):
                if place == EMPTY:
                    continue
                rounded_product = exact or not unit.fused  # the product is rounded or exact before the sum
                product = node("product", place) if unit.product is None else node("rounded", unit.product, node("product", place))
                running = added(running, product) if rounded_product else node("fma", running, place)
                if closes:
                    total, running = added(total, running), None
            lanes.append(total)
        for to, source in additions(unit.join, len(lanes)):
            x, y = lanes[to], lanes[source]
            sum_or_none = y if x is None else x
            if x is None or y is None:  # a lane without products has +0, which turns a -0 of the other lane into +0
                lanes[to] = sum_or_none if exact or sum_or_none is None else node("plus zero", sum_or_none)
            else:
                lanes[to] = added(x, y)
        last = additions(unit.join, len(lanes))[-1][0] if len(lanes) > 1 else 0
        total = lanes[last]
        assert total is not None
        sums.append(total)
    return sums


def _merge_sums(recipe: KernelRecipe, sums: list[int], node: Any, added: Any, zero_matters: bool) -> int:
    merge = recipe.merge
    if len(sums) == 1 and merge.start != "zero":
        return sums[0]

    def waiting(x: int) -> int:
        return x if merge.partial == F32 else node("rounded", merge.partial, x)

    pairs = additions(merge.order, len(sums))
    first = pairs[0][0] if pairs else 0
    sums = [waiting(x) if merge.rounds_slices or number == first else x for number, x in enumerate(sums)]
    started = merge.start == "zero" and zero_matters
    if started and merge.rounds_running:
        sums[first] = node("from zero", sums[first])
    for to, source in pairs:
        total = added(sums[to], sums[source])
        sums[to] = waiting(total) if merge.rounds_running else total
    total = sums[pairs[-1][0] if pairs else 0]
    return node("from zero", total) if started and not merge.rounds_running else total  # +0 at the start changes only totals that stay -0
