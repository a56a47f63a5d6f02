"""Records of single operations, written by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tcemu.uses.drift.recorder import Recording

MATRIX_PRODUCT = {"dimension_numbers": [[[1], [0]], [[], []]]}


def recorded(operations: Sequence[tuple[str, list[np.ndarray], list[np.ndarray], dict[str, Any]]], framework: str = "jax") -> Recording:
    """A record of (name, operands, results, attributes)."""
    run = Recording(None, 1 << 30, None, None, framework)
    for name, operands, results, attributes in operations:
        run.add(name, operands, results, path="", source="", backward=False, attributes=attributes)
    run.close()
    return run


def recorded_product(a: np.ndarray, b: np.ndarray, d: np.ndarray) -> Recording:
    return recorded([("dot_general", [a, b], [d], MATRIX_PRODUCT)])
