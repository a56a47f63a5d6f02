"""Programs of JAX that NumPy executes, equation by equation: nothing is compiled, so that nobody waits for XLA.

XLA takes some 25 ms to compile an addition and 0.3 s a store, as long as NumPy takes for hundreds of them. Integers, moves and conversions
have the same words by both: sums and products wrap, and a shift by the width or more gives zero, or the sign. So have IEEE operations of
f32 and f64, but XLA may flush subnormal numbers and fuse a product with a sum. A program of floats must depend on neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, Literal

from tcemu.base.jax_internals import named_call, split_scan_operands

Equation = Any  # of a `Jaxpr`: the types of its variables are abstract values, which have shape and dtype
Array = Any  # of NumPy, or a scalar of it
CALLS = ("pjit", "jit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vmap_call", "remat2")
INNER = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")  # parameters that hold the program of a call
FOLDED_SIZE = 256  # elements of a value that is computed when the program is translated, if it follows from constants
FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


class UnknownOperation(Exception):
    """An operation or a type that NumPy does not compute as XLA does."""


class NumpyProgram:
    """A program that NumPy executes. It can be pickled."""

    def __init__(
        self, program: Jaxpr, constants: Sequence[Any], calls: Mapping[str, Callable[..., Array]] | None = None,
        others: Callable[[Equation], Callable[..., Any]] | None = None, *, elementwise: bool = False,
    ) -> None:  # fmt: skip
        """Translate a program.

        Args:
            program: The program.
            constants: Its constants.
            calls: What computes the jitted functions of these names, and those that are traced by name.
            others: Returns what computes an equation that NumPy does not; None: there is nothing.
            elementwise: The program is of scalars and is executed for arrays of any shape.

        Raises:
            UnknownOperation: NumPy does not execute an operation, and `others` is None.
        """
        self._translator, self._elementwise = _Translator(dict(calls or {}), others), elementwise
        self._values: list[Any] = []  # inputs, constants and results by number; None unless a constant
        self._instructions: list[tuple[Callable[..., Any], list[int], list[int]]] = []  # (function, its operands, its results)
        inputs = [self._add_value(var.aval, None) for var in program.invars]
        self._outputs = self._translate(program, inputs, constants)
        self._inputs = len(inputs)
        del self._translator
        self._free_early()

    def __call__(self, *arrays: Any) -> list[Any]:
        """Execute the program, of the arrays' shapes or, if it is elementwise, of shapes that broadcast."""
        values = self._values.copy()
        values[: self._inputs] = map(np.asarray, arrays)
        with np.errstate(all="ignore"):
            for function, operands, results in self._instructions:
                found = function(*[values[number] for number in operands])
                if len(results) == 1:
                    values[results[0]] = found
                else:
                    for number, value in zip(results, found, strict=True):
                        values[number] = value
        return [values[number] for number in self._outputs]

    def __len__(self) -> int:
        """Return the number of operations."""
        return len(self._instructions)

    @classmethod
    def join(cls, calls: Sequence[ProgramCall]) -> tuple[NumpyProgram, list[str], list[str]]:
        """Return one program that executes elementwise programs in turn.

        Args:
            calls: The programs, with the names of the values that they read and write.

        Returns:
            The program, the names of its inputs and those of its results.
        """
        joined, read, written = cls.__new__(cls), list[str](), set[str]()
        for call in calls:
            read += [each for each in call.operands if isinstance(each, str) and each not in written and each not in read]
            written |= set(call.results)
        numbers = {name: number for number, name in enumerate(read)}
        joined._inputs, joined._elementwise, joined._values, joined._instructions = len(read), True, [None] * len(read), []
        for program, operands, results in calls:
            own = [numbers[each] if isinstance(each, str) else joined._append(np.asarray(each)) for each in operands]
            own += [joined._append(value) for value in program._values[program._inputs :]]
            joined._instructions += [
                (function, [own[number] for number in given], [own[number] for number in made])
                for function, given, made in program._instructions
            ]
            numbers |= {name: own[number] for name, number in zip(results, program._outputs, strict=True)}
        names = sorted(written)
        joined._outputs = [numbers[name] for name in names]
        joined._free_early()
        return joined, read, names

    def _append(self, value: Any) -> int:
        self._values.append(value)
        return len(self._values) - 1

    def _add_value(self, aval: Any, value: Any) -> int:
        plain = aval.dtype.kind in "biu" or aval.dtype in FLOATS or self._translator.others is not None
        if not plain or (self._elementwise and aval.shape != ()):
            raise UnknownOperation(f"values of type {aval}")
        return self._append(value)

    def _translate(self, program: Jaxpr, inputs: Sequence[int], constants: Sequence[Any]) -> list[int]:
        """Add the instructions of a program whose inputs have these numbers; return the numbers of its outputs."""
        numbers = dict(zip(program.invars, inputs, strict=True))
        for var, value in zip(program.constvars, constants, strict=True):
            numbers[var] = self._add_value(var.aval, np.asarray(value))

        def find_number(operand: Any) -> int:
            aval: Any = operand.aval
            return self._add_value(aval, aval.dtype.type(operand.val)) if isinstance(operand, Literal) else numbers[operand]

        equations: list[Equation] = program.eqns
        for equation in equations:
            operands = [find_number(operand) for operand in equation.invars]
            inner = _inner_program(equation)
            if equation.primitive is named_call or (inner is not None and equation.params.get("name") in self._translator.calls):
                results = [self._add_value(equation.outvars[0].aval, None)]
                function = partial(_call, self._translator.calls[equation.params["name"]], equation.outvars[0].aval.shape)
                self._instructions.append((function, operands, results))
            elif inner is not None:
                results = self._translate(inner.jaxpr, operands, inner.consts)
            elif _changes_nothing(equation):
                results = operands
            else:
                function = self._translator.find_function(equation, self._elementwise)
                known = [self._values[number] for number in operands]
                (var, *others) = equation.outvars
                if not others and var.aval.size <= FOLDED_SIZE and all(value is not None for value in known):
                    with np.errstate(all="ignore"):
                        results = [self._add_value(var.aval, np.asarray(function(*known)))]
                else:
                    results = [self._add_value(each.aval, None) for each in equation.outvars]
                    self._instructions.append((function, operands, results))
            numbers |= zip(equation.outvars, results, strict=True)
        return [find_number(operand) for operand in program.outvars]

    def _free_early(self) -> None:
        """Let a result take the number of a value that is read no more, so that the memory of that one is free."""
        last = {number: place for place, (_, operands, _) in enumerate(self._instructions) for number in operands}
        kept = {*range(self._inputs), *self._outputs} | {number for number, value in enumerate(self._values) if value is not None}
        renamed, free = {number: number for number in kept}, list[int]()
        for place, (function, operands, results) in enumerate(self._instructions):
            given = [renamed[number] for number in operands]
            free += [renamed[number] for number in dict.fromkeys(operands) if last[number] == place and number not in kept]
            for number in results:
                if number not in renamed:
                    renamed[number] = free.pop() if free and number in last else number
            self._instructions[place] = function, given, [renamed[number] for number in results]


