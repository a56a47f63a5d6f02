"""`tcemu demo`: run once in this process, its table held against NumPy and against docs/start.md."""

import io
import re

import ml_dtypes
import numpy as np
import pytest
from support import pages

from tcemu.cli import main
from tcemu.faces.commands import demo_command as demo
from tcemu.formats import E4M3

DTYPES = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn}  # tf32 has none


@pytest.fixture(scope="module")
def printed():
    """What the demo prints."""
    with pytest.MonkeyPatch.context() as patch:
        stream = io.StringIO()
        patch.setattr("sys.stdout", stream)
        assert main(["demo"]) == 0
        return stream.getvalue()


def test_the_table_holds(printed):
    lines = dict(re.findall(r"^(plain float32|f16|bf16|tf32|e4m3) +(\d.*)$", printed, re.MULTILINE))
    assert list(lines) == ["plain float32", "f16", "bf16", "tf32", "e4m3"]
    data = demo.load_digits()
    labels = data["labels"][1157:]
    exact = demo.classify(data, np.matmul, np.float64)
    for name, line in lines.items():
        right, changed, of, error, other, *_ = line.replace(" of ", " ").split()
        assert of == "640"
        assert 90 < float(right.rstrip("%")) < 96
        assert int(changed) < 20
        assert (float(other.rstrip("%")) > 90) == (name != "plain float32")
        if name in DTYPES:  # NumPy rounds the inputs alone, which makes nearly all of the error
            logits = demo.classify(data, rounded_product(DTYPES[name]))
            assert (logits.argmax(1) == labels).mean() * 100 == pytest.approx(float(right.rstrip("%")), abs=0.2)
            assert float(error) == pytest.approx(np.abs(logits - exact).max(), rel=0.1)


def test_what_it_prints_is_on_the_first_page(printed):
    """But for times, and plain float32's line."""
    text = (pages.ROOT / "docs" / "start.md").read_text()
    shown = text.partition("```text\n640 images")[2].partition("```")[0]
    assert pages.comparable(printed) == pages.comparable(f"640 images{shown}")


def rounded_product(dtype):
    """A product of matrices rounded to `dtype` by NumPy, after the demo's scaling, with float64 sums."""

    def product(a, b):
        by = [demo.power_of_two_scale(x, E4M3) if dtype == ml_dtypes.float8_e4m3fn else 1.0 for x in (a, b)]
        a, b = ((x * np.float32(s)).astype(dtype).astype(np.float64) for x, s in zip((a, b), by, strict=True))
        return (a @ b / (by[0] * by[1])).astype(np.float32)

    return product


@pytest.mark.parametrize(("largest", "scale"), [(448, 1), (449, 0.5), (224, 2), (0.0, 1), (1, 256), (1.76, 128), (1e-6, 2.0**28)])
def test_the_scale_fills_the_format(largest, scale):
    x = np.array([[0.0, -largest]], np.float32)
    assert demo.power_of_two_scale(x, E4M3) == scale


def test_the_shipped_weights_classify_the_shipped_digits():
    data = demo.load_digits()
    assert {name: (x.dtype.name, x.shape) for name, x in data.items()} == {
        "images": ("uint8", (1797, 8, 8)), "labels": ("uint8", (1797,)), "first_test": ("int32", ()),
        "w1": ("float32", (64, 64)), "b1": ("float32", (64,)), "w2": ("float32", (64, 10)), "b2": ("float32", (10,)),
    }  # fmt: skip
    assert data["images"].max() == 16
    right = demo.classify(data, np.matmul, np.float64).argmax(1) == data["labels"][data["first_test"] :]
    assert (right.sum(), right.size) == (600, 640)
