"""A PTX file as values: what `tcemu.ptx.parse` returns. Nothing here knows what an instruction does.

`str` of a value is its PTX. A module prints as text that parses to an equal module: scopes are gone, as their names are told apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Place(NamedTuple):
    """Where something stands in the text; both count from 1."""

    line: int
    column: int


# ---- operands


@dataclass(frozen=True)
class Register:
    """A register by its name, as "%r1"; or a special one, as "%tid.x". An element of a vector register is a register too, as "V.x"."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Integer:
    """An integer constant. Its sign is kept; the instruction's type says how many bits are taken of it."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Float:
    """A floating-point constant, by its bits. width: 32 for 0f..., 64 for 0d... and for decimal ones."""

    bits: int
    width: int

    def __str__(self) -> str:
        return f"0f{self.bits:08X}" if self.width == 32 else f"0d{self.bits:016X}"


@dataclass(frozen=True)
class Symbol:
    """The address of a variable, a function or a label, and what is added to it, in bytes."""

    name: str
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.name}+{self.offset}" if self.offset else self.name


@dataclass(frozen=True)
class Address:
    """`[base+offset]`. base: a register, a symbol without an offset of its own, or None for an absolute address; offset in bytes.

    A tensor copy's `[map, {x, y}]` has its coordinates.
    """

    base: Register | Symbol | None
    offset: int = 0
    coordinates: Vector | None = None

    def __str__(self) -> str:
        place = str(self.offset) if self.base is None else f"{self.base}+{self.offset}" if self.offset else str(self.base)
        return f"[{place}]" if self.coordinates is None else f"[{place}, {self.coordinates}]"


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`. A vector register that is named as a whole is the vector of its elements."""

    elements: tuple[Operand, ...]

    def __str__(self) -> str:
        return f"{{{', '.join(map(str, self.elements))}}}"


@dataclass(frozen=True)
class Pair:
    """`p|q`: two destinations."""

    first: Operand
    second: Operand

    def __str__(self) -> str:
        return f"{self.first}|{self.second}"


@dataclass(frozen=True)
class Negated:
    """`!p`: a predicate, negated."""

    register: Register

    def __str__(self) -> str:
        return f"!{self.register}"


@dataclass(frozen=True)
class Sink:
    """`_`: a destination that is not kept."""

    def __str__(self) -> str:
        return "_"


Operand = Register | Integer | Float | Symbol | Address | Vector | Pair | Negated | Sink


# ---- statements


class Guard(NamedTuple):
    """`@p` or `@!p` before an instruction."""

    register: str
    negated: bool = False

    def __str__(self) -> str:
        return f"@{'!' if self.negated else ''}{self.register}"


@dataclass(frozen=True)
class Statement:
    """One instruction. opcode: all of it, as "add.rn.ftz.f32"; operands in the order of the text; place: of the opcode.

    Of `call`, the operands are the list of results, the function (a symbol, or a register that holds its address), the list of arguments,
    and, of an indirect one, the name of the prototype or list: Vector, Symbol or Register, Vector, Symbol.
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

    def __str__(self) -> str:
        operands = self.operands
        if self.name == "call" and len(operands) > 2:
            lists = [f"({', '.join(map(str, operand.elements))})" if isinstance(operand, Vector) else str(operand) for operand in operands]
            operands = lists if isinstance(operands[0], Vector) and operands[0].elements else lists[1:]
        text = f"{self.opcode} {', '.join(map(str, operands))}".rstrip() + ";"
        return f"{self.guard} {text}" if self.guard else text


# ---- declarations


class Pointer(NamedTuple):
    """The address of a symbol within a variable's initial bytes: `width` bytes from `byte` on, little-endian, of the address >> `shift`.

    generic: the generic address, written `generic(x)`; else the one in the symbol's own state space.
    """

    byte: int
    symbol: Symbol
    generic: bool = False
    width: int = 8
    shift: int = 0

    def __str__(self) -> str:
        name, offset = self.symbol.name, f"+{self.symbol.offset}" if self.symbol.offset else ""
        text = f"generic({name}){offset}" if self.generic else f"{name}{offset}"
        return f"{0xFF << self.shift:#x}({text})" if self.width == 1 else text


@dataclass(frozen=True)
class Variable:
    """A variable in a state space: .global, .const, .shared, .local or .param; or a .reg that a function takes or gives.

    Its address is a multiple of `alignment`, in bytes. kind: the type of an element, as "b8"; shape: elements along each axis, () for a
    single one; None within it: left open, as in `.extern .shared .b8 smem[]`. The elements of a vector are its last axis.
    initial: the bytes that it begins with, the rest is zeros; None: undefined (for .global and .const: zeros). pointers: the places in
    `initial` that hold addresses.
    """

    name: str
    space: str
    kind: str
    shape: tuple[int | None, ...]
    alignment: int
    place: Place = field(compare=False)
    extern: bool = False
    initial: bytes | None = None
    pointers: tuple[Pointer, ...] = ()

    def __str__(self) -> str:
        if self.space == "reg":
            return f".reg .{self.kind} {self.name}"
        axes = "".join(f"[{'' if size is None else size}]" for size in self.shape)
        text = f".{self.space} .align {self.alignment} .{self.kind} {self.name}{axes}"
        text = f".extern {text}" if self.extern else text
        return text if self.initial is None else f"{text} = {self._initialiser()}"

    def _initialiser(self) -> str:
        """The initial bytes as numbers of the variable's type; nested as its axes are."""
        width = int(re.sub(r"\D", "", self.kind)) // 8
        form = {32: "0f{:08X}", 64: "0d{:016X}"}[width * 8] if self.kind.startswith("f") and width > 2 else "{}"
        pointers = {pointer.byte: str(pointer) for pointer in self.pointers}
        data = self.initial or b""
        texts = [
            pointers.get(at) or form.format(int.from_bytes(data[at : at + width], "little")) for at in range(0, len(data), width)
        ]  # a pointer is as wide as the type, or a byte of it is
        for size in reversed(self.shape[1:]):
            texts = [f"{{{', '.join(texts[at : at + (size or 1)])}}}" for at in range(0, len(texts), size or 1)]
        return f"{{{', '.join(texts)}}}" if self.shape else texts[0]


