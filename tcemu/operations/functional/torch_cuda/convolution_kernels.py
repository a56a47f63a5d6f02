"""The order in which a kernel of a convolution adds, by its name: rows of patterns.

PyTorch's convolutions on Hopper are kernels of cuDNN, and cuBLAS's where the window has one place. A kernel's name and grid, as a profiler
shows them, tell the unit, the rounding of f32 operands to TF32, how many channels are taken at a time and how K is cut.
`order_of_convolution` reads them into a `ConvolutionOrder`, which `add_products` computes.

The terms of one result are [channels, places of the window]: of the input in the forward, of the output's gradient in the gradient of the
input. In the gradient of the weight they are batch and places of the result, in ascending order.

Source: names, grids and words of torch 2.11.0 with cuDNN 9.19 on an NVIDIA H200 (tests/gpu_runs/convolution_kernels.py). Layouts that other
kernels change before and after change no bits; those whose template ends with 2 also round f32 to TF32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.engine.architectures.lookup import resolve_arithmetic
from tcemu.engine.formats.number_formats import F32, TF32
from tcemu.operations.functional.torch_cuda.product_kernels import DTYPES, LINE, TARGET, VECTOR, Launch, ceil_div
from tcemu.operations.products.library.kernel_matmul import matmul_with_kernel
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Lanes, Merge, Slices, Steps
from tcemu.operations.products.recipe_kinds import ProductOperands

FORWARD, OF_INPUT, OF_WEIGHT = DIRECTIONS = ("forward", "gradient of the input", "gradient of the weight")
FMA, TENSOR_CORE = "f32 fma", "tensor core"
WHOLE = "whole"  # K is one slice
BLOCKS = "blocks"  # slices take blocks of channels, with the whole window, in turn
TILES = "tiles"  # slices take tiles of K in turn
EVEN = "even"  # contiguous slices of equal length
ENDS = "ends"  # contiguous slices of whole tiles, the last ones longer by a tile where tiles remain
IMAGES = "images"  # each image of the batch is a slice


class ConvolutionOrder(NamedTuple):
    """The order in which a kernel adds the products of one result.

    Attributes:
        unit: FMA, one chain; or TENSOR_CORE, instructions of 16 products, of 8 in TF32.
        cast: Rounding of f32 operands to TF32, as in `KernelRecipe`.
        block: Channels that are taken at a time, with every place of the window before the next block. None: all channels of one place
            and then of the next, without a gap, so that an instruction may have products of two places.
        vector: Neighbours along K that a lane loads at once and keeps for instructions of its own: four lanes have 4 * vector elements,
            and an instruction takes 2 of each lane in TF32 and 4 in 16 bits.
        backwards: The places of the window are taken from the last to the first.
        cut: WHOLE, BLOCKS, TILES, EVEN, ENDS or IMAGES.
        slices: Number of slices.
        tile: Elements of K in a tile of TILES, or to a multiple of which EVEN slices are rounded up.
        residue: As in `Steps`.
        serial: The running sum of the slices waits in the result's format.
        merge: Order in which the slices' sums are added, as in `Merge`.
    """

    unit: str
    cast: str = "RN"
    block: int | None = None
    vector: int = 1
    backwards: bool = False
    cut: str = WHOLE
    slices: int = 1
    tile: int = 1
    residue: int | None = None
    serial: bool = False
    merge: str = "ascending"

    def __str__(self) -> str:
        said = self.unit + ("" if self.unit == FMA or self.cast == "RN" else f", operands rounded {self.cast}")
        said += ", " + ("channels within the window" if self.block is None else f"{self.block} channel{'s' * (self.block > 1)} at a time")
        said += ", from the window's last place" * self.backwards
        return said + ("" if self.cut == WHOLE else f", {self.slices} slices by {self.cut}")


class KernelOrder(NamedTuple):
    """The order of recorded kernels."""

    order: ConvolutionOrder
    kernels: str  # the name of the row
    evidence: str


class KernelFacts(NamedTuple):
    """The facts of a call that a row reads besides the kernel's name and grid."""

    direction: str
    dtype: str
    weight: tuple[int, ...]  # its shape
    groups: int
    terms: int  # of one result
    images: int = 1  # of each of which cuBLAS computes a product of matrices: the batch, where channels do not lie last
    reduces: bool = False  # another kernel adds the slices


