"""The package's table of cuBLASLt's proposals for layers of models: `python benchmarks/torch_product_proposals.py FOLDER [FOLDER ...]`.

A folder has what `tests/gpu_runs/model_products.py` wrote on a GPU: proposals over the number of tokens, and launches with words. The table
is held to the launches (kernels with their grids, and words) and to the launches of other runs. `--write` writes the table.
"""

import argparse
import json
import lzma
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from torch_product_rules import order_name

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu_runs"))
import model_products

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.product_kernels import Launch, TorchProduct
from tcemu.operations.products.library.kernel_recipe import Conditions
from tcemu.uses.replay.predicted_orders import RuleCount
from tcemu.uses.replay.torch_products import (
    NOT_ASKED,
    NOT_TOLD,
    PROPOSALS_FILE,
    PROPOSALS_KIND,
    PROPOSALS_VERSION,
    SHORT,
    ProductChoice,
    choose_kernel,
    form_name,
    is_aligned,
    multiply_as_chosen,
    nvjet_choice,
    proposed_choice,
    proposed_orders,
    recorded_launches,
)

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
Curve = tuple[str, bool, int, int]  # layout, True for a bias, and the sizes that are not the number of tokens


# ---- the table


def product_of(curve: tuple, dtype: str, tokens: int) -> TorchProduct:
    _, m, k, n, layout, addend = model_products.product(curve, dtype, tokens)
    return TorchProduct(dtype, m, k, n, 1, layout, addend)


def read_answers(folders: list[Path]) -> dict[tuple, dict[int, tuple]]:
    """Return the proposals, by curve and dtype, then by the number of tokens."""
    curves, found = model_products.curves(), defaultdict(dict)
    for folder in folders:
        for path in sorted(folder.glob("curves_*.npz")):
            with np.load(path) as file:
                choices = list(map(tuple, file["choices"].tolist()))
                for number, coded, tokens, choice in file["rows"].tolist():
                    found[curves[number], model_products.DTYPES[coded]][tokens] = choices[choice]
    return found


def runs_of(curve: Curve, dtype: str, answers: dict[int, tuple], numbers: dict[tuple, int]) -> list[int]:
    """Return the first number of tokens and the order of each run. Between two answers that differ and are no neighbours none is known."""
    runs, before, last = [], NOT_ASKED, 0
    form = (SHORT[dtype], curve[0], int(curve[1]), 0)
    for tokens in sorted(answers):
        call = product_of(curve, dtype, tokens)
        name = order_name(form, answers[tokens], call.k) if answers[tokens][0] >= 0 else None
        vector = min(call.m, call.n) == 1 and not is_aligned(call)  # cuBLAS has other kernels for these
        number = NOT_TOLD if name is None or vector else numbers.setdefault(name, len(numbers))
        if number != before:
            if before != NOT_ASKED and tokens > last + 1:
                runs += [last + 1, NOT_ASKED]
            runs += [tokens, number]
        before, last = number, tokens
    return [*runs, last + 1, NOT_ASKED]


def launched(folders: list[Path]) -> Iterator[tuple[TorchProduct, list[Launch], list | None]]:
    for folder in folders:
        for line in (folder / "launches.jsonl").read_text().splitlines()[1:]:
            (dtype, m, k, n, layout, addend), kernels, words = json.loads(line)
            yield TorchProduct(dtype, m, k, n, 1, layout, addend), [Launch(name, *map(tuple, sizes)) for name, *sizes in kernels], words


# ---- the table held to what was launched


def same_order(one: Any, other: Any) -> bool:
    """Return True for two choices or orders that add alike, whatever instruction of 16 products their recipes name."""
    parts = lambda recipe: (
        recipe.slices.edges, recipe.slices.dealt, recipe.slices.dropped, recipe.merge if len(recipe.slices.edges) > 2 else None,
        recipe.epilogue, (recipe.unit.op.k, recipe.unit.residue) if hasattr(recipe.unit, "op") else recipe.unit,
    )  # fmt: skip
    return parts(one.recipe) == parts(other.recipe) and one.addend_first == other.addend_first


def words_of(choice: ProductChoice, call: TorchProduct) -> list[list[int]]:
    """Return the words of the recorded rows and columns, as integers of 16 bits."""
    p = (call.dtype, call.m, call.k, call.n, call.layout, call.addend)
    _, _, *operands = model_products.operands(p)
    dtype = ml_dtypes.bfloat16 if call.dtype == "bfloat16" else np.float16
    a, b, bias = (None if x is None else x.astype(dtype) for x in operands)
    recipe = choice.recipe.replace(conditions=Conditions(bias=choice.recipe.conditions.bias))  # one compilation for each order
    return np.asarray(multiply_as_chosen(choice._replace(recipe=recipe), a, b, bias)).view(np.int16).tolist()


def other_launches() -> Iterator[tuple[TorchProduct, Sequence[Launch], None]]:
    """Yield the launches of other runs: those that the package has, and those of the tests."""
    yield from ((call, launches, None) for call, launches in recorded_launches().launches.items() if call.dtype != "float32")
    file = json.loads(lzma.decompress((GOLDEN / "torch_products_h200.json.xz").read_bytes()))
    layouts = {"mm": ("rr", None), "linear": ("rc", None), "linear_bias": ("rc", "columns"), "dw": ("cr", None), "addmm": ("rr", "columns")}
    for name, (batch, kernels, *_) in file["cases"].items():
        kind, dtype, sizes = name.split("|")
        if kind in layouts and dtype != "f32" and batch == 1:
            (long,) = (each for each in SHORT if SHORT[each] == dtype)
            launches = [Launch(file["kernels"][number], tuple(grid), tuple(block)) for number, grid, block in kernels]
            m, k, n = map(int, sizes.split("x"))
            yield TorchProduct(long, m, k, n, 1, *layouts[kind]), launches, None


