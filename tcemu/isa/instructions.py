"""`Instruction`: one tensor-core instruction as a value, with its PTX spelling, its operands and their sizes.

Here stands what follows from an instruction's own fields, and how each family is spelled (`FAMILIES`, `WRITE`). Which instructions there
are stands in `syntax`, which target has them in `catalog`, what they compute in `tcemu.architectures`. `grammar` reads spellings, and
`diagnosis` explains those that are wrong.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tcemu.formats import Format
from tcemu.layouts import LANES, REGISTER_BITS


@dataclass(frozen=True)
class Family:
    """How the instructions of one family are spelled: the name, then slots of qualifiers in the order of the manual's syntax block."""

    head: str
    order: str
    types: str = ""  # the fields of Instruction behind the slot "type", in its order
    operands: str = ""


_MMA = "sparsity sync aligned shape layout satfinite kind block_scale scale_vec type bit_op rounding"
_WGMMA = "sparsity sync aligned shape satfinite type bit_op"
FAMILIES = {
    "mma": Family("mma", _MMA, "d a b c stype", "d a b c"),  # 9.7.14.5.14
    "mma.sp": Family("mma", _MMA, "d a b c stype", "d a b c e f"),  # 9.7.14.6.3
    "wmma.load": Family("wmma.load.{operand}", "sync aligned layout shape space type", "a b c", "r p stride"),  # 9.7.14.4.3
    "wmma.store": Family("wmma.store.{operand}", "sync aligned layout shape space type", "d", "p r stride"),  # 9.7.14.4.4
    "wmma.mma": Family("wmma.mma", "bit_op sync aligned layout shape rounding type satfinite", "d a b c", "d a b c"),  # 9.7.14.4.5
    "ldmatrix": Family("ldmatrix", "sync aligned shape num trans space type", "", "r p"),  # 9.7.14.5.15
    "stmatrix": Family("stmatrix", "sync aligned shape num trans space type", "", "p r"),  # 9.7.14.5.16
    "movmatrix": Family("movmatrix", "sync aligned shape trans type", "", "d a"),  # 9.7.14.5.17
    "wgmma": Family("wgmma.mma_async", _WGMMA, "d a b", "d a b scale_d"),  # 9.7.15.5.2
    "wgmma.sp": Family("wgmma.mma_async", _WGMMA, "d a b", "d a b sp_meta sp_sel scale_d"),  # 9.7.15.6.3
    "wgmma.fence": Family("wgmma.fence", "sync aligned"),  # 9.7.15.7.1
    "wgmma.commit_group": Family("wgmma.commit_group", "sync aligned"),  # 9.7.15.7.2
    "wgmma.wait_group": Family("wgmma.wait_group", "sync aligned", "", "n"),  # 9.7.15.7.3
}
MOVERS = ("ldmatrix", "stmatrix", "movmatrix")
# .scale_vec where the spelling leaves it out: 9.7.14.5.14; .kind::mxf4nvf4 has none
DEFAULT_SCALE_VEC = {"mxf4": 2, "mxf8f6f4": 1}
DEFAULT_ROUNDING = "rn"  # 9.7.14.5.14, 9.7.14.4.5


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One PTX instruction of sections 9.7.14 and 9.7.15. Hashable, so it may be static under `jit`.

    `str(op)` is the canonical spelling: the manual's order, defaults left out. `tcemu.parse` makes one from any spelling. What a
    family does not have is 0, False or None. `arguments` and `guard` are the text of the statement it was read from; they take no part in
    equality.
    """

    family: str  # a key of FAMILIES
    m: int = 0
    n: int = 0
    k: int = 0
    d: Format | None = None
    a: Format | None = None
    b: Format | None = None
    c: Format | None = None
    alayout: str | None = None  # "row" or "col"
    blayout: str | None = None
    kind: str | None = None  # "f8f6f4", "mxf8f6f4", "mxf4", "mxf4nvf4"
    block_scale: bool = False
    scale_vec: int | None = None  # scales per row of A and column of B: 1, 2, 4; the default is filled in
    stype: Format | None = None  # the format of the scales
    rounding: str | None = None  # f64: "rn" (also when left out), "rz", "rm", "rp"; otherwise None
    satfinite: bool = False
    bit_op: str | None = None  # b1: "xor" or "and", followed by popc
    ordered: bool = False  # mma.sp::ordered_metadata
    operand: str | None = None  # wmma.load: "a", "b", "c"; wmma.store: "d"
    layout: str | None = None  # wmma.load, wmma.store: "row" or "col" in memory
    space: str | None = None  # "global", "shared", "shared::cta"; None is generic
    num: int = 0  # ldmatrix, stmatrix: matrices moved
    trans: bool = False  # ldmatrix, stmatrix, movmatrix
    element: str | None = None  # ldmatrix, stmatrix, movmatrix: "b16", "b8", or the .dst_fmt "b8x16"
    src_fmt: str | None = None  # ldmatrix: "b6x16_p32" or "b4x16_p64"
    arguments: tuple[str, ...] = field(default=(), compare=False)
    guard: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        return spell(self)

    def __repr__(self) -> str:
        return f"tcemu.parse({spell(self)!r})"

    @property
    def shape(self) -> str:
        """Such as "m16n8k16"; "" where there is none."""
        return "".join(f"{name}{size}" for name, size in (("m", self.m), ("n", self.n), ("k", self.k)) if size)

    @property
    def sparse(self) -> bool:
        return self.family in ("mma.sp", "wgmma.sp")

    @property
    def warps(self) -> int:
        """Warps that execute one instruction together (9.7.15.1)."""
        return 4 if self.family.startswith("wgmma") else 1

    @property
    def products(self) -> int:
        """How many M x N x K products one warp computes: four for m8n8k4 with f16 (9.7.14.5.1), one otherwise."""
        return 4 if self.family == "mma" and self.shape == "m8n8k4" and self.a is not None and self.a.name == "f16" else 1

    @property
    def forms(self) -> tuple[tuple[str, ...], ...]:
        """The operand lists that a statement may have, in the manual's order and names; a selector pair is one operand.

        wgmma takes A as registers `a` or as a descriptor `a_desc`, and may leave out no immediate; wmma.load and wmma.store may leave
        out `stride`.
        """
        names = tuple(FAMILIES[self.family].operands.split())
        if self.block_scale:
            names += ("scale_a", "selector_a", "scale_b", "selector_b")
        if self.family in ("wmma.load", "wmma.store"):
            return names[:-1], names
        if self.family in ("wgmma", "wgmma.sp"):
            scales, trans_a, trans_b = (), (), ()
            if self.a is not None and self.a.exponent_bits:
                scales = ("imm_scale_a", "imm_scale_b")
                if self.a.bits == 16:
                    trans_a, trans_b = ("imm_trans_a",), ("imm_trans_b",)
            rest = names[3:]
            return ("d", "a_desc", "b_desc", *rest, *scales, *trans_a, *trans_b), ("d", "a", "b_desc", *rest, *scales, *trans_b)
        return (names,)

    @property
    def operands(self) -> tuple[str, ...]:
        """Every operand that some form of the statement has."""
        return tuple(dict.fromkeys(name for form in self.forms for name in form))

    def matrix(self, operand: str) -> tuple[int, int]:
        """Rows and columns of the matrix behind an operand: "a" is M x K (sparse: the stored M x K/2), "b" is K x N, "c" and "d" are
        M x N (9.7.14.1), "scale_a" and "scale_b" as table 35 says; "e" or "sp_meta" is M x chunks of four bits (9.7.14.6.1). The movers
        have `num` matrices of M x N in "r", "d" or "a"; wmma's "r" is the matrix that is loaded or stored.

        **Raises:** `ValueError` if the instruction has no such operand, or the operand is no matrix.
        """
        if self.family in MOVERS:
            names = ("d", "a") if self.family == "movmatrix" else ("r",)
            matrices = {name: (self.m, self.n) for name in names}
        elif self.k:
            stored = self.k // 2 if self.sparse else self.k
            matrices = {"a": (self.m, stored), "b": (self.k, self.n), "c": (self.m, self.n), "d": (self.m, self.n)}
            matrices = {name: size for name, size in matrices.items() if getattr(self, name) is not None}
            if self.operand is not None:
                matrices["r"] = matrices[self.operand]
        else:
            matrices = {}
        if self.scale_vec is not None:
            matrices |= {"scale_a": (self.m, self.scale_vec), "scale_b": (self.scale_vec, self.n)}
        if self.sparse:
            matrices[self.metadata] = (self.m, self.k // self.chunk)
        if operand not in matrices:
            raise ValueError(f"{self}: operand {operand!r} is no matrix of this instruction; want one of {', '.join(matrices) or 'none'}")
        return matrices[operand]

    def container_bits(self, operand: str) -> int:
        """Bits that one element takes in a register: 8 for the narrow types under .kind::f8f6f4 and .kind::mxf8f6f4 (9.7.14.5.14), and
        after ldmatrix has unpacked them (9.7.14.5.15).

        **Raises:** `ValueError` if the operand holds no matrix elements.
        """
        name = self.operand if operand == "r" and self.operand is not None else operand
        element = getattr(self, name) if name in ("a", "b", "c", "d") else None
        if self.family in MOVERS and operand in ("r", "d", "a"):
            return 16 if self.element == "b16" else 8
        if element is None:
            raise ValueError(f"{self}: operand {operand!r} holds no matrix elements")
        return 8 if operand in ("a", "b") and self.kind in ("f8f6f4", "mxf8f6f4") else element.bits

    def copies(self, operand: str) -> int:
        """How often the warp holds each element. wmma's f16 A and B take eight registers whatever the shape (9.7.14.4.1)."""
        name = self.operand if operand == "r" and self.operand is not None else operand
        if not self.family.startswith("wmma") or name not in ("a", "b") or getattr(self, name).name != "f16":
            return 1
        rows, columns = self.matrix(name)
        return 8 * LANES * REGISTER_BITS // (rows * columns * 16)

    def registers(self, operand: str) -> int:
        """How many 32-bit registers a lane holds of an operand; an .f64 counts as two words.

        **Raises:** `ValueError` if the operand does not exist or is not in registers.
        """
        if operand in self.operands and operand in ("scale_a", "scale_b", "e", "sp_meta"):
            return 1
        rows, columns = self.matrix(operand)
        held = max(self.num, 1) * self.products * self.copies(operand)
        return held * rows * columns * self.container_bits(operand) // (LANES * REGISTER_BITS * self.warps)

    @property
    def default_stride(self) -> int:
        """wmma.load and wmma.store: the stride in elements when the operand is left out (9.7.14.4.2).

        **Raises:** `ValueError` for other instructions.
        """
        rows, columns = self.matrix("r") if self.operand else (0, 0)
        if not rows:
            raise ValueError(f"{self}: has no stride")
        return columns if self.layout == "row" else rows

    @property
    def chunk(self) -> int:
        """Elements along K that one 4-bit metadata field describes, half of which are stored; 0 if dense (9.7.14.6.1)."""
        if not self.sparse or self.a is None:
            return 0
        return {32: 2, 4: 8}.get(self.container_bits("a"), 4)

    @property
    def metadata(self) -> str:
        """The name of the operand that holds the sparsity metadata (9.7.14.6.3, 9.7.15.6.3); "" if dense."""
        return {"mma.sp": "e", "wgmma.sp": "sp_meta"}.get(self.family, "")

    @property
    def selectors(self) -> tuple[int, ...]:
        """Valid sparsity selectors: which lanes of a quad hold the metadata (9.7.14.6.1, 9.7.15.6.1); empty if dense."""
        if not self.sparse:
            return ()
        metadata_bits = 4 * self.m * (self.k // self.chunk)
        return tuple(range(LANES * REGISTER_BITS * self.warps // metadata_bits))

    @property
    def byte_ids(self) -> tuple[int, ...]:
        """Valid byte-id-a and byte-id-b (table 37); empty without .block_scale."""
        return {None: (), 1: (0, 1, 2, 3), 2: (0, 2), 4: (0,)}[self.scale_vec]

    @property
    def thread_ids_a(self) -> tuple[int, ...]:
        """Valid thread-id-a (table 37)."""
        return (0, 1) if self.block_scale else ()

    @property
    def thread_ids_b(self) -> tuple[int, ...]:
        """Valid thread-id-b (table 37)."""
        return (0, 1, 2, 3) if self.block_scale else ()


def head(op: Instruction) -> str:
    """The name before the qualifiers, such as "wmma.load.a"."""
    return FAMILIES[op.family].head.format(operand=op.operand)


def _types(op: Instruction) -> list[str]:
    if op.family in MOVERS:
        return [name for name in (op.element, op.src_fmt) if name]
    # wmma.mma leaves .atype and .btype out where they are .f16 (9.7.14.4.5)
    unsaid = ("a", "b") if op.family == "wmma.mma" and op.a is not None and op.a.name == "f16" else ()
    fields = (getattr(op, name) for name in FAMILIES[op.family].types.split() if name not in unsaid)
    return [element.name for element in fields if element is not None]


def _sparsity(op: Instruction) -> tuple[str | None]:
    return (("sp::ordered_metadata" if op.ordered else "sp") if op.sparse else None,)


# slot -> its qualifiers for an instruction; None is left out
WRITE: dict[str, Callable[[Instruction], Iterable[str | None]]] = {
    "sparsity": _sparsity,
    "sync": lambda op: ("sync",),
    "aligned": lambda op: ("aligned",),
    "shape": lambda op: (op.shape,),
    "layout": lambda op: (op.alayout, op.blayout, op.layout),
    "satfinite": lambda op: ("satfinite" if op.satfinite else None,),
    "kind": lambda op: (f"kind::{op.kind}" if op.kind else None,),
    "block_scale": lambda op: ("block_scale" if op.block_scale else None,),
    "scale_vec": lambda op: (f"scale_vec::{op.scale_vec}X" if op.scale_vec else None,),
    "type": _types,
    "bit_op": lambda op: (op.bit_op, "popc" if op.bit_op else None),
    "rounding": lambda op: (op.rounding,),
    "num": lambda op: (f"x{op.num}",),
    "trans": lambda op: ("trans" if op.trans else None,),
    "space": lambda op: (op.space,),
}


def _defaulted(op: Instruction) -> set[str]:
    """The slots whose qualifier is the default, so that it may be left out."""
    slots = {"rounding"} if op.rounding == DEFAULT_ROUNDING else set()
    return slots | ({"scale_vec"} if op.scale_vec is not None and op.scale_vec == DEFAULT_SCALE_VEC.get(op.kind or "") else set())


def slots(op: Instruction, *, defaults: bool = False) -> tuple[tuple[str, ...], ...]:
    """The qualifiers, slot by slot in the family's order; with `defaults`, also those that may be left out."""
    left_out = set() if defaults else _defaulted(op)
    order = FAMILIES[op.family].order.split()
    return tuple(() if slot in left_out else tuple(q for q in WRITE[slot](op) if q) for slot in order)


def spell(op: Instruction, *, defaults: bool = False) -> str:
    """The PTX spelling in the manual's order."""
    return ".".join([head(op), *(q for slot in slots(op, defaults=defaults) for q in slot)])


def spellings(op: Instruction) -> tuple[str, ...]:
    """The spellings of an instruction in the manual's order: defaults left out, then written where there are any."""
    return tuple(dict.fromkeys((spell(op), spell(op, defaults=True))))
