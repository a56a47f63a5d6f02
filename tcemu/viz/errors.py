"""Results as pictures. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tcemu.emulation.compare import Comparison
from tcemu.emulation.report import Report
from tcemu.fuzz.counts import Coverage
from tcemu.fuzz.inference.findings import Inferred
from tcemu.fuzz.runs import Run
from tcemu.study.claims.claim import Outcome
from tcemu.study.sweeps import Sweep

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = (Comparison, Report, Run, Coverage, Inferred, Sweep, Outcome)


def plot(result: Comparison | Report | Run | Coverage | Inferred | Sweep | Outcome) -> Figure:
    """`result.plot()` of what `tcemu.compare`, `tcemu.fuzz`, `tcemu.study` and the report of `tcemu.emulate` give: a matplotlib Figure.

    Raises ImportError if matplotlib is not installed, TypeError for another result.
    """
    if not isinstance(result, DRAWN):
        raise TypeError(f"result: got {type(result).__name__}; wanted one of {', '.join(one.__name__ for one in DRAWN)}")
    return result.plot()
