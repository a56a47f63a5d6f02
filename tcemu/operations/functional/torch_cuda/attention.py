"""PyTorch's `scaled_dot_product_attention` on a GPU: which backend it takes, and what that backend computes, to the last bit.

Source: PyTorch 2.11.0, aten/src/ATen/native/transformers/attention.cpp (the math backend) and cuda/sdp_utils.cpp (the choice); the fused
kernels: `fused_attention.py`. Held to words of PyTorch 2.11.0 on an H200: `tests/operations/functional/torch_census.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.engine.arithmetic.special_functions import NAN
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes, to_float
from tcemu.engine.formats.number_formats import BF16, F16, F32, Format
from tcemu.operations.functional.torch_cuda.attention_backward import BackwardOperands, cutlass_backward, fused_backward
from tcemu.operations.functional.torch_cuda.device_functions import Value
from tcemu.operations.functional.torch_cuda.elementwise import given_dtype
from tcemu.operations.functional.torch_cuda.fused_attention import (
    KERNELS,
    DroppedWeights,
    FusedOperands,
    by_rows,
    fused_forward,
    fused_kernel,
)
from tcemu.operations.functional.torch_cuda.random_numbers import AttentionDropout, attention_mask
from tcemu.operations.functional.torch_cuda.reduce_plans import GPUS
from tcemu.operations.functional.torch_cuda.rows import reduce
from tcemu.operations.functional.torch_cuda.softmax import softmax, softmax_backward
from tcemu.operations.products.library.kernel_recipe import KernelRecipe, Lanes, Merge, Slices
from tcemu.operations.products.matmul import matmul

BACKENDS = (*KERNELS, "math")
CUDNN_HIDDEN = -65504.0  # what PyTorch adds for a hidden key before cuDNN, in bf16 too: seen in records of an H200

# ---- the choice


class AttentionCall(NamedTuple):
    """The facts on which PyTorch's choice of a backend depends.

    Attributes:
        query: Shape of the queries, [batch, heads, queries, size].
        key: Shape of the keys.
        value_size: Head size of the values.
        dtype: Of the operands.
        causal: `is_causal`.
        has_mask: An `attn_mask` is given.
        gpu: A key of `reduce_plans.GPUS`.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value_size: int
    dtype: DTypeLike
    causal: bool = False
    has_mask: bool = False
    gpu: str = "H200"

    @property
    def is_narrow(self) -> bool:
        return jnp.dtype(self.dtype) in (jnp.bfloat16, jnp.float16)


class Condition(NamedTuple):
    """A condition of a backend, and the function of sdp_utils.cpp that checks it."""

    holds: Callable[[AttentionCall], bool]
    said: str
    source: str


_SIZES = Condition(lambda c: c.query[-2] > 0 and c.key[-2] > 0, "sequences are not empty", "check_nonzero_sequence_lengths_dense")
_NARROW = Condition(lambda c: c.is_narrow, "the dtype is bfloat16 or float16", "check_dtypes_low_precision")
# in the order in which PyTorch tries them on compute capability 9.x and 10.x with cuDNN 9.15.1 or newer: priority_order
CHOICES: dict[str, tuple[Condition, ...]] = {
    "cudnn": (
        _NARROW,
        _SIZES,
        Condition(lambda c: max(c.query[-1], c.value_size) <= 256, "head sizes are at most 256", "check_cudnn_tensor_shapes"),
        Condition(lambda c: c.query[-1] % 8 == c.value_size % 8 == 0, "head sizes are multiples of 8", "check_cudnn_tensor_shapes"),
        Condition(lambda c: c.key[-2] != 1, "there is more than one key", "check_cudnn_tensor_shapes"),
    ),
    "flash": (
        _NARROW,
        _SIZES,
        Condition(lambda c: not c.has_mask, "there is no mask", "check_for_attn_mask"),
        Condition(lambda c: c.query[-1] == c.value_size <= 256, "head sizes are equal and at most 256", "check_head_dim_size_flash"),
        Condition(lambda c: not c.causal or c.query[-2] == c.key[-2], "causal queries and keys are equally many",
                  "check_flash_causal_non_square_seqlens"),
    ),
    "efficient": (
        _SIZES,
        Condition(lambda c: c.query[-1] % _alignment(c) == c.value_size % _alignment(c) == 0, "head sizes are multiples of 16 bytes",
                  "check_head_dim_size_mem_efficient"),
        Condition(lambda c: c.query[1] == c.key[1], "queries and keys have the same heads", "check_batch_size_and_num_heads_dense"),
    ),
    "math": (),
}  # fmt: skip


