"""Results of recipes on drawn operands, compared with those of a black box to eliminate candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.base.compilation import jit_wide_vectors
from tcemu.base.meshes import on_local_device
from tcemu.engine.arithmetic.sum_tree import Join, Node, Waiting, evaluate, join_as_data, join_values
from tcemu.engine.formats.number_formats import BF16, F32, Format
from tcemu.operations.products.library.kernel_order import merge_node, slice_indices
from tcemu.operations.products.library.kernel_recipe import Epilogue, KernelRecipe, Lanes
from tcemu.operations.products.library.kernel_sums import (
    ChainFlags,
    CodeAddition,
    EpilogueFlags,
    EpilogueOperands,
    EpiloguePlan,
    KernelProgram,
    apply_epilogue,
    epilogue_operands,
    operand_codes,
    plan_epilogue,
    product_sums,
    slices_as_data,
    static_unit,
)
from tcemu.uses.replay.black_box import DTYPES, PLAIN_FORM, BlackBox, EpilogueCodes, FormatPair, ProductForm, repeat
from tcemu.uses.replay.drawn_matrices import draw_epilogue, draw_matrices

MAX_ROWS = 48  # distinct rows of A and columns of B per comparison; other rows and columns repeat these, so that every output is compared
ROW_SIZES = (1, 2, 4, 8, 16, 24, 32, MAX_ROWS)  # numbers of rows after padding, so that compiled programs are shared
MAX_OUTPUTS = MAX_ROWS * MAX_ROWS
F32_ONE = np.uint32(0x3F800000)  # f32
SLICE_COUNTS = (8, 64, 512)  # numbers of slice sums after padding
SAMPLE_TRIES = 36  # draws of operands to distinguish two recipes
DISTINGUISHING_KINDS = ("window", "zeros", "window", "brink", "window", "subnormal", "window", "ties", "window", "tiny", "window", "brink")
LAST_TRIES = 12  # further draws, of the kind "faint", where f32 cannot represent every product


class Sample(NamedTuple):
    """One call on drawn operands."""

    kind: str
    operand_formats: FormatPair
    a: np.ndarray  # codes of the distinct rows
    b: np.ndarray  # codes of the distinct columns
    answer: np.ndarray  # codes of all outputs, [M, N]
    form: ProductForm = PLAIN_FORM
    epilogue: EpilogueCodes = EpilogueCodes()  # for the distinct rows and columns


def draw_sample(
    shape: tuple[int, int, int],
    operand_formats: FormatPair,
    form: ProductForm,
    kind: str,
    seed: int,
    epilogue_kind: str | None = None,
    reference_recipe: KernelRecipe | None = None,
    max_rows: int = MAX_ROWS,
) -> Sample:
    """Draw a sample without an answer.

    Args:
        shape: M, N and K.
        operand_formats: Formats of A and B.
        form: What the product takes besides A and B.
        kind: Kind of the draws of A and B.
        seed: Seed of all draws.
        epilogue_kind: Kind of the draws of scales and bias, for the totals of `reference_recipe`. None: neutral scales and bias.
        reference_recipe: See `epilogue_kind`.
        max_rows: Largest number of distinct rows and columns.
    """
    m, n, k = shape
    size = min(m, max_rows), min(n, max_rows)
    a, b = draw_matrices(kind, seed, operand_formats, (*size, k))
    plain = Sample(kind, operand_formats, a, b, np.zeros((0, 0)), form)
    if form.is_plain:
        return plain
    if epilogue_kind is None:
        return plain._replace(epilogue=form.neutral_epilogue(*size))
    assert reference_recipe is not None
    totals = RecipeResults(plain).totals(reference_recipe).view(np.float32).astype(np.float64)
    return plain._replace(epilogue=draw_epilogue(form, epilogue_kind, seed, totals))


def answer_sample(black_box: BlackBox, sample: Sample) -> Sample:
    """Call the black box on a sample, with its rows and columns repeated."""
    m, n, _ = black_box.shape
    return sample._replace(answer=black_box(*repeat_operands(sample, m, n), sample.epilogue.repeat(m, n)))


def repeat_operands(sample: Sample, m: int, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Repeat the rows of A and the columns of B up to m and n, in row-major order."""
    return repeat(sample.a, 0, m), repeat(sample.b, 1, n)


def ask_sample(
    black_box: BlackBox, kind: str, seed: int, epilogue_kind: str | None = None, reference_recipe: KernelRecipe | None = None
) -> Sample:
    """Draw a sample and call the black box on it; see `draw_sample`."""
    form = black_box.shape, black_box.operand_formats, black_box.form
    return answer_sample(black_box, draw_sample(*form, kind, seed, epilogue_kind, reference_recipe))


