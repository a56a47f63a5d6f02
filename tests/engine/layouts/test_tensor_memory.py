"""Tensor memory and tcgen05's operands in shared memory: every layout against its formula, written out apart, over all cells.

The formulas are those of PTX ISA 9.7.16, of CUTLASS's headers and of TVM's tests. The rows of the package are not used to write them.
"""

from itertools import product

import numpy as np
import pytest

from tcemu.engine.layouts import tcgen05_memory, tensor_memory
from tcemu.engine.layouts.tcgen05_memory import (
    decode_tcgen05_descriptor,
    descriptor_problem,
    encode_tcgen05_descriptor,
    tcgen05_unit_addresses,
)

MOVES = {  # thread t, register r -> lane, column; 16x32bx2's offset i
    "32x32b": lambda t, r, i: (t, r),
    "16x64b": lambda t, r, i: (t // 4 + 8 * (t % 2), t // 2 % 2 + 2 * r),
    "16x128b": lambda t, r, i: (t // 4 + 8 * (r % 2), t % 4 + 4 * (r // 2)),
    "16x256b": lambda t, r, i: (t // 4 + 8 * (r // 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r // 4)),
    "16x32bx2": lambda t, r, i: (t % 16, r + i * (t // 16)),
}


@pytest.mark.parametrize("tile", MOVES)
def test_registers_of_ld_and_st(tile):
    for num, offset in product((1, 2, 16, 128 // tensor_memory.MOVE_REGISTERS[tile]), (0, 16) if tile == "16x32bx2" else (0,)):
        cells = tensor_memory.move_cells(tile, num, offset)
        packed = tensor_memory.move_cells(tile, num, offset, packed=True)
        for t, r in np.ndindex(cells.lane.shape):
            lane, column = MOVES[tile](t, r, 0)
            behind = offset * (t // 16)
            assert (cells.lane[t, r], cells.column[t, r]) == (lane, column + behind)
            assert packed.lane[t, r].tolist() == [lane] * 2 and packed.column[t, r].tolist() == [
                2 * column + behind,
                2 * column + 1 + behind,
            ]
        if tile != "16x32bx2" or offset:  # one register a cell, so that writing is the inverse of reading
            assert len(set(zip(cells.lane.ravel(), cells.column.ravel(), strict=True))) == cells.lane.size or offset < num


ACCUMULATORS = {  # M, cta_group, ws, sparse: CTA, lane and column of element (r, c)
    (256, 2, False, False): lambda r, c, n: (r // 128, r % 128, c),
    (256, 2, False, True): lambda r, c, n: (r // 128, r % 128, c),
    (128, 2, False, False): lambda r, c, n: (r // 64, r % 64 + 64 * (c >= n // 2), c % (n // 2)),
    (128, 2, False, True): lambda r, c, n: (r // 64, r % 64 % 16 + 32 * (r % 64 // 16), c),
    (128, 1, False, False): lambda r, c, n: (0, r, c),
    (128, 1, True, False): lambda r, c, n: (0, r, c),
    (64, 1, True, False): lambda r, c, n: (0, r + 64 * (c >= n // 2), c % (n // 2)),
    (64, 1, False, True): lambda r, c, n: (0, r % 16 + 32 * (r // 16), c),
    (32, 1, True, True): lambda r, c, n: (0, r + 32 * (c // (n // 4)), c % (n // 4)),
}


@pytest.mark.parametrize("form", ACCUMULATORS, ids=str)
def test_accumulators(form):
    m, cta_group, ws, sparse = form
    layout = tensor_memory.accumulator_layout(m, cta_group, ws=ws, sparse=sparse)
    for n in (64, 128, 256):
        cells = tensor_memory.accumulator_cells(layout, n)
        assert cells.lane.shape == (m, n) and cells.lane.max() < 128
        for r, c in np.ndindex(m, n):
            assert (cells.cta[r, c], cells.lane[r, c], cells.column[r, c]) == ACCUMULATORS[form](r, c, n)
        flat = (cells.cta * 128 + cells.lane) * 512 + cells.column
        assert np.unique(flat).size == m * n  # each element a cell of its own
    # A's rows lie where D's rows do, once for each part of the columns
    lanes = tensor_memory.multiplicand_lanes(layout)
    own = [int(cells.lane[r, 0]) for r in range(m) if cells.cta[r, 0] == 0]
    assert lanes[0].tolist() == own
    assert sorted({int(cells.lane[0, c]) for c in range(n)}) == lanes[:, 0].tolist()


def test_accumulators_that_are_not_there():
    with pytest.raises(ValueError, match="M = 32 with cta_group::1"):
        tensor_memory.accumulator_layout(32)


def test_scales():
    for rows, (count, ids) in product((8, 64, 128, 256), ((1, (0, 1, 2, 3)), (2, (0, 2)), (4, (0,)))):
        for byte_id in ids:
            cells = tensor_memory.scale_cells(rows, count, byte_id)
            for x, s in np.ndindex(rows, count):
                assert (cells.lane[x, s], cells.column[x, s], cells.byte[x, s]) == (x % 32, x // 32, byte_id + s)
    # K = 96: six scales, the last of them in the next chunk
    cells = tensor_memory.scale_cells(128, 6, 0)
    assert [(int(c), int(b)) for c, b in zip(cells.column[40], cells.byte[40], strict=True)] == [
        (1, 0),
        (1, 1),
        (1, 2),
        (1, 3),
        (5, 0),
        (5, 1),
    ]
    assert tensor_memory.scale_cells(256, 3, 3).column[0].tolist() == [0, 8, 8]


METADATA = {  # bits of an element: K, chunk, and lane, column and bit of the chunk that begins at k in row m
    16: (32, 4, lambda m, k, f: (m % 8 + 8 * (k // 16) + (32 if f else 16) * (m // 16), 0, 16 * (m // 8 % 2) + k % 16)),
    32: (16, 2, lambda m, k, f: (m % 8 + 8 * (k // 8) + (32 if f else 16) * (m // 16), 0, 16 * (m // 8 % 2) + 2 * (k % 8))),
    8: (64, 4, lambda m, k, f: (m % 16 + 32 * (m // 16) if f else m, k // 32, k % 32)),
    4: (128, 8, lambda m, k, f: (m % 16 + 32 * (m // 16) if f else m, k // 64, k // 2 % 32)),
}


@pytest.mark.parametrize("bits", METADATA)
def test_metadata(bits):
    k, chunk, formula = METADATA[bits]
    for m, cta_group, ws in ((128, 1, False), (64, 1, False), (128, 2, False), (32, 1, True)):
        layout = tensor_memory.accumulator_layout(m, cta_group, ws=ws, sparse=True)
        cells = tensor_memory.metadata_cells(layout, k, bits)
        assert cells.lane.shape == (layout.cta_rows, k // chunk)
        for r, i in np.ndindex(cells.lane.shape):
            assert (cells.lane[r, i], cells.column[r, i], cells.bit[r, i]) == formula(r, i * chunk, layout.name in "FC")
        fields = (cells.lane * 512 + cells.column) * 32 + cells.bit
        assert np.unique(fields).size == fields.size


def test_copies():
    lanes = tensor_memory.copy_lanes
    for i in range(128):
        assert lanes("128x256b", None)[i].tolist() == lanes("128x128b", None)[i].tolist() == [i]
    for i in range(64):
        assert lanes("64x128b", "warpx2::02_13")[i].tolist() == [i, 64 + i]
        assert lanes("64x128b", "warpx2::01_23")[i].tolist() == ([i, 32 + i] if i < 32 else [64 + i - 32, 96 + i - 32])
    for i in range(32):
        assert lanes("32x128b", "warpx4")[i].tolist() == [i, 32 + i, 64 + i, 96 + i]
    assert lanes("4x256b", None).tolist() == [[0], [32], [64], [96]]


def test_shift():
    assert tensor_memory.shift_sources().tolist() == [lane if lane % 32 == 31 else lane + 1 for lane in range(128)]


WIDTHS = {"0": 16, "32": 32, "64": 64, "128": 128, "128x32": 128}


def byte_address(major, swizzle, start, leading, stride, x, k_byte, k, element):
    """The byte of element (x, k) as section 4.2's table has it; K-major by the byte along K, MN-major by k."""
    width, along = WIDTHS[swizzle], x * element
    if major == "k" and swizzle == "0":
        a = start + 16 * (x % 8) + stride * (x // 8) + leading * (k_byte // 16) + k_byte % 16
    elif major == "k":
        a = start + width * (x % 8) + stride * (x // 8) + k_byte
    elif swizzle == "0":
        a = start + along % 16 + stride * (along // 16) + 16 * (k % 8) + leading * (k // 8)
    elif swizzle == "128x32":
        a = start + along % 128 + leading * (along // 128) + 128 * (k % 4) + stride * (k // 4)
    else:
        a = start + along % width + leading * (along // width) + width * (k % 8) + stride * (k // 8)
    if swizzle == "128x32":
        return a ^ (a >> 7 & 3) << 5
    return a ^ (a >> 7 & width // 16 - 1) << 4


@pytest.mark.parametrize(("major", "swizzle"), list(product(("k", "mn"), WIDTHS)))
def test_shared_memory(major, swizzle):
    """128 rows of elements of 1, 2 and 4 bytes with 32 bytes of K."""
    for element, start in product((1, 2, 4), (0, 1024, 4096 + 32)):
        if major == "mn" and swizzle in ("0", "32", "64", "128") and element == 4:
            continue  # tf32 takes atoms of 32 bytes alone
        start = start if major == "k" or start % 1024 == 0 else 2048
        rows, k = 128, 32 // element
        leading, stride = (2048, 1024) if major == "k" else (4096, 1024)
        words = encode_tcgen05_descriptor(start, leading, stride, swizzle)
        fields = decode_tcgen05_descriptor(np.array([words & 0xFFFFFFFF, words >> 32], np.uint32))
        assert (fields.start, fields.leading, fields.stride, fields.version) == (start, leading, stride, 1)
        lines, units = (rows, 2) if major == "k" else (k, rows * element // 16)
        addresses = tcgen05_unit_addresses(fields, major, lines, units)
        for x, kk in np.ndindex(rows, k):
            line, byte = (x, kk * element) if major == "k" else (kk, x * element)
            got = addresses[line, byte // 16] + byte % 16
            assert got == byte_address(major, swizzle, start, leading, stride, x, kk * element, kk, element), (x, kk)


def test_descriptors():
    """Constants of CUTLASS and Triton, and what is wrong with others."""
    value = encode_tcgen05_descriptor(1024, 16, 1024, 128)
    assert value == 1024 >> 4 | 1 << 16 | 64 << 32 | 1 << 46 | 2 << 61
    words = lambda value: np.array([value & 0xFFFFFFFF, value >> 32], np.uint32)
    assert descriptor_problem(words(value)) is None
    assert "bits 46 to 48 are 0" in descriptor_problem(words(value ^ 1 << 46))
    assert "swizzle field is 3" in descriptor_problem(words(value | 1 << 61))
    assert "belong to no field" in descriptor_problem(words(value | 1 << 14))
    assert {row.mode for row in tcgen05_memory.SWIZZLES.values()} == {0, 1, 2, 4, 6}
    with pytest.raises(ValueError, match="multiple of 16"):
        encode_tcgen05_descriptor(8, 0, 0)
    with pytest.raises(ValueError, match="expected one of 0, 32"):
        encode_tcgen05_descriptor(0, 0, 0, 96)
