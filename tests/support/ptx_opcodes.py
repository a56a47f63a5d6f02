"""The opcodes that a row's syntax has: all of them, written out."""

from __future__ import annotations

from itertools import product

from tcemu.ptx.scalar.syntax import Row


def opcodes(name: str, row: Row) -> list[str]:
    """Every opcode of a row; some combinations of comparisons and types are none, and their `Prepare` says so."""
    found = []
    for line in row.lines:
        choices = []
        for part in line.split():
            names = part.removesuffix("?").split("|")
            choices.append([*names, ""] if part.endswith("?") else names)
        found += [".".join([name, *filter(None, chosen)]) for chosen in product(*choices)]
    return list(dict.fromkeys(found))
