"""How well do rules predict the orders that were measured? `python benchmarks/replay_rules.py`: accuracy, coverage and calibration.

Sets of shapes: those measured on an H200; those measured on an H100, of which every fifth round tests (`replay_products.study_shapes`), and
some held-out ones (`replay_gpu.py --held-out`); cuBLASLt's proposals on that H100 (`replay_proposals.py`). The thresholds for nvjet are
fitted on nine tenths of the H200's shapes and proposals and tried on the tenth, ten times; shapes that differ in the library alone stay
together. Trees are fitted on proposals for shapes that nobody measured. Probabilities are counted on measured shapes that do not test.
`--write` writes tcemu/uses/replay/order_rules.json and the tables of the documentation. `--models` prints which share of the products of
models is measured, predicted and refused. `--proposals FILE ...` makes the package's file of proposals, `--held-out SURVEY` the held-out
shapes.
"""

import argparse
import json
import lzma
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from replay_distil import lines_of
from replay_products import STUDY_UNITS, study_shapes, tests_rules

from tcemu.base.errors import NotModelled
from tcemu.operations.products.library.kernel_json import from_dict
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Slices, even_edges
from tcemu.uses.replay.kernel_choices import (
    NVJET,
    PROPOSALS_FILE,
    PROPOSALS_KIND,
    PROPOSALS_VERSION,
    STAGE_TILES,
    TILE,
    ChoiceTree,
    KernelChoice,
    choice_order,
    list_proposals,
    proposed_orders,
    shape_features,
)
from tcemu.uses.replay.kernel_profiles import (
    MIN_PROBABILITY,
    Profile,
    find_profile,
    likely_recipe,
    list_profiles,
    predict_recipe,
    proposed_recipe,
)
from tcemu.uses.replay.predicted_orders import (
    BETWEEN,
    FEW_BLOCKS,
    LEAF_SIZES,
    MANY_OUTPUTS,
    NVJET_GRAINS,
    PROPOSED,
    RULES_FILE,
    RULES_KIND,
    RULES_VERSION,
    SHORT_K,
    TREE_RULE,
    XLA_LIBRARIES,
    XLA_SPLIT,
    NvjetRule,
    OrderRules,
    RuleCount,
    Shape,
    most_slices,
    predict_nvjet,
    predict_order,
    shipped_rules,
)
from tcemu.uses.replay.summation_levels import equivalence_key
from tcemu.uses.replay.torch_products import ALIGNMENT, TorchProduct, choose_kernel

FOLDS, SEED = 10, 45
STUDY_LIBRARIES = tuple(STUDY_UNITS)
LIBRARIES = (*NVJET_GRAINS, "torch-tf32", *XLA_LIBRARIES)
DATA = Path(__file__).parents[1] / "docs" / "data"
KERNELS = ("CUTLASS", "nvjet", "XMMA", "f32 fma")
PLAIN_RULES = (SHORT_K, FEW_BLOCKS, MANY_OUTPUTS, BETWEEN)
RULES = (*PLAIN_RULES, XLA_SPLIT, *(TREE_RULE.format(size, kernels) for kernels in KERNELS for size in LEAF_SIZES))
PROPOSAL_RULES = tuple(map(PROPOSED.format, KERNELS))
HIGH = 0.99


GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
HELD_OUT = GOLDEN / "replay_held_out_h100.json.xz"
H100 = "NVIDIA H100"
STUDY = 1500  # rounds of `study_shapes` that were surveyed


class Answer(NamedTuple):
    """A shape whose order is known: a recipe that was measured, or the number of slices that cuBLASLt proposes."""

    library: str
    shape: Shape
    recipe: KernelRecipe | None
    proposed: int = 0
    gpu: str | None = None  # part of its name; None: the H200

    @property
    def profile(self) -> Profile:
        return find_profile(list_profiles(), self.library, None, self.gpu if self.library in STUDY_LIBRARIES else None)

    @property
    def aligned(self) -> bool:
        unit = 4 if self.library == "torch-tf32" else 8  # 16 bytes
        return not (self.shape[1] % unit or self.shape[2] % unit)

    @property
    def slices(self) -> Slices:
        if self.recipe is not None:
            return self.recipe.slices
        return Slices.even(self.shape[2], self.proposed, NVJET_GRAINS[self.library])


