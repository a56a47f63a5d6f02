"""What a rate of differing outputs means: public reports with their answers, a planted kernel, and the intervals by themselves.

The reports are triton-lang/triton#1481 (2023-04-06, A100: 427,383 of 2,097,152 outputs of f16 differ by more than 1e-3, at most by 1) and
modular/modular#7165 (2026-09-20, RTX 3090 Ti, bf16: at most 0.38 of outputs above 1 in magnitude, 4 to 6 slices).
"""

import json
from math import inf

import numpy as np
import pytest
from oracles import simulated_kernels as sim

from tcemu.cli import main
from tcemu.replay import attribute
from tcemu.uses.replay.attribution import (
    KEPT,
    SLICE_COUNTS,
    RateSpread,
    largest_interval,
    parse_law,
    rates_agree,
    reported_range,
    wilson,
)

TRITON = {"differing": 427_383 / 2_097_152, "largest": 1.0, "atol": 1e-3, "law": "normal(-0.5, 1)", "gpus": ("A100",)}
F32_SUMS = {"exact sum", "one slice", "one slice by fma", "f32 partial sums"}
MODULAR = {"largest_relative": 0.38, "relative_above": 1.0, "law": "uniform(-1, 1)", "gpus": ("RTX 3090 Ti",)}


def is_f32(pair):
    return set(pair.kinds) <= F32_SUMS


# ---- public reports


@pytest.fixture(scope="module")
def triton():
    return attribute((512, 4096, 4096), "f16", **TRITON, slices=(2, 3, 4), draws=4)


def test_three_slices_in_f16_give_the_rate_of_a_report(triton):
    pair = triton.find("3 slices, f16 partial sums", "A100, one slice")
    assert pair.consistent and pair.differing.low < 0.199 < pair.differing.high and pair.largest.value == 1
    assert triton.pairs[0].consistent and {p.kinds[0] for p in triton.consistent} <= {"f16 partial sums", "f16 running sum"}
    for count in (2, 4):
        assert not triton.find(f"{count} slices, f16 partial sums", "A100, one slice").consistent


def test_no_order_of_f32_sums_gives_it(triton):
    pairs = [pair for pair in triton.pairs if is_f32(pair)]
    assert len(pairs) >= 7 and not any(pair.consistent for pair in pairs)
    assert all(pair.differing.high < 0.03 and pair.reasons[0] == "differing too small" for pair in pairs)
    assert not triton.find("f16 accumulators", "exact").consistent  # nine outputs in ten differ


@pytest.mark.full
def test_the_rates_of_that_report_on_many_draws():
    found = attribute((512, 4096, 4096), "f16", **TRITON, slices=(3, *SLICE_COUNTS), draws=48)
    assert abs(found.find("3 slices, f16 partial sums", "A100, one slice").differing.value - 0.199) < 0.004
    assert 0.012 < max(pair.differing.value for pair in found.pairs if is_f32(pair)) < 0.017


def test_slices_and_a_running_sum_in_bf16_give_the_largest_difference_of_a_report():
    found = attribute((64, 4096, 14_336), "bf16", **MODULAR, slices=(6,), draws=2)
    assert found.find("6 slices, bf16 partial and running sums", "exact").consistent
    of_f32 = [pair for pair in found.pairs if is_f32(pair)]
    assert len(of_f32) == 3 and all(pair.largest_relative.value < 2**-6 for pair in of_f32)
    assert not found.find("6 slices, f32 partial sums", "one slice").consistent


@pytest.mark.full
def test_that_largest_difference_on_as_many_outputs_as_were_reported():
    found = attribute((64, 4096, 14_336), "bf16", **MODULAR, slices=(6,), draws=114)
    pair = found.find("6 slices, bf16 partial and running sums", "exact")
    assert pair.consistent and 0.3 < pair.largest_relative.value < 0.5


# ---- a planted kernel, which shares no line with the package


def test_a_planted_kernel_is_among_the_consistent_pairs():
    m, n, k, law = 64, 64, 512, np.random.default_rng(7)
    a, b = law.standard_normal((m, k)).astype(np.float16), law.standard_normal((k, n)).astype(np.float16)
    whole, split = sim.tensor("f16", "f16", [list(range(k))]), sim.tensor("f16", "f16", sim.even(k, 4, 64), sim.serial("f16"))
    x, y = (np.asarray(kernel(a, b)).astype(np.float64) for kernel in (split, whole))
    found = attribute(
        (m, n, k), "f16", differing=float((x != y).mean()), largest=float(np.abs(x - y).max()), gpus=("H100",), slices=(2, 4, 8), draws=4
    )
    assert found.find("4 slices, f16 running sum", "H100, one slice").consistent
    assert not any(pair.consistent for pair in found.pairs if is_f32(pair))


