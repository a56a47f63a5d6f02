"""`tcemu.study.sweep`: the same errors as products made one by one, few compiled programs, and what it refuses."""

from fractions import Fraction
from math import log2, sqrt

import jax
import numpy as np
import pytest

import tcemu
from tcemu.formats import F32
from tcemu.study import normal, sweep, uniform
from tcemu.uses.study import accuracy as measures
from tcemu.uses.study.accuracy import MEASURE_DEFINITIONS, MEASURES, TALLY_MEASURES, resolve_measures

WGMMA = "e4m3 wgmma"
SIZE = (8, 8, 96)  # M, N, K
BITS, INTERVALS = (6, 13), (None, 2, 4)  # of three instructions: a last chunk that is not full is cut once more at 6 bits
COMPILED = []  # a word for each program that XLA compiled, or JAX took from its cache
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration_secs, **_: COMPILED.append(event) if event == "/jax/core/compile/backend_compile_duration" else None
)


def exact_measures(value: np.ndarray, a: np.ndarray, b: np.ndarray) -> dict[str, float]:
    """Every measure in rational arithmetic, of an f32 product of matrices."""
    exact = [[sum(map(lambda x, y: Fraction(x) * Fraction(y), row, column), Fraction()) for column in b.T.tolist()] for row in a.tolist()]
    pairs = [(Fraction(float(x)), y) for row, wanted in zip(value, exact, strict=True) for x, y in zip(row, wanted, strict=True)]
    errors, count = [abs(x - y) for x, y in pairs], len(pairs)
    relative = [e / abs(y) for e, (_, y) in zip(errors, pairs, strict=True)]
    ulps = [float(e) / 2.0 ** (int(np.frexp(float(y))[1]) - 24) for e, (_, y) in zip(errors, pairs, strict=True)]
    lost = [min(log2(max(u, 1)), 24) for u in ulps]
    size = sqrt(sum(y**2 for _, y in pairs))
    return {
        "normwise": sqrt(sum(e**2 for e in errors)) / size,
        "elementwise": float(max(relative)),
        "mean_elementwise": float(sum(relative) / count),
        "largest_over_rms": float(max(errors)) / (size / sqrt(count)),
        "bias": float(sum((x - y) * (1 if y > 0 else -1) for x, y in pairs) / sum(abs(y) for _, y in pairs)),
        "ulps": max(ulps), "mean_ulps": sum(ulps) / count, "bits_lost": sum(lost) / count, "most_bits_lost": max(lost),
    }  # fmt: skip


@pytest.fixture(scope="module")
def swept():
    """Two axes that are traced, one with a value that is not, and two seeds."""
    over = {"fraction_bits": BITS, "promote": INTERVALS, "op": (WGMMA,)}
    return sweep(tcemu.matmul, over, operands=normal(*SIZE), measures=[*MEASURES, *TALLY_MEASURES], seeds=2)


def test_every_row_is_the_error_of_its_product(swept):
    """Each product made by itself, its error in rational arithmetic: every measure, at every point, for every seed."""
    assert len(swept) == len(BITS) * len(INTERVALS) * 2 and swept.programs == 2
    assert [(r["fraction_bits"], r["promote"], r["seed"]) for r in swept.records()] == [
        (f, p, s) for f in BITS for p in INTERVALS for s in (0, 1)
    ]
    base = tcemu.Recipe(tcemu.parse(WGMMA), "H100")
    what_if = lambda a, b, bits, promote: tcemu.matmul(a, b, recipe=base.what_if(fraction_bits=bits, promote=promote))
    product = jax.jit(what_if, static_argnums=3)
    for record in swept.records():
        a, b = normal(*SIZE)(record["seed"])
        value = np.asarray(product(a, b, record["fraction_bits"], record["promote"]))
        held = [np.asarray(tcemu.formats.round_float(tcemu.formats.E4M3, x)) for x in (a, b)]
        wanted = exact_measures(value, *held)
        assert {name: record[name] for name in wanted} == pytest.approx(wanted, rel=1e-9)
        assert record["not_finite"] == 0 and record["op"] == WGMMA


