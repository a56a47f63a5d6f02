"""The orders and formats in which libraries add sums of products, as kernel recipes with what these do not say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

from tcemu.engine.arithmetic.sum_tree import ordered_pairs
from tcemu.engine.formats.number_formats import BF16, E4M3, E5M2, F16, F32, TF32, Format
from tcemu.operations.products.library.kernel_order import lane_order
from tcemu.operations.products.library.kernel_recipe import Epilogue, KernelRecipe, Lanes, Merge, Slices, Steps
from tcemu.uses.replay.kernel_profiles import list_profiles
from tcemu.uses.replay.order_candidates import RESTARTS, candidate_lanes, candidate_steps

CASTS = ((TF32, "RN"), (TF32, "RZ"), (TF32, "RNA"), (BF16, "RN"))  # roundings of f32 operands before they are multiplied
ROUNDED_OPERANDS = "rounded operands"  # evidence of a recipe whose operands are f32 that are rounded first
CAST_ORDERS = 40  # orders that are tried with rounded operands
LANE_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)  # of replay's candidates
SLICE_COUNTS = (2, 3, 4, 5, 6, 8, 16, 32)
GRAINS = (1, 8, 16, 32, 64)
CORE_FORMATS = (TF32, BF16, F16, E4M3, E5M2)  # formats that tensor cores multiply
CORE_COUNTS, CORE_GRAINS = (2, 3, 4, 5, 6, 7, 8, 16), (64, 32, 128)  # slices that are added by tensor cores
RESIDUES = (32, 64)
LIBRARIES = {  # sums whose order is computed by `tcemu.uses.drift.cpu_sums`
    "torch": "cascaded sum of torch on a CPU",
    "mkl": "16 lanes of MKL's sgemv with AVX-512, carried on in the first lane, fma",
}


@dataclass(frozen=True)
class Summation:
    """The order and the formats in which a sum of products, or of terms, is computed.

    Attributes:
        order: Slices of K, their unit and their merge. Its formats are those that are multiplied; its result is f32.
        accumulator: f32, or a format to which every running sum is rounded. f64: the sum is exact but for one rounding to f32.
        bias_first: A bias is the start of the sum, not added to it.
        of_terms: The sum is of terms, not of products.
        library: A key of LIBRARIES, for orders that depend on the place of an output; then `order` counts for nothing.
    """

    order: KernelRecipe
    accumulator: str = "float32"
    bias_first: bool = False
    of_terms: bool = False
    library: str = ""

    @property
    def fused(self) -> bool:
        """True if each product and its addition are rounded once. A lane of one product rounds that product."""
        unit = self.order.unit
        return isinstance(unit, Lanes) and unit.fused and not self.of_terms and unit.lanes < self.order.k

    def __str__(self) -> str:
        if self.library:
            return LIBRARIES[self.library]
        if self.accumulator == "float64":
            return f"{_operand_words(self.order)}sum in float64, rounded to f32"
        slices = self.order.slices
        words = _operand_words(self.order)
        if isinstance(self.order.unit, Lanes):
            unit = self.order.unit
            plain = unit.lanes == 1 and unit.chunk is None
            pairwise = unit.lanes == self.order.k > 1 and unit.vector == 1
            how = "sequential" if plain else f"pairwise ({unit.join})" if pairwise else _lane_words(unit)
            words += f"{how} sum" + ("" if self.of_terms else ", fma" if self.fused else ", products rounded")
            words += "" if self.accumulator == "float32" else f", running sums rounded to {self.accumulator}"
            words += ", subnormal numbers count as zeros" if unit.flush else ""
        else:
            words += f"tensor core, {self.order.unit}"
        if isinstance(self.order.unit, Steps):
            words += "" if self.accumulator == "float32" else f", sums in {self.accumulator}"
        merge = self.order.merge
        if len(slices.edges) != 2 or merge.start == "zero":
            words += f"; {slices}, {f'added {merge.order}' if merge == Merge(merge.order) else merge}"
        return words + ("; the sum starts at the bias" if self.bias_first else "")


def _operand_words(order: KernelRecipe) -> str:
    if order.a in (TF32,):
        return f"operands rounded to tf32 ({order.cast}); "
    measured = f"as {order.conditions.library} {order.conditions.gpu}: " if order.conditions.library else ""
    return f"operands rounded to {order.a}; " if order.conditions.evidence == ROUNDED_OPERANDS else measured


def _lane_words(unit: Lanes) -> str:
    words = f"{unit.lanes} lanes of {unit.vector}, joined {unit.join}" if unit.lanes > 1 else "sequential"
    return words + ("" if unit.chunk is None else f", restarted every {unit.chunk}")


def plain_summation(a: Format, b: Format, k: int, *, of_terms: bool = False) -> Summation:
    """Return the sequential sum in f32."""
    return Summation(KernelRecipe(a, b, F32, Lanes(), Slices.single(k)), of_terms=of_terms)


@lru_cache(maxsize=256)
def candidate_summations(
    a: Format, b: Format, k: int, targets: tuple[str, ...], is_product: bool, shape: tuple[int, int] | None = None
) -> tuple[Summation, ...]:
    """List the ways in which a library may sum, plain ones first, each schedule once. With targets, tensor cores stand before lanes.

    Args:
        a: Format of the left operand.
        b: Format of the right operand.
        k: Number of terms.
        targets: GPUs whose tensor cores are tried.
        is_product: Terms are products. Otherwise they are the left operand, and fma and casts make no difference.
        shape: M and N of a product, whose measured kernel recipes are tried; None: none is known.
    """
    plain = KernelRecipe(a, b, F32, Lanes(), Slices.single(k))
    inexact = is_product and (a, b) in ((F32, F32), (BF16, F32), (F32, BF16))
    known: set[Any] = set()
    orders: list[KernelRecipe] = []
    for lanes, slices in _lane_schedules(k):
        key = _schedule_key(lanes, slices)
        if key not in known:
            known.add(key)
            orders.append(plain.replace(unit=lanes, slices=slices))
    found = [Summation(order) for order in orders]
    if inexact:
        found += [Summation(_unfused(order)) for order in orders]
    first = orders[0]
    narrow = [Summation(_unfused(order), name) for order, name in product(orders[:4], ("bfloat16", "float16"))]
    found += [*narrow, Summation(first, "float64"), Summation(first, bias_first=True), Summation(_unfused(first), bias_first=True)]
    if not is_product and a == F32:
        found.insert(1, Summation(first, library="torch"))
    if inexact and a == b and shape is not None and shape[0] == 1:
        found.insert(1, Summation(first, library="mkl"))
    found += [Summation(first.replace(unit=replace(first.unit, flush=True, fused=fused))) for fused in (True, False)]
    if is_product and (a, b) == (F32, F32):
        for fmt, cast in CASTS:
            conditions = replace(plain.conditions, evidence=ROUNDED_OPERANDS)
            found += [Summation(order.replace(a=fmt, b=fmt, cast=cast, conditions=conditions)) for order in orders[:CAST_ORDERS]]
    if is_product and targets:
        cores = list(_core_summations(a, b, k, targets))  # those in one slice, then the others
        whole = [how for how in cores if len(how.order.slices.edges) == 2]
        found = [*whole, *_measured_orders(a, b, k, shape, targets), *found, *(how for how in cores if how not in whole)]
    return tuple(found) if is_product else tuple(replace(how, of_terms=True) for how in found if not how.bias_first)


def _measured_orders(a: Format, b: Format, k: int, shape: tuple[int, int] | None, targets: tuple[str, ...]) -> Iterator[Summation]:
    """Yield the orders that the profiles have for a shape, plain epilogues only."""
    factors = ((F32, F32), (TF32, TF32)) if (a, b) == (F32, F32) else ((a, b),)
    for profile in list_profiles() if shape is not None else ():
        if (*shape, k) in profile.shapes:  # type: ignore[misc]
            order = profile.kernel_recipe((*shape, k)).without_shape()  # type: ignore[misc]
            fits = (order.a, order.b) in factors and order.epilogue == Epilogue()
            if fits and (isinstance(order.unit, Lanes) or order.unit.target in targets):
                yield Summation(order if order.merge.partial != F32 else order.replace(dtype=F32))


def _core_summations(a: Format, b: Format, k: int, targets: tuple[str, ...]) -> Iterator[Summation]:
    """Yield sums by tensor cores, one for each arithmetic, whole and in slices, and with f16 sums."""
    fmts = (TF32, TF32) if (a, b) == (F32, F32) else (a, b)
    if not all(fmt in CORE_FORMATS for fmt in fmts):
        return
    single = Slices.single(k)
    for steps in candidate_steps(fmts, targets):
        whole = [steps, *(replace(steps, restart=restart) for restart in RESTARTS if restart < k and restart % steps.op.k == 0)]
        whole += [replace(steps, residue=residue) for residue in RESIDUES if k > residue and k % residue % steps.op.k]
        yield from (Summation(KernelRecipe(*fmts, F32, unit, single)) for unit in whole)
        edges: dict[tuple[int, ...], Slices] = {}
        counts = [*product(CORE_GRAINS, CORE_COUNTS), *((grain, -(-k // grain)) for grain in CORE_GRAINS)]
        for grain, count in counts:
            slices = Slices.even(k, count, grain)
            edges.setdefault(slices.edges, slices)
        for slices in list(edges.values()):
            if len(slices.edges) > 2:
                yield Summation(KernelRecipe(*fmts, F32, steps, slices))
                for partial in (BF16, F16):
                    if partial in fmts:
                        recipes = [KernelRecipe(*fmts, partial, steps, slices, Merge("ascending", partial, x)) for x in (False, True)]
                        yield from map(Summation, recipes)
                        if fmts == (F16, F16):
                            yield from (Summation(recipe, "float16") for recipe in recipes)
        if fmts == (F16, F16):
            yield Summation(KernelRecipe(*fmts, F32, steps, single), "float16")


def _unfused(order: KernelRecipe) -> KernelRecipe:
    assert isinstance(order.unit, Lanes)
    return order.replace(unit=replace(order.unit, fused=False))


def _lane_schedules(k: int) -> Iterator[tuple[Lanes, Slices]]:
    single = Slices.single(k)
    yield Lanes(), single
    for join in ("tree", "folded"):  # one product in each lane: pairwise
        if k > 1:
            yield Lanes(lanes=k, vector=1, join=join), single
    for count, grain in product(SLICE_COUNTS, GRAINS):
        if -(-k // grain) > 1 and count < k:
            yield Lanes(), Slices.even(k, count, grain)
    yield from ((lanes, single) for lanes in candidate_lanes(k) if lanes.lanes in LANE_COUNTS and lanes.lanes < k)


def _schedule_key(unit: Lanes, slices: Slices) -> Any:
    if unit.lanes == 1 and unit.chunk is not None and len(slices.edges) == 2:  # restarts of one lane are slices
        unit, slices = Lanes(), Slices.from_edges((*range(0, slices.k, unit.chunk), slices.k))
    order = lane_order(unit, slices)
    joined = ordered_pairs(unit.join, unit.lanes)
    return order.indices.tobytes(), order.indices.shape, order.closes.tobytes() if order.chunked else b"", joined
