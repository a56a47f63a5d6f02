"""Statements of tcgen05 to ask the assembler about: the legal ones, what lies around them, and what people mistype.

Written from the manual's syntax blocks (PTX ISA 9.7.16), not from tcemu: nothing here is imported from the package. Whole statements, since
some operands decide: a disable-output-lane vector, a scale-input-d, A in tensor memory.
"""

import random
from collections.abc import Iterator
from itertools import product

NUMS = [1 << i for i in range(8)]
REGISTERS = {"16x64b": 1, "16x128b": 2, "16x256b": 4, "32x32b": 1, "16x32bx2": 1}  # registers of .x1
USES = ("fill", "use", "lastuse", "discard")
COLLECT_A = ["", *(f".collector::a::{use}" for use in USES)]
COLLECT_B = ["", *(f".collector::b{n}::{use}" for n in range(4) for use in USES)]
KINDS, SCALED_KINDS = ("f16", "tf32", "f8f6f4", "i8"), ("mxf8f6f4", "mxf4", "mxf4nvf4")
SIZES = ("", ".scale_vec::1X", ".scale_vec::2X", ".scale_vec::4X", ".block16", ".block32")
FOREIGN = (
    *("ftz", "shared", "global", "x1", "x3", "x256", "pack::8b", "unpack::16b", "pack::16b", "b16", "b64", "f16", "u32", "64x64b", "8x32b"),
    *("kind::f64", "kind::mxf6", "kind::f16", "cta_group::3", "cta_group::2", "collector::a::fill", "collector::c::fill", "ashift", "sp"),
    *("ws", "scale_vec::3X", "block64", "block_scale", "warpx3", "warpx4", "up", "down", "aligned", "sync", "red", "min", "NaN", "abs"),
    *("mbarrier::arrive::one", "multicast::cluster", "shared::cluster", "shared::cta", "m128n64k16", "f32", "b8x16", "b8x16.b4x16_p64"),
)


def vector(count: int, first: int = 10) -> str:
    return "{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}"


def memory_statements() -> Iterator[str]:
    for group in (1, 2):
        cg = f"cta_group::{group}"
        yield f"tcgen05.alloc.{cg}.sync.aligned.shared::cta.b32 [%r1], 64"
        yield f"tcgen05.alloc.{cg}.sync.aligned.b32 [%d1], 64"
        yield f"tcgen05.alloc.{cg}.sync.aligned.shared::cluster.b32 [%r1], 64"
        yield f"tcgen05.alloc.{cg}.sync.aligned.shared::cta.b32 [%r1], %r2"
        for n in (0, 16, 32, 48, 64, 96, 128, 256, 512, 544, 576, 1024):
            yield f"tcgen05.alloc.{cg}.sync.aligned.shared::cta.b32 [%r1], {n}"
            yield f"tcgen05.dealloc.{cg}.sync.aligned.b32 %r2, {n}"
        yield f"tcgen05.dealloc.{cg}.sync.aligned.b32 %r2, %r3"
        yield f"tcgen05.relinquish_alloc_permit.{cg}.sync.aligned"
        for space, multicast in product((".shared::cluster", "", ".shared::cta"), (True, False)):
            address = "%r1" if space else "%d1"
            words, mask = (".multicast::cluster", ", %h") if multicast else ("", "")
            yield f"tcgen05.commit.{cg}.mbarrier::arrive::one{space}{words}.b64 [{address}]{mask}"
            yield f"tcgen05.commit.{cg}.mbarrier::arrive::one{space}{words}.b64 [{address}]{'' if multicast else ', %h'}"
        shapes = ("128x256b", "4x256b", "128x128b", "64x128b", "32x128b")
        casts = ("", ".warpx2::02_13", ".warpx2::01_23", ".warpx4")
        for shape, cast, form in product(shapes, casts, ("", ".b8x16.b6x16_p32", ".b8x16.b4x16_p64")):
            yield f"tcgen05.cp.{cg}.{shape}{cast}{form} [%r2], %d1"
        yield f"tcgen05.shift.{cg}.down [%r2]"
        yield f"tcgen05.shift.down.{cg} [%r2]"
    for shape, n, packed in product(REGISTERS, NUMS, (False, True)):
        count = min(REGISTERS[shape] * n, 256)
        half = ", 16" if shape == "16x32bx2" else ""
        ld, st = (".pack::16b", ".unpack::16b") if packed else ("", "")
        yield f"tcgen05.ld.sync.aligned.{shape}.x{n}{ld}.b32 {vector(count)}, [%r2]{half}"
        yield f"tcgen05.st.sync.aligned.{shape}.x{n}{st}.b32 [%r2]{half}, {vector(count)}"
        if n in (2, 8) and not packed:
            yield f"tcgen05.ld.sync.aligned.{shape}.x{n}.b32 {vector(count + 1)}, [%r2]{half}"
            yield f"tcgen05.ld.sync.aligned.{shape}.x{n}.b32 {vector(count)}, [%r2]{'' if half else ', 16'}"
            yield f"tcgen05.st.sync.aligned.{shape}.x{n}.b32 [%r2], {vector(count)}{half or ', 16'}"
    for shape, n, op in product(("32x32b", "16x32bx2", "16x64b"), NUMS, ("min", "max")):
        half = ", 16" if shape == "16x32bx2" else ""
        for modifier in ("", ".abs", ".NaN", ".abs.NaN"):
            yield f"tcgen05.ld.red.sync.aligned.{shape}.x{n}.{op}{modifier}.f32 {vector(n)}, %r5, [%r2]{half}"
        for element in ("u32", "s32"):
            yield f"tcgen05.ld.red.sync.aligned.{shape}.x{n}.{op}.{element} {vector(n)}, %r5, [%r2]{half}"
            yield f"tcgen05.ld.red.sync.aligned.{shape}.x{n}.{element}.{op} {vector(n)}, %r5, [%r2]{half}"
    for offset in ("0", "1", "16", "511", "65535", "65536", "1048576", "2147483647", "-16", "%r8"):
        yield f"tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {{%r10}}, [%r2], {offset}"
    yield from ("tcgen05.wait::ld.sync.aligned", "tcgen05.wait::st.sync.aligned", "tcgen05.wait::ld", "tcgen05.wait.sync.aligned")
    yield from ("tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync", "tcgen05.fence", "tcgen05.wait::mma.sync.aligned")


