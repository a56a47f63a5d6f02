"""`tcemu check`, `tcemu list` and `tcemu show`: whether a target has an instruction, what it has, and what is known of an instruction."""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.base.text import WIDTH, table_lines, wrap_lines
from tcemu.engine.architectures.evidence import LEVELS
from tcemu.engine.architectures.lookup import COMPUTING_FAMILIES, DESCRIBED_FAMILIES, find_row, target_rows
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.isa.families import FAMILIES, Instruction, MatrixMultiply, spellings
from tcemu.engine.isa.grammar import parse
from tcemu.engine.isa.legality import check, describe_instruction, instructions, min_version, targets
from tcemu.engine.isa.operand_fragments import register_fragments
from tcemu.engine.isa.other_makers import OTHER_TARGETS, UNIT_FAMILIES, Unit
from tcemu.engine.isa.short_names import short_names
from tcemu.engine.isa.targets import GPU_NAMES, TARGETS, capability_target, resolve_target
from tcemu.engine.layouts.fragment_layouts import Fragment
from tcemu.faces.commands import EXAMPLE_SPELLING, OP_HELP, TARGET_HELP, CommandError
from tcemu.faces.commands.array_files import Output, path_text
from tcemu.operations.products.unit_choice import describe_unit
from tcemu.uses.viz.layout_pictures import holders, operands, page, svg

OVERVIEW = (
    "tcemu list --target H100   the instructions of a target; --family mma: of one family",
    "tcemu list --short         the short names of instructions, such as f16 and e4m3 wgmma",
    "tcemu list --evidence      how the arithmetic of each target is known",
)
MAX_CELLS = 16  # printed cells of a row of a fragment


def add_check(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "check",
        description="Says whether a target has an instruction; if not, why not and what would work. The exit status is 0 or 1.",
        epilog=f"example: tcemu check {EXAMPLE_SPELLING} --target sm_90a",
    )
    parser.add_argument("spelling", metavar="SPELLING", help=f"{OP_HELP}, or a whole statement")
    parser.add_argument("--target", required=True, help=TARGET_HELP)
    _add_isa_option(parser)
    parser.set_defaults(run=_run_check)


def add_list(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "list",
        description="Prints the instructions of a target, one spelling a line, and on standard error how many there are. Without options "
        "it prints the targets and their GPUs.",
        epilog="examples: tcemu list --target H100 --family mma; tcemu list --gpus; tcemu list --evidence",
    )
    parser.add_argument("--target", help=TARGET_HELP)
    parser.add_argument("--family", choices=tuple(FAMILIES), metavar="FAMILY", help=f"one of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--all-spellings", action="store_true", help="also print the spellings with optional qualifiers")
    parser.add_argument("--evidence", action="store_true", help="print the evidence for the arithmetic of the target, or of all targets")
    parser.add_argument("--short", action="store_true", help="print the short names of instructions")
    parser.add_argument("--gpus", action="store_true", help="print the targets and the names of their GPUs")
    _add_isa_option(parser)
    parser.set_defaults(run=_run_list)


def add_show(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "show",
        description="Prints an instruction's fields, operands and registers, where it is legal, and how its arithmetic is known.",
        epilog=f"examples: tcemu show {EXAMPLE_SPELLING} --fragments; tcemu show {EXAMPLE_SPELLING} --svg fragments.svg --lane 5",
    )
    parser.add_argument("spelling", metavar="SPELLING", help=OP_HELP)
    parser.add_argument("--fragments", action="store_true", help="also print which lane holds which element, a table per register operand")
    parser.add_argument("--svg", metavar="FILE", help="also draw which lane holds which element, and the layouts in shared memory")
    parser.add_argument("--operand", metavar="NAME", help="with --svg: draw this operand alone")
    parser.add_argument("--lane", type=int, metavar="N", help="with --svg: mark this lane; wgmma counts the lanes of its four warps")
    parser.add_argument("--overwrite", action="store_true", help="with --svg: replace an existing FILE")
    parser.set_defaults(run=_run_show)


def _add_isa_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--isa", metavar="VERSION", help="the PTX ISA version, such as 8.7 (default: the newest known)")


def _run_check(args: argparse.Namespace) -> int:
    try:
        op = check(args.spelling, args.target, args.isa)
    except ValueError as error:
        print(error)
        return 1
    if isinstance(op, Unit):
        print(f"{op} is an instruction of {args.target}. {op.source}.")
        return 0
    major, minor = min_version(op, args.target) or (0, 0)
    since = f"{op} is an instruction of {args.target}, from PTX ISA {major}.{minor} on."
    print("\n".join([since, *wrap_lines(describe_unit(op, args.target))]))
    return 0


