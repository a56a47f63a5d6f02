"""Functions of JAX evaluated by NumPy, equation by equation: nothing is compiled, so that the first call of a shape does not wait for XLA.

The functions are those of this room: f32 codes, whose additions, products, quotients, roots and fused multiply-adds are traced as their
names alone. In their place NumPy computes with floats, which gives the same bits: NumPy's f32 operations are IEEE operations, which nothing
contracts or flushes. Every other equation is one of integers, or a move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from threading import Lock
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from tcemu.base.jax_internals import named_call, split_scan_operands, tracing_names
from tcemu.engine.arithmetic.special_functions import NAN

F32 = np.dtype(np.float32)
TO_NEAREST_EVEN = int(lax.RoundingMethod.TO_NEAREST_EVEN)
CALLS = (
    "pjit",
    "jit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vmap_call",
    "custom_partitioning",
    "remat2",
)
INNER = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")  # parameters that hold the program of a call
_programs: dict[Any, Any] = {}
_lock = Lock()


def fma_f32(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Compute x·y + z in f32, rounded once.

    A product of two f32 has 48 bits, which f64 holds exactly. Its sum with z is rounded to odd in f64, and a number of 53 bits that was
    rounded to odd is rounded to 24 bits as the exact one is (Boldo and Melquiond, 2008).
    """
    p, c = np.multiply(x, y, dtype=np.float64), z.astype(np.float64)
    total = p + c
    back = total - p
    error = (p - (total - back)) + (c - back)
    inexact = (error != 0) & np.isfinite(total)
    if not inexact.any():
        return total.astype(np.float32)
    bits = np.asarray(total).view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where(inexact & ((bits & 1) == 0), bits + step, bits)
    return odd.view(np.float64).astype(np.float32)


FLOAT_FUNCTIONS: dict[str, Callable[..., np.ndarray]] = {  # by the name of a function of f32 codes
    "add_f32": np.add,
    "multiply_f32": np.multiply,
    "divide_f32": np.divide,
    "root_f32": np.sqrt,
    "fma_f32": fma_f32,
}


def _call_floats(name: str, *codes: np.ndarray) -> np.ndarray:
    found = np.asarray(FLOAT_FUNCTIONS[name](*(np.asarray(x).view(F32) for x in codes)), F32)
    result = found.view(np.uint32)
    invalid = np.isnan(found)
    return np.where(invalid, NAN, result) if invalid.any() else result


# ---- primitives


