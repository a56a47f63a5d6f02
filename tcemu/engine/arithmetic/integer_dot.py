"""Integer and single-bit dot products, exact.

Source: PTX ISA 9.7.14.5.14 (`.satfinite`, `.popc`). The manual does not say after how many products `.satfinite` clamps: that is
`Model.clamp_step`, with its evidence in `tcemu.engine.architectures.model_rows`.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array, lax

from tcemu.base.meshes import match_varying_axes
from tcemu.engine.formats.coding import decode
from tcemu.engine.formats.number_formats import Format

BLOCK = 256  # products in one float dot: 256 * 255 * 255 < 2^24


def decode_integers(fmt: Format, codes: Array) -> Array:
    """Decodes codes of a format of at most 8 bits into f32 values."""
    number = decode(fmt, codes)
    magnitude = number.magnitude[0].astype(jnp.int32)
    return jnp.where(number.negative, -magnitude, magnitude).astype(jnp.float32)


def min_value(fmt: Format) -> int:
    """Returns -128 or 0, a lower bound of the format's values."""
    return -128 if fmt.signed else 0


def integer_dot(a: Array, b: Array, lowest: tuple[int, int] = (-128, -128)) -> Array:
    """Returns int32 [..., M, N]: a [..., M, K] times b [..., K, N], f32 integers of at most 8 bits, summed modulo 2^32.

    lowest: the least value of either's format, -128 or 0.
    """
    return lax.platform_dependent(a, b, cuda=partial(_by_bytes, lowest), default=_by_floats)


def _by_bytes(lowest: tuple[int, int], a: Array, b: Array) -> Array:
    """The machine's own dot of signed bytes: exact modulo 2^32. Unsigned ones are moved down by 128, whose part is linear."""
    down, up = (low + 128 for low in lowest)
    x, y = (a - down).astype(jnp.int8), (b - up).astype(jnp.int8)
    total = jnp.matmul(x, y, preferred_element_type=jnp.int32)
    if up:
        total = total + up * jnp.sum(x, axis=-1, keepdims=True, dtype=jnp.int32)
    if down:
        total = total + down * (jnp.sum(y, axis=-2, keepdims=True, dtype=jnp.int32) + up * a.shape[-1])
    return total


def _by_floats(a: Array, b: Array) -> Array:
    """The machine's own f32 dot in blocks of K, exact in any order, with or without FMA, and in every precision mode.

    The operands fit the eight significant bits of bf16, and all partial sums of a block are integers below 2^24.
    """
    k = a.shape[-1]
    pad = -k % min(BLOCK, max(k, 1))
    a, b = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, pad)]), jnp.pad(b, [(0, 0)] * (b.ndim - 2) + [(0, pad), (0, 0)])
    blocks = max(1, a.shape[-1] // BLOCK)
    a = jnp.moveaxis(a.reshape(*a.shape[:-1], blocks, -1), -2, 0)
    b = jnp.moveaxis(b.reshape(*b.shape[:-2], blocks, -1, b.shape[-1]), -3, 0)
    total = jnp.zeros((*jnp.broadcast_shapes(a.shape[1:-2], b.shape[1:-2]), a.shape[-2], b.shape[-1]), jnp.int32)
    total, a, b = match_varying_axes(total, a, b)

    def add_block(total: Array, block: tuple[Array, Array]) -> tuple[Array, None]:
        return total + jnp.matmul(*block, precision=lax.Precision.HIGHEST).astype(jnp.int32), None

    return lax.scan(add_block, total, (a, b))[0]


def add_clamped(c: Array, s: Array) -> Array:
    """Returns the exact c + s clamped to the s32 range; int32 in and out."""
    total = c + s
    overflow = ((c ^ total) & (s ^ total)) < 0
    return jnp.where(overflow, jnp.where(c < 0, jnp.int32(-(2**31)), jnp.int32(2**31 - 1)), total)


def dot_add_clamped(c: Array, a: Array, b: Array, lowest: tuple[int, int], k: int, step: int) -> Array:
    """Returns int32 [..., M, N]: c plus a [..., M, K] times b [..., K, N], clamped to the s32 range after every `step` products.

    k: products of one instruction, which divides K. The last step of an instruction may be shorter.
    """

    def split(v: Array, at: int) -> Array:
        """Splits K, the axis `at`, into steps, which become the first axis."""
        v = v.reshape(*v.shape[:at], -1, k, *v.shape[at + 1 :])
        v = jnp.pad(v, [(0, -k % step if axis == at + 1 else 0) for axis in range(v.ndim)])
        return jnp.moveaxis(v.reshape(*v.shape[:at], -1, step, *v.shape[at + 2 :]), at, 0)

    def add_step(total: Array, products: tuple[Array, Array]) -> tuple[Array, None]:
        return add_clamped(total, integer_dot(*products, lowest)), None

    return lax.scan(add_step, c, (split(a, a.ndim - 1), split(b, b.ndim - 2)))[0]


def xor_popcount(a: Array, b: Array) -> Array:
    """Returns int32 [..., M, N]: set bits of row XOR column, |a| + |b| - 2 |a AND b|; a [..., M, K] and b [..., K, N] hold 0.0 and 1.0."""
    count = lambda x, axis: jnp.sum(x.astype(jnp.int32), axis=axis, keepdims=True)
    return count(a, -1) + count(b, -2) - 2 * integer_dot(a, b)