class ProgramCall(NamedTuple):
    """A call of a program within a joined one."""

    program: NumpyProgram
    operands: Sequence[Any]  # names of values, or constants
    results: Sequence[str]  # names of values


class _Translator(NamedTuple):
    """The functions that compute equations in place of those of NumPy."""

    calls: dict[str, Callable[..., Array]]  # jitted functions by name
    others: Callable[[Equation], Callable[..., Any]] | None  # equations that NumPy does not compute

    def find_function(self, equation: Equation, elementwise: bool) -> Callable[..., Any]:
        """Return the function that computes an equation. Raises UnknownOperation if nothing does."""
        try:
            return _find_function(equation, self, elementwise)
        except UnknownOperation:
            if self.others is None:
                raise
        return self.others(equation)

    def translate(self, closed: Any) -> NumpyProgram:
        """Translate a program within an equation."""
        return NumpyProgram(closed.jaxpr, closed.consts, self.calls, self.others)


def _call(function: Callable[..., Array], shape: tuple[int, ...], *operands: Array) -> Array:
    return np.broadcast_to(function(*operands), shape)


def _inner_program(equation: Equation) -> Any:
    if equation.primitive.name not in CALLS:
        return None
    found = next((equation.params[key] for key in INNER if key in equation.params), None)
    return found if hasattr(found, "consts") else None


