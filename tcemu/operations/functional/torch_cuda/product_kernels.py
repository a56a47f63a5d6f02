"""The order in which a kernel of a library adds, by its name: rows of patterns, each with its evidence.

PyTorch's products on Hopper are kernels of cuBLAS. A kernel's name and grid, as a profiler shows them, tell the tile, the slices of K
and the format in which partial sums wait, and so the order. `order_of_kernels` reads them into a `KernelRecipe`.

Source: names and grids of torch 2.11.0 with CUDA 13.0 on an NVIDIA H200, in the profiler's trace, with words of each product
(tests/gpu_runs/torch_products.py); CUTLASS, cutlass/gemm/kernel/params_universal_base.h (the alignment of slices).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.formats.number_formats import BF16, F16, F32, TF32, Format
from tcemu.operations.products.library.kernel_recipe import Conditions, Epilogue, KernelRecipe, Lanes, Merge, Slices, Steps

TARGET = "sm_90a"
DTYPES: dict[str, Format] = {"bfloat16": BF16, "float16": F16, "float32": F32}
BYTES = {BF16: 2, F16: 2, F32: 4}
LAYOUTS = ("rr", "rc", "cr", "cc")
ADDENDS = (None, "columns", "outputs")
LINE, VECTOR = 128, 16  # bytes to a multiple of which CUTLASS rounds slices up


class Launch(NamedTuple):
    """A kernel as it was launched."""

    name: str
    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)


class TorchProduct(NamedTuple):
    """A product of PyTorch, as far as the library's choice depends on it."""

    dtype: str  # of the operands and the result: a key of `DTYPES`
    m: int
    k: int
    n: int
    batch: int = 1
    layout: str = "rr"  # memory orders of A and B: "r", rows are contiguous, or "c", columns are
    addend: str | None = None  # "columns": a bias [N]; "outputs": an addend [M, N], as of addmm

    @property
    def format(self) -> Format:
        """The format of the operands and the result."""
        return DTYPES[self.dtype]

    @property
    def has_contiguous_k(self) -> bool:
        """True if A or B has neighbours along K next to each other."""
        return self.layout[0] == "r" or self.layout[1] == "c"

    def __str__(self) -> str:
        batch = "" if self.batch == 1 else f"{self.batch} times "
        added = {None: "", "columns": " with a bias", "outputs": " with an addend"}[self.addend]
        return f"{batch}{self.m} x {self.k} x {self.n} (M x K x N) in {self.dtype}, layout {self.layout!r}{added}"


class ProductOrder(NamedTuple):
    """The order of a product's kernels."""

    recipe: KernelRecipe
    addend_first: bool  # the addend is a slice before the first one; else the recipe's epilogue adds it
    kernels: str  # the name of the row
    evidence: str


class SliceOrder(NamedTuple):
    """The order of one kernel, without the merge of its slices by others."""

    unit: Steps | Lanes
    slices: Slices
    output: Format = F32  # in which partial sums are stored for another kernel to add


class KernelRow(NamedTuple):
    """The kernels whose names match a pattern."""

    name: str
    pattern: re.Pattern[str]
    order: Callable[[re.Match[str], Launch, TorchProduct], SliceOrder]
    evidence: str


# ---- orders of kernels


def tensor_core(call: TorchProduct, *, short: bool = False, residue: int | None = None) -> Steps:
    """Return the unit of a kernel of tensor cores: instructions of 16 products, or of 8, as all of tf32."""
    fmt, depth = (TF32, 8) if call.format == F32 else (call.format, 8 if short else 16)
    spelling = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{fmt}.{fmt}.f32"
    return Steps(resolve_arithmetic(spelling, TARGET).op, TARGET, residue=residue)


