"""The orders that a black box may have: those of known kernels, with every slice, lane and residue that is usual, plain ones first.

They are tried from the outside in: first the slices of K, by the answers about terms in different slices; then, within the slices that are
left, what adds up a slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np

from tcemu.architectures.lookup import applied
from tcemu.errors import NotModelled, Unsupported
from tcemu.formats import BF16, E4M3, E5M2, F16, F32, TF32, Format
from tcemu.linalg.kernel_order import places_of_slices
from tcemu.linalg.kernel_recipes import KernelRecipe, Lanes, Merge, Slices, Steps, even_edges
from tcemu.replay.probes import Asked, fits
from tcemu.replay.trees import Level, levels_of_slices, levels_of_unit, lost

Formats = tuple[Format, Format]  # of A and of B
TARGETS = ("sm_90a", "sm_80", "sm_89", "sm_120")  # between them, every known arithmetic of these formats but that of sm_90's FP8 mma
GRAINS = (64, 128, 32, 16, 8, 256, 4, 1)  # of slices: tiles of K, or what is aligned
FEW_SLICES, MOST_SLICES = 64, 512  # every count up to the first; cuBLASLt takes as many as there are multiprocessors, and more
TILES = (64, 32, 128, 16)  # that are dealt out
RESIDUES = (32, 64, 16, 128)
RESTARTS = (128, 64, 256, 32, 512)
LANES = (1, 32, 16, 8, 4, 2, 64, 128, 26, 24, 20)
VECTORS = (1, 4, 2, 8, 16, 32, 64)
CHUNKS = (None, 16, 32, 64, 128, 256, 512, 8, 320, 240, 384, 448, 1024)
JOINS = ("folded", "ascending", "tree")
ORDERS = ("ascending", "descending", "tree", "folded", "paired")


def multiplied(held: Formats) -> tuple[Formats, ...]:
    """The formats that operands of these may be multiplied in."""
    return ((F32, F32), (TF32, TF32)) if held == (F32, F32) else (held,)


@lru_cache(maxsize=64)
def instructions(fmts: Formats, targets: tuple[str, ...]) -> tuple[Steps, ...]:
    """The tensor cores' ways with these formats, one of each arithmetic and K. Those that take K in groups are left out."""
    a, b = fmts
    if a == F32:
        return ()
    k = {TF32: 8, BF16: 16, F16: 16, E4M3: 32, E5M2: 32}[a]
    found: dict = {}
    for target in targets:
        for spelling in (
            f"wgmma.mma_async.sync.aligned.m64n64k{k}.f32.{a}.{b}",
            f"mma.sync.aligned.m16n8k{k}.row.col.f32.{a}.{b}.f32",
            f"mma.sync.aligned.m16n8k{k // 2}.row.col.f32.{a}.{b}.f32",
        ):
            try:
                used = applied(spelling, target)
            except (Unsupported, NotModelled):
                continue
            if used.model.fraction_bits is not None and used.model.groups == 1 and used.model.chain is None:
                found.setdefault((used.model, used.op.k), Steps(used.op, target))
    return tuple(found.values())


def slicings(k: int, dropped: int, read: Sequence[Slices] = ()) -> Iterator[Slices]:
    """Ways to cut K, each once. read: cuts that answers have shown."""
    seen = set()
    if not dropped:
        yield Slices.whole(k)
        seen.add((0, k))
    for grain in GRAINS:
        for count in counts_of_slices(k - dropped, grain):
            edges = even_edges(k - dropped, count, grain)
            if len(edges) > 2 and edges not in seen:
                seen.add(edges)
                yield Slices.even(k, count, grain, dropped=dropped)
    if dropped:
        yield Slices.listed((0, k - dropped), dropped=dropped)
        return
    for slices in read:
        if slices.edges not in seen:
            seen.add(slices.edges)
            yield slices
    for tile, count in product(TILES, range(2, 17)):
        if tile * count < k:
            yield Slices.dealt_out(k, count, tile)


