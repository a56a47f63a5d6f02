"""The package's table of cuBLASLt's proposals for layers of models: `python benchmarks/torch_product_proposals.py FOLDER [FOLDER ...]`.

A folder has what `tests/gpu_runs/model_products.py` wrote on a GPU: proposals over the number of tokens, and launches with words. The table
is held to the launches (kernels with their grids, and words) and to the launches of other runs. `--write` writes the table.
"""

import argparse
import json
import lzma
import sys
import zlib
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
from tcemu.uses.replay.kernel_choices import NOT_ASKED, NOT_TOLD, ORDERS_FILE, ORDERS_KIND, ORDERS_VERSION, TOKEN_STEP, proposed_orders
from tcemu.uses.replay.predicted_orders import RuleCount
from tcemu.uses.replay.torch_products import (
    LAUNCHES_FILE,
    LAUNCHES_KIND,
    LAUNCHES_VERSION,
    SHORT,
    ProductChoice,
    choose_kernel,
    form_name,
    is_aligned,
    multiply_as_chosen,
    nvjet_choice,
    proposed_choice,
    recorded_launches,
)

KEPT_WORDS = 8  # one product of so many
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


ASKED_NOT, TOLD_NOT = 0, 1  # numbers of the first two orders
STEP = {"rc": 1, "rr": 1, "cr": TOKEN_STEP}  # tokens between two answers that count as neighbours


def may_be_cut(curve: Curve, dtype: str, first: int, last: int) -> bool:
    """True unless all products of a curve in this range are aligned, and none was ever seen to be cut."""
    calls = [product_of(curve, dtype, tokens) for tokens in (first, last)]
    return any(not is_aligned(call) or model_products.may_be_cut(call.m, call.n, call.k, 4) for call in calls)


def runs_of(curve: Curve, dtype: str, answers: dict[int, tuple], numbers: dict[tuple, int]) -> list[int]:
    """Return the first number of tokens and the order of each run.

    Between two answers that are no neighbours an order is known only if both are equal and no K between them may be cut.
    """
    runs, before, last = [], ASKED_NOT, 0
    form = (SHORT[dtype], curve[0], int(curve[1]), 0)
    for tokens in sorted(answers):
        call = product_of(curve, dtype, tokens)
        name = order_name(form, answers[tokens], call.k) if answers[tokens][0] >= 0 else None
        vector = min(call.m, call.n) == 1 and not is_aligned(call)  # cuBLAS has other kernels for these
        number = TOLD_NOT if name is None or vector else numbers.setdefault(name, len(numbers))
        gap = before != ASKED_NOT and tokens > last + STEP[curve[0]]
        if gap and (number != before or may_be_cut(curve, dtype, last + 1, tokens - 1)):
            runs += [last + 1, ASKED_NOT]
            before = ASKED_NOT
        if number != before:
            runs += [tokens, number]
        before, last = number, tokens
    return [*runs, last + 1, ASKED_NOT]


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
    """Return the contents of the file, without curves that nvjet's sure thresholds give, and how often these were right at runs' ends."""
    numbers: dict[tuple, int] = {tuple(NOT_ASKED): ASKED_NOT, tuple(NOT_TOLD): TOLD_NOT}
    forms: dict[str, list] = defaultdict(list)
    sure, left_out = Counter(), 0
    for (curve, dtype), found in answers.items():
        runs = runs_of(curve, dtype, found, numbers)
        names, needed = list(numbers), False
        for first, after, number in zip(runs[::2], runs[2::2], runs[1::2], strict=False):
            rules = [sure_rule(product_of(curve, dtype, tokens)) for tokens in (first, after - 1)] if number != ASKED_NOT else []
            needed |= any(rule != names[number] for rule in rules)
            sure.update(rule == names[number] for rule in rules if rule is not None)
        if needed:
            forms[form_name(product_of(curve, dtype, 2))].append((curve[2], curve[3], runs))
        left_out += not needed
    columns = {form: [list(column) for column in zip(*sorted(rows), strict=True)] for form, rows in sorted(forms.items())}
    lines = [
        f"{sum(map(len, answers.values())):,} proposals for {len(answers):,} curves; {left_out:,} curves are those of the sure thresholds",
        f"{sum(map(len, forms.values())):,} curves with {sum(len(one) // 2 for rows in forms.values() for *_, one in rows):,} runs of "
        f"{len(numbers) - 2} orders",
        f"at the ends of runs the sure thresholds were right {sure[True]:,} times of {sure.total():,}",
    ]
    return head | {"orders": list(numbers), "curves": columns}, lines


