"""Recipes by name: everything that takes a recipe takes its name, also with a target, and what is said of a name that is none."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.sampling import sample_cases

import tcemu
from tcemu.operations.products.recipes import RECIPES, as_recipe

RNG = np.random.default_rng(0)
X, W = RNG.standard_normal((5, 128), np.float32), RNG.standard_normal((128, 3), np.float32)
EXPERTS, SIZES = RNG.standard_normal((2, 128, 3), np.float32), np.array([2, 3])
AXES = (((1,), (0,)), ((), ()))


def layer(params, x):
    return x @ params


def emulated_figures(policy):
    return tcemu.emulate(layer, policy)(W, X)


def figures(policies):
    return [(e.policy, e.relative_error, e.sum_error) for e in tcemu.compare(layer, policies, (W, X), results=False)]


def delayed_product(recipe):
    """The product; of a recipe that it does not take, what it says."""
    try:
        return tcemu.products.delayed_matmul(X, W, tcemu.products.DelayedScaling.start(2), recipe=recipe)
    except ValueError as error:
        if "delayed scaling keeps" not in str(error):
            raise
        return str(error)


TAKING = {  # everything public that takes a recipe, by its name
    "matmul": lambda recipe: tcemu.matmul(X, W, recipe=recipe),
    "products.delayed_matmul": delayed_product,
    "attention": lambda recipe: tcemu.attention(*[X[:, None]] * 3, recipe=recipe, flash=None),
    "dot_general": lambda recipe: tcemu.dot_general(recipe)(X, W, AXES),
    "ragged_dot": lambda recipe: tcemu.ragged_dot(recipe)(X, EXPERTS, SIZES),
    "emulate": emulated_figures,
    "emulate, by rules": lambda recipe: emulated_figures({"*": recipe}),
    "emulate, by pairs": lambda recipe: emulated_figures([(tcemu.policies.Where(role="weight"), recipe)]),
    "emulate, by a function": lambda recipe: emulated_figures(lambda product: recipe),
    "compare": figures,
    "compare, of several": lambda recipe: figures([recipe, tcemu.get_recipe("bf16", "sm_80")]),
    "compare, by name": lambda recipe: figures({"mine": recipe}),
    "policies.linear_only": lambda recipe: emulated_figures(tcemu.policies.linear_only(recipe)),
    "policies.skip_attention": lambda recipe: emulated_figures(tcemu.policies.skip_attention(recipe)),
    "policies.skip_ends": lambda recipe: emulated_figures(tcemu.policies.skip_ends(recipe, first=0, last=0)),
    "policies.to_json": tcemu.policies.to_json,
    "Recipe.replace": lambda recipe: repr(tcemu.get_recipe("fp8").replace(backward=recipe)),
    "Recipe.replace, a pair": lambda recipe: repr(tcemu.get_recipe("fp8").replace(backward=("tf32", recipe))),
}


OTHER_RECIPES = {"products.complex_matmul", "products.ozaki_matmul", "products.ozaki_matmul_codes"}  # see test_ozaki.py


def test_what_takes_a_recipe_is_here():
    """Found by the parameter, so that a new function cannot be forgotten."""
    faces = {"": tcemu, "products.": tcemu.products, "policies.": tcemu.policies}
    named = {prefix + name: getattr(face, name) for prefix, face in faces.items() for name in getattr(face, "__all__", vars(face))}
    functions = {name: f for name, f in named.items() if inspect.isfunction(f)}
    found = {name for name, f in functions.items() if {"recipe", "policy", "policies"} & set(inspect.signature(f).parameters)}
    assert found - OTHER_RECIPES == {name.partition(",")[0] for name in TAKING} - {"Recipe.replace"}


SLOW = (  # each compiles programs of its own
    "products.delayed_matmul", "attention", "ragged_dot", "compare", "compare, of several", "emulate, by pairs", "emulate, by a function",
    "policies.skip_attention", "policies.skip_ends",
)  # fmt: skip


@pytest.mark.parametrize("taking", sample_cases(TAKING, [name for name in TAKING if name not in SLOW]))
@pytest.mark.parametrize("name", sample_cases(("bf16", "FP8-E4M3 on L40S"), ("FP8-E4M3 on L40S",)))
def test_a_name_is_its_recipe(taking, name):
    """Bit for bit; and with the target in the name."""
    recipe = {"bf16": tcemu.get_recipe("bf16"), "FP8-E4M3 on L40S": tcemu.get_recipe("fp8_e4m3", "sm_89")}[name]
    by_name, by_recipe = TAKING[taking](name), TAKING[taking](recipe)
    assert np.array_equal(by_name, by_recipe) if isinstance(by_name, jax.Array) else by_name == by_recipe


@pytest.mark.parametrize("taking", TAKING)
def test_a_name_that_is_none_is_refused_everywhere(taking):
    with pytest.raises(ValueError, match=r"recipe 'bf61', did you mean '.*bf16.*'\?; expected one of f16, bf16, tf32"):
        TAKING[taking]("bf61")
    with pytest.raises(tcemu.Unsupported, match="unknown target 'H10O', did you mean H100"):
        TAKING[taking]("bf16 on H10O")
    with pytest.raises(tcemu.Unsupported, match="The recipe works on sm_89"):
        TAKING[taking]("fp8 on A100")


@pytest.mark.parametrize("name", RECIPES)
def test_every_name(name):
    for written in (name, name.upper(), name.replace("_", "-"), name.replace("_", " "), f" {name} "):
        assert tcemu.get_recipe(written) == tcemu.get_recipe(name) == as_recipe(written)
        assert tcemu.get_recipe(f"{written} on RTX 5090") == tcemu.get_recipe(name, "sm_120a")
        assert as_recipe(written, "RTX 5090") == tcemu.get_recipe(name, "sm_120a")


def test_a_target_is_said_once():
    with pytest.raises(ValueError, match="contains a target, and target='sm_90a'"):
        tcemu.get_recipe("bf16 on A100", "sm_90a")
    with pytest.raises(ValueError, match=r"recipe 'bf16 on', did you mean 'bf16' or 'f16'\?"):
        tcemu.get_recipe("bf16 on")
    with pytest.raises(ValueError, match="recipe 'bf16 on ': the target is missing, as in 'bf16 on H100'"):
        tcemu.get_recipe("bf16 on ")
    with pytest.raises(TypeError, match="expected a name such as 'bf16', got int"):
        tcemu.get_recipe(16)  # type: ignore[arg-type]
    assert as_recipe("bf16 on A100", "sm_90a").target == "sm_80"  # a recipe's gradients may be of another GPU


def test_gradients_by_name():
    """They are of the recipe's own target."""
    recipe = tcemu.get_recipe("fp8", "H100", backward=("tf32", "bf16"))
    assert recipe.gradients == (tcemu.get_recipe("tf32", "sm_90a"), tcemu.get_recipe("bf16", "sm_90a"))
    assert tcemu.get_recipe("fp8", "L4", backward="bf16").gradients == (tcemu.get_recipe("bf16", "sm_89"),) * 2


@pytest.mark.full
def test_gradients_flow_by_name():
    gradient = lambda recipe: jax.jit(jax.grad(lambda w: jnp.sin(tcemu.matmul(X, w, recipe=recipe)).sum()))(W)
    np.testing.assert_array_equal(gradient("fp8 on L4"), gradient(tcemu.get_recipe("fp8", "sm_89")))


def test_a_name_is_compiled_once():
    """The same words give the same Recipe, so that what was compiled for it serves again."""
    assert as_recipe("bf16 on H100") is as_recipe("bf16 on H100")
    traced = jax.jit(lambda x: tcemu.matmul(x, W, recipe="bf16"))
    traced(X)
    traced(X + 1)
    assert traced._cache_size() == 1


def test_recipes_of_one_name_are_told_apart():
    compared = tcemu.compare(layer, ["bf16 on A100", "bf16 on H100"], (W, X), results=False)
    assert [e.policy for e in compared] == ["bf16 on sm_80", "bf16 on sm_90a"]
    with pytest.raises(TypeError, match="do not tell them apart"):
        tcemu.compare(layer, ["bf16 on H100", "BF16 on h200"], (W, X))