def _shift(left: bool, arithmetic: bool, x: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Shift as XLA does: by the number of bits or more gives 0, or the sign."""
    x, bits = np.asarray(x), 8 * np.asarray(x).dtype.itemsize
    count = np.asarray(count).astype(np.int64) & 0xFFFFFFFF
    inside = np.minimum(count, bits - 1).astype(x.dtype)
    if left:
        return np.where(count >= bits, x.dtype.type(0), x << inside)
    if arithmetic:
        signed = np.dtype(f"i{x.dtype.itemsize}")
        return (x.view(signed) >> inside.view(signed)).view(x.dtype)
    unsigned = np.dtype(f"u{x.dtype.itemsize}")
    return np.where(count >= bits, unsigned.type(0), x.view(unsigned) >> inside.view(unsigned)).view(x.dtype)


def _convert(x: np.ndarray, *, new_dtype: Any, **_: Any) -> np.ndarray:
    x, dtype = np.asarray(x), np.dtype(new_dtype)
    if dtype.kind in "iu" and x.dtype.kind not in "iub":  # XLA saturates, and gives 0 for NaN
        info, wide = np.iinfo(dtype), np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf)
        return np.where(wide >= info.max, info.max, np.where(wide <= info.min, info.min, np.clip(wide, -(2.0**62), 2.0**62))).astype(dtype)
    return x.astype(dtype)


def _select(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.where(which, cases[1], cases[0]) if np.asarray(which).dtype == bool else np.choose(which, cases)


def _broadcast(x: np.ndarray, *_: Any, shape: Sequence[int], broadcast_dimensions: Sequence[int], **__: Any) -> np.ndarray:
    x = np.asarray(x)
    own = [1] * len(shape)
    for axis, place in enumerate(broadcast_dimensions):
        own[place] = x.shape[axis]
    return np.broadcast_to(x.reshape(own), shape)


def _iota(*, dtype: Any, shape: Sequence[int], dimension: int, **_: Any) -> np.ndarray:
    own = [-1 if axis == dimension else 1 for axis in range(len(shape))]
    return np.broadcast_to(np.arange(shape[dimension], dtype=dtype).reshape(own), shape)


def _leading_zeros(x: np.ndarray) -> np.ndarray:
    x = np.asarray(x)
    bits = 8 * x.dtype.itemsize
    _, exponent = np.frexp(x.view(np.dtype(f"u{x.dtype.itemsize}")).astype(np.float64))
    return (bits - exponent).astype(x.dtype)  # frexp(0) has the exponent 0; 32 bits are exact in f64


def _slice(x: np.ndarray, *, start_indices: Any, limit_indices: Any, strides: Any) -> np.ndarray:
    return x[tuple(map(slice, start_indices, limit_indices, strides or (1,) * x.ndim))]


def _pad(x: np.ndarray, value: np.ndarray, *, padding_config: Any) -> np.ndarray:
    if any(inner or low < 0 or high < 0 for low, high, inner in padding_config):
        raise NotImplementedError
    return np.pad(x, [(low, high) for low, high, _ in padding_config], constant_values=np.asarray(value))


def _gather(x: np.ndarray, indices: np.ndarray, *, dimension_numbers: Any, slice_sizes: Any, mode: Any, **_: Any) -> np.ndarray:
    """Take elements or rows of the first axis; anything else is left to JAX."""
    numbers, indices = dimension_numbers, np.asarray(indices)
    rest, batch = x.ndim - 1, indices.ndim - 1
    simple = (
        numbers.collapsed_slice_dims == (0,)
        and numbers.start_index_map == (0,)
        and not numbers.operand_batching_dims
        and tuple(slice_sizes) == (1, *x.shape[1:])
        and tuple(numbers.offset_dims) == tuple(range(batch, batch + rest))
    )
    places = indices[..., 0]
    if not simple or ("CLIP" not in str(mode) and places.size and (places.min() < 0 or places.max() >= len(x))):
        raise NotImplementedError
    return np.take(x, np.clip(places, 0, len(x) - 1), axis=0)


def _scatter(x: np.ndarray, indices: np.ndarray, updates: np.ndarray, *, dimension_numbers: Any, **_: Any) -> np.ndarray:
    """Replace elements or rows of the first axis; anything else is left to JAX."""
    numbers, places = dimension_numbers, np.asarray(indices)[..., 0]
    simple = numbers.inserted_window_dims == (0,) and numbers.scatter_dims_to_operand_dims == (0,) and not numbers.operand_batching_dims
    windows = tuple(range(places.ndim, places.ndim + x.ndim - 1)) == tuple(numbers.update_window_dims)
    if not simple or not windows or (places.size and (places.min() < 0 or places.max() >= len(x))):
        raise NotImplementedError
    found = np.array(x)
    found[places] = updates
    return found


def _reduce(how: Any, x: np.ndarray, *, axes: Sequence[int], **_: Any) -> np.ndarray:
    return how.reduce(x, axis=tuple(axes))


def _argmax(x: np.ndarray, *, axes: Sequence[int], index_dtype: Any, **_: Any) -> np.ndarray:
    return np.argmax(x, axis=axes[0]).astype(index_dtype)


def _round_half(x: np.ndarray, *, rounding_method: Any) -> np.ndarray:
    if int(rounding_method) != TO_NEAREST_EVEN:
        raise NotImplementedError
    return np.rint(x)


PLAIN: dict[str, Callable[..., Any]] = {  # functions of the operands alone
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs, "sign": np.sign, "floor": np.floor,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "eq": np.equal, "ne": np.not_equal,
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "min": np.minimum, "max": np.maximum,
    "is_finite": np.isfinite, "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high), "select_n": _select,
    "shift_left": partial(_shift, True, False), "shift_right_logical": partial(_shift, False, False),
    "shift_right_arithmetic": partial(_shift, False, True), "clz": _leading_zeros,
    **dict.fromkeys(("copy", "copy_p", "stop_gradient", "xla_metadata_value"), lambda x: x),
}  # fmt: skip
PRIMITIVES: dict[str, Callable[..., Any]] = {  # functions of the operands and of a primitive's parameters
    "iota": _iota, "convert_element_type": _convert, "broadcast_in_dim": _broadcast, "slice": _slice, "pad": _pad, "gather": _gather,
    "scatter": _scatter,
    "bitcast_convert_type": lambda x, *, new_dtype: np.asarray(x).view(np.dtype(new_dtype)),
    "reshape": lambda x, *_, new_sizes, **__: np.reshape(x, new_sizes),
    "transpose": lambda x, *, permutation: np.transpose(x, permutation), "squeeze": lambda x, *, dimensions: np.squeeze(x, dimensions),
    "expand_dims": lambda x, *, dimensions: np.expand_dims(x, dimensions), "rev": lambda x, *, dimensions: np.flip(x, dimensions),
    "concatenate": lambda *x, dimension: np.concatenate(x, dimension), "stack": lambda *x, axis=0, **_: np.stack(x, axis),
    "round": _round_half, "argmax": _argmax, "reduce_or": partial(_reduce, np.logical_or), "reduce_and": partial(_reduce, np.logical_and),
    "reduce_max": partial(_reduce, np.maximum), "reduce_min": partial(_reduce, np.minimum),
}  # fmt: skip


def evaluate_by_numpy(fn: Callable[..., Any], *arrays: Any) -> Any:
    """Compute `fn(*arrays)` by NumPy.

    Args:
        fn: A function of JAX. Equal functions share a program: give a `functools.partial`-like value that hashes, or the same object.
        *arrays: Its operands.

    Returns:
        NumPy arrays, in the structure that fn returns.
    """
    arrays = tuple(np.asarray(x) for x in arrays)
    key = (fn, tuple((x.shape, x.dtype) for x in arrays))
    with _lock:
        program = _programs.get(key)
    if program is None:
        with tracing_names():
            closed, shape = jax.make_jaxpr(fn, return_shape=True)(*arrays)
        program = _Program(closed), jax.tree.structure(shape)
        with _lock:
            if len(_programs) > 512:
                _programs.clear()
            _programs[key] = program
    steps, structure = program
    with np.errstate(all="ignore"):
        return jax.tree.unflatten(structure, [np.asarray(x) for x in steps.run(arrays)])


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


class _Step(NamedTuple):
    """One function of NumPy between slots."""

    compute: Callable[..., Any]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    is_one: bool  # compute returns the result, otherwise a list of results
    ended: tuple[int, ...]  # slots that no later step reads, so that their memory is free early


class _Program:
    """The equations of a jaxpr and of all that it calls, as one list of steps between numbered slots."""

    def __init__(self, closed: Any) -> None:
        self.values: list[Any] = []  # at the beginning
        self.steps: list[_Step] = []
        self.inputs = [self._slot() for _ in closed.jaxpr.invars]
        self.outputs = self._add(closed.jaxpr, closed.consts, self.inputs)
        later = set(self.outputs)
        for number in reversed(range(len(self.steps))):
            step = self.steps[number]
            ended = {*step.operands, *step.results} - later
            later |= ended
            self.steps[number] = step._replace(ended=tuple(ended))

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the results."""
        values = self.values.copy()
        for slot, argument in zip(self.inputs, arguments, strict=True):
            values[slot] = argument
        for compute, operands, results, is_one, ended in self.steps:
            found = compute(*[values[slot] for slot in operands])
            if is_one:
                values[results[0]] = found
            else:
                for slot, value in zip(results, found, strict=True):
                    values[slot] = value
            for slot in ended:
                values[slot] = None
        return [values[slot] for slot in self.outputs]

    def _slot(self, value: Any = None) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _add(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int]) -> list[int]:
        """Add the equations of a jaxpr, and return the slots of its results."""
        slots = dict(zip(jaxpr.invars, inputs, strict=True))
        slots |= {variable: self._slot(np.asarray(value)) for variable, value in zip(jaxpr.constvars, consts, strict=True)}
        find = lambda atom: self._slot(np.asarray(atom.val, atom.aval.dtype)) if hasattr(atom, "val") else slots[atom]
        for equation in jaxpr.eqns:
            operands = [find(atom) for atom in equation.invars]
            inner = next((equation.params[key] for key in INNER if key in equation.params), None)
            if equation.primitive.name in CALLS and inner is not None:
                closed = hasattr(inner, "consts")
                results = self._add(inner.jaxpr if closed else inner, inner.consts if closed else (), operands)
            else:
                results = [self._slot() for _ in equation.outvars]
                self.steps.append(_Step(_compile(equation), tuple(operands), tuple(results), len(results) == 1, ()))
            slots.update(zip(equation.outvars, results, strict=True))
        return [find(atom) for atom in jaxpr.outvars]


