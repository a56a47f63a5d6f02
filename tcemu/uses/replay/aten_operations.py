"""PyTorch's operators by their names: `OPERATIONS` says what computes each on a GPU, and with what evidence; `EXACT` which need no rule.

Operands and results are NumPy arrays. The strides of an operand count: they say how it lies in memory. `tcemu.torch.emulate(gpu=...)` and
`tcemu drift --gpu` read the same table.

NumPy's float32 operations are single IEEE operations, which nothing contracts and no subnormal flushes: sums, differences, products and
quotients of two numbers are computed by them.

Source: PyTorch 2.11.0, native_functions.yaml for names and arguments; each row's kernel for its formula.
"""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from tcemu.base.errors import NotModelled, Unsupported
from tcemu.operations.functional.torch_cuda import (
    attention,
    batch_norms,
    distributions,
    embeddings,
    foreach,
    losses,
    norms,
    optimizers,
    random_numbers,
    rows,
    scans,
    softmax,
    sorting,
)
from tcemu.operations.functional.torch_cuda.elementwise import elementwise
from tcemu.operations.functional.torch_cuda.numpy_evaluation import call_by_numpy, fma_f32
from tcemu.operations.products.library.kernel_recipe import KernelRecipe
from tcemu.uses.replay import torch_convolutions, torch_products

F32, BF16, F16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
FLOATS = (BF16, F16, F32)
DIGITS = {BF16: 8, F16: 11, F32: 24, np.dtype(np.float64): 53}  # of their numbers
PLACEMENT = ("layout", "device", "pin_memory", "memory_format", "non_blocking")  # arguments that change no bits
GPUS, LIBRARIES = ("H100", "H200"), ("torch 2.11",)
CONTIGUOUS, CHANNELS_LAST = "contiguous", "channels last"
MEASURED, BY_RULE, EXACT_RESULT, NOT_KNOWN = "measured", "by rule", "exact", "not known"
ROWS_ALIKE = 8  # rows after which a row begins at the same place in a vector again
CHUNK = 1 << 16  # elements that a formula takes at once, so that they stay in the cache


class Evidence(NamedTuple):
    """Why an operation's result is that of the GPU.

    Attributes:
        status: MEASURED: words of a GPU agree for this function or shape. BY_RULE: the order follows from a rule that agrees elsewhere,
            or the library proposed it on a GPU.
            EXACT_RESULT: every correct implementation has these bits. NOT_KNOWN: nothing says what the GPU gives.
        text: The evidence in words.
    """

    status: str
    text: str


IEEE = Evidence(EXACT_RESULT, "one IEEE operation in f32, rounded once to the result")
ALL_CODES = Evidence(MEASURED, "H200: equal for all 65,536 codes of bf16 and f16, and 65,536 of f32")
PAIRS = Evidence(MEASURED, "H200: equal for 65,536 pairs of each dtype")
LENGTHS = Evidence(BY_RULE, "Reduce.cuh; H200: equal at 45 lengths of each dtype")
CENSUS = Evidence(MEASURED, "H200: equal in the cases of the census")
SOURCE = Evidence(BY_RULE, "PyTorch's source; equal in training steps recorded on an H200")


class Answer(NamedTuple):
    """Results of an operation and what computes them.

    Attributes:
        results: One array for each result of aten; None for results that the operation does not give.
        kernel: The kernel or the order.
        evidence: Why these are the GPU's bits.
        updates: New values of arguments to which the operator writes without saying so in its schema, by name.
        states: Seeds and offsets of random numbers among the results behind those of `results`, by number. Others are 0.
        recipe: The order of a product.
        memory_format: How the first result lies, where PyTorch's tensors without memory say otherwise: CONTIGUOUS or CHANNELS_LAST.
        open_results: Why the GPU leaves the bits of some results open, by their numbers: these are one of the results that it may give.
    """

    results: tuple[np.ndarray | None, ...]
    kernel: str
    evidence: Evidence
    updates: Mapping[str, np.ndarray] = MappingProxyType({})
    states: Mapping[int, np.ndarray] = MappingProxyType({})
    recipe: KernelRecipe | None = None
    memory_format: str | None = None
    open_results: Mapping[int, str] = MappingProxyType({})


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        name: Name after "aten::", without the "_" of operators that write to their operand.
        arguments: Arguments by name; tensors are NumPy arrays.
        dtypes: Dtypes of the results.
        gpu: One of GPUS.
        library: One of LIBRARIES.
        generator: The GPU's generator of random numbers, which operators that draw move on; None: not known.
        tf32: `torch.backends.cudnn.allow_tf32`, which is on by default.
        deterministic: `torch.use_deterministic_algorithms(True)`, without `warn_only`.
    """

    name: str
    arguments: Mapping[str, Any]
    dtypes: tuple[np.dtype, ...]
    gpu: str = "H100"
    library: str = "torch 2.11"
    generator: random_numbers.GpuGenerator | None = None
    tf32: bool = True
    deterministic: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the first result."""
        return self.dtypes[0]


class Operation(NamedTuple):
    """A row of the table.

    Attributes:
        arguments: Names of the arguments in aten's order, with defaults, as Python writes them: "self, other, alpha=1".
        compute: Computes the results of a `Call`.
    """

    arguments: str
    compute: Callable[[Call], Answer]


@lru_cache(maxsize=256)
def parse_arguments(text: str) -> tuple[tuple[str, bool, Any], ...]:
    """Return name, whether there is a default, and the default of each argument of a row."""
    given = ast.parse(f"lambda {text}: 0", mode="eval").body.args  # type: ignore[attr-defined]
    names = [argument.arg for argument in given.args]
    defaults = [ast.literal_eval(value) for value in given.defaults]
    required = len(names) - len(defaults)
    return tuple((name, i >= required, defaults[i - required] if i >= required else None) for i, name in enumerate(names))


