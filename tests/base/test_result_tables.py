"""Results as records, as strict JSON, as tables of a notebook and as pictures; and short where they are shown by their repr."""

import csv
import io
import json
import math
import re
from fractions import Fraction
from html.parser import HTMLParser
from itertools import combinations, takewhile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from support import pages

import tcemu
from tcemu.base.results import MAX_HTML_ROWS, Result, Table, to_json, to_scalar
from tcemu.engine.arithmetic.model import RARE_FIELDS

RECORDED = Path(__file__).parents[2] / "docs" / "studies" / "same-product.json"
RNG = np.random.default_rng(0)
X, W = RNG.standard_normal((4, 32), np.float32), RNG.standard_normal((32, 3), np.float32)


def layer(params, x):
    return jnp.tanh(x @ params["<b>&up"])


PARAMS = {"<b>&up": W}


def compared() -> Result:
    return tcemu.compare(layer, {"mine <i>": "fp8_e4m3", "bf16": "bf16"}, (PARAMS, X))


def ran() -> Result:
    return tcemu.fuzz.find_mismatches("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32", "A100", "H100", cases=64, seed=1)


RESULTS = {
    "Comparison": compared,
    "Report": lambda: tcemu.emulate(layer, "bf16").report(PARAMS, X),
    "Run": ran,
    "Coverage": lambda: make_result("Run").coverage,
    "Inferred": lambda: tcemu.fuzz.infer_model("s8", "H100", cases=16),
    "Sweep": lambda: tcemu.study.sweep(tcemu.matmul, {"recipe": "bf16"}, operands=(X, W), seeds=2),
    "Outcome": lambda: tcemu.study.Outcome.from_facts(tcemu.study.get_claim("same-product"), json.loads(RECORDED.read_text())),
    "Explanation": lambda: tcemu.explain("f16", [1.5, 2**-20], [1, math.inf], target="H100"),
    "Explanations": lambda: tcemu.explain("f16", [1.5, 2**-20], [1, 3], target=["A100", "H100"]),
}
HELD = {}


def make_result(name: str):
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
    shown = repr(make_result(name))
    assert shown.startswith(f"<{name} ") or shown.startswith(f"<{name}:")
    assert len(shown) < 450 and "\n" not in shown and "array" not in shown


@pytest.mark.parametrize("name", RESULTS)
def test_records_are_flat_dicts_of_plain_values(name):
    """As pandas, polars and csv want them: the same keys in each, and no value of NumPy's or JAX's."""
    records = make_result(name).records()
    assert records and all(record.keys() == records[0].keys() for record in records)
    assert {type(value) for record in records for value in record.values()} <= {str, int, float, bool, type(None)}
    written = io.StringIO()
    writer = csv.DictWriter(written, records[0])
    writer.writeheader()
    writer.writerows(records)
    assert len(list(csv.DictReader(io.StringIO(written.getvalue())))) == len(records)


@pytest.mark.parametrize("name", RESULTS)
def test_json_is_strict(name):
    text = make_result(name).to_json()
    read = json.loads(text, parse_constant=refuse)
    assert isinstance(read, dict) and json.loads(make_result(name).to_json(indent=2), parse_constant=refuse) == read


@pytest.mark.parametrize("name", RESULTS)
def test_csv_keeps_the_records_and_the_facts(name):
    """Every value of the records and of the facts comes back, None and "" apart, by a reader of our own."""
    result, table = make_result(name), make_result(name).table()
    head, *lines = read_csv(without_facts(result.to_csv()))
    assert [dict(zip(head, line, strict=True)) for line in lines] == [
        {key: value if isinstance(value, str) else Plain("" if value is None else str(value)) for key, value in record.items()}
        for record in table.records()
    ]
    lines = takewhile(lambda line: line.startswith("# "), io.StringIO(result.to_csv()))
    facts = {name: json.loads(value, parse_constant=refuse) for name, value in (line[2:].split(": ", 1) for line in lines)}
    assert facts == json.loads(to_json({"title": table.title, **table.facts}))


def test_csv_of_difficult_texts():
    rows = (('a "#" b,\n# x: 1', None, math.nan, True), ("", 1, -math.inf, False), ("#", 2**70, 0.1 + 0.2, True))
    table = Table("two\nlines # 1", ("text", "int # 1", "float", "bool"), rows, {"nested": {"jax": ["0.10", None]}})
    text = table.to_csv()
    assert text.startswith('# title: "two\\nlines # 1"\n# nested: {"jax": ["0.10", null]}\n"text","int # 1","float","bool"\n')
    plain = lambda value: value if isinstance(value, str) else Plain("" if value is None else str(value))
    assert read_csv(without_facts(text))[1:] == [[plain(value) for value in row] for row in rows]


class Plain(str):
    """A cell without quotes, which equals no text in quotes."""

    def __eq__(self, other):
        return isinstance(other, Plain) and str.__eq__(self, other)

    __hash__ = str.__hash__


