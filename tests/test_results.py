"""Results as records, as strict JSON, as tables of a notebook and as pictures; and short where they are shown by their repr."""

import csv
import dataclasses
import io
import json
import math
import re
from fractions import Fraction
from html.parser import HTMLParser
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import tcemu
from tcemu.results import MOST_ROWS, Result, Table, scalar, to_json

RECORDED = Path(__file__).parents[1] / "docs" / "studies" / "same-product.json"
RNG = np.random.default_rng(0)
X, W = RNG.standard_normal((4, 32), np.float32), RNG.standard_normal((32, 3), np.float32)


def layer(params, x):
    return jnp.tanh(x @ params["<b>&up"])


PARAMS = {"<b>&up": W}


def compared() -> Result:
    return tcemu.compare(layer, {"mine <i>": "fp8_e4m3", "bf16": "bf16"}, (PARAMS, X))


def ran() -> Result:
    return tcemu.fuzz.run("f16", "A100", "H100", cases=64, seed=1)


RESULTS = {
    "Comparison": compared,
    "Report": lambda: tcemu.emulate(layer, "bf16").report(PARAMS, X),
    "Run": ran,
    "Coverage": lambda: made("Run").coverage,
    "Inferred": lambda: tcemu.fuzz.infer("f16", "H100", cases=16),
    "Sweep": lambda: tcemu.study.sweep(tcemu.matmul, {"recipe": "bf16"}, operands=(X, W), seeds=2),
    "Outcome": lambda: tcemu.study.Outcome.of(tcemu.study.claim("same-product"), json.loads(RECORDED.read_text())),
    "Explanation": lambda: tcemu.explain("f16", [1.5, 2**-20], [1, math.inf], target="H100"),
    "Explanations": lambda: tcemu.explain("f16", [1.5, 2**-20], [1, 3], target=["A100", "H100"]),
}
HELD = {}


def made(name: str):
    """Each made once: they are values."""
    return HELD.setdefault(name, RESULTS[name]()) if name not in HELD else HELD[name]


def refuse(text: str):
    raise AssertionError(f"{text} is no JSON")


class Page(HTMLParser):
    """The tags of a page, whether they close in order, and its text."""

    def __init__(self, page: str):
        super().__init__()
        self.tags, self.open, self.cells = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        assert attrs == []
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.cells.append(data)


@pytest.mark.parametrize("name", RESULTS)
def test_repr_is_short_and_says_what_it_is(name):
    shown = repr(made(name))
    assert shown.startswith(f"<{name} ") or shown.startswith(f"<{name}:")
    assert len(shown) < 450 and "\n" not in shown and "array" not in shown


@pytest.mark.parametrize("name", RESULTS)
def test_records_are_flat_dicts_of_plain_values(name):
    """As pandas, polars and csv want them: the same keys in each, and no value of NumPy's or JAX's."""
    records = made(name).records()
    assert records and all(record.keys() == records[0].keys() for record in records)
    assert {type(value) for record in records for value in record.values()} <= {str, int, float, bool, type(None)}
    written = io.StringIO()
    writer = csv.DictWriter(written, records[0])
    writer.writeheader()
    writer.writerows(records)
    assert len(list(csv.DictReader(io.StringIO(written.getvalue())))) == len(records)


@pytest.mark.parametrize("name", RESULTS)
def test_json_is_strict(name):
    text = made(name).to_json()
    read = json.loads(text, parse_constant=refuse)
    assert isinstance(read, dict) and json.loads(made(name).to_json(indent=2), parse_constant=refuse) == read


@pytest.mark.parametrize("name", RESULTS)
def test_a_notebook_gets_a_plain_table(name):
    result = made(name)
    page = result._repr_html_()
    parsed = Page(page)
    assert set(parsed.tags) <= {"table", "caption", "thead", "tbody", "tr", "th", "td", "div"}
    assert parsed.tags.count("tr") == 1 + min(len(result.records()), MOST_ROWS)
    assert parsed.tags.count("th") == len(result.records()[0])


def test_text_of_users_is_escaped():
    assert "<b>" not in made("Report")._repr_html_() and "&lt;b&gt;&amp;up" in made("Report")._repr_html_()
    assert "<i>" not in made("Comparison")._repr_html_()
    table = Table("<script>", ("a<b",), (("</td><script>x</script>",),), {"<f>": "&"})
    assert (
        "<script>" not in table.html()
        and "&lt;script&gt;" in table.html()
        and "a&lt;b" in table.html()
        and "&lt;f&gt;: &amp;" in table.html()
    )


# ---- what stands in them


def test_a_comparison():
    found, records = made("Comparison"), made("Comparison").records()
    assert [(r["policy"], r["relative_error"]) for r in records] == [(e.policy, e.relative_error) for e in found]
    (first, *_) = found
    assert records[0]["worst_exact"] == float(first.worst.exact) and records[0]["worst_row"] == first.worst.index[1]
    assert (records[0]["overflow_a"], records[0]["underflow_b"]) == (first.overflow[0], first.underflow[1])
    assert json.loads(found.to_json())["results"] == found.results


def test_a_report():
    (record,) = made("Report").records()
    assert (record["product"], record["replaced"], record["by"], record["runs"]) == ("dot_general", True, "bf16", 1)
    assert (record["role_lhs"], record["role_rhs"], record["parameters"]) == ("activation", "weight", "<b>&up")
    assert re.fullmatch(r"test_results\.py:\d+ \(layer\)", record["source"])
    left = tcemu.emulate(lambda x: x @ W, {"nothing": "bf16"}).report(X)
    assert [r["replaced"] for r in left.records()] == [False]