def test_a_result_can_be_asked(swept):
    assert swept.column("seed", fraction_bits=6, promote=None) == (0, 1)
    (first,) = swept.column("normwise", fraction_bits=13, promote=2, seed=1)
    assert [r["normwise"] for r in swept.records() if (r["fraction_bits"], r["promote"], r["seed"]) == (13, 2, 1)] == [first]
    with pytest.raises(KeyError, match="'bits' is none of fraction_bits, promote, op, seed, normwise"):
        swept.column("normwise", bits=6)
    with pytest.raises(KeyError, match="no row has"):
        swept.column("normwise", fraction_bits=7)


def test_a_result_prints_means_over_seeds(swept):
    lines = str(swept).splitlines()
    assert len(lines) == 1 + len(BITS) * len(INTERVALS) + 1 and "Unit: wgmma" in lines[-1]
    assert lines[0].split()[:7] == ["fraction", "bits", "promote", "op", "target", "evidence", "normwise"]
    mean = np.mean(swept.column("normwise", fraction_bits=6, promote=None))
    assert lines[1].split()[:7] == ["6", "None", "e4m3", "wgmma", "sm_90a", "what-if", f"{mean:.3g}"]
    assert repr(swept) == "<Sweep of 2 fraction_bits x 3 promote x 1 op, 2 seeds: 12 rows>"


def test_pictures(swept):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install -e '.[viz]')")
    (axes,) = swept.plot().axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    mean = lambda **at: np.mean(swept.column("normwise", **at))
    assert drawn.keys() == {f"promote {p}, {WGMMA}" for p in ("never", 2, 4)}
    assert drawn[f"promote 2, {WGMMA}"] == [[bits, mean(fraction_bits=bits, promote=2)] for bits in BITS]
    (axes,) = swept.plot("ulps", axis="promote").axes
    assert len(axes.lines) == 2 and axes.get_ylabel() == "ulps"  # never is no number
    (axes,) = tcemu.study.Sweep({"op": ("a", "b")}, ("normwise",), (0,), (("a", 0, 0.5, 0), ("b", 0, 2.0, 0)), 1).plot().axes
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == [0.5, 2]
    with pytest.raises(KeyError, match=r"one of normwise, .* axis one of fraction_bits, promote, op"):
        swept.plot("speed")


def test_every_measure_has_a_definition_and_its_name_alone():
    assert MEASURE_DEFINITIONS.keys() == MEASURES.keys() | TALLY_MEASURES.keys() and resolve_measures(MEASURES) == MEASURES
    with pytest.raises(ValueError, match="'ulps' is the name of a measure"):
        resolve_measures({"ulps": lambda value, exact: 0.0})


# ---- programs


def compiled_programs(size: int) -> tuple[tcemu.study.Sweep, int]:
    """23 widths in four formats, and how many programs were compiled on the way."""
    over = {"recipe": ("f16", "bf16", "tf32", "fp8"), "fraction_bits": range(2, 25)}
    before = len(COMPILED)
    found = sweep(tcemu.matmul, over, operands=normal(size, size, size))
    return found, len(COMPILED) - before


@pytest.mark.full
@pytest.mark.parametrize("size", [16, 512])
def test_widths_and_formats_are_four_programs(size):
    found, programs = compiled_programs(size)
    assert len(found) == 92 and found.programs == 4 and 1 <= programs <= 4
    for name in found.axes["recipe"]:
        errors = [found.column("normwise", recipe=name, fraction_bits=bits)[0] for bits in (2, 6, 10)]
        assert errors[0] > 4 * errors[1] > 16 * errors[2] > 0
    again, programs = compiled_programs(size)
    assert again.rows == found.rows and programs == 0  # equal sweeps of tcemu's own products share theirs


# ---- what may be swept