def _run_list(args: argparse.Namespace) -> int:
    target: str | None = args.target
    try:
        for word, lines in (("gpus", gpu_lines), ("short", short_name_lines)):
            if getattr(args, word):
                if args.target or args.family or args.all_spellings or args.isa or args.evidence or (args.gpus and args.short):
                    raise CommandError(f"--{word} excludes all other options")
                print("\n".join(lines()))
                return 0
        if args.evidence:
            if args.family or args.all_spellings or args.isa:
                raise CommandError("--evidence can be combined only with --target")
            print("\n".join(evidence_summary() if target is None else evidence_details(target)))
            return 0
        if target is None:
            for option in ("family", "all_spellings", "isa"):
                if getattr(args, option):
                    raise CommandError(f"--{option.replace('_', '-')} needs --target, such as --target H100")
            print("\n".join([*gpu_lines(), "", *OVERVIEW]))
            return 0
        listed = instructions(target, args.family, args.isa)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    lines = [spelling for op in listed for spelling in (spellings(op) if args.all_spellings else (str(op),))]
    print("".join(f"{line}\n" for line in lines), end="")
    print(f"{len(lines)} {'spellings' if args.all_spellings else 'instructions'}", file=sys.stderr)
    return 0


def gpu_lines() -> Iterator[str]:
    """A line per target: its name, its architecture, its GPUs."""
    rows = [
        (capability_target(*capability), products.architecture, ", ".join(products.names)) for capability, products in GPU_NAMES.items()
    ]
    for target, architecture, names in rows:
        first, *more = wrap_lines(names, " " * 20, WIDTH - 20)
        yield from (f"{target:9}{architecture:11}{first}", *more)
    yield ""
    yield from wrap_lines(
        "Wherever a target is expected, you can use any of these names, or that of an architecture if all its GPUs have one "
        "target. Case, spaces, hyphens and words such as NVIDIA or 80GB make no difference."
    )


def short_name_lines() -> Iterator[str]:
    """A line per short name: the name, the first target that has the instruction, the instruction."""
    rows = [[name, targets(str(op))[0], str(op)] for name, op in short_names().items()]
    yield from table_lines(["name", "first target", "instruction"], rows, left=range(3))
    yield ""
    yield from wrap_lines(
        "A name is the format of A and B, or a kind with block scales, followed by wgmma, wmma or sparse. It means the largest common "
        "shape with sums in f32 (f64, s32), and works wherever a spelling does. On an older target it means the largest shape there: "
        "f16 is m16n8k8 on a T4 and m8n8k4 on a V100 (tcemu check f16 --target T4)."
    )


def evidence_summary() -> Iterator[str]:
    """A line per target: its instructions by level of evidence, and the recorded words. Equal targets share a line."""
    lines: dict[tuple, list[str]] = {}
    for target in targets():
        known = [find_row(op, target).evidence for op in _computing_instructions(target)] if target_rows(target) else []
        counts = Counter(evidence.level for evidence in known)
        words = sum(evidence.recorded for evidence in set(known))
        lines.setdefault((*(counts[level] for level in LEVELS), words), []).append(target)
    rows = [
        [_join_targets(names), *(str(count or "-") for count in counts), f"{words:,}" if words else "-"]
        for (*counts, words), names in lines.items()
    ]
    yield "Instructions whose arithmetic is known, by level of evidence, and recorded words:"
    yield from table_lines(["targets", *LEVELS, "words"], rows, left=[0])
    yield ""
    for level, meaning in LEVELS.items():
        yield f"{level:11} {meaning}"


def evidence_details(target: str) -> Iterator[str]:
    """The rows of one target: label, model and evidence; of a target without rows what is public."""
    if not target_rows(target):
        yield f"{target}: no arithmetic is modelled; known is: {TARGETS[resolve_target(target)].public}"
        return
    used = {find_row(op, target).label for op in _computing_instructions(target)}
    for row in target_rows(target):
        if row.label in used or row.family in DESCRIBED_FAMILIES or row.toolkits:
            known = row.evidence
            words = f", {known.recorded:,} words" if known.recorded else ""
            yield f"{row.label}: {_describe_model(row.model)}"
            yield f"    {known.level}: {known.source}{words}"


def _computing_instructions(target: str) -> Iterator[Instruction]:
    families = UNIT_FAMILIES if resolve_target(target) in OTHER_TARGETS else COMPUTING_FAMILIES
    return (op for family in families for op in instructions(target, family))


