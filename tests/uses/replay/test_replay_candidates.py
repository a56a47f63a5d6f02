"""What a fingerprint computes of its candidates is what `matmul` gives: merges, chains and epilogues are data of a few shared programs."""

from typing import NamedTuple

import numpy as np
import pytest
from support.sampling import sample_cases

from tcemu.formats import BF16, E4M3, F16, F32, TF32
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Lanes, Merge, Slices, Steps
from tcemu.operations.products.library.kernel_sums import epilogue_operands, kernel_product_codes, operand_codes, plan_kernel
from tcemu.replay import Epilogue, ProductForm
from tcemu.uses.replay.black_box import DTYPES
from tcemu.uses.replay.drawn_matrices import epilogue_kinds
from tcemu.uses.replay.order_candidates import rounding_variants
from tcemu.uses.replay.recipe_results import RecipeResults, draw_sample

WGMMA = "wgmma.mma_async.sync.aligned.m64n64k{}.f32.{}.{}"
M, N, K = 5, 7, 96


def steps(fmt, k, **options):
    return Steps(WGMMA.format(k, fmt, fmt), "sm_90a", **options)  # pyright: ignore[reportArgumentType]


def every_variant(recipe):
    return list({v: None for rare in (False, True) for v in rounding_variants(recipe, rare=rare)})


class Case(NamedTuple):
    recipes: list[KernelRecipe]
    form: ProductForm = ProductForm()


def add_epilogues(recipe, form):
    return Case([recipe.replace(epilogue=e) for e in form.possible_epilogues(recipe.dtype)], form)


EVEN = Slices.even(K, 3, 32)
CHAIN = KernelRecipe(F16, F16, F16, steps(F16, 16), EVEN)
WHOLE = CHAIN.replace(slices=Slices.single(K))
FP8 = KernelRecipe(E4M3, E4M3, BF16, steps(E4M3, 32), Slices.single(K))
CASES = {
    "merges": Case(every_variant(CHAIN)),
    "serial": Case([CHAIN.replace(merge=Merge(partial=F16, start="zero", **how)) for how in ({}, {"serial": True}, {"atomic": True})]),
    "merges backwards": Case(every_variant(CHAIN.replace(merge=Merge("descending")))),
    "merges of many": Case(every_variant(KernelRecipe(F16, F16, F16, Lanes(), Slices.even(K, 12, 8)))),
    "one slice that waits or not": Case([WHOLE.replace(merge=Merge(partial=F16, start=start)) for start in ("first", "zero")]),
    "one slice": Case(every_variant(KernelRecipe(BF16, BF16, BF16, steps(BF16, 16), Slices.single(K)))),
    "casts": Case(every_variant(KernelRecipe(TF32, TF32, F32, steps(TF32, 8), EVEN))),
    "restarts": Case([FP8.replace(unit=steps(E4M3, 32, restart=restart)) for restart in (None, 32)]),
    "lanes of f32": Case(every_variant(KernelRecipe(F32, F32, F32, Lanes(4, 2), Slices.single(K)))),
    "lanes of f32 in slices": Case(every_variant(KernelRecipe(F32, F32, F32, Lanes(4, 2, chunk=4), EVEN))),
    "lanes of bf16": Case(every_variant(KernelRecipe(BF16, BF16, BF16, Lanes(8, 1, join="tree"), Slices.single(K)))),
    "saturated": Case([FP8.replace(dtype=F16, epilogue=Epilogue(saturate=flag)) for flag in (False, True)]),
    "scales": add_epilogues(FP8, ProductForm("tensor")),
    "scales and bias": add_epilogues(FP8, ProductForm("rows", "bf16")),
    "alpha and beta": add_epilogues(FP8.replace(dtype=F16), ProductForm(bias="f16", bias_shape="outputs", alpha=1.7, beta=0.3)),
    "beta": add_epilogues(FP8.replace(dtype=F16), ProductForm(bias="f32", beta=-0.3)),
    "a scale of a plain product": Case([FP8.replace(epilogue=Epilogue(True, alpha=alpha)) for alpha in (1, 0.7)]),
}  # fmt: skip


def matmul_codes(recipe, asked):
    """Codes, by a program of this recipe alone."""
    held = (F32, F32) if recipe.a == TF32 else (recipe.a, recipe.b)
    a, b = (
        operand_codes(fmt, recipe.cast, np.ascontiguousarray(x).view(DTYPES[of]))
        for fmt, of, x in zip((recipe.a, recipe.b), held, (asked.a, asked.b), strict=True)
    )
    formats = asked.form.formats
    floats = {name: None if x is None else x.view(DTYPES[formats[name]]) for name, x in asked.epilogue._asdict().items()}
    extras = epilogue_operands(recipe.epilogue, (floats["scale_a"], floats["scale_b"]), floats["bias"])
    return np.asarray(kernel_product_codes(*plan_kernel(recipe), a, b, extras))


@pytest.mark.parametrize("name", sample_cases(CASES, ("serial",), str))
def test_candidates_are_computed_as_matmul_computes_them(name):
    recipes, form = CASES[name]
    first = recipes[0]
    held = (F32, F32) if first.a == TF32 else (first.a, first.b)
    differ = 0
    for number, kind in enumerate(("late", "zeros", "tiny", "huge")):
        how = None if form.is_plain else epilogue_kinds(form)[number % len(epilogue_kinds(form))]
        asked = draw_sample((M, N, K), held, form, kind, 5, how, first)
        computed = RecipeResults(asked)
        codes = [computed.result_codes(recipe) for recipe in recipes]
        for recipe, own in zip(recipes, codes, strict=True):
            wanted = matmul_codes(recipe, asked)
            assert own.dtype == wanted.dtype and (own == wanted).all(), f"{kind}\n{recipe}"
        differ += sum(bool((own != codes[0]).any()) for own in codes)
    assert len(recipes) > 1 and differ > 0  # the recipes are not one
