"""Products within other operations of PyTorch on Hopper: convolutions, and grouped products of experts.

Source: kernels and words of torch 2.11.0 on an NVIDIA H200, 42 patch convolutions and 20 grouped products in bf16 and f16
(tests/gpu_runs/torch_products.py, seed 0), and 39 convolutions in bf16, f16 and f32 (tests/gpu_runs/dropout_and_convolutions.py): the
orders below give every compared word of the calls that have a rule. That blocks of channels come before the window's places was chosen
after wrong words of three convolutions, and is what CUTLASS's iterators do; how many channels a block has, 64 or 32, is the last number in
the name of the kernel's tile. In f16 and f32 a grouped product launched the kernels of one product an expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.errors import NotModelled
from tcemu.engine.formats.number_formats import F32
from tcemu.operations.functional.torch_cuda.product_kernels import TorchProduct, check_product, tensor_core
from tcemu.operations.products.library.kernel_matmul import matmul_with_kernel
from tcemu.operations.products.library.kernel_recipe import Epilogue, KernelRecipe, Lanes, Slices
from tcemu.operations.products.library.numpy_sums import multiply_by_numpy
from tcemu.operations.products.recipe_kinds import ProductOperands
from tcemu.uses.replay.torch_products import matmul

CHAIN, DEPTHWISE, TENSOR_CORE = "a chain of f32 fma", "PyTorch's depthwise kernel", "a tensor core, blocks of channels"
MANY_CHANNELS = 16  # of a group, from which cuDNN took a tensor core in 16 bits
FEW_OUTPUTS, MANY_OUTPUTS = 384, 512  # with fewer channels: up to the first no tensor core was seen in 16 bits, from the second on one
BLOCK = 64  # channels that are taken at a time
FEW_BLOCKED, MOST_BLOCKED = 32, 818_688  # channels that one block has for sure; results up to which a block was seen to have 64
MOST_OF_ONE_TAP = 256  # channels of a window of one place, up to which one slice was seen
INSTRUCTION_K = 16


class ConvolutionCall(NamedTuple):
    """The facts by which cuDNN and PyTorch choose a kernel.

    Attributes:
        dtype: Name of the operands' dtype.
        channels: Channels of the input that a group has.
        outputs: Channels of the output.
        groups: Number of groups.
        window: Shape of the kernel, one to three axes.
        places: Number of places of the output, of all batches.
        tf32: `torch.backends.cudnn.allow_tf32`.
    """

    dtype: str
    channels: int
    outputs: int
    groups: int
    window: tuple[int, ...]
    places: int
    tf32: bool

    @property
    def is_depthwise(self) -> bool:
        """Return whether each channel is a separate group."""
        return self.groups > 1 and self.channels == 1 and self.outputs % self.groups == 0


def choose_convolution(call: ConvolutionCall) -> str:
    """Return what adds the products of a convolution: CHAIN, DEPTHWISE or TENSOR_CORE.

    Raises:
        NotModelled: Nothing tells it.
    """
    if call.is_depthwise and len(call.window) < 3:
        by_cudnn = call.dtype == "float16" and (len(call.window) == 1 or call.window in ((1, 1), (3, 3), (5, 5)))
        if not by_cudnn:
            return DEPTHWISE
        reason = (
            "in float16 cuDNN may take kernels of 1, 3 or 5 rows, and those of one axis, by their size; in bfloat16 and float32 it does not"
        )
    elif call.dtype == "float32":
        if not call.tf32:
            return CHAIN
        reason = "cuDNN may take TF32, by shape; torch.backends.cudnn.allow_tf32 = False has a rule"
    elif math.prod(call.window) == 1:
        if MANY_CHANNELS <= call.channels <= MOST_OF_ONE_TAP and call.groups == 1:
            return TENSOR_CORE
        reason = f"it is a product by cuBLAS, of which {MANY_CHANNELS} to {MOST_OF_ONE_TAP} channels are known"
    elif call.channels >= MANY_CHANNELS:
        if call.channels <= FEW_BLOCKED or (call.places * call.outputs <= MOST_BLOCKED and len(call.window) < 3):
            return TENSOR_CORE
        reason = (
            f"how many channels a block has is known up to {FEW_BLOCKED} channels, or up to {MOST_BLOCKED:,} results of one or two axes"
        )
    elif call.groups > 1 or len(call.window) == 3:
        reason = f"known are {MANY_CHANNELS} channels and more of a group, or one or two axes without groups"
    elif call.outputs <= FEW_OUTPUTS or call.outputs >= MANY_OUTPUTS:
        return CHAIN if call.outputs <= FEW_OUTPUTS else TENSOR_CORE
    else:
        reason = f"cuDNN took no tensor core up to {FEW_OUTPUTS} channels of the output, and one from {MANY_OUTPUTS} on"
    window = " x ".join(map(str, call.window))
    raise NotModelled(
        f"a convolution of {call.channels} channels in {call.groups} groups to {call.outputs}, {window}, in {call.dtype}: {reason} "
        "(replay/torch_convolutions.py)"
    )


def convolution(
    x: ArrayLike,
    weight: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    stride: Sequence[int] | None = None,
    padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
    groups: int = 1,
    tf32: bool = False,
) -> Array:
    """Compute a convolution as PyTorch does it on Hopper, mostly by cuDNN.

    Without a tensor core the products are a chain of f32 fma over channels and then over the window. With one, blocks of 64 channels are
    taken in turn, and within a block the places of the window, each with instructions of its own for the block's channels. A bias is
    added by another kernel, to the rounded result; PyTorch's own kernel for channels that are groups of their own begins with it.

    Args:
        x: [batch, channels, ...] with one to three further axes, in bf16, f16 or f32.
        weight: [outputs, channels of a group, ...].
        bias: [outputs], or None.
        stride: Of each further axis; None: 1.
        padding: Zeros before and behind each further axis; None: 0.
        dilation: Distance of the window's places; None: 1.
        groups: Number of groups of channels.
        tf32: `torch.backends.cudnn.allow_tf32`, of f32.

    Returns:
        [batch, outputs, ...].

    Raises:
        NotModelled: Nothing tells which kernel is taken.
        Unsupported: Another dtype.
        ValueError: The shapes do not fit.
    """
    x, weight, added = jnp.asarray(x), jnp.asarray(weight), None if bias is None else jnp.asarray(bias)
    axes = x.ndim - 2
    fits = 1 <= axes <= 3 and weight.ndim == x.ndim and groups >= 1
    if not fits or x.shape[1] != weight.shape[1] * groups or weight.shape[0] % groups or x.dtype != weight.dtype:
        raise ValueError(
            f"{x.dtype}{list(x.shape)} and {weight.dtype}{list(weight.shape)} in {groups} groups: expected [B, C, ...] and "
            "[O, C / groups, ...] in one dtype, with one to three further axes"
        )
    if added is not None and (added.shape != weight.shape[:1] or added.dtype != x.dtype):
        raise ValueError(f"bias: got {added.dtype}{list(added.shape)}; expected {x.dtype}{list(weight.shape[:1])}")
    outputs, channels, *window = weight.shape
    steps, zeros, spread = (tuple(default if given is None else given) for given, default in (
        (stride, (1,) * axes), (padding, (0,) * axes), (dilation, (1,) * axes),
    ))  # fmt: skip
    if any(len(each) != axes for each in (steps, zeros, spread)) or min(*steps, *spread) < 1 or min(zeros) < 0:
        raise ValueError(
            f"stride={list(steps)}, padding={list(zeros)}, dilation={list(spread)}: expected a number for each of {axes} axes, strides and "
            "dilations of 1 or more, paddings of 0 or more"
        )
    call = TorchProduct(jnp.dtype(x.dtype).name, 1, channels * math.prod(window), outputs)
    check_product(call)
    x = jnp.pad(x, [(0, 0), (0, 0), *((zero, zero) for zero in zeros)])
    for axis, size in enumerate(window):  # [batch, channels, rows, window, columns, window, ...]
        count = (x.shape[2 + 2 * axis] - spread[axis] * (size - 1) - 1) // steps[axis] + 1
        places = np.arange(max(count, 0))[:, None] * steps[axis] + np.arange(size) * spread[axis]
        x = jnp.take(x, places.reshape(-1), axis=2 + 2 * axis)
        x = x.reshape(*x.shape[: 2 + 2 * axis], *places.shape, *x.shape[3 + 2 * axis :])
    batch, _, *sizes = x.shape
    places = batch * math.prod(sizes[::2])
    if not places:
        return jnp.zeros((batch, outputs, *sizes[::2]), x.dtype)
    kind = choose_convolution(ConvolutionCall(call.dtype, channels, outputs, groups, tuple(window), places, tf32))
    laid = x.reshape(batch, groups, channels, *sizes)
    taken, placed = (tuple(range(start, 3 + 2 * axes, 2)) for start in (4, 3))
    a = laid.transpose(1, 0, *placed, 2, *taken).reshape(groups, -1, channels, math.prod(window))
    b = weight.reshape(groups, outputs // groups, channels, -1)
    epilogue = Epilogue(between=None if bias is None or call.format == F32 else call.format)
    factors, lanes = F32, Lanes()
    if kind == TENSOR_CORE:
        factors, lanes = call.format, tensor_core(call)
        block = BLOCK if channels > BLOCK else -(-channels // INSTRUCTION_K) * INSTRUCTION_K
        rest = [(0, 0), (0, 0), (0, -channels % block), (0, 0)]
        a, b = (jnp.pad(y, rest).reshape(*y.shape[:2], -1, block, y.shape[3]).swapaxes(3, 4) for y in (a, b))
    a, b = a.reshape(groups, a.shape[1], -1), b.reshape(groups, outputs // groups, -1)
    if kind == DEPTHWISE and added is not None:
        a = jnp.concatenate([jnp.ones((groups, a.shape[1], 1), a.dtype), a], axis=2)
        b = jnp.concatenate([added.reshape(groups, -1, 1), b], axis=2)
        added, epilogue = None, Epilogue()
    recipe = KernelRecipe(factors, factors, call.format, lanes, Slices.single(a.shape[2]), epilogue=epilogue)
    if added is not None:  # a bias of each group's own
        added = added.reshape(groups, -1)
    parts = [matmul_with_kernel(recipe, ProductOperands(a, jnp.swapaxes(b, 1, 2)), x.dtype)] if added is None else [
        matmul_with_kernel(recipe, ProductOperands(a[g], b[g].T, added[g]), x.dtype)[None] for g in range(groups)
    ]  # fmt: skip
    y = jnp.concatenate(parts).reshape(groups, batch, *sizes[::2], outputs // groups)
    return jnp.moveaxis(y, (1, 0, -1), (0, 1, 2)).reshape(batch, outputs, *sizes[::2])


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
