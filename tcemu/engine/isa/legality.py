"""Legality: which instructions the targets of `tcemu.isa.targets` have, and since which PTX ISA version.

A new target has every instruction whose row in `tcemu.engine.isa.syntax_table` names this target or, with a "+", an earlier one. The
arithmetic of the instructions is in `tcemu.engine.architectures.model_rows`.
"""

from collections.abc import Iterator
from dataclasses import fields
from functools import cache, lru_cache
from re import compile, fullmatch

from tcemu.base.errors import Unsupported
from tcemu.engine.isa.families import FAMILIES, BlockScaling, Instruction, MatrixMultiply, Mover, Sparsity, qualifier_slots, spellings
from tcemu.engine.isa.grammar import parse, shorten_text, slot_distance
from tcemu.engine.isa.other_makers import OTHER_TARGETS, UNIT_FAMILIES, Unit, check_unit, other_units, short_named_unit
from tcemu.engine.isa.short_names import ALIASES, canonical_short_name, instructions_by_name
from tcemu.engine.isa.statement_table import PtxStatement, describe_forms, find_forms, form_needs, rows_by_name
from tcemu.engine.isa.syntax_table import QUALIFIER_SINCE, Needs, Version, statement_needs, syntax_row, syntax_rows
from tcemu.engine.isa.targets import TARGETS, library_unit, parse_target_name, resolve_target
from tcemu.engine.isa.tcgen05 import Tcgen05Product
from tcemu.engine.isa.tcgen05_kinds import KINDS

LATEST: Version = max(row.since for row in TARGETS.values())  # the newest PTX ISA version that a row names


def targets(op: str | Instruction | None = None, isa: str | None = None) -> tuple[str, ...]:
    """Return the names of the targets that have an instruction, or of all NVIDIA's targets.

    Args:
        op: PTX spelling, short name or `Instruction`; None for all targets.
        isa: PTX ISA version, such as "8.7"; None is the newest known.

    Returns:
        The targets, such as "sm_90a", from old to new. The tuple is empty for a string that is no instruction.

    Raises:
        ValueError: The version is malformed.

    Example:
        >>> import tcemu
        >>> tcemu.targets("e4m3")[:3]
        ('sm_89', 'sm_90', 'sm_90a')
    """
    if op is None:
        return tuple(TARGETS)
    version = _parse_version(isa)
    if statement := find_statement(op):
        return tuple(target for target in TARGETS if _has_statement(statement.spelling, target, version))
    try:
        if isinstance(unit := parse(op), Unit):
            return unit.targets
        since = {target: min_version(resolve_op(op, target), target) for target in TARGETS}
    except Unsupported:
        return ()
    return tuple(target for target, lowest in since.items() if lowest is not None and lowest <= version)


def instructions(target: str, family: str | None = None, isa: str | None = None) -> tuple[Instruction, ...]:
    """Return the instructions of a target.

    Args:
        target: GPU name or target, such as "H100" or "sm_90a".
        family: One family, such as "mma" or "wgmma.sp"; None for all.
        isa: PTX ISA version, such as "8.7"; None is the newest known.

    Raises:
        Unsupported: The target is unknown.
        ValueError: The family is unknown, or the version is malformed.
    """
    version, target = _parse_version(isa), resolve_target(target)
    if family is not None and family not in (*FAMILIES, *UNIT_FAMILIES):
        raise ValueError(f"family {family!r}: expected one of {', '.join(FAMILIES)}")
    if target in OTHER_TARGETS:
        return other_units(target, family)
    return _instructions(target, family, version)


@lru_cache
def _instructions(target: str, family: str | None, version: Version) -> tuple[Instruction, ...]:
    since = ((op, min_version(op, target)) for op in syntax_rows() if family in (None, op.family))
    return tuple(op for op, lowest in since if lowest is not None and lowest <= version)


