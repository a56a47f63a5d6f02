"""Kernels with what no compiler writes: .ws, .sp, masks, shifts, copies of every shape and pairs of blocks in every layout.

Each kernel copies an image to shared memory, fills 128 columns of tensor memory, executes its own statements, and gives back the columns.
What it should leave is computed with formulas of PTX ISA 9.7.16 that are written here, and with `dot` of the same instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import tcemu
from support.tcgen05_operands import PADDED, codes, descriptor, k_major, store_bits
from tcemu import ptx
from tcemu.engine.isa.tcgen05 import Tcgen05Product
from tcemu.engine.isa.tcgen05_descriptors import InstructionDescriptor, encode_instruction_descriptor
from tcemu.engine.layouts.tcgen05_memory import encode_tcgen05_descriptor

COLUMNS, IMAGE, B_START = 128, 32768, 16384
A_COLUMN, METADATA, SCALES = 64, 80, (88, 104)  # columns of A, of the metadata, and of the scales of A and B


class OwnKernel(NamedTuple):
    """A kernel, its memories before, and its tensor memory afterwards."""

    statements: str  # what the issuing thread executes; %r7 is the address of the columns, %rd4 and %rd5 are descriptors, %r9 is idesc
    idesc: int
    descriptors: tuple[int, int]
    image: np.ndarray  # uint8[blocks, IMAGE]
    cells: np.ndarray  # uint32[blocks, 128, COLUMNS]
    expected: np.ndarray
    target: str = "sm_100a"

    @property
    def blocks(self) -> int:
        """Blocks that compute together."""
        return len(self.image)


def vector(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def entry_text(name: str, kernel: OwnKernel) -> str:
    """Return the entry of a kernel."""
    pair, group = kernel.blocks == 2, f"cta_group::{kernel.blocks}"
    meet = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;" if pair else "bar.sync 0;"
    loads = " ".join(f"ld.global.v4.b32 {vector(100 + 4 * i, 4)}, [%rd2+{16 * i}];" for i in range(COLUMNS // 4))
    stores = " ".join(f"st.global.v4.b32 [%rd3+{16 * i}], {vector(100 + 4 * i, 4)};" for i in range(COLUMNS // 4))
    commit = (
        f"tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r2], %h0;"
        if pair
        else f"tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster.b64 [%r2];"
    )
    return f""".visible .entry {name}(.param .u64 image, .param .u64 cells, .param .u64 out, .param .u64 a_desc, .param .u64 b_desc)
{".explicitcluster .reqnctapercluster 2" if pair else ""} {{
    .reg .b32 %r<240>; .reg .b64 %rd<16>; .reg .pred %p<8>; .reg .b16 %h<2>;
    .shared .align 1024 .b8 tile[{IMAGE}]; .shared .align 8 .b64 done; .shared .b32 place;
    ld.param.u64 %rd1, [image]; ld.param.u64 %rd2, [cells]; ld.param.u64 %rd3, [out];
    ld.param.u64 %rd4, [a_desc]; ld.param.u64 %rd5, [b_desc];
    mov.u32 %r0, %tid.x; mov.u32 %r10, %cluster_ctarank; mov.u16 %h0, 3;
    setp.lt.u32 %p0, %r0, 32; setp.eq.u32 %p2, %r0, 0; mov.u32 %r1, place; mov.u32 %r2, done; mov.u32 %r3, tile;
    and.b32 %r11, %r3, 0x3ffff; shr.u32 %r4, %r11, 4; cvt.u64.u32 %rd6, %r4; add.u64 %rd4, %rd4, %rd6; add.u64 %rd5, %rd5, %rd6;
    mul.wide.u32 %rd7, %r10, {IMAGE}; add.u64 %rd1, %rd1, %rd7; mul.wide.u32 %rd7, %r10, {512 * COLUMNS};
    add.u64 %rd2, %rd2, %rd7; add.u64 %rd3, %rd3, %rd7;
    @%p2 mbarrier.init.shared.b64 [%r2], 1;
    @%p0 tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%r1], {COLUMNS};
    mul.wide.u32 %rd7, %r0, 16; add.u64 %rd1, %rd1, %rd7; shl.b32 %r5, %r0, 4; add.u32 %r3, %r3, %r5; mov.u32 %r6, 0;
COPY:
    ld.global.v4.b32 {vector(100, 4)}, [%rd1]; st.shared.v4.b32 [%r3], {vector(100, 4)};
    add.u64 %rd1, %rd1, 2048; add.u32 %r3, %r3, 2048; add.u32 %r6, %r6, 1; setp.lt.u32 %p1, %r6, {IMAGE // 2048};
    @%p1 bra COPY;
    bar.sync 0;
    ld.shared.b32 %r7, [place]; shr.u32 %r8, %r0, 5; shl.b32 %r8, %r8, 21; add.u32 %r8, %r8, %r7;
    mul.wide.u32 %rd7, %r0, {4 * COLUMNS}; add.u64 %rd2, %rd2, %rd7; add.u64 %rd3, %rd3, %rd7;
    {loads}
    tcgen05.st.sync.aligned.32x32b.x{COLUMNS}.b32 [%r8], {vector(100, COLUMNS)};
    tcgen05.wait::st.sync.aligned; fence.proxy.async.shared::cta; tcgen05.fence::before_thread_sync;
    {meet}
    tcgen05.fence::after_thread_sync; mov.u32 %r9, {kernel.idesc};
    setp.eq.and.u32 %p4, %r10, 0, %p2;
    @!%p4 bra ISSUED;
    {kernel.statements}
    {commit}
ISSUED:
    mbarrier.try_wait.parity.shared.b64 %p3, [%r2], 0;
    @!%p3 bra ISSUED;
    tcgen05.fence::after_thread_sync;
    tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32 {vector(100, COLUMNS)}, [%r8];
    tcgen05.wait::ld.sync.aligned;
    {stores}
    tcgen05.fence::before_thread_sync;
    {meet}
    tcgen05.fence::after_thread_sync;
    @%p0 tcgen05.dealloc.{group}.sync.aligned.b32 %r7, {COLUMNS};
    ret;
}}
"""


def module_text(kernels: dict[str, OwnKernel]) -> str:
    """Return the PTX of kernels of one target."""
    (target,) = {kernel.target for kernel in kernels.values()}
    head = f".version 9.0\n.target {target}\n.address_size 64\n"
    return head + "".join(entry_text(name, kernel) for name, kernel in kernels.items())


def run_own_kernel(name: str, kernel: OwnKernel) -> tuple[np.ndarray, tuple[str, ...]]:
    """Run a kernel in checked mode; return its tensor memory and the notes."""
    args = [kernel.image, kernel.cells, np.zeros_like(kernel.cells), *kernel.descriptors]
    text = module_text({name: kernel})
    found = ptx.run(text, grid=kernel.blocks, block=128, cluster=kernel.blocks, args=args, target=kernel.target, checked=True)
    return np.asarray(found[2]), found.notes


# ---- the places of operands, by the manual's formulas


def d_place(op: Tcgen05Product, r: int, c: int) -> tuple[int, int, int]:
    """Return the block, the lane and the column of an element of D: 9.7.16.10.5."""
    n = op.n
    if op.ws:
        parts = 128 // op.m
        return 0, r + op.m * (c // (n // parts)), c % (n // parts)
    if op.m == 256 or (op.m == 128 and op.cta_group == 1):
        return r // 128, r % 128, c
    s = r % 64
    if op.m == 128 and not op.sparse:
        return r // 64, s + 64 * (c >= n // 2), c % (n // 2)
    return r // 64, s % 16 + 32 * (s // 16), c


def a_lanes(op: Tcgen05Product, r: int) -> list[tuple[int, int]]:
    """Return the block and the lanes of a row of A in tensor memory."""
    block, lane, _ = d_place(op, r, 0)
    if op.ws or (op.m == 128 and op.cta_group == 2 and not op.sparse):
        height = op.m // op.cta_group
        return [(block, lane + height * i) for i in range(128 // height)]
    return [(block, lane)]


def metadata_places(op: Tcgen05Product, r: int, k: int) -> list[tuple[int, int, int, int]]:
    """Return the block, the lane, the column and the bit of the field of the logical elements from k on: 9.7.16.10.8."""
    bits = 8 if op.kind in PADDED else op.a.bits
    rows = op.m // op.cta_group
    block, m = divmod(r, rows)
    halves = rows == 64 and not op.ws  # rows lie in halves of the quarters
    if bits >= 16:
        span = 256 // bits
        lane = m % 8 + 8 * (k // span) + (32 if halves else 16) * (m // 16)
        column, bit = 0, 16 * (m // 8 % 2) + (k % 16 if bits == 16 else 2 * (k % 8))
    else:
        lane = m % 16 + 32 * (m // 16) if halves else m
        column, bit = (k // 32, k % 32) if bits == 8 else (k // 64, k // 2 % 32)
    return [(block, lane + rows * i, column, bit) for i in range(128 // rows if op.ws else 1)]


def scale_bytes(rows: int, count: int, first: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield row and number of a scale, and lane within a quarter, column and byte: 9.7.16.10.7."""
    for x, s in np.ndindex(rows, count):
        byte = first + s
        yield x, s, x % 32, x // 32 + 4 * (byte // 4), byte % 4