def without_facts(text: str) -> str:
    """What follows the lines of facts."""
    return re.sub(r"\A(# .*\n)+", "", text)


def read_csv(text: str) -> list[list[str]]:
    """The lines of a CSV text by RFC 4180; cells without quotes as `Plain`."""
    lines = [[]]
    for cell in re.finditer(r'(?:"((?:[^"]|"")*)"|([^",\n]*))(,|\n)', text):
        lines[-1].append(Plain(cell[2]) if cell[1] is None else cell[1].replace('""', '"'))
        if cell[3] == "\n":
            lines.append([])
    assert lines.pop() == []
    return lines


@pytest.mark.parametrize("name", RESULTS)
def test_a_notebook_gets_a_plain_table(name):
    result = make_result(name)
    page = result._repr_html_()
    parsed = Page(page)
    assert set(parsed.tags) <= {"table", "caption", "thead", "tbody", "tr", "th", "td", "div"}
    assert parsed.tags.count("tr") == 1 + min(len(result.records()), MAX_HTML_ROWS)
    assert parsed.tags.count("th") == len(result.records()[0])


def test_text_of_users_is_escaped():
    assert "<b>" not in make_result("Report")._repr_html_() and "&lt;b&gt;&amp;up" in make_result("Report")._repr_html_()
    assert "<i>" not in make_result("Comparison")._repr_html_()
    table = Table("<script>", ("a<b",), (("</td><script>x</script>",),), {"<f>": "&"})
    assert (
        "<script>" not in table.html()
        and "&lt;script&gt;" in table.html()
        and "a&lt;b" in table.html()
        and "&lt;f&gt;: &amp;" in table.html()
    )


# ---- what stands in them


def test_a_comparison():
    found, records = make_result("Comparison"), make_result("Comparison").records()
    assert [(r["policy"], r["relative_error"]) for r in records] == [(e.policy, e.relative_error) for e in found]
    (first, *_) = found
    assert records[0]["worst_exact"] == float(first.worst.exact) and records[0]["worst_row"] == first.worst.index[1]
    assert (records[0]["overflow_a"], records[0]["underflow_b"]) == (first.overflow[0], first.underflow[1])
    assert json.loads(found.to_json())["results"] == found.results


def test_a_report():
    (record,) = make_result("Report").records()
    assert (record["product"], record["replaced"], record["by"], record["runs"]) == ("dot_general", True, "bf16", 1)
    assert (record["role_lhs"], record["role_rhs"], record["parameters"]) == ("activation", "weight", "<b>&up")
    assert re.fullmatch(r"test_result_tables\.py:\d+ \(layer\)", record["source"])
    left = tcemu.emulate(lambda x: x @ W, {"nothing": "bf16"}).report(X)
    assert [r["replaced"] for r in left.records()] == [False]


def test_a_run_and_its_coverage():
    run, records = make_result("Run"), make_result("Run").records()
    assert sum(r["cases"] for r in records) == 64 and sum(r["wrong_cases"] for r in records) == run.wrong_cases > 0
    facts = json.loads(run.to_json())
    assert (facts["done"], facts["wrong_outputs"], facts["outputs"]) == (64, run.wrong_outputs, 64 * 16 * 8)
    assert facts["first_wrong_cases"] == list(run.first) and facts["smallest_mismatch"] == str(run.small_mismatch)
    counted = {(r["counted"], r["at"]): r["count"] for r in run.coverage.records()}
    assert facts["coverage"] == run.coverage.records()
    assert sum(n for (what, _), n in counted.items() if what == "products") == int(run.coverage.products.sum())
    assert counted["events", "D normal"] == int(run.coverage.events[6])


def test_an_inferred_model():
    """The account has the whole model, as it can be pasted; the JSON has every field."""
    found = make_result("Inferred")
    facts = json.loads(found.to_json())
    own = tcemu.get_model("s8", "H100")
    assert facts["confirmed"] is True and facts["model"]["fraction_bits"] == own.fraction_bits
    assert facts["model"].keys() == vars(own).keys()
    said = " ".join(str(found).split())
    assert repr(own) in said and all(f"{name}=" in said for name in vars(own) if name not in RARE_FIELDS)
    assert [r["field"] for r in found.records()] == [f.field for f in found.findings]


def test_explanations():
    one, both = make_result("Explanation"), make_result("Explanations")
    assert json.loads(one.to_json()) == one.to_dict() and one.records()[0]["target"] == "sm_90a"
    assert {r["value"] for r in one.records()} >= {math.inf}
    truncated = [r for r in both.records() if r["truncated"]]
    assert {r["target"] for r in both.records()} == {"sm_80", "sm_90a"} and all(0 < abs(r["truncated"]) < 1 for r in truncated)
    steps = [len(step.terms) for e in both.explanations for step in e.steps]
    assert len(both.records()) == sum(steps)


