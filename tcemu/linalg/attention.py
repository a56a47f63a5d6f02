"""`attention`: scaled dot-product attention whose two products go by recipes, whole or in blocks as FlashAttention computes it."""

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

from tcemu.formats import ARRAY_FORMATS
from tcemu.linalg.arguments import floats, given_recipe, in_jax
from tcemu.linalg.attention_blocks import Operands, Settings
from tcemu.linalg.attention_gradients import out_and_residual
from tcemu.linalg.flash import Flash
from tcemu.linalg.recipes import Recipe
from tcemu.meshes import with_axes_of

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
    flash: Flash | None = Flash(),  # noqa: B008  frozen
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
    """softmax(scale·Q·Kᵀ + bias)·V, both products as recipes state them: in place of `jax.nn.dot_product_attention`, with its arguments.

    query: [..., T, N, H]; key: [..., S, K, H]; value: [..., S, K, H of V]; floats of any dtype, the same batch axes. N is a multiple of K:
    N / K neighbouring heads of the queries share a head of the keys.
    bias: floats that are added to the scaled scores; mask: bool, True where a query sees a key; both broadcast to [..., N, T, S].
    recipe: of both products, or a pair, of Q·Kᵀ and of P·V; Q and P are the A of their products. Scores, and the result, are rounded to
    its `out`.
    flash: a `tcemu.Flash`, block by block with an online softmax; None: the plain form, all scores of a row at once, P divided by its sum
    before its cast and scaled as the recipe says, as if each product were a `matmul`.
    scale: a positive number; None: 1 / sqrt(H). is_causal: query i sees the keys 0 to i. query_seq_lengths, key_value_seq_lengths: how many
    count, integers of the batch axes' shape. local_window_size: how many keys a query sees to its left and right, or a number for both.
    implementation: has no effect. return_residual: ln of each row's sum of exponentials too, f32 [..., T, N].
    dtype: of the result; None: the query's. random_key: a jax.random key, for the signs of a Hadamard rotation and for rounding "SR".

    Every operation is stated and rounded as such, so that all devices give the same bits: see docs/howto/attention.md. A row that sees no
    key gives 0, as FlashAttention has it; JAX has the mean of V. Memory grows with T times a block of keys, the program not with S.
    Gradients flow to query, key, value and bias, in reverse mode, once: dP = g·Vᵀ, dV = Pᵀ·g, dQ = dS·K and dK = dSᵀ·Q, block of keys by
    block, go by the recipes' own for gradients, dA and dB, or in plain f32, as `backward` says. Quantisation counts as identity.
    Raises TypeError or ValueError for arrays of another kind or shape, a name that is no recipe's, where blocks do not fit the recipe and
    where a key is missing.
    """
    call = _Call(
        query, key, value, bias, mask, recipe, flash, scale, is_causal, (query_seq_lengths, key_value_seq_lengths), local_window_size,
        implementation, dtype, random_key,
    )  # fmt: skip
    out, residual = call.computed()
    return (out, residual) if return_residual else out


class _Call(NamedTuple):
    """What came."""

    query: ArrayLike
    key: ArrayLike
    value: ArrayLike
    bias: ArrayLike | None
    mask: ArrayLike | None
    recipe: Any
    flash: Flash | None
    scale: float | None
    is_causal: bool
    lengths: tuple[ArrayLike | None, ArrayLike | None]
    window: Any
    implementation: str | None
    dtype: DTypeLike | None
    random_key: PRNGKey | None

    def computed(self) -> tuple[Array, Array]:
        """The result and the residual. Raises for what does not fit."""
        flash, (qk, pv) = self.flash, _recipes(self.recipe, self.random_key)
        if flash is not None and not isinstance(flash, Flash):
            raise TypeError(f"flash: got {type(flash).__name__}; wanted a tcemu.Flash, or None for the plain form")
        if self.implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation={self.implementation!r}: wanted one of {IMPLEMENTATIONS}, as in jax.nn")
        values = floats("query", self.query), floats("key", self.key), floats("value", self.value)
        shape = _shape(*(x.shape for x in values))
        if flash is not None:
            flash.check(qk, pv)
            _check_rotation(flash, shape.width, self.random_key)
        rotated = flash is not None and flash.hadamard
        once = [scheme.rounds_once and not (rotated and at < 2) for at, scheme in enumerate((*qk.schemes, pv.schemes[1]))]
        q, k, v = (in_jax(x, once=one) for x, one in zip(values, once, strict=True))
        given = _Given(
            q, k, v,
            bias=None if self.bias is None else in_jax(floats("bias", self.bias)).astype(jnp.float32),
            mask=_mask(self.mask),
            lengths=(_lengths("query_seq_lengths", self.lengths[0], shape), _lengths("key_value_seq_lengths", self.lengths[1], shape)),
            random_key=self.random_key,
            recipes=(qk, pv),
        )  # fmt: skip
        for name, x in (("bias", given.bias), ("mask", given.mask)):
            _check_broadcasts(name, x, shape)
        settings = Settings(
            flash=flash, scale=_scale(self.scale, shape.width), causal=bool(self.is_causal), window=_window(self.window),
            queries=shape.queries, keys=shape.keys, dtype=_dtype(self.dtype, q),
        )  # fmt: skip
        return with_axes_of(lambda given: (given.q, given.q[..., 0]), lambda given: _computed(settings, shape, given), given)


