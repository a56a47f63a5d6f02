"""`KERNELS`: values for kernels that people use, with their sources. Facts of the published kernels, not their code.

A row is a rule: Triton chooses the elements that a thread holds by the row's length and dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any, NamedTuple, TypeVar

import numpy as np
from jax.typing import DTypeLike

from tcemu.operations.functional.kernel_values import GeluKernel, LayerNormKernel, RmsNormKernel, RotaryKernel, SiluKernel, SoftmaxKernel
from tcemu.operations.functional.row_sums import LANES, RowSum

LOAD_BYTES = 16  # the widest load of a thread
TORCH_VECTOR = 4  # elements of a load of PyTorch's layer norm
ALIGNMENT = 16  # Triton specialises a kernel for integer arguments that 16 divides
Kernel = TypeVar("Kernel")


class KernelRow(NamedTuple):
    """One kernel as published."""

    make: Callable[[int, np.dtype], Any]  # of a row's columns and dtype
    source: str


def padded_size(columns: int) -> int:
    """Return the least power of two that is not below the number of columns."""
    return 1 << max(columns - 1, 0).bit_length()


def triton_vector(columns: int, dtype: np.dtype, warps: int, tile: int, aligned: bool = True) -> int:
    """Return the neighbouring elements that Triton lets a thread hold, by its pass that coalesces loads.

    Args:
        columns: Elements of a row, which is also the stride between rows.
        dtype: The narrowest dtype that is loaded.
        warps: Warps of the block.
        tile: Elements that the block holds at once.
        aligned: An operand that every row shares, such as a weight, is aligned whatever the stride. Otherwise rows whose stride 16 does not
            divide are loaded element by element.
    """
    widest = LOAD_BYTES // dtype.itemsize if aligned or columns % ALIGNMENT == 0 else 1
    return max(min(widest, tile // (LANES * warps)), 1)


def _warps_by_size(columns: int) -> int:
    """Return the warps that Liger-Kernel launches for a row: 4, 8 from 2048 padded columns on, 16 from 8192, 32 from 32768."""
    size = padded_size(columns)
    return 32 if size >= 32768 else 16 if size >= 8192 else 8 if size >= 2048 else 4


def _triton_softmax(columns: int, dtype: np.dtype) -> SoftmaxKernel:
    warps = 8
    return SoftmaxKernel(RowSum(warps, triton_vector(columns, dtype, warps, padded_size(columns), aligned=False)))


def _triton_layer_norm(columns: int, dtype: np.dtype) -> LayerNormKernel:
    tile = min(65536 // dtype.itemsize, padded_size(columns))
    warps = min(max(tile // 256, 1), 8)
    return LayerNormKernel(RowSum(warps, triton_vector(columns, dtype, warps, tile), tile))


def _liger_rms_norm(columns: int, dtype: np.dtype) -> RmsNormKernel:
    size, warps = padded_size(columns), _warps_by_size(columns)
    reversed_pairs = (4, 5) if size == 4096 and dtype == np.float32 else ()  # as the PTX has it; in narrower dtypes squares are exact
    return RmsNormKernel(RowSum(warps, triton_vector(columns, dtype, warps, size), reversed_pairs=reversed_pairs))


def _liger_rms_norm_gemma(columns: int, dtype: np.dtype) -> RmsNormKernel:
    return _liger_rms_norm(columns, dtype).replace(round_before_weight=False)


def _vllm_rms_norm(columns: int, dtype: np.dtype, most_threads: int = 1024) -> RmsNormKernel:
    vector = gcd(LOAD_BYTES // dtype.itemsize, columns)
    warps = max(padded_size(min(columns // vector, most_threads)) // LANES, 1)
    sums = RowSum(warps, vector, thread_order="chain", lane_order="near", warp_order="chain")
    return RmsNormKernel(sums, division="rn", root="rsqrt.approx", add_offset=False)


def _torch_layer_norm(columns: int, dtype: np.dtype) -> LayerNormKernel:
    if columns % TORCH_VECTOR:
        raise ValueError(f"kernel='torch': PyTorch's vectorised kernel takes rows of a multiple of {TORCH_VECTOR} elements; got {columns}")
    return LayerNormKernel(RowSum(4, TORCH_VECTOR), division="rn", root="rsqrt.approx", moments="welford")


def _liger_cross_entropy(columns: int, dtype: np.dtype) -> SoftmaxKernel:
    block, warps = min(32768, padded_size(columns)), 32
    return SoftmaxKernel(RowSum(warps, triton_vector(columns, dtype, warps, block, aligned=False)), block=block)


TUTORIALS = "Triton's tutorials (triton-lang/triton, python/tutorials), compiled by Triton 3.9.0"
LIGER = "Liger-Kernel (linkedin/Liger-Kernel, src/liger_kernel/ops), compiled by Triton 3.9.0"
VLLM = "vLLM 0.20 (vllm-project/vllm, csrc/layernorm_kernels.cu, rms_norm_kernel), with CUB's sum of a block"
TORCH = "PyTorch (pytorch/pytorch, aten/src/ATen/native/cuda/layer_norm_kernel.cu at 0005c53)"
KERNELS: dict[str, dict[str, KernelRow]] = {  # by function and name
    "softmax": {"triton": KernelRow(_triton_softmax, f"{TUTORIALS}: 02-fused-softmax")},
    "log_softmax": {"triton": KernelRow(_triton_softmax, "a log-softmax in the manner of Triton's tutorial 02-fused-softmax")},
    "cross_entropy": {"liger": KernelRow(_liger_cross_entropy, f"{LIGER}: cross_entropy.py, the loss")},
    "rms_norm": {
        "liger": KernelRow(_liger_rms_norm, f"{LIGER}: rms_norm.py, casting mode llama"),
        "liger_gemma": KernelRow(_liger_rms_norm_gemma, f"{LIGER}: rms_norm.py, casting mode gemma"),
        "vllm": KernelRow(_vllm_rms_norm, f"{VLLM}, fewer than 256 tokens or batch-invariant: up to 1024 threads"),
        "vllm_256": KernelRow(partial(_vllm_rms_norm, most_threads=256), f"{VLLM}, 256 tokens or more: up to 256 threads"),
    },
    "layer_norm": {
        "triton": KernelRow(_triton_layer_norm, f"{TUTORIALS}: 05-layer-norm, the forward pass"),
        "torch": KernelRow(_torch_layer_norm, f"{TORCH}: the vectorised forward pass"),
    },
    "silu": {"liger": KernelRow(lambda *_: SiluKernel(), f"{LIGER}: swiglu.py")},
    "gelu": {
        "liger": KernelRow(lambda *_: GeluKernel(), f"{LIGER}: geglu.py, by libdevice's tanh"),
        "triton_erf": KernelRow(lambda *_: GeluKernel("erf"), "tl.erf, compiled by Triton 3.9.0"),
        "triton_sigmoid": KernelRow(lambda *_: GeluKernel("sigmoid"), "tl.sigmoid, compiled by Triton 3.9.0"),
    },
    "rotary": {"liger": KernelRow(lambda *_: RotaryKernel(), f"{LIGER}: rope.py")},
}


def kernel_value(function: str, kind: type[Kernel], kernel: Kernel | str, columns: int, dtype: DTypeLike) -> Kernel:
    """Return a kernel's value: a row by its name, or the value as it is given.

    Raises:
        TypeError: It is neither.
        ValueError: The function has no such row.
    """
    if isinstance(kernel, kind):
        return kernel
    if not isinstance(kernel, str):
        raise TypeError(f"kernel: got {type(kernel).__name__}; expected a {kind.__name__}, or the name of a row of functional.KERNELS")
    rows = KERNELS[function]
    if kernel not in rows:
        raise ValueError(f"kernel={kernel!r}: {function} has the rows {', '.join(rows)}; or give a {kind.__name__}")
    return rows[kernel].make(columns, np.dtype(dtype))


def get_kernel(function: str, name: str, *, columns: int, dtype: DTypeLike = "float32") -> Any:
    """Return the value of a published kernel for rows of a length and a dtype.

    Args:
        function: Name of a function of `tcemu.functional`, such as "softmax".
        name: Name of its row in `functional.KERNELS`, such as "triton".
        columns: Elements of a row.
        dtype: float32, float16 or bfloat16.

    Returns:
        The function's kernel value, such as a `SoftmaxKernel`. Its `replace` changes fields.

    Raises:
        ValueError: The function or the row is unknown.
    """
    if function not in KERNELS:
        raise ValueError(f"function={function!r}: expected one of {', '.join(KERNELS)}")
    if name not in KERNELS[function]:
        raise ValueError(f"name={name!r}: {function} has the rows {', '.join(KERNELS[function])}")
    return KERNELS[function][name].make(columns, np.dtype(dtype))
