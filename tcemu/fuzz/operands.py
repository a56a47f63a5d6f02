"""The operands of cases: their names, and codes of one or two words as Python integers."""

from typing import Any

import numpy as np
from jax import Array

from tcemu.formats import Format

# codes by the operand's name, the cases in front: "a", "b" and "c"; of a sparse instruction also the metadata "e", of a block-scaled one
# "scale_a" and "scale_b"
Operands = dict[str, Array]
HostOperands = dict[str, np.ndarray]  # the same as NumPy arrays
Vector = dict[str, list[int]]  # the operands of one element of D: "a" has K codes, "b" K, "c" one, the others those of its row and column


def as_integers(fmt: Format, codes: np.ndarray) -> np.ndarray:
    """Codes with one entry each: those of two words as Python integers, others as they are."""
    return codes[..., 0].astype(object) + (codes[..., 1].astype(object) << 32) if fmt.words == 2 else codes


def from_integers(fmt: Format, codes: Any) -> np.ndarray:
    """Codes as the format holds them: in its dtype, or as uint32[..., 2]. codes: an array of integers, one for each code."""
    if fmt.words == 1:
        return codes.astype(fmt.dtype)
    return np.stack([(codes & 0xFFFFFFFF).astype(np.uint32), (codes >> 32).astype(np.uint32)], axis=-1)
