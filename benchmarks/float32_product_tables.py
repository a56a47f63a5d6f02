"""The package's tables of float32 products of PyTorch: `python benchmarks/float32_product_tables.py FOLDER ...`.

The folders have what `tests/gpu_runs/float32_products.py` wrote on a GPU: cuBLASLt's proposals for layers over the number of tokens, and
kernels of products with one row. The first are held to the numbers of tokens that were asked about apart and to the launches that the
package has, the second to products of other sizes. `--write` writes the tables.
"""

import argparse
import json
import lzma
import re
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from torch_product_proposals import same_order
from torch_product_rules import order_name

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu_runs"))
import float32_products

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.product_kernels import Launch, TorchProduct, order_of_kernels
from tcemu.uses.replay.kernel_choices import NOT_ASKED, NOT_TOLD, ORDERS_KIND, ORDERS_VERSION, proposed_orders
from tcemu.uses.replay.torch_products import (
    SHORT,
    SMALL_LAYERS_FILE,
    VECTOR_STEP,
    VECTORS_FILE,
    VECTORS_KIND,
    VECTORS_VERSION,
    form_name,
    proposed_choice,
    recorded_launches,
    recorded_vectors,
    vector_choice,
)

FAR_STEP = 64  # of a weight's gradient the numbers of tokens between were wrong in 42 of 4,548 cases, so that they are left out
GPU, LIBRARY = "NVIDIA H200", "cuBLASLt 13.1 with PyTorch's workspace"
Curve = tuple[tuple, int, int]  # form, K and N of a layer


# ---- proposals


class Answers:
    """The proposals for a curve: choices by the first number of tokens of each run, up to the last one."""

    def __init__(self) -> None:
        self.changes: dict[int, tuple] = {}
        self.held_out: dict[int, tuple] = {}
        self.last = 0

    def choice(self, tokens: int) -> tuple:
        starts = sorted(self.changes)
        return self.changes[starts[bisect_right(starts, tokens) - 1]]


def read_surveys(folders: list[Path]) -> dict[Curve, Answers]:
    found: dict[Curve, Answers] = defaultdict(Answers)
    for survey, (_, grid, forms) in float32_products.SURVEYS.items():
        for path in (folder / f"{survey}.npz" for folder in folders if (folder / f"{survey}.npz").exists()):
            file = np.load(path)
            choices, layers = [tuple(row) for row in file["choices"].tolist()], file["layers"].tolist()
            for key in ("changes", "held_out"):
                for number, tokens, choice in file[key].tolist():
                    layer, which = divmod(number, len(forms))
                    answers = found[(forms[which], *layers[layer])]
                    getattr(answers, key)[tokens] = choices[choice]
                    answers.last = max(answers.last, grid[-1])
    return found


def make_table(surveys: dict[Curve, Answers]) -> tuple[dict[str, Any], tuple[int, int], str]:
    """Return the runs of each curve, and how the numbers of tokens that were asked about apart agree with them."""
    numbers: dict[tuple, int] = {tuple(NOT_ASKED): 0, tuple(NOT_TOLD): 1}
    forms: dict[str, list] = defaultdict(list)
    agree = Counter()
    for (form, k, n), answers in surveys.items():

        def number_of(tokens: int, choice: tuple, form: tuple = form, k: int = k, n: int = n) -> int:
            m, depth, columns, _ = float32_products.operands(form, k, n, tokens)
            name = order_name(form, choice, depth) if min(m, columns) > 1 else None
            return numbers.setdefault(tuple(NOT_TOLD) if name is None else name, len(numbers))

        # of a weight's gradient the tokens are K, on which the lengths of slices depend
        starts = range(1, answers.last + 1) if form[1] == "cr" else sorted(answers.changes)
        runs: list[int] = []
        for tokens in starts:
            far = form[1] == "cr" and tokens > float32_products.MOST and tokens % FAR_STEP
            found = numbers[()] if far else number_of(tokens, answers.choice(tokens))
            runs += [] if runs and runs[-1] == found else [tokens, found]
        for tokens, choice in answers.held_out.items():
            found = runs[2 * bisect_right(runs[::2], tokens) - 1]
            if found != numbers[()]:
                agree[found == number_of(tokens, choice)] += 1
        dtype = next(name for name, short in SHORT.items() if short == form[0])
        call = TorchProduct(dtype, *float32_products.operands(form, k, n, 2)[:3], 1, form[1], "columns" if form[2] else None)
        x, y = (k, n) if form[1] == "cr" else (n, k)
        forms[form_name(call)].append((x, y, [*runs, answers.last + 1, numbers[()]]))
    columns = {form: [list(column) for column in zip(*sorted(rows), strict=True)] for form, rows in sorted(forms.items())}
    said = f"{agree[True]:,} of {agree.total():,} numbers of tokens that were asked about apart have the order of their run"
    return {"orders": list(numbers), "curves": columns}, (agree[True], agree.total()), said


# ---- products with one row


