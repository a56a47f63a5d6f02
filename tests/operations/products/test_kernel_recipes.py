"""Kernel recipes: values, JSON, and the engine against sums in Python fractions and a loop over `tcemu.gemm`."""

import json
from fractions import Fraction
from itertools import product

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.changed_json import json_paths, replace_at
from support.sampling import sample_cases

import tcemu
from tcemu.engine.arithmetic.sum_tree import ordered_pairs
from tcemu.formats import BF16, E4M3, F16, F32, TF32
from tcemu.operations.products.library.kernel_json import LATER_FIELDS
from tcemu.operations.products.library.kernel_order import slice_indices, step_order
from tcemu.operations.products.library.kernel_recipe import even_edges
from tcemu.operations.products.library.kernel_sums import apply_epilogue, epilogue_operands, plan_epilogue, plan_kernel
from tcemu.operations.products.library.numpy_sums import FLOATS, multiply_by_numpy
from tcemu.replay import Conditions, Epilogue, Lanes, Merge, Slices, Steps, dumps, find_divergence, loads
from tcemu.uses.replay.recipe_divergence import trace_sums

WGMMA = {fmt: f"wgmma.mma_async.sync.aligned.m64n64k{k}.f32.{fmt}.{fmt}" for fmt, k in ((F16, 16), (BF16, 16), (E4M3, 32), (TF32, 8))}
HOPPER = Steps(WGMMA[F16], "sm_90a")  # pyright: ignore[reportArgumentType]  a spelling will do


def steps(fmt=F16, **options):
    return Steps(WGMMA[fmt], "sm_90a", **options)


PLAIN = Merge()


def recipe(unit, slices, merge=PLAIN, out=F32, fmt=F16, **options):
    return tcemu.replay.KernelRecipe(fmt, fmt, out, unit, slices, merge, **options)


def draw_matrices(k, m=3, n=4, dtype=np.float16, seed=0):
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((m, k)) * np.exp2(rng.integers(-4, 5, (m, k))), rng.standard_normal((k, n))
    return a.astype(dtype), b.astype(dtype)


# ---- a reference in fractions: sums of f32 rounded to nearest even


def round_exactly(x: Fraction, bits: int = 24, least: int = -149) -> Fraction:
    """x to nearest even, by exact arithmetic."""
    if x == 0:
        return x
    e = abs(x.numerator).bit_length() - x.denominator.bit_length()
    e = e if abs(x) >= Fraction(2) ** e else e - 1
    unit = Fraction(2) ** max(e - bits + 1, least)
    return Fraction(round(x / unit)) * unit  # round() of a Fraction goes to the even one


def chain(products, fused=True):
    total = Fraction(0)
    for x, y in products:
        total = round_exactly(total + x * y) if fused else round_exactly(total + round_exactly(x * y))
    return total


def exact(x):
    return [[Fraction(float(v)) for v in row] for row in np.asarray(x)]


