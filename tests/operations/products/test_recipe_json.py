"""Recipes as JSON and back: every recipe in use, every kind of field, and files that are damaged or hostile."""

import json
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.changed_json import json_paths, replace_at

import tcemu
from tcemu.base.saved_files import DamagedFile
from tcemu.operations.products.recipe_json import MAX_NESTING
from tcemu.operations.products.recipes import RECIPES, Recipe, _supported_targets, get_recipe
from tcemu.operations.quantize.quantizer import Quantizer

NVFP4 = get_recipe("nvfp4_training")
MAKE: Any = Recipe  # takes spellings and names of formats too
MADE = {
    "what if": get_recipe("fp8", "H100").what_if(fraction_bits=20, result_bits=None, rounding="RN", alignment="RP", chain="k"),
    "exact steps": get_recipe("bf16").what_if(terms=1, fraction_bits=None, rounding="RN"),
    "multiplicand": get_recipe("fp8").what_if(multiplicand=tcemu.formats.F16, groups=2, chain=16, together=True),
    "every field": MAKE(
        "e4m3 wgmma", "H100", Quantizer("block", (1, 128), "power_of_two", saturate=True), Quantizer("block", (128, 128), rounding="SR"),
        promote=4, split_k=3, reduction="tree", dtype="bf16", backward="straight_through", name="mine \"ü\"", source="here",
    ),
    "one backward": get_recipe("fp8").replace(backward="bf16"),
    "a name of gradients": get_recipe("mxfp8", "B200").replace(backward=(get_recipe("bf16", "B200"), NVFP4)),
    "hadamard": NVFP4.replace(a=Quantizer("block", hadamard=(1, 1, 1, -1)), b=Quantizer("block", rows=16, hadamard=(1, 1, 1, -1))),
    "f16 sums": MAKE("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", "A100", dtype="f16"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_in_use_comes_back(name):
    for target in _supported_targets(name):
        recipe = get_recipe(name, target)
        back = Recipe.from_json(recipe.to_json())
        assert back == recipe and hash(back) == hash(recipe) and repr(back) == repr(recipe)
        assert (back.name, back.source) == (recipe.name, recipe.source)


@pytest.mark.parametrize("name", MADE)
def test_every_kind_of_field_comes_back(name):
    recipe = MADE[name]
    back = Recipe.from_json(recipe.to_json(indent=1))
    assert back == recipe and repr(back) == repr(recipe) and back.to_json() == recipe.to_json()


def test_arrays_come_back_with_their_shape():
    recipe = get_recipe("deepseek").what_if(fraction_bits=jnp.array([[13, 14]]), promote=jnp.int32(2))
    back: Any = Recipe.from_json(recipe.to_json())
    assert back.model.fraction_bits.tolist() == [[13, 14]] and back.model.fraction_bits.dtype == np.int32
    assert jnp.shape(back.promote) == () and int(back.promote) == 2


def test_a_model_of_an_older_file_lacks_later_fields():
    data = json.loads(MADE["what if"].to_json())
    assert data["model"].pop("clamp_step", "") is None
    assert Recipe.from_json(json.dumps(data)) == MADE["what if"]


def test_a_traced_recipe_is_refused():
    with pytest.raises(TypeError, match=r"Model.fraction_bits is traced .* outside jit"):
        jax.vmap(lambda bits: get_recipe("bf16").what_if(fraction_bits=bits).to_json() and bits)(jnp.arange(3, 5))


def test_saved_recipes_compute_the_same_bits():
    a, b = np.random.default_rng(0).standard_normal((2, 8, 32), np.float32)
    recipe = MADE["what if"]
    one, two = (tcemu.matmul(a, b.T, recipe=r) for r in (recipe, Recipe.from_json(recipe.to_json())))
    np.testing.assert_array_equal(np.asarray(one).view(np.uint32), np.asarray(two).view(np.uint32))


def test_other_files_are_refused_by_name():
    plain = json.loads(MADE["every field"].to_json())
    for change, said in (
        ({"version": 2}, "this is 'tcemu recipe', version 2; expected 'tcemu recipe', version 1"),
        ({"kind": "tcemu kernel recipe"}, "this is 'tcemu kernel recipe'"),
        ({"more": 1}, r"a recipe: unknown \['more'\]"),
        ({"op": 3}, "recipe.op: got 3; expected text"),
        ({"op": "e4m3 wgmmo"}, "wgmmo"),
        ({"target": "P100"}, "P100"),
        ({"dtype": "f8"}, "dtype: got 'f8'; expected a number format"),
        ({"promote": {"array": [1.5]}}, "recipe.promote: got .*expected an array of integers"),
        ({"promote": {"array": [[1], [1, 2]]}}, "recipe.promote"),
        ({"promote": {"array": [True]}}, "recipe.promote"),
        ({"promote": [4]}, "recipe.promote: got .*expected one value"),
        ({"split_k": True}, "split_k=True"),
        ({"backward": 3}, "recipe.backward: got 3"),
        ({"backward": {"dA": plain}}, "missing"),
        ({"a": {"scaling": "none"}}, "a: missing"),
        ({"name": None}, "recipe.name: got None; expected text"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            Recipe.from_json(json.dumps(plain | change))
    for text in ("", "[]", "null", "{", '{"kind": 1, "kind": 1}', "NaN", "[" * 100_000):
        with pytest.raises(DamagedFile):
            Recipe.from_json(text)


def test_nesting_is_limited_both_ways():
    recipe = get_recipe("bf16").replace(backward="exact")
    for _ in range(MAX_NESTING):
        recipe = recipe.replace(backward=recipe)
    assert Recipe.from_json(recipe.to_json()) == recipe
    with pytest.raises(ValueError, match="nested 17 deep"):
        recipe.replace(backward=recipe).to_json()
    text = json.loads(get_recipe("bf16").replace(backward="exact").to_json())
    inner = {name: value for name, value in text.items() if name not in ("kind", "version")}
    for _ in range(MAX_NESTING + 1):
        inner = {**inner, "backward": {"both": inner}}
    with pytest.raises(DamagedFile, match="nested 17 deep"):
        Recipe.from_json(json.dumps(text | {"backward": {"both": inner}}))


JUNK = (None, True, -1, 0, 1.5, 10**40, "", "x", "bf16", [], [1], {}, {"array": []}, {"array": [10**12]}, [[[]]], {"both": {}})


def test_a_changed_file_is_a_recipe_or_a_named_error():
    """Every place of a file holds some junk once; nothing but ValueError comes of it, and what is read can be written."""
    rng = random.Random(0)
    read = refused = 0
    for recipe in (MADE["every field"], get_recipe("deepseek"), MADE["what if"]):
        plain = json.loads(recipe.to_json())
        for path in json_paths(plain):
            for junk in rng.sample(JUNK, 5):
                changed = replace_at(plain, path, junk)
                try:
                    back = Recipe.from_json(json.dumps(changed))
                except ValueError:
                    refused += 1
                else:
                    read += 1
                    assert json.loads(back.to_json()).keys() == plain.keys()
    assert refused > 300 and read > 10


def test_dumps_takes_kernel_recipes_alone():
    with pytest.raises(TypeError, match=r"got Recipe; expected a tcemu.replay.KernelRecipe. A tcemu.Recipe has to_json\(\)"):
        tcemu.replay.dumps(get_recipe("bf16"))  # type: ignore[arg-type]
    for other in (None, "bf16", {}, lambda x: x):
        with pytest.raises(TypeError, match=r"expected a tcemu\.replay\.KernelRecipe"):
            tcemu.replay.dumps(other)  # type: ignore[arg-type]