class KernelRow(NamedTuple):
    """The kernels whose names match a pattern."""

    name: str
    pattern: re.Pattern[str]
    order: Callable[[re.Match[str], Launch, KernelFacts], ConvolutionOrder]


def _check_single(launch: Launch, slices: int = 1) -> None:
    """Raise NotModelled where the grid's third side cuts K."""
    if launch.grid[2] > slices:
        raise NotModelled(f"{launch.name[:100]}: the order of {launch.grid[2]} slices is not known")


def _chain(block: int | None, backwards: bool = False) -> Callable[[re.Match[str], Launch, KernelFacts], ConvolutionOrder]:
    def order(match: re.Match[str], launch: Launch, facts: KernelFacts) -> ConvolutionOrder:
        return ConvolutionOrder(FMA, block=block, backwards=backwards)

    return order


def _chain_of_ffma(match: re.Match[str], launch: Launch, facts: KernelFacts) -> ConvolutionOrder:
    _check_single(launch)
    return ConvolutionOrder(FMA, block=None if facts.direction == OF_WEIGHT else 1)


def _chain_of_one(match: re.Match[str], launch: Launch, facts: KernelFacts) -> ConvolutionOrder:
    if launch.grid[2] == facts.images == 2:  # of which it does not matter which arrives first
        return ConvolutionOrder(FMA, cut=IMAGES, slices=2)
    _check_single(launch)
    return ConvolutionOrder(FMA)


def _hopper(match: re.Match[str], launch: Launch, facts: KernelFacts) -> ConvolutionOrder:
    if facts.direction != OF_WEIGHT:
        if match["end"] == "execute_segment_k_on":
            raise NotModelled(f"{launch.name[:100]}: its grid does not tell the number of slices")
        return ConvolutionOrder(TENSOR_CORE, "RN", int(match["tile"]), backwards=facts.direction == OF_INPUT)
    order = ConvolutionOrder(TENSOR_CORE, "RZ")
    if match["end"] != "execute_segment_k_on":
        return order
    rows, columns = int(match["rows"]), int(match["columns"])
    outputs, channels, window = facts.weight[0], facts.weight[1], math.prod(facts.weight[2:])
    tiles = ceil_div(outputs, rows) * ceil_div(channels, columns) * window
    tiles += tiles % 2 if rows != columns else 0  # clusters of two
    slices, rest = divmod(math.prod(launch.grid), tiles)
    if rest or slices < 1 or facts.groups > 1:
        raise NotModelled(f"{launch.name[:100]}: its grid {launch.grid} is no multiple of {tiles} tiles, so its slices are not known")
    if slices == 1:
        return order
    merge = "descending" if facts.reduces or slices == 3 else "tree"  # of pairs from the last slice on
    if merge == "tree" and slices & (slices - 1):
        raise NotModelled(f"{launch.name[:100]}: the order in which {slices} slices are added is not known here")
    return order._replace(cut=ENDS, slices=slices, tile=int(match["tile"]), merge=merge)