def sum_in_fractions(a, b, lanes, vector, chunk, fold, fused=True):
    a, b = exact(a), exact(np.asarray(b).T)
    expected = np.zeros((len(a), len(b)), np.float32)
    for i, row in enumerate(a):
        for j, column in enumerate(b):
            sums = []
            for lane in range(lanes):
                own = [(row[k], column[k]) for k in range(len(row)) if k // vector % lanes == lane]
                chunks = [chain(own[at : at + chunk], fused) for at in range(0, len(own), chunk)] or [Fraction(0)]
                total = chunks[0]
                for c in chunks[1:]:
                    total = round_exactly(total + c)
                sums.append(total)
            expected[i, j] = float(fold(sums))
    return expected


def left_to_right(sums):
    total = sums[0]
    for s in sums[1:]:
        total = round_exactly(total + s)
    return total


def butterfly(sums):
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [round_exactly(sums[i] + sums[i + half]) for i in range(half)]
    return sums[0]


LANES = {
    "one": (Lanes(1, 1), left_to_right),
    "chunks": (Lanes(4, 2, 8, "ascending"), left_to_right),
    "apart": (Lanes(8, 1, None, "folded", False), butterfly),
}


@pytest.mark.parametrize("name", sample_cases(LANES, ("chunks",), str))
def test_lanes_are_sums_in_fractions(name):
    unit, fold = LANES[name]
    a, b = draw_matrices(61, dtype=np.float32)
    got = tcemu.matmul(a, b, recipe=recipe(unit, Slices.single(61), fmt=F32))
    expected = sum_in_fractions(a, b, unit.lanes, unit.vector, unit.chunk or 61, fold, unit.fused)
    assert (np.asarray(got) == expected).all()


# ---- slices of instructions are a loop over gemm


def parts(a, b, places, fmt=F16):
    return [np.asarray(tcemu.gemm(a[:, p], b[p], op=WGMMA[fmt], target="sm_90a")) for p in places]


def half(x):
    return x.astype(np.float16).astype(np.float32)


MERGES = {  # how three partial sums are merged -> the same in NumPy
    Merge(): lambda p: p[0] + p[1] + p[2],
    Merge("descending"): lambda p: p[2] + p[1] + p[0],
    Merge("tree"): lambda p: (p[0] + p[1]) + p[2],
    Merge(partial=F16): lambda p: half(half(p[0]) + half(p[1]) + half(p[2])),
    Merge(partial=F16, serial=True): lambda p: half(half(half(p[0]) + p[1]) + p[2]),
    Merge(partial=F16, atomic=True): lambda p: half(half(half(p[0]) + half(p[1])) + half(p[2])),
    Merge("tree", F16, atomic=True): lambda p: half(half(half(p[0]) + half(p[1])) + half(p[2])),
    Merge("descending", F16, start="zero", atomic=True): lambda p: half(half(half(0 + half(p[2])) + half(p[1])) + half(p[0])),
}


@pytest.mark.parametrize(
    "merge", sample_cases(MERGES, (Merge("descending"), Merge(partial=F16, serial=True), Merge(partial=F16, atomic=True)), str)
)
def test_slices_are_a_loop_over_gemm(merge):
    a, b = draw_matrices(300)
    p = parts(a, b, [np.arange(0, 128), np.arange(128, 256), np.arange(256, 300)])
    got = np.asarray(tcemu.matmul(a, b, recipe=recipe(HOPPER, Slices.even(300, 3, 64), merge, F16)))
    assert (got == half(MERGES[merge](p))).all()


@pytest.mark.full
def test_interleaved_slices_are_a_loop_over_gemm():
    a, b = draw_matrices(300)
    dealt = [np.concatenate([np.arange(t, min(t + 32, 300)) for t in range(s * 32, 300, 64)]) for s in (0, 1)]
    p = parts(a, b, dealt)
    assert (np.asarray(tcemu.matmul(a, b, recipe=recipe(HOPPER, Slices.interleaved(300, 2, 32)))) == p[0] + p[1]).all()


def test_residues_are_a_loop_over_gemm():
    a, b = draw_matrices(333)
    first = tcemu.gemm(a[:, :13], b[:13], op=WGMMA[F16], target="sm_90a")
    expected = tcemu.gemm(a[:, 13:], b[13:], first, op=WGMMA[F16], target="sm_90a")
    assert (np.asarray(tcemu.matmul(a, b, recipe=recipe(steps(residue=32), Slices.single(333)))) == np.asarray(expected)).all()


@pytest.mark.full
def test_restarts_are_a_loop_over_gemm():
    a, b = (x.astype(jnp.float8_e4m3fn) for x in draw_matrices(320))
    p = parts(a, b, [np.arange(0, 128), np.arange(128, 256), np.arange(256, 320)], E4M3)
    got = tcemu.matmul(a, b, recipe=recipe(steps(E4M3, restart=128), Slices.single(320), fmt=E4M3))
    assert (np.asarray(got) == p[0] + p[1] + p[2]).all()


def test_products_that_are_left_out():
    a, b = draw_matrices(200)
    got = tcemu.matmul(a, b, recipe=recipe(HOPPER, Slices.even(200, 3, 64, dropped=8)))
    p = parts(a, b, [np.arange(0, 64), np.arange(64, 128), np.arange(128, 192)])
    assert (np.asarray(got) == p[0] + p[1] + p[2]).all()
    assert "LEFT OUT" in str(Slices.even(200, 3, 64, dropped=8))


def test_the_epilogue_and_the_ways_to_tf32():
    a, b = draw_matrices(64)
    bias, total = np.float32([[1.5, -2, 0.25, 3]]), np.asarray(tcemu.gemm(a, b, op=WGMMA[F16], target="sm_90a"))
    scaled = recipe(HOPPER, Slices.single(64), epilogue=Epilogue(scaled=True, alpha=0.3))
    alpha = np.float32(0.3) * np.float32(1.7)
    assert (np.asarray(tcemu.matmul(a, b, bias, recipe=scaled, scale_a=np.float32(1.7))) == total * alpha + bias).all()
    once = [Fraction(float(alpha)) * Fraction(float(x)) + Fraction(float(y)) for x, y in zip(total[0], bias[0], strict=True)]
    got = tcemu.matmul(a, b, bias, recipe=scaled.replace(epilogue=Epilogue(True, 0.3, roundings=1)), scale_a=np.float32(1.7))
    assert np.asarray(got)[0].tolist() == [float(round_exactly(x)) for x in once]
    large = np.full((1, 64), 200, np.float16)
    for saturate, expected in ((False, np.inf), (True, 65504)):
        cut = recipe(HOPPER, Slices.single(64), out=F16, epilogue=Epilogue(saturate=saturate))
        assert np.asarray(tcemu.matmul(large, large.T, recipe=cut))[0, 0] == expected
    tie = np.float32([[1 + 2**-11]])
    one = np.float32([[1]])
    for cast, expected in (("RN", 1), ("RZ", 1), ("RNA", 1 + 2**-10)):
        assert np.asarray(tcemu.matmul(tie, one, recipe=recipe(steps(TF32), Slices.single(1), fmt=TF32, cast=cast)))[0, 0] == expected


EPILOGUES = [
    Epilogue(True, 0.7), Epilogue(True, plus_zero=False), Epilogue(True, scaling="a first"),
    Epilogue(True, scaling="b first", plus_zero=False),
    Epilogue(True, scaling="a first", roundings=1), Epilogue(True, beta=0.3, roundings=1), Epilogue(True, scaling="b first", between=BF16),
    Epilogue(beta=-0.3),
]  # fmt: skip


def f32(x):
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(x, np.float64).astype(np.float32).astype(np.float64)


def numpy_epilogue(epilogue, total, scale_a, scale_b, bias):
    """The epilogue in NumPy: products of two f32 are exact in float64; a sum of one and an f32 by fractions."""
    alpha, beta = (float(np.float32(x)) for x in (epilogue.alpha, epilogue.beta))
    first, second = (scale_b, scale_a) if epilogue.scaling == "b first" else (scale_a, scale_b)
    if epilogue.scaling == "folded":
        last = f32(f32(scale_a * scale_b) * alpha)
    else:
        total, last = f32(total * first), second
    d = total * last if epilogue.scaled else total

    def once(x, y):
        pairs = zip(x.flat, np.broadcast_to(y, x.shape).flat, strict=True)
        return np.reshape([float(round_exactly(Fraction(p) + Fraction(q))) for p, q in pairs], x.shape)

    if epilogue.roundings == 1:
        return once(d, f32(beta * bias))
    d = f32(d + 0.0 if epilogue.plus_zero else d) if epilogue.scaled else d
    d = d if epilogue.between is None else d.astype(ml_dtypes.bfloat16).astype(np.float64)
    return once(d, beta * bias)


@pytest.mark.parametrize("epilogue", sample_cases(EPILOGUES, 4, str))
def test_scales_and_a_bias_enter_as_the_epilogue_says(epilogue):
    rng = np.random.default_rng(3)
    total = f32(rng.standard_normal((4, 8)) * np.exp2(rng.integers(-20, 20, (4, 8))))
    total[0, :2] = 0
    scale_a, scale_b = f32(rng.standard_normal((4, 1)) * 2.0**-130), f32(rng.standard_normal((1, 8)) * 2.0**100)
    bias = np.where(np.arange(8) == 3, 0, rng.standard_normal((1, 8)) * 2.0**-30).astype(ml_dtypes.bfloat16)
    scales = tuple(x.astype(np.float32) for x in (scale_a, scale_b))
    extras = epilogue_operands(epilogue, scales if epilogue.scaled else (None, None), bias)
    got = jax.jit(apply_epilogue, static_argnums=0)(plan_epilogue(epilogue, F32), total.astype(np.float32).view(np.uint32), extras)
    expected = numpy_epilogue(epilogue, total, scale_a, scale_b, bias.astype(np.float64))
    assert (np.asarray(got).view(np.float32) == expected).all()
    other = Epilogue(True, scaling="a first" if epilogue.scaling == "b first" else "b first")
    assert (numpy_epilogue(other, total, scale_a, scale_b, bias.astype(np.float64)) != expected).any()  # the control


def test_scales_of_rows_in_matmul():
    a, b = draw_matrices(64)
    rng = np.random.default_rng(1)
    rows = recipe(
        HOPPER, Slices.single(64), epilogue=Epilogue(True, scaling="a first"), conditions=Conditions(scales="rows", bias="f32 columns")
    )
    total = np.asarray(tcemu.gemm(a, b, op=WGMMA[F16], target="sm_90a"), np.float64)
    scale_a, scale_b = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 1), (1, 4)))
    bias = rng.standard_normal(4).astype(np.float32)
    given = {"recipe": rows, "scale_a": scale_a, "scale_b": scale_b}
    batch = np.stack([a, a])
    got = np.asarray(tcemu.matmul(batch, b, bias, **given))
    assert (got == f32(f32(f32(total * scale_a) * scale_b) + bias)).all()
    slope = jax.grad(lambda s: tcemu.matmul(batch, b, bias, **(given | {"scale_a": s})).sum())(jnp.asarray(scale_a))
    assert np.allclose(slope[..., 0], (total * scale_b).sum(-1), rtol=1e-4)
    for wrong, said in (
        ({"scale_a": np.float32(2)}, "expected \\[..., 3, 1\\], as this recipe was observed"),
        ({"scale_b": scale_b[:, :3]}, "expected \\[..., 1, 4\\]"),
        ({"bias": np.zeros((3, 4), np.float32)}, "observed with a bias in f32 columns"),
    ):
        with pytest.raises(ValueError, match=said):
            tcemu.matmul(batch, b, **({"bias": bias} | given | wrong))
    one = rows.replace(conditions=Conditions(scales="tensor"))
    with pytest.raises(ValueError, match="expected one number, as"):
        tcemu.matmul(a, b, recipe=one, scale_a=scale_a[0])


