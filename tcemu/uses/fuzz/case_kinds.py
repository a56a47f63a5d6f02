"""The kinds of cases: how the operands of a case are distributed, and how often each kind occurs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

EVERY = 255  # the largest share, and the span of all exponents
ALL = EVERY + 1  # a share that includes every element
MAX_WEIGHT = (1 << 31) - 1  # keeps the sum of all weights times a word within 64 bits
# bases: exponents of A and B drawn independently, or so that products meet an exponent at which a result changes
ANY_BASE, AIMED_BASE = 0, 1


class Kind(NamedTuple):
    """The distribution of one kind of case. Shares are out of 255 elements."""

    name: str
    weight: int
    base: int = ANY_BASE
    span: int = 0  # number of exponents above the base
    raw: bool = False  # every bit is drawn
    edge: int = 0  # share of edge fractions: zero, one bit, ones at either end
    special: int = 0  # share of zero, Inf, NaN, the first and last normal and subnormal numbers; for integers the limits of the range
    zero: int = 0  # share of zeros
    same_sign: bool = False
    spread: bool = False  # most terms lie below a few others by an alignment distance at which a result changes
    twins: bool = False  # terms come in pairs that cancel, except for the last bit of some


KINDS = (
    Kind("raw bits", 8, raw=True),
    Kind("edge values", 8, span=EVERY, edge=EVERY, special=16),
    Kind("near one another", 14, base=AIMED_BASE, span=3),
    Kind("any exponent", 8, span=EVERY, zero=16),
    Kind("subnormal", 6, base=AIMED_BASE, span=1, edge=64, zero=16),
    Kind("specials", 6, base=AIMED_BASE, span=6, special=24, zero=24),
    Kind("carries", 8, base=AIMED_BASE, edge=200, same_sign=True),
    Kind("few terms", 8, base=AIMED_BASE, span=10, edge=96, zero=200),
    Kind("alignment edges", 14, base=AIMED_BASE, edge=96, spread=True),
    Kind("near ties", 12, base=AIMED_BASE, edge=EVERY, zero=64, spread=True),
    Kind("cancellation", 14, base=AIMED_BASE, edge=64, spread=True, twins=True),
    Kind("near-cancelling alike", 8, base=AIMED_BASE, span=2, edge=64, twins=True),
)


def select_kinds(names: Sequence[str] | None = None, weights: Sequence[int] | None = None) -> tuple[Kind, ...]:
    """Select kinds by name, optionally with other weights.

    Args:
        names: Names from `tcemu.fuzz.KINDS`, each at most once. None selects all kinds.
        weights: One weight per selected kind, from 0 to 2^31 - 1, not all zero. None keeps the kinds' own weights.

    Returns:
        The selected kinds.

    Raises:
        ValueError: A name or a weight is invalid.
    """
    known = {kind.name: kind for kind in KINDS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"kinds: {name!r} is unknown; known kinds are {', '.join(map(repr, known))}")
    if names is not None and (not len(names) or len(set(names)) < len(names)):
        raise ValueError(f"kinds: got {list(names)}; expected at least one name, each once; weights set how often each kind occurs")
    kinds = KINDS if names is None else tuple(known[name] for name in names)
    if weights is not None:
        valid = all(isinstance(weight, int | np.integer) and 0 <= weight <= MAX_WEIGHT for weight in weights)
        if len(weights) != len(kinds) or not valid or not any(weights):
            raise ValueError(f"weights: got {list(weights)}; expected {len(kinds)} integers from 0 to 2^31 - 1, one per kind, not all 0")
        kinds = tuple(kind._replace(weight=int(weight)) for kind, weight in zip(kinds, weights, strict=True))
    return kinds


def kind_thresholds(kinds: Sequence[Kind]) -> np.ndarray:
    """Return uint32 thresholds: words below the i-th select one of the first i + 1 kinds, and the last kind takes the rest."""
    total = np.cumsum([kind.weight for kind in kinds])
    return np.array([min((int(part) << 32) // int(total[-1]), (1 << 32) - 1) for part in total[:-1]], np.uint32)
