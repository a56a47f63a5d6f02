"""Recorded operations as small programs of known arithmetic, evaluated under a chosen arithmetic.

A node computes in f32 from its inputs and is rounded to its dtype. `Choices` says which of these roundings happen, which special functions
are used, how sums are added, and where a multiplication and an addition are one fma. Nodes that libraries keep in f32 within one kernel,
such as the parts of a softmax, are internal: they are rounded only if a choice says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tcemu.engine.arithmetic import special_functions
from tcemu.engine.formats.number_formats import BF16, E4M3, E5M2, F16, F32
from tcemu.uses.drift.mkl_sums import multiply_row
from tcemu.uses.drift.moments import Moments, mean_and_variance
from tcemu.uses.drift.quantization import BlockQuantization, Quantization
from tcemu.uses.drift.records import DTYPES, Operation
from tcemu.uses.drift.samples import GATHERED, REDUCTIONS, ROWWISE, SUMS, Sample
from tcemu.uses.drift.sum_evaluation import fma_f32, sum_products
from tcemu.uses.drift.summation import Summation
from tcemu.uses.drift.torch_sums import torch_sum, torch_sum_rows

Ref = tuple[str, int]  # ("input", index) or ("node", index)
F32_DTYPE = np.dtype(np.float32)
FORMATS = {F32_DTYPE: F32, np.dtype(np.float16): F16, np.dtype(ml_dtypes.bfloat16): BF16}
FACTOR_FORMATS = FORMATS | {np.dtype(ml_dtypes.float8_e4m3fn): E4M3, np.dtype(ml_dtypes.float8_e5m2): E5M2}  # of multiplied operands
SPECIAL = ("exp", "exp2", "log", "tanh", "logistic", "rsqrt", "sqrt", "erf", "sin", "cos")
MAX_NODES = 64
MAX_PADDING = 1 << 10  # of a convolution
PADDED = 1 << 12  # elements to which short operands of JAX's functions are padded


class Node(NamedTuple):
    """One step of a program."""

    kind: str
    inputs: tuple[Ref, ...]
    dtype: np.dtype  # dtype to which its result is rounded
    attributes: dict[str, Any]
    internal: bool  # within one recorded operation
    operation: int  # number of the recorded operation


@dataclass
class Program:
    """The arithmetic of one operation or of several that follow each other.

    Attributes:
        nodes: Its steps; the last one gives the result.
        inputs: What it reads: (operation, operand) of a record, or a constant.
        shape: Shape of the result.
        f32_inputs: Indices of the inputs that are f32 tensors.
        others: Further results of the last operation that are known, by their number.
    """

    nodes: list[Node] = field(default_factory=list)
    inputs: list[tuple[int, int] | np.ndarray] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    f32_inputs: set[int] = field(default_factory=set)
    others: dict[int, Ref] = field(default_factory=dict)

    def operand_name(self, index: int) -> str:
        """Return the number of an input's operand, with its operation."""
        given = self.inputs[index]
        return "constant" if isinstance(given, np.ndarray) else f"{given[1]} of operation {given[0]}"

    def constant(self, value: float, dtype: type = np.float32) -> Ref:
        self.inputs.append(np.asarray(value, dtype))
        return "input", len(self.inputs) - 1

    def add(self, kind: str, inputs: Sequence[Ref], dtype: np.dtype, operation: int, internal: bool = False, **attributes: Any) -> Ref:
        self.nodes.append(Node(kind, tuple(inputs), np.dtype(dtype), attributes, internal, operation))
        return "node", len(self.nodes) - 1

    def dtype(self, ref: Ref, inputs: Sequence[np.ndarray]) -> np.dtype:
        """Return the dtype of a value as a node reads it."""
        kind, index = ref
        node = None if kind == "input" else self.nodes[index]
        return inputs[index].dtype if node is None else F32_DTYPE if node.internal else node.dtype

    @property
    def sums(self) -> list[int]:
        return [i for i, node in enumerate(self.nodes) if node.kind in SUMS]

    @property
    def has_special(self) -> bool:
        return any(node.kind in SPECIAL for node in self.nodes)


class Choices(NamedTuple):
    """The arithmetic under which a program is evaluated."""

    unrounded: frozenset[int] = frozenset()  # nodes that are not rounded to their dtype
    rounded: frozenset[int] = frozenset()  # internal nodes that are rounded
    functions: str = "exact"  # "exact", "gpu", "cuda", "expanded" or "xla"
    contracted: frozenset[int] = frozenset()  # additions x·y + z of a node x·y that are one fma
    flushed: bool = False  # subnormal f32 count as zeros
    reciprocal: bool = False  # a quotient is a product with the rounded reciprocal
    summation: Summation | None = None  # None: the plain sequential sum
    extra: tuple[tuple[str, int, str], ...] = ()  # further roundings: of ("input" or "node", index), to a dtype
    order: str = ""  # order of scales in a rewritten program, in words; see `tcemu.uses.drift.rewrites`
    quantization: Quantization | BlockQuantization | None = None
    moments: Moments | None = None  # of a mean and a variance in one pass; None: in two passes, by sums

    def require_summation(self) -> Summation:
        """Return the summation.

        Raises:
            ValueError: The choices have none, and so evaluate programs without sums alone.
        """
        if self.summation is None:
            raise ValueError("choices.summation: a program with sums needs a summation")
        return self.summation