def find_distinguishing_sample(
    black_box: BlackBox, recipes: Sequence[KernelRecipe], seed: int, hows: Sequence[str | None]
) -> Sample | None:
    """Find drawn operands on which the first recipe and another one differ, without a call. Returns None if none occurred."""
    kinds = [DISTINGUISHING_KINDS[number % len(DISTINGUISHING_KINDS)] for number in range(SAMPLE_TRIES)]
    if black_box.operand_formats[0] in (F32, BF16):
        kinds += ["faint"] * LAST_TRIES
    form = black_box.shape, black_box.operand_formats, black_box.form
    for number, kind in enumerate(kinds):
        sample = draw_sample(*form, kind, seed + number, hows[number % len(hows)], recipes[0])
        computed = RecipeResults(sample)
        first = computed.result_codes(recipes[0])
        if any(count_unequal_codes(other.dtype, computed.result_codes(other), first) for other in recipes[1:3]):
            return sample
    return None


def _pad_rows(x: np.ndarray, rows: int, k: int) -> np.ndarray:
    """Pad with rows equal to the first, and with indices along K that no order contains."""
    x = np.concatenate([x, np.repeat(x[:1], rows - len(x), 0)])
    return np.pad(x, [(0, 0), (0, k - x.shape[1])])


def recipe_codes(recipe: KernelRecipe, sample: Sample) -> np.ndarray:
    """Compute the codes of a recipe on the distinct rows and columns of a sample."""
    return RecipeResults(sample).result_codes(recipe)


class RecipeResults:
    """Results of recipes on one sample, computed on a CPU.

    Recipes that differ only in the merge of their slices share the slices' sums. Recipes that differ only in their epilogues share totals.
    All arrays are padded to few sizes, so that compiled programs are shared too.
    """

    def __init__(self, sample: Sample):
        self.sample = sample
        self.size = len(sample.a), sample.b.shape[1]
        self.sums: dict = {}
        self.found_totals: dict = {}

    def result_codes(self, recipe: KernelRecipe) -> np.ndarray:
        """Compute the codes of the results."""
        formats, (a, b, bias) = self.sample.form.formats, self.sample.epilogue

        def flat(codes: np.ndarray | None, fmt: Format | None) -> np.ndarray | None:
            if codes is None or fmt is None:
                return None
            return np.resize(np.broadcast_to(codes, self.size).reshape(-1), MAX_OUTPUTS).view(DTYPES[fmt])

        total, form, epilogue = self.totals(recipe), self.sample.form, recipe.epilogue
        with on_local_device("cpu"):
            extras = epilogue_operands(epilogue, (flat(a, formats["scale_a"]), flat(b, formats["scale_b"])), flat(bias, formats["bias"]))
            missing = (2 if form.scales else int(form.beta != 1)) - len(extras.factors)
            factors = [np.full(MAX_OUTPUTS, F32_ONE)] * missing + [np.broadcast_to(np.asarray(x), MAX_OUTPUTS) for x in extras.factors]
            finish = plan_epilogue(epilogue, recipe.dtype)
            ways = finish.flags._replace(plus_zero=epilogue.scaled and epilogue.plus_zero)  # unscaled totals are multiplied by one
            shared = EpiloguePlan(
                recipe.dtype, saturate=finish.saturate, between=finish.between or (None if recipe.dtype == F32 else recipe.dtype)
            )
            codes = np.asarray(_jitted_finish(shared, np.resize(total, MAX_OUTPUTS), extras._replace(factors=tuple(factors)), ways))
        return codes[: total.size].reshape(self.size)

    def totals(self, recipe: KernelRecipe) -> np.ndarray:
        """Compute f32 codes before scales and bias."""
        order = recipe.replace(epilogue=Epilogue())
        if order not in self.found_totals:
            sums = self._slice_sums(recipe)
            total, size = sums[0], _next_size(len(sums), SLICE_COUNTS)
            if len(sums) > 1 or recipe.merge.start == "zero":
                with on_local_device("cpu"):
                    flush = np.array(isinstance(recipe.unit, Lanes) and recipe.unit.flush)
                    merge = _shared_merge(recipe, len(sums), size)
                    total = np.asarray(_jitted_merge(merge, flush, np.pad(sums, [(0, size - len(sums)), (0, 0)])))
            self.found_totals[order] = total[: self.size[0] * self.size[1]].reshape(self.size)
        return self.found_totals[order]

    def _slice_sums(self, recipe: KernelRecipe) -> np.ndarray:
        """Compute f32 codes [S, OUTPUTS] of the slices' sums: all outputs, followed by a repetition of the first ones."""
        key = recipe.a, recipe.b, recipe.cast, recipe.unit, recipe.slices
        if key not in self.sums:
            (rows, columns), count = self.size, len(slice_indices(recipe.slices))
            unit, flags = static_unit(recipe.unit), None
            if isinstance(recipe.unit, Lanes):
                flags, narrow = ChainFlags(np.array(recipe.unit.fused), np.array(recipe.unit.flush)), recipe.unit.product
                unit = Lanes(fused=narrow is None, product=narrow)
            program = KernelProgram(unit, (recipe.a, recipe.b), plan_epilogue(Epilogue(), F32))
            tree = slices_as_data(recipe.unit, recipe.slices, _next_size(count, SLICE_COUNTS), closing=True)
            with on_local_device("cpu"):
                sums = np.asarray(_jitted_sums(program, tree, *self._operands(recipe), flags))
            self.sums[key] = sums[:count, :rows, :columns].reshape(count, -1)[:, np.arange(MAX_OUTPUTS) % (rows * columns)]
        return self.sums[key]

    def _operands(self, recipe: KernelRecipe) -> tuple[jax.Array, jax.Array]:
        """Return codes of A and B in the formats that are multiplied."""
        k = self.sample.a.shape[1]
        step = 1 << max(k.bit_length() - 2, 3)
        codes_of_both = []
        for fmt, stored, x in (
            (recipe.a, self.sample.operand_formats[0], self.sample.a),
            (recipe.b, self.sample.operand_formats[1], self.sample.b.T),
        ):
            codes = np.ascontiguousarray(_pad_rows(x, _next_size(len(x), ROW_SIZES), k + -k % step))
            codes_of_both.append(jnp.asarray(codes) if fmt == stored else operand_codes(fmt, recipe.cast, codes.view(DTYPES[stored])))
        return codes_of_both[0], codes_of_both[1].T


