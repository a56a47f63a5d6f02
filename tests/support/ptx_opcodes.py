"""All opcodes of a group of rows, written out."""

from __future__ import annotations

from itertools import product

from tcemu.engine.isa.statement_table import parse_line, statement_rows


def opcodes(key: str) -> list[str]:
    """Return every opcode of the lines of a key. Its `Prepare` rejects some combinations of comparisons and types."""
    found = []
    for row in statement_rows():
        if row.key == key:
            choices = [[*slot.choices, *([] if slot.required else [""])] for slot in parse_line(row.line)]
            found += [".".join([row.head, *filter(None, chosen)]) for chosen in product(*choices)]
    return list(dict.fromkeys(found))
