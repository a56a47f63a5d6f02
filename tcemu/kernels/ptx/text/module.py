"""A PTX file as values, as `tcemu.ptx.parse` returns it. Nothing here knows the meaning of an instruction.

`str` of a value is its PTX. A module prints as text that parses to an equal module. It has no scopes, since names are unique.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple


class Position(NamedTuple):
    """A position in the text; both numbers count from 1."""

    line: int
    column: int


# ---- operands


@dataclass(frozen=True)
class Register:
    """A register, as "%r1"; a special register, as "%tid.x"; or an element of a vector register, as "V.x"."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Integer:
    """An integer constant with its sign. The instruction's type decides how many of its bits are used."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Float:
    """A floating-point constant."""

    bits: int
    width: int  # 32 for 0f..., 64 for 0d... and for decimal constants

    def __str__(self) -> str:
        return f"0f{self.bits:08X}" if self.width == 32 else f"0d{self.bits:016X}"


@dataclass(frozen=True)
class Symbol:
    """The address of a variable, a function or a label, plus an offset in bytes."""

    name: str
    offset: int = 0

    def __str__(self) -> str:
        return f"{self.name}+{self.offset}" if self.offset else self.name


@dataclass(frozen=True)
class Address:
    """`[base+offset]`, or `[map, {x, y}]` of a tensor copy."""

    base: Register | Symbol | None  # a symbol has no offset of its own; None: an absolute address
    offset: int = 0  # bytes
    coordinates: Vector | None = None

    def __str__(self) -> str:
        place = str(self.offset) if self.base is None else f"{self.base}+{self.offset}" if self.offset else str(self.base)
        return f"[{place}]" if self.coordinates is None else f"[{place}, {self.coordinates}]"


@dataclass(frozen=True)
class Vector:
    """`{a, b, ...}`. The name of a vector register stands for the vector of its elements."""

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
    """A negated predicate, `!p`."""

    register: Register

    def __str__(self) -> str:
        return f"!{self.register}"


@dataclass(frozen=True)
class Sink:
    """A destination that is discarded, `_`."""

    def __str__(self) -> str:
        return "_"


@dataclass(frozen=True)
class Part:
    """A part of a register of a video instruction, as `%r1.b0` or `%r1.h10`, or a negated operand of `vmad`, `-%r1`."""

    register: Register
    selector: str = ""
    negated: bool = False

    def __str__(self) -> str:
        return f"{'-' * self.negated}{self.register}{'.' * bool(self.selector)}{self.selector}"


Operand = Register | Integer | Float | Symbol | Address | Vector | Pair | Negated | Sink | Part


def flatten_operands(operands: tuple[Operand, ...]) -> list[Operand]:
    """Return the operands with vectors and pairs replaced by their elements."""
    flat: list[Operand] = []
    for operand in operands:
        if isinstance(operand, Vector):
            flat += operand.elements
        elif isinstance(operand, Pair):
            flat += [operand.first, operand.second]
        else:
            flat.append(operand)
    return flat


def nested_operands(operands: tuple[Operand, ...]) -> Iterator[Operand]:
    """Yield the operands and all that are within them: elements, bases of addresses, coordinates, negated registers."""
    for operand in operands:
        yield operand
        inner = [getattr(operand, name, None) for name in ("base", "coordinates", "first", "second", "register")]
        yield from nested_operands((*getattr(operand, "elements", ()), *(part for part in inner if part is not None)))


# ---- statements


class Guard(NamedTuple):
    """`@p` or `@!p` before an instruction."""

    register: str
    negated: bool = False

    def __str__(self) -> str:
        return f"@{'!' if self.negated else ''}{self.register}"


@dataclass(frozen=True)
class Statement:
    """An instruction.

    A `call` has as operands the list of results (a Vector), the function (a Symbol, or a Register that holds its address), the list of
    arguments (a Vector) and, if it is indirect, the name of the prototype or list (a Symbol).
    """

    opcode: str  # in full, as "add.rn.ftz.f32"
    operands: tuple[Operand, ...]  # in the order of the text
    guard: Guard | None
    position: Position = field(compare=False)  # of the opcode
    source: str = field(compare=False, default="")  # line of the source by `.loc`: "kernel.cu:12", "help.cuh:7, inlined at kernel.cu:12"

    @property
    def line_text(self) -> str:
        """The line in words, as "line 44" or "line 44 (kernel.cu:12)"."""
        return f"line {self.position.line} ({self.source})" if self.source else f"line {self.position.line}"

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
    """The address of a symbol within a variable's initial bytes, little-endian."""

    byte: int  # offset of its first byte
    symbol: Symbol
    generic: bool = False  # the generic address, written `generic(x)`; else the one in the symbol's state space
    width: int = 8  # bytes
    shift: int = 0  # bits by which the address is shifted right

    def __str__(self) -> str:
        name, offset = self.symbol.name, f"+{self.symbol.offset}" if self.symbol.offset else ""
        text = f"generic({name}){offset}" if self.generic else f"{name}{offset}"
        return f"{0xFF << self.shift:#x}({text})" if self.width == 1 else text


