"""`attention`: scaled dot-product attention whose two products go by recipes, in the plain form or in FlashAttention's blocks."""

from __future__ import annotations

from math import isfinite, prod, sqrt
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.errors import Unsupported
from tcemu.base.meshes import shard_like
from tcemu.operations.products.attention.attention_backward import attention_with_residual
from tcemu.operations.products.attention.flash_blocks import AttentionOperands, AttentionSettings, Flash
from tcemu.operations.products.product_arguments import as_jax_array, check_float_dtype, float_array
from tcemu.operations.products.recipes import Recipe, resolve_recipe

IMPLEMENTATIONS = (None, "xla", "cudnn")


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    recipe: Recipe | str | tuple[Recipe | str, Recipe | str],
    flash: Flash | None = ...,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    implementation: str | None = ...,
    return_residual: Literal[False] = ...,
    dtype: DTypeLike | None = ...,
    random_key: PRNGKey | None = ...,
) -> Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    recipe: Recipe | str | tuple[Recipe | str, Recipe | str],
    flash: Flash | None = ...,
    scale: float | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int, int] | None = ...,
    implementation: str | None = ...,
    return_residual: Literal[True],
    dtype: DTypeLike | None = ...,
    random_key: PRNGKey | None = ...,
) -> tuple[Array, Array]: ...


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    recipe: Recipe | str | tuple[Recipe | str, Recipe | str],
    flash: Flash | None = Flash(),  # noqa: B008
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    dtype: DTypeLike | None = None,
    random_key: PRNGKey | None = None,
) -> Array | tuple[Array, Array]:
    """Compute softmax(scale·Q·Kᵀ + bias)·V with both products by recipes: a replacement of `jax.nn.dot_product_attention`.

    Every operation is specified and rounded, so that all devices give the same bits: see docs/concepts/attention.md. A row that sees no key
    gives 0, as in FlashAttention; JAX gives the mean of V. Memory grows with T times a block of keys; the program does not grow with S.

    Gradients flow to query, key, value and bias, in reverse mode, once: dP = g·Vᵀ, dV = Pᵀ·g, dQ = dS·K and dK = dSᵀ·Q, block of keys by
    block. The recipes' gradient recipes, dA and dB, compute these products, or plain f32 does, as `backward` says. Quantisation counts
    as identity.

    Args:
        query: Floats [..., T, N, H]. N is a multiple of K: N / K neighbouring heads of the queries share a head of the keys.
        key: Floats [..., S, K, H], with the same batch axes.
        value: Floats [..., S, K, H of V], with the same batch axes.
        bias: Floats that are added to the scaled scores; broadcasts to [..., N, T, S].
        mask: Booleans, True where a query sees a key; broadcasts to [..., N, T, S].
        recipe: A recipe or its name for both products, or a pair, for Q·Kᵀ and P·V. Q and P are the A of their products. Scores and the
            result are rounded to the recipe's `dtype`.
        flash: A `tcemu.products.Flash`: block by block with an online softmax. None: the plain form, all scores of a row at once, P divided
            by its sum before its cast and scaled as the recipe says, as if each product were a `matmul`.
        scale: Positive number; None: 1 / sqrt(H).
        is_causal: Query i sees the keys 0 to i.
        query_seq_lengths: Number of valid queries, integers of the batch axes' shape.
        key_value_seq_lengths: Number of valid keys, integers of the batch axes' shape.
        local_window_size: Keys that a query sees to its left and right, or one number for both.
        implementation: Accepted as in `jax.nn`; has no effect.
        return_residual: Also return ln of each row's sum of exponentials.
        dtype: Float dtype of the result; None: the query's.
        random_key: JAX random key for the signs of a Hadamard rotation and for rounding "SR". (`key` is an operand.)

    Returns:
        Array [..., T, N, H of V]; with return_residual also f32 [..., T, N].

    Raises:
        TypeError: an argument holds values of another kind.
        ValueError: shapes do not fit, blocks do not fit the recipe, a name is unknown, or a key is missing.
        Unsupported: a recipe is sparse, or dequantises an operand before the instruction.
    """
    qk, pv = _resolve_recipes(recipe, random_key)
    for one in (qk, pv):
        if one.op.sparse or one.a.element is not None or one.b.element is not None:
            raise Unsupported(
                f"recipe {one.name or str(one.op)!r}: attention has no sparse operand and dequantises none before the instruction; take a "
                "dense recipe whose quantisers have no element="
            )
    if flash is not None and not isinstance(flash, Flash):
        raise TypeError(f"flash: got {type(flash).__name__}; expected a tcemu.products.Flash, or None for the plain form")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={implementation!r}: expected one of {IMPLEMENTATIONS}, as in jax.nn")
    values = float_array("query", query), float_array("key", key), float_array("value", value)
    shape = _attention_shape(*(x.shape for x in values))
    if flash is not None:
        flash.check_recipes(qk, pv)
        _check_rotation(flash, shape.width, random_key)
    rotated = flash is not None and flash.hadamard
    to_odd = [scheme.rounds_once and not (rotated and i < 2) for i, scheme in enumerate((*qk.schemes, pv.schemes[1]))]
    q, k, v = (as_jax_array(x, round_to_odd=odd) for x, odd in zip(values, to_odd, strict=True))
    arrays = AttentionOperands(
        qk, pv, q, k, v,
        bias=None if bias is None else as_jax_array(float_array("bias", bias)).astype(jnp.float32),
        mask=_check_mask(mask),
        lengths=(
            _check_lengths("query_seq_lengths", query_seq_lengths, shape), _check_lengths("key_value_seq_lengths", key_value_seq_lengths,
            shape)
        ),
        key=random_key,
    )  # fmt: skip
    for name, x in (("bias", arrays.bias), ("mask", arrays.mask)):
        _check_broadcasts(name, x, shape)
    settings = AttentionSettings(
        flash=flash, scale=_check_softmax_scale(scale, shape.width), causal=bool(is_causal), window=_check_window(local_window_size),
        queries=shape.queries, keys=shape.keys, dtype=check_float_dtype(q.dtype if dtype is None else dtype),
    )  # fmt: skip
    out, residual = shard_like(lambda given: (given.q, given.q[..., 0]), lambda given: _compute(settings, shape, given), arrays)
    return (out, residual) if return_residual else out


