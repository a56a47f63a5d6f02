"""Results as pictures. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tcemu.emulation.compare import Comparison
from tcemu.fuzz.counts import Coverage
from tcemu.fuzz.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(result: Comparison | Run | Coverage) -> Figure:
    """`result.plot()` of what `tcemu.compare` or `tcemu.fuzz.run` found: a matplotlib Figure.

    Raises ImportError if matplotlib is not installed, TypeError for another result.
    """
    if not isinstance(result, Comparison | Run | Coverage):
        raise TypeError(f"result: got {type(result).__name__}; wanted what tcemu.compare or tcemu.fuzz.run gives")
    return result.plot()
