"""Published claims: each figure lies within its spread over seeds, what a source publishes is met where the claim says so, and the command.

The figures of the quick forms over eight seeds are in claims_quick.json, those of the whole forms in docs/studies. A seed that is in
neither is measured: its figures lie within the interval that holds one more draw with a probability of 99.9% (Student's t).
"""

import functools
import json
import re
import runpy
from importlib import import_module
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace

import numpy as np
import pytest
from renew_claims import FILE, SEEDS
from support import pages
from support.sampling import sample_cases

import tcemu
from tcemu.base.plots import suits_log_axis
from tcemu.cli import main
from tcemu.engine.isa.targets import resolve_target
from tcemu.uses.study.claims import CLAIM_MODULES
from tcemu.uses.study.claims.claim_types import Claim, Outcome, Quantity

CLAIMS = tcemu.study.list_claims()
STUDIES = pages.ROOT / "docs" / "studies"
QUICK = json.loads(FILE.read_text())
OTHER_SEED = 100
T_999 = {4: 8.610, 7: 5.408}  # Student's t for 99.9%, two-sided, by degrees of freedom (Fisher and Yates, table III)
SAME = 1e-5  # relative: the exact products of the reference are sums in float64, whose order is the machine's


def agree(values: dict[str, float], recorded: dict[str, list[float]]) -> list[str]:
    """The figures that lie outside the spread of the recorded ones."""
    assert values.keys() == recorded.keys()
    wrong = []
    for name, value in values.items():
        known = recorded[name]
        room = SAME * abs(fmean(known))
        if len(known) > 1:
            room += T_999[len(known) - 1] * stdev(known) * sqrt(1 + 1 / len(known))
        if not abs(value - fmean(known)) <= room:
            wrong.append(f"{name}: {value}, recorded {fmean(known)} +- {room}")
    return wrong


WAYS = ("plain f16, chained", "corrected, sums in the tensor core", "f32, multiply-add in order", "corrected, sums outside")
POINTS = {  # what each claim says, of its quick form's figures
    "deepseek-accumulation": lambda v: (
        0.005 < v["N(0,1), K = 4096: largest error / rms"] < 0.02 and -0.07 < v["uniform, K = 4096: bias"] < -0.06
    ),
    "deepseek-promotion": lambda v: all(
        falls([v[f"{draw}, {n}"] for n in ("never", "every 16", "every 8", "every 4", "every 2", "every 1")])
        for draw in ("N(0,1)", "uniform")
    ),
    "hopper-blackwell-fp8": lambda v: v["sm_90a, wgmma"] > 1e4 * v["sm_120a, mma"],
    "fast-accumulation": lambda v: v["forward, K = 4096, N(0,1)"] > 8 and v["forward, K = 4096, uniform"] > 100,
    "error-corrected-sgemm": lambda v: falls([v[f"{way}, K = 4096"] for way in WAYS]),
    "bf16x9-range": lambda v: (
        v["BF16x9, scaled parts, A · 2^-120"] < v["f32, multiply-add in order, A · 2^-120"] < v["BF16x9, plain parts, A · 2^-120"]
        and v["FP16x2, corrected, A · 2^-120"] > 0.05
    ),
    "ozaki-slices": lambda v: (
        33 < v["bits kept by 6 slices of 7 bits"] < 42 and v["native f64, 20 binades"] < v["8 slices, 20 binades"] < 1e-12
    ),
    "ozaki-moduli": lambda v: (
        22 < v["bits kept by 8 moduli, int8"] < 32
        and v["15 moduli scaled by norms, 20 binades"] < 1e-14
        and v["15 moduli scaled by the product, 20 binades"] < 1e-14
    ),
    "chunked-accumulation": lambda v: v["where a long sum stops growing"] == 4096 and v["chunks of 64, 16384: error"] < 0.01,
    "variance-retention": lambda v: v["4096 products, 5 bits"] < 0.95 < v["4096 products, 8 bits"],
    "mxfp8-scale-rounding": lambda v: (
        v["rounded up: elements that saturate"] == 0 < v["rounded down (OCP): elements that saturate"]
        and v["rounded up: normwise error"] < v["rounded down (OCP): normwise error"]
    ),
    "nvfp4-rounding": lambda v: v["to nearest"] < v["stochastic"] and v["the mean of 64 stochastic"] < v["stochastic"] / 6,
    "fp22-registers": lambda v: (v["sm_90a, wgmma"], v["sm_90a, mma"]) == (13, 23),
    "long-context-pv": lambda v: v["V of mean 0.5, 32768 keys, chained"] > 0.15 and v["V of mean 0.5, 32768 keys, every 128 keys"] < 1e-3,
    "long-context-attention": lambda v: v["4096 keys, FP8, chained"] > 5 * v["4096 keys, FP8, every 128 keys"],
    "attention-sink-underflow": lambda v: (
        falls([v[f"P rounded to 0, S = 1, sinks at {height}"] for height in (8, 7, 6, 5, 4)])
        and v["P rounded to 0, S = 256, sinks at 6"] < 1e-3
    ),
    "flash-attention-3": lambda v: 1e-3 < v["FlashAttention 3, FP8"] < 0.1,
    "biased-attention": lambda v: (
        v["a tail of the same sign"] < -0.05 < v["no tail"] < 0.05 < v["a tail of the other sign"]
        and abs(v["a tail of the same sign, the maximum moved"]) < 0.05
    ),
    "same-product": lambda v: list(v.values()) == [-0.5, -0.75, 0, -0.75],
}


