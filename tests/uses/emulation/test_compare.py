"""`compare` against figures made here in exact rational arithmetic, on one function whose products run in a loop and outside it."""

import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax, monitoring
from oracles import recipes_reference as by_hand
from support.sampling import sample_cases

import tcemu
from tcemu.formats import to_float
from tcemu.uses.emulation.compare import measure_sensitivity
from tcemu.uses.emulation.decisions import decide
from tcemu.uses.emulation.emulate import trace_call as traced_call
from tcemu.uses.emulation.product_errors import count_out_of_range, quantize_operands

MMA = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
PLAIN = tcemu.Recipe(MMA, "sm_90a", name="e4m3")
CLAMPED = PLAIN.replace(name="e4m3 clamped", **dict.fromkeys("ab", tcemu.quantize.Quantizer(saturate=True)))
SCALED = tcemu.Recipe(MMA, "sm_90a", name="e4m3 by tensor", **dict.fromkeys("ab", tcemu.quantize.Quantizer("tensor", saturate=True)))
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 16)).astype(np.float32) * np.float32(8)
X[0, 0], X[3, 2], X[5, 5] = 500.0, 1e-4, 464.0  # out of range, too small, and just not out of range
W = RNG.normal(size=(2, 16, 16)).astype(np.float32)
W[1, 4, 4] = 1e-5


def fn(x, w):
    y, _ = lax.scan(lambda c, w: (jax.jit(jnp.matmul)(c, w) * 0.25, None), x, w)
    return jnp.einsum("ij,kj->ik", y, w[0]), jnp.arange(3)


def product_operands(x, w):
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
    for product, rows in zip(product_operands(X, W), (found.rows[:2], found.rows[2:]), strict=True):
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


def fractions(lines):
    return [[Fraction(float(v)) for v in line] for line in lines]


def quantized_values(x, recipe, rows, depth):
    """x by the recipe's cast, or its scales for groups of rows x depth, each times its scale, in Fractions; None for NaN."""
    if recipe is PLAIN:
        with np.errstate(over="ignore"):
            held = x.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return [[None if np.isnan(v) else Fraction(v) for v in line] for line in held]
    scales = by_hand.expand_scales(by_hand.block_scales(x, "e4m3", rows, depth), x.shape, rows, depth)
    elements = by_hand.elements(x, "e4m3", scales).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return [[p * q for p, q in zip(*pair, strict=True)] for pair in zip(fractions(elements), fractions(scales), strict=True)]


def parts_of_the_error(pairs, recipe, rows, depth):
    """The relative errors by quantising the operands and by the sums."""
    by_operands = by_sums = size = Fraction()
    for a, b in pairs:
        d = np.asarray(tcemu.matmul(a, b, recipe=recipe))
        left, right = quantized_values(a, recipe, rows, depth), quantized_values(b.T, recipe, rows, depth)
        exact_left, exact_right = fractions(a), fractions(b.T)
        for i, j in np.ndindex(d.shape):
            if np.isfinite(d[i, j]):
                exact = sum((p * q for p, q in zip(exact_left[i], exact_right[j], strict=True)), Fraction())
                held = sum((p * q for p, q in zip(left[i], right[j], strict=True)), Fraction())
                by_operands, by_sums = by_operands + (held - exact) ** 2, by_sums + (Fraction(float(d[i, j])) - held) ** 2
                size += exact**2
    return float(by_operands / size) ** 0.5, float(by_sums / size) ** 0.5


def test_the_error_is_parted_into_operands_and_sums(found):
    for product, rows in zip(product_operands(X, W), (found.rows[:2], found.rows[2:]), strict=True):
        for row, recipe in zip(rows, POLICIES, strict=True):
            by_operands, by_sums = parts_of_the_error(product, recipe, 16, 16)
            assert row.operand_error == pytest.approx(by_operands, rel=1e-9) and row.sum_error == pytest.approx(by_sums, rel=1e-6)
            assert (0 if recipe is SCALED else -1) < row.sum_error < row.operand_error  # sums of 16 products of e4m3 may be exact


@pytest.mark.parametrize("name", sample_cases(("fp8_e4m3 on L4", "nvfp4 on RTX 5090", "bf16 on A100"), ("fp8_e4m3 on L4",)))
def test_scales_of_f32_are_no_part_of_the_sums_error(name):
    """One product: nothing is added, so that the sums lose what f32 loses, however the scales were rounded."""
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(8, 1)).astype(np.float32), rng.normal(size=(1, 8)).astype(np.float32)
    (row,) = tcemu.compare(jnp.matmul, tcemu.get_recipe(name), (x, y), results=False)
    if name.startswith("bf16"):
        assert row.sum_error == 0  # a product of two bf16 is an f32
    else:
        assert row.sum_error < 2.0**-22 < 2.0**-9 < row.operand_error