def _alignment(call: AttentionCall) -> int:
    return 8 if call.is_narrow else 4


def choose_backend(call: AttentionCall) -> str:
    """Return the backend that PyTorch 2.11 takes by default, a key of CHOICES.

    Args:
        call: The call. Its GPU decides the order in which backends are tried.

    Raises:
        NotModelled: The GPU is another one.

    Source: sdp_utils.cpp, select_sdp_backend, without dropout and nested tensors; each condition names its function.
    """
    if call.gpu not in GPUS:
        raise NotModelled(f"gpu={call.gpu!r}: the order of backends is known on {', '.join(GPUS)} (torch_cuda/attention.py, CHOICES)")
    return next(name for name, conditions in CHOICES.items() if all(condition.holds(call) for condition in conditions))


# ---- the forward


def attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    backend: str,
    causal: bool = False,
    bias: ArrayLike | None = None,
    scale: float | None = None,
    gpu: str = "H200",
    multiply: Multiply | None = None,
    dropout: AttentionDropout | None = None,
) -> tuple[Array, Array]:
    """Compute `scaled_dot_product_attention` as one of PyTorch's backends does.

    Args:
        q: bfloat16 or float16 [batch, heads, queries, size].
        k: [batch, key heads, keys, size]; heads is a multiple of key heads.
        v: [batch, key heads, keys, size of a value].
        backend: "cudnn", "flash", "efficient" or "math"; `choose_backend` says which PyTorch takes.
        causal: A query sees the keys up to its own number.
        bias: Added to the scaled scores, or booleans, of which False hides a key. It broadcasts to [batch, heads, queries, keys].
        scale: Factor of the scores; None: 1 / sqrt(size).
        gpu: "H100" or "H200".
        multiply: Of "math" with one head in all, which PyTorch computes by products of matrices: computes A·B of f32 matrices, given
            transposed_a and transposed_b as `tcemu.uses.replay.torch_products.matmul`. With more heads cuBLAS's batched product is a chain.
        dropout: Dropout of the weights, of "flash" and "efficient".

    Returns:
        The result, [batch, heads, queries, size of a value] in q's dtype, and the log-sum-exps, f32 [batch, heads, queries], which are
        natural logarithms, NaN where their rounding is not known, as with one query by "cudnn"; of "math" the f32 weights, [batch, heads,
        queries, keys], from which PyTorch computes its gradients.

    Raises:
        NotModelled: The kernel of this call is not known.
        Unsupported: The backend does not take the call.
        ValueError: Shapes do not fit.

    Source: as the modules of `torch_cuda` say; words of an H200 that agree: the census in tests/operations/functional.
    """
    call = _bind(backend, q, k, v, causal=causal, bias=bias, scale=scale, gpu=gpu)
    return _math(call, _product(call, multiply)) if backend == "math" and dropout is None else _fused(call, dropout)


OPEN_ORDERS = ("raise", "lockstep")


