"""The kernel of `quantize.cu`: elements divided by scales or multiplied by them, and rounded, on an NVIDIA GPU."""

from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.backends.batched_calls import launch_numbers
from tcemu.backends.cuda.kernel_text import quantizer_text
from tcemu.backends.cuda.xla_launch import KernelEntry, launch, route
from tcemu.backends.elementwise_request import ElementwiseRequest
from tcemu.formats import F32, Format

THREADS, PIECE = 256, 8  # threads of a block; elements of a thread, as in quantize.cu
MOST = 1 << 31  # pieces of an operand, which are counted in 32 bits


def unavailable_reason(shape: tuple[int, ...]) -> str:
    """Returns the reason why the kernel cannot run here on an operand of this shape; "" if it can."""
    return f"the operand's shape is {list(shape)}" if _pieces(shape) >= MOST else route().missing


def run(request: ElementwiseRequest, result: jax.ShapeDtypeStruct, codes: Array, *scales: Array) -> Array:
    """Computes a request by one launch."""
    batch, rows, k = codes.shape
    scales = tuple(_f32_scales(request.scale, v) for v in scales)
    text = quantizer_text(request.source, request.target, request.saturate, bool(scales), request.multiplied)
    shape = launch_numbers(batch * rows, rows, k, *(scales[0].shape if scales else (1, 1, 1)), request.depth or 1)
    return launch(KernelEntry("quantize", text, THREADS), -(-_pieces(codes.shape) // THREADS), result, shape, codes, *scales)[0]


def _f32_scales(scale: Format, codes: Array) -> Array:
    """Converts codes of scales to f32."""
    if scale == F32:
        return codes
    subnormal = np.uint32(1 << F32.mantissa_bits - 1)  # 2^-127, of code 0
    words = jnp.maximum(codes.astype(jnp.uint32) << F32.mantissa_bits, subnormal)
    return jnp.where(codes == scale.nan, np.uint32(F32.nan), words)


def _pieces(shape: tuple[int, ...]) -> int:
    return prod(shape[:-1]) * -(-shape[-1] // PIECE)
