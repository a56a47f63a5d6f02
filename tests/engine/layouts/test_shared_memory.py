"""wgmma's shared memory: the manual's canonical layouts as CuTe evaluates them, the formulas seen on an H200, and there and back again."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import fragment_formulas as fragments
from support.sampling import sample_cases
from tensor_layouts import Layout, Swizzle

import tcemu
from tcemu.engine.layouts.shared_memory import (
    SWIZZLE_BYTES,
    SharedLayout,
    decode_descriptor,
    descriptor_words,
    has_stray_bits,
    read_matrix,
    swizzle_address,
    unit_addresses,
)
from tcemu.formats import B1, BF16, E4M3, F16, F64, S4, S8, TF32

SWIZZLES = (0, 32, 64, 128)
FORMATS = (B1, S4, E4M3, S8, F16, BF16, TF32)

# 9.7.15.5.1.2.1.3: figure, format, rows (M or N) x columns (K), major, swizzle, exact layout, LBO and SBO in elements, their encodings
EXAMPLES = [
    (166, TF32, (16, 16), "k", 0, "Swizzle<0,4,3> o ((8,2),(4,4)):((4,32),(1,64))", 64, 32, 16, 8),
    (168, BF16, (16, 16), "mn", 0, "Swizzle<0,4,3> o ((8,1,2),(8,2)):((1,8,64),(8,128))", 128, 64, 16, 8),
    (169, BF16, (32, 16), "mn", 32, "Swizzle<1,4,3> o ((8,2,2),(8,2)):((1,8,128),(16,256))", 128, 256, 16, 32),
    (170, BF16, (64, 16), "mn", 64, "Swizzle<2,4,3> o ((8,4,2),(8,2)):((1,8,256),(32,512))", 256, 512, 32, 64),
]
# figure 167 as printed: its (4,4):(1,4) takes 16 columns of an atom that is 8 wide, into the next row
PRINTED_167 = "Swizzle<1,4,3> o ((8,2),(4,4)):((8,64),(1,4))"
MENDED_167 = "Swizzle<1,4,3> o ((8,2),(4,2)):((8,64),(1,4))"

# the table of canonical layouts, as printed
CANONICAL = {
    ("mn", 0): "Swizzle<0,4,3> o ((T,1,m),(8,k)):((1,T,SBO),(1T,LBO))",
    ("mn", 32): "Swizzle<1,4,3> o ((T,2,m),(8,k)):((1,T,LBO),(2T,SBO))",
    ("mn", 64): "Swizzle<2,4,3> o ((T,4,m),(8,k)):((1,T,LBO),(4T,SBO))",
    ("mn", 128): "Swizzle<3,4,3> o ((T,8,m),(8,k)):((1,T,LBO),(8T,SBO))",
    ("k", 0): "Swizzle<0,4,3> o ((8,m),(T,2k)):((1T,SBO),(1,LBO))",
    ("k", 32): "Swizzle<1,4,3> o ((8,m),(T,2k)):((2T,SBO),(1,T))",
    ("k", 64): "Swizzle<2,4,3> o ((8,m),(T,2k)):((4T,SBO),(1,T))",
    ("k", 128): "Swizzle<3,4,3> o ((8,m),(T,2k)):((8T,SBO),(1,T))",
}


def cute(text: str, element_bytes: int, **symbols: int) -> np.ndarray:
    """The byte addresses [rows, columns] of a layout in the manual's notation; the swizzle acts on bytes."""
    text = re.sub(r"(\d)(?=[A-Za-z])", r"\1*", text.split(" o ")[1])
    text = re.sub(r"[A-Za-z]+", lambda name: str(symbols[name[0]]), text)
    shape, stride = (eval(side) for side in text.split(":"))
    layout = Layout(shape, stride)
    rows, columns = (int(np.prod(group)) for group in shape)
    return np.array([[layout(i, j) * element_bytes for j in range(columns)] for i in range(rows)])


def swizzle_text(text: str, addresses: np.ndarray) -> np.ndarray:
    bits = [int(number) for number in re.search(r"Swizzle<(\d),(\d),(\d)>", text).groups()]
    return np.vectorize(Swizzle(*bits))(addresses)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"figure {example[0]}")
def test_the_manuals_examples(example):
    _, fmt, (rows, columns), major, mode, text, leading, stride, encoded_leading, encoded_stride = example
    size = fmt.bits // 8
    want = swizzle_text(text, cute(text, size))
    given_strides = SharedLayout(fmt, rows, columns, major, mode, leading=leading * size, stride=stride * size)
    np.testing.assert_array_equal(given_strides.addresses(), want)
    without_gaps = SharedLayout(fmt, rows, columns, major, mode)
    assert without_gaps.descriptor() == given_strides.descriptor()
    assert sorted(want.ravel()) == list(range(0, rows * columns * size, size))
    made = given_strides.descriptor()
    assert (made >> 16 & 0x3FFF, made >> 32 & 0x3FFF) == (encoded_leading, encoded_stride)