def _changes_nothing(equation: Equation) -> bool:
    """Return True for copies and for changes of JAX's weak types alone."""
    name = equation.primitive.name
    same = name == "convert_element_type" and equation.invars[0].aval.dtype == equation.outvars[0].aval.dtype
    return same or name in ("copy", "copy_p", "stop_gradient", "xla_metadata_value", "optimization_barrier")


# ---- operations on elements


def _shift_right(x: Array, count: Array, *, kind: str) -> Array:
    dtype = np.dtype(f"{kind}{x.dtype.itemsize}")
    return np.right_shift(x, count) if x.dtype == dtype else np.right_shift(x.view(dtype), count.view(dtype)).view(x.dtype)


def _select(which: Array, *cases: Array) -> Array:
    return np.where(which, cases[1], cases[0]) if which.dtype == bool else np.choose(which, cases)


def _divide(x: Array, y: Array) -> Array:
    """Divide integers as XLA does: towards zero, by zero all ones, and the least by -1 itself."""
    zero, minus = y == 0, (y == -1 if y.dtype.kind == "i" else np.bool_(False))
    divisor = np.where(zero | minus, y.dtype.type(1), y)
    quotient = (x - np.fmod(x, divisor)) // divisor
    return np.where(zero, ~np.zeros_like(quotient), np.where(minus, np.negative(x), quotient))


def _remainder(x: Array, y: Array) -> Array:
    """Return the remainder of integers as XLA does: of the dividend's sign; by zero the dividend."""
    zero, minus = y == 0, (y == -1 if y.dtype.kind == "i" else np.bool_(False))
    return np.where(zero, x, np.fmod(x, np.where(zero | minus, y.dtype.type(1), y)))


def _leading_zeros(x: Array) -> Array:
    bits = 8 * x.dtype.itemsize
    word = x.view(np.dtype(f"u{x.dtype.itemsize}"))
    upper = word >> 32 if bits == 64 else word  # 32 bits are exact in f64, and frexp(0) has the exponent 0
    _, exponent = np.frexp(upper.astype(np.float64))
    if bits == 64:
        _, lower = np.frexp((word & 0xFFFFFFFF).astype(np.float64))
        exponent = np.where(upper != 0, exponent + 32, lower)
    return (bits - exponent).astype(x.dtype)


def _count_ones(x: Array) -> Array:
    return np.bitwise_count(x.view(np.dtype(f"u{x.dtype.itemsize}"))).astype(x.dtype)


def _clamp(low: Array, x: Array, high: Array) -> Array:
    return np.minimum(np.maximum(x, low), high)


def _convert(x: Array, *, dtype: np.dtype) -> Array:
    if x.dtype.kind + dtype.kind in ("iu", "ui") and x.itemsize == dtype.itemsize:
        return x.view(dtype)
    return x.astype(dtype)


