"""Pictures: what is read off them is the layout's index, everywhere in the catalogue; nothing is cut; marks are where they should be."""

import re
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from oracles.fragment_formulas import wgmma_byte
from support.sampling import sample_cases
from support.svg_pictures import SVG, Grid, parse, span, texts

from tcemu.base.errors import Unsupported
from tcemu.cli import main
from tcemu.engine.isa.grammar import parse as parse_op
from tcemu.engine.isa.operand_fragments import register_fragments
from tcemu.engine.isa.syntax_table import syntax_rows
from tcemu.engine.layouts.fragment_layouts import Fragment
from tcemu.uses.viz.svg_drawing import ADDRESS_HEADING, COLOURS, FADED, INK, PAGE_WIDTH, PAPER, draw_paragraph
from tcemu.viz import operands, page, svg

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
VOLTA = "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32"
SPARSE = "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32"
SCALED = "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3"
SCALED_1X = "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.f32.e4m3.e4m3.f32.ue8m0"
WGMMA = "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16"
WGMMA_SPARSE = "wgmma.mma_async.sp.sync.aligned.m64n24k32.f32.f16.f16"
WMMA = "wmma.mma.sync.aligned.row.col.m32n8k16.f32.f32"
LDMATRIX = "ldmatrix.sync.aligned.m8n8.x4.trans.b16"
MOVMATRIX = "movmatrix.sync.aligned.m8n8.trans.b16"
WGMMA_DENSE = "wgmma.mma_async.sync.aligned.m64n48k16.f16.f16.f16"
BITS = "mma.sync.aligned.m16n8k256.row.col.s32.b1.b1.s32.and.popc"
PAGES = [MMA, MOVMATRIX, WGMMA_DENSE, VOLTA, SPARSE, SCALED, SCALED_1X, WGMMA_SPARSE, WMMA, LDMATRIX, BITS]


@cache
def every_operand() -> list[tuple[str, str, Fragment]]:
    """An instruction for each kind of operand: one for each name, fragment and element that a cell can show."""
    found = {}
    for op in syntax_rows():
        for name, fragment in register_fragments(op).items():
            found.setdefault(
                (op.family.split(".")[0], name, getattr(op, "operand", None), getattr(op, "scaling", None), fragment),
                (str(op), name, fragment),
            )
    return list(found.values())


