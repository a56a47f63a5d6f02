"""The picture of an explanation: its cells are the bits of the terms, and its labels do not overlap."""

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

import tcemu
from tcemu.uses.explanation.explanation_picture import MAX_COLUMNS, MAX_ROWS, REMOVED, BitRow, StepPanel, choose_columns, set_bits

pytest.importorskip("matplotlib", reason="matplotlib is not installed (pip install -e '.[viz]')")
RNG = np.random.default_rng(0)
A, B = RNG.normal(size=(2, 64))
README = ([-8192, -0.5, -0.25, -0.125], [1024, 1, 1, 1], 2.0**23)
EXPLAINED = {
    "README": lambda: tcemu.explain("f16", *README, target=["A100", "H100"]),
    "f16": lambda: tcemu.explain("f16", A[:32], B[:32], 0.3, target="H100"),
    "many terms": lambda: tcemu.explain("e4m3 wgmma", A, B, target="H100"),
    "what if": lambda: tcemu.explain("bf16", A[:8], B[:8], target="H100",
    model=[None, tcemu.get_model("bf16", "H100").replace(fraction_bits=9)]),
    "block scales": lambda: tcemu.explain("nvf4", A.round(), B.round(), target="sm_120a", scale_a=[1, 2, 0.5, 4], scale_b=[1, 1, 2, 1]),
    "fused multiply-adds": lambda: tcemu.explain("f64", A[:4], B[:4], 0.3, target="H100"),
    "integers": lambda: tcemu.explain("s8", [1, -3], [1, 2], 7, target="H100"),
    "infinity": lambda: tcemu.explain("f16", [1, np.inf], [1, 2], 0.3, target="H100"),
    "nothing but zeros": lambda: tcemu.explain("f16", [0.0], [1.0], target="H100"),
}  # fmt: skip


def texts(figure):
    return [text for text in figure.axes[0].texts if text.get_text()]


@pytest.mark.parametrize("name", EXPLAINED)
def test_labels_do_not_overlap_and_stay_inside(name):
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = EXPLAINED[name]().plot()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts(figure)]
    overlapping = [(one, other) for (one, a), (other, b) in combinations(boxes, 2) if a.overlaps(b)]
    assert overlapping == []
    width, height = figure.get_size_inches() * figure.dpi
    assert [text for text, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height] == []


def test_cells_are_the_bits_and_red_ones_what_is_truncated():
    """The cells of each row, as numbers, are the terms; the red ones are what alignment truncated."""
    explained = tcemu.explain("f16", A[:16], B[:16], 0.3, target="A100")
    for number, step in enumerate(explained.steps, 1):
        panel = explained.panel(number)
        for row, term in zip(panel.terms, (term for term in step.terms if term.value), strict=True):
            value = sum(Fraction(2) ** place for place in set_bits(row.value))
            removed = sum(Fraction(2) ** place for place in set_bits(row.value) if place < row.last_bit)
            assert (row.name, value, removed) == (term.name, abs(term.value), abs(term.truncated))
        lost = sum(Fraction(2) ** place for place in set_bits(panel.total.value) if panel.total.last_bit and place < panel.total.last_bit)
        assert lost == abs(step.rounding_loss)
        figure = explained.plot(number)
        red = [
            patch
            for patch in figure.axes[0].patches
            if patch.get_facecolor()[:3] == tuple(int(REMOVED[i : i + 2], 16) / 255 for i in (1, 3, 5))
        ]
        places = [place for row in (*panel.terms, panel.total) for place in set_bits(row.value) if row.last_bit is not None]
        assert len(figure.axes[0].patches) == sum(len(set_bits(row.value)) for row in (*panel.terms, panel.total)) and places
        assert len(red) == sum(
            place < row.last_bit for row in (*panel.terms, panel.total) if row.last_bit is not None for place in set_bits(row.value)
        )


def test_the_readme_s_picture_says_what_differs():
    words = [text.get_text() for text in texts(EXPLAINED["README"]().plot())]
    assert "sm_80 (A100, A30): aligned terms keep 24 fraction bits" in words
    assert "sm_90a (H100, H200): aligned terms keep 25 fraction bits" in words
    assert [word for word in words if word.startswith("result")] == ["result -0.5, exact -0.875", "result -0.75, exact -0.875"]


def test_the_step_that_loses_most_is_drawn_unless_one_is_named():
    explained = EXPLAINED["f16"]()
    losses = [sum(abs(t.truncated) for t in step.terms) + abs(step.rounding_loss) for step in explained.steps]
    number = losses.index(max(losses)) + 1
    assert explained.panel() == explained.panel(number) and explained.panel(1) != explained.panel(2)
    for step in (0, 3):
        with pytest.raises(ValueError, match=f"step={step}: expected a number from 1 to 2"):
            explained.plot(step)


def test_large_steps_are_limited_and_say_so():
    words = [text.get_text() for text in texts(EXPLAINED["many terms"]().plot())]
    assert (
        any("terms that lose the least are not drawn" in word for word in words)
        and sum(word.startswith("k ") for word in words) <= MAX_ROWS
    )
    wide = StepPanel("", (BitRow("x", Fraction(2**200 - 1, 2**100), None),), None, None, "")
    assert len(choose_columns([wide])) == MAX_COLUMNS
    far = StepPanel("", (BitRow("x", Fraction(2**40 + 1), None),), None, 0, "")
    assert choose_columns([far]) == [40, None, 0]


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"plot\(\) needs matplotlib"):
        EXPLAINED["README"]().plot()
