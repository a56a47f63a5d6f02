"""The kernel of `cuda/quantize.cu`: elements divided by scales or multiplied by them, and rounded, each by itself.

On integers, as XLA compiles them, a division and a rounding take hundreds of operations an element, and a program with many of them takes
long to compile. The kernel has the GPU's own division and multiplication, which are those of IEEE 754.
"""

from collections.abc import Callable
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.backends.batched_calls import call_batched, launch_numbers, require_known_sizes
from tcemu.backends.cuda.kernel_text import quantizer_text
from tcemu.backends.cuda.xla_launch import KernelEntry, launch, route
from tcemu.base.errors import Unsupported
from tcemu.formats import F32, Format

PLATFORM = "cuda"  # as `lax.platform_dependent` names it
THREADS, PIECE = 256, 8  # threads of a block; elements of a thread, as in quantize.cu
MOST = 1 << 31  # pieces of an operand, which are counted in 32 bits
EVERY = (1 << 31) - 1  # elements along K that share a scale, where all do


class ElementwiseCall(NamedTuple):
    """x / scale or x * scale, rounded: a `BatchedCall` that returns codes of the target [batch, R, K].

    It takes codes of x [batch, R, K] and f32 codes of scales [batch or 1, R or 1, groups along K].
    """

    source: Format
    target: Format
    saturate: bool
    depth: int | None  # elements along K that share a scale; None: there are no scales
    by_row: bool = False  # each row has scales of its own
    multiplied: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        if self.depth is None:
            return "r k", "r k"
        of_scales = f"{'r' if self.by_row else 's'} {'k' if self.depth == 1 else 'g'}"
        return "r k", of_scales, "r k" if self.depth in (1, EVERY) else "r j"  # a group along K may reach over a cut

    @property
    def sharing(self) -> tuple[str, ...]:
        return ("",) if self.depth is None else ("", "scales")

    def __call__(self, codes: Array, *scales: Array) -> Array:
        batch, rows, k = codes.shape
        result = jax.ShapeDtypeStruct(codes.shape, self.target.dtype)
        if codes.size == 0:
            return jnp.zeros(result.shape, result.dtype)
        text = quantizer_text(self.source, self.target, self.saturate, bool(scales), self.multiplied)
        shape = launch_numbers(batch * rows, rows, k, *(scales[0].shape if scales else (1, 1, 1)), self.depth or 1)
        return launch(KernelEntry("quantize", text, THREADS), -(-_pieces(codes.shape) // THREADS), result, shape, codes, *scales)[0]


def _pieces(shape: tuple[int, ...]) -> int:
    return prod(shape[:-1]) * -(-shape[-1] // PIECE)


def unavailable_reason(*operands: Array) -> str:
    """Returns the reason why the kernel cannot run on these operands here; "" if it can."""
    try:
        require_known_sizes(*operands)
    except Unsupported as error:
        return str(error)
    shape = jnp.broadcast_shapes((1, 1), *(operand.shape for operand in operands))
    if _pieces(shape) >= MOST:
        return f"the operand's shape is {list(shape)}"
    return route().missing


def round_elements(call: ElementwiseCall, codes: Array, scales: Array | None, depth: int | None) -> Array:
    """By the kernel: codes of the target [..., R, K]; the call's own depth and rows are put in.

    codes: of x; scales: f32 codes [..., R or 1, groups along K] that broadcast along batch axes; None: there are none. depth: how many
    elements along K share one; None: all.
    """
    if scales is None:
        return call_batched(call, codes)
    scales = scales.reshape((1,) * (2 - scales.ndim) + scales.shape)
    call = call._replace(depth=EVERY if scales.shape[-1] == 1 or depth is None else depth, by_row=scales.shape[-2] > 1)
    return call_batched(call, codes, scales)


def multiply_f32(x: Array, y: Array) -> Array:
    """x * y, rounded to nearest once: f32 codes, which broadcast against each other."""
    return _call_on_words(ElementwiseCall(F32, F32, False, 1, multiplied=True), x, y)


def divide_f32(x: Array, y: Array) -> Array:
    """x / y, rounded to nearest once: f32 codes, which broadcast against each other."""
    return _call_on_words(ElementwiseCall(F32, F32, False, 1), x, y)


def narrow(target: Format, x: Array) -> Array:
    """f32 codes as those of a signed float format, rounded to nearest; what is out of range becomes the largest finite value."""
    return round_elements(ElementwiseCall(F32, target, True, None), x.reshape((1,) * (2 - x.ndim) + x.shape), None, None).reshape(x.shape)


def _call_on_words(call: ElementwiseCall, x: Array, y: Array) -> Array:
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    matrix = (1,) * (2 - len(shape)) + shape
    return round_elements(call, jnp.broadcast_to(x, shape).reshape(matrix), y, 1).reshape(shape)


def platform_programs(by_kernel: Callable[..., Array], *operands: Array) -> dict[str, Callable[..., Array]]:
    """One of these functions on its platform, for `lax.platform_dependent`; empty where it cannot run."""
    return {} if unavailable_reason(*operands) else {PLATFORM: by_kernel}
