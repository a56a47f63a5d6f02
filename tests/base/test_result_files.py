"""Results as JSON files and back: each is saved as the same file again, and a changed or hostile file is a named error."""

import importlib
import json
import math
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.changed_json import json_paths, replace_at
from support.sampling import sample_cases

import tcemu
from tcemu.base.intervals import mean_interval, student_t_quantile
from tcemu.base.provenance import describe_arrays
from tcemu.base.saved_files import DamagedFile
from tcemu.engine.isa.targets import resolve_target
from tcemu.operations.products.recipe_facts import RECIPE_COLUMNS
from tcemu.uses.emulation.product_errors import Comparison
from tcemu.uses.emulation.report import Report
from tcemu.uses.emulation.saved_results import SavedFunction

RNG = np.random.default_rng(0)
PARAMS = {"up": RNG.standard_normal((16, 8), np.float32), "down": RNG.standard_normal((8, 4), np.float32)}
X = RNG.standard_normal((4, 16), np.float32)


def model(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def layer(params, x):
    return jnp.tanh(x @ params["up"])


def draw(seed):
    return PARAMS, np.random.default_rng(seed).standard_normal((4, 16), np.float32)


def convolve(x, kernel):
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME")
    return jax.lax.ragged_dot(y.reshape(16, 4), jnp.ones((2, 4, 3)), jnp.array([7, 9]))


def plain_product(*args, **kwargs):
    return jax.lax.dot_general(*args, **kwargs)


POLICIES = {
    "8": "fp8 on H100",
    "rest": {"*": "bf16 on A100"},
    "mine": tcemu.get_recipe("bf16").what_if(fraction_bits=9),
    "f": lambda p: plain_product,
}
CLAIM = "same-product"
MADE = {
    "report": lambda: tcemu.emulate(model, {"*.1": None, "*": "nvfp4"}).report(PARAMS, X),
    "report of a gradient": lambda: tcemu.emulate(jax.grad(lambda p, x: model(p, x).sum()), "fp8").report(PARAMS, X),
    "report of other products":
    lambda: tcemu.emulate(convolve, "bf16", convolutions=True).report(jnp.ones((1, 2, 4, 4)), jnp.ones((4, 2, 3, 3))),
    "comparison": lambda: tcemu.compare(layer, POLICIES, draw, seeds=2),
    "comparison of one input": lambda: tcemu.compare(model, "mxfp8", (PARAMS, X * 1e30), results=False),
    "sweep": lambda: tcemu.study.sweep(
        tcemu.matmul, {"recipe": ["bf16", "fp8"], "fraction_bits": [9, 25]}, operands=tcemu.study.normal(4, 4, 32), seeds=2
    ),
    "sweep over GPUs": lambda: tcemu.study.sweep(
        tcemu.gemm, {"op": "f16", "target": ["A100", "H100"]}, operands=(X, PARAMS["up"] * np.float32(np.inf)), exact="given"
    ),
    "outcome": lambda: tcemu.study.get_claim(CLAIM).reproduce(quick=True),
}  # fmt: skip
READERS = {
    "report": Report.from_json,
    "comparison": Comparison.from_json,
    "sweep": tcemu.study.Sweep.from_json,
    "outcome": tcemu.study.read_outcome,
}
MADE_RESULTS = {}


@pytest.fixture
def stats():
    """`scipy.stats`, whose import takes longer than a test."""
    return importlib.import_module("scipy.stats")


def make(name):
    """Each made once: they are values."""
    return MADE_RESULTS.setdefault(name, MADE[name]()) if name not in MADE_RESULTS else MADE_RESULTS[name]


def read(name, text):
    return READERS[name.partition(" ")[0]](text)


USUAL = [name for name in MADE if name not in ("report of a gradient", "comparison of one input", "sweep over GPUs", "outcome")]


@pytest.mark.parametrize("name", sample_cases(MADE, USUAL))
def test_a_result_comes_back(name):
    result = make(name)
    back = read(name, result.to_json(indent=1))
    assert type(back) is type(result) and str(back) == str(result) and back.to_json() == result.to_json()
    assert list(map(str, back.records())) == list(map(str, result.records()))  # nan is not equal to itself
    if not name.startswith("comparison") and name != "sweep over GPUs":
        assert back == result


@pytest.mark.parametrize("name", sample_cases(MADE, USUAL))
def test_the_versions_and_the_arithmetic_stay_with_a_result(name):
    plain = json.loads(make(name).to_json())
    versions = plain["versions"] if name == "outcome" else plain["provenance"]["versions"]
    assert versions["tcemu"] == tcemu.__version__ and versions["jax"] == jax.__version__ and versions["numpy"] == np.__version__
    if name == "outcome":
        return
    arithmetics = plain["provenance"]["evidence"]
    for record in plain["records"]:
        assert set(RECIPE_COLUMNS) <= record.keys()
        target = resolve_target(record["target"]) if record["target"] else None
        changes = f", {record['model']}" if record["model"] else ""
        if target is not None:
            assert arithmetics[f"{record['instruction']} on {target}{changes}"].startswith(f"{record['evidence']}: ")
            if not changes:
                assert record["evidence"] == tcemu.evidence(record["instruction"], target).level
    assert {record["target"] for record in plain["records"]} - {None}


def test_the_table_for_people_names_gpu_and_evidence():
    assert re.search("nvfp4 +sm_100a +published", str(make("report")))
    lines = str(make("comparison")).splitlines()
    for start in ("  8       sm_90a  silicon", "  rest    sm_80   published", "  mine    sm_90a  what-if", "  f       -       - "):
        assert any(line.startswith(start) for line in lines)
    assert "op   target  evidence" in str(make("sweep over GPUs"))


def test_what_does_not_come_back_says_so():
    back = read("comparison", make("comparison").to_json())
    with pytest.raises(TypeError, match="read from a file, which has no operands"):
        back[0].worst.explain()
    function = next(row.choice for row in back if row.policy == "f")
    assert isinstance(function, SavedFunction) and function.name.endswith("plain_product")
    with pytest.raises(TypeError, match="only the function's name"):
        function()


def test_inputs_are_named_by_their_law_or_a_digest():
    assert make("sweep").provenance.inputs.startswith("normal(m=4, n=4, k=32): A [m, k], then B [k, n], N(0, 1) in float32")
    assert make("sweep over GPUs").provenance.inputs == describe_arrays((X, PARAMS["up"] * np.float32(np.inf)))
    inputs = make("comparison").provenance.inputs
    assert inputs.startswith("test_result_files.draw(seed); 0: 3 arrays of 224 elements, sha256 ") and "; " in inputs
    one, other = describe_arrays([X]), describe_arrays([X.T])
    assert one == describe_arrays([jnp.asarray(X)]) and one != other and describe_arrays([jax.random.key(1)]).startswith("1 arrays of 2")


# ---- damaged files

JUNK = (None, True, -1, 3, 1.5, "", "x", "nan", [], [[]], {}, {"dot": [[[9], []], [[], []]]}, 10**40, "Infinity")


@pytest.mark.parametrize(
    "name", sample_cases(["report", "report of other products", "comparison", "sweep", "outcome"], ["report", "sweep"])
)
def test_a_changed_file_is_a_named_error_or_the_result_that_it_says(name):
    rng = random.Random(name)
    plain = json.loads(make(name).to_json())
    paths = list(json_paths(plain))
    refused = 0
    for path in rng.sample(paths, min(len(paths), 150)):
        for junk in rng.sample(JUNK, 3):
            changed = replace_at(plain, path, junk)
            text = json.dumps(changed)
            try:
                back = read(name, text)
            except ValueError:
                refused += 1
            else:
                assert json.loads(back.to_json()) == changed and str(back) and back.records() is not None
    assert refused > 200


@pytest.mark.parametrize("name", sample_cases(["report", "comparison", "sweep", "outcome"], ["report", "comparison", "sweep"]))
def test_other_files_are_refused(name):
    text = make(name).to_json()
    plain = json.loads(text)
    for change, said in (
        ({"version": 99}, "version 99; expected"),
        ({"kind": "x"}, "this is 'x'"),
        ({"more": 1}, "unknown"),
        ({"title": "x"}, "title"),
    ):
        with pytest.raises(DamagedFile, match=said):
            read(name, json.dumps(plain | change))
    for other in ("", "[]", text[:-1], "[" * 100_000, '{"kind": 1, "kind": 2}', tcemu.get_recipe("bf16").to_json()):
        with pytest.raises(DamagedFile):
            read(name, other)
    other = "report" if name != "report" else "sweep"
    with pytest.raises(DamagedFile, match=f"this is 'tcemu {other}', version \\d; expected 'tcemu .*{name}'"):
        read(name, make(other).to_json())
    removed = {key: value for key, value in plain.items() if key != "records"}
    with pytest.raises(DamagedFile, match="missing"):
        read(name, json.dumps(removed))


def test_records_must_agree_with_the_rest():
    plain = json.loads(make("report").to_json())
    plain["records"][0]["evidence"] = "silicon"
    with pytest.raises(DamagedFile, match="records does not agree"):
        read("report", json.dumps(plain))


# ---- means and intervals


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 8, 9, 30, 101])
def test_quantiles_are_those_of_scipy(stats, degrees):
    for probability in (0.5, 0.75, 0.9, 0.975, 0.9995):
        assert student_t_quantile(probability, degrees) == pytest.approx(stats.t.ppf(probability, degrees), rel=1e-11, abs=1e-15)


