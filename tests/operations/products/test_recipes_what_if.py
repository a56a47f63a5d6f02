"""Recipes with another arithmetic: the gradients follow, promotion is swept by tracing, and where a named recipe works."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import recipes_reference as by_hand
from support.sampling import sample_cases

import tcemu
from tcemu import Recipe, formats
from tcemu.engine.architectures.lookup import family_targets
from tcemu.engine.isa.legality import targets
from tcemu.operations.products.recipes import RECIPES

F16_SUMS = "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16"
BF16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
E4M3 = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
DEEPSEEK = tcemu.get_recipe("deepseek", "sm_89", backward="exact")
RNG = np.random.default_rng(0)
A, B, G = (RNG.standard_normal(shape).astype(np.float32) for shape in ((3, 300), (300, 5), (3, 5)))


def words(x):
    return np.asarray(x).view(np.uint32)


def gradients(recipe):
    return jax.grad(lambda a, b: jnp.sum(G * tcemu.matmul(a, b, recipe=recipe)), (0, 1))(A, B)


# ---- the gradients' products follow


@pytest.mark.full
def test_what_if_changes_the_gradients_products_too():
    recipe = tcemu.get_recipe("bf16", "sm_80")
    coarse = recipe.what_if(fraction_bits=4)
    assert [r.arithmetic.fraction_bits for r in (coarse, *coarse.gradients)] == [4, 4, 4]
    da, db = gradients(coarse)
    kept = recipe.what_if(fraction_bits=4, backward=False)
    assert kept.gradients == recipe.gradients and kept.arithmetic == coarse.arithmetic
    np.testing.assert_array_equal(words(da), words(tcemu.matmul(G, B.T, recipe=coarse.gradients[0])))
    np.testing.assert_array_equal(words(db), words(tcemu.matmul(A.T, G, recipe=coarse.gradients[1])))
    assert (words(da) != words(tcemu.matmul(G, B.T, recipe=kept.gradients[0]))).any()


def test_only_the_named_fields_change():
    """dA sums in f16, dB in f32 with a promotion of its own; each keeps what is not named."""
    of_a, of_b = Recipe(F16_SUMS, "sm_90a", backward=Recipe(BF16, "sm_80")), Recipe(BF16, "sm_80", promote=3)
    recipe = Recipe(BF16, "sm_90a", backward=(of_a, of_b))
    changed = recipe.what_if(terms=4)
    for one, own in zip((changed, *changed.gradients), (recipe, of_a, of_b), strict=True):
        assert one == own.replace(model=own.arithmetic.replace(terms=4), backward=one.backward)
    assert changed.gradients[0].backward == of_a.backward.what_if(terms=4)  # and so on, as deep as it goes
    assert Recipe(BF16, "sm_80", backward=of_b).what_if(terms=4).backward == of_b.what_if(terms=4)
    assert recipe.what_if(terms=4, backward=False).backward == (of_a, of_b)
    promoted = recipe.what_if(promote=2)
    assert [r.promote for r in (promoted, *promoted.gradients)] == [2, 2, 2] and promoted.model is None
    assert [r.promote for r in (lambda r: (r, *r.gradients))(recipe.replace(promote=2))] == [2, None, 3]
    assert tcemu.get_recipe("bf16", backward="exact").what_if(floor=-20).backward == "exact"


@pytest.mark.full
def test_a_traced_field_reaches_the_gradients():
    recipe = tcemu.get_recipe("bf16", "sm_80")
    swept = jax.jit(jax.vmap(lambda bits: gradients(recipe.what_if(fraction_bits=bits))[0]))(jnp.array([4, 24]))
    for bits, da in zip((4, 24), swept, strict=True):
        np.testing.assert_array_equal(words(da), words(tcemu.matmul(G, B.T, recipe=recipe.gradients[0].what_if(fraction_bits=bits))))


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        (
            {"split_k": 2},
            TypeError,
            r"what_if\(split_k=...\): expected backward=, promote= or fields of tcemu.Model, alignment, .*\.replace",
        ),
        ({"fraction_bit": 4}, TypeError, r"what_if\(fraction_bit=...\): expected"),
        ({"promote": 3}, ValueError, "promote=3 takes 96 elements along K, which does not divide 128"),
        ({"promote": None}, ValueError, "give promote="),
    ],
)
def test_what_is_no_arithmetic_is_told(changes, error, said):
    with pytest.raises(error, match=said):
        tcemu.get_recipe("deepseek", "sm_89").what_if(**changes)


def test_what_a_gradient_cannot_do_names_it():
    recipe = Recipe(BF16, "sm_90a", backward=Recipe(F16_SUMS, "sm_90a"))
    with pytest.raises(ValueError, match=r"backward gradient, mma.*f16: Model\(result_bits=20\).*backward=False leaves"):
        recipe.what_if(result_bits=20)
    assert recipe.what_if(result_bits=20, backward=False).arithmetic.result_bits == 20


# ---- promotion, traced


def with_minus_zeros():
    """A and B for deepseek; in row 0, column 0 each chunk is a sum below every f32, negative, so that fma(scale, chunk, sum) is -0."""
    a, b, tiny = A.copy(), B.copy(), np.float32(2.0**-74)
    a[0], b[:] = 0, 0
    for k in range(0, 300, 128):
        a[0, k], a[0, k + 1] = 448 * tiny, tiny / 4
        b[k + 1, 0], b[k + 2, 1] = -tiny / 4, 448 * tiny
    return a, b


@jax.jit
@partial(jax.vmap, in_axes=(0, None, None))
def sum_by_blocks(interval, a, b):
    return tcemu.matmul(a, b, recipe=DEEPSEEK.what_if(promote=interval))


@pytest.mark.parametrize("data", ["normal", "minus zeros"])
def test_a_traced_promotion_of_blocks_is_the_loop_by_hand(data):
    """And 3, which does not divide the 4 instructions of a block, gives NaN, as do 0 and 8."""
    a, b = (A, B) if data == "normal" else with_minus_zeros()
    intervals = (1, 2, 4, 3, 0, 8)
    swept = sum_by_blocks(jnp.array(intervals), a, b)
    sa, sb = by_hand.block_scales(a, "e4m3", 1, 128), by_hand.block_scales(b.T, "e4m3", 128, 128)
    x = by_hand.elements(a, "e4m3", by_hand.expand_scales(sa, a.shape, 1, 128))
    y = by_hand.elements(b.T, "e4m3", by_hand.expand_scales(sb, b.T.shape, 128, 128)).T
    x, y = np.pad(x, [(0, 0), (0, 84)]), np.pad(y, [(0, 84), (0, 0)])
    sb = np.repeat(sb, 128, 0)[:5].T
    scale = lambda k: sa[:, [k // 128]] * sb[[k // 128]]
    for n, d in zip(intervals, swept, strict=True):
        if 4 % max(n, 1) or n < 1:
            assert np.isnan(d).all()
            continue
        kept = -(-300 // (32 * n)) * 32 * n  # no chunk of zeros alone follows
        np.testing.assert_array_equal(words(d), words(by_hand.promoted_product(E4M3, "sm_89", x[:, :kept], y[:kept], n, scale)))
    if data == "minus zeros":
        assert words(swept[2])[0, 0] == 1 << 31


@pytest.mark.parametrize("case", sample_cases([("bf16", 3), ("deepseek", 1), ("deepseek", 2), ("deepseek", 3)], (), str))
def test_a_traced_promotion_is_the_static_one(case):
    name, split = case
    recipe = tcemu.get_recipe(name, "sm_89", split_k=split, backward="exact")
    a, b = (np.concatenate(pair, axis) for axis, pair in enumerate(zip((A, B), with_minus_zeros(), strict=True)))
    intervals = [1, 2, 4] if name == "deepseek" else [2]
    swept = jax.jit(jax.vmap(lambda n: tcemu.matmul(a, b, recipe=recipe.replace(promote=n))))(jnp.array(intervals, np.uint8))
    for n, d in zip(intervals, swept, strict=True):
        np.testing.assert_array_equal(words(d), words(tcemu.matmul(a, b, recipe=recipe.replace(promote=n))))


@pytest.mark.full
def test_a_traced_promotion_out_of_range_raises_in_checked_mode():
    recipe = tcemu.get_recipe("deepseek", "sm_89", backward="exact")
    checked = tcemu.checked(jax.jit(lambda n: tcemu.matmul(A[:1], B[:, :1], recipe=recipe.replace(promote=n))))
    assert np.isfinite(checked(jnp.int32(2))).all()
    for n in (0, 3):
        with pytest.raises(tcemu.UndefinedBehaviour, match="a traced promote is below 1, or does not divide the depth of the blocks"):
            checked(jnp.int32(n))


def test_what_no_traced_promotion_can_do_is_told():
    recipe = tcemu.get_recipe("deepseek", "sm_89", backward="exact")
    with pytest.raises(ValueError, match="promote=3 takes 96 elements"):
        recipe.replace(promote=jnp.array([1, 3]))
    narrow = tcemu.quantize.Quantizer("block", (1, 48))
    with pytest.raises(ValueError, match="promote=1 takes 32 elements along K, which does not divide 48"):
        jax.jit(lambda n: tcemu.matmul(A, B, recipe=recipe.replace(a=narrow, promote=n)))(1)
    long = Recipe(BF16, "sm_80").what_if(terms=8, chain=32)
    with pytest.raises(ValueError, match=r"Model\(chain=32\): a traced promote cuts K after any instruction, of 16 products"):
        jax.jit(lambda n: tcemu.matmul(A, B, recipe=long.replace(promote=n)))(2)


# ---- where a recipe works, and its words


@pytest.mark.parametrize(("name", "target"), [("mxfp8", "sm_90a"), ("nvfp4", "sm_100"), ("fp8", "sm_80"), ("bf16", "sm_75")])
def test_where_a_recipe_works_is_said(name, target):
    with pytest.raises(tcemu.Unsupported) as caught:
        tcemu.get_recipe(name, target)
    said = str(caught.value)
    assert said.startswith(f"recipe('{name}', '{target}'): mma") and f"; the target is {target}" in said
    listed = said.partition("The recipe works on ")[2].removesuffix(".").split(", ")
    assert listed and target not in listed
    for each in targets():
        if each in listed:
            assert tcemu.get_recipe(name, each).gradients is not None
        else:
            with pytest.raises((tcemu.Unsupported, tcemu.NotModelled)):
                tcemu.get_recipe(name, each)


def test_plain_targets_have_no_fifth_generation_unit():
    """PTX gives tcgen05 to the a and f targets of sm_100, sm_103 and sm_110 alone."""
    assert sorted(family_targets("tcgen05.mma")) == ["sm_100a", "sm_100f", "sm_103a", "sm_103f", "sm_110a", "sm_110f"]
    for name in RECIPES:
        for target in targets():
            try:
                op = tcemu.get_recipe(name, target).op
            except (tcemu.Unsupported, tcemu.NotModelled):
                continue
            assert op.family.startswith("tcgen05.mma") == (target in family_targets("tcgen05.mma"))
    with pytest.raises(tcemu.Unsupported, match=r"needs sm_100a or sm_100f and its family"):
        Recipe("bf16 tcgen05", "sm_100")
    assert tcemu.get_recipe("fp8", "sm_100").arithmetic == tcemu.get_model(tcemu.get_recipe("fp8", "sm_90").op, "sm_100")


@pytest.mark.parametrize("name", ["f32", "f16", "bf16"])
def test_the_result_may_be_named(name):
    recipe = tcemu.get_recipe("bf16", dtype=name)
    assert recipe == tcemu.get_recipe("bf16", dtype=formats.FORMATS[name]) and recipe.dtype is formats.FORMATS[name]
    with pytest.raises(ValueError, match=r"dtype='fp16': expected f32, f16 or bf16"):
        tcemu.get_recipe("bf16", dtype="fp16")


def test_the_evidence_of_a_recipe():
    """Of each product that it emulates, as `tcemu.evidence` has it; a what-if is nobody's to know."""
    recipe = tcemu.get_recipe("deepseek")
    known = tcemu.evidence(recipe.op, "sm_90a")
    assert recipe.evidence == {"D": known, "dA": known, "dB": known}
    assert recipe.replace(backward="exact").evidence == {"D": known}
    assert recipe.what_if(fraction_bits=20, backward=False).evidence == {"D": None, "dA": known, "dB": known}
    assert recipe.replace(model=recipe.arithmetic).evidence["D"] == known
    assert {name: evidence.level for name, evidence in tcemu.get_recipe("bf16", "A100").evidence.items()} == dict.fromkeys(
        ("D", "dA", "dB"), "published"
    )
    by_unit = tcemu.get_recipe("mxfp8 on B200").evidence["D"]
    assert by_unit.level == "literature" and "MMA-Sim" in by_unit.source