class _Shape(NamedTuple):
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


class _Given(NamedTuple):
    """What came, as JAX's arrays."""

    q: Array
    k: Array
    v: Array
    bias: Array | None
    mask: Array | None
    lengths: tuple[Array | None, Array | None]
    random_key: PRNGKey | None
    recipes: tuple[Recipe, Recipe]


def _computed(settings: Settings, shape: _Shape, given: _Given) -> tuple[Array, Array]:
    batch, groups = prod(shape.batch), shape.heads // max(1, shape.key_heads)
    q = given.q.reshape(batch, shape.queries, shape.key_heads, groups, shape.width)
    q = q.transpose(0, 2, 3, 1, 4).reshape(batch, shape.key_heads, groups * shape.queries, shape.width)
    k, v = (jnp.swapaxes(x.reshape(batch, *x.shape[-3:]), 1, 2) for x in (given.k, given.v))
    if settings.flash is not None and settings.flash.hadamard:
        assert given.random_key is not None
        signs = jax.random.bernoulli(jax.random.fold_in(given.random_key, 1), shape=(shape.width,))
        q, k = rotated(q, signs), rotated(k, signs)
    spread = lambda x: None if x is None else _by_groups(x, shape)  # noqa: E731
    lengths = tuple(None if x is None else jnp.broadcast_to(x, shape.batch).reshape(batch) for x in given.lengths)
    key = given.random_key if any(recipe.stochastic for recipe in given.recipes) else None
    operands = Operands(
        *given.recipes, q=q, k=k, v=v, bias=spread(given.bias), mask=spread(given.mask), lengths=(lengths[0], lengths[1]),
        key=None if key is None else jax.random.fold_in(key, 0),
    )  # fmt: skip
    out, residual = out_and_residual(settings, operands)
    out = out.reshape(batch, shape.key_heads, groups, shape.queries, v.shape[-1]).transpose(0, 3, 1, 2, 4)
    residual = residual.reshape(batch, shape.heads, shape.queries).swapaxes(1, 2)
    leading = (*shape.batch, shape.queries, shape.heads)
    return out.reshape(*leading, v.shape[-1]), residual.reshape(leading)