def write(table: dict[str, Any]) -> int:
    content = lzma.compress(json.dumps(table, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME)
    ORDERS_FILE.write_bytes(content)
    proposed_orders.cache_clear()
    return len(content)


# ---- what is kept of the launches


def packed_launches(found: Iterable[tuple[TorchProduct, Sequence[Launch]]], head: dict[str, Any]) -> bytes:
    """Return a file of launches: the names of kernels once, then each product with the numbers, grids and blocks of its kernels."""
    names: dict[str, int] = {}
    products = []
    for call, launches in found:
        sizes = lambda kernel: () if kernel.name.startswith("gpu_mem") else (kernel.grid, kernel.block)
        products.append([*call, [[names.setdefault(kernel.name, len(names)), *sizes(kernel)] for kernel in launches]])
    data = {"kind": LAUNCHES_KIND, "version": LAUNCHES_VERSION} | head | {"kernels": list(names), "products": products}
    return lzma.compress(json.dumps(data, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME)


def is_told(call: TorchProduct, launches: Sequence[Launch]) -> bool:
    """Return True for a product in 16 bits whose order a proposal or a rule tells as its kernels do, or alone."""
    if call.dtype == "float32":
        return False
    try:
        choice = proposed_choice(call, "H200") or nvjet_choice(call, "H200")
    except NotModelled:
        return False
    try:
        return choice is not None and same_order(choice, choose_kernel(call, launches=launches))
    except NotModelled:
        return choice is not None


def keep_launches(folders: list[Path]) -> None:
    """Write the package's launches, those that neither a proposal nor a rule tells, and the others for the tests, with some words."""
    recorded, every, words = recorded_launches(), {}, []
    every |= recorded.launches
    for call, launches, theirs in launched(folders):
        every[call] = tuple(launches)
        if theirs is not None and zlib.crc32(str(call).encode()) % KEPT_WORDS == 0:
            words.append([list(call), theirs])
    told = {call: is_told(call, launches) for call, launches in every.items()}
    head = {"gpu": recorded.gpu, "library": "torch 2.11.0+cu130", "date": "2026-11-27 and 2026-11-28"}
    LAUNCHES_FILE.write_bytes(packed_launches(((call, x) for call, x in every.items() if not told[call]), head))
    layers = packed_launches(((call, x) for call, x in every.items() if told[call]), head | {"words": words})
    (GOLDEN / "torch_layers_h200.json.xz").write_bytes(layers)
    kept = sum(told.values())
    print(f"{kept:,} launches for the tests, {len(told) - kept:,} for the package, {len(words)} products with words")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--date", default="2026-11-28")
    parser.add_argument("--words", action="store_true", help="compare the recorded words too")
    parser.add_argument("--launches", action="store_true", help="write the package's and the tests' launches")
    parser.add_argument("--write", action="store_true", help=f"write {ORDERS_FILE.name}")
    args = parser.parse_args()
    machine = json.loads((args.folders[0] / "launches.jsonl").read_text().splitlines()[0])
    head = {"kind": ORDERS_KIND, "version": ORDERS_VERSION, "gpu": machine["gpu"]}
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
    if args.launches:
        keep_launches(args.folders)
    return 0


if __name__ == "__main__":
    sys.exit(main())