@pytest.mark.full
def test_gemm_targets_and_roundings():
    """A function that takes a model; a rounding as a word, which the program takes as a number; GPUs by name."""
    over = {"rounding": ("RZ", "RN"), "target": ("H100", "sm_90a")}
    found = sweep(tcemu.gemm, over, recipe="f16", operands=uniform(4, 4, 64), measures={"sum": lambda value, exact: float(value.sum())})
    a, b = uniform(4, 4, 64)(0)
    for rounding in ("RZ", "RN"):
        model = tcemu.get_recipe("f16", "H100").arithmetic.replace(rounding=rounding)
        wanted = np.asarray(tcemu.gemm(a, b, op=tcemu.get_recipe("f16", "H100").op, target="sm_90a", model=model), np.float64).sum()
        assert found.column("sum", rounding=rounding) == (wanted, wanted)
    assert found.column("sum", rounding="RZ") != found.column("sum", rounding="RN")


@pytest.mark.full
def test_equal_recipes_keep_their_names():
    recipes = [tcemu.get_recipe("f16").replace(name=name) for name in ("one", "two")]
    found = sweep(tcemu.matmul, {"recipe": recipes}, operands=normal(4, 4, 16), exact="given", measures="normwise", seeds=(3, 1))
    assert [(r["recipe"], r["seed"]) for r in found.records()] == [("one", 1), ("one", 3), ("two", 1), ("two", 3)]
    assert found.column("normwise", recipe="one") == found.column("normwise", recipe="two") and found.programs == 1


def test_axes_of_ones_own():
    """What operands and fn name; an exact result of one's own; what is not finite is counted and left out."""

    def draw(seed: int, scale: float) -> tuple[np.ndarray, ...]:
        a, b = normal(4, 4, 16)(seed)
        return (a * np.float32(scale), b)

    def doubled(a, b, recipe, times):
        return times * tcemu.matmul(a, b, recipe=recipe)

    exact = lambda a, b, times: times * (a.astype(np.float64) @ b.astype(np.float64))
    over = {"scale": (1.0, 2.0**16), "times": (1, 2)}
    found = sweep(doubled, over, recipe="f16", operands=draw, exact=exact, measures="normwise")
    of = lambda **at: found.column("normwise", **at)[0]
    assert 0 < of(scale=1.0, times=1) == of(scale=1.0, times=2) < 1e-3
    assert found.column("not_finite", scale=1.0) == (0, 0) and min(found.column("not_finite", scale=2.0**16)) > 0
    given = sweep(tcemu.matmul, {"recipe": "f16"}, operands=draw(0, 1.0), exact="given", measures="normwise")
    assert given.column("normwise")[0] == of(scale=1.0, times=1)


def test_measures_of_nothing():
    zeros = np.zeros((2, 2))
    found, lost = measures.compute_measures(measures.resolve_measures([*MEASURES, "ulps"]), F32, zeros, zeros)
    assert {name: found[name] for name in ("normwise", "elementwise", "largest_over_rms", "bias")} == dict.fromkeys(
        ("normwise", "elementwise", "largest_over_rms", "bias"), 0.0
    )
    assert lost == 0 and np.isnan(found["mean_elementwise"]) and np.isnan(found["ulps"])
    found, lost = measures.compute_measures(measures.resolve_measures("normwise"), F32, np.array([1.0, np.nan]), np.array([0.0, 1.0]))
    assert (found, lost) == ({"normwise": np.inf}, 1)


DRAW = normal(2, 2, 16)
ROWWISE = lambda a, b, recipe: tcemu.matmul(a, b, recipe=recipe).sum(0)