def elements(name: str, words: str, per_register: int) -> list[int]:
    """The elements that the second line of a cell names."""
    if name in ("e", "sp_meta"):
        high, low = map(int, re.fullmatch(r"\[(\d+):(\d+)\]", words).groups())
        assert high == low + 3
        return [low // 4]
    if name.startswith("scale"):
        return [int(re.fullmatch(r"byte (\d)", words)[1])]
    if words.endswith("]"):
        register, part = map(int, re.fullmatch(r"[rad](\d+)\[(\d)\]", words).groups())
        return [register * per_register + part]
    assert words[0] in "abcd"
    return [element for part in words[1:].split(",") for element in span(part)]


def leading(title: str, name: str, scale_vec: int | None) -> tuple[int, ...]:
    """The place on the layout's leading axes that the title of a grid says."""
    numbers = [int(number) for number in re.findall(r"\d+", title)]
    if name.startswith("scale"):
        return numbers[1], numbers[0] // scale_vec
    return (numbers[0],) if numbers else ()


def read_back(op: str, name: str, fragment: Fragment, grids: list[Grid]) -> np.ndarray:
    """int[lanes, elements] from the picture: where in the fragment's shape each element stands; fails if one is drawn twice."""
    instruction = parse_op(op)
    held, per_register = fragment.elements, fragment.elements // instruction.register_count(name)
    drawn = []  # lane, element, place on each axis of the shape
    for seen in grids:
        place = leading(seen.title, name, getattr(instruction, "scaling", None) and instruction.scaling.count)
        column_at = {text.x: span(text.words) for text in seen.columns if text.words != ADDRESS_HEADING}
        row_at = {text.y: span(text.words) for text in seen.rows}
        for rect in seen.cells:
            lane_words, element_words = rect.words
            rows, columns = row_at[rect.y + rect.height // 2 + 4], column_at[rect.x + rect.width // 2]
            places = [(row, column) for row in rows for column in columns]
            numbers = elements(name, element_words, per_register)
            assert len(numbers) % len(places) == 0 and numbers == sorted(numbers)
            for lane in lane_words.removeprefix("T").split(","):
                # copies follow each other, each as long as the cell's run
                drawn += [(int(lane), number, *place, *places[i % len(places)]) for i, number in enumerate(numbers)]
    lanes, numbers, *places, rows, columns = np.array(drawn).T
    if name == "sp_meta":  # the fragment is that of one warp
        np.testing.assert_array_equal(rows // 16, lanes // 32)
        rows = rows % 16
    assert len(set(zip(lanes.tolist(), numbers.tolist(), strict=True))) == len(drawn), f"{op} {name}: an element is drawn twice"
    found = np.full((32 * instruction.warps, held), -1)
    found[lanes, numbers] = np.ravel_multi_index((*places, rows, columns), fragment.shape)
    return found


@pytest.mark.parametrize("every", sample_cases((8, 1), (8,)))
def test_what_is_read_off_the_pictures_is_the_layout(every):
    cells = 0
    for op, name, fragment in every_operand()[::every]:
        _, grids = parse(svg(op, name))
        found = read_back(op, name, fragment, grids)
        index = fragment.index().reshape(-1, fragment.elements)
        np.testing.assert_array_equal(found, np.tile(index, (len(found) // len(index), 1)), err_msg=f"{op} {name}")
        cells += found.size
        for seen in grids:
            for rect in seen.cells:
                lane = int(re.match(r"T(\d+)", rect.words[0])[1])
                assert rect.fill == COLOURS[lane % 32]
    assert len(every_operand()) >= 193 and cells >= (345_984 if every == 1 else 40_000)


@pytest.mark.parametrize("op", PAGES)
def test_a_page_shows_what_the_single_pictures_show(op):
    _, grids = parse(page(op))
    singles = [seen for name in operands(op) for seen in parse(svg(op, name))[1]]
    assert [[rect.words for rect in seen.cells] for seen in grids] == [[rect.words for rect in seen.cells] for seen in singles]
    assert [seen.title for seen in grids] == [seen.title for seen in singles]


@pytest.mark.parametrize("op", PAGES)
def test_nothing_is_cut_and_nothing_overlaps(op):
    root, grids = parse(page(op))
    left, top, width, height = map(float, root.get("viewBox").split())
    assert (
        (left, top) == (0, 0) and width < PAGE_WIDTH + 64 and (root.get("width"), root.get("height")) == (f"{width:.0f}", f"{height:.0f}")
    )
    lines = {}
    for text in texts(root):
        assert text.span[0] >= 0 and text.span[1] <= width and text.size < text.y < height, text
        lines.setdefault(text.y, []).append(text.span)
    for y, spans in lines.items():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans)), f"texts overlap at y = {y}"
    for seen in grids:
        for rect in seen.cells + seen.addresses:
            assert rect.x + rect.width <= width and rect.y + rect.height <= height
            for text in rect.texts:
                assert rect.x < text.span[0] and text.span[1] < rect.x + rect.width
                assert rect.y + text.size * 0.75 < text.y < rect.y + rect.height - text.size * 0.25


@pytest.mark.parametrize(
    ("op", "lane"),
    [(MMA, 0), (MMA, 31), (VOLTA, 17), (SPARSE, 6), (SCALED, 3), (WGMMA_SPARSE, 37), (WGMMA_SPARSE, 127), (WMMA, 5), (LDMATRIX, 9)],
)
def test_a_lane_is_marked_and_no_other(op, lane):
    root, grids = parse(page(op, lane))
    marked = 0
    for seen in grids:
        for rect in seen.cells + seen.addresses:
            if rect.words[0][0] != "T":  # shared memory has no lanes
                assert rect.fill in COLOURS and rect.stroke == PAPER
                continue
            mine = lane in map(int, rect.words[0].removeprefix("T").split(","))
            assert (rect.fill, rect.stroke) == ((COLOURS[lane % 32], INK) if mine else (FADED, PAPER))
            marked += mine
    plain = [rect for seen in parse(page(op))[1] for rect in seen.cells + seen.addresses]
    assert marked == sum(f"T{lane}" in rect.words for rect in plain) > 0
    assert any(f"T{lane}" in text.words and "colour" in text.words for text in texts(root))


def test_rows_say_whose_address_points_to_them():
    rows = 0
    for op in syntax_rows():
        if op.family not in ("ldmatrix", "stmatrix"):
            continue
        for seen in parse(svg(op, "r"))[1]:
            matrix = int(seen.title.removeprefix("matrix "))
            drawn = {text.words: rect.words for rect in seen.addresses for text in seen.rows if rect.y < text.y < rect.y + rect.height}
            # 9.7.14.5.15: threads 0-7 have the rows of the first matrix, and so on; 16 rows for m16n16
            each = 16 if op.shape == "m16n16" else 8
            assert drawn == {str(row): [f"T{each * matrix + row}"] for row in range(each)}
            rows += each
    assert rows > 1_000


MODES = {"no": 0, "128-byte": 1, "64-byte": 2, "32-byte": 3}  # the field of the descriptor, 9.7.15.5.1.2.2


@pytest.mark.parametrize(
    ("op", "majors"),
    [
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16", "km"),
        ("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32", "k"),
        ("wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.u8", "k"),
        ("wgmma.mma_async.sync.aligned.m64n8k256.s32.b1.b1.and.popc", "k"),
        ("wgmma.mma_async.sp.sync.aligned.m64n24k32.f32.bf16.bf16", "km"),
    ],
)
@pytest.mark.parametrize("operand", ["a_desc", "b_desc"])
def test_shared_memory_is_drawn_as_the_formulas_say(op, majors, operand):
    """Every byte of every atom, against the addresses written out in tests/fragments.py."""
    bits = parse_op(op).a.bits
    across = {"a_desc": "m", "b_desc": "n"}[operand]
    _, grids = parse(svg(op, operand))
    assert [seen.title[0].lower() for seen in grids] == [major for name in majors for major in 4 * name.replace("m", across)]
    drawn = 0
    for seen in grids:
        mode = MODES[re.search(r", (\S+) swizzle", seen.title)[1]]
        for rect in seen.cells:
            row, column = seen.place(rect)
            line, along = ((words[0], span(words[1:])) for words in rect.words)
            assert {line[0], along[0]} == {across, "k"} and along[0] == seen.title[0].lower()
            for element, number in enumerate(along[1]):
                at, k = (line[1][0], number) if along[0] == "k" else (number, line[1][0])
                byte, _ = wgmma_byte(mode << 62, at, k, bits, along[0] == "k")
                assert byte == int(row) + int(column) + element * bits // 8
                drawn += 1
    assert drawn * bits // 8 == len(majors) * (128 + 256 + 512 + 1024)


def test_warps_are_named_and_drawn_apart():
    (seen,) = parse(svg(WGMMA_SPARSE, "d"))[1]
    assert seen.upright == ["warp 0", "warp 1", "warp 2", "warp 3"]
    tops = sorted({rect.y for rect in seen.cells})
    steps = np.diff(tops)
    assert set(np.flatnonzero(steps > steps.min())) == {15, 31, 47}


def test_a_wide_matrix_is_folded():
    root, grids = parse(svg(WGMMA, "d"))
    assert [seen.columns[0].words for seen in grids] == ["0-1", "64-65", "128-129", "192-193"]
    assert float(root.get("width")) < 2100


def luminance(colour: str) -> float:
    return linear(colour) @ np.array([0.2126, 0.7152, 0.0722])


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lightness_and_hue(rgb: np.ndarray) -> np.ndarray:
    """Linear sRGB -> OKLab, in which distance is about as seen; 0.02 is a difference that is just noticed."""
    cones = np.cbrt([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]] @ rgb)
    return np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]) @ cones


# what is left of linear sRGB without one kind of cones, Machado and others 2009, severity 1
VISION = {
    "all cones": np.eye(3),
    "no long": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no middle": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no short": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def test_colours_are_told_apart_and_carry_text():
    assert len(set(COLOURS)) == 32
    assert min((luminance(colour) + 0.05) / (luminance(INK) + 0.05) for colour in COLOURS) > 7  # WCAG 2.2, enhanced contrast
    assert (luminance(FADED) + 0.05) / (luminance("#666666") + 0.05) > 4.5
    for vision, matrix in VISION.items():
        seen = np.array([lightness_and_hue(np.clip(matrix @ linear(colour), 0, 1)) for colour in COLOURS])
        apart = np.linalg.norm(seen[:, None] - seen, axis=-1)[~np.eye(32, dtype=bool)].min()
        assert apart > (0.05 if vision == "all cones" else 0.025), vision


def test_a_picture_is_plain_svg_and_the_same_each_time():
    first = svg(WMMA, "b", 3)
    assert first == svg(parse_op(WMMA), "b", np.int64(3))
    root, _ = parse(first)
    assert root.find(f"{SVG}title").text == f"{WMMA}: b"
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {"svg", "title", "g", "rect", "text"}


def test_text_is_escaped():
    assert any("a &lt; b &amp; c" in line for line in draw_paragraph(["a < b & c"]).body)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: svg(MMA, "e"), ValueError, r"operand: 'e' of .* one of a, b, c, d"),
        (lambda: svg(MMA, "a", 32), ValueError, "lane: got 32; the lanes of .* are 0 to 31"),
        (lambda: page(MMA, -1), ValueError, "lane: got -1"),
        (lambda: page(WGMMA, 128), ValueError, "0 to 127, counted through its four warps"),
        (lambda: page(MMA, 2.0), TypeError, r"lane: got 2\.0.* integer"),
        (lambda: page(MMA, True), TypeError, "lane: got True"),
        (lambda: page("wgmma.fence.sync.aligned"), ValueError, "has no operand to draw"),
        (lambda: svg("wgmma.fence.sync.aligned", "d"), ValueError, "one of none"),
        (lambda: svg(WGMMA, "a_desc", 3), ValueError, "a_desc of .* lies in shared memory and has no lanes"),
        (lambda: page("mma.sync"), Unsupported, "missing qualifier"),
    ],
)
def test_errors(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_show_writes_a_picture_and_says_so(capsys, tmp_path):
    file = tmp_path / "fragments.svg"
    assert main(["show", MMA, "--svg", str(file)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{MMA}\n  family     mma")
    assert out.endswith(f"\n{file}: a, b, c, d, {file.stat().st_size:,} bytes\n")
    assert file.read_text() == page(MMA)

    assert main(["show", MMA, "--svg", str(file), "--lane", "5"]) == 2
    assert f"{file} exists already; name another file, or add --overwrite" in capsys.readouterr().err
    assert file.read_text() == page(MMA)
    assert main(["show", MMA, "--svg", str(file), "--lane", "5", "--operand", "b", "--overwrite"]) == 0
    assert f"{file}: b, " in capsys.readouterr().out
    assert file.read_text() == svg(MMA, "b", 5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--svg", "new.svg", "--lane", "32"), "lane: got 32"),
        (("--svg", "new.svg", "--operand", "e"), "operand: 'e' of"),
        (("--svg", "no/such/folder.svg"), "No such file or directory"),
        (("--lane", "3"), "--lane needs --svg"),
        (("--operand", "a"), "--operand needs --svg"),
        (("--overwrite",), "--overwrite needs --svg"),
    ],
)
def test_show_refuses(capsys, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["show", MMA, *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err and captured.out == ""
    assert list(tmp_path.iterdir()) == []


TENSOR_MEMORY = {  # product -> the cells of D that are drawn in each CTA, and one of them
    "f16 tcgen05": (8 * 8, ("m 16-31", "n 32-63")),
    "tcgen05.mma.cta_group::1.kind::f16.m64n64k16.f32.f16.f16": (4 * 8, ("m 48-63", "n 56-63")),
    "tcgen05.mma.ws.cta_group::1.kind::f16.m32n64k16.f32.f16.f16": (8 * 8, ("m 16-31", "n 62-63")),
    "tcgen05.mma.cta_group::2.kind::f16.m128n64k16.f32.f16.f16": (2 * 8 * 8, ("m 64-79", "n 32-35")),
}


@pytest.mark.parametrize("spelling", TENSOR_MEMORY)
def test_tensor_memory_is_drawn(spelling):
    """Every element of D is in one drawn cell: the cells' rows times columns are M times N."""
    count, shown = TENSOR_MEMORY[spelling]
    op = parse_op(spelling)
    picture = page(spelling)
    cells = re.findall(r">m (\d+)-(\d+)<.*?>n (\d+)-(\d+)<", picture, re.DOTALL)
    assert len(cells) == count
    sizes = [(int(b) - int(a) + 1) * (int(d) - int(c) + 1) for a, b, c, d in cells]
    assert sum(sizes) == op.m * op.n and len(set(cells)) == count
    assert (*(shown[0][2:].split("-")), *(shown[1][2:].split("-"))) in cells
    with pytest.raises(ValueError, match="lies in tensor memory"):
        page(spelling, lane=3)
