"""How well do rules predict the orders that were measured? `python benchmarks/replay_rules.py`: accuracy, coverage and calibration.

Three sets of shapes: those of the shipped profiles, measured on an H200; cuBLASLt's proposals on an H100 (`replay_proposals.py`); and the
held-out ones, measured on that H100 (`replay_gpu.py --held-out`). Thresholds and probabilities are fitted on nine tenths of the first two
and tried on the tenth, ten times; shapes that differ in the library alone stay together. Then all of the first two are tried on the third.
`--write` writes tcemu/replay/order_rules.json and the tables of the documentation. `--models` prints which share of the products of models
is measured, predicted and refused. `--distil PROPOSALS SURVEY` makes the files of the last two sets from what the GPU wrote.
"""

import argparse
import json
import lzma
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from replay_products import LAYERS

from tcemu.base.errors import NotModelled
from tcemu.products.library.kernel_json import from_dict
from tcemu.products.library.kernel_recipe import KernelRecipe, Slices, even_edges
from tcemu.replay.kernel_profiles import MIN_PROBABILITY, Profile, find_profile, likely_recipe, list_profiles, predict_recipe
from tcemu.replay.predicted_orders import (
    BETWEEN,
    FEW_BLOCKS,
    MANY_OUTPUTS,
    NVJET_GRAINS,
    RULES_FILE,
    RULES_KIND,
    RULES_VERSION,
    SHORT_K,
    TILE,
    XLA_LIBRARIES,
    XLA_SPLIT,
    NvjetRule,
    OrderRules,
    RuleCount,
    Shape,
    most_slices,
    predict_slices,
    shipped_rules,
)

FOLDS, SEED = 10, 45
LIBRARIES = (*NVJET_GRAINS, *XLA_LIBRARIES)
DATA = Path(__file__).parents[1] / "docs" / "data"
RULES = (SHORT_K, FEW_BLOCKS, MANY_OUTPUTS, BETWEEN, XLA_SPLIT)
HIGH = 0.99


GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
PROPOSALS, HELD_OUT = GOLDEN / "replay_proposals_h100.json.xz", GOLDEN / "replay_held_out_h100.json.xz"
NVJET = 66  # cuBLASLt's number of the algorithm


class Answer(NamedTuple):
    """A shape whose order is known: a recipe that was measured, or the number of slices that cuBLASLt proposes."""

    library: str
    shape: Shape
    recipe: KernelRecipe | None
    proposed: int = 0

    @property
    def aligned(self) -> bool:
        return not (self.shape[1] % 8 or self.shape[2] % 8)

    @property
    def slices(self) -> Slices:
        if self.recipe is not None:
            return self.recipe.slices
        return Slices.even(self.shape[2], self.proposed, NVJET_GRAINS[self.library])


def profile_of(library: str) -> Profile:
    return find_profile(list_profiles(), library, None, None)


def measured_on_h200() -> list[Answer]:
    return [Answer(name, shape, p.kernel_recipe(shape)) for name in LIBRARIES for p in [profile_of(name)] for shape in p.shapes]


def read(path: Path) -> dict:
    return json.loads(lzma.decompress(path.read_bytes()))


def proposed_on_h100() -> list[Answer]:
    shapes = read(PROPOSALS)["slices"]
    return [Answer(library, (m, n, k), None, count) for library, rows in shapes.items() for m, n, k, count in rows]


def held_out_on_h100() -> list[Answer]:
    return [Answer(name, (m, n, k), from_dict(recipe)) for name, m, n, k, recipe in read(HELD_OUT)["recipes"]]