def _truncate(x: Array, *, dtype: np.dtype) -> Array:
    """Convert floats to integers as XLA does: towards zero, saturated, and NaN to 0."""
    info, wide = np.iinfo(dtype), np.trunc(x)
    if wide.size and (np.abs(wide) < 2.0 ** (info.bits - 1 if info.min < 0 else 0)).all():
        return wide.astype(dtype)
    wide = wide.astype(np.float64)
    low, end = wide < float(info.min), wide >= 2.0 ** (info.bits - (info.min < 0))  # the end is a power of two, which f64 has
    plain = np.where(low | end | np.isnan(wide), 0.0, wide).astype(dtype)
    return np.where(low, dtype.type(info.min), np.where(end, dtype.type(info.max), plain))


# functions of integers and booleans by the name of JAX's primitive; of floats those in FLOAT_FUNCTIONS
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "max": np.maximum, "min": np.minimum, "abs": np.abs,
    "sign": np.sign, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert, "shift_left": np.left_shift,
    "shift_right_logical": partial(_shift_right, kind="u"), "shift_right_arithmetic": partial(_shift_right, kind="i"),
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "div": _divide, "rem": _remainder, "clz": _leading_zeros, "population_count": _count_ones, "clamp": _clamp,
}  # fmt: skip
if not hasattr(np, "bitwise_count"):
    del FUNCTIONS["population_count"]
FLOAT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "sqrt": np.sqrt, "neg": np.negative, "abs": np.abs,
    "floor": np.floor, "is_finite": np.isfinite,
    **{name: FUNCTIONS[name] for name in ("eq", "ne", "lt", "le", "gt", "ge")},
}  # fmt: skip


def _find_function(equation: Equation, translator: _Translator, elementwise: bool) -> Callable[..., Any]:
    """Return the function of NumPy that computes an equation. Raises UnknownOperation if NumPy has none."""
    name, dtypes = equation.primitive.name, [operand.aval.dtype for operand in equation.invars]
    if name == "select_n":
        return _select
    if name == "convert_element_type":
        return _find_conversion(dtypes[0], equation.outvars[0].aval.dtype)
    if name in FUNCTIONS and all(dtype.kind in "iub" for dtype in dtypes):
        return FUNCTIONS[name]
    if name in FLOAT_FUNCTIONS and all(dtype in FLOATS for dtype in dtypes):
        return FLOAT_FUNCTIONS[name]
    if name == "round" and dtypes[0] in FLOATS and equation.params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN:
        return np.rint
    if elementwise and name == "bitcast_convert_type" and dtypes[0].itemsize == equation.params["new_dtype"].itemsize:
        return methodcaller("view", np.dtype(equation.params["new_dtype"]))
    if elementwise or name not in SHAPED:
        raise UnknownOperation(name)
    return SHAPED[name](equation, translator)


def _find_conversion(old: np.dtype, new: np.dtype) -> Callable[..., Any]:
    if old.kind in "biu" and (new.kind in "biu" or new in FLOATS):
        return partial(_convert, dtype=new)
    if old in FLOATS and new in FLOATS:
        return partial(_convert, dtype=new)
    if old in FLOATS and new.kind in "iu":
        return partial(_truncate, dtype=new)
    raise UnknownOperation(f"{old} to {new}")


# ---- operations on shapes


def _reshape(x: Array, *rest: Array, shape: tuple[int, ...]) -> Array:
    return x.reshape(shape)