@pytest.mark.full
def test_targets_differ_where_their_sums_do():
    """One recipe on several targets: the names say which, the operands are one error, and the sums are each target's own."""
    targets = ("sm_80", "sm_90a", "sm_120a")
    found = tcemu.compare(jnp.matmul, [tcemu.get_recipe("bf16", target) for target in targets], (X[4:], W[0] * 0.37), results=False)
    assert [row.policy for row in found] == [f"bf16 on {target}" for target in targets]
    assert len({row.operand_error for row in found}) == 1
    assert found[0].sum_error != found[1].sum_error == found[2].sum_error  # 24 fraction bits kept, 25, and 25
    bf16 = tcemu.get_recipe("bf16", "sm_80")
    several = [bf16, bf16.what_if(fraction_bits=10), bf16.replace(promote=2), tcemu.get_recipe("f16", "sm_80")]
    names = [row.policy for row in tcemu.compare(jnp.matmul, several, (X[4:], W[0]), results=False)]
    assert names == ["bf16 on sm_80", "bf16 on sm_80, fraction_bits=10", "bf16 on sm_80, promote=2", "f16"]


# ---- what each product costs at the end


def test_what_each_product_costs_at_the_end(caplog):
    with caplog.at_level("INFO", logger="tcemu"):
        found = tcemu.compare(fn, {"scaled": SCALED}, (X, W), sensitivity=True)
    assert [text for text in caplog.messages if "sensitivity under scaled: product" in text][-1].endswith(
        f"product {len(found)} of {len(found)}"
    )
    policies = ([("scan*", SCALED)], [("ij*", SCALED)], SCALED)
    plain, *others = jax.jit(lambda x, w: [fn(x, w)[0], *(tcemu.emulate(fn, policy)(x, w)[0] for policy in policies)])(X, W)
    norms = [np.linalg.norm(np.asarray(other, np.float64) - plain) / np.linalg.norm(plain) for other in others]
    assert [row.output_error for row in found] == pytest.approx(norms[:2], rel=1e-3)
    assert found.results["scaled"] == pytest.approx(norms[2], rel=1e-3)
    assert "output" in str(found).splitlines()[0] and f"{found[0].output_error:.2e}" in str(found)


@pytest.mark.parametrize("count", sample_cases([2, 6], 2))
def test_the_sensitivity_of_any_number_of_products_is_one_program(count):
    """It is compiled once, and holds each product's emulation once."""
    traced, compiled = [], []

    def double(lhs, rhs, dimension_numbers, **kwargs):
        traced.append(None)
        return 2 * lax.dot_general(lhs, rhs, dimension_numbers, **kwargs)

    def chain(x):
        for _ in range(count):
            x = x @ x
        return x

    listen = lambda event, _, fun_name="", **more: compiled.append(fun_name) if event.endswith("backend_compile_duration") else None
    monitoring.register_event_duration_secs_listener(listen)
    try:
        call = traced_call(chain, (np.eye(4, dtype=np.float32),), {})
        found = measure_sensitivity(call, lambda product: decide(lambda product: double, product, False), False)
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert len([name for name in compiled if "with_selected" in name]) == 1 and len(traced) == count
    assert [found.single_errors[product] for product in found.single_errors] == [2.0 ** (2 ** (count - 1 - i)) - 1 for i in range(count)]
    assert found.total_error == 2.0 ** (2**count - 1) - 1


@pytest.mark.full
def test_sensitivity_of_gradients_loops_and_convolutions():
    """Products of a gradient, in a checkpoint, a cond and under vmap; one that a policy leaves has none."""

    def conv(x, w):
        return lax.conv_general_dilated(
            x[None, :, :, None], w[:, :, None, None], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(w, x):
        y = jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)
        y = lax.cond(y[0, 0] > 9, lambda y: y, lambda y: y @ w, y)
        return jnp.sum(jax.vmap(lambda row: row @ w)(y)) + jnp.sum(conv(y, w[:3, :3]))

    twice = lambda *args, **kwargs: 2 * lax.dot_general(*args, **kwargs)
    found = tcemu.compare(jax.grad(loss), {"twice": [("*transpose*", twice)]}, (W[0], X / 500), convolutions=True, sensitivity=True)
    assert len(found) >= 5 and all("transpose" in row.product.name and row.output_error > 0 for row in found)
    assert tcemu.compare(fn, {"nothing": None}, (X, W), sensitivity=True).results == {"nothing": 0}
    assert all(row.output_error is None for row in tcemu.compare(fn, {"twice": [("scan*", twice)]}, (X, W), results=False))


