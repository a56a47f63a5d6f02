"""A comparison of policies as a picture: the relative error of every product, a mark for each policy. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tcemu.emulation.compare import Comparison

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKS = "osD^vP*X<>"


def plot(comparison: Comparison) -> Figure:
    """The relative errors of what `tcemu.compare` found, products downwards, on a logarithmic axis; a matplotlib Figure.

    An error of 0 has no mark; a product that a policy leaves has none either. Raises ImportError if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("tcemu.viz.plot needs matplotlib: pip install 'tcemu[viz]'") from error
    products = list(dict.fromkeys(row.product.name for row in comparison))
    policies = list(dict.fromkeys(row.policy for row in comparison))
    figure = Figure(figsize=(8, 1.2 + 0.3 * len(products)), layout="constrained")
    axes: Any = figure.subplots()
    for number, policy in enumerate(policies):
        rows = [row for row in comparison if row.policy == policy]
        places = [products.index(row.product.name) for row in rows]
        errors = [row.relative_error if row.relative_error > 0 else np.nan for row in rows]
        axes.plot(errors, places, MARKS[number % len(MARKS)], label=policy)
    axes.set_xscale("log")
    axes.set_yticks(range(len(products)), products)
    axes.set_ylim(len(products) - 0.5, -0.5)
    axes.set_xlabel("relative error")
    axes.grid(axis="x", alpha=0.3)
    if policies:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    return figure