def _compile(equation: Any) -> Callable[..., Any]:
    """Return what computes an equation: its only result, or a list of results."""
    kind, params = equation.primitive.name, equation.params
    is_one = len(equation.outvars) == 1
    if equation.primitive is named_call:
        return partial(_call_floats, params["name"])
    if kind in ("cond", "scan", "while"):
        run = {"cond": _branches, "scan": _scan, "while": _loop}[kind](params)
        return (lambda *operands: run(operands)[0]) if is_one else (lambda *operands: run(operands))
    extra = {key: value for key, value in params.items() if key not in ("weak_type", "sharding", "accuracy", "unroll")}
    how = PLAIN.get(kind) or (partial(PRIMITIVES[kind], **extra) if kind in PRIMITIVES else _refuse)

    def compute(*operands: Any) -> Any:
        try:
            found = how(*operands)
        except (NotImplementedError, TypeError):
            found = _by_jax(equation, operands)
            return found[0] if is_one else found
        return found if is_one else [found]

    return compute


def _refuse(*_: Any) -> Any:
    raise NotImplementedError


def _by_jax(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Compute an equation that NumPy does not, by JAX."""
    parameters: Any = equation.primitive.get_bind_params(equation.params)
    functions, options = parameters if isinstance(parameters, tuple) else ((), parameters)  # a tuple before JAX 0.7
    found = equation.primitive.bind(*functions, *operands, **options)
    return [np.asarray(x) for x in found] if equation.primitive.multiple_results else [np.asarray(found)]


def _branches(params: Any) -> Callable[[Sequence[Any]], list[Any]]:
    branches = [_Program(branch) for branch in params["branches"]]
    return lambda operands: branches[int(np.asarray(operands[0]))].run(operands[1:])


def _scan(params: Any) -> Callable[[Sequence[Any]], list[Any]]:
    body = _Program(params["jaxpr"])
    order = range(params["length"])[:: -1 if params["reverse"] else 1]

    def run(operands: Sequence[Any]) -> list[Any]:
        consts, carry, xs = split_scan_operands(params, operands)
        slots: list[list[Any]] = []
        for number in order:
            found = body.run([*consts, *carry, *(np.asarray(x)[number] for x in xs)])
            carry = found[: len(carry)]
            slots.append(found[len(carry) :])
        slots = slots[::-1] if params["reverse"] else slots
        return [*carry, *(np.stack(column) for column in zip(*slots, strict=True))]

    return run


def _loop(params: Any) -> Callable[[Sequence[Any]], list[Any]]:
    condition, body = _Program(params["cond_jaxpr"]), _Program(params["body_jaxpr"])
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]

    def run(operands: Sequence[Any]) -> list[Any]:
        of_condition, of_body, carry = operands[:first], operands[first:second], list(operands[second:])
        while bool(np.asarray(condition.run([*of_condition, *carry])[0])):
            carry = body.run([*of_body, *carry])
        return carry

    return run
