"""Functions of JAX evaluated by NumPy, equation by equation: nothing is compiled, so that the first call of a shape does not wait for XLA.

The functions are those of this room: f32 codes, whose additions, products, quotients, roots and fused multiply-adds are traced as their
names alone. In their place NumPy computes with floats, which gives the same bits: NumPy's f32 operations are IEEE operations, which nothing
contracts or flushes. Every other equation is one of integers, or a move.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn

from tcemu.base.errors import NotModelled
from tcemu.base.jax_internals import tracing_names
from tcemu.base.numpy_programs import NumpyProgram
from tcemu.engine.arithmetic.special_functions import NAN

F32 = np.dtype(np.float32)
_programs: dict[Any, Any] = {}
_lock = Lock()


def fma_f32(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Compute x·y + z in f32, rounded once.

    A product of two f32 has 48 bits, which f64 holds exactly. Its sum with z in f64 is rounded to 24 bits as the exact sum is, unless it
    lies halfway between two f32, or where these have fewer bits, at most at 2^-126; a sum that f32 rounds to zero is exact in f64. Such
    sums are rounded to odd in f64: a number of 53 bits that was rounded to odd is rounded to 24 bits as the exact one is (Boldo and
    Melquiond, 2008).
    """
    with np.errstate(invalid="ignore", over="ignore"):
        product = np.multiply(x, y, dtype=np.float64)
        total = np.asarray(product + z)
        found = total.astype(np.float32)
        doubtful = (total.view(np.int64) & 0x1FFFFFFF) == 0x10000000
        doubtful |= ((found.view(np.uint32) & 0x7FFFFFFF) - np.uint32(1)) < 0x00800000
        if doubtful.any():
            shape = total.shape
            p, c, near = np.broadcast_to(product, shape)[doubtful], np.broadcast_to(z, shape)[doubtful].astype(np.float64), total[doubtful]
            found[doubtful] = _round_to_odd(p, c, near).astype(np.float32)
        return found


def _round_to_odd(p: np.ndarray, c: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Return p + c in f64, rounded to odd, from the sum that is rounded to nearest."""
    back = total - p
    error = (p - (total - back)) + (c - back)
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where((error != 0) & np.isfinite(total) & ((bits & 1) == 0), bits + step, bits).view(np.float64)


FLOAT_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {  # by the name of a function of f32 codes
    "add_f32": np.add,
    "product_f32": np.multiply,
    "divide_f32": np.divide,
    "root_f32": np.sqrt,
    "fma_f32": fma_f32,
}


def _call_floats(name: str, *codes: np.ndarray) -> np.ndarray:
    found = np.asarray(FLOAT_FUNCTIONS[name](*(np.asarray(x).view(F32) for x in codes)), F32)
    result = found.view(np.uint32)
    invalid = np.isnan(found)
    return np.where(invalid, NAN, result) if invalid.any() else result


def _less(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.less(np.asarray(x).view(F32), np.asarray(y).view(F32))


CALLS = {name: partial(_call_floats, name) for name in FLOAT_FUNCTIONS} | {"less_f32": _less}


def _by_jax(equation: JaxprEqn) -> Callable[..., Any]:
    """Return the function of an equation that NumPy does not compute, by JAX."""
    parameters: Any = equation.primitive.get_bind_params(equation.params)
    functions, options = parameters if isinstance(parameters, tuple) else ((), parameters)  # a tuple before JAX 0.7

    def compute(*operands: np.ndarray) -> Any:
        found = equation.primitive.bind(*functions, *operands, **options)
        arrays = [np.asarray(x) for x in (found if equation.primitive.multiple_results else [found])]  # NumPy computes what follows
        return arrays[0] if len(arrays) == 1 else arrays

    return compute


def evaluate_by_numpy(fn: Callable[..., Any], *arrays: Any) -> Any:
    """Compute `fn(*arrays)` by NumPy.

    Args:
        fn: A function of JAX. Equal functions share a program: give a `functools.partial`-like value that hashes, or the same object.
        *arrays: Its operands.

    Returns:
        NumPy arrays, in the structure that fn returns.

    Raises:
        NotModelled: An operand is float64.
    """
    arrays = tuple(np.asarray(x) for x in arrays)
    if any(x.dtype == np.float64 for x in arrays):  # which JAX would trace as float32
        raise NotModelled("float64 has no rule; known are bfloat16, float16 and float32 (torch_cuda/)")
    key = (fn, tuple((x.shape, x.dtype) for x in arrays))
    with _lock:
        found = _programs.get(key)
    if found is None:
        with tracing_names():
            closed, shape = jax.make_jaxpr(fn, return_shape=True)(*arrays)
        found = NumpyProgram(closed.jaxpr, closed.consts, CALLS, _by_jax), jax.tree.structure(shape)
        with _lock:
            if len(_programs) > 512:
                _programs.clear()
            _programs[key] = found
    program, structure = found
    return jax.tree.unflatten(structure, [np.asarray(x) for x in program(*arrays)])


ARRAY = object()  # stands for an array among the arguments of `_bind`


@lru_cache(maxsize=1024)
def _bind(fn: Callable[..., Any], arguments: tuple[Any, ...], options: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    """Return a function of the arrays among its arguments; equal ones are one object."""

    def run(*arrays: Any) -> Any:
        given = iter(arrays)
        return fn(*[next(given) if argument is ARRAY else argument for argument in arguments], **dict(options))

    return run


def call_by_numpy(fn: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Compute `fn(*arguments, **options)`, a function of JAX, by NumPy. Arguments that are no NumPy arrays are static, and hash."""
    arrays = [np.ascontiguousarray(x) for x in arguments if isinstance(x, np.ndarray)]
    fixed = tuple(ARRAY if isinstance(x, np.ndarray) else x for x in arguments)
    return evaluate_by_numpy(_bind(fn, fixed, tuple(sorted(options.items()))), *arrays)
