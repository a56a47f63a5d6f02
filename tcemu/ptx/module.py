"""A PTX file as values: what `tcemu.ptx.parse` returns. Nothing here knows what an instruction does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """Where something stands in the text; both count from 1."""

    line: int
    column: int


# ---- operands


@dataclass(frozen=True)
class Register:
    """A register by its name, as "%r1"; or a special one, as "%tid.x". component: of a vector register, as "x"; else None."""

    name: str
    component: str | None = None


@dataclass(frozen=True)
class Integer:
    """An integer constant. Its sign is kept; the instruction's type says how many bits are taken of it."""

    value: int


@dataclass(frozen=True)
class Float:
    """A floating-point constant, by its bits. width: 32 for 0f..., 64 for 0d... and for decimal ones."""

    bits: int
    width: int


@dataclass(frozen=True)
class Symbol:
    """The address of a variable, a function or a label, and what is added to it, in bytes."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """`[base+offset]`. base: a register, a symbol, or None for an absolute address; offset in bytes.

    A tensor copy's `[map, {x, y}]` has its coordinates.
    """

    base: Register | Symbol | None
    offset: int = 0
    coordinates: Vector | None = None


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True)
class Pair:
    """`p|q`: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True)
class Negated:
    """`!p`: a predicate, negated."""

    register: Register


@dataclass(frozen=True)
class Sink:
    """`_`: a destination that is not kept."""


Operand = Register | Integer | Float | Symbol | Address | Vector | Pair | Negated | Sink


# ---- statements


class Guard(NamedTuple):
    """`@p` or `@!p` before an instruction."""

    register: str
    negated: bool = False


@dataclass(frozen=True)
class Statement:
    """One instruction. opcode: all of it, as "add.rn.ftz.f32"; operands in the order of the text.

    Of `call`, the operands are the list of results, the name and the list of arguments: Vector, Symbol, Vector.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    place: Place = field(compare=False)

    @property
    def name(self) -> str:
        """The first part of the opcode, as "add"."""
        return self.opcode.partition(".")[0]

    @property
    def qualifiers(self) -> tuple[str, ...]:
        """The other parts, as ("rn", "ftz", "f32"). "shared::cta" is one part."""
        return tuple(self.opcode.split(".")[1:])


# ---- declarations


@dataclass(frozen=True)
class Variable:
    """A variable in a state space: .global, .const, .shared, .local or .param. Its address is a multiple of `alignment`, in bytes.

    kind: the type of an element, as "b8"; shape: elements along each axis, () for a single one; None within it: left open, as in
    `.extern .shared .b8 smem[]`. initial: the bytes that it begins with, None: undefined (for .global and .const: zeros).
    pointers: the places in `initial` that hold the address of another variable: byte, symbol.
    """

    name: str
    space: str
    kind: str
    shape: tuple[int | None, ...]
    alignment: int
    place: Place = field(compare=False)
    extern: bool = False
    initial: bytes | None = None
    pointers: tuple[tuple[int, Symbol], ...] = ()


@dataclass(frozen=True)
class Function:
    """An entry or a function. name: as in the text; parameters and results in their order.

    registers: the type of every register, by name: "pred", "b32", "v4.f32" for vector registers. variables: .shared, .local and .param
    ones that are declared within. labels: the index in `statements` before which each stands. Names that inner blocks `{ ... }` declare
    anew are told apart by a suffix "@1", "@2", ... directives: .maxntid, .reqntid, .minnctapersm and so on, with their numbers.
    branch_targets: label lists of `.branchtargets` by name.
    """

    name: str
    entry: bool
    parameters: tuple[Variable, ...]
    results: tuple[Variable, ...]
    registers: dict[str, str]
    variables: tuple[Variable, ...]
    statements: tuple[Statement, ...]
    labels: dict[str, int]
    place: Place = field(compare=False)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    defined: bool = True  # False: declared only


@dataclass(frozen=True)
class Module:
    """A PTX file. version: of the PTX ISA; target: the first name of `.target`, as "sm_90a"."""

    version: tuple[int, int]
    target: str
    address_size: int
    functions: dict[str, Function]
    variables: tuple[Variable, ...]  # of the file: .global, .const, .shared
    text: str = field(repr=False, compare=False, default="")

    @property
    def entries(self) -> dict[str, Function]:
        """The functions that a host can launch."""
        return {name: function for name, function in self.functions.items() if function.entry}
