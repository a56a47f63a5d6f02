"""Trees from a shape to the order in which PyTorch's products are added: `python benchmarks/torch_product_rules.py FILE ...`.

The files are those that `tests/gpu_runs/torch_proposals.py` wrote on a GPU, named SEED=FILE: the choices that cuBLASLt proposed. A tree is
fitted on nine tenths of the shapes of each form, and tried on the tenth. `--write` writes the package's file of rules.
"""

import argparse
import json
import lzma
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu_runs"))
import torch_proposals

from tcemu.operations.functional.torch_cuda.product_kernels import DTYPES, TorchProduct, ceil_div
from tcemu.uses.replay.kernel_choices import ChoiceTree
from tcemu.uses.replay.torch_products import (
    IN_PLACE,
    LEAF_SIZES,
    OPEN,
    RULES_FILE,
    RULES_KIND,
    RULES_VERSION,
    SHORT,
    form_name,
    is_aligned,
    leaf_rule,
    product_features,
)

SM_COUNT, GPU, LIBRARY = 132, "NVIDIA H200", "torch 2.11.0+cu130, cuBLASLt 130100"
MIN_LEAF, MOST_ORDERS, MOST_THRESHOLDS = LEAF_SIZES[0], 120, 200
LONG_K = 42  # tiles of 64 from which nvjet may cut K
XMMA, SIMT, SMALL, LARGE_K, NVJET, CUTLASS = 55, 20, 11, 10, 66, (23, 24)  # algorithms of cuBLASLt
ALGORITHM, TILE, SPLIT, SCHEME, CUSTOM, STAGES = range(6)  # columns of a choice

Form = tuple[str, str, int, int]


def call_of(form: Form, m: Any, k: Any, n: Any, batch: Any) -> TorchProduct:
    (dtype,) = (name for name in DTYPES if SHORT[name] == form[0])
    return TorchProduct(dtype, m, k, n, batch, form[1], "columns" if form[2] else None)


def order_name(form: Form, choice: tuple[int, ...], k: int) -> tuple | None:
    """Return the short name of a choice's order for this K, as `tcemu.uses.replay.torch_products.order_by_name` reads it."""
    algorithm, split = choice[ALGORITHM], max(1, choice[SPLIT])
    size = 4 if form[0] == "f32" else 2
    line, vector = 128 // size, 16 // size
    grain = line if (form[1][0] == "r" or form[1][1] == "c") and k % line == 0 else vector
    length = ceil_div(ceil_div(k, grain), split) * grain
    if algorithm == XMMA:
        return ("fma",) if split == 1 else ("deal", split) if choice[CUSTOM] == 0 or split == 2 else (OPEN,)
    if algorithm == SIMT:
        first = (1,) if choice[SCHEME] == IN_PLACE and form[2] else ()
        return ("fma",) if length >= k else ("fma cut", length, *first)
    if algorithm == LARGE_K:
        return ("large k", split)
    if algorithm == SMALL:
        return ("sn t",) if form[1] == "rc" else ("sn n", 4 if choice[CUSTOM] else 2)
    if algorithm == NVJET:
        return ("nvjet",) if split == 1 else ("nvjet cut", split)
    if algorithm in CUTLASS:
        kind = (algorithm, choice[STAGES])
        return ("tc", *kind) if length >= k else ("tc cut", *kind, length, choice[SCHEME])
    return None


def is_asked(form: Form, m: int, k: int, n: int, batch: int) -> bool:
    """Return True for a shape that no simpler rule answers."""
    if min(m, n, k) < 2:
        return False
    return form[0] == "f32" or not is_aligned(call_of(form, m, k, n, batch)) or (batch == 1 and ceil_div(k, 64) >= LONG_K)


def grow(x: np.ndarray, y: np.ndarray, names: list[str], thresholds: list[np.ndarray], unknown: int) -> list:
    """Grow a node by the comparison that lowers Gini's impurity most. x: for each feature the number of thresholds below it."""
    size, present = len(y), np.unique(y)
    if len(present) == 1:
        return [int(present[0]), size] if present[0] != unknown and size >= MIN_LEAF else []
    if size < 2 * MIN_LEAF or (y != unknown).sum() < MIN_LEAF:
        return []
    small, width = np.searchsorted(present, y), len(present)
    best = (-1.0, 0, 0)
    for place, cuts in enumerate(thresholds):
        if not len(cuts):
            continue
        counts = np.bincount(x[:, place].astype(np.int64) * width + small, minlength=(len(cuts) + 1) * width).reshape(-1, width)
        low, total = np.cumsum(counts, 0)[:-1], counts.sum(0)
        below = low.sum(1)
        allowed = (below >= MIN_LEAF) & (size - below >= MIN_LEAF)
        purity = (low.astype(float) ** 2).sum(1) / np.maximum(below, 1)
        purity += ((total - low).astype(float) ** 2).sum(1) / np.maximum(size - below, 1)
        purity = np.where(allowed, purity, -1.0)
        at = int(purity.argmax())
        best = max(best, (float(purity[at]), place, at), key=lambda one: one[0])
    if best[0] < 0:
        return []
    _, place, at = best
    is_low = x[:, place] <= at
    low, high = (grow(x[part], y[part], names, thresholds, unknown) for part in (is_low, ~is_low))
    return [] if not low and not high else [names[place], int(thresholds[place][at]), low, high]