def profile_of(library: str, gpu: str | None = None) -> Profile:
    return find_profile(list_profiles(), library, None, gpu)


def measured_on_h200() -> list[Answer]:
    return [Answer(name, shape, p.kernel_recipe(shape)) for name in LIBRARIES for p in [profile_of(name)] for shape in p.shapes]


def fits_trees(number: int) -> bool:
    """Return True for a round of `study_shapes` whose proposals trees are fitted on."""
    return number % 5 in (0, 1)


@cache
def measured_on_h100() -> tuple[list[Answer], list[Answer]]:
    """Return the shapes that probabilities are counted on, and those that test."""
    rounds, parts = study_shapes(STUDY), ([], [])
    for name in STUDY_LIBRARIES:
        profile = profile_of(name, H100)
        for shape in profile.shapes:
            if not fits_trees(rounds[name, *shape]):
                parts[tests_rules(rounds[name, *shape])].append(Answer(name, shape, profile.kernel_recipe(shape), gpu=H100))
    return parts


def proposed_on_h100() -> list[Answer]:
    """Return the numbers of slices that were proposed for nvjet."""
    shapes = list_proposals().libraries
    return [
        Answer(name, shape, None, choice.split_k)
        for name in shapes
        for shape, choice in shapes[name].items()
        if choice.algorithm in NVJET and not (shape[1] % 8 or shape[2] % 8)
    ]


def proposed_on_h200() -> list[Answer]:
    """Return the numbers of slices that were proposed for layers of models at the last tokens of the last run in which K is cut."""
    table, found = proposed_orders(), []
    for (form, x, y), runs in table.curves.items():
        dtype, layout, *bias = form.split("-")
        lines = (x, y) if layout == "cr" else (y, x)
        if bias or any(length % ALIGNMENT for length in lines):
            continue
        cut = [
            (last - 1, table.orders[number][1])
            for last, number in zip(runs[2::2], runs[1::2], strict=False)
            if table.orders[number][:1] == ["nvjet cut"]
        ]
        for tokens, count in cut if layout == "cr" else cut[-1:]:
            m, n, k = (x, y, tokens) if layout == "cr" else (tokens, x, y)
            if not k % ALIGNMENT:
                found.append(Answer(f"torch-{dtype}", (m, n, k), None, count))
    return found


def known_answers() -> list[Answer]:
    """Return the shapes on which nvjet's thresholds are fitted, and rules counted."""
    return [*measured_on_h200(), *proposed_on_h100(), *proposed_on_h200()]


def held_out_on_h100() -> list[Answer]:
    data = json.loads(lzma.decompress(HELD_OUT.read_bytes()))
    return [Answer(name, (m, n, k), from_dict(recipe), gpu=H100) for name, m, n, k, recipe in data["recipes"]]


