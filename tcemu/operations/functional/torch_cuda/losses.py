"""PyTorch's negative log likelihood and cross entropy, and their gradients, as its CUDA kernels compute them.

Source: PyTorch 2.11.0, aten/src/ATen/native/cuda/Loss.cu; aten/src/ATen/native/LossNLL.cpp (`cross_entropy_loss_label_smoothing`) and
derivatives.yaml. Held to words of PyTorch 2.11.0 on an H200: `tests/operations/functional/test_torch_cuda.py`.
"""

from __future__ import annotations

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import ArrayLike

from tcemu.base.errors import NotModelled
from tcemu.engine.arithmetic.sum_tree import Chain, Join, Node
from tcemu.engine.formats.number_formats import F32, Format
from tcemu.operations.functional.torch_cuda.device_functions import Value, as_value, where
from tcemu.operations.functional.torch_cuda.elementwise import elementwise, round_value
from tcemu.operations.functional.torch_cuda.reduce_plans import WARP, strided_places
from tcemu.operations.functional.torch_cuda.reductions import reduce_tree_values
from tcemu.operations.functional.torch_cuda.rows import operand_values, reduce, result_array
from tcemu.operations.functional.torch_cuda.softmax import log_softmax, log_softmax_backward

MAX_THREADS, ROWS_OF_THREAD = 1024, 16
REDUCTIONS = ("mean", "sum", "none")


def _check(reduction: str) -> None:
    if reduction not in REDUCTIONS:
        raise NotModelled(f"reduction={reduction!r}: expected one of {', '.join(REDUCTIONS)} (torch_cuda/losses.py)")


