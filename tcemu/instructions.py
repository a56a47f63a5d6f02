"""`Instruction`: one tensor-core instruction as a value, its PTX spelling, and the facts that follow from its fields."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tcemu.formats import Format

LANES = 32

# the qualifiers of each instruction in the order of the manual's syntax block; the assembler takes any order between slots
ORDER = {
    "mma": "sync aligned shape layout satfinite kind block_scale scale_vec type bit_op popc rounding",  # 9.7.14.5.14
}
HEAD = {"mma": "mma"}
# the element types that a spelling names, in its order
TYPES = {"mma": "d a b c stype"}
# .scale_vec where the spelling leaves it out: 9.7.14.5.14; .kind::mxf4nvf4 has none
DEFAULT_SCALE_VEC = {"mxf4": 2, "mxf8f6f4": 1}
DEFAULT_ROUNDING = "rn"  # 9.7.14.5.14, 9.7.14.4.5


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One PTX instruction of sections 9.7.14 and 9.7.15, without its operands. Hashable, so it may be static under `jit`.

    `str(op)` is the canonical spelling: the manual's order, defaults left out. `tcemu.grammar.parse` makes one from any spelling.
    """

    family: str
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

    def __str__(self) -> str:
        return spell(self)

    @property
    def shape(self) -> str:
        return f"m{self.m}n{self.n}k{self.k}"

    @property
    def products(self) -> int:
        """How many M x N x K products one warp computes: four for m8n8k4 with f16 (9.7.14.5.1), one otherwise."""
        return 4 if self.shape == "m8n8k4" and self.a is not None and self.a.name == "f16" else 1

    @property
    def operands(self) -> tuple[str, ...]:
        """The operands in the order of the statement; each selector pair is one operand."""
        scales = ("scale_a", "selector_a", "scale_b", "selector_b") if self.block_scale else ()
        return ("d", "a", "b", "c", *scales)

    def matrix(self, operand: str) -> tuple[int, int]:
        """Rows and columns of the matrix behind an operand: A is M x K, B is K x N, C and D are M x N (9.7.14.1), scales as table 35 says.

        **Raises:** `ValueError` if the instruction has no such operand, or the operand is no matrix.
        """
        matrices = {"a": (self.m, self.k), "b": (self.k, self.n), "c": (self.m, self.n), "d": (self.m, self.n)}
        if self.scale_vec is not None:
            matrices |= {"scale_a": (self.m, self.scale_vec), "scale_b": (self.scale_vec, self.n)}
        if operand not in matrices:
            raise ValueError(f"{self}: operand {operand!r} is no matrix of this instruction, which has {', '.join(matrices)}")
        return matrices[operand]

    def container_bits(self, operand: str) -> int:
        """Bits that one element takes in a register: 8 for the narrow types under .kind::f8f6f4 and .kind::mxf8f6f4 (9.7.14.5.14)."""
        element = {"a": self.a, "b": self.b, "c": self.c, "d": self.d}.get(operand)
        if element is None:
            raise ValueError(f"{self}: operand {operand!r} has no element type")
        return 8 if operand in ("a", "b") and self.kind in ("f8f6f4", "mxf8f6f4") else element.bits

    def registers(self, operand: str) -> int:
        """How many 32-bit registers a lane holds of an operand; an .f64 counts as two words."""
        if operand in ("scale_a", "scale_b") and self.block_scale:
            return 1
        rows, columns = self.matrix(operand)
        return self.products * rows * columns * self.container_bits(operand) // (LANES * 32)

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


def _types(op: Instruction) -> list[str]:
    return [element.name for element in (getattr(op, name) for name in TYPES[op.family].split()) if element is not None]


# slot -> its qualifiers for an instruction; None is left out
WRITE: dict[str, Callable[[Instruction], Iterable[str | None]]] = {
    "sync": lambda op: ("sync",),
    "aligned": lambda op: ("aligned",),
    "shape": lambda op: (op.shape,),
    "layout": lambda op: (op.alayout, op.blayout),
    "satfinite": lambda op: ("satfinite" if op.satfinite else None,),
    "kind": lambda op: (f"kind::{op.kind}" if op.kind else None,),
    "block_scale": lambda op: ("block_scale" if op.block_scale else None,),
    "scale_vec": lambda op: (f"scale_vec::{op.scale_vec}X" if op.scale_vec else None,),
    "type": _types,
    "bit_op": lambda op: (op.bit_op,),
    "popc": lambda op: ("popc" if op.bit_op else None,),
    "rounding": lambda op: (op.rounding,),
}


def _defaulted(op: Instruction) -> set[str]:
    """The slots whose qualifier says what is so without it."""
    slots = {"rounding"} if op.rounding == DEFAULT_ROUNDING else set()
    return slots | ({"scale_vec"} if op.scale_vec is not None and op.scale_vec == DEFAULT_SCALE_VEC.get(op.kind or "") else set())


def slots(op: Instruction, *, defaults: bool = False) -> tuple[tuple[str, ...], ...]:
    """The qualifiers, slot by slot in the order of `ORDER`; with `defaults`, also those that may be left out."""
    left_out = set() if defaults else _defaulted(op)
    order = ORDER[HEAD[op.family]].split()
    return tuple(() if slot in left_out else tuple(q for q in WRITE[slot](op) if q) for slot in order)


def spell(op: Instruction, *, defaults: bool = False) -> str:
    """The PTX spelling in the manual's order."""
    return ".".join([HEAD[op.family], *(q for slot in slots(op, defaults=defaults) for q in slot)])


def spellings(op: Instruction) -> tuple[str, ...]:
    """The spellings of an instruction in the manual's order: defaults left out, then written where there are any."""
    return tuple(dict.fromkeys((spell(op), spell(op, defaults=True))))
