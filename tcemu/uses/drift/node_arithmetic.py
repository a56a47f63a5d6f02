"""The arithmetic of a program's nodes in NumPy: elementwise and special functions, movements, and the rows that a sum adds."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tcemu.engine.arithmetic import special_functions
from tcemu.operations.functional.torch_cuda.device_functions import Value, expf
from tcemu.uses.drift.programs import Node
from tcemu.uses.drift.samples import node_shape, product_axes

MAX_PADDING = 1 << 10  # of a convolution
PADDED = 1 << 12  # elements to which short operands of JAX's functions are padded

# ---- the rows of a sum


def _product_rows(node: Node, raw: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return rows of A [B, M, K], rows of B [B, N, K] and the shape of the result."""
    a, b, shapes = raw[0], raw[1], [x.shape for x in raw]
    if "windows" in node.attributes:
        return *_patches(a, b, node.attributes), node_shape(node, shapes)
    (left, right), (left_batch, right_batch) = node.attributes["axes"]
    free_a, free_b = product_axes(node, shapes)
    batch, k = math.prod(a.shape[i] for i in left_batch), math.prod(a.shape[i] for i in left)
    rows = a.transpose([*left_batch, *free_a, *left]).reshape(batch, -1, k)
    return rows, b.transpose([*right_batch, *free_b, *right]).reshape(batch, -1, k), node_shape(node, shapes)


def _patches(x: np.ndarray, w: np.ndarray, attributes: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return a convolution as rows of patches and rows of kernels; K runs over the window, then over the channels."""
    lhs, rhs, _ = attributes["windows"]
    x, w = x.transpose([lhs[0], *lhs[2:], lhs[1]]), w.transpose([rhs[0], *rhs[2:], rhs[1]])  # N, spatial, C; O, spatial, I
    padding, strides = attributes["padding"], attributes["strides"]
    if any(not 0 <= size <= MAX_PADDING for pair in padding for size in pair):
        raise ValueError(f"padding {padding}: expected 0 to {MAX_PADDING}")
    x = np.pad(x, [(0, 0), *padding, (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[1:-1], axis=tuple(range(1, x.ndim - 1)))
    windows = windows[(slice(None), *(slice(None, None, stride) for stride in strides))]
    windows = np.moveaxis(windows, 1 + len(strides), -1)  # N, places, window, C
    return windows.reshape(1, -1, w[0].size), w.reshape(1, len(w), -1)


def sum_rows(node: Node, raw: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    x, axes = raw[0], [axis % raw[0].ndim for axis in node.attributes["axes"]]
    kept = [i for i in range(x.ndim) if i not in axes]
    k = math.prod(x.shape[i] for i in axes)
    rows = x.transpose([*kept, *axes]).reshape(1, -1, k)
    return rows, np.ones((1, 1, k), rows.dtype), node_shape(node, [x.shape])


ROW_READERS = {"product": _product_rows, "sum": sum_rows}

# ---- functions and movements

EXACT: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # in f64, rounded to f32 afterwards
    "exp": np.exp, "exp2": np.exp2, "log": np.log, "tanh": np.tanh, "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "rsqrt": lambda x: 1 / np.sqrt(x), "sqrt": np.sqrt, "erf": np.vectorize(math.erf, otypes=[np.float64]), "sin": np.sin, "cos": np.cos,
}  # fmt: skip
ELEMENTWISE: dict[str, Callable[..., np.ndarray]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum, "neg": np.negative,
    "abs": np.abs, "sign": np.sign, "floor": np.floor, "ceil": np.ceil, "round": np.rint, "eq": np.equal, "ne": np.not_equal,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "and": np.logical_and, "or": np.logical_or,
    "select": lambda which, *cases: np.choose(np.asarray(which).astype(int), np.broadcast_arrays(*cases)),
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high), **EXACT,
}  # fmt: skip


def padded_call(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """Call an elementwise function of JAX, which is compiled once for all sizes up to PADDED."""
    if x.size >= PADDED:
        return function(x)
    full = np.zeros(PADDED, np.float32)
    full[: x.size] = x.reshape(-1)
    return function(full)[: x.size].reshape(x.shape)


def _codes(x: np.ndarray) -> jax.Array:
    return jnp.asarray(np.ascontiguousarray(x, np.float32).view(np.uint32))


GPU_FUNCTIONS = {"exp2": "ex2", "rsqrt": "rsqrt", "sqrt": "sqrt", "sin": "sin", "cos": "cos", "exp": "ex2", "logistic": "ex2", "log": "lg2"}


def gpu_function(kind: str, x: np.ndarray) -> np.ndarray:
    """Compute a special function as a GPU's approximate instructions do: ex2, lg2, rsqrt, sqrt, sin, cos and rcp in f32."""
    f32 = lambda codes: np.asarray(codes).view(np.float32)
    log2_e = np.float32(1.4426950408889634)
    if kind == "exp":
        return f32(special_functions.ex2(_codes(x * log2_e)))
    if kind == "logistic":
        return f32(special_functions.rcp(_codes(np.float32(1) + f32(special_functions.ex2(_codes(-x * log2_e))))))
    if kind == "log":
        return f32(special_functions.lg2(_codes(x))) * np.float32(0.6931471805599453)
    return f32(getattr(special_functions, GPU_FUNCTIONS[kind])(_codes(x)))


def cuda_exp(x: np.ndarray) -> np.ndarray:
    """Compute e^x as `expf` of CUDA's device library, which XLA uses on an H100 (tests/uses/drift/test_h100_drifts.py)."""
    return np.asarray(_cuda_exp_codes(_codes(x))).view(np.float32)


@jax.jit
def _cuda_exp_codes(codes: jax.Array) -> jax.Array:
    return expf(Value(codes)).codes


def xla_function(kind: str, x: np.ndarray) -> np.ndarray:
    return np.asarray(getattr(jax.lax, kind)(jnp.asarray(x)))


MOVEMENTS: dict[str, Callable[[np.ndarray, dict[str, Any]], np.ndarray]] = {
    "reshape": lambda x, facts: x.reshape(facts["shape"]),
    "transpose": lambda x, facts: x.transpose(facts["axes"]),
    "broadcast": lambda x, facts: np.broadcast_to(
        x.reshape(
            [facts["shape"][i] if i in facts["axes"] and x.shape[facts["axes"].index(i)] != 1 else 1 for i in range(len(facts["shape"]))]
        ),
        facts["shape"],
    ),
    "amax": lambda x, facts: np.abs(x).max(axis=tuple(facts["axes"]), keepdims=facts.get("keepdims", False)),
    "reduce_max": lambda x, facts: x.max(axis=tuple(facts["axes"]), keepdims=facts.get("keepdims", False)),
    "reduce_min": lambda x, facts: x.min(axis=tuple(facts["axes"]), keepdims=facts.get("keepdims", False)),
}