def test_it_is_a_function_of_jax():
    a, b = draw_matrices(64)
    r = recipe(HOPPER, Slices.even(64, 2, 32))
    plain = np.asarray(tcemu.matmul(a, b, recipe=r))
    assert (np.asarray(jax.jit(lambda a, b: tcemu.matmul(a, b, recipe=r))(a, b)) == plain).all()
    batch = np.asarray(tcemu.matmul(np.stack([a, -a]), b, recipe=r))
    assert (batch == np.stack([plain, -plain])).all()
    mapped = jax.vmap(lambda a: tcemu.matmul(a, b, recipe=r))(np.stack([a, -a]))
    assert (np.asarray(mapped) == batch).all()
    gradient = jax.grad(lambda a: tcemu.matmul(a, b, recipe=r).sum())(jnp.asarray(a, jnp.float32))
    assert np.allclose(gradient, np.asarray(b, np.float32).sum(1)[None], rtol=1e-5)


def test_a_gradient_is_the_rounded_operand_to_the_bit():
    """Each column of B meets one gradient of 1, so that nothing is rounded but A itself; infinities spoil no neighbour."""
    r = recipe(HOPPER, Slices.even(64, 2, 32))
    a = np.float32([1.9999999, 0.99999994, -3.9999998, 60001, np.inf, 1e-3, -0.0, 7.0] * 8)[None]
    gradient = jax.grad(lambda b: tcemu.matmul(a, b, recipe=r)[0, 0])(jnp.zeros((64, 1), jnp.float32))
    assert (np.asarray(gradient)[:, 0] == a[0].astype(np.float16).astype(np.float32)).all()