def test_what_quantisation_loses_is_counted(found):
    pairs = product_operands(X, W)[0]
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
    x = np.abs(RNG.normal(size=(1, 16, 16)) * 600).astype(np.float32)
    with np.errstate(over="ignore"):
        beyond = int(np.isnan(x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)).sum())
    counts = [sum(count_out_of_range(x, quantize_operands(recipe, None, x, x)[0])[:1]) for recipe in (PLAIN, CLAMPED)]
    assert counts == [beyond, beyond] and 0 < beyond < x.size


def test_the_worst_element_can_be_explained(found):
    for row in found:
        worst = row.worst
        explained = worst.explain()
        assert str(explained) == explained.summary() != explained.text() and "step" in str(explained)
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
    assert lines[0].split("  ")[1] == "policy"
    heads = ["target", "evidence", "rel.", "error", "operands", "sums", "bits", "lost", "most", "over", "under", "inf/NaN", "worst"]
    assert lines[0].split()[1:] == heads
    assert (
        lines[1] == "scan/matmul/dot_general: [16,16] · [16,16], 2 runs" and lines[4] == "ij,kj->ik/dot_general: [16,16] · [16,16], 1 run"
    )
    assert lines[2].startswith("  e4m3 ") and lines[3].startswith("  e4m3 by tensor ")
    for part in (found[1].relative_error, found[1].operand_error, found[1].sum_error):
        assert f"{part:.2e}" in lines[3] and "exact" in lines[3]
    assert repr(found) == "<Comparison of 2 products under 2 policies>"
    assert max(map(len, lines)) <= 140


def test_it_says_what_it_does_and_how_long_it_compiled(caplog):
    with caplog.at_level("INFO", logger="tcemu"):
        tcemu.compare(lambda x: x @ x, PLAIN, (X,))
    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == ["compare: runs the function as it is, with 1 products", "compare: 1 of them by e4m3, then the whole function"]
    assert re.fullmatch(r"compare: compiled for \d+\.\d s, ran for \d+\.\d s", said[-1])


@pytest.mark.full
def test_columns_in_which_nothing_happened_are_left_out():
    plain = str(tcemu.compare(jnp.matmul, [SCALED], (np.ones((2, 2), np.float32),) * 2, results=False))
    assert plain.splitlines()[0].split() == [
        "policy",
        "target",
        "evidence",
        "rel.",
        "error",
        "operands",
        "sums",
        "bits",
        "lost",
        "most",
        "worst",
    ]


@pytest.mark.full
def test_a_table_with_every_column_is_not_too_wide():
    wide = dict.fromkeys((f"policy {i} of a long name" for i in range(3)), PLAIN)
    with_all = str(tcemu.compare(fn, wide, (X, W), sensitivity=True)).splitlines()
    assert {"output", "over", "under"} <= set(with_all[0].split()) and max(map(len, with_all)) <= 140


def test_the_picture(found, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install -e '.[viz]')")
    figure = found.plot()
    (axes,) = figure.axes
    assert [line.get_label() for line in axes.lines] == [recipe.name for recipe in POLICIES]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["scan/matmul/dot_general", "ij,kj->ik/dot_general"]
    for line in axes.lines:
        rows = [row for row in found if row.policy == line.get_label()]
        assert list(line.get_xdata()) == pytest.approx([row.relative_error for row in rows], nan_ok=True)
    figure.savefig(tmp_path / "errors.svg")


def test_policies_of_other_kinds():
    double = lambda *args, **kwargs: 2 * lax.dot_general(*args, **kwargs)
    policies = {"twice": [("scan*", double)], "nothing": None}
    found = tcemu.compare(fn, policies, (np.eye(16, dtype=np.float32), W), results=False)
    (row,) = found
    assert (row.policy, row.overflow, row.underflow, found.results) == ("twice", None, None, {})
    assert row.relative_error == pytest.approx(1, rel=1e-6)
    with pytest.raises(TypeError, match=r"the product was not by a tcemu.Recipe"):
        row.worst.explain()
    assert "\n\n" in str(tcemu.compare(fn, {"nothing": None}, (X, W), results=False))
    for wrong in (16, [PLAIN, 16], [PLAIN, PLAIN], {"a": 3}):
        with pytest.raises(TypeError, match="polic"):
            tcemu.compare(fn, wrong, (X, W))


def test_convolutions_and_gradients_are_compared():
    x, w = np.ones((1, 6, 6, 4), np.float32), np.ones((3, 3, 4, 8), np.float32)
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    (row,) = tcemu.compare(conv, {"plain": [("*", lax.dot_general)]}, (x, w), convolutions=True, results=False)
    assert (row.product.primitive, row.relative_error, row.worst.exact) == ("conv_general_dilated", 0, 36)
    assert not len(tcemu.compare(conv, {"plain": [("*", lax.dot_general)]}, (x, w), results=False))