# ---- intervals


def test_wilsons_interval():
    assert wilson(0.0, 100) == (0.0, pytest.approx(1.959964**2 / (100 + 1.959964**2)))
    assert wilson(81 / 263, 263) == (pytest.approx(0.2553, abs=5e-5), pytest.approx(0.3662, abs=5e-5))  # Newcombe 1998, table I


def test_newcombes_interval_of_a_difference():
    """R. G. Newcombe, Statistics in Medicine 17, 873 (1998), table II, method 10: those that contain 0, and those that do not."""
    assert not rates_agree(56 / 70, 70, 48 / 80, 80)
    assert not rates_agree(9 / 10, 10, 3 / 10, 10) and not rates_agree(6 / 7, 7, 2 / 7, 7)
    assert rates_agree(5 / 56, 56, 0.0, 29) and rates_agree(0.0, 10, 0.0, 20)


@pytest.mark.parametrize("shape", [(6, 40), (1, 40), (40, 1)])
def test_outputs_that_share_a_row_or_a_column_count_as_fewer(shape):
    """The variance of the rate by its components is that of drawn rates, which is larger than the binomial one."""
    rng, draws = np.random.default_rng(1), 4000
    rows, columns = rng.uniform(-0.2, 0.2, (draws, shape[0], 1)), rng.uniform(-0.1, 0.1, (draws, 1, shape[1]))
    differs = rng.random((draws, *shape)) < 0.4 + rows + columns
    true = differs.mean((1, 2)).var()
    count = RateSpread.of(differs).independent(differs.mean(), *shape)
    assert 0.24 / count == pytest.approx(true, rel=0.1) and count < 0.7 * shape[0] * shape[1]


def test_few_outputs_that_differ_are_binomial():
    differs = np.zeros((3, 8, 8), bool)
    assert RateSpread.of(differs).independent(0.0, 100, 100) == 10_000


@pytest.mark.parametrize("simulated", [500, *(pytest.param(count, marks=pytest.mark.full) for count in (2000, 20_000))])
@pytest.mark.parametrize("law", ["normal", "uniform", "steps"])
def test_the_largest_of_a_report_lies_in_its_interval(simulated, law):
    """At least 9 in 10 of drawn reports of 2,000 outputs, from fewer, as many and more simulated ones."""
    rng, inside, tries = np.random.default_rng(3), 0, 100
    draw = {
        "normal": lambda count: np.abs(rng.standard_normal(count)),
        "uniform": lambda count: rng.random(count),
        "steps": lambda count: np.exp2(rng.integers(-4, 1, count)) * (rng.random(count) < 0.05),
    }[law]
    for _ in range(tries):
        found = largest_interval(np.sort(draw(simulated))[::-1][:KEPT], simulated, 2000)
        inside += found.low <= draw(2000).max() <= found.high
    assert inside >= 0.9 * tries


def test_what_is_unknown_of_the_largest_is_said():
    assert largest_interval(np.zeros(100), 100, 10_000) == (0.0, 0.0, inf)
    assert largest_interval(np.array([inf, 1.0]), 100, 10) == (inf, 0.0, inf)
    one = largest_interval(np.array([0.5, *np.zeros(99)]), 100, 100)
    assert one.value == 0.5 and one.high > 5  # one number says little of its law


# ---- arguments, texts, the command


def test_a_reported_number_is_rounded_at_its_last_digit():
    assert reported_range("x", 0.0038) == (pytest.approx(0.00375), pytest.approx(0.00385))
    assert reported_range("x", 3e-2) == (pytest.approx(0.025), pytest.approx(0.035))
    assert reported_range("x", 1e-05) == (pytest.approx(0.5e-5), pytest.approx(1.5e-5))
    assert reported_range("x", (0.25, 0.5)) == (0.25, 0.5) and reported_range("x", 0.0)[0] == 0
    for wrong in (-1, float("nan"), (2, 1), (1, 2, 3), "many", inf):
        with pytest.raises(ValueError, match="expected a finite number from 0"):
            reported_range("x", wrong)