def distil(proposals: Path, survey: Path) -> None:
    """Write the two files of tests/golden. Of the proposals, those of aligned shapes are kept; all are of one algorithm."""
    found, lines = read(proposals), [json.loads(line) for line in lzma.decompress(survey.read_bytes()).decode().splitlines()]
    slices: dict[str, list[list[int]]] = {}
    for library, rows in found["answers"].items():
        if library in NVJET_GRAINS:
            aligned = [row for row in rows if not (row[1] % 8 or row[2] % 8)]
            assert {row[found["fields"].index("algorithm")] for row in aligned} == {NVJET}
            slices[library] = sorted([*row[:3], row[found["fields"].index("split_k")]] for row in aligned)
    recipes = [
        [line["survey"], line["m"], line["n"], line["k"], line["recipe"]]
        for line in lines
        if line.get("survey") in LIBRARIES and line.get("recipe") and line["wrong"] == 0
    ]
    for path, content in ((PROPOSALS, {"slices": slices}), (HELD_OUT, {"recipes": recipes})):
        path.write_bytes(lzma.compress(json.dumps({"machine": found["machine"]} | content).encode(), preset=9))


# ---- fitting


def answers(measured: Iterable[Answer], rules: OrderRules) -> list[tuple[str, bool, float]]:
    """The rule of each shape that a rule covers, if it is right, and its probability."""
    found = []
    for one in measured:
        profile = profile_of(one.library)
        try:
            prediction, probability = predict_slices(one.library, one.shape, profile.sm_count, rules)
        except NotModelled:
            continue
        if one.recipe is not None:
            right = predict_recipe(profile, one.shape, rules).has_order(one.recipe)
        else:
            right = prediction.slices.dropped > 0 or prediction.slices.edges == one.slices.edges
        found.append((prediction.rule, right, probability))
    return found


def counts(measured: Iterable[Answer], rule: NvjetRule) -> dict[str, RuleCount]:
    """How many shapes each rule covers, and how many it gets right."""
    unknown = OrderRules(rule, dict.fromkeys(RULES, RuleCount(0, 0)))
    found = {name: [right for of, right, _ in answers(measured, unknown) if of == name] for name in RULES}
    return {name: RuleCount(sum(rights), len(rights)) for name, rights in found.items()}


LARGEST_K = 16384