@pytest.mark.parametrize(
    ("fn", "over", "options", "error", "said"),
    [
        (tcemu.matmul, {}, {"recipe": "f16"}, ValueError, "over: got no axes"),
        (tcemu.matmul, {"terms": ()}, {"recipe": "f16"}, ValueError, "over: terms has no values"),
        (
            tcemu.matmul,
            {"bits": (3,)},
            {"recipe": "f16"},
            TypeError,
            "over: 'bits' is neither one of recipe, op, target, result, terms, fraction_bits, .*promote, a, b, ",
        ),
        (tcemu.matmul, {"terms": (8,)}, {}, TypeError, "recipe: give the recipe that the axes change, or an axis 'recipe' or 'op'"),
        (tcemu.gemm, {"promote": (4,)}, {"recipe": "f16"}, TypeError, "over: promote would not reach fn, which does not take recipe="),
        (tcemu.gemm, {"terms": (8,)}, {"recipe": "fp8"}, TypeError, "recipe: fp8 scales operands, promotes .* fn does not take recipe="),
        (tcemu.matmul, {"seed": (1,)}, {"recipe": "f16"}, TypeError, "over: 'seed' is neither"),
        (lambda a, b, target: a, {"terms": (8,)}, {"recipe": "f16"}, TypeError, "terms would not reach fn, .* recipe= or model="),
        (lambda a, b: a, {"terms": (8,)}, {"recipe": "f16"}, TypeError, "fn: it takes none of recipe=, op=, target= and model="),
        (tcemu.matmul, {"fraction_bits": (8, 99)}, {"recipe": "f16"}, ValueError, "fraction_bits must be from 1 to 40"),
        (tcemu.matmul, {"promote": (4, 3)}, {"recipe": "deepseek"}, ValueError, "promote=3 takes 96 elements along K"),
        (tcemu.matmul, {"recipe": ("f17",)}, {}, ValueError, "recipe 'f17', did you mean 'f16'"),
        (tcemu.matmul, {"target": ("H200X",)}, {"recipe": "f16"}, ValueError, "unknown target 'H200X'"),
        (
            tcemu.matmul,
            {"terms": (8,)},
            {"recipe": "f16", "measures": "speed"},
            ValueError,
            "measures: got .speed.; .* some of normwise",
        ),
        (tcemu.matmul, {"terms": (8,)}, {"recipe": "f16", "measures": {"x": 3}}, TypeError, "measures: 'x' has no function"),
        (tcemu.matmul, {"terms": (8,)}, {"recipe": "f16", "exact": "so"}, ValueError, "exact=.so.: .* .quantized., .given."),
        (tcemu.matmul, {"terms": (8,)}, {"recipe": "f16", "seeds": ()}, ValueError, "seeds: .* at least one"),
        (tcemu.matmul, {"terms": (8,)}, {"recipe": "f16", "operands": lambda seed: 3}, TypeError, "operands: got int; .* a tuple"),
        (tcemu.matmul, {"terms": (8,)}, {"recipe": "f16", "operands": (np.ones(3, np.float32),) * 2}, ValueError, "is of two matrices"),
        (ROWWISE, {"terms": (8,)}, {"recipe": "f16"}, ValueError, r"fn gave \[2\], and the exact result is \[2, 2\]; give exact="),
    ],
)
def test_what_cannot_be_swept(fn, over, options, error, said):
    if fn is tcemu.matmul and "operands" in options and not callable(options["operands"]):
        fn = lambda a, b, recipe: a + b
    with pytest.raises(error, match=said):
        sweep(fn, over, **({"operands": DRAW} | options))


@pytest.mark.parametrize("sizes", [(-1, 2, 3), (1.5, 2, 3), (0, 1, 1), ("2", 2, 2)])
def test_sizes_of_drawn_operands_are_checked(sizes):
    for law in (normal, uniform):
        with pytest.raises(ValueError, match=r"m: got .*; expected an integer from 1"):
            law(*sizes)


def test_a_sweep_without_a_finite_result_has_no_error():
    a = np.full((4, 4), np.nan, np.float32)
    names = ("normwise", "elementwise")
    (row,) = sweep(tcemu.matmul, {"fraction_bits": 9}, recipe="f16 on H100", operands=(a, a), measures=names).records()
    assert np.isnan(row["normwise"]) and np.isnan(row["elementwise"]) and row["not_finite"] == 16
