"""All opcodes of a row's syntax, written out."""

from __future__ import annotations

from itertools import product

from tcemu.ptx.scalar.opcode_syntax import Row


def opcodes(name: str, row: Row) -> list[str]:
    """Yield every opcode of a row. Its `Prepare` rejects some combinations of comparisons and types."""
    found = []
    for line in row.lines:
        choices = []
        for part in line.split():
            names = part.removesuffix("?").split("|")
            choices.append([*names, ""] if part.endswith("?") else names)
        found += [".".join([name, *filter(None, chosen)]) for chosen in product(*choices)]
    return list(dict.fromkeys(found))