@jit_wide_vectors(0)
def _jitted_sums(program: KernelProgram, tree: Node, a: jax.Array, b: jax.Array, flags: ChainFlags | None) -> jax.Array:
    return evaluate(tree, product_sums(program, a, b, flags))


def _shared_merge(recipe: KernelRecipe, count: int, size: int) -> Join:
    """Return the merge of `count` of `size` sums, with all of its roundings as data."""
    merge, narrow = recipe.merge, recipe.merge.partial != F32
    waiting = Waiting(recipe.dtype, np.array(narrow and merge.rounds_slices), np.array(narrow and merge.rounds_running))
    return replace(join_as_data(merge_node(merge, None), count, size, size), waiting=waiting)


@jax.jit
def _jitted_merge(merge: Join, flush: jax.Array, sums: jax.Array) -> jax.Array:
    return join_values(merge, sums, CodeAddition(flush))


@partial(jax.jit, static_argnums=0)
def _jitted_finish(finish: EpiloguePlan, total: jax.Array, extras: EpilogueOperands, ways: EpilogueFlags) -> jax.Array:
    return apply_epilogue(finish, total, extras, ways)


def _next_size(count: int, sizes: tuple[int, ...]) -> int:
    return next((size for size in sizes if size >= count), count)


def count_mismatches(recipe: KernelRecipe, sample: Sample) -> int:
    """Count the outputs of the black box that a recipe does not give. All NaNs are equal."""
    return _count_sample_mismatches(recipe, recipe_codes(recipe, sample), sample)


def select_matching(recipes: Sequence[KernelRecipe], sample: Sample, *, signs: bool = True) -> list[KernelRecipe]:
    """Select the recipes that give every output of the black box. `signs` compares the signs of zeros too."""
    computed = RecipeResults(sample)
    return [recipe for recipe in recipes if not _count_sample_mismatches(recipe, computed.result_codes(recipe), sample, signs=signs)]


def _count_sample_mismatches(recipe: KernelRecipe, codes: np.ndarray, sample: Sample, *, signs: bool = True) -> int:
    m, n = sample.answer.shape
    return count_unequal_codes(recipe.dtype, repeat(repeat(codes, 0, m), 1, n), sample.answer, signs=signs)


def count_unequal_codes(fmt: Format, x: np.ndarray, y: np.ndarray, *, signs: bool = True) -> int:
    """Count the codes that differ. All NaNs are equal. `signs` compares the signs of zeros too."""
    differ = x != y
    if not differ.any():
        return 0
    one, other = (v[differ].view(DTYPES[fmt]).astype(np.float32) for v in (x, y))
    same = np.isnan(one) & np.isnan(other)
    return int((~same if signs else ~same & (one != other)).sum())
