"""In which order terms are added, as a tree: what a model prescribes, and which model has the tree that a black box shows.

The probe is that of FPRev (Xie, Gao and Jia, arXiv 2411.00442): two leaves hold M and -M, all others one small number, so that the
result counts those outside the smallest subtree that holds both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Tree = int | tuple  # a leaf's number, or its children, added in one step; C is the last number
CHAINS = (None, "k", 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Order:
    """The fields of Model that say which term meets which."""

    terms: int
    groups: int = 1
    chain: int | str | None = None
    together: bool = False


def steps(order: Order, k: int) -> list[list[int]]:
    """The products of each step of one instruction with k of them."""
    dealt = np.arange(k).reshape(-1, order.groups, 2).swapaxes(0, 1).reshape(order.groups, -1) if order.groups > 1 else np.arange(k)[None]
    return [row[at : at + order.terms].tolist() for row in dealt for at in range(0, len(row), order.terms)]


def tree(order: Order, k: int) -> Tree:
    """How `arithmetic.program` adds k products and C, which is leaf number k."""
    found, running = steps(order, k), k

    def walk(start: Tree | None, some: Sequence[list[int]]) -> Tree:
        for one in some:
            members = one if start is None else [start, *one]
            start = tuple(members) if len(members) > 1 else members[0]
        assert start is not None
        return start

    if order.chain is None:
        return walk(running, found)
    length = len(found) if isinstance(order.chain, str) else max(1, order.chain * len(found) // k)
    chains = [walk(None, found[at : at + length]) for at in range(0, len(found), length)]
    if order.together:
        total: Tree = chains[0]
        for one in chains[1:]:
            total = total, one
        return running, total
    whole: Tree = running
    for one in chains:
        whole = whole, one
    return whole


def sizes(found: Tree, leaves: int) -> np.ndarray:
    """int [leaves, leaves]: the leaves of the smallest subtree that holds both; 0 on the diagonal."""
    table = np.zeros((leaves, leaves), int)

    def below(node: Tree) -> list[int]:
        if isinstance(node, int):
            return [node]
        parts = [below(child) for child in node]
        every = [leaf for part in parts for leaf in part]
        for i, part in enumerate(parts):
            for other in parts[i + 1 :]:
                table[np.ix_(part, other)] = table[np.ix_(other, part)] = len(every)
        return every

    below(found)
    return table


def orders(k: int) -> Iterator[Order]:
    """Every order of k products that a Model can have, the plainest first."""
    for chain in CHAINS:
        for groups in (1, 2, 4):
            if groups > 1 and k % (2 * groups):
                continue
            if isinstance(chain, int) and chain > k:
                continue
            for terms in range(1, k // groups + 1):
                # a chain of so many products holds whole steps
                if isinstance(chain, int) and chain * len(steps(Order(terms, groups), k)) % k:
                    continue
                yield Order(terms, groups, chain)
                if isinstance(chain, int):
                    yield Order(terms, groups, chain, together=True)


def matching(table: np.ndarray) -> Order | None:
    """The plainest order whose tree has this table of sizes, [k + 1, k + 1]; None if no model has."""
    k = len(table) - 1
    return next((order for order in orders(k) if np.array_equal(sizes(tree(order, k), k + 1), table)), None)
