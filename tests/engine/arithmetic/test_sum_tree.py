"""Trees of sums: one walk gives the same sums under every algebra, whatever the shape of the tree."""

from itertools import product

import jax
import numpy as np
import pytest
from support.sampling import sample_cases

from tcemu.engine.arithmetic.sum_tree import (
    Chain,
    Concat,
    Join,
    evaluate,
    grid_shape,
    join_as_data,
    ordered_pairs,
    pad_turns,
    stages,
)
from tcemu.operations.functional.torch_cuda.reduce_plans import ReduceCall, reduce_tree
from tcemu.operations.functional.torch_cuda.reductions import reduce_tree_values
from tcemu.operations.products.library.numpy_sums import FloatSums
from tcemu.uses.drift.cpu_sums import inner_tree, outer_tree
from tcemu.uses.drift.sum_evaluation import terms_first

ORDERS = ("ascending", "descending", "tree", "folded", "paired")


def in_numpy(tree, x):
    terms = terms_first(x, -0.0)
    return evaluate(tree, FloatSums(terms, terms.shape[1:]))


def terms(count, seed=0):
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def in_turn(values):
    total = np.float32(0)
    for value in values:
        total = total + value
    return total


def test_a_chain_of_lanes_and_a_join():
    x = terms(6)
    tree = Join(Chain(np.arange(6).reshape(3, 2)))
    assert grid_shape(tree) == () and in_numpy(tree, x) == ((x[0] + x[2]) + x[4]) + ((x[1] + x[3]) + x[5])


def test_sums_of_unlike_trees_stand_side_by_side():
    x = terms(9)
    tree = Join(Concat((Chain(np.arange(7)[:, None]), Chain(np.array([[7, 8]]), from_first=True))), "descending", from_zero=True)
    assert in_numpy(tree, x) == ((np.float32(0) + x[8]) + x[7]) + in_turn(x[:7])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("from_zero", [False, True])
def test_stages_data_and_pairs_in_turn_are_one_order(order, from_zero):
    """Additions in stages, as data with sums in vain, and one after the other."""
    for count in (1, 2, 3, 5, 8, 13):
        x = terms(count, count)
        join = Join(Chain(np.arange(count)[None], from_first=True), order, from_zero)
        sums = {**dict(enumerate(x)), count: np.float32(0)}
        pairs = ordered_pairs(order, count, from_zero)
        for to, origin in pairs:
            sums[to] = sums[to] + sums[origin]
        expected = sums[pairs[-1][0] if pairs else 0]
        assert in_numpy(join, x) == expected
        wide = join_as_data(Join(Chain(np.arange(count + 3)[None], from_first=True), order, from_zero), count, count + 3)
        padded = pad_turns(Chain(np.minimum(np.arange(count + 3), count)[None], from_first=True))
        assert (count == 1 and not from_zero) or in_numpy(wide, np.append(x, [9, 9, 9]).astype(np.float32)) == expected
        assert len(padded.places) == 1


def test_stages_share_no_sum_and_lose_none_that_is_read():
    for order in ORDERS:
        for count in range(2, 20):
            live = set(range(count))
            for to, origin, is_all in stages(ordered_pairs(order, count)):
                one, other = (np.atleast_1d(np.arange(count)[index]).tolist() for index in (to, origin))
                assert set(one + other) <= live and len(set(one + other)) == 2 * len(one)
                live = set(one) if is_all else live
            assert ordered_pairs(order, count)[-1][0] in live


CASCADES = {
    "inner": inner_tree, "outer, grouped": lambda k: outer_tree(k, True), "outer, four": lambda k: outer_tree(k, False),
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    sample_cases(product(CASCADES, (5, 37, 300)), [("outer, grouped", 37), ("inner", 300)], lambda case: f"{case[0]} {case[1]}"),
)
def test_torch_sums_of_a_cpu_are_the_same_in_jax(case):
    """The cascades of PyTorch's sums, which have chains of chains and a remainder, by codes in JAX."""
    name, k = case
    x, tree = terms(k, k), CASCADES[name](k)
    codes = jax.jit(lambda words: reduce_tree_values("sum", tree, words))(x.view(np.uint32))
    assert np.asarray(codes).view(np.float32) == in_numpy(tree, x)


@pytest.mark.parametrize(
    "call",
    [ReduceCall(1, 5), ReduceCall(33, 5), ReduceCall(129, 5), ReduceCall(515, 3, vector=8), ReduceCall(900, 2), ReduceCall(100, 7, False),
     ReduceCall(300, 7, is_split=True), ReduceCall(140_000, 1)],
    ids=str,
)  # fmt: skip
def test_a_reduction_takes_every_element_once(call):
    for shift in range(call.vector):
        node = reduce_tree(call, shift)
        while isinstance(node, Join):
            node = node.child
        places = node.places[node.places >= 0]
        assert np.sort(places).tolist() == list(range(call.terms))
