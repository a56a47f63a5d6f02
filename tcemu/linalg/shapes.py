"""Shapes of a product: what D's is, and K filled up to whole instructions."""

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.arithmetic.model import Signature

Shape = tuple[int, ...]
Pair = tuple[Array, Array]  # of A and of B


def shape_of_product(a: Shape, b: Shape, addend: Shape | None = None, *, names: tuple[str, str, str] = ("a", "b", "c")) -> Shape:
    """The shape [..., M, N] of D = A·B + addend, of the shapes [..., M, K] and [..., K, N] and one that broadcasts to D's.

    names: those of the arguments, for the errors. All sizes but K may be symbols of `jax.export`. Raises ValueError where they do not fit.
    """
    for name, shape, wanted in ((names[0], a, "[..., M, K]"), (names[1], b, "[..., K, N]")):
        if len(shape) < 2:
            raise ValueError(f"{name}: got shape {list(shape)}; wanted a matrix, {wanted}, with any batch axes in front")
    left, right = names[:2]
    for name, k in ((left, a[-1]), (right, b[-2])):
        if not isinstance(k, int):
            raise ValueError(
                f"{name}: K is {k}, a symbol of jax.export, and its steps must be known before tracing; export with K as a number (M, N "
                'and batch axes may be symbols). In a gradient, M of the product is the K of dB: a recipe with backward="exact" takes it so'
            )
    if a[-1] != b[-2]:
        hint = f"; {right} transposed would fit" if a[-1] == b[-1] else ""
        raise ValueError(
            f"{left} is [..., M, K] = {list(a)} and {right} is [..., K, N] = {list(b)}: K is {a[-1]} in {left} and {b[-2]} in {right}; "
            f"they must be equal{hint}"
        )
    try:
        d = (*jnp.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])
    except ValueError:
        raise ValueError(f"the batch axes of {left}, {list(a[:-2])}, and of {right}, {list(b[:-2])}, do not broadcast") from None
    if addend is not None and not broadcasts(addend, d):
        raise ValueError(f"{names[2]}: got shape {list(addend)}; wanted one that broadcasts to D, [..., M, N] = {list(d)}")
    return d


def broadcasts(shape: Shape, to: Shape) -> bool:
    try:
        return jnp.broadcast_shapes(shape, to) == to
    except ValueError:
        return False


def fill(signature: Signature, a: Array, b: Array, multiple: int) -> Pair:
    """A and B with K filled up to a multiple of `multiple`, whole instructions: A with -0 (integers: 0) and B with 0.

    That changes no bit. In a fused step a zero product takes part neither in the largest exponent nor in the sum. A step of zeros alone
    rounds a value that already is of the result's format, +0 included (a step never leaves -0 behind). (A what-if that keeps fewer fraction
    bits than its result cuts the running value there, once, as an instruction of zeros does.) A rounded addition of the product
    -0 returns the other operand, -0 included, in RN, the mode of every chain of multiply-adds. Integer zeros add nothing.
    """
    missing = -(a.shape[-1] if signature.a.words == 1 else a.shape[-2]) % multiple
    if missing == 0:
        return a, b
    words = [(0, 0)] * (signature.a.words - 1)  # the axis of a 64-bit code's words
    filling = 0 if signature.a.is_integer else 1 << (signature.a.bits - 1)
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1 - len(words)) + [(0, missing), *words], constant_values=np.array(filling, signature.a.dtype))
    return a, jnp.pad(b, [(0, 0)] * (b.ndim - 2 - len(words)) + [(0, missing), (0, 0), *words])


def fill_scales(signature: Signature, scales: Pair, multiple: int) -> Pair:
    """The scales of the instruction's blocks, filled up with ones to those of K as a multiple of `multiple`, whole instructions."""
    assert signature.scale is not None
    missing = -scales[0].shape[-1] % (multiple // signature.k * signature.scale_vec)
    return fill_along_k(scales, missing, signature.scale.bias << signature.scale.mantissa_bits)


def fill_along_k(pair: Pair, missing: int, value: int) -> Pair:
    """[..., M, K] and [..., K, N] with `missing` more places along K, each `value`."""
    a, b = pair
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, missing)], constant_values=value)
    return a, jnp.pad(b, [(0, 0)] * (b.ndim - 2) + [(0, missing), (0, 0)], constant_values=value)