@lru_cache(maxsize=64)
def loss_tree(rows: int) -> Node:
    """Return the sum over a batch: threads of one block take rows in turn and are joined in halves. Their number is rounded."""
    share = max(rows // ROWS_OF_THREAD, 1)
    threads = min(max(1 << round(float(np.log2(share))), WARP), MAX_THREADS)
    return Join(Chain(strided_places(rows, threads).astype(np.int32)), "folded")


def _weights(fmt: Format, target: Array, weight: ArrayLike | None, ignore_index: int) -> tuple[Array, Value]:
    """Return whether each row counts, and its weight."""
    counts = target != ignore_index
    ones = Value(jnp.full(target.shape, as_value(1.0).codes))
    if weight is None:
        return counts, ones
    _, values = operand_values("nll_loss", weight)
    return counts, Value(values.codes[jnp.where(counts, target, 0)])


@partial(jax.jit, static_argnames=("reduction", "ignore_index"))
def nll_loss(
    x: ArrayLike, target: ArrayLike, weight: ArrayLike | None = None, reduction: str = "mean", ignore_index: int = -100
) -> tuple[Array, Array]:
    """Compute the negative log likelihood as PyTorch's `nll_loss_forward` on a GPU does.

    Args:
        x: Logarithms of probabilities [rows, classes], bfloat16, float16 or float32.
        target: Classes, integers [rows].
        weight: Weights of the classes [classes] in x's dtype, or None.
        reduction: "mean", "sum" or "none".
        ignore_index: A target that does not count.

    Returns:
        The loss, a scalar or [rows], and the sum of the weights, in x's dtype.

    Raises:
        NotModelled: The dtype or the reduction is another one.
    """
    _check(reduction)
    fmt, values = operand_values("nll_loss", x)
    target = jnp.asarray(target)
    counts, weights = _weights(fmt, target, weight, ignore_index)
    chosen = Value(jnp.take_along_axis(values.codes, jnp.where(counts, target, 0)[:, None], axis=1)[:, 0])
    if reduction == "none":
        loss = where(counts, round_value(-weights * chosen, fmt), 0.0)
        return result_array(loss, fmt), result_array(as_value(0.0), fmt)
    tree = loss_tree(len(target))
    chosen, weights = where(counts, chosen, 0.0), where(counts, weights, 0.0)
    if fmt == F32 and weight is not None:  # nvcc contracts the product and the difference
        total = Value(reduce_tree_values("products", tree, (-chosen).codes, weights.codes))
    else:
        total = Value(reduce_tree_values("sum", tree, (-round_value(chosen * weights, fmt)).codes))
    total_weight = Value(reduce_tree_values("sum", tree, weights.codes))
    loss = total / total_weight if reduction == "mean" else total
    return result_array(loss, fmt), result_array(total_weight, fmt)


@partial(jax.jit, static_argnames=("reduction", "ignore_index"))
def nll_loss_backward(
    grad: ArrayLike,
    x: ArrayLike,
    target: ArrayLike,
    total_weight: ArrayLike,
    weight: ArrayLike | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
) -> Array:
    """Compute the gradient of `nll_loss` as PyTorch's `nll_loss_backward` on a GPU does.

    Args:
        grad: Gradient of the loss, of x's dtype.
        x: The operand [rows, classes], of which only shape and dtype count.
        target: Classes [rows].
        total_weight: The second result of `nll_loss`.
        weight: Weights of the classes, or None.
        reduction: As in `nll_loss`.
        ignore_index: As in `nll_loss`.

    Returns:
        The gradient of x, in its dtype.

    Raises:
        NotModelled: The dtype or the reduction is another one.
    """
    _check(reduction)
    (fmt, values), (_, grads) = operand_values("nll_loss_backward", x), operand_values("nll_loss_backward", grad)
    target = jnp.asarray(target)
    counts, weights = _weights(fmt, target, weight, ignore_index)
    if reduction == "mean":
        grads = round_value(grads / operand_values("nll_loss_backward", total_weight)[1], fmt)
    each = -round_value(weights * Value(jnp.broadcast_to(grads.codes, target.shape)), fmt)
    classes = jnp.arange(values.codes.shape[1])
    hit = (classes[None] == jnp.expand_dims(target, 1)) & counts[:, None]
    return result_array(where(hit, Value(each.codes[:, None]), 0.0), fmt)


@partial(jax.jit, static_argnames=("reduction", "ignore_index", "label_smoothing", "gpu"))
def cross_entropy(
    x: ArrayLike,
    target: ArrayLike,
    weight: ArrayLike | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    gpu: str = "H200",
) -> Array:
    """Compute the cross entropy of logits as PyTorch's `cross_entropy_loss` on a GPU does.

    Args:
        x: Logits [rows, classes], bfloat16, float16 or float32.
        target: Classes, integers [rows].
        weight: Weights of the classes, or None.
        reduction: "mean", "sum" or "none".
        ignore_index: A target that does not count.
        label_smoothing: Share of the uniform distribution; with it, weights have no rule.
        gpu: As in `rows.reduce`.

    Returns:
        The loss in x's dtype, a scalar or [rows].

    Raises:
        NotModelled: The dtype, the reduction or the GPU is another one, or label smoothing comes with weights.
    """
    logarithms = log_softmax(x, -1)
    loss, _ = nll_loss(logarithms, target, weight, reduction, ignore_index)
    if label_smoothing == 0.0:
        return loss
    if weight is not None:
        raise NotModelled("cross_entropy: got label_smoothing and weight; known is one of them (torch_cuda/losses.py)")
    fmt, value = operand_values("cross_entropy", loss)
    spread = -operand_values("cross_entropy", reduce("sum", logarithms, -1, gpu=gpu))[1]
    spread = where(jnp.asarray(target) == ignore_index, 0.0, spread)
    if reduction != "none":
        spread = operand_values("cross_entropy", reduce("sum", result_array(spread, fmt), None, gpu=gpu))[1]
    if reduction == "mean":
        spread = round_value(spread / _count(target, ignore_index, fmt), fmt)
    own, other = 1.0 - label_smoothing, label_smoothing / jnp.shape(x)[-1]
    return result_array(round_value(value * own, fmt) + round_value(spread * other, fmt), fmt)


def _count(target: ArrayLike, ignore_index: int, fmt: Format) -> Value:
    """Return the number of targets that count, which PyTorch rounds to the dtype."""
    count = (jnp.asarray(target) != ignore_index).sum().astype(jnp.float32)
    return round_value(Value(lax.bitcast_convert_type(count, jnp.uint32)), fmt)


@partial(jax.jit, static_argnames=("reduction", "ignore_index", "label_smoothing"))
def cross_entropy_backward(
    grad: ArrayLike,
    x: ArrayLike,
    target: ArrayLike,
    weight: ArrayLike | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Array:
    """Compute the gradient of `cross_entropy` as PyTorch's autograd on a GPU does.

    Args:
        grad: Gradient of the loss, of x's dtype.
        x: The logits.
        target: Classes [rows].
        weight: Weights of the classes, or None.
        reduction: As in `cross_entropy`.
        ignore_index: As in `cross_entropy`.
        label_smoothing: As in `cross_entropy`.

    Returns:
        The gradient of x, in its dtype.

    Raises:
        NotModelled: As in `cross_entropy`.
    """
    logarithms = log_softmax(x, -1)
    _, total_weight = nll_loss(logarithms, target, weight, reduction, ignore_index)
    if label_smoothing == 0.0:
        return log_softmax_backward(
            nll_loss_backward(grad, logarithms, target, total_weight, weight, reduction, ignore_index), logarithms, -1
        )
    if weight is not None or reduction == "none":
        raise NotModelled("cross_entropy: got label_smoothing with weights or no reduction; known is one of them (torch_cuda/losses.py)")
    fmt, grads = operand_values("cross_entropy", grad)
    own = result_array(grads * (1.0 - label_smoothing), fmt)
    spread = round_value(grads * (label_smoothing / jnp.shape(x)[-1]), fmt)
    if reduction == "mean":
        spread = round_value(spread / _count(target, ignore_index, fmt), fmt)
    _, of_target = operand_values("cross_entropy", nll_loss_backward(own, logarithms, target, total_weight, None, reduction, ignore_index))
    spread = where((jnp.asarray(target) == ignore_index)[:, None], 0.0, -spread)
    return log_softmax_backward(result_array(of_target + spread, fmt), logarithms, -1)


def mse_loss(x: ArrayLike, target: ArrayLike, reduction: str = "mean", *, gpu: str = "H200") -> Array:
    """Compute the mean squared error as PyTorch's `mse_loss` on a GPU does: the squares are rounded to the dtype before they are added.

    Args:
        x: bfloat16, float16 or float32, contiguous.
        target: Of x's dtype and shape.
        reduction: "mean", "sum" or "none".
        gpu: As in `rows.reduce`.

    Raises:
        NotModelled: The reduction, the dtype or the GPU is another one.
    """
    _check(reduction)
    squares = elementwise("mse_loss", x, target)
    return squares if reduction == "none" else reduce(reduction, squares, None, gpu=gpu)


def mse_loss_backward(grad: ArrayLike, x: ArrayLike, target: ArrayLike, reduction: str = "mean") -> Array:
    """Compute the gradient of `mse_loss`, for a gradient of its result that broadcasts to x; arguments and errors as there."""
    _check(reduction)
    grads = jnp.broadcast_to(jnp.asarray(grad), jnp.shape(x))
    return elementwise("mse_loss_backward", grads, x, target, factor=2.0 / max(np.size(x), 1) if reduction == "mean" else 2.0)
