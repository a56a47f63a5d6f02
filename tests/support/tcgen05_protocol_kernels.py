"""Kernels that keep the protocol of tcgen05, in 120 variants, and edits that break it, each with the fault that it plants.

A kernel is a list of lines with tags. It multiplies A [128, 32 bytes] by the transpose of B [16, 32 bytes] into D in columns 0 to 15 of
tensor memory, `steps` times into one accumulator, in one or two rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import tcemu
from tcemu import ptx
from tcemu.engine.instructions.tcgen05_faults import Tcgen05Fault as Fault
from tcemu.engine.isa.tcgen05_descriptors import encode_instruction_descriptor
from tcemu.engine.layouts.tcgen05_memory import encode_tcgen05_descriptor

TARGET = "sm_100a"
M, N, A_COLUMN, SCALES = 128, 16, 16, 24
KINDS = {  # K and types, and the type of the arrays
    "f16": ("m128n{n}k16.f32.f16.f16", np.float16),
    "tf32": ("m128n{n}k8.f32.tf32.tf32", np.float32),
    "f8f6f4": ("m128n{n}k32.f32.e4m3.e4m3", ml_dtypes.float8_e4m3fn),
    "i8": ("m128n{n}k32.s32.s8.s8", np.int8),
    "mxf8f6f4": ("m128n{n}k32.f32.e4m3.e4m3.ue8m0", ml_dtypes.float8_e4m3fn),
}


class Variant(NamedTuple):
    """The choices of a kernel."""

    kind: str = "f16"
    a_in: str = "tensor"  # memory that holds A
    steps: int = 2  # products into one accumulator
    rounds: int = 1
    waits: str = "all"  # threads that wait for the mbarrier: "all", or "one" warp and then a barrier
    start: str = "zero"  # D begins as zero by enable-input-d, or is "stored"
    scales: str = "stored"  # scales of a scaled kind are stored by threads, or "copied" from shared memory

    @property
    def scaled(self) -> bool:
        return self.kind.startswith("mx")

    def op(self, n: int = N) -> Any:
        """Return the instruction."""
        block = ".block_scale" if self.scaled else ""
        return tcemu.parse(f"tcgen05.mma.cta_group::1.kind::{self.kind}{block}.{KINDS[self.kind][0].format(n=n)}")


class Line(NamedTuple):
    """A line of PTX."""

    text: str
    tag: str = ""


def variants() -> list[Variant]:
    """Return 120 variants."""
    choices = product(KINDS, ("tensor", "shared"), (1, 2), (1, 2), ("all", "one"), ("zero", "stored"), ("stored", "copied"))
    every = [Variant(*each) for each in choices if each[0].startswith("mx") or each[-1] == "stored"]
    return [each for i, each in enumerate(every) if i % 8 in (0, 2, 3, 5, 7)]


def vector(first: int, count: int) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def mma(variant: Variant, enable: str, *, a: str = "", idesc: str = "%r30", d: str = "%r7", collector: str = "") -> str:
    """Return a product by thread 0."""
    a = a or ("[%r20]" if variant.a_in == "tensor" else "%rd6")
    block, scales = (".block_scale", f", [%r7+{SCALES}], [%r7+{SCALES + 4}]") if variant.scaled else ("", "")
    return f"@%p2 tcgen05.mma.cta_group::1.kind::{variant.kind}{block}{collector} [{d}], {a}, %rd5, {idesc}{scales}, {enable};"


def kernel_lines(variant: Variant, columns: int = 64) -> list[Line]:
    """Return a kernel that keeps the protocol."""
    group, lines = "cta_group::1", []

    def add(tag: str, *texts: str) -> None:
        lines.extend(Line(text, tag) for text in texts)

    matrix = encode_tcgen05_descriptor(0, 128, 256, 0)
    add(
        "",
        "mov.u32 %r0, %tid.x; setp.lt.u32 %p0, %r0, 32; setp.lt.u32 %p1, %r0, 16; setp.eq.u32 %p2, %r0, 0; setp.eq.u32 %p4, %r0, 1;",
        "and.b32 %r6, %r0, 16; setp.eq.u32 %p5, %r6, 0;",
        "mov.u32 %r1, place; mov.u32 %r2, done; mov.u32 %r3, rows; mov.u32 %r4, scales; mov.u32 %r5, rows_of_a;",
        "ld.param.u64 %rd1, [a]; ld.param.u64 %rd2, [b]; ld.param.u64 %rd3, [d];",
        "mul.wide.u32 %rd4, %r0, 32; add.u64 %rd1, %rd1, %rd4; add.u64 %rd2, %rd2, %rd4;",
        "mul.wide.u32 %rd4, %r0, 64; add.u64 %rd3, %rd3, %rd4;",
        "and.b32 %r9, %r0, 7; shl.b32 %r9, %r9, 4; shr.u32 %r10, %r0, 3; shl.b32 %r10, %r10, 8; add.u32 %r9, %r9, %r10;",
        "add.u32 %r21, %r3, %r9; add.u32 %r22, %r5, %r9; shl.b32 %r23, %r0, 2; add.u32 %r23, %r23, %r4;",
    )
    add("init", "@%p2 mbarrier.init.shared.b64 [%r2], 1;")
    add("alloc", f"@%p0 tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%r1], {columns};")
    add("relinquish", f"@%p0 tcgen05.relinquish_alloc_permit.{group}.sync.aligned;")
    add(
        "",
        "bar.sync 0;",
        "ld.shared.b32 %r7, [place];",
        "shr.u32 %r8, %r0, 5; shl.b32 %r8, %r8, 21; add.u32 %r8, %r8, %r7;",
        f"add.u32 %r20, %r7, {A_COLUMN}; mov.u32 %r30, {encode_instruction_descriptor(variant.op())};",
        f"mov.u32 %r31, {encode_instruction_descriptor(variant.op(32))};",
    )
    for name, register in (("%rd5", "%r3"), ("%rd6", "%r5")):
        add("descriptor", f"shr.u32 %r11, {register}, 4; cvt.u64.u32 {name}, %r11; add.u64 {name}, {name}, {matrix};")
    if variant.scaled and variant.scales == "copied":
        words = encode_tcgen05_descriptor(0, 512, 128, 0)
        add("", f"shr.u32 %r11, %r4, 4; cvt.u64.u32 %rd7, %r11; add.u64 %rd7, %rd7, {words}; mov.u32 %r12, 0x7f7f7f7f;")
        add("", "st.shared.b32 [%r23], %r12;")
    for number in range(variant.rounds):
        lines += _round_lines(variant, number)
    add("dealloc", f"@%p0 tcgen05.dealloc.{group}.sync.aligned.b32 %r7, {columns};")
    for number in range(variant.rounds):
        for i in range(0, N, 4):
            add("", f"st.global.v4.b32 [%rd3+{64 * M * number + 4 * i}], {vector(100 + 20 * number + i, 4)};")
    add("", "ret;")
    return lines


def _round_lines(variant: Variant, number: int) -> list[Line]:
    lines: list[Line] = []

    def add(tag: str, *texts: str) -> None:
        lines.extend(Line(text, tag if tag in ("", "last bar") else f"{tag} {number}") for text in texts)

    add("", f"ld.global.v4.b32 {vector(40, 4)}, [%rd1];", f"ld.global.v4.b32 {vector(44, 4)}, [%rd1+16];")
    add("", f"@%p1 ld.global.v4.b32 {vector(48, 4)}, [%rd2];", f"@%p1 ld.global.v4.b32 {vector(52, 4)}, [%rd2+16];")
    add("b", f"@%p1 st.shared.v4.b32 [%r21], {vector(48, 4)};", f"@%p1 st.shared.v4.b32 [%r21+128], {vector(52, 4)};")
    if variant.a_in == "shared":
        add("a", f"st.shared.v4.b32 [%r22], {vector(40, 4)};", f"st.shared.v4.b32 [%r22+128], {vector(44, 4)};")
    else:
        add("a", f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r8+{A_COLUMN}], {vector(40, 8)};")
    if variant.start == "stored":
        add("c", *(f"mov.u32 %r{60 + i}, 0;" for i in range(N)))
        add("c", f"tcgen05.st.sync.aligned.32x32b.x16.b32 [%r8], {vector(60, N)};")
    if variant.scaled and variant.scales == "stored":
        add("scales", *(f"mov.u32 %r{80 + i}, 0x7f7f7f7f;" for i in range(8)))
        add("scales", f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r8+{SCALES}], {vector(80, 8)};")
    stores = variant.a_in == "tensor" or variant.start == "stored" or (variant.scaled and variant.scales == "stored")
    if stores:
        add("wait st", "tcgen05.wait::st.sync.aligned;")
    add("proxy", "fence.proxy.async.shared::cta;")
    add("before", "tcgen05.fence::before_thread_sync;")
    add("bar", "bar.sync 0;")
    add("after", "tcgen05.fence::after_thread_sync;")
    if variant.scaled and variant.scales == "copied":
        for column in (SCALES, SCALES + 4):
            add("cp", f"@%p2 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r7+{column}], %rd7;")
    for step in range(variant.steps):
        add(f"mma {step}", mma(variant, "0" if step == 0 and variant.start == "zero" else "1"))
    add("commit", "@%p2 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];")
    if variant.waits == "one":
        add("wait", f"@!%p0 bra DONE{number};")
    add("wait", f"AGAIN{number}:", f"mbarrier.try_wait.parity.shared.b64 %p3, [%r2], {number};", f"@!%p3 bra AGAIN{number};")
    if variant.waits == "one":
        add("wait", f"DONE{number}:")
        add("wait bar", "bar.sync 0;")
    add("after product", "tcgen05.fence::after_thread_sync;")
    add("ld", f"tcgen05.ld.sync.aligned.32x32b.x16.b32 {vector(100 + 20 * number, N)}, [%r8];")
    add("wait ld", "tcgen05.wait::ld.sync.aligned;")
    add("before end", "tcgen05.fence::before_thread_sync;")
    add("last bar", "bar.sync 0;")
    add("after end", "tcgen05.fence::after_thread_sync;")
    return lines


def kernel_text(lines: list[Line]) -> str:
    """Return the PTX of a kernel."""
    body = "\n    ".join(line.text for line in lines)
    return f""".version 9.0
