"""The order of a sum as a tree of data, and the one walk over it. What the values are and how two are added is an `Algebra`.

A tree describes sums of one order that run side by side: a `Chain` has a grid of accumulators, such as [slices, lanes] or
[blocks, warps, lanes, registers], and a `Join` adds the accumulators along the last axis of the grid. So a loop of a thread is a chain,
its unrolled registers and the vectors that it loads are an axis of the grid, shuffles within a warp, sums through shared memory and stages
of a grid are joins, and Welford's moments are an algebra whose values are (mean, squares, count).

Example: 6 terms in two lanes, joined: (x0 + x2 + x4) + (x1 + x3 + x5) is

    Join(Chain(np.arange(6).reshape(3, 2)), "ascending")

Algebras: codes in JAX (`tcemu.operations.products.library.kernel_sums`), NumPy's f32 (`tcemu.uses.drift.sum_evaluation`, `moments`) and
symbols (`tcemu.uses.replay.summation_levels`). `tcemu.uses.replay.recipe_divergence` walks without this module: it is the oracle.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.engine.formats.number_formats import Format

EMPTY = -1  # index of an element that is not there
Pairs = list[tuple[int, int]]
Flag = Any  # bool, or a bool array where programs are shared by data


@dataclass(frozen=True, eq=False)
class Chain:
    """Accumulators that take their elements in turn.

    Attributes:
        places: int32 [T, *grid]: index of the element that each accumulator takes in a turn, or EMPTY. [T, k] for instructions that take
            k elements at once, which run one after the other.
        closes: bool [T, *grid]: the accumulator is then added to its sum and starts again. None: the accumulators are the sums.
        slots: int32 [T]: number of the sum to which a closed accumulator belongs, for accumulators that run one after the other.
        from_first: Accumulators begin at -0, so that the first element is taken as it is; else at +0.
        restarted: A sum is the sum of several closed accumulators; else of one.
        from_zero: Such a sum begins at +0, not at its first accumulator.
        sums: Number of sums with `slots`; the grid of the result is then [sums].
    """

    # int32 [T, *grid]: index of the element that each accumulator takes in a turn, or EMPTY; [T, k] for instructions that take k elements
    # at once, which run one after the other
    places: Any
    closes: Any = None  # bool [T, *grid]: the accumulator is then added to its sum and starts again; None: the accumulators are the sums
    slots: Any = None  # int32 [T]: number of the sum of a closed accumulator, for accumulators that run one after the other
    from_first: Flag = False  # accumulators begin at -0, so that the first element is taken as it is; else at +0
    restarted: bool = False  # a sum is the sum of several closed accumulators; else of one
    from_zero: bool = False  # such a sum begins at +0, not at its first accumulator
    sums: int | None = None  # number of sums with `slots`; the grid of the result is then [sums]

    @property
    def grid(self) -> tuple[int, ...]:
        """Shape of the accumulators that run side by side."""
        return tuple((self.places if self.closes is None else self.closes).shape[1:])


@dataclass(frozen=True, eq=False)
class Waiting:
    """Roundings of sums to a narrower format while they wait to be added.

    Attributes:
        fmt: The format.
        terms: Every sum that is added is rounded once.
        running: Every sum of two is rounded, and the first one before it is added.
    """

    fmt: Format
    terms: Flag = True  # every sum that is added is rounded once
    running: Flag = False  # every sum of two is rounded, and the first one before it is added


@dataclass(frozen=True, eq=False)
class Join:
    """The sums along the last axis of a grid are added.

    Attributes:
        child: The sums; None where the values are at hand (`join_values`).
        order: One of ORDERS.
        from_zero: The first sum is added to +0.
        waiting: Roundings on the way.
        pairs: int32 [P, 2]: additions (to, from) in place of `order`, as data, so that programs are shared by all orders of a length.
        total: Index of the total after the last of `pairs`.
        spares: Number of +0 that stand after the sums, to start from or to add in vain.
    """

    child: Node | None  # the sums; None where the values are at hand (`join_values`)
    order: str = "ascending"  # one of ORDERS
    from_zero: bool = False  # the first sum is added to +0
    waiting: Waiting | None = None  # roundings on the way
    pairs: Any = None  # int32 [P, 2]: additions (to, from) as data in place of `order`, so that all orders of a length share programs
    total: Any = None  # index of the total after the last of `pairs`
    spares: int = 0  # number of +0 that stand after the sums, to start from or to add in vain


@dataclass(frozen=True, eq=False)
class Concat:
    """The sums of several trees side by side, along the last axis of their grids."""

    children: tuple[Node, ...]


Node = Chain | Join | Concat
for kind, data, static in (
    (Chain, ("places", "closes", "slots", "from_first"), ("restarted", "from_zero", "sums")),
    (Waiting, ("terms", "running"), ("fmt",)),
    (Join, ("child", "waiting", "pairs", "total"), ("order", "from_zero", "spares")),
    (Concat, ("children",), ()),
):
    jax.tree_util.register_dataclass(kind, data_fields=data, meta_fields=static)


class Turn(NamedTuple):
    """One turn of a chain: the elements that its accumulators take, and the accumulators that close after it."""

    elements: Any  # as the algebra has read them
    closes: Any  # None if nothing closes
    slot: Any


class Addition(ABC):
    """The addition of two sums: all that a join needs. The methods that are not abstract are those of NumPy's arrays."""

    @abstractmethod
    def add(self, x: Any, y: Any) -> Any:
        """Add two sums."""

    @abstractmethod
    def round(self, fmt: Format, x: Any) -> Any:
        """Round sums to a format."""

    def put(self, sums: Any, index: Any, value: Any) -> Any:
        """Return the sums with others at an index of the first axis, or at several. The given sums are not used again."""
        sums[index] = value
        return sums

    def add_pairs(self, sums: Any, pairs: Any, adding: Callable[[Any, Any], Any]) -> Any:
        """Add along the first axis by pairs (to, from), a tuple of pairs or an array."""
        return add_in_stages(sums, tuple((int(to), int(origin)) for to, origin in pairs), adding, self)

    def extend(self, sums: Any, count: int) -> Any:
        """Append +0 along the first axis."""
        return np.concatenate([sums, np.zeros((count, *sums.shape[1:]), sums.dtype)])


