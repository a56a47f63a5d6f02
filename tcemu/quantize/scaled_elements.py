"""Elements divided by their scales and rounded to a narrow format: by the kernel `cuda/quantize.cu`, or on any device.

Scales are found before, by XLA: a max magnitude is exact in any order.
"""

from collections.abc import Callable
from typing import Any

from jax import Array

from tcemu.backends.cuda import elementwise
from tcemu.backends.cuda.elementwise import ElementwiseCall
from tcemu.base.compilation import call_by_platform
from tcemu.formats import BF16, F16, F32, Format
from tcemu.quantize.scale_groups import GroupSizes, repeat_scales

SOURCES = (F32, F16, BF16)  # formats whose numbers f32 can represent


def round_by_platform(reason: str, kernel: Callable[..., Array], portable: Callable[..., Array], *operands: Any) -> Array:
    """Calls the kernel on NVIDIA GPUs and `portable` elsewhere; always `portable` if there is a reason against the kernel."""
    return portable(*operands) if reason else call_by_platform({elementwise.PLATFORM: kernel}, portable, *operands)


def unsupported_reason(source: Format, target: Format, rounding: str, codes: Array, *, scaled: bool) -> str:
    """Returns the reason why the kernel does not round codes of one format to another; "" if it does. scaled: with a division first."""
    if source not in SOURCES or (source == target and not scaled):
        return f"{source} to {target} is no rounding of f32 numbers"
    float_of_both_signs = not target.is_integer and target.signed and target.subnormals
    if not float_of_both_signs or target.mantissa_bits >= F32.mantissa_bits or not F32.can_represent(target):
        return f"{target} is no signed float format narrower than f32"
    if rounding != "RN":
        return f"it rounds to nearest, not {rounding}"
    return elementwise.unavailable_reason(codes) or ("" if codes.ndim >= 2 else f"the operand's shape is {list(codes.shape)}")


def round_with_kernel(
    source: Format,
    target: Format,
    saturate: bool,
    sizes: GroupSizes,
    codes: Array,
    scales: Array | None,
    *,
    multiplied: bool = False,
) -> Array:
    """Rounds x / scale to nearest, in f32 and then in the target: codes of the target [..., R, K].

    Args:
        source: Format of x.
        target: Format of the result.
        saturate: Values out of range become the largest finite value.
        sizes: Elements that share a scale.
        codes: Codes of x [..., R, K].
        scales: f32 codes, as `scale_groups.broadcast_scales` takes them, or None.
        multiplied: Compute x * scale instead.
    """
    if scales is not None and sizes.rows is not None and sizes.rows > 1:  # few bytes; a mesh may then shard the rows
        scales = repeat_scales(scales, sizes.rows, codes.shape[-2], -2)
    return elementwise.round_elements(ElementwiseCall(source, target, saturate, None, multiplied=multiplied), codes, scales, sizes.depth)