def attention_backward(
    grad: ArrayLike,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    out: ArrayLike,
    logsumexp: ArrayLike,
    *,
    backend: str,
    causal: bool = False,
    bias: ArrayLike | None = None,
    scale: float | None = None,
    gpu: str = "H200",
    multiply: Multiply | None = None,
    open_order: str = "raise",
    dropout: AttentionDropout | None = None,
) -> tuple[Array, Array, Array]:
    """Compute the gradients of `attention` as one of PyTorch's backends does.

    Args:
        grad: Gradient of the result, in its shape and dtype.
        q: As in `attention`.
        k: As in `attention`.
        v: As in `attention`.
        out: The result of `attention`.
        logsumexp: Its second result.
        backend: As in `attention`.
        causal: As in `attention`.
        bias: As in `attention`.
        scale: As in `attention`.
        gpu: As in `attention`.
        multiply: As in `attention`.
        open_order: What to do where the GPU's atomics leave the order of a sum open: "raise", or "lockstep", by which blocks of keys
            are added as if all ran at the same pace: one of the results that the GPU may give.
        dropout: Dropout of the forward's weights, of "flash".

    Returns:
        The gradients of q, k and v, in their shapes and dtype.

    Raises:
        NotModelled: The backward of this call is not known, or its order is open.
        Unsupported: The backend does not take the call.
        ValueError: Shapes do not fit.
    """
    if open_order not in OPEN_ORDERS:
        raise ValueError(f"open_order={open_order!r}: expected one of {', '.join(OPEN_ORDERS)}")
    call = _bind(backend, q, k, v, causal=causal, bias=bias, scale=scale, gpu=gpu)
    shapes = {"grad": jnp.shape(grad), "out": jnp.shape(out)}
    stored = (*call.q.shape[:3], call.k.shape[2]) if backend == "math" else call.q.shape[:3]
    if set(shapes.values()) != {(*call.q.shape[:3], call.v.shape[-1])} or jnp.shape(logsumexp) != stored:
        raise ValueError(
            f"attention_backward: got grad {list(shapes['grad'])}, out {list(shapes['out'])}, logsumexp {list(jnp.shape(logsumexp))}; "
            f"expected {[*call.q.shape[:3], call.v.shape[-1]]} twice, and {list(stored)}"
        )
    grad_codes, out_codes, lse_codes = (array_codes(jnp.asarray(x))[1] for x in (grad, out, logsumexp))
    operands = BackwardOperands(grad_codes, call.q, call.k, call.v, out_codes, lse_codes)
    if backend == "cudnn" and call.v.shape[-1] != call.q.shape[-1]:
        raise NotModelled("cudnn: known is the backward of equal head sizes (torch_cuda/attention.py)")
    visible = _visible_keys(call.bias) if backend == "cudnn" and call.bias is not None else None
    if dropout is not None and backend != "flash":
        raise NotModelled(f"{backend}: gradients with dropout have no rule; those of FlashAttention 2 have one (torch_cuda/attention.py)")
    in_lockstep = open_order == "lockstep"
    if backend == "math":
        found = _math_backward(call, _product(call, multiply), grad_codes, to_float(F32, lse_codes))
    elif backend == "efficient":
        found = cutlass_backward(call.fmt, operands, call.bias, call.causal, call.scale, in_lockstep=in_lockstep)
    else:
        dropped = None if dropout is None else (*_kept_weights(call, dropout), float(np.float32(1) - np.float32(dropout.probability)))
        options = {"in_lockstep": in_lockstep, "dropped": dropped, "visible": visible}
        found = fused_backward(backend, call.fmt, operands, call.causal, call.scale, **options)
    dq, dk, dv = (to_float(call.fmt, x, given_dtype(call.fmt)) for x in found)
    return dq, dk, dv


class _Call(NamedTuple):
    """A checked call."""

    backend: str
    fmt: Format
    q: Array  # codes
    k: Array
    v: Array
    bias: Array | None  # f32 codes [batch, heads, queries, keys]
    causal: bool
    scale: float
    gpu: str


def _bind(
    backend: str,
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    causal: bool,
    bias: ArrayLike | None,
    scale: float | None,
    gpu: str,
) -> _Call:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    given = {name: array_codes(x if isinstance(x, jax.Array) else np.asarray(x)) for name, x in (("q", q), ("k", k), ("v", v))}
    formats = {fmt for fmt, _ in given.values()}
    if len(formats) != 1 or not formats <= {BF16, F16}:
        raise NotModelled(f"attention: got {', '.join(f'{n} {f}' for n, (f, _) in given.items())}; known are bf16 and f16, one for all")
    codes = [codes for _, codes in given.values()]
    shapes = [x.shape for x in codes]
    (batch, heads, queries, size), key_shape, value_shape = shapes if all(len(s) == 4 for s in shapes) else _wrong_shapes(shapes)
    groups_fit = 0 not in key_shape and key_shape[:3] == value_shape[:3] and key_shape[0] == batch and heads % key_shape[1] == 0
    if not groups_fit or key_shape[-1] != size:
        _wrong_shapes(shapes)
    call = AttentionCall(shapes[0], key_shape, value_shape[-1], given_dtype(next(iter(formats))), causal, bias is not None, gpu)
    for condition in CHOICES[backend]:
        if not condition.holds(call):
            raise Unsupported(
                f"backend={backend!r}: PyTorch takes it only where {condition.said} (sdp_utils.cpp, {condition.source}); it takes "
                f"{choose_backend(call)!r} here"
            )
    if causal and bias is not None:
        raise Unsupported("causal=True and a bias: PyTorch takes one of them; give a bias that hides the later keys")
    scale = float(size**-0.5 if scale is None else scale)
    if not scale > 0:
        raise NotModelled(f"scale={scale}: known are positive scales")
    fmt, target = next(iter(formats)), (batch, heads, queries, key_shape[2])
    added = None if bias is None else _bias_codes(bias, fmt, CUDNN_HIDDEN if backend == "cudnn" else -np.inf, target)
    q_codes, k_codes, v_codes = codes
    return _Call(backend, fmt, q_codes, k_codes, v_codes, added, causal, scale, gpu)