class Algebra(Addition):
    """Values and their sums; the axes of a grid come first in an array of values."""

    @abstractmethod
    def zeros(self, grid: tuple[int, ...], negative: Any) -> Any:
        """Return +0 for each accumulator of a grid, or -0 where `negative`."""

    @abstractmethod
    def scan(self, turn: Callable[[Any, Turn], Any], state: Any, chain: Chain) -> Any:
        """Read the elements of a chain, call `turn` for each turn, and return the last state."""

    @abstractmethod
    def accumulate(self, running: Any, elements: Any) -> Any:
        """Take the elements of a turn into accumulators."""

    def where(self, mask: Any, x: Any, y: Any) -> Any:
        """Select by a mask over the leading axes."""
        mask = np.asarray(mask)
        return np.where(mask.reshape(mask.shape + (1,) * (np.ndim(x) - mask.ndim)), x, y)

    def concatenate(self, parts: list[Any], axis: int) -> Any:
        return np.concatenate(parts, axis)

    def move_first(self, sums: Any, axis: int) -> Any:
        return np.moveaxis(sums, axis, 0)


# ---- the walk


def evaluate(node: Node, algebra: Algebra) -> Any:
    """Compute the sums of a tree, [*grid, ...]."""
    if isinstance(node, Chain):
        return _run_chain(node, algebra)
    axis = len(grid_shape(node)) - isinstance(node, Concat)
    if isinstance(node, Concat):
        return algebra.concatenate([evaluate(child, algebra) for child in node.children], axis)
    assert node.child is not None, "a join without a child is computed by join_values"
    return join_values(node, algebra.move_first(evaluate(node.child, algebra), axis), algebra)