SLOW = (
    "flash-attention-3", "long-context-attention", "nvfp4-rounding", "variance-retention", "chunked-accumulation", "long-context-pv",
    "error-corrected-sgemm", "ozaki-moduli",
)  # fmt: skip


def falls(values: list[float]) -> bool:
    return all(one > other for one, other in pairwise(values))


@pytest.fixture
def computing_targets(monkeypatch):
    """The targets of the products, attentions and sweeps that claims compute, but for arithmetics that no GPU has."""
    seen = set()

    def record(function):
        @functools.wraps(function)
        def compute(*args, recipe=None, target=None, model=None, **kwargs):
            recipes = [recipe] if recipe is not None else args[1].get("recipe", ()) if function is tcemu.study.sweep else ()
            seen.update(one.target for one in recipes if getattr(one, "narrow", one).model is None)
            if target is not None and model is None:
                seen.add(target)
            given = {"recipe": recipe, "target": target, "model": model}
            return function(*args, **kwargs, **{name: value for name, value in given.items() if value is not None})

        return compute

    for module in (import_module(f"tcemu.uses.study.claims.{name}") for name in CLAIM_MODULES):
        computes = (
            "gemm",
            "attention",
            "ozaki_matmul",
            "sweep",
            *(() if hasattr(module, "sweep") else ("matmul",)),
        )  # a sweep knows matmul itself
        for name in computes:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, record(getattr(module, name)))
    return seen


NO_GPU = {  # claims whose sums no GPU adds so, or that round operands alone
    "chunked-accumulation", "variance-retention", "mxfp8-scale-rounding", "nvfp4-rounding",
}  # fmt: skip


def test_every_claim_names_its_gpus(capsys):
    for name, claim in CLAIMS.items():
        assert bool(claim.targets) == (name not in NO_GPU) and [resolve_target(target) for target in claim.targets] == [*claim.targets]
        without = {q.name for q in claim.quantities if not claim.quantity_target(q)}
        assert name in NO_GPU or all(one.startswith(("f32, multiply-add in order", "native f64", "P rounded to 0")) for one in without)
    found = Outcome.from_facts(CLAIMS["same-product"], json.loads((STUDIES / "same-product.json").read_text()))
    assert [row["target"] for row in found.records()][:3] == ["sm_70", "sm_75", "sm_80"]
    assert re.search(r"^ +target +published", str(found), re.MULTILINE) and re.search(r"^V100, f16 +sm_70 ", str(found), re.MULTILINE)
    assert main(["study"]) == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()[1:]}
    assert listed["deepseek-accumulation"].split()[1] == "sm_90a" and listed["nvfp4-rounding"].split()[1] == "-"


@pytest.mark.parametrize("name", sample_cases(list(CLAIMS), [name for name in CLAIMS if name not in SLOW][::3]))
def test_the_quick_form(name, computing_targets):
    """A seed that was not recorded lies within the spread of those that were, and shows what is claimed, by the GPUs that it names."""
    assert OTHER_SEED not in SEEDS
    found = CLAIMS[name].reproduce([OTHER_SEED], quick=True)
    values = {name: value for name, (value,) in found.values.items()}
    assert agree(values, QUICK[name]) == []
    assert POINTS[name](values)
    assert computing_targets == {CLAIMS[name].quantity_target(row.quantity) for row in found.rows} - {""}


def test_every_claim_has_its_figures_and_its_point():
    assert list(QUICK) == sorted(CLAIMS) and POINTS.keys() == CLAIMS.keys()


