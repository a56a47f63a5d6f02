"""The order in which a kernel adds that cuBLASLt chooses: its configuration determines the slices of K, the merge and the instruction.

`choice_order` translates a configuration. `list_proposals` has those that an H100's cuBLASLt proposed, shape by shape, in the file
`proposed_h100.json.xz`, which `benchmarks/replay_rules.py --proposals` writes. `proposed_orders` has the orders of those that an H200's
proposed with PyTorch's workspace for the layers of public models and their gradients, over the number of tokens, in the file
`torch_product_proposals.json.xz`, which `benchmarks/torch_product_proposals.py` writes. A library may choose otherwise; `order_rules.json`
and the second file count how often measured and launched products did.

Source: cublasLt.h of cuBLAS 13.1 (cublasLtMatmulStages_t, cublasLtReductionScheme_t); CUTLASS, cutlass/gemm/kernel/params_universal_base.h
(the alignment of slices), cutlass/transform/threadblock/predicated_tile_access_iterator.h (the remainder of K comes first).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from tcemu.base.saved_files import check_saved, decompress_json
from tcemu.engine.formats.number_formats import BF16, F16, F32
from tcemu.operations.functional.torch_cuda.product_kernels import nvjet_slices
from tcemu.operations.products.library.kernel_recipe import Lanes, Merge, Slices

PROPOSALS_FILE = Path(__file__).parent / "proposed_h100.json.xz"
PROPOSALS_KIND, PROPOSALS_VERSION = "tcemu replay proposals", 1
PROPOSALS_FIELDS = ("gpu", "sm_count", "library_version", "date", "libraries")
Shape = tuple[int, int, int]  # m, n, k

CUTLASS, NVJET, XMMA, FMA = (21, 23, 24), (66,), (63,), (55,)  # algorithms; others add in orders that are not known from the choice
STAGE_TILES = {stage: size for size, first in ((16, 1), (32, 7), (64, 13), (128, 19)) for stage in range(first, first + 6)} | {27: 16}
DEFAULT_TILE = 32  # K of a tile where the stages are 0, as in the kernels named s1688gemm of algorithm 24
LINE, VECTOR = 128, 16  # bytes to a multiple of which slices are rounded up where K is a multiple of the line, and otherwise


class LibraryUnits(NamedTuple):
    """The sizes that all kernels of a library share."""

    element_bytes: int
    step: int  # terms of an instruction
    nvjet_grain: int = 0  # elements in nvjet's tile of K


LIBRARY_UNITS = {
    "torch-f16": LibraryUnits(2, 16, 64), "torch-bf16": LibraryUnits(2, 16, 64), "torch-tf32": LibraryUnits(4, 8),
    "torch-e4m3": LibraryUnits(1, 32, 128),
}  # fmt: skip
SHORT_STEPS = {"torch-f16": "f16", "torch-bf16": "bf16"}  # libraries with kernels of mma.m16n8k8
RESULTS = {"torch-f16": F16, "torch-bf16": BF16, "torch-tf32": F32}


class KernelChoice(NamedTuple):
    """A configuration of cuBLASLt, as far as it concerns the order."""

    algorithm: int
    stages: int
    split_k: int
    reduction_scheme: str


class ChoiceOrder(NamedTuple):
    """The order of a kernel for one K."""

    slices: Slices
    merge: Merge
    kernels: str  # the kind of kernel: "CUTLASS", "nvjet", "XMMA" or "f32 fma"
    residue: int | None = None  # of `Steps`
    op: str | None = None  # instruction; None: the library's usual one
    lanes: Lanes | None = None  # in place of an instruction


def choice_order(library: str, k: int, choice: KernelChoice) -> ChoiceOrder | None:
    """Return the order of a chosen kernel.

    Args:
        library: One of `LIBRARY_UNITS`.
        k: K of the product.
        choice: The configuration.

    Returns:
        The order, or None where the configuration does not determine it.
    """
    units = LIBRARY_UNITS[library]
    if choice.algorithm in FMA and choice.split_k <= 1:
        return ChoiceOrder(Slices.single(k), Merge(start="zero"), "f32 fma", lanes=Lanes())
    if choice.algorithm in XMMA and choice.split_k <= 1:
        return ChoiceOrder(Slices.single(k), Merge(), "XMMA")
    if choice.algorithm in NVJET and units.nvjet_grain:
        return ChoiceOrder(nvjet_slices(k, choice.split_k, units.nvjet_grain), Merge(), "nvjet")
    if choice.algorithm not in CUTLASS or (choice.stages not in STAGE_TILES and choice.stages != 0):
        return None
    line, vector = LINE // units.element_bytes, VECTOR // units.element_bytes
    slices = Slices.even(k, max(1, choice.split_k), vector if k % line else line)
    slices = slices if len(slices.edges) > 2 else Slices.single(k)
    tile = STAGE_TILES.get(choice.stages, DEFAULT_TILE)
    short = SHORT_STEPS.get(library) if choice.stages == 0 else None
    step = 8 if short else units.step
    lengths = {end - start for start, end in zip(slices.edges, slices.edges[1:], strict=False)}
    residue = tile if any(length > tile and length % tile % step for length in lengths) else None
    op = f"mma.sync.aligned.m16n8k8.row.col.f32.{short}.{short}.f32" if short else None
    return ChoiceOrder(slices, _merge(library, choice), "CUTLASS", residue, op)


def _merge(library: str, choice: KernelChoice) -> Merge:
    result = RESULTS[library]
    if choice.reduction_scheme == "output type":
        return Merge(partial=result, start="zero")
    return Merge(partial=result, serial=result != F32) if choice.reduction_scheme == "in place" else Merge()


TILE = 64  # rows and columns of the tiles in which outputs are counted, and elements of K in a tile of 16-bit operands


class Proposals(NamedTuple):
    """The choices that cuBLASLt proposed on one GPU, by library and shape."""

    gpu: str
    sm_count: int
    library_version: str
    date: str
    libraries: dict[str, dict[Shape, KernelChoice]]


@lru_cache(maxsize=1)
def list_proposals() -> Proposals:
    """Read the proposals of this package."""
    data = check_saved("proposals", decompress_json(PROPOSALS_FILE.read_bytes()), PROPOSALS_KIND, PROPOSALS_VERSION, PROPOSALS_FIELDS)
    libraries = {}
    for library, (choices, *columns) in data["libraries"].items():
        choices = [KernelChoice(*choice) for choice in choices]
        libraries[library] = {(m, n, k): choices[number] for m, n, k, number in zip(*columns, strict=True)}
    return Proposals(data["gpu"], data["sm_count"], data["library_version"], data["date"], libraries)


ORDERS_FILE = Path(__file__).parent / "torch_product_proposals.json.xz"
ORDERS_KIND, ORDERS_VERSION = "tcemu torch product proposals", 1
ORDERS_FIELDS = ("gpu", "library", "date", "launched", "orders", "curves")
NOT_ASKED = ()  # in place of an order: cuBLASLt was not asked
NOT_TOLD = ["not told"]  # in place of an order: it proposed a kernel whose order a proposal does not tell
LONG_K, TOKEN_STEP = 42 * 64, 8  # K from which gradients of weights were asked about at multiples of so many tokens


class ProposedOrders(NamedTuple):
    """The orders of the kernels that cuBLASLt proposed on one GPU for layers, over the number of tokens."""

    gpu: str
    library: str
    date: str
    launched: tuple[int, int]  # launched products whose kernels had the proposal's order, and all of them
    orders: list[list]  # by their short names, as in the trees of `torch_products`
    curves: dict[tuple[str, int, int], list[int]]  # by a product's form and two of its sizes: first tokens and order of each run

    def find(self, form: str, m: int, n: int, k: int) -> Sequence[Any]:
        """Return the short name of the order for a product, `NOT_ASKED` or `NOT_TOLD`.

        The tokens are the rows of A; in a gradient of a weight, whose A lies transposed in memory, they are K.
        """
        if "-cr" in form and k >= LONG_K and k % TOKEN_STEP:
            return NOT_ASKED
        x, y, tokens = (m, n, k) if "-cr" in form else (n, k, m)
        runs = self.curves.get((form, x, y), [])
        at = bisect_right(runs[::2], tokens)
        return self.orders[runs[2 * at - 1]] if at else NOT_ASKED


@lru_cache
def proposed_orders(file: Path = ORDERS_FILE) -> ProposedOrders:
    """Read the proposed orders of a file of this package."""
    data = check_saved("orders", decompress_json(file.read_bytes()), ORDERS_KIND, ORDERS_VERSION, ORDERS_FIELDS)
    curves = {(form, x, y): runs for form, columns in data["curves"].items() for x, y, runs in zip(*columns, strict=True)}
    return ProposedOrders(data["gpu"], data["library"], data["date"], tuple(data["launched"]), data["orders"], curves)


# ---- predicted choices


def shape_features(shape: Shape, sm_count: int) -> dict[str, int]:
    """Return what the nodes of a choice tree compare, in integers."""
    m, n, k = shape
    features = {
        "M": m, "N": n, "K": k, "M*N": m * n, "M*N*K": m * n * k, "K // 32": k // 32, "K // 64": k // 64,
        "1024*K*K // (M*N)": 1024 * k * k // (m * n), "1024*M // N": 1024 * m // n, "alignment of N": n & -n, "alignment of K": k & -k,
    }  # fmt: skip
    for rows, columns in ((64, 64), (64, 128), (128, 64), (128, 128), (64, 256), (256, 64), (128, 256), (256, 128)):
        tiles = -(-m // rows) * -(-n // columns)
        name = f"tiles of {rows} x {columns}"
        features[name], features[f"SMs // {name}"], features[f"2 SMs // {name}"] = tiles, sm_count // tiles, 2 * sm_count // tiles
    return features


class ChoiceTree(NamedTuple):
    """A decision tree from the features of a shape to what is chosen for it.

    A node is [feature, threshold, node if below or equal, node if above]. A leaf is [index of a choice, number of proposals], all of which
    were this choice, or [] where they differ.
    """

    choices: list[Any]  # of `KernelChoice`, or of orders by their short names
    root: list

    def find(self, features: dict[str, int]) -> tuple[Any, int, str] | None:
        """Return the choice in the leaf of a shape, its number of proposals, and the path to it; None where proposals differ."""
        node, path = self.root, {}
        while len(node) == 4:
            name, threshold, low, high = node
            is_low = features[name] <= threshold
            path[name, is_low] = f"{name} {'<=' if is_low else '>'} {threshold}"
            node = low if is_low else high
        return (self.choices[node[0]], node[1], ", ".join(path.values())) if node else None
