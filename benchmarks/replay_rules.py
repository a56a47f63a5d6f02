"""How well do rules predict the orders that were measured? `python benchmarks/replay_rules.py`: accuracy, coverage and calibration.

The measured shapes are those of the shipped profiles, and of `--survey FILE`s that `replay_gpu.py` wrote. Thresholds and probabilities are
fitted on nine tenths of the shapes and tried on the tenth, ten times. Shapes that differ in the library alone stay together. `--write`
fits them on all shapes and writes tcemu/replay/order_rules.json. `--held-out FILE` tries the shipped rules on a survey that they have not
seen. `--models` prints which share of the products of models is measured, predicted and refused.
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
    XLA_LIBRARIES,
    XLA_SPLIT,
    NvjetRule,
    OrderRules,
    RuleCount,
    TILE,
    Shape,
    most_slices,
    predict_slices,
    shipped_rules,
)

FOLDS, SEED = 10, 45
LIBRARIES = (*NVJET_GRAINS, *XLA_LIBRARIES)
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


# ---- reports


def print_rules(rules: OrderRules) -> None:
    print(f"nvjet: {rules.nvjet}")
    for name, count in rules.counts.items():
        print(f"  {name:26} right for {count.right:4} of {count.asked:4} shapes: probability {count.probability:.4f}")


def print_accuracy(measured: Sequence[Measurement], folds: Sequence[tuple[Sequence[Measurement], OrderRules]]) -> None:
    """Accuracy and coverage by library, and calibration, where each shape was tried with rules that had not seen it."""
    groups = {f"{name}, {'aligned' if aligned else 'not aligned'}": (name, aligned) for name in LIBRARIES for aligned in (True, False)}
    print(f"{'product':32}{'shapes':>8}{'answered':>10}{'share':>8}{'right':>7}{'accuracy':>10}   at p >= {MIN_PROBABILITY}")
    for title, (name, aligned) in groups.items():
        asked = sum(one.library == name and one.aligned == aligned for one in measured)
        found = [
            answer for part, rules in folds for answer in answers([o for o in part if o.library == name and o.aligned == aligned], rules)
        ]
        kept = [right for _, right, p in found if p >= MIN_PROBABILITY]
        if asked:
            accuracy = f"{sum(kept) / len(kept):10.2%}" if kept else f"{'-':>10}"
            print(f"{title:32}{asked:8}{len(kept):10}{len(kept) / asked:8.1%}{sum(kept):7}{accuracy}")
    everything = [answer for part, rules in folds for answer in answers(part, rules)]
    print("calibration: predictions by their stated probability")
    for low, high in ((HIGH, 1.01), (MIN_PROBABILITY, HIGH), (0.9, MIN_PROBABILITY), (0.0, 0.9)):
        rights = [right for _, right, p in everything if low <= p < high]
        stated = [p for _, _, p in everything if low <= p < high]
        if rights:
            wrong = len(rights) - sum(rights)
            print(f"  from {low:4.2f}: {len(rights):5} predictions, {wrong:3} wrong ({wrong / len(rights):.2%}), stated {np.mean(stated):.4f}")


def cross_validate(measured: Sequence[Measurement]) -> None:
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
    print_accuracy(measured, folds)


# ---- the products of models

ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
COUNTS = {  # the linear products of a layer with how often it has them, and of the whole model once; the products of attention
    "MiniLM-L6": (6, {(384, 384): 4, (1536, 384): 1, (384, 1536): 1}, {}),
    "7B (Llama-2)": (32, {(4096, 4096): 4, (11008, 4096): 2, (4096, 11008): 1}, {(32000, 4096): 1}),
}
ATTENTION = 2  # products of a layer that are no A [M, K] times B [K, N]


def print_models() -> None:
    """The share of products that are measured, predicted and refused, by library and number of tokens."""
    assert {shape for _, of_layer, once in COUNTS.values() for shape in (*of_layer, *once)} <= {s for kind in LAYERS.values() for s in kind}
    head = f"{'model':14}{'library':11}{'tokens':>7}{'linear':>8}{'measured':>10}{'predicted':>11}{'refused':>9}"
    print(f"{head}   the least probability; products of attention, refused too")
    for model, (layers, of_layer, once) in COUNTS.items():
        products = {shape: layers * count for shape, count in of_layer.items()} | once
        for library in ("torch-bf16", "torch-f16", "torch-e4m3", "jax-bf16"):
            profile = profile_of(library)
            for m in ROWS:
                sums, least = defaultdict(int), 1.0
                for (n, k), count in products.items():
                    try:
                        probability = likely_recipe(profile, (m, n, k), MIN_PROBABILITY).conditions.probability
                        sums["measured" if probability is None else "predicted"] += count
                        least = min(least, probability or 1.0)
                    except NotModelled:
                        sums["refused"] += count
                total = sum(products.values())
                cells = "".join(f"{sums[name] / total:{width}.0%}" for name, width in (("measured", 10), ("predicted", 11), ("refused", 9)))
                print(f"{model:14}{library:11}{m:7}{total:8}{cells}   {least:.3f}; {layers * ATTENTION}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--survey", type=Path, nargs="+", default=[], metavar="FILE", help="further measured shapes")
    parser.add_argument("--held-out", type=Path, nargs="+", default=[], metavar="FILE", help="surveys to try the shipped rules on")
    parser.add_argument("--models", action="store_true", help="print the shares of models' products instead")
    parser.add_argument("--write", action="store_true", help=f"write {RULES_FILE.name} too")
    args = parser.parse_args()
    if args.models:
        print_models()
        return 0
    if args.held_out:
        known = {(one.library, one.shape) for one in shipped_measurements()}
        held = [one for path in args.held_out for one in surveyed_measurements(path) if (one.library, one.shape) not in known]
        print_accuracy(held, [(held, shipped_rules())])
        return 0
    measured = [*shipped_measurements(), *(one for path in args.survey for one in surveyed_measurements(path))]
    rules = fit(measured)
    print_rules(rules)
    cross_validate(measured)
    if args.write:
        RULES_FILE.write_text(as_json(rules, measured))
        print(f"{RULES_FILE.name} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