def bind_arguments(operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name.

    Raises:
        NotModelled: The call has an argument that the row does not have, which an overload without a rule may.
    """
    parsed = parse_arguments(operation.arguments)
    names = [name for name, _, _ in parsed]
    further = set(kwargs) - set(names)
    if len(args) > len(names) or further:
        raise NotModelled(f"this overload has other arguments than {operation.arguments!r} (replay/aten_operations.py)")
    found = dict(zip(names, args, strict=False)) | dict(kwargs)
    for name, has_default, default in parsed:
        if name not in found:
            if not has_default:
                raise NotModelled(f"this overload has no argument {name!r} (replay/aten_operations.py)")
            found[name] = default
    return found


# ---- dtypes and memory


def common_dtype(operands: Sequence[Any]) -> np.dtype:
    """Return the dtype to which PyTorch brings the operands of an elementwise operator: tensors with axes count before those without."""
    kinds = {"b": 0, "u": 1, "i": 1}
    found: list[np.dtype | None] = [None, None, None]  # of tensors with axes, of tensors without, of numbers
    for operand in operands:
        level = 2 if not isinstance(operand, np.ndarray) else 0 if operand.ndim else 1
        dtype = (
            operand.dtype if level < 2 else np.dtype(bool if isinstance(operand, bool) else np.int64 if isinstance(operand, int) else F32)
        )
        before = found[level]
        found[level] = dtype if before is None else _promote(before, dtype)
    result = None
    for dtype in found:
        if dtype is not None and (result is None or kinds.get(dtype.kind, 2) > kinds.get(result.kind, 2)):
            result = dtype
    assert result is not None
    return result


def _promote(x: np.dtype, y: np.dtype) -> np.dtype:
    if x == y:
        return x
    wide = [dtype for dtype in (x, y) if dtype.kind not in "iub"]
    if len(wide) == 2:
        return F32 if {x, y} == {BF16, F16} else max(x, y, key=lambda dtype: dtype.itemsize)
    return wide[0] if wide else np.promote_types(x, y)


def is_contiguous(x: np.ndarray) -> bool:
    """Return whether the elements lie in memory as the shape says."""
    return bool(x.flags.c_contiguous)


def memory_order(x: np.ndarray) -> tuple[int, ...] | None:
    """Return the axes from the outermost to the innermost in memory, or None if elements overlap or there are gaps between them."""
    order = tuple(sorted(range(x.ndim), key=lambda axis: (-x.strides[axis], x.shape[axis] == 1)))
    return order if is_contiguous(x.transpose(order)) else None


def lies_transposed(x: np.ndarray) -> bool:
    """Return whether cuBLAS gets a matrix, the last two axes, as its transpose.

    Source: PyTorch 2.11.0, aten/src/ATen/native/cuda/cuBlasCommonArgs.h (`prepare_matrix_for_cublas`).
    """
    rows_apart, columns_apart = x.strides[-2], x.strides[-1]
    if is_contiguous(x if x.ndim == 2 else x[0]):
        return False
    return rows_apart == x.itemsize and columns_apart >= max(1, x.shape[-2]) * x.itemsize


# ---- elementwise


def _operands(call: Call, names: Sequence[str]) -> tuple[np.dtype, list[Any]]:
    """Return the common dtype, and the operands in f32: tensors are rounded to the common dtype first, numbers are not.

    Raises:
        NotModelled: The common dtype has no rule.
    """
    given = [call[name] for name in names]
    dtype = common_dtype(given)
    if dtype.kind in "biu":  # a quotient or a root of integers: they are converted to the dtype of the result
        dtype = call.dtype
    if dtype not in FLOATS:
        raise NotModelled(f"{call.name}: got operands of {dtype}; known are bfloat16, float16 and float32 (replay/aten_operations.py)")
    return dtype, [x.astype(dtype).astype(F32) if isinstance(x, np.ndarray) else np.float32(x) for x in given]


def _round(call: Call, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round an f32 result to the common dtype, and then to that of the result."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x).astype(dtype).astype(call.dtype)


def _quiet(compute: Callable[..., np.ndarray], *operands: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        return compute(*operands)


def _ieee(names: str, compute: Callable[..., np.ndarray], kernel: str) -> Callable[[Call], Answer]:
    """Return what computes one IEEE operation of the named operands."""

    def run(call: Call) -> Answer:
        dtype, operands = _operands(call, names.split())
        return Answer((_round(call, _quiet(compute, *operands), dtype),), kernel, IEEE)

    return run


def _add(call: Call, sign: float = 1.0) -> Answer:
    alpha = call["alpha"]
    dtype, (x, y) = _operands(call, ("self", "other"))
    if alpha in (1, 1.0):
        return Answer((_round(call, _quiet(np.add, x, np.float32(sign) * y), dtype),), "add", IEEE)
    # in f32, as a number is not rounded to the tensor's dtype
    found = _formula("add", F32, *np.broadcast_arrays(x, y), alpha=sign * float(alpha))
    return Answer((_round(call, found, dtype),), "add with alpha, one fma", PAIRS)


MAX_MIN = Evidence(MEASURED, "H200: equal for all pairs of 27 special numbers; max.f32 and min.f32, for which +0 is above -0")


def _maximum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where((x == 0) & (y == 0), x + y, np.maximum(x, y))


def _minimum(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return -_maximum(-x, -y)


def _limit(low: str = "", high: str = "", zero: bool = False) -> Callable[[Call], Answer]:
    """Return what takes the larger of an operand and the argument `low`, or 0, and the smaller of that and the argument `high`."""

    def run(call: Call) -> Answer:
        limits = [name for name in (low, high) if name and call[name] is not None]
        dtype, (x, *values) = _operands(call, ("self", *limits))
        given = dict(zip(limits, values, strict=True)) | ({"zero": F32.type(0)} if zero else {})
        for name, limit in given.items():
            if np.ndim(limit) == 0 and np.isnan(limit) and not isinstance(limit, np.ndarray):
                if len(given) > 1:
                    raise NotModelled(f"{call.name}: {name}=nan beside another limit has no rule (replay/aten_operations.py)")
                continue  # max.f32 returns the other operand
            x = _quiet(_minimum if name == high else _maximum, x, limit)
        return Answer((_round(call, x, dtype),), "min" if high and not low else "max" if not high else "max, then min", MAX_MIN)

    return run


def _rsub(call: Call) -> Answer:
    return _add(replace(call, arguments={**call.arguments, "self": call["other"], "other": call["self"]}), -1.0)


def _div(call: Call) -> Answer:
    if call["rounding_mode"] is not None:
        raise NotModelled(f"div: rounding_mode={call['rounding_mode']!r} has no rule (replay/aten_operations.py)")
    dtype, (x, y) = _operands(call, ("self", "other"))
    if isinstance(call["other"], np.ndarray):
        return Answer((_round(call, _quiet(np.divide, x, y), dtype),), "div", IEEE)
    inverse = _quiet(np.divide, np.float32(1), y)
    text = "BinaryDivTrueKernel.cu: a product with the f32 reciprocal of the number; equal in models recorded on an H200"
    return Answer((_round(call, _quiet(np.multiply, x, inverse), dtype),), "mul by the reciprocal", Evidence(MEASURED, text))


def _evaluate_rows(fn: Callable[..., Any], rows_: Sequence[np.ndarray], *fixed: Any, **options: Any) -> Any:
    """Compute a function of rows [..., N], each of which it treats alike, some rows at a time, so that they stay in the cache."""
    shape = rows_[0].shape
    flat = [np.ascontiguousarray(x).reshape(-1, x.shape[-1]) for x in rows_]
    count = len(flat[0])
    calls = max(-(-flat[0].size // CHUNK), 1)
    step = -(-count // calls)
    if calls > 1:
        step = -(-step // ROWS_ALIKE) * ROWS_ALIKE
        flat = [np.concatenate([x, np.zeros((-count % step, x.shape[-1]), x.dtype)]) for x in flat]  # each size would be a program
    compute = lambda i: call_by_numpy(fn, *(x[i : i + step] for x in flat), *fixed, **options)
    parts = [compute(0)]  # which traces the program of the others
    if calls > 1:  # NumPy releases the interpreter's lock within an operation
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            parts += pool.map(compute, range(step, count, step))
    join = lambda *x: np.concatenate(x)[:count].reshape(*shape[:-1], x[0].shape[-1])
    return tuple(map(join, *parts)) if isinstance(parts[0], tuple) else join(*parts)


def _formula(name: str, dtype: np.dtype, *operands: Any, **options: Any) -> np.ndarray:
    """Compute a formula of `elementwise` on operands of one shape, rounded to a dtype."""
    arrays = [np.ascontiguousarray(x.astype(dtype)) for x in operands if isinstance(x, np.ndarray)]
    if len(operands) == 1 and dtype.itemsize == 2:
        return _table(name, dtype, tuple(sorted(options.items())))[arrays[0].view(np.uint16)]
    count, shape = arrays[0].size, arrays[0].shape
    flat, found = iter([x.reshape(-1) for x in arrays]), np.empty(count, dtype)
    given = [next(flat) if isinstance(x, np.ndarray) else float(x) for x in operands]
    for start in range(0, count, CHUNK):
        part = slice(start, start + CHUNK)
        found[part] = call_by_numpy(elementwise, name, *(x[part] if isinstance(x, np.ndarray) else x for x in given), **options)
    return found.reshape(shape)


@lru_cache(maxsize=64)
def _table(name: str, dtype: np.dtype, options: tuple[tuple[str, Any], ...]) -> np.ndarray:
    """Return a function's values for all codes of a 16-bit dtype."""
    return call_by_numpy(elementwise, name, np.arange(1 << 16, dtype=np.uint16).view(dtype), **dict(options))


def _function(names: str, formula: str = "", evidence: Evidence = ALL_CODES) -> Callable[[Call], Answer]:
    """Return what computes a formula of `elementwise`, of the operator's name unless another is given."""

    def run(call: Call) -> Answer:
        name = formula or call.name
        dtype, operands = _operands(call, names.split())
        operands = [x if isinstance(x, np.ndarray) else x.astype(dtype).astype(F32) for x in operands]  # numbers become the tensor's dtype
        tensors = [x for x in operands if isinstance(x, np.ndarray)]
        shape = np.broadcast_shapes(*(x.shape for x in tensors))
        found = _formula(name, dtype, *(np.broadcast_to(x, shape) if isinstance(x, np.ndarray) else x for x in operands))
        return Answer((found.astype(call.dtype),), name, evidence)

    return run


def _requires(call: Call, **expected: Any) -> None:
    """Raise NotModelled if an argument has another value than the formula."""
    for name, value in expected.items():
        if call[name] != value:
            raise NotModelled(f"{call.name}: {name}={call[name]!r} has no rule; known is {value!r} (replay/aten_operations.py)")


def _with(run: Callable[[Call], Answer], **expected: Any) -> Callable[[Call], Answer]:
    """Return a rule that holds for some values of other arguments only."""

    def checked(call: Call) -> Answer:
        _requires(call, **expected)
        return run(call)

    return checked


def _gelu(call: Call) -> Answer:
    return _function("self", "gelu_tanh" if call["approximate"] == "tanh" else "gelu")(call)


def _gelu_backward(call: Call) -> Answer:
    name = "gelu_tanh_backward" if call["approximate"] == "tanh" else "gelu_backward"
    return _function("grad_output self", name, PAIRS)(call)


ROOTS = {0.5: "pow_half", -0.5: "pow_minus_half", -1.0: "pow_minus_1"}  # of exponents that are these numbers
POWERS = {2.0: "pow2", 3.0: "pow3", -2.0: "pow_minus_2"}  # of exponents that are these numbers when rounded to the tensor's dtype


def _pow(call: Call) -> Answer:
    exponent = call["exponent"]
    if isinstance(exponent, np.ndarray) or isinstance(call["self"], int | float):
        return _function("self exponent", "pow", PAIRS)(call)
    dtype, (x,) = _operands(call, ("self",))
    if float(exponent) in ROOTS:
        return _function("self", ROOTS[float(exponent)])(call)
    if float(exponent) == 1.0:
        return Answer((_round(call, x, dtype),), "copy", IEEE)
    power = float(np.float32(exponent).astype(dtype))
    if power == 2.0:
        return Answer((_round(call, _quiet(np.multiply, x, x), dtype),), "x * x", IEEE)
    if power == 3.0:
        square = _quiet(np.multiply, x, x).astype(dtype).astype(F32)
        return Answer((_round(call, _quiet(np.multiply, square, x), dtype),), "(x * x) * x, each rounded to its dtype", ALL_CODES)
    return _function("self", POWERS[power])(call) if power in POWERS else _function("self exponent", "pow", PAIRS)(call)


def _foreach(one: Callable[[Call], Answer]) -> Callable[[Call], Answer]:
    """Return what computes an operator of lists: each element by itself, with the elements of the other lists."""

    def run(call: Call) -> Answer:
        count, found, answer = len(call["self"]), [], Answer((), "", IEEE)
        for i in range(count):
            own = {
                name: value[i] if isinstance(value, list | tuple) and len(value) == count else value
                for name, value in call.arguments.items()
            }
            answer = one(replace(call, arguments=own, dtypes=(call.dtypes[i],)))
            found.append(answer.results[0])
        return Answer(tuple(found), f"{answer.kernel}, for each of {count} tensors", answer.evidence)

    return run


def _foreach_limit(high: bool) -> Callable[[Call], Answer]:
    """Return what takes the larger of two operands, or the smaller: of zeros of both signs the second one, unlike `maximum`."""

    def run(call: Call) -> Answer:
        dtype, (x, y) = _operands(call, ("self", "other"))
        first = np.isnan(x) | _quiet(np.less if high else np.greater, x, y)
        text = "ForeachMinMaxFunctors.cuh: the first operand if it is NaN or beyond the second one; H200: equal in 2,400 special words"
        return Answer((_round(call, np.where(first, x, y), dtype),), "min" if high else "max", Evidence(BY_RULE, text))

    return _foreach(run)


def _pointwise(call: Call, name: str) -> Answer:
    """Compute self + value * (tensor1 op tensor2)."""
    dtype, operands = _operands(call, ("self", "tensor1", "tensor2"))
    found = _formula(name, dtype, *np.broadcast_arrays(*operands), value=float(call["value"]))
    return Answer((found.astype(call.dtype),), name, SOURCE)


def _lerp(call: Call) -> Answer:
    if isinstance(call["weight"], np.ndarray):
        raise NotModelled("lerp: a tensor of weights has no rule; a number has one (replay/aten_operations.py)")
    dtype, operands = _operands(call, ("self", "end"))
    found = _formula("lerp", dtype, *np.broadcast_arrays(*operands), weight=float(np.float32(call["weight"])))
    return Answer((found.astype(call.dtype),), "lerp", SOURCE)


# ---- random numbers

DROPOUT = Evidence(BY_RULE, "Dropout.cu; H200: equal in 84 calls, 792,786 words")
DRAWN = Evidence(BY_RULE, "DistributionTemplates.h and curand's Philox; H200: equal in 1,098 calls, 638,055 words")


def _draw(call: Call, elements: int, step: int | None = None) -> tuple[int, int]:
    """Return seed and offset of a launch over some elements, and move the generator on.

    Raises:
        NotModelled: The generator's state is not known, or a generator of the user's own is given.
    """
    if call.arguments.get("generator") is not None:
        raise NotModelled(f"{call.name}: generator= is a generator of a CPU; the GPU's default one has a rule (replay/aten_operations.py)")
    if call.generator is None:
        raise NotModelled(f"{call.name}: random numbers need the generator's seed and offset, which a record does not have")
    return call.generator.advance(random_numbers.launch_step(elements, call.gpu) if step is None else step)


def _storage_order(x: np.ndarray) -> tuple[int, ...]:
    """Return the axes in the order in which TensorIterator counts elements, the slowest first."""
    return tuple(sorted(range(x.ndim), key=lambda axis: -x.strides[axis]))


def _lay_numbers(numbers: np.ndarray, x: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Return numbers, counted with some axes as the slowest ones first, in the shape of x."""
    return numbers.reshape([x.shape[axis] for axis in order]).transpose(np.argsort(order)) if x.ndim else numbers.reshape(())


def _dropout(call: Call) -> Answer:
    x, p = call["input"], float(call["p"])
    if x.dtype not in FLOATS:
        raise NotModelled(f"{call.name}: got {x.dtype}; known are bfloat16, float16 and float32 (replay/aten_operations.py)")
    if call["train"] is False or not x.size or p == 1:
        kept = np.full(x.shape, call["train"] is False)
        return Answer((np.where(kept, x, np.zeros_like(x)), kept), "no random numbers", Evidence(EXACT_RESULT, "moves elements"))
    order = memory_order(x)
    vector = random_numbers.dropout_vector(x.size, x.itemsize, is_dense=order is not None)
    mask = random_numbers.dropout_mask(*_draw(call, x.size), x.size, p, vector=vector, gpu=call.gpu)
    mask = _lay_numbers(mask, x, tuple(range(x.ndim)) if vector == 1 or order is None else order)
    found = random_numbers.drop(x.astype(F32), mask, random_numbers.dropout_scale(p))
    return Answer((_round(call, found, x.dtype), mask), f"Philox, {vector} neighbours a thread", DROPOUT)


def _dropout_backward(call: Call) -> Answer:
    dtype, (grad,) = _operands(call, ("grad_output",))
    found = random_numbers.drop(grad, call["mask"], float(call["scale"]))
    return Answer((_round(call, found, dtype),), "mask * grad * scale", DROPOUT)


def _bernoulli(call: Call) -> Answer:
    x, p = call["self"], call["self"] if call["p"] is None else call["p"]
    if not np.all((np.asarray(p) >= 0) & (np.asarray(p) <= 1)):
        raise NotModelled(f"{call.name}: probabilities are from 0 to 1; a GPU stops at others")
    if isinstance(p, np.ndarray):
        _contiguous(call, x)
        found = random_numbers.bernoulli_of_tensor(*_draw(call, x.size, random_numbers.TENSOR_STEP), np.broadcast_to(p, x.shape))
        return Answer((found.astype(call.dtype),), "Philox, 4 neighbours a thread", DRAWN)
    return _distribution(call, x, lambda words: random_numbers.to_uniform(words) < F32.type(p))


def _distribution(call: Call, x: np.ndarray, transform: Callable[[np.ndarray], np.ndarray], each: int = random_numbers.WORDS) -> Answer:
    """Draw a number for each element of an operand, which is written in the order of its strides; as `draw_elements`."""
    state = _draw(call, x.size, random_numbers.launch_step(x.size, call.gpu, each))
    numbers = random_numbers.draw_elements(*state, x.size, transform, each=each, gpu=call.gpu)
    with np.errstate(over="ignore"):
        return Answer((_lay_numbers(numbers, x, _storage_order(x)).astype(call.dtype),), "Philox, single elements", DRAWN)


def _drawn_tensor(call: Call) -> np.ndarray:
    """Return an array like the result of a draw. Raises NotModelled for another dtype than the floats with a rule."""
    if call.dtype not in FLOATS:
        raise NotModelled(f"{call.name}: got {call.dtype}; known are bfloat16, float16 and float32 (replay/aten_operations.py)")
    return call["self"] if "self" in call.arguments else np.empty(call["size"], call.dtype)


def _exponential(call: Call) -> Answer:
    return _distribution(call, _drawn_tensor(call), lambda words: distributions.to_exponential(words, float(call["lambd"])))


def _normal(call: Call) -> Answer:
    mean, std = (np.asarray(call.arguments.get(name, value), F32) for name, value in (("mean", 0.0), ("std", 1.0)))
    return _distribution(call, _drawn_tensor(call), lambda words: fma_f32(distributions.to_normal(words), std, mean))


def _normal_of_tensors(call: Call) -> Answer:
    """Draw by a tensor of means or of deviations: two more operations scale and move normal numbers."""
    mean, std = call["mean"], call["std"]
    if not isinstance(mean, np.ndarray) and not isinstance(std, np.ndarray):
        raise NotModelled(f"{call.name}: this overload has no rule; torch.randn has (replay/aten_operations.py)")
    scaled = isinstance(std, np.ndarray)
    if scaled and not (std >= 0).all():
        raise NotModelled(f"{call.name}: a standard deviation is negative or NaN, which PyTorch refuses")
    x = np.empty(np.broadcast_shapes(np.shape(mean), np.shape(std)), call.dtype)
    drawn = _normal(replace(call, arguments={"self": x, "std": 1.0 if scaled else std, "generator": call["generator"]}))
    (numbers,) = drawn.results
    if scaled:
        numbers = _round(call, _quiet(np.multiply, np.asarray(numbers, F32), std.astype(F32)), call.dtype)
    moved = _round(call, _quiet(np.add, np.asarray(numbers, F32), np.asarray(mean, call.dtype).astype(F32)), call.dtype)
    return drawn._replace(results=(moved,))


def _integers(call: Call) -> Answer:
    """Draw integers from `low` to `high`, without `high`; one limit alone is `high`. Floats of the result are rounded."""
    low, high, size = call["low"], call["high"], call.arguments.get("size")
    if isinstance(high, list | tuple) and call.name == "randint":  # randint(high, size)
        high, size = None, high
    x = call["self"] if "self" in call.arguments else np.empty(() if size is None else size, call.dtype)
    if low is None:  # random_()
        if call.dtype not in FLOATS and call.dtype.kind not in "iu":
            raise NotModelled(f"{call.name}: {call.dtype} without limits has no rule (replay/aten_operations.py)")
        span = (1 << DIGITS[call.dtype]) + 1 if call.dtype in FLOATS else int(np.iinfo(call.dtype).max) + 1
        low, each = 0, 2 if call.dtype.itemsize == 8 else random_numbers.WORDS
    else:
        if call.name == "random" and high is None:  # random_(low, None)
            raise NotModelled(f"{call.name}: low={low} without high has no rule (replay/aten_operations.py)")
        low, high = (0, int(low)) if high is None or isinstance(high, list | tuple) else (int(low), int(high))
        is_whole, is_bool = call.dtype.kind in "iu", call.dtype.kind == "b"
        least, most = (np.iinfo(call.dtype).min, np.iinfo(call.dtype).max) if is_whole else (0, 1) if is_bool else (low, high)
        if not least <= low < high <= int(most) + 1:
            raise NotModelled(f"{call.name}: low={low}, high={high} of {call.dtype}, which PyTorch refuses")
        if call.dtype in DIGITS:
            low, high = distributions.held_limits(low, high, DIGITS[call.dtype])
        span, each = high - low, distributions.integer_width(high - low)
    return _distribution(call, x, lambda words: distributions.to_integers(words, low, span, each), each)


def _multinomial(call: Call) -> Answer:
    """Draw indices: those of the largest quotients of probabilities and exponential numbers."""
    x, count = call["self"], call["num_samples"]
    if x.dtype not in FLOATS or not x.size or not (np.isfinite(x).all() and (x >= 0).all() and (x.astype(F32).sum(-1) > 0).all()):
        raise NotModelled(f"multinomial: got {x.dtype}{list(x.shape)}; known are probabilities of bfloat16, float16 and float32")
    if not 0 < count <= (x.shape[-1] if not call["replacement"] else count):
        raise NotModelled(f"multinomial: {count} samples of {x.shape[-1]} probabilities, which PyTorch refuses")
    if count > 1 and call["replacement"]:
        raise NotModelled("multinomial: several draws with replacement have no rule (replay/aten_operations.py)")
    order = memory_order(x)
    laid = x if order is not None else np.ascontiguousarray(x)
    given = {"self": laid, "lambd": 1.0, "generator": call["generator"]}
    (numbers,) = _exponential(replace(call, dtypes=(x.dtype,), arguments=given)).results
    assert numbers is not None
    shares = _quiet(lambda p, q: (p / q).astype(x.dtype), x.astype(F32), numbers.astype(F32))
    if count == 1:
        return Answer((np.argmax(shares.astype(F32), -1, keepdims=True),), "Philox, the largest quotient", DRAWN)
    chosen = _topk(
        replace(
            call, dtypes=(x.dtype, np.dtype(np.int64)), arguments={"self": shares, "k": count, "dim": -1, "largest": True, "sorted": True}
        )
    )
    return Answer((chosen.results[1],), f"Philox, the {count} largest quotients", DRAWN)


def _uniform(call: Call) -> Answer:
    """Draw numbers from `low` to `high`, without `high`: those that are rounded to it become `low`."""
    x = _drawn_tensor(call)
    low, high = (np.asarray(call.arguments.get(name, value)).astype(call.dtype) for name, value in (("low", 0.0), ("high", 1.0)))
    if not low <= high:
        raise NotModelled(f"{call.name}: low={low}, high={high}, which PyTorch refuses")
    span = (high.astype(F32) - low.astype(F32)).astype(call.dtype).astype(F32)

    def transform(words: np.ndarray) -> np.ndarray:
        found = fma_f32(random_numbers.to_uniform(words), span, low.astype(F32)).astype(call.dtype)
        return np.where(found == high, low, found)

    return _distribution(call, x, transform)


# ---- reductions


def _axes(call: Call, x: np.ndarray) -> list[int]:
    """Return the axes over which an operator reduces; all of them for None and ()."""
    given = call["dim"]
    axes = list(range(x.ndim)) if given is None or given == [] or given == () else [given] if isinstance(given, int) else list(given)
    return sorted(axis % x.ndim for axis in axes) if x.ndim else []


def _reduce(name: str) -> Callable[[Call], Answer]:
    """Return what reduces by a row of `rows.ROW_OPERATORS`."""

    return lambda call: _reduced(call, f"{name}: Reduce.cuh", rows.reduce, name)


def _reduced(call: Call, kernel: str, reduce: Callable[..., Any], *first: Any, has_dtype: bool = True, **options: Any) -> Answer:
    """Reduce an operand along the axes of the call as the kernel does, which takes its axes in the order in which they lie in memory."""
    x, keep = call["self"], bool(call["keepdim"])
    if x.dtype not in FLOATS or call.dtype not in (x.dtype, F32):
        raise NotModelled(f"{call.name}: got {x.dtype} to {call.dtype}; known are bfloat16, float16 and float32 (torch_cuda/rows.py)")
    order = memory_order(x)
    if order is None:
        raise NotModelled(f"{call.name}: the operand has gaps or repeats in memory (strides {x.strides} bytes); dense ones have a rule")
    axes = _axes(call, x)
    places = tuple(place for place, axis in enumerate(order) if axis in axes)
    options |= {"dtype": np.float32 if call.dtype == F32 else None} if has_dtype else {}
    found = call_by_numpy(reduce, *first, x.transpose(order), places, gpu=call.gpu, **options)
    kept = [axis for axis in order if axis not in axes]
    found = found.transpose(np.argsort(kept)) if kept else found
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape) if keep or axis not in axes]
    terms = math.prod(x.shape[axis] for axis in axes)
    return Answer((found.reshape(shape).astype(call.dtype),), f"{kernel}, {terms} terms", LENGTHS)


def _extreme(sign: int) -> Callable[[Call], Answer]:
    """Return what finds the largest elements, or with -1 the least ones. The order decides between zeros of both signs alone."""

    def run(call: Call) -> Answer:
        x, axes = call["self"], tuple(_axes(call, call["self"]))
        if x.dtype not in FLOATS:
            raise NotModelled(f"{call.name}: got {x.dtype}; known are bfloat16, float16 and float32 (replay/aten_operations.py)")
        wide = x.astype(F32)
        found = (np.max if sign > 0 else np.min)(wide, axis=axes, keepdims=bool(call["keepdim"]))
        zeros = wide[wide == 0]
        if not (found == 0).any() or np.signbit(zeros).all() or not np.signbit(zeros).any():
            return Answer((_round(call, found, x.dtype),), "one of the operands", Evidence(EXACT_RESULT, "takes one of its operands"))
        signed = lambda v: v if sign > 0 else -v
        answer = _reduced(replace(call, arguments={**call.arguments, "self": signed(x)}), "ReduceMaxValuesKernel.cu", rows.reduce, "amax")
        return answer._replace(results=tuple(map(signed, answer.results)))

    return run


def _foreach_norm(call: Call) -> Answer:
    _requires(call, dtype=None)
    orders = [memory_order(x) for x in call["self"]]
    if None in orders:
        raise NotModelled("_foreach_norm: a tensor has gaps in memory; dense ones have a rule (replay/aten_operations.py)")
    flat = [x.transpose(order).reshape(-1) for x, order in zip(call["self"], orders, strict=True)]
    found = call_by_numpy(_norms_of_order, float(call["ord"]), *flat)
    return Answer(tuple(found), f"ForeachReduceOp.cu, for each of {len(found)} tensors", CENSUS)


def _norms_of_order(order: float, *tensors: Any) -> Any:
    return foreach.foreach_norm(tensors, order)


def _vector_norm(call: Call) -> Answer:
    return _reduced(call, "norm: Reduce.cuh", _norm_of_order, float(call["ord"]))


def _norm_of_order(order: float, x: Any, axes: tuple[int, ...], **options: Any) -> Any:
    return rows.vector_norm(x, order, axes, **options)


def _moment(reduce: Callable[..., Any]) -> Callable[[Call], Answer]:
    def run(call: Call) -> Answer:
        correction = 1 if call["correction"] is None else call["correction"]
        return _reduced(call, "Welford, Reduce.cuh", reduce, has_dtype=False, correction=float(correction))

    return run


def _contiguous(call: Call, *operands: np.ndarray) -> None:
    """Raise NotModelled for operands whose rows lie otherwise in memory than the shape says."""
    if not all(is_contiguous(x) for x in operands):
        raise NotModelled(f"{call.name}: got an operand that is not contiguous; PyTorch may copy it first (replay/aten_operations.py)")


def _along_axis(fn: Callable[..., Any], operands: Sequence[np.ndarray], axis: int, **options: Any) -> np.ndarray:
    ndim = operands[0].ndim
    if ndim and axis % ndim == ndim - 1:
        return _evaluate_rows(fn, operands, -1, **options)
    return call_by_numpy(fn, *operands, axis, **options)


def _softmax(call: Call, log: bool) -> Answer:
    x = np.ascontiguousarray(call["self"])  # PyTorch copies it too
    found = _along_axis(softmax.softmax, (x,), call["dim"], log=log, dtype=np.float32 if call["half_to_float"] else None)
    size = x.shape[call["dim"]] if x.ndim else 1
    return Answer((found,), f"{'log_' * log}softmax, {size} elements along axis {call['dim']}", LENGTHS)


def _safe_softmax(call: Call) -> Answer:
    """Compute the softmax of attention's math backend: a row without a finite element or NaN becomes 0."""
    _requires(call, dtype=None)
    answer = _softmax(replace(call, arguments={**call.arguments, "half_to_float": False}), log=False)
    hidden = np.isneginf(call["self"]).all(axis=call["dim"], keepdims=True)
    return answer._replace(results=(np.where(hidden, np.zeros((), call.dtype), np.asarray(answer.results[0])),))


def _softmax_backward(call: Call, log: bool) -> Answer:
    grad, y = (np.ascontiguousarray(call[name]) for name in ("grad_output", "output"))
    narrow = np.float16 if call.dtype == F16 and y.dtype == F32 else None
    found = _along_axis(softmax.softmax_backward, (grad, y), call["dim"], log=log, dtype=narrow)
    return Answer((found,), f"gradient of {'log_' * log}softmax, {y.shape[call['dim']]} elements", LENGTHS)


def _norm_axes(call: Call) -> None:
    if len(call["normalized_shape"]) != 1:
        raise NotModelled(f"{call.name}: got axes {call['normalized_shape']}; known is the last one (torch_cuda/norms.py)")


def _layer_norm(call: Call) -> Answer:
    _norm_axes(call)
    x = call["input"]
    found = _evaluate_rows(norms.layer_norm, (x,), call["weight"], call["bias"], float(call["eps"]))
    return Answer(found, f"layer_norm_kernel.cu, {x.shape[-1]} columns", LENGTHS)


def _rms_norm(call: Call) -> Answer:
    _norm_axes(call)
    x, eps = call["input"], call["eps"]
    eps = float(np.finfo(np.float32).eps) if eps is None else float(eps)
    return Answer(_evaluate_rows(norms.rms_norm, (x,), call["weight"], eps), f"layer_norm_kernel.cu, {x.shape[-1]} columns", LENGTHS)


def _requested(call: Call, found: Sequence[np.ndarray]) -> tuple[np.ndarray | None, ...]:
    """Return the gradients that the call asks for, and None for the others."""
    return tuple(x if wanted else None for x, wanted in zip(found, call["output_mask"], strict=True))


def _norm_backward(call: Call, gradients: Callable[..., Any], names: str) -> Answer:
    _norm_axes(call)
    found = call_by_numpy(gradients, *(call[name] for name in names.split()), gpu=call.gpu)
    return Answer(_requested(call, found), f"layer_norm_kernel.cu, gradients of {call['input'].shape[-1]} columns", LENGTHS)


def _check_batch_norm(call: Call, x: np.ndarray) -> None:
    """Raise NotModelled where cuDNN computes batch norm, or operands lie otherwise in memory than the shape says."""
    if x.dtype == F32 and x.ndim > 2 and call["weight"] is not None:
        raise NotModelled(
            f"{call.name}: cuDNN computes float32 operands with axes behind the channels, in an order that is not known; bfloat16 and "
            "float16 have a rule (torch_cuda/batch_norms.py)"
        )
    _contiguous(call, x)


def _batch_norm(call: Call) -> Answer:
    x = call["input"]
    _check_batch_norm(call, x)
    names = ("weight", "bias", "running_mean", "running_var")
    options = (bool(call["training"]), float(call["momentum"]), float(call["eps"]))
    *found, mean, variance = call_by_numpy(batch_norms.batch_norm, x, *(call[name] for name in names), *options)
    updates = {"running_mean": mean, "running_var": variance} if call["training"] and mean is not None else {}
    return Answer(tuple(found), f"Normalization.cuh, {x.shape[1]} channels", CENSUS, updates)


def _batch_norm_backward(call: Call) -> Answer:
    _requires(call, train=True)
    names = ("grad_out", "input", "weight", "save_mean", "save_invstd")
    operands = [call[name] if call[name] is None else np.ascontiguousarray(call[name]) for name in names]
    _check_batch_norm(call, operands[1])
    found = call_by_numpy(batch_norms.batch_norm_backward, *operands)
    return Answer(_requested(call, found), f"Normalization.cuh, gradients of {operands[1].shape[1]} channels", CENSUS)


# ---- losses, embeddings and cumulative sums

REDUCTIONS = ("none", "mean", "sum")  # by aten's number


def _check_targets(call: Call) -> None:
    """Raise NotModelled for one row without a batch, which has a kernel of its own, and Unsupported for targets that no class has."""
    x, labels = call["self"], call["target"]
    if x.ndim != 2:
        raise NotModelled(f"{call.name}: got operands {list(x.shape)}; known are rows [N, classes] (torch_cuda/losses.py)")
    wrong = (labels != call["ignore_index"]) & ((labels < 0) | (labels >= x.shape[1]))
    if wrong.any():
        raise Unsupported(f"{call.name}: the target {labels[wrong][0]} is none of {x.shape[1]} classes: the GPU stops with an assertion")


def _nll_loss(call: Call) -> Answer:
    _check_targets(call)
    how = REDUCTIONS[call["reduction"]]
    found = call_by_numpy(losses.nll_loss, call["self"], call["target"], call["weight"], how, call["ignore_index"])
    return Answer(found, f"Loss.cu, {call['self'].shape[0]} rows", LENGTHS)


def _nll_loss_backward(call: Call) -> Answer:
    _check_targets(call)
    operands = tuple(call[name] for name in ("grad_output", "self", "target", "total_weight", "weight"))
    found = call_by_numpy(losses.nll_loss_backward, *operands, REDUCTIONS[call["reduction"]], call["ignore_index"])
    return Answer((found,), "Loss.cu, gradient", LENGTHS)


def _mse_loss(call: Call) -> Answer:
    x, target = (np.ascontiguousarray(call[name]) for name in ("self", "target"))
    found = call_by_numpy(losses.mse_loss, x, target, REDUCTIONS[call["reduction"]], gpu=call.gpu)
    return Answer((found,), f"squares in {x.dtype}, and Reduce.cuh, {x.size} terms", LENGTHS)


def _mse_loss_backward(call: Call) -> Answer:
    operands = [np.ascontiguousarray(call[name]) for name in ("grad_output", "self", "target")]
    found = call_by_numpy(losses.mse_loss_backward, *operands, REDUCTIONS[call["reduction"]])
    return Answer((found,), "mse_loss_backward", CENSUS, memory_format=CONTIGUOUS)


def _embedding_backward(call: Call) -> Answer:
    _requires(call, scale_grad_by_freq=False)
    grad, indices = call["grad_output"], call["indices"]
    grad = np.ascontiguousarray(grad).reshape(-1, grad.shape[-1])
    found = call_by_numpy(embeddings.embedding_backward, grad, indices.reshape(-1), int(call["num_weights"]), int(call["padding_idx"]))
    return Answer((found,), f"Embedding.cu, {indices.size} indices", LENGTHS)


def _cumsum(call: Call) -> Answer:
    x = call["self"]
    if call.dtype.kind in "iu":
        return Answer((np.cumsum(x.astype(call.dtype), call["dim"], dtype=call.dtype),), "integers", Evidence(EXACT_RESULT, "integers"))
    if call.dtype != x.dtype:
        raise NotModelled(f"cumsum: got {x.dtype} to {call.dtype}; known are results of the operand's dtype (torch_cuda/scans.py)")
    if not x.ndim:
        return Answer((x.copy(),), "the element itself", IEEE)
    return Answer((call_by_numpy(scans.cumsum, x, call["dim"]),), f"ScanUtils.cuh, {x.shape[call['dim']]} elements", LENGTHS)


def _histc(call: Call) -> Answer:
    """Count the elements of each bin: counts are integers, which atomic additions in any order give."""
    x, low, high, bins = call["self"], call["min"], call["max"], call["bins"]
    if call.dtype != F32 or x.size >= 1 << 24 or low >= high:
        raise NotModelled(f"histc: got {x.size} elements of {x.dtype} from {low} to {high}; known are float32, below 2^24, from min < max")
    low, high = F32.type(low), F32.type(high)
    inside = x[(x >= low) & (x <= high)]
    places = np.minimum(((inside - low) * F32.type(bins) / (high - low)).astype(np.int64), bins - 1)
    return Answer((np.bincount(places, minlength=bins).astype(F32),), "SummaryOps.cu", Evidence(BY_RULE, "PyTorch's source"))


# ---- sorting

TIES = Evidence(MEASURED, "H200: equal words and indices, with equal elements (torch_cuda/sorting.py)")


def _alone(call: Call) -> Answer | None:
    """Return the answer for a tensor without axes: the element itself."""
    x = call["self"]
    return None if x.ndim else Answer((x.copy(), np.zeros((), np.int64)), "the element itself", IEEE)


def _indexed(call: Call, found: tuple[np.ndarray, np.ndarray], kernel: str) -> Answer:
    return Answer((found[0], found[1].astype(call.dtypes[1])), kernel, TIES)


def _sort(call: Call) -> Answer:
    if call["stable"]:
        raise NotModelled("sort: a stable sort has no rule here; PyTorch on this CPU gives its bits (replay/aten_operations.py)")
    if alone := _alone(call):
        return alone
    found = call_by_numpy(sorting.sort, call["self"], call["dim"], bool(call["descending"]))
    return _indexed(call, found, f"Sort.cu, {call['self'].shape[call['dim']]} elements")


def _topk(call: Call) -> Answer:
    _requires(call, sorted=True)
    if call["k"] and (alone := _alone(call)):
        return alone
    found = call_by_numpy(sorting.topk, call["self"], call["k"], call["dim"], bool(call["largest"]))
    return _indexed(call, found, f"TensorTopK.cu, {call['k']} of {call['self'].shape[call['dim']]}")


# ---- fused optimizers


def _adam_step(param: Any, grad: Any, mean: Any, square: Any, largest: Any, step: int, **options: Any) -> Any:
    param, state = optimizers.adam_step(param, grad, optimizers.AdamState(mean, square, largest), step, **options)
    return param, *state


def _fused_adam(call: Call, decoupled: bool) -> Answer:
    """Compute a step of each parameter. The results are the lists that it writes, in aten's order; gradients stay as they are."""
    _requires(call, grad_scale=None, found_inf=None)
    if isinstance(call["lr"], np.ndarray):
        raise NotModelled(f"{call.name}: a tensor as learning rate has no rule; a number has one (replay/aten_operations.py)")
    options = {name: call[name] for name in ("lr", "eps", "weight_decay", "maximize")}
    options |= {"betas": (call["beta1"], call["beta2"]), "decoupled": decoupled, "form": "fused"}
    params, states = call["self"], [call[name] for name in ("exp_avgs", "exp_avg_sqs")]
    largest = call["max_exp_avg_sqs"] if call["amsgrad"] else [None] * len(params)
    rows_ = [
        call_by_numpy(_adam_step, *operands, int(step), **options)
        for *operands, step in zip(params, call["grads"], *states, largest, call["state_steps"], strict=True)
    ]
    columns = [[row[i] for row in rows_] for i in range(4)]
    written = [*columns[0], *[None] * len(params), *columns[1], *columns[2], *(columns[3] if call["amsgrad"] else ())]
    return Answer(tuple(written), f"fused_adam_utils.cuh, for each of {len(params)} tensors", CENSUS)


# ---- products


def _product(call: Call, left: str, right: str) -> Answer:
    """Compute a product, with a `self` that is no factor added, by the kernel that cuBLAS takes for its shapes and memory orders."""
    a, b, addend = call[left], call[right], None if left == "self" else call["self"]
    if addend is not None:
        _requires(call, beta=1, alpha=1)
    if a.dtype not in FLOATS or not a.dtype == b.dtype == call.dtype or (addend is not None and addend.dtype != a.dtype):
        raise NotModelled(f"{call.name}: got {a.dtype}, {b.dtype} to {call.dtype}; known are equal float dtypes (replay/torch_products.py)")
    if addend is not None and addend.ndim != 1:
        addend = np.ascontiguousarray(np.broadcast_to(addend, (*a.shape[:-1], b.shape[-1])))
    if 0 in (*a.shape, *b.shape):
        found = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype) if addend is None else np.broadcast_to(addend, (*a.shape[:-1], b.shape[-1]))
        return Answer((found.copy(),), "no product", IEEE)
    if a.shape[-1] == 1 and addend is None:  # an accumulator that begins at +0 takes one product
        found = _quiet(fma_f32, *np.broadcast_arrays(a.astype(F32), b.astype(F32), F32.type(0)))
        return Answer((_round(call, found, a.dtype),), "one product", IEEE)
    shape = None if addend is None else addend.shape
    orders = {"transposed_a": lies_transposed(a), "transposed_b": lies_transposed(b)}
    choice = torch_products.choose_kernel(
        torch_products.torch_product(a.shape, b.shape, a.dtype, **orders, addend_shape=shape), gpu=call.gpu, library=call.library
    )
    found = np.asarray(torch_products.multiply_as_chosen(choice, a, b, addend))
    status = BY_RULE if choice.source in (torch_products.RULE, torch_products.PROPOSED) else MEASURED
    return Answer((found,), f"{choice.kernels}, {choice.recipe.slices}", Evidence(status, choice.evidence), recipe=choice.recipe)


def lies_channels_last(x: np.ndarray) -> bool:
    """Return whether PyTorch suggests channels last for a tensor of two or three further axes.

    Source: PyTorch 2.11.0, c10/core/MemoryFormat.h (`is_channels_last_strides_2d_s4` and `_3d_s5`).
    """
    if x.ndim not in (4, 5) or not x.size or not x.strides[1]:
        return False
    least = 0
    for axis in (1, *range(x.ndim - 1, 1, -1), 0):
        if x.strides[axis] < least or (axis == 0 and least == x.strides[1]):
            return False
        least = x.strides[axis] * max(1, x.shape[axis])
    return True


def _convolution_options(call: Call, x: np.ndarray, weight: np.ndarray) -> dict[str, Any]:
    """Return what `torch_convolutions` takes besides the operands. cuDNN gets copies of operands that lie otherwise."""
    axes = weight.ndim - 2
    names = ("stride", "padding", "dilation", "output_padding")
    options: dict[str, Any] = {name: tuple(call[name]) * (axes if len(call[name]) == 1 else 1) for name in names}
    last = lies_channels_last(x) or lies_channels_last(weight)
    options |= {"groups": call["groups"], "transposed": bool(call["transposed"]), "channels_last": last, "tf32": call.tf32}
    return options | {"gpu": call.gpu, "library": call.library}


def _convolution_evidence(choices: Sequence[torch_convolutions.ConvolutionChoice]) -> tuple[str, Evidence]:
    kernels = "; ".join(
        f"{choice.call.direction}: {choice.kernels}" + ("" if choice.order is None else f", {choice.order}") for choice in choices
    )
    recorded = all(choice.source == torch_convolutions.RECORDED for choice in choices)
    return kernels, Evidence(MEASURED if recorded else BY_RULE, "; ".join(dict.fromkeys(choice.evidence for choice in choices)))


def _convolution(call: Call) -> Answer:
    x, weight = call["input"], call["weight"]
    options = _convolution_options(call, x, weight)
    found, choices = torch_convolutions.convolution(x, weight, call["bias"], **options)
    return Answer((found,), *_convolution_evidence(choices), memory_format=CHANNELS_LAST if options["channels_last"] else None)


def _convolution_backward(call: Call) -> Answer:
    """Compute gradients of input, weight and bias; the last one is a sum over batch and places."""
    grad, x, weight = call["grad_output"], call["input"], call["weight"]
    of_input, of_weight, of_bias = call["output_mask"]
    options = _convolution_options(call, x, weight)
    *found, choices = torch_convolutions.convolution_gradients(grad, x, weight, **options, requested=(of_input, of_weight))
    kernel, evidence = _convolution_evidence(choices)
    of_bias_ = None
    if of_bias:
        axes = [0, *range(2, grad.ndim)]
        summed = replace(call, name="sum", arguments={"self": grad, "dim": axes, "keepdim": False, "dtype": None}, dtypes=(grad.dtype,))
        answer = _reduce("sum")(summed)
        of_bias_, kernel = answer.results[0], "; ".join(filter(None, (kernel, f"gradient of the bias: {answer.kernel}")))
        evidence = evidence if choices else answer.evidence
    return Answer((*found, of_bias_), kernel, evidence)


def _grouped_mm(call: Call) -> Answer:
    _requires(call, bias=None, out_dtype=None)
    x, weights = call["self"], call["mat2"]
    if call["offs"] is None or weights.ndim != 3:
        raise NotModelled("_grouped_mm: known are rows by experts, [M, K] and [E, K, N] with offsets (replay/torch_convolutions.py)")
    found = torch_convolutions.grouped_matmul(
        np.ascontiguousarray(x), np.ascontiguousarray(weights), call["offs"], transposed_b=lies_transposed(weights), gpu=call.gpu
    )
    text = "H200: equal in the recorded grouped products (replay/torch_convolutions.py)"
    return Answer((np.asarray(found),), f"grouped products of {len(weights)} experts", Evidence(BY_RULE, text))


# ---- attention

ATTENTION = Evidence(BY_RULE, "H200: equal in the cases of the census and in recorded models (torch_cuda/attention.py)")


def _attention(call: Call, backend: str) -> Answer:
    """Compute a backend's output and logarithms of sums. Its other results are seeds and offsets of random numbers."""
    if "return_debug_mask" in call.arguments:
        _requires(call, return_debug_mask=False)
    q, k, v = (np.ascontiguousarray(call[name]) for name in ("query", "key", "value"))
    options = {"causal": bool(call["is_causal"]), "bias": call.arguments.get("attn_bias"), "scale": call["scale"], "gpu": call.gpu}
    dropout, states = None, {}
    if call["dropout_p"]:
        shape = (*q.shape[:3], k.shape[2])
        seed, offset = _draw(call, math.prod(shape), random_numbers.attention_step(backend, shape))
        dropout = random_numbers.AttentionDropout(float(call["dropout_p"]), seed, offset)
        state = np.array([seed, offset], np.uint64)
        first = {"cudnn": 6, "efficient": 2}.get(backend, 0)
        states = {first: state[0].astype(np.int64), first + 1: state[1].astype(np.int64)} if first else {6: state}
    out, logarithms = map(np.asarray, attention.attention(q, k, v, backend=backend, dropout=dropout, **options))
    if backend == "efficient":  # CUTLASS's kernel writes whole warps of queries
        width = -(-q.shape[2] // 32) * 32 if call["compute_log_sumexp"] else 0
        logarithms = np.pad(logarithms, [(0, 0), (0, 0), (0, max(width - q.shape[2], 0))], constant_values=np.inf)[..., :width]
    kernel = f"{backend} attention, {k.shape[2]} keys" + ", dropout" * (dropout is not None)
    gives_sums = backend != "cudnn" or call["compute_log_sumexp"]
    return Answer((out, logarithms if gives_sums else None), kernel, ATTENTION, states=states)


def _attention_backward(call: Call, backend: str) -> Answer:
    """Compute the gradients of a backend."""
    dropout = None
    if call["dropout_p"]:
        state = np.concatenate(
            [np.asarray(call[name]).reshape(-1) for name in ("philox_seed", "philox_offset")]
        )  # of flash, the first has both
        dropout = random_numbers.AttentionDropout(float(call["dropout_p"]), int(state[0]) % (1 << 64), int(state[1]))
    names = ("grad_out_" if backend == "efficient" else "grad_out", "query", "key", "value", "out", "logsumexp")
    operands = [np.ascontiguousarray(call[name]) for name in names]
    _, q, k, v, _, logsumexp = operands
    operands[-1] = logsumexp.reshape(*q.shape[:2], -1)[..., : q.shape[2]]
    options = {"causal": bool(call["is_causal"]), "bias": call.arguments.get("attn_bias"), "scale": call["scale"], "gpu": call.gpu}
    options |= {"open_order": "lockstep", "deterministic": call.deterministic, "dropout": dropout}
    found = attention.attention_backward(*operands, backend=backend, **options)
    wanted = call.arguments.get("grad_input_mask", (True, True, True, False))
    shape = (*q.shape[:3], max(q.shape[-1], v.shape[-1]))
    reason = attention.find_open_order(backend, shape, k.shape[2], deterministic=call.deterministic, wide=q.dtype == F32)
    results = (*map(np.asarray, found[:3]), *([np.asarray(found.bias)] if wanted[3] else [None] * (len(call.dtypes) - 3)))
    how = ", dQ in lockstep" if reason else ""
    return Answer(results, f"{backend} attention, gradients{how}", ATTENTION, open_results={0: reason} if reason and wanted[0] else {})


# ---- the table

FUSED_ADAM = (
    "self, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize, "
    "grad_scale=None, found_inf=None"
)
OPERATIONS: dict[str, Operation] = {
    "add": Operation("self, other, alpha=1", _add),
    "sub": Operation("self, other, alpha=1", partial(_add, sign=-1.0)),
    "rsub": Operation("self, other, alpha=1", _rsub),
    "mul": Operation("self, other", _ieee("self other", np.multiply, "mul")),
    "maximum": Operation("self, other", _limit(low="other")),
    "minimum": Operation("self, other", _limit(high="other")),
    "clamp": Operation("self, min=None, max=None", _limit("min", "max")),
    "clamp_min": Operation("self, min", _limit(low="min")),
    "clamp_max": Operation("self, max", _limit(high="max")),
    "hardtanh": Operation("self, min_val=-1, max_val=1", _limit("min_val", "max_val")),
    "relu": Operation("self", _limit(zero=True)),
    "div": Operation("self, other, rounding_mode=None", _div),
    "pow": Operation("self, exponent", _pow),
    "gelu": Operation("self, approximate='none'", _gelu),
    "gelu_backward": Operation("grad_output, self, approximate='none'", _gelu_backward),
    "silu_backward": Operation("grad_output, self", _function("grad_output self", evidence=PAIRS)),
    "sigmoid_backward": Operation("grad_output, output", _function("grad_output output", evidence=PAIRS)),
    "tanh_backward": Operation("grad_output, output", _function("grad_output output", evidence=PAIRS)),
    "_foreach_add": Operation("self, other, alpha=1", _foreach(_add)),
    "_foreach_sub": Operation("self, other, alpha=1", _foreach(partial(_add, sign=-1.0))),
    "_foreach_mul": Operation("self, other", _foreach(_ieee("self other", np.multiply, "mul"))),
    "_foreach_div": Operation("self, other", _foreach(_ieee("self other", np.divide, "div"))),
    **{f"_foreach_{name}": Operation("self, other", _foreach_limit(False)) for name in ("maximum", "clamp_min")},
    **{f"_foreach_{name}": Operation("self, other", _foreach_limit(True)) for name in ("minimum", "clamp_max")},
    "_foreach_sqrt": Operation("self", _foreach(_ieee("self", np.sqrt, "sqrt"))),
    "_foreach_addcmul": Operation("self, tensor1, tensor2, value=1", _foreach(partial(_pointwise, name="addcmul"))),
    "_foreach_addcdiv": Operation("self, tensor1, tensor2, value=1", _foreach(partial(_pointwise, name="addcdiv"))),
    "_foreach_norm": Operation("self, ord=2, dtype=None", _foreach_norm),
    "_fused_adam": Operation(FUSED_ADAM, partial(_fused_adam, decoupled=False)),
    "_fused_adamw": Operation(FUSED_ADAM, partial(_fused_adam, decoupled=True)),
    "_foreach_lerp": Operation("self, end, weight", _foreach(_lerp)),
    "elu": Operation("self, alpha=1, scale=1, input_scale=1", _with(_function("self"), alpha=1, scale=1, input_scale=1)),
    "leaky_relu": Operation("self, negative_slope=0.01", _with(_function("self"), negative_slope=0.01)),
    "softplus": Operation("self, beta=1, threshold=20", _with(_function("self"), beta=1, threshold=20)),
    "addcmul": Operation("self, tensor1, tensor2, value=1", partial(_pointwise, name="addcmul")),
    "addcdiv": Operation("self, tensor1, tensor2, value=1", partial(_pointwise, name="addcdiv")),
    "lerp": Operation("self, end, weight", _lerp),
    "sum": Operation("self, dim=None, keepdim=False, dtype=None", _reduce("sum")),
    "mean": Operation("self, dim=None, keepdim=False, dtype=None", _reduce("mean")),
    "linalg_vector_norm": Operation("self, ord=2, dim=None, keepdim=False, dtype=None", _vector_norm),
    "prod": Operation("self, dim=None, keepdim=False, dtype=None", _reduce("prod")),
    "amax": Operation("self, dim=(), keepdim=False", _extreme(1)),
    "amin": Operation("self, dim=(), keepdim=False", _extreme(-1)),
    "var": Operation("self, dim=None, correction=None, keepdim=False", _moment(rows.variance)),
    "std": Operation("self, dim=None, correction=None, keepdim=False", _moment(rows.standard_deviation)),
    "_safe_softmax": Operation("self, dim, dtype=None", _safe_softmax),
    "_softmax": Operation("self, dim, half_to_float", partial(_softmax, log=False)),
    "_log_softmax": Operation("self, dim, half_to_float", partial(_softmax, log=True)),
    "_softmax_backward_data": Operation("grad_output, output, dim, input_dtype", partial(_softmax_backward, log=False)),
    "_log_softmax_backward_data": Operation("grad_output, output, dim, input_dtype", partial(_softmax_backward, log=True)),
    "native_layer_norm": Operation("input, normalized_shape, weight, bias, eps", _layer_norm),
    "native_layer_norm_backward": Operation(
        "grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask",
        partial(_norm_backward, gradients=norms.layer_norm_backward, names="grad_out input mean rstd weight"),
    ),
    "_fused_rms_norm": Operation("input, normalized_shape, weight, eps", _rms_norm),
    "_fused_rms_norm_backward": Operation(
        "grad_out, input, normalized_shape, rstd, weight, output_mask",
        partial(_norm_backward, gradients=norms.rms_norm_backward, names="grad_out input rstd weight"),
    ),
    "nll_loss_forward": Operation("self, target, weight, reduction, ignore_index", _nll_loss),
    "nll_loss_backward": Operation(
        "grad_output, self, target, weight, reduction, ignore_index, total_weight", _nll_loss_backward
    ),
    "mse_loss": Operation("self, target, reduction=1", _mse_loss),
    "mse_loss_backward": Operation("grad_output, self, target, reduction", _mse_loss_backward),
    "native_batch_norm": Operation("input, weight, bias, running_mean, running_var, training, momentum, eps", _batch_norm),
    "native_batch_norm_backward": Operation(
        "grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask", _batch_norm_backward
    ),
    "embedding_dense_backward": Operation(
        "grad_output, indices, num_weights, padding_idx, scale_grad_by_freq", _embedding_backward
    ),
    "cumsum": Operation("self, dim, dtype=None", _cumsum),
    "histc": Operation("self, bins=100, min=0, max=0", _histc),
    "_scaled_dot_product_cudnn_attention": Operation(
        "query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None",
        partial(_attention, backend="cudnn"),
    ),
    "_scaled_dot_product_flash_attention": Operation(
        "query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, scale=None", partial(_attention, backend="flash")
    ),
    "_scaled_dot_product_efficient_attention": Operation(
        "query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, scale=None",
        partial(_attention, backend="efficient"),
    ),
    "_scaled_dot_product_cudnn_attention_backward": Operation(
        "grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k, "
        "dropout_p, is_causal, scale=None",
        partial(_attention_backward, backend="cudnn"),
    ),
    "_scaled_dot_product_flash_attention_backward": Operation(
        "grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, "
        "philox_offset, scale=None",
        partial(_attention_backward, backend="flash"),
    ),
    "_scaled_dot_product_efficient_attention_backward": Operation(
        "grad_out_, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p, grad_input_mask, "
        "is_causal=False, scale=None",
        partial(_attention_backward, backend="efficient"),
    ),
    "native_dropout": Operation("input, p, train", _dropout),
    "native_dropout_backward": Operation("grad_output, mask, scale", _dropout_backward),
    "bernoulli": Operation("self, p=None, generator=None", _bernoulli),
    "uniform": Operation("self, low=0.0, high=1.0, generator=None", _uniform),
    "rand": Operation("size, dtype=None, generator=None", _uniform),
    "rand_like": Operation("self, dtype=None", _uniform),
    "exponential": Operation("self, lambd=1.0, generator=None", _exponential),
    "normal_": Operation("self, mean=0.0, std=1.0, generator=None", _normal),
    "randn": Operation("size, dtype=None, generator=None", _normal),
    "randn_like": Operation("self, dtype=None", _normal),
    "normal": Operation("mean, std=1.0, generator=None", _normal_of_tensors),
    "randint": Operation("low, high, size=None, dtype=None, generator=None", _integers),
    "randint_like": Operation("self, low, high=None, dtype=None", _integers),
    "random": Operation("self, low=None, high=(), generator=None", _integers),
    "multinomial": Operation("self, num_samples, replacement=False, generator=None", _multinomial),
    "sort": Operation("self, dim=-1, descending=False, stable=None", _sort),
    "topk": Operation("self, k, dim=-1, largest=True, sorted=True", _topk),
    "softplus_backward": Operation(
        "grad_output, self, beta, threshold", _with(_function("grad_output self", evidence=PAIRS), beta=1, threshold=20)
    ),
    "mish_backward": Operation("grad_output, self", _function("grad_output self", evidence=PAIRS)),
    "hardsigmoid": Operation("self", _function("self")),
    "hardsigmoid_backward": Operation("grad_output, self", _function("grad_output self", evidence=PAIRS)),
    "leaky_relu_backward": Operation(
        "grad_output, self, negative_slope, self_is_result", _with(_function("grad_output self", evidence=PAIRS), negative_slope=0.01)
    ),
    **{name: Operation("self, other", _function("self other", evidence=PAIRS)) for name in ("atan2", "fmod", "remainder", "logaddexp")},
    "convolution": Operation("input, weight, bias, stride, padding, dilation, transposed, output_padding, groups", _convolution),
    "convolution_backward": Operation(
        "grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask",
        _convolution_backward,
    ),
    "_grouped_mm": Operation("self, mat2, offs=None, bias=None, out_dtype=None", _grouped_mm),
    **{name: Operation("self, mat2", partial(_product, left="self", right="mat2")) for name in ("mm", "bmm")},
    "addmm": Operation("self, mat1, mat2, beta=1, alpha=1", partial(_product, left="mat1", right="mat2")),
    "baddbmm": Operation("self, batch1, batch2, beta=1, alpha=1", partial(_product, left="batch1", right="batch2")),
    **{
        name: Operation("self", _function("self"))
        for name in (
            "exp", "log", "exp2", "log2", "log1p", "expm1", "sqrt", "rsqrt", "tanh", "erf", "reciprocal", "sigmoid", "silu", "hardswish",
            "mish", "sin", "cos",
        )
    },
}  # fmt: skip

# Operators whose kernels load vectors or are chosen by where an operand begins: the rules are those of operands that begin where PyTorch
# allocates. On an H200 views of float32 that begin 4 to 28 bytes later had other words than their clones in 65 of 135 cases; 16 or 32 bytes
# later, and of bfloat16, whose results are rounded, in none. Those of COPIED copy an operand that is not contiguous first.
ALIGNMENT = 16  # bytes
COPIED = frozenset(name for name in OPERATIONS if "softmax" in name or name.startswith(("native_layer_norm", "_fused_rms_norm")))
ALIGNED = COPIED | {
    "sum", "mean", "prod", "linalg_vector_norm", "_foreach_norm", "var", "std", "cumsum", "mm", "bmm", "addmm", "baddbmm", "native_dropout",
} | {name for name in OPERATIONS if name.startswith("_scaled_dot_product")}  # fmt: skip

# Operators whose results every correct implementation has: a reason for each group of names.
MOVES_ELEMENTS = "moves elements"
EXACT: dict[str, str] = {
    name: reason
    for reason, names in {
        MOVES_ELEMENTS: (
            "_foreach_zero _foreach_copy alias arange cat clone constant_pad_nd copy diag_embed embedding eye flip fill "
            "full full_like gather index index_select lift_fresh masked_fill masked_select new_full new_ones new_zeros "
            "nonzero ones ones_like repeat roll scalar_tensor select_backward slice_backward slice_scatter "
            "select_scatter split_with_sizes_copy stack take tril triu unbind_copy where zero zeros zeros_like _to_copy "
            "_unsafe_view _reshape_alias _reshape_copy resize expand_copy view_copy permute_copy unsqueeze_copy slice_copy "
            "as_strided_copy unfold_backward _unsafe_index _local_scalar_dense empty empty_like empty_strided new_empty "
            "new_empty_strided detach _conj_physical pixel_shuffle"
        ),
        "takes one of its operands": (
            "_foreach_abs _foreach_neg abs neg sign threshold_backward max min argmax argmin ceil floor trunc isnan isinf"
        ),
        "compares or counts": (
            "eq ne lt le gt ge all any bitwise_and bitwise_or bitwise_not bitwise_xor logical_and logical_or logical_not isin equal signbit"
        ),
    }.items()
    for name in names.split()
}
