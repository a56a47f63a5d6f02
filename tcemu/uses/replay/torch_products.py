"""Products as PyTorch 2.11 computes them on Hopper: which kernel a call gets, with the evidence, and the product by that kernel's order.

`choose_kernel` answers from kernels that a profiler recorded, from measured shapes, from kernels that were recorded on an H200
(`torch_product_launches.json.xz`), from what cuBLASLt proposed there for the layers of public models, over the number of tokens
(`kernel_choices.proposed_orders`), or from rules. Rules: nvjet's thresholds (`predicted_orders`), which hold for every memory order of
aligned operands; and trees from a shape to the order of the kernel that cuBLASLt proposed for every shape there, one for each dtype, memory
order, bias and batch (`torch_product_rules.json.xz`, written by `benchmarks/torch_product_rules.py`). A call that none of these answers
raises NotModelled, and says what a recording would teach.

Source: cuBLASLt 13.1's proposals on an H200, and kernels, grids and words of torch 2.11.0 there (tests/gpu_runs/torch_products.py,
torch_proposals.py, model_products.py); the workspace of cuBLASLt in PyTorch, at::cuda::getCUDABlasLtWorkspaceSize.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.base.saved_files import check_saved, decompress_json
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.functional.torch_cuda.product_kernels import (
    BYTES,
    LARGE_K_TILE,
    LAYOUTS,
    NVJET_GRAIN,
    Launch,
    SliceOrder,
    TorchProduct,
    ceil_div,
    check_product,
    nvjet_slices,
    tensor_core,
)
from tcemu.operations.functional.torch_cuda.product_kernels import order_of_kernels as order_of_kernels
from tcemu.operations.products.library.kernel_matmul import Floats, matmul_with_kernel
from tcemu.operations.products.library.kernel_recipe import Conditions, Epilogue, KernelRecipe, Lanes, Merge, Slices, Steps
from tcemu.operations.products.library.numpy_sums import multiply_by_numpy
from tcemu.operations.products.recipe_kinds import ProductOperands
from tcemu.uses.replay.kernel_choices import NOT_TOLD, ORDERS_FILE, STAGE_TILES, ChoiceTree, proposed_orders
from tcemu.uses.replay.kernel_profiles import MIN_PROBABILITY, find_profile, list_profiles
from tcemu.uses.replay.predicted_orders import BETWEEN, RuleCount, predict_nvjet, shipped_rules

RULES_FILE = Path(__file__).parent / "torch_product_rules.json.xz"
RULES_KIND, RULES_VERSION = "tcemu torch product rules", 1
LAUNCHES_FILE = Path(__file__).parent / "torch_product_launches.json.xz"
LAUNCHES_KIND, LAUNCHES_VERSION = "tcemu torch product launches", 1
LAUNCHES_FIELDS = ("gpu", "library", "date", "kernels", "products")
RULES_FIELDS = ("gpu", "library", "date", "sm_count", "forms", "counts")
SMALL_LAYERS_FILE = Path(__file__).parent / "torch_product_small_layers.json.xz"  # float32, and layers with few labels in 16 bits
VECTORS_FILE = Path(__file__).parent / "torch_product_vectors.json.xz"
VECTORS_KIND, VECTORS_VERSION = "tcemu torch products with a vector", 1
VECTORS_FIELDS = ("gpu", "library", "date", "tried", "kernels", "launches", "grids", "layers")
VECTOR_STEP = 64  # elements between two sizes of which the kernels were recorded
LIBRARIES = ("torch 2.11",)
GPUS = ("H100", "H200")
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
LT_WORKSPACE = 1 << 20  # bytes that PyTorch gives cuBLASLt, which computes products with a bias; cuBLAS gets 32 MiB
ALIGNMENT = 8  # elements of 16 bits in 16 bytes
TILES = (
    (32, 32), (32, 64), (64, 32), (64, 64), (64, 128), (128, 64), (128, 32), (128, 128), (64, 256), (256, 64), (128, 256), (256, 128),
    (8, 64), (8, 128), (8, 192), (8, 256), (16, 64), (16, 128), (24, 64), (40, 64), (48, 64), (96, 64), (192, 128), (192, 64),
)  # fmt: skip
NVJET_TREE, LONGEST_K, MIN_CHUNK = "nvjet ", 28672, 21  # trees for aligned operands: name's beginning, K of the fit, tiles in a slice
LEAF_SIZES = (20, 60, 200)  # proposals in a leaf from which it counts as another rule
MEASURED, RECORDED, PROPOSED, RULE = "measured", "recorded kernels", "proposed", "by rule"


class ProductChoice(NamedTuple):
    """The order that a product of PyTorch gets, and how that is known."""

    product: TorchProduct
    recipe: KernelRecipe
    addend_first: bool  # the addend is a slice before the first one; else the recipe's epilogue adds it
    kernels: str  # the kind of kernel
    source: str  # "measured", "recorded kernels", "proposed" or "by rule"
    evidence: str
    probability: float | None = None  # of a proposal or a rule

    def __str__(self) -> str:
        share = "" if self.probability is None else f", probability {self.probability:.4f}"
        return f"{self.product}: {self.kernels}, {self.recipe.slices}; {self.source}{share}: {self.evidence}"


# ---- the rules that are shipped


class ProductRules(NamedTuple):
    """The contents of `torch_product_rules.json.xz`."""

    gpu: str
    sm_count: int
    forms: dict[str, ChoiceTree]  # by `form_name`, of orders by their short names
    counts: dict[str, RuleCount]  # by form, kind of order and size of the leaf, on shapes that no tree was fitted on


@lru_cache(maxsize=1)
def product_rules() -> ProductRules:
    """Read the rules of this package."""
    data = check_saved("rules", decompress_json(RULES_FILE.read_bytes()), RULES_KIND, RULES_VERSION, RULES_FIELDS)
    forms = {name: ChoiceTree(*tree) for name, tree in data["forms"].items()}
    return ProductRules(data["gpu"], data["sm_count"], forms, {name: RuleCount(*count) for name, count in data["counts"].items()})


class RecordedLaunches(NamedTuple):
    """The contents of `torch_product_launches.json.xz`: the kernels of each product."""

    gpu: str
    launches: dict[TorchProduct, tuple[Launch, ...]]


@lru_cache(maxsize=1)
def recorded_launches() -> RecordedLaunches:
    """Read the recorded launches of this package."""
    data = check_saved("launches", decompress_json(LAUNCHES_FILE.read_bytes()), LAUNCHES_KIND, LAUNCHES_VERSION, LAUNCHES_FIELDS)
    names = data["kernels"]
    read = lambda kernel: Launch(names[kernel[0]], *(tuple(size) for size in kernel[1:]))  # a memset has no grid
    return RecordedLaunches(data["gpu"], {TorchProduct(*product): tuple(map(read, kernels)) for *product, kernels in data["products"]})


def form_name(call: TorchProduct) -> str:
    """Return the name of a product's dtype, memory order, bias and batch."""
    return f"{SHORT[call.dtype]}-{call.layout}{'-bias' if call.addend == 'columns' else ''}{'-batch' if call.batch > 1 else ''}"


