"""The example statements of PTX ISA 9.7.14 and 9.7.15, and those of them that are no instructions as printed."""

from pathlib import Path

EXAMPLES = [tuple(line.split(" ", 1)) for line in (Path(__file__).parents[1] / "manual_examples.txt").read_text().splitlines()[1:]]
# statement -> what the error says, the statement as it should be
SLIPS = {
    "wmma.load.a.sync.aligned.row.m16n16k16.f16 {x0,...,x7}, [p], s;": (
        "operand r has 3 registers, but takes 8",  # an ellipsis for people
        "wmma.load.a.sync.aligned.row.m16n16k16.f16 {x0,x1,x2,x3,x4,x5,x6,x7}, [p], s;",
    ),
    "wmma.mma.sync.m16n16k16.row.col.f32.f32 {d0, d1, d2, d3, d4, d5, d6, d7}, ...;": (
        "missing qualifier .aligned;",  # mandatory from PTX ISA 6.3 on; and an ellipsis
        "wmma.mma.sync.aligned.m16n16k16.row.col.f32.f32 {d0, d1, d2, d3, d4, d5, d6, d7}, {a0, a1, a2, a3, a4, a5, a6, a7}, "
        "{b0, b1, b2, b3, b4, b5, b6, b7}, {c0, c1, c2, c3, c4, c5, c6, c7};",
    ),
    "wmma.store.d.sync.m16n16k16.row.f32 [ptr], {d0, d1, d2, d3, d4, d5, d6, d7};": (
        "missing qualifier .aligned;",
        "wmma.store.d.sync.aligned.m16n16k16.row.f32 [ptr], {d0, d1, d2, d3, d4, d5, d6, d7};",
    ),
    "stmatrix.sync.aligned.m16n8.x4.b8 [addr], {r0, r1, r2, r3};": (
        "missing qualifier .trans;",  # mandatory with m16n8 by the manual's own words
        "stmatrix.sync.aligned.m16n8.x4.trans.b8 [addr], {r0, r1, r2, r3};",
    ),
}
