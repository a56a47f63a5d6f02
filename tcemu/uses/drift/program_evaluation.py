"""Programs evaluated under a chosen arithmetic, whole or for a sample of the result's elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from tcemu.operations.functional.torch_cuda.numpy_evaluation import fma_f32
from tcemu.uses.drift.cpu_sums import multiply_row, torch_sum
from tcemu.uses.drift.moments import mean_and_variance
from tcemu.uses.drift.node_arithmetic import (
    ELEMENTWISE,
    EXACT,
    GPU_FUNCTIONS,
    MOVEMENTS,
    ROW_READERS,
    cuda_exp,
    gpu_function,
    padded_call,
    sum_rows,
    xla_function,
)
from tcemu.uses.drift.programs import FORMATS, SPECIAL, Choices, Node, Program
from tcemu.uses.drift.records import DTYPES
from tcemu.uses.drift.samples import GATHERED, REDUCTIONS, ROWWISE, SUMS, Sample
from tcemu.uses.drift.sum_evaluation import sum_products


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
                value = _sum_node(node, operands, choices, None if sample is None else sample.columns[number])
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


def _sum_node(node: Node, operands: list[np.ndarray], choices: Choices, places: tuple[np.ndarray, int, int] | None) -> np.ndarray:
    """Add terms, or the products of two operands: the whole result; with places, the rows [n, K] of a sample's elements."""
    how, is_whole = choices.require_summation(), places is None
    bias = operands[2].astype(np.float32) if how.bias_first and len(operands) > 2 else None
    if places is None:
        a, b, shape = ROW_READERS[node.kind](node, operands)
        places = np.arange(math.prod(shape)), math.prod(shape), operands[0].ndim
    else:
        a, shape = operands[0][None], operands[0].shape[:1]
        b = operands[1][None] if node.kind == "product" else np.ones((1, 1, a.shape[2]), a.dtype)
    total = None
    if how.library:
        mkl = how.library == "mkl"
        total = multiply_row(a[0], b[0], *places[:2]) if mkl else torch_sum(a[0].astype(np.float32), node.attributes["axes"], *places)
    if total is None:
        starts = [bias] * len(a)
        if is_whole and bias is not None:
            starts = np.broadcast_to(bias, shape).reshape(len(a), a.shape[1], b.shape[1])
        pairs = [(x[:, None], y[None]) if is_whole else (x, y) for x, y in zip(a, b, strict=True)]
        parts = [sum_products(how, x, y, start) for (x, y), start in zip(pairs, starts, strict=True)]
        total = np.stack(parts) if parts else np.zeros(shape, np.float32)
    total = total.reshape(shape)
    return total / np.float32(node.attributes["divisor"]) if node.attributes.get("divisor") else total


def _moment(node: Node, x: np.ndarray, choices: Choices, is_sampled: bool) -> np.ndarray:
    """Compute the mean or the variance of rows."""
    assert choices.moments is not None, "a program with moments needs their arithmetic"
    rows, _, shape = (x, None, x.shape[:1]) if is_sampled else sum_rows(node, [x])
    rows = rows.reshape(-1, rows.shape[-1])
    inner = node.attributes.get("inner") or rows.shape[1]
    return mean_and_variance(choices.moments, rows, inner)[node.attributes["moment"]].reshape(shape)


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
            return padded_call(partial(gpu_function, kind), x)
        if choices.functions == "cuda" and kind in ("exp", "logistic"):
            power = padded_call(cuda_exp, -x if kind == "logistic" else x)
            return power if kind == "exp" else np.float32(1) / (np.float32(1) + power)
        if choices.functions == "expanded" and kind == "logistic":  # XLA expands the logistic of bf16 and f16 before it widens the steps
            step = lambda y: y.astype(node.dtype).astype(np.float32)
            return np.float32(1) / step(np.float32(1) + step(np.exp(-x.astype(np.float64)).astype(np.float32)))
        if choices.functions == "expanded" and kind == "rsqrt":
            return np.float32(1) / np.sqrt(x)
        if choices.functions == "xla":
            return padded_call(partial(xla_function, kind), x)
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
