"""The errors of a softmax, norm or activation by a kernel, against the exact function of the same operands in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import erf, pi, sqrt

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tcemu.engine.formats.number_formats import ARRAY_FORMATS
from tcemu.uses.emulation.function_choices import FunctionDecision, compute_function
from tcemu.uses.emulation.product_errors import ErrorSums, ProductErrors, WorstElement
from tcemu.uses.emulation.survey import Function
from tcemu.uses.study.accuracy import ErrorTally

POLICY = "functions"  # name of the policy in the rows of functions
Operands = tuple[np.ndarray | None, ...]


def measure_function_errors(function: Function, decision: FunctionDecision, runs: Sequence[Operands]) -> ProductErrors:
    """Measure the errors of a function over its runs by a kernel.

    Args:
        function: The function.
        decision: The decision to replace it.
        runs: Operands of each run: x, and for a norm the weight and the bias, or None.
    """
    sums = ErrorSums(ErrorTally(ARRAY_FORMATS[np.dtype(function.dtype)]))
    for number, operands in enumerate(runs):
        given = (None if operand is None else jnp.asarray(operand) for operand in operands)
        computed = _as_rows(function, compute_function(function, decision.kernel, *given))  # type: ignore[arg-type]
        exact = _as_rows(function, exact_function(function, *operands))
        index = sums.add(computed, exact)
        if index is not None:
            sums.worst = WorstElement(number, index, float(computed[index]), Fraction(float(exact[index])))
    return sums.summarise(function, POLICY, decision.reason, decision.kernel, len(runs))


def _as_rows(function: Function, x: ArrayLike) -> np.ndarray:
    """Return an array as float64 [1, rows, columns]."""
    return np.moveaxis(np.asarray(x, np.float64), function.axis, -1).reshape(1, -1, max(function.columns, 1))


def exact_function(
    function: Function, x: np.ndarray | None, weight: np.ndarray | None = None, bias: np.ndarray | None = None
) -> np.ndarray:
    """Compute a function in float64, with an error of some units in the 52nd bit, which is 2^-20 of one in the last bit of f32."""
    operand = np.asarray(x, np.float64)
    with np.errstate(all="ignore"):
        return EXACT[function.kind](function, operand, *(None if v is None else np.asarray(v, np.float64) for v in (weight, bias)))


def _softmax(function: Function, x: np.ndarray, *_: None) -> np.ndarray:
    power = np.exp(x - x.max(axis=function.axis, keepdims=True))
    return power / power.sum(axis=function.axis, keepdims=True)


def _log_softmax(function: Function, x: np.ndarray, *_: None) -> np.ndarray:
    shifted = x - x.max(axis=function.axis, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=function.axis, keepdims=True))


def _rms_norm(function: Function, x: np.ndarray, weight: np.ndarray | None, _: np.ndarray | None) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + function.eps) * (1.0 if weight is None else weight)


def _layer_norm(function: Function, x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None) -> np.ndarray:
    return _rms_norm(function, x - x.mean(axis=-1, keepdims=True), weight, None) + (0.0 if bias is None else bias)


def _silu(_: Function, x: np.ndarray, *__: None) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _gelu(function: Function, x: np.ndarray, *_: None) -> np.ndarray:
    if function.form == "erf":
        return 0.5 * x * (1 + np.vectorize(erf, otypes=[np.float64])(x / sqrt(2)))
    return 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))


EXACT: dict[str, Callable[..., np.ndarray]] = {
    "softmax": _softmax, "log_softmax": _log_softmax, "rms_norm": _rms_norm, "layer_norm": _layer_norm, "silu": _silu, "gelu": _gelu,
}  # fmt: skip
