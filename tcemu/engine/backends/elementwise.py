"""Elements divided by scales or multiplied by them, and rounded, and max magnitudes: by a kernel, on the platforms that have one.

On integers, as XLA compiles them, a division and a rounding take hundreds of operations an element, and a program with many of them takes
long to compile. A kernel has the machine's own division and multiplication, which are those of IEEE 754.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.base.errors import Unsupported
from tcemu.base.execution import PORTABLE, current_execution
from tcemu.engine.backends.batched_calls import call_batched, require_known_sizes
from tcemu.engine.backends.cuda import quantize_kernel
from tcemu.engine.backends.elementwise_request import EVERY, ElementwiseRequest, MagnitudeRequest, ScaleRequest
from tcemu.engine.backends.llvm import llvm_programs
from tcemu.engine.formats.number_formats import F32, Format


class PlatformKernel(NamedTuple):
    unavailable_reason: Callable[[tuple[int, ...]], str]  # (shape of x): the reason why they cannot run here; "" if they can
    run: Callable[..., Array]  # (request, result, codes, *scales), of one device
    finds_scales: bool  # they take a MagnitudeRequest too, and e4m3 as the source
    casts: bool  # they are faster than XLA where there are no scales


KERNELS = {  # by the platform, as `lax.platform_dependent` names it
    "cuda": PlatformKernel(quantize_kernel.unavailable_reason, quantize_kernel.run, finds_scales=False, casts=True),
    "cpu": PlatformKernel(llvm_programs.missing_elementwise, llvm_programs.run_elementwise, finds_scales=True, casts=False),
}


class ElementwiseCall(NamedTuple):
    """A request to the kernel of a platform, a `BatchedCall`."""

    platform: str
    request: ElementwiseRequest | MagnitudeRequest
    by_row: bool = False  # each row has scales of its own

    @property
    def axes(self) -> tuple[str, ...]:
        depth = self.request.depth
        if isinstance(self.request, MagnitudeRequest):
            return "r k", "r g"
        if depth is None:
            return "r k", "r k"
        of_scales = f"{'r' if self.by_row else 's'} {'k' if depth == 1 else 'g'}"
        return "r k", of_scales, "r k" if depth in (1, EVERY) else "r j"  # a group along K may reach over a cut

    @property
    def sharing(self) -> tuple[str, ...]:
        return ("",) if self.request.depth is None or isinstance(self.request, MagnitudeRequest) else ("", "scales")

    def __call__(self, *operands: Array) -> Array:
        codes, *scales = operands
        if isinstance(self.request, MagnitudeRequest):
            *others, k = codes.shape
            result = jax.ShapeDtypeStruct((*others, -(-k // self.request.depth)), F32.dtype)
        else:
            result = jax.ShapeDtypeStruct(codes.shape, self.request.target.dtype)
        if codes.size == 0:
            return jnp.zeros(result.shape, result.dtype)
        return KERNELS[self.platform].run(self.request, result, codes, *scales)


def kernel_programs(
    by_kernel: Callable[..., Array], *operands: Array, of_scales: bool = False, is_cast: bool = False
) -> dict[str, Callable[..., Array]]:
    """Returns programs by platform, as `call_by_platform` takes them, for the platforms whose kernel can run on these operands here.

    Args:
        by_kernel: Function of the platform's name and further arguments.
        *operands: Operands that broadcast against each other to the shape of x.
        of_scales: Only platforms whose kernels find scales.
        is_cast: There are no scales: only platforms where a kernel is then faster.
    """
    if current_execution() == PORTABLE:
        return {}
    try:
        require_known_sizes(*operands)
    except Unsupported:
        return {}
    shape = jnp.broadcast_shapes((1, 1), *(operand.shape for operand in operands))
    kernels = {
        platform: kernel for platform, kernel in KERNELS.items() if (kernel.finds_scales or not of_scales) and (kernel.casts or not is_cast)
    }
    return {platform: partial(by_kernel, platform) for platform, kernel in kernels.items() if not kernel.unavailable_reason(shape)}


def round_elements(platform: str, request: ElementwiseRequest, codes: Array, scales: Array | None, depth: int | None = None) -> Array:
    """Rounds by a platform's kernel: codes of the target [..., R, K].

    Args:
        platform: A key of `KERNELS`.
        request: The request; its depth is put in here.
        codes: Codes of x.
        scales: Codes [..., R or 1, groups along K] that broadcast along batch axes; None: there are none.
        depth: Elements along K that share a scale; None: all.
    """
    if scales is None:
        return call_batched(ElementwiseCall(platform, request), codes)
    scales = scales.reshape((1,) * (2 - scales.ndim) + scales.shape)
    request = request._replace(depth=EVERY if scales.shape[-1] == 1 or depth is None else depth)
    return call_batched(ElementwiseCall(platform, request, by_row=scales.shape[-2] > 1), codes, scales)


def max_magnitudes(source: Format, depth: int | None, scale: ScaleRequest | None, platform: str, codes: Array) -> Array:
    """Returns the max magnitudes of groups along K, or their scales, by a platform's kernel: f32 codes [..., R, groups].

    Args:
        source: Format of the codes.
        depth: Elements of a group; None: all.
        scale: Request for the scale of each; None: for the max magnitude.
        platform: A key of `KERNELS` that has a kernel for them.
        codes: Codes of x [..., R, K], K not 0.
    """
    return call_batched(ElementwiseCall(platform, MagnitudeRequest(source, EVERY if depth is None else depth, scale)), codes)


def multiply_f32(platform: str, x: Array, y: Array) -> Array:
    """x * y, rounded to nearest once: f32 codes, which broadcast against each other."""
    return _call_on_words(platform, ElementwiseRequest(F32, F32, False, 1, multiplied=True), x, y)


def divide_f32(platform: str, x: Array, y: Array) -> Array:
    """x / y, rounded to nearest once: f32 codes, which broadcast against each other."""
    return _call_on_words(platform, ElementwiseRequest(F32, F32, False, 1), x, y)


def multiply_codes(source: Format, target: Format, platform: str, x: Array, y: Array) -> Array:
    """x * y, rounded to nearest in f32 and then in the target, saturated.

    Args:
        source: Format of x: e4m3, or one of an `ElementwiseRequest`.
        target: Format of the result.
        platform: A key of `KERNELS` that finds scales.
        x: Codes of the source.
        y: f32 codes; both broadcast against each other.
    """
    return _call_on_words(platform, ElementwiseRequest(source, target, True, 1, multiplied=True), x, y)


def narrow(target: Format, platform: str, x: Array) -> Array:
    """f32 codes as those of a signed float format, rounded to nearest; what is out of range becomes the largest finite value."""
    matrix = x.reshape((1,) * (2 - x.ndim) + x.shape)
    return round_elements(platform, ElementwiseRequest(F32, target, True, None), matrix, None).reshape(x.shape)


def _call_on_words(platform: str, request: ElementwiseRequest, x: Array, y: Array) -> Array:
    shape = jnp.broadcast_shapes(x.shape, y.shape)
    matrix: Any = (1,) * (2 - len(shape)) + shape
    return round_elements(platform, request, jnp.broadcast_to(x, shape).reshape(matrix), y, 1).reshape(shape)