def counts_of_slices(k: int, grain: int) -> Iterator[int]:
    """Every count up to FEW_SLICES, and of more slices up to MOST_SLICES one count for each length."""
    yield from range(2, FEW_SLICES + 1)
    for grains in range(-(-k // grain) // FEW_SLICES + 1, 0, -1):
        count = -(-k // (grains * grain))
        if FEW_SLICES < count <= MOST_SLICES:
            yield count


def units(held: Formats, targets: tuple[str, ...], slices: Slices) -> Iterator[tuple[Formats, Steps | Lanes]]:
    """What may add up a slice, with the formats that it multiplies."""
    longest = max(len(part) for part in places_of_slices(slices))
    lengths = {len(part) for part in places_of_slices(slices)}
    for fmts in multiplied(held):
        steps = instructions(fmts, targets)
        for step in steps:
            yield fmts, step
        for step, residue in product(steps, RESIDUES):
            if any(length % residue % step.op.k and length > residue for length in lengths):
                yield fmts, Steps(step.op, step.target, None, residue)
        for step, restart in product(steps, RESTARTS):
            if step.op.k <= restart < longest and restart % step.op.k == 0:
                yield fmts, Steps(step.op, step.target, None, None, restart)
        if fmts[0] != TF32:
            for lanes in lane_structures(longest):
                yield fmts, lanes


def lane_structures(length: int) -> Iterator[Lanes]:
    """Lanes that differ on a slice of this length."""
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


# ---- what the answers leave


def may_fit(level: Level, asked: Asked) -> bool:
    """Slices may explain a call: answers about pairs in different slices are theirs, and no term outside a pair's slice is lost."""
    for at, (i, j) in enumerate(asked.pairs):
        x, y = int(level.members[i]), int(level.members[j])
        same = x == y
        alive = (level.members != x) if same else ~lost([level, level], i, j)
        alive = alive & (level.members >= 0)
        counts = np.bincount(asked.window_of[alive & (asked.window_of >= 0)], minlength=len(asked.windows))
        if (asked.counts[at] < counts).any() if same else (asked.counts[at] != counts).any():
            return False
    return True


def in_one_slice(level: Level, asked: Asked) -> Asked:
    """The pairs of a call that lie in one slice: those about which the unit has to say something."""
    inside = [at for at, (i, j) in enumerate(asked.pairs) if level.members[i] == level.members[j]]
    return asked._replace(pairs=[asked.pairs[at] for at in inside], counts=asked.counts[inside])


def cuts(k: int, dropped: int, read: Sequence[Slices], answers: Sequence[Asked]) -> list[tuple[Slices, str, Level]]:
    """The slices and merge orders that may explain the answers."""
    found = []
    for slices in slicings(k, dropped, read):
        count = len(places_of_slices(slices))
        for order in ORDERS if 2 < count <= FEW_SLICES else ORDERS[:1]:
            level = levels_of_slices(slices, order)
            if all(may_fit(level, asked) for asked in answers):
                found.append((slices, order, level))
    return found


def trees(
    held: Formats, out: Format, targets: tuple[str, ...], found: Sequence[tuple[Slices, str, Level]], answers: Sequence[Asked]
) -> list[KernelRecipe]:
    """The orders that explain every answer, as recipes whose sums wait in f32."""
    kept = []
    for slices, order, level in found:
        inside = [in_one_slice(level, asked) for asked in answers]
        inside = [asked for asked in inside if asked.pairs]
        known: dict = {}
        for (a, b), unit in units(held, targets, slices):
            key = unit if isinstance(unit, Lanes) else (unit.arithmetic.terms, unit.op.k, unit.residue, unit.restart)
            if key not in known:
                tree = [level, *levels_of_unit(unit, slices)]
                known[key] = all(fits(tree, asked) for asked in inside)
            if known[key]:
                kept.append(KernelRecipe(a, b, out, unit, slices, Merge(order)))
    narrow = held[0] in (E4M3, E5M2)  # whose accumulators are restarted for their width's sake; elsewhere such sums are slices
    return sorted(kept, key=lambda recipe: not narrow and isinstance(recipe.unit, Steps) and recipe.unit.restart is not None)


def variants(recipe: KernelRecipe, *, rare: bool = False) -> Iterator[KernelRecipe]:
    """The same order with every rounding that its sums may have on the way.

    rare: with what few kernels do, too: XLA's products rounded to f16 or bf16, chains begun at their first product, and one slice's sum
    that waits and is added to +0.
    """
    units = list(_lanes_like(recipe.unit, recipe.a, rare)) if isinstance(recipe.unit, Lanes) else [recipe.unit]
    several = len(places_of_slices(recipe.slices)) > 1
    merges = [recipe.merge]
    if several:
        order = recipe.merge.order
        partials = [(F32, False)] + ([(recipe.out, False), (recipe.out, True)] if recipe.out != F32 else [])
        starts = ("first", "zero") if order in ORDERS[:2] else ("first",)
        merges = [
            Merge(order, partial, serial, start)
            for (partial, serial), start in product(partials, starts)
            if not serial or order in ORDERS[:2]
        ]
    casts = ("RN", "RZ", "RNA") if recipe.a == TF32 else ("RN",)
    for unit, merge, cast in product(units, merges, casts):
        if merge.start == "first" or not (isinstance(unit, Lanes) and (unit.product or unit.start == "first")):  # else as others
            yield recipe.replace(unit=unit, merge=merge, cast=cast)
    if rare and not several:
        waiting = [Merge(partial=partial, start="zero") for partial in dict.fromkeys((F32, recipe.out))]
        units = [unit for unit in units if not (isinstance(unit, Lanes) and (unit.product or unit.start == "first"))]  # as without it
        for unit, merge, cast in product(units, waiting, casts):
            yield recipe.replace(unit=unit, merge=merge, cast=cast)


def _lanes_like(unit: Lanes, fmt: Format, rare: bool) -> Iterator[Lanes]:
    """The same lanes with every rounding of their products. fmt: of the operands."""
    inexact = fmt in (F32, BF16)  # products that an f32 may have to round, or has below its range
    for start in ("zero", "first") if rare else ("zero",):
        for flush, fused in product((False, True), (True, False)) if inexact else ((False, True),):
            yield replace(unit, fused=fused, flush=flush, start=start)
        if rare and fmt in (F16, BF16):
            yield replace(unit, fused=False, product=fmt, start=start)