def resolve_op(op: str | Instruction, *target_names: str) -> Instruction:
    """Return the instruction that a spelling or a short name means on some targets.

    A short name means the instruction that `tcemu.parse` returns where the targets have it. Elsewhere it means the largest instruction with
    that name that all of the targets have: "f16" is m16n8k8 on a T4 and m8n8k4 on a V100.

    Args:
        op: PTX spelling, short name or `Instruction`.
        target_names: GPU names or targets.

    Returns:
        The instruction. If the targets have none with that name in common, it is the one that `tcemu.parse` returns.

    Raises:
        Unsupported: The spelling is no instruction, or a target is unknown.
    """
    names = tuple(map(resolve_target, target_names))
    others = bool(names) and all(name in OTHER_TARGETS for name in names)
    if others and isinstance(op, str) and (unit := short_named_unit(ALIASES.get(op.strip().lower(), op), names)):
        return unit
    instruction = parse(op)
    name = canonical_short_name(op) if isinstance(op, str) else None
    return instruction if name is None else _common_instruction(name, names)


@lru_cache(maxsize=4096)
def _common_instruction(name: str, names: tuple[str, ...]) -> Instruction:
    ops = instructions_by_name()[name]
    return next((op for op in ops if all(min_version(op, target) is not None for target in names)), ops[0])


def check(op: str | Instruction, target: str, isa: str | None = None) -> Instruction:
    """Return the instruction if a target has it. `tcemu.targets(op)` lists the targets that do, without an error.

    Args:
        op: PTX spelling, short name or `Instruction`. A short name means the target's own instruction: "f16" is m16n8k8 on a T4. The
            spelling may also be that of any other statement that `tcemu.ptx` runs, such as "redux.sync.min.f32".
        target: GPU name or target, such as "H100" or "sm_90a".
        isa: PTX ISA version, such as "8.7"; None is the newest known.

    Returns:
        The instruction; a `PtxStatement` for a statement outside the tensor-core families.

    Raises:
        Unsupported: The spelling is no instruction, the target is unknown or does not have the instruction, or the instruction needs a
            newer PTX ISA version.
        ValueError: The version is malformed.

    Source: the Target ISA Notes and PTX ISA Notes of each instruction, PTX ISA 9.7; for those outside 9.7.14 to 9.7.16 also the answers of
    ptxas (`tcemu.engine.isa.statement_table`).

    Example:
        >>> import tcemu
        >>> str(tcemu.check("f16", "T4"))
        'mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32'
    """
    version, target = _parse_version(isa), resolve_target(target)
    if (name := _statement_name(op)) and target not in OTHER_TARGETS:
        return _check_statement(op, name, target, version)
    given = str(op)
    try:
        op = resolve_op(op, target)
    except Unsupported:
        if target in OTHER_TARGETS:
            check_unit(None, shorten_text(given), target)
        raise
    if isinstance(op, Unit) or target in OTHER_TARGETS:
        return check_unit(op if isinstance(op, MatrixMultiply) else None, given, target)
    since = min_version(op, target)
    if since is not None and since <= version:
        return op
    row = syntax_row(op)
    if since is not None:
        newer = f"needs PTX ISA {_format_version(since)} or newer; the version is {_format_version(version)}"
        raise Unsupported(f"{op} on {target} {newer}. PTX ISA {row.section}, PTX ISA Notes.")
    needs = " or ".join(dict.fromkeys(_describe_need(need) for need, _ in _further_needs(op) or row.needs))
    raise Unsupported(
        f"{op} needs {needs}; the target is {target}{_describe_alternative(op, target)}. PTX ISA {row.section}, Target ISA Notes."
    )


def find_statement(op: str | Instruction) -> PtxStatement | None:
    """Return the statement outside the tensor-core families that a spelling has, or None.

    Args:
        op: PTX spelling, also of a whole statement with guard and operands, or `Instruction`.
    """
    name = _statement_name(op)
    return PtxStatement(spelling=name) if name and find_forms(name) else None


def _statement_name(op: str | Instruction) -> str:
    """Return the opcode of a statement whose name is one outside the tensor-core families, or ""."""
    if isinstance(op, PtxStatement):
        return op.spelling
    match = _OPCODE.match(op) if isinstance(op, str) else None
    return match[1] if match and match[1].partition(".")[0] in rows_by_name() else ""


_OPCODE = compile(r"\s*(?:@!?[\w$%]+\s+)?([a-z]\w*(?:\.[\w:]+)*)(?=$|[\s;{\[])")