def test_figure_167_is_printed_with_twice_its_columns():
    printed = swizzle_text(PRINTED_167, cute(PRINTED_167, 4))
    assert printed.shape == (16, 16) and len(np.unique(printed)) < printed.size
    np.testing.assert_array_equal(printed[0, 8:], printed[1, :8])
    mended = swizzle_text(MENDED_167, cute(MENDED_167, 4))
    layout = SharedLayout(TF32, 16, 8, "k", 32, stride=64 * 4)
    np.testing.assert_array_equal(layout.addresses(), mended)
    assert layout.descriptor() >> 32 & 0x3FFF == 16


@pytest.mark.parametrize("major", ["k", "mn"])
@pytest.mark.parametrize("mode", SWIZZLES)
@pytest.mark.parametrize("fmt", [E4M3, F16, TF32], ids=str)
def test_the_table_of_canonical_layouts(fmt, mode, major):
    text, size, per_unit = CANONICAL[major, mode], fmt.bits // 8, 128 // fmt.bits
    width = max(1, mode // 16)
    atom = 8 * width * per_unit
    for m, k in ((1, 1), (2, 1), (3, 2)):
        if major == "k" and mode:  # 2k units along K, which must stay inside the atom
            k = min(k, width // 2)
        strides = {"LBO": 3 * m * k * atom, "SBO": atom} if (major == "mn") == (mode == 0) else {"LBO": 2 * atom, "SBO": 9 * atom}
        if major == "k":
            strides = {"LBO": 3 * m * atom, "SBO": atom}
        symbols = {"T": per_unit, "m": m, "k": k} | strides
        want = swizzle_text(text, cute(text, size, **symbols))
        layout = SharedLayout(fmt, *want.shape, major, mode, leading=strides["LBO"] * size, stride=strides["SBO"] * size)
        np.testing.assert_array_equal(layout.addresses(), want)


traced_addresses = jax.jit(lambda words, *size: unit_addresses(decode_descriptor(words), *size), static_argnums=(1, 2, 3))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_formulas_seen_on_an_h200(data):
    """Any start, strides and base offset; 16-bit elements MN-major, all widths K-major, to 64 bytes of K."""
    mode = data.draw(st.sampled_from(SWIZZLES))
    k_major = data.draw(st.booleans())
    fmt = data.draw(st.sampled_from(FORMATS)) if k_major else F16
    start, leading, stride = (16 * data.draw(st.integers(0, (1 << 14) - 1)) for _ in range(3))
    made = tcemu.layouts.descriptor(start, leading, stride, mode, data.draw(st.integers(0, 7)) if mode else 0)
    rows, columns = 24, 64 * 8 // fmt.bits
    lines, units = (rows, 4) if k_major else (columns, 3)
    found = unit_addresses(decode_descriptor(descriptor_words("x", made)), "k" if k_major else "mn", lines, units)
    for row, column in ((0, 0), (1, columns // 2), (8, columns - 1), (23, columns // 4), (17, 3)):
        byte, _ = fragments.wgmma_byte(made, row, column, fmt.bits, k_major)
        line, along = (row, column * fmt.bits // 8) if k_major else (column, row * 2)
        assert found[line, along // 16] + along % 16 == byte
    np.testing.assert_array_equal(traced_addresses(descriptor_words("x", made), "k" if k_major else "mn", lines, units), found)


def test_the_swizzle_is_its_own_inverse_and_moves_units_inside_their_128_bytes():
    addresses = np.arange(0, 1 << 18, 16)
    for width in (1, 2, 4, 8):
        for base in range(8):
            moved = swizzle_address(addresses, width, base)
            np.testing.assert_array_equal(swizzle_address(moved, width, base), addresses)
            np.testing.assert_array_equal(moved // (16 * width), addresses // (16 * width))
            assert (moved == addresses).all() == (width == 1)


@pytest.mark.parametrize("mode", [32, 64, 128])
def test_a_base_offset_moves_the_pattern(mode):
    """9.7.15.5.1.2.2: (pattern start >> 7) & 7; with it a matrix looks the same from its own start on."""
    plain = SharedLayout(F16, 64, 16, "k", mode)
    for start in range(0, 2048, 128):
        moved = SharedLayout(F16, 64, 16, "k", mode, start=start, base_offset=start >> 7 & 7)
        np.testing.assert_array_equal(moved.addresses() - start, plain.addresses())
        aligned = start % (8 * mode) == 0
        zero = SharedLayout(F16, 64, 16, "k", mode, start=start).addresses() - start
        assert (zero == plain.addresses()).all() == aligned


layouts = st.builds(
    lambda fmt, rows, columns, major, mode, start, base, gap: (fmt, rows, columns, major, mode, 16 * start, base if mode else 0, gap),
    st.sampled_from(FORMATS), st.integers(1, 6), st.integers(1, 6), st.sampled_from(["k", "mn"]), st.sampled_from(SWIZZLES),
    st.integers(0, 64), st.integers(0, 7), st.integers(0, 3),
)  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(layouts, st.integers(0, 2**32 - 1))
def test_there_and_back_again(drawn, seed):
    check_there_and_back(drawn, seed)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(layouts, st.integers(0, 2**32 - 1))
def test_there_and_back_again_often(drawn, seed):
    check_there_and_back(drawn, seed)


def check_there_and_back(drawn, seed):
    fmt, lines, units, major, mode, start, base, gap = drawn
    rng = np.random.default_rng(seed)
    along = units * 128 // fmt.bits
    rows, columns = (8 * lines - 3, along) if major == "k" else (along, 8 * lines - 3)
    layout = SharedLayout(fmt, rows, columns, major, mode, start=start, base_offset=base)
    if gap:  # strides with gaps
        leading, stride = layout.fields.leading + 16 * gap * 64, layout.fields.stride + 16 * gap * 64 * 8
        layout = SharedLayout(fmt, rows, columns, major, mode, start, leading, stride, base)
    codes = rng.integers(0, 1 << fmt.bits, (2, rows, columns), dtype=np.uint64).astype(np.uint32)
    before = rng.integers(0, 2**32, layout.words + 5, dtype=np.uint32)
    if len(np.unique(layout.units)) < layout.units.size:  # gaps that make atoms meet
        with pytest.raises(ValueError, match="two elements"):
            tcemu.layouts.to_shared(codes, layout, before)
        return
    after = tcemu.layouts.to_shared(codes, layout, before)
    np.testing.assert_array_equal(tcemu.layouts.from_shared(after, layout), codes)
    place = layout.addresses()
    elsewhere = np.setdiff1d(np.arange(before.size), np.unique(place // 4))
    np.testing.assert_array_equal(np.asarray(after)[:, elsewhere], np.broadcast_to(before[elsewhere], (2, elsewhere.size)))
    if fmt.bits >= 8:  # the bytes, one by one
        as_bytes = np.asarray(after).view(np.uint8)
        found = sum(as_bytes[:, place + i].astype(np.uint32) << 8 * i for i in range(fmt.bits // 8))
        np.testing.assert_array_equal(found, codes)


def test_fresh_memory_is_zero_and_as_long_as_it_must_be():
    layout = SharedLayout(F16, 8, 16, "k", 0, stride=512, leading=1024)
    memory = np.asarray(tcemu.layouts.to_shared(np.full((8, 16), 0xFFFF, np.uint16), layout))
    assert memory.shape == (layout.words,) == ((1024 + 7 * 16 + 16) // 4,)
    assert (memory != 0).sum() == 64 and memory[-1] == 0xFFFFFFFF


@pytest.mark.parametrize("major", ["k", "mn"])
@pytest.mark.parametrize("mode", sample_cases(SWIZZLES, (0, 128)))
@pytest.mark.parametrize("fmt", sample_cases([E4M3, F16, TF32], (F16,), str))
def test_a_part_has_a_descriptor_of_its_own(fmt, mode, major):
    rng, per_unit = np.random.default_rng(mode), 128 // fmt.bits
    width = max(1, mode // 16)
    rows, columns = (64, 4 * max(2, width) * per_unit) if major == "k" else (3 * width * per_unit, 64)
    layout = SharedLayout(fmt, rows, columns, major, mode, start=1024)
    codes = rng.integers(0, 1 << fmt.bits, (rows, columns), dtype=np.uint64).astype(np.uint32)
    memory = tcemu.layouts.to_shared(codes, layout)
    row_step, column_step = (8, 2 * per_unit if mode else per_unit) if major == "k" else (width * per_unit, 8)
    parts = 0
    for row in range(0, rows - row_step + 1, row_step):
        for column in range(0, columns - column_step + 1, column_step):
            lines, units = (row_step, column_step // per_unit) if major == "k" else (column_step, row_step // per_unit)
            at = unit_addresses(decode_descriptor(descriptor_words("x", layout.descriptor(row, column))), major, lines, units)
            part = read_matrix(memory, at, fmt, major)
            np.testing.assert_array_equal(part, codes[row : row + row_step, column : column + column_step])
            parts += 1
    assert parts == (rows // row_step) * (columns // column_step) >= 8
    with pytest.raises(ValueError, match="may begin at a multiple"):
        layout.descriptor(row_step // 2, 0)
    with pytest.raises(ValueError, match="column: got"):
        layout.descriptor(0, columns)


def test_stepping_k_inside_an_atom_adds_to_the_start():
    layout = SharedLayout(E4M3, 128, 128)
    assert [layout.descriptor(0, k) - layout.descriptor() for k in (0, 32, 64, 96)] == [0, 2, 4, 6]
    assert layout.descriptor(64) - layout.descriptor() == 64 * 128 >> 4


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**14 - 1), st.integers(0, 2**14 - 1), st.integers(0, 2**14 - 1), st.sampled_from(SWIZZLES), st.integers(0, 7))
def test_descriptors_hold_their_fields(start, leading, stride, mode, base):
    base = base if mode else 0
    made = tcemu.layouts.descriptor(16 * start, 16 * leading, 16 * stride, mode, base)
    encode = lambda x: (x & 0x3FFFF) >> 4
    number = {0: 0, 128: 1, 64: 2, 32: 3}[mode]
    assert made == encode(16 * start) | encode(16 * leading) << 16 | encode(16 * stride) << 32 | base << 49 | number << 62
    words = descriptor_words("x", made)
    assert decode_descriptor(words) == (16 * start, 16 * leading, 16 * stride, base, number) and SWIZZLE_BYTES[number] == mode
    assert not has_stray_bits(words)


def test_every_bit_outside_the_fields_is_a_stray():
    found = [bit for bit in range(64) if has_stray_bits(descriptor_words("x", 1 << bit))]
    assert found == [14, 15, 30, 31, 46, 47, 48, *range(52, 62)]


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((8, 16, 16, 0), ValueError, "multiple of 16 from 0 to 262128"),
        ((1 << 18, 16, 16, 0), ValueError, "start: got 262144"),
        ((-16, 16, 16, 0), ValueError, "start: got -16"),
        ((0, 1, 16, 0), ValueError, "leading: got 1"),
        ((0, 16, 1 << 18, 0), ValueError, "stride: got 262144"),
        ((0, 16, 16, 16), ValueError, "swizzle: got 16"),
        ((0, 16, 16, 128, 8), ValueError, "base_offset: got 8"),
        ((0, 16, 16, 0, 1), ValueError, "base_offset: got 1 without a swizzle"),
        ((0.0, 16, 16, 0), TypeError, "start: got float"),
        ((0, 16, 16, True), TypeError, "swizzle: got bool"),
    ],
)
def test_bad_descriptors_are_explained(arguments, error, said):
    with pytest.raises(error, match=re.escape(said)):
        tcemu.layouts.descriptor(*arguments)


def error_message(error, *said):
    return pytest.raises(error, match="(?s)" + ".*".join(said))


def test_bad_layouts_and_matrices_are_explained():
    with error_message(ValueError, "two elements", "too small"):
        tcemu.layouts.to_shared(
            np.zeros((16, 16), np.uint32), SharedLayout(TF32, 16, 16, "k", 32, leading=16, stride=256)
        )  # figure 167 as printed
    with error_message(ValueError, "columns must be a multiple of 8, 16 bytes"):
        SharedLayout(F16, 16, 12)
    with error_message(ValueError, "rows must be a multiple of 16"):
        SharedLayout(S8, 8, 16, "mn")
    with error_message(ValueError, "major: got 'row'", "'k' or 'mn'"):
        SharedLayout(F16, 16, 16, "row")
    with error_message(ValueError, "f64", "at most 32 bits"):
        SharedLayout(F64, 16, 16)
    with error_message(ValueError, "shared addresses end at 262144"):
        SharedLayout(F16, 256, 1024)
    with error_message(ValueError, "start: got 8"):
        SharedLayout(F16, 16, 16, start=8)
    layout = SharedLayout(F16, 16, 64)
    with error_message(ValueError, r"matrix: got shape \[64, 16\]", r"\[..., 16, 64\]"):
        tcemu.layouts.to_shared(np.zeros((64, 16), np.uint16), layout)
    with error_message(TypeError, "matrix: got float32", "raw codes of f16"):
        tcemu.layouts.to_shared(jnp.zeros((16, 64)), layout)
    with error_message(ValueError, "memory: got 511 words", "reaches to word 512"):
        tcemu.layouts.from_shared(np.zeros(511, np.uint32), layout)
    with error_message(TypeError, "memory: got int32"):
        tcemu.layouts.from_shared(np.zeros(512, np.int32), layout)
    with error_message(ValueError, "memory: got a single uint32"):
        tcemu.layouts.to_shared(np.zeros((16, 64), np.uint16), layout, np.uint32(0))