def rotated(x: Array, signs: Array) -> Array:
    """x [..., H] times a Hadamard matrix whose rows have random signs, over sqrt(H), in f32: sums and differences of pairs, log2 H times.

    signs: bool [H]. The rotation is orthogonal but for the roundings of these sums and of the last product.
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


def _by_groups(x: Array, shape: _Shape) -> Array:
    """What broadcasts to [..., N, T, S], as [B or 1, K or 1, groups or 1, T or 1, S]."""
    wanted = len(shape.scores)
    x = x.reshape(x.shape[-wanted:]) if x.ndim > wanted else x.reshape((1,) * (wanted - x.ndim) + x.shape)
    *batch, heads, queries, _ = x.shape
    if any(size != 1 for size in batch):
        x = jnp.broadcast_to(x, (*shape.batch, *x.shape[-3:]))
    x = x.reshape(-1, *x.shape[-3:]) if batch else x[None]
    groups = shape.heads // max(1, shape.key_heads)
    x = x.reshape(x.shape[0], *((1, 1) if heads == 1 else (shape.key_heads, groups)), queries, x.shape[-1])
    return jnp.broadcast_to(x, (*x.shape[:-1], shape.keys))


def _recipes(recipe: Any, key: PRNGKey | None) -> tuple[Recipe, Recipe]:
    pair = recipe if isinstance(recipe, tuple | list) else (recipe, recipe)
    if len(pair) != 2:
        raise ValueError(f"recipe: got {len(pair)} recipes; wanted one, or two, of Q·Kᵀ and of P·V")
    try:
        qk, pv = (given_recipe(one, key) for one in pair)
    except ValueError as error:
        raise type(error)(str(error).replace("give key=", "give random_key=")) from None
    if any(one.hadamard is not None for two in (qk, pv) for one in (two.a, two.b)):
        raise ValueError(
            "recipe: it transforms its operands itself (Quantizer.hadamard); in attention Flash(hadamard=True) rotates Q and K"
        )
    return qk, pv


def _shape(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> _Shape:
    for name, shape, wanted in (("query", q, "[..., T, N, H]"), ("key", k, "[..., S, K, H]"), ("value", v, "[..., S, K, H of V]")):
        if len(shape) < 3:
            raise ValueError(f"{name}: got shape {list(shape)}; wanted {wanted}: places, heads, features")
    if q[:-3] != k[:-3] or k[:-1] != v[:-1] or q[-1] != k[-1]:
        raise ValueError(
            f"query is [..., T, N, H] = {list(q)}, key [..., S, K, H] = {list(k)} and value [..., S, K, H of V] = {list(v)}: wanted the "
            "same batch axes, the same S and K in key and value, and the same H in query and key"
        )
    heads, key_heads = q[-2], k[-2]
    if key_heads == 0 or heads % key_heads:
        raise ValueError(
            f"query has {heads} heads and key {key_heads}: wanted a multiple, so that as many queries share each head of the keys"
        )
    return _Shape(batch=q[:-3], queries=q[-3], keys=k[-3], heads=heads, key_heads=key_heads, width=q[-1])


def _scale(scale: Any, width: int) -> float:
    if scale is None:
        return 1 / sqrt(max(1, width))
    if isinstance(scale, bool | Tracer) or not isinstance(scale, int | float | np.number) or not (isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale!r}: wanted a positive number, known before tracing; scale the query by any other")
    return float(scale)


def _dtype(dtype: DTypeLike | None, query: Array) -> np.dtype:
    found = np.dtype(query.dtype if dtype is None else dtype)
    target = ARRAY_FORMATS.get(found)
    if target is None or target.is_integer:
        raise TypeError(f"dtype: got {found}; wanted a float dtype")
    return found


def _window(window: Any) -> tuple[int, int] | None:
    if window is None:
        return None
    pair = (window, window) if isinstance(window, int | np.integer) else tuple(window)
    if len(pair) != 2 or not all(isinstance(size, int | np.integer) and size >= 0 for size in pair):
        raise ValueError(f"local_window_size={window!r}: wanted a number of keys, 0 or more, or a pair, to the left and to the right")
    return int(pair[0]), int(pair[1])


def _check_rotation(flash: Flash, width: int, key: PRNGKey | None) -> None:
    if flash.hadamard and (width < 1 or width & (width - 1)):
        raise ValueError(f"Flash(hadamard=True): H is {width}; wanted a power of two, of which there are Hadamard matrices of sums alone")
    if flash.hadamard and key is None:
        raise ValueError("Flash(hadamard=True): its signs are random: give random_key= (a jax.random key)")


def _mask(mask: ArrayLike | None) -> Array | None:
    if mask is None:
        return None
    array = jnp.asarray(mask)
    if array.dtype != bool:
        raise TypeError(f"mask: got {array.dtype}{list(array.shape)}; wanted bool, True where a query sees a key; what is added is a bias")
    return array


def _lengths(name: str, lengths: ArrayLike | None, shape: _Shape) -> Array | None:
    if lengths is None:
        return None
    array = jnp.asarray(lengths)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name}: got {array.dtype}{list(array.shape)}; wanted integers")
    if array.shape not in (shape.batch, (1,) * (not shape.batch)):
        raise ValueError(f"{name}: got shape {list(array.shape)}; wanted that of the batch axes, {list(shape.batch)}")
    return array.astype(jnp.int32).reshape(shape.batch)


def _check_broadcasts(name: str, x: Array | None, shape: _Shape) -> None:
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
        raise ValueError(f"{name}: got shape {list(x.shape)}; wanted one that broadcasts to [..., N, T, S] = {list(shape.scores)}")