def grid_shape(node: Node) -> tuple[int, ...]:
    if isinstance(node, Chain):
        return node.grid if node.sums is None else (node.sums,)
    if isinstance(node, Concat):
        grids = [grid_shape(child) for child in node.children]
        return (*grids[0][:-1], sum(grid[-1] for grid in grids))
    assert node.child is not None, "a join without a child has no grid"
    return grid_shape(node.child)[:-1]


def _run_chain(chain: Chain, algebra: Algebra) -> Any:
    begin = algebra.zeros(chain.grid, chain.from_first)
    if chain.closes is None:
        return algebra.scan(lambda running, turn: algebra.accumulate(running, turn.elements), begin, chain)

    def take(state: tuple[Any, Any], turn: Turn) -> tuple[Any, Any]:
        sums, running = state
        running = algebra.accumulate(running, turn.elements)
        if turn.closes is None:
            return sums, running
        total = sums if turn.slot is None else sums[turn.slot]
        closed = algebra.where(turn.closes, algebra.add(total, running) if chain.restarted else running, total)
        return closed if turn.slot is None else algebra.put(sums, turn.slot, closed), algebra.where(turn.closes, begin, running)

    # -0 + x is x: a sum that begins at its first accumulator. One to which no accumulator belongs stays as an accumulator begins.
    sums = algebra.zeros(grid_shape(chain), False if chain.from_zero else chain.from_first | chain.closes.any(0))
    return algebra.scan(take, (sums, begin), chain)[0]


def join_values(join: Join, sums: Any, algebra: Addition) -> Any:
    """Add sums [n, ...] along their first axis as a join says."""
    pairs, total, spares = join.pairs, join.total, join.spares
    if pairs is None:
        pairs = ordered_pairs(join.order, len(sums), join.from_zero)
        spares = int(join.from_zero or len(sums) == 0)
        total = pairs[-1][0] if pairs else 0
    sums = algebra.extend(sums, spares) if spares else sums
    if len(pairs) == 0:  # a single sum does not wait
        return sums[0]
    waiting, adding = join.waiting, algebra.add
    if waiting is not None:
        round_sums = partial(algebra.round, waiting.fmt)
        sums = select(waiting.terms, lambda: round_sums(sums), lambda: sums)
        first = pairs[0][0]
        sums = select(waiting.running, lambda: algebra.put(sums, first, round_sums(sums[first])), lambda: sums)

        def adding(x: Any, y: Any) -> Any:
            exact = algebra.add(x, y)
            return select(waiting.running, lambda: round_sums(exact), lambda: exact)

    return algebra.add_pairs(sums, pairs, adding)[total]


def select(flag: Flag, one: Callable[[], Any], other: Callable[[], Any]) -> Any:
    """Return one of the two. Where the flag is static, the other one is not computed."""
    if isinstance(flag, bool):
        return one() if flag else other()
    return jnp.where(flag, one(), other())


def add_in_stages(sums: Any, pairs: tuple[tuple[int, int], ...], adding: Callable[[Any, Any], Any], algebra: Addition) -> Any:
    """Add along the first axis by pairs (to, from). Pairs that do not depend on each other are added at once.

    Sums that no later pair reads, and that are not the total, may be left out of the result.
    """
    for to, origin, is_all in stages(pairs):
        total = adding(sums[to], sums[origin])
        sums = total if is_all else algebra.put(sums, to, total)
    return sums


# ---- orders


def _tree(count: int) -> Pairs:
    strides = (1 << level for level in range(max(count - 1, 0).bit_length()))
    return [(i, i + apart) for apart in strides for i in range(0, count - apart, 2 * apart)]


def _folded(count: int) -> Pairs:
    strides = (1 << level for level in reversed(range(max(count - 1, 0).bit_length())))
    return [(i, i + apart) for apart in strides for i in range(min(apart, count - apart))]