def tree_name(call: TorchProduct) -> str:
    """Return the name of a product's tree."""
    return f"{NVJET_TREE if call.batch == 1 and is_aligned(call) else ''}{form_name(call)}"


def product_features(call: TorchProduct, sm_count: int) -> dict[str, int]:
    """Return what the nodes of a tree compare, in integers."""
    m, k, n, batch = call.m, call.k, call.n, call.batch
    slices = np.maximum(1, (ceil_div(k, NVJET_GRAIN) - 1) // (MIN_CHUNK - 1))
    features = {
        "M": m, "N": n, "K": k, "batch": batch, "M*N": m * n, "batch*M*N": batch * m * n, "M*N*K": m * n * k, "K // 32": k // 32,
        "K // 64": k // 64, "1024*K*K // (M*N)": 1024 * k * k // (m * n), "1024*M // N": 1024 * m // n, "alignment of N": n & -n,
        "alignment of K": k & -k, "alignment of M": m & -m, "slices": slices, "M*N // slices": m * n // slices,
    }  # fmt: skip
    for rows, columns in TILES:
        tiles, name = ceil_div(m, rows) * ceil_div(n, columns) * batch, f"tiles of {rows} x {columns}"
        features |= {name: tiles} | {f"{'' if f == 1 else f'{f} '}SMs // {name}": f * sm_count // tiles for f in (1, 2, 3)}
    return features


def leaf_rule(form: str, kind: str, proposals: int) -> str:
    """Return the name under which a leaf's predictions are counted."""
    return f"{form}: {kind}, {max(size for size in LEAF_SIZES if size <= proposals)} proposals or more"


# ---- orders by their short names in a tree

OPEN = "open"
KINDS = {
    "fma": "a chain of f32 fma", "fma cut": "CUTLASS f32", "deal": "XMMA f32", "sn t": "gemmSN_TN", "sn n": "gemmSN_NN",
    "large k": "sgemm_largek", "nvjet": "nvjet", "nvjet cut": "nvjet", "tc": "CUTLASS", "tc cut": "CUTLASS", OPEN: "XMMA f32",
}  # fmt: skip
IN_PLACE, OUTPUT_TYPE = 1, 4  # cublasLtReductionScheme_t


class NamedOrder(NamedTuple):
    """The order of a leaf, for one K."""

    slices: SliceOrder
    merge: Merge = Merge()
    addend_first: bool = False


def cut_evenly(k: int, length: int) -> Slices:
    return Slices.from_edges((*range(0, k, length), k)) if length < k else Slices.single(k)


def order_by_name(order: Sequence[Any], call: TorchProduct) -> NamedOrder:
    """Return the order that a leaf names. Raises NotModelled where the GPU itself leaves it open."""
    kind, *numbers = order
    k, single = call.k, Slices.single(call.k)
    if kind == "fma":
        return NamedOrder(SliceOrder(Lanes(), single))
    if kind == "fma cut":  # the length of a slice, and 1 where the running sum is stored in place
        return NamedOrder(SliceOrder(Lanes(), cut_evenly(k, numbers[0])), addend_first=len(numbers) > 1 and call.addend is not None)
    if kind == "large k":
        return NamedOrder(SliceOrder(Lanes(), Slices.even(k, numbers[0], LARGE_K_TILE) if numbers[0] > 1 else single))
    if kind == "deal":
        return NamedOrder(SliceOrder(Lanes(), Slices.interleaved(k, numbers[0], 8)))
    if kind == "sn t":
        return NamedOrder(SliceOrder(Lanes(16, chunk=16, join="ascending"), single))
    if kind == "sn n":
        return NamedOrder(SliceOrder(Lanes(chunk=512 // numbers[0]), Slices.even(k, min(k, numbers[0]), 1)))
    if kind == "nvjet":
        return NamedOrder(SliceOrder(tensor_core(call), single))
    if kind == "nvjet cut":
        return NamedOrder(SliceOrder(tensor_core(call), nvjet_slices(k, numbers[0], NVJET_GRAIN)))
    if kind == OPEN:
        raise NotModelled(f"{call}: the kernel adds its slices in the order in which they arrive: the order is open")
    stages = numbers[1]  # after the algorithm
    unit = tensor_core(call, short=stages == 0, residue=STAGE_TILES.get(stages, 32))
    if kind == "tc":
        return NamedOrder(SliceOrder(unit, single))
    length, scheme = numbers[2:]
    merge = Merge(partial=call.format, start="zero") if scheme == OUTPUT_TYPE else Merge()
    merge = Merge(partial=call.format, serial=True) if scheme == IN_PLACE else merge
    slices = SliceOrder(unit, cut_evenly(k, length), call.format if scheme == OUTPUT_TYPE else F32)
    return NamedOrder(slices, merge, addend_first=scheme == IN_PLACE and call.addend is not None)


# ---- the choice

# shapes whose K may be cut: those for which an H100 proposed what trees of an H200's proposals tell (`list_proposals`), and all
ON_ANOTHER_GPU = RuleCount(1857, 2017)
TEACH = "a recording of its kernels with their grids would teach it: choose_kernel(..., launches=...)"


def check_library(what: str, gpu: str, library: str) -> None:
    """Raise Unsupported for a GPU or a library with which the operations that `what` names were not observed."""
    for name, value, expected in (("gpu", gpu, GPUS), ("library", library, LIBRARIES)):
        if value not in expected:
            raise Unsupported(f"{name}={value!r}: {what} of PyTorch were observed with {name} one of {', '.join(expected)}")


def choose_kernel(
    call: TorchProduct,
    *,
    gpu: str = "H200",
    library: str = "torch 2.11",
    launches: Sequence[Launch] | None = None,
    min_probability: float = MIN_PROBABILITY,
) -> ProductChoice:
    """Return the order that a product of PyTorch gets on a GPU, with how that is known.

    Args:
        call: The product.
        gpu: "H200" or "H100". cuBLASLt was asked on an H200. An H100 has as many multiprocessors, but cuts K into other slices for 8 % of
            the shapes where K may be cut, so that proposals and trees for aligned operands in 16 bits are refused there.
        library: "torch 2.11".
        launches: The product's kernels with their grids, as a profiler recorded them. They determine the order, whatever the rules say.
        min_probability: Rules that were right less often are not used.

    Returns:
        The choice.

    Raises:
        NotModelled: The order is not known, or the GPU leaves it open.
        Unsupported: Another dtype, memory order, GPU or library.
    """
    check_product(call)
    check_library("products", gpu, library)
    if launches is not None:
        found = order_of_kernels(launches, call)
        return ProductChoice(call, found.recipe, found.addend_first, found.kernels, RECORDED, found.evidence)
    known = measured_choice(call, gpu) or recorded_choice(call, gpu)
    if known is not None:
        return known
    first = (proposed_choice, nvjet_choice) if gpu in proposed_orders().gpu else (nvjet_choice, proposed_choice)
    ruled = next(filter(None, (rule(call, gpu) for rule in (vector_choice, *first, gradient_choice, tree_choice))), None)
    if ruled is None:
        raise NotModelled(f"{call}: no rule knows which kernel {library} takes for it on an {gpu}; {TEACH}")
    if ruled.probability is not None and ruled.probability < min_probability:
        raise NotModelled(
            f"{call}: {ruled.kernels}, {ruled.recipe.slices}, has a probability of {ruled.probability:.3f} only, and min_probability is "
            f"{min_probability}; {TEACH}"
        )
    return ruled


def measured_choice(call: TorchProduct, gpu: str) -> ProductChoice | None:
    """Return the choice of a shape whose order was found on the GPU by probes; None for others."""
    if call.layout != "rr" or call.batch > 1 or call.addend is not None:
        return None
    profile = find_profile(list_profiles(), "torch-" + SHORT[call.dtype], None, gpu if call.dtype != "float32" else "H200")
    shape = call.m, call.n, call.k
    if gpu not in profile.gpu or shape not in profile.shapes:
        return None
    recipe = profile.kernel_recipe(shape)
    return ProductChoice(call, recipe, False, "as measured", MEASURED, recipe.conditions.evidence)


def recorded_choice(call: TorchProduct, gpu: str) -> ProductChoice | None:
    """Return the choice of a product whose kernels were recorded; None for others. Raises NotModelled where their order is not known."""
    recorded = recorded_launches()
    if call not in recorded.launches:
        return None
    found = order_of_kernels(recorded.launches[call], call)
    where, source = ("", RECORDED) if gpu in recorded.gpu else (f", assumed for an {gpu}", RULE)
    evidence = f"its kernels on an {recorded.gpu}{where}; {found.evidence}"
    return ProductChoice(call, found.recipe, found.addend_first, found.kernels, source, evidence)


class RecordedVectors(NamedTuple):
    """The contents of `torch_product_vectors.json.xz`: kernels of float32 products with one row, at multiples of VECTOR_STEP."""

    gpu: str
    tried: RuleCount  # products of other sizes, and those of them whose kernels had the order of the sizes around them
    launches: list[tuple[Launch, ...]]  # grids have the slices alone
    grids: dict[str, dict[int, list[int]]]  # by `form_name` and K: the first N and the launches of each run, at last the N after
    layers: dict[tuple[str, int, int], int]  # by `form_name`, K and N: the launches of layers of other sizes


@lru_cache(maxsize=1)
def recorded_vectors() -> RecordedVectors:
    """Read the recorded products with a vector."""
    data = check_saved("vectors", decompress_json(VECTORS_FILE.read_bytes()), VECTORS_KIND, VECTORS_VERSION, VECTORS_FIELDS)
    read = lambda name, slices, block: Launch(data["kernels"][name], (1, 1, slices), tuple(block))
    launches = [tuple(read(*launch) for launch in each) for each in data["launches"]]
    grids = {form: {int(k): runs for k, runs in rows.items()} for form, rows in data["grids"].items()}
    layers = {(form, k, n): number for form, rows in data["layers"].items() for k, n, number in rows}
    return RecordedVectors(data["gpu"], RuleCount(*data["tried"]), launches, grids, layers)


def vector_launches(call: TorchProduct) -> list[tuple[Launch, ...]]:
    """Return the kernels of the recorded sizes around a product with one row; none where one of them was not recorded."""
    table, found = recorded_vectors(), []
    rows = table.grids.get(form_name(call), {})
    around = lambda size: {max(1, size // VECTOR_STEP) * VECTOR_STEP, ceil_div(size, VECTOR_STEP) * VECTOR_STEP}
    for k in around(call.k):
        for n in around(call.n):
            runs = rows.get(k, [])
            at = bisect_right(runs[::2], n)
            if not at or 2 * at >= len(runs):
                return []
            found.append(table.launches[runs[2 * at - 1]])
    return found


def vector_choice(call: TorchProduct, gpu: str, *, by_layer: bool = True) -> ProductChoice | None:
    """Return the choice of a float32 product with one row, by the kernels of its size or of the recorded sizes around it, if these agree.

    by_layer: The kernels of layers of sizes between the steps count.
    """
    if call.dtype != "float32" or call.m > 1 or call.batch > 1 or call.addend == "outputs" or call.k < VECTOR_STEP or call.n < 2:
        return None
    table = recorded_vectors()
    layer = table.layers.get((form_name(call), call.k, call.n)) if by_layer else None
    launches = list(dict.fromkeys(vector_launches(call))) if layer is None else [table.launches[layer]]
    orders = [order_of_kernels(each, call) for each in launches]
    if not orders or len({order.recipe for order in orders}) > 1:
        return None
    found, exact = orders[0], layer is not None or not (call.k % VECTOR_STEP or call.n % VECTOR_STEP)
    where = "" if gpu in table.gpu else f", assumed for an {gpu}"
    said = f"its kernel on an {table.gpu}" if exact else (
        f"the order of the kernels of the sizes around it on an {table.gpu}; right for {table.tried.right:,} of {table.tried.asked:,} "
        "products that it was tried on"
    )  # fmt: skip
    source = RECORDED if exact and gpu in table.gpu else RULE
    probability = None if exact else table.tried.probability
    return ProductChoice(call, found.recipe, found.addend_first, found.kernels, source, f"{said}{where}; {found.evidence}", probability)


def proposed_choice(call: TorchProduct, gpu: str) -> ProductChoice | None:
    """Return the choice of a layer whose curve of proposals has the number of tokens; None for others.

    Raises NotModelled where the proposal does not tell the order.
    """
    if call.batch > 1 or call.addend == "outputs":
        return None
    tables = [proposed_orders(file) for file in (ORDERS_FILE, SMALL_LAYERS_FILE)]
    asked = ((table, table.find(form_name(call), call.m, call.n, call.k)) for table in tables)
    table, order = next(((table, order) for table, order in asked if order), (tables[0], []))
    if order == NOT_TOLD:
        raise NotModelled(f"{call}: cuBLASLt proposed a kernel on an {table.gpu} whose order the proposal does not tell; {TEACH}")
    if not order:
        return None
    why = f"{table.library} proposed this order on {table.date}"
    count = ON_ANOTHER_GPU if is_aligned(call) and gpu not in table.gpu else RuleCount(*table.launched)
    return _ruled(call, order_by_name(order, call), KINDS[order[0]], why, count, gpu, source=PROPOSED, found_on=table.gpu)


def is_aligned(call: TorchProduct) -> bool:
    """True if cuBLAS takes nvjet: 16-bit operands whose rows, or columns where these are contiguous, are multiples of 16 bytes."""
    lines = call.n, call.k if call.layout[0] == "r" else call.m, call.n if call.layout[1] == "r" else call.k
    return BYTES[call.format] == 2 and not any(length % ALIGNMENT for length in lines)


NVJET_WORKSPACE = RuleCount(91883, 91883)  # drawn products with a bias of tests/gpu_runs/model_products.py: none was cut
NVJET_BATCH = RuleCount(1116, 1116)  # bmm of aligned operands in both runs of torch_products.py: none was cut
FLOAT32_GRADIENTS = RuleCount(42_912, 42_912)  # proposals for gradients of eager attention, float32_products.py: each one chain


def nvjet_choice(call: TorchProduct, gpu: str) -> ProductChoice | None:
    """Return the choice of an aligned product of 16 bits by nvjet's thresholds; None where these do not tell."""
    if not is_aligned(call):
        return None
    rules = shipped_rules()
    if call.addend == "columns" and 2 * call.m * call.n * BYTES[F32] > LT_WORKSPACE and call.batch == 1:
        why = f"the workspace of {LT_WORKSPACE:,} bytes holds no two slices of {call.m * call.n:,} outputs in f32"
        return _ruled(call, NamedOrder(SliceOrder(tensor_core(call), Slices.single(call.k))), "nvjet", why, NVJET_WORKSPACE, gpu)
    if call.batch > 1:
        return _ruled(
            call, NamedOrder(SliceOrder(tensor_core(call), Slices.single(call.k))), "nvjet", "nvjet cuts no batch", NVJET_BATCH, gpu
        )
    whole = ceil_div(call.k, ALIGNMENT) * ALIGNMENT
    found = predict_nvjet(rules.nvjet, NVJET_GRAIN, (call.m, call.n, whole), product_rules().sm_count)
    if found is None or found.rule == BETWEEN:
        return None
    count = max(1, len(found.order.slices.edges) - 1)
    if call.addend == "columns" and count * call.m * call.n * 4 > LT_WORKSPACE and count > 1:
        return None
    dropped = found.order.slices.dropped
    slices = Slices.even(call.k, count, NVJET_GRAIN, dropped=dropped) if count > 1 else Slices.single(call.k)
    return _ruled(call, NamedOrder(SliceOrder(tensor_core(call), slices)), "nvjet", found.why, rules.counts[found.rule], gpu)


def gradient_choice(call: TorchProduct, gpu: str) -> ProductChoice | None:
    """Return the choice of a gradient of eager attention in float32, a batch of A that lies transposed; None for others."""
    if call.dtype != "float32" or call.batch == 1 or call.layout != "cr" or min(call.m, call.k, call.n) < 2 or call.addend:
        return None
    order = NamedOrder(SliceOrder(Lanes(), Slices.single(call.k)))
    return _ruled(call, order, KINDS["fma"], "cuBLASLt cuts no gradient of attention in float32", FLOAT32_GRADIENTS, gpu)


def tree_choice(call: TorchProduct, gpu: str) -> ProductChoice | None:
    """Return the choice of a product by the tree of its form; None where it has no leaf."""
    rules, form = product_rules(), tree_name(call)
    aligned = form.startswith(NVJET_TREE)
    if form not in rules.forms or (call.k > LONGEST_K if aligned else min(call.m, call.n, call.k) < 2):
        return None
    found = rules.forms[form].find(product_features(call, rules.sm_count))
    if found is None:
        return None
    order, proposals, _ = found
    count = rules.counts.get(leaf_rule(form, order[0], proposals), RuleCount(0, 0))
    count = ON_ANOTHER_GPU if aligned and gpu not in rules.gpu else count
    why = f"cuBLASLt proposed this order for all {proposals} shapes of a leaf of the tree {form!r}"
    return _ruled(call, order_by_name(order, call), KINDS[order[0]], why, count, gpu)


def _ruled(
    call: TorchProduct, order: NamedOrder, kernels: str, why: str, count: RuleCount, gpu: str, *, source: str = RULE, found_on: str = ""
) -> ProductChoice:
    """Return the choice of a rule, or of a proposal."""
    found_on = found_on or product_rules().gpu
    split = order.slices.slices.dealt is not None or len(order.slices.slices.edges) > 2
    # nvjet adds an addend [M, N] to the rounded total, and a split sum in the result's format is rounded before a bias
    before = call.addend == "outputs" and kernels == "nvjet" and not split
    before |= call.addend == "columns" and kernels == "CUTLASS" and split and not order.addend_first
    bias = None if call.addend is None or order.addend_first else f"{call.format} {call.addend}"
    where = "" if gpu in found_on else f"; found on an {found_on}, assumed for an {gpu}"
    evidence = f"{why}; right for {count.right:,} of {count.asked:,} shapes that it was tried on{where}"
    conditions = Conditions(
        call.m, call.n, library="torch", gpu=gpu, layout=call.layout, bias=bias, evidence=evidence, probability=count.probability
    )
    factors = F32 if isinstance(order.slices.unit, Lanes) else call.format
    epilogue = Epilogue(between=call.format if before else None)
    recipe = KernelRecipe(factors, factors, call.format, order.slices.unit, order.slices.slices, order.merge, epilogue, conditions)
    return ProductChoice(call, recipe, order.addend_first, kernels, source, evidence, count.probability)


# ---- the product


def torch_product(
    a_shape: Sequence[int], b_shape: Sequence[int], dtype: Any, *, transposed_a: bool = False, transposed_b: bool = False,
    addend_shape: Sequence[int] | None = None,
) -> TorchProduct:  # fmt: skip
    """Return the product of PyTorch that a call is.

    Args:
        a_shape: Logical shape of A, [..., M, K].
        b_shape: Logical shape of B, [K, N], or [..., K, N] with the same leading axes as A.
        dtype: Of both.
        transposed_a: A lies in memory as [..., K, M].
        transposed_b: B lies in memory as [..., N, K], as the weight of `torch.nn.Linear` does.
        addend_shape: [N] of a bias, or [..., M, N] of an addend; None: there is none. PyTorch expands other vectors, and vectors that a
            batch adds, to [..., M, N].

    Returns:
        The product. Leading axes of A are rows where B has none, as in `torch.nn.functional.linear`, and a batch where it has.

    Raises:
        ValueError: The shapes do not fit.
    """
    a, b = tuple(a_shape), tuple(b_shape)
    if len(a) < 2 or len(b) < 2 or a[-1] != b[-2] or (len(b) > 2 and a[:-2] != b[:-2]):
        raise ValueError(f"shapes {list(a)} and {list(b)}: expected [..., M, K] and [K, N], or [..., M, K] and [..., K, N]")
    leading = int(np.prod(a[:-2], dtype=np.int64))
    m, batch = (a[-2], leading) if len(b) > 2 else (a[-2] * leading, 1)
    layout = ("c" if transposed_a else "r") + ("c" if transposed_b else "r")
    addend = None if addend_shape is None else "columns" if tuple(addend_shape) == b[-1:] and len(b) == 2 else "outputs"
    return TorchProduct(jnp.dtype(dtype).name, m, a[-1], b[-1], batch, layout, addend)


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    transposed_a: bool = False,
    transposed_b: bool = False,
    bias: ArrayLike | None = None,
    gpu: str = "H200",
    library: str = "torch 2.11",
    launches: Sequence[Launch] | None = None,
    min_probability: float = MIN_PROBABILITY,
) -> Array:
    """Compute a product as PyTorch computes it on a GPU, to the last bit: `mm`, `linear`, `addmm`, `bmm`, `baddbmm`.

    Args:
        a: Logical [..., M, K]; bfloat16, float16 or float32. Kernels for float64 were not observed, and nothing is cast.
        b: Logical [K, N], of the same dtype: the leading axes of A are then rows; or [..., K, N], a batch.
        transposed_a: A lies in memory as [..., K, M], as in a weight gradient `g.t() @ x`.
        transposed_b: B lies in memory as [..., N, K], as the weight of `torch.nn.Linear` does.
        bias: [N] of a linear layer or `addmm`, or an addend of `addmm` and `baddbmm`, which is expanded to [..., M, N].
        gpu: As in `choose_kernel`.
        library: As in `choose_kernel`.
        launches: As in `choose_kernel`.
        min_probability: As in `choose_kernel`.

    Returns:
        The product, in the operands' dtype.

    Raises:
        NotModelled, Unsupported: As in `choose_kernel`.
        ValueError: The shapes or dtypes do not fit.
    """
    left, right, addend = jnp.asarray(a), jnp.asarray(b), None if bias is None else jnp.asarray(bias)
    # as they were given: JAX makes float32 of NumPy's float64
    given = ((a, left), (b, right), (bias, addend))
    dtypes = {str(getattr(x, "dtype", array.dtype)) for x, array in given if array is not None}
    if len(dtypes) > 1:
        raise ValueError(f"dtypes {', '.join(sorted(dtypes))}: expected one")
    shape = None if addend is None else addend.shape
    call = torch_product(left.shape, right.shape, *dtypes, transposed_a=transposed_a, transposed_b=transposed_b, addend_shape=shape)
    choice = choose_kernel(call, gpu=gpu, library=library, launches=launches, min_probability=min_probability)
    return jnp.asarray(multiply_as_chosen(choice, left, right, addend))


def multiply_as_chosen(choice: ProductChoice, a: Floats, b: Floats, bias: Floats | None = None) -> Floats:
    """Compute the product of a choice. The arrays are those of `matmul`, or NumPy's, for which only instructions are compiled."""
    outputs = (*a.shape[:-1], b.shape[-1])
    if choice.product.addend == "outputs" and bias is not None:
        fits = bias.ndim <= len(outputs) and all(n in (1, size) for n, size in zip(bias.shape[::-1], outputs[::-1], strict=False))
        if not fits:
            raise ValueError(f"bias: got shape {list(bias.shape)}; expected [{outputs[-1]}], or one that broadcasts to {list(outputs)}")
        bias = (np if isinstance(bias, np.ndarray) else jnp).broadcast_to(bias, outputs)
    if b.ndim == 2:
        a = a.reshape(-1, a.shape[-1])
        bias = bias.reshape(-1, b.shape[-1]) if bias is not None and bias.ndim > 2 else bias
    recipe = choice.recipe
    if choice.addend_first and bias is not None:
        a, b, recipe = _with_addend_slice(choice, a, b, bias)
        bias = None
    if choice.product.addend == "columns" and bias is not None:
        bias = bias.reshape(-1)
    found = None
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and (bias is None or isinstance(bias, np.ndarray)):
        found = multiply_by_numpy(recipe, a, b, bias)
    found = matmul_with_kernel(recipe, ProductOperands(a, b, bias), a.dtype) if found is None else found
    return found.reshape(outputs)


def _with_addend_slice(choice: ProductChoice, a: Floats, b: Floats, bias: Floats) -> tuple[Floats, Floats, KernelRecipe]:
    """Return operands with a slice before the first whose sum is the bias: ones in A, the bias and zeros in B."""
    if choice.product.addend != "columns":
        raise NotModelled(f"{choice.product}: an addend [M, N] that is added before the first slice is not computed here")
    recipe, unit = choice.recipe, choice.recipe.unit
    length = unit.op.k if isinstance(unit, Steps) else 1
    xp: Any = np if isinstance(a, np.ndarray) else jnp
    first = np.arange(length) == 0
    ones = xp.broadcast_to(xp.asarray(first, a.dtype), (*a.shape[:-1], length))
    rows = xp.broadcast_to(xp.where(first[:, None], bias, xp.zeros((), b.dtype)), (*b.shape[:-2], length, b.shape[-1]))
    edges = (0, *(length + edge for edge in recipe.slices.edges))
    augmented = recipe.replace(slices=Slices.from_edges(edges))
    return xp.concatenate([ones, a], -1), xp.concatenate([rows, b], -2), augmented


__all__ = [
    "LAYOUTS", "Launch", "ProductChoice", "TorchProduct", "choose_kernel", "matmul", "multiply_as_chosen", "order_of_kernels",
    "torch_product",
]  # fmt: skip
