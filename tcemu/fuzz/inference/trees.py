"""In which order terms are added, as a tree: what a model prescribes, and which model has the tree that a black box shows.

The probe is that of FPRev (Xie, Gao and Jia, arXiv 2411.00442): two leaves hold M and -M, all others one small number, so that the
result counts those outside the smallest subtree that holds both.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from tcemu.arithmetic.order import Order

Tree = int | tuple  # a leaf's number, or its children, added in one step; C is the last number
CHAINS = (None, "k", 2, 4, 8, 16, 32)


def tree(order: Order, k: int) -> Tree:
    """How `arithmetic.program` adds k products and C, which is leaf number k."""
    accumulator: Tree = k
    if order.chain is None:
        return _added(accumulator, order.steps(k))
    chains = [_added(None, steps) for steps in order.chains(k)]
    if order.together:
        return accumulator, _one_after_the_other(chains[0], chains[1:])
    return _one_after_the_other(accumulator, chains)


def _added(start: Tree | None, steps: Sequence[list[int]]) -> Tree:
    """Steps one after the other, each with what the one before left."""
    running = start
    for products in steps:
        members = products if running is None else [running, *products]
        running = tuple(members) if len(members) > 1 else members[0]
    assert running is not None
    return running


def _one_after_the_other(start: Tree, others: Sequence[Tree]) -> Tree:
    """Sums of two: the others are added one by one."""
    for other in others:
        start = start, other
    return start


def sizes(root: Tree, leaves: int) -> np.ndarray:
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

    below(root)
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
                if isinstance(chain, int) and chain * Order(terms, groups).steps_of_instruction(k) % k:
                    continue
                yield Order(terms, groups, chain)
                if isinstance(chain, int):
                    yield Order(terms, groups, chain, together=True)


def matching(table: np.ndarray) -> Order | None:
    """The plainest order whose tree has this table of sizes, [k + 1, k + 1]; None if no model has."""
    k = len(table) - 1
    return next((order for order in orders(k) if np.array_equal(sizes(tree(order, k), k + 1), table)), None)