def _check_statement(op: str | Instruction, name: str, target: str, version: Version) -> PtxStatement:
    """Return a statement outside the tensor-core families if the target and the version have it. Raises Unsupported."""
    forms = find_forms(name)
    if not forms:
        raise Unsupported(describe_forms(shorten_text(name)))
    statement, notes = PtxStatement(spelling=name), f"PTX ISA {forms[0].row.section}"
    if _has_statement(name, target, version):
        return statement
    lowest = min_version(statement, target)
    if lowest is not None and lowest <= version:
        raise Unsupported(f"{name} was removed in PTX ISA {_format_version(forms[0].row.until or version)}. {notes}, PTX ISA Notes.")
    if lowest is not None:
        newer = f"needs PTX ISA {_format_version(lowest)} or newer; the version is {_format_version(version)}"
        raise Unsupported(f"{name} on {target} {newer}. {notes}, PTX ISA Notes of {forms[0].row.head}.")
    missing = [each for each in form_needs(forms[0]) if _lowest_version(each, target) is None]
    needs = dict.fromkeys(" or ".join(dict.fromkeys(_describe_need(need) for need, _ in each)) for each in missing)
    raise Unsupported(f"{name} needs {', and '.join(needs)}; the target is {target}. {notes}, Target ISA Notes of {forms[0].row.head}.")


def manual_section(op: Instruction) -> str:
    """Return the section of the PTX ISA manual that describes an instruction, such as "9.7.14.5.14".

    Args:
        op: Instruction.
    """
    return find_forms(op.spelling)[0].row.section if isinstance(op, PtxStatement) else syntax_row(op).section


def source_reference(op: Instruction) -> str:
    """Return where an instruction is defined, as messages name it: "PTX ISA 9.7.14.5.14", or another maker's manual.

    Args:
        op: Instruction.
    """
    return op.source if isinstance(op, Unit) else f"PTX ISA {manual_section(op)}"


def min_version(op: Instruction, target: str) -> Version | None:
    """Return the lowest PTX ISA version in which a target has an instruction.

    Args:
        op: Instruction.
        target: GPU name or target.

    Returns:
        The version as (major, minor); None if the target does not have the instruction in any version.

    Raises:
        Unsupported: The target is unknown, or no row of the table of instructions has the instruction's fields.
    """
    target = resolve_target(target)
    if isinstance(op, Unit) or target in OTHER_TARGETS:
        return (0, 0) if isinstance(op, Unit) and target in op.targets else None
    if isinstance(op, PtxStatement):
        return min((lowest for lowest, _ in statement_versions(op.spelling, target)), default=None)
    beyond = _further_needs(op)
    version = _row_version(op, target)
    if version is None or beyond is None:
        return version
    needed = _lowest_version(beyond, target)
    return None if needed is None else max(version, needed)


def _has_statement(spelling: str, target: str, version: Version) -> bool:
    """Return True if a target has an opcode outside the tensor-core families in a version."""
    return any(lowest <= version and (until is None or version < until) for lowest, until in statement_versions(spelling, target))


@lru_cache(maxsize=65536)
def statement_versions(spelling: str, target: str) -> tuple[tuple[Version, Version | None], ...]:
    """Return for each row that has an opcode on a target the lowest version, and the version that removed it or None.

    Args:
        spelling: Opcode of a statement outside the tensor-core families.
        target: Target, such as "sm_90a".
    """
    found = []
    for form in find_forms(spelling):
        versions = [_lowest_version(needs, target) for needs in form_needs(form)]
        if None not in versions:
            found.append((max(TARGETS[target].since, *(version for version in versions if version is not None)), form.row.until))
    return tuple(found)


@lru_cache(maxsize=65536)
def _row_version(op: Instruction, target: str) -> Version | None:
    """Return the lowest version by the row of an instruction; arguments do not count."""
    try:
        row = syntax_row(op)
    except KeyError:
        raise Unsupported(f"{op}: no instruction has these fields; make instructions with tcemu.parse") from None
    version = _lowest_version(row.needs, target)
    return None if version is None else max(_needed_version(op, version), TARGETS[target].since)


