"""What cuDNN took for PyTorch's convolutions: `python benchmarks/torch_convolution_rules.py --help`.

The files are those that `tests/gpu_runs/convolution_kernels.py` wrote on a GPU (`names`, and the kernels of `words`). The calls of
`--layers` become the package's recorded launches. A tree is fitted for each form on the shapes of `--layers` and `--fit`; how often each
leaf is right is counted on those of `--try`, and the leaves that are right often enough are held to those of `--hold`. Forms that are right
less often there are left out.
"""

import argparse
import json
import lzma
import math
import re
import sys
from ast import literal_eval
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from torch_product_rules import MIN_LEAF, bin_features, grow

from tcemu.base.errors import NotModelled
from tcemu.operations.functional.torch_cuda.convolution_kernels import BESIDE, FORWARD, OF_INPUT, OF_WEIGHT, REDUCES, order_of_convolution
from tcemu.operations.functional.torch_cuda.product_kernels import Launch
from tcemu.uses.replay.kernel_choices import ChoiceTree
from tcemu.uses.replay.kernel_profiles import MIN_PROBABILITY
from tcemu.uses.replay.predicted_orders import RuleCount
from tcemu.uses.replay.torch_convolutions import (
    LAUNCHES_FILE,
    LAUNCHES_KIND,
    LAUNCHES_VERSION,
    OPEN,
    RULES_FILE,
    RULES_KIND,
    RULES_VERSION,
    ConvolutionCall,
    convolution_features,
    form_name,
    kernel_facts,
    order_label,
    takes_cudnn,
)

HEAD = {"gpu": "NVIDIA H200", "library": "torch 2.11.0+cu130, cuDNN 9.19"}
DIRECTIONS = {"y": FORWARD, "dx": OF_INPUT, "dw": OF_WEIGHT}
Calls = dict[ConvolutionCall, tuple[Launch, ...]]


def read_call(name: str) -> ConvolutionCall:
    """Return the call of a name in a file; a transposed convolution is a gradient of the input, and its gradient a forward."""
    mode, layout, text = name.split("|", 2)
    text, _, part = text.rpartition("|")
    x, weight, stride, padding, dilation, groups, transposed, more = literal_eval(text)
    direction = DIRECTIONS[part]
    if transposed:
        sizes = [
            (n - 1) * s - 2 * p + d * (k - 1) + o + 1
            for n, k, s, p, d, o in zip(x[2:], weight[2:], stride, padding, dilation, more, strict=True)
        ]
        x, direction = (x[0], weight[1] * groups, *sizes), {FORWARD: OF_INPUT, OF_INPUT: FORWARD}.get(direction, direction)
    dtype = "float32" if mode == "tf32" else mode
    return ConvolutionCall(direction, dtype, x, weight, stride, padding, dilation, groups, layout == "last", mode == "tf32")


def shorten(name: str) -> str:
    """Return a kernel's name as far as the rows of kernels read it."""
    found = re.match(r"\w*?GemmShape\w+?(Wgrad|Dgrad|Fprop)", name) if name.startswith("_ZN") else None
    if found:
        return found[0]
    if reduced := re.search(REDUCES, name):
        return reduced[0]
    name = re.sub(r"cudnn::\w+::|cudnn::|cutlass__5x_cudnn::|^void ", "", name.partition("(")[0])
    return name[:200]


def slices_of(launch: Launch) -> int:
    """Return what the rows read of a grid: its third side, or the number of its blocks."""
    return math.prod(launch.grid) if "segment_k_on" in launch.name else launch.grid[2]


def read(paths: list[Path]) -> Calls:
    """Return the kernels of cuDNN that each call launched, without those that change no bits."""
    found = {}
    for path in paths:
        calls, errors = json.loads(path.read_text())
        assert not errors, errors
        names, calls = calls if isinstance(calls, list) else (None, calls)
        for name, kernels in calls.items():
            if name.rpartition("|")[2] not in DIRECTIONS:
                continue
            call = read_call(name)
            if not takes_cudnn(call):
                continue
            launches = [Launch(kernel[0] if names is None else names[kernel[0]], tuple(kernel[1] or (1, 1, 1))) for kernel in kernels]
            kept = [one for one in launches if re.search(REDUCES, one.name) or not re.search(BESIDE, one.name)]
            found[call] = tuple(Launch(shorten(one.name), (1, 1, slices_of(one))) for one in kept)
    return found


def label_of(call: ConvolutionCall, launches: tuple[Launch, ...]) -> tuple:
    try:
        return order_label(order_of_convolution(launches, kernel_facts(call)).order, call)
    except NotModelled:
        return (OPEN,)