def multiply_statements() -> Iterator[str]:
    for group in (1, 2):
        cg, mask = f"cta_group::{group}", ", " + vector(4 * group)
        for sp, kind, a, lanes, scale, collector, shift in product(
            ("", ".sp"), KINDS, ("%d1", "[%r3]"), ("", mask), ("", ", 4"), COLLECT_A, ("", ".ashift")
        ):
            meta = ", [%r4]" if sp else ""
            yield f"tcgen05.mma{sp}.{cg}.kind::{kind}{shift}{collector} [%r2], {a}, %d2{meta}, %r5{lanes}, %p{scale}"
        for sp, kind, a, size, collector in product(("", ".sp"), SCALED_KINDS, ("%d1", "[%r3]"), SIZES, COLLECT_A):
            meta = ", [%r4]" if sp else ""
            yield f"tcgen05.mma{sp}.{cg}.kind::{kind}.block_scale{size}{collector} [%r2], {a}, %d2{meta}, %r5, [%r6], [%r7], %p"
        for ending in (", 0", ", 15", ", 16", ", -1", ", %r8"):
            for kind in KINDS:
                yield f"tcgen05.mma.{cg}.kind::{kind} [%r2], %d1, %d2, %r5, %p{ending}"
        plain = f"tcgen05.mma.{cg}.kind::f16 [%r2], %d1, %d2"
        yield f"{plain}, %r5, {vector(4 if group == 2 else 8)}, %p"
        yield f"{plain}, 0x8100490, %p"
        yield f"{plain}, %p"
        yield f"{plain}, [%r4], %r5, %p"
        yield f"tcgen05.mma.sp.{cg}.kind::f16 [%r2], %d1, %d2, %r5, %p"
        yield f"tcgen05.mma.{cg}.kind::f16 %r2, %d1, %d2, %r5, %p"
        yield f"tcgen05.mma.{cg}.kind::mxf8f6f4.block_scale [%r2], %d1, %d2, %r5, %p"
        yield f"tcgen05.mma.{cg}.kind::mxf8f6f4.block_scale [%r2], %d1, %d2, %r5, [%r6], [%r7]{mask}, %p"
        yield f"tcgen05.mma.{cg}.kind::mxf8f6f4.block_scale [%r2], %d1, %d2, %r5, [%r6], [%r7], %p, 4"
        yield f"tcgen05.mma.{cg}.kind::mxf8f6f4 [%r2], %d1, %d2, %r5, %p"
        yield f"tcgen05.mma.{cg}.kind::f16.block_scale [%r2], %d1, %d2, %r5, [%r6], [%r7], %p"
        yield f"tcgen05.mma.{cg}.kind::f16.collector::b0::fill [%r2], %d1, %d2, %r5, %p"
        for word in ("mxf4.block_scale [%r2], %d1, %d2, %r5, [%r6], [%r7], %p", "f16 [%r2], %d1, %d2, %r5, %p"):
            yield f"tcgen05.mma.ws.{cg}.kind::{word}"
        yield f"tcgen05.mma.ws.{cg}.kind::f16 [%r2], %d1, %d2, %r5{mask}, %p"
        yield f"tcgen05.mma.ws.{cg}.kind::f16.ashift [%r2], [%r3], %d2, %r5, %p"
        yield f"tcgen05.mma.ws.{cg}.kind::f16 [%r2], %d1, %d2, %r5, %p, 4"
        yield f"tcgen05.mma.ws.{cg}.kind::f16.collector::a::fill [%r2], %d1, %d2, %r5, %p"
    for sp, kind, a, collector, zeros in product(("", ".sp"), KINDS, ("%d1", "[%r3]"), COLLECT_B, ("", ", %d3")):
        meta = ", [%r4]" if sp else ""
        yield f"tcgen05.mma.ws{sp}.cta_group::1.kind::{kind}{collector} [%r2], {a}, %d2{meta}, %r5, %p{zeros}"


