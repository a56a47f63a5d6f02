"""`tcemu explain`: one dot product of an instruction, step by step, on one target or on several side by side."""

import argparse
import json
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from tcemu.engine.architectures.lookup import find_row, require_product
from tcemu.engine.arithmetic.product_spec import product_spec
from tcemu.engine.formats.number_formats import Format
from tcemu.engine.isa.families import MatrixMultiply
from tcemu.engine.isa.grammar import shorten_text
from tcemu.engine.isa.legality import check
from tcemu.engine.isa.targets import DEFAULT_TARGET
from tcemu.engine.layouts.sparsity import defined_fields
from tcemu.faces.commands import EXAMPLE_SPELLING, OP_HELP, TARGET_HELP, CommandError, command_errors
from tcemu.faces.commands.arguments import apply_what_if
from tcemu.faces.commands.standard_streams import print_styled
from tcemu.uses.explanation.explain import EXPLAIN_ROUNDINGS, explain
from tcemu.uses.explanation.explanation_results import Explanations

NEGATIVE = re.compile(r"-(\.?\d|inf|nan)", re.IGNORECASE)  # the start of a negative number, which no option has
EXPONENT = re.compile(r"e([+-]?[\d_]+)$", re.IGNORECASE)
MAX_EXPONENT = 10_000  # far beyond f64, and still quick to expand
VECTORS = {
    "a": "elements of the row of A (sparse: the stored ones)",
    "b": "elements of the column of B (sparse: those that meet A's, or with --e all)",
    "c": "the element of C (default: 0)",
    "scale_a": "block scales of the row",
    "scale_b": "block scales of the column",
}


def add_explain(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "explain",
        description="Explains one dot product of an instruction: each term's exact value, alignment shift, kept and truncated "
        "bits, the sums, the roundings, the result and the exact result. Several targets are shown side by side, with their first "
        "divergence. A row shorter than the instruction's K is padded with zeros.",
        epilog=f"example: tcemu explain {EXAMPLE_SPELLING} --a -8192 -0.5 -0.25 -0.125 --b 1024 1 1 1 --c 0x1p23",
    )
    parser.add_argument("spelling", metavar="SPELLING", help=OP_HELP)
    parser.add_argument("--target", action="append", help=f"{TARGET_HELP}; repeat it to compare (default: {DEFAULT_TARGET})")
    for name, meaning in VECTORS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="+", metavar="X", help=meaning)
    parser.add_argument("--e", nargs="+", metavar="FIELD", help="sparsity metadata of the row: hex digits, a field of four bits each")
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--codes", action="store_true", help="elements are raw codes in hex (default: numbers, such as -0.1, 1/3, 0x1p-24, inf)"
    )
    given.add_argument("--random", type=int, metavar="SEED", help="draw all operands from this seed")
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="FIELD=VALUE[,...]",
        help="compare with the first target's arithmetic changed, such as fraction_bits=13,terms=8 (fields of tcemu.Model)",
    )
    parser.add_argument("--rounding", type=str.upper, choices=EXPLAIN_ROUNDINGS, default="RN", help="rounding of the numbers (default: RN)")
    parser.add_argument("--saturate", action="store_true", help="clamp numbers beyond the format's largest value (default: Inf or NaN)")
    parser.add_argument("--steps", action="store_true", help="with several targets: explain each in full before the comparison")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--colour", action="store_true", help="dim the truncated bits")
    parser.set_defaults(run=_run_explain)
    _accept_negative_numbers(parser)