def put_scales(cells: np.ndarray, column: int, values: np.ndarray, first: int, quarters: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    """Write scales, codes [rows, scales], to the quarters of a block's tensor memory."""
    for x, s, lane, at, byte in scale_bytes(values.shape[0], values.shape[1], first):
        for quarter in quarters:
            word = int(cells[lane + 32 * quarter, column + at])
            word = word & ~(0xFF << 8 * byte) | int(values[x, s]) << 8 * byte
            cells[lane + 32 * quarter, column + at] = word


FIELDS = {8: (0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110), 2: (0b0100, 0b1110)}


# ---- products


class Choices(NamedTuple):
    """How a kernel gives its operands."""

    a_in: str = "shared"
    selector: int = 0
    ids: tuple[int, int] = (0, 0)  # of the scales of A and B
    mask: tuple[int, ...] = ()
    zeros: tuple[int, int, int, int] | None = None  # zero-column mask: start, first span, skip and use less 1, of every part
    shift: int = 0  # of the columns, by the zero-column mask
    scale: int = 0  # scale-input-d
    ashift: bool = False
    lane: int = 0
    negate: bool = False
    wrapped: bool = False  # rows of K = 96 that go on at another address


def product_kernel(spelling: str, **given: Any) -> OwnKernel:
    """Return a kernel with a product of random operands."""
    op, chosen = tcemu.parse(spelling), Choices(**given)
    assert isinstance(op, Tcgen05Product)
    rng = np.random.default_rng(list(spelling.encode()))
    blocks, rows, columns = op.cta_group, op.m // op.cta_group, op.n // op.cta_group
    stored = op.matrix_shape("a")[1]
    a, b, c = codes(op, "a", (op.m, stored)), codes(op, "b", (op.n + chosen.shift, op.k)), codes(op, "d", (op.m, op.n))
    if chosen.scale:  # not near the subnormal numbers
        c = np.asarray(tcemu.formats.from_float(op.d, rng.uniform(1, 2, (op.m, op.n)).astype(np.float32)))
    image = np.zeros((blocks, IMAGE), np.uint8)
    cells = rng.integers(0, 1 << 32, (blocks, 128, COLUMNS), dtype=np.uint32)
    padded = [op.kind in PADDED and fmt.bits < 8 for fmt in (op.a, op.b)]
    for block in range(blocks):
        k_major(a[rows * block : rows * (block + 1)], op.a.bits, padded[0], 0, image[block])
        k_major(b[columns * block : columns * (block + 1) + chosen.shift], op.b.bits, padded[1], B_START, image[block])
    descriptors = [
        descriptor(stored, op.a.bits, padded[0], 0), descriptor(op.k, op.b.bits, padded[1], B_START),
    ]  # fmt: skip
    if chosen.wrapped:
        image[:], descriptors = 0, []
        for matrix, start in ((a, 0), (b, B_START)):
            descriptors.append(place_wrapped(matrix, start, image[0]))
    for r, column in np.ndindex(op.m, op.n):
        block, lane, at = d_place(op, r, column)
        cells[block, lane + chosen.lane, at] = int(c[r, column]) | (0xABCD0000 if op.d.bits == 16 else 0)
    if chosen.a_in == "tensor":
        put_a(op, a, chosen.lane, cells)
    fields = put_metadata(op, chosen, rng, cells) if op.sparse else None
    scales: dict[str, Any] = put_all_scales(op, chosen, rng, cells) if op.scaling is not None else {}
    cells = cells.astype(np.uint32)
    described = InstructionDescriptor(
        op, negate_a=chosen.negate, selector=chosen.selector, scale_a_id=chosen.ids[0], scale_b_id=chosen.ids[1],
        max_shift=0 if not chosen.shift else 16 if chosen.shift <= 16 else 32,
    )  # fmt: skip
    factors = b[chosen.shift :] if chosen.shift else b
    if chosen.zeros is not None:
        factors = np.where(zero_runs(*chosen.zeros, 128 // op.m, op.n)[:, None], 0, factors).astype(b.dtype)
    first = a ^ np.array(1 << op.a.bits - 1, a.dtype) if chosen.negate else a
    start = scaled_codes(op, c, chosen.scale)
    multiply = lambda left, right: np.asarray(
        tcemu.dot(op, left, factors.T.copy(), right, target=target_of(op), e=fields, **scales)
    ).astype(np.uint32)
    sums = multiply(first, start)
    expected = cells.copy()
    if chosen.ashift:
        put_a(op, moved_down(op, first), chosen.lane, expected)
        sums = multiply(moved_down(op, first), sums.astype(c.dtype))
    for r, column in np.ndindex(op.m, op.n):
        block, lane, at = d_place(op, r, column)
        word = 128 * block + lane + chosen.lane
        if not chosen.mask or not chosen.mask[word // 32] >> word % 32 & 1:
            expected[block, lane + chosen.lane, at] = sums[r, column]
    statements = product_statements(op, chosen)
    idesc = encode_instruction_descriptor(described)
    return OwnKernel(statements, idesc, (descriptors[0], descriptors[1]), image, cells, expected, target_of(op))


def target_of(op: Tcgen05Product) -> str:
    return "sm_103a" if op.k == 96 else "sm_100a"


def moved_down(op: Tcgen05Product, a: np.ndarray) -> np.ndarray:
    """Return A after a shift: each row is the next one, but for the last of 32 lanes (9.7.16.9.3)."""
    rows = np.arange(op.m)
    return a[np.where(rows % 32 == 31, rows, rows + 1)]


def scaled_codes(op: Tcgen05Product, c: np.ndarray, by: int) -> np.ndarray:
    """Return C times 2^-by, which is a normal number."""
    dtype = {16: np.float16, 32: np.float32}.get(op.d.bits)
    return (c.view(dtype) * dtype(2.0**-by)).view(c.dtype) if by and dtype else c


def put_a(op: Tcgen05Product, a: np.ndarray, lane: int, cells: np.ndarray) -> None:
    """Write A to tensor memory, packed."""
    for r in range(op.m):
        memory = np.zeros(4 * COLUMNS, np.uint8)
        for i, code in enumerate(a[r]):
            store_bits(memory, 0, i * op.a.bits, op.a.bits, int(code))
        words = memory.view(np.uint32)[: -(-len(a[r]) * op.a.bits // 32)]
        for block, at in a_lanes(op, r):
            cells[block, at + lane, A_COLUMN : A_COLUMN + len(words)] = words


def put_metadata(op: Tcgen05Product, chosen: Choices, rng: np.random.Generator, cells: np.ndarray) -> np.ndarray:
    """Write random metadata; return its fields."""
    fields = rng.choice(FIELDS.get(op.chunk_size, FIELDS[8]), (op.m, op.k // op.chunk_size)).astype(np.uint8)
    for r, chunk in np.ndindex(fields.shape):
        for block, lane, column, bit in metadata_places(op, r, chunk * op.chunk_size):
            at = block, lane + chosen.lane, METADATA + chosen.selector + column
            cells[at] = int(cells[at]) & ~(0xF << bit) & 0xFFFFFFFF | int(fields[r, chunk]) << bit
    return fields


def put_all_scales(op: Tcgen05Product, chosen: Choices, rng: np.random.Generator, cells: np.ndarray) -> dict[str, Any]:
    """Write random scales; return them as `dot` takes them."""
    scaling = op.require_scaling()
    bias = scaling.format.bias << scaling.format.mantissa_bits
    a, b = ((bias + rng.integers(-3, 4, (rows, scaling.count))).astype(np.uint8) for rows in (op.m, op.n))
    rows = op.m // op.cta_group
    for column in SCALES:
        cells[:, :, column : column + 8] = 0
    for block in range(op.cta_group):
        put_scales(cells[block], SCALES[0], a[rows * block : rows * (block + 1)], chosen.ids[0])
        if op.m == 128 and op.cta_group == 2:  # each half of the lanes has the scales of its columns of D
            for half in range(2):
                part = b[op.n // 2 * half : op.n // 2 * (half + 1)]
                put_scales(cells[block], SCALES[1], part, chosen.ids[1], (2 * half, 2 * half + 1))
        else:
            put_scales(cells[block], SCALES[1], b, chosen.ids[1])
    return {"scale_a": a, "scale_b": b.T.copy()}


def zero_runs(start: int, first: int, skip: int, use: int, parts: int, n: int) -> np.ndarray:
    """Return which columns of B count as zeros, bool[n]: alternate runs, without the first `start` bits of each part (9.7.16.4.3)."""
    bits: list[int] = []
    bit = first
    while len(bits) < start + n // parts:
        bits += [bit] * (skip + 1 if bit else use + 1)
        bit ^= 1
    return np.tile(np.array(bits[start : start + n // parts], bool), parts)


def place_wrapped(matrix: np.ndarray, start: int, image: np.ndarray) -> int:
    """Write rows of 48 bytes that begin at byte 96 of rows of 128 bytes and go on in another buffer, swizzled; return the descriptor."""
    other = start + 8192
    for x, i in np.ndindex(matrix.shape):
        byte, bit = divmod(4 * i, 8)
        base, within = (start, 96 + byte) if byte < 32 else (other, byte - 32)
        address = base + 128 * (x % 8) + 1024 * (x // 8) + within
        address ^= (address >> 7 & 7) << 4
        store_bits(image, address, bit, 4, int(matrix[x, i]))
    return encode_tcgen05_descriptor(start + 96, other, 1024, "128", absolute=True)


def product_statements(op: Tcgen05Product, chosen: Choices) -> str:
    """Return the statements of the issuing thread."""
    lines, lane = [], chosen.lane << 16
    lines.append(f"add.u32 %r20, %r7, {lane}; add.u32 %r21, %r7, {lane + A_COLUMN}; add.u32 %r22, %r7, {lane + METADATA};")
    operands = ["[%r20]", "[%r21]" if chosen.a_in == "tensor" else "%rd4", "%rd5"]
    if op.sparse:
        operands.append("[%r22]")
    operands.append("%r9")
    if op.scaling is not None:
        operands += [f"[%r7+{column}]" for column in SCALES]
    if chosen.mask:
        lines += [f"mov.u32 %r{24 + i}, {word};" for i, word in enumerate(chosen.mask)]
        operands.append(vector(24, len(chosen.mask)))
    operands.append("1")
    if chosen.zeros is not None:
        start, first, skip, use = chosen.zeros
        word = 1 << 39 | skip << 40 | use << 48 | chosen.shift << 56
        word |= sum(start << 8 * i | first << 32 + i for i in range(128 // op.m))
        lines.append(f"mov.b64 %rd8, {word};")
        operands.append("%rd8")
    if chosen.scale:
        operands.append(str(chosen.scale))
    if chosen.wrapped:  # the tile's address counts in the address of the other buffer too
        lines.append("shl.b64 %rd9, %rd6, 16; add.u64 %rd4, %rd4, %rd9; add.u64 %rd5, %rd5, %rd9;")
    name = str(op.instruction) + (".ashift" if chosen.ashift else "")
    lines.append(f"{name} {', '.join(operands)};")
    if chosen.ashift:
        lines.append(f"{op.instruction} {', '.join(operands)};")
    return "\n    ".join(lines)


# ---- copies and shifts

COPIES: dict[str, Callable[[int], tuple[int, list[int]]]] = {  # lanes of each row: 9.7.16.9.2
    "128x256b": lambda i: (i, [i]), "128x128b": lambda i: (i, [i]), "4x256b": lambda i: (i, [31 + 32 * i]),
    "64x128b.warpx2::02_13": lambda i: (i, [i, 64 + i]),
    "64x128b.warpx2::01_23": lambda i: (i, [i % 32 + 64 * (i // 32), 32 + i % 32 + 64 * (i // 32)]),
    "32x128b.warpx4": lambda i: (i, [i, 32 + i, 64 + i, 96 + i]),
}  # fmt: skip


def copy_kernel(shape: str, blocks: int = 1, narrow: bool = False) -> OwnKernel:
    """Return a kernel that copies rows of 8 x 16 bytes from shared memory to column 16."""
    rng = np.random.default_rng(list(shape.encode()))
    image = rng.integers(0, 256, (blocks, IMAGE), dtype=np.uint8)
    cells = rng.integers(0, 1 << 32, (blocks, 128, COLUMNS), dtype=np.uint32)
    expected, rows = cells.copy(), int(shape.partition("x")[0])
    units = 2 if shape.endswith("256b") else 1
    for block, i, unit in np.ndindex(blocks, rows, units):
        at = 16 * (i % 8) + 256 * (i // 8) + 128 * unit
        row = image[block, at : at + 16]
        if narrow:
            row = np.array([row[j // 2] >> 4 * (j % 2) & 15 for j in range(16)], np.uint8) << 2
        for lane in COPIES[shape](i)[1]:
            expected[block, lane, 16 + 4 * unit : 20 + 4 * unit] = np.ascontiguousarray(row).view(np.uint32)
    lane = 31 << 16 if shape == "4x256b" else 0
    name = f"tcgen05.cp.cta_group::{blocks}.{shape}{'.b8x16.b4x16_p64' if narrow else ''}"
    descriptors = (encode_tcgen05_descriptor(0, 128, 256, 0), 1 << 46)
    return OwnKernel(f"add.u32 %r20, %r7, {lane + 16}; {name} [%r20], %rd4;", 0, descriptors, image, cells, expected)


def shift_kernel(blocks: int, refresh: bool) -> OwnKernel:
    """Return a kernel that shifts 8 columns, and with `refresh` copies new rows to the last lanes of the quarters."""
    rng = np.random.default_rng(7 + blocks)
    image = rng.integers(0, 256, (blocks, IMAGE), dtype=np.uint8)
    cells = rng.integers(0, 1 << 32, (blocks, 128, COLUMNS), dtype=np.uint32)
    expected, lanes = cells.copy(), np.arange(128)
    expected[:, :, 32:40] = cells[:, np.where(lanes % 32 == 31, lanes, lanes + 1), 32:40]
    group, statements = f"cta_group::{blocks}", ""
    if refresh:
        statements = f"add.u32 %r20, %r7, {31 << 16 | 32}; tcgen05.cp.{group}.4x256b [%r20], %rd4;"
        for block, i, unit in np.ndindex(blocks, 4, 2):
            row = image[block, 16 * i + 128 * unit :][:16]
            expected[block, 31 + 32 * i, 32 + 4 * unit : 36 + 4 * unit] = np.ascontiguousarray(row).view(np.uint32)
    descriptors = (encode_tcgen05_descriptor(0, 128, 256, 0), 1 << 46)
    return OwnKernel(f"tcgen05.shift.{group}.down [%r7+32]; {statements}", 0, descriptors, image, cells, expected)


# ---- the list

WS = {"f16": "f32.f16.f16", "tf32": "f32.tf32.tf32", "f8f6f4": "f32.e4m3.e5m2", "i8": "s32.s8.u8"}
K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "i8": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}
MX = {"mxf8f6f4": (".block_scale", "f32.e4m3.e4m3.ue8m0"), "mxf4": (".block_scale", "f32.e2m1.e2m1.ue8m0"),
      "mxf4nvf4": (".block_scale.block16", "f32.e2m1.e2m1.ue4m3")}  # fmt: skip


def spelled(kind: str, m: int, n: int, types: str, *, group: int = 1, ws: bool = False, sp: bool = False, k: int = 0) -> str:
    scale = MX[kind][0] if kind in MX else ""
    k = k or K[kind] * (2 if sp else 1)
    return f"tcgen05.mma{'.ws' * ws}{'.sp' * sp}.cta_group::{group}.kind::{kind}{scale}.m{m}n{n}k{k}.{types}"


def own_kernels() -> dict[str, Callable[[], OwnKernel]]:
    """Return the kernels by name; a function makes each."""
    made: dict[str, Callable[[], OwnKernel]] = {}

    def add(name: str, spelling: str, **chosen: Any) -> None:
        made[name] = partial(product_kernel, spelling, **chosen)

    for (kind, types), m in product(WS.items(), (32, 64, 128)):
        add(f"ws_{kind}_m{m}", spelled(kind, m, 64, types, ws=True))
    for m in (32, 64, 128):
        add(f"ws_a_in_tensor_m{m}", spelled("f16", m, 64, WS["f16"], ws=True), a_in="tensor")
        add(f"ws_zeros_m{m}", spelled("f16", m, 64, WS["f16"], ws=True), zeros=(1, 1, 2, 3))
        add(f"ws_sp_f16_m{m}", spelled("f16", m, 64, WS["f16"], ws=True, sp=True))
    add("ws_zeros_shifted_m32", spelled("f16", 32, 64, WS["f16"], ws=True), zeros=(3, 0, 4, 2), shift=16)
    add("ws_zeros_shifted_m128", spelled("f16", 128, 64, WS["f16"], ws=True), zeros=(0, 1, 0, 6), shift=24)
    for kind in ("tf32", "f8f6f4", "i8"):
        add(f"ws_sp_{kind}_m64", spelled(kind, 64, 64, WS[kind], ws=True, sp=True))
    for kind, types in {**WS, **{name: row[1] for name, row in MX.items()}}.items():
        add(f"sp_{kind}_m128", spelled(kind, 128, 16, types, sp=True))
    add("sp_f16_m64", spelled("f16", 64, 16, WS["f16"], sp=True))
    add("sp_f8f6f4_m64", spelled("f8f6f4", 64, 16, WS["f8f6f4"], sp=True))
    add("sp_f16_selector", spelled("f16", 128, 16, WS["f16"], sp=True), selector=1)
    add("sp_a_in_tensor", spelled("f16", 128, 16, WS["f16"], sp=True), a_in="tensor")
    add("m64_lane_16", spelled("f16", 64, 16, WS["f16"]), lane=16)
    add("m64_lane_16_a_in_tensor", spelled("f16", 64, 16, WS["f16"]), lane=16, a_in="tensor")
    add("negated_a", spelled("f16", 128, 16, WS["f16"]), negate=True)
    add("mask", spelled("f16", 128, 16, WS["f16"]), mask=(0, 0xFFFF0000, 0x80000001, 0xFFFFFFFF))
    add("mask_pair", spelled("f16", 256, 32, WS["f16"], group=2), mask=(1, 0, 0, 0xFF, 0xF0F0, 2, 0, 0x80000000))
    add("pair_m256_a", spelled("f16", 256, 32, WS["f16"], group=2))
    add("pair_m128_b", spelled("f16", 128, 32, WS["f16"], group=2))
    add("pair_m128_c", spelled("f16", 128, 32, WS["f16"], group=2, sp=True))
    add("pair_m256_sp", spelled("f16", 256, 32, WS["f16"], group=2, sp=True))
    add("pair_m256_a_in_tensor", spelled("f16", 256, 32, WS["f16"], group=2), a_in="tensor")
    add("pair_m128_a_in_tensor", spelled("f16", 128, 32, WS["f16"], group=2), a_in="tensor")
    add("pair_i8_m128", spelled("i8", 128, 32, WS["i8"], group=2))
    for kind, m in product(MX, (128, 256)):
        add(f"pair_{kind}_m{m}", spelled(kind, m, 64 if m == 128 else 32, MX[kind][1], group=2))
    add("mx_byte_ids", spelled("mxf8f6f4", 128, 16, MX["mxf8f6f4"][1]), ids=(3, 1))
    add("scaled_d_f32", spelled("f16", 128, 16, WS["f16"]), scale=3)
    add("scaled_d_f16", spelled("f16", 128, 16, "f16.f16.f16"), scale=12)
    add("scaled_d_tf32", spelled("tf32", 128, 16, WS["tf32"]), scale=15)
    add("ashift", spelled("f16", 128, 16, WS["f16"]), a_in="tensor", ashift=True)
    add("ashift_pair", spelled("f16", 256, 32, WS["f16"], group=2), a_in="tensor", ashift=True)
    for kind in ("mxf4", "mxf4nvf4"):
        add(f"k96_{kind}", spelled(kind, 128, 16, MX[kind][1], k=96))
        add(f"k96_{kind}_pair", spelled(kind, 256, 32, MX[kind][1], k=96, group=2))
    add("k96_byte_ids", spelled("mxf4nvf4", 128, 16, MX["mxf4nvf4"][1], k=96), ids=(2, 0))
    add("k96_wrapped", spelled("mxf4", 128, 16, MX["mxf4"][1], k=96), wrapped=True)
    for shape in COPIES:
        label = shape.replace(".", "_").replace("::", "_")
        made[f"cp_{label}"] = partial(copy_kernel, shape)
        made[f"cp_{label}_pair"] = partial(copy_kernel, shape, 2)
        made[f"cp_{label}_narrow"] = partial(copy_kernel, shape, 1, True)
    for blocks, refresh in product((1, 2), (False, True)):
        made[f"shift{'_refreshed' * refresh}{'_pair' * (blocks == 2)}"] = partial(shift_kernel, blocks, refresh)
    return made
