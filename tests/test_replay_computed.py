"""What a fingerprint computes of its candidates is what `matmul` gives: merges, chains and epilogues are data of a few shared programs."""

from typing import NamedTuple

import numpy as np
import pytest
from support.sampling import sampled

from tcemu.formats import BF16, E4M3, F16, F32, TF32
from tcemu.linalg.kernel_recipes import KernelRecipe, Lanes, Merge, Slices, Steps
from tcemu.linalg.kernel_sums import operand_codes, outputs
from tcemu.linalg.kernel_totals import extras_of
from tcemu.replay import Epilogue, Form
from tcemu.replay.boxes import DTYPES
from tcemu.replay.candidates import variants
from tcemu.replay.comparison import Asking, Computed, drawn
from tcemu.replay.extras import hows_of

WGMMA = "wgmma.mma_async.sync.aligned.m64n64k{}.f32.{}.{}"
M, N, K = 5, 7, 96


def steps(fmt, k, **options):
    return Steps(WGMMA.format(k, fmt, fmt), "sm_90a", **options)  # pyright: ignore[reportArgumentType]


def all_of(recipe):
    return list({v: None for rare in (False, True) for v in variants(recipe, rare=rare)})


class Case(NamedTuple):
    recipes: list[KernelRecipe]
    form: Form = Form()


def with_epilogues(recipe, form):
    return Case([recipe.replace(epilogue=e) for e in form.epilogues(recipe.out)], form)


EVEN = Slices.even(K, 3, 32)
CHAIN = KernelRecipe(F16, F16, F16, steps(F16, 16), EVEN)
WHOLE = CHAIN.replace(slices=Slices.whole(K))
FP8 = KernelRecipe(E4M3, E4M3, BF16, steps(E4M3, 32), Slices.whole(K))
CASES = {
    "merges": Case(all_of(CHAIN)),
    "serial": Case([CHAIN.replace(merge=Merge(partial=F16, serial=serial, start="zero")) for serial in (False, True)]),
    "merges backwards": Case(all_of(CHAIN.replace(merge=Merge("descending")))),
    "merges of many": Case(all_of(KernelRecipe(F16, F16, F16, Lanes(), Slices.even(K, 12, 8)))),
    "one slice that waits or not": Case([WHOLE.replace(merge=Merge(partial=F16, start=start)) for start in ("first", "zero")]),
    "one slice": Case(all_of(KernelRecipe(BF16, BF16, BF16, steps(BF16, 16), Slices.whole(K)))),
    "casts": Case(all_of(KernelRecipe(TF32, TF32, F32, steps(TF32, 8), EVEN))),
    "restarts": Case([FP8.replace(unit=steps(E4M3, 32, restart=restart)) for restart in (None, 32)]),
    "lanes of f32": Case(all_of(KernelRecipe(F32, F32, F32, Lanes(4, 2), Slices.whole(K)))),
    "lanes of f32 in slices": Case(all_of(KernelRecipe(F32, F32, F32, Lanes(4, 2, chunk=4), EVEN))),
    "lanes of bf16": Case(all_of(KernelRecipe(BF16, BF16, BF16, Lanes(8, 1, join="tree"), Slices.whole(K)))),
    "saturated": Case([FP8.replace(out=F16, epilogue=Epilogue(saturate=flag)) for flag in (False, True)]),
    "scales": with_epilogues(FP8, Form("tensor")),
    "scales and bias": with_epilogues(FP8, Form("rows", "bf16")),
    "alpha and beta": with_epilogues(FP8.replace(out=F16), Form(bias="f16", of="outputs", alpha=1.7, beta=0.3)),
    "beta": with_epilogues(FP8.replace(out=F16), Form(bias="f32", beta=-0.3)),
    "a scale of a plain product": Case([FP8.replace(epilogue=Epilogue(True, alpha=alpha)) for alpha in (1, 0.7)]),
}  # fmt: skip


def by_matmul(recipe, asked):
    """Codes, by a program of this recipe alone."""
    held = (F32, F32) if recipe.a == TF32 else (recipe.a, recipe.b)
    a, b = (
        operand_codes(fmt, recipe.cast, np.ascontiguousarray(x).view(DTYPES[of]))
        for fmt, of, x in zip((recipe.a, recipe.b), held, (asked.a, asked.b), strict=True)
    )
    formats = asked.form.formats
    floats = {name: None if x is None else x.view(DTYPES[formats[name]]) for name, x in asked.besides._asdict().items()}
    return np.asarray(outputs(recipe, a, b, extras_of(recipe.epilogue, (floats["scale_a"], floats["scale_b"]), floats["bias"])))


@pytest.mark.parametrize("name", sampled(CASES, ("beta",), str))
def test_candidates_are_computed_as_matmul_computes_them(name):
    recipes, form = CASES[name]
    first = recipes[0]
    held = (F32, F32) if first.a == TF32 else (first.a, first.b)
    differ = 0
    for number, kind in enumerate(("late", "zeros", "tiny", "huge")):
        how = None if form.plain else hows_of(form)[number % len(hows_of(form))]
        asked = drawn(Asking((M, N, K), held, form, kind, 5, how), first)
        computed = Computed(asked)
        codes = [computed.codes(recipe) for recipe in recipes]
        for recipe, own in zip(recipes, codes, strict=True):
            wanted = by_matmul(recipe, asked)
            assert own.dtype == wanted.dtype and (own == wanted).all(), f"{kind}\n{recipe}"
        differ += sum(bool((own != codes[0]).any()) for own in codes)
    assert len(recipes) > 1 and differ > 0  # the recipes are not one
