"""What a test proves: the rows of the table in docs/verified.md, which `tests/proof_table.py` writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

SOLVER, ENUMERATION, INTERVALS = "solver", "enumeration", "intervals"


class Proof(NamedTuple):
    """One row."""

    formulas: tuple[str, ...]  # such as "rounding.encode", of `tcemu.engine.arithmetic.step`
    method: str
    domain: str  # formats, widths and values


PROOFS: dict[str, Proof] = {}  # by the name of the test function


def proves(*formulas: str, by: str, domain: str) -> Callable[[Any], Any]:
    """Marks a test as a proof of formulas.

    Args:
        *formulas: Their names with their modules.
        by: SOLVER, ENUMERATION or INTERVALS.
        domain: The formats, widths and values for which it holds.
    """

    def mark(test: Any) -> Any:
        PROOFS[test.__name__] = Proof(formulas, by, domain)
        return test

    return mark