class _AttentionShape(NamedTuple):
    """The sizes of a call."""

    batch: tuple[int, ...]
    queries: int  # T
    keys: int  # S
    heads: int  # N
    key_heads: int  # K
    width: int  # H

    @property
    def scores(self) -> tuple[int, ...]:
        return (*self.batch, self.heads, self.queries, self.keys)


def _compute(settings: AttentionSettings, shape: _AttentionShape, given: AttentionOperands) -> tuple[Array, Array]:
    batch, groups = prod(shape.batch), shape.heads // max(1, shape.key_heads)
    q = given.q.reshape(batch, shape.queries, shape.key_heads, groups, shape.width)
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, shape.key_heads, groups * shape.queries, shape.width)
    k, v = (jnp.swapaxes(x.reshape(batch, *x.shape[-3:]), 1, 2) for x in (given.k, given.v))
    if settings.flash is not None and settings.flash.hadamard:
        assert given.key is not None
        signs = jax.random.bernoulli(jax.random.fold_in(given.key, 1), shape=(shape.width,))
        q, k = hadamard_rotate(q, signs), hadamard_rotate(k, signs)
    spread = lambda x: None if x is None else _broadcast_to_groups(x, shape)
    lengths = tuple(None if x is None else jnp.broadcast_to(x, shape.batch).reshape(batch) for x in given.lengths)
    key = given.key if given.qk.is_stochastic or given.pv.is_stochastic else None
    operands = given._replace(
        q=q, k=k, v=v, bias=spread(given.bias), mask=spread(given.mask), lengths=(lengths[0], lengths[1]),
        key=None if key is None else jax.random.fold_in(key, 0),
    )  # fmt: skip
    out, residual = attention_with_residual(settings, operands)
    out = out.reshape(batch, shape.key_heads, groups, shape.queries, v.shape[-1]).transpose(0, 3, 1, 2, 4)
    residual = residual.reshape(batch, shape.heads, shape.queries).swapaxes(1, 2)
    leading = (*shape.batch, shape.queries, shape.heads)
    return out.reshape(*leading, v.shape[-1]), residual.reshape(leading)


