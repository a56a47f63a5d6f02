"""Products within other operations of PyTorch on Hopper: convolutions with their gradients, and grouped products of experts.

Which kernel a convolution gets is cuDNN's choice by shape. It is known where the kernels of the shape were recorded, or where a rule tells
the order (`choose_order`); other convolutions raise NotModelled. Each kernel's order is a row of `torch_cuda/convolution_kernels.py`.
Convolutions whose channels are groups of their own are PyTorch's kernels, unless the channels lie last or, in float16, the sizes are those
of `takes_cudnn`.

Source: kernels and words of torch 2.11.0 with cuDNN 9.19 on an NVIDIA H200 (tests/gpu_runs/convolution_kernels.py); PyTorch 2.11.0,
aten/src/ATen/native/Convolution.cpp (backends, memory formats, the gradient of the bias) and cuda/DepthwiseConv2d.cu; for grouped products
20 in bf16 and f16 (tests/gpu_runs/torch_products.py, seed 0), in f16 and f32 the kernels of one product an expert.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.errors import NotModelled
from tcemu.base.saved_files import check_saved, decompress_json
from tcemu.operations.functional.torch_cuda.convolution_kernels import (
    FMA,
    FORWARD,
    LANES,
    OF_INPUT,
    OF_WEIGHT,
    TENSOR_CORE,
    WHOLE,
    ConvolutionOrder,
    KernelFacts,
    add_products,
    order_of_convolution,
)
from tcemu.operations.functional.torch_cuda.numpy_evaluation import fma_f32
from tcemu.operations.functional.torch_cuda.product_kernels import Launch, TorchProduct, ceil_div, check_product, tensor_core
from tcemu.operations.products.library.kernel_matmul import matmul_with_kernel
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Slices
from tcemu.operations.products.library.numpy_sums import multiply_by_numpy
from tcemu.operations.products.recipe_kinds import ProductOperands
from tcemu.uses.replay.kernel_choices import ChoiceTree
from tcemu.uses.replay.kernel_profiles import MIN_PROBABILITY
from tcemu.uses.replay.predicted_orders import RuleCount
from tcemu.uses.replay.torch_products import RECORDED, RULE, SHORT, check_library, matmul

F32 = np.dtype(np.float32)


# ---- geometry


class ConvolutionCall(NamedTuple):
    """A convolution or one of its gradients, as far as the choice of a kernel depends on it.

    A transposed convolution is the gradient of the input of the convolution that has its result as input.

    Attributes:
        direction: One of DIRECTIONS.
        dtype: Name of the operands' dtype.
        x: Shape of the convolution's input, [batch, channels, ...] with one to three further axes.
        weight: Shape of the weight, [outputs, channels of a group, ...].
        stride: Of each further axis.
        padding: Zeros before and behind each further axis.
        dilation: Distance of the window's places.
        groups: Number of groups of channels.
        channels_last: The operands lie in memory with the channels last.
        tf32: `torch.backends.cudnn.allow_tf32`, of f32.
    """

    direction: str
    dtype: str
    x: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    channels_last: bool = False
    tf32: bool = False

    @property
    def window(self) -> tuple[int, ...]:
        """Shape of the window."""
        return self.weight[2:]

    @property
    def places(self) -> tuple[int, ...]:
        """Places of the result of the convolution along each further axis."""
        return tuple(
            max(0, (n + 2 * p - d * (k - 1) - 1) // s + 1)
            for n, k, s, p, d in zip(self.x[2:], self.window, self.stride, self.padding, self.dilation, strict=True)
        )

    @property
    def y(self) -> tuple[int, ...]:
        """Shape of the result of the convolution."""
        return (self.x[0], self.weight[0], *self.places)

    @property
    def is_depthwise(self) -> bool:
        """Whether each channel is a group of its own."""
        return self.groups > 1 and self.x[1] == self.groups and self.weight[0] % self.groups == 0


def _window_indices(call: ConvolutionCall) -> list[np.ndarray]:
    """Return for each further axis the indices [places, window] of the input that a place of the result reads; -1 for zeros."""
    found = []
    for n, k, s, p, d, m in zip(call.x[2:], call.window, call.stride, call.padding, call.dilation, call.places, strict=True):
        index = np.arange(m)[:, None] * s - p + np.arange(k) * d
        found.append(np.where((index >= 0) & (index < n), index, -1))
    return found


class Phase(NamedTuple):
    """The places of the input along one axis that the same places of the window reach: every `stride`-th from `start` on."""

    start: int
    taps: list[int]
    reached: np.ndarray  # [places, taps]: place of the result; -1 for none


def _phases(call: ConvolutionCall) -> Iterator[tuple[Phase, ...]]:
    """Yield the phases of the further axes, each with each."""
    axes = []
    for n, k, s, p, d, m in zip(call.x[2:], call.window, call.stride, call.padding, call.dilation, call.places, strict=True):
        phases = []
        for start in range(min(s, n)):
            taps = [r for r in range(k) if (start + p - r * d) % s == 0]
            index = np.arange(-(-(n - start) // s))[:, None] + np.array([(start + p - r * d) // s for r in taps], np.int64)
            phases.append(Phase(start, taps, np.where((index >= 0) & (index < m), index, -1)))
        axes.append(phases)
    return itertools.product(*axes)


def _gather(x: np.ndarray, indices: Sequence[np.ndarray]) -> np.ndarray:
    """Return [batch, channels, places, window, places, window, ...]: elements at `indices` [places, window]; -1 stands for a zero."""
    x = np.pad(x, [(0, 0), (0, 0), *[(0, 1)] * len(indices)])
    for axis, index in enumerate(indices):
        at = 2 + 2 * axis
        x = np.take(x, index.reshape(-1), axis=at)
        x = x.reshape(*x.shape[:at], *index.shape, *x.shape[at + 1 :])
    return x


def _rows(gathered: np.ndarray, groups: int) -> np.ndarray:
    """Return [groups, batch and places, channels, window] of what `_gather` gives."""
    axes = (gathered.ndim - 2) // 2
    laid = gathered.reshape(gathered.shape[0], groups, -1, *gathered.shape[2:])
    placed, window = (tuple(range(start, 3 + 2 * axes, 2)) for start in (3, 4))
    laid = laid.transpose(1, 0, *placed, 2, *window)
    return laid.reshape(groups, math.prod(laid.shape[1 : 2 + axes]), laid.shape[2 + axes], -1)


# ---- the three products


def _forward(call: ConvolutionCall, order: ConvolutionOrder, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    outputs, channels = call.weight[:2]
    filters = weight.reshape(call.groups, outputs // call.groups, channels, -1)
    y = add_products(order, call.dtype, _rows(_gather(x, _window_indices(call)), call.groups), filters)
    return np.moveaxis(y.reshape(call.groups, call.x[0], *call.places, -1), (1, 0, -1), (0, 1, 2)).reshape(call.y)


def _of_input(call: ConvolutionCall, order: ConvolutionOrder, grad: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Compute the gradient of the input. A place takes only the window's places that reach it, as the kernels for strides do."""
    outputs, channels = call.weight[:2]
    found = np.zeros(call.x, grad.dtype)
    for phases in _phases(call):
        taps = [phase.taps for phase in phases]
        places = [len(phase.reached) for phase in phases]
        if not all(taps):
            continue
        filters = weight[(slice(None), slice(None), *np.ix_(*taps))].reshape(call.groups, outputs // call.groups, channels, -1)
        part = add_products(
            order, call.dtype, _rows(_gather(grad, [phase.reached for phase in phases]), call.groups), filters.swapaxes(1, 2)
        )
        part = np.moveaxis(part.reshape(call.groups, call.x[0], *places, channels), (1, 0, -1), (0, 1, 2))
        at = tuple(slice(phase.start, None, step) for phase, step in zip(phases, call.stride, strict=True))
        found[(slice(None), slice(None), *at)] = part.reshape(call.x[0], call.x[1], *places)
    return found


def _of_weight(call: ConvolutionCall, order: ConvolutionOrder, grad: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Compute the gradient of the weight: batch and places of the result are the terms."""
    outputs, channels = call.weight[:2]
    axes = len(call.window)
    gathered = _gather(x, _window_indices(call))
    placed, window = (tuple(range(start, 2 + 2 * axes, 2)) for start in (2, 3))
    columns = gathered.transpose(1, *window, 0, *placed).reshape(call.groups, channels * math.prod(call.window), 1, -1)
    rows = np.moveaxis(grad, 1, 0).reshape(call.groups, outputs // call.groups, 1, -1)
    return add_products(order, call.dtype, rows, columns).reshape(call.weight)


# ---- PyTorch's kernels for channels that are groups of their own

WARP, MOST_WARPS = 32, 8


def _sum_taps(shape: tuple[int, ...], start: np.ndarray, taps: Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> np.ndarray:
    """Return a chain of fma for each result, which begins with `start`; taps that a result does not reach are left out."""
    total = np.broadcast_to(start, shape).astype(F32)
    for factor, values, reached in taps:
        total = np.where(reached, fma_f32(np.broadcast_to(factor, shape), values, total), total)
    return total


def _depthwise(call: ConvolutionCall, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Compute conv_depthwise2d_forward_kernel: one chain over the window, which begins with the bias."""
    multiplier = call.weight[0] // call.groups
    index = _window_indices(call)
    filters, wide = weight.astype(F32), x.astype(F32)

    def taps() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for tap in np.ndindex(*call.window):
            at = [axis[:, r] for axis, r in zip(index, tap, strict=True)]
            values = np.repeat(wide[(slice(None), slice(None), *np.ix_(*at))], multiplier, 1)
            yield filters[(slice(None), 0, *tap)].reshape(-1, *[1] * len(tap)), values, _all_reached(at)

    start = np.zeros(1, F32) if bias is None else bias.astype(F32)
    return _sum_taps(call.y, start.reshape(-1, *[1] * len(call.window)), taps()).astype(x.dtype)


def _all_reached(at: Sequence[np.ndarray]) -> np.ndarray:
    """Return where no axis has an index of -1."""
    found = np.ones([len(axis) for axis in at], bool)
    for number, axis in enumerate(at):
        found &= (axis >= 0).reshape([-1 if place == number else 1 for place in range(len(at))])
    return found


def _depthwise_of_input(call: ConvolutionCall, grad: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Compute conv_depthwise2d_backward_kernel: one chain over the results of a channel and the window."""
    multiplier = call.weight[0] // call.groups
    wide = grad.astype(F32).reshape(call.x[0], call.groups, multiplier, *call.places)
    filters = weight.astype(F32).reshape(call.groups, multiplier, *call.window)

    def taps() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        for number in range(multiplier):
            for tap in np.ndindex(*call.window):
                at = []
                for n, s, p, d, m, r in zip(call.x[2:], call.stride, call.padding, call.dilation, call.places, tap, strict=True):
                    from_tap = np.arange(n) + p - r * d
                    at.append(np.where((from_tap % s == 0) & (from_tap >= 0) & (from_tap // s < m), from_tap // s, -1))
                factor = filters[(slice(None), number, *tap)].reshape(-1, *[1] * len(tap))
                yield factor, wide[:, :, number][(slice(None), slice(None), *np.ix_(*at))], _all_reached(at)

    return _sum_taps(call.x, np.zeros(1, F32), taps()).astype(grad.dtype)


def _depthwise_of_weight(call: ConvolutionCall, grad: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Compute conv_depthwise2d_grad_weight_kernel: images in turn by up to 8 warps, a lane for each 32nd place, joined in halves."""
    batch, size = call.x[0], math.prod(call.places)
    multiplier, warps = call.weight[0] // call.groups, min(batch, MOST_WARPS)
    index = _window_indices(call)
    wide, rounds = x.astype(F32), -(-size // WARP)
    grads = np.pad(grad.astype(F32).reshape(batch, -1, size), [(0, 0), (0, 0), (0, rounds * WARP - size)])
    found = np.zeros(call.weight, F32)
    for tap in np.ndindex(*call.window):
        at = [axis[:, r] for axis, r in zip(index, tap, strict=True)]
        values = np.repeat(wide[(slice(None), slice(None), *np.ix_(*at))], multiplier, 1).reshape(grads.shape[0], -1, size)
        values = np.pad(values, [(0, 0), (0, 0), (0, rounds * WARP - size)])
        reached = np.pad(_all_reached(at).reshape(-1), (0, rounds * WARP - size)).reshape(rounds, WARP)
        lanes = np.zeros((warps, call.weight[0], WARP), F32)
        for image in range(batch):
            for start in range(rounds):
                part = slice(start * WARP, (start + 1) * WARP)
                total = fma_f32(values[image, :, part], grads[image, :, part], lanes[image % warps])
                lanes[image % warps] = np.where(reached[start], total, lanes[image % warps])
        sums = np.zeros((WARP, call.weight[0]), F32)
        sums[:warps] = _join_halves(np.moveaxis(lanes, 2, 0))
        found[(slice(None), 0, *tap)] = _join_halves(sums)
    return found.astype(grad.dtype)


def _join_halves(sums: np.ndarray) -> np.ndarray:
    """Return the sum of a warp's lanes, the first axis: the upper half is added to the lower, and so on."""
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    return sums[0]


# ---- the choice of the order

RULES_FILE, LAUNCHES_FILE = (Path(__file__).parent / f"torch_convolution_{name}.json.xz" for name in ("rules", "launches"))
RULES_KIND, RULES_VERSION, RULES_FIELDS = "tcemu torch convolution rules", 1, ("gpu", "library", "date", "forms")
LAUNCHES_KIND, LAUNCHES_VERSION = "tcemu torch convolution launches", 1
LAUNCHES_FIELDS = ("gpu", "library", "date", "kernels", "lists", "shapes", "calls")
OPEN, FIT = "open", "fit"
TILES = ((64, 64), (128, 64), (64, 128), (128, 128), (256, 64), (256, 128), (64, 32), (128, 32))
SOURCE = "PyTorch's source"
DEPTHWISE = "PyTorch's kernel for channels that are groups of their own"


class ConvolutionChoice(NamedTuple):
    """The order that a convolution of PyTorch gets, and how that is known."""

    call: ConvolutionCall
    order: ConvolutionOrder | None  # None: `kernels` is DEPTHWISE
    kernels: str
    source: str  # RECORDED, RULE or SOURCE
    evidence: str
    probability: float | None = None  # of a rule


class RecordedConvolutions(NamedTuple):
    """The contents of `torch_convolution_launches.json.xz`: the kernels of each call."""

    gpu: str
    launches: dict[ConvolutionCall, tuple[Launch, ...]]


@lru_cache(maxsize=1)
def recorded_convolutions() -> RecordedConvolutions:
    """Read the recorded launches of this package."""
    data = check_saved("launches", decompress_json(LAUNCHES_FILE.read_bytes()), LAUNCHES_KIND, LAUNCHES_VERSION, LAUNCHES_FIELDS)
    lists = [tuple(Launch(data["kernels"][name], (1, 1, slices)) for name, slices in each) for each in data["lists"]]
    found = {}
    for form, numbers in data["calls"].items():
        direction, dtype, tf32, last = form.split("|")
        for (*sizes, groups), number in zip(data["shapes"], numbers, strict=True):
            if number >= 0:
                x, weight, stride, padding, dilation = map(tuple, sizes)
                call = ConvolutionCall(direction, dtype, x, weight, stride, padding, dilation, groups, last == "last", tf32 == "tf32")
                found[call] = lists[number]
    return RecordedConvolutions(data["gpu"], found)


class ConvolutionRules(NamedTuple):
    """The contents of `torch_convolution_rules.json.xz`."""

    gpu: str
    forms: dict[str, ChoiceTree]  # by `form_name`; a choice is an `order_label`, and of how many other shapes it was right for how many
    held: dict[str, tuple[int, int]]  # by form: of shapes drawn later for which a leaf was used, how many got the predicted order


@lru_cache(maxsize=1)
def convolution_rules() -> ConvolutionRules:
    """Read the rules of this package."""
    data = check_saved("rules", decompress_json(RULES_FILE.read_bytes()), RULES_KIND, RULES_VERSION, RULES_FIELDS)
    forms = {name: ChoiceTree(*tree) for name, (*tree, _, _) in data["forms"].items()}
    return ConvolutionRules(data["gpu"], forms, {name: (right, asked) for name, (*_, right, asked) in data["forms"].items()})


def form_name(call: ConvolutionCall) -> str:
    """Return the name of a call's tree."""
    dtype = "tf32" if call.tf32 and call.dtype == "float32" else SHORT[call.dtype]
    return f"{call.direction}, {dtype}{', channels last' if call.channels_last else ''}"


def convolution_features(call: ConvolutionCall) -> dict[str, int]:
    """Return what the nodes of a tree compare, in integers."""
    batch, (outputs, channels, *_) = call.x[0], call.weight
    places, inputs, window = (math.prod(sizes) for sizes in (call.places, call.x[2:], call.window))
    m, n, k = {
        FORWARD: (batch * places, outputs // call.groups, channels * window),
        OF_INPUT: (batch * inputs, channels, outputs // call.groups * window),
        OF_WEIGHT: (outputs // call.groups, channels * window, batch * places),
    }[call.direction]
    m, n, k = (max(1, size) for size in (m, n, k))
    features = {
        "batch": batch, "channels": channels, "outputs": outputs // call.groups, "groups": call.groups, "window": window,
        "stride": call.stride[0], "dilation": call.dilation[0], "padding": call.padding[-1], "axes": len(call.window),
        "stride is the window": int(call.stride == call.window), "places": places, "input's places": inputs, "width": call.places[-1],
        "input's width": call.x[-1], "alignment of channels": call.x[1] & -call.x[1], "alignment of outputs": outputs & -outputs,
        "M": m, "N": n, "K": k, "M*N": m * n, "M*N*K": m * n * k, "1024*M // N": 1024 * m // n,
        "1024*K*K // (M*N)": 1024 * k * k // (m * n),
    }  # fmt: skip
    return features | {f"tiles of {rows} x {columns}": ceil_div(m, rows) * ceil_div(n, columns) for rows, columns in TILES}


def _reduced_sizes(call: ConvolutionCall) -> tuple[int, int]:
    """Return channels and places of the window that one result adds."""
    if call.direction == OF_WEIGHT:
        return 1, 1
    return (call.weight[1] if call.direction == FORWARD else call.weight[0] // call.groups), math.prod(call.window)


def order_label(order: ConvolutionOrder, call: ConvolutionCall) -> tuple:
    """Return a short name of an order; orders that give the same bits for the call have the same one. OPEN where K is cut."""
    channels, window = _reduced_sizes(call)
    if order.cut != WHOLE:
        return (OPEN,)
    if order.unit == FMA:
        return (FMA, None if 1 in (channels, window) else order.block, order.backwards and window > 1)
    depth = 8 if call.dtype == "float32" else 16
    cast = order.cast if call.dtype == "float32" else "RN"
    if order.residue is not None and channels > order.residue and channels % order.residue % depth:
        return (TENSOR_CORE, cast, "residue", order.residue)
    if order.vector > depth // LANES and channels * window > depth:
        return (TENSOR_CORE, cast, "vector", order.vector)
    if window == 1 or (order.block is None and channels % depth == 0) or (order.block is not None and order.block >= channels):
        return (TENSOR_CORE, cast, FIT, order.backwards and window > 1)
    return (TENSOR_CORE, cast, order.block, order.backwards)


def order_by_label(label: Sequence[Any], call: ConvolutionCall) -> ConvolutionOrder:
    """Return an order that a label names, for the call."""
    if label[0] == FMA:
        return ConvolutionOrder(FMA, block=label[1], backwards=label[2])
    _, cast, block, last = label
    if block == "residue":
        return ConvolutionOrder(TENSOR_CORE, cast, residue=last)
    if block == "vector":
        return ConvolutionOrder(TENSOR_CORE, cast, vector=last)
    if block == FIT:
        depth = 8 if call.dtype == "float32" else 16
        block = ceil_div(_reduced_sizes(call)[0], depth) * depth
    return ConvolutionOrder(TENSOR_CORE, cast, block, backwards=last)


def kernel_facts(call: ConvolutionCall) -> KernelFacts:
    """Return what the rows of kernels read of a call."""
    channels, window = _reduced_sizes(call)
    terms = call.x[0] * math.prod(call.places) if call.direction == OF_WEIGHT else channels * window
    return KernelFacts(call.direction, call.dtype, call.weight, call.groups, terms, 1 if call.channels_last else call.x[0])


def takes_cudnn(call: ConvolutionCall) -> bool:
    """Return whether cuDNN computes a call; PyTorch's kernels compute channels that are groups of their own.

    Source: PyTorch 2.11.0, Convolution.cpp (`use_cudnn_depthwise`, `check_cudnn_depthwise_workload_with_filter`).
    """
    if call.channels_last or not call.is_depthwise:
        return True
    batch, channels, *sizes = call.x
    if call.dtype != "float16" or channels < 32 or len(sizes) > 2 or any(d != 1 for d in call.dilation):
        return False
    height, width = sizes if len(sizes) == 2 else (1, *sizes)
    step, window = call.stride[-1], call.window if len(call.window) == 2 else (1, *call.window)
    if height > 1 and call.stride[0] != step:
        return False
    if height == 1 and step == 1:
        return True
    if window[0] != window[1] or window[0] not in (1, 3, 5) or width < 7 or step > 2:
        return False
    if step == 1:
        return True
    if window[0] == 1:
        return width <= 28 if batch == 1 else batch <= 16 and channels >= 128 and width <= 7
    return batch == 1 or channels >= 512 or (channels >= 256 and width >= 28)


def choose_order(
    call: ConvolutionCall,
    *,
    gpu: str = "H200",
    library: str = "torch 2.11",
    launches: Sequence[Launch] | None = None,
    min_probability: float = MIN_PROBABILITY,
) -> ConvolutionChoice:
    """Return the order that a convolution of PyTorch gets on a GPU, with how that is known.

    Args:
        call: The convolution.
        gpu: "H200" or "H100". Kernels were recorded on an H200; an H100 has as many multiprocessors, and its evidence says so.
        library: "torch 2.11", with `torch.backends.cudnn.benchmark` and `deterministic` off, as they are by default.
        launches: The call's kernels with their grids, as a profiler recorded them. They determine the order, whatever the rules say.
        min_probability: Rules that were right less often are not used.

    Returns:
        The choice.

    Raises:
        NotModelled: The order is not known, or the GPU leaves it open.
        Unsupported: Another dtype, GPU or library.
    """
    check_product(TorchProduct(call.dtype, 1, 1, 1))
    check_library("convolutions", gpu, library)
    described = f"{form_name(call)}: a convolution of {list(call.x)} by {list(call.weight)}, stride {list(call.stride)}"
    if launches is None and not takes_cudnn(call):
        if len(call.window) == 3:
            raise NotModelled(f"{described}: PyTorch's kernel for three axes was not recorded; one and two axes have a rule")
        return ConvolutionChoice(call, None, DEPTHWISE, SOURCE, "DepthwiseConv2d.cu; H200: equal in 19 recorded convolutions")
    recorded = recorded_convolutions()
    where, source = "", RECORDED
    if launches is None and (launches := recorded.launches.get(call)) is not None:
        assumed, source = ("", RECORDED) if gpu in recorded.gpu else (f", assumed for an {gpu}", RULE)
        where = f"its kernels on an {recorded.gpu}{assumed}; "
    if launches is not None:
        try:
            found = order_of_convolution(launches, kernel_facts(call))
        except NotModelled as error:
            raise NotModelled(f"{described}: {error}") from None
        return ConvolutionChoice(call, found.order, found.kernels, source, where + found.evidence)
    rules, form = convolution_rules(), form_name(call)
    found = rules.forms[form].find(convolution_features(call)) if form in rules.forms else None
    teach = "a recording of its kernels with their grids would teach it: choose_order(..., launches=...)"
    if found is None or found[0][0][0] == OPEN:
        raise NotModelled(f"{described}: no rule knows which kernel {library} takes for it on an {gpu}; {teach}")
    (label, right, asked), shapes, _ = found
    count = RuleCount(right, asked)
    if count.probability < min_probability:
        raise NotModelled(
            f"{described}: {label} has a probability of {count.probability:.3f} only, and min_probability is {min_probability}; {teach}"
        )
    assumed = "" if gpu in rules.gpu else f"; found on an {rules.gpu}, assumed for an {gpu}"
    why = (
        f"all {shapes} recorded shapes of a leaf of the tree {form!r}; right for {count.right:,} of {count.asked:,} others, "
        f"and the tree for {rules.held[form][0]:,} of {rules.held[form][1]:,} drawn later{assumed}"
    )
    return ConvolutionChoice(call, order_by_label(label, call), "cuDNN", RULE, why, count.probability)


# ---- convolutions


def _make_call(
    direction: str, x: Sequence[int], weight: Sequence[int], dtype: np.dtype, options: dict[str, Any], channels_last: bool, tf32: bool
) -> ConvolutionCall:
    """Return the call. Raises ValueError for shapes and numbers that no convolution has."""
    axes, groups = len(x) - 2, options["groups"]
    fits = 1 <= axes <= 3 and len(weight) == len(x) and groups >= 1
    if not fits or x[1] != weight[1] * groups or weight[0] % groups:
        raise ValueError(
            f"{dtype}{list(x)} and {dtype}{list(weight)} in {groups} groups: expected [B, C, ...] and [O, C / groups, ...] with one to "
            "three further axes"
        )
    numbers = [tuple(default if options[name] is None else options[name]) for name, default in (
        ("stride", (1,) * axes), ("padding", (0,) * axes), ("dilation", (1,) * axes),
    )]  # fmt: skip
    steps, zeros, spread = numbers
    if any(len(each) != axes for each in numbers) or min(*steps, *spread) < 1 or min(zeros) < 0:
        raise ValueError(
            f"stride={list(steps)}, padding={list(zeros)}, dilation={list(spread)}: expected a number for each of {axes} axes, strides and "
            "dilations of 1 or more, paddings of 0 or more"
        )
    dtype_name = np.dtype(dtype).name
    last = channels_last and axes > 1  # PyTorch lays an operand with one further axis contiguous first
    return ConvolutionCall(
        direction, dtype_name, tuple(x), tuple(weight), steps, zeros, spread, groups, last, tf32 and dtype_name == "float32"
    )


def _check_operands(**operands: np.ndarray) -> None:
    if len({str(x.dtype) for x in operands.values()}) > 1:
        said = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in operands.items())
        raise ValueError(f"{said}: expected one dtype")


def convolution(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    stride: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    transposed: bool = False,
    output_padding: Sequence[int] | None = None,
    channels_last: bool = False,
    tf32: bool = False,
    **choice: Any,
) -> tuple[np.ndarray, tuple[ConvolutionChoice, ...]]:
    """Compute a convolution as PyTorch does it on Hopper, mostly by cuDNN.

    A bias is added by another kernel, to the rounded result; PyTorch's own kernel for channels that are groups of their own begins with it.

    Args:
        x: [batch, channels, ...] with one to three further axes, in bf16, f16 or f32.
        weight: [outputs, channels of a group, ...]; transposed: [channels, outputs of a group, ...].
        bias: [outputs], or None.
        stride: Of each further axis; None: 1.
        padding: Zeros before and behind each further axis; None: 0.
        dilation: Distance of the window's places; None: 1.
        groups: Number of groups of channels.
        transposed: A transposed convolution.
        output_padding: Further places of a transposed convolution behind each axis; None: 0.
        channels_last: x or weight lies in memory with the channels last.
        tf32: `torch.backends.cudnn.allow_tf32`, of f32.
        **choice: `gpu`, `library`, `launches` and `min_probability` of `choose_order`.

    Returns:
        The result, [batch, outputs, ...], and the choice of its order; none for an empty result.

    Raises:
        NotModelled: Nothing tells which kernel is taken, or how it adds.
        Unsupported: Another dtype.
        ValueError: The shapes do not fit.
    """
    x, weight, added = np.asarray(x), np.asarray(weight), None if bias is None else np.asarray(bias)
    _check_operands(x=x, weight=weight)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    call = _convolution_call(x.shape, weight.shape, x.dtype, options, transposed, output_padding, channels_last, tf32)
    outputs = call.x[1] if transposed else call.weight[0]
    if added is not None and (added.shape != (outputs,) or added.dtype != x.dtype):
        raise ValueError(f"bias: got {added.dtype}{list(added.shape)}; expected {x.dtype}[{outputs}]")
    shape = call.x if transposed else call.y
    if 0 in shape:
        return np.zeros(shape, x.dtype), ()
    chosen = choose_order(call, **choice)
    if chosen.order is None:
        return _depthwise(call, x, weight, added), (chosen,)
    y = _of_input(call, chosen.order, x, weight) if transposed else _forward(call, chosen.order, x, weight)
    if added is not None:
        y = (y.astype(F32) + added.astype(F32).reshape(-1, *[1] * len(call.window))).astype(x.dtype)
    return y, (chosen,)


def _convolution_call(
    x: Sequence[int], weight: Sequence[int], dtype: np.dtype, options: dict[str, Any], transposed: bool,
    output_padding: Sequence[int] | None, channels_last: bool, tf32: bool,
) -> ConvolutionCall:  # fmt: skip
    """Return the call of a forward. The transposed convolution of x is the gradient of the input whose result has the shape of x."""
    if not transposed:
        return _make_call(FORWARD, x, weight, dtype, options, channels_last, tf32)
    axes = len(x) - 2
    given = [options[name] or (default,) * axes for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    further = tuple(output_padding or (0,) * axes)
    if len(weight) != len(x) or any(len(each) != axes for each in (*given, further)) or weight[0] != x[1]:
        raise ValueError(
            f"{dtype}{list(x)} and {dtype}{list(weight)}: expected [B, C, ...] and [C, O / groups, ...], and numbers for each axis"
        )
    if not all(0 <= more < max(step, spread) for more, step, spread in zip(further, given[0], given[2], strict=True)):
        raise ValueError(f"output_padding={list(further)}: expected numbers from 0, below the stride or the dilation")
    sizes = [(n - 1) * s - 2 * p + d * (k - 1) + more + 1 for n, s, p, d, k, more in zip(x[2:], *given, weight[2:], further, strict=True)]
    return _make_call(OF_INPUT, (x[0], weight[1] * options["groups"], *sizes), weight, dtype, options, channels_last, tf32)


def convolution_gradients(
    grad: ArrayLike,
    x: ArrayLike,
    weight: ArrayLike,
    *,
    stride: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    transposed: bool = False,
    output_padding: Sequence[int] | None = None,
    channels_last: bool = False,
    tf32: bool = False,
    requested: Sequence[bool] = (True, True),
    **choice: Any,
) -> tuple[np.ndarray | None, np.ndarray | None, tuple[ConvolutionChoice, ...]]:
    """Compute the gradients of a convolution's input and weight as PyTorch does it on Hopper.

    The gradient of a bias is the sum of `grad` over all axes but the second, as `functional.torch_cuda.rows.reduce` computes it.

    Args:
        grad: Gradient of the result.
        x: As in `convolution`.
        weight: As in `convolution`.
        stride, padding, dilation, groups, transposed, output_padding, channels_last, tf32: As in `convolution`.
        requested: Whether the gradients of input and weight are computed.
        **choice: As in `convolution`.

    Returns:
        The gradients of input and weight, None for one that is not requested, and the choices of their orders.

    Raises:
        NotModelled, Unsupported, ValueError: As in `convolution`.
    """
    grad, x, weight = np.asarray(grad), np.asarray(x), np.asarray(weight)
    _check_operands(grad=grad, x=x, weight=weight)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    call = _convolution_call(x.shape, weight.shape, x.dtype, options, transposed, output_padding, channels_last, tf32)
    expected = call.x if transposed else call.y
    if grad.shape != expected:
        raise ValueError(f"grad: got shape {list(grad.shape)}; expected {list(expected)}")
    found: list[np.ndarray | None] = [None, None]
    choices = []
    result, given = (x, grad) if transposed else (grad, x)  # of the convolution that is not transposed
    for place, direction in enumerate((FORWARD if transposed else OF_INPUT, OF_WEIGHT)):
        if not requested[place]:
            continue
        call = call._replace(direction=direction)
        if 0 in (*call.x, *call.y):
            found[place] = np.zeros((x if place == 0 else weight).shape, x.dtype)
            continue
        choices.append(choose_order(call, **choice))
        order = choices[-1].order
        if order is not None and direction == FORWARD:
            found[place] = _forward(call, order, given, weight)
        elif direction == OF_INPUT:
            found[place] = _depthwise_of_input(call, grad, weight) if order is None else _of_input(call, order, grad, weight)
        else:
            found[place] = _depthwise_of_weight(call, grad, x) if order is None else _of_weight(call, order, result, given)
    return found[0], found[1], tuple(choices)


# ---- grouped products


def grouped_matmul(x: ArrayLike, weights: ArrayLike, offsets: Any, *, transposed_b: bool = False, **options: Any) -> Array:
    """Compute the products of experts as `torch._grouped_mm` does on Hopper.

    In bf16 one kernel of CUTLASS multiplies every expert's rows, K in one slice. In f16 and f32 each expert is a separate product.

    Args:
        x: [M, K], the rows of one expert after the other.
        weights: [experts, K, N], logical.
        offsets: The row after an expert's last, ascending, as integers that are known.
        transposed_b: The weights lie in memory as [experts, N, K].
        **options: Of `matmul`, for f16 and f32.

    Returns:
        [M, N].

    Raises:
        NotModelled, Unsupported: As in `matmul`.
        ValueError: The shapes or the offsets do not fit.
    """
    is_numpy = isinstance(x, np.ndarray) and isinstance(weights, np.ndarray)
    xp: Any = np if is_numpy else jnp
    a, b = xp.asarray(x), xp.asarray(weights)
    edges = [0, *np.asarray(offsets, np.int64).tolist()]
    if a.ndim != 2 or b.ndim != 3 or len(edges) != len(b) + 1 or sorted(edges) != edges or edges[-1] != len(a):
        raise ValueError(f"{list(a.shape)}, {list(b.shape)} and offsets {edges[1:]}: expected [M, K], [E, K, N] and E offsets up to M")
    call = TorchProduct(a.dtype.name, max(1, len(a)), a.shape[1], b.shape[2])
    check_product(call)
    recipe = (
        KernelRecipe(call.format, call.format, call.format, tensor_core(call), Slices.single(call.k)) if call.dtype == "bfloat16" else None
    )
    parts = []
    for expert, (start, stop) in enumerate(pairwise(edges)):
        if start == stop:
            continue
        rows = a[start:stop]
        if recipe is not None:
            found = multiply_by_numpy(recipe, rows, b[expert]) if is_numpy else None  # compiles no program but the instructions'
            parts.append(matmul_with_kernel(recipe, ProductOperands(rows, b[expert]), a.dtype) if found is None else found)
        else:
            parts.append(matmul(rows, b[expert], transposed_b=transposed_b, **options))
    return jnp.asarray(xp.concatenate(parts)) if parts else jnp.zeros((0, call.n), a.dtype)
