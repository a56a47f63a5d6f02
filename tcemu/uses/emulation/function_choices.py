"""A policy's choice for one softmax, norm or activation: the kernel of `tcemu.functional` that computes it.

A policy for functions, the argument `functions` of `tcemu.emulate` and `tcemu.compare`, has one of three forms:

- the name of kernels in `tcemu.functional.KERNELS`, such as "liger", for every function that has a kernel of that name;
- rules: a dict, or a list of pairs, from a pattern to a choice. The first rule that matches counts. A pattern is a string for the
  function's kind, name or scope or the path of a parameter, in which "*" stands for anything (`fnmatch`), a regular expression, or a
  function from a `Function` to a bool;
- a function from a `Function` to a choice.

A choice is the name of a kernel, a value such as a `SoftmaxKernel`, or None, which leaves the function as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tcemu.operations.functional.activations import gelu, silu
from tcemu.operations.functional.kernel_table import KERNELS, kernel_value
from tcemu.operations.functional.kernel_values import GeluKernel, KernelValue, LayerNormKernel, RmsNormKernel, SiluKernel, SoftmaxKernel
from tcemu.operations.functional.norms import layer_norm, rms_norm
from tcemu.operations.functional.row_softmax import log_softmax, softmax
from tcemu.uses.emulation.decisions import NO_RULE, matches_pattern, pattern_text, rule_pairs, unused_rule_warnings
from tcemu.uses.emulation.function_patterns import FLOATS
from tcemu.uses.emulation.survey import Function

KERNEL_TYPES: dict[str, type[KernelValue]] = {
    "softmax": SoftmaxKernel, "log_softmax": SoftmaxKernel, "rms_norm": RmsNormKernel, "layer_norm": LayerNormKernel, "silu": SiluKernel,
    "gelu": GeluKernel,
}  # fmt: skip
FunctionChoice = KernelValue | str | None
FunctionPattern = str | re.Pattern[str] | Callable[[Function], bool]
FunctionRules = Mapping[FunctionPattern, FunctionChoice] | Sequence[tuple[FunctionPattern, FunctionChoice]]
FunctionPolicy = str | FunctionRules | Callable[[Function], FunctionChoice] | None


class FunctionDecision(NamedTuple):
    """A policy's decision on a function."""

    kernel: KernelValue | str | None  # what computes it, or None if it is left unchanged
    reason: str  # name of the kernel, or why the function is left


def as_function_policy(policy: FunctionPolicy) -> FunctionPolicy:
    """Return the policy with rules as a tuple of pairs.

    Raises:
        TypeError: It is no policy for functions.
        ValueError: A name is that of no kernel.
    """
    if policy is None or (callable(policy) and not isinstance(policy, type)):
        return policy
    if isinstance(policy, str):
        _check_row(policy)
        return policy
    rules = rule_pairs(policy)
    if rules is not None and all(isinstance(choice, KernelValue | str | None) for _, choice in rules):
        for pattern, choice in rules:
            if isinstance(choice, str):
                _check_row(choice, pattern if isinstance(pattern, str) else "")
        return rules
    raise TypeError(
        f"functions: got {policy!r}; expected the name of kernels in tcemu.functional.KERNELS, as 'liger', a function from a Function to a "
        "choice, or rules: a dict, or a list of pairs, from a pattern, as 'softmax' or '*_norm', to a kernel's name, a value such as "
        "tcemu.functional.SoftmaxKernel(), or None"
    )


def _check_row(name: str, kind: str = "") -> None:
    """Raise ValueError if a function, or any function, has no kernel of this name."""
    rows = {own: tuple(KERNELS[own]) for own in ([kind] if kind in KERNEL_TYPES else KERNEL_TYPES)}
    if not any(name in known for known in rows.values()):
        listed = "; ".join(f"{own}: {', '.join(known)}" for own, known in rows.items())
        raise ValueError(f"functions: {name!r} is the name of no kernel; tcemu.functional.KERNELS has {listed}")