def hadamard_rotate(x: Array, signs: Array) -> Array:
    """Multiplies x [..., H] by a Hadamard matrix whose rows have random signs, over sqrt(H), in f32.

    The steps are sums and differences of pairs, log2 H times. The rotation is orthogonal except for the roundings of these sums and of the
    last product. signs: bool [H].
    """
    width = x.shape[-1]
    x = jnp.where(signs, -x.astype(jnp.float32), x.astype(jnp.float32))
    size = 1
    while size < width:
        pairs = x.reshape(*x.shape[:-1], width // (2 * size), 2, size)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x = jnp.stack([low + high, low - high], axis=-2).reshape(x.shape)
        size *= 2
    return x * np.float32(1 / sqrt(width))


def _broadcast_to_groups(x: Array, shape: _AttentionShape) -> Array:
    """Reshapes an array that broadcasts to [..., N, T, S] to [B or 1, K or 1, groups or 1, T or 1, S]."""
    expected = len(shape.scores)
    x = x.reshape(x.shape[-expected:]) if x.ndim > expected else x.reshape((1,) * (expected - x.ndim) + x.shape)
    *batch, heads, queries, _ = x.shape
    if any(size != 1 for size in batch):
        x = jnp.broadcast_to(x, (*shape.batch, *x.shape[-3:]))
    x = x.reshape(-1, *x.shape[-3:]) if batch else x[None]
    groups = shape.heads // max(1, shape.key_heads)
    x = x.reshape(x.shape[0], *((1, 1) if heads == 1 else (shape.key_heads, groups)), queries, x.shape[-1])
    return jnp.broadcast_to(x, (*x.shape[:-1], shape.keys))


def _resolve_recipes(recipe: Any, key: PRNGKey | None) -> tuple[Recipe, Recipe]:
    pair = recipe if isinstance(recipe, tuple | list) else (recipe, recipe)
    if len(pair) != 2:
        raise ValueError(f"recipe: got {len(pair)} recipes; expected one, or a pair for Q·Kᵀ and P·V")
    try:
        qk, pv = (resolve_recipe(one, key) for one in pair)
    except ValueError as error:
        raise type(error)(str(error).replace("give key=", "give random_key=")) from None
    if any(one.hadamard is not None for two in (qk, pv) for one in (two.a, two.b)):
        raise ValueError("recipe: it transforms its operands (Quantizer.hadamard); in attention Flash(hadamard=True) rotates Q and K")
    return qk, pv


def _attention_shape(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> _AttentionShape:
    for name, shape, expected in (("query", q, "[..., T, N, H]"), ("key", k, "[..., S, K, H]"), ("value", v, "[..., S, K, H of V]")):
        if len(shape) < 3:
            raise ValueError(f"{name}: got shape {list(shape)}; expected {expected}: positions, heads, features")
    if q[:-3] != k[:-3] or k[:-1] != v[:-1] or q[-1] != k[-1]:
        raise ValueError(
            f"query is [..., T, N, H] = {list(q)}, key [..., S, K, H] = {list(k)} and value [..., S, K, H of V] = {list(v)}: expected the "
            "same batch axes, the same S and K in key and value, and the same H in query and key"
        )
    heads, key_heads = q[-2], k[-2]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"query has {heads} heads and key {key_heads}: expected a multiple, so that all heads of the keys serve as many queries"
        )
    return _AttentionShape(batch=q[:-3], queries=q[-3], keys=k[-3], heads=heads, key_heads=key_heads, width=q[-1])


def _check_softmax_scale(scale: Any, width: int) -> float:
    if scale is None:
        return 1 / sqrt(max(1, width))
    if isinstance(scale, bool | Tracer) or not isinstance(scale, int | float | np.number) or not (isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale!r}: expected a positive number, known before tracing; scale the query by any other number")
    return float(scale)


def _check_window(window: Any) -> tuple[int, int] | None:
    if window is None:
        return None
    pair = (window, window) if isinstance(window, int | np.integer) else tuple(window)
    if len(pair) != 2 or not all(isinstance(size, int | np.integer) and size >= 0 for size in pair):
        raise ValueError(f"local_window_size={window!r}: expected a number of keys, 0 or more, or a pair, to the left and to the right")
    return int(pair[0]), int(pair[1])


def _check_rotation(flash: Flash, width: int, key: PRNGKey | None) -> None:
    if flash.hadamard and (width < 1 or width & (width - 1)):
        raise ValueError(
            f"Flash(hadamard=True): H is {width}; expected a power of two, for which a Hadamard matrix consists of sums and differences"
        )
    if flash.hadamard and key is None:
        raise ValueError("Flash(hadamard=True): its signs are random: pass random_key= (a jax.random key)")


def _check_mask(mask: ArrayLike | None) -> Array | None:
    if mask is None:
        return None
    array = jnp.asarray(mask)
    if array.dtype != bool:
        raise TypeError(f"mask: got {array.dtype}{list(array.shape)}; expected bool, True where a query sees a key; a bias is added")
    return array


def _check_lengths(name: str, lengths: ArrayLike | None, shape: _AttentionShape) -> Array | None:
    if lengths is None:
        return None
    array = jnp.asarray(lengths)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: got {array.dtype}{list(array.shape)}; expected integers")
    if array.shape not in (shape.batch, (1,) * (not shape.batch)):
        raise ValueError(f"{name}: got shape {list(array.shape)}; expected that of the batch axes, {list(shape.batch)}")
    return array.astype(jnp.int32).reshape(shape.batch)


def _check_broadcasts(name: str, x: Array | None, shape: _AttentionShape) -> None:
    if x is None:
        return
    own = x.shape
    while len(own) > len(shape.scores) and own[0] == 1:  # as jax.nn has four axes also where nothing else has a batch
        own = own[1:]
    try:
        fits = jnp.broadcast_shapes(own, shape.scores) == shape.scores
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name}: got shape {list(x.shape)}; expected one that broadcasts to [..., N, T, S] = {list(shape.scores)}")
