"""`tcemu quantizers`: how libraries quantise, which of them give equal words, and on which inputs they part."""

import argparse
import sys

from tcemu.base.text import table_lines, wrap_lines
from tcemu.faces.commands import CommandError, command_errors
from tcemu.operations.quantize.contract_matrix import contract_matrix, special_words
from tcemu.operations.quantize.contract_rows import CONTRACTS, get_contract
from tcemu.operations.quantize.contracts import QuantizerContract


def add_quantizers(subparsers) -> None:
    """Add the command to argparse's `subparsers`."""
    parser = subparsers.add_parser(
        "quantizers",
        description="Prints the rules by which libraries quantise. With --matrix it compares every pair of contracts with equal formats on "
        "drawn blocks; with two names it prints a counterexample for each kind of input on which they part.",
        epilog="examples: tcemu quantizers; tcemu quantizers vllm_per_token; tcemu quantizers te_mxfp8 mslk_mxfp8; "
        "tcemu quantizers --matrix",
    )
    parser.add_argument("names", metavar="NAME", nargs="*", help="contracts (default: all)")
    parser.add_argument("--matrix", action="store_true", help="compare all pairs of the contracts")
    parser.add_argument("--blocks", metavar="N", type=int, default=2048, help="blocks per kind of input (default: 2048)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="seed of the draws (default: 0)")
    parser.set_defaults(run=_run_quantizers)


def _run_quantizers(args: argparse.Namespace) -> int:
    with command_errors(ValueError):
        chosen = [get_contract(name) for name in args.names] or list(CONTRACTS.values())
    if args.blocks < 1 or args.seed < 0:
        raise CommandError("--blocks needs a number of 1 or more, --seed of 0 or more")
    if args.matrix:
        print(contract_matrix([contract.name for contract in chosen], blocks=args.blocks, seed=args.seed))
        return 0
    if len(chosen) == 1:
        print("\n".join(describe_contract(chosen[0])))
        return 0
    if len(args.names) == 2:
        return _print_pair(chosen[0], chosen[1], args)
    rows = [(contract.name, contract.family, contract.versions, "; ".join(contract.libraries)) for contract in chosen]
    print("\n".join(table_lines(("contract", "formats", "version", "libraries"), rows, left=(0, 1, 2, 3))))
    print("tcemu quantizers NAME prints one; NAME NAME compares two; --matrix compares all.", file=sys.stderr)
    return 0


def describe_noise(contract: QuantizerContract) -> str:
    """Return in words what random bits a contract adds; "" for none."""
    bits = contract.noise_bits
    return f"; {bits} random bits added to amax and, less {(1 << bits) - 1 >> 1}, to each quotient" if bits else ""


def describe_contract(contract: QuantizerContract) -> list[str]:
    """Return a contract as lines of text; what it does with special values is computed."""
    words = special_words(contract)
    facts = [
        ("libraries", "; ".join(contract.libraries)),
        ("versions", contract.versions),
        ("formats", contract.family + (f", of {contract.only} alone" if contract.only else "")),
        ("share a scale", ", ".join(contract.extents)),
        ("rule", contract.scale.describe() + describe_noise(contract)),
        ("NaN in amax", "ignored" if contract.ignores_nan else "kept"),
        ("words", "; ".join(f"{name} -> {word}" for name, word in words.items())),
        ("source", contract.source),
        *([("note", contract.note)] if contract.note else []),
    ]
    width = max(len(name) for name, _ in facts) + 2
    lines = [contract.name]
    for name, text in facts:
        lines += wrap_lines(f"  {name.ljust(width)}{text}", " " * (width + 2))
    return lines


def _print_pair(left: QuantizerContract, right: QuantizerContract, args: argparse.Namespace) -> int:
    if left.family != right.family:
        raise CommandError(f"{left.name} has {left.family}, {right.name} {right.family}: their words cannot be compared")
    if left.name == right.name:
        raise CommandError(f"{left.name} is named twice; name two contracts")
    (found,) = contract_matrix([left.name, right.name], blocks=args.blocks, seed=args.seed).comparisons
    for divergence in found.divergences:
        equal = f"equal words on {divergence.compared} blocks" if divergence.compared else "a library leaves this open"
        text = (
            equal if divergence.example is None else f"{divergence.differing} of {divergence.compared} blocks differ. {divergence.example}"
        )
        print("\n".join(wrap_lines(f"{divergence.region + ':':15}{text}", " " * 15)))
    return 0