def test_intervals_are_those_of_scipy(stats):
    values = RNG.normal(3, 2, size=7).tolist()
    wanted = stats.t.interval(0.95, 6, loc=np.mean(values), scale=stats.sem(values))
    found = mean_interval(values)
    assert found.mean == pytest.approx(np.mean(values)) and (found.low, found.high) == pytest.approx(wanted)
    assert mean_interval([2.0]).mean == 2 and math.isnan(mean_interval([2.0]).low)


def test_seeds_give_means_and_intervals(stats):
    """Each seed is a comparison of its own; the table has their mean and the interval of scipy."""
    found = make("comparison")
    singles = [tcemu.compare(layer, {"8": "fp8 on H100"}, draw(seed)) for seed in range(2)]
    errors = [one[0].relative_error for one in singles]
    assert [row.relative_error for row in found if row.policy == "8"] == errors
    low, high = stats.t.interval(0.95, 1, loc=np.mean(errors), scale=stats.sem(errors))
    summary = next(record for record in found.summary().records() if record["policy"] == "8")
    assert (summary["relative_error"], summary["low"], summary["high"], summary["seeds"]) == pytest.approx((np.mean(errors), low, high, 2))
    assert re.search(rf" {np.mean(errors):.2e} +{low:.2e} to {high:.2e} ", str(found)) and "Student's t" in str(found)
    assert found.results["8"] == pytest.approx(np.mean([one.results["8"] for one in singles]))
    whole = next(r for r in found.summary().records() if r["product"] is None and r["policy"] == "8")
    assert whole["low"] < whole["relative_error"] == found.results["8"] < whole["high"]
    swept = make("sweep").summary().records()
    one = next(r for r in swept if (r["recipe"], r["fraction_bits"], r["error"]) == ("bf16", 9, "normwise"))
    normwise = make("sweep").column("normwise", recipe="bf16", fraction_bits=9)
    assert (one["mean"], one["deviation"]) == pytest.approx((np.mean(normwise), np.std(normwise, ddof=1)))
    assert one["low"] == pytest.approx(stats.t.interval(0.95, 1, loc=np.mean(normwise), scale=stats.sem(normwise))[0])


