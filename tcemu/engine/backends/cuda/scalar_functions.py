"""A function of single numbers, written in JAX, as a function of CUDA C++: each operation of its trace is a line.

So what stands once in Python serves XLA, for whole arrays, and a kernel of ours, which can leave out what it knows to be zero.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

TYPES = {"bool": "bool", "int32": "int", "uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned int"}
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shift_left": "<<", "shift_right_logical": ">>",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
WRAPPING = ("add", "sub", "mul", "shift_left", "shift_right_logical")  # on the words of signed numbers, as XLA has them
SHAPELESS = ("broadcast_in_dim", "reshape", "squeeze", "copy")  # what does nothing to a single number
OTHERS = ("shift_right_arithmetic", "not", "convert_element_type", "select_n", "max", "min")
CALLS = ("jit", "pjit", "closed_call")  # whose trace is a part of this one


def scalar_function_text(name: str, fn: Callable[..., Any], *types: Any) -> str:
    """The text of `fn`, which takes numbers of these dtypes, of TYPES, and gives one.

    Its shifts are by fewer bits than the type has: by more, C++ promises nothing. Raises TypeError for an operation or a type that is not
    listed above.
    """
    closed = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct((), one) for one in types))
    given = [f"x{at}" for at in range(len(types))]
    parameters = ", ".join(f"{_type(var)} {word}" for var, word in zip(closed.jaxpr.invars, given, strict=True))
    lines: list[str] = []
    (result,) = _trace(closed, given, lines)
    head = f"__device__ __forceinline__ {_type(closed.jaxpr.outvars[0])} {name}({parameters}) {{"
    return "\n".join([head, *(f"    {line}" for line in lines), f"    return {result};", "}", ""])


def _trace(closed: ClosedJaxpr, given: Sequence[str], lines: list[str]) -> list[str]:
    """The lines of a trace whose parameters are these words; its results' words."""
    names: dict[Any, str] = dict(zip(closed.jaxpr.invars, given, strict=True))
    names |= {var: _constant(var, value) for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
    word = lambda var: _constant(var, var.val) if isinstance(var, Literal) else names[var]
    for equation in closed.jaxpr.eqns:
        name, words = equation.primitive.name, [word(var) for var in equation.invars]
        if name in CALLS:
            names |= zip(equation.outvars, _trace(equation.params["jaxpr"], words, lines), strict=True)
            continue
        (result,) = equation.outvars
        kind = _type(result)
        if name in SHAPELESS:
            names[result] = words[0]
            continue
        names[result] = f"v{len(lines)}"
        lines.append(f"[[maybe_unused]] const {kind} {names[result]} = {_expression(name, _type(equation.invars[0]), kind, words)};")
    return [word(var) for var in closed.jaxpr.outvars]


def _type(var: Any) -> str:
    kind = str(var.aval.dtype)
    if var.aval.shape or kind not in TYPES:
        raise TypeError(f"got {var.aval}; a function for kernels is of single numbers of {', '.join(TYPES)}")
    return TYPES[kind]


def _constant(var: Any, value: Any) -> str:
    number = int(np.asarray(value))
    return f"({_type(var)}){number}{'u' if number >= 0 else ''}"


def _expression(name: str, operand: str, result: str, words: Sequence[str]) -> str:
    """Returns the expression of a primitive whose first operand and whose result have these types."""
    if name in INFIX:
        x, y = (f"(unsigned){word}" if name in WRAPPING else word for word in words)
        return f"({result})({x} {INFIX[name]} {y})"
    if name == "shift_right_arithmetic" and operand == TYPES["int32"]:
        return f"{words[0]} >> {words[1]}"
    if name == "not":
        return f"({result}){'!' if result == TYPES['bool'] else '~'}{words[0]}"
    if name == "convert_element_type":
        return f"{words[0]} != 0" if result == TYPES["bool"] else f"({result}){words[0]}"
    if name == "select_n" and operand == TYPES["bool"]:
        return f"{words[0]} ? {words[2]} : {words[1]}"
    if name in ("max", "min"):
        return f"{words[0]} {'>' if name == 'max' else '<'} {words[1]} ? {words[0]} : {words[1]}"
    raise TypeError(f"{name} of {operand} is no operation that a function for kernels has; they are {', '.join((*INFIX, *OTHERS))}")