# ---- one by one


def test_scalars_are_pythons_own():
    given = [np.float32(0.5), np.int64(3), np.bool_(True), jnp.float32(2), np.array(7), Fraction(1, 4), None, "x", 10**30]
    wanted = [0.5, 3, True, 2.0, 7, 0.25, None, "x", 10**30]
    assert [to_scalar(value) for value in given] == wanted
    assert [type(to_scalar(value)) for value in given] == [type(value) for value in wanted]
    assert to_scalar(Fraction(10) ** 400) == math.inf and to_scalar(-(Fraction(10) ** 400)) == -math.inf
    assert to_scalar(tcemu.formats.F16) == "f16"


def test_what_json_has_no_number_for():
    given = {"a": [math.nan, math.inf, -math.inf], "b": np.array([1.5, math.inf]), 3: (None, Fraction(1, 2))}
    assert json.loads(to_json(given), parse_constant=refuse) == {"a": ["nan", "+inf", "-inf"], "b": [1.5, "+inf"], "3": [None, 0.5]}
    assert [float(x) for x in ("+inf", "-inf")] == [math.inf, -math.inf] and math.isnan(float("nan"))


def test_a_long_table_says_how_long_it_is():
    table = Table("many", ("n",), tuple((n,) for n in range(MAX_HTML_ROWS + 1234)))
    assert table.html().count("<tr>") == MAX_HTML_ROWS + 1 and "1,234 more rows; records() has all" in table.html()
    assert len(table.records()) == MAX_HTML_ROWS + 1234


DRAWN = ("Comparison", "Sweep", "Outcome")


def figures(name: str) -> list[float]:
    """What the marks or bars of a picture are, from the records or the result."""
    result = make_result(name)
    if name == "Sweep":
        return [np.mean(result.column("normwise", recipe=recipe)) for recipe in result.axes["recipe"]]
    figure = {"Comparison": "relative_error", "Outcome": "ours"}[name]
    records = result.records()
    return [r[figure] for r in records] + [r["published"] for r in records if r.get("published") is not None]


@pytest.mark.parametrize("name", DRAWN)
def test_pictures(name):
    """The marks and bars are the figures."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install -e '.[viz]')")
    figure = make_result(name).plot()
    assert type(figure).__module__ == "matplotlib.figure"
    axes = figure.axes[0]
    drawn = [x for line in axes.lines for x in line.get_xdata()]
    assert drawn == figures(name) != []


@pytest.mark.parametrize("name", DRAWN)
def test_pictures_have_titles_and_labels_that_do_not_overlap(name):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install -e '.[viz]')")
    figure = make_result(name).plot()
    texts = drawn_texts(figure)
    assert figure.get_suptitle() and figure.get_supxlabel() and all(axes.get_xlabel() for axes in figure.axes)
    assert [(one, other) for (one, a), (other, b) in combinations(texts, 2) if a.overlaps(b)] == []
    width, height = figure.get_size_inches() * figure.dpi
    assert [text for text, box in texts if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height] == []


def drawn_texts(figure) -> list:
    """The texts of a figure with their boxes, without the tick labels beyond the ends of an axis."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    hidden = set()
    for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        hidden |= {id(label) for tick in ticks if not low <= tick.get_loc() <= high for label in (tick.label1, tick.label2)}
    texts = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible() and id(text) not in hidden]
    return [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    for name in DRAWN:
        with pytest.raises(ImportError, match=r"plot\(\) needs matplotlib: pip install '\.\[viz\]' in a clone of tcemu"):
            make_result(name).plot()


def test_text_is_aligned():
    table = Table("Rows", ("name", "some_number", "shown"), (("a", 1.25, True), ("longer", 300, False), ("none", None, True)), {"fact": 1})
    assert table.text().splitlines() == [
        "Rows",
        "name    some number  shown",
        "a              1.25  True",
        "longer          300  False",
        "none                 True",
    ]
    assert Table("Empty", ("a", "b_c"), ()).text() == "Empty\na  b c"


def test_a_table_in_pandas_and_a_picture_as_the_page_says(tmp_path, monkeypatch):
    pandas = pytest.importorskip("pandas", reason="pandas is not installed (pip install pandas)")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install -e '.[viz]')")
    (block,) = (one for one in pages.blocks((pages.ROOT / "docs" / "studies.md").read_text()) if "import pandas" in one.code)
    names = {"explained": tcemu.explain("f16", [-8192, -0.5, -0.25], [1024, 1, 1], 2.0**23, target="A100")}
    monkeypatch.chdir(tmp_path)
    exec(compile(block.code, "a page", "exec"), names)
    assert list(names["table"].term[:2]) == ["C", "k 0"]
    pandas.testing.assert_frame_equal(names["table"], names["same"], check_dtype=False)
    assert (tmp_path / "explained.png").read_bytes().startswith(b"\x89PNG")
