"""How well do rules predict the orders that were measured? `python benchmarks/replay_rules.py`: accuracy, coverage and calibration.

The measured shapes are those of the shipped profiles, and of `--survey FILE`s that `replay_gpu.py` wrote. Thresholds and probabilities are
fitted on nine tenths of the shapes and tried on the tenth, ten times. Shapes that differ in the library alone stay together. `--write`
fits them on all shapes and writes tcemu/replay/order_rules.json and the tables of the documentation. `--held-out FILE` tries the shipped
rules on a survey that they have not seen. `--models` prints which share of the products of models is measured, predicted and refused.
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
from tcemu.products.library.kernel_recipe import KernelRecipe
from tcemu.replay.kernel_profiles import MIN_PROBABILITY, Profile, find_profile, likely_recipe, list_profiles, predict_recipe
from tcemu.replay.predicted_orders import (
    BETWEEN,
    FEW_TILES,
    MANY_TILES,
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
RULES = (SHORT_K, FEW_TILES, MANY_TILES, BETWEEN, XLA_SPLIT)
HIGH = 0.99


class Measurement(NamedTuple):
    """A shape whose order was measured."""

    library: str
    shape: Shape
    recipe: KernelRecipe

    @property
    def aligned(self) -> bool:
        return not (self.shape[1] % 8 or self.shape[2] % 8)


def profile_of(library: str) -> Profile:
    return find_profile(list_profiles(), library, None, None)


def shipped_measurements() -> list[Measurement]:
    return [Measurement(name, shape, p.kernel_recipe(shape)) for name in LIBRARIES for p in [profile_of(name)] for shape in p.shapes]


def surveyed_measurements(path: Path) -> list[Measurement]:
    """The shapes of a survey, in xz or not, whose recipe gave every fresh word."""
    content = path.read_bytes()
    text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
    found = [line for line in lines if line.get("survey") in LIBRARIES and line.get("recipe") and line["wrong"] == 0]
    return [Measurement(line["survey"], (line["m"], line["n"], line["k"]), from_dict(line["recipe"])) for line in found]


# ---- fitting


def answers(measured: Iterable[Measurement], rules: OrderRules) -> list[tuple[str, bool, float]]:
    """The rule of each shape that a rule covers, if it is right, and its probability."""
    found = []
    for one in measured:
        profile = profile_of(one.library)
        try:
            prediction, probability = predict_slices(one.library, one.shape, profile.sm_count, rules)
        except NotModelled:
            continue
        found.append((prediction.rule, predict_recipe(profile, one.shape, rules).adds_as(one.recipe), probability))
    return found


def counts(measured: Iterable[Measurement], rule: NvjetRule) -> dict[str, RuleCount]:
    """How many shapes each rule covers, and how many it gets right."""
    unknown = OrderRules(rule, dict.fromkeys(RULES, RuleCount(0, 0)))
    found = {name: [right for of, right, _ in answers(measured, unknown) if of == name] for name in RULES}
    return {name: RuleCount(sum(rights), len(rights)) for name, rights in found.items()}


FEWEST_ROWS = 8  # fewer were hardly measured with N and K aligned
SMALL = 16  # output tiles of a product that the thresholds of K are fitted on


def output_tiles(shape: Shape) -> int:
    return -(-shape[0] // TILE) * -(-shape[1] // TILE)


def fit(measured: Sequence[Measurement], grid: Sequence[int] = range(12, 33)) -> OrderRules:
    """Fit the thresholds, then count.

    `min_chunk` gets the most small outputs right; the largest such number is taken. `few_tiles` and `many_tiles` are as wide as they can be
    without an error.
    """
    largest = 16384 if any(one.shape[2] >= 16384 for one in measured if one.library in NVJET_GRAINS) else 8192
    nvjet = [one for one in measured if one.library in NVJET_GRAINS and one.aligned and one.shape[2] <= largest]
    uncounted = dict.fromkeys(RULES, RuleCount(0, 0))

    def wrong(limit: int, part: Sequence[Measurement]) -> list[int]:
        """Output tiles of the shapes that are not cut into as many slices as the limit allows."""
        rules = OrderRules(NvjetRule(limit, 1 << 30, 1 << 30, largest, FEWEST_ROWS), uncounted)
        return [output_tiles(one.shape) for one in part for _, right, _ in answers([one], rules) if not right]

    small = [one for one in nvjet if output_tiles(one.shape) <= SMALL and one.shape[2] > 1024]
    limit = min(grid, key=lambda chunk: (len(wrong(chunk, small)), -chunk))
    long = [one for one in nvjet if most_slices(-(-one.shape[2] // NVJET_GRAINS[one.library]), limit) > 1]
    first_error = min(wrong(limit, long), default=1 << 30)
    few = max((t for one in long if (t := output_tiles(one.shape)) < first_error), default=1)
    many = max((output_tiles(one.shape) for one in long if len(one.recipe.slices.edges) > 2), default=few)
    rule = NvjetRule(limit, few, many, largest, FEWEST_ROWS)
    return OrderRules(rule, counts(measured, rule))


def as_json(rules: OrderRules, measured: Sequence[Measurement]) -> str:
    data = {
        "kind": RULES_KIND, "version": RULES_VERSION, "shapes": len(measured), "nvjet": rules.nvjet._asdict(),
        "counts": {name: list(count) for name, count in rules.counts.items()},
    }  # fmt: skip
    return json.dumps(data, indent=1) + "\n"


# ---- reports, as tables in Markdown

Folds = Sequence[tuple[Sequence[Measurement], OrderRules]]


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def rule_lines(rules: OrderRules) -> list[str]:
    rows = [(name, f"{count.right:,} of {count.asked:,}", f"{count.probability:.4f}") for name, count in rules.counts.items()]
    return markdown(("rule", "measured shapes that it gets right", "probability"), rows)


def accuracy_lines(measured: Sequence[Measurement], folds: Folds) -> list[str]:
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
            rows.append((said, f"{np.mean(stated):.3f}", f"{len(rights):,}", f"{wrong} ({wrong / len(rights):.1%})"))
    return markdown(("stated probability", "mean", "predictions", "wrong"), rows)


def cross_validate(measured: Sequence[Measurement]) -> list[str]:
    """The tables of accuracy and calibration, each tenth of the shapes tried with rules fitted on the rest."""
    groups: dict[Shape, list[Measurement]] = defaultdict(list)
    for one in measured:
        groups[one.shape].append(one)
    shapes = sorted(groups)
    order = np.random.default_rng(SEED).permutation(len(shapes))
    folds = []
    for fold in range(FOLDS):
        held = {shapes[i] for i in order[fold::FOLDS]}
        rules = fit([one for shape in shapes if shape not in held for one in groups[shape]])
        folds.append(([one for shape in shapes if shape in held for one in groups[shape]], rules))
    return [*accuracy_lines(measured, folds), "", *calibration_lines(folds)]


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
    yield f"{least:.3f}" if sums["predicted"] else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--survey", type=Path, nargs="+", default=[], metavar="FILE", help="further measured shapes")
    parser.add_argument("--held-out", type=Path, nargs="+", default=[], metavar="FILE", help="surveys to try the shipped rules on")
    parser.add_argument("--models", action="store_true", help="print the shares of models' products instead")
    parser.add_argument("--write", action="store_true", help=f"write {RULES_FILE.name} and the tables too")
    args = parser.parse_args()
    if args.models:
        print("\n".join(model_lines()))
        return 0
    if args.held_out:
        known = {(one.library, one.shape) for one in shipped_measurements()}
        held = [one for path in args.held_out for one in surveyed_measurements(path) if (one.library, one.shape) not in known]
        folds = [(held, shipped_rules())]
        print("\n".join([*accuracy_lines(held, folds), "", *calibration_lines(folds)]))
        return 0
    measured = [*shipped_measurements(), *(one for path in args.survey for one in surveyed_measurements(path))]
    rules = fit(measured)
    lines = [*rule_lines(rules), "", *cross_validate(measured)]
    print("\n".join(lines))
    if args.write:
        RULES_FILE.write_text(as_json(rules, measured))
        shipped_rules.cache_clear()
        (DATA / "replay_rules.md").write_text("\n".join(lines) + "\n")
        (DATA / "replay_models.md").write_text("\n".join(model_lines()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
