"""Every instruction of values by the first part of its opcode: `PREPARE`. Several rows of one name are tried in their order."""

from __future__ import annotations

from tcemu.ptx.context import Prepare
from tcemu.ptx.scalar.float_table import FLOAT_ROWS
from tcemu.ptx.scalar.integer_table import INTEGER_ROWS
from tcemu.ptx.scalar.syntax import either

TABLES = (INTEGER_ROWS, FLOAT_ROWS)
NAMES = sorted({name.partition(".")[0] for table in TABLES for name in table})


def _prepare(name: str) -> Prepare:
    """A key may say more than the name, as "add.cc", where one name has several rows."""
    return either(*(row for table in TABLES for key, row in table.items() if key.partition(".")[0] == name))


PREPARE: dict[str, Prepare] = {name: _prepare(name) for name in NAMES}
