"""A kind of recipe of one's own, in one file: everything that takes a recipe takes it, by value and by name, and saves it."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

import tcemu
from tcemu.operations.products import recipe_kinds
from tcemu.operations.products.recipe_kinds import ProductCall, RecipeKind, find_kind, register_kind, registered_kinds

NAME = "halves"


@dataclass(frozen=True)
class Halves:
    """Two products by "bf16" on a target, one of each half of K, added in f32."""

    target: str = "sm_90a"
    name: str = NAME


def find_halves(text):
    name, _, target = text.partition(" on ")
    return Halves(target or "sm_90a") if name == NAME else None


def multiply_halves(recipe, call: ProductCall):
    call.forbid("bias", "scale_a", "scale_b", "key", "axis_name", why="a sum of halves has none of them")
    half, narrow = call.operands.a.shape[-1] // 2, f"bf16 on {recipe.target}"
    parts = (
        tcemu.matmul(call.operands.a[..., :half], call.operands.b[..., :half, :], recipe=narrow),
        tcemu.matmul(call.operands.a[..., half:], call.operands.b[..., half:, :], recipe=narrow),
    )
    return (parts[0] + parts[1]).astype(call.dtype)


@pytest.fixture(autouse=True)
def halves():
    register_kind(
        RecipeKind(
            saved_as="halves", types=(Halves,), find=find_halves,
            to_dict=lambda recipe: {"target": recipe.target}, from_dict=lambda data: Halves(data["target"]),
            multiply=multiply_halves, facts=lambda recipe, evidence: (recipe.target, "2 x bf16", "", "assumed"), plain=lambda recipe: None,
        )
    )  # fmt: skip
    yield
    del recipe_kinds._KINDS["halves"]


def operands():
    rng = np.random.default_rng(0)
    return rng.normal(size=(8, 64)).astype(np.float32), rng.normal(size=(64, 8)).astype(np.float32)


def wanted(a, b):
    parts = (tcemu.matmul(a[:, at], b[at], recipe="bf16") for at in (slice(32), slice(32, 64)))
    return np.asarray(sum(parts))


def test_products_take_it_by_value_and_by_name():
    a, b = operands()
    for recipe in (Halves(), "halves", "halves on sm_90a"):
        np.testing.assert_array_equal(tcemu.matmul(a, b, recipe=recipe), wanted(a, b))
    assert (np.asarray(tcemu.matmul(a, b, recipe="bf16")) != wanted(a, b)).any()
    with pytest.raises(ValueError, match=r"bias.*a sum of halves has none of them"):
        tcemu.matmul(a, b, np.zeros(8, np.float32), recipe="halves")
    plain = tcemu.dot_general("halves")
    np.testing.assert_array_equal(plain(a, b, (((1,), (0,)), ((), ()))), wanted(a, b))


def test_policies_take_it_compare_it_and_save_it():
    a, b = operands()
    function = lambda a, b: jnp.tanh(a @ b)
    expected = jnp.tanh(wanted(a, b))
    policies = ("halves", Halves(), {"*": "halves"})
    for policy in policies:
        emulated = tcemu.emulate(function, policy)
        np.testing.assert_array_equal(emulated(a, b), expected)
        saved = tcemu.policies.from_json(tcemu.policies.to_json(policy))
        np.testing.assert_array_equal(tcemu.emulate(function, saved)(a, b), expected)
    table = str(tcemu.compare(function, [Halves(), "bf16"], (a, b)))
    assert "halves" in table and "assumed" in table


def test_a_value_has_one_kind_and_every_kind_its_own_name_in_files():
    of_each = [tcemu.get_recipe("bf16"), tcemu.products.get_wide_recipe("bf16x6"), tcemu.products.get_ozaki_recipe("ozaki_int8"), Halves()]
    tcemu.dot_general("bf16")
    kinds = registered_kinds()
    assert len({kind.saved_as for kind in kinds}) == len(kinds) == 5
    assert len({find_kind(recipe) for recipe in of_each}) == 4 and find_kind("bf16") is None