def _wrong_shapes(shapes: list[tuple[int, ...]]) -> NoReturn:
    raise ValueError(
        f"attention: got q {list(shapes[0])}, k {list(shapes[1])}, v {list(shapes[2])}; expected [batch, heads, queries, size] and twice "
        "[batch, key heads, keys, size], with heads a multiple of key heads"
    )


def _bias_codes(bias: ArrayLike, fmt: Format, hidden: float, shape: tuple[int, ...]) -> Array:
    """Return f32 codes of a bias; of booleans 0 and `hidden` in the operands' format, as PyTorch converts a mask."""
    bias = bias if isinstance(bias, jax.Array) else np.asarray(bias)
    if bias.dtype == bool:
        bias = jnp.where(bias, jnp.float32(0), jnp.float32(hidden)).astype(given_dtype(fmt))
    own, codes = array_codes(bias)
    return jnp.broadcast_to(convert(own, F32, codes), shape)


def _visible_keys(bias: Array) -> np.ndarray:
    """Return which keys a bias lets a query see, booleans. cuDNN's backward is known for biases that do no more: it subtracts the
    log-sum-exps in an order that the words of such biases do not tell.
    """
    values = np.asarray(bias).view(np.float32)
    visible = values == 0
    if not np.all(visible | (values <= CUDNN_HIDDEN)) or not visible.any(-1).all():
        raise NotModelled(
            f"cudnn: known is the backward with a bias that is 0, or hides a key by {CUDNN_HIDDEN} or less, and hides not all keys of a "
            "query (torch_cuda/attention.py)"
        )
    return visible


def _kept_weights(call: _Call, dropout: AttentionDropout) -> tuple[np.ndarray, float]:
    """Return which weights dropout keeps, [batch, heads, queries, keys], and 1 / (1 - p) as the kernel rounds it, in f32."""
    batch, heads, queries, _ = call.q.shape
    kept = attention_mask(call.backend, dropout, (batch, heads, queries, call.k.shape[2]))
    p = np.float32(dropout.probability)
    return kept, float(np.float32(1) / (np.float32(1) - p) if call.backend == "flash" else np.float32(1.0 / (1.0 - float(p))))


def _fused(call: _Call, dropout: AttentionDropout | None = None) -> tuple[Array, Array]:
    batch, heads, queries, size = call.q.shape
    key_heads, width = call.k.shape[1], call.v.shape[-1]
    rows = heads // key_heads * queries
    # with one query FlashAttention 2 takes the heads of a group as queries, and nothing is hidden
    swapped = call.backend == "flash" and queries == 1 and dropout is None
    seen = (batch, key_heads, rows, size) if swapped else call.q.shape
    dropped = None
    if dropout is not None:
        kept, factor = _kept_weights(call, dropout)
        dropped = DroppedWeights(kept.reshape(batch * heads * queries, -1), np.array(np.float32(factor).view(np.uint32)))
    kernel = fused_kernel(call.backend, seen, call.k.shape[2], call.gpu, drops=dropped is not None)
    operands = FusedOperands(
        call.q.reshape(batch, key_heads, rows, size), call.k, call.v,
        None if call.bias is None else call.bias.reshape(batch, key_heads, rows, -1),
    )  # fmt: skip
    found = fused_forward(kernel, call.fmt, operands, queries, call.causal and not swapped, call.scale, dropped)
    out = by_rows(convert, found.out, fixed=(F32, call.fmt))
    out, logarithms = out.reshape(batch, heads, queries, width), found.logsumexp.reshape(batch, heads, queries)
    if call.backend == "cudnn" and queries == 1:
        logarithms = (
            np.full(logarithms.shape, np.float32(np.nan).view(np.uint32)) if isinstance(out, np.ndarray) else jnp.full_like(logarithms, NAN)
        )
    if isinstance(out, np.ndarray):
        return jax.device_put(out.view(given_dtype(call.fmt))), jax.device_put(np.asarray(logarithms).view(np.float32))
    return to_float(call.fmt, out, given_dtype(call.fmt)), to_float(F32, logarithms)