@pytest.mark.full
@pytest.mark.parametrize("name", CLAIMS)
def test_the_whole_form(name):
    """A recorded seed has its figures again, and another lies within the spread."""
    recorded = json.loads((STUDIES / f"{name}.json").read_text())["values"]
    found = CLAIMS[name].reproduce((0, OTHER_SEED))
    assert {one: values[0] for one, values in recorded.items()} == pytest.approx(
        {n: v[0] for n, v in found.values.items()}, rel=SAME, abs=1e-12
    )
    assert agree({one: values[1] for one, values in found.values.items()}, recorded) == []


def test_what_lies_outside_the_spread_is_seen():
    recorded = {"a": [1.0, 1.1, 0.9, 1.05, 0.95], "b": [3.0]}
    assert agree({"a": 1.2, "b": 3.0}, recorded) == []
    assert len(agree({"a": 2.0, "b": 3.1}, recorded)) == 2
    assert len(agree({"a": float("nan"), "b": 3.0}, recorded)) == 1


# ---- what is recorded and shown


@pytest.mark.parametrize("name", CLAIMS)
def test_the_page_shows_the_recorded_figures(name):
    """The JSON is of the claim as it is, in its whole form; page and picture are what the script makes of it."""
    facts = json.loads((STUDIES / f"{name}.json").read_text())
    found = Outcome.from_facts(CLAIMS[name], facts)
    assert json.loads(found.to_json()) == facts and not found.quick
    assert found.seeds == tuple(range(CLAIMS[name].seeds)) and found.values.keys() == {q.name for q in CLAIMS[name].quantities}
    write = SimpleNamespace(**runpy.run_path(str(STUDIES / "write.py")))
    assert write.page(found) == (STUDIES / f"{name}.md").read_text()
    assert write.picture(found) == (STUDIES / f"{name}.svg").read_text()


def test_what_is_said_of_attention_is_in_the_recorded_figures():
    """Two-level sums mend long contexts, FlashAttention 3 has half the error of the baseline, P times 256 helps where sinks have no V."""
    ours = {
        name: {
            row.quantity.name: row.ours for row in Outcome.from_facts(CLAIMS[name], json.loads((STUDIES / f"{name}.json").read_text())).rows
        }
        for name in ("long-context-pv", "long-context-attention", "flash-attention-3", "attention-sink-underflow")
    }
    assert ours["long-context-pv"]["V of mean 0.5, 131072 keys, chained"] > 0.4
    assert ours["long-context-pv"]["V of mean 0.5, 131072 keys, every 128 keys"] < 2e-4
    errors = ours["long-context-attention"]
    assert errors["131072 keys, FP8, chained"] > 0.4 and errors["131072 keys, FP8, every 128 keys"] < 0.01
    table = ours["flash-attention-3"]
    assert table["FlashAttention 3, FP8"] == pytest.approx(9.1e-3, rel=0.1) and table["FP8 baseline"] > 1.8 * table["FlashAttention 3, FP8"]
    sinks = ours["attention-sink-underflow"]
    assert all(3 < sinks[f"mean squared error, {way}, V of 0, sinks at 5"] < 10 for way in ("S = 1 over S = 256", "sinks first over last"))


def test_published_numbers_that_are_met_exactly():
    for name in ("same-product", "fp22-registers", "chunked-accumulation"):
        found = Outcome.from_facts(CLAIMS[name], json.loads((STUDIES / f"{name}.json").read_text()))
        assert [row.difference for row in found.rows if row.quantity.published is not None].count(0) >= 1
        assert {row.difference for row in found.rows} <= {0, None}


def test_the_folder_has_nothing_else():
    kept = {f"{name}.{end}" for name in CLAIMS for end in ("json", "md", "svg")} | {"write.py"}
    assert {path.name for path in STUDIES.iterdir() if path.is_file()} == kept


# ---- a claim of our own


def claim_text(seed: int, quick: bool) -> dict[str, float]:
    return {"one": 1.0 + seed, "two": 10.0} | ({} if quick else {"line": 2.0})


OWN = Claim(
    name="own", title="a title", citation="A, B, 2020", link="https://example.org", setting="a setting.", reduced="no line.",
    differs="a reason.", measure=claim_text,
    quantities=(Quantity("one", 2.0, "about 2"), Quantity("two"), Quantity("line", 0.0, series="a", x=3)),
)  # fmt: skip


