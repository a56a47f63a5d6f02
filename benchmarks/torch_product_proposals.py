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
from torch_product_rules import ALGORITHM, NVJET, SM_COUNT, SPLIT, bin_features, grow, order_name

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu_runs"))
import model_products

from tcemu.base.errors import NotModelled
from tcemu.base.saved_files import decompress_json
from tcemu.operations.functional.torch_cuda.product_kernels import Launch, TorchProduct
from tcemu.operations.products.library.kernel_recipe import Conditions
from tcemu.uses.replay.kernel_choices import (
    NOT_ASKED,
    NOT_TOLD,
    ORDERS_FILE,
    ORDERS_KIND,
    ORDERS_VERSION,
    TOKEN_STEP,
    ChoiceTree,
    proposed_orders,
)
from tcemu.uses.replay.predicted_orders import RuleCount
from tcemu.uses.replay.torch_products import (
    LAUNCHES_FILE,
    LAUNCHES_KIND,
    LAUNCHES_VERSION,
    LONGEST_K,
    NVJET_TREE,
    RULES_FILE,
    SHORT,
    ProductChoice,
    choose_kernel,
    form_name,
    is_aligned,
    leaf_rule,
    multiply_as_chosen,
    nvjet_choice,
    product_features,
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
    seen = set()
    for folder in folders:
        for line in (folder / "launches.jsonl").read_text().splitlines()[1:]:
            (dtype, m, k, n, layout, addend), kernels, words = json.loads(line)
            call = TorchProduct(dtype, m, k, n, 1, layout, addend)
            if call not in seen:
                seen.add(call)
                yield call, [Launch(name, *map(tuple, sizes)) for name, *sizes in kernels], words


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


# ---- trees for layers that the table does not have

KEPT_LEAVES, SAMPLED = 60, 97  # proposals in the smallest leaf that is kept; one of so many answers of curves counts


def fit_tree(folder: Path, form: int, answers: dict[tuple[Curve, str], dict[int, tuple]]) -> tuple[str, ChoiceTree, dict[str, list[int]]]:
    """Fit a form's tree on nine tenths of its drawn shapes, and count on the tenth, and on layers' shapes, how often it is right."""
    layout, bias, dtype = model_products.FORMS[form]
    with np.load(folder / f"random_{form}.npz") as file:
        choices = file["choices"][file["numbers"].astype(int)]
    shapes: list[np.ndarray] = []
    while sum(map(len, shapes)) < len(choices):
        shapes.append(model_products.random_shapes(form, len(shapes)))
    every, labels = np.concatenate(shapes)[: len(choices)], np.maximum(1, choices[:, SPLIT])
    assert (choices[:, ALGORITHM] == NVJET).all()
    kept = np.arange(len(labels)) % 10 == 3
    call = TorchProduct(dtype, 1, 1, 1, 1, layout, "columns" if bias else None)
    features = lambda rows: product_features(call._replace(**dict(zip("mkn", rows.T, strict=True))), SM_COUNT)
    name, root = f"{NVJET_TREE}{form_name(call)}", grow_tree(features(every), labels, ~kept)
    tree = ChoiceTree([["nvjet"] if count <= 1 else ["nvjet cut", count] for count in range(labels.max() + 1)], pruned(root))
    points = [
        (*product_of(curve, dtype, tokens)[1:4], max(1, choice[SPLIT]))
        for (curve, other), found in answers.items()
        if (curve[0], int(curve[1]), other) == (layout, bias, dtype) and not any(size % 8 for size in curve[2:])
        for tokens, choice in found.items()
        if choice[ALGORITHM] == NVJET
    ][::SAMPLED]
    tried = np.concatenate([np.c_[every, labels][kept], np.array(points)])
    tried = tried[(tried[:, 1] >= model_products.LONG_K) & (tried[:, 1] <= LONGEST_K)]
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    columns = features(tried[:, :3])
    for at, (m, k, n, label) in enumerate(tried.tolist()):
        leaf = tree.find({feature: int(values[at]) for feature, values in columns.items() if np.ndim(values)} | {"batch": 1})
        if leaf is not None and nvjet_choice(call._replace(m=m, k=k, n=n), "H200") is None:
            rule = leaf_rule(name, leaf[0][0], leaf[1])
            counts[rule][0] += leaf[0] == tree.choices[label] if label < len(tree.choices) else 0
            counts[rule][1] += 1
    return name, tree, dict(counts)


def grow_tree(features: dict[str, np.ndarray], labels: np.ndarray, fitted: np.ndarray) -> list:
    x, thresholds = bin_features(features)
    return grow(x[fitted], labels[fitted], list(features), thresholds, 0)


def pruned(node: list) -> list:
    """Return a tree without leaves of few proposals."""
    if len(node) != 4:
        return node if node and node[1] >= KEPT_LEAVES else []
    low, high = pruned(node[2]), pruned(node[3])
    return [*node[:2], low, high] if low or high else []


def write_trees(trees: Iterable[tuple[str, ChoiceTree, dict[str, list[int]]]]) -> None:
    """Write the trees beside those of operands that are not aligned."""
    data = decompress_json(RULES_FILE.read_bytes())
    for part in ("forms", "counts"):
        data[part] = {name: value for name, value in data[part].items() if not name.startswith(NVJET_TREE)}
    for name, tree, counts in trees:
        print(name, counts, flush=True)
        data["forms"][name] = tree
        data["counts"] |= counts
    content = lzma.compress(json.dumps(data, separators=(",", ":"), default=int).encode(), preset=9 | lzma.PRESET_EXTREME)
    RULES_FILE.write_bytes(content)
    print(f"{len(content):,} bytes of rules")


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


def is_known(call: TorchProduct, launches: Sequence[Launch] | None = None) -> bool:
    """Return True for a product whose launches, or else a proposal or a sure rule, tell its order."""
    try:
        if launches is not None:
            return choose_kernel(call, launches=launches) is not None
        return (proposed_choice(call, "H200") or nvjet_choice(call, "H200")) is not None
    except NotModelled:
        return False


def keep_launches(folders: list[Path]) -> None:
    """Write the package's launches, of products that neither a proposal nor a sure rule tells, and those of the tests, with some words."""
    recorded, words = recorded_launches(), []
    ours = {call: x for call, x in recorded.launches.items() if call.dtype == "float32" or not is_known(call)}
    tests = {call: x for call, x in recorded.launches.items() if call not in ours}
    for call, launches, theirs in launched(folders):
        if is_known(call):
            tests[call] = tuple(launches)
        elif theirs is None and is_known(call, launches):
            ours[call] = tuple(launches)
        if theirs is not None and is_known(call) and zlib.crc32(str(call).encode()) % KEPT_WORDS == 0:
            words.append([list(call), theirs])
    head = {"gpu": recorded.gpu, "library": "torch 2.11.0+cu130", "date": "2026-11-27 and 2026-11-28"}
    LAUNCHES_FILE.write_bytes(packed_launches(ours.items(), head))
    (GOLDEN / "torch_layers_h200.json.xz").write_bytes(packed_launches(tests.items(), head | {"words": words}))
    print(f"{len(tests):,} launches for the tests, {len(ours):,} for the package, {len(words)} products with words")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--date", default="2026-11-28")
    parser.add_argument("--words", action="store_true", help="compare the recorded words too")
    parser.add_argument("--trees", action="store_true", help="fit trees on the first folder's drawn shapes")
    parser.add_argument("--launches", action="store_true", help="write the package's and the tests' launches")
    parser.add_argument("--write", action="store_true", help=f"write {ORDERS_FILE.name}")
    args = parser.parse_args()
    machine = json.loads((args.folders[0] / "launches.jsonl").read_text().splitlines()[0])
    head = {"kind": ORDERS_KIND, "version": ORDERS_VERSION, "gpu": machine["gpu"]}
    head["library"] = "cuBLASLt 13.1 with PyTorch's workspace"
    answers = read_answers(args.folders) if args.write or args.trees else {}
    if args.write:
        table, lines = make_table(answers, head | {"date": args.date, "launched": [0, 0]})
        print("\n".join(lines), f"{write(table):,} bytes", sep="\n", flush=True)
    count, lines = compare((*one[:2], one[2] if args.words else None) for one in launched(args.folders))
    print("\n".join(lines), flush=True)
    others, lines = compare(other_launches())
    print("of other runs:", *lines, sep="\n", flush=True)
    if args.write or args.launches:
        launches = [count.right + others.right, count.asked + others.asked]
        print(f"{write(decompress_json(ORDERS_FILE.read_bytes()) | {'launched': launches}):,} bytes", flush=True)
    if args.trees:
        write_trees(fit_tree(args.folders[0], form, answers) for form in range(len(model_products.FORMS)))
    if args.launches:
        keep_launches(args.folders)
    return 0


if __name__ == "__main__":
    sys.exit(main())
