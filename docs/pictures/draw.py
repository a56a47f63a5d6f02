"""Draws the pictures of the documentation, from what tcemu computes: `python docs/pictures/draw.py [FOLDER]`.

The same bytes on every machine: nothing but integers and exact fractions decides where a line goes, or floats that are rounded to a pixel.
dot_product.svg and order_changes.svg are results' `plot()`, with the same bytes from one version of matplotlib, which the files name.
"""

import sys
from collections.abc import Callable
from math import log2
from pathlib import Path
from xml.sax.saxutils import escape

import jax
import jax.numpy as jnp
import numpy as np

import tcemu
from tcemu import replay, viz
from tcemu.base.plots import figure_svg

OP = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
WGMMA = "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3"
WGMMA_SMALL = "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3"
FONT = "system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif"
INK, FAINT, PAPER, LINE = "#1a1a1a", "#767676", "#ffffff", "#b3261e"


def document(width: int, height: int, title: str, body: list[str]) -> str:
    """An SVG on white paper."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
            f'font-family="{escape(FONT)}" font-size="15">',
            f"<title>{escape(title)}</title>",
            f'<rect width="{width}" height="{height}" rx="6" fill="{PAPER}"/>',
            *body,
            "</svg>\n",
        ]
    )


def text(x: int, y: int, words: str, anchor: str = "start", fill: str = INK, more: str = "") -> str:
    """A line of text."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{fill}"{more}>{escape(words)}</text>'


# ---- one dot product on two GPUs


def superscript(number: int) -> str:
    """-1 -> "⁻¹"."""
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def dot_product() -> str:
    """-8192 x 1024 - 0.5 - 0.25 - 0.125 + 2^23 on an A100 and on an H100, as the README has it: `explained.plot()`, by matplotlib."""
    a, b, c = [-8192, -0.5, -0.25, -0.125], [1024, 1, 1, 1], 2.0**23
    explained = tcemu.explain("f16", a, b, c, target=["A100", "H100"])
    return figure_svg(explained.plot(), "The same dot product on an A100 and on an H100: the A100 truncates one bit more").decode()


# ---- at which M the order changes


def order_changes() -> str:
    """A layer of 4096 x 4096 in bf16 by XLA: `find_order_changes(...).plot()`, by matplotlib."""
    found = replay.find_order_changes("jax-bf16", 4096, 4096)
    return figure_svg(found.plot(), "Slices of K over M for a layer of 4096 x 4096 in bf16 by XLA on an H200: 8, 4, 2, 1").decode()


# ---- the error of a narrower accumulator


def errors() -> list[tuple[int, float, float]]:
    """(fraction bits, mean error of the sums, the same with promotion) of a product with K = 1024 in e4m3."""
    rng = np.random.default_rng(0)
    a, b = (tcemu.formats.round_float(tcemu.formats.E4M3, rng.normal(size=shape).astype(np.float32)) for shape in ((16, 1024), (1024, 16)))
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    widths = jnp.arange(6, 19)
    means = []
    op = tcemu.parse(WGMMA)
    for recipe in (tcemu.Recipe(op, "H100"), tcemu.Recipe(op, "H100", promote=4)):
        narrower = lambda bits, recipe=recipe: recipe.what_if(fraction_bits=bits, result_bits=bits)
        swept = jax.jit(jax.vmap(lambda bits, of=narrower: tcemu.matmul(a, b, recipe=of(bits))))(widths)
        means.append(np.abs(np.asarray(swept, np.float64) - exact).mean((1, 2)).tolist())
    return list(zip(widths.tolist(), *means, strict=True))


def error_by_width() -> str:
    """The mean error of the sums over the bits that a step keeps."""
    points = errors()
    width, height, left, bottom = 560, 360, 64, 300
    floor, top = -17, 3

    def place(bits: int, error: float) -> str:
        return f"{left + 38 * (bits - 6)} {round(bottom - (log2(error) - floor) * 260 / (top - floor))}"

    body = []
    for power in range(-15, top + 1, 5):
        y = place(6, 2.0**power).split()[1]
        body.append(f'<path d="M{left - 8} {y}H{width - 12}" stroke="#dddddd"/>')
        body.append(text(left - 14, int(y) + 5, f"2{superscript(power)}", "end", FAINT, ' font-size="13"'))
    for bits in range(6, 19):
        if bits % 2 == 0 or bits == 13:
            faint = INK if bits == 13 else FAINT
            body.append(text(left + 38 * (bits - 6), bottom + 20, str(bits), "middle", faint, ' font-size="13"'))
    body.append(text(width // 2, bottom + 44, "fraction bits of a step and its result (H100, FP8, wgmma: 13)", "middle"))
    body.append(text(16, 22, "mean error of the sums, e4m3, K = 1024", more=' font-weight="600"'))
    at = left + 38 * 7
    body.append(f'<path d="M{at} 84V{bottom}" stroke="{FAINT}" stroke-dasharray="2 4"/>')
    for column, (colour, words) in enumerate((("#1f5fa8", "one sum over K"), (LINE, "promoted every 4 instructions")), 1):
        line = "L".join(place(point[0], point[column]) for point in points)
        body.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        body.append(f'<path d="M{left + 190} {24 + 22 * column}h24" stroke="{colour}" stroke-width="2.5"/>')
        body.append(text(left + 222, 29 + 22 * column, words, fill=colour))
    return document(width, height, "The mean error of FP8 sums over the fraction bits of a step, with and without promotion", body)


PICTURES: dict[str, Callable[[], str]] = {
    "dot_product.svg": dot_product,
    "error_by_width.svg": error_by_width,
    "order_changes.svg": order_changes,
    "mma_a.svg": lambda: viz.svg(OP, "a"),
    "mma_d.svg": lambda: viz.svg(OP, "d", lane=5),
    "wgmma_b_desc.svg": lambda: viz.svg(WGMMA_SMALL, "b_desc"),
    "tcgen05_d.svg": lambda: viz.svg("tcgen05.mma.ws.cta_group::1.kind::f16.m32n256k16.f32.f16.f16", "d"),
    "mma_sp_e.svg": lambda: viz.svg("mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32", "e"),
}


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw(), encoding="utf-8")
        print(folder / name)
