"""Compare the error of a result with the error that the arithmetic of its operation may make, by a running error analysis in float64.

Every node adds at most its own rounding to the errors of its inputs. A sum of K terms in f32, in any order and with or without fma, errs by
at most K·u / (1 - K·u) times the sum of magnitudes, with u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 4.2). A
variance in one pass errs to first order by at most K·u times the mean of the squares (Chan, Golub and LeVeque, The American Statistician
37, 1983); four times that is allowed. A sum by a tensor core errs in each step by the truncation of its terms and by the rounding of the
step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tcemu.engine.formats.number_formats import TF32
from tcemu.operations.products.library.kernel_recipe import Steps
from tcemu.uses.drift.causes import program_inputs
from tcemu.uses.drift.node_arithmetic import EXACT, MOVEMENTS, ROW_READERS
from tcemu.uses.drift.programs import FORMATS, UNFIT, Node, Program
from tcemu.uses.drift.records import Record
from tcemu.uses.drift.summation import ROUNDED_OPERANDS, Summation

F32_UNIT = 2.0**-24
FUNCTION_UNITS = 4 * 2.0**-23  # relative error that a special function in f32 may have: 4 units of the last place
TINY = 2.0**-149
Bounded = tuple[np.ndarray, np.ndarray]  # value, and bound of its error


class Legitimacy(NamedTuple):
    """The errors of both results, in units of the bound of the error.

    Attributes:
        left: Largest error of the left result over its bound; at most 1 is inside.
        right: The same for the right result.
    """

    left: float
    right: float

    def __str__(self) -> str:
        words = [
            f"{name} {'inside' if ratio <= 1 else 'OUTSIDE'} ({ratio:.2g} of its bound)"
            for name, ratio in zip(self._fields, self, strict=True)
        ]
        return ", ".join(words)


def check_legitimate(
    record: Record,
    program: Program,
    left: np.ndarray,
    right: np.ndarray,
    summations: tuple[Summation | None, Summation | None] = (None, None),
) -> Legitimacy | None:
    """Compare two results with the exact one of a program; None if its operands were not kept, or a node has no bound.

    Args:
        record: The record that has the operands.
        program: The operations.
        left: Their result on one side.
        right: Their result on the other side.
        summations: The summation of each side, or None if it is unknown. The bound of a tensor core differs from that of f32.
    """
    inputs = program_inputs(record, program)
    if inputs is None or left.shape != right.shape:
        return None
    try:
        return _compare(program, inputs, (left, right), summations)
    except UNFIT:  # a record is not trusted
        return None


def _compare(
    program: Program,
    inputs: list[np.ndarray],
    results: tuple[np.ndarray, np.ndarray],
    summations: tuple[Summation | None, Summation | None],
) -> Legitimacy | None:
    ratios = []
    for result, how in zip(results, summations, strict=True):
        found = _exact_and_bound(program, inputs, how)
        if found is None:
            return None
        exact, bound = found
        bound = bound + _half_ulp(np.abs(exact) + bound, result.dtype)
        with np.errstate(all="ignore"):
            error = np.abs(result.astype(np.float64) - np.broadcast_to(exact, result.shape))
            ratio = np.where(np.isfinite(error) & np.isfinite(bound), error / np.maximum(bound, 1e-300), 0.0)
        ratios.append(float(ratio.max()) if ratio.size else 0.0)
    return Legitimacy(*ratios)


def _half_ulp(magnitude: np.ndarray, dtype: np.dtype) -> np.ndarray:
    facts: Any = ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        exponent = np.maximum(np.frexp(np.where(np.isfinite(magnitude), magnitude, 0))[1] - 1, facts.minexp)
    return np.ldexp(0.5, exponent - facts.nmant)


def _exact_and_bound(program: Program, inputs: list[np.ndarray], how: Summation | None) -> Bounded | None:
    values: list[Bounded] = []
    with np.errstate(all="ignore"):
        for number, node in enumerate(program.nodes):
            operands = [
                values[index] if kind == "node" else (inputs[index].astype(np.float64), np.zeros(inputs[index].shape))
                for kind, index in node.inputs
            ]
            if node.kind in ("sum", "product"):
                exact, error = _sum_bound(node, operands, inputs, how)
            elif node.kind == "moment":
                exact, error = _moment_bound(node, operands[0])
            elif node.kind in RULES:
                exact, error = RULES[node.kind](*operands)
                error = error + (F32_UNIT * np.abs(exact) + TINY if node.kind in ROUNDED else 0)
            elif node.kind in EXACT:
                (x, ex), function = operands[0], EXACT[node.kind]
                exact = function(x)
                error = (
                    np.maximum(np.abs(function(x + ex) - exact), np.abs(function(x - ex) - exact)) + FUNCTION_UNITS * np.abs(exact) + TINY
                )
            elif node.kind in MOVEMENTS:
                exact, error = (MOVEMENTS[node.kind](x, node.attributes) for x in operands[0])
            else:
                return None
            if number < len(program.nodes) - 1 and not node.internal and node.dtype in FORMATS and node.dtype != np.float32:
                error = error + _half_ulp(np.abs(exact) + error, node.dtype)
            values.append((np.asarray(exact), np.asarray(error)))
    return values[-1]


def _sum_bound(node: Node, operands: list[Bounded], inputs: list[np.ndarray], how: Summation | None) -> Bounded:
    read = ROW_READERS[node.kind]
    a, b, shape = read(node, [x for x, _ in operands])
    size_a, size_b, _ = read(node, [np.abs(x) for x, _ in operands])
    error_a, error_b, _ = read(node, [e for _, e in operands])
    if node.kind == "sum":
        size_b, error_b = np.abs(b).astype(np.float64), np.zeros(b.shape)
    if how is not None and node.kind == "product" and (how.order.a == TF32 or how.order.conditions.evidence == ROUNDED_OPERANDS):
        unit = 2.0 ** -(how.order.a.mantissa_bits + (how.order.cast != "RZ"))  # the operands are rounded before they are multiplied
        error_a, error_b = error_a + unit * size_a, error_b + unit * size_b
    times = lambda x, y: x @ y.astype(np.float64).swapaxes(-1, -2)
    exact, size = times(a, b), times(size_a, size_b)
    carried = times(error_a, size_b) + times(size_a, error_b) + times(error_a, error_b)
    k = a.shape[-1]
    unit = (k + 1) * F32_UNIT / max(1 - (k + 1) * F32_UNIT, 0.5)
    if how is not None and isinstance(how.order.unit, Steps):
        model = how.order.unit.arithmetic
        terms, bits = int(np.max(np.asarray(model.terms))), int(np.min(np.asarray(model.fraction_bits or 24)))
        steps = -(-k // terms) + len(how.order.slices.edges)
        unit = steps * ((terms + 1) * 2.0**-bits + 2.0 ** -(model.result_bits or model.result.mantissa_bits))  # type: ignore[operator]
    if how is not None and how.accumulator in ("float16", "bfloat16"):
        sums = -(-k // how.order.unit.op.k) if isinstance(how.order.unit, Steps) else 2 * k
        unit = (sums + len(how.order.slices.edges)) * (2.0**-11 if how.accumulator == "float16" else 2.0**-8)
    error = carried + unit * (size + carried) + (k + 1) * TINY
    divisor = node.attributes.get("divisor")
    if divisor:
        exact, error = exact / divisor, error / divisor + F32_UNIT * np.abs(exact) / divisor
    return exact.reshape(shape), error.reshape(shape)


def _moment_bound(node: Node, x: Bounded) -> Bounded:
    values, axes = x[0], tuple(node.attributes["axes"])
    mean = lambda y: y.mean(axis=axes, keepdims=True)
    k = np.prod([values.shape[axis] for axis in axes])
    if node.attributes["moment"] == 0:
        return mean(values), (k + 1) * F32_UNIT * mean(np.abs(values)) + mean(x[1]) + TINY
    spread = np.abs(values - mean(values))
    error = 4 * (k + 1) * F32_UNIT * mean(values**2) + mean(2 * spread * (x[1] + mean(x[1])) + (x[1] + mean(x[1])) ** 2)
    return mean(spread**2), error + TINY


def _quotient(x: Bounded, y: Bounded) -> Bounded:
    (a, ea), (b, eb) = x, y
    safe = np.maximum(np.abs(b) - eb, 1e-300)
    return a / b, (ea + np.abs(a / b) * eb) / safe


ROUNDED = ("add", "sub", "mul", "div")
RULES: dict[str, Callable[..., Bounded]] = {
    "add": lambda x, y: (x[0] + y[0], x[1] + y[1]),
    "sub": lambda x, y: (x[0] - y[0], x[1] + y[1]),
    "mul": lambda x, y: (x[0] * y[0], np.abs(x[0]) * y[1] + np.abs(y[0]) * x[1] + x[1] * y[1]),
    "div": _quotient,
    "neg": lambda x: (-x[0], x[1]),
    "abs": lambda x: (np.abs(x[0]), x[1]),
    "convert": lambda x: x,
    "max": lambda x, y: (np.maximum(x[0], y[0]), np.maximum(x[1], y[1])),
    "min": lambda x, y: (np.minimum(x[0], y[0]), np.maximum(x[1], y[1])),
}
