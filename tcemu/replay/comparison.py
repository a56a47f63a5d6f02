"""What recipes give on drawn operands, beside what a box gives: the elimination of candidates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.compilation import wide_vectors
from tcemu.formats import F32, Format
from tcemu.linalg.kernel_epilogue import Epilogue
from tcemu.linalg.kernel_order import places_of_slices
from tcemu.linalg.kernel_recipes import KernelRecipe, Lanes, Merge
from tcemu.linalg.kernel_sums import Chains, Merging, Order, Run, chains_of, merged, merging_of, operand_codes, run_of, sums_of_slices
from tcemu.linalg.kernel_totals import Extras, Finish, Ways, extras_of, finish_of, finished
from tcemu.replay.boxes import DTYPES, Box
from tcemu.replay.data import operands
from tcemu.replay.extras import besides
from tcemu.replay.forms import PLAIN, Besides, Form

MOST = 48  # different rows of A, and columns of B, in one comparison: the others repeat them, so that every output is compared
SIZES = (1, 2, 4, 8, 16, 24, 32, MOST)  # to which they are filled up, so that programs are shared
OUTPUTS = MOST * MOST
ONE = np.uint32(0x3F800000)  # f32
COUNTS = (8, 64, 512)  # of sums of slices
TRIES = 36  # of operands, until two recipes are told apart
TELLING = ("window", "zeros", "window", "brink", "window", "subnormal", "window", "ties", "window", "tiny", "window", "brink")


class Asking(NamedTuple):
    """What makes one call: a shape, formats, a form; operands by their kind and seed, and scales and a bias by their kind."""

    shape: tuple[int, int, int]
    held: tuple[Format, Format]
    form: Form
    kind: str
    seed: int
    how: str | None = None  # None: what changes no result
    most: int = MOST


class Sample(NamedTuple):
    """One call on drawn operands."""

    kind: str
    held: tuple[Format, Format]
    a: np.ndarray  # codes of different rows
    b: np.ndarray  # codes of different columns
    answer: np.ndarray  # codes, all [M, N]
    form: Form = PLAIN
    besides: Besides = Besides()  # of the different rows and columns


def drawn(asking: Asking, totals_by: KernelRecipe | None = None) -> Sample:
    """Operands whose rows and columns repeat after so many, and no answer. totals_by: whose totals scales and biases are drawn for."""
    m, n, k = asking.shape
    size = min(m, asking.most), min(n, asking.most)
    a, b = operands(asking.kind, asking.seed, asking.held, (*size, k))
    plain = Sample(asking.kind, asking.held, a, b, np.zeros((0, 0)), asking.form)
    if asking.form.plain:
        return plain
    if asking.how is None:
        return plain._replace(besides=asking.form.neutral(*size))
    assert totals_by is not None
    found = Computed(plain).totals(totals_by).view(np.float32).astype(np.float64)
    return plain._replace(besides=besides(asking.form, asking.how, asking.seed, found))


def answered(box: Box, asked: Sample) -> Sample:
    """One call of the box about a sample, whose rows and columns are repeated."""
    m, n, _ = box.shape
    return asked._replace(answer=box(*repeated(asked, m, n), asked.besides.repeated(m, n)))


def repeated(asked: Sample, m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """A and B with so many rows and columns, of which there are fewer, in row-major order."""
    return asked.a.take(np.arange(m) % len(asked.a), axis=0), asked.b.take(np.arange(n) % asked.b.shape[1], axis=1)


def sample(box: Box, kind: str, seed: int, how: str | None = None, totals_by: KernelRecipe | None = None) -> Sample:
    """Asks the box about drawn operands: see `drawn`."""
    return answered(box, drawn(Asking(box.shape, box.held, box.form, kind, seed, how), totals_by))


def telling_sample(box: Box, recipes: Sequence[KernelRecipe], seed: int, hows: Sequence[str | None]) -> Sample | None:
    """The first drawn operands on which the first recipe and another one give other bits, at no call; None where none were met."""
    for number in range(TRIES):
        kind, how = TELLING[number % len(TELLING)], hows[number % len(hows)]
        asked = drawn(Asking(box.shape, box.held, box.form, kind, seed + number, how), recipes[0])
        computed = Computed(asked)
        first = computed.codes(recipes[0])
        if any(unlike(other.out, computed.codes(other), first) for other in recipes[1:3]):
            return asked
    return None


def _filled(x: np.ndarray, rows: int, k: int) -> np.ndarray:
    """More rows, equal to the first, and more places along K, which no order names."""
    x = np.concatenate([x, np.repeat(x[:1], rows - len(x), 0)])
    return np.pad(x, [(0, 0), (0, k - x.shape[1])])


def given(recipe: KernelRecipe, asked: Sample) -> np.ndarray:
    """The codes that a recipe gives on the different rows and columns of a sample."""
    return Computed(asked).codes(recipe)


class Computed:
    """What recipes give on one sample, computed on a CPU.

    Recipes that differ in how their slices are merged share the slices' sums, and those that differ in their epilogues share totals.
    Everything is brought to few sizes, so that they share compiled programs, too.
    """

    def __init__(self, asked: Sample):
        self.asked = asked
        self.size = len(asked.a), asked.b.shape[1]
        self.sums: dict = {}
        self.found: dict = {}

    def codes(self, recipe: KernelRecipe) -> np.ndarray:
        """Of the results."""
        formats, (a, b, bias) = self.asked.form.formats, self.asked.besides

        def flat(codes: np.ndarray | None, fmt: Format | None) -> np.ndarray | None:
            if codes is None or fmt is None:
                return None
            return np.resize(np.broadcast_to(codes, self.size).reshape(-1), OUTPUTS).view(DTYPES[fmt])

        total, form, epilogue = self.totals(recipe), self.asked.form, recipe.epilogue
        with jax.default_device(jax.devices("cpu")[0]):
            extras = extras_of(epilogue, (flat(a, formats["scale_a"]), flat(b, formats["scale_b"])), flat(bias, formats["bias"]))
            missing = (2 if form.scales else int(form.beta != 1)) - len(extras.factors)
            factors = [np.full(OUTPUTS, ONE)] * missing + [np.broadcast_to(np.asarray(x), OUTPUTS) for x in extras.factors]
            finish = finish_of(epilogue, recipe.out)
            ways = finish.ways._replace(plus_zero=epilogue.scaled and epilogue.plus_zero)  # what is not scaled is multiplied by one
            shared = Finish(recipe.out, saturate=finish.saturate, between=finish.between or (None if recipe.out == F32 else recipe.out))
            codes = np.asarray(_finished(shared, np.resize(total, OUTPUTS), extras._replace(factors=tuple(factors)), ways))
        return codes[: total.size].reshape(self.size)

    def totals(self, recipe: KernelRecipe) -> np.ndarray:
        """f32 codes, before scales and bias."""
        order = recipe.replace(epilogue=Epilogue())
        if order not in self.found:
            sums = self._sums_of(recipe)
            total, kept = sums[0], _size(len(sums), COUNTS)
            if len(sums) > 1 or recipe.merge.start == "zero":
                with jax.default_device(jax.devices("cpu")[0]):
                    total = np.asarray(_merged(recipe.out, merging_of(recipe, kept), np.pad(sums, [(0, kept - len(sums)), (0, 0)])))
            self.found[order] = total[: self.size[0] * self.size[1]].reshape(self.size)
        return self.found[order]

    def _sums_of(self, recipe: KernelRecipe) -> np.ndarray:
        """f32 codes [S, OUTPUTS] of the slices' sums: all outputs, and then the first ones again."""
        key = recipe.a, recipe.b, recipe.cast, recipe.unit, recipe.slices
        if key not in self.sums:
            (rows, columns), count = self.size, len(places_of_slices(recipe.slices))
            run, order = run_of(recipe.replace(merge=Merge(), epilogue=Epilogue(), out=F32))
            chains = None
            if isinstance(recipe.unit, Lanes):
                chains, narrow = chains_of(recipe.unit), recipe.unit.product
                run = run._replace(unit=Lanes(fused=narrow is None, product=narrow), restarted=True)  # as without, where there is one chain
            order = order._replace(
                numbers=np.zeros(_size(count, COUNTS), bool), of_slices=np.zeros((0, 2), np.int32), total=np.zeros((), np.int32)
            )
            with jax.default_device(jax.devices("cpu")[0]):
                found = np.asarray(_sums(run, order, *self._operands(recipe), chains))
            self.sums[key] = found[:count, :rows, :columns].reshape(count, -1)[:, np.arange(OUTPUTS) % (rows * columns)]
        return self.sums[key]

    def _operands(self, recipe: KernelRecipe) -> tuple[jax.Array, jax.Array]:
        """Codes of A and B in the formats that are multiplied."""
        k = self.asked.a.shape[1]
        step = 1 << max(k.bit_length() - 2, 3)
        found = []
        for fmt, held, x in ((recipe.a, self.asked.held[0], self.asked.a), (recipe.b, self.asked.held[1], self.asked.b.T)):
            codes = np.ascontiguousarray(_filled(x, _size(len(x), SIZES), k + -k % step))
            found.append(jnp.asarray(codes) if fmt == held else operand_codes(fmt, recipe.cast, codes.view(DTYPES[held])))
        return found[0], found[1].T


