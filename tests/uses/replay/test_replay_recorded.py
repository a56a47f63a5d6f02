"""Words that cuBLAS and XLA gave on an H200, and the recipes that were found there: `matmul` by them gives the words, on any machine."""

import base64
import json
import lzma
import zlib
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu import replay
from tcemu.formats import BF16, F32, FORMATS, TF32
from tcemu.operations.products.library.kernel_json import from_dict
from tcemu.uses.replay.black_box import DTYPES, EpilogueCodes, codes_to_float64
from tcemu.uses.replay.drawn_matrices import draw_matrices
from tcemu.uses.replay.recipe_results import Sample, count_mismatches, select_matching
from tcemu.uses.replay.summation_levels import equivalence_key

RECORDED = json.loads(lzma.decompress((Path(__file__).parents[2] / "golden" / "replay.json.xz").read_bytes()))
WORDS = {f"{w['survey']} {w['m']}x{w['n']}x{w['k']}": w for w in RECORDED["words"]}
USUAL = (
    "torch-f16 333x78x1000", "torch-e4m3 64x64x8192", "torch-tf32 256x256x1024", "torch-e4m3-rows-bias 128x128x128",
)  # fmt: skip
USUAL_FORMS = ("torch-e4m3-rows-bias 128x128x128",)


def recorded_sample(word):
    """The recorded words as a sample: the operands are drawn again, and are those that were recorded."""
    recipe = from_dict(word["recipe"])
    rows, columns, out = word["rows"], word["columns"], FORMATS[word["out"]]
    held = tuple(F32 if fmt == TF32 else fmt for fmt in (recipe.a, recipe.b))
    a, b = draw_matrices(word["kind"], word["seed"], held, (rows, columns, word["k"]))
    form, besides = recipe_form(recipe), epilogue_operands(recipe, word)
    given = [a, b, *(x for x in besides if x is not None)]
    assert [zlib.crc32(np.ascontiguousarray(x).tobytes()) for x in given] == word["crc"]
    codes = np.frombuffer(base64.b64decode(word["codes"]), out.dtype).reshape(rows, columns)
    return Sample(word["kind"], held, a, b, codes, form, besides)


def recipe_form(recipe):
    """What the product took besides A and B."""
    fmt, _, of = (recipe.conditions.bias or "").partition(" ")
    return replay.ProductForm(recipe.conditions.scales, fmt or None, of or "columns", recipe.epilogue.alpha, recipe.epilogue.beta)


def epilogue_operands(recipe, word):
    """Scales and a bias as they were kept."""
    form, (rows, columns) = recipe_form(recipe), (word["rows"], word["columns"])
    tall, wide = ((rows, 1), (1, columns)) if form.scales == "rows" else ((), ())
    shapes = {"scale_a": tall, "scale_b": wide, "bias": (columns,) if form.bias_shape == "columns" else (rows, columns)}
    return EpilogueCodes(
        **{
            name: np.frombuffer(base64.b64decode(text), form.formats[name].dtype).reshape(shapes[name])
            for name, text in word.get("besides", {}).items()
        }
    )


@pytest.mark.parametrize("name", sample_cases(WORDS, USUAL, str))
def test_the_words_of_a_library(name):
    word = WORDS[name]
    asked, recipe = recorded_sample(word), from_dict(word["recipe"])
    more = [recorded_sample(word | one) for one in word.get("more_words", ())]
    assert [count_mismatches(recipe, one) for one in (asked, *more)] == [0] * (1 + len(more))
    exact, form = codes_to_float64(asked.operand_formats[0], asked.a) @ codes_to_float64(asked.operand_formats[1], asked.b), asked.form
    given = {name: codes_to_float64(form.formats[name], codes) for name, codes in asked.epilogue._asdict().items() if codes is not None}
    factor = form.alpha * given.get("scale_a", 1) * given.get("scale_b", 1)
    wanted, ours = factor * exact + form.beta * given.get("bias", 0), asked.answer.view(DTYPES[recipe.dtype]).astype(float)
    assert (np.abs(ours - wanted) <= 0.02 * np.abs(wanted) + 0.2 * np.sqrt(word["k"]) * np.abs(factor)).all()