def fit(known: Sequence[Answer], grid: Sequence[int] = range(12, 33)) -> OrderRules:
    """Fit the thresholds, then count.

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
    rule = NvjetRule(limit, few, outputs, LARGEST_K)
    return OrderRules(rule, counts(known, rule))


def _tiles_of_k(one: Answer) -> int:
    return -(-one.shape[2] // NVJET_GRAINS[one.library])


def _output_tiles(one: Answer) -> int:
    return -(-one.shape[0] // TILE) * -(-one.shape[1] // TILE)


def as_json(rules: OrderRules, known: Sequence[Answer]) -> str:
    data = {
        "kind": RULES_KIND, "version": RULES_VERSION, "shapes": len(known), "nvjet": rules.nvjet._asdict(),
        "counts": {name: list(count) for name, count in rules.counts.items()},
    }  # fmt: skip
    return json.dumps(data, indent=1) + "\n"


# ---- reports, as tables in Markdown

Folds = Sequence[tuple[Sequence[Answer], OrderRules]]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def rule_lines(rules: OrderRules) -> list[str]:
    parts = [dict(counts(part(), rules.nvjet)) for part in (measured_on_h200, held_out_on_h100)]
    text = lambda count: f"{count.right:,} of {count.asked:,}" if count.asked else "none"
    rows = [(name, text(count), *(text(part[name]) for part in parts), f"{count.probability:.5f}") for name, count in rules.counts.items()]
    return markdown(("rule", "fitted on: right", "of them measured on the H200", "held out, on the H100", "probability"), rows)


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


def cross_validate(known: Sequence[Answer]) -> list[str]:
    """The tables of accuracy and calibration: a tenth of the measured shapes by rules fitted on the rest, ten times; held-out shapes."""
    groups: dict[Shape, list[Answer]] = defaultdict(list)
    for one in known:
        groups[one.shape].append(one)
    shapes = sorted(groups)
    order = np.random.default_rng(SEED).permutation(len(shapes))
    folds = []
    for fold in range(FOLDS):
        held = {shapes[i] for i in order[fold::FOLDS]}
        rules = fit([one for shape in shapes if shape not in held for one in groups[shape]])
        folds.append(([one for shape in shapes if shape in held for one in groups[shape] if one.recipe is not None], rules))
    measured = [one for one in known if one.recipe is not None]
    other = held_out_on_h100()
    others = [(other, fit(known))]
    lines = ["Measured on the H200, cross-validated:", "", *accuracy_lines(measured, folds), "", *calibration_lines(folds), ""]
    return [*lines, "Measured on the H100, held out:", "", *accuracy_lines(other, others), "", *calibration_lines(others)]


# ---- the products of models

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
COUNTS = {  # the linear products of a layer with how often it has them, and of the whole model once; the products of attention
    "MiniLM-L6": (6, {(384, 384): 4, (1536, 384): 1, (384, 1536): 1}, {}),
    "7B (Llama-2)": (32, {(4096, 4096): 4, (11008, 4096): 2, (4096, 11008): 1}, {(32000, 4096): 1}),
}
MODEL_LIBRARIES = ("torch-bf16", "torch-f16", "torch-e4m3", "jax-bf16")
ATTENTION = 2  # products of a layer that are no A [M, K] times B [K, N]


def model_lines() -> list[str]:
    """The share of linear products that are measured, predicted and refused, by library and number of tokens."""
    assert {shape for _, of_layer, once in COUNTS.values() for shape in (*of_layer, *once)} <= {s for kind in LAYERS.values() for s in kind}
    rows = []
    for model, (layers, of_layer, once) in COUNTS.items():
        products = {shape: layers * count for shape, count in of_layer.items()} | once
        for library in MODEL_LIBRARIES:
            lines: dict[tuple[str, ...], list[int]] = defaultdict(list)
            for m in ROWS:
                lines[tuple(_shares(profile_of(library), m, products))].append(m)
            rows += [(model, library, ", ".join(map(str, tokens)), *shares) for shares, tokens in lines.items()]
    table = markdown(("model", "library", "tokens", "measured", "predicted", "refused", "least probability"), rows)
    sums = [
        f"{model}: {layers * sum(of_layer.values()) + sum(once.values())} linear products, {layers * ATTENTION} of attention"
        for model, (layers, of_layer, once) in COUNTS.items()
    ]
    return [*table, "", *(f"{line}, which have other axes and are refused." for line in sums)]


def _shares(profile: Profile, m: int, products: dict[tuple[int, int], int]) -> Iterable[str]:
    sums, least = dict.fromkeys(("measured", "predicted", "refused"), 0), 1.0
    for (n, k), count in products.items():
        try:
            probability = likely_recipe(profile, (m, n, k), MIN_PROBABILITY).conditions.probability
        except NotModelled:
            sums["refused"] += count
            continue
        sums["measured" if probability is None else "predicted"] += count
        least = min(least, probability or 1.0)
    yield from (f"{count / sum(products.values()):.0%}" for count in sums.values())
    yield f"{least:.4f}" if sums["predicted"] else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--distil", type=Path, nargs=2, metavar=("PROPOSALS", "SURVEY"), help="make the files of the H100")
    parser.add_argument("--models", action="store_true", help="print the shares of models' products instead")
    parser.add_argument("--write", action="store_true", help=f"write {RULES_FILE.name} and the tables too")
    args = parser.parse_args()
    if args.distil:
        distil(*args.distil)
    if args.models:
        print("\n".join(model_lines()))
        return 0
    known = [*measured_on_h200(), *proposed_on_h100()]
    rules = fit(known)
    lines = [*rule_lines(rules), "", *cross_validate(known)]
    print("\n".join(lines))
    if args.write:
        RULES_FILE.write_text(as_json(rules, known))
        shipped_rules.cache_clear()
        (DATA / "replay_rules.md").write_text("\n".join(lines) + "\n")
        (DATA / "replay_models.md").write_text("\n".join(model_lines()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