class Prototype(NamedTuple):
    """What `.callprototype` says of the functions that an indirect call may reach."""

    results: tuple[Variable, ...]
    parameters: tuple[Variable, ...]
    noreturn: bool = False


@dataclass(frozen=True)
class Function:
    """An entry or a function. name: as in the text; parameters and results in their order.

    registers: the type of every register, by name, as "pred" or "b32"; of a vector register, of its elements, as "V.x". variables: .shared,
    .local, .param and other ones that are declared within. labels: the index in `statements` before which each stands. Names that blocks
    `{ ... }` declare anew are told apart by a suffix: "p", "p$1", "p$2", ... directives: "maxntid", "reqntid", "minnctapersm" and so on,
    with their numbers. branch_targets, call_targets, prototypes: what `.branchtargets`, `.calltargets` and `.callprototype` say, by label.
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
    call_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)
    prototypes: dict[str, Prototype] = field(default_factory=dict)
    defined: bool = True  # False: declared only

    @property
    def declaration(self) -> str:
        """The head, as it is declared before it is defined."""
        results = f"({', '.join(map(str, self.results))}) " if self.results else ""
        head = f".visible .entry {self.name}" if self.entry else f"{'' if self.defined else '.extern '}.func {results}{self.name}"
        noreturn = "\n.noreturn" if "noreturn" in self.directives else ""
        return f"{head}({', '.join(map(str, self.parameters))}){noreturn}"

    def __str__(self) -> str:
        if not self.defined:
            return f"{self.declaration};"
        directives = [f".{name} {', '.join(map(str, numbers))}".rstrip() for name, numbers in self.directives.items() if name != "noreturn"]
        lines = [self.declaration, *directives, "{", *(f"    {line}" for line in self._declarations())]
        labels: dict[int, list[str]] = {}
        for name, at in self.labels.items():
            labels.setdefault(at, []).append(f"{name}:")
        for at, statement in enumerate(self.statements):
            lines += [*labels.get(at, ()), f"    {statement}"]
        return "\n".join([*lines, *labels.get(len(self.statements), ()), "}"])

    def _declarations(self) -> Iterator[str]:
        """The registers, the variables and the lists of targets."""
        yield from _registers({name: kind for name, kind in self.registers.items() if name not in {v.name for v in self._given()}})
        yield from (f"{variable};" for variable in self.variables)
        for name, prototype in self.prototypes.items():
            results, parameters = (f"({', '.join(map(str, given))})" if given else "" for given in prototype[:2])
            yield f"{name}: .callprototype {results} _ {parameters or '()'}{' .noreturn' if prototype.noreturn else ''};"
        for word, lists in (("branchtargets", self.branch_targets), ("calltargets", self.call_targets)):
            yield from (f"{name}: .{word} {', '.join(targets)};" for name, targets in lists.items())

    def _given(self) -> tuple[Variable, ...]:
        """What is declared in the head."""
        return self.parameters + self.results


def _registers(registers: dict[str, str]) -> Iterator[str]:
    """Declarations of registers: `%r<10>` where the numbers are whole, and one by one else."""
    groups: dict[tuple[str, str], dict[int, None]] = {}
    vectors: dict[str, int] = {}
    single: list[tuple[str, str]] = []
    for name, kind in registers.items():
        vector, dot, _ = name.partition(".")
        numbered = re.fullmatch(r"(.*?[^\d])(0|[1-9]\d*)", name)
        if dot:
            vectors[vector] = vectors.get(vector, 0) + 1
        elif numbered:
            groups.setdefault((numbered[1], kind), {})[int(numbered[2])] = None
        else:
            single.append((name, kind))
    for vector, elements in vectors.items():
        yield f".reg .v{elements} .{registers[f'{vector}.x']} {vector};"
    for (prefix, kind), numbers in groups.items():
        count = next(at for at in range(len(numbers) + 1) if at not in numbers)  # 0 to count - 1 are all there
        if count:
            yield f".reg .{kind} {prefix}<{count}>;"
        single += [(f"{prefix}{number}", kind) for number in numbers if number >= count]
    yield from (f".reg .{kind} {name};" for name, kind in single)


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
        return {name: function for name, function in self.functions.items() if function.entry and function.defined}

    def __str__(self) -> str:
        version = ".".join(map(str, self.version))
        head = [f".version {version}", f".target {self.target}", f".address_size {self.address_size}", ""]
        functions = [function for function in self.functions.values() if not (function.entry and function.defined)]
        head += [f"{function.declaration};" for function in functions]
        head += [f"{variable};" for variable in self.variables]
        return "\n".join([*head, *("\n" + str(function) for function in self.functions.values() if function.defined), ""])
