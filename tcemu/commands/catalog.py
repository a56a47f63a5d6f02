"""`tcemu check`, `tcemu list` and `tcemu show`: what is an instruction, what a target has, what is known of one."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from tcemu.architectures.lookup import row_for
from tcemu.commands import EXAMPLE, OP, TARGET, CommandError
from tcemu.commands.evidence import details, summary
from tcemu.commands.outputs import Output, shown
from tcemu.commands.tables import table
from tcemu.errors import NotModelled, Unsupported
from tcemu.isa.catalog import check, describe, instructions, least, targets
from tcemu.isa.grammar import parse
from tcemu.isa.instructions import FAMILIES, Instruction, spellings
from tcemu.isa.short_names import short_names
from tcemu.isa.targets import PRODUCTS, own_target
from tcemu.operations.fragments import fragments
from tcemu.text import WIDTH, wrapped
from tcemu.viz import operands, page, svg


def add_check(subparsers) -> None:
    """Adds the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "check",
        description="Says whether a target has an instruction, and if not why not and what would work. Exit status: 0 if it has, 1 if not.",
        epilog=f"example: tcemu check {EXAMPLE} --target sm_90a",
    )
    parser.add_argument("spelling", metavar="SPELLING", help=f"{OP}, or a whole statement")
    parser.add_argument("--target", required=True, help=TARGET)
    _add_isa(parser)
    parser.set_defaults(run=_check)


def add_list(subparsers) -> None:
    """Adds the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "list",
        description="Prints the instructions of a target, one spelling a line, and on standard error how many there are.",
        epilog="examples: tcemu list --target H100 --family mma; tcemu list --gpus; tcemu list --evidence",
    )
    parser.add_argument("--target", help=TARGET)
    parser.add_argument("--family", choices=tuple(FAMILIES), metavar="FAMILY", help=f"one of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--all-spellings", action="store_true", help="also with the qualifiers that may be left out")
    parser.add_argument("--evidence", action="store_true", help="instead: how the arithmetic of the target, or of all, is known")
    parser.add_argument("--short", action="store_true", help="instead: the short names of instructions, and what each means")
    parser.add_argument("--gpus", action="store_true", help="instead: the targets, and the GPUs that have them, by name")
    _add_isa(parser)
    parser.set_defaults(run=_list)


def add_show(subparsers) -> None:
    """Adds the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "show",
        description="Prints an instruction's fields, operands and registers, where it is legal, and how its arithmetic is known.",
        epilog=f"examples: tcemu show {EXAMPLE} --fragments; tcemu show {EXAMPLE} --svg fragments.svg --lane 5",
    )
    parser.add_argument("spelling", metavar="SPELLING", help=OP)
    parser.add_argument("--fragments", action="store_true", help="also which lane holds which element, a table for each register operand")
    parser.add_argument("--svg", metavar="FILE", help="also draw which lane holds which element, and what lies where in shared memory")
    parser.add_argument("--operand", metavar="NAME", help="with --svg: draw this one alone")
    parser.add_argument("--lane", type=int, metavar="N", help="with --svg: mark this lane; wgmma's count through its four warps")
    parser.add_argument("--overwrite", action="store_true", help="with --svg: FILE may exist")
    parser.set_defaults(run=_show)


