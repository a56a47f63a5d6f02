"""Fragments as text, in the manner of the manual's figures: for each row of a matrix, which thread holds what."""

from collections.abc import Iterator

import numpy as np

from tcemu.layouts import Fragment
from tcemu.viz.pictures import holders

WIDEST = 16  # cells of a row that are printed


def table(fragment: Fragment) -> Iterator[str]:
    """One line a row, after a line for each place on the leading axes if there are any; T5:2-3 is lane 5's elements 2 and 3."""
    held = holders(fragment)[..., 0, :]  # of copies, the first
    for place in np.ndindex(*fragment.shape[:-2]):
        if place:
            yield f"[{', '.join(map(str, place))}]"
        rows = [cells(row) for row in held[place]]
        width = max(len(cell) for row in rows for cell in row)
        for number, row in enumerate(rows):
            more = f" ... {len(row) - WIDEST} more" if len(row) > WIDEST else ""
            yield f"{number:>3}  " + " ".join(cell.ljust(width) for cell in row[:WIDEST]).rstrip() + more


def cells(row: np.ndarray) -> list[str]:
    """Neighbouring columns that one lane holds as consecutive elements make one cell. row: int[columns, 2]."""
    merged: list[list[int]] = []  # lane, first element, last element
    for lane, element in row.tolist():
        if merged and merged[-1][0] == lane and merged[-1][2] == element - 1:
            merged[-1][2] = element
        else:
            merged.append([lane, element, element])
    return [f"T{lane}:{first}" + (f"-{last}" if last > first else "") for lane, first, last in merged]
