"""The table of PTX statements outside the tensor-core families: syntax lines, and the targets and PTX ISA versions that each line needs.

It has every statement that `tcemu.ptx` runs; those of PTX 9.7.14 to 9.7.16 are in `tcemu.engine.isa.syntax_table`. A line lists the
qualifiers of an opcode behind its head: "rn|rz? ftz? type=f32|f64" matches ".f32", ".ftz.f32", ".rz.ftz.f32" and so on. "|" separates
choices, "?" marks an optional position, and a name before "=" is that by which `tcemu.ptx` reads the position.

Source: the syntax blocks, PTX ISA Notes and Target ISA Notes of the manual; every line was put to ptxas 12.9, 13.0 and 13.5
(tests/assembler/statement_answers.json.xz), those of PTX 9.2 to 13.5 by hand, since the record ends with PTX 9.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from re import compile
from typing import NamedTuple

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.families import Instruction, Slots
from tcemu.engine.isa.syntax_table import Needs, Version, since

ANY: Needs = (("sm_70+", (6, 0)),)


class Slot(NamedTuple):
    """A position for one qualifier."""

    name: str  # "" if no code reads it
    choices: tuple[str, ...]
    required: bool


class StatementRow(NamedTuple):
    """A line of syntax of one instruction name."""

    key: str  # name of the group of rows, as "add" or "add.cc"; its head where no other is given
    head: str  # first parts of the opcode, as "add" or "mbarrier.arrive.expect_tx"
    line: str  # the other qualifiers
    needs: Needs
    section: str  # of the manual
    until: Version | None = None  # the PTX ISA version that removed it

    @property
    def slots(self) -> tuple[Slot, ...]:
        return parse_line(self.line)


@dataclass(frozen=True, repr=False)
class PtxStatement(Instruction):
    """A statement outside the tensor-core families, as `tcemu.check` returns it."""

    spelling: str = ""

    def __str__(self) -> str:
        return self.spelling

    def __repr__(self) -> str:
        return f"PtxStatement({self.spelling!r})"

    @property
    def family(self) -> str:
        """The first part of the opcode, as "redux"."""
        return self.spelling.partition(".")[0]

    @property
    def slots(self) -> Slots:
        """The qualifiers, in one slot."""
        return {"qualifiers": tuple(self.spelling.split(".")[1:])}


Choices = dict[str, str | None]  # qualifier of a statement in each named slot; None if it is omitted


class StatementForm(NamedTuple):
    """A row with the qualifiers that an opcode has in it."""

    row: StatementRow
    qualifiers: tuple[str, ...]  # in the order of the line
    choices: Choices


TYPE_NAME = compile(r"pred|[bus]\d+(x\d+)?|b?f\d+(x\d+)?|tf32|u?e\dm\dx\d|s2f6x2")


@lru_cache(maxsize=4096)
def parse_line(line: str) -> tuple[Slot, ...]:
    slots = []
    for part in line.split():
        name, equals, choices = part.rpartition("=")
        slots.append(Slot(name if equals else "", tuple(choices.removesuffix("?").split("|")), not choices.endswith("?")))
    return tuple(slots)


def match_line(line: str, parts: tuple[str, ...]) -> list[str | None] | None:
    """Return the qualifier of each position, None where it is omitted; None if the parts do not match the line.

    Types must be in order; other parts may stand anywhere, as in ptxas.
    """
    rest, matched = list(parts), list[str | None]()
    types = [part for part in rest if TYPE_NAME.fullmatch(part)]
    for slot in parse_line(line):
        match = next((part for part in rest if part in slot.choices and (part not in types or part == types[0])), None)
        if match is None and slot.required:
            return None
        if match is not None:
            rest.remove(match)
            if types and match == types[0]:
                del types[0]
        matched.append(match)
    return None if rest else matched


def match_row(row: StatementRow, opcode: str) -> StatementForm | None:
    """Return the form of an opcode in a row, or None if it does not match."""
    if not (opcode == row.head or opcode.startswith(row.head + ".")):
        return None
    matched = match_line(row.line, tuple(opcode[len(row.head) + 1 :].split(".")) if opcode != row.head else ())
    if matched is None:
        return None
    named = {slot.name: part for slot, part in zip(row.slots, matched, strict=True) if slot.name}
    return StatementForm(row, tuple(part for part in matched if part is not None), named)


@lru_cache(maxsize=65536)
def find_forms(opcode: str) -> tuple[StatementForm, ...]:
    """Return the forms of an opcode in the table. There are several where lines of different needs overlap."""
    rows = rows_by_name().get(opcode.partition(".")[0], ())
    return tuple(form for row in rows if (form := match_row(row, opcode)) is not None)


def require_form(opcode: str) -> StatementForm:
    """Return the first form of an opcode. Raises Unsupported, with the forms of its name, if it has no form."""
    forms = find_forms(opcode)
    if not forms:
        raise Unsupported(describe_forms(opcode))
    return forms[0]


def describe_forms(opcode: str) -> str:
    """Return the message for an opcode that no line has: what is wrong by the line that has most of its qualifiers, and that line."""
    parts = opcode.split(".")
    rows = [row for row in rows_by_name().get(parts[0], ()) if parts[: row.head.count(".") + 1] == row.head.split(".")]
    if not rows:
        heads = dict.fromkeys(row.head for row in rows_by_name().get(parts[0], ()))
        section = rows_by_name()[parts[0]][0].section
        return f"{opcode!r} is not supported; {parts[0]!r} has the forms {', '.join(heads)}. PTX ISA {section}"
    row, rest, missing = max((_compare_line(row, parts) for row in rows), key=_likeness)
    known = dict.fromkeys(choice for each in rows for slot in each.slots for choice in slot.choices)
    unknown = [part for part in rest if part not in known]
    if missing:
        wrong = f"it needs {' or '.join(missing[0].choices)}" + (f" in place of {', '.join(rest)}" if rest else "")
    elif unknown:
        wrong = f"it has no qualifier {', '.join(unknown)}; known are {', '.join(known) or 'none'}"
    else:
        wrong = f"{', '.join(rest)} cannot be combined with the other qualifiers, or its place is another"
    form = row.head + "".join(f".({'|'.join(slot.choices)}){'' if slot.required else '?'}" for slot in row.slots)
    note = "where | separates choices and ? marks optional parts"
    return f"{opcode!r} is not supported: {wrong}. The nearest form is {form}, {note}. PTX ISA {row.section}"


def _likeness(compared: tuple[StatementRow, list[str], list[Slot]]) -> tuple[int, ...]:
    """Return a key that is greatest for the line that an opcode probably means: few differences, and those in late positions."""
    row, rest, missing = compared
    return -len(rest) - len(missing), len(row.head), min((row.slots.index(slot) - len(row.slots) for slot in missing), default=0)


def _compare_line(row: StatementRow, parts: list[str]) -> tuple[StatementRow, list[str], list[Slot]]:
    """Return the row, the qualifiers of an opcode that its line does not have, and the required positions that the opcode does not fill."""
    rest, missing = parts[row.head.count(".") + 1 :], []
    for slot in row.slots:
        match = next((part for part in rest if part in slot.choices), None)
        if match is not None:
            rest.remove(match)
        elif slot.required:
            missing.append(slot)
    return row, rest, missing


def form_needs(form: StatementForm) -> tuple[Needs, ...]:
    """Return what an opcode needs: what its line needs, and what each of its qualifiers needs that came later."""
    later = QUALIFIER_NEEDS.get(form.row.head.partition(".")[0], {})
    return (form.row.needs, *(later[part] for part in form.qualifiers if part in later))


# ---- types and qualifiers that several lines have

INTEGERS, WORDS, BITS = "u16|u32|u64|s16|s32|s64", "u32|u64|s32|s64", "b16|b32|b64"
REGISTERS = f"{BITS}|{INTEGERS}|f32|f64"
ROUNDINGS = "rn|rz|rm|rp"
BYTES = "b8|u8|s8"
ORDERED, BIT_RELATIONS = "eq|ne|lt|le|gt|ge", "eq|ne"
UNSIGNED = f"{ORDERED}|lo|ls|hi|hs"
FLOAT_RELATIONS = f"{ORDERED}|equ|neu|ltu|leu|gtu|geu|num|nan"
BOOLEAN = "and|or|xor?"
COMPARED = (  # relations and types of the operands; the types of f16 and bf16 are separate
    (BIT_RELATIONS, BITS), (UNSIGNED, "u16|u32|u64"), (ORDERED, "s16|s32|s64"),
)  # fmt: skip
SCALED = "scaled::n2::ue8m0"
FP8_PAIRS, FP6_PAIRS, QUADS = "e4m3x2|e5m2x2", "e2m3x2|e3m2x2", "e4m3x4|e5m2x4|e2m1x4|e2m3x4|e3m2x4"
S80, S90 = since(80, 7, 0), since(90, 7, 8)
S100 = since(100, 8, 6)

Entry = str | tuple[str, Needs]


def _scalar() -> Iterator[StatementRow]:
    def rows(section: str, **groups: Entry | list[Entry]) -> Iterator[StatementRow]:
        for key, lines in groups.items():
            for line in lines if isinstance(lines, list) else [lines]:
                text, needs = line if isinstance(line, tuple) else (line, ANY)
                yield StatementRow(key.rstrip("_").replace("__", "."), key.partition("__")[0].rstrip("_"), text, needs, section)

    yield from rows(
        "9.7.1",
        add=[INTEGERS, ("u16x2|s16x2", since(90, 8, 0)), "sat s32"],
        sub=[INTEGERS, "sat s32"],
        mul=[f"lo|hi {INTEGERS}", "wide u16|u32|s16|s32"],
        mad=[f"lo|hi {INTEGERS}", "wide u16|u32|s16|s32", "hi sat s32"],
        mul24="lo|hi u32|s32",
        mad24=["lo|hi u32|s32", "hi sat s32"],
        sad=INTEGERS,
        div=INTEGERS,
        rem=INTEGERS,
        abs="s16|s32|s64",
        neg="s16|s32|s64",
        min=[INTEGERS, ("u16x2|s16x2", since(90, 8, 0)), ("relu s16x2|s32", since(90, 8, 0))],
        max=[INTEGERS, ("u16x2|s16x2", since(90, 8, 0)), ("relu s16x2|s32", since(90, 8, 0))],
        popc="b32|b64",
        clz="b32|b64",
        bfind=f"shiftamt? {WORDS}",
        fns="b32",
        brev="b32|b64",
        bfe=WORDS,
        bfi="b32|b64",
        szext=("clamp|wrap u32|s32", since(70, 7, 6)),
        bmsk=("clamp|wrap b32", since(70, 7, 6)),
        dp4a="u32|s32 u32|s32",
        dp2a="lo|hi u32|s32 u32|s32",
    )
    yield from rows(
        "9.7.2",
        addc=f"cc? {WORDS}",
        subc=f"cc? {WORDS}",
        madc=f"lo|hi cc? {WORDS}",
        add__cc=f"cc {WORDS}",
        sub__cc=f"cc {WORDS}",
        mad__cc=f"lo|hi cc {WORDS}",
    )
    half = [f"{FLOAT_RELATIONS} {BOOLEAN} ftz? f16|f16x2", (f"{FLOAT_RELATIONS} {BOOLEAN} bf16|bf16x2", S90)]
    whole = [f"{FLOAT_RELATIONS} {BOOLEAN} ftz? f32", f"{FLOAT_RELATIONS} {BOOLEAN} f64"]
    yield from rows("9.7.6", setp=[*(f"{relations} {BOOLEAN} {types}" for relations, types in COMPARED), *whole])
    yield from rows("9.7.7", setp=half)
    yield from rows(
        "9.7.6",
        set=[
            *(f"{relations} {BOOLEAN} u32|s32|f32 {types}" for relations, types in COMPARED),
            *(f"{relations} {BOOLEAN} f16 {types}" for relations, types in COMPARED),
            *((f"{relations} {BOOLEAN} bf16 {types}", S90) for relations, types in COMPARED),
            f"{FLOAT_RELATIONS} {BOOLEAN} ftz? u32|s32|f32|f16 f32",
            f"{FLOAT_RELATIONS} {BOOLEAN} u32|s32|f32|f16 f64",
            (f"{FLOAT_RELATIONS} {BOOLEAN} bf16 f32|f64|f16", S90),
        ],
        selp=REGISTERS,
        slct=[f"{REGISTERS} s32", f"ftz? {REGISTERS} f32"],
    )
    yield from rows(
        "9.7.7",
        set=[
            f"{FLOAT_RELATIONS} {BOOLEAN} ftz? f16 f16",
            (f"{FLOAT_RELATIONS} {BOOLEAN} ftz? u16|s16|u32|s32 f16", since(70, 6, 5)),
            (f"{FLOAT_RELATIONS} {BOOLEAN} u16|s16|u32|s32|bf16 bf16", S90),
            f"{FLOAT_RELATIONS} {BOOLEAN} ftz? f16x2 f16x2",
            (f"{FLOAT_RELATIONS} {BOOLEAN} ftz? u32|s32 f16x2", since(70, 6, 5)),
            (f"{FLOAT_RELATIONS} {BOOLEAN} bf16x2|u32|s32 bf16x2", S90),
        ],
    )
    logic = f"pred|{BITS}"
    yield from rows(
        "9.7.8",
        and_=logic,
        or_=logic,
        xor=logic,
        not_=logic,
        cnot=BITS,
        lop3=["b32", ("or|and b32", since(70, 8, 2))],
        shf="l|r clamp|wrap b32",
        shl=BITS,
        shr=f"{BITS}|{INTEGERS}",
    )
    yield from rows("9.7.9", mov=f"pred|{REGISTERS}", mov__wide=("b128", since(70, 8, 3)), prmt="b32 f4e|b4e|rc8|ecl|ecr|rc16?")
    f32x2 = (f"{ROUNDINGS}? ftz? f32x2", S100)
    sums: list[Entry] = [
        f"{ROUNDINGS}? ftz? sat? f32", f"{ROUNDINGS}? f64", "rn? ftz? sat? f16|f16x2", ("rn? bf16|bf16x2", S90), f32x2,
    ]  # fmt: skip
    mixed = (f"{ROUNDINGS}? sat? f32 f16|bf16", S100)
    quotients: list[Entry] = [f"{ROUNDINGS} ftz? f32", f"{ROUNDINGS} f64"]
    signs: list[Entry] = ["ftz? f32", "f64", ("bf16|bf16x2", S80)]
    extrema: list[Entry] = [
        "ftz? f32", ("ftz? NaN f32", S80), ("ftz? NaN? xorsign abs f32", since(86, 7, 2)), "f64",
        ("ftz? NaN? f16|f16x2", S80), ("ftz? NaN? xorsign abs f16|f16x2", since(86, 7, 2)),
        ("NaN? bf16|bf16x2", S80), ("NaN? xorsign abs bf16|bf16x2", since(86, 7, 2)),
    ]  # fmt: skip
    yield from rows(
        "9.7.3",
        add__float=sums,
        sub__float=sums,
        mul__float=sums,
        fma=[
            f"{ROUNDINGS} ftz? sat? f32",
            f"{ROUNDINGS} f64",
            (f"{ROUNDINGS} ftz? f32x2", S100),
            "rn ftz? sat? f16|f16x2",
            ("rn ftz? relu f16|f16x2", S80),
            ("rn relu? bf16|bf16x2", S80),
            ("rn oob relu? f16|f16x2|bf16|bf16x2", since(90, 8, 1)),
        ],
        mad__float=[f"{ROUNDINGS} ftz? sat? f32", f"{ROUNDINGS} f64"],
        div__float=quotients,
        div__full="full ftz? f32",
        div__approx="approx ftz? f32",
        rcp=quotients,
        rcp__approx="approx ftz? f32",
        rcp__upper="approx ftz f64",
        sqrt=quotients,
        sqrt__approx="approx ftz? f32",
        rsqrt=["approx ftz? f32", "approx f64"],
        rsqrt__upper=("approx ftz f64", since(70, 6, 0)),
        sin="approx ftz? f32",
        cos="approx ftz? f32",
        lg2="approx ftz? f32",
        ex2=["approx ftz? f32", ("approx f16|f16x2", since(75, 7, 0)), ("approx ftz bf16|bf16x2", S90)],
        tanh=[("approx f32|f16|f16x2", since(75, 7, 0)), ("approx bf16|bf16x2", S90)],
        abs__float=[*signs, ("ftz? f16|f16x2", since(70, 6, 5))],
        neg__float=[*signs, "ftz? f16|f16x2"],
        min__float=extrema,
        max__float=extrema,
        testp="finite|infinite|number|notanumber|normal|subnormal f32|f64",
        copysign="f32|f64",
    )
    yield from rows("9.7.3", min__three=("ftz? NaN? abs? f32", since(100, 8, 8)), max__three=("ftz? NaN? abs? f32", since(100, 8, 8)))
    yield from rows("9.7.5", add__mixed=mixed, sub__mixed=mixed, fma__mixed=(f"{ROUNDINGS} sat? f32 f16|bf16", S100))
    yield from _conversions()


def _video() -> Iterator[StatementRow]:
    word, second, comparison = "u32|s32", "op=add|min|max?", "cmp=eq|ne|lt|le|gt|ge"
    lines = {
        **dict.fromkeys(("vadd", "vsub", "vabsdiff", "vmin", "vmax"), (f"{word} {word} {word} sat? {second}",)),
        **dict.fromkeys(("vshl", "vshr"), (f"{word} {word} u32 sat? mode=clamp|wrap {second}",)),
        "vmad": (f"{word} {word} {word} po? sat? scale=shr7|shr15?",),
        "vset": (f"{word} {word} {comparison} {second}",),
    }
    for count in (2, 4):
        names = (f"{name}{count}" for name in ("vadd", "vsub", "vavrg", "vabsdiff", "vmin", "vmax"))
        lines |= dict.fromkeys(names, (f"{word} {word} {word} sat?", f"{word} {word} {word} add"))
        lines[f"vset{count}"] = (f"{word} {word} {comparison} add?",)
    for name, several in lines.items():
        yield from (StatementRow(name, name, line, ANY, "9.7.18") for line in several)


def _holds(kind: str, other: str) -> bool:
    """Return True if an integer type has every value of another."""
    size, other_size = int(kind[1:]), int(other[1:])
    return size >= other_size if kind[0] == other[0] else kind[0] == "s" and size > other_size


def _conversions() -> Iterator[StatementRow]:
    def row(key: str, line: str, needs: Needs = ANY) -> StatementRow:
        return StatementRow(key, "cvt", line, needs, "9.7.9.21")

    whole = "u8|u16|u32|u64|s8|s16|s32|s64"
    integer_roundings = "rni|rzi|rmi|rpi"
    yield row("cvt", f"{whole} {whole}")
    for kind in whole.split("|"):
        wider = [other for other in whole.split("|") if not _holds(kind, other)]
        if wider:  # .sat is legal only where the source exceeds the destination
            yield row("cvt", f"sat {kind} {'|'.join(wider)}")
    yield row("cvt", f"{integer_roundings} ftz? sat? {whole} f32")
    yield row("cvt", f"{integer_roundings} sat? {whole} f16|f64")
    yield row("cvt", f"{integer_roundings} {whole} bf16", S90)
    yield row("cvt", f"{ROUNDINGS} sat? f16|f32|f64 {whole}")
    yield row("cvt", f"{ROUNDINGS} ftz sat? f32 {whole}")
    yield row("cvt", f"{ROUNDINGS} bf16 {whole}", S90)
    yield row("cvt", f"{integer_roundings}? ftz? sat? f32 f32")
    yield row("cvt", f"{integer_roundings}? sat? f16 f16")
    yield row("cvt", f"{integer_roundings}? sat? f64 f64")
    yield row("cvt", f"{integer_roundings}? bf16 bf16", S90)
    yield row("cvt", "ftz? sat? f32 f16")
    yield row("cvt", "sat? f64 f16")
    yield row("cvt", "ftz? sat? f64 f32")
    yield row("cvt", f"{ROUNDINGS} ftz? sat? f16 f32")
    yield row("cvt", f"{ROUNDINGS} ftz? sat? f32 f64")
    yield row("cvt", f"{ROUNDINGS} sat? f16 f64")
    yield row("cvt", "f32 bf16", since(80, 7, 1))
    yield row("cvt", "ftz f32 bf16", S90)
    yield row("cvt", "f64 bf16", S90)
    yield row("cvt", f"{ROUNDINGS}? bf16 f16", S90)
    yield row("cvt", f"{ROUNDINGS}? f16 bf16", S90)
    yield row("cvt", f"{ROUNDINGS} bf16 f64", S90)
    yield row("cvt", "rm|rp ftz? bf16 f32", S80)
    yield row("cvt.finite", "rn|rz satfinite f16 f32", since(70, 8, 1))
    yield row("cvt.finite", "rn|rz relu? f16|bf16 f32", S80)
    yield row("cvt.finite", "rn|rz relu? satfinite f16|bf16 f32", since(80, 8, 1))
    yield row("cvt.pair", "rn|rz relu? f16x2|bf16x2 f32", S80)
    yield row("cvt.pair", "rn|rz relu? satfinite f16x2|bf16x2 f32", since(80, 8, 1))
    yield row("cvt.tf32", "rna tf32 f32", S80)
    yield row("cvt.tf32", "rna satfinite tf32 f32", since(80, 8, 1))
    yield row("cvt.tf32", "rn|rz relu? tf32 f32", S90)
    yield row("cvt.tf32", "rn|rz satfinite relu? tf32 f32", since(100, 8, 6))
    yield row("cvt.narrow", f"rn satfinite relu? {FP8_PAIRS} f32|f16x2", FP8)
    yield row("cvt.narrow", f"rn satfinite relu? e2m1x2|{FP6_PAIRS} f32", FAMILIES_86)
    yield row("cvt.narrow", "rn satfinite relu? e2m1x2 f16x2", FAMILIES_90)
    yield row("cvt.narrow", f"rn satfinite relu? {FP6_PAIRS} f16x2", FAMILIES_91)
    yield row("cvt.narrow", f"rn satfinite relu? {FP8_PAIRS}|{FP6_PAIRS}|e2m1x2 bf16x2", FAMILIES_91)
    yield row("cvt.fixed", f"rn satfinite relu? {SCALED}? s2f6x2 f32|bf16x2", FIXED_POINT)
    yield row("cvt.scale", "rz|rp satfinite? ue8m0x2 f32|bf16x2", FAMILIES_86)
    yield row("cvt.stochastic", "rs relu? satfinite? f16x2|bf16x2 f32", STOCHASTIC)
    yield row("cvt.stochastic", f"rs relu? satfinite {QUADS} f32", STOCHASTIC)
    yield row("cvt.wide", f"rn relu? f16x2 {FP8_PAIRS}", FP8)
    yield row("cvt.wide", f"rn relu? f16x2 e2m1x2|{FP6_PAIRS}", FAMILIES_86)
    yield row("cvt.wide", "rn bf16x2 ue8m0x2", FAMILIES_86)
    yield row("cvt.wide", f"rn satfinite? relu? {SCALED}? bf16x2 {FP8_PAIRS}|{FP6_PAIRS}|e2m1x2", FAMILIES_92)
    yield row("cvt.wide", f"rn satfinite? relu? {SCALED}? bf16x2 s2f6x2", FIXED_POINT)
    pack = (("u16|s16 s32", 72), ("u8|s8 s32 b32", 72), ("u4|s4|u2|s2 s32 b32", 75))
    for types, target in pack:
        yield StatementRow("cvt.pack", "cvt", f"pack sat {types}", since(target, 6, 5), "9.7.9.22")


# what the f and a targets of the generations with tcgen05 or block scales have
FAMILIES_86: Needs = (("sm_100a", (8, 6)), ("sm_120a", (8, 7)), *((f"sm_{number}f+", (8, 8)) for number in (100, 110, 120)))
FAMILIES_90: Needs = tuple((target, max(version, (9, 0))) for target, version in FAMILIES_86)
FAMILIES_91, FAMILIES_92 = (tuple((target, version) for target, _ in FAMILIES_86) for version in ((9, 1), (9, 2)))
FIXED_POINT: Needs = (*((f"sm_{number}a", (9, 1)) for number in (100, 103, 110, 120, 121)), ("sm_107a", (9, 4)))
FP8: Needs = (("sm_89", (8, 1)), ("sm_90+", (7, 8)))
STOCHASTIC: Needs = (("sm_100a", (8, 7)), ("sm_103a", (8, 8)), ("sm_107a", (9, 4)))


def _collectives() -> Iterator[StatementRow]:
    def row(head: str, line: str, needs: Needs = ANY) -> StatementRow:
        return StatementRow(head, head, line, needs, "9.7.9.6" if head == "shfl" else "9.7.13")

    for name, line in (("shfl", "mode=up|down|bfly|idx b32"), ("vote", "mode=all|any|uni type=pred"), ("vote", "mode=ballot type=b32")):
        yield row(name, f"sync=sync {line}")
        yield row(name, f"sync=sync? {line}")._replace(until=(6, 4))
    yield row("match", "mode=any|all sync type=b32|b64")
    yield row("redux", "sync mode=add|min|max type=u32|s32", S80)
    yield row("redux", "sync mode=and|or|xor type=b32", S80)
    yield row("redux", "sync mode=min|max abs? NaN? type=f32", (("sm_100a", (8, 6)), ("sm_100f+", (8, 8))))
    yield row("activemask", "b32", since(70, 6, 2))
    yield row("elect", "sync", since(90, 8, 0))


def _control() -> Iterator[StatementRow]:
    def row(head: str, line: str = "", needs: Needs = ANY, section: str = "9.7.12") -> StatementRow:
        return StatementRow(head, head, line, needs, section)

    for name, line in (("bra", "uni?"), ("brx", "idx uni?"), ("call", "uni?"), ("ret", "uni?"), ("exit", "")):
        yield row(name, line)
    yield row("trap", section="9.7.19")
    yield row("brkpt", section="9.7.19")
    yield row("pmevent", "mask?", section="9.7.19")
    yield row("nanosleep", "u32", since(70, 6, 2), "9.7.19")
    for name, extra in (("bar", "cta?"), ("barrier", "cta? aligned?")):
        extra_head = extra.split()[0]
        tail = extra.removeprefix(extra_head).strip()
        yield row(name, f"{extra_head} sync|arrive {tail}".strip(), section="9.7.13.1")
        yield row(name, f"{extra_head} red popc {tail} u32".replace("  ", " "), section="9.7.13.1")
        yield row(name, f"{extra_head} red and|or {tail} pred".replace("  ", " "), section="9.7.13.1")
    yield row("bar.warp", "sync", section="9.7.13.2")
    yield row("barrier.cluster.arrive", "release|relaxed? aligned?", S90, "9.7.13.4")
    yield row("barrier.cluster.wait", "acquire? aligned?", S90, "9.7.13.4")


GLOBAL = "space=global?"  # or generic addresses
SHARED = "shared|shared::cta|shared::cluster"
LOAD_SPACES = f"space=const|local|param|param::entry|param::func|{SHARED}"
STORE_SPACES = f"space=local|param|param::func|{SHARED}"
LEVEL_1 = "L1::evict_normal|L1::evict_unchanged|L1::evict_first|L1::evict_last|L1::no_allocate?"
LEVEL_2 = "L2::evict_normal|L2::evict_first|L2::evict_last?"
HINT, PREFETCH = "hint=L2::cache_hint?", "L2::64B|L2::128B|L2::256B?"
SCOPES = "cta|cluster|gpu|sys"
NARROW_TYPES = "type=b8|u8|s8|b16|u16|s16|b32|u32|s32|f32"
ELEMENT_TYPES = f"{NARROW_TYPES}|b64|u64|s64|f64"
VECTORS: tuple[tuple[str, Needs, str], ...] = (  # and the scopes of ordered accesses
    (f"vector=v2? {ELEMENT_TYPES}", ANY, SCOPES), (f"vector=v4 {NARROW_TYPES}", ANY, SCOPES),
    ("type=b128", since(70, 8, 3), "cta|cluster|gpu"), ("type=b128", since(70, 8, 4), "sys"),
)  # fmt: skip
WIDE_VECTORS = ("vector=v4 type=b64|u64|s64|f64", "vector=v8 type=b32|u32|s32|f32")
WIDE = since(100, 8, 8)


def _memory() -> Iterator[StatementRow]:
    def row(head: str, line: str, needs: Needs = ANY, section: str = "9.7.9.8") -> StatementRow:
        return StatementRow(head, head, line, needs, section)

    for vector, needs, scopes in VECTORS:
        yield row("ld", f"weak? {GLOBAL} {LEVEL_1} {HINT} {PREFETCH} {vector}", needs)
        yield row("ld", f"weak? {GLOBAL} ca|cg|cs|lu|cv {HINT} {PREFETCH} {vector}", needs)
        yield row("ld", f"weak? {LOAD_SPACES} ca|cg|cs|lu|cv? {vector}", needs)
        yield row("ld", f"volatile {GLOBAL} {PREFETCH} {vector}", needs)
        yield row("ld", f"volatile space={SHARED} {vector}", needs)
        yield row("ld", f"volatile space=local {vector}", since(70, 9, 1))
        yield row("ld", f"relaxed|acquire {scopes} {GLOBAL} {LEVEL_1} {HINT} {PREFETCH} {vector}", needs)
        yield row("ld", f"relaxed|acquire {scopes} space={SHARED} {vector}", needs)
        yield row("ld", f"space=global ca|cg|cs? nc {HINT} {PREFETCH} {vector}", needs, "9.7.9.9")
        yield row("ld", f"space=global nc {LEVEL_1} {HINT} {PREFETCH} {vector}", needs, "9.7.9.9")
        yield row("ldu", f"{GLOBAL} {vector}", needs, "9.7.9.10")
        yield row("st", f"weak? {GLOBAL} {LEVEL_1} {HINT} {vector}", needs, "9.7.9.11")
        yield row("st", f"weak? {GLOBAL} wb|cg|cs|wt {HINT} {vector}", needs, "9.7.9.11")
        yield row("st", f"weak? {STORE_SPACES} wb|cg|cs|wt? {vector}", needs, "9.7.9.11")
        yield row("st", f"volatile {GLOBAL} {vector}", needs, "9.7.9.11")
        yield row("st", f"volatile space={SHARED} {vector}", needs, "9.7.9.11")
        yield row("st", f"volatile space=local {vector}", since(70, 9, 1), "9.7.9.11")
        yield row("st", f"relaxed|release {scopes} {GLOBAL} {LEVEL_1} {HINT} {vector}", needs, "9.7.9.11")
        yield row("st", f"relaxed|release {scopes} space={SHARED} {vector}", needs, "9.7.9.11")
    yield row("ld", f"mmio relaxed sys space=global? {ELEMENT_TYPES}")
    yield row("st", f"mmio relaxed sys space=global? {ELEMENT_TYPES}", section="9.7.9.11")
    for vector in WIDE_VECTORS:
        yield row("ld", f"weak? space=global {LEVEL_1} {LEVEL_2} {HINT} {PREFETCH} {vector}", WIDE)
        yield row("ld", f"relaxed|acquire {SCOPES} space=global {LEVEL_1} {LEVEL_2} {HINT} {PREFETCH} {vector}", WIDE)
        yield row("ld", f"space=global nc {LEVEL_1} {LEVEL_2} {HINT} {PREFETCH} {vector}", WIDE, section="9.7.9.9")
        yield row("st", f"weak? space=global {LEVEL_1} {LEVEL_2} {HINT} {vector}", WIDE, section="9.7.9.11")
        yield row("st", f"relaxed|release {SCOPES} space=global {LEVEL_1} {LEVEL_2} {HINT} {vector}", WIDE, section="9.7.9.11")
    yield from _atomics()
    space = "global|const|local|shared|shared::cta|shared::cluster|param|param::entry"
    yield row("cvta", f"to? space={space} type=u64", section="9.7.9.20")
    yield row("isspacep", f"space={space}", section="9.7.9.19")
    yield row("mapa", "shared::cluster? type=u32|u64", S90, "9.7.9.23")
    yield row("getctarank", "shared::cluster? type=u32|u64", S90, "9.7.9.24")
    yield row("prefetch", "global|local? L1|L2", section="9.7.9.15")
    yield row("prefetch", "global L2::evict_last|L2::evict_normal", since(80, 7, 4), "9.7.9.15")
    yield row("prefetch", "const|param? tensormap", since(90, 8, 0), "9.7.9.15")
    yield row("prefetchu", "L1", section="9.7.9.15")
    yield row("applypriority", "global? L2::evict_normal", since(80, 7, 4), "9.7.9.16")
    yield row("discard", "global? L2", since(80, 7, 4), "9.7.9.17")
    fence = lambda line, needs=ANY, name="fence": row(name, line, needs, "9.7.13")
    yield fence("cta|gl|sys", name="membar")
    yield fence("proxy alias", since(70, 7, 5), "membar")
    yield fence(f"sc|acq_rel? {SCOPES}")
    for order, space in (("acquire", "cluster"), ("release", "cta")):
        yield fence(f"{order} sync_restrict::shared::{space} cluster", since(90, 8, 6))
        yield fence(f"proxy async::generic {order} sync_restrict::shared::{space} cluster", since(90, 8, 6))
    yield fence("mbarrier_init release cluster", since(90, 8, 0))
    yield fence("proxy alias", since(70, 7, 5))
    yield fence("proxy async", since(90, 8, 0))
    yield fence("proxy async global|shared::cta|shared::cluster", since(90, 8, 0))
    yield fence(f"proxy tensormap::generic acquire|release {SCOPES}", since(90, 8, 3))
    for name, type_ in (("alloca", "type=u32|u64"), ("stacksave", "type=u32|u64"), ("stackrestore", "type=u32|u64")):
        yield row(name, type_, since(70, 7, 3), "9.7.17")


def _atomics() -> Iterator[StatementRow]:
    orders = f"relaxed|acquire|release|acq_rel? {SCOPES}?"
    everywhere = (f"{orders} {GLOBAL} {HINT}", f"{orders} space={SHARED}")
    vectors = (f"{orders} space=global {HINT}",)
    lines: list[tuple[str, Needs, tuple[str, ...]]] = [
        ("operation=and|or|xor type=b32|b64", ANY, everywhere),
        ("operation=add type=u32|s32|u64|f32|f64", ANY, everywhere),
        ("operation=inc|dec type=u32", ANY, everywhere),
        ("operation=min|max type=u32|s32|u64|s64", ANY, everywhere),
        ("operation=add rounding=noftz type=f16", since(70, 6, 3), everywhere),
        ("operation=add rounding=noftz type=f16x2", since(70, 6, 2), everywhere),
        ("operation=add rounding=noftz type=bf16|bf16x2", S90, everywhere),
        ("operation=exch type=b32|b64", ANY, everywhere),
        ("operation=cas type=b32|b64", ANY, (f"{orders} {GLOBAL}", everywhere[1])),
        ("operation=cas type=b16", since(70, 6, 3), (f"{orders} {GLOBAL}", everywhere[1])),
        ("operation=add vector=v2|v4 type=f32", since(90, 8, 1), vectors),
        ("operation=add|min|max rounding=noftz vector=v2|v4|v8 type=f16|bf16", since(90, 8, 1), vectors),
        ("operation=add|min|max rounding=noftz vector=v2|v4 type=f16x2|bf16x2", since(90, 8, 1), vectors),
    ]
    for scopes, needs in (("cta|cluster|gpu?", since(90, 8, 3)), ("sys", since(90, 8, 4))):
        on_global, on_shared = (f"relaxed|acquire|release|acq_rel? {scopes} {space}" for space in (GLOBAL, f"space={SHARED}"))
        lines.append(("operation=exch type=b128", needs, (f"{on_global} {HINT}", on_shared)))
        lines.append(("operation=cas type=b128", needs, (on_global, on_shared)))
    for line, needs, heads in lines:
        for head in heads:
            yield StatementRow("atom", "atom", f"{head} {line}", needs, "9.7.13.5")
            if "exch" not in line and "cas" not in line:
                yield StatementRow("red", "red", f"{head.replace(orders, f'relaxed|release? {SCOPES}?')} {line}", needs, "9.7.13.6")


def _asynchronous() -> Iterator[StatementRow]:
    def row(head: str, line: str, needs: Needs, section: str) -> StatementRow:
        return StatementRow(head, head, line, needs, section)

    shared, anywhere = "space=shared|shared::cta?", f"space={SHARED}?"
    barrier = "9.7.13.15"
    yield row("mbarrier.init", f"{shared} type=b64", S80, barrier)
    yield row("mbarrier.inval", f"{shared} type=b64", S80, barrier)
    scoped, relaxed = "scope=cta|cluster", since(90, 8, 6)
    for name in ("expect_tx", "complete_tx"):
        yield row(f"mbarrier.{name}", f"{anywhere} type=b64", since(90, 8, 0), barrier)
        yield row(f"mbarrier.{name}", f"sem=relaxed {scoped} {anywhere} type=b64", since(90, 8, 0), barrier)
    for name in ("arrive", "arrive_drop"):
        for head, least in ((f"mbarrier.{name}", S80), (f"mbarrier.{name}.expect_tx", since(90, 8, 0))):
            yield row(head, f"{anywhere} type=b64", least, barrier)
            yield row(head, f"sem=release {scoped} {anywhere} type=b64", least, barrier)
            yield row(head, f"sem=relaxed {scoped} {anywhere} type=b64", relaxed, barrier)
        yield row(f"mbarrier.{name}.noComplete", f"{shared} type=b64", S80, barrier)
        yield row(f"mbarrier.{name}.noComplete", f"sem=release scope=cta {shared} type=b64", S80, barrier)
    for name, least in (("test_wait", S80), ("try_wait", S90)):
        yield row(f"mbarrier.{name}", f"parity=parity? {shared} type=b64", least, barrier)
        yield row(f"mbarrier.{name}", f"parity=parity? sem=acquire {scoped} {shared} type=b64", least, barrier)
        yield row(f"mbarrier.{name}", f"parity=parity? sem=relaxed {scoped} {shared} type=b64", relaxed, barrier)
    yield row("mbarrier.pending_count", "type=b64", S80, barrier)

    hint = "hint=L2::cache_hint?"
    copy = "9.7.9.25.3"
    yield row("cp.async", f"cache=ca|cg to=shared|shared::cta from=global {hint} prefetch=L2::64B|L2::128B|L2::256B?", S80, copy)
    yield row("cp.async.mbarrier.arrive", f"noinc=noinc? {shared} type=b64", S80, "9.7.13.15.17")
    for name in ("commit_group", "wait_group", "wait_all"):
        yield row(f"cp.async.{name}", "", S80, copy)
    bulk = "9.7.9.25.4"
    bytes_ = "completion=mbarrier::complete_tx::bytes"
    yield row("cp.async.bulk", f"to=shared::cluster from=global {bytes_} multicast=multicast::cluster? {hint}", since(90, 8, 0), bulk)
    yield row("cp.async.bulk", f"to=shared::cta from=global {bytes_} {hint}", since(90, 8, 6), bulk)
    yield row("cp.async.bulk", f"to=shared::cluster from=shared::cta {bytes_}", since(90, 8, 0), bulk)
    yield row("cp.async.bulk", f"to=global from=shared::cta completion=bulk_group {hint}", since(90, 8, 0), bulk)
    yield row("cp.async.bulk", f"to=global from=shared::cta completion=bulk_group {hint} mask=cp_mask", S100, bulk)
    yield row("cp.async.bulk.commit_group", "", since(90, 8, 0), bulk)
    yield row("cp.async.bulk.wait_group", "read=read?", since(90, 8, 0), bulk)
    yield row("cp.async.bulk.prefetch", f"level=L2 from=global {hint}", since(90, 8, 0), bulk)
    reduce = "9.7.9.25.4.2"
    to_global = f"to=global from=shared::cta completion=bulk_group {hint}"
    for line in (
        "operation=add type=u32|s32|u64|f32|f64", "operation=min|max type=u32|s32|u64|s64|f16|bf16", "operation=inc|dec type=u32",
        "operation=and|or|xor type=b32|b64", "operation=add rounding=noftz type=f16|bf16",
    ):  # fmt: skip
        yield row("cp.reduce.async.bulk", f"{to_global} {line}", since(90, 8, 0), reduce)
    to_cluster = f"to=shared::cluster from=shared::cta {bytes_}"
    for line in (
        "operation=add type=u32|s32|u64", "operation=min|max type=u32|s32", "operation=inc|dec type=u32", "operation=and|or|xor type=b32",
    ):  # fmt: skip
        yield row("cp.reduce.async.bulk", f"{to_cluster} {line}", since(90, 8, 0), reduce)
    yield from _tensor_copies()

    store = f"sem=weak? space=shared::cluster? {bytes_}"
    yield row("st.async", f"{store} vector=v2? type=b32|b64|u32|u64|s32|s64|f32|f64", since(90, 8, 1), "9.7.9.12")
    yield row("st.async", f"{store} vector=v4 type=b32|u32|s32|f32", since(90, 8, 1), "9.7.9.12")
    yield row("st.bulk", "sem=weak? space=shared::cta?", S100, "9.7.9.13")
    for line in ("inc|dec type=u32", "add type=u32|s32|u64|s64", "min|max type=u32|s32", "and|or|xor type=b32"):
        reduction = f"sem=relaxed scope=cluster space=shared::cluster? {bytes_} operation={line}"
        yield row("red.async", reduction, since(90, 8, 1), "9.7.13.8")

    launch = "clusterlaunchcontrol"
    request = f"async=async space=shared::cta? {bytes_}"
    yield row(f"{launch}.try_cancel", f"{request} type=b128", S100, "9.7.13.17")
    yield row(f"{launch}.try_cancel", f"{request} multicast=multicast::cluster::all type=b128", FAMILIES_86, "9.7.13.17")
    yield row(f"{launch}.query_cancel.is_canceled", "type=pred response=b128", S100, "9.7.13.17")
    yield row(f"{launch}.query_cancel.get_first_ctaid", "vector=v4 type=b32 response=b128", S100, "9.7.13.17")
    for axis in "xyz":
        yield row(f"{launch}.query_cancel.get_first_ctaid::{axis}", "type=b32 response=b128", S100, "9.7.13.17")

    for name in ("launch_dependents", "wait"):
        yield row(f"griddepcontrol.{name}", "", S90, "9.7.13.16")
    yield row("setmaxnreg", "action=inc|dec sync=sync aligned=aligned type=u32", EXACT, "9.7.19.5")
    priorities = "L2::evict_last|L2::evict_normal|L2::evict_first|L2::evict_unchanged"
    policy = f"first={priorities} second=L2::evict_first|L2::evict_unchanged? type=b64"
    yield row("createpolicy.fractional", policy, since(80, 7, 4), "9.7.9.18")
    yield row("createpolicy.range", f"space=global? {policy}", since(80, 7, 4), "9.7.9.18")
    yield row("createpolicy.cvt", "level=L2 type=b64", since(80, 7, 4), "9.7.9.18")

    words = "rank|box_dim|global_dim|element_stride|elemtype|interleave_layout|swizzle_mode|fill_mode"
    fields = (("global_address|global_stride", "b64", EXACT_83), (words, "b32", EXACT_83), ("swizzle_atomicity", "b32", EXACT_86))
    for names, width, needs in fields:
        line = f"mode=tile field={names} space=global|shared::cta? object=b1024 type={width}"
        yield row("tensormap.replace", line, needs, "9.7.9.28")
    line = f"to=global from=shared::cta proxy=tensormap::generic order=release scope={SCOPES} sync=sync aligned=aligned"
    yield row("tensormap.cp_fenceproxy", line, since(90, 8, 3), "9.7.13.17")


EXACT: Needs = (("sm_90a", (8, 0)), ("sm_100a", (8, 6)), ("sm_120a", (8, 7)), *((f"sm_{number}f+", (8, 8)) for number in (100, 110, 120)))
EXACT_83: Needs = tuple((target, max(version, (8, 3))) for target, version in EXACT)
EXACT_86: Needs = EXACT[1:]


def _tensor_copies() -> Iterator[StatementRow]:
    section, reduction = "9.7.9.25.5", "9.7.9.25.5.3"
    s90, hint = since(90, 8, 0), "hint=L2::cache_hint?"
    tcgen05: Needs = (("sm_100a", (8, 6)), ("sm_100f+", (8, 8)), ("sm_110f+", (8, 8)))
    tiles, boxes = "dim=1d|2d|3d|4d|5d", "dim=3d|4d|5d"
    bytes_ = "completion=mbarrier::complete_tx::bytes"

    def row(head: str, line: str, needs: Needs, section: str = section) -> StatementRow:
        return StatementRow(head, head, line, needs, section)

    for dims, mode, least in (
        (tiles, "mode=tile?", s90), (boxes, "mode=im2col", s90), ("dim=2d", "mode=tile::gather4", tcgen05),
    ):  # fmt: skip
        load = f"{dims} to=shared::cluster from=global {mode} {bytes_} multicast=multicast::cluster?"
        yield row("cp.async.bulk.tensor", f"{load} {hint}", least)
        yield row("cp.async.bulk.tensor", f"{load} group=cta_group::1|cta_group::2 {hint}", tcgen05)
        block = S100 if least is tcgen05 else since(90, 8, 6)
        local = f"{dims} to=shared::cta from=global {mode} {bytes_}"
        yield row("cp.async.bulk.tensor", f"{local} {hint}", block)
        yield row("cp.async.bulk.tensor", f"{local} group=cta_group::1|cta_group::2 {hint}", tcgen05)
        yield row("cp.async.bulk.prefetch.tensor", f"{dims} level=L2 from=global {mode} {hint}", least)
    yield row("cp.async.bulk.prefetch.tensor", f"{boxes} level=L2 from=global mode=im2col::w|im2col::w::128 {hint}", tcgen05)
    for dims, mode, least in (
        (tiles, "mode=tile?", s90), (boxes, "mode=im2col_no_offs", s90), ("dim=2d", "mode=tile::scatter4", tcgen05),
    ):  # fmt: skip
        yield row("cp.async.bulk.tensor", f"{dims} to=global from=shared::cta {mode} completion=bulk_group {hint}", least)
        line = f"{dims} to=global from=shared::cta operation=add|min|max|inc|dec|and|or|xor {mode} completion=bulk_group {hint}"
        yield row("cp.reduce.async.bulk.tensor", line, least, reduction)


# qualifiers that came later than their statements, by the name of the statement
_CACHE_CONTROL: dict[str, Needs] = {
    **dict.fromkeys(("L1::evict_normal", "L1::evict_unchanged", "L1::evict_first", "L1::evict_last", "L1::no_allocate"), since(70, 7, 4)),
    "L2::cache_hint": since(80, 7, 4),
    "L2::64B": since(75, 7, 4), "L2::128B": since(75, 7, 4), "L2::256B": since(80, 7, 4),
    "mmio": since(70, 8, 2),
    "cluster": since(90, 7, 8), "shared::cluster": since(90, 7, 8), "shared::cta": since(70, 7, 8),
    "param::entry": since(70, 8, 3), "param::func": since(70, 8, 3),
}  # fmt: skip
QUALIFIER_NEEDS: dict[str, dict[str, Needs]] = {
    **dict.fromkeys(("ld", "ldu", "st", "atom", "red"), _CACHE_CONTROL),
    **dict.fromkeys(("cvta", "isspacep"), _CACHE_CONTROL | {"param": since(70, 7, 7)}),
    "bar": {"cta": since(70, 7, 8)},
    "barrier": {"cta": since(70, 7, 8), **dict.fromkeys(("release", "relaxed", "acquire"), since(90, 8, 0))},
    "mbarrier": {
        "shared::cta": since(80, 7, 8), "shared::cluster": since(90, 8, 0), "cluster": since(90, 8, 0), "parity": since(80, 7, 1),
        "release": since(80, 8, 0), "acquire": since(80, 8, 0),
    },
    "cp": {
        "shared::cta": since(80, 7, 8), "L2::cache_hint": since(80, 7, 4),
        **dict.fromkeys(("L2::64B", "L2::128B", "L2::256B"), since(80, 7, 4)),
    },
    "fence": {"cluster": since(90, 7, 8)},
}  # fmt: skip


@lru_cache(maxsize=4096)
def statement_rows() -> tuple[StatementRow, ...]:
    return (*_scalar(), *_video(), *_collectives(), *_control(), *_memory(), *_asynchronous())


@lru_cache(maxsize=4096)
def rows_by_name() -> dict[str, tuple[StatementRow, ...]]:
    """Return the rows by the first part of their opcodes."""
    names: dict[str, list[StatementRow]] = {}
    for row in statement_rows():
        names.setdefault(row.head.partition(".")[0], []).append(row)
    return {name: tuple(rows) for name, rows in names.items()}
