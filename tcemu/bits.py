"""Unsigned integers of any width on uint32 arrays, so that 64 and 128 bits need no x64 mode.

`Limbs` is a tuple of equally shaped uint32 arrays, least significant first. Widths are static; nothing here branches on values.
XLA defines a logical shift by the width or more as 0, and the code below relies on it.
"""

import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

Limbs = tuple[Array, ...]

WORD = 32


def zeros_like(x: Limbs) -> Limbs:
    return tuple(jnp.zeros_like(limb) for limb in x)


def extend(x: Limbs, count: int) -> Limbs:
    """The same integer in `count` limbs."""
    return x + (jnp.zeros_like(x[0]),) * (count - len(x))


def is_zero(x: Limbs) -> Array:
    """bool: no bit is set."""
    any_bit = x[0]
    for limb in x[1:]:
        any_bit = any_bit | limb
    return any_bit == 0


def select(condition: Array, x: Limbs, y: Limbs) -> Limbs:
    """x where the condition holds, else y."""
    return tuple(jnp.where(condition, a, b) for a, b in zip(x, y, strict=True))


def less(x: Limbs, y: Limbs) -> Array:
    """bool: x < y."""
    result = x[0] < y[0]
    for a, b in zip(x[1:], y[1:], strict=True):
        result = (a < b) | ((a == b) & result)
    return result


def add(x: Limbs, y: Limbs) -> Limbs:
    """x + y modulo the width."""
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
    """-x modulo the width."""
    one = (jnp.ones_like(x[0]), *zeros_like(x[1:]))
    return add(tuple(~limb for limb in x), one)


def subtract(x: Limbs, y: Limbs) -> Limbs:
    """x - y modulo the width."""
    return add(x, negate(y))


def multiply_words(x: Array, y: Array) -> Limbs:
    """The 64-bit product of two uint32 arrays, in two limbs, from 16-bit halves."""
    half = jnp.uint32(0xFFFF)
    x0, x1, y0, y1 = x & half, x >> 16, y & half, y >> 16
    low, mid1, mid2, high = x0 * y0, x0 * y1, x1 * y0, x1 * y1
    middle = (low >> 16) + (mid1 & half) + (mid2 & half)
    return (low & half) | (middle << 16), high + (mid1 >> 16) + (mid2 >> 16) + (middle >> 16)


def multiply(x: Limbs, y: Limbs) -> Limbs:
    """The full product, in len(x) + len(y) limbs."""
    width = len(x) + len(y)
    zero = jnp.zeros(jnp.broadcast_shapes(x[0].shape, y[0].shape), jnp.uint32)
    total = (zero,) * width
    for i, a in enumerate(x):
        for j, b in enumerate(y):
            low, high = multiply_words(a, b)
            total = add(total, (zero,) * (i + j) + (low, high) + (zero,) * (width - i - j - 2))
    return total


def leading_zeros(x: Limbs) -> Array:
    """int32: zero bits above the highest set bit; the whole width for zero."""
    count = lax.clz(x[0]).astype(jnp.int32)
    for limb in x[1:]:
        count = jnp.where(limb == 0, count + WORD, lax.clz(limb).astype(jnp.int32))
    return count


def _by_words(x: Limbs, words: Array, step: int) -> Limbs:
    """x moved by `words` whole limbs, upward (step 1) or downward (step -1)."""
    moved = []
    for i in range(len(x)):
        limb = jnp.zeros_like(x[0])
        for w in range(len(x)):
            if 0 <= i - step * w < len(x):
                limb = jnp.where(words == w, x[i - step * w], limb)
        moved.append(limb)
    return tuple(moved)


def shift_left(x: Limbs, count: ArrayLike) -> Limbs:
    """x << count modulo the width; count: int32 >= 0, any size."""
    count = jnp.asarray(count).astype(jnp.uint32)
    if len(x) == 1:
        return (x[0] << count,)
    x = _by_words(x, count >> 5, 1)
    bit = count & 31
    return tuple((x[i] << bit) | (x[i - 1] >> (WORD - bit) if i else 0) for i in range(len(x)))


def shift_right(x: Limbs, count: ArrayLike) -> Limbs:
    """x >> count; count: int32 >= 0, any size."""
    count = jnp.asarray(count).astype(jnp.uint32)
    if len(x) == 1:
        return (x[0] >> count,)
    x = _by_words(x, count >> 5, -1)
    bit = count & 31
    return tuple((x[i] >> bit) | (x[i + 1] << (WORD - bit) if i + 1 < len(x) else 0) for i in range(len(x)))


def shift_right_jam(x: Limbs, count: ArrayLike) -> Limbs:
    """x >> count with bit 0 set if any bit was lost: enough for every later rounding decision above bit 1."""
    shifted = shift_right(x, count)
    lost = ~is_zero(tuple(a ^ b for a, b in zip(shift_left(shifted, count), x, strict=True)))
    return (shifted[0] | lost, *shifted[1:])


def narrow_jam(x: Limbs, count: int) -> Limbs:
    """The top `count` limbs of x, with bit 0 set if any bit below was."""
    dropped, kept = x[: len(x) - count], x[len(x) - count :]
    return (kept[0] | ~is_zero(dropped), *kept[1:]) if dropped else kept