.target {TARGET}
.address_size 64
.visible .entry e(.param .u64 a, .param .u64 b, .param .u64 d) {{
    .reg .b32 %r<200>; .reg .b64 %rd<20>; .reg .pred %p<8>;
    .shared .align 128 .b8 rows[1024]; .shared .align 128 .b8 rows_of_a[4096]; .shared .align 128 .b8 scales[512];
    .shared .align 8 .b64 done; .shared .b32 place;
    {body}
}}"""


def operands(variant: Variant) -> tuple[np.ndarray, np.ndarray]:
    """Return A [128, K] and B [16, K]."""
    rng = np.random.default_rng(5)
    dtype = np.dtype(KINDS[variant.kind][1])
    k = 32 // dtype.itemsize
    if dtype == np.int8:
        return rng.integers(-128, 128, (M, k), np.int8), rng.integers(-128, 128, (N, k), np.int8)
    a, b = (rng.standard_normal((rows, k)).astype(dtype) for rows in (M, N))
    if dtype == np.float32:
        a, b = ((x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b))
    return a, b


def run_kernel(variant: Variant, lines: list[Line]) -> Any:
    """Run a kernel in checked mode; return the arrays that it leaves."""
    a, b = operands(variant)
    dtype = np.int32 if variant.kind == "i8" else np.float32
    d = np.zeros((variant.rounds, M, N), dtype)
    return ptx.run(kernel_text(lines), grid=1, block=128, args=[a, b, d], target=TARGET, checked=True)


def expected_result(variant: Variant) -> np.ndarray:
    """Return D by `gemm`, the same in each round."""
    a, b = operands(variant)
    scales: dict[str, Any] = {}
    if variant.scaled:
        scales = {"scale_a": np.full((M, 1), 0x7F, np.uint8), "scale_b": np.full((1, N), 0x7F, np.uint8)}
    d: np.ndarray | None = None
    for _ in range(variant.steps):
        d = np.asarray(tcemu.gemm(a, b.T, d, op=variant.op(), target=TARGET, **scales))
    assert d is not None
    return np.broadcast_to(d, (variant.rounds, M, N))


# ---- edits


Lines = list[Line]


class Edit(NamedTuple):
    """A change of a kernel that breaks the protocol."""

    name: str
    change: Callable[[Variant, Lines], Lines]
    fault: Fault
    fits: Callable[[Variant], bool] = lambda variant: True


def without(*tags: str) -> Callable[[Variant, Lines], Lines]:
    return lambda variant, lines: [line for line in lines if line.tag not in tags]


def altered(tag: str, old: str, new: str) -> Callable[[Variant, Lines], Lines]:
    return lambda variant, lines: [line._replace(text=line.text.replace(old, new)) if line.tag == tag else line for line in lines]


def inserted(tag: str, *texts: str, behind: bool = False) -> Callable[[Variant, Lines], Lines]:
    """Insert lines before the first line with the tag, or behind the last."""

    def change(variant: Variant, lines: Lines) -> Lines:
        places = [i for i, line in enumerate(lines) if line.tag == tag]
        at = places[-1] + 1 if behind else places[0]
        return [*lines[:at], *map(Line, texts), *lines[at:]]

    return change


def moved(tag: str, before: str) -> Callable[[Variant, Lines], Lines]:
    def change(variant: Variant, lines: Lines) -> Lines:
        return inserted(before, *(line.text for line in lines if line.tag == tag))(variant, without(tag)(variant, lines))

    return change


def replaced_product(tag: str, enable: str = "1", **choices: str) -> Callable[[Variant, Lines], Lines]:
    def change(variant: Variant, lines: Lines) -> Lines:
        return [line._replace(text=mma(variant, enable, **choices)) if line.tag == tag else line for line in lines]

    return change


def store_of_scales(variant: Variant, lines: Lines) -> Lines:
    """Give the threads of the first warp another scale."""
    store = f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r8+{SCALES}], {{%r80}};"
    texts = ("tcgen05.wait::st.sync.aligned;", "selp.b32 %r80, 0x7e7e7e7e, 0x7f7f7f7f, %p0;", store)
    return inserted("wait st 0", *texts)(variant, lines)


IN_TENSOR, STORED, TWICE = lambda v: v.a_in == "tensor", lambda v: v.start == "stored", lambda v: v.steps == 2
ROUNDS, ONE, ZERO = lambda v: v.rounds == 2, lambda v: v.waits == "one", lambda v: v.start == "zero"
COPIED, ANY_STORE = lambda v: v.scaled and v.scales == "copied", lambda v: v.a_in == "tensor" or v.start == "stored"
EDITS = (
    Edit("no wait for the mbarrier", without("wait 0"), Fault.UNFINISHED_WORK),
    Edit("no commit and no wait", without("commit 0", "wait 0"), Fault.UNFINISHED_WORK, lambda v: v.rounds == 1),
    Edit("another thread commits", altered("commit 0", "@%p2", "@%p4"), Fault.UNFINISHED_WORK),
    Edit("the commit comes before the product", moved("commit 0", "mma 0 0"), Fault.UNFINISHED_WORK),
    Edit("the commit comes before the last product", moved("commit 0", "mma 1 0"), Fault.UNFINISHED_WORK, TWICE),
    Edit("one warp waits, and the others go on", without("wait bar 0"), Fault.UNFINISHED_WORK, ONE),
    Edit("the load comes before the wait", moved("ld 0", "wait 0"), Fault.UNFINISHED_WORK),
    Edit("no wait in the second round", without("wait 1"), Fault.UNFINISHED_WORK, ROUNDS),
    Edit("no wait::st", without("wait st 0"), Fault.STORE_WITHOUT_WAIT, ANY_STORE),
    Edit("no barrier between the stores and the product", without("bar 0"), Fault.STORE_WITHOUT_WAIT, ANY_STORE),
    Edit("no wait::st in the second round", without("wait st 1"), Fault.STORE_WITHOUT_WAIT, lambda v: ROUNDS(v) and ANY_STORE(v)),
    Edit("no wait::ld, and a second round", without("wait ld 0"), Fault.LOAD_WITHOUT_WAIT, ROUNDS),
    Edit("no wait::ld before the end", without("wait ld 0"), Fault.FREED_IN_USE, lambda v: v.rounds == 1),
    Edit("no fence.proxy.async", without("proxy 0"), Fault.PROXY_FENCE_MISSING),
    Edit("no fence.proxy.async in the second round", without("proxy 1"), Fault.PROXY_FENCE_MISSING, ROUNDS),
    Edit(
        "B is overwritten before the wait",
        inserted("wait 0", f"@%p1 st.shared.v4.b32 [%r21], {vector(48, 4)};"), Fault.SHARED_MEMORY_IN_USE,
    ),
    Edit(
        "A is overwritten before the wait",
        inserted("wait 0", f"tcgen05.st.sync.aligned.32x32b.x8.b32 [%r8+{A_COLUMN}], {vector(40, 8)};"),
        Fault.UNFINISHED_WORK,
        IN_TENSOR,
    ),
    Edit(
        "another shape of the accumulator", replaced_product("mma 0 0", "0", idesc="%r31"), Fault.UNORDERED_WORK,
        lambda v: TWICE(v) and not IN_TENSOR(v) and not v.scaled,
    ),
    Edit("D is A of the next product", replaced_product("mma 1 0", a="[%r7]"), Fault.UNORDERED_WORK, lambda v: TWICE(v) and IN_TENSOR(v)),
    Edit(
        "A is D of the next product", replaced_product("mma 1 0", "0", d="%r20"), Fault.UNPROMISED_ORDER,
        lambda v: TWICE(v) and IN_TENSOR(v) and not v.scaled and v.rounds == 1,
    ),
    Edit("D is added to what nothing has written", replaced_product("mma 0 0"), Fault.UNWRITTEN_CELLS, ZERO),
    Edit("a load of what nothing has written", altered("ld 0", "[%r8]", "[%r8+40]"), Fault.UNWRITTEN_CELLS),
    Edit("a load beyond the allocation", altered("ld 0", "[%r8]", "[%r8+64]"), Fault.UNALLOCATED_COLUMNS),
    Edit("a product beyond the allocation", replaced_product("mma 0 0", d="%r7+56"), Fault.UNALLOCATED_COLUMNS),
    Edit("nothing frees the columns", without("dealloc"), Fault.NOT_FREED),
    Edit("dealloc of fewer columns", altered("dealloc", "%r7, 64", "%r7, 32"), Fault.OTHER_SIZE),
    Edit("dealloc of another address", altered("dealloc", "%r7", "%r20"), Fault.UNKNOWN_ALLOCATION),
    Edit("dealloc twice", inserted("dealloc", "@%p0 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 64;"), Fault.UNKNOWN_ALLOCATION),
    Edit("dealloc before the load", moved("dealloc", "ld 0"), Fault.UNALLOCATED_COLUMNS, lambda v: v.rounds == 1),
    Edit("dealloc before the wait", moved("dealloc", "wait 0"), Fault.FREED_IN_USE, lambda v: v.rounds == 1),
    Edit(
        "alloc after relinquish_alloc_permit",
        inserted("dealloc", "@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;", behind=True),
        Fault.NO_PERMIT,
    ),
    Edit(
        "a larger alloc",
        lambda v, lines: inserted("dealloc", "@%p0 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 128;", behind=True)(
            v, without("relinquish")(v, lines)
        ),
        Fault.LARGER_ALLOCATION,
    ),
    Edit("nCols that is no power of 2", altered("alloc", "[%r1], 64", "[%r1], %r0"), Fault.ILLEGAL_SIZE),
    Edit("the quarter of another warp", inserted("ld 0", "xor.b32 %r8, %r8, 0x200000;"), Fault.OTHER_QUARTER),
    Edit("the lanes of the first quarter", inserted("ld 0", "and.b32 %r8, %r8, 0xFFFF;"), Fault.LANE_OF_FIRST_QUARTER),
    Edit("addresses that differ in a warp", inserted("ld 0", "add.u32 %r8, %r8, %r0;"), Fault.DIFFERENT_VALUES),
    Edit("a descriptor without its version", inserted("proxy 0", f"xor.b64 %rd5, %rd5, {1 << 46};"), Fault.ILLEGAL_DESCRIPTOR),
    Edit("a descriptor with a swizzle that is none", inserted("proxy 0", f"or.b64 %rd5, %rd5, {7 << 61};"), Fault.ILLEGAL_DESCRIPTOR),
    Edit("D in other lanes", inserted("mma 0 0", "add.u32 %r7, %r7, 0x200000;"), Fault.LANE_OF_D, lambda v: v.start == "zero"),
    Edit(
        "a shift from lane 5",
        inserted("mma 0 0", "add.u32 %r32, %r7, 0x50000;", "@%p2 tcgen05.shift.cta_group::1.down [%r32];"), Fault.LANE_OF_SHIFT, STORED,
    ),
    Edit("relinquish of another cta_group", altered("relinquish", "cta_group::1", "cta_group::2"), Fault.MIXED_GROUPS),
    Edit("scales that differ between the quarters", store_of_scales, Fault.SCALES_DIFFER, lambda v: v.scaled and v.scales == "stored"),
    Edit(
        "a copy that is loaded before its commit",
        inserted("cp 0", f"tcgen05.ld.sync.aligned.32x32b.x1.b32 {{%r33}}, [%r8+{SCALES}];", behind=True), Fault.UNFINISHED_WORK, COPIED,
    ),
    Edit(
        "a collector that nothing has filled", replaced_product("mma 1 0", collector=".collector::a::use"), Fault.COLLECTOR_NOT_FILLED,
        TWICE,
    ),
    Edit("no fence before the barrier", without("before 0"), Fault.MISSING_FENCE, ANY_STORE),
    Edit("no fence after the barrier", without("after 0"), Fault.MISSING_FENCE, ANY_STORE),
    Edit("no fence after the mbarrier", without("after product 0"), Fault.MISSING_FENCE),
)  # fmt: skip


def planted_faults(count: int) -> Iterator[tuple[Edit, Variant]]:
    """Yield edits and variants, every edit about as often, and with variants as different as there are."""
    fitting = {edit.name: [variant for variant in variants() if edit.fits(variant)] for edit in EDITS}
    for number in range(count):
        turn, place = divmod(number, len(EDITS))
        edit = EDITS[place]
        choices = fitting[edit.name]
        yield edit, choices[(7 * turn + 3 * place) % len(choices)]