@dataclass(frozen=True)
class Variable:
    """A variable in a state space, or a .reg parameter or result of a function."""

    name: str
    space: str  # "global", "const", "shared", "local", "param" or "reg"
    kind: str  # type of an element, as "b8"
    shape: tuple[int | None, ...]  # elements along each axis, the elements of a vector last; None: open, as in `.b8 smem[]`
    alignment: int  # of the address, in bytes
    position: Position = field(compare=False)
    extern: bool = False
    initial: bytes | None = None  # the first initial bytes, zeros follow; None: undefined, or zeros for .global and .const
    pointers: tuple[Pointer, ...] = ()  # addresses within `initial`

    def __str__(self) -> str:
        if self.space == "reg":
            return f".reg .{self.kind} {self.name}"
        axes = "".join(f"[{'' if size is None else size}]" for size in self.shape)
        text = f".{self.space} .align {self.alignment} .{self.kind} {self.name}{axes}"
        text = f".extern {text}" if self.extern else text
        return text if self.initial is None else f"{text} = {self._initialiser()}"

    def _initialiser(self) -> str:
        """Return the initial bytes as numbers of the variable's type, nested like its axes."""
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
    """A `.callprototype`: the form of the functions that an indirect call may reach."""

    results: tuple[Variable, ...]
    parameters: tuple[Variable, ...]
    noreturn: bool = False


@dataclass(frozen=True)
class Function:
    """An entry or a function. Names that blocks `{ ... }` declare again have a suffix: "p", "p$1", "p$2", ..."""

    name: str
    entry: bool
    parameters: tuple[Variable, ...]
    results: tuple[Variable, ...]
    registers: dict[str, str]  # types by name, as "pred" or "b32"; a vector register has its elements, as "V.x"
    variables: tuple[Variable, ...]  # declared in the body: .shared, .local, .param and others
    statements: tuple[Statement, ...]
    labels: dict[str, int]  # index of the statement that follows each label
    position: Position = field(compare=False)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)  # numbers of "maxntid", "reqntid", "minnctapersm", ...
    branch_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)  # `.branchtargets` by label
    call_targets: dict[str, tuple[str, ...]] = field(default_factory=dict)  # `.calltargets` by label
    prototypes: dict[str, Prototype] = field(default_factory=dict)  # `.callprototype` by label
    defined: bool = True  # False: declared only

    @property
    def declaration(self) -> str:
        """The head of the function, as a declaration."""
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
        """Yield the declarations of registers, variables and lists of targets."""
        head = {variable.name for variable in self.parameters + self.results}
        yield from _register_declarations({name: kind for name, kind in self.registers.items() if name not in head})
        yield from (f"{variable};" for variable in self.variables)
        for name, prototype in self.prototypes.items():
            results, parameters = (f"({', '.join(map(str, given))})" if given else "" for given in prototype[:2])
            yield f"{name}: .callprototype {results} _ {parameters or '()'}{' .noreturn' if prototype.noreturn else ''};"
        for word, lists in (("branchtargets", self.branch_targets), ("calltargets", self.call_targets)):
            yield from (f"{name}: .{word} {', '.join(targets)};" for name, targets in lists.items())


def _register_declarations(registers: dict[str, str]) -> Iterator[str]:
    """Yield declarations of registers: `%r<10>` for numbers without gaps, and single ones."""
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
        count = next(at for at in range(len(numbers) + 1) if at not in numbers)  # 0 to count - 1 are all present
        if count:
            yield f".reg .{kind} {prefix}<{count}>;"
        single += [(f"{prefix}{number}", kind) for number in numbers if number >= count]
    yield from (f".reg .{kind} {name};" for name, kind in single)


@dataclass(frozen=True)
class Module:
    """A PTX file."""

    version: tuple[int, int]  # of the PTX ISA
    target: str  # the first name of `.target`, as "sm_90a"
    address_size: int
    functions: dict[str, Function]
    variables: tuple[Variable, ...]  # declared in the file: .global, .const, .shared
    text: str = field(repr=False, compare=False, default="")
    name_expressions: dict[str, str] = field(default_factory=dict)  # names of functions by the C++ expressions that `compile` was given

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


# ---- special registers: all that PTX has, with their types (PTX ISA, section 10); `simt.special_registers` has the supported ones


_VECTOR_REGISTERS = ("tid", "ntid", "ctaid", "nctaid", "clusterid", "nclusterid", "cluster_ctaid", "cluster_nctaid")
_WORD_REGISTERS = (
    "laneid", "warpid", "nwarpid", "smid", "nsmid", "cluster_ctarank", "cluster_nctarank",
    *(f"lanemask_{which}" for which in ("eq", "le", "lt", "ge", "gt")),
    "clock", "clock_hi", "globaltimer_lo", "globaltimer_hi", *(f"pm{at}" for at in range(8)), *(f"envreg{at}" for at in range(32)),
    "total_smem_size", "aggr_smem_size", "dynamic_smem_size",
    *(f"reserved_smem_offset_{which}" for which in ("begin", "end", "cap", "0", "1")),
)  # fmt: skip
_LONG_REGISTERS = ("gridid", "clock64", "globaltimer", "current_graph_exec", *(f"pm{at}_64" for at in range(8)))

SPECIAL_REGISTERS = {
    **{f"%{name}.{axis}": "u32" for name in _VECTOR_REGISTERS for axis in "xyzw"},
    **{f"%{name}": "u32" for name in _WORD_REGISTERS},
    **{f"%{name}": "u64" for name in _LONG_REGISTERS},
    "%is_explicit_cluster": "pred",
}