def compare(found: Iterable[tuple[TorchProduct, Sequence[Launch], list | None]]) -> tuple[RuleCount, list[str]]:
    """Return how often a proposal was the order of the launched kernels, and what differs, words too."""
    right = asked = 0
    words, wrong, refused = Counter(), [], Counter()
    for call, launches, theirs in found:
        try:
            launched_order = choose_kernel(call, launches=launches)
        except NotModelled as error:
            refused[str(error).split(": ", 1)[1][:60]] += 1
            launched_order = None
        try:
            proposed = proposed_choice(call, "H200")
        except NotModelled:
            proposed = None
        if proposed is not None and launched_order is not None:
            asked, right = asked + 1, right + same_order(proposed, launched_order)
            if not same_order(proposed, launched_order):
                kernels = [(launch.name[:70], launch.grid) for launch in launches]
                wrong.append(f"{call}: proposed {proposed.kernels}, {proposed.recipe.slices}; launched {kernels}")
        if theirs is not None and (choice := proposed or launched_order) is not None:
            ours = words_of(choice, call)
            differ = sum(x != y for mine, other in zip(ours, theirs, strict=True) for x, y in zip(mine, other, strict=True))
            name = "words of proposed orders" if proposed else "words of launched orders"
            words[name] += sum(map(len, theirs))
            words[f"{name} that differ"] += differ
            if differ:
                wrong.append(f"{call}: {differ} {name}, {choice.recipe.slices}, differ; {launches[0].name[:70]}")
    lines = [f"{right:,} of {asked:,} launched products have the order of their proposal"]
    return RuleCount(right, asked), [*lines, *(f"{name}: {count:,}" for name, count in words.items()), *wrong, str(refused)]


def sure_rule(call: TorchProduct) -> tuple | None:
    """Return the order of nvjet's sure thresholds, as a short name."""
    choice = nvjet_choice(call, "H200")
    if choice is None:
        return None
    count = len(choice.recipe.slices.edges) - 1
    return ("nvjet",) if count == 1 else ("nvjet cut", count)


def make_table(answers: dict[tuple[Curve, str], dict[int, tuple]], head: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the contents of the file, without curves that nvjet's sure thresholds give, and how often these were right."""
    numbers: dict[tuple, int] = {}
    forms: dict[str, list] = defaultdict(list)
    sure, left_out = Counter(), 0
    for (curve, dtype), found in answers.items():
        runs = runs_of(curve, dtype, found, numbers)
        needed = 0
        for tokens, choice in found.items():
            call = product_of(curve, dtype, tokens)
            rule = sure_rule(call)
            name = order_name((SHORT[dtype], curve[0], int(curve[1]), 0), choice, call.k) if choice[0] >= 0 else None
            needed += rule != name
            if rule is not None:
                sure[rule == name] += 1
        if not needed:
            left_out += 1
            continue
        forms[form_name(product_of(curve, dtype, 2))].append((curve[2], curve[3], runs))
    columns = {form: [list(column) for column in zip(*sorted(rows), strict=True)] for form, rows in sorted(forms.items())}
    kept = sum(map(len, forms.values()))
    runs = sum(len(one) // 2 for rows in forms.values() for *_, one in rows)
    lines = [
        f"{sum(map(len, answers.values())):,} proposals for {len(answers):,} curves; {left_out:,} curves are those of the sure thresholds",
        f"{kept:,} curves with {runs:,} runs of {len(numbers)} orders",
        f"the sure thresholds were right {sure[True]:,} times of {sure.total():,}",
    ]
    return head | {"orders": list(numbers), "curves": columns}, lines


def write(table: dict[str, Any]) -> int:
    content = lzma.compress(json.dumps(table, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME)
    PROPOSALS_FILE.write_bytes(content)
    proposed_orders.cache_clear()
    return len(content)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--date", default="2026-11-28")
    parser.add_argument("--words", action="store_true", help="compare the recorded words too")
    parser.add_argument("--write", action="store_true", help=f"write {PROPOSALS_FILE.name}")
    args = parser.parse_args()
    machine = json.loads((args.folders[0] / "launches.jsonl").read_text().splitlines()[0])
    head = {"kind": PROPOSALS_KIND, "version": PROPOSALS_VERSION, "gpu": machine["gpu"]}
    head["library"] = "cuBLASLt 13.1 with PyTorch's workspace"
    if args.write:
        table, lines = make_table(read_answers(args.folders), head | {"date": args.date, "launched": [0, 0]})
        print("\n".join(lines), f"{write(table):,} bytes", sep="\n", flush=True)
    count, lines = compare((*one[:2], one[2] if args.words else None) for one in launched(args.folders))
    print("\n".join(lines), flush=True)
    others, lines = compare(other_launches())
    print("of other runs:", *lines, sep="\n", flush=True)
    if args.write:
        write(table | {"launched": [count.right + others.right, count.asked + others.asked]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