# ---- the math backend


Multiply = Callable[..., Array]  # of A, B, transposed_a and transposed_b


def multiply_by_chain(a: Array, b: Array, *, transposed_a: bool = False, transposed_b: bool = False) -> Array:
    """Return A·B of f32 arrays [..., M, K] and [..., K, N] by one chain of fma over K, whatever their memory orders."""
    recipe = KernelRecipe(F32, F32, F32, Lanes(), Slices.single(a.shape[-1]), Merge(start="zero"))
    return matmul(a, b, recipe=recipe)


def _product(call: _Call, multiply: Multiply | None) -> Multiply:
    """Return what computes the products of a call. Raises NotModelled for one head without `multiply`."""
    if call.q.shape[0] * call.q.shape[1] > 1:
        return multiply_by_chain
    if multiply is None:
        raise NotModelled(
            "math: got one head in all, for which PyTorch multiplies matrices by kernels that depend on their shapes; give multiply="
            "tcemu.uses.replay.torch_products.matmul (torch_cuda/attention.py)"
        )
    return lambda a, b, **orders: multiply(a[0, 0], b[0, 0], **orders)[None, None]


def _math_operands(call: _Call) -> tuple[Array, Array, Array]:
    """Return the operands in f32, of all heads: q and k are each multiplied by the square root of the scale."""
    group, root = call.q.shape[1] // call.k.shape[1], float(np.sqrt(call.scale))
    q, k, v = (Value(convert(call.fmt, F32, x)) for x in (call.q, jnp.repeat(call.k, group, 1), jnp.repeat(call.v, group, 1)))
    return _numbers(q * root), _numbers(k * root), _numbers(v)


def _numbers(value: Value) -> Array:
    return to_float(F32, value.codes)


def _turned(x: Array) -> Array:
    return jnp.swapaxes(x, -1, -2)


def _math(call: _Call, multiply: Multiply) -> tuple[Array, Array]:
    """Compute in f32; the result is rounded once."""
    q, k, v = _math_operands(call)
    scores = multiply(q, _turned(k), transposed_b=True)
    if call.causal:
        hidden = np.arange(k.shape[2])[None] > np.arange(q.shape[2])[:, None]
        scores = jnp.where(hidden, -jnp.inf, scores)
    if call.bias is not None:
        scores = _numbers(Value(array_codes(scores)[1]) + Value(call.bias))
    weights = softmax(scores)
    out = multiply(weights, v)
    return to_float(call.fmt, convert(F32, call.fmt, array_codes(out)[1]), given_dtype(call.fmt)), weights


def _math_backward(call: _Call, multiply: Multiply, grad: Array, weights: Array) -> tuple[Array, Array, Array]:
    """Compute the gradients that autograd gives of the math backend's operators, codes of the operands' format."""
    q, k, v = _math_operands(call)
    wide = to_float(F32, convert(call.fmt, F32, grad))
    of_scores = softmax_backward(multiply(wide, _turned(v), transposed_b=True), weights)
    root, group = float(np.sqrt(call.scale)), q.shape[1] // call.k.shape[1]

    def finished(x: Array, factor: float, group: int) -> Array:
        """Multiply by a factor, add the heads of a group, and round."""
        scaled = Value(array_codes(x)[1]) * factor
        if group > 1:
            parts = _numbers(scaled).reshape(x.shape[0], -1, group, *x.shape[2:])
            scaled = Value(array_codes(reduce("sum", parts, 2, gpu=call.gpu))[1])
        return convert(F32, call.fmt, scaled.codes)

    return (
        finished(multiply(of_scores, k), root, 1),
        finished(_turned(multiply(_turned(q), of_scores, transposed_a=True)), root, group),
        finished(multiply(_turned(weights), wide, transposed_a=True), 1.0, group),
    )
