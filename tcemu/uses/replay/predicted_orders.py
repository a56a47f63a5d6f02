"""Orders of shapes that nobody measured, by readable rules, with the share of measured shapes that each rule gets right.

`predict_order` knows three kinds of rules. nvjet, cuBLAS's kernels for aligned operands, cuts K if the slices stay long enough and the
output has few tiles. cuBLAS's other kernels are found by a decision tree, whose leaves name what cuBLASLt proposed for every shape there;
the proposal determines the order, as `kernel_choices` says. XLA without autotuning cuts K by the costs that its split-K pass estimates;
that rule is its source. Trees, thresholds and counts are data: `order_rules.json`, which `benchmarks/replay_rules.py` writes. A shape that
no rule covers is refused.

Source of XLA's rule: openxla/xla, xla/backends/gpu/transforms/splitk_rewriter.cc. Source of the fault of nvjet's split kernels: Triton's
fork for equivalence to cuBLAS, facebookexperimental/triton, bitequiv/cublas_match/cublas_gemm_bug_reproduce.py.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.product_kernels import nvjet_slices
from tcemu.operations.products.library.kernel_recipe import Merge, Slices
from tcemu.uses.replay.kernel_choices import TILE, ChoiceOrder, ChoiceTree, KernelChoice, choice_order, shape_features

RULES_FILE = Path(__file__).parent / "order_rules.json"
RULES_KIND, RULES_VERSION = "tcemu replay order rules", 2
Shape = tuple[int, int, int]  # m, n, k

# ---- the rules, and how often each was right


class NvjetRule(NamedTuple):
    """The thresholds of cuBLAS's rule."""

    min_chunk: int  # tiles of K in a slice, at least
    few_blocks: int  # output tiles times slices up to which K is cut into as many slices as `min_chunk` allows
    most_outputs: int  # outputs per such slice above which K is not cut
    largest_k: int  # K beyond it is refused where it may be cut


class RuleCount(NamedTuple):
    """The number of shapes that a rule covers, and of those that it gets right."""

    right: int
    asked: int

    @property
    def probability(self) -> float:
        """The mean of the share that is right, after a prior of half a success and half a failure."""
        return (self.right + 0.5) / (self.asked + 1)


class OrderRules(NamedTuple):
    """The contents of `order_rules.json`."""

    nvjet: NvjetRule
    trees: dict[str, ChoiceTree]  # by library
    counts: dict[str, RuleCount]  # by the name of a rule


@cache
def shipped_rules() -> OrderRules:
    """Read the rules of this package."""
    data = json.loads(RULES_FILE.read_text(encoding="utf-8"))
    if (data["kind"], data["version"]) != (RULES_KIND, RULES_VERSION):
        raise ValueError(f"{RULES_FILE.name}: expected {RULES_KIND!r} in version {RULES_VERSION}")
    trees = {name: ChoiceTree([KernelChoice(*choice) for choice in choices], root) for name, (choices, root) in data["trees"].items()}
    return OrderRules(NvjetRule(**data["nvjet"]), trees, {name: RuleCount(*count) for name, count in data["counts"].items()})


class OrderPrediction(NamedTuple):
    """The likely order of a product."""

    order: ChoiceOrder
    rule: str  # name of the rule
    why: str  # the rule, applied to this shape


# ---- nvjet

NVJET_GRAINS = {  # libraries, and the elements in a tile of K
    "torch-f16": 64, "torch-bf16": 64, "torch-e4m3": 128, "torch-e4m3-slow": 128, "torch-e5m2-e4m3": 128, "torch-e5m2-e4m3-slow": 128,
    "torch-e4m3-e5m2": 128, "torch-e4m3-e5m2-slow": 128,
}  # fmt: skip
SHORT_K, FEW_BLOCKS, MANY_OUTPUTS, BETWEEN = "nvjet: short K", "nvjet: few blocks", "nvjet: many outputs", "nvjet: one wave"
ALIGNMENT = 8  # N and K, in elements of 16 bits