def test_a_run_and_its_coverage():
    run, records = made("Run"), made("Run").records()
    assert sum(r["cases"] for r in records) == 64 and sum(r["wrong_cases"] for r in records) == run.wrong_cases > 0
    facts = json.loads(run.to_json())
    assert (facts["done"], facts["wrong_outputs"], facts["outputs"]) == (64, run.wrong_outputs, 64 * 16 * 8)
    assert facts["first_wrong_cases"] == list(run.first) and facts["smallest_mismatch"] == str(run.shrunk)
    counted = {(r["counted"], r["at"]): r["count"] for r in run.coverage.records()}
    assert facts["coverage"] == run.coverage.records()
    assert sum(n for (what, _), n in counted.items() if what == "products") == int(run.coverage.products.sum())
    assert counted["events", "D normal"] == int(run.coverage.events[6])


def test_an_inferred_model():
    """The account has the whole model, as it can be pasted; the JSON has every field."""
    found = made("Inferred")
    facts = json.loads(found.to_json())
    own = tcemu.model("f16", "H100")
    assert facts["confirmed"] is True and facts["model"]["fraction_bits"] == own.fraction_bits
    assert facts["model"].keys() == vars(own).keys()
    said = " ".join(str(found).split())
    assert repr(own) in said and all(f"{name}=" in said for name in vars(own))
    assert [r["field"] for r in found.records()] == [f.field for f in found.findings]


def test_explanations():
    one, both = made("Explanation"), made("Explanations")
    assert json.loads(one.to_json()) == one.to_dict() and one.records()[0]["target"] == "sm_90a"
    assert {r["value"] for r in one.records()} >= {math.inf}
    cut = [r for r in both.records() if r["cut"]]
    assert {r["target"] for r in both.records()} == {"sm_80", "sm_90a"} and all(0 < abs(r["cut"]) < 1 for r in cut)
    steps = [len(step.terms) for e in both.explanations for step in e.steps]
    assert len(both.records()) == sum(steps)


# ---- one by one


def test_scalars_are_pythons_own():
    given = [np.float32(0.5), np.int64(3), np.bool_(True), jnp.float32(2), np.array(7), Fraction(1, 4), None, "x", 10**30]
    wanted = [0.5, 3, True, 2.0, 7, 0.25, None, "x", 10**30]
    assert [scalar(value) for value in given] == wanted
    assert [type(scalar(value)) for value in given] == [type(value) for value in wanted]
    assert scalar(Fraction(10) ** 400) == math.inf and scalar(-(Fraction(10) ** 400)) == -math.inf
    assert scalar(tcemu.formats.F16) == "f16"


def test_what_json_has_no_number_for():
    given = {"a": [math.nan, math.inf, -math.inf], "b": np.array([1.5, math.inf]), 3: (None, Fraction(1, 2))}
    assert json.loads(to_json(given), parse_constant=refuse) == {"a": ["nan", "+inf", "-inf"], "b": [1.5, "+inf"], "3": [None, 0.5]}
    assert [float(x) for x in ("+inf", "-inf")] == [math.inf, -math.inf] and math.isnan(float("nan"))


def test_a_long_table_says_how_long_it_is():
    table = Table("many", ("n",), tuple((n,) for n in range(MOST_ROWS + 1234)))
    assert table.html().count("<tr>") == MOST_ROWS + 1 and "1,234 more rows; records() has all" in table.html()
    assert len(table.records()) == MOST_ROWS + 1234


DRAWN = ("Comparison", "Report", "Run", "Coverage", "Inferred", "Sweep", "Outcome")


def figures(name: str) -> list[float]:
    """What the marks or bars of a picture are, from the records or the result."""
    result = made(name)
    if name in ("Run", "Coverage"):
        return made("Coverage").products.tolist()
    if name == "Inferred":
        return result.comparison.by_kind.T.ravel().tolist()
    if name == "Report":
        return [12.0]  # [4, 32] · [32, 3], once
    if name == "Sweep":
        return [np.mean(result.column("normwise", recipe=recipe)) for recipe in result.axes["recipe"]]
    figure = {"Comparison": "relative_error", "Outcome": "ours"}[name]
    records = result.records()
    return [r[figure] for r in records] + [r["published"] for r in records if r.get("published") is not None]


@pytest.mark.parametrize("name", DRAWN)
def test_pictures(name):
    """The marks and bars are the figures."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install -e '.[viz]')")
    figure = made(name).plot()
    assert type(figure).__module__ == "matplotlib.figure" and type(tcemu.viz.plot(made(name))) is type(figure)
    axes = figure.axes[0]
    drawn = [bar.get_height() for bar in axes.patches] or [x for line in axes.lines for x in line.get_xdata()]
    assert drawn == figures(name) != []


def test_what_cannot_be_drawn():
    with pytest.raises(ValueError, match="did not count what its cases reached"):
        tcemu.fuzz.run("f16", "A100", "A100", cases=8, covering=False).plot()
    with pytest.raises(ValueError, match="plot: no model was found, so nothing was compared"):
        dataclasses.replace(made("Inferred"), comparison=None).plot()
    with pytest.raises(TypeError, match="result: got int; wanted one of Comparison, Report"):
        tcemu.viz.plot(3)  # type: ignore[arg-type]


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    for name in DRAWN:
        with pytest.raises(ImportError, match=r"plot\(\) needs matplotlib: pip install 'tcemu\[viz\]'"):
            made(name).plot()