def bin_features(features: dict[str, np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the bins of the features, uint8 [shapes, features], and the thresholds between the bins of each feature."""
    bins, thresholds = [], []
    for values in features.values():
        found = np.unique(values)[:-1]
        if len(found) > MOST_THRESHOLDS:
            found = np.unique(np.quantile(values, np.linspace(0, 1, MOST_THRESHOLDS + 1)[1:-1]).astype(np.int64))
        thresholds.append(found)
        bins.append(np.searchsorted(found, values, "left").astype(np.uint8))
    return np.stack(bins, axis=1), thresholds


def fit(form: Form, shapes: np.ndarray, choices: list[tuple[int, ...]]) -> tuple[ChoiceTree, dict[str, list[int]], int, int]:
    """Fit a form's tree. Returns it, the counts of its rules on the shapes kept back, how many of these have no leaf, and their number."""
    asked = [at for at, row in enumerate(shapes.tolist()) if is_asked(form, *row)]
    shapes = shapes[asked].astype(np.int64)
    orders = [order_name(form, choices[at], int(row[1])) for at, row in zip(asked, shapes, strict=True)]
    frequent = [order for order, count in Counter(filter(None, orders)).most_common(MOST_ORDERS) if count >= MIN_LEAF]
    numbers, unknown = {order: number for number, order in enumerate(frequent)}, len(frequent)
    y = np.array([numbers.get(order, unknown) if order else unknown for order in orders])
    call = call_of(form, *shapes.T)
    features = product_features(call, SM_COUNT)
    names, (x, thresholds) = list(features), bin_features(features)
    kept = np.arange(len(y)) % 10 == 3
    tree = ChoiceTree([list(order) for order in frequent], grow(x[~kept], y[~kept], names, thresholds, unknown))
    counts, without = defaultdict(lambda: [0, 0]), 0
    for at in np.flatnonzero(kept):
        found = tree.find({name: int(values[at]) for name, values in features.items()})
        if found is None:
            without += 1
            continue
        count = counts[leaf_rule(form_name(call._replace(batch=int(form[3]) + 1)), found[0][0], found[1])]
        count[0] += tuple(found[0]) == orders[at]
        count[1] += 1
    return tree, dict(counts), without, int(kept.sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", metavar="SEED=FILE", help="proposals.npz with the seed of its shapes, the later ones first")
    parser.add_argument("--date", default="2026-11-27")
    parser.add_argument("--only", nargs="+", help="forms")
    parser.add_argument("--parts", type=Path, help="folder that keeps each form's tree, and from which finished ones are taken")
    parser.add_argument("--write", action="store_true", help=f"write {RULES_FILE.name}")
    args = parser.parse_args()
    files = [(seed, np.load(path)) for seed, _, path in (each.partition("=") for each in args.files)]
    forms, counts = {}, {}
    for form in torch_proposals.ALL:
        name = torch_proposals.form_name(form)
        if args.only and name not in args.only:
            continue
        part = args.parts / f"{name}.json" if args.parts else None
        if part and part.exists():
            forms[name], found = json.loads(part.read_text())
            counts |= found
            continue
        rows = []
        for seed, file in files:
            # a product with a bias was asked about with cuBLAS's workspace in the first survey, and with cuBLASLt's later
            if name in file and not (form[2] and not seed):
                torch_proposals.SEED = seed
                choices = list(map(tuple, file["choices"].tolist()))
                rows.append(
                    (torch_proposals.shapes(form, torch_proposals.COUNTS[seed])[: len(file[name])], [choices[i] for i in file[name]])
                )
        if not rows:
            continue
        tree, found, without, kept = fit(form, np.concatenate([shapes for shapes, _ in rows]), [c for _, part in rows for c in part])
        print(name, f"{sum(len(shapes) for shapes, _ in rows):,} proposals; of {kept} kept back {without} have no leaf", found, flush=True)
        forms[name] = list(tree)
        counts |= found
        if part:
            part.write_text(json.dumps([forms[name], found]))
    if args.write:
        head = {"kind": RULES_KIND, "version": RULES_VERSION, "gpu": GPU, "library": LIBRARY, "date": args.date, "sm_count": SM_COUNT}
        text = json.dumps(head | {"forms": forms, "counts": counts}, separators=(",", ":"))
        RULES_FILE.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    return 0


if __name__ == "__main__":
    sys.exit(main())