def decide_function(policy: FunctionPolicy, function: Function) -> FunctionDecision:
    """Decide on a function by a policy, as `as_function_policy` returns it.

    Raises:
        TypeError: The choice is no kernel of this function.
        ValueError: The function has no kernel of the chosen name, or the kernel has another form of GELU.
    """
    if policy is None:
        return FunctionDecision(None, "there is no policy for functions")
    if isinstance(policy, str):
        choice, why = (policy, "") if policy in KERNELS[function.kind] else (None, f"{function.kind} has no kernel {policy!r}")
    elif callable(policy):
        choice, why = policy(function), "the policy leaves it"
    else:
        assert isinstance(policy, tuple)  # as `as_function_policy` leaves rules
        matching = (
            (choice, f"the rule for {pattern_text(pattern)} leaves it") for pattern, choice in policy if matches_pattern(pattern, function)
        )
        choice, why = next(matching, (None, NO_RULE))
    for dtype in (function.operand_dtype, function.dtype):
        if choice is not None and jnp.dtype(dtype).name not in FLOATS:
            return FunctionDecision(None, f"of {jnp.dtype(dtype).name}, which kernels do not load and store")
    if choice is None:
        return FunctionDecision(None, why)
    kind = KERNEL_TYPES[function.kind]
    if not isinstance(choice, kind | str):
        raise TypeError(f"functions: for {function} it gave {choice!r}; expected a {kind.__name__}, a kernel's name or None")
    if isinstance(choice, str) and choice not in KERNELS[function.kind]:
        rows = ", ".join(KERNELS[function.kind])
        raise ValueError(f"functions: for {function} it gave {choice!r}; {function.kind} has the kernels {rows}; or give a {kind.__name__}")
    if function.kind == "gelu":
        form = kernel_value("gelu", GeluKernel, choice, function.columns, function.operand_dtype).form  # type: ignore[arg-type]
        if (form == "erf") != (function.form == "erf"):
            other = f"GELU by {function.form}, and the kernel's form is {form}"
            if isinstance(policy, str):
                return FunctionDecision(None, other)
            raise ValueError(f"functions: {function} is {other}; choose a kernel of the same function")
    return FunctionDecision(choice, choice if isinstance(choice, str) else kind.__name__)


def compute_function(function: Function, kernel: Any, x: Array, weight: Array | None = None, bias: Array | None = None) -> Array:
    """Compute a function by a kernel.

    Args:
        function: The function, which has the axis and the other numbers.
        kernel: The kernel's name or value.
        x: Operand.
        weight: Weight of a norm, or None.
        bias: Bias of a norm, or None.
    """
    options: dict[str, Any] = {"kernel": kernel, "dtype": function.dtype}
    if function.kind in (by_axis := {"softmax": softmax, "log_softmax": log_softmax}):
        return by_axis[function.kind](x, function.axis, **options)
    if function.kind in (elementwise := {"silu": silu, "gelu": gelu}):
        return elementwise[function.kind](x, **options)
    vector = partial(jnp.full, (function.columns,), dtype=np.float32)
    weight = vector(1.0) if weight is None else jnp.reshape(weight, -1)
    if function.kind == "rms_norm":
        return rms_norm(x, weight, eps=function.eps or 0.0, **options)
    bias = vector(-0.0) if bias is None else jnp.reshape(bias, -1)  # x + -0 is x, for -0 too
    return layer_norm(x, weight, bias, eps=function.eps or 0.0, **options)


def unused_function_warnings(policy: FunctionPolicy, functions: Sequence[Function], replaced: int) -> list[str]:
    """Return warnings for a policy for functions (functions excepted) that replaced nothing and for its rules that match no function."""
    if policy is None or callable(policy):
        return []
    names = ", ".join(dict.fromkeys(f"{function.name} ({function.kind})" for function in functions[:8])) or "none"
    lines = []
    if isinstance(policy, tuple):
        lines = [f"functions: {line}" for line in unused_rule_warnings(policy, functions, "function", names)]
    wants = isinstance(policy, str) or (isinstance(policy, tuple) and any(choice is not None for _, choice in policy))
    if wants and not replaced and not lines:
        lines.append(f"functions: no function is replaced; the functions are {names}; .report(...) lists all")
    return lines