# ---- evaluation


def evaluate(program: Program, inputs: Sequence[np.ndarray], choices: Choices, sample: Sample | None = None) -> np.ndarray:
    """Compute the result of a program.

    Args:
        program: The program.
        inputs: The arrays of `program.inputs`.
        choices: The arithmetic.
        sample: The elements of the result that are computed; None: all.

    Returns:
        The result in its dtype; with `sample`, a vector.
    """
    inputs = list(inputs if sample is None else sample.inputs)
    more: dict[tuple[str, int], np.dtype] = {(kind, index): DTYPES[name] for kind, index, name in choices.extra}
    for kind, index in more:
        if kind == "input":
            with np.errstate(over="ignore"):
                inputs[index] = inputs[index].astype(more[kind, index]).astype(inputs[index].dtype)
    values: list[np.ndarray] = []
    unrounded_products: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    with np.errstate(all="ignore"):
        for number, node in enumerate(program.nodes):
            operands = [inputs[index] if kind == "input" else values[index] for kind, index in node.inputs]
            if sample is not None:
                operands = [_gather(x, where) for x, where in zip(operands, sample.positions[number], strict=True)]
            if node.kind in SUMS:
                value = _sum_node(node, operands, choices) if sample is None else _sampled_sum(number, node, operands, choices, sample)
            elif node.kind in ROWWISE:
                value = _moment(node, operands[0], choices, sample is not None)
            elif sample is not None and node.kind in GATHERED:
                value = _wide(operands[0])
            elif sample is not None and node.kind in REDUCTIONS:
                value = MOVEMENTS[node.kind](_wide(operands[0]), {"axes": (-1,)})
            else:
                factors = {} if not choices.contracted else _factors(number, node, unrounded_products, sample)
                value = _node_value(number, node, operands, choices, factors)
                exact = node.dtype == np.float32 or number in choices.unrounded or (node.internal and number not in choices.rounded)
                if node.kind == "mul" and choices.contracted and exact:
                    unrounded_products[number] = (_wide(operands[0]), _wide(operands[1]))
            if choices.flushed and value.dtype == np.float32:
                value = np.where(np.abs(value) < np.float32(2.0**-126), np.copysign(np.float32(0), value), value)
            if ("node", number) in more:
                value = value.astype(more["node", number]).astype(np.float32)
            last = number == len(program.nodes) - 1
            keeps = number in choices.unrounded or (node.internal and number not in choices.rounded)
            values.append(value if keeps and not last else _round(value, node.dtype))
    return np.broadcast_to(values[-1], program.shape if sample is None else (sample.size,))


def _gather(x: np.ndarray, where: np.ndarray | None) -> np.ndarray:
    return x if where is None else np.broadcast_to(x, where.shape) if x.size == 1 else x[where]