FORMS = {name: word for name, word in WORDS.items() if word.get("more_words")}


@pytest.mark.parametrize("name", sample_cases(FORMS, USUAL_FORMS, str))
def test_the_words_show_how_scales_and_a_bias_enter(name):
    """Of all ways one gives the words of every kind of scales and biases, but for the sign of a zero, which few words show."""
    word = FORMS[name]
    recipe = from_dict(word["recipe"])
    ways = {equivalence_key(way): way for way in (recipe.replace(epilogue=e) for e in recipe_form(recipe).possible_epilogues(recipe.dtype))}
    left = list(ways.values())
    for one in (word, *word["more_words"]):
        left = select_matching(left, recorded_sample(word | one))
    assert len(ways) > 1 and {way.epilogue.plus_zero for way in left} >= {recipe.epilogue.plus_zero}
    assert {replace(way.epilogue, plus_zero=True) for way in left} == {replace(recipe.epilogue, plus_zero=True)}


def test_another_order_has_other_words():
    """The control: one slice in place of six."""
    word = WORDS["torch-f16 64x64x8192"]
    recipe = from_dict(word["recipe"])
    assert len(recipe.slices.edges) == 7 and recipe.slices.edges[1] == 1408
    assert count_mismatches(recipe.replace(slices=recipe.slices.single(8192)), recorded_sample(word)) > 0


def test_the_shapes_that_were_predicted_and_found():
    """As others measured them on an H100, and as this project had found by hand."""
    cuts = {
        "torch-f16 64x64x8192": (6, 1408), "torch-e4m3 64x64x8192": (3, 2816), "torch-e4m3 128x128x16384": (6, 2816),
        "torch-f16 128x128x16384": (12, 1408), "torch-tf32 256x256x1024": (8, 128), "torch-tf32 16x4096x4096": (8, 512),
    }  # fmt: skip
    for name, (count, first) in cuts.items():
        edges = from_dict(WORDS[name]["recipe"]).slices.edges
        assert (len(edges) - 1, edges[1]) == (count, first), name
    fault = from_dict(WORDS["torch-f16 64x64x11528"]["recipe"])
    assert fault.slices.dropped == 8 and "LEFT OUT" in str(fault)  # as on an H100: K mod 64 = 8, and 9 slices of 20 tiles of 64
    assert from_dict(WORDS["jax-f16 64x64x11528"]["recipe"]).slices.dropped == 0
    assert {w["recipe"]["unit"].get("steps", {}).get("residue") for w in WORDS.values()} >= {None, 32, 64}


# ---- a model's products


MODEL = json.loads(lzma.decompress((Path(__file__).parents[2] / "golden" / "replay_model.json.xz").read_bytes()))
BY_SHAPE: dict[str, list] = {}
for product in MODEL["products"]:
    BY_SHAPE.setdefault(f"{product['m']}x{product['n']}x{product['k']}", []).append(product)


def bf16(text, *shape):
    return np.frombuffer(base64.b64decode(text), DTYPES[BF16]).reshape(shape)


@pytest.mark.parametrize("shape", sample_cases(BY_SHAPE, ("96x256x1024",), str))
def test_the_products_of_a_model(shape):
    """A small GPT in bf16 by JAX on an H200: rows and columns of each product, all products of one shape at once."""
    kept = BY_SHAPE[shape]
    m, n, k = (kept[0][name] for name in "mnk")
    a, b, d = (
        np.stack([bf16(p[name], *size) for p in kept])
        for name, size in (("a", (-1, k)), ("b", (k, -1)), ("d", (len(bf16(kept[0]["a"], -1, k)), -1)))
    )
    recipe = replay.get_kernel_recipe(MODEL["library"], m, n, k)
    ours = np.asarray(tcemu.matmul(a, b, recipe=recipe.without_shape(), dtype=jnp.bfloat16))
    assert (ours.view(np.uint16) == d.view(np.uint16)).all() and d.size == 32 * len(kept)


def test_all_products_of_the_model_were_kept():
    assert len(MODEL["products"]) == 29 and len(BY_SHAPE) == 6 and MODEL["gpu"] == "NVIDIA H200"
