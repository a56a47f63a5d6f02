"""The formulas that tests hold the layouts against, written out by hand, one by one, as their sources print them.

`MANUAL` is PTX ISA 9.7.14.5.1 to .13 literally; where the manual slips, `SLIPS` has the literal text and `MANUAL` the corrected formula.
The rest restates figures and hardware findings in other words than the layouts. A formula takes the lane and the element's number.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


def group(lane):
    return lane >> 2  # groupID = %laneid >> 2


def thread(lane):
    return lane % 4  # threadID_in_group = %laneid % 4


def table(formula, elements, shape, lanes=32):
    """int[lanes, elements]: the row-major position in `shape` that the formula gives."""
    positions = np.array([[formula(lane, i) for i in range(elements)] for lane in range(lanes)])
    return np.ravel_multi_index(tuple(np.moveaxis(positions, -1, 0)), shape)


@dataclass(frozen=True)
class Row:
    """One printed formula: `types` share it. `formula(lane, i)` is (row, col), for Volta (product, row, col)."""

    section: str
    operand: str
    shape: tuple[int, int, int]
    bits: tuple[int, ...]  # of the types that share the formula: .f16 and .f32 accumulators, .tf32 and .f64
    elements: int
    formula: Any
    volta: str | None = None

    @property
    def visible(self):
        m, n, k = self.shape
        matrix = {"a": (m, k), "b": (k, n), "c": (m, n)}[self.operand]
        return (4, *matrix) if self.section.endswith("5.1") else matrix


def _volta(lane):
    return lane // 4 % 4  # computation 1: lanes 0-3 and 16-19; 2: 4-7 and 20-23; 3: 8-11 and 24-27; 4: 12-15 and 28-31


def _c16(lane, i):  # the accumulator of every m16n8 shape
    return (group(lane) if i < 2 else group(lane) + 8), (thread(lane) * 2) + (i & 0x1)


def _c8(lane, i):  # the accumulator of m8n8k16, k32, k128
    return group(lane), (thread(lane) * 2) + i


S = "9.7.14.5."
MANUAL = [
    # .1: m8n8k4 .f16
    Row(S + "1", "a", (8, 8, 4), (16,), 4, lambda n, i: (_volta(n), n % 4 if n < 16 else (n % 4) + 4, i), "row"),
    Row(S + "1", "a", (8, 8, 4), (16,), 4, lambda n, i: (_volta(n), i % 4 if n < 16 else (i % 4) + 4, n % 4), "col"),
    Row(S + "1", "b", (8, 8, 4), (16,), 4, lambda n, i: (_volta(n), n % 4, i if n < 16 else i + 4), "row"),
    Row(S + "1", "b", (8, 8, 4), (16,), 4, lambda n, i: (_volta(n), i, n % 4 if n < 16 else (n % 4) + 4), "col"),
    Row(S + "1", "c", (8, 8, 4), (16,), 8, lambda n, i: (_volta(n), n % 4 if n < 16 else (n % 4) + 4, i)),
    Row(
        S + "1",
        "c",
        (8, 8, 4),
        (32,),
        8,
        lambda n, i: (_volta(n), (n & 0b1) + (i & 0b10) + (0 if n < 16 else 4), (i & 0b100) + (n & 0b10) + (i & 0b1)),
    ),
    # .2: m8n8k4 .f64
    Row(S + "2", "a", (8, 8, 4), (64,), 1, lambda n, i: (n >> 2, n % 4)),
    Row(S + "2", "b", (8, 8, 4), (64,), 1, lambda n, i: (n % 4, n >> 2)),
    Row(S + "2", "c", (8, 8, 4), (64,), 2, lambda n, i: (group(n), (thread(n) * 2) + (i & 0x1))),
    # .3: m8n8k16 .u8 .s8
    Row(S + "3", "a", (8, 8, 16), (8,), 4, lambda n, i: (group(n), (thread(n) * 4) + i)),
    Row(S + "3", "b", (8, 8, 16), (8,), 4, lambda n, i: ((thread(n) * 4) + i, group(n))),
    Row(S + "3", "c", (8, 8, 16), (32,), 2, _c8),
    # .4: m8n8k32 .u4 .s4
    Row(S + "4", "a", (8, 8, 32), (4,), 8, lambda n, i: (group(n), (thread(n) * 8) + i)),
    Row(S + "4", "b", (8, 8, 32), (4,), 8, lambda n, i: ((thread(n) * 8) + i, group(n))),
    Row(S + "4", "c", (8, 8, 32), (32,), 2, _c8),
    # .5: m8n8k128 .b1
    Row(S + "5", "a", (8, 8, 128), (1,), 32, lambda n, i: (group(n), (thread(n) * 32) + i)),
    Row(S + "5", "b", (8, 8, 128), (1,), 32, lambda n, i: ((thread(n) * 32) + i, group(n))),
    Row(S + "5", "c", (8, 8, 128), (32,), 2, _c8),
    # .6: m16n8k4 .tf32, .f64
    Row(S + "6", "a", (16, 8, 4), (32, 64), 2, lambda n, i: (group(n) if i == 0 else group(n) + 8, thread(n))),
    Row(S + "6", "b", (16, 8, 4), (32, 64), 1, lambda n, i: (thread(n), group(n))),
    Row(S + "6", "c", (16, 8, 4), (32, 64), 4, _c16),
    # .7: m16n8k8 .f16 .bf16; .tf32, .f64
    Row(S + "7", "a", (16, 8, 8), (16,), 4, lambda n, i: (group(n) if i in (0, 1) else group(n) + 8, thread(n) * 2 + (i & 0x1))),
    Row(
        S + "7",
        "a",
        (16, 8, 8),
        (32, 64),
        4,
        lambda n, i: (group(n) if i in (0, 2) else group(n) + 8, thread(n) if i in (0, 1) else thread(n) + 4),
    ),
    Row(S + "7", "b", (16, 8, 8), (16,), 2, lambda n, i: ((thread(n) * 2) + i, group(n))),
    Row(S + "7", "b", (16, 8, 8), (32, 64), 2, lambda n, i: (thread(n) if i == 0 else thread(n) + 4, group(n))),
    Row(S + "7", "c", (16, 8, 8), (16, 32, 64), 4, _c16),
    # .8: m16n8k16 .f16 .bf16; .f64
    Row(
        S + "8",
        "a",
        (16, 8, 16),
        (16,),
        8,
        lambda n, i: (
            group(n) if 0 <= i < 2 or 4 <= i < 6 else group(n) + 8,
            (thread(n) * 2) + (i & 0x1) if i < 4 else (thread(n) * 2) + (i & 0x1) + 8,
        ),
    ),
    Row(
        S + "8",
        "a",
        (16, 8, 16),
        (64,),
        8,
        lambda n, i: (group(n) if i % 2 == 0 else group(n) + 8, (i * 2) + thread(n) if i % 2 == 0 else (i * 2) - 2 + thread(n)),
    ),
    Row(
        S + "8",
        "b",
        (16, 8, 16),
        (16,),
        4,
        lambda n, i: ((thread(n) * 2) + (i & 0x1) if i < 2 else (thread(n) * 2) + (i & 0x1) + 8, group(n)),
    ),
    Row(S + "8", "b", (16, 8, 16), (64,), 4, lambda n, i: (thread(n) + (i * 4), group(n))),
    Row(S + "8", "c", (16, 8, 16), (16, 32, 64), 4, _c16),
    # .9: m16n8k16 .u8 .s8 .e4m3 .e5m2
    Row(S + "9", "a", (16, 8, 16), (8,), 8, lambda n, i: (group(n) if i < 4 else group(n) + 8, (thread(n) * 4) + (i & 0x3))),
    Row(S + "9", "b", (16, 8, 16), (8,), 4, lambda n, i: ((thread(n) * 4) + i, group(n))),
    Row(S + "9", "c", (16, 8, 16), (16, 32), 4, _c16),
    # .10: m16n8k32 .u4 .s4; .u8 .s8 and the types of f8f6f4
    Row(S + "10", "a", (16, 8, 32), (4,), 16, lambda n, i: (group(n) if i < 8 else group(n) + 8, (thread(n) * 8) + (i & 0x7))),
    Row(
        S + "10",
        "a",
        (16, 8, 32),
        (8,),
        16,
        lambda n, i: (
            group(n) if 0 <= i < 4 or 8 <= i < 12 else group(n) + 8,
            (thread(n) * 4) + (i & 0x3) if i < 8 else (thread(n) * 4) + (i & 0x3) + 16,
        ),
    ),
    Row(S + "10", "b", (16, 8, 32), (4,), 8, lambda n, i: ((thread(n) * 8) + (i & 0x7), group(n))),
    Row(
        S + "10",
        "b",
        (16, 8, 32),
        (8,),
        8,
        lambda n, i: ((thread(n) * 4) + (i & 0x3) if i < 4 else (thread(n) * 4) + (i & 0x3) + 16, group(n)),
    ),
    Row(S + "10", "c", (16, 8, 32), (16, 32), 4, _c16),
    # .11: m16n8k64 .u4 .s4 .e2m1
    Row(
        S + "11",
        "a",
        (16, 8, 64),
        (4,),
        32,
        lambda n, i: (
            group(n) if 0 <= i < 8 or 16 <= i < 24 else group(n) + 8,
            (thread(n) * 8) + (i & 0x7) if i < 16 else (thread(n) * 8) + (i & 0x7) + 32,
        ),
    ),
    Row(
        S + "11",
        "b",
        (16, 8, 64),
        (4,),
        16,
        lambda n, i: ((thread(n) * 8) + (i & 0x7) if i < 8 else (thread(n) * 8) + (i & 0x7) + 32, group(n)),
    ),
    Row(S + "11", "c", (16, 8, 64), (32,), 4, _c16),
    # .12: m16n8k128 .b1
    Row(S + "12", "a", (16, 8, 128), (1,), 64, lambda n, i: (group(n) if i < 32 else group(n) + 8, (thread(n) * 32) + (i & 0x1F))),
    Row(S + "12", "b", (16, 8, 128), (1,), 32, lambda n, i: ((thread(n) * 32) + i, group(n))),
    Row(S + "12", "c", (16, 8, 128), (32,), 4, _c16),
    # .13: m16n8k256 .b1; A corrected, see SLIPS
    Row(
        S + "13",
        "a",
        (16, 8, 256),
        (1,),
        128,
        lambda n, i: (
            group(n) if 0 <= i < 32 or 64 <= i < 96 else group(n) + 8,
            (thread(n) * 32) + (i & 0x1F) if i < 64 else (thread(n) * 32) + (i & 0x1F) + 128,
        ),
    ),
    Row(
        S + "13",
        "b",
        (16, 8, 256),
        (1,),
        64,
        lambda n, i: ((thread(n) * 32) + (i & 0x1F) if i < 32 else (thread(n) * 32) + (i & 0x1F) + 128, group(n)),
    ),
    Row(S + "13", "c", (16, 8, 256), (32,), 4, _c16),
]


def literal_m16n8k256_a(n, i):
    """9.7.14.5.13, A, as printed: `+ i` where i < 64, without the mask."""
    row = group(n) if 0 <= i < 32 or 64 <= i < 96 else group(n) + 8
    return row, (thread(n) * 32) + i if i < 64 else (thread(n) * 32) + (i & 0x1F) + 128


@dataclass(frozen=True)
class Slip:
    """A list of elements that the manual prints wrongly for one lane: `printed`, where the fragment has elements 0 to `right` - 1."""

    where: str
    says: str
    printed: tuple[int, ...]
    right: int


SLIPS = [
    Slip("9.7.14.5.9 C .f16", "c0, c1, c1, c2", (0, 1, 1, 2), 4),
    Slip("9.7.14.6.2.2 B .f16", "four registers of two, b0, b1, b2, b3", (0, 1, 2, 3), 8),
    Slip("9.7.14.6.2.3 B .tf32", "four registers, each containing four", tuple(range(16)), 4),
    Slip("9.7.15.6.2.3 metadata", "a .b32 of 16 4-bit vectors", tuple(range(16)), 8),
    Slip("9.7.14.4.1 wmma C .f64", "a single .f64 register", (0,), 2),
    Slip("9.7.14.5.15 ldmatrix .m16n16.x1", "1 register as per .num, of four elements", (0, 1, 2, 3), 8),
]


# 9.7.14.6.2.1-8: K, bits, elements, row of A's element i, first column of the chunk it was kept from, columns of that chunk
def _half(*low):
    return lambda n, i: group(n) if any(first <= i < last for first, last in low) else group(n) + 8


SPARSE_A = [
    (16, 16, 4, _half((0, 2)), lambda n, i: thread(n) * 4, 4),
    (32, 16, 8, _half((0, 2), (4, 6)), lambda n, i: thread(n) * 4 if i < 4 else (thread(n) * 4) + 16, 4),
    (16, 32, 4, _half((0, 1), (2, 3)), lambda n, i: thread(n) * 2 if i in (0, 1) else (thread(n) * 2) + 8, 2),
    (8, 32, 2, _half((0, 1)), lambda n, i: thread(n) * 2, 2),
    (32, 8, 8, _half((0, 4)), lambda n, i: thread(n) * 8, 8),
    (64, 8, 16, _half((0, 4), (8, 12)), lambda n, i: thread(n) * 8 if i < 8 else (thread(n) * 8) + 32, 8),
    (64, 4, 16, _half((0, 8)), lambda n, i: thread(n) * 16, 16),
    (128, 4, 32, _half((0, 8), (16, 24)), lambda n, i: thread(n) * 16 if i < 16 else (thread(n) * 16) + 64, 16),
]

# B of the sparse shapes, from the figures 121 124 132-135 142-145: K, bits -> k, n of element e of register r
SPARSE_B = [
    (32, 16, 8, lambda n, i: (2 * thread(n) + i % 2 + 8 * (i // 2), group(n))),
    (16, 32, 4, lambda n, i: (thread(n) + 4 * i, group(n))),
    (64, 8, 16, lambda n, i: (4 * thread(n) + i % 4 + 16 * (i // 4), group(n))),
    (128, 4, 32, lambda n, i: (8 * thread(n) + i % 8 + 32 * (i // 8), group(n))),
]

# Metadata as sm_90 reads it: K, bits, selector values, chunks; (row, chunk, selector) -> lane, field
METADATA = [
    (16, 16, 4, 4, lambda r, c, s: (4 * (r % 8) + s, c + 4 * (r >= 8))),
    (8, 32, 4, 4, lambda r, c, s: (4 * (r % 8) + s, c + 4 * (r >= 8))),
    (32, 16, 2, 8, lambda r, c, s: (4 * (r % 8) + 2 * s + (c >> 2), (c & 3) + 4 * (r >= 8))),
    (16, 32, 2, 8, lambda r, c, s: (4 * (r % 8) + 2 * s + (c >> 2), (c & 3) + 4 * (r >= 8))),
    (32, 8, 2, 8, lambda r, c, s: (4 * (r % 8) + 2 * s + (r >= 8), c)),
    (64, 4, 2, 8, lambda r, c, s: (4 * (r % 8) + 2 * s + (r >= 8), c)),
    (64, 8, 1, 16, lambda r, c, s: (4 * (r % 8) + 2 * (c >> 3) + (r >= 8), c & 7)),
    (128, 4, 1, 16, lambda r, c, s: (4 * (r % 8) + 2 * (c >> 3) + (r >= 8), c & 7)),
]

# The same read off the figures: columns of a chunk; lane and field -> selector, row, first column
METADATA_FIGURES = [
    (16, 16, 4, lambda n, f: (thread(n), group(n) + 8 * (f >> 2), 4 * (f & 3))),
    (8, 32, 2, lambda n, f: (thread(n), group(n) + 8 * (f >> 2), 2 * (f & 3))),
    (32, 16, 4, lambda n, f: (thread(n) >> 1, group(n) + 8 * (f >> 2), 16 * (n & 1) + 4 * (f & 3))),
    (16, 32, 2, lambda n, f: (thread(n) >> 1, group(n) + 8 * (f >> 2), 8 * (n & 1) + 2 * (f & 3))),
    (32, 8, 4, lambda n, f: (thread(n) >> 1, group(n) + 8 * (n & 1), 4 * f)),
    (64, 4, 8, lambda n, f: (thread(n) >> 1, group(n) + 8 * (n & 1), 8 * f)),
    (64, 8, 4, lambda n, f: (0, group(n) + 8 * (n & 1), 32 * (thread(n) >> 1) + 4 * f)),
    (128, 4, 8, lambda n, f: (0, group(n) + 8 * (n & 1), 64 * (thread(n) >> 1) + 8 * f)),
]

# Movers: shape, .trans, elements of one matrix; lane, register r of the matrix and place e in it -> memory row, place in the row
MOVERS = [
    ((8, 8), False, 2, (8, 8), lambda n, i: (group(n), 2 * thread(n) + i)),
    ((8, 8), True, 2, (8, 8), lambda n, i: (2 * thread(n) + i, group(n))),
    ((8, 16), False, 4, (8, 16), lambda n, i: (group(n), 4 * thread(n) + i)),
    ((16, 16), True, 8, (16, 16), lambda n, i: (4 * thread(n) + i % 4, group(n) + 8 * (i // 4))),
    ((16, 8), True, 4, (8, 16), lambda n, i: (2 * thread(n) + (i & 1), group(n) + 8 * (i >> 1))),
]

# wmma on sm_75 and later, as compiled; r is the register, e the place in it. operand, shape, bits, registers, integer, least sm, formula
M16, M32, M8 = (16, 16, 16), (32, 8, 16), (8, 32, 16)


def _r(per, formula):
    return lambda n, i: formula(group(n), thread(n), i // per, i % per)


WMMA_75 = [
    ("a", M16, 16, 8, False, 75, _r(2, lambda g, t, r, e: (g + 8 * (r & 1), 2 * t + e + 8 * ((r & 3) >> 1)))),
    ("b", M16, 16, 8, False, 75, _r(2, lambda g, t, r, e: (2 * t + e + 8 * (r & 1), g + 8 * ((r & 3) >> 1)))),
    ("a", M32, 16, 8, False, 75, _r(2, lambda g, t, r, e: (g + 8 * (r & 1) + 16 * (r >> 2), 2 * t + e + 8 * ((r >> 1) & 1)))),
    ("b", M32, 16, 8, False, 75, _r(2, lambda g, t, r, e: (2 * t + e + 8 * (r & 1), g))),
    ("a", M8, 16, 8, False, 75, _r(2, lambda g, t, r, e: (g, 2 * t + e + 8 * (r & 1)))),
    ("b", M8, 16, 8, False, 75, _r(2, lambda g, t, r, e: (2 * t + e + 8 * ((r >> 1) & 1), g + 8 * (r & 1) + 16 * (r >> 2)))),
    ("c", M16, 32, 8, False, 75, _r(1, lambda g, t, r, e: (g + 8 * ((r >> 1) & 1), 2 * t + (r & 1) + 8 * (r >> 2)))),
    ("c", M16, 16, 4, False, 75, _r(2, lambda g, t, r, e: (g + 8 * (r & 1), 2 * t + e + 8 * (r >> 1)))),
    ("c", M32, 32, 8, False, 75, _r(1, lambda g, t, r, e: (g + 8 * ((r >> 1) & 1) + 16 * (r >> 2), 2 * t + (r & 1)))),
    ("c", M32, 16, 4, False, 75, _r(2, lambda g, t, r, e: (g + 8 * (r & 1) + 16 * (r >> 1), 2 * t + e))),
    ("c", M8, 32, 8, False, 75, _r(1, lambda g, t, r, e: (2 * t + (r & 1), g + 8 * ((r >> 1) & 1) + 16 * (r >> 2)))),
    ("c", M8, 16, 4, False, 75, _r(2, lambda g, t, r, e: (2 * t + e, g + 8 * (r & 1) + 16 * (r >> 1)))),
    # .bf16: the same without the copies
    ("a", M16, 16, 4, False, 80, _r(2, lambda g, t, r, e: (g + 8 * (r & 1), 2 * t + e + 8 * (r >> 1)))),
    ("b", M16, 16, 4, False, 80, _r(2, lambda g, t, r, e: (2 * t + e + 8 * (r & 1), g + 8 * (r >> 1)))),
    ("b", M32, 16, 2, False, 80, _r(2, lambda g, t, r, e: (2 * t + e + 8 * r, g))),
    ("a", M8, 16, 2, False, 80, _r(2, lambda g, t, r, e: (g, 2 * t + e + 8 * r))),
    # .tf32, .f64
    ("a", (16, 16, 8), 32, 4, False, 80, _r(1, lambda g, t, r, e: (g + 8 * (r & 1), t + 4 * (r >> 1)))),
    ("b", (16, 16, 8), 32, 4, False, 80, _r(1, lambda g, t, r, e: (t + 4 * (r & 1), g + 8 * (r >> 1)))),
    ("c", (16, 16, 8), 32, 8, False, 80, _r(1, lambda g, t, r, e: (g + 8 * ((r >> 1) & 1), 2 * t + (r & 1) + 8 * (r >> 2)))),
    ("a", (8, 8, 4), 64, 2, False, 80, _r(1, lambda g, t, r, e: (g, t))),
    ("b", (8, 8, 4), 64, 2, False, 80, _r(1, lambda g, t, r, e: (t, g))),
    ("c", (8, 8, 4), 64, 4, False, 80, _r(1, lambda g, t, r, e: (g, 2 * t + r))),
    # .u8 .s8
    ("a", M16, 8, 2, True, 72, _r(4, lambda g, t, r, e: (g + 8 * r, 4 * t + e))),
    ("b", M16, 8, 2, True, 72, _r(4, lambda g, t, r, e: (4 * t + e, g + 8 * r))),
    ("c", M16, 32, 8, True, 72, _r(1, lambda g, t, r, e: (g + 8 * ((r >> 1) & 1), 2 * t + (r & 1) + 8 * (r >> 2)))),
    ("a", M32, 8, 4, True, 72, _r(4, lambda g, t, r, e: (g + 8 * r, 4 * t + e))),
    ("b", M32, 8, 1, True, 72, _r(4, lambda g, t, r, e: (4 * t + e, g))),
    ("c", M32, 32, 8, True, 72, _r(1, lambda g, t, r, e: (g + 8 * (r >> 1), 2 * t + (r & 1)))),
    ("a", M8, 8, 1, True, 72, _r(4, lambda g, t, r, e: (g, 4 * t + e))),
    ("b", M8, 8, 4, True, 72, _r(4, lambda g, t, r, e: (4 * t + e, g + 8 * r))),
    ("c", M8, 32, 8, True, 80, _r(1, lambda g, t, r, e: (2 * t + (r & 1), g + 8 * (r >> 1)))),
    ("c", M8, 32, 8, True, 72, _r(1, lambda g, t, r, e: (g, 2 * t + (r & 1) + 8 * (r >> 1)))),
    # .u4 .s4, .b1
    ("a", (8, 8, 32), 4, 1, True, 75, _r(8, lambda g, t, r, e: (g, 8 * t + e))),
    ("b", (8, 8, 32), 4, 1, True, 75, _r(8, lambda g, t, r, e: (8 * t + e, g))),
    ("c", (8, 8, 32), 32, 2, True, 75, _r(1, lambda g, t, r, e: (g, 2 * t + r))),
    ("a", (8, 8, 128), 1, 1, True, 75, _r(32, lambda g, t, r, e: (g, 32 * t + e))),
    ("b", (8, 8, 128), 1, 1, True, 75, _r(32, lambda g, t, r, e: (32 * t + e, g))),
    ("c", (8, 8, 128), 32, 2, True, 75, _r(1, lambda g, t, r, e: (g, 2 * t + r))),
]


# wmma .f16 on sm_70 and sm_72: two elements in a register of 16 bits; x, y: what bits 2 and 3 of the lane add to the row and to the column
def _x(shape, n):
    b2, b3 = n >> 2 & 1, n >> 3 & 1
    return {M16: 8 * b2, M32: 8 * b2 + 16 * b3, M8: 0}[shape]


def _y(shape, n):
    b2, b3 = n >> 2 & 1, n >> 3 & 1
    return {M16: 8 * b3, M32: 0, M8: 8 * b2 + 16 * b3}[shape]


def _wmma_70(shape):
    def h(n):
        return 4 * (n >> 4)

    return [
        ("a", shape, 16, "row", lambda n, i: (n % 4 + _x(shape, n) + h(n), 2 * (i >> 1) + i % 2)),
        ("a", shape, 16, "col", lambda n, i: (_x(shape, n) + h(n) + 2 * ((i >> 1) & 1) + i % 2, n % 4 + 4 * (i >> 2))),
        ("b", shape, 16, "row", lambda n, i: (n % 4 + 4 * (i >> 2), _y(shape, n) + h(n) + 2 * ((i >> 1) & 1) + i % 2)),
        ("b", shape, 16, "col", lambda n, i: (2 * (i >> 1) + i % 2, n % 4 + _y(shape, n) + h(n))),
        ("c", shape, 16, "row", lambda n, i: (n % 4 + _x(shape, n) + h(n), _y(shape, n) + 2 * (i >> 1) + i % 2)),
        (
            "c",
            shape,
            32,
            "row",
            lambda n, i: ((n & 1) + _x(shape, n) + h(n) + 2 * ((i >> 1) & 1), (n & 2) + _y(shape, n) + (i & 1) + 4 * (i >> 2)),
        ),
    ]


WMMA_70 = [row for shape in (M16, M32, M8) for row in _wmma_70(shape)]