def _factors(
    number: int, node: Node, products: dict[int, tuple[np.ndarray, np.ndarray]], sample: Sample | None
) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Return the factors of the products that a node reads."""
    found = {}
    for place, (kind, index) in enumerate(node.inputs):
        if kind == "node" and index in products:
            x, y = products[index]
            where = None if sample is None else sample.positions[number][place]
            if where is not None:
                x, y = (v if v.size == 1 else v[where] for v in (x, y))
            found[index] = x, y
    return found


def _round(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return x if x.dtype == dtype else np.asarray(x).astype(dtype)


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype in FORMATS or x.dtype.name.startswith("float8") else x


def _sum_node(node: Node, raw: list[np.ndarray], choices: Choices) -> np.ndarray:
    a, b, shape = ROW_READERS[node.kind](node, raw)
    how = choices.require_summation()
    library = torch_sum(raw[0].astype(np.float32), node.attributes["axes"]) if how.library == "torch" else None
    if how.library == "mkl":
        library = multiply_row(a[0], b[0], np.arange(b.shape[1]), b.shape[1])
    bias = np.broadcast_to(raw[2].astype(np.float32), shape) if how.bias_first and len(raw) > 2 else None
    if library is not None:
        found = library.reshape(shape)
    else:
        matrix = lambda x, i: None if x is None else x.reshape(a.shape[0], a.shape[1], b.shape[1])[i]
        parts = [sum_products(how, x[:, None], y[None], matrix(bias, i)) for i, (x, y) in enumerate(zip(a, b, strict=True))]
        found = np.stack(parts).reshape(shape) if parts else np.zeros(shape, np.float32)
    return _divided(node, found)


def _moment(node: Node, x: np.ndarray, choices: Choices, is_sampled: bool) -> np.ndarray:
    """Compute the mean or the variance of rows."""
    assert choices.moments is not None, "a program with moments needs their arithmetic"
    rows, _, shape = (x, None, x.shape[:1]) if is_sampled else _sum_rows(node, [x])
    rows = rows.reshape(-1, rows.shape[-1])
    inner = node.attributes.get("inner") or rows.shape[1]
    return mean_and_variance(choices.moments, rows, inner)[node.attributes["moment"]].reshape(shape)


def _divided(node: Node, total: np.ndarray) -> np.ndarray:
    return total / np.float32(node.attributes["divisor"]) if node.attributes.get("divisor") else total


def _sampled_sum(number: int, node: Node, rows: list[np.ndarray], choices: Choices, sample: Sample) -> np.ndarray:
    """Sum rows [n, K] of terms, or of the products of two operands."""
    how = choices.summation
    assert how is not None, "a program with sums needs a summation"
    if how.library == "mkl":
        columns, count, _ = sample.columns[number]
        return multiply_row(rows[0], rows[1], columns, count)
    if how.library:
        library = torch_sum_rows(rows[0].astype(np.float32), node.attributes["axes"], *sample.columns[number])
        if library is not None:
            return _divided(node, library)
    a = rows[0]
    b = rows[1] if node.kind == "product" else np.ones((1, a.shape[1]), a.dtype)
    bias = rows[2].astype(np.float32) if how.bias_first and len(rows) > 2 else None
    return _divided(node, sum_products(how, a, b, bias))


def _product_rows(node: Node, raw: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return rows of A [B, M, K], rows of B [B, N, K] and the shape of the result."""
    a, b, attributes = raw[0], raw[1], node.attributes
    if "windows" in attributes:
        return _patches(a, b, attributes)
    (left, right), (left_batch, right_batch) = attributes["axes"]
    free_a = [i for i in range(a.ndim) if i not in left and i not in left_batch]
    free_b = [i for i in range(b.ndim) if i not in right and i not in right_batch]
    batch = [a.shape[i] for i in left_batch]
    shape = (*batch, *(a.shape[i] for i in free_a), *(b.shape[i] for i in free_b))
    k = math.prod(a.shape[i] for i in left)
    rows = a.transpose([*left_batch, *free_a, *left]).reshape(math.prod(batch), -1, k)
    columns = b.transpose([*right_batch, *free_b, *right]).reshape(math.prod(batch), -1, k)
    return rows, columns, shape


def _patches(x: np.ndarray, w: np.ndarray, attributes: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    """Return a convolution as rows of patches and rows of kernels; K runs over the window, then over the channels."""
    lhs, rhs, _ = attributes["windows"]
    x, w = x.transpose([lhs[0], *lhs[2:], lhs[1]]), w.transpose([rhs[0], *rhs[2:], rhs[1]])  # N, spatial, C; O, spatial, I
    padding, strides = attributes["padding"], attributes["strides"]
    if any(not 0 <= size <= MAX_PADDING for pair in padding for size in pair):
        raise ValueError(f"padding {padding}: expected 0 to {MAX_PADDING}")
    x = np.pad(x, [(0, 0), *padding, (0, 0)])
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[1:-1], axis=tuple(range(1, x.ndim - 1)))
    windows = windows[(slice(None), *(slice(None, None, stride) for stride in strides))]
    spatial = windows.shape[1 : 1 + len(strides)]
    windows = np.moveaxis(windows, 1 + len(strides), -1)  # N, places, window, C
    rows = windows.reshape(1, -1, w[0].size)
    shape = (x.shape[0], *spatial, len(w))
    return rows, w.reshape(1, len(w), -1), shape


def _sum_rows(node: Node, raw: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, tuple[int, ...]]:
    x, axes = raw[0], [axis % raw[0].ndim for axis in node.attributes["axes"]]
    kept = [i for i in range(x.ndim) if i not in axes]
    k = math.prod(x.shape[i] for i in axes)
    rows = x.transpose([*kept, *axes]).reshape(1, -1, k)
    shape = tuple(1 if i in axes else size for i, size in enumerate(x.shape) if i not in axes or node.attributes.get("keepdims"))
    return rows, np.ones((1, 1, k), np.float32 if rows.dtype == np.float32 else rows.dtype), shape


ROW_READERS = {"product": _product_rows, "sum": _sum_rows}

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


