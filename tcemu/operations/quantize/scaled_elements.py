"""Elements divided by their scales and rounded to a narrow format: by a kernel, where the device has one, or by JAX's operations.

Scales are found before, from max magnitudes, which are exact in any order.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.base.compilation import call_kernel_by_platform
from tcemu.engine.backends import elementwise
from tcemu.engine.backends.elementwise_request import ElementwiseRequest, ScaleRequest
from tcemu.engine.backends.quotients import divide
from tcemu.engine.formats.coding import convert, rounds_from_f32
from tcemu.engine.formats.number_formats import BF16, F16, F32, Format
from tcemu.operations.quantize.scale_groups import GroupSizes, max_along_rows, repeat_scales, split_groups

SOURCES = (F32, F16, BF16)  # formats whose numbers f32 can represent
FEW = 1 << 15  # elements of which one thread finds the maximum
MAGNITUDE = np.uint32((1 << 31) - 1)
ONE = np.float32(1).view(np.uint32)


def round_by_platform(reason: str, by_kernel: Callable[..., Array], portable: Callable[..., Array], codes: Array, *operands: Any) -> Array:
    """Calls `by_kernel`, with the platform before the operands, where there is a kernel, else `portable`.

    reason: one against kernels. operands: the scales first; None where there are none.
    """
    programs = {} if reason else elementwise.kernel_programs(by_kernel, codes, is_cast=operands[0] is None)
    return call_kernel_by_platform(programs, portable, codes, *operands)


def unsupported_reason(source: Format, target: Format, rounding: str, codes: Array, *, scaled: bool) -> str:
    """Returns the reason why kernels do not round codes of one format to another; "" if they do. scaled: with a division first."""
    if source not in SOURCES or (source == target and not scaled):
        return f"{source} to {target} is no rounding of f32 numbers"
    if not target.signed or target.mantissa_bits >= F32.mantissa_bits or not rounds_from_f32(F32, target):
        return f"{target} is no signed float format narrower than f32"
    if rounding != "RN":
        return f"it rounds to nearest, not {rounding}"
    return "" if codes.ndim >= 2 else f"the operand's shape is {list(codes.shape)}"


def max_magnitudes(source: Format, codes: Array, depth: int | None, scale: ScaleRequest | None = None) -> Array:
    """Returns the max magnitude of each group of neighbours along K, f32 codes without sign [..., R, groups].

    Args:
        source: Format of x.
        codes: Codes of x [..., R, K].
        depth: Elements of a group; None: all.
        scale: Return the scales of the magnitudes instead.
    """

    def portable(codes: Array) -> Array:
        magnitudes = f32_codes(source, codes) & MAGNITUDE
        found = max_along_rows(split_groups(magnitudes, depth or max(1, magnitudes.shape[-1]), -1))
        return found if scale is None else _scales_on_any_device(scale, found)

    has_kernel = source in SOURCES and codes.ndim >= 2 and codes.shape[-1] != 0
    by_kernel = partial(elementwise.max_magnitudes, source, depth, scale)
    return call_kernel_by_platform(elementwise.kernel_programs(by_kernel, codes, of_scales=True) if has_kernel else {}, portable, codes)


def max_of_all(source: Format, codes: Array, scale: ScaleRequest | None = None) -> Array:
    """Returns the max magnitude of all elements, or its scale, an f32 code: [1, 1]."""
    if codes.size == 0:
        source, codes = F32, jnp.zeros((1, 1), F32.dtype)
    if source not in SOURCES:
        source, codes = F32, f32_codes(source, codes)
    rows = codes if codes.size <= FEW else max_magnitudes(source, codes, None)
    return max_magnitudes(source if rows is codes else F32, rows.reshape(1, rows.size), None, scale)


def scales_of_magnitudes(scale: ScaleRequest, magnitudes: Array) -> Array:
    """Returns the scales of max magnitudes, f32 codes of any shape."""
    return max_magnitudes(F32, magnitudes.reshape(1, magnitudes.size), 1, scale).reshape(magnitudes.shape)


def _scales_on_any_device(request: ScaleRequest, magnitudes: Array) -> Array:
    scale = jnp.maximum(divide(magnitudes, np.uint32(request.largest), F32), np.uint32(request.least))
    if request.power_of_two:
        up = (scale + ((1 << F32.mantissa_bits) - 1)) >> F32.mantissa_bits << F32.mantissa_bits
        scale = jnp.where(scale >= F32.infinity, scale, up)
    return jnp.where(magnitudes == 0, ONE, scale)


def f32_codes(source: Format, codes: Array) -> Array:
    """Converts codes to f32. A NaN may keep its payload, which is not used."""
    if source == F32:
        return codes
    if source == BF16:
        return codes.astype(jnp.uint32) << (F32.bits - BF16.bits)
    return convert(source, F32, codes)


def round_with_kernel(
    source: Format,
    target: Format,
    saturate: bool,
    sizes: GroupSizes,
    platform: str,
    codes: Array,
    scales: Array | None,
    *,
    multiplied: bool = False,
    scale: Format = F32,
) -> Array:
    """Rounds x / scale to nearest, in f32 and then in the target: codes of the target [..., R, K].

    Args:
        source: Format of x.
        target: Format of the result.
        saturate: Values out of range become the largest finite value.
        sizes: Elements that share a scale.
        platform: The platform whose kernel rounds.
        codes: Codes of x [..., R, K].
        scales: Codes, as `scale_groups.broadcast_scales` takes them, or None.
        multiplied: Compute x * scale instead.
        scale: Format of the scales, f32 or ue8m0.
    """
    if scales is not None and sizes.rows is not None and sizes.rows > 1:  # few bytes; a mesh may then shard the rows
        scales = repeat_scales(scales, sizes.rows, codes.shape[-2], -2)
    request = ElementwiseRequest(source, target, saturate, None, multiplied=multiplied, scale=scale)
    return elementwise.round_elements(platform, request, codes, scales, sizes.depth)