def _broadcast(x: Array, *, own: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    x = x.reshape(own)
    if not x.flags.c_contiguous or not x.size:
        return np.broadcast_to(x, shape)
    strides = [0 if size == 1 else stride for size, stride in zip(own, x.strides, strict=True)]
    return np.ndarray(shape, x.dtype, x, 0, strides)  # what `np.broadcast_to` returns after ten times as long


def _bitcast(x: Array, *, dtype: np.dtype, shape: tuple[int, ...]) -> Array:
    return np.ascontiguousarray(x).view(dtype).reshape(shape)


def _take_slices(x: Array, *, slices: tuple[tuple[int, int, int], ...]) -> Array:
    return x[tuple(slice(*each) for each in slices)]


def _pad(x: Array, value: Array, *, slices: tuple[slice, ...], widths: list[tuple[int, int]]) -> Array:
    return np.pad(x[slices], widths, constant_values=value)


def _join(*parts: Array, how: Callable[..., Array], axis: int) -> Array:
    return how(parts, axis)


def _split(x: Array, *, ends: list[int], axis: int) -> Any:
    found = np.split(x, ends, axis)
    return found if ends else found[0]


def _reduce(x: Array, *, how: np.ufunc, axes: tuple[int, ...]) -> Array:
    return how.reduce(x, axis=axes, dtype=x.dtype)


def _accumulate(x: Array, *, how: np.ufunc, axis: int, reverse: bool) -> Array:
    x = np.flip(x, axis) if reverse else x
    found = how.accumulate(x, axis=axis, dtype=x.dtype)
    return np.flip(found, axis) if reverse else found


def _argument(x: Array, *, how: Callable[..., Array], axes: tuple[int, ...], index_dtype: Any) -> Array:
    return how(x, axis=axes[0]).astype(index_dtype)


def _sort(*operands: Array, axis: int, keys: int) -> Any:
    order = np.lexsort(operands[:keys][::-1], axis=axis)
    found = [np.take_along_axis(each, order, axis) for each in operands]
    return found if len(found) > 1 else found[0]


def _starts(x: Array, starts: Sequence[Array], sizes: Sequence[int]) -> list[int]:
    return [min(max(int(start), 0), extent - size) for start, extent, size in zip(starts, x.shape, sizes, strict=True)]


def _dynamic_slice(x: Array, *starts: Array, sizes: tuple[int, ...]) -> Array:
    return x[tuple(slice(first, first + size) for first, size in zip(_starts(x, starts, sizes), sizes, strict=True))]


def _dynamic_update(x: Array, update: Array, *starts: Array) -> Array:
    found = np.array(x)
    found[tuple(slice(first, first + size) for first, size in zip(_starts(x, starts, update.shape), update.shape, strict=True))] = update
    return found


class _Windows:
    """The windows of an array that a gather reads or a scatter writes."""

    def __init__(
        self, indexed: Sequence[int], batched: Mapping[int, int], dropped: Sequence[int], sizes: Sequence[int], clips: bool
    ) -> None:
        """Note the windows.

        Args:
            indexed: Axes of the array that the elements of an index vector choose.
            batched: For each axis of the array that is a batch axis the axis of the indices.
            dropped: Axes of the array of which a window has none.
            sizes: Size of a window along each axis of the array.
            clips: Windows that reach beyond the array are moved into it; otherwise they are invalid.
        """
        self.indexed, self.batched, self.sizes, self.clips = tuple(indexed), dict(batched), tuple(sizes), clips
        self.kept = [axis for axis in range(len(sizes)) if axis not in dropped and axis not in batched]

    def places(self, shape: tuple[int, ...], indices: Array) -> tuple[list[Array], Array | None]:
        """Return the indices of each axis of the array, [*batch, *window] broadcast, and which are valid; None: all."""
        batch, valid = indices.shape[:-1], None
        found = []
        for axis, size in enumerate(self.sizes):
            if axis in self.indexed:
                first, last = indices[..., self.indexed.index(axis)].astype(np.int64), shape[axis] - size
                clipped = np.minimum(np.maximum(first, 0), last)  # in a third of the time of `np.clip`
                if not self.clips and (clipped != first).any():
                    inside = clipped == first
                    valid = inside if valid is None else valid & inside
            elif axis in self.batched:
                own = [1] * len(batch)
                own[self.batched[axis]] = batch[self.batched[axis]]
                clipped = np.arange(batch[self.batched[axis]]).reshape(own)
            else:
                clipped = np.zeros((1,) * len(batch), np.int64)
            clipped = clipped.reshape((*clipped.shape, *(1,) * len(self.kept)))
            if axis in self.kept:
                offsets = [1] * len(self.kept)
                offsets[self.kept.index(axis)] = size
                clipped = clipped + np.arange(size).reshape(offsets)
            found.append(clipped)
        return found, valid if valid is None else valid.reshape((*valid.shape, *(1,) * len(self.kept)))


def _gather(x: Array, indices: Array, *, windows: _Windows, offset_dims: tuple[int, ...], shape: tuple[int, ...], fill: Any) -> Array:
    places, valid = windows.places(x.shape, indices)
    found = x[tuple(places)]
    if valid is not None:
        found = np.where(valid, found, x.dtype.type(fill))
    batch = indices.ndim - 1
    extents = (*indices.shape[:-1], *(windows.sizes[axis] for axis in windows.kept))
    found, places = found if found.shape == extents else np.broadcast_to(found, extents), tuple(range(batch, batch + len(offset_dims)))
    return (found if places == offset_dims else np.moveaxis(found, places, offset_dims)).reshape(shape)


def _take_rows(x: Array, indices: Array, *, clips: bool, general: Callable[[Array, Array], Array]) -> Array:
    """Gather whole rows, as `general` does in several times as long."""
    numbers = indices[..., 0]
    if clips or not numbers.size or (numbers.min() >= 0 and numbers.max() < len(x)):
        return np.take(x, numbers, axis=0, mode="clip")
    return general(x, indices)


def _scatter(x: Array, indices: Array, updates: Array, *, windows: _Windows, window_dims: tuple[int, ...], how: np.ufunc | None) -> Array:
    places, valid = windows.places(x.shape, indices)
    batch = indices.ndim - 1
    if window_dims != (axes := tuple(range(batch, batch + len(window_dims)))):
        updates = np.moveaxis(updates, window_dims, axes)
    places = list(np.broadcast_arrays(*places, updates)[: len(places)])
    if valid is not None:
        valid = np.broadcast_to(valid, updates.shape)
        places, updates = [each[valid] for each in places], updates[valid]
    found = np.array(x)
    if how is None:
        found[tuple(places)] = updates  # of several for one place the last one, as with XLA on a CPU
    else:
        how.at(found, tuple(places), updates)
    return found


# ---- loops


def _choose(index: Array, *operands: Array, branches: list[NumpyProgram]) -> Any:
    found = branches[min(max(int(index), 0), len(branches) - 1)](*operands)
    return found if len(found) > 1 else found[0]


def _repeat(*operands: Array, condition: NumpyProgram, body: NumpyProgram, first: int, second: int) -> Any:
    of_condition, of_body, carry = operands[:first], operands[first:second], list(operands[second:])
    while condition(*of_condition, *carry)[0]:
        carry = body(*of_body, *carry)
    return carry if len(carry) > 1 else carry[0]


def _scan(*operands: Array, body: NumpyProgram, constants: int, carried: int, length: int, reverse: bool) -> Any:
    fixed, carry, xs = operands[:constants], list(operands[constants : constants + carried]), operands[constants + carried :]
    slots = []
    for number in reversed(range(length)) if reverse else range(length):
        found = body(*fixed, *carry, *(x[number] for x in xs))
        carry = found[:carried]
        slots.append(found[carried:])
    slots = slots[::-1] if reverse else slots
    results = [*carry, *(np.stack(column) for column in zip(*slots, strict=True))]
    return results if len(results) > 1 else results[0]


# ---- the translation of equations with shapes


def _translate_iota(equation: Equation, translator: _Translator) -> Callable[..., Any]:
    params = equation.params
    own = [1] * len(params["shape"])
    own[params["dimension"]] = params["shape"][params["dimension"]]
    row = np.arange(own[params["dimension"]]).astype(params["dtype"]).reshape(own)
    return partial(_broadcast, row, own=tuple(own), shape=tuple(params["shape"]))


def _translate_broadcast(equation: Equation, translator: _Translator) -> Callable[..., Any]:
    params, old = equation.params, equation.invars[0].aval.shape
    own = [1] * len(params["shape"])
    for axis, place in enumerate(params["broadcast_dimensions"]):
        own[place] = old[axis]
    return partial(_broadcast, own=tuple(own), shape=tuple(params["shape"]))


def _translate_pad(equation: Equation, translator: _Translator) -> Callable[..., Any]:
    config, shape = equation.params["padding_config"], equation.invars[0].aval.shape
    if any(inner for _, _, inner in config):
        raise UnknownOperation("interior padding")
    slices = tuple(slice(max(-low, 0), extent - max(-high, 0)) for (low, high, _), extent in zip(config, shape, strict=True))
    return partial(_pad, slices=slices, widths=[(max(low, 0), max(high, 0)) for low, high, _ in config])


def _translate_split(equation: Equation, translator: _Translator) -> Callable[..., Any]:
    sizes = equation.params["sizes"]
    return partial(_split, ends=[int(end) for end in np.cumsum(sizes)[:-1]], axis=equation.params["axis"])


def _translate_sort(equation: Equation, translator: _Translator) -> Callable[..., Any]:
    keys = equation.params["num_keys"]
    if any(operand.aval.dtype.kind not in "iub" for operand in equation.invars[:keys]):
        raise UnknownOperation("a sort of floats")
    return partial(_sort, axis=equation.params["dimension"], keys=keys)


def _translate_gather(equation: Equation, translator: _Translator) -> Callable[..., Any]:
    params, numbers, (x, indices) = equation.params, equation.params["dimension_numbers"], equation.invars
    if x.aval.dtype.kind not in "biu" or indices.aval.dtype == np.uint64 or 0 in x.aval.shape:
        raise UnknownOperation("a gather of floats, or by indices of 64 bits without sign")
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    batched = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    windows = _Windows(numbers.start_index_map, batched, numbers.collapsed_slice_dims, params["slice_sizes"], not fills)
    fill = params["fill_value"]
    if fill is None:
        dtype = x.aval.dtype
        fill = True if dtype.kind == "b" else np.iinfo(dtype).min if dtype.kind == "i" else np.iinfo(dtype).max
    found = partial(_gather, windows=windows, offset_dims=tuple(numbers.offset_dims), shape=equation.outvars[0].aval.shape, fill=fill)
    last = tuple(range(indices.aval.ndim - 1, equation.outvars[0].aval.ndim))
    takes_rows = windows.indexed == numbers.collapsed_slice_dims == (0,) and not batched and numbers.offset_dims == last
    if takes_rows and tuple(params["slice_sizes"][1:]) == x.aval.shape[1:]:
        return partial(_take_rows, clips=not fills, general=found)
    return found


SCATTERS = {"scatter": None, "scatter-add": np.add, "scatter-mul": np.multiply, "scatter-max": np.maximum, "scatter-min": np.minimum}


def _translate_scatter(equation: Equation, translator: _Translator) -> Callable[..., Any]:
    params, numbers, (x, indices, updates) = equation.params, equation.params["dimension_numbers"], equation.invars
    if x.aval.dtype.kind not in "biu" or indices.aval.dtype == np.uint64 or 0 in x.aval.shape:
        raise UnknownOperation("a scatter of floats, or by indices of 64 bits without sign")
    batched = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    sizes, window = [], iter(numbers.update_window_dims)
    for axis in range(len(x.aval.shape)):
        without = axis in numbers.inserted_window_dims or axis in batched
        sizes.append(1 if without else updates.aval.shape[next(window)])
    clips = params["mode"] == lax.GatherScatterMode.CLIP
    windows = _Windows(numbers.scatter_dims_to_operand_dims, batched, numbers.inserted_window_dims, sizes, clips)
    return partial(_scatter, windows=windows, window_dims=tuple(numbers.update_window_dims), how=SCATTERS[equation.primitive.name])


def _translate_while(equation: Equation, translator: _Translator) -> Callable[..., Any]:
    params = equation.params
    condition, body = (translator.translate(params[name]) for name in ("cond_jaxpr", "body_jaxpr"))
    first = params["cond_nconsts"]
    return partial(_repeat, condition=condition, body=body, first=first, second=first + params["body_nconsts"])


def _translate_scan(equation: Equation, translator: _Translator) -> Callable[..., Any]:
    params = equation.params
    constants, carry, _ = split_scan_operands(params, list(range(len(equation.invars))))
    body = translator.translate(params["jaxpr"])
    if not params["length"] and len(equation.outvars) > len(carry):
        raise UnknownOperation("a scan of no elements")
    return partial(_scan, body=body, constants=len(constants), carried=len(carry), length=params["length"], reverse=params["reverse"])


def _translate_slice(equation: Equation, translator: _Translator) -> Callable[..., Any]:
    params = equation.params
    strides = params["strides"] or (1,) * len(params["start_indices"])
    return partial(_take_slices, slices=tuple(zip(params["start_indices"], params["limit_indices"], strides, strict=True)))


def _of_integers(
    function: Callable[..., Any], how: Callable[..., Array], kinds: str, names: str, equation: Equation, translator: _Translator
) -> Callable[..., Any]:
    """Translate an operation on integers to a function of its parameters of these names."""
    if equation.invars[0].aval.dtype.kind not in kinds:
        raise UnknownOperation(f"{equation.primitive.name} of floats")
    return partial(function, how=how, **{name: equation.params[name] for name in names.split()})


def _out_shape(equation: Equation) -> tuple[int, ...]:
    return equation.outvars[0].aval.shape


SHAPED: dict[str, Callable[[Equation, _Translator], Callable[..., Any]]] = {
    **dict.fromkeys(("reshape", "squeeze", "expand_dims"), lambda equation, _: partial(_reshape, shape=_out_shape(equation))),
    "bitcast_convert_type": lambda equation, _: partial(_bitcast, dtype=equation.params["new_dtype"], shape=_out_shape(equation)),
    "transpose": lambda equation, _: partial(np.transpose, axes=equation.params["permutation"]),
    "rev": lambda equation, _: partial(np.flip, axis=tuple(equation.params["dimensions"])),
    "concatenate": lambda equation, _: partial(_join, how=np.concatenate, axis=equation.params["dimension"]),
    "stack": lambda equation, _: partial(_join, how=np.stack, axis=equation.params.get("axis", 0)),
    "dynamic_slice": lambda equation, _: partial(_dynamic_slice, sizes=tuple(equation.params["slice_sizes"])),
    "dynamic_update_slice": lambda equation, _: _dynamic_update,
    "cond": lambda equation, translator: partial(_choose, branches=[translator.translate(each) for each in equation.params["branches"]]),
    "iota": _translate_iota, "broadcast_in_dim": _translate_broadcast, "pad": _translate_pad, "split": _translate_split,
    "sort": _translate_sort, "gather": _translate_gather, "slice": _translate_slice, "while": _translate_while, "scan": _translate_scan,
    **dict.fromkeys(SCATTERS, _translate_scatter),
    **{f"reduce_{name}": partial(_of_integers, _reduce, how, "iub", "axes") for name, how in {
        "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "and": np.bitwise_and,
        "xor": np.bitwise_xor}.items()},
    **{f"cum{name}": partial(_of_integers, _accumulate, how, "iu", "axis reverse") for name, how in {
        "sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}.items()},
    **{f.__name__: partial(_of_integers, _argument, f, "iub", "axes index_dtype") for f in (np.argmax, np.argmin)},
}  # fmt: skip


def trace_elementwise(function: Callable[..., Any], shapes: Any) -> NumpyProgram | None:
    """Return the program of an elementwise function; None if NumPy does not execute one of its operations.

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
        return NumpyProgram(closed.jaxpr, closed.consts, elementwise=True)
    except UnknownOperation:
        return None