def _ampere(match: re.Match[str], launch: Launch, facts: KernelFacts) -> ConvolutionOrder:
    tile, count = int(match["tile"]), launch.grid[2]
    if facts.direction == OF_WEIGHT:
        _check_single(launch, 2)  # of more the kernel adds those that arrive first
        return ConvolutionOrder(TENSOR_CORE, "RNA", cut=TILES if count > 1 else WHOLE, slices=count, tile=tile)
    if "_strided_execute_kernel" in launch.name:
        raise NotModelled(f"{launch.name[:100]}: too few words of this kernel were recorded to tell the order of the window")
    if match["form"] == "_indexed_wo_smem":
        if facts.direction == OF_INPUT:
            raise NotModelled(f"{launch.name[:100]}: words of this kernel were not recorded")
        _check_single(launch)
        size = 4 if facts.dtype == "float32" else 2
        loaded = re.search(r"_aligna(\d+)", launch.name)  # bytes; without it 16
        return ConvolutionOrder(TENSOR_CORE, "RNA", vector=(int(loaded[1]) if loaded else VECTOR) // size)
    if count > 1 and (match["form"] or facts.groups > 1):
        _check_single(launch)
    return ConvolutionOrder(TENSOR_CORE, "RNA", tile, cut=BLOCKS if count > 1 else WHOLE, slices=count)


def _cutlass(match: re.Match[str], launch: Launch, facts: KernelFacts) -> ConvolutionOrder:
    tile, count = int(match["tile"]), launch.grid[2]
    if facts.direction == OF_WEIGHT:
        serial = count > 1 and not facts.reduces
        return ConvolutionOrder(TENSOR_CORE, "RNA", cut=TILES if count > 1 else WHOLE, slices=count, tile=tile, serial=serial)
    if facts.groups == 1:
        _check_single(launch)
    return ConvolutionOrder(TENSOR_CORE, "RNA", tile)


def _matrices(match: re.Match[str], launch: Launch, facts: KernelFacts) -> ConvolutionOrder:
    """A product of matrices by cuBLAS, for a window of one place."""
    found = match.groupdict()
    tile, is_hopper = found.get("tile"), "sm90" in launch.name
    count, rest = (1, 0) if is_hopper else divmod(launch.grid[2], facts.images)
    if rest:
        raise NotModelled(f"{launch.name[:100]}: its grid {launch.grid} is no multiple of {facts.images} images")
    order = ConvolutionOrder(TENSOR_CORE, "RN", residue=None if tile is None else int(tile))
    if facts.direction == OF_WEIGHT and facts.images > 1:
        order = order._replace(cut=IMAGES, slices=facts.images)
    if count == 1:
        return order
    if facts.images > 1 or tile is None or facts.dtype != "float32":
        raise NotModelled(f"{launch.name[:100]}: the order of {count} slices is not known")
    size = 4
    contiguous = found["layout"] != "nt" and facts.terms % (LINE // size) == 0
    return order._replace(cut=EVEN, slices=count, tile=(LINE if contiguous else VECTOR) // size)


def _row(name: str, pattern: str, order: Callable[[re.Match[str], Launch, KernelFacts], ConvolutionOrder]) -> KernelRow:
    return KernelRow(name, re.compile(pattern), order)


# 12 to 48 words of a call. On 981 calls of shapes drawn later, 23,552 words, one differed in 16 of 24 words, and taught how lanes take
# vectors along K; with that the calls of its kernels, 8 of them held out from it, have every word.
EVIDENCE = (
    "words of an H200: none differs in 2,800 recorded calls whose kernels have a row, of which 980 were drawn after the rows were written"
)


NARROW = r"(bf16bf16_bf16f32|f16f16_f16f32|tf32f32_tf32f32|f32f32_tf32f32)_f32"
PRODUCT = r"(f32f32_tf32f32|bf16bf16_bf16f32|f16f16_f16f32)_f32"
ROWS = (
    _row("implicit_convolve_sgemm", r"implicit_convolve(Nd)?_sgemm<", _chain(1)),
    _row("convolve_common_engine, channels last", r"convolve_common_engine_float_NHWC<", _chain(None)),
    _row("conv2d_c1_k1", r"^conv2d_c1_k1_(nhwc|nchw)", _chain(None)),
    _row("dgrad2d_c1_k1", r"^dgrad2d_c1_k1_(nhwc|nchw)", _chain(None, backwards=True)),
    _row("wgrad_alg1_engine", r"wgrad_alg1_engine(_NHWC)?<", _chain(None)),
    _row("wgrad_alg0_engine", r"wgrad_alg0_engine(_NHWC)?<", _chain_of_one),
    _row(
        "XMMA f32",
        r"sm80_xmma_[fdw](prop|grad)_implicit_gemm(_indexed)?_f32f32_f32f32_f32_.*_ffma_(\w+_)?execute_kernel",
        _chain_of_ffma,
    ),
    _row(
        "XMMA for Hopper",
        rf"sm90_xmma_[fdw](prop|grad)(_indexed)?_implicit_gemm(_indexed)?_{NARROW}_nhwckrsc_nhwc_tilesize(?P<rows>\d+)x(?P<columns>\d+)x(?P<tile>\d+)"
        r"_\w*?_g1_(?P<end>execute_segment_k_off|execute_segment_k_on|strided_execute)_kernel",
        _hopper,
    ),
    _row(
        "XMMA",
        rf"sm80_xmma_[fdw](prop|grad)_implicit_gemm(?P<form>_indexed|_indexed_wo_smem)?_{NARROW}_nhwckrsc_\w+?_tilesize\d+x\d+x(?P<tile>\d+)_"
        r"\w*?_g1_tensor16x8x(8|16)_(\w+_)?execute_kernel",
        _ampere,
    ),
    _row(
        "CUTLASS", r"cutlass_tensorop_((bf16|f16)_)?s(1688|16816)[fdw](prop|grad)_\w+?_(bf16|f16|tf32)_\d+x\d+_(?P<tile>\d+)x\d+_nhwc",
        _cutlass,
    ),
    _row(
        "CUTLASS, split", r"ImplicitGemmConvolution\w+?GemmShapeILi\d+ELi\d+ELi(?P<tile>\d+)E\w+?Wgrad", _cutlass,
    ),
    _row("cuBLAS, CUTLASS", r"cutlass_80_tensorop_s1688gemm_\d+x\d+_(?P<tile>\d+)x\d+_(?P<layout>[nt]{2})_align\d", _matrices),
    _row(
        "cuBLAS, 16 bits", r"cutlass_80_(wmma_)?tensorop_((bf16|f16)_)?s\d+gemm_(bf16|f16)_\d+x\d+_(?P<tile>\d+)x\d+_"
        r"(?P<layout>[nt]{2})_align\d",
        _matrices,
    ),
    _row("nvjet", r"nvjet_sm90_[a-z]{3}_\w+_[vh](_ssched)?_(bz|bx|badd)(_coop[AB])?_[NT]{3}$", _matrices),
    _row(
        "cuBLAS, XMMA", rf"sm[89]0_xmma_gemm_{PRODUCT}_\w+_execute_(segment_k_off_)?kernel__5x_cublas",
        _matrices,
    ),
)  # fmt: skip
REDUCES = r"ReduceSplitK|splitKreduce_kernel|execute_split_k_kernel"
BESIDE = (
    r"kern_precompute_indices|SliceCKernel|nchwToNhwcKernel|nhwcToNchwKernel|[fF]oldedNhwc|init_device_workspace_kernel|AddPaddingKernel|"
    r"convertTensor_kernel|tensorTransformGeneric|scalePackedTensor_kernel|"
    r"strided_dgrad_indexed::kernel_helper|reduce_wgrad_nchw_helper|[Mm]emset|[Mm]emcpy|at::native::|" + REDUCES
)


def order_of_convolution(launches: Sequence[Launch], facts: KernelFacts) -> KernelOrder:
    """Return the order in which recorded kernels add a convolution.

    Args:
        launches: The kernels as a profiler lists them, in order, with their grids.
        facts: What is computed.

    Returns:
        The order.

    Raises:
        NotModelled: No row knows a kernel, several kernels add, or name and grid do not tell the order.
    """
    main = [launch for launch in launches if not re.search(BESIDE, launch.name)]
    if len(main) != 1:
        raise NotModelled(f"expected one kernel that adds, got {[launch.name[:80] for launch in main]}")
    (launch,) = main
    facts = facts._replace(reduces=any(re.search(REDUCES, one.name) for one in launches))
    for row in ROWS:
        if match := row.pattern.search(launch.name):
            return KernelOrder(row.order(match, launch, facts), row.name, EVIDENCE)
    raise NotModelled(f"no row of ROWS knows the order of {launch.name[:120]} (torch_cuda/convolution_kernels.py)")


# ---- the products

LANES = 4  # of a warp that share a row of an instruction's operand


def arrange(order: ConvolutionOrder, terms: np.ndarray, dtype: str) -> np.ndarray:
    """Return [..., channels, window] as [..., K], in the order in which a kernel takes them, with zeros where elements lack."""
    terms = terms[..., ::-1] if order.backwards else terms
    *outer, channels, window = terms.shape
    if order.block is None:
        terms = terms.swapaxes(-1, -2).reshape(*outer, -1)
        taken = 2 if dtype == "float32" else 4  # of each lane by an instruction
        if order.vector <= taken:
            return terms
        terms = np.pad(terms, [*[(0, 0)] * len(outer), (0, -terms.shape[-1] % (LANES * order.vector))])
        return terms.reshape(*outer, -1, LANES, order.vector // taken, taken).swapaxes(-2, -3).reshape(*outer, -1)
    terms = np.pad(terms, [*[(0, 0)] * len(outer), (0, -channels % order.block), (0, 0)])
    return terms.reshape(*outer, -1, order.block, window).swapaxes(-1, -2).reshape(*outer, -1)


def cut_terms(order: ConvolutionOrder, k: int, window: int) -> Slices:
    """Return the slices of K that `arrange` gives."""
    if order.cut in (EVEN, IMAGES):
        return Slices.even(k, order.slices, order.tile if order.cut == EVEN else 1)
    if order.cut == ENDS:
        least, more = divmod(ceil_div(k, order.tile), order.slices)
        lengths = [least + (place >= order.slices - more) for place in range(order.slices)]
        return Slices.from_edges((*(min(k, order.tile * sum(lengths[:place])) for place in range(order.slices)), k))
    tile = order.tile if order.cut == TILES else (order.block or 1) * window
    count = min(order.slices, math.ceil(k / tile))
    return Slices.single(k) if order.cut == WHOLE or count == 1 else Slices.interleaved(k, count, tile)


def convolution_recipe(order: ConvolutionOrder, dtype: str, k: int, window: int) -> KernelRecipe:
    """Return the recipe of the products of what `arrange` gives."""
    fmt = DTYPES[dtype]
    factors, unit = F32, Lanes()
    if order.unit == TENSOR_CORE:
        factors, depth = (TF32, 8) if fmt == F32 else (fmt, 16)
        spelling = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.{factors}.{factors}.f32"
        unit = Steps(resolve_arithmetic(spelling, TARGET).op, TARGET, residue=order.residue)
    merge = Merge(partial=fmt, serial=True) if order.serial and fmt != F32 else Merge(order.merge)
    return KernelRecipe(factors, factors, fmt, unit, cut_terms(order, k, window), merge, cast=order.cast if factors == TF32 else "RN")


def add_products(order: ConvolutionOrder, dtype: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the products [..., M, N] of terms [..., M, channels, window] and [..., N, channels, window]."""
    window = a.shape[-1]
    left, right = (np.ascontiguousarray(arrange(order, terms, dtype)) for terms in (a, b))
    recipe = convolution_recipe(order, dtype, left.shape[-1], window)
    return np.asarray(matmul_with_kernel(recipe, ProductOperands(left, right.swapaxes(-1, -2)), a.dtype))