def _join_targets(names: list[str]) -> str:
    """Join names of targets: sm_103, sm_103f, sm_103a -> sm_103/f/a; sm_103f, sm_103a -> sm_103f/a."""
    suffixes: dict[str, list[str]] = {}
    for name in names:
        base = name.rstrip("af")
        suffixes.setdefault(base, []).append(name.removeprefix(base))
    return ", ".join(base + "/".join(found) for base, found in suffixes.items())


def _describe_model(model: Model) -> str:
    if model.result.is_integer:
        return "exact integers" + ("" if model.clamp_step is None else f", clamped after every {model.clamp_step} products")
    if model.step_kind is not None:
        return f"{model.step_kind} steps of {model.terms}, {model.result} {model.rounding}"
    if model.is_exact_sum:
        return f"exact steps of {model.terms}, {model.result} {model.rounding}"
    if model.fraction_bits is None:
        return f"{model.result} multiply-adds, {model.rounding}" + ("" if model.chain is None else f", in chains of {model.chain}")
    parts = [f"steps of {model.terms}", f"{model.fraction_bits} fraction bits", f"floor {model.floor}", f"{model.result} {model.rounding}"]
    parts += [f"groups of {model.summed} summed exactly"] if model.summed else []
    parts += [f"{model.result_bits} bits of the result kept"] if model.result_bits else []
    parts += [f"as {model.multiplicand}, {model.groups} groups, C last"] if model.multiplicand else []
    return ", ".join(parts)


def _run_show(args: argparse.Namespace) -> int:
    try:
        description = describe_instruction(args.spelling)
    except Unsupported as error:
        print(error, file=sys.stderr)
        return 1
    picture_line = _write_picture(args)
    print(description)
    for known, names in _targets_by_evidence(parse(args.spelling)).items():
        print(f"  arithmetic {known} ({', '.join(names)})")
    for name, fragment in register_fragments(parse(args.spelling)).items() if args.fragments else ():
        print(f"\n{name}: T5:2-3 is elements 2 and 3 of lane 5" + (", lanes counted through four warps" if len(fragment.lanes) > 1 else ""))
        print("\n".join(fragment_table(fragment)))
    if picture_line:
        print(f"\n{picture_line}")
    return 0


def _write_picture(args: argparse.Namespace) -> str:
    """Write the requested picture and return a line about it; "" without --svg."""
    if args.svg is None:
        for option in ("operand", "lane", "overwrite"):
            if getattr(args, option) not in (None, False):
                raise CommandError(f"--{option} needs --svg FILE")
        return ""
    output = Output(Path(args.svg), args.overwrite, ending=".svg")
    try:
        names = (args.operand,) if args.operand is not None else operands(args.spelling)
        text = page(args.spelling, args.lane) if args.operand is None else svg(args.spelling, args.operand, args.lane)
    except ValueError as error:
        raise CommandError(str(error)) from None
    content = text.encode()
    output.write(content)
    return f"{path_text(output.path)}: {', '.join(names)}, {len(content):,} bytes"


def _targets_by_evidence(op: Instruction) -> dict[str, list[str]]:
    """Evidence for the arithmetic of an instruction -> its targets; empty for an instruction without a product."""
    known: dict[str, list[str]] = {}
    for target in targets(op) if isinstance(op, MatrixMultiply) else ():
        try:
            evidence = find_row(op, target).evidence
            text = f"{evidence.level}: {evidence.source}"
        except NotModelled:
            text = "not modelled"
        known.setdefault(text, []).append(target)
    return known


def fragment_table(fragment: Fragment) -> Iterator[str]:
    """The fragment as text, as in the manual's figures: a line per row; T5:2-3 is lane 5's elements 2 and 3."""
    held = holders(fragment)[..., 0, :]  # the first of several copies
    for index in np.ndindex(*fragment.shape[:-2]):
        if index:
            yield f"[{', '.join(map(str, index))}]"
        rows = [merge_cells(row) for row in held[index]]
        width = max(len(cell) for row in rows for cell in row)
        for number, row in enumerate(rows):
            more = f" ... {len(row) - MAX_CELLS} more" if len(row) > MAX_CELLS else ""
            yield f"{number:>3}  " + " ".join(cell.ljust(width) for cell in row[:MAX_CELLS]).rstrip() + more


def merge_cells(row: np.ndarray) -> list[str]:
    """Merge neighbouring columns that one lane holds as consecutive elements. row: int[columns, 2], lane and element."""
    merged: list[list[int]] = []  # lane, first element, last element
    for lane, element in row.tolist():
        if merged and merged[-1][0] == lane and merged[-1][2] == element - 1:
            merged[-1][2] = element
        else:
            merged.append([lane, element, element])
    return [f"T{lane}:{first}" + (f"-{last}" if last > first else "") for lane, first, last in merged]
