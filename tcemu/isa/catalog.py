"""What is legal where: which instructions the targets of `tcemu.isa.targets` have, and from which PTX ISA version on.

A new target has every instruction whose row in `tcemu.isa.syntax` gives it to this target or to all later ones; what it computes is said
in `tcemu.architectures.rows`.
"""

from collections.abc import Iterator
from dataclasses import fields
from functools import cache, lru_cache
from re import fullmatch

from tcemu.errors import Unsupported
from tcemu.isa.diagnosis import difference
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import FAMILIES, Instruction, slots, spellings
from tcemu.isa.syntax import SINCE, Version, syntax_rows
from tcemu.isa.targets import TARGETS, named_target

LATEST: Version = (9, 1)  # the PTX ISA version of the manual that the rows were read from


def targets(op: str | Instruction | None = None, isa: str | None = None) -> tuple[str, ...]:
    """The names of all targets, such as "sm_90a", or of those that have `op` in PTX ISA version `isa` (the newest known when left out)."""
    return tuple(TARGETS) if op is None else tuple(target for target in TARGETS if is_supported(op, target, isa))


def instructions(target: str, family: str | None = None, isa: str | None = None) -> tuple[Instruction, ...]:
    """The instructions of a target, of one family ("mma", ...) or all, in PTX ISA version `isa` (the newest known when left out).

    **Raises:** `Unsupported` for an unknown target; `ValueError` for an unknown family or version.
    """
    version, target = _version(isa), named_target(target)
    families = tuple(FAMILIES)
    if family is not None and family not in families:
        raise ValueError(f"family {family!r}: want one of {', '.join(families)}")
    return _instructions(target, family, version)


@lru_cache
def _instructions(target: str, family: str | None, version: Version) -> tuple[Instruction, ...]:
    since = ((op, least(op, target)) for op in syntax_rows() if family in (None, op.family))
    return tuple(op for op, lowest in since if lowest is not None and lowest <= version)


def check(op: str | Instruction, target: str, isa: str | None = None) -> Instruction:
    """The instruction, if `target` has it in PTX ISA version `isa` (such as "8.7"; the newest known when left out).

    **Raises:** `Unsupported` if the spelling is no instruction, the target is unknown or lacks it, or it needs a newer ISA version.
    **Source:** the Target ISA Notes and PTX ISA Notes of each instruction, PTX ISA 9.7.14 and 9.7.15.
    """
    op, version, target = parse(op), _version(isa), named_target(target)
    since = least(op, target)
    if since is not None and since <= version:
        return op
    row = syntax_rows()[op]
    if since is not None:
        newer = f"needs PTX ISA {_dotted(since)} or newer; the version is {_dotted(version)}"
        raise Unsupported(f"{op} on {target} {newer}. PTX ISA {row.section}, PTX ISA Notes.")
    needs = " or ".join(dict.fromkeys(_target_words(wanted) for wanted, _ in row.needs))
    raise Unsupported(f"{op} needs {needs}; the target is {target}{_instead(op, target)}. PTX ISA {row.section}, Target ISA Notes.")


def is_supported(op: str | Instruction, target: str, isa: str | None = None) -> bool:
    """Whether `target` has the instruction in PTX ISA version `isa`. What is no instruction no target has.

    **Raises:** `Unsupported` for an unknown target; `ValueError` for an unknown version.
    """
    version, target = _version(isa), named_target(target)
    try:
        since = least(parse(op), target)
    except Unsupported:
        return False
    return since is not None and since <= version


def section(op: Instruction) -> str:
    """The section of the PTX ISA manual that describes an instruction."""
    return syntax_rows()[op].section


@lru_cache(maxsize=65536)
def least(op: Instruction, target: str) -> Version | None:
    """The lowest PTX ISA version in which a target has an instruction, as (major, minor); None if it never has.

    **Raises:** `Unsupported` for an unknown target, or if no row of the catalogue gives the instruction's fields.
    """
    target = named_target(target)
    row = syntax_rows().get(op)
    if row is None:
        raise Unsupported(f"{op}: no row of the catalogue gives these fields; make instructions with parse")
    versions = [version for wanted, version in row.needs if target in _meeting(wanted)]
    return max(_later(op, min(versions)), TARGETS[target]) if versions else None


