"""`tcemu explain`: one dot product of an instruction, step by step, on one target or side by side on several."""

import argparse
import json
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tcemu.architectures.lookup import row_for
from tcemu.commands import EXAMPLE, OP, TARGET, CommandError
from tcemu.commands.what_ifs import changed
from tcemu.explanation.comparison import Explanations
from tcemu.explanation.explain import explain
from tcemu.formats import Format
from tcemu.isa.catalog import check
from tcemu.isa.diagnosis import shown
from tcemu.isa.instructions import Instruction
from tcemu.operations.operands import signature_of
from tcemu.sparsity import defined_fields

NEGATIVE = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)  # how a negative number begins, and no option does
EXPONENT = re.compile(r"e([+-]?[\d_]+)$", re.IGNORECASE)
GREATEST_EXPONENT = 10_000  # ten to it is far beyond f64, and still quick to write out
VECTORS = {
    "a": "elements of the row of A (sparse: the stored ones)",
    "b": "elements of the column of B (sparse: those that meet A's, or with --e all)",
    "c": "the element of C (default: 0)",
    "scale_a": "block scales of the row",
    "scale_b": "block scales of the column",
}


def add_explain(subparsers) -> None:
    """Adds the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "explain",
        description="Takes one dot product of an instruction apart: each term's exact value, alignment shift, kept and cut bits, the sums, "
        "the roundings, the result and the exact one beside it. With several targets: side by side, and where they part. A row shorter "
        "than the instruction's K is filled up with zeros.",
        epilog=f"example: tcemu explain {EXAMPLE} --a -8192 -0.5 -0.25 -0.125 --b 1024 1 1 1 --c 0x1p23",
    )
    parser.add_argument("spelling", metavar="SPELLING", help=OP)
    parser.add_argument("--target", action="append", help=f"{TARGET}; several times to compare (default: sm_90a)")
    for name, meaning in VECTORS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="+", metavar="X", help=meaning)
    parser.add_argument("--e", nargs="+", metavar="FIELD", help="sparsity metadata of the row: hex digits, a field of four bits each")
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--codes", action="store_true", help="elements are raw codes in hex (default: numbers, such as -0.1, 1/3, 0x1p-24, inf)"
    )
    given.add_argument("--random", type=int, metavar="SEED", help="draw all operands with this seed")
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="FIELD=VALUE[,...]",
        help="compare with the first target's arithmetic so changed, such as fraction_bits=13,terms=8 (the fields of tcemu.Model)",
    )
    parser.add_argument("--steps", action="store_true", help="with several targets: each in full, before the comparison")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--colour", action="store_true", help="dim the bits that are cut away")
    parser.set_defaults(run=run_explain)
    _take_negative_numbers(parser)


def _take_negative_numbers(parser: argparse.ArgumentParser) -> None:
    """argparse takes -1e-3, -1/3 and -inf for options. With a blank before them they are values, and `words` drops the blank."""
    parse = parser.parse_known_args

    def parse_known_args(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        return parse([f" {word}" if NEGATIVE.match(word) else word for word in args or ()], namespace)

    parser.parse_known_args = parse_known_args  # pyright: ignore[reportAttributeAccessIssue]


def number(token: str) -> float | Fraction:
    """A number as it is written: exactly, so that it is rounded once."""
    try:
        if "0x" in token.lower():
            return float.fromhex(token)
        value, written = float(token), EXPONENT.search(token)
        if value == 0 and (written is None or not any(digit in "123456789" for digit in token[: written.start()])):
            return value  # with its sign
        if np.isnan(value) or (np.isinf(value) and "inf" in token.lower()):
            return value
        if written is not None and abs(int(written[1])) > GREATEST_EXPONENT:
            raise CommandError(f"{shown(token)!r} is beyond every format, by far; write inf or 0 for it")
        return Fraction(token)
    except OverflowError:
        raise CommandError(f"{shown(token)!r} is beyond every format, by far; write inf for it") from None
    except ValueError:
        try:
            return Fraction(token)
        except (ValueError, ZeroDivisionError):
            raise CommandError(f"{shown(token)!r} is no number; write it as -0.1, 1e-3, 1/3, 0x1p-24, inf or nan") from None


def code(token: str) -> int:
    """A raw code in hex."""
    try:
        return int(token, 16)
    except ValueError:
        raise CommandError(f"{shown(token)!r} is no code; write it in hex, such as 3c00") from None


def words(given: list[str]) -> list[str]:
    """The elements of an operand, between spaces or commas."""
    return [token for text in given for token in text.replace(",", " ").split()]


def drawn(op: Instruction, seed: int) -> dict[str, Any]:
    """Operands of one instruction by a seed: normal numbers over some orders of magnitude, integers over their range."""
    rng, signature = np.random.default_rng(seed), signature_of(op)

    def some(fmt: Format, count: int) -> list[float]:
        if fmt.is_integer:
            low = -(1 << (fmt.bits - 1)) if fmt.signed else 0
            return rng.integers(max(low, -1000), min(fmt.greatest_magnitude, 1000) + 1, count).astype(float).tolist()
        return (rng.standard_normal(count) * np.exp2(rng.uniform(-4, 4, count))).tolist()

    operands: dict[str, Any] = {"a_row": some(signature.a, signature.k), "b_col": some(signature.b, op.k), "c": some(signature.c, 1)[0]}
    if op.sparse:
        operands["e"] = rng.choice(np.array(defined_fields(op.chunk, op.ordered)), op.k // op.chunk)
    if op.block_scale:
        operands |= {name: np.exp2(rng.integers(-3, 4, signature.scale_vec)) for name in ("scale_a", "scale_b")}
    return operands


def read(args: argparse.Namespace) -> dict[str, Any]:
    """The operands that stand on the command line."""
    meaning = code if args.codes else number
    elements = {name: [meaning(token) for token in words(text)] for name in VECTORS if (text := getattr(args, name)) is not None}
    if "a" not in elements or "b" not in elements:
        raise CommandError("the operands are missing: give --a and --b, or --random SEED")
    operands: dict[str, Any] = {"a_row": elements["a"], "b_col": elements["b"], "c": elements.get("c", 0), "codes": args.codes}
    operands |= {name: elements[name] for name in ("scale_a", "scale_b") if name in elements}
    if args.e is not None:
        operands["e"] = [code(digit) for text in words(args.e) for digit in text.removeprefix("0x")]
    return operands


def run_explain(args: argparse.Namespace) -> int:
    """Does what the words say. Raises CommandError."""
    targets = args.target or ["sm_90a"]
    try:
        op = check(args.spelling, targets[0])
        if args.random is None:
            operands = read(args)
        elif any(getattr(args, name) is not None for name in (*VECTORS, "e")):
            raise CommandError("--random draws all operands; leave --a, --b and the others out")
        elif args.random < 0:
            raise CommandError(f"--random {args.random}: a seed is a whole number from 0 on")
        else:
            operands = drawn(op, args.random)
        models = [changed(row_for(op, targets[0]).model, text) for text in args.what_if]
        if len(targets) == 1 and not models:
            explained = explain(op, **operands, target=targets[0])
        else:
            explained = explain(op, **operands, target=targets + [targets[0]] * len(models), model=[None] * len(targets) + models)
    except (ValueError, TypeError) as error:
        raise CommandError(str(error)) from error
    if args.json:
        print(json.dumps(explained.to_dict(), indent=1))
    elif isinstance(explained, Explanations):
        full = [e.text(args.colour) for e in explained.explanations] if args.steps else []
        print("\n\n".join([*full, explained.text()]))
    else:
        print(explained.text(args.colour))
    return 0