# ---- the order, and values


def test_every_order_adds_every_sum_once():
    for order in ("ascending", "descending", "tree", "folded", "paired"):
        for count in range(1, 20):
            sums = {i: [i] for i in range(count)}
            last = 0
            for to, source in ordered_pairs(order, count):
                sums[to] = sums[to] + sums.pop(source)
                last = to
            assert sorted(sums[last]) == list(range(count)), (order, count)


def test_every_place_is_taken_once():
    for slices in (
        Slices.even(1000, 7, 64),
        Slices.interleaved(1000, 3, 64),
        Slices.from_edges((0, 10, 500, 1000)),
        Slices.even(1000, 3, 8, dropped=5),
    ):
        assert np.concatenate(slice_indices(slices)).size == slices.used
        for unit in (HOPPER, steps(residue=32), steps(restart=128)):
            places = step_order(unit, slices).indices
            assert sorted(places[places >= 0].tolist()) == list(range(slices.used))


def test_the_rule_of_slices():
    assert even_edges(8192, 6, 64) == (0, 1408, 2816, 4224, 5632, 7040, 8192)  # an H200's f16 64 x 64 x 8192
    assert even_edges(16384, 6, 128)[1] == 2816 and even_edges(12288, 4, 128)[1] == 3072
    assert even_edges(64, 6, 64) == (0, 64)