@pytest.mark.full
def test_keys_may_be_what_differs():
    stochastic = tcemu.get_recipe("bf16").replace(a=tcemu.quantize.Quantizer(rounding="SR"))
    compared = tcemu.compare(lambda w, x: x @ w, {"SR": stochastic}, (PARAMS["up"], X), key=jax.random.key(0), seeds=[4, 9])
    first, second = compared
    assert (first.seed, second.seed) == compared.seeds == (4, 9) and first.relative_error != second.relative_error
    alone = tcemu.compare(lambda w, x: x @ w, {"SR": stochastic}, (PARAMS["up"], X), key=jax.random.fold_in(jax.random.key(0), 9))
    assert alone[0].relative_error == second.relative_error


@pytest.mark.parametrize(
    ("inputs", "seeds", "error", "said"),
    [
        (draw, None, TypeError, "inputs: got the function test_result_files.draw.*give seeds="),
        ((PARAMS, X), 3, TypeError, "without a key the same inputs give the same errors"),
        (draw, 0, ValueError, "seeds: got 0"),
        (draw, [1, 1], ValueError, r"seeds: got \[1, 1\]"),
        (draw, [1.5], ValueError, "seeds"),
        (lambda seed: (PARAMS, X[: seed + 1]), 2, ValueError, "those of seed 1 give other products than those of seed 0"),
    ],
)
def test_seeds_that_compare_nothing_are_refused(inputs, seeds, error, said):
    with pytest.raises(error, match=said):
        tcemu.compare(lambda params, x: x @ params["up"], "bf16", inputs, seeds=seeds, results=False)
