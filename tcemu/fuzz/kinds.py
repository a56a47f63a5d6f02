"""Kinds of cases, a row each: where their exponents lie, which fractions and specials they have, and what their terms do to each other."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

EVERY = 255  # of 255 elements
ALL = EVERY + 1  # a share that leaves out none
MOST_WEIGHT = (1 << 31) - 1  # so that the sum of all fits 64 bits beside a word
ANY, AIMED = 0, 1  # bases: A's and B's exponents drawn each alone; or so that the products have an exponent at which something changes


class Kind(NamedTuple):
    """How the operands of one case are drawn. Shares are of 255 elements."""

    name: str
    weight: int
    base: int = ANY
    span: int = 0  # exponents above the base
    raw: bool = False  # all bits drawn
    edge: int = 0  # share of significant fractions: zero, one bit, ones at either end
    special: int = 0  # share of zero, Inf, NaN, and the first and last normal and subnormal numbers; of integers the ends
    zero: int = 0  # share of zeros
    same_sign: bool = False
    spread: bool = False  # most terms lie below a few others by an alignment distance at which something changes
    twins: bool = False  # terms in pairs that cancel, but for the last bit of some


KINDS = (
    Kind("raw bits", 8, raw=True),
    Kind("edge values", 8, span=EVERY, edge=EVERY, special=16),
    Kind("near one another", 14, base=AIMED, span=3),
    Kind("any exponent", 8, span=EVERY, zero=16),
    Kind("subnormal", 6, base=AIMED, span=1, edge=64, zero=16),
    Kind("specials", 6, base=AIMED, span=6, special=24, zero=24),
    Kind("carries", 8, base=AIMED, edge=200, same_sign=True),
    Kind("few terms", 8, base=AIMED, span=10, edge=96, zero=200),
    Kind("alignment edges", 14, base=AIMED, edge=96, spread=True),
    Kind("near ties", 12, base=AIMED, edge=EVERY, zero=64, spread=True),
    Kind("cancellation", 14, base=AIMED, edge=64, spread=True, twins=True),
    Kind("near-cancelling alike", 8, base=AIMED, span=2, edge=64, twins=True),
)


def chosen(names: Sequence[str] | None = None, weights: Sequence[int] | None = None) -> tuple[Kind, ...]:
    """Some of the kinds, all if none are named, with other weights if there are any. Raises ValueError for an unknown name or weight."""
    known = {kind.name: kind for kind in KINDS}
    for name in names or ():
        if name not in known:
            raise ValueError(f"kinds: {name!r} is none of {', '.join(map(repr, known))}")
    if names is not None and (not len(names) or len(set(names)) < len(names)):
        raise ValueError(f"kinds: got {list(names)}; wanted one at least, each once; weights say how often each comes")
    kinds = KINDS if names is None else tuple(known[name] for name in names)
    if weights is not None:
        whole = all(isinstance(weight, int | np.integer) and 0 <= weight <= MOST_WEIGHT for weight in weights)
        if len(weights) != len(kinds) or not whole or not any(weights):
            raise ValueError(f"weights: got {list(weights)}; wanted {len(kinds)} whole numbers from 0 to 2^31 - 1, one a kind, not all 0")
        kinds = tuple(kind._replace(weight=int(weight)) for kind, weight in zip(kinds, weights, strict=True))
    return kinds


def bounds(kinds: Sequence[Kind]) -> np.ndarray:
    """uint32: the words below which the first, the first two, ... kinds are drawn; the last kind takes what is left."""
    total = np.cumsum([kind.weight for kind in kinds])
    return np.array([min((int(part) << 32) // int(total[-1]), (1 << 32) - 1) for part in total[:-1]], np.uint32)