def fit(calls: list[ConvolutionCall], labels: list[tuple]) -> ChoiceTree:
    """Fit the tree of a form."""
    orders = [label for label, count in Counter(labels).most_common() if count >= MIN_LEAF]
    numbers, unknown = {label: number for number, label in enumerate(orders)}, len(orders)
    y = np.array([numbers.get(label, unknown) for label in labels])
    rows = [convolution_features(call) for call in calls]
    names = list(rows[0])
    x, thresholds = bin_features({name: np.array([row[name] for row in rows], np.int64) for name in names})
    return ChoiceTree([list(label) for label in orders], grow(x, y, names, thresholds, unknown))


def with_counts(tree: ChoiceTree) -> ChoiceTree:
    """Return a tree whose leaves have choices of their own: a label, and how often it was right of how many shapes that were tried."""
    choices = []

    def number(node: list) -> list:
        if len(node) == 4:
            return [*node[:2], *map(number, node[2:])]
        if node:
            choices.append([tree.choices[node[0]], 0, 0])
            return [len(choices) - 1, node[1]]
        return []

    return ChoiceTree(choices, number(tree.root))


def write(path: Path, content: dict) -> None:
    text = json.dumps(content, separators=(",", ":"))
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(path.name, path.stat().st_size, "bytes")


def write_launches(calls: Calls, date: str) -> None:
    shape_of = lambda call: (call.x, call.weight, call.stride, call.padding, call.dilation, call.groups)
    shapes = sorted({shape_of(call) for call in calls}, key=lambda shape: (len(shape[0]), shape))
    lists = sorted(set(calls.values()))
    kernels = sorted({launch.name for each in lists for launch in each})
    place, number = {shape: i for i, shape in enumerate(shapes)}, {each: i for i, each in enumerate(lists)}
    columns: dict[str, list[int]] = defaultdict(lambda: [-1] * len(shapes))
    for call, launches in calls.items():
        form = "|".join((call.direction, call.dtype, "tf32" if call.tf32 else "", "last" if call.channels_last else "first"))
        columns[form][place[shape_of(call)]] = number[launches]
    name = {kernel: i for i, kernel in enumerate(kernels)}
    content = {"kernels": kernels, "lists": [[[name[one.name], one.grid[2]] for one in each] for each in lists], "shapes": shapes}
    head = {"kind": LAUNCHES_KIND, "version": LAUNCHES_VERSION, **HEAD, "date": date}
    write(LAUNCHES_FILE, head | content | {"calls": dict(sorted(columns.items()))})
    print(len(calls), "calls of", len(shapes), "shapes,", len(kernels), "kernels")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("layers", "fit", "try", "hold"):
        parser.add_argument(f"--{name}", nargs="*", type=Path, default=[])
    parser.add_argument("--date", default="2026-11-28")
    parser.add_argument("--write", action="store_true")
    args = vars(parser.parse_args())
    layers, fitted, tried, held = (read(args[name]) for name in ("layers", "fit", "try", "hold"))
    forms, by_form = {}, defaultdict(list)
    for call, launches in (layers | fitted).items():
        by_form[form_name(call)].append((call, label_of(call, launches)))
    for form, rows in sorted(by_form.items()):
        if len(rows) >= 10 * MIN_LEAF:
            forms[form] = with_counts(fit(*map(list, zip(*rows, strict=True))))
    for right, calls in ((True, tried), (False, held)):  # leaves are counted on `--try`, and their rules held to `--hold`
        asked, answered, good = Counter(), Counter(), Counter()
        for call, launches in calls.items():
            form = form_name(call)
            if form not in forms or call in layers or call in fitted or (not right and call in tried):
                continue
            asked[form] += 1
            found = forms[form].find(convolution_features(call))
            if found is None or found[0][0][0] == OPEN:
                continue
            leaf = found[0]
            is_right = tuple(leaf[0]) == label_of(call, launches)
            if right:
                leaf[1], leaf[2] = leaf[1] + is_right, leaf[2] + 1
            elif RuleCount(*leaf[1:]).probability < MIN_PROBABILITY:
                continue
            answered[form] += 1
            good[form] += is_right
        for form in forms if asked else ():
            print(f"{form}: {len(by_form[form])} shapes; of {asked[form]} others {answered[form]} have a leaf, {good[form]} right")
        print("in all", sum(asked.values()), sum(answered.values()), sum(good.values()))
        if not right:  # forms that did not stand are left out
            stood = {form: good[form] >= MIN_PROBABILITY * answered[form] and answered[form] >= MIN_LEAF for form in forms}
            forms = {form: [*tree, good[form], answered[form]] for form, tree in forms.items() if stood[form]}
    if args["write"]:
        write_launches(layers, args["date"])
        head = {"kind": RULES_KIND, "version": RULES_VERSION, **HEAD, "date": args["date"]}
        write(RULES_FILE, head | {"forms": forms})
    return 0


if __name__ == "__main__":
    sys.exit(main())
