"""The package's table of float32 products of PyTorch: `python benchmarks/float32_products.py FOLDER`.

The folder has what `tests/gpu_runs/float32_products.py` wrote on a GPU: cuBLASLt's proposals for layers over the number of tokens. The table
is held to the numbers of tokens that were asked about apart, and to the launches that the package has. `--write` writes the table.
"""

import argparse
import json
import lzma
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from torch_product_rules import order_name

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "gpu_runs"))
import float32_products

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.product_kernels import TorchProduct, order_of_kernels
from tcemu.uses.replay.torch_products import (
    FLOAT32_FILE,
    NOT_ASKED,
    NOT_TOLD,
    PROPOSALS_KIND,
    PROPOSALS_VERSION,
    form_name,
    proposed_choice,
    proposed_orders,
    recorded_launches,
)

MOST_TOKENS = 1024


def make_table(file: Any) -> tuple[dict[str, Any], str]:
    """Return the runs of each curve, and how the numbers of tokens that were asked about apart agree with them."""
    choices, layers = [tuple(row) for row in file["choices"].tolist()], file["layers"].tolist()
    numbers: dict[tuple, int] = {}
    forms: dict[str, list] = defaultdict(list)
    asked, rows = defaultdict(list), defaultdict(list)
    for key, where in (("changes", rows), ("held_out", asked)):
        for number, tokens, choice in file[key].tolist():
            where[number].append((tokens, choice))
    agree = Counter()
    for number, changes in rows.items():
        layer, which = divmod(number, len(float32_products.FORMS))
        form, (k, n) = float32_products.FORMS[which], layers[layer]

        def name_of(tokens: int, choice: int, form: tuple = form, k: int = k, n: int = n) -> int:
            m, depth, columns, _ = float32_products.operands(form, k, n, tokens)
            name = order_name(form, choices[choice], depth) if min(m, columns) > 1 else None
            return NOT_TOLD if name is None else numbers.setdefault(name, len(numbers))

        # the slices of a gradient's K depend on K, so that a run may not outlast its first number of tokens
        if form[1] == "cr":
            starts = [tokens for tokens, _ in changes]
            changes = [(t, changes[bisect_right(starts, t) - 1][1]) for t in range(1, MOST_TOKENS + 1)]
        runs: list[int] = []
        for tokens, choice in changes:
            found = name_of(tokens, choice)
            runs += [] if runs and runs[-1] == found else [tokens, found]
        for tokens, choice in asked[number]:
            agree[runs[2 * bisect_right(runs[::2], tokens) - 1] == name_of(tokens, choice)] += 1
        call = TorchProduct("float32", *float32_products.operands(form, k, n, 2)[:3], 1, form[1], "columns" if form[2] else None)
        x, y = (k, n) if form[1] == "cr" else (n, k)
        forms[form_name(call)].append((x, y, [*runs, MOST_TOKENS + 1, NOT_ASKED]))
    columns = {form: [list(column) for column in zip(*sorted(rows), strict=True)] for form, rows in sorted(forms.items())}
    said = f"{agree[True]:,} of {agree.total():,} numbers of tokens that were asked about apart have the order of their run"
    return {"orders": list(numbers), "curves": columns}, said


def compare() -> tuple[int, int, list[str]]:
    """Return how many launched products have the order of their proposal, of how many, and the others."""
    right, asked, wrong = 0, 0, []
    for call, launches in recorded_launches().launches.items():
        if call.dtype != "float32":
            continue
        try:
            proposed, launched = proposed_choice(call, "H200"), order_of_kernels(launches, call)
        except NotModelled:
            continue
        if proposed is None:
            continue
        parts = lambda found: (found.recipe.slices.edges, found.recipe.slices.dealt, found.recipe.unit, found.recipe.epilogue, found.addend_first)
        same = parts(proposed) == parts(launched)
        right, asked = right + same, asked + 1
        wrong += [] if same else [f"{call}: proposed {proposed.recipe.slices}, launched {launched.recipe.slices}"]
    return right, asked, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--date", default="2026-11-28")
    parser.add_argument("--write", action="store_true", help=f"write {FLOAT32_FILE.name}")
    args = parser.parse_args()
    table, said = make_table(np.load(args.folder / "layers.npz"))
    print(said, f"{len(table['orders'])} orders", sep="\n")
    head = {"kind": PROPOSALS_KIND, "version": PROPOSALS_VERSION, "gpu": "NVIDIA H200", "library": "cuBLASLt 13.1 with PyTorch's workspace"}
    for launched in ([0, 0], None) if args.write else ():
        right, asked, _ = compare() if launched is None else (0, 0, [])
        content = json.dumps(head | {"date": args.date, "launched": [right, asked]} | table, separators=(",", ":")).encode()
        FLOAT32_FILE.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
        proposed_orders.cache_clear()
    right, asked, wrong = compare()
    print(f"{right:,} of {asked:,} launched products have the order of their proposal", *wrong, f"{FLOAT32_FILE.stat().st_size:,} bytes", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
