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
from tcemu.engine.formats.coding import convert
from tcemu.engine.formats.float_arrays import array_codes, to_float
from tcemu.engine.formats.number_formats import BF16, F16, F32, Format
from tcemu.operations.functional.torch_cuda.attention_backward import (
    BackwardDropout,
    BackwardOperands,
    cutlass_backward,
    find_open_order,
    fused_backward,
)
from tcemu.operations.functional.torch_cuda.device_functions import Value
from tcemu.operations.functional.torch_cuda.elementwise import given_dtype
from tcemu.operations.functional.torch_cuda.fused_attention import (
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

BACKENDS = ("cudnn", "flash", "efficient", "math")
CUDNN_HIDDEN = -65504.0  # what PyTorch adds for a hidden key before cuDNN, in bf16 too: seen in records of an H200

# ---- the choice


class AttentionCall(NamedTuple):
    """The facts on which PyTorch's choice of a backend depends.

    Attributes:
        query: Shape of the queries, [batch, heads, queries, size].
        key: Shape of the keys.
        value: Shape of the values.
        dtype: Of the three, or None if they differ.
        causal: `is_causal`.
        mask: Shape of `attn_mask`, or None.
        mask_gradient: `attn_mask` needs a gradient.
        dropout: `dropout_p`.
        grouped: `enable_gqa`.
        is_dense: The last axes of operands and mask have a stride of one element.
        deterministic: `torch.use_deterministic_algorithms(True)`, without `warn_only`.
        gpu: A key of `reduce_plans.GPUS`.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]
    dtype: DTypeLike | None
    causal: bool = False
    mask: tuple[int, ...] | None = None
    mask_gradient: bool = False
    dropout: float = 0.0
    grouped: bool = False
    is_dense: bool = True
    deterministic: bool = False
    gpu: str = "H200"

    @property
    def is_narrow(self) -> bool:
        return self.dtype is not None and jnp.dtype(self.dtype) in (jnp.bfloat16, jnp.float16)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Head sizes of queries, keys and values."""
        return self.query[-1], self.key[-1], self.value[-1]


class Condition(NamedTuple):
    """A condition of a backend, and the function of sdp_utils.cpp that checks it."""

    holds: Callable[[AttentionCall], bool]
    said: str
    source: str


def _heads_fit(call: AttentionCall, *, grouped: bool, alike: bool = True) -> bool:
    heads, *others = call.query[-3], call.key[-3], call.value[-3]
    if call.grouped and grouped:
        return (others[0] == others[1] or not alike) and all(n and heads % n == 0 for n in others)
    return others == [heads, heads]


def _mask_fits(call: AttentionCall) -> bool:
    if call.mask is None:
        return True
    sizes = (call.query[0], call.query[1], call.query[-2], call.key[-2])
    fit = all(given in (1, size) for given, size in zip(call.mask[::-1], sizes[::-1], strict=False))
    return fit and len(call.mask) in (2, 4) and not call.mask_gradient


_AXES = Condition(lambda c: len(c.query) == len(c.key) == len(c.value) == 4, "operands have 4 axes", "check_tensor_shapes")
_LENGTHS = Condition(lambda c: c.query[-2] > 0 and c.key[-2] > 0, "sequences are not empty", "check_nonzero_sequence_lengths_dense")
_NARROW = Condition(lambda c: c.is_narrow, "all dtypes are bfloat16 or all are float16", "check_dtypes_low_precision")
_DENSE = Condition(lambda c: c.is_dense, "the last axes are dense in memory", "check_last_dim_stride_equals_1_dense")
_BATCHES = Condition(lambda c: c.query[0] == c.key[0] == c.value[0], "batches are equal", "check_batch_size_and_num_heads_dense")
_HEADS = "check_batch_size_and_num_heads_dense"
# in the order in which PyTorch tries them on compute capability 9.x and 10.x with cuDNN 9.15.1 or newer: priority_order
CHOICES: dict[str, tuple[Condition, ...]] = {
    "cudnn": (
        _AXES,
        Condition(lambda c: not c.deterministic, "algorithms need not be deterministic", "check_cudnn_deterministic"),
        _NARROW,
        Condition(_mask_fits, "a mask has the axes of 2 or 4 and needs no gradient", "check_attn_mask_shape"),
        _LENGTHS,
        _DENSE,
        _BATCHES,
        Condition(lambda c: _heads_fit(c, grouped=True, alike=False), "heads fit, or enable_gqa is set and they divide", _HEADS),
        Condition(lambda c: max(c.query[-1], c.value[-1]) <= 256, "head sizes are at most 256", "check_cudnn_tensor_shapes"),
        Condition(lambda c: c.query[-1] % 8 == c.value[-1] % 8 == 0, "head sizes are multiples of 8", "check_cudnn_tensor_shapes"),
        Condition(lambda c: c.key[-2] != 1, "there is more than one key", "check_cudnn_tensor_shapes"),
        Condition(lambda c: c.query[-2] != 1 or not c.dropout, "there is more than one query, or no dropout", "check_cudnn_tensor_shapes"),
    ),
    "flash": (
        _AXES,
        Condition(lambda c: c.mask is None, "there is no mask", "check_for_attn_mask"),
        Condition(lambda c: len(set(c.sizes)) == 1 and c.sizes[0] <= 256, "head sizes are equal and at most 256",
                  "check_head_dim_size_flash"),
        Condition(lambda c: not c.causal or c.query[-2] == c.key[-2], "causal queries and keys are equally many",
                  "check_flash_causal_non_square_seqlens"),
        _NARROW,
        _BATCHES,
        Condition(lambda c: _heads_fit(c, grouped=True), "heads fit, or enable_gqa is set and they divide", _HEADS),
        _LENGTHS,
        _DENSE,
    ),
    "efficient": (
        _AXES,
        Condition(lambda c: c.query[-1] == c.key[-1] and not any(n % _alignment(c) or n == 0 for n in c.sizes),
                  "head sizes are multiples of 16 bytes", "check_head_dim_size_mem_efficient"),
        _LENGTHS,
        _DENSE,
        _BATCHES,
        Condition(lambda c: _heads_fit(c, grouped=False), "queries, keys and values have the same heads", _HEADS),
        Condition(lambda c: c.dtype is not None and jnp.dtype(c.dtype) in (jnp.bfloat16, jnp.float16, jnp.float32),
                  "all dtypes are the same, of 16 or 32 bits", "check_tensor_dtype"),
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

    Source: sdp_utils.cpp, select_sdp_backend, without nested tensors; each condition names its function.
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
        q: bfloat16 or float16 [batch, heads, queries, size]; float32 by "efficient".
        k: [batch, key heads, keys, size]; heads is a multiple of key heads.
        v: [batch, key heads, keys, size of a value].
        backend: "cudnn", "flash", "efficient" or "math"; `choose_backend` says which PyTorch takes.
        causal: A query sees the keys up to its own number.
        bias: Added to the scaled scores, or booleans, of which False hides a key. It broadcasts to [batch, heads, queries, keys].
        scale: Factor of the scores; None: 1 / sqrt(size).
        gpu: "H100" or "H200".
        multiply: Of "math" with one head in all, which PyTorch computes by products of matrices: computes A·B of f32 matrices, given
            transposed_a and transposed_b as `tcemu.uses.replay.torch_products.matmul`. With more heads cuBLAS's batched product is a chain.
        dropout: Dropout of the weights, of all backends but "math".

    Returns:
        The result, [batch, heads, queries, size of a value] in q's dtype, and the log-sum-exps, f32 [batch, heads, queries], which are
        natural logarithms; of "math" the f32 weights, [batch, heads, queries, keys], from which PyTorch computes its gradients.

    Raises:
        NotModelled: The kernel of this call is not known.
        Unsupported: The backend does not take the call.
        ValueError: Shapes do not fit.

    Source: as the modules of `torch_cuda` say; words of an H200 that agree: the census in tests/operations/functional.
    """
    given = 0.0 if dropout is None else dropout.probability
    call = _bind(backend, q, k, v, causal=causal, bias=bias, scale=scale, gpu=gpu, dropout=given)
    return _math(call, _product(call, multiply)) if backend == "math" and dropout is None else _fused(call, dropout)


OPEN_ORDERS = ("raise", "lockstep")


class AttentionGradients(NamedTuple):
    """Gradients of attention's operands; that of the bias, [batch, heads, queries, keys], is known of "efficient"."""

    q: Array
    k: Array
    v: Array
    bias: Array | None = None


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
    deterministic: bool = False,
    dropout: AttentionDropout | None = None,
) -> AttentionGradients:
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
        open_order: What to do where the GPU leaves the order of the sums in the gradient of q open: "raise", or "lockstep", by which blocks
            of keys are added as if all ran at the same pace: one of the results that the GPU may give. The other gradients have one order.
        deterministic: `torch.use_deterministic_algorithms(True)`, by which "flash" and "efficient" have one order.
        dropout: Dropout of the forward's weights.

    Returns:
        The gradients, in their operands' shapes and dtype.

    Raises:
        NotModelled: The backward of this call is not known, or an order is open.
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
    if backend == "math":
        found = _math_backward(call, _product(call, multiply), grad_codes, to_float(F32, lse_codes))
        return AttentionGradients(*(to_float(call.fmt, x, given_dtype(call.fmt)) for x in found))
    size, keys = max(call.q.shape[-1], call.v.shape[-1]), call.k.shape[2]
    reason = find_open_order(backend, (*call.q.shape[:3], size), keys, deterministic=deterministic, wide=call.fmt == F32)
    if reason and open_order == "raise":
        raise NotModelled(
            f"{backend}: the order of the sums in the gradient of the queries is open: {reason}; those of keys and values have one order: "
            "open_order='lockstep' gives them, and one order of the others (torch_cuda/attention_backward.py)"
        )
    dropped = None
    if dropout is not None:
        dropped = BackwardDropout(*_kept_weights(call, dropout), float(np.float32(1) - np.float32(dropout.probability)))
    if backend == "efficient":
        found = cutlass_backward(call.fmt, operands, call.bias, call.causal, call.scale, deterministic=deterministic, dropped=dropped)
    else:
        heads = call.q.shape[0] * call.q.shape[1]
        splits = -(-GPUS[call.gpu][0] // heads) if deterministic else 0
        found = fused_backward(backend, call.fmt, operands, call.causal, call.scale, bias=call.bias, splits=splits, dropped=dropped)
    return AttentionGradients(*(to_float(call.fmt, x, given_dtype(call.fmt)) for x in found[: 3 if call.bias is None else 4]))


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
    dropout: float = 0.0,
) -> _Call:
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {', '.join(BACKENDS)}")
    given = {name: array_codes(x if isinstance(x, jax.Array) else np.asarray(x)) for name, x in (("q", q), ("k", k), ("v", v))}
    formats = {fmt for fmt, _ in given.values()}
    if len(formats) != 1 or not formats <= ({BF16, F16, F32} if backend == "efficient" else {BF16, F16}):
        said = ", ".join(f"{n} {f}" for n, (f, _) in given.items())
        raise NotModelled(f"attention: got {said}; known are bf16 and f16, and f32 of the efficient backend's forward, one for all")
    codes = [codes for _, codes in given.values()]
    shapes = [x.shape for x in codes]
    (batch, heads, queries, size), key_shape, value_shape = shapes if all(len(s) == 4 for s in shapes) else _wrong_shapes(shapes)
    if 0 not in (key_shape[1], value_shape[1]) and key_shape[1] != value_shape[1] and heads % key_shape[1] == heads % value_shape[1] == 0:
        raise NotModelled(f"{backend}: got {key_shape[1]} heads of keys and {value_shape[1]} of values; known are equal ones")
    groups_fit = 0 not in key_shape and key_shape[:3] == value_shape[:3] and key_shape[0] == batch and heads % key_shape[1] == 0
    if not groups_fit or key_shape[-1] != size:
        _wrong_shapes(shapes)
    call = AttentionCall(
        shapes[0], key_shape, value_shape, given_dtype(next(iter(formats))), causal, None if bias is None else (queries, key_shape[2]),
        dropout=dropout, grouped=heads != key_shape[1], gpu=gpu,
    )  # fmt: skip
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


def _kept_weights(call: _Call, dropout: AttentionDropout) -> tuple[np.ndarray, float]:
    """Return which weights dropout keeps, [batch, heads, queries, keys], and 1 / (1 - p) as the kernel rounds it, in f32."""
    batch, heads, queries, _ = call.q.shape
    kept = attention_mask(call.backend, dropout, (batch, heads, queries, call.k.shape[2]))
    p = np.float32(dropout.probability)
    return kept, float(np.float32(1.0 / (1.0 - float(p))) if call.backend == "efficient" else np.float32(1) / (np.float32(1) - p))


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
    kernel = fused_kernel(call.backend, seen, call.k.shape[2], call.gpu, drops=dropped is not None, fmt=call.fmt)
    operands = FusedOperands(
        call.q.reshape(batch, key_heads, rows, size), call.k, call.v,
        None if call.bias is None else call.bias.reshape(batch, key_heads, rows, -1),
    )  # fmt: skip
    found = fused_forward(kernel, call.fmt, operands, queries, call.causal and not swapped, call.scale, dropped)
    out = by_rows(convert, found.out, fixed=(F32, call.fmt))
    out, logarithms = out.reshape(batch, heads, queries, width), found.logsumexp.reshape(batch, heads, queries)
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
