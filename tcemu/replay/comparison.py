"""What recipes give on drawn operands, beside what a box gives: the elimination of candidates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.formats import F32, Format
from tcemu.linalg.kernel_epilogue import Epilogue
from tcemu.linalg.kernel_recipes import KernelRecipe
from tcemu.linalg.kernel_sums import operand_codes, product, run_of
from tcemu.linalg.kernel_totals import Extras, Finish, extras_of, finish_of, finished
from tcemu.replay.boxes import DTYPES, Box
from tcemu.replay.data import operands
from tcemu.replay.extras import besides
from tcemu.replay.forms import PLAIN, Besides, Form

MOST = 48  # different rows of A, and columns of B, in one comparison: the others repeat them, so that every output is compared
SIZES = (1, 2, 4, 8, 16, 24, 32, MOST)  # to which they are filled up, so that programs are shared


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
    found = totals(totals_by, plain).view(np.float32).astype(np.float64)
    return plain._replace(besides=besides(asking.form, asking.how, asking.seed, found))


def answered(box: Box, asked: Sample) -> Sample:
    """One call of the box about a sample, whose rows and columns are repeated."""
    m, n, _ = box.shape
    a, b = asked.a[np.arange(m) % len(asked.a)], asked.b[:, np.arange(n) % asked.b.shape[1]]
    return asked._replace(answer=box(a, b, asked.besides.repeated(m, n)))


def sample(box: Box, kind: str, seed: int, how: str | None = None, totals_by: KernelRecipe | None = None) -> Sample:
    """Asks the box about drawn operands: see `drawn`."""
    return answered(box, drawn(Asking(box.shape, box.held, box.form, kind, seed, how), totals_by))


def telling_sample(box: Box, recipes: Sequence[KernelRecipe], seed: int, hows: Sequence[str | None]) -> Sample | None:
    """The first drawn operands on which the first recipe and another one give other bits, at no call; None where none were met."""
    for number in range(TRIES):
        kind, how = TELLING[number % len(TELLING)], hows[number % len(hows)]
        asked = drawn(Asking(box.shape, box.held, box.form, kind, seed + number, how), recipes[0])
        first = given(recipes[0], asked)
        if any(unlike(other.out, given(other, asked), first) for other in recipes[1:3]):
            return asked
    return None


def _filled(x: np.ndarray, rows: int, k: int) -> np.ndarray:
    """More rows, equal to the first, and more places along K, which no order names."""
    x = np.concatenate([x, np.repeat(x[:1], rows - len(x), 0)])
    return np.pad(x, [(0, 0), (0, k - x.shape[1])])


def given(recipe: KernelRecipe, asked: Sample) -> np.ndarray:
    """The codes that a recipe gives on the different rows and columns of a sample. Computed on a CPU."""
    if asked.form.plain:
        return _product(recipe, asked)
    return finished_totals(recipe, totals(recipe, asked), asked)


def totals(recipe: KernelRecipe, asked: Sample) -> np.ndarray:
    """f32 codes of a recipe's totals on the different rows and columns of a sample, before scales and bias."""
    return _product(recipe, asked, Finish(F32))


def _product(recipe: KernelRecipe, asked: Sample, finish: Finish | None = None) -> np.ndarray:
    rows, columns, k = len(asked.a), asked.b.shape[1], asked.a.shape[1]
    step = 1 << max(k.bit_length() - 2, 3)
    longer = k + -k % step
    with jax.default_device(jax.devices("cpu")[0]):
        a, b = (
            operand_codes(fmt, recipe.cast, np.ascontiguousarray(x).view(DTYPES[held]))
            for fmt, held, x in (
                (recipe.a, asked.held[0], _filled(asked.a, _size(rows), longer)),
                (recipe.b, asked.held[1], _filled(asked.b.T, _size(columns), longer)),
            )
        )
        run, order = run_of(recipe)
        run, extras = (run, extras_of(recipe.epilogue, (None, None), None)) if finish is None else (run._replace(finish=finish), Extras())
        codes = product(run, jax.tree.map(jnp.asarray, order), a, b.T, extras)
        return np.asarray(codes)[:rows, :columns]


@partial(jax.jit, static_argnums=0)
def _finished(finish: Finish, total: jax.Array, extras: Extras) -> jax.Array:
    return finished(finish, total, extras)


def finished_totals(recipe: KernelRecipe, total: np.ndarray, asked: Sample) -> np.ndarray:
    """The codes of the result, of totals that a recipe gave. Everything is brought to one size, so that programs are shared."""

    def flat(codes: np.ndarray | None, fmt: Format | None) -> np.ndarray | None:
        if codes is None or fmt is None:
            return None
        every = np.broadcast_to(codes, total.shape).reshape(-1)
        return np.resize(every, MOST * MOST).view(DTYPES[fmt])

    formats, (a, b, bias) = asked.form.formats, asked.besides
    with jax.default_device(jax.devices("cpu")[0]):
        scales = flat(a, formats["scale_a"]), flat(b, formats["scale_b"])
        extras = extras_of(recipe.epilogue, scales, flat(bias, formats["bias"]))
        held = jnp.asarray(np.resize(total.reshape(-1), MOST * MOST))
        codes = np.asarray(_finished(finish_of(recipe.epilogue, recipe.out), held, extras))
    return codes[: total.size].reshape(total.shape)


def _size(count: int) -> int:
    return next(size for size in SIZES if size >= count)


def differing(recipe: KernelRecipe, asked: Sample) -> int:
    """How many outputs of the box a recipe does not give. NaN equals NaN, whatever its word."""
    return _unlike_all(recipe, given(recipe, asked), asked)


def surviving(recipes: Sequence[KernelRecipe], asked: Sample, *, signs: bool = True) -> list[KernelRecipe]:
    """The recipes that give every output of the box. signs: of zeros too. Recipes that differ in their epilogues share their totals."""
    if asked.form.plain:
        return [recipe for recipe in recipes if not differing(recipe, asked)]
    found, known = [], {}
    for recipe in recipes:
        order = recipe.replace(epilogue=Epilogue())
        if order not in known:
            known[order] = totals(recipe, asked)
        if not _unlike_all(recipe, finished_totals(recipe, known[order], asked), asked, signs=signs):
            found.append(recipe)
    return found


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