def most_slices(tiles: int, min_chunk: int) -> int:
    """Return the largest number of slices with ceil(tiles / slices) >= min_chunk, or 1."""
    return max(1, (tiles - 1) // (min_chunk - 1)) if min_chunk > 1 else tiles


def predict_nvjet(rule: NvjetRule, grain: int, shape: Shape, sm_count: int) -> OrderPrediction | None:
    """Predict the slices of an aligned product of cuBLAS; None if no rule covers the shape."""
    m, n, k = shape
    if n % ALIGNMENT or k % ALIGNMENT:
        return None
    most = most_slices(-(-k // grain), rule.min_chunk)
    tiles = -(-m // TILE) * -(-n // TILE)
    limit = f"{rule.min_chunk} tiles of {grain}"
    if most == 1:
        return _nvjet_prediction(Slices.single(k), SHORT_K, f"K = {k} has no two slices of {limit}")
    if k > rule.largest_k:
        return None
    if m * n > rule.most_outputs * most:
        why = f"{m * n:,} outputs are more than {rule.most_outputs:,} for each of the {most} slices of {limit} that K = {k} has"
        return _nvjet_prediction(Slices.single(k), MANY_OUTPUTS, why)
    if tiles * most <= rule.few_blocks:
        why = f"{most} slices of {limit} and output tiles of {TILE} x {TILE} make {tiles * most} blocks, at most {rule.few_blocks}"
        return _nvjet_prediction(nvjet_slices(k, most, grain), FEW_BLOCKS, why)
    count = max(1, min(most, sm_count // tiles))
    why = f"{count} slices of {tiles} output tiles fill one wave of {sm_count} multiprocessors"
    return _nvjet_prediction(nvjet_slices(k, count, grain), BETWEEN, why)


def _nvjet_prediction(slices: Slices, rule: str, why: str) -> OrderPrediction:
    return OrderPrediction(ChoiceOrder(slices, Merge(), "nvjet"), rule, why)


# ---- what cuBLASLt proposes, by a tree

TREE_RULE, PROPOSED = "tree, {} proposals or more: {}", "proposal: {}"  # names of rules, with the kind of kernel
LEAF_SIZES = 6, 20, 60  # numbers of proposals in a leaf from which it counts as another rule


def predict_by_tree(tree: ChoiceTree, library: str, shape: Shape, sm_count: int) -> OrderPrediction | None:
    """Predict the order of a product by the choice in a leaf; None for vectors and K = 1, and without a choice whose order is known."""
    found = tree.find(shape_features(shape, sm_count)) if min(shape) > 1 else None
    order = choice_order(library, shape[2], found[0]) if found else None
    if found is None or order is None:
        return None
    choice, proposals, path = found
    size = max(size for size in LEAF_SIZES if size <= proposals)
    chosen = f"algorithm {choice.algorithm} with stages {choice.stages} and {choice.split_k} slices"
    why = f"cuBLASLt proposed {chosen} for all {proposals} shapes asked about where {path}"
    return OrderPrediction(order, TREE_RULE.format(size, order.kernels), why)


# ---- XLA

XLA_LIBRARIES = ("jax-f16", "jax-bf16")
XLA_SPLIT = "XLA: split-K pass"
XLA_TILE = 128
XLA_SPLITS = tuple(1 << i for i in range(12))
COMPUTE_WEIGHT, MEMORY_WEIGHT, REDUCTION_WEIGHT, REDUCTION_LAUNCH = 100.0, 0.194136, 193.1384, 4.36e7  # of Hopper
ALIGNED_ELEMENTS = 8  # of 16 bits in 16 bytes, to a multiple of which a slice is padded
FOLDED_FROM = 32  # slices from which the reduction folds them; fewer are added in ascending order


def xla_cost(shape: Shape, splits: int, sm_count: int) -> float:
    """Return the cost that XLA estimates for a product of 16-bit operands cut into `splits` slices on Hopper."""
    m, n, k = shape
    tile_m, tile_n = min(m, XLA_TILE), min(n, XLA_TILE)
    tiles = splits * -(-m // XLA_TILE) * -(-n // XLA_TILE)
    waves = max(1.0, tiles / (sm_count * (XLA_TILE * XLA_TILE / (tile_m * tile_n))))
    compute = 2.0 * tile_m * tile_n * -(-k // splits) * waves * COMPUTE_WEIGHT
    written = m * n * splits * (4 if splits > 1 else 2)
    memory = ((m + n) * k * 2 + written) * MEMORY_WEIGHT
    if splits == 1:
        return max(compute, memory)
    return max(compute, memory) + REDUCTION_LAUNCH + m * n * (4 * splits + 2) * REDUCTION_WEIGHT


def predict_xla(shape: Shape, sm_count: int) -> OrderPrediction | None:
    """Predict the slices of a product of XLA without autotuning; None for vectors, and for K = 1, which are no such products."""
    m, n, k = shape
    if min(m, n) < 2 or k < 2:
        return None
    splits = min(XLA_SPLITS, key=lambda count: xla_cost(shape, count, sm_count))
    if splits == 1:
        one = ChoiceOrder(Slices.single(k), Merge(), "XLA")
        return OrderPrediction(one, XLA_SPLIT, "XLA's split-K pass estimates the least cost for one slice")
    why = f"XLA's split-K pass estimates the least cost for {splits} slices"
    order = "folded" if splits >= FOLDED_FROM else "ascending"
    return OrderPrediction(ChoiceOrder(Slices.even(k, splits, ALIGNED_ELEMENTS), Merge(order), "XLA"), XLA_SPLIT, why)


# ---- both


def predict_order(library: str, shape: Shape, sm_count: int, rules: OrderRules | None = None) -> tuple[OrderPrediction, float]:
    """Predict the order in which a library adds.

    Args:
        library: Name of a profile.
        shape: M, N and K.
        sm_count: Number of the GPU's multiprocessors.
        rules: Other rules than the shipped ones.

    Returns:
        The prediction and its probability.

    Raises:
        NotModelled: No rule covers the library or the shape.
    """
    rules = shipped_rules() if rules is None else rules
    known = dict.fromkeys((*NVJET_GRAINS, *rules.trees, *XLA_LIBRARIES))
    if library not in known:
        raise NotModelled(f"no rule predicts orders of {library}; there are rules for {', '.join(known)}")
    if library in XLA_LIBRARIES:
        found = predict_xla(shape, sm_count)
        if found is None:
            raise NotModelled(
                f"{library}: no rule predicts the order of {' x '.join(map(str, shape))}; the rule covers M, N and K from 2 on"
            )
        return found, rules.counts[found.rule].probability
    predictions = [predict_nvjet(rules.nvjet, NVJET_GRAINS[library], shape, sm_count)] if library in NVJET_GRAINS else []
    if library in rules.trees and (not predictions or predictions[0] is None or predictions[0].rule == BETWEEN):
        predictions.append(predict_by_tree(rules.trees[library], library, shape, sm_count))
    likely = [(found, rules.counts[found.rule].probability) for found in predictions if found is not None]
    if not likely:
        covered = f"the rules cover N and K in multiples of {ALIGNMENT}, and K up to {rules.nvjet.largest_k} where K may be cut"
        tree = "its tree has no leaf there in which all proposals are one" if library in rules.trees else covered
        raise NotModelled(f"{library}: no rule predicts the order of {' x '.join(map(str, shape))}; {tree}")
    return max(likely, key=lambda one: one[1])