EXAMPLES = [
    recipe(HOPPER, Slices.even(300, 3, 64), Merge(partial=F16, serial=True), F16, conditions=Conditions(3, 4, gpu="H200", sm_count=132)),
    recipe(Lanes(32, 4, 8), Slices.single(77), fmt=F32, epilogue=Epilogue(True, 0.5)),
    recipe(Lanes(32, 4, 8, fused=False, product=F16, start="first"), Slices.single(77)),
    recipe(
        steps(E4M3),
        Slices.single(64),
        out=BF16,
        fmt=E4M3,
        conditions=Conditions(scales="rows", bias="bf16 columns"),
        epilogue=Epilogue(True, scaling="a first", plus_zero=False, between=BF16),
    ),
    recipe(steps(E4M3, restart=128), Slices.interleaved(512, 3, 64), out=BF16, fmt=E4M3),
    recipe(steps(model=tcemu.get_model(WGMMA[F16], "sm_90a").replace(fraction_bits=20)), Slices.from_edges((0, 10, 64), dropped=3)),
]


@pytest.mark.parametrize("r", EXAMPLES, ids=lambda r: str(r.slices.k))
def test_json_brings_it_back(r):
    assert loads(dumps(r)) == r and loads(dumps(r)).conditions == r.conditions
    assert hash(loads(dumps(r))) == hash(r)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d | {"version": 2}, "version 2"),
        (lambda d: d | {"kind": "x"}, "expected 'tcemu kernel recipe'"),
        (lambda d: d | {"more": 1}, "unknown \\['more'\\]"),
        (lambda d: {k: v for k, v in d.items() if k != "merge"}, "missing \\['merge'\\]"),
        (lambda d: d | {"a": "f17"}, "a: got 'f17'"),
        (lambda d: d | {"a": ["f16"]}, "expected a number format"),
        (lambda d: d | {"unit": {"steps": 3}}, "steps: got 3"),
        (lambda d: d | {"slices": d["slices"] | {"edges": [0, 64, 32, 300]}}, "ascend"),
        (lambda d: d | {"slices": d["slices"] | {"edges": [0, 100, 300]}}, "rule="),
        (lambda d: d | {"slices": d["slices"] | {"k": True}}, "k=True"),
        (lambda d: d | {"merge": d["merge"] | {"order": "any"}}, "order='any'"),
        (lambda d: d | {"epilogue": d["epilogue"] | {"between": "f17"}}, "between: got 'f17'"),
        (lambda d: d | {"epilogue": d["epilogue"] | {"scaling": "c first"}}, "scaling='c first'"),
        (lambda d: d | {"conditions": d["conditions"] | {"bias": "bf16"}}, "bias='bf16'"),
        (lambda d: d | {"conditions": d["conditions"] | {"m": 1.5}}, "m=1.5"),
    ],
)
def test_json_is_read_strictly(change, said):
    held = json.loads(dumps(EXAMPLES[0]))
    with pytest.raises(ValueError, match=said):
        loads(json.dumps(change(held)))


def test_recipes_are_equal_where_matmul_does_the_same_with_them():
    """A recipe is a key of jit's cache: one that is refused for another N must not be found there."""
    r = recipe(Lanes(), Slices.single(16), fmt=F32, conditions=Conditions(m=3, n=16, gpu="H200"))
    same = r.replace(conditions=Conditions(m=3, n=16, evidence="elsewhere"))
    assert r == same and hash(r) == hash(same)
    for other in (Conditions(m=3, n=32), Conditions(n=16), Conditions(m=3, n=16, scales="rows"), Conditions(3, 16, bias="f32 columns")):
        assert r != r.replace(conditions=other) and r.has_order(r.replace(conditions=other))
    a = np.ones((3, 16), np.float32)
    for n in (16, 32):
        dot = jax.jit(tcemu.dot_general(r.replace(conditions=Conditions(m=3, n=n))), static_argnums=2)
        assert dot(a, np.ones((16, n), np.float32), (((1,), (0,)), ((), ()))).shape == (3, n)


def test_files_from_before_scales_are_read():
    """As they were written: an epilogue and conditions of fewer fields."""
    for r in EXAMPLES[:2]:
        held = json.loads(dumps(r))
        for name, later in LATER_FIELDS.items():
            part = held["unit"] if name in held["unit"] else held
            if name in part:
                part[name] = {key: value for key, value in part[name].items() if key not in later}
        assert "plus_zero" not in held["epilogue"] and loads(json.dumps(held)) == r