def write_proposals(paths: Sequence[Path], date: str) -> None:
    """Write the package's file of proposals from what `replay_proposals.py` and `replay_gpu.py --study` wrote."""
    parts, libraries = [json.loads(lzma.decompress(path.read_bytes())) for path in paths if path.suffix == ".xz"], {}
    surveyed = [line for line in lines_of(path for path in paths if path.suffix != ".xz") if line.get("proposed", [""])[0]]
    (machine,) = {json.dumps(part["machine"], sort_keys=True) for part in parts}
    machine = json.loads(machine)
    for library in parts[0]["answers"]:
        rows = {}
        for part in parts:
            places = [part["fields"].index(name) for name in KernelChoice._fields]
            rows |= {tuple(row[:3]): tuple(row[place] for place in places) for row in part["answers"][library]}
        for line in surveyed:
            if line["survey"] == library and isinstance(line["proposed"][0], dict):
                rows[line["m"], line["n"], line["k"]] = tuple(line["proposed"][0][name] for name in KernelChoice._fields)
        choices = sorted(set(rows.values()))
        numbers = {choice: number for number, choice in enumerate(choices)}
        libraries[library] = [choices, *map(list, zip(*((*shape, numbers[rows[shape]]) for shape in sorted(rows)), strict=True))]
    head = {"kind": PROPOSALS_KIND, "version": PROPOSALS_VERSION, "gpu": machine["gpu"], "sm_count": machine["sm_count"], "date": date}
    data = head | {"library_version": f"cuBLASLt {machine['cublaslt']}", "libraries": libraries}
    PROPOSALS_FILE.write_bytes(lzma.compress(json.dumps(data, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME))


def write_held_out(survey: Path) -> None:
    lines = [json.loads(line) for line in lzma.decompress(survey.read_bytes()).decode().splitlines()]
    recipes = [
        [line["survey"], line["m"], line["n"], line["k"], line["recipe"]]
        for line in lines
        if line.get("survey") in LIBRARIES and line.get("recipe") and line["wrong"] == 0
    ]
    machine = next(line["machine"] for line in lines if "machine" in line)
    HELD_OUT.write_bytes(lzma.compress(json.dumps({"machine": machine, "recipes": recipes}).encode(), preset=9))


# ---- fitting


def has_same_bits(one: KernelRecipe, other: KernelRecipe) -> bool:
    """Return True for one order, also where it has two descriptions for this K."""
    return one.has_order(other) or equivalence_key(one) == equivalence_key(other)


def answers(measured: Iterable[Answer], rules: OrderRules) -> list[tuple[str, bool, float]]:
    """The rule of each shape that a rule covers, if it is right, and its probability."""
    found = []
    for one in measured:
        profile = one.profile
        try:
            prediction, probability = predict_order(one.library, one.shape, profile.sm_count, rules)
        except NotModelled:
            continue
        if one.recipe is not None:
            right = has_same_bits(predict_recipe(profile, one.shape, rules), one.recipe)
        else:
            right = prediction.order.slices.dropped > 0 or prediction.order.slices.edges == one.slices.edges
        found.append((prediction.rule, right, probability))
    return found


def answers_by_proposal(measured: Iterable[Answer], rules: OrderRules) -> list[tuple[str, bool, float]]:
    """The same where cuBLASLt's proposal for the very shape is known and determines the order."""
    found = []
    for one in measured:
        choice = list_proposals().libraries.get(one.library, {}).get(one.shape)
        recipe = proposed_recipe(one.profile, one.shape, rules)
        if choice is not None and recipe is not None and one.recipe is not None:
            order = choice_order(one.library, one.shape[2], choice)
            assert order is not None and recipe.conditions.probability is not None
            found.append((PROPOSED.format(order.kernels), has_same_bits(recipe, one.recipe), recipe.conditions.probability))
    return found


def counts(measured: Sequence[Answer], rule: NvjetRule, trees: dict[str, ChoiceTree]) -> dict[str, RuleCount]:
    """How many shapes each rule covers, and how many it gets right. Proposals on which trees are fitted do not count for trees."""
    unknown = OrderRules(rule, {}, dict.fromkeys(RULES, RuleCount(0, 0)))
    found = answers(measured, unknown)
    unknown = OrderRules(rule, trees, dict.fromkeys(RULES, RuleCount(0, 0)) | {BETWEEN: RuleCount(0, 10)})
    fresh = answers((one for one in measured if one.recipe is not None or is_kept_back(one.shape)), unknown)
    found += [one for one in fresh if one[0] not in (*PLAIN_RULES, XLA_SPLIT)]
    rights = {name: [right for of, right, _ in found if of == name] for name in RULES}
    return {name: RuleCount(sum(right), len(right)) for name, right in rights.items()}


def is_kept_back(shape: Shape) -> bool:
    """Return True for a tenth of the shapes, on whose proposals no tree is fitted."""
    return zlib.crc32(repr(shape).encode()) % 10 == 0


def counts_of_proposals(measured: Iterable[Answer], rule: NvjetRule) -> dict[str, RuleCount]:
    found = answers_by_proposal(measured, OrderRules(rule, {}, dict.fromkeys(PROPOSAL_RULES, RuleCount(0, 0))))
    rights = {name: [right for of, right, _ in found if of == name] for name in PROPOSAL_RULES}
    return {name: RuleCount(sum(right), len(right)) for name, right in rights.items()}


# ---- trees

MIN_LEAF = LEAF_SIZES[0]  # proposals in a leaf that answers


def plain_choice(library: str, k: int, choice: KernelChoice) -> KernelChoice:
    """Return a choice with the same order at this K, one for all such choices."""
    order = choice_order(library, k, choice)
    if order is None:
        return KernelChoice(choice.algorithm, 0, 1, "none")
    if order.kernels != "CUTLASS":
        return KernelChoice(choice.algorithm, 0, max(1, choice.split_k), "none")
    stages = next((stage for stage, tile in STAGE_TILES.items() if tile == STAGE_TILES.get(choice.stages)), 0)
    single = len(order.slices.edges) == 2
    return KernelChoice(choice.algorithm, stages, 1 if single else choice.split_k, "none" if single else choice.reduction_scheme)


def fit_trees(rule: NvjetRule) -> dict[str, ChoiceTree]:
    """Fit a tree for each library, on proposals for shapes that count and test nothing, and that nvjet's rules leave open."""
    measured = {(one.library, *one.shape) for one in (*measured_on_h200(), *held_out_on_h100())}
    measured |= {shape for shape, number in study_shapes(STUDY).items() if not fits_trees(number)}
    proposals, trees = list_proposals(), {}
    for library, shapes in proposals.libraries.items():
        rows = []
        for shape, choice in shapes.items():
            sure = predict_nvjet(rule, NVJET_GRAINS[library], shape, proposals.sm_count) if library in NVJET_GRAINS else None
            if min(shape) > 1 and not is_kept_back(shape) and (library, *shape) not in measured and (sure is None or sure.rule == BETWEEN):
                rows.append((shape, plain_choice(library, shape[2], choice)))
        choices = sorted({choice for _, choice in rows})
        features = [shape_features(shape, proposals.sm_count) for shape, _ in rows]
        names = list(features[0])
        known = [choice_order(library, 64, choice) is not None for choice in choices]
        labels = np.array([choices.index(choice) for _, choice in rows])
        root = grow(np.array([[row[name] for name in names] for row in features]), labels, names, known)
        used = sorted(labels_of_leaves(root))
        trees[library] = ChoiceTree([choices[label] for label in used], renumber(root, used))
    return trees


def grow(x: np.ndarray, y: np.ndarray, names: Sequence[str], known: Sequence[bool]) -> list:
    """Grow a node by the comparison that lowers Gini's impurity most. Leaves are [label, proposals], or [] where these differ."""
    present, y_small = np.unique(y, return_inverse=True)
    if len(present) == 1 or len(y) < 2 * MIN_LEAF or not any(known[label] for label in present):
        return [int(present[0]), len(y)] if len(present) == 1 and known[present[0]] and len(y) >= MIN_LEAF else []
    one_hot = np.eye(len(present), dtype=np.float32)[y_small]
    total, best, size = one_hot.sum(0), (-1.0, 0, 0), len(y)
    for place in range(x.shape[1]):
        order = np.argsort(x[:, place], kind="stable")
        values = x[order, place]
        cuts = np.flatnonzero(values[1:] != values[:-1])
        cuts = cuts[(cuts + 1 >= MIN_LEAF) & (size - cuts - 1 >= MIN_LEAF)]
        if len(cuts):
            low = np.cumsum(one_hot[order], axis=0)[cuts]
            purity = (low**2).sum(1) / (cuts + 1) + ((total - low) ** 2).sum(1) / (size - cuts - 1)
            at = int(purity.argmax())
            best = max(best, (float(purity[at]), place, int(values[cuts[at]])), key=lambda one: one[0])
    if best[0] < 0:
        return []
    _, place, threshold = best
    is_low = x[:, place] <= threshold
    low, high = (grow(x[part], y[part], names, known) for part in (is_low, ~is_low))
    return [] if not low and not high else [names[place], threshold, low, high]


def labels_of_leaves(node: list) -> set[int]:
    return labels_of_leaves(node[2]) | labels_of_leaves(node[3]) if len(node) == 4 else set(node[:1])


def renumber(node: list, used: Sequence[int]) -> list:
    return [*node[:2], renumber(node[2], used), renumber(node[3], used)] if len(node) == 4 else [*map(used.index, node[:1]), *node[1:]]


# ---- nvjet's thresholds

LARGEST_K = 16384


def fit_nvjet(known: Sequence[Answer], grid: Sequence[int] = range(12, 33)) -> NvjetRule:
    """Fit the thresholds.

    `min_chunk` gets the most products of one output tile right; the largest such number is taken. `few_blocks` is as large as it can be
    without an error, and `most_outputs` the largest number of outputs per slice of a product that is cut.
    """
    nvjet = [one for one in known if one.library in NVJET_GRAINS and one.aligned and one.shape[2] <= LARGEST_K]
    cut = [(one, _tiles_of_k(one), len(one.slices.edges) > 2) for one in nvjet]

    def wrong(limit: int) -> int:
        """Products whose K is cut though it is too short, and those of one tile whose K is not cut into the most slices."""
        count = 0
        for one, tiles, is_cut in cut:
            most = most_slices(tiles, limit)
            if most == 1:
                count += is_cut
            elif _output_tiles(one) == 1:
                count += one.slices.edges != even_edges(one.slices.used, most, NVJET_GRAINS[one.library])
        return count

    limit = min(grid, key=lambda chunk: (wrong(chunk), -chunk))
    long = [(one, most_slices(tiles, limit), is_cut) for one, tiles, is_cut in cut if most_slices(tiles, limit) > 1]
    blocks = {True: [0], False: [1 << 30]}
    for one, most, _ in long:
        edges = even_edges(one.slices.used, most, NVJET_GRAINS[one.library])
        blocks[one.slices.edges == edges].append(most * _output_tiles(one))
    few = max(count for count in blocks[True] if count < min(blocks[False]))
    outputs = max((-(-one.shape[0] * one.shape[1] // most) for one, most, is_cut in long if is_cut), default=1)
    return NvjetRule(limit, few, outputs, LARGEST_K)


def fit(known: Sequence[Answer], rule: NvjetRule, trees: dict[str, ChoiceTree]) -> OrderRules:
    """Count how often rules are right: nvjet's and XLA's on `known`, the others on the shapes of an H100 too that do not test."""
    learned = measured_on_h100()[0]
    found = counts([*known, *learned], rule, trees)
    return OrderRules(rule, trees, found | counts_of_proposals(learned, rule))


def _tiles_of_k(one: Answer) -> int:
    return -(-one.shape[2] // NVJET_GRAINS[one.library])


def _output_tiles(one: Answer) -> int:
    return -(-one.shape[0] // TILE) * -(-one.shape[1] // TILE)


def as_json(rules: OrderRules, known: Sequence[Answer]) -> str:
    data = {
        "kind": RULES_KIND, "version": RULES_VERSION, "shapes": len(known), "nvjet": rules.nvjet._asdict(),
        "counts": {name: list(count) for name, count in rules.counts.items()}, "trees": rules.trees,
    }  # fmt: skip
    return json.dumps(data, separators=(",", ":")) + "\n"


# ---- reports, as tables in Markdown

Folds = Sequence[tuple[Sequence[Answer], OrderRules]]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def rule_lines(rules: OrderRules) -> list[str]:
    parts = [
        (*answers(part, rules), *(answers_by_proposal(part, rules) if by_proposal else ()))
        for part, by_proposal in ((measured_on_h200(), False), ([*measured_on_h100()[1], *held_out_on_h100()], True))
    ]
    text = lambda rights: f"{sum(rights):,} of {len(rights):,}" if rights else "none"
    rows = [
        (
            name,
            f"{count.right:,} of {count.asked:,}",
            *(text([r for of, r, _ in part if of == name]) for part in parts),
            f"{count.probability:.5f}",
        )
        for name, count in rules.counts.items()
    ]
    return markdown(("rule", "counted: right", "measured on the H200", "held out, on the H100", "probability"), rows)


def accuracy_lines(measured: Sequence[Answer], folds: Folds) -> list[str]:
    """Accuracy and coverage by library, where each shape was tried with rules that had not seen it."""
    rows = []
    for name in LIBRARIES:
        for aligned in (True, False):
            asked = sum(one.library == name and one.aligned == aligned for one in measured)
            parts = [([one for one in part if one.library == name and one.aligned == aligned], rules) for part, rules in folds]
            kept = [right for part, rules in parts for _, right, p in answers(part, rules) if p >= MIN_PROBABILITY]
            if asked:
                accuracy = f"{sum(kept)} of {len(kept)}, {sum(kept) / len(kept):.1%}" if kept else "none"
                rows.append((f"{name}, {'' if aligned else 'not '}aligned", str(asked), f"{len(kept) / asked:.1%}", accuracy))
    return markdown(("product", "shapes", f"predicted with {MIN_PROBABILITY} or more", "right"), rows)


def calibration_lines(folds: Folds) -> list[str]:
    """How many predictions are wrong, by their stated probability."""
    everything = [answer for part, rules in folds for answer in answers(part, rules)]
    rows = []
    for low, high, said in ((HIGH, 1.01, f"{HIGH} or more"), (0.9, HIGH, f"0.9 to {HIGH}"), (0.0, 0.9, "less than 0.9")):
        rights = [right for _, right, p in everything if low <= p < high]
        stated = [p for _, _, p in everything if low <= p < high]
        wrong = len(rights) - sum(rights)
        if rights:
            rows.append((said, f"{np.mean(stated):.4f}", f"{len(rights):,}", f"{wrong} ({wrong / len(rights):.1%})"))
    return markdown(("stated probability", "mean", "predictions", "wrong"), rows)


def cross_validate(known: Sequence[Answer], rules: OrderRules) -> list[str]:
    """The tables of accuracy and calibration: a tenth of the measured shapes by rules fitted on the rest, ten times; held-out shapes."""
    trees = rules.trees
    groups: dict[Shape, list[Answer]] = defaultdict(list)
    for one in known:
        groups[one.shape].append(one)
    shapes = sorted(groups)
    order = np.random.default_rng(SEED).permutation(len(shapes))
    folds = []
    for fold in range(FOLDS):
        held = {shapes[i] for i in order[fold::FOLDS]}
        part = [one for shape in shapes if shape not in held for one in groups[shape]]
        fitted = fit(part, fit_nvjet(part), trees)
        folds.append(([one for shape in shapes if shape in held for one in groups[shape] if one.recipe is not None], fitted))
    measured = [one for one in known if one.recipe is not None]
    other = [*measured_on_h100()[1], *held_out_on_h100()]
    others = [(other, rules)]
    lines = ["Measured on the H200, cross-validated:", "", *accuracy_lines(measured, folds), "", *calibration_lines(folds), ""]
    return [*lines, "Measured on the H100, held out:", "", *accuracy_lines(other, others), "", *calibration_lines(others)]


# ---- the products of models

ROWS = (1, 3, 8, 16, 37, 64, 100, 128, 256, 333, 512, 1000, 2048, 4096)


class ModelProducts(NamedTuple):
    """The products of a model's linear layers: (outputs, inputs) with how often a layer of the model has them, and the model once."""

    layers: int
    of_layer: dict[tuple[int, int], int]
    once: dict[tuple[int, int], int]
    bias: bool = False

    @property
    def products(self) -> dict[tuple[int, int], int]:
        return {shape: self.layers * count for shape, count in self.of_layer.items()} | self.once


MODELS = {
    "MiniLM-L6": ModelProducts(6, {(384, 384): 4, (1536, 384): 1, (384, 1536): 1}, {}, bias=True),
    "Llama-2 7B": ModelProducts(32, {(4096, 4096): 4, (11008, 4096): 2, (4096, 11008): 1}, {(32000, 4096): 1}),
    "Llama-3 8B": ModelProducts(32, {(4096, 4096): 2, (1024, 4096): 2, (14336, 4096): 2, (4096, 14336): 1}, {(128256, 4096): 1}),
    "Qwen3 0.6B": ModelProducts(
        28, {(2048, 1024): 1, (1024, 1024): 2, (1024, 2048): 1, (3072, 1024): 2, (1024, 3072): 1}, {(151936, 1024): 1}
    ),
    "Qwen3 8B": ModelProducts(36, {(4096, 4096): 2, (1024, 4096): 2, (12288, 4096): 2, (4096, 12288): 1}, {(151936, 4096): 1}),
}
LINEAR = {"torch-bf16": "bfloat16", "torch-f16": "float16"}  # libraries whose products are asked about as layers of PyTorch
MODEL_LIBRARIES = (*LINEAR, "torch-bf16, gradients", "torch-e4m3", "jax-bf16")
COLUMNS = ("measured", "proposed", "by rule", "refused")


def model_lines() -> list[str]:
    """The share of linear products that are measured, proposed, predicted by a rule and refused, by library and number of tokens."""
    rows = []
    for model, facts in MODELS.items():
        for library in MODEL_LIBRARIES:
            lines: dict[tuple[str, ...], list[int]] = defaultdict(list)
            for tokens in ROWS:
                lines[tuple(_shares(library, tokens, facts))].append(tokens)
            rows += [(model, library, ", ".join(map(str, tokens)), *shares) for shares, tokens in lines.items()]
    return markdown(("model", "library", "tokens", *COLUMNS, "least probability"), rows)


def _products(library: str, tokens: int, n: int, k: int, bias: bool) -> list[TorchProduct]:
    """Return PyTorch's products of a linear layer: the forward pass, or the gradients of its input and of its weight."""
    dtype = LINEAR[library.split(",")[0]]
    if library in LINEAR:
        return [TorchProduct(dtype, tokens, k, n, 1, "rc", "columns" if bias else None)]
    return [TorchProduct(dtype, tokens, n, k), TorchProduct(dtype, n, tokens, k, 1, "cr")]


def _known(library: str, tokens: int, n: int, k: int, bias: bool) -> Iterable[tuple[str, float | None]]:
    """Yield how the order of each product of a layer is known, and the probability of a proposal or a rule."""
    if library.split(",")[0] not in LINEAR:
        try:
            probability = likely_recipe(profile_of(library), (tokens, n, k), MIN_PROBABILITY).conditions.probability
            yield ("measured" if probability is None else "by rule"), probability
        except NotModelled:
            yield "refused", None
        return
    for call in _products(library, tokens, n, k, bias):
        try:
            choice = choose_kernel(call)
            yield (choice.source if choice.source in COLUMNS else "measured"), choice.probability
        except NotModelled:
            yield "refused", None


def _shares(library: str, tokens: int, facts: ModelProducts) -> Iterable[str]:
    sums, least = dict.fromkeys(COLUMNS, 0), 1.0
    for (n, k), count in facts.products.items():
        for how, probability in _known(library, tokens, n, k, facts.bias):
            sums[how] += count
            least = min(least, probability or 1.0)
    yield from (f"{count / sum(sums.values()):.0%}" for count in sums.values())
    yield f"{least:.4f}" if sums["proposed"] + sums["by rule"] else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proposals", type=Path, nargs="+", metavar="FILE", help=f"write {PROPOSALS_FILE.name}")
    parser.add_argument("--date", help="of the proposals")
    parser.add_argument("--held-out", type=Path, metavar="SURVEY", help=f"write {HELD_OUT.name}")
    parser.add_argument("--models", action="store_true", help="print the shares of models' products instead")
    parser.add_argument("--write", action="store_true", help=f"write {RULES_FILE.name} and the tables too")
    args = parser.parse_args()
    if args.proposals:
        write_proposals(args.proposals, args.date)
    if args.held_out:
        write_held_out(args.held_out)
    if args.models:
        print("\n".join(model_lines()))
        return 0
    known = known_answers()
    rule = fit_nvjet(known)
    rules = fit(known, rule, fit_trees(rule))
    lines = [*rule_lines(rules), "", *cross_validate(known, rules)]
    print("\n".join(lines))
    if args.write:
        RULES_FILE.write_text(as_json(rules, known))
        shipped_rules.cache_clear()
        (DATA / "replay_rules.md").write_text("\n".join(lines) + "\n")
        (DATA / "replay_models.md").write_text("\n".join(model_lines()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