def ceil_div(x: int, y: int) -> int:
    return -(-x // y)


def nvjet(match: re.Match[str], launch: Launch, call: TorchProduct) -> SliceOrder:
    unit = tensor_core(call)
    if not match["split"]:
        return SliceOrder(unit, Slices.single(call.k))
    tile_n, tile_m, of_n, of_m = (int(match[name]) for name in ("tile_n", "tile_m", "cluster_n", "cluster_m"))
    blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
    tiles = ceil_div(ceil_div(call.n, tile_n), of_n) * of_n * ceil_div(ceil_div(call.m, tile_m), of_m) * of_m
    if blocks in FULL_GRIDS[of_n * of_m]:
        raise NotModelled(f"{launch.name}: a grid of {blocks} blocks fills the GPU for any larger number of slices of {call}")
    if blocks % tiles:
        raise NotModelled(
            f"{launch.name}: {blocks} blocks are no multiple of the {tiles} output tiles of {call}, so its slices are not known"
        )
    return SliceOrder(unit, nvjet_slices(call.k, blocks // tiles, NVJET_GRAIN))


def nvjet_slices(k: int, count: int, grain: int) -> Slices:
    """Return the slices of a kernel of nvjet; where the kernel's fault omits products at the end, without these."""
    tail = k % NVJET_GRAIN
    dropped = tail if grain == NVJET_GRAIN and tail and count > tail and k // NVJET_GRAIN % count == 0 else 0
    return Slices.even(k, count, grain, dropped=dropped) if count > 1 else Slices.single(k)


NVJET_GRAIN = 64  # elements of 16 bits in a tile of K
# blocks that fill 132 multiprocessors, by the blocks of a cluster: a grid of them may compute more tiles than it has blocks, as 132 and 120
# did (tests/gpu_runs/model_products.py)
FULL_GRIDS = {1: (132,), 2: (132,), 4: (120, 128, 132), 8: (112, 120, 128)}


def slices_of_grid(launch: Launch, call: TorchProduct) -> int:
    """Return the number of slices, the grid's third side without the batch."""
    slices, rest = divmod(launch.grid[2], call.batch)
    if rest or slices < 1:
        raise NotModelled(f"{launch.name}: its grid {launch.grid} is no multiple of the batch, so its slices are not known")
    return slices


def cutlass_slices(launch: Launch, call: TorchProduct) -> Slices:
    count, size = slices_of_grid(launch, call), BYTES[call.format]
    line = LINE // size
    return (
        Slices.even(call.k, count, line if call.has_contiguous_k and call.k % line == 0 else VECTOR // size)
        if count > 1
        else Slices.single(call.k)
    )


def cutlass(match: re.Match[str], launch: Launch, call: TorchProduct) -> SliceOrder:
    short = match["shape"] == "1688"
    tile = DEFAULT_TILE if match["tile"] is None else int(match["tile"])
    output = F32 if match["output"] is None else call.format
    return SliceOrder(tensor_core(call, short=short, residue=tile), cutlass_slices(launch, call), output)


DEFAULT_TILE = 32  # K of a tile where the name has none


def simt(match: re.Match[str], launch: Launch, call: TorchProduct) -> SliceOrder:
    return SliceOrder(Lanes(), cutlass_slices(launch, call))


def xmma_fma(match: re.Match[str], launch: Launch, call: TorchProduct) -> SliceOrder:
    count = slices_of_grid(launch, call)
    return SliceOrder(Lanes(), Slices.interleaved(call.k, count, int(match["tile"])) if count > 1 else Slices.single(call.k))


def xmma_tf32(match: re.Match[str], launch: Launch, call: TorchProduct) -> SliceOrder:
    if slices_of_grid(launch, call) > 1:
        raise NotModelled(f"{launch.name[:80]}: its grid {launch.grid} cuts K, for which no order was seen")
    return SliceOrder(tensor_core(call), Slices.single(call.k))


SMALL_N = 512  # elements of K of all slices between two ends of a chain


def small_rows(match: re.Match[str], launch: Launch, call: TorchProduct) -> SliceOrder:
    count = min(int(match["slices"]), call.k)
    return SliceOrder(Lanes(chunk=SMALL_N // int(match["slices"])), Slices.even(call.k, count, 1))


def small_columns(match: re.Match[str], launch: Launch, call: TorchProduct) -> SliceOrder:
    return SliceOrder(Lanes(int(match["lanes"]), chunk=16, join="ascending"), Slices.single(call.k))


def check_whole_k(launch: Launch, call: TorchProduct) -> None:
    """Raises NotModelled for a product with a vector whose kernel cuts K: its grid's third side is more than the batch."""
    if launch.grid[2] != call.batch:
        raise NotModelled(
            f"{launch.name[:80]}: the order of a kernel for vectors that cuts K is not known; a probe of its sums would teach it"
        )


def vector_by_columns(match: re.Match[str], launch: Launch, call: TorchProduct) -> SliceOrder:
    check_whole_k(launch, call)
    return SliceOrder(Lanes(16, chunk=8 * int(match["unrolled"]), join="ascending"), Slices.single(call.k))


def vector_warps(match: re.Match[str], launch: Launch, call: TorchProduct) -> SliceOrder:
    lanes = int(match["lanes"])
    if lanes < 32 and call.k > 4 * lanes:
        raise NotModelled(
            f"{launch.name[:80]}: the order of more than {4 * lanes} elements is not known; a probe of its sums would teach it"
        )
    return SliceOrder(Lanes(lanes, 4), Slices.single(call.k))


LONGEST_VECTOR, LONGEST_DOT = 64, 16  # elements that a lane of gemvx takes at once, for rows and for columns of B
SINGLE_LANES, SHORT_LANES = (4, 32), (4, 8)  # blocks whose lanes take single elements of rows, and of more than 8 in columns


def vector_lanes(match: re.Match[str], launch: Launch, call: TorchProduct) -> SliceOrder:
    count, lanes = slices_of_grid(launch, call), launch.block[match["transposed"] != "true"]
    slices = Slices.even(call.k, count, 1) if count > 1 else Slices.single(call.k)
    vector = ceil_div(ceil_div(call.k, count), lanes)
    if count > 1 and call.format != F32:
        raise NotModelled(f"{launch.name[:80]}: the order of a kernel for vectors in {call.format} that cuts K is not known")
    if match["transposed"] == "true":
        if count > 1:
            check_whole_k(launch, call)
        vector = vector if match["short"] == "true" or vector <= (8 if launch.block[:2] == SHORT_LANES else LONGEST_DOT) else 1
    elif launch.block[:2] == SINGLE_LANES:
        vector = 1
    elif launch.block[0] < 32:
        raise NotModelled(f"{launch.name[:80]}: a block of {launch.block} took K in two ways, and nothing in the name tells which")
    return SliceOrder(Lanes(lanes, min(LONGEST_VECTOR, vector)), slices)


DOT_BLOCK, DOT_THREADS, MOST_DOT_BLOCKS = 256, 128, 4  # of dot_kernel: elements, threads, and blocks whose sums are added in turn


def dot_blocks(match: re.Match[str], launch: Launch, call: TorchProduct) -> SliceOrder:
    """Each thread adds two rounded products, threads join in halves, and another kernel adds the sums of the blocks."""
    count = ceil_div(call.k, DOT_BLOCK)
    if call.layout != "rc" or count > MOST_DOT_BLOCKS:
        raise NotModelled(
            f"{launch.name[:80]}: known are up to {MOST_DOT_BLOCKS * DOT_BLOCK} elements of K, contiguous in both operands (layout 'rc')"
        )
    unit = Lanes(DOT_THREADS, 2, fused=False)
    return SliceOrder(unit, Slices.even(call.k, count, DOT_BLOCK) if count > 1 else Slices.single(call.k))


LARGE_K_TILE = 8  # elements of K to a multiple of which the kernel for large K rounds slices up


def large_k(match: re.Match[str], launch: Launch, call: TorchProduct) -> SliceOrder:
    """The slices, one after the other, are added to the output in memory: counters, which are cleared before, keep that order."""
    count = slices_of_grid(launch, call)
    return SliceOrder(Lanes(), Slices.even(call.k, count, LARGE_K_TILE) if count > 1 else Slices.single(call.k))


def _row(name: str, pattern: str, order: Callable[[re.Match[str], Launch, TorchProduct], SliceOrder], evidence: str) -> KernelRow:
    return KernelRow(name, re.compile(pattern), order, evidence)


def seen(found: int, tried: int, mended: str = "") -> str:
    """Return the evidence of a row: products of the run on which it was found, and of another; what was mended on the other."""
    said = f"40 words of each of {found:,} products on an H200, 0 different, and of {tried:,} products of another run, 0 different"
    return said + (f"; {mended} was mended on that run" if mended else "")


SEEN_TF32 = (
    "up to 8,192 words of each of 18 products of JAX 0.11.2 on an H200 (tests/gpu_runs/xla_programs.py), 0 different, and of 28 of other "
    "shapes"
)

KERNELS = (
    _row(
        "nvjet",
        r"nvjet_sm90_[a-z]{3}_(?P<tile_n>\d+)x(?P<tile_m>\d+)_64x\d+_(?P<cluster_n>\d)x(?P<cluster_m>\d)_[vh]_(?P<add>bz|bx|badd)"
        r"(_coop[AB])?(?P<split>_splitK)?(_bias)?_[NT]{3}$",
        nvjet, seen(1674, 2938),
    ),
    _row(
        "CUTLASS",
        r"cutlass_\d+_(wmma_)?tensorop_((?P<output>bf16|f16)_)?s(?P<shape>1688|16816|161616)gemm_(bf16|f16)_\d+x\d+(_(?P<tile>\d+)x\d+)?_",
        cutlass, seen(531, 818, "the rounding before a bias"),
    ),
    _row("CUTLASS tf32", r"cutlass_\d+_tensorop_((?P<output>f32)_)?s(?P<shape>1688)gemm_\d+x\d+_(?P<tile>\d+)x\d+_", cutlass, SEEN_TF32),
    _row("CUTLASS f32", r"cutlass_80_simt_sgemm_", simt, seen(283, 520)),
    _row(
        "XMMA f32", r"sm80_xmma_gemm_f32f32_f32f32_f32_.*tilesize\d+x\d+x(?P<tile>\d+)_.*_ffma_.*_execute_kernel",
        xmma_fma, seen(572, 903),
    ),
    _row("XMMA", r"sm90_xmma_gemm_(bf16bf16_bf16|f16f16_f16)f32_f32_.*_execute_segment_k_off_kernel",
         lambda match, launch, call: SliceOrder(tensor_core(call), Slices.single(call.k)), seen(6, 6)),
    _row("XMMA tf32", r"sm90_xmma_gemm_f32f32_tf32f32_f32_.*_execute_segment_k_off_kernel",
         lambda match, launch, call: SliceOrder(tensor_core(call), Slices.single(call.k)), SEEN_TF32),
    _row("XMMA tf32, unaligned", r"sm80_xmma_gemm_f32f32_tf32f32_f32_.*_execute_kernel", xmma_tf32,
         "found on one product of JAX 0.11.2 on an H200; 0 of 11,284 words of three others there different"),
    _row("gemmSN_NN", r"gemmSN_NN_kernel<float, \d+, (?P<slices>\d+), ", small_rows, seen(103, 203)),
    _row("gemmSN_TN", r"gemmSN_TN_kernel<float, 128, (?P<lanes>16), ", small_columns, seen(56, 152)),
    _row("gemv2T", r"gemv2T_kernel_val<.*?, 128, 16, (?P<unrolled>\d+), (?P=unrolled), ", vector_by_columns, seen(7, 13)),
    _row("gemv2N", r"gemv2N_kernel<", lambda match, launch, call: SliceOrder(Lanes(), Slices.single(call.k)), seen(4, 6)),
    _row("gemvNSP", r"gemvNSP_kernel<float, float, float, float, 1, (?P<lanes>\d+), 4, ", vector_warps, seen(6, 10, "the limit of K")),
    _row(
        "gemvx", r"gemvx::kernel<int, int, (\w+, ){4}(?P<short>true|false), true, (?P<transposed>true|false), false, ",
        vector_lanes, seen(53, 150, "the dealing of K"),
    ),
    _row(
        "dot_kernel", r"dot_kernel<float, 128, 0, cublasDotParams<cublasGemvTensorStridedBatched<float const>", dot_blocks,
        "found by probes of 7 products on an H200, that products are rounded by words; 0 of 108 words of 5 of them different there",
    ),
    _row(
        "sgemm_largek", r"sgemm_largek_lds64<", large_k,
        "found by probes of 18 products on an H200, and 0 of 256 words of each different there",
    ),
)  # fmt: skip
REDUCTION = r"splitKreduce_kernel<([^,]*, ){8}(?P<total>[^,]*), "  # `total`: the type to which the total is rounded before a bias
IN_KERNEL, CLEARED = r"_execute_split_k_kernel", r"memset|Memset"
# copies, additions and clearing by other kernels, and the second kernel of dot_kernel
BESIDE = r"memcpy|Memcpy|reduce_1Block_kernel<float, 128, |at::native::|cublasLt::epilogue::|scal(_64addr)?_kernel<"


# ---- from launches to the order


def order_of_kernels(launches: Sequence[Launch], call: TorchProduct) -> ProductOrder:
    """Return the order in which recorded kernels add a product.

    Args:
        launches: The kernels of the product as a profiler lists them, in order, with their grids. "gpu_memset" is the clearing of counters.
        call: The product.

    Returns:
        The order.

    Raises:
        NotModelled: No row knows a kernel, or the name and the grid do not determine the order.
        Unsupported: The product has another dtype or layout.
    """
    check_product(call)
    names = [launch.name for launch in launches]
    main = [launch for launch in launches if not re.search("|".join((REDUCTION, IN_KERNEL, CLEARED, BESIDE)), launch.name)]
    if len(main) != 1:
        raise NotModelled(f"{call}: expected one kernel of a product, got {[launch.name[:60] for launch in main]}")
    (launch,) = main
    found = [(row, match) for row in KERNELS if (match := row.pattern.search(launch.name))]
    if not found:
        raise NotModelled(
            f"{call}: no row of KERNELS knows the order of {launch.name[:100]}; tcemu.replay.fingerprint finds it where that GPU is"
        )
    ((row, match),) = found
    try:
        order = row.order(match, launch, call)
    except ZeroDivisionError:
        raise NotModelled(f"{call}: {launch.name[:100]} with the grid {launch.grid} and blocks of {launch.block} has a size of 0") from None
    reduced, cleared = (any(re.search(pattern, name) for name in names) for pattern in (REDUCTION, CLEARED))
    split = order.slices.dealt is not None or len(order.slices.edges) > 2
    merge = Merge()
    if reduced:
        merge = Merge() if order.output == F32 else Merge(partial=order.output, start="zero")
    elif split and cleared and row.order is xmma_fma and order.slices.dealt is not None and order.slices.dealt[0] > 2:
        raise NotModelled(
            f"{call}: {launch.name[:100]} adds its {order.slices.dealt[0]} slices in the order in which they arrive: the order is open"
        )
    elif split and cleared and call.format != F32 and row.order is cutlass:
        merge = Merge(partial=call.format, serial=True)
    addend_first = call.addend is not None and split and cleared and not reduced and row.order in (simt, cutlass)
    reductions = [found for name in names if (found := re.search(REDUCTION, name))]
    rounded_before = call.addend == "columns" and any(found["total"] != "float" for found in reductions)
    rounded_before |= row.order is nvjet and match["add"] == "badd"
    epilogue = Epilogue(between=call.format if rounded_before and call.addend is not None else None)
    bias = None if call.addend is None or addend_first else f"{call.format} {call.addend}"
    conditions = Conditions(call.m, call.n, library="torch", layout=call.layout, bias=bias, evidence=row.evidence)
    factors = F32 if isinstance(order.unit, Lanes) else order.unit.op.a
    recipe = KernelRecipe(factors, factors, call.format, order.unit, order.slices, merge, epilogue, conditions)
    return ProductOrder(recipe, addend_first, row.name, row.evidence)


def check_product(call: TorchProduct) -> None:
    """Raises Unsupported for a product of another dtype or layout, ValueError for a size that is no integer from 1."""
    for name, value, expected in (("dtype", call.dtype, tuple(DTYPES)), ("layout", call.layout, LAYOUTS), ("addend", call.addend, ADDENDS)):
        if value not in expected:
            raise Unsupported(f"{name}={value!r}: expected one of {', '.join(map(str, expected))}")
    for name in ("m", "k", "n", "batch"):
        size = getattr(call, name)
        if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 1:
            raise ValueError(f"{name}={size!r}: expected sizes of a product that are integers of 1 or more")
