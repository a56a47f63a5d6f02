"""The elements of quantised operands by a CUDA kernel, and sums under their scales: which quantisers it takes, and its call.

On integers, as XLA compiles them, a division and a rounding take hundreds of operations an element. The kernel has the GPU's own division,
which is that of IEEE 754. Scales are found before, by XLA: a largest magnitude is exact in any order.
"""

from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tcemu.arithmetic.kernels.launch import Entry, launch, route
from tcemu.arithmetic.kernels.source import quantizer_text
from tcemu.errors import Unsupported
from tcemu.formats import BF16, F16, F32, Format
from tcemu.native.calls import known_sizes, numbers, run
from tcemu.quantize.groups import GroupSizes, repeated

PLATFORM = "cuda"  # as `lax.platform_dependent` names it
SOURCES = (F32, F16, BF16)  # of which f32 holds every number
THREADS, PIECE = 256, 8  # of a block; elements of a thread, as in quantize.cu
MOST = 1 << 31  # pieces of an operand, which are counted in 32 bits
EVERY = (1 << 31) - 1  # elements along K that share a scale, where all do


class Elements(NamedTuple):
    """x / scale or x * scale, rounded: a call of `calls.run`, which gives codes of the target [batch, R, K].

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
    def shared(self) -> tuple[bool, ...]:
        return (False,) if self.depth is None else (False, True)

    def __call__(self, codes: Array, *scales: Array) -> Array:
        batch, rows, k = codes.shape
        result = jax.ShapeDtypeStruct(codes.shape, self.target.dtype)
        if codes.size == 0:
            return jnp.zeros(result.shape, result.dtype)
        text = quantizer_text(self.source, self.target, self.saturate, bool(scales), self.multiplied)
        shape = numbers(batch * rows, rows, k, *(scales[0].shape if scales else (1, 1, 1)), self.depth or 1)
        return launch(Entry("quantize", text, THREADS), -(-_pieces(codes.shape) // THREADS), result, shape, codes, *scales)[0]


def _pieces(shape: tuple[int, ...]) -> int:
    return prod(shape[:-1]) * -(-shape[-1] // PIECE)


def missing(source: Format, target: Format, rounding: str, codes: Array, *, scaled: bool) -> str:
    """Why the kernel does not round codes of one format to another; "" if it does. scaled: they are divided first."""
    if source not in SOURCES or (source == target and not scaled):
        return f"{source} to {target} is no rounding of f32 numbers"
    float_of_both_signs = not target.is_integer and target.signed and target.subnormals
    if not float_of_both_signs or target.mantissa_bits >= F32.mantissa_bits or not F32.holds(target):
        return f"{target} is no signed float format narrower than f32"
    if rounding != "RN":
        return f"it rounds to nearest, not {rounding}"
    return missing_here(codes)


def missing_here(codes: Array) -> str:
    """Why no kernel can run on these; "" if one can."""
    try:
        known_sizes(codes)
    except Unsupported as error:
        return str(error)
    if codes.ndim < 2 or _pieces(codes.shape) >= MOST:
        return f"the operand's shape is {list(codes.shape)}"
    return route().missing


def elements(source: Format, target: Format, saturate: bool, sizes: GroupSizes, codes: Array, scales: Array | None) -> Array:
    """x / scale, in f32 and then in the target, each rounded to nearest once: codes of the target [..., R, K].

    codes: of x [..., R, K]; scales: f32 codes, as `groups.spread` takes them; None: there are none. sizes: how many share one.
    """
    if scales is None:
        *batch, rows, k = codes.shape
        return run(Elements(source, target, saturate, None), codes.reshape(prod(batch), rows, k)).reshape(codes.shape)
    return _under_scales(Elements(source, target, saturate, sizes.depth), sizes, codes, scales)


def product(x: Array, scales: Array) -> Array:
    """x * scale, rounded to nearest once: f32 codes [..., R, K]; scales: f32 codes, as what broadcasts to them."""
    return _under_scales(Elements(F32, F32, False, 1, multiplied=True), GroupSizes(1, 1), x, scales)


def _under_scales(call: Elements, sizes: GroupSizes, codes: Array, scales: Array) -> Array:
    *batch, rows, k = codes.shape
    scales = scales.reshape((1,) * (2 - scales.ndim) + scales.shape)
    if sizes.rows is not None and sizes.rows > 1:
        scales = repeated(scales, sizes.rows, rows, -2)  # few bytes; then a mesh may cut the rows
    *own, of_rows, groups = scales.shape
    own = own if prod(own) == 1 else batch
    scales = jnp.broadcast_to(scales, (*own, of_rows, groups)).reshape(prod(own), of_rows, groups)
    call = call._replace(depth=EVERY if groups == 1 or sizes.depth is None else sizes.depth, by_row=of_rows > 1)
    return run(call, codes.reshape(prod(batch), rows, k), scales).reshape(codes.shape)
