"""Unsigned integers of any width on uint32 arrays, so that 64 and 128 bits need no x64 mode.

`Limbs` is a tuple of equally shaped uint32 arrays, least significant first. Widths are static; nothing here branches on values.
XLA defines a logical shift by the width or more as 0, and the code below relies on it.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

Limbs = tuple[Array, ...]

LIMB_BITS = 32


def zeros_like(x: Limbs) -> Limbs:
    """Return zero in as many limbs as x, with the same shapes."""
    return tuple(jnp.zeros_like(limb) for limb in x)


def extend(x: Limbs, count: int) -> Limbs:
    """Zero-extend an integer to `count` limbs.

    Args:
        x: Unsigned integer of at most `count` limbs.
        count: Number of limbs of the result.

    Returns:
        The same integer, with zero limbs appended.
    """
    return x + (jnp.zeros_like(x[0]),) * (count - len(x))


def is_zero(x: Limbs) -> Array:
    """Return whether no bit of x is set, as a bool array."""
    any_bit = x[0]
    for limb in x[1:]:
        any_bit = any_bit | limb
    return any_bit == 0


def select(condition: Array, x: Limbs, y: Limbs) -> Limbs:
    """Return x where the condition holds, else y. Both have equally many limbs."""
    return tuple(jnp.where(condition, a, b) for a, b in zip(x, y, strict=True))


def less(x: Limbs, y: Limbs) -> Array:
    """Return x < y as a bool array. Both have equally many limbs."""
    result = x[0] < y[0]
    for a, b in zip(x[1:], y[1:], strict=True):
        result = (a < b) | ((a == b) & result)
    return result


def add(x: Limbs, y: Limbs) -> Limbs:
    """Return x + y modulo the width. Both have equally many limbs."""
    total, carry = [], None
    for a, b in zip(x, y, strict=True):
        s = a + b
        carried = s < a
        if carry is not None:
            s = s + carry
            carried = carried | (s < carry)
        total.append(s)
        carry = carried.astype(jnp.uint32)
    return tuple(total)


def negate(x: Limbs) -> Limbs:
    """Return -x modulo the width."""
    unit = (jnp.ones_like(x[0]), *zeros_like(x[1:]))
    return add(tuple(~limb for limb in x), unit)


def subtract(x: Limbs, y: Limbs) -> Limbs:
    """Return x - y modulo the width. Both have equally many limbs."""
    return add(x, negate(y))


def add_signed(x_negative: Array, x: Limbs, y_negative: Array, y: Limbs) -> tuple[Array, Limbs]:
    """Add two integers in sign and magnitude, modulo the width.

    Args:
        x_negative: Bool array, the sign of x.
        x: Magnitude.
        y_negative: Bool array, the sign of y.
        y: Magnitude, with as many limbs as x.

    Returns:
        Sign and magnitude of the sum. A zero difference has the sign of x.
    """
    same, smaller = x_negative == y_negative, less(x, y)
    difference = select(smaller, subtract(y, x), subtract(x, y))
    return jnp.where(same | ~smaller, x_negative, y_negative), select(same, add(x, y), difference)


def sum_along(x: Limbs, axis: int) -> Limbs:
    """Return the sum along an axis of at most 65,536 elements, modulo the width."""
    total, carry = [], jnp.uint32(0)
    for half in (half for limb in x for half in (limb & 0xFFFF, limb >> 16)):
        s = jnp.sum(half, axis, dtype=jnp.uint32) + carry
        total.append(s & 0xFFFF)
        carry = s >> 16
    return tuple(low | high << 16 for low, high in zip(total[::2], total[1::2], strict=True))


def multiply_words(x: Array, y: Array) -> Limbs:
    """Return the 64-bit product of two uint32 arrays in two limbs, computed from 16-bit halves."""
    half = jnp.uint32(0xFFFF)
    x0, x1, y0, y1 = x & half, x >> 16, y & half, y >> 16
    low, mid1, mid2, high = x0 * y0, x0 * y1, x1 * y0, x1 * y1
    middle = (low >> 16) + (mid1 & half) + (mid2 & half)
    return (low & half) | (middle << 16), high + (mid1 >> 16) + (mid2 >> 16) + (middle >> 16)


def multiply(x: Limbs, y: Limbs) -> Limbs:
    """Return the full product in len(x) + len(y) limbs. The shapes broadcast."""
    width = len(x) + len(y)
    zero = jnp.zeros(jnp.broadcast_shapes(x[0].shape, y[0].shape), jnp.uint32)
    total = (zero,) * width
    for i, a in enumerate(x):
        for j, b in enumerate(y):
            low, high = multiply_words(a, b)
            total = add(total, (zero,) * (i + j) + (low, high) + (zero,) * (width - i - j - 2))
    return total


def leading_zeros(x: Limbs) -> Array:
    """Return the number of zero bits above the highest set bit, as int32. Zero has as many as its width."""
    count = lax.clz(x[0]).astype(jnp.int32)
    for limb in x[1:]:
        count = jnp.where(limb == 0, count + LIMB_BITS, lax.clz(limb).astype(jnp.int32))
    return count


def _shift_limbs(x: Limbs, words: Array, direction: int) -> Limbs:
    """Shift x by `words` limbs, upward (direction 1) or downward (direction -1)."""
    shifted = []
    for i in range(len(x)):
        limb = jnp.zeros_like(x[0])
        for w in range(len(x)):
            if 0 <= i - direction * w < len(x):
                limb = jnp.where(words == w, x[i - direction * w], limb)
        shifted.append(limb)
    return tuple(shifted)


def shift_left(x: Limbs, count: ArrayLike) -> Limbs:
    """Shift left, modulo the width.

    Args:
        x: Unsigned integer.
        count: Bits, int32 >= 0. A count of the width or more gives 0.

    Returns:
        x << count, in as many limbs as x.
    """
    count = jnp.asarray(count).astype(jnp.uint32)
    if len(x) == 1:
        return (x[0] << count,)
    x = _shift_limbs(x, count >> 5, 1)
    bit = count & 31
    return tuple((x[i] << bit) | (x[i - 1] >> (LIMB_BITS - bit) if i else 0) for i in range(len(x)))


def shift_right(x: Limbs, count: ArrayLike) -> Limbs:
    """Shift right.

    Args:
        x: Unsigned integer.
        count: Bits, int32 >= 0. A count of the width or more gives 0.

    Returns:
        x >> count, in as many limbs as x.
    """
    count = jnp.asarray(count).astype(jnp.uint32)
    if len(x) == 1:
        return (x[0] >> count,)
    x = _shift_limbs(x, count >> 5, -1)
    bit = count & 31
    return tuple((x[i] >> bit) | (x[i + 1] << (LIMB_BITS - bit) if i + 1 < len(x) else 0) for i in range(len(x)))


def shift_right_jam(x: Limbs, count: ArrayLike) -> Limbs:
    """Shift right and keep a sticky bit, which suffices for every later rounding decision above bit 1.

    Args:
        x: Unsigned integer.
        count: Bits, int32 >= 0. A count of the width or more leaves only the sticky bit.

    Returns:
        x >> count, with bit 0 set if any set bit was shifted out.
    """
    shifted = shift_right(x, count)
    lost = ~is_zero(tuple(a ^ b for a, b in zip(shift_left(shifted, count), x, strict=True)))
    return (shifted[0] | lost, *shifted[1:])


def narrow_jam(x: Limbs, count: int) -> Limbs:
    """Return the top `count` limbs of x, with bit 0 set if any bit of the dropped limbs is set."""
    dropped, top = x[: len(x) - count], x[len(x) - count :]
    return (top[0] | ~is_zero(dropped), *top[1:]) if dropped else top