def read_vectors(path: Path) -> dict[TorchProduct, tuple[Launch, ...]]:
    """Return the kernels of each recorded product without copies; grids have the slices alone."""
    file, found = json.loads(lzma.decompress(path.read_bytes())), {}
    for *product, kernels in file["products"]:
        call = TorchProduct(*product)
        launches = [Launch(file["kernels"][number], *map(tuple, sizes)) for number, *sizes in kernels]
        found[call] = tuple(
            launch._replace(grid=(1, 1, launch.grid[2] // call.batch))
            for launch in launches
            if not re.search("at::native|memcpy", launch.name)
        )
    return found


MOST_SIZE = 64 * VECTOR_STEP


def vector_table(found: dict[TorchProduct, tuple[Launch, ...]]) -> dict[str, Any]:
    """Return the runs of equal launches over N, for each form and K in steps, and the launches of layers of models that are in no step."""
    names: dict[str, int] = {}
    classes: dict[tuple, int] = {}
    grids: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    layers: dict[str, list] = defaultdict(list)
    usual = {*float32_products.layers(), *float32_products.further_layers()}
    for call in sorted(found, key=lambda call: (form_name(call), call.k, call.n)):
        if call.m > 1 or call.batch > 1:
            continue
        launches = tuple((names.setdefault(x.name, len(names)), x.grid[2], x.block) for x in found[call])
        number = classes.setdefault(launches, len(classes))
        if not (call.k % VECTOR_STEP or call.n % VECTOR_STEP) and max(call.k, call.n) <= MOST_SIZE:
            runs = grids[form_name(call)][call.k]
            if runs:
                runs.pop()
            runs += [call.n + VECTOR_STEP] if runs and runs[-1] == number else [call.n, number, call.n + VECTOR_STEP]
        elif (call.k, call.n) in usual:
            layers[form_name(call)].append([call.k, call.n, number])
    return {"kernels": list(names), "launches": list(classes), "grids": grids, "layers": layers}


def try_vectors(found: dict[TorchProduct, tuple[Launch, ...]]) -> tuple[int, int, Counter, list[str]]:
    """Return how many products have the order of the sizes around them, of how many, why others have none, and those that differ."""
    right, asked, without, wrong = 0, 0, Counter(), []
    for call, launches in found.items():
        if call.m > 1 or call.batch > 1 or not (call.k % VECTOR_STEP or call.n % VECTOR_STEP):
            continue
        try:
            choice = vector_choice(call, "H200", by_layer=False)
            if choice is None:
                without["sizes around it have several orders, or none"] += 1
                continue
            launched = order_of_kernels([x._replace(grid=(1, 1, x.grid[2] * call.batch)) for x in launches], call)
        except NotModelled as error:
            without[str(error).split(": ")[-1][:70]] += 1
            continue
        same = launched.recipe == choice.recipe
        right, asked = right + same, asked + 1
        wrong += [] if same else [f"{call}: {choice.recipe.unit}, launched {launched.recipe.unit}"]
    return right, asked, without, wrong


def compare(labels: list[Path]) -> tuple[int, int, list[str]]:
    """Return how many launched products have the order of their proposal, of how many, and the others."""
    launched = {call: launches for call, launches in recorded_launches().launches.items() if call.dtype == "float32"}
    launched |= {call: launches for path in labels for call, launches in read_vectors(path).items() if min(call.m, call.n) > 1}
    right, asked, wrong = 0, 0, []
    for call, launches in launched.items():
        try:
            proposed, order = proposed_choice(call, "H200"), order_of_kernels(launches, call)
        except NotModelled:
            continue
        if proposed is None:
            continue
        same = same_order(proposed, order)
        right, asked = right + same, asked + 1
        wrong += [] if same else [f"{call}: proposed {proposed.recipe.slices}, launched {order.recipe.slices}"]
    return right, asked, wrong


def write(path: Path, content: dict[str, Any]) -> str:
    data = lzma.compress(json.dumps(content, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME)
    path.write_bytes(data)
    proposed_orders.cache_clear()
    recorded_vectors.cache_clear()
    return f"{path.name}: {len(data):,} bytes"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--date", default="2026-11-28")
    parser.add_argument("--write", action="store_true", help=f"write {SMALL_LAYERS_FILE.name} and {VECTORS_FILE.name}")
    args = parser.parse_args()
    table, (agreed, of), said = make_table(read_surveys(args.folders))
    print(f"{sum(len(rows[0]) for rows in table['curves'].values()):,} curves, {len(table['orders'])} orders", said, sep="\n")
    head = {"kind": ORDERS_KIND, "version": ORDERS_VERSION, "gpu": GPU, "library": LIBRARY, "date": args.date}
    vectors = {name: read_vectors(path) for folder in args.folders for path in folder.glob("*vectors.json.xz") for name in (path.name,)}
    every = {call: launches for found in vectors.values() for call, launches in found.items()}
    rows = {"kind": VECTORS_KIND, "version": VECTORS_VERSION, "gpu": GPU, "library": "torch 2.11.0+cu130", "date": args.date}
    rows |= vector_table(every)
    if args.write:
        write(SMALL_LAYERS_FILE, head | {"launched": [0, 0]} | table)
        write(VECTORS_FILE, rows | {"tried": [0, 0]})
    right, asked, wrong = compare([path for folder in args.folders for path in folder.glob("labels.json.xz")])
    print(f"{right:,} of {asked:,} launched products have the order of their proposal", *wrong, sep="\n")
    tried, total, without, differ = try_vectors(every)
    print(
        f"{tried:,} of {total:,} products with one row have the order of the sizes around them; others: {dict(without)}", *differ, sep="\n"
    )
    if args.write:
        print(
            write(SMALL_LAYERS_FILE, head | {"launched": [right + agreed, asked + of]} | table),
            write(VECTORS_FILE, rows | {"tried": [tried, total]}),
            sep="\n",
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