def _padded(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """Call an elementwise function of JAX, which is compiled once for all sizes up to PADDED."""
    if x.size >= PADDED:
        return function(x)
    full = np.zeros(PADDED, np.float32)
    full[: x.size] = x.reshape(-1)
    return function(full)[: x.size].reshape(x.shape)


def _codes(x: np.ndarray) -> jax.Array:
    return jnp.asarray(np.ascontiguousarray(x, np.float32).view(np.uint32))


GPU_FUNCTIONS = {"exp2": "ex2", "rsqrt": "rsqrt", "sqrt": "sqrt", "sin": "sin", "cos": "cos", "exp": "ex2", "logistic": "ex2", "log": "lg2"}


def _gpu(kind: str, x: np.ndarray) -> np.ndarray:
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


def _cuda_exp(x: np.ndarray) -> np.ndarray:
    """Compute e^x as `expf` of CUDA's device library: 2^i times ex2.approx of the rest, which two fma reduce.

    Source: the PTX that nvcc 13.0 emits for expf; an H100's words of XLA's exp, tests/uses/drift/test_h100_drifts.py.
    """
    constant = lambda code: np.full_like(x, np.uint32(code).view(np.float32))
    saturated = np.clip(fma_f32(x, constant(0x3BBB989D), constant(0x3F000000)), np.float32(0), np.float32(1))
    i = np.floor(saturated.astype(np.float64) * 252).astype(np.float32) - np.float32(126)  # fma.rm with 12582913 leaves the integer part
    rest = fma_f32(x, constant(0x32A57060), fma_f32(x, constant(0x3FB8AA3B), -i))
    return np.asarray(special_functions.ex2(_codes(rest))).view(np.float32) * np.ldexp(np.float32(1), i.astype(np.int32))


def _xla(kind: str, x: np.ndarray) -> np.ndarray:
    return np.asarray(getattr(jax.lax, kind)(jnp.asarray(x)))


def _node_value(
    number: int, node: Node, operands: list[np.ndarray], choices: Choices, products: dict[int, tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    wide = [_wide(x) for x in operands]
    kind, attributes = node.kind, node.attributes
    if choices.flushed:
        wide = [np.where(np.abs(x) < np.float32(2.0**-126), np.copysign(np.float32(0), x), x) if x.dtype == np.float32 else x for x in wide]
    if kind in SPECIAL:
        x = wide[0]
        if choices.functions == "gpu" and kind in GPU_FUNCTIONS:
            return _padded(partial(_gpu, kind), x)
        if choices.functions == "cuda" and kind in ("exp", "logistic"):
            power = _padded(_cuda_exp, -x if kind == "logistic" else x)
            return power if kind == "exp" else np.float32(1) / (np.float32(1) + power)
        if choices.functions == "expanded" and kind == "logistic":  # XLA expands the logistic of bf16 and f16 before it widens the steps
            step = lambda y: y.astype(node.dtype).astype(np.float32)
            return np.float32(1) / step(np.float32(1) + step(np.exp(-x.astype(np.float64)).astype(np.float32)))
        if choices.functions == "expanded" and kind == "rsqrt":
            return np.float32(1) / np.sqrt(x)
        if choices.functions == "xla":
            return _padded(partial(_xla, kind), x)
        return EXACT[kind](x.astype(np.float64)).astype(np.float32)
    if number in choices.contracted:
        for place, ref in enumerate(node.inputs):
            if ref[0] == "node" and ref[1] in products and products[ref[1]][0].dtype == np.float32:
                x, y = products[ref[1]]
                other = wide[1 - place]
                if kind == "sub":
                    x, other = (x, -other) if place == 0 else (-x, other)
                shape = np.broadcast_shapes(np.shape(x), np.shape(y), np.shape(other))
                return fma_f32(*(np.broadcast_to(np.asarray(v, np.float32), shape) for v in (x, y, other)))
    if kind == "div" and choices.reciprocal:
        return wide[0] * (np.float32(1) / wide[1])
    if kind == "add" and attributes.get("wide"):
        wide = [x.astype(np.float64 if choices.functions == "exact" else np.float32) for x in wide]
    if kind in ELEMENTWISE:
        return np.asarray(ELEMENTWISE[kind](*wide))
    if kind == "convert":
        return wide[0] if node.dtype in FORMATS else np.asarray(wide[0])
    return MOVEMENTS[kind](wide[0], attributes)


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


# ---- recorded operations

Builder = Callable[[Program, Operation, list[Ref]], Ref]


def append_operation(program: Program, operation: Operation, refs: list[Ref]) -> Ref | None:
    """Append the nodes of a recorded operation, and return its first result; None for an operation that is not known."""
    builder = BUILDERS.get(operation.name)
    if builder is None or not operation.results or operation.results[0].dtype not in DTYPES or len(program.nodes) > MAX_NODES:
        return None
    if any(tensor.dtype in ("float64", "int64", "uint64") and tensor.shape for tensor in operation.operands):
        return None
    try:
        return builder(program, operation, refs)
    except (KeyError, IndexError, TypeError, ValueError, StopIteration):
        return None  # parameters of another kind than the builder knows


def _out(operation: Operation) -> np.dtype:
    return DTYPES[operation.results[0].dtype]


def _elementwise(kind: str) -> Builder:
    return lambda program, operation, refs: program.add(kind, refs, _out(operation), operation.index)


def _integer_pow(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    power = int(operation.attributes.get("y", 2))
    (x,), dtype = refs, _out(operation)
    if not 2 <= power <= 16:
        raise ValueError(power)
    total: Ref | None = None
    square = x
    while power:
        if power & 1:
            total = square if total is None else program.add("mul", (total, square), dtype, operation.index, internal=True)
        power >>= 1
        if power:
            square = program.add("mul", (square, square), dtype, operation.index, internal=True)
    assert total is not None
    return total


def _jax_product(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    contracted, batch = operation.attributes["dimension_numbers"]
    return program.add("product", refs, _out(operation), operation.index, axes=(contracted, batch))


def _jax_convolution(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    facts = operation.attributes
    if facts["feature_group_count"] != 1 or facts["batch_group_count"] != 1 or set(facts["lhs_dilation"] + facts["rhs_dilation"]) != {1}:
        raise ValueError("a dilated or grouped convolution")
    padding, strides, out = facts["padding"], facts["window_strides"], facts["dimension_numbers"][2]
    if [out[0], *out[2:], out[1]] != list(range(len(out))):
        raise ValueError("the channels of the result are not its last axis")
    return program.add(
        "product", refs, _out(operation), operation.index, windows=facts["dimension_numbers"], padding=padding, strides=strides
    )


def _jax_sum(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    return program.add("sum", refs, _out(operation), operation.index, axes=operation.attributes["axes"])


def _jax_movement(kind: str, shape: str | None, axes: str | None) -> Builder:
    def build(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
        facts: dict[str, Any] = {"shape": operation.results[0].shape if shape else None}
        if axes:
            facts["axes"] = operation.attributes[axes]
        return program.add(kind, refs[:1], _out(operation), operation.index, **facts)

    return build


def _torch_arguments(operation: Operation, program: Program, refs: list[Ref]) -> list[Any]:
    """Return the positional arguments: references for tensors, and plain values."""
    tensors = iter(refs)
    return [next(tensors) if isinstance(x, str) and x.startswith("#") else x for x in operation.attributes["args"]]


def _torch_binary(kind: str) -> Builder:
    def build(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
        x, y, *rest = _torch_arguments(operation, program, refs)
        if operation.attributes["kwargs"] or rest:
            raise ValueError("alpha")
        x, y = (program.constant(float(v)) if isinstance(v, int | float) else v for v in (x, y))
        return program.add(kind, (x, y), _out(operation), operation.index)

    return build


def _torch_unary(kind: str) -> Builder:
    return lambda program, operation, refs: program.add(kind, refs[:1], _out(operation), operation.index)


def _constant(program: Program, x: Any) -> Ref:
    return x if isinstance(x, tuple) else program.constant(float(x))


def _torch_rsub(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, y, *rest = _torch_arguments(operation, program, refs)
    if operation.attributes["kwargs"] or rest not in ([], [1]):
        raise ValueError("alpha")
    return program.add("sub", (_constant(program, y), _constant(program, x)), _out(operation), operation.index)


def _torch_clamp(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, *bounds = _torch_arguments(operation, program, refs)
    low, high = (*bounds, None, None)[:2]
    low, high = operation.attributes["kwargs"].get("min", low), operation.attributes["kwargs"].get("max", high)
    dtype, number = _out(operation), operation.index
    if low is not None:
        x = program.add("max", (x, _constant(program, low)), dtype, number, internal=high is not None)
    return x if high is None else program.add("min", (x, _constant(program, high)), dtype, number)


def _torch_relu(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    return program.add("max", (refs[0], program.constant(0.0)), _out(operation), operation.index)


def _torch_reciprocal(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    return program.add("div", (program.constant(1.0), refs[0]), _out(operation), operation.index)


def _torch_where(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    which, x, y = (_constant(program, value) for value in _torch_arguments(operation, program, refs))
    return program.add("select", (which, y, x), _out(operation), operation.index)


def _torch_extreme(kind: str) -> Builder:
    def build(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
        _, *rest = _torch_arguments(operation, program, refs)
        axes = (rest[0] if rest and rest[0] != [] else None) if rest else None
        axes = list(range(len(operation.operands[0].shape))) if axes is None else [axes] if isinstance(axes, int) else axes
        keepdims = bool(rest[1]) if len(rest) > 1 else False
        return program.add(kind, refs[:1], _out(operation), operation.index, axes=axes, keepdims=keepdims)

    return build


def _torch_convolution(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, w, bias, strides, padding, dilation, transposed, _, groups = _torch_arguments(operation, program, refs)[:9]
    if transposed or groups != 1 or set(dilation) != {1}:
        raise ValueError("a dilated, transposed or grouped convolution")
    rank, dtype, number = len(operation.operands[0].shape), _out(operation), operation.index
    spatial, shape = list(range(2, rank)), operation.results[0].shape
    channels_last = [0, 1, *spatial]  # of the operands: N or O, C or I, spatial axes
    windows = (channels_last, channels_last, None)
    total = program.add(
        "product", (x, w), dtype, number, internal=True, windows=windows, padding=[[p, p] for p in padding], strides=strides
    )  # fmt: skip
    last = bias is None
    total = program.add("transpose", (total,), dtype, number, internal=not last, axes=[0, rank - 1, *range(1, rank - 1)])
    if last:
        return total
    wide = program.add("reshape", (bias,), dtype, number, internal=True, shape=[1, shape[1], *(1 for _ in spatial)])
    return program.add("add", (total, wide), dtype, number)


def _torch_scaled_product(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    a, b, scale_a, scale_b, *rest = _torch_arguments(operation, program, refs)
    kwargs = operation.attributes["kwargs"]
    scale_a, scale_b = kwargs.get("scale_a", scale_a), kwargs.get("scale_b", scale_b)
    if any(isinstance(x, tuple) for x in rest):
        raise ValueError("a bias or a scale of the result")
    dtype, number = _out(operation), operation.index
    total = program.add("product", (a, b), dtype, number, internal=True, axes=(((1,), (0,)), ((), ())))
    total = program.add("mul", (total, scale_a), dtype, number, internal=True)
    return program.add("mul", (total, scale_b), dtype, number)


def _nodes(formula: Callable[..., Any]) -> Builder:
    """Return a builder for a formula of one kernel: formula(add, arguments), where add appends a node within the operation."""

    def build(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
        dtype, number = _out(operation), operation.index

        def add(kind: str, *inputs: Any, **facts: Any) -> Ref:
            return program.add(kind, [_constant(program, x) for x in inputs], dtype, number, internal=True, **facts)

        result = formula(add, *_torch_arguments(operation, program, refs))
        program.nodes[-1] = program.nodes[-1]._replace(internal=False)
        return result

    return build


def _tanh_backward(add: Any, grad: Ref, y: Ref) -> Ref:
    return add("mul", grad, add("sub", 1.0, add("mul", y, y)))


def _sigmoid_backward(add: Any, grad: Ref, y: Ref) -> Ref:
    return add("mul", add("mul", grad, add("sub", 1.0, y)), y)


def _silu_backward(add: Any, grad: Ref, x: Ref) -> Ref:
    gate = add("logistic", x)
    slope = add("add", 1.0, add("mul", x, add("sub", 1.0, gate)))
    return add("mul", add("mul", grad, gate), slope)


def _gelu_backward(add: Any, grad: Ref, x: Ref) -> Ref:
    cumulative = add("mul", 0.5, add("add", 1.0, add("erf", add("mul", x, math.sqrt(0.5)))))
    density = add("mul", 1 / math.sqrt(2 * math.pi), add("exp", add("mul", add("mul", x, x), -0.5)))
    return add("mul", grad, add("add", cumulative, add("mul", x, density)))


def _threshold_backward(add: Any, grad: Ref, x: Ref, threshold: float) -> Ref:
    return add("select", add("gt", x, threshold), 0.0, grad)


def _softmax_backward(add: Any, grad: Ref, y: Ref, axis: int, _: Any) -> Ref:
    total = add("sum", add("mul", grad, y), axes=[axis], keepdims=True)
    return add("mul", add("sub", grad, total), y)


def _log_softmax(add: Any, x: Ref, axis: int, _: Any) -> Ref:
    largest = add("reduce_max", x, axes=[axis], keepdims=True)
    total = add("sum", add("exp", add("sub", x, largest)), axes=[axis], keepdims=True)
    return add("sub", add("sub", x, largest), add("log", total))


def _log_softmax_backward(add: Any, grad: Ref, y: Ref, axis: int, _: Any) -> Ref:
    total = add("sum", grad, axes=[axis], keepdims=True)
    return add("sub", grad, add("mul", add("exp", y), total))


def _torch_pow(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, power = _torch_arguments(operation, program, refs)
    if power not in (1, 2, 3):
        raise ValueError(power)
    if power == 1:
        return program.add("convert", (x,), _out(operation), operation.index)
    square = program.add("mul", (x, x), _out(operation), operation.index, internal=power == 3)
    return square if power == 2 else program.add("mul", (square, x), _out(operation), operation.index)


def _torch_product(axes: Any) -> Builder:
    return lambda program, operation, refs: program.add("product", refs, _out(operation), operation.index, axes=axes)


def _torch_addmm(axes: Any) -> Builder:
    def build(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
        if operation.attributes["kwargs"]:
            raise ValueError("alpha or beta")
        bias, a, b = refs
        total = program.add("product", (a, b, bias), _out(operation), operation.index, internal=True, axes=axes)
        return program.add("add", (total, bias), _out(operation), operation.index)

    return build


def _torch_sum(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    _, *rest = _torch_arguments(operation, program, refs)
    rank = len(operation.operands[0].shape)
    axes = (rest[0] if rest and rest[0] else None) or list(range(rank))
    keepdims = bool(rest[1]) if len(rest) > 1 else False
    facts: dict[str, Any] = {"axes": axes, "keepdims": keepdims}
    if operation.name == "aten.mean":
        facts["divisor"] = math.prod(operation.operands[0].shape[axis] for axis in axes)
    return program.add("sum", refs[:1], _out(operation), operation.index, **facts)


def _softmax(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, axis, _ = _torch_arguments(operation, program, refs)
    dtype, number = _out(operation), operation.index
    largest = program.add("reduce_max", (x,), dtype, number, internal=True, axes=[axis], keepdims=True)
    shifted = program.add("sub", (x, largest), dtype, number, internal=True)
    powers = program.add("exp", (shifted,), dtype, number, internal=True)
    total = program.add("sum", (powers,), dtype, number, internal=True, axes=[axis], keepdims=True)
    return program.add("div", (powers, total), dtype, number)


def _mean_and_variance(
    program: Program, operation: Operation, x: Ref, axes: list[int], count: int, inner: int | None = None
) -> tuple[Ref, Ref, Ref]:
    """Append a mean and a variance in two passes, and return the mean, x - mean and the variance; `rewrites` has one pass."""
    dtype, number = _out(operation), operation.index
    mean = program.add("sum", (x,), dtype, number, internal=True, axes=axes, keepdims=True, divisor=count, inner=inner)
    centred = program.add("sub", (x, mean), dtype, number, internal=True)
    squares = program.add("mul", (centred, centred), dtype, number, internal=True)
    variance = program.add("sum", (squares,), dtype, number, internal=True, axes=axes, keepdims=True, divisor=count)
    return mean, centred, variance


def _linear_norm(
    program: Program, operation: Operation, x: Ref, moments: tuple[Ref, Ref], eps: float, weight: Ref | None, bias: Ref | None
) -> Ref:
    """Append x · scale + shift with scale = weight / sqrt(variance + eps) and shift = bias - mean · scale, as f32 within the operation."""
    dtype, number = _out(operation), operation.index
    add = lambda kind, *inputs, **facts: program.add(kind, inputs, dtype, number, internal=True, **facts)
    mean, variance = moments
    scale = add("rsqrt", add("add", variance, program.constant(eps, np.float64), wide=True))  # PyTorch's eps is f64 on a CPU
    program.others = {1: mean, 2: scale}
    if weight is not None:
        scale = add("mul", scale, weight)
    shift = add("mul", mean, scale)
    shift = add("neg", shift) if bias is None else add("sub", bias, shift)
    return add("add", add("mul", x, scale), shift)


def _group_norm(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, weight, bias, n, channels, pixels, groups, eps = _torch_arguments(operation, program, refs)
    dtype, number, own = _out(operation), operation.index, channels // groups
    reshape = lambda ref, *shape: program.add("reshape", (ref,), dtype, number, internal=True, shape=shape)
    grouped = reshape(x, n, groups, own, pixels)
    mean, _, variance = _mean_and_variance(program, operation, grouped, [2, 3], own * pixels)
    weight, bias = (None if ref is None else reshape(ref, 1, groups, own, 1) for ref in (weight, bias))
    y = _linear_norm(program, operation, grouped, (mean, variance), eps, weight, bias)
    return program.add("reshape", (y,), dtype, number, shape=operation.results[0].shape)


def _batch_norm(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, weight, bias, _, _, training, _, eps = _torch_arguments(operation, program, refs)
    if not training:
        raise ValueError("batch norm by its running mean")
    dtype, number, shape = _out(operation), operation.index, operation.results[0].shape
    spread = [1, shape[1], *(1 for _ in shape[2:])]
    weight, bias = (
        None if ref is None else program.add("reshape", (ref,), dtype, number, internal=True, shape=spread) for ref in (weight, bias)
    )
    inner, axes = math.prod(shape[2:]), [0, *range(2, len(shape))]
    mean, _, variance = _mean_and_variance(program, operation, x, axes, shape[0] * inner, inner)
    y = _linear_norm(program, operation, x, (mean, variance), eps, weight, bias)
    program.nodes[y[1]] = program.nodes[y[1]]._replace(internal=False)
    return y


def _layer_norm(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, normalized, weight, bias, eps = _torch_arguments(operation, program, refs)
    dtype, number, axes = _out(operation), operation.index, list(range(-len(normalized), 0))
    mean, centred, variance = _mean_and_variance(program, operation, x, axes, math.prod(normalized))
    shifted = program.add("add", (variance, program.constant(eps)), dtype, number, internal=True)
    scale = program.add("rsqrt", (shifted,), dtype, number, internal=True)
    program.others = {1: mean, 2: scale}
    y = program.add("mul", (centred, scale), dtype, number, internal=True)
    if weight is not None:
        y = program.add("mul", (y, weight), dtype, number, internal=bias is not None)
    return y if bias is None else program.add("add", (y, bias), dtype, number)


def _silu(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    gate = program.add("logistic", refs[:1], _out(operation), operation.index, internal=True)
    return program.add("mul", (refs[0], gate), _out(operation), operation.index)


def _gelu(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    (x,), dtype, number = refs[:1], _out(operation), operation.index
    half, one = program.constant(0.5), program.constant(1.0)
    if operation.attributes["kwargs"].get("approximate", "none") == "tanh":
        cube = program.add("mul", (program.add("mul", (x, x), dtype, number, internal=True), x), dtype, number, internal=True)
        scaled = program.add("mul", (program.constant(0.044715), cube), dtype, number, internal=True)
        inner = program.add("add", (x, scaled), dtype, number, internal=True)
        inner = program.add("mul", (program.constant(math.sqrt(2 / math.pi)), inner), dtype, number, internal=True)
        gate = program.add("tanh", (inner,), dtype, number, internal=True)
    else:
        inner = program.add("mul", (x, program.constant(math.sqrt(0.5))), dtype, number, internal=True)
        gate = program.add("erf", (inner,), dtype, number, internal=True)
    gate = program.add("add", (one, gate), dtype, number, internal=True)
    halved = program.add("mul", (half, x), dtype, number, internal=True)
    return program.add("mul", (halved, gate), dtype, number)


BUILDERS: dict[str, Builder] = {
    **{name: _elementwise(name) for name in (*SPECIAL, "add", "sub", "mul", "div", "max", "min", "neg", "abs", "sign", "floor", "ceil")},
    **{name: _elementwise(name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or")},
    "add_any": _elementwise("add"), "select_n": _elementwise("select"), "round": _elementwise("round"),
    "convert_element_type": _elementwise("convert"), "stop_gradient": _elementwise("convert"), "copy": _elementwise("convert"),
    "integer_pow": _integer_pow, "square": _integer_pow, "dot_general": _jax_product, "conv_general_dilated": _jax_convolution,
    "reduce_sum": _jax_sum, "reshape": _jax_movement("reshape", "shape", None), "squeeze": _jax_movement("reshape", "shape", None),
    "expand_dims": _jax_movement("reshape", "shape", None), "transpose": _jax_movement("transpose", None, "permutation"),
    "broadcast_in_dim": _jax_movement("broadcast", "shape", "broadcast_dimensions"),
    "reduce_max": _jax_movement("reduce_max", None, "axes"), "reduce_min": _jax_movement("reduce_min", None, "axes"),
    **{f"aten.{name}": _torch_binary(kind) for name, kind in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("div", "div"))},
    **{f"aten.{name}": _torch_unary(name) for name in ("exp", "exp2", "log", "tanh", "rsqrt", "sqrt", "erf", "neg", "abs", "sin", "cos")},
    "aten.sigmoid": _torch_unary("logistic"), "aten._to_copy": _torch_unary("convert"), "aten.pow": _torch_pow,
    "aten.mm": _torch_product((((1,), (0,)), ((), ()))), "aten.bmm": _torch_product((((2,), (1,)), ((0,), (0,)))),
    "aten.addmm": _torch_addmm((((1,), (0,)), ((), ()))), "aten.baddbmm": _torch_addmm((((2,), (1,)), ((0,), (0,)))),
    "aten.sum": _torch_sum, "aten.mean": _torch_sum, "aten._softmax": _softmax, "aten.native_layer_norm": _layer_norm,
    "aten.native_group_norm": _group_norm, "aten.native_batch_norm": _batch_norm,
    "aten.silu": _silu, "aten.gelu": _gelu, "aten.rsub": _torch_rsub, "aten.clamp": _torch_clamp, "aten.relu": _torch_relu,
    "aten.clamp_min": _torch_clamp, "aten.reciprocal": _torch_reciprocal, "aten.where": _torch_where,
    "aten.amax": _torch_extreme("reduce_max"),
    "aten.amin": _torch_extreme("reduce_min"), "aten.maximum": _torch_binary("max"), "aten.minimum": _torch_binary("min"),
    "aten.convolution": _torch_convolution, "aten._scaled_mm": _torch_scaled_product,
    "aten.tanh_backward": _nodes(_tanh_backward), "aten.sigmoid_backward": _nodes(_sigmoid_backward), "clamp": _elementwise("clamp"),
    "aten.silu_backward": _nodes(_silu_backward), "aten.gelu_backward": _nodes(_gelu_backward), "aten._log_softmax": _nodes(_log_softmax),
    "aten.threshold_backward": _nodes(_threshold_backward), "aten._softmax_backward_data": _nodes(_softmax_backward),
    "aten._log_softmax_backward_data": _nodes(_log_softmax_backward),
}  # fmt: skip
