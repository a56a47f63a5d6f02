"""One product through a model's arithmetic: raw codes in, raw codes out.

`multiply_add` brings the operands to the formats that the model multiplies and hands them to a backend. Which model a target uses is a row
of `tcemu.architectures`. Who reads a Model: this file and what it calls (`order`, `walk`, `dot_add`, `grouped`, the kernels), which compute
by it; `explanation.steps`, on purpose a second time and apart; and texts and studies, which compute no results.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.checkify import debug_check
from jax.typing import ArrayLike

from tcemu.arithmetic import backends, integer
from tcemu.arithmetic.fitting import fitted
from tcemu.arithmetic.model import Model, Promotion, Scales, Signature, within_limits
from tcemu.executing import NATIVE
from tcemu.formats import Format, limbs_code
from tcemu.formats.coding import recoded
from tcemu.meshes import alike

Tree = TypeVar("Tree")
Pair = tuple[Array, Array]


def multiply_add(model: Model, signature: Signature, a: ArrayLike, b: ArrayLike, c: ArrayLike, scales: Scales | None = None) -> Array:
    """D = A·B + C on raw codes.

    a: [..., M, K]; b: [..., K, N]; c: [..., M, N]; leading axes broadcast; f64 codes have a trailing axis of two words.
    K is a multiple of `signature.k`, not 0 (any number but 0 for a model with fraction_bits=None and no chain).
    scales: codes of `signature.scale`, [..., M, S] for A and [..., S, N] for B, each for K / S products along K; None if there are none.
    Returns codes of `signature.d`, [..., M, N].
    """
    a, b, c = jnp.asarray(a), jnp.asarray(b), jnp.asarray(c)
    words = (2,) * (signature.a.words - 1)
    (*a_batch, m, _), (*b_batch, _, n), (*c_batch, _, _) = (v.shape[: v.ndim - len(words)] for v in (a, b, c))
    batch = jnp.broadcast_shapes(tuple(a_batch), tuple(b_batch), tuple(c_batch), *(jnp.shape(v)[:-2] for v in scales or ()))
    c = jnp.broadcast_to(c, (*batch, m, n, *words))
    if c.size == 0:
        return jnp.zeros(c.shape, signature.d.dtype)
    model, (a, b, c), scales = _alike((model, (a, b, c), scales))
    emulated = partial(_emulated, model, signature._replace(native=None), scales)
    return emulated(a, b, c) if signature.native is None else signature.native.product(emulated, model, signature, (a, b, c))


def _emulated(model: Model, signature: Signature, scales: Scales | None, a: Array, b: Array, c: Array) -> Array:
    """C has every batch axis."""
    if model.result.is_integer:
        return _integer_product(signature, a, b, c)
    held, (model, signature) = (signature.a, signature.b), _as_multiplied(model, signature, a.shape[-1], scales)
    c = recoded(signature.c, model.result, c)
    model, inside = within_limits(model)
    d = backends.product(model, signature, held, a, b, c, scales)
    return d if inside is None else _nan_unless(inside, signature.d, d)


def _as_multiplied(model: Model, signature: Signature, k: int, scales: Scales | None) -> tuple[Model, Signature]:
    """The model as the instruction uses it, and the signature with the formats of A and B that it multiplies."""
    model = fitted(model, signature, None if scales is None else k // jnp.shape(scales[0])[-1])
    if scales is None:
        signature = signature._replace(scale=None, scale_vec=0)
    return model, signature if model.common is None else signature._replace(a=model.common, b=model.common)


class Promoted(NamedTuple):
    """The operands of a product whose sums are promoted: codes as in `multiply_add`, K in whole parts."""

    a: Array
    b: Array
    scales: Pair | None
    block_scales: Pair | None  # f32 codes [..., groups of M, parts] and [..., parts, groups of N]


def promoted(model: Model, signature: Signature, promotion: Promotion, operands: Promoted, otherwise: Callable[[Promoted], Array]) -> Array:
    """f32 codes [..., M, N]: A·B as the sum of promoted parts.

    otherwise: the same by `multiply_add`, for the platforms of which no backend promotes.
    """
    model, operands = _alike((model, operands))
    native = signature.native
    by_unit = None
    if native is not None and operands.scales is None:
        by_unit = native.promoted(model, signature, promotion, operands.a, operands.b)
    if native is not None and native.choice == NATIVE:
        return otherwise(operands) if by_unit is None else by_unit(operands)  # otherwise each part is computed natively
    programs = _promoting(model, signature._replace(native=None), promotion, operands) if by_unit is None else {"cuda": by_unit}
    return backends.by_platform(programs, otherwise, operands)


def _promoting(model: Model, signature: Signature, promotion: Promotion, operands: Promoted) -> dict[str, Callable[[Promoted], Array]]:
    """The backends that promote, by platform."""
    held, (own, multiplied) = (signature.a, signature.b), _as_multiplied(model, signature, operands.a.shape[-1], operands.scales)
    batch = jnp.broadcast_shapes(*(v.shape[:-2] for v in jax.tree.leaves(operands)))

    def by(program: backends.Program) -> Callable[[Promoted], Array]:
        def call(operands: Promoted) -> Array:
            a, b = operands.a, operands.b
            zeros, scales = jnp.zeros((*batch, a.shape[-2], b.shape[-1]), jnp.uint32), operands.block_scales
            if scales is not None:
                assert promotion.reach is not None
                (rows, columns), (of_a, of_b) = promotion.reach, scales
                scales = _for_each(of_a, rows, a.shape[-2], -2), _for_each(of_b, columns, b.shape[-1], -1)
            return program(a, b, zeros, operands.scales, scales)

        return call

    return {platform: by(program) for platform, (_, program) in backends.chosen(own, multiplied, promotion, held).items()}


def _for_each(scales: Array, reach: int | None, length: int, axis: int) -> Array:
    """A scale for each row or column; reach: how many share one, None: all."""
    return lax.slice_in_dim(jnp.repeat(scales, reach or length, axis), 0, length, axis=axis)


def _alike(arrays: Tree) -> Tree:
    """The same, all arrays varying over the same axes of a mesh."""
    leaves, tree = jax.tree.flatten(arrays)
    return jax.tree.unflatten(tree, alike(*map(jnp.asarray, leaves)))


def _nan_unless(inside: Array, fmt: Format, d: Array) -> Array:
    """NaN where a traced field of the model is outside its limits, so that no number comes of it; an error in checked mode."""
    debug_check(inside, "a traced field of the model is outside its limits, which tcemu.Model states")
    nan = limbs_code(fmt, tuple(jnp.asarray(fmt.nan >> 32 * word & 0xFFFFFFFF, jnp.uint32) for word in range(fmt.words)))
    return jnp.where(inside, d, nan)


def _integer_product(signature: Signature, a: Array, b: Array, c: Array) -> Array:
    """Exact sums in s32, wrapped, or clamped once an instruction."""
    x, y = integer.values(signature.a, a), integer.values(signature.b, b)
    lowest = integer.lowest(signature.a), integer.lowest(signature.b)
    total = c.astype(jnp.int32)
    if signature.bit_op == "xor":
        return (total + integer.xor_popcount(x, y)).astype(jnp.uint32)
    if not signature.clamp:
        return (total + integer.dot(x, y, lowest)).astype(jnp.uint32)
    x = jnp.moveaxis(x.reshape(*x.shape[:-1], -1, signature.k), -2, 0)
    y = jnp.moveaxis(y.reshape(*y.shape[:-2], -1, signature.k, y.shape[-1]), -3, 0)
    step = lambda t, xy: (integer.clamping_add(t, integer.dot(xy[0], xy[1], lowest)), None)  # noqa: E731
    return lax.scan(step, total, (x, y))[0].astype(jnp.uint32)