def test_an_outcome_says_all():
    found = OWN.reproduce(3)
    assert found.seeds == (0, 1, 2) and found.values == {"one": (1, 2, 3), "two": (10, 10, 10), "line": (2, 2, 2)}
    one, two, line = found.records()
    assert (one["published"], one["ours"], one["least"], one["most"], one["deviation"], one["difference"]) == (2, 2, 1, 3, 1, 0)
    assert (two["published"], two["difference"], line["difference"], line["series"], line["x"]) == (None, None, 2, "a", 3)
    text = str(found)
    assert re.search(r"^one +about 2 +2 +1 +none$", text, re.MULTILINE) and re.search(r"^two +- +10 +- +-$", text, re.MULTILINE)
    for words in ("own: a title", "A, B, 2020", "https://example.org", "Setting: a setting.", "3 seeds", "a reason."):
        assert words in text
    quick = OWN.reproduce([7], quick=True)
    assert "Quick form: no line." in str(quick) and "deviation" not in str(quick) and "line" not in quick.values
    assert quick.values["one"] == (8,) and "+300%" in str(quick)
    assert Outcome.from_facts(OWN, json.loads(found.to_json())) == found
    assert repr(quick) == "<Outcome of own: 2 quantities, 1 seed, quick form>" and repr(OWN) == "<Claim own: a title>"


@pytest.mark.parametrize("seeds", [0, [], [-1], [1.5]])
def test_seeds_that_are_none(seeds):
    with pytest.raises(ValueError, match=r"seeds: got .*; .* a number of seeds, 1 or more"):
        OWN.reproduce(seeds)


def test_pictures():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install -e '.[viz]')")
    (axes,) = OWN.reproduce(3).plot().axes
    assert [np.asarray(line.get_xydata()).tolist() for line in axes.lines] == [[[3, 2]]]  # places beat marks
    (axes,) = OWN.reproduce(2, quick=True).plot().axes
    assert [(line.get_label(), np.asarray(line.get_xdata()).tolist()) for line in axes.lines] == [("ours", [1.5, 10]), ("published", [2])]
    assert axes.get_xscale() == "linear" and suits_log_axis([1, 9]) and not suits_log_axis([0, 9])


def test_a_claim_by_name():
    assert tcemu.study.get_claim("same-product").name == "same-product"
    with pytest.raises(ValueError, match=r"claim 'same-prodct', did you mean same-product.*; .* one of deepseek-accumulation"):
        tcemu.study.get_claim("same-prodct")


# ---- the command


def test_the_command_lists_the_claims(capsys):
    assert main(["study"]) == 0
    listed = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in listed] == list(CLAIMS)
    assert all(claim.title in line for claim, line in zip(CLAIMS.values(), listed, strict=True))


def test_the_command_runs_one_and_writes(capsys, tmp_path):
    words = ["study", "same-product", "--quick", "--seeds", "0,5", "--out", str(tmp_path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert re.search(r"^H100, f16 +sm_90a +-0.75 +-0.75 +none$", out, re.MULTILINE) and "https://arxiv.org/abs/2511.10909" in out
    read = json.loads((tmp_path / "same-product.json").read_text())
    assert read["seeds"] == [0, 5] and read["quick"] is True and read["values"]["H100, f16"] == [-0.75, -0.75]
    before = (tmp_path / "same-product.json").stat().st_mtime_ns
    assert main(words) == 2
    assert "same-product.json exists already; name another file, or add --overwrite" in capsys.readouterr().err
    assert (tmp_path / "same-product.json").stat().st_mtime_ns == before
    assert main([*words, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "claim 'nonsense'; expected one of"),
        (["--quick"], "--overwrite need the name of a claim"),
        (["same-product", "--overwrite"], "--overwrite needs --out"),
        (["same-product", "--seeds", "0"], "--seeds '0': expected a number"),
        (["same-product", "--seeds", "-3,x"], "expected a number"),
        (["same-product", "--out", "/nowhere"], "the folder /nowhere does not exist"),
    ],
)
def test_words_that_ask_for_nothing(words, said, capsys):
    words = [*words[:-2], f"{words[-2]}={words[-1]}"] if "-3,x" in words else words
    assert main(["study", *words]) == 2
    assert said in capsys.readouterr().err


def test_without_matplotlib_there_is_no_picture(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert main(["study", "fp22-registers", "--quick", "--out", str(tmp_path)]) == 0
    assert "no picture: plot() needs matplotlib" in capsys.readouterr().out
    assert [path.name for path in Path(tmp_path).iterdir()] == ["fp22-registers.json"]