BASES = (
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64",
    "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 64",
    "tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned",
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r10, %r11}, [%r2]",
    "tcgen05.ld.sync.aligned.16x32bx2.x2.pack::16b.b32 {%r10, %r11}, [%r2], 16",
    "tcgen05.st.sync.aligned.16x128b.x1.unpack::16b.b32 [%r2], {%r10, %r11}",
    "tcgen05.ld.red.sync.aligned.32x32b.x2.min.abs.NaN.f32 {%r10, %r11}, %r5, [%r2]",
    "tcgen05.ld.red.sync.aligned.32x32b.x2.max.u32 {%r10, %r11}, %r5, [%r2]",
    "tcgen05.wait::ld.sync.aligned",
    "tcgen05.fence::before_thread_sync",
    "tcgen05.cp.cta_group::1.64x128b.warpx2::02_13 [%r2], %d1",
    "tcgen05.cp.cta_group::2.32x128b.warpx4.b8x16.b4x16_p64 [%r2], %d1",
    "tcgen05.shift.cta_group::1.down [%r2]",
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r1]",
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %h",
    "tcgen05.mma.cta_group::1.kind::f16 [%r2], %d1, %d2, %r5, %p",
    "tcgen05.mma.cta_group::2.kind::i8.collector::a::lastuse [%r2], %d1, %d2, %r5, %p",
    "tcgen05.mma.cta_group::1.kind::tf32.ashift.collector::a::lastuse [%r2], [%r3], %d2, %r5, %p",
    "tcgen05.mma.sp.cta_group::1.kind::f8f6f4 [%r2], %d1, %d2, [%r4], %r5, %p",
    "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.scale_vec::1X.collector::a::use [%r2], %d1, %d2, %r5, [%r6], [%r7], %p",
    "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16 [%r2], %d1, %d2, %r5, [%r6], [%r7], %p",
    "tcgen05.mma.sp.cta_group::1.kind::mxf4.block_scale.block32 [%r2], %d1, %d2, [%r4], %r5, [%r6], [%r7], %p",
    "tcgen05.mma.ws.cta_group::1.kind::f16.collector::b2::fill [%r2], %d1, %d2, %r5, %p, %d3",
    "tcgen05.mma.ws.sp.cta_group::1.kind::f8f6f4 [%r2], [%r3], %d2, [%r4], %r5, %p",
)


def mutations(statements: tuple[str, ...], seed: int) -> Iterator[str]:
    """What fingers do: a qualifier lost, doubled, moved, or brought from elsewhere; then whole orders shuffled; then operands lost."""
    draw = random.Random(seed)
    for statement in statements:
        spelling, _, operands = statement.partition(" ")
        head, *rest = spelling.removeprefix("tcgen05.").split(".")
        spelled = lambda words, head=head, operands=operands: " ".join(filter(None, [".".join(["tcgen05", head, *words]), operands]))
        for i in range(len(rest)):
            yield spelled([*rest[:i], *rest[i + 1 :]])
            yield spelled([*rest[: i + 1], *rest[i:]])
            if i:
                yield spelled([*rest[: i - 1], rest[i], rest[i - 1], *rest[i + 1 :]])
        for word in FOREIGN:
            at = draw.randrange(len(rest) + 1)
            yield spelled([*rest[:at], word, *rest[at:]])
        for _ in range(12):
            yield spelled(draw.sample(rest, len(rest)))


def candidates() -> list[str]:
    """Every statement once, in a fixed order, without its closing semicolon."""
    return list(dict.fromkeys([*memory_statements(), *multiply_statements(), *BASES, *mutations(BASES, seed=5)]))