def _add_isa(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--isa", metavar="VERSION", help="the PTX ISA version, such as 8.7 (default: the newest known)")


def _check(args: argparse.Namespace) -> int:
    try:
        op = check(args.spelling, args.target, args.isa)
    except ValueError as error:
        print(error)
        return 1
    major, minor = least(op, args.target) or (0, 0)
    print(f"{op} is an instruction of {args.target}, from PTX ISA {major}.{minor} on.")
    return 0


def _list(args: argparse.Namespace) -> int:
    target: str | None = args.target
    try:
        for word, lines in (("gpus", named_gpus), ("short", named_instructions)):
            if getattr(args, word):
                if args.target or args.family or args.all_spellings or args.isa or args.evidence or (args.gpus and args.short):
                    raise CommandError(f"--{word} goes alone")
                print("\n".join(lines()))
                return 0
        if args.evidence:
            if args.family or args.all_spellings or args.isa:
                raise CommandError("--evidence goes with --target alone")
            print("\n".join(summary() if target is None else details(target)))
            return 0
        if target is None:
            raise CommandError(f"--target is missing: one of {', '.join(targets())}, or a GPU by name, as H100")
        listed = instructions(target, args.family, args.isa)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    lines = [spelling for op in listed for spelling in (spellings(op) if args.all_spellings else (str(op),))]
    print("".join(f"{line}\n" for line in lines), end="")
    print(f"{len(lines)} {'spellings' if args.all_spellings else 'instructions'}", file=sys.stderr)
    return 0


def named_gpus() -> Iterator[str]:
    """A line a target: its name, its architecture, the GPUs that have it."""
    rows = [(own_target(*capability), products.architecture, ", ".join(products.names)) for capability, products in PRODUCTS.items()]
    for target, architecture, names in rows:
        first, *more = wrapped(names, " " * 20, WIDTH - 20)
        yield from (f"{target:9}{architecture:11}{first}", *more)
    yield ""
    yield from wrapped(
        "A target may be given by any of these names, or by that of an architecture if all its GPUs have one target. Upper "
        "and lower case, spaces, hyphens and words such as NVIDIA or 80GB make no difference."
    )


def named_instructions() -> Iterator[str]:
    """A line a short name: it, the instruction that it means, the first target that has that."""
    for name, op in short_names().items():
        yield f"{name:20}{targets(op)[0]:8}{op}"
    yield ""
    yield from wrapped(
        "Name, first target, instruction. A name is the format of A and B, or a kind with block scales, and then wgmma, wmma or "
        "sparse. It means the largest common shape, with sums in f32 (f64, s32), and is taken wherever an instruction is."
    )


def _show(args: argparse.Namespace) -> int:
    try:
        described = describe(args.spelling)
    except Unsupported as error:
        print(error, file=sys.stderr)
        return 1
    drawn = _draw(args)
    print(described)
    for known, names in _arithmetic(parse(args.spelling)).items():
        print(f"  arithmetic {known} ({', '.join(names)})")
    for name, fragment in fragments(parse(args.spelling)).items() if args.fragments else ():
        print(f"\n{name}: T5:2-3 is elements 2 and 3 of lane 5" + (", lanes counted through four warps" if len(fragment.lanes) > 1 else ""))
        print("\n".join(table(fragment)))
    if drawn:
        print(f"\n{drawn}")
    return 0


def _draw(args: argparse.Namespace) -> str:
    """Writes the picture that is asked for, and says so; "" if none is."""
    if args.svg is None:
        for option in ("operand", "lane", "overwrite"):
            if getattr(args, option) not in (None, False):
                raise CommandError(f"--{option} is about a picture: add --svg FILE")
        return ""
    output = Output(Path(args.svg), args.overwrite)
    try:
        names = (args.operand,) if args.operand is not None else operands(args.spelling)
        text = page(args.spelling, args.lane) if args.operand is None else svg(args.spelling, args.operand, args.lane)
    except ValueError as error:
        raise CommandError(str(error)) from None
    content = text.encode()
    output.write(content)
    return f"{shown(output.path)}: {', '.join(names)}, {len(content):,} bytes"


def _arithmetic(op: Instruction) -> dict[str, list[str]]:
    """How it is known what the instruction computes -> the targets of which that is so; empty for an instruction that computes nothing."""
    known: dict[str, list[str]] = {}
    for target in targets(op) if op.a is not None and op.d is not None else ():
        try:
            evidence = row_for(op, target).evidence
            text = f"{evidence.level}: {evidence.source}"
        except NotModelled:
            text = "not modelled"
        known.setdefault(text, []).append(target)
    return known