def _later(op: Instruction, version: Version) -> Version:
    """A row's version, or that of a qualifier which came after it."""
    return max(version, *(SINCE.get(q, version) for slot in slots(op) for q in slot))


@cache
def _meeting(wanted: str) -> frozenset[str]:
    """The targets that meet one need: "sm_80+" (or later), "sm_120f+" (its family, f and a), "sm_90a" (itself)."""

    def number(target: str) -> int:
        return int(target.strip("smaf_+"))

    if not wanted.endswith("+"):
        return frozenset({wanted})
    later = (target for target in TARGETS if number(target) >= number(wanted))
    if "f" in wanted:
        return frozenset(t for t in later if number(t) // 10 == number(wanted) // 10 and t[-1] in "fa")
    return frozenset(later)


def _target_words(wanted: str) -> str:
    if not wanted.endswith("+"):
        return wanted
    return f"{wanted[:-1]} and its family" if "f" in wanted else f"{wanted[:-1]} or later"


def _instead(op: Instruction, target: str) -> str:
    """What the target has that is nearest: with the fewest slots changed."""

    def distance(other: Instruction) -> tuple[int, int]:
        changes = [difference(x, y) for x, y in zip(slots(op), slots(other), strict=True)]
        return sum(changed for changed, _ in changes), sum(letters for _, letters in changes)

    same = instructions(target, op.family)
    return f", whose nearest is {min(same, key=distance)}" if same else f", which has no {op.family} at all"


def _version(isa: str | None) -> Version:
    if isa is None:
        return LATEST
    match = fullmatch(r"(\d{1,3})\.(\d{1,3})", isa)
    if match is None:
        raise ValueError(f"isa: want a PTX ISA version such as '8.7', got {isa!r}")
    return int(match[1]), int(match[2])


def _dotted(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def spelled(target: str, family: str | None = None, isa: str | None = None) -> Iterator[str]:
    """The spellings of `instructions`, with optional qualifiers left out and written."""
    return (spelling for op in instructions(target, family, isa) for spelling in spellings(op))


def describe(op: str | Instruction) -> str:
    """What is known of an instruction without running it, as text for people: its fields, operands, registers and targets.

    **Raises:** `Unsupported` if it is no instruction.
    """
    op = parse(op)
    row = syntax_rows()[op]
    lines = [("family", f"{op.family}, PTX ISA {row.section}")]
    lines += [("also", spelling) for spelling in spellings(op) if spelling != str(op)]
    lines += [("fields", ", ".join(_fields(op)) or "none")]
    lines += [("operands", ", ".join(form) or "none") for form in op.forms]
    lines += [(name, text) for name in op.operands if (text := _operand(op, name))]
    lines += [("legal on", f"{_target_words(wanted)}, from PTX ISA {_dotted(_later(op, version))}") for wanted, version in row.needs]
    return "\n".join([str(op), *(f"  {name:<11}{text}" for name, text in lines)])


def _fields(op: Instruction) -> Iterator[str]:
    for field in fields(op):
        value = getattr(op, field.name)
        if field.compare and field.name != "family" and value not in (None, 0):
            yield field.name if value is True else f"{field.name} {value}"


def _operand(op: Instruction, name: str) -> str:
    """The matrix and registers of one operand, or its valid values; "" if there is nothing to say of it."""
    if name in ("f", "sp_sel"):
        return f"one of {', '.join(map(str, op.selectors))}"
    if name.startswith("selector"):
        threads = op.thread_ids_a if name == "selector_a" else op.thread_ids_b
        return f"byte-id one of {', '.join(map(str, op.byte_ids))}; thread-id one of {', '.join(map(str, threads))}"
    try:
        (rows, columns), count = op.matrix(name), op.registers(name)
    except ValueError:
        return ""
    if name in ("scale_a", "scale_b"):
        element = op.stype
    elif name in ("e", "sp_meta"):
        element = "4-bit fields"
    else:
        element = op.element or getattr(op, op.operand or name)
    times = op.num or (op.products if name in ("a", "b", "c", "d") else 1)
    many = f"{times} matrices of " if times > 1 else ""
    return f"{many}{rows} x {columns} {element}, {count} 32-bit register{'s' if count > 1 else ''} a lane"