@wide_vectors(0)
def _sums(run: Run, order: Order, a: jax.Array, b: jax.Array, chains: Chains | None) -> jax.Array:
    return sums_of_slices(run, order, a, b, chains)


@partial(jax.jit, static_argnums=0)
def _merged(waiting: Format, how: Merging, sums: jax.Array) -> jax.Array:
    return merged(waiting, how, sums)


@partial(jax.jit, static_argnums=0)
def _finished(finish: Finish, total: jax.Array, extras: Extras, ways: Ways) -> jax.Array:
    return finished(finish, total, extras, ways)


def _size(count: int, sizes: tuple[int, ...]) -> int:
    return next((size for size in sizes if size >= count), count)


def differing(recipe: KernelRecipe, asked: Sample) -> int:
    """How many outputs of the box a recipe does not give. NaN equals NaN, whatever its word."""
    return _unlike_all(recipe, given(recipe, asked), asked)


def surviving(recipes: Sequence[KernelRecipe], asked: Sample, *, signs: bool = True) -> list[KernelRecipe]:
    """The recipes that give every output of the box. signs: of zeros too."""
    computed = Computed(asked)
    return [recipe for recipe in recipes if not _unlike_all(recipe, computed.codes(recipe), asked, signs=signs)]


def _unlike_all(recipe: KernelRecipe, codes: np.ndarray, asked: Sample, *, signs: bool = True) -> int:
    m, n = asked.answer.shape
    return unlike(recipe.out, codes[np.arange(m) % len(codes)][:, np.arange(n) % codes.shape[1]], asked.answer, signs=signs)


def unlike(fmt: Format, x: np.ndarray, y: np.ndarray, *, signs: bool = True) -> int:
    """How many codes differ. signs: of zeros too."""
    differ = x != y
    if not differ.any():
        return 0
    one, other = (v[differ].view(DTYPES[fmt]).astype(np.float32) for v in (x, y))
    same = np.isnan(one) & np.isnan(other)
    return int((~same if signs else ~same & (one != other)).sum())
