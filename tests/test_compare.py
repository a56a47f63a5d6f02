"""`compare` against figures made here in exact rational arithmetic, on one function whose products run in a loop and outside it."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import tcemu
from tcemu.emulation.compare import _lost, _quantized
from tcemu.formats import to_float
from tcemu.viz import plot

MMA = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
PLAIN = tcemu.Recipe(MMA, "sm_90a", name="e4m3")
CLAMPED = PLAIN.replace(name="e4m3 clamped", **dict.fromkeys("ab", tcemu.Quantizer(saturate=True)))
SCALED = tcemu.Recipe(MMA, "sm_90a", name="e4m3 by tensor", **dict.fromkeys("ab", tcemu.Quantizer("tensor", saturate=True)))
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 16)).astype(np.float32) * np.float32(8)
X[0, 0], X[3, 2], X[5, 5] = 500.0, 1e-4, 464.0  # out of range, too small, and just not out of range
W = RNG.normal(size=(2, 16, 16)).astype(np.float32)
W[1, 4, 4] = 1e-5


def fn(x, w):
    y, _ = lax.scan(lambda c, w: (jax.jit(jnp.matmul)(c, w) * 0.25, None), x, w)
    return jnp.einsum("ij,kj->ik", y, w[0]), jnp.arange(3)


def in_plain(x, w):
    """The operands that the products have in fn, as pairs of A and B."""
    y, pairs = jnp.asarray(x), []
    for one in w:
        pairs.append((np.asarray(y), one))
        y = y @ one * 0.25
    return [pairs, [(np.asarray(y), w[0].T)]]


POLICIES = [PLAIN, SCALED]


@pytest.fixture(scope="module")
def found():
    return tcemu.compare(fn, POLICIES, (X, W), results=False)


def test_every_product_has_a_row_for_every_policy(found):
    assert [(row.product.name, row.policy, row.runs) for row in found] == [
        (name, recipe.name, runs) for name, runs in (("scan/matmul/dot_general", 2), ("ij,kj->ik/dot_general", 1)) for recipe in POLICIES
    ]
    assert [row.choice for row in found] == POLICIES * 2


def test_the_figures_are_those_of_exact_arithmetic(found):
    for product, rows in zip(in_plain(X, W), (found.rows[:2], found.rows[2:]), strict=True):
        for row, recipe in zip(rows, POLICIES, strict=True):
            errors, sizes, odd = [], [], 0
            for a, b in product:
                d = np.asarray(tcemu.matmul(a, b, recipe=recipe))
                left, right = ([[Fraction(float(v)) for v in line] for line in lines] for lines in (a, b.T))
                exact = [[sum((p * q for p, q in zip(row_a, column, strict=True)), Fraction()) for column in right] for row_a in left]
                for i, j in np.ndindex(d.shape):
                    if not np.isfinite(d[i, j]):
                        odd += 1
                        continue
                    errors.append((abs(Fraction(float(d[i, j])) - exact[i][j]), d[i, j], exact[i][j]))
                    sizes.append(exact[i][j])
            relative = float(sum(e[0] ** 2 for e in errors) / sum(s**2 for s in sizes)) ** 0.5
            assert row.not_finite == odd
            assert row.relative_error == pytest.approx(relative, rel=1e-9)
            furthest = max(errors)
            assert row.largest_error == pytest.approx(float(furthest[0]), rel=1e-9)
            assert row.worst is not None
            assert (np.float32(row.worst.value), row.worst.exact) == furthest[1:]
            assert 0 < row.bits_lost <= row.most_bits_lost <= 24


def test_what_quantisation_loses_is_counted(found):
    pairs = in_plain(X, W)[0]
    with np.errstate(over="ignore"):
        codes = [[np.asarray(v).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) for v in pair] for pair in pairs]
    over = tuple(sum(int(np.isnan(c[i]).sum()) for c in codes) for i in (0, 1))
    under = tuple(sum(int(((c[i] == 0) & (p[i] != 0)).sum()) for c, p in zip(codes, pairs, strict=True)) for i in (0, 1))
    plain, scaled = found.rows[:2]
    assert plain.overflow == over and over[0] >= 1
    assert plain.underflow == under and min(under) >= 1
    assert scaled.overflow == (0, 0)
    assert plain.not_finite >= 16 and scaled.not_finite == 0


def test_what_is_clamped_counts_as_out_of_range():
    """As many as ml_dtypes, which does not clamp, makes NaN."""
    x = np.abs(RNG.normal(size=(1, 16, 16)) * 600)
    with np.errstate(over="ignore"):
        beyond = int(np.isnan(x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)).sum())
    counts = [sum(_lost(x, _quantized(recipe, None, x, x)[0])[:1]) for recipe in (PLAIN, CLAMPED)]
    assert counts == [beyond, beyond] and 0 < beyond < x.size


def test_the_worst_element_can_be_explained(found):
    for row in found:
        worst = row.worst
        explained = worst.explain()
        if row.choice is not SCALED:  # whose scales multiply outside the instruction
            assert to_float(tcemu.formats.F32, np.uint32(explained.result)) == np.float32(worst.value)
        a, b = (np.asarray(to_float(tcemu.formats.E4M3, codes)) for codes in (worst.a_codes, worst.b_codes))
        assert explained.exact == sum((Fraction(float(p)) * Fraction(float(q)) for p, q in zip(a, b, strict=True)), Fraction())
        assert worst.exact == sum((Fraction(p) * Fraction(q) for p, q in zip(worst.a_row, worst.b_col, strict=True)), Fraction())


@pytest.mark.full
def test_the_results_of_the_whole():
    found = tcemu.compare(fn, POLICIES, (X, W))
    wanted = np.asarray(fn(X, W)[0], np.float64)
    d = np.asarray(jax.jit(tcemu.emulate(fn, SCALED))(X, W)[0], np.float64)
    np.testing.assert_allclose(found.results[SCALED.name], np.sqrt(((d - wanted) ** 2).sum() / (wanted**2).sum()), rtol=1e-6)
    assert list(found.results) == [recipe.name for recipe in POLICIES]
    assert "results of the whole" in str(found)


def test_the_table(found):
    lines = str(found).splitlines()
    heads = ("product", "shapes", "runs", "policy", "rel. error", "bits lost", "most", "overflow", "underflow", "not finite", "worst")
    assert lines[0].split() == " ".join(heads).split()
    assert lines[1].startswith("scan/matmul/dot_general  [16,16] · [16,16]     2  e4m3 ") and lines[2].startswith(" ")
    assert f"{found[1].relative_error:.2e}" in lines[2] and "exact" in lines[2]
    assert repr(found) == "<Comparison of 2 products under 2 policies>"


def test_the_picture(found, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install 'tcemu[viz]')")
    figure = plot(found)
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == [recipe.name for recipe in POLICIES]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["scan/matmul/dot_general", "ij,kj->ik/dot_general"]
    for line in axes.lines:
        rows = [row for row in found if row.policy == line.get_label()]
        assert list(line.get_xdata()) == pytest.approx([row.relative_error for row in rows], nan_ok=True)
    figure.savefig(tmp_path / "errors.svg")


def test_policies_of_other_kinds():
    double = lambda *args, **kwargs: 2 * lax.dot_general(*args, **kwargs)  # noqa: E731
    policies = {"twice": [("scan*", double)], "nothing": None}
    found = tcemu.compare(fn, policies, (np.eye(16, dtype=np.float32), W), results=False)
    (row,) = found
    assert (row.policy, row.overflow, row.underflow, found.results) == ("twice", None, None, {})
    assert row.relative_error == pytest.approx(1, rel=1e-6)
    with pytest.raises(TypeError, match=r"the product was not by a tcemu.Recipe"):
        row.worst.explain()
    assert "\n\n" in str(tcemu.compare(fn, {"nothing": None}, (X, W), results=False))
    for wrong in ("bf16", [PLAIN, "bf16"], [PLAIN, PLAIN], {"a": 3}):
        with pytest.raises(TypeError, match="polic"):
            tcemu.compare(fn, wrong, (X, W))


def test_convolutions_and_gradients_are_compared():
    x, w = np.ones((1, 6, 6, 4), np.float32), np.ones((3, 3, 4, 8), np.float32)
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))  # noqa: E731
    (row,) = tcemu.compare(conv, {"plain": [("*", lax.dot_general)]}, (x, w), convolutions=True, results=False)
    assert (row.product.primitive, row.relative_error, row.worst.exact) == ("conv_general_dilated", 0, 36)
    assert not len(tcemu.compare(conv, {"plain": [("*", lax.dot_general)]}, (x, w), results=False))
