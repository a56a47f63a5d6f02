"""Classes of operands: what may stand at each position of a statement, and the error for what may not.

A class is written as a word, and the operands of a statement as words with spaces between them:

    u32       a value: a register of 32 bits that agrees with .u32, or a constant (pred: also !p)
    %u32      a register alone        #         an integer constant
    =u32      a destination: a register that the function declares; =u32_ also `_`; =u32|pred also a pair with a predicate,
              =u32|pred! such a pair alone
    []        an address; [,] one with coordinates
    <u32*4>   a vector of four values; <=u32*4> of four destinations; with one element also the element alone

`~` before a type allows registers that are wider, as cvt, ld and st do. The rules are those of ptxas
(tests/assembler/operand_answers.json.xz). Source: PTX ISA 6.2 to 6.4, 9.4.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from re import fullmatch
from typing import NamedTuple

from tcemu.base.errors import Unsupported
from tcemu.kernels.ptx.instruction_interface import Context, Operation
from tcemu.kernels.ptx.text.module import (
    SPECIAL_REGISTERS,
    Address,
    Float,
    Integer,
    Negated,
    Operand,
    Pair,
    Part,
    Register,
    Sink,
    Statement,
    Symbol,
    Vector,
)
from tcemu.kernels.ptx.text.ptx_types import KINDS

SECTION = "PTX ISA 9.4"


class OperandClass(NamedTuple):
    """The operands that a position takes."""

    role: str  # "value", "register", "destination", "constant", "address", "tensor" (an address with coordinates)
    kind: str = ""  # type of the value
    elements: int = 0  # of a vector; 0: no vector
    wider: bool = False  # registers may be wider than the type
    sink: bool = False  # `_` may stand for a destination
    pair: str = ""  # type of the second destination of a pair; "" if there is none
    needs_pair: bool = False  # a single destination is not enough
    special: bool = False  # special registers may be read
    addresses: bool = False  # addresses of variables may be read


@lru_cache(maxsize=4096)
def parse_classes(text: str) -> tuple[OperandClass, ...]:
    """Return the classes that words stand for."""
    return tuple(map(_parse_class, text.split()))


def _parse_class(word: str) -> OperandClass:
    plain = {"#": OperandClass("constant"), "[]": OperandClass("address"), "[,]": OperandClass("tensor")}.get(word)
    if plain is not None:
        return plain
    if vector := fullmatch(r"<(.*)\*(\d+)>", word):
        return _parse_class(vector[1])._replace(elements=int(vector[2]))
    found = fullmatch(r"(=|%|)(~?)(\w+?)(_?)(?:\|(\w+)(!?))?", word)
    if found is None or found[3] not in KINDS:
        raise ValueError(f"{word!r} is no class of operands")
    role = {"=": "destination", "%": "register", "": "value"}[found[1]]
    return OperandClass(role, found[3], wider=bool(found[2]), sink=bool(found[4]), pair=found[5] or "", needs_pair=bool(found[6]))


def check_operands(operands: Sequence[Operand], classes: Sequence[OperandClass], kinds: Mapping[str, str]) -> None:
    """Raise Unsupported for an operand of a wrong class, with its position, what came and what may stand there.

    Args:
        operands: The operands of a statement.
        classes: The classes of their positions.
        kinds: Types of the function's registers, by name.
    """
    if len(operands) != len(classes):
        expected = ", ".join(map(describe_class, classes)) or "none"
        raise Unsupported(f"it has {len(operands)} operands; expected {len(classes)}: {expected}. {SECTION}")
    for position, (operand, expected) in enumerate(zip(operands, classes, strict=True), 1):
        operand = operand.register if isinstance(operand, Part) else operand
        wrong = _wrong_part(operand, expected, kinds)
        if wrong is not None:
            raise Unsupported(
                f"operand {position} is {describe_operand(wrong, kinds)}; here the instruction takes {describe_class(expected)}. {SECTION}"
            )


ADDRESS_READERS = ("mov", "mapa", "getctarank", "cvta")  # instructions that read the address of a variable
WIDENING = ("cvt",)  # takes registers wider than its types, and fills them: PTX ISA 9.4.1, table "relaxed type-checking"


def check_operation(operation: Operation, statement: Statement, context: Context) -> None:
    """Raise Unsupported for an operand of a wrong class in a statement that maps values to values."""
    name, kinds = statement.name, context.function.registers
    results = operation.results[: len(operation.results) - operation.carry_out]
    sources = operation.sources[: len(operation.sources) - operation.carry_in]
    expected: list[OperandClass] = []
    if results:
        discards = name in ("setp", "lop3") or isinstance(statement.operands[0], Pair | Vector)
        first = OperandClass("destination", results[0], wider=name in WIDENING, sink=discards)
        if isinstance(statement.operands[0], Pair) and len(results) == 2:
            first = first._replace(pair=results[1])
        expected.append(first if len(results) == 1 or first.pair else first._replace(elements=len(results)))
    special = name == "mov" or (name == "cvt" and _is_integer(results[0]))
    reads = OperandClass("value", wider=name in WIDENING, special=special, addresses=name in ADDRESS_READERS)
    values = [OperandClass("constant") if i in operation.constants else reads._replace(kind=kind) for i, kind in enumerate(sources)]
    given = statement.operands[len(expected) :]
    if len(given) == 1 and isinstance(given[0], Vector) and len(values) > 1 and len(set(sources)) == 1:
        values = [values[0]._replace(elements=len(values))]
    check_operands(statement.operands, [*expected, *values], kinds)


def check_operand_lists(statement: Statement, context: Context, *lists: str) -> None:
    """Raise Unsupported unless the operands of a statement are those of one of several lists.

    Args:
        statement: The statement.
        context: Its context, with the function's registers.
        *lists: Lists of classes, as words.
    """
    classes = [parse_classes(text) for text in lists]
    possible = [each for each in classes if len(each) == len(statement.operands)]
    if not possible:
        counts = " or ".join(dict.fromkeys(str(len(each)) for each in classes))
        expected = "; or ".join(", ".join(map(describe_class, each)) or "no operand" for each in classes)
        raise Unsupported(f"it has {len(statement.operands)} operands; expected {counts}: {expected}. {SECTION}")
    for each in possible[:-1]:
        with suppress(Unsupported):
            return check_operands(statement.operands, each, context.function.registers)
    check_operands(statement.operands, possible[-1], context.function.registers)


def _wrong_part(operand: Operand, expected: OperandClass, kinds: Mapping[str, str]) -> Operand | None:
    """Return the operand, or the part of it, that does not belong to a class; None if all does."""
    if expected.role == "constant":
        return None if isinstance(operand, Integer) else operand
    if expected.role in ("address", "tensor"):
        right = isinstance(operand, Address) and (operand.coordinates is not None) == (expected.role == "tensor")
        if not right or not isinstance(operand, Address):
            return operand
        elements = () if operand.coordinates is None else operand.coordinates.elements
        return next((each for each in elements if not _fits(each, COORDINATE, kinds)), None)
    if expected.elements:
        if not isinstance(operand, Vector):
            return None if expected.elements == 1 and _fits(operand, expected, kinds) else operand
        if len(operand.elements) != expected.elements:
            return operand
        return next((each for each in operand.elements if not _fits(each, expected, kinds)), None)
    if expected.pair and isinstance(operand, Pair):
        halves = (operand.first, expected._replace(sink=True)), (operand.second, expected._replace(kind=expected.pair, sink=True))
        return next((half for half, want in halves if not _fits(half, want, kinds)), None)
    return None if _fits(operand, expected, kinds) and not expected.needs_pair else operand


def _fits(operand: Operand, expected: OperandClass, kinds: Mapping[str, str]) -> bool:
    """Return True if a single operand belongs to a class."""
    if isinstance(operand, Sink):
        return expected.role == "destination" and expected.sink
    if isinstance(operand, Register):
        if operand.name in kinds:
            return _agrees(kinds[operand.name], expected)
        return expected.role == "value" and expected.special and _reads_special(operand, expected)
    if expected.role != "value":
        return False
    kind = KINDS[expected.kind]
    if isinstance(operand, Negated):
        return kind.bits == 1 and kinds.get(operand.register.name) == "pred"
    if isinstance(operand, Integer):
        return kind.bits == 1 or _is_integer(expected.kind) or _is_bits(expected.kind)
    if isinstance(operand, Float):
        return expected.kind in ("f32", "f64") or expected.kind == f"b{operand.width}"
    if isinstance(operand, Symbol):
        number = (_is_integer(expected.kind) or _is_bits(expected.kind)) and kind.bits >= 16
        return number and (expected.addresses or operand.offset != 0)
    return False


COORDINATE = OperandClass("value", "s32")


def _reads_special(register: Register, expected: OperandClass) -> bool:
    """Return True if a special register can be read as a value of the expected type."""
    kind = SPECIAL_REGISTERS.get(register.name)
    if kind is None:
        return False
    have, want = KINDS[kind].bits, KINDS[expected.kind].bits
    return (have == want or want == 16 or (expected.wider and have > want)) and "f" not in expected.kind


def _agrees(declared: str, expected: OperandClass) -> bool:
    """Return True if a register's type agrees with an instruction's type: PTX ISA 9.4, and with `wider` 9.4.1."""
    have, want = KINDS.get(declared), KINDS[expected.kind]
    if have is None:
        return False
    if have.bits == 1 or want.bits == 1:
        return have.bits == want.bits
    if have.bits != want.bits and not (expected.wider and have.bits > want.bits):
        return False
    if _is_bits(declared) or _is_bits(expected.kind) or declared == expected.kind:
        return True
    return _is_integer(expected.kind) and _is_integer(declared)


def _is_integer(kind: str) -> bool:
    return fullmatch(r"[us]\d+", kind) is not None


def _is_bits(kind: str) -> bool:
    return fullmatch(r"b\d+", kind) is not None


# ---- words for messages


def describe_operand(operand: Operand, kinds: Mapping[str, str]) -> str:
    """Return an operand in words."""
    if isinstance(operand, Register):
        if operand.name in kinds:
            return f"{operand.name}, a register of .{kinds[operand.name]}"
        return f"{operand.name}, a special register, which mov and cvt alone read"
    what = {
        Integer: "an integer constant", Float: "a floating-point constant", Symbol: "the address of a variable or a label",
        Address: "an address", Vector: "a vector", Pair: "a pair of destinations", Negated: "a negated predicate",
        Sink: "a discarded destination", Part: "a part of a register",
    }[type(operand)]  # fmt: skip
    count = f" of {len(operand.elements)}" if isinstance(operand, Vector) else ""
    return f"{operand}, {what}{count}"


def describe_class(expected: OperandClass) -> str:
    """Return a class in words."""
    if expected.role == "constant":
        return "an integer constant"
    if expected.role in ("address", "tensor"):
        return "an address in brackets" + (", with coordinates in braces" if expected.role == "tensor" else "")
    vector = f"a vector of {expected.elements}: each " if expected.elements > 1 else ""
    return vector + " or ".join(_describe_choices(expected))


def _describe_choices(expected: OperandClass) -> Iterator[str]:
    kind = KINDS[expected.kind]
    more = " or more" if expected.wider else ""
    size = "a predicate" if kind.bits == 1 else f"a register of {kind.bits} bits{more} that agrees with .{expected.kind}"
    yield size + (" of the function" if expected.role == "destination" else "")
    if expected.role == "value" and (expected.kind in ("f32", "f64") or expected.kind[0] in "us" or fullmatch(r"b\d+|pred", expected.kind)):
        yield "a floating-point constant" if expected.kind in ("f32", "f64") else "an integer constant"
    if expected.pair:
        yield f"a pair {expected.kind}|{expected.pair}"
    if expected.sink:
        yield "_"