def _paired(count: int) -> Pairs:
    half, last = -(-count // 2), count - 1
    return [(i, i + half) for i in range(half) if i + half < last] + [(last, i) for i in range(min(half, last))]


# The additions of `count` sums by the order's name, as pairs (to, from). The total is at the last pair's `to`, or at 0 for one sum.
ORDERS: dict[str, Callable[[int], Pairs]] = {
    "ascending": lambda count: [(0, i) for i in range(1, count)],
    "descending": lambda count: [(count - 1, i) for i in range(count - 2, -1, -1)],
    "tree": _tree,  # neighbours in pairs, then the pairs
    "folded": _folded,  # the upper half, from the largest power of two below their number on, onto the lower one, and so on
    "paired": _paired,  # i and i + half, where the latter is not the last; then the last with each of these
}
CHAINED = ("ascending", "descending")  # one running sum takes the others


@lru_cache(maxsize=4096)
def ordered_pairs(order: str, count: int, from_zero: bool = False) -> tuple[tuple[int, int], ...]:
    """Return the additions of `count` sums in an order, which a +0 at index `count` begins with `from_zero`."""
    pairs = ORDERS[order](count)
    if from_zero:
        first = pairs[0][0] if pairs else 0
        pairs = [(count, first), *((count, origin) for _, origin in pairs)] if count else []
    return tuple(pairs)


@lru_cache(maxsize=4096)
def stages(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[Any, Any, bool], ...]:
    """Group pairs (to, from) into stages whose pairs share no sum.

    Returns:
        For each stage two indices, numbers or slices where they are regular, and whether the first one has every sum that is read later.
    """
    found: list[list[tuple[int, int]]] = []
    used: set[int] = set()
    for pair in pairs:
        if not found or used.intersection(pair):
            found.append([])
            used.clear()
        found[-1].append(pair)
        used.update(pair)
    result: list[tuple[Any, Any, bool]] = []
    last = pairs[-1][0]
    for stage in reversed(found):
        targets = [to for to, _ in stage]
        is_all = len(stage) > 1 and targets == list(range(len(stage))) and last < len(stage)
        result.append((_as_index(targets), _as_index([origin for _, origin in stage]), is_all))
        last = max(last, *(max(pair) for pair in stage))
    return tuple(reversed(result))


def _as_index(numbers: list[int]) -> Any:
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    regular = step > 0 and numbers == list(range(numbers[0], numbers[-1] + 1, step))
    return numbers[0] if len(numbers) == 1 else slice(numbers[0], numbers[-1] + 1, step) if regular else np.array(numbers)


def join_as_data(join: Join, count: int, size: int, length: int = 0) -> Join:
    """Return a join whose additions are data, so that programs for one size are shared.

    Args:
        join: The join.
        count: Number of its sums.
        size: Number of sums that are given: further ones are not added.
        length: Least number of additions.
    """
    pairs = list(ordered_pairs(join.order, count, join.from_zero))
    pairs = [(size if to == count and join.from_zero else to, origin) for to, origin in pairs]
    total = np.array(pairs[-1][0] if pairs else 0, np.int32)
    pairs += [(size + 1, size + 1)] * max(size - count, length - len(pairs))
    return replace(join, order="", from_zero=False, pairs=np.array(pairs, np.int32).reshape(-1, 2), total=total, spares=2)


def pad_turns(chain: Chain) -> Chain:
    """Add turns that change nothing, so that their number is one of few and programs are shared."""
    turns = len(chain.places)
    missing = -turns % (1 << max(turns.bit_length() - 2, 0))

    def pad(x: Any, value: int) -> Any:
        return None if x is None else np.concatenate([x, np.full((missing, *x.shape[1:]), value, x.dtype)])

    last = 0 if chain.slots is None else chain.slots[-1]
    return replace(chain, places=pad(chain.places, EMPTY), closes=pad(chain.closes, 0), slots=pad(chain.slots, last))