def _accept_negative_numbers(parser: argparse.ArgumentParser) -> None:
    """Make argparse accept -1e-3, -1/3 and -inf, which it takes for options: a blank before them makes them values."""
    parse = parser.parse_known_args

    def parse_known_args(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        return parse([f" {word}" if NEGATIVE.match(word) else word for word in args or ()], namespace)

    parser.parse_known_args = parse_known_args  # pyright: ignore[reportAttributeAccessIssue]


def parse_number(token: str) -> float | Fraction:
    """A number exactly as written, so that it is rounded once."""
    try:
        if "0x" in token.lower():
            return float.fromhex(token)
        value, written = float(token), EXPONENT.search(token)
        if value == 0 and (written is None or not any(digit in "123456789" for digit in token[: written.start()])):
            return value  # with its sign
        if np.isnan(value) or (np.isinf(value) and "inf" in token.lower()):
            return value
        if written is not None and abs(int(written[1])) > MAX_EXPONENT:
            raise CommandError(f"{shorten_text(token)!r} is beyond every format, by far; write inf or 0 for it")
        return Fraction(token)
    except OverflowError:
        raise CommandError(f"{shorten_text(token)!r} is beyond every format, by far; write inf for it") from None
    except ValueError:
        try:
            return Fraction(token)
        except (ValueError, ZeroDivisionError):
            raise CommandError(f"{shorten_text(token)!r} is no number; write it as -0.1, 1e-3, 1/3, 0x1p-24, inf or nan") from None


def parse_code(token: str) -> int:
    """A raw code in hex."""
    try:
        return int(token, 16)
    except ValueError:
        raise CommandError(f"{shorten_text(token)!r} is no code; write it in hex, such as 3c00") from None


def split_elements(given: list[str]) -> list[str]:
    """The elements of an operand, separated by spaces or commas."""
    return [token for text in given for token in text.replace(",", " ").split()]


def draw_operands(op: MatrixMultiply, seed: int) -> dict[str, Any]:
    """Draw operands of one instruction: normal numbers over some orders of magnitude, integers over their range."""
    rng, signature = np.random.default_rng(seed), product_spec(op)

    def draw(fmt: Format, count: int) -> list[float]:
        if fmt.is_integer:
            low = -(1 << (fmt.bits - 1)) if fmt.signed else 0
            return rng.integers(max(low, -1000), min(fmt.max_magnitude, 1000) + 1, count).astype(float).tolist()
        return (rng.standard_normal(count) * np.exp2(rng.uniform(-4, 4, count))).tolist()

    operands: dict[str, Any] = {"a_row": draw(signature.a, signature.k), "b_col": draw(signature.b, op.k), "c": draw(signature.c, 1)[0]}
    if op.sparse:
        operands["e"] = rng.choice(np.array(defined_fields(op.chunk_size, op.ordered)), op.k // op.chunk_size)
    if op.scaling is not None:
        operands |= {name: np.exp2(rng.integers(-3, 4, signature.scale_vec)) for name in ("scale_a", "scale_b")}
    return operands


def parse_operands(args: argparse.Namespace) -> dict[str, Any]:
    """The operands of the command line."""
    meaning = parse_code if args.codes else parse_number
    elements = {name: [meaning(token) for token in split_elements(text)] for name in VECTORS if (text := getattr(args, name)) is not None}
    if "a" not in elements or "b" not in elements:
        raise CommandError("the operands are missing: give --a and --b, or --random SEED")
    operands: dict[str, Any] = {"a_row": elements["a"], "b_col": elements["b"], "c": elements.get("c", 0), "codes": args.codes}
    operands |= {name: elements[name] for name in ("scale_a", "scale_b") if name in elements}
    if args.e is not None:
        operands["e"] = [parse_code(digit) for text in split_elements(args.e) for digit in text.removeprefix("0x")]
    return operands


def _run_explain(args: argparse.Namespace) -> int:
    targets = args.target or [DEFAULT_TARGET]
    with command_errors(ValueError, TypeError):
        op = check(args.spelling, targets[0])
        if args.random is None:
            operands = parse_operands(args)
        elif any(getattr(args, name) is not None for name in (*VECTORS, "e")):
            raise CommandError("--random draws all operands; leave --a, --b and the others out")
        elif args.random < 0:
            raise CommandError(f"--random {args.random}: a seed is an integer from 0 on")
        else:
            operands = draw_operands(require_product(op), args.random)
        options = {"rounding": args.rounding, "saturate": args.saturate}
        models = [apply_what_if(find_row(op, targets[0]).model, text) for text in args.what_if]
        if len(targets) == 1 and not models:
            explained = explain(args.spelling, **operands, **options, target=targets[0])
        else:
            explained = explain(
                args.spelling, **operands, **options, target=targets + [targets[0]] * len(models), model=[None] * len(targets) + models
            )
    if args.json:
        print(json.dumps(explained.to_dict(), indent=1))
        return 0
    show = print_styled if args.colour else print
    if isinstance(explained, Explanations):
        full = [e.text(args.colour) for e in explained.explanations] if args.steps else []
        show("\n\n".join([*full, explained.text()]))
    else:
        show(explained.text(args.colour))
    return 0
