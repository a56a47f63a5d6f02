"""The kernel of `quantize.cu`: elements divided by scales or multiplied by them, and rounded, on an NVIDIA GPU."""

from math import prod

import jax
from jax import Array

from tcemu.engine.backends.batched_calls import launch_numbers
from tcemu.engine.backends.cuda.kernel_text import quantizer_text
from tcemu.engine.backends.cuda.xla_launch import KernelEntry, launch, route
from tcemu.engine.backends.elementwise_request import ElementwiseRequest

THREADS, PIECE = 256, 8  # threads of a block; elements of a thread, as in quantize.cu
MOST = 1 << 31  # pieces of an operand, which are counted in 32 bits


def unavailable_reason(shape: tuple[int, ...]) -> str:
    """Returns the reason why the kernel cannot run here on an operand of this shape; "" if it can."""
    return f"the operand's shape is {list(shape)}" if _pieces(shape) >= MOST else route().missing


def run(request: ElementwiseRequest, result: jax.ShapeDtypeStruct, codes: Array, *scales: Array) -> Array:
    batch, rows, k = codes.shape
    text = quantizer_text(request)
    shape = launch_numbers(batch * rows, rows, k, *(scales[0].shape if scales else (1, 1, 1)), request.depth or 1)
    return launch(KernelEntry("quantize", text, THREADS), -(-_pieces(codes.shape) // THREADS), result, shape, codes, *scales)[0]


def _pieces(shape: tuple[int, ...]) -> int:
    return prod(shape[:-1]) * -(-shape[-1] // PIECE)
