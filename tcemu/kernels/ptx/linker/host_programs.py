"""Programs of integer operations, which NumPy executes on the host without compiling.

XLA takes some 25 ms to compile an addition of two registers, as long as NumPy takes for a thousand of them. The program is traced for
scalars, and executed elementwise for arrays of any shape. JAX and NumPy define the listed operations alike: sums and products wrap, and a
shift by the width or more gives zero, or the sign. Floating-point operations, and integer divisions, whose results for zero differ, are
left to XLA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

FUNCTIONS: dict[str, Callable[..., Any]] = {  # by the name of JAX's primitive
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not, "shift_left": np.left_shift,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
SHIFTS_RIGHT = {"shift_right_logical": "u", "shift_right_arithmetic": "i"}  # the kind of integers for which NumPy shifts so


class UnknownOperation(Exception):
    """An operation or a type of which only XLA has a program."""


class HostProgram:
    """A program that NumPy executes."""

    def __init__(self, program: Jaxpr, constants: Sequence[Any]) -> None:
        """Translate a program. Raises UnknownOperation unless all operations are elementwise and of integers."""
        self._values: list[Any] = []  # inputs, constants and results by number; None unless a constant
        self._instructions: list[tuple[Callable[..., Any], list[int], int]] = []  # (function, numbers of its operands, of its result)
        numbers = [self._add_value(var.aval, None) for var in program.invars]
        self._inputs = len(numbers)
        self._outputs = self._translate(program, numbers, constants)

    def __call__(self, *arrays: Any) -> list[Any]:
        """Execute the program on arrays whose shapes broadcast."""
        values = self._values.copy()
        values[: self._inputs] = map(np.asarray, arrays)
        with np.errstate(over="ignore"):  # of sums and products of scalars
            for function, operands, result in self._instructions:
                values[result] = function(*[values[number] for number in operands])
        return [values[number] for number in self._outputs]

    def __len__(self) -> int:
        """Return the number of operations."""
        return len(self._instructions)

    def _add_value(self, aval: Any, value: Any) -> int:
        if aval.shape != () or aval.dtype.kind not in "biu":
            raise UnknownOperation(f"values of type {aval}")
        self._values.append(value)
        return len(self._values) - 1

    def _translate(self, program: Jaxpr, inputs: Sequence[int], constants: Sequence[Any]) -> list[int]:
        """Add the instructions of a program whose inputs have these numbers; return the numbers of its outputs."""
        numbers = dict(zip(program.invars, inputs, strict=True))
        for var, value in zip(program.constvars, constants, strict=True):
            numbers[var] = self._add_value(var.aval, np.asarray(value))

        def find_number(operand: Any) -> int:
            return self._add_value(operand.aval, _dtype(operand).type(operand.val)) if isinstance(operand, Literal) else numbers[operand]

        for equation in program.eqns:
            operands = [find_number(operand) for operand in equation.invars]
            if equation.primitive.name == "jit":
                inner = equation.params["jaxpr"]
                results = self._translate(inner.jaxpr, operands, inner.consts)
            elif equation.primitive.name == "convert_element_type" and _dtype(equation.invars[0]) == _dtype(equation.outvars[0]):
                results = operands  # a change of JAX's weak types alone
            else:
                results = [self._add_value(var.aval, None) for var in equation.outvars]
                self._instructions.append((_find_function(equation), operands, results[0]))
            numbers |= zip(equation.outvars, results, strict=True)
        return [find_number(operand) for operand in program.outvars]


def _find_function(equation: JaxprEqn) -> Callable[..., Any]:
    """Return NumPy's function of an equation. Raises UnknownOperation if there is none."""
    name = equation.primitive.name
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    if name in SHIFTS_RIGHT:
        dtype = _dtype(equation.outvars[0])
        kind = np.dtype(f"{SHIFTS_RIGHT[name]}{dtype.itemsize}")
        return np.right_shift if kind == dtype else lambda value, count: np.right_shift(value.view(kind), count.view(kind)).view(dtype)
    if name == "select_n" and _dtype(equation.invars[0]).kind == "b" and len(equation.invars) == 3:
        return lambda which, if_false, if_true: np.where(which, if_true, if_false)
    if name == "convert_element_type":
        return partial(_convert, dtype=_dtype(equation.outvars[0]))
    raise UnknownOperation(name)


def _dtype(operand: Any) -> np.dtype:
    return operand.aval.dtype


def _convert(value: Any, dtype: np.dtype) -> Any:
    return value.view(dtype) if value.dtype.kind + dtype.kind in ("iu", "ui") and value.itemsize == dtype.itemsize else value.astype(dtype)


def trace_host_program(function: Callable[..., Any], shapes: Any) -> HostProgram | None:
    """Return the program of an elementwise function for NumPy; None if it has operations that only XLA executes.

    Args:
        function: Of trees of arrays.
        shapes: Its arguments as trees of `jax.ShapeDtypeStruct`, of which only the dtypes matter.

    Returns:
        The program, of the leaves of the arguments; it returns the leaves of the result.
    """
    scalars = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((), leaf.dtype), shapes)
    with jax.enable_x64(True):
        closed = jax.make_jaxpr(function)(*scalars)
    try:
        return HostProgram(closed.jaxpr, closed.consts)
    except UnknownOperation:
        return None
