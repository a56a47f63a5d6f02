"""Which quantisers the kernel `cuda/quantize.cu` takes, and how their scales go into it.

Scales are found before, by XLA: a largest magnitude is exact in any order.
"""

from jax import Array

from tcemu.arithmetic.kernels import elementwise
from tcemu.arithmetic.kernels.elementwise import Elements
from tcemu.formats import BF16, F16, F32, Format
from tcemu.quantize.groups import GroupSizes, repeated

SOURCES = (F32, F16, BF16)  # of which f32 holds every number


def missing(source: Format, target: Format, rounding: str, codes: Array, *, scaled: bool) -> str:
    """Why the kernel does not round codes of one format to another; "" if it does. scaled: they are divided first."""
    if source not in SOURCES or (source == target and not scaled):
        return f"{source} to {target} is no rounding of f32 numbers"
    float_of_both_signs = not target.is_integer and target.signed and target.subnormals
    if not float_of_both_signs or target.mantissa_bits >= F32.mantissa_bits or not F32.holds(target):
        return f"{target} is no signed float format narrower than f32"
    if rounding != "RN":
        return f"it rounds to nearest, not {rounding}"
    return elementwise.missing(codes) or ("" if codes.ndim >= 2 else f"the operand's shape is {list(codes.shape)}")


def elements(source: Format, target: Format, saturate: bool, sizes: GroupSizes, codes: Array, scales: Array | None) -> Array:
    """x / scale, in f32 and then in the target, each rounded to nearest once: codes of the target [..., R, K].

    codes: of x [..., R, K]; scales: f32 codes, as `groups.spread` takes them; None: there are none. sizes: how many share one.
    """
    if scales is not None and sizes.rows is not None and sizes.rows > 1:  # few bytes; then a mesh may cut the rows
        scales = repeated(scales, sizes.rows, codes.shape[-2], -2)
    return elementwise.rounded(Elements(source, target, saturate, None), codes, scales, sizes.depth)