@pytest.mark.parametrize("r", EXAMPLES, ids=lambda r: f"{type(r.unit).__name__} {r.slices}")
def test_no_changed_json_ends_in_another_error_than_valueerror(r):
    """Every value is replaced by values of other types; what is still read is a recipe with an order."""
    plain, refused = json.loads(dumps(r)), 0
    for path, value in product(json_paths(plain), (None, True, 1.5, -1, "x", [], [1], [[1]], {}, {"a": 1})):
        try:
            read = loads(json.dumps(replace_at(plain, path, value)))
        except ValueError:
            refused += 1
            continue
        assert str(read) and dumps(read) and plan_kernel(read)
    assert refused > 300
    with pytest.raises(TypeError, match="text: got NoneType"):
        loads(None)


def test_json_that_is_none():
    for text in ("", "[1]", '{"a": 1, "a": 2}', "NaN", "[" * 100_000):
        with pytest.raises(ValueError):
            loads(text)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Slices(10), "edges or dealt"),
        (lambda: Slices.even(0, 1, 1), "k=0"),
        (lambda: Merge("tree", F16, True), "ascending or descending"),
        (lambda: Merge(serial=True), "serial=True"),
        (lambda: Merge(atomic=True), "atomic=True"),
        (lambda: Merge(partial=F16, serial=True, atomic=True), "False with serial=True"),
        (lambda: Lanes(0), "lanes=0"),
        (lambda: Lanes(product=F16), "expected fused=False"),
        (lambda: Lanes(product=F32, fused=False), "product="),
        (lambda: Lanes(start="none"), "start="),
        (lambda: steps(restart=24), "restart=24"),
        (lambda: Epilogue(alpha=2.0), "scaled=True"),
        (lambda: Epilogue(scaling="a first"), "scaled=True"),
        (lambda: Epilogue(True, 2.0, scaling="a first"), "expected alpha=1"),
        (lambda: Epilogue(True, roundings=1, between=F16), "expected roundings=2"),
        (lambda: Conditions(scales="columns"), "scales='columns'"),
        (lambda: recipe(HOPPER, Slices.single(8), fmt=BF16), "multiplies f16"),
        (lambda: recipe(HOPPER, Slices.single(8), Merge(partial=BF16)), "partial=bf16"),
        (lambda: recipe(HOPPER, Slices.single(8), cast="RNA"), "tf32"),
        (lambda: Steps("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64", "sm_80"), "results f32"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_what_cannot_be_is_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_products_that_do_not_fit_are_refused():
    a, b = draw_matrices(300)
    r = EXAMPLES[0]
    tcemu.matmul(a, b, recipe=r)
    for wrong, options, said in (
        ((a[:, :299], b[:299]), {}, "this recipe is for K = 300"),
        ((a[:2], b), {}, "without_shape"),
        ((a, b), {"scale_a": np.float32(2)}, "not scaled"),
        ((a, b), {"key": jax.random.key(0)}, "leave them out"),
        ((a, b), {"dtype": np.int32}, "float dtype"),
    ):
        with pytest.raises((ValueError, TypeError), match=said):
            tcemu.matmul(*wrong, recipe=r, **options)
    part = tcemu.matmul(a[:2], b, recipe=r.without_shape())
    assert (np.asarray(part) == np.asarray(tcemu.matmul(a, b, recipe=r))[:2]).all()


def test_subnormal_numbers_that_count_as_zeros():
    a, b = np.float32([[2**-126, 2**-130, 1.5 * 2**-126]]), np.float32([[-1, 1], [1, 1], [1, -1]])
    for flush, expected in ((False, [2**-127 + 2**-130, -(2**-127) + 2**-130]), (True, [0, -0.0])):
        got = np.asarray(tcemu.matmul(a, b, recipe=recipe(Lanes(flush=flush), Slices.single(3), fmt=F32)))
        assert got[0].view(np.uint32).tolist() == np.float32(expected).view(np.uint32).tolist()


@pytest.mark.parametrize("fmt", sample_cases([F16, BF16], [BF16], ids=str))
def test_products_that_are_rounded_before_they_are_added(fmt):
    """XLA's sums of products that its f16 or bf16 has already: NumPy's and ml_dtypes' casts, f32 sums in the order of the lanes."""
    dtype = {F16: np.float16, BF16: ml_dtypes.bfloat16}[fmt]
    a, b = (x.astype(dtype) for x in draw_matrices(61, dtype=np.float32))
    a[0, :20] *= dtype(2.0**-14 if fmt == F16 else 2.0**-60)
    b[:, 0] *= dtype(2.0**-8 if fmt == F16 else 2.0**-70)  # subnormal products
    products = (a[:, :, None].astype(np.float64) * b[None].astype(np.float64)).astype(np.float32).astype(dtype).astype(np.float32)
    own = [np.float32(0)] * 4
    for k in range(61):
        own[k % 4] = own[k % 4] + products[:, k]
    expected = ((own[0] + own[2]) + (own[1] + own[3])).astype(dtype)
    got = np.asarray(
        tcemu.matmul(a, b, recipe=recipe(Lanes(4, 1, None, "folded", False, product=fmt), Slices.single(61), out=fmt, fmt=fmt))
    )
    assert (got.astype(dtype).view(np.uint16) == expected.view(np.uint16)).all()
    fused = tcemu.matmul(a, b, recipe=recipe(Lanes(4, 1), Slices.single(61), out=fmt, fmt=fmt))
    assert (np.asarray(fused, np.float32) != expected.astype(np.float32)).any()  # the control


NEGATIVE_ZEROS = [
    (Lanes(8, 1, None, "folded", start="first"), Merge(), True),  # lanes without products take no part
    (Lanes(start="first"), Merge(start="zero"), False),
    (Lanes(), Merge(), False),
    (Lanes(start="first"), Merge(), True),
    (Lanes(2, 1, 2, "ascending", False, start="first"), Merge(), True),
]


@pytest.mark.parametrize("case", sample_cases(NEGATIVE_ZEROS, NEGATIVE_ZEROS[:2], lambda case: f"{case[0]} {case[1]}"))
def test_negative_zeros(case):
    """Sums of negative zeros are one where a chain begins at its first product; +0 that is added to one slice ends that."""
    unit, merge, negative = case
    a, b = np.float32([[-0.0, -0.0, -0.0, -0.0, -0.0]]), np.ones((5, 1), np.float32)
    got = np.asarray(tcemu.matmul(a, b, recipe=recipe(unit, Slices.single(5), merge, fmt=F32)))
    assert got.view(np.uint32).tolist() == [[0x80000000 * negative]]


@pytest.mark.full
def test_one_slice_that_waits():
    """A result below the least number of f16 is -0, and +0 once it has waited in f16 and was added to +0."""
    a, b = np.float16([[-(2.0**-24)]]), np.float16([[2.0**-24]])
    for merge, word in ((Merge(), 0x8000), (Merge(start="zero"), 0x8000), (Merge(partial=F16, start="zero"), 0)):
        made = recipe(HOPPER, Slices.single(1), merge, F16)
        got = np.asarray(tcemu.matmul(a, b, recipe=made)).astype(np.float16)
        assert got.view(np.uint16).tolist() == [[word]] and ("begun at +0" in str(made)) == (merge.start == "zero")


def test_files_from_before_products_were_rounded():
    made = recipe(Lanes(4, 1), Slices.single(20))
    held = json.loads(dumps(made))
    for name in ("product", "start"):
        del held["unit"]["lanes"][name]
    assert loads(json.dumps(held)) == made
    del held["unit"]["lanes"]["flush"]
    with pytest.raises(ValueError, match="missing"):
        loads(json.dumps(held))


# ---- where two part


@pytest.mark.full
def test_where_two_recipes_part():
    a, b = draw_matrices(200, seed=3)
    left, right = recipe(HOPPER, Slices.single(200)), recipe(HOPPER, Slices.even(200, 2, 64))
    found = find_divergence(a, b, left, right)
    x, y = (np.asarray(tcemu.matmul(a, b, recipe=r)) for r in (left, right))
    assert found.outputs == ((x != y).sum(), x.size) and found.position == tuple(np.argwhere(x != y)[0])
    assert found.sum_index == 8 and [s.k_indices for s in found.sums if s] == [tuple(range(128, 144))] * 2  # a new slice begins at k = 128
    assert found.sums[1].start == 0 and "instruction of k 128 to 143" in str(found) and "right:\nwgmma" in str(found)
    halved = find_divergence(a, b, left, left.replace(epilogue=Epilogue(True, 0.5)))
    assert "the total times alpha" in str(halved) and halved.results[1] == halved.results[0] / 2
    assert find_divergence(a, b, left, left).sum_index is None and "0 of 12 outputs differ" in str(find_divergence(a, b, left, left))


SUMMED = [
    recipe(HOPPER, Slices.even(200, 3, 64), Merge(partial=F16, serial=True), F16),
    recipe(HOPPER, Slices.even(200, 4, 32), Merge("tree", F16, atomic=True), F16),
    recipe(HOPPER, Slices.even(200, 3, 64), Merge(partial=F16, start="zero", atomic=True), F16),
    recipe(HOPPER, Slices.even(200, 3, 64), Merge("paired", F16), F16),
    recipe(steps(restart=64), Slices.interleaved(200, 2, 32)),
    recipe(Lanes(8, 2, 4, "tree"), Slices.even(200, 2, 8), Merge(start="zero")),
    recipe(Lanes(3, 2, None, "folded", False), Slices.single(200), fmt=F32),
    recipe(Lanes(4, 1, None, "tree", False, product=F16, start="first"), Slices.single(200)),
    recipe(HOPPER, Slices.single(200), Merge(partial=F16, start="zero"), F16),
]


@pytest.mark.parametrize("r", sample_cases(SUMMED, 8, lambda r: f"{r.merge} {r.unit}"))
def test_sums_in_plain_python_are_the_engine(r):
    """`explain` and fractions on one side, the engine on the other."""
    a, b = draw_matrices(200, dtype=np.float32 if r.a == F32 else np.float16)
    got = np.asarray(tcemu.matmul(a, b, recipe=r.replace(dtype=F32) if r.merge.partial == F32 else r))
    word = a.view(f"uint{r.a.bits}"), b.view(f"uint{r.a.bits}")
    last = list(trace_sums(r, word[0][1].tolist(), word[1][:, 2].tolist()))[-1].code
    assert last == int(got[1, 2].view(np.uint32))


BY_NUMPY = [r for r in SUMMED if isinstance(r.unit, Steps)] + [
    recipe(steps(residue=64), Slices.even(200, 3, 72), Merge("descending"), F16, epilogue=Epilogue(between=F16)),
    recipe(steps(BF16), Slices.single(200), out=BF16, fmt=BF16),
    recipe(steps(BF16), Slices.even(200, 2, 64), Merge(partial=BF16), BF16, BF16, epilogue=Epilogue(between=BF16)),
]


@pytest.mark.parametrize("r", sample_cases(BY_NUMPY, 8, lambda r: f"{r.merge} {r.unit} {r.epilogue.between}"))
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_products_of_numpy_arrays_have_the_words_of_the_compiled_ones(r, batch):
    """With huge and tiny numbers, infinities, NaN, zeros of both signs, and B in both memory orders."""
    rng, dtype = np.random.default_rng(5), {F16: np.float16, BF16: ml_dtypes.bfloat16}[r.a]
    a, b = (rng.standard_normal((*batch, *shape)) * np.exp2(rng.integers(-14, 15, shape)) for shape in ((13, 200), (200, 11)))
    a[..., 3, :9], a[..., 4, 5], a[..., 5, :] = 6e4, np.inf, -0.0
    b[..., 7, 2], b[..., 3] = np.nan, 6e4
    a, b, bias = a.astype(dtype), b.astype(dtype), rng.standard_normal(11).astype(dtype)
    bias[4] = -0.0
    for given in (None, bias):
        expected = np.asarray(tcemu.matmul(a, b, bias=given, recipe=r, dtype=FLOATS[r.dtype]))
        for columns in (b, np.ascontiguousarray(b.swapaxes(-1, -2)).swapaxes(-1, -2)):
            found = multiply_by_numpy(r, a, columns, given)
            assert found is not None and found.dtype == expected.dtype
            assert (found.view(f"u{found.dtype.itemsize}") == expected.view(f"u{found.dtype.itemsize}")).all()


def test_numpy_leaves_sums_in_lanes_scales_and_conversions_to_compiled_programs():
    a, b = draw_matrices(200)
    wide = a.astype(np.float32), b.astype(np.float32)
    others = recipe(Lanes(), Slices.single(200)), recipe(HOPPER, Slices.single(200), epilogue=Epilogue(scaled=True, alpha=0.5))
    assert [multiply_by_numpy(r, a, b) for r in others] == [None, None]
    assert multiply_by_numpy(recipe(HOPPER, Slices.single(200)), *wide) is None