def _further_needs(op: Instruction) -> Needs | None:
    """Return what a statement or a product needs beyond its instruction's row, or None."""
    return _product_needs(op) if isinstance(op, Tcgen05Product) else statement_needs(op)


@lru_cache(maxsize=4096)
def _product_needs(op: Tcgen05Product) -> Needs | None:
    """Return the targets that have the K and the block scales of a product; None if all targets with tensor memory have them."""
    scale = None if op.scaling is None else (op.scaling.format, KINDS[op.kind].sizes[op.size])
    able = [row for row in TARGETS.values() if row.tensor_columns]
    have = [row for row in able if row.multiplies(op.kind, op.k // (2 if op.sparse else 1), scale)]
    return None if len(have) == len(able) else tuple((row.name, row.since) for row in have)


@lru_cache(maxsize=4096)
def _lowest_version(needs: Needs, target: str) -> Version | None:
    return min((version for need, version in needs if target in _matching_targets(need)), default=None)


def _needed_version(op: Instruction, version: Version) -> Version:
    """Return the version of a row, or the version of a qualifier that was introduced later."""
    return max((version, *(QUALIFIER_SINCE.get(q, version) for slot in qualifier_slots(op) for q in slot)))


@cache
def _matching_targets(need: str) -> frozenset[str]:
    """Return the targets that meet one need: "sm_80+" (or later), "sm_120f+" (its family, f and a), "sm_90a" (itself)."""

    if not need.endswith("+"):
        return frozenset({need})
    first = parse_target_name(need[:-1])
    later = (row for row in TARGETS.values() if row.number >= first.number)
    if first.suffix:
        return frozenset(row.name for row in later if row.suffix and parse_target_name(row.name).family == first.family)
    return frozenset(row.name for row in later)


def _describe_need(need: str) -> str:
    if not need.endswith("+"):
        return need
    return f"{need[:-1]} and its family" if "f" in need else f"{need[:-1]} or later"


def _describe_alternative(op: Instruction, target: str) -> str:
    """Name what the target has in the place of an instruction, as the end of a message.

    It is the instruction of the same family and the same A and B with the fewest slots changed. Without one, it is the formats that the
    family has on the target.
    """

    def distance(other: Instruction) -> tuple[int, int]:
        changes = [slot_distance(x, y) for x, y in zip(qualifier_slots(op), qualifier_slots(other), strict=True)]
        return sum(changed for changed, _ in changes), sum(letters for _, letters in changes)

    unit = _describe_unit(op, target)
    if isinstance(op, Tcgen05Product):
        op = op.instruction
    family = instructions(target, op.family)
    if not family:
        return f", which has no {op.family} at all{unit}"
    same = [other for other in family if _multiplicands(other) == _multiplicands(op)]
    if same:
        return f", whose nearest instruction is {min(same, key=distance)}{unit}"
    formats = dict.fromkeys(name for other in family for name in _multiplicands(other))
    return f", which has no {op.family} of {' and '.join(dict.fromkeys(_multiplicands(op)))}, only of {', '.join(formats)}{unit}"


def _multiplicands(op: Instruction) -> tuple[str, ...]:
    """Return the names of the formats of A and B; () for an instruction that computes nothing."""
    return (op.a.name, op.b.name) if isinstance(op, MatrixMultiply) else ()


# Recipes of `tcemu.operations.products.recipes` by the kind, or by the format, of an instruction's operands, for messages that name one
RECIPE_NAMES = {
    "mxf4nvf4": "nvfp4", "mxf4": "mxfp4", "mxf8f6f4 e4m3": "mxfp8", "mxf8f6f4 e5m2": "mxfp8_e5m2", "mxf8f6f4 e3m2": "mxfp6_e3m2",
    "mxf8f6f4 e2m3": "mxfp6_e2m3", "f16": "f16", "bf16": "bf16", "tf32": "tf32", "e4m3": "fp8", "e5m2": "fp8_e5m2",
}  # fmt: skip


def recipe_name(op: Instruction) -> str | None:
    """Return the recipe that multiplies the operands of a dense instruction, such as "fp8" for e4m3; None if there is no such recipe.

    Args:
        op: Instruction.
    """
    if not isinstance(op, MatrixMultiply) or op.sparse or op.a != op.b:
        return None
    keys = (op.a.name,) if op.scaling is None else (str(op.kind), f"{op.kind} {op.a}")
    return next((RECIPE_NAMES[key] for key in keys if key in RECIPE_NAMES), None)


def _describe_unit(op: Instruction, target: str) -> str:
    """Name the recipe that multiplies the operands of `op` by a unit of the target that has other instructions, as the end of a message."""
    recipe = recipe_name(op) if library_unit(target) == "tcgen05" else None
    return f". {target} multiplies these operands by tcgen05, which a recipe takes: recipe='{recipe} on {target}'" if recipe else ""


def _parse_version(isa: str | None) -> Version:
    if isa is None:
        return LATEST
    match = fullmatch(r"(\d{1,3})\.(\d{1,3})", isa)
    if match is None:
        raise ValueError(f"isa: expected a PTX ISA version such as '8.7', got {isa!r}")
    return int(match[1]), int(match[2])


def _format_version(version: Version) -> str:
    return f"{version[0]}.{version[1]}"


def describe_instruction(op: str | Instruction) -> str:
    """Describe an instruction as text: its fields, operands, registers and targets.

    Args:
        op: PTX spelling, short name or `Instruction`.

    Raises:
        Unsupported: `op` is no instruction.
    """
    op = parse(op)
    if isinstance(op, Unit):
        lines = [("formats", f"A {op.a}, B {op.b}, D {op.d}, K {op.k}"), ("source", op.source), ("on", ", ".join(op.targets))]
        return "\n".join([str(op), *(f"  {name:<11}{text}" for name, text in lines)])
    row = syntax_row(op)
    lines = [("family", f"{op.family}, PTX ISA {row.section}")]
    lines += [("also", spelling) for spelling in spellings(op) if spelling != str(op)]
    lines += [("fields", ", ".join(_describe_fields(op)) or "none")]
    lines += [("operands", ", ".join(form) or "none") for form in op.operand_forms]
    lines += [(name, text) for name in op.operands if (text := _describe_operand(op, name))]
    lines += [
        ("legal on", f"{_describe_need(need)}, from PTX ISA {_format_version(_needed_version(op, version))}") for need, version in row.needs
    ]
    return "\n".join([str(op), *(f"  {name:<11}{text}" for name, text in lines)])


def _describe_fields(op: Instruction) -> Iterator[str]:
    for field in fields(op):
        value = getattr(op, field.name)
        if isinstance(value, Sparsity):
            yield "ordered" if value.ordered else "sparse"
        elif isinstance(value, BlockScaling):
            yield f"block_scale, scale_vec {value.count}, stype {value.format}"
        elif field.compare and field.name != "name" and value not in (None, 0):
            yield field.name if value is True else f"{field.name} {value}"


def _describe_operand(op: Instruction, name: str) -> str:
    """Describe the matrix and registers of one operand, or its valid values; "" for an operand that has neither."""
    if isinstance(op, MatrixMultiply):
        if name in ("f", "sp_sel"):
            return f"one of {', '.join(map(str, op.selectors))}"
        if name.startswith("selector") and op.scaling is not None:
            threads = op.scaling.thread_ids[name[-1]]
            return f"byte-id one of {', '.join(map(str, op.scaling.byte_ids))}; thread-id one of {', '.join(map(str, threads))}"
    try:
        (rows, columns), count = op.matrix_shape(name), op.register_count(name)
    except ValueError:
        return ""
    if name in ("scale_a", "scale_b") and isinstance(op, MatrixMultiply) and op.scaling is not None:
        element = op.scaling.format
    elif name in ("e", "sp_meta"):
        element = "4-bit fields"
    else:
        element = op.element if isinstance(op, Mover) else op.operand_format(name)
    matrices = op.matrix_count if name in ("a", "b", "c", "d", "r") else 1
    prefix = f"{matrices} matrices of " if matrices > 1 else ""
    return f"{prefix}{rows} x {columns} {element}, {count} 32-bit register{'s' if count > 1 else ''} a lane"
