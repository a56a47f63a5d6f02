"""`identify` finds the arithmetics that give every word of each operation of one record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tcemu.base.results import Result, Table
from tcemu.engine.isa.targets import resolve_target
from tcemu.operations.products.library.kernel_json import to_dict
from tcemu.uses.drift.alignment import MOVEMENTS
from tcemu.uses.drift.causes import MAX_TWINS, explain_result, fit_recipe
from tcemu.uses.drift.prediction import EQUAL, operator_name, predict_operation, recorded_kernels
from tcemu.uses.drift.records import Operation, Record, RecordSource, read_values
from tcemu.uses.replay.aten_operations import EXACT as ATEN_EXACT
from tcemu.uses.replay.order_candidates import TARGETS

EXACT = ("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "select_n", "max", "min", "neg", "abs", "sign", "floor", "ceil", "round")


class IdentifiedOperation(NamedTuple):
    """The arithmetics of one operation.

    Attributes:
        number: Its number in the run.
        path: Path of the module.
        name: Name of the operation.
        elements: Number of words of its result.
        arithmetic: The plainest arithmetic that gives every word, in words; else the nearest with its misses, or the reason for none.
        twins: Further arithmetics that give every word.
        recipe: Kernel recipe of the sum, as a JSON value; None without a sum.
        is_explained: True if an arithmetic gives every word.
    """

    number: int
    path: str
    name: str
    elements: int
    arithmetic: str
    twins: tuple[str, ...]
    recipe: dict | None
    is_explained: bool


@dataclass(frozen=True)
class Identification(Result):
    """The arithmetics of the operations of one record.

    Attributes:
        record: Name of the record.
        operations: The operations that compute, in order. Movements and exact operations are left out.
    """

    record: str
    operations: tuple[IdentifiedOperation, ...]

    @property
    def unexplained(self) -> tuple[IdentifiedOperation, ...]:
        """The operations of which no arithmetic gives every word."""
        return tuple(line for line in self.operations if not line.is_explained)

    def __str__(self) -> str:
        counts = Counter((line.name, line.arithmetic) for line in self.operations if line.is_explained)
        lines = [f"{self.record}: {len(self.operations) - len(self.unexplained)} of {len(self.operations)} operations are explained"]
        lines += [f"  {count} {name}: {arithmetic}" for (name, arithmetic), count in counts.items()]
        for line in self.unexplained:
            where = f"{line.path}: " if line.path else ""
            lines.append(f"  {line.number} {where}{line.name}: {line.arithmetic}")
        return "\n".join(lines)

    def table(self) -> Table:
        """Return a table with a row for each operation."""
        columns = ("operation", "path", "name", "elements", "explained", "arithmetic", "twins")
        rows = tuple(
            (line.number, line.path, line.name, line.elements, line.is_explained, line.arithmetic, len(line.twins))
            for line in self.operations
        )
        return Table(f"arithmetics of {self.record}", columns, rows, {"unexplained": len(self.unexplained)})


def identify(record: RecordSource, *, targets: Sequence[str] = TARGETS, names: Sequence[str] | None = None) -> Identification:
    """Find the arithmetics that give every word of each operation of a record: the emulation of a whole run, operation by operation.

    The record of a GPU whose library's kernels are known is compared with these first, as `predict` does: an operation whose kernel gives
    every word has no twins. Everything else is searched.

    Args:
        record: A record: a file, a finished recording, or its bytes.
        targets: GPUs whose tensor cores are tried, as "H100"; () for none, which is much faster.
        names: Names of the operations that are computed, as "aten.mm"; None: all that compute.

    Returns:
        An `Identification`.

    Raises:
        DamagedFile: The file is no record.
        ValueError: A target is unknown.
    """
    run, resolved = read_values(record), tuple(resolve_target(target) for target in targets)
    found = []
    for operation in run.operations:
        skipped = _is_exact(operation) if names is None else operation.name not in names
        if not skipped and operation.results and operation.results[0].dtype.startswith(("float", "bfloat")):
            found.append(_identify_operation(run, operation, resolved))
    return Identification(run.name, tuple(found))


def _is_exact(operation: Operation) -> bool:
    """Return whether every correct implementation gives the operation's words."""
    return operation.name in (*MOVEMENTS, *EXACT) or (operation.name.startswith("aten.") and operator_name(operation) in ATEN_EXACT)


def _identify_operation(run: Record, operation: Operation, targets: tuple[str, ...]) -> IdentifiedOperation:
    facts = operation.index, operation.path, operation.name, int(np.prod(operation.results[0].shape))
    kernels = recorded_kernels(run)
    if kernels is not None:  # the kernel of the library that made the record is no hypothesis if it gives every word
        line, answer = predict_operation(run, operation, *kernels)
        if line.verdict == EQUAL and line.words and answer is not None:
            recipe = None if answer.recipe is None else to_dict(answer.recipe)
            return IdentifiedOperation(*facts, f"{line.kernel}, {kernels[1]} on {kernels[0]}", (), recipe, True)
    side = explain_result(run, (operation,), operation.results[0], targets=targets, earlier=True)
    fits = side.fits
    words = [fit.words for fit in fits[: MAX_TWINS + 1]]
    return IdentifiedOperation(*facts, side.words, tuple(words[1:]), fit_recipe(fits[0]) if fits else None, bool(fits))
