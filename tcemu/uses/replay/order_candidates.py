"""Candidate orders of a black box: those of known kernels with every usual slice, lane and residue, plain ones first.

Candidates are tried from the outside in: first the slices of K, by the answers about terms in different slices; then, within the remaining
slices, the unit that adds up a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.sum_tree import CHAINED, ORDERS
from tcemu.engine.formats.number_formats import BF16, E4M3, E5M2, F16, F32, TF32, Format
from tcemu.engine.isa.other_makers import OTHER_TARGETS as MACHINES
from tcemu.engine.isa.other_makers import other_units
from tcemu.operations.products.library.kernel_order import slice_indices
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Lanes, Merge, Slices, Steps, even_edges
from tcemu.uses.replay.black_box import FP8_FORMATS, FormatPair
from tcemu.uses.replay.order_probes import PairAnswers, explains_answers
from tcemu.uses.replay.summation_levels import Level, lost_terms, slice_level, unit_levels

TARGETS = ("sm_90a", "sm_80", "sm_89", "sm_120")  # these have every known arithmetic of these formats except that of sm_90's FP8 mma
OTHER_TARGETS = ("znver4", "sapphirerapids")  # CPUs whose units are tried where nothing else explains the answers
GRAINS = (64, 128, 32, 16, 8, 256, 4, 1)  # alignments of slices, tiles of K
FEW_SLICES, MAX_SLICES = 64, 512  # every count up to the first; cuBLASLt uses as many as there are multiprocessors, and more
TILES = (64, 32, 128, 16)  # sizes of tiles that slices take in turn
RESIDUES = (32, 64, 16, 128)
RESTARTS = (128, 64, 256, 32, 512)
LANES = (1, 32, 16, 8, 4, 2, 64, 128, 26, 24, 20)
VECTORS = (1, 4, 2, 8, 16, 32, 64)
CHUNKS = (None, 16, 32, 64, 128, 256, 512, 8, 320, 240, 384, 448, 1024)
JOINS = ("folded", "ascending", "tree")


def multiplicand_formats(operand_formats: FormatPair) -> tuple[FormatPair, ...]:
    """Return the format pairs in which operands of these formats may be multiplied."""
    return ((F32, F32), (TF32, TF32)) if operand_formats == (F32, F32) else (operand_formats,)


@lru_cache(maxsize=64)
def candidate_steps(fmts: FormatPair, targets: tuple[str, ...]) -> tuple[Steps, ...]:
    """Return the steps of matrix units for these formats, one per arithmetic and K.

    Of NVIDIA's, those that take K in groups are left out. Of other makers', those made of multiply-adds are taken.
    """
    a, b = fmts
    if a == F32:
        return ()
    k = {TF32: 8, BF16: 16, F16: 16, E4M3: 32, E5M2: 32}[a]
    found: dict = {}
    for target in targets:
        if target in MACHINES:
            for op in other_units(target):
                used = (op.a, op.b, op.d) == (a, b, F32) and resolve_arithmetic(op, target)
                if used and used.model.fraction_bits is None and used.model.step_kind is None:
                    found.setdefault((used.model, used.op.k), Steps(used.op, target))
            continue
        for spelling in (
            f"wgmma.mma_async.sync.aligned.m64n64k{k}.f32.{a}.{b}",
            f"mma.sync.aligned.m16n8k{k}.row.col.f32.{a}.{b}.f32",
            f"mma.sync.aligned.m16n8k{k // 2}.row.col.f32.{a}.{b}.f32",
        ):
            try:
                used = resolve_arithmetic(spelling, target)
            except (Unsupported, NotModelled):
                continue
            if used.model.fraction_bits is not None and used.model.groups == 1 and used.model.chain is None:
                found.setdefault((used.model, used.op.k), Steps(used.op, target))
    return tuple(found.values())


def candidate_slices(k: int, dropped: int, read: Sequence[Slices] = ()) -> Iterator[Slices]:
    """Yield ways to divide K, each once. `read` has slices that answers have shown."""
    known_edges = set()
    if not dropped:
        yield Slices.single(k)
        known_edges.add((0, k))
    for grain in GRAINS:
        for count in slice_counts(k - dropped, grain):
            edges = even_edges(k - dropped, count, grain)
            if len(edges) > 2 and edges not in known_edges:
                known_edges.add(edges)
                yield Slices.even(k, count, grain, dropped=dropped)
    if dropped:
        yield Slices.from_edges((0, k - dropped), dropped=dropped)
        return
    for slices in read:
        if slices.edges not in known_edges:
            known_edges.add(slices.edges)
            yield slices
    for tile, count in product(TILES, range(2, 17)):
        if tile * count < k:
            yield Slices.interleaved(k, count, tile)


def slice_counts(k: int, grain: int) -> Iterator[int]:
    """Yield every count up to FEW_SLICES, and beyond up to MAX_SLICES one count per slice length."""
    yield from range(2, FEW_SLICES + 1)
    for grains in range(-(-k // grain) // FEW_SLICES + 1, 0, -1):
        count = -(-k // (grains * grain))
        if FEW_SLICES < count <= MAX_SLICES:
            yield count


def candidate_units(operand_formats: FormatPair, targets: tuple[str, ...], slices: Slices) -> Iterator[tuple[FormatPair, Steps | Lanes]]:
    """Yield units that may add up a slice, with the formats that they multiply."""
    longest = max(len(part) for part in slice_indices(slices))
    lengths = {len(part) for part in slice_indices(slices)}
    for fmts in multiplicand_formats(operand_formats):
        steps = candidate_steps(fmts, targets)
        for step in steps:
            yield fmts, step
        for step, residue in product(steps, RESIDUES):
            if any(length % residue % step.op.k and length > residue for length in lengths):
                yield fmts, Steps(step.op, step.target, None, residue)
        for step, restart in product(steps, RESTARTS):
            chained = step.arithmetic.chain is not None  # its sums restart with each instruction
            if not chained and step.op.k <= restart < longest and restart % step.op.k == 0:
                yield fmts, Steps(step.op, step.target, None, None, restart)
        if fmts[0] != TF32:
            for lanes in candidate_lanes(longest):
                yield fmts, lanes


def candidate_lanes(length: int) -> Iterator[Lanes]:
    """Yield lanes that differ on a slice of this length."""
    for lanes in LANES:
        own = -(-length // lanes)
        for vector in dict.fromkeys([*VECTORS, own, min(64, own)] if lanes > 1 else [1]):
            if vector * (lanes // 2) >= length and lanes > 1:
                continue
            for chunk in CHUNKS:
                if chunk is not None and chunk >= -(-length // (lanes * vector)) * vector:
                    continue
                for join in JOINS if lanes > 2 else JOINS[:1]:
                    yield Lanes(lanes, vector, chunk, join)


# ---- elimination by answers


def slices_may_explain(level: Level, answers: PairAnswers) -> bool:
    """Return whether slices can explain a call.

    Answers about pairs in different slices must be those of the slices, and no term outside a pair's slice may be lost.
    """
    for row, (i, j) in enumerate(answers.pairs):
        x, y = int(level.members[i]), int(level.members[j])
        same = x == y
        alive = (level.members != x) if same else ~lost_terms([level, level], i, j)
        alive = alive & (level.members >= 0)
        counts = np.bincount(answers.window_indices[alive & (answers.window_indices >= 0)], minlength=len(answers.windows))
        if (answers.counts[row] < counts).any() if same else (answers.counts[row] != counts).any():
            return False
    return True


def pairs_in_one_slice(level: Level, answers: PairAnswers) -> PairAnswers:
    """Return the pairs of a call that lie in one slice, on which the unit has an effect."""
    inside = [row for row, (i, j) in enumerate(answers.pairs) if level.members[i] == level.members[j]]
    return answers._replace(pairs=[answers.pairs[at] for at in inside], counts=answers.counts[inside])


def find_slicings(k: int, dropped: int, read: Sequence[Slices], answers: Sequence[PairAnswers]) -> list[tuple[Slices, str, Level]]:
    """Find the slices and merge orders that may explain the answers."""
    found = []
    for slices in candidate_slices(k, dropped, read):
        count = len(slice_indices(slices))
        for order in ORDERS if 2 < count <= FEW_SLICES else CHAINED[:1]:
            level = slice_level(slices, order)
            if all(slices_may_explain(level, answer) for answer in answers):
                found.append((slices, order, level))
    return found


def find_orders(
    operand_formats: FormatPair,
    out: Format,
    targets: tuple[str, ...],
    slicings: Sequence[tuple[Slices, str, Level]],
    answers: Sequence[PairAnswers],
) -> list[KernelRecipe]:
    """Find the orders that explain every answer, as recipes whose partial sums are f32."""
    orders = []
    for slices, order, level in slicings:
        inside = [pairs_in_one_slice(level, answer) for answer in answers]
        inside = [answer for answer in inside if answer.pairs]
        known: dict = {}
        for (a, b), unit in candidate_units(operand_formats, targets, slices):
            key = unit if isinstance(unit, Lanes) else _order_key(unit)
            if key not in known:
                tree = [level, *unit_levels(unit, slices)]
                known[key] = all(explains_answers(tree, answer) for answer in inside)
            if known[key]:
                orders.append(KernelRecipe(a, b, out, unit, slices, Merge(order)))
    is_fp8 = operand_formats[0] in FP8_FORMATS  # these restart narrow accumulators; elsewhere such sums are slices
    return sorted(orders, key=lambda recipe: not is_fp8 and isinstance(recipe.unit, Steps) and recipe.unit.restart is not None)


def _order_key(unit: Steps) -> tuple:
    """Return a value that is equal for steps that lose the same terms."""
    return Order.from_model(unit.arithmetic, unit.op.k), unit.op.k, unit.residue, unit.restart


def rounding_variants(recipe: KernelRecipe, *, rare: bool = False) -> Iterator[KernelRecipe]:
    """Yield the same order with every rounding that its sums may have on the way.

    `rare` adds what few kernels do: XLA's products rounded to f16 or bf16, chains that begin at their first product, and a single slice's
    sum that is stored and added to +0.
    """
    units = list(_lane_variants(recipe.unit, recipe.a, rare)) if isinstance(recipe.unit, Lanes) else [recipe.unit]
    several = len(slice_indices(recipe.slices)) > 1
    merges = [recipe.merge]
    if several:
        order = recipe.merge.order
        chained = order in CHAINED
        merges = [Merge(order)]
        if recipe.dtype != F32:
            merges += [Merge(order, recipe.dtype), *([Merge(order, recipe.dtype, serial=True)] if chained else [])]
            merges += [Merge(order, recipe.dtype, atomic=True)]
        merges = [replace(merge, start=start) for merge in merges for start in (("first", "zero") if chained else ("first",))]
    casts = ("RN", "RZ", "RNA") if recipe.a == TF32 else ("RN",)
    for unit, merge, cast in product(units, merges, casts):
        # other combinations give the same bits as some that are yielded
        if merge.start == "first" or not (isinstance(unit, Lanes) and (unit.product or unit.start == "first")):
            yield recipe.replace(unit=unit, merge=merge, cast=cast)
    if rare and not several:
        merged = [Merge(partial=partial, start="zero") for partial in dict.fromkeys((F32, recipe.dtype))]
        # for other units the merge changes nothing
        units = [unit for unit in units if not (isinstance(unit, Lanes) and (unit.product or unit.start == "first"))]
        for unit, merge, cast in product(units, merged, casts):
            yield recipe.replace(unit=unit, merge=merge, cast=cast)


def _lane_variants(unit: Lanes, fmt: Format, rare: bool) -> Iterator[Lanes]:
    """Yield the same lanes with every rounding of their products. `fmt` is the operands' format."""
    inexact = fmt in (F32, BF16)  # products that f32 may have to round, or cannot represent
    for start in ("zero", "first") if rare else ("zero",):
        for flush, fused in product((False, True), (True, False)) if inexact else ((False, True),):
            yield replace(unit, fused=fused, flush=flush, start=start)
        if rare and fmt in (F16, BF16):
            yield replace(unit, fused=False, product=fmt, start=start)
