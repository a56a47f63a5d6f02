"""The arithmetics of all targets that a GPU computes by an instruction of its own, from the models alone."""

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from tcemu.engine.architectures.lookup import target_rows
from tcemu.engine.architectures.model_rows import ROWS, ModelRow
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.backends.native.units import MATRICES, ArithmeticKey, match_arithmetic
from tcemu.engine.isa.legality import instructions
from tcemu.formats import Format


class Equality(NamedTuple):
    """An arithmetic of a target, and a row of a GPU that computes the same for these multiplicands."""

    target: str
    row: str  # its key
    multiplicands: tuple[Format, Format]
    unit: str  # the key of the GPU's row
    how: str  # EQUAL or FILLED
    evidence: str  # its level, of the GPU's row


@cache
def equalities(gpu: str) -> tuple[Equality, ...]:
    """What a GPU of this target computes by an instruction of its own, of all targets: from the models alone.

    A row is served by one of its own family, which takes the registers; products of dense matrices by one of MATRICES too.
    """
    found = []
    for row in ROWS:
        families = {row.family} if row.family.endswith(".sp") else {row.family, *MATRICES}
        own = [other for other in target_rows(gpu) if other.family in families and not other.toolkits]
        alike = [(pair, other, how) for other in own for pair, how in _pairs(row, other, gpu)]
        for target in row.targets:
            found += [Equality(target, row.label, pair, other.label, how, other.evidence.level) for pair, other, how in alike]
    return tuple(found)


def _pairs(row: ModelRow, own: ModelRow, gpu: str) -> Iterator[tuple[tuple[Format, Format], str]]:
    """The multiplicands for which the second row computes what the first does, each by its longest K."""
    limits = lambda one: (one.shapes, one.toolkits, one.clamped_metadata, one.c, one.kinds or (None,), one.satfinite)
    if limits(row) != limits(own):
        return
    for a, b in _multiplicands(gpu, own.family):
        both = {a, b} <= {*row.multiplicands} & {*own.multiplicands}
        for d in row.accumulators if both else ():
            spec = ProductSpec(a, b, row.c or d, d, 4 if row.shapes else max(256 // max(a.bits, 8), 4), clamp=row.satfinite)
            how = (
                match_arithmetic(ArithmeticKey.from_model(row.model, spec), ArithmeticKey.from_model(own.model, spec))
                if d in own.accumulators
                else ""
            )
            if how:
                yield (a, b), how


@cache
def _multiplicands(target: str, family: str) -> tuple[tuple[Format, Format], ...]:
    """The formats of A and B that a family takes, each pair once."""
    return tuple(sorted({(op.a, op.b) for op in instructions(target, family) if op.a and op.b}, key=str))
