"""The order in which a kernel recipe adds, as probes see it: terms lost beside a pair of large terms, and equivalent recipes.

A term is lost if it is added before the two large terms, +L and -L, have met. This is the swamping of FPRev (arXiv 2411.00442).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.sum_tree import EMPTY, Algebra, Chain, Turn, evaluate, ordered_pairs
from tcemu.engine.formats.number_formats import BF16, F32, TF32, Format
from tcemu.operations.products.library.kernel_order import lane_schedule, recipe_tree, slice_indices, step_order
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
    for to, source in ordered_pairs(order, count):
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
    if single_chain or (
        stored_narrow and not signed and all(len(part) == 1 for part in places)
    ):  # products rounded alone, whatever multiplies them
        tree = replace(recipe_tree(recipe), child=Chain(np.array([[part[0] for part in places]])))
        algebra = Symbols(exact=True)
    else:
        tree = recipe_tree(recipe)
        algebra = StepSymbols(unit, exact) if isinstance(unit, Steps) else LaneSymbols(unit, exact)
    inexact_lanes = not exact and isinstance(unit, Lanes) and unit.product is None
    algebra.zero_matters = signed or inexact_lanes or (merge.partial != F32 and not merge.serial)
    total = algebra.finish(evaluate(tree, algebra))
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


# ---- sums as symbols


class FromZero(NamedTuple):
    """A sum that began at +0. This changes only a sum that would stay -0, so that the +0 may as well be added last."""

    sum: int


Symbol = Any  # a hash of the operations that lead to a sum; FromZero; or one of the following
NOTHING, START, ZERO = None, -2, -1  # -0; the +0 from which an accumulator starts; the +0 from which a join starts


def node(*what: Any) -> int:
    """Return the hash of an operation and its operands."""
    return hash(what)


class Symbols(Algebra):
    """The algebra in which a sum is the way to it: equal symbols are equal bits for all operands. Grids are arrays of symbols.

    Attributes:
        exact: Products are exact in f32.
        start_matters: A sum with an accumulator that took nothing may differ from one without.
        zero_matters: A join that starts at +0 may differ from one that starts at its first sum.
    """

    def __init__(self, exact: bool, start_matters: bool = False) -> None:
        self.exact, self.start_matters, self.zero_matters = exact, start_matters, True
        self.rounded: set[int] = set()

    def accumulate(self, running: Symbol, elements: Any) -> Symbol:
        return running if elements == EMPTY else self.combine(running, node("product", elements))

    def combine(self, x: Symbol, y: Symbol) -> Symbol:
        """Add two sums."""
        if x is NOTHING or y is NOTHING:
            return y if x is NOTHING else x
        if x == START or y == START:
            other = y if x == START else x
            return node("plus zero", other) if self.start_matters and other != START else other
        if x == ZERO:
            return FromZero(y) if self.zero_matters else y
        if isinstance(x, FromZero) or isinstance(y, FromZero):
            return FromZero(self.combine(*(v.sum if isinstance(v, FromZero) else v for v in (x, y))))
        return node("add", frozenset((x, y)) if x != y else x)

    def finish(self, x: Symbol) -> int:
        """Return the symbol of a sum after which nothing is added."""
        return node("from zero", x.sum) if isinstance(x, FromZero) else x

    def round_sum(self, fmt: Format, x: Symbol) -> Symbol:
        """Round a sum, which changes nothing the second time."""
        if x == ZERO:
            return x
        known = x.sum in self.rounded if isinstance(x, FromZero) else x in self.rounded
        found = self.finish(x) if known else node("rounded", fmt, self.finish(x))
        self.rounded.add(found)
        return found

    def zeros(self, grid: tuple[int, ...], negative: Any) -> Any:
        signs = np.asarray(negative)
        return (
            np.where(signs, np.array(NOTHING), START) if signs.ndim else NOTHING if signs else START
        )  # one symbol stands for a grid of it

    def scan(self, turn: Callable[[Any, Turn], Any], state: Any, chain: Chain) -> Any:
        closes = np.zeros(chain.places.shape, bool) if chain.closes is None else chain.closes
        if chain.slots is not None:
            state = np.full((chain.sums or 1,), state[0], object), state[1]
            for elements, closing, slot in zip(chain.places.tolist(), closes.tolist(), chain.slots.tolist(), strict=True):
                state = turn(state, Turn(elements, closing or None, slot))
            return state
        single = not isinstance(state, tuple)
        grids = [np.broadcast_to(np.asarray(x, object), chain.grid).copy() for x in ((state,) if single else state)]
        for at in np.ndindex(chain.grid):
            own: Any = grids[0][at] if single else tuple(x[at] for x in grids)
            for element, closing in zip(chain.places[:, *at].tolist(), closes[:, *at].tolist(), strict=True):
                own = turn(own, Turn(element, closing or None, None))
            for x, value in zip(grids, (own,) if single else own, strict=True):
                x[at] = value
        return grids[0] if single else tuple(grids)

    def add(self, x: Any, y: Any) -> Any:
        return self._each(self.combine, x, y)

    def round(self, fmt: Format, x: Any) -> Any:
        return self._each(partial(self.round_sum, fmt), x)

    def where(self, mask: Any, x: Any, y: Any) -> Any:
        return x if mask else y  # accumulators run one after the other

    def extend(self, sums: Any, count: int) -> Any:
        return np.concatenate([sums, np.full((count, *sums.shape[1:]), ZERO, object)])

    def _each(self, function: Callable[..., Symbol], *values: Any) -> Any:
        if not isinstance(values[0], np.ndarray):
            return function(*values)
        found = np.empty(values[0].shape, object)
        for at in np.ndindex(found.shape):
            found[at] = function(*(x[at] for x in values))
        return found


class LaneSymbols(Symbols):
    """Sums of products by f32 multiply-adds."""

    def __init__(self, unit: Lanes, exact: bool) -> None:
        super().__init__(exact, start_matters=not exact)
        self.product, self.rounds_products = unit.product, exact or not unit.fused

    def accumulate(self, running: Symbol, elements: Any) -> Symbol:
        if elements == EMPTY:
            return running
        before = NOTHING if running == START else running
        if not self.rounds_products:
            return node("fma", before, elements)
        product = node("product", elements)
        return self.combine(before, product if self.product is None else node("rounded", self.product, product))


class StepSymbols(Symbols):
    """Sums of products by an instruction of tensor cores."""

    def __init__(self, unit: Steps, exact: bool) -> None:
        super().__init__(exact)
        model = unit.arithmetic
        assert isinstance(model.terms, int)
        same = {"terms": 1} | ({"floor": 0} if exact else {})  # the nodes have a step's terms; exact products lie above every floor
        other = model.step_kind is not None or model.flush is not None or model.groups > 1 or model.chain is not None
        self.terms, self.arithmetic = model.terms, node(model, unit.op.k) if other else node(model.replace(**same))
        # a single product is truncated as in f32
        self.unchanged = not other and (exact or (model.rounding == "RZ" and (model.fraction_bits or 0) >= PRODUCT_BITS))

    def accumulate(self, running: Symbol, elements: Any) -> Symbol:
        running = None if running == START else running
        for start in range(0, len(elements), self.terms):
            step = tuple(sorted(p for p in elements[start : start + self.terms] if p != EMPTY))
            if step and running is None and len(step) == 1 and self.unchanged:
                running = node("product" if self.exact else "product, cut", step[0])
            elif step:
                running = node("step", self.arithmetic, running, step)
        return running