def test_laws_of_operands():
    rng = np.random.default_rng
    np.testing.assert_array_equal(parse_law("normal")(rng(1), (3, 4)), rng(1).standard_normal((3, 4)))
    np.testing.assert_array_equal(parse_law("normal( -0.5,2 )")(rng(1), (3, 4)), -0.5 + 2 * rng(1).standard_normal((3, 4)))
    np.testing.assert_array_equal(parse_law("uniform(-1, 1)")(rng(1), (3, 4)), rng(1).uniform(-1, 1, (3, 4)))
    assert parse_law("uniform")(rng(1), (99,)).min() > 0 and parse_law(len) is len
    for wrong in ("gaussian", "normal(1)", "normal(0, 0)", "normal(0, -1)", "uniform(1, 1)", "normal(nan, 1)", "normal(a, b)", ""):
        with pytest.raises(ValueError, match="expected 'normal'"):
            parse_law(wrong)


def test_mistakes_say_what_would_work():
    for wrong, said in (
        ({"differing": 38.0}, "share from 0 to 1"), ({"dtype": "s8"}, "expected one of f16"), ({"out": "e4m3"}, "expected one of f32"),
        ({"atol": -1.0}, "atol"), ({"draws": 0}, "draws"), ({"slices": (0,)}, "slices"), ({"gpus": ("V100",), "dtype": "bf16"}, "no unit"),
        ({"law": "normal(0, 1e9)"}, "not finite in f16"), ({"differing": None}, "differing, largest, largest_relative: none is given"),
        ({"law": lambda rng, shape: rng.random(3)}, r"drew shape \[3\]; expected \[8, 64\]"),
        ({"recipes": [5]}, r"recipes=\[5\]: expected a mapping"), ({"recipes": {"mine": 5}}, r"recipes=\{'mine': 5\}: expected a mapping"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            attribute((8, 8, 64), **{"differing": 0.1, **wrong})


@pytest.fixture(scope="module")
def small():
    return attribute((4, 8, 256), "f16", differing=0.0, gpus=("A100", "RTX 3090"), slices=(2,), draws=2)


def test_a_result_shows_itself(small):
    text = str(small)
    assert text.splitlines()[0] == "4 x 8 x 256, f16 to f16, normal: reported differing 0 to 0.05"
    assert "A100, RTX 3090, one slice" in text and "Kinds of pairs" in text and "pairs are consistent, on 64 outputs of 2 draws" in text
    assert "<table>" in small._repr_html_() and "differing_low" in small.to_csv()
    data = json.loads(small.to_json())
    assert len(data["records"]) == len(small.pairs) and data["law"] == "normal" and "Newcombe" in data["intervals"]["differing"]
    assert "sm_80" in json.dumps(data["provenance"]["evidence"])
    with pytest.raises(KeyError, match="no pair"):
        small.find("B200", "")


def test_libraries_and_given_recipes_are_sides():
    from tcemu.replay import get_kernel_recipe

    order = get_kernel_recipe("torch-f16", 64, 64, 8192)
    found = attribute((64, 64, 8192), "f16", differing=(0, 1), gpus="H200", slices=(2,), draws=1, recipes={"mine": order})
    assert found.find("torch-f16 on NVIDIA H200, measured", "exact").differing == found.find("mine", "exact").differing
    assert found.consistent == found.pairs  # every rate lies between 0 and 1


@pytest.mark.parametrize(
    ("dtype", "words"), [("e4m3", "promoted every 128"), pytest.param("f32", "tf32, one slice", marks=pytest.mark.full)]
)
def test_other_formats(dtype, words):
    found = attribute((8, 8, 512), dtype, differing=(0, 1), gpus=("H100",), slices=(2,), draws=1)
    assert found.find(words, "exact").differing.value > 0 and found.out == {"f32": "f32", "e4m3": "bf16"}[dtype]


def test_the_command(capsys):
    arguments = "replay attribute 4 8 256 --gpu A100 --slices 2 --draws 1 --seed 3"
    assert main([*arguments.split(), "--differing", "0:0.5", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["reported"] == {"differing": [0.0, 0.5]} and data["seed"] == 3
    for wrong in ("--slices two", "--differing much", "--largest 1:2:3", "--law gauss"):
        assert main([*arguments.split(), *wrong.split()]) == 2
        assert "expected" in capsys.readouterr().err
