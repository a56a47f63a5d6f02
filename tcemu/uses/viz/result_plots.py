"""Results as pictures. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(result: Any) -> Figure:
    """Plot a result of `tcemu.compare`, `tcemu.fuzz` or `tcemu.study`, or a report of `tcemu.emulate`: `result.plot()`.

    Args:
        result: A result that has a method `plot`.

    Returns:
        A matplotlib Figure.

    Raises:
        ImportError: matplotlib is not installed.
        TypeError: `result` has no method `plot`.
    """
    if not callable(getattr(result, "plot", None)):
        raise TypeError(f"result: got {type(result).__name__}; expected a result of tcemu.compare, tcemu.fuzz or tcemu.study")
    return result.plot()
