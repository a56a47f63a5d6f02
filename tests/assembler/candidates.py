"""Spellings to ask the assembler about: the legal ones, what lies around them, and what people mistype.

Written from the manual's syntax blocks, not from tcemu: nothing here is imported from the package.
"""

import random
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations, product


@dataclass(frozen=True)
class Candidate:
    """One spelling and one way to give it operands; legal if the assembler takes any of the operand lists."""

    spelling: str
    form: str  # "" or wgmma's "registers" / "descriptor"
    operands: tuple[str, ...]


BITS = {"f64": 64, "f32": 32, "tf32": 32, "s32": 32, "f16": 16, "bf16": 16, "u4": 4, "s4": 4, "e2m1": 4, "b1": 1}
FLOATS = ("f16", "bf16", "tf32", "e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "f64")
NARROW = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
INTEGERS = ("u8", "s8", "u4", "s4")
MMA_K = {8: (4, 16, 32, 128), 16: (4, 8, 16, 32, 64, 128, 256)}
MMA_SHAPES = tuple(f"m{m}n8k{k}" for m, ks in MMA_K.items() for k in ks)
SPARSITY = ("", ".sp", ".sp::ordered_metadata")
FOREIGN = (
    *("ftz", "sat", "relu", "approx", "noftz", "global", "const", "trans", "x4", "or", "b16", "u16", "f8", "fp16", "m16n8k12", "m8n8"),
    *("kind::f16", "kind::i8", "kind::mxf6", "scale_vec::3X", "scale_vec::2x", "block16", "ue8m0", "rna", "rni", "satfinite", "row", "col"),
    *("sp", "xor", "and", "popc", "shared::cluster", "volatile", "async", "cta_group::1", "f32", "s32", "rn"),
)


def bits(name: str) -> int:
    return BITS.get(name, 8)


def vector(count: float, name: str = "f32", first: int = 0) -> str:
    """A brace-enclosed list of registers: %r of 32 bits, or %g of 64 for f64."""
    letter, size = ("g", count / 2) if name == "f64" else ("r", count)
    return "{" + ", ".join(f"%{letter}{first + i}" for i in range(max(int(size), 1))) + "}"


def words(rows: int, columns: int, width: int, lanes: int = 32) -> float:
    return rows * columns * width / (32 * lanes)


def sizes(spelling: str) -> tuple[int, int, int]:
    found = re.search(r"\.m(\d+)n(\d+)(?:k(\d+))?(?=\.|$)", spelling)
    return (int(found[1]), int(found[2]), int(found[3] or 0)) if found else (16, 8, 16)


def wmma_types(spelling: str) -> list[str]:
    known = {*BITS, *FLOATS, *INTEGERS, "ue8m0", "ue4m3"}
    return [word for word in spelling.split(".") if word in known]


def mma_operands(spelling: str) -> tuple[str, ...]:
    m, n, k = sizes(spelling)
    d, a, b, c = (*wmma_types(spelling), "f32", "f32", "f32", "f32")[:4]
    contained = "f8f6f4" in spelling
    width_a, width_b = (8 if contained and name in NARROW else bits(name) for name in (a, b))
    times = 4 if (m, n, k, a) == (8, 8, 4, "f16") else 1
    sparse = ".sp" in spelling
    text = ", ".join((
        vector(times * words(m, n, bits(d)), d),
        vector(times * words(m, k, width_a) / (2 if sparse else 1), a),
        vector(times * words(k, n, width_b), b),
        vector(times * words(m, n, bits(c)), c),
    ))  # fmt: skip
    text += ", %r100, 0" if sparse else ""
    scales = text + ", %r101, {0, 0}, %r102, {0, 0}"
    return (text, scales) if any(word in spelling for word in ("kind", "scale", "ue")) else (text,)


def mma() -> Iterator[str]:
    def spelled(shape: str, d: str, a: str, b: str, c: str, middle: str = "", end: str = "", sparsity: str = "") -> str:
        return f"mma{sparsity}.sync.aligned.{shape}.row.col{middle}.{d}.{a}.{b}.{c}{end}"

    accumulators = tuple(product(("f16", "f32"), repeat=2))
    for shape, sparsity in product(MMA_SHAPES, SPARSITY):
        for a, b in product(FLOATS, repeat=2):
            close = a == b or (a in NARROW and b in NARROW)
            for d, c in (*accumulators, ("f64", "f64"), ("s32", "s32")) if close else (("f32", "f32"),):
                yield spelled(shape, d, a, b, c, sparsity=sparsity)
        for a, b in product(INTEGERS, repeat=2):
            for middle in ("", ".satfinite"):
                yield spelled(shape, "s32", a, b, "s32", middle, sparsity=sparsity)
            yield spelled(shape, "f32", a, b, "f32", sparsity=sparsity)
        for end in ("", ".xor.popc", ".and.popc", ".or.popc", ".popc", ".xor", ".popc.and"):
            yield spelled(shape, "s32", "b1", "b1", "s32", end=end, sparsity=sparsity)
        yield spelled(shape, "s32", "b1", "b1", "s32", ".satfinite", ".xor.popc", sparsity)
        for end in (".rn", ".rz", ".rm", ".rp", ".rna"):
            yield spelled(shape, "f64", "f64", "f64", "f64", end=end, sparsity=sparsity)
    for shape, sparsity in product(("m16n8k16", "m16n8k32", "m16n8k64", "m16n8k128"), SPARSITY):
        for a, b in (*product(NARROW, repeat=2), ("f16", "f16"), ("bf16", "bf16"), ("tf32", "tf32"), ("u8", "u8"), ("e4m3", "f16")):
            for d, c in accumulators:
                yield spelled(shape, d, a, b, c, ".kind::f8f6f4", sparsity=sparsity)
            for vector_size in ("", ".scale_vec::1X"):
                middle = f".kind::mxf8f6f4.block_scale{vector_size}"
                yield spelled(shape, "f32", a, b, "f32", middle, ".ue8m0", sparsity)
        narrow = (("e2m1", "e2m1"), ("e4m3", "e4m3"), ("e2m1", "e5m2"), ("e3m2", "e2m3"))
        kinds = ("", ".kind::f8f6f4", ".kind::mxf8f6f4", ".kind::mxf4", ".kind::mxf4nvf4")
        vectors = ("", ".scale_vec::1X", ".scale_vec::2X", ".scale_vec::4X")
        for (a, b), kind, block, size, stype in product(narrow, kinds, ("", ".block_scale"), vectors, ("", ".ue8m0", ".ue4m3")):
            if (block and kind) or ((kind or block or size or stype) and (a, b) == narrow[0]):
                yield spelled(shape, "f32", a, b, "f32", kind + block + size, stype, sparsity)
        for kind, stype in product(kinds[2:], (".ue8m0", ".ue4m3")):
            yield spelled(shape, "f16", "e2m1", "e2m1", "f16", f"{kind}.block_scale.scale_vec::2X", stype, sparsity)
    for layouts, shape in product(("row.row", "row.col", "col.row", "col.col"), MMA_SHAPES):
        for types in ("f16.f16.f16.f16", "f32.f16.f16.f32", "f32.f16.f16.f16", "f16.f16.f16.f32", "f32.bf16.bf16.f32", "s32.s8.s8.s32"):
            yield f"mma.sync.aligned.{shape}.{layouts}.{types}"
        for types in ("f64.f64.f64.f64", "s32.u4.u4.s32", "f32.tf32.tf32.f32", "f32.e4m3.e4m3.f32", "s32.b1.b1.s32.xor.popc"):
            yield f"mma.sync.aligned.{shape}.{layouts}.{types}"
        yield f"mma.sp.sync.aligned.{shape}.{layouts}.f32.f16.f16.f32"


WMMA_SHAPES = ("m16n16k16", "m8n32k16", "m32n8k16", "m16n16k8", "m8n8k4", "m8n8k32", "m8n8k128", "m16n8k16")
LAYOUTS = ("row.row", "row.col", "col.row", "col.col")


def wmma_words(spelling: str, operand: str, name: str) -> float:
    m, n, k = sizes(spelling)
    rows, columns = {"a": (m, k), "b": (k, n)}.get(operand, (m, n))
    return 8 if operand in "ab" and name == "f16" else words(rows, columns, bits(name))


def wmma_mma_operands(spelling: str) -> tuple[str, ...]:
    types = wmma_types(spelling)
    d, a, b, c = (types[0], "f16", "f16", types[1]) if len(types) == 2 else (*types, "f32", "f32", "f32", "f32")[:4]
    return (", ".join(vector(wmma_words(spelling, operand, name), name) for operand, name in zip("dabc", (d, a, b, c), strict=True)),)


def wmma_mma() -> Iterator[str]:
    for shape, layout in product(WMMA_SHAPES, LAYOUTS):
        start = f"wmma.mma.sync.aligned.{layout}.{shape}"
        for d, c, end in product(("f16", "f32"), ("f16", "f32"), ("", ".satfinite")):
            yield f"{start}.{d}.{c}{end}"
        for name in ("f16", "bf16", "tf32", "e4m3"):
            for d, c in (("f32", "f32"), ("f16", "f16")):
                yield f"{start}.{d}.{name}.{name}.{c}"
        for a, b, end in product(INTEGERS, INTEGERS, ("", ".satfinite")):
            yield f"{start}.s32.{a}.{b}.s32{end}"
        for rounding in ("", ".rn", ".rz", ".rm", ".rp"):
            yield f"{start}{rounding}.f64.f64.f64.f64"
            yield f"{start}{rounding}.f32.f32"
        for op in (".xor.popc", ".and.popc", ".or.popc", ".popc", ".xor", ""):
            yield f"wmma.mma{op}.sync.aligned.{layout}.{shape}.s32.b1.b1.s32"
        yield f"wmma.mma.xor.popc.sync.aligned.{layout}.{shape}.s32.b1.b1.s32.satfinite"
        yield f"{start}.f32.bf16.f16.f32"


def wmma_memory_operands(spelling: str) -> tuple[str, ...]:
    operand = spelling.split(".")[2]
    name = (*wmma_types(spelling), "f32")[0]
    registers = vector(wmma_words(spelling, operand, name), name)
    orders = (
        (f"{registers}, [%d0]", f"{registers}, [%d0], %r99") if "load" in spelling else (f"[%d0], {registers}", f"[%d0], {registers}, 64")
    )
    return orders[:1]


def wmma_memory() -> Iterator[str]:
    types = ("f16", "f32", "bf16", "tf32", "f64", "s8", "u8", "s4", "u4", "b1", "s32", "e4m3")
    for name, layout, shape, element in product(("load.a", "load.b", "load.c", "store.d"), ("row", "col"), WMMA_SHAPES, types):
        for space in ("", ".global", ".shared", ".shared::cta", ".shared::cluster", ".local"):
            if space in ("", ".global", ".shared", ".shared::cta") or (shape, element) in (
                ("m16n16k16", "f16"),
                ("m8n8k32", "s32"),
                ("m8n8k4", "f64"),
            ):
                yield f"wmma.{name}.sync.aligned.{layout}.{shape}{space}.{element}"


def mover_operands(spelling: str) -> tuple[str, ...]:
    m, n, _ = sizes(spelling)
    num = int(next((word[1:] for word in spelling.split(".") if re.fullmatch(r"x\d", word)), 1))
    count = num * words(m, n, 16 if spelling.endswith("b16") or "b16." in spelling else 8)
    registers = vector(count)
    if spelling.startswith("movmatrix"):
        return ("%r0, %r1",)
    return (f"[%d0], {registers}" if spelling.startswith("st") else f"{registers}, [%d0]",)


def movers() -> Iterator[str]:
    formats = ("b16", "b8", "b8x16.b6x16_p32", "b8x16.b4x16_p64", "b4x16_p64", "b8x16", "b32")
    for name, shape in product(("ldmatrix", "stmatrix"), ("m8n8", "m16n16", "m8n16", "m16n8", "m8n4")):
        for num, trans, space, element in product(
            ("", ".x1", ".x2", ".x4", ".x8"), ("", ".trans"), ("", ".shared", ".shared::cta"), formats
        ):
            yield f"{name}.sync.aligned.{shape}{num}{trans}{space}.{element}"
        for space in (".global", ".shared::cluster", ".param"):
            yield f"{name}.sync.aligned.{shape}.x1.trans{space}.b16"
    for shape, trans, element in product(("m8n8", "m16n16", "m16n8"), ("", ".trans"), ("b16", "b8", "b32", "f16")):
        yield f"movmatrix.sync.aligned.{shape}{trans}.{element}"


WGMMA_K = {"f16": 16, "bf16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "u8": 32, "s8": 32, "b1": 256}


def wgmma_operands(spelling: str) -> dict[str, tuple[str, ...]]:
    m, n, k = sizes(spelling)
    d, a = (*wmma_types(spelling), "f32", "f32")[:2]
    sparse = ".sp" in spelling
    registers = vector(words(m, n, bits(d), 128))
    held = vector(words(m, k // 2 if sparse else k, bits(a), 128), first=256)
    middle = ", %d1" + (", %r250, 0" if sparse else "") + ", %p0"
    endings = ("", ", 1, -1")
    return {
        "descriptor": tuple(f"{registers}, %d0{middle}{end}" for end in (*endings, ", 1, 1, 0, 1")),
        "registers": tuple(f"{registers}, {held}{middle}{end}" for end in (*endings, ", 1, 1, 1")),
    }


def wgmma() -> Iterator[str]:
    def spelled(n: int, k: int, types: str, sparsity: str, end: str = "", middle: str = "") -> str:
        return f"wgmma.mma_async{sparsity}.sync.aligned.m64n{n}k{k}{middle}.{types}{end}"

    floats = [("f16", "f16"), ("bf16", "bf16"), ("tf32", "tf32"), *product(("e4m3", "e5m2"), repeat=2)]
    for sparsity, k_factor in (("", 1), (".sp", 2)):
        for n in (*range(8, 257, 8), 4, 20, 264, 512):
            for (a, b), d in product(floats, ("f16", "f32")):
                if n <= 64 or d == "f32" or a in ("f16", "e4m3", "e5m2"):
                    yield spelled(n, WGMMA_K[a] * k_factor, f"{d}.{a}.{b}", sparsity)
            for a, b, middle in product(("u8", "s8"), ("u8", "s8"), ("", ".satfinite")):
                yield spelled(n, 32 * k_factor, f"s32.{a}.{b}", sparsity, middle=middle)
            yield spelled(n, 256 * k_factor, "s32.b1.b1", sparsity, ".and.popc")
        for n, k in product((8, 64), (4, 8, 16, 32, 64, 128, 256)):
            for a, b in (*floats, ("f16", "bf16"), ("e4m3", "f16"), ("f64", "f64"), ("e2m1", "e2m1"), ("e3m2", "e3m2")):
                for d in ("f16", "f32", "s32", "f64"):
                    yield spelled(n, k, f"{d}.{a}.{b}", sparsity)
            for a, b in (("u8", "s8"), ("s4", "s4"), ("u4", "u4"), ("s8", "s4")):
                yield spelled(n, k, f"s32.{a}.{b}", sparsity)
            for end in ("", ".and.popc", ".xor.popc", ".or.popc", ".popc", ".and"):
                yield spelled(n, k, "s32.b1.b1", sparsity, end)
        yield spelled(8, 16 * k_factor, "f32.f16.f16.f32", sparsity)
        yield spelled(8, 16 * k_factor, "f32.f16.f16", sparsity, middle=".satfinite")
        yield spelled(8, 16 * k_factor, "f32.f16.f16", sparsity, middle=".row.col")
    for n, k in ((8, 32), (8, 64)):
        yield spelled(n, k, "f32.f16.f16", ".sp::ordered_metadata")


FENCES = {"wgmma.fence": ("",), "wgmma.commit_group": ("",), "wgmma.wait_group": ("0",)}


def mutations(spellings: Iterable[str], heads: int, seed: int) -> Iterator[str]:
    """What fingers do: a qualifier lost, doubled, moved, or brought from elsewhere; then whole orders shuffled."""
    draw = random.Random(seed)
    for spelling in spellings:
        parts = spelling.split(".")
        head, rest = parts[:heads], parts[heads:]
        for i in range(len(rest)):
            yield ".".join([*head, *rest[:i], *rest[i + 1 :]])
            yield ".".join([*head, *rest[: i + 1], *rest[i:]])
            if i:
                yield ".".join([*head, *rest[: i - 1], rest[i], rest[i - 1], *rest[i + 1 :]])
        for word in FOREIGN:
            at = draw.randrange(len(rest) + 1)
            yield ".".join([*head, *rest[:at], word, *rest[at:]])
        for _ in range(12):
            yield ".".join([*head, *draw.sample(rest, len(rest))])


BASES = {
    1: (
        "mma.sync.aligned.m8n8k4.col.row.f32.f16.f16.f16",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
        "mma.sync.aligned.m16n8k32.row.col.f16.e4m3.e5m2.f16",
        "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64.rz",
        "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.u8.s8.s32",
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.u4.s32",
        "mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc",
        "mma.sync.aligned.m16n8k32.row.col.kind::f8f6f4.f32.e3m2.e2m1.f32",
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3",
        "mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.f32.e2m1.e2m1.f32.ue8m0",
        "mma.sp.sync.aligned.m16n8k16.row.col.f32.tf32.tf32.f32",
        "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.satfinite.s32.u8.s8.s32",
        "mma.sp::ordered_metadata.sync.aligned.m16n8k64.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e2m1.e4m3.f32.ue8m0",
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16",
        "ldmatrix.sync.aligned.m16n16.x2.trans.shared.b8x16.b6x16_p32",
        "ldmatrix.sync.aligned.m8n16.x1.b8x16.b4x16_p64",
        "stmatrix.sync.aligned.m8n8.x2.b16",
        "stmatrix.sync.aligned.m16n8.x4.trans.shared.b8",
        "movmatrix.sync.aligned.m8n8.trans.b16",
    ),
    2: (
        "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f16",
        "wmma.mma.sync.aligned.col.row.m8n32k16.f32.bf16.bf16.f32",
        "wmma.mma.sync.aligned.row.row.m16n16k16.s32.u8.u8.s32.satfinite",
        "wmma.mma.sync.aligned.row.col.m8n8k4.rm.f64.f64.f64.f64",
        "wmma.mma.xor.popc.sync.aligned.row.col.m8n8k128.s32.b1.b1.s32",
        "wgmma.mma_async.sync.aligned.m64n24k16.f32.f16.f16",
        "wgmma.mma_async.sp.sync.aligned.m64n64k64.f16.e5m2.e4m3",
        "wgmma.mma_async.sync.aligned.m64n48k32.satfinite.s32.u8.s8",
        "wgmma.mma_async.sync.aligned.m64n16k256.s32.b1.b1.and.popc",
        "wgmma.fence.sync.aligned",
        "wgmma.commit_group.sync.aligned",
        "wgmma.wait_group.sync.aligned",
    ),
    3: (
        "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16",
        "wmma.load.b.sync.aligned.col.m8n8k32.s4",
        "wmma.load.c.sync.aligned.col.m16n16k8.global.f32",
        "wmma.store.d.sync.aligned.row.m32n8k16.shared::cta.s32",
    ),
}


def operand_forms(spelling: str) -> dict[str, tuple[str, ...]]:
    name = spelling.split(".")[0]
    if name in ("ldmatrix", "stmatrix", "movmatrix"):
        return {"": mover_operands(spelling)}
    if name == "mma":
        return {"": mma_operands(spelling)}
    if spelling.startswith("wmma.mma"):
        return {"": wmma_mma_operands(spelling)}
    if name == "wmma":
        return {"": wmma_memory_operands(spelling)}
    for fence, operands in FENCES.items():
        if spelling.startswith(fence):
            return {"": operands}
    return wgmma_operands(spelling)


def candidates() -> list[Candidate]:
    """Every candidate once, in a fixed order."""
    everything = [*mma(), *wmma_mma(), *wmma_memory(), *movers(), *wgmma(), *(f"{name}.sync.aligned" for name in FENCES)]
    # all orders of a short instruction
    everything += [f"movmatrix.{'.'.join(order)}" for order in permutations(("sync", "aligned", "m8n8", "trans", "b16"))]
    for heads, bases in BASES.items():
        everything += mutations(bases, heads, seed=heads)
    return [Candidate(s, form, operands) for s in dict.fromkeys(everything) for form, operands in operand_forms(s).items()]
