"""Recorded operations of torch and JAX as nodes of a program: `BUILDERS` has one builder an operation.

A builder reads the parameters of an operation through `_read_arguments` and `_read_attribute`, which raise NotModelled for parameters of
another kind than it knows: a record is not trusted. Any other exception of a builder is a fault of this module, and is not caught.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.uses.drift.programs import SPECIAL, Program, Ref
from tcemu.uses.drift.records import DTYPES, Operation

Builder = Callable[[Program, Operation, list[Ref]], Ref]
MAX_NODES = 64


def append_operation(program: Program, operation: Operation, refs: list[Ref]) -> Ref | None:
    """Append the nodes of a recorded operation, and return its first result; None for an operation that is not known."""
    builder = BUILDERS.get(operation.name)
    if builder is None or not operation.results or operation.results[0].dtype not in DTYPES or len(program.nodes) > MAX_NODES:
        return None
    if any(tensor.dtype in ("float64", "int64", "uint64") and tensor.shape for tensor in operation.operands):
        return None
    try:
        return builder(program, operation, refs)
    except NotModelled:  # parameters of another kind than the builder knows
        return None


# ---- parameters of a record


class Kind(NamedTuple):
    """A kind of parameter."""

    words: str
    accepts: Callable[[Any], bool]
    default: Any = ...  # of a parameter that is not given; ...: it must be


def _is_number(x: Any) -> bool:
    return (isinstance(x, int | float) and not isinstance(x, bool)) or x in ("inf", "-inf", "nan")  # as JSON has them


def _is_integer(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _is_list(x: Any, of: Callable[[Any], bool] = _is_integer) -> bool:
    return isinstance(x, list) and all(map(of, x))


TENSOR = Kind("a tensor", lambda x: isinstance(x, tuple))
VALUE = Kind("a tensor or a number", lambda x: isinstance(x, tuple) or _is_number(x))
BOUND = Kind("a tensor, a number or None", lambda x: x is None or isinstance(x, tuple) or _is_number(x), None)
OPTIONAL = Kind("a tensor or None", lambda x: x is None or isinstance(x, tuple))
NUMBER, INTEGER = Kind("a number", _is_number), Kind("an integer", _is_integer)
INTEGERS = Kind("integers", _is_list)
FLAG = Kind("True or False", lambda x: isinstance(x, bool))
KEEPDIMS = FLAG._replace(default=False)
AXES = Kind("an axis, axes or None", lambda x: x is None or _is_integer(x) or _is_list(x), None)
ANY = Kind("anything", lambda x: True, None)
PAIR_OF_PAIRS = Kind("two pairs of axes", lambda x: _is_list(x, lambda y: _is_list(y, _is_list) and len(y) == 2) and len(x) == 2)
LISTS = Kind("lists of integers", lambda x: _is_list(x, _is_list))
ALPHA = Kind("the factor 1", lambda x: x in (1, 1.0), 1)


def _refuse(operation: Operation, what: str) -> NotModelled:
    return NotModelled(f"{operation.name}: {what}; nothing is known of it (tcemu/uses/drift/recorded_operations.py)")


def _read_arguments(operation: Operation, refs: list[Ref], *kinds: Kind, keywords: tuple[str, ...] = ()) -> list[Any]:
    """Return the positional arguments of an operation of torch: references for tensors, and plain values.

    Args:
        operation: The operation.
        refs: Its tensors.
        *kinds: The kinds of its arguments.
        keywords: Names of arguments that the caller reads from `operation.attributes["kwargs"]`.

    Raises:
        NotModelled: The operation has other arguments.
    """
    given, named = operation.attributes.get("args"), operation.attributes.get("kwargs")
    if not isinstance(given, list) or not isinstance(named, dict) or not set(named) <= {*keywords}:
        raise _refuse(operation, f"arguments {given!r} and {named!r}")
    tensors = iter(refs)
    values = [next(tensors, None) if isinstance(x, str) and x.startswith("#") else x for x in given]
    values += [kind.default for kind in kinds[len(values) :]]
    wrong = [x for x, kind in zip(values, kinds, strict=False) if x is ... or not kind.accepts(x)]
    if len(values) > len(kinds) or wrong:
        raise _refuse(operation, f"arguments {given!r}; expected {', '.join(kind.words for kind in kinds)}")
    return values


def _read_attribute(operation: Operation, name: str, kind: Kind) -> Any:
    """Return a parameter of an operation of JAX. Raises NotModelled if it is of another kind."""
    value = operation.attributes.get(name, kind.default)
    if value is ... or not kind.accepts(value):
        raise _refuse(operation, f"{name} = {operation.attributes.get(name)!r}; expected {kind.words}")
    return value


def _read_operands(operation: Operation, refs: list[Ref], count: int) -> list[Ref]:
    """Return the first operands. Raises NotModelled if there are fewer."""
    if len(refs) < count:
        raise _refuse(operation, f"{len(refs)} operands; expected {count}")
    return refs[:count]


def _axes(operation: Operation, axes: int | list[int] | None) -> list[int]:
    """Return axes of the first operand; all of them for None and []. Raises NotModelled for an axis that it does not have."""
    rank = len(operation.operands[0].shape) if operation.operands else 0
    found = [axes] if isinstance(axes, int) else axes or list(range(rank))
    if not all(-rank <= axis < rank for axis in found):
        raise _refuse(operation, f"axes {found} of an operand of rank {rank}")
    return found


# ---- operations of JAX, and of both


def _out(operation: Operation) -> np.dtype:
    return DTYPES[operation.results[0].dtype]


def _elementwise(kind: str) -> Builder:
    return lambda program, operation, refs: program.add(kind, refs, _out(operation), operation.index)


def _integer_pow(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    power = _read_attribute(operation, "y", INTEGER._replace(default=2))
    (x,), dtype = _read_operands(operation, refs, 1), _out(operation)
    if not 2 <= power <= 16:
        raise _refuse(operation, f"the power {power}")
    total: Ref | None = None
    square = x
    while power:
        if power & 1:
            total = square if total is None else program.add("mul", (total, square), dtype, operation.index, internal=True)
        power >>= 1
        if power:
            square = program.add("mul", (square, square), dtype, operation.index, internal=True)
    assert total is not None
    return total


def _jax_product(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    contracted, batch = _read_attribute(operation, "dimension_numbers", PAIR_OF_PAIRS)
    return program.add("product", _read_operands(operation, refs, 2), _out(operation), operation.index, axes=(contracted, batch))


def _jax_convolution(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    groups = [_read_attribute(operation, name, INTEGER) for name in ("feature_group_count", "batch_group_count")]
    dilations = [*_read_attribute(operation, "lhs_dilation", INTEGERS), *_read_attribute(operation, "rhs_dilation", INTEGERS)]
    padding, strides = _read_attribute(operation, "padding", LISTS), _read_attribute(operation, "window_strides", INTEGERS)
    numbers = _read_attribute(operation, "dimension_numbers", LISTS)
    if groups != [1, 1] or set(dilations) != {1} or len(numbers) != 3:
        raise _refuse(operation, "a dilated or grouped convolution")
    out = numbers[2]
    if [*out[:1], *out[2:], *out[1:2]] != list(range(len(out))):
        raise _refuse(operation, "the channels of the result are not its last axis")
    operands = _read_operands(operation, refs, 2)
    return program.add("product", operands, _out(operation), operation.index, windows=numbers, padding=padding, strides=strides)


def _jax_sum(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    axes = _axes(operation, _read_attribute(operation, "axes", INTEGERS))
    return program.add("sum", _read_operands(operation, refs, 1), _out(operation), operation.index, axes=axes)


def _jax_movement(kind: str, shape: str | None, axes: str | None) -> Builder:
    def build(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
        facts: dict[str, Any] = {"shape": operation.results[0].shape if shape else None}
        if axes:
            facts["axes"] = _read_attribute(operation, axes, INTEGERS)
        return program.add(kind, _read_operands(operation, refs, 1), _out(operation), operation.index, **facts)

    return build


# ---- operations of torch


def _torch_binary(kind: str) -> Builder:
    def build(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
        x, y = (_constant(program, v) for v in _read_arguments(operation, refs, VALUE, VALUE))
        return program.add(kind, (x, y), _out(operation), operation.index)

    return build


def _torch_unary(kind: str) -> Builder:
    return lambda program, operation, refs: program.add(kind, _read_operands(operation, refs, 1), _out(operation), operation.index)


def _constant(program: Program, x: Any) -> Ref:
    return x if isinstance(x, tuple) else program.constant(float(x))


def _torch_rsub(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, y, _ = _read_arguments(operation, refs, VALUE, VALUE, ALPHA)
    return program.add("sub", (_constant(program, y), _constant(program, x)), _out(operation), operation.index)


def _is_bound(x: Any) -> bool:
    return BOUND.accepts(x)


def _torch_clamp(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, low, high = _read_arguments(operation, refs, TENSOR, BOUND, BOUND, keywords=("min", "max"))
    low, high = (operation.attributes["kwargs"].get(name, bound) for name, bound in (("min", low), ("max", high)))
    if not _is_bound(low) or not _is_bound(high) or (low is None and high is None):
        raise _refuse(operation, f"the bounds {low!r} and {high!r}")
    dtype, number = _out(operation), operation.index
    if low is not None:
        x = program.add("max", (x, _constant(program, low)), dtype, number, internal=high is not None)
    return x if high is None else program.add("min", (x, _constant(program, high)), dtype, number)


def _torch_relu(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    return program.add("max", (*_read_operands(operation, refs, 1), program.constant(0.0)), _out(operation), operation.index)


def _torch_reciprocal(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    return program.add("div", (program.constant(1.0), *_read_operands(operation, refs, 1)), _out(operation), operation.index)


def _torch_where(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    which, x, y = (_constant(program, value) for value in _read_arguments(operation, refs, TENSOR, VALUE, VALUE))
    return program.add("select", (which, y, x), _out(operation), operation.index)


def _torch_extreme(kind: str) -> Builder:
    def build(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
        x, axes, keepdims = _read_arguments(operation, refs, TENSOR, AXES, KEEPDIMS)
        return program.add(kind, (x,), _out(operation), operation.index, axes=_axes(operation, axes), keepdims=keepdims)

    return build


def _torch_convolution(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    kinds = (TENSOR, TENSOR, OPTIONAL, INTEGERS, INTEGERS, INTEGERS, FLAG, INTEGERS, INTEGER)
    x, w, bias, strides, padding, dilation, transposed, _, groups = _read_arguments(operation, refs, *kinds)
    if transposed or groups != 1 or set(dilation) != {1}:
        raise _refuse(operation, "a dilated, transposed or grouped convolution")
    rank, dtype, number = len(operation.operands[0].shape), _out(operation), operation.index
    spatial, shape = list(range(2, rank)), operation.results[0].shape
    channels_last = [0, 1, *spatial]  # of the operands: N or O, C or I, spatial axes
    windows = (channels_last, channels_last, None)
    total = program.add(
        "product", (x, w), dtype, number, internal=True, windows=windows, padding=[[p, p] for p in padding], strides=strides
    )  # fmt: skip
    last = bias is None
    total = program.add("transpose", (total,), dtype, number, internal=not last, axes=[0, rank - 1, *range(1, rank - 1)])
    if last:
        return total
    wide = program.add("reshape", (bias,), dtype, number, internal=True, shape=[1, shape[1], *(1 for _ in spatial)])
    return program.add("add", (total, wide), dtype, number)


def _torch_scaled_product(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    a, b, scale_a, scale_b, *rest = _read_arguments(
        operation, refs, TENSOR, TENSOR, TENSOR, TENSOR, ANY, ANY, ANY, ANY, keywords=("out_dtype", "use_fast_accum")
    )
    if any(isinstance(x, tuple) for x in rest):
        raise _refuse(operation, "a bias or a scale of the result")
    dtype, number = _out(operation), operation.index
    total = program.add("product", (a, b), dtype, number, internal=True, axes=(((1,), (0,)), ((), ())))
    total = program.add("mul", (total, scale_a), dtype, number, internal=True)
    return program.add("mul", (total, scale_b), dtype, number)


def _nodes(formula: Callable[..., Any], *kinds: Kind) -> Builder:
    """Return a builder for a formula of one kernel: formula(add, arguments), where add appends a node within the operation."""

    def build(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
        dtype, number = _out(operation), operation.index

        def add(kind: str, *inputs: Any, **facts: Any) -> Ref:
            return program.add(kind, [_constant(program, x) for x in inputs], dtype, number, internal=True, **facts)

        result = formula(add, *_read_arguments(operation, refs, *kinds))
        program.nodes[-1] = program.nodes[-1]._replace(internal=False)
        return result

    return build


def _tanh_backward(add: Any, grad: Ref, y: Ref) -> Ref:
    return add("mul", grad, add("sub", 1.0, add("mul", y, y)))


def _sigmoid_backward(add: Any, grad: Ref, y: Ref) -> Ref:
    return add("mul", add("mul", grad, add("sub", 1.0, y)), y)


def _silu_backward(add: Any, grad: Ref, x: Ref) -> Ref:
    gate = add("logistic", x)
    slope = add("add", 1.0, add("mul", x, add("sub", 1.0, gate)))
    return add("mul", add("mul", grad, gate), slope)


def _gelu_backward(add: Any, grad: Ref, x: Ref) -> Ref:
    cumulative = add("mul", 0.5, add("add", 1.0, add("erf", add("mul", x, math.sqrt(0.5)))))
    density = add("mul", 1 / math.sqrt(2 * math.pi), add("exp", add("mul", add("mul", x, x), -0.5)))
    return add("mul", grad, add("add", cumulative, add("mul", x, density)))


def _threshold_backward(add: Any, grad: Ref, x: Ref, threshold: float) -> Ref:
    return add("select", add("gt", x, threshold), 0.0, grad)


def _softmax_backward(add: Any, grad: Ref, y: Ref, axis: int, _: Any) -> Ref:
    total = add("sum", add("mul", grad, y), axes=[axis], keepdims=True)
    return add("mul", add("sub", grad, total), y)


def _log_softmax(add: Any, x: Ref, axis: int, _: Any) -> Ref:
    largest = add("reduce_max", x, axes=[axis], keepdims=True)
    total = add("sum", add("exp", add("sub", x, largest)), axes=[axis], keepdims=True)
    return add("sub", add("sub", x, largest), add("log", total))


def _log_softmax_backward(add: Any, grad: Ref, y: Ref, axis: int, _: Any) -> Ref:
    total = add("sum", grad, axes=[axis], keepdims=True)
    return add("sub", grad, add("mul", add("exp", y), total))


def _torch_pow(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, power = _read_arguments(operation, refs, TENSOR, NUMBER)
    if power not in (1, 2, 3):
        raise _refuse(operation, f"the power {power}")
    if power == 1:
        return program.add("convert", (x,), _out(operation), operation.index)
    square = program.add("mul", (x, x), _out(operation), operation.index, internal=power == 3)
    return square if power == 2 else program.add("mul", (square, x), _out(operation), operation.index)


def _torch_product(axes: Any) -> Builder:
    return lambda program, operation, refs: program.add(
        "product", _read_operands(operation, refs, 2), _out(operation), operation.index, axes=axes
    )


def _torch_addmm(axes: Any) -> Builder:
    def build(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
        bias, a, b = _read_arguments(operation, refs, TENSOR, TENSOR, TENSOR)
        total = program.add("product", (a, b, bias), _out(operation), operation.index, internal=True, axes=axes)
        return program.add("add", (total, bias), _out(operation), operation.index)

    return build


def _torch_sum(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, axes, keepdims = _read_arguments(operation, refs, TENSOR, AXES, KEEPDIMS, keywords=("dtype",))
    axes = _axes(operation, axes)
    facts: dict[str, Any] = {"axes": axes, "keepdims": keepdims}
    if operation.name == "aten.mean":
        facts["divisor"] = math.prod(operation.operands[0].shape[axis] for axis in axes)
    return program.add("sum", (x,), _out(operation), operation.index, **facts)


def _softmax(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, axis, _ = _read_arguments(operation, refs, TENSOR, INTEGER, FLAG)
    _axes(operation, axis)
    dtype, number = _out(operation), operation.index
    largest = program.add("reduce_max", (x,), dtype, number, internal=True, axes=[axis], keepdims=True)
    shifted = program.add("sub", (x, largest), dtype, number, internal=True)
    powers = program.add("exp", (shifted,), dtype, number, internal=True)
    total = program.add("sum", (powers,), dtype, number, internal=True, axes=[axis], keepdims=True)
    return program.add("div", (powers, total), dtype, number)


def _mean_and_variance(
    program: Program, operation: Operation, x: Ref, axes: list[int], count: int, inner: int | None = None
) -> tuple[Ref, Ref, Ref]:
    """Append a mean and a variance in two passes, and return the mean, x - mean and the variance; `rewrites` has one pass."""
    dtype, number = _out(operation), operation.index
    mean = program.add("sum", (x,), dtype, number, internal=True, axes=axes, keepdims=True, divisor=count, inner=inner)
    centred = program.add("sub", (x, mean), dtype, number, internal=True)
    squares = program.add("mul", (centred, centred), dtype, number, internal=True)
    variance = program.add("sum", (squares,), dtype, number, internal=True, axes=axes, keepdims=True, divisor=count)
    return mean, centred, variance


def _linear_norm(
    program: Program, operation: Operation, x: Ref, moments: tuple[Ref, Ref], eps: float, weight: Ref | None, bias: Ref | None
) -> Ref:
    """Append x · scale + shift with scale = weight / sqrt(variance + eps) and shift = bias - mean · scale, as f32 within the operation."""
    dtype, number = _out(operation), operation.index
    add = lambda kind, *inputs, **facts: program.add(kind, inputs, dtype, number, internal=True, **facts)
    mean, variance = moments
    scale = add("rsqrt", add("add", variance, program.constant(eps, np.float64), wide=True))  # PyTorch's eps is f64 on a CPU
    program.others = {1: mean, 2: scale}
    if weight is not None:
        scale = add("mul", scale, weight)
    shift = add("mul", mean, scale)
    shift = add("neg", shift) if bias is None else add("sub", bias, shift)
    return add("add", add("mul", x, scale), shift)


def _group_norm(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    kinds = (TENSOR, OPTIONAL, OPTIONAL, INTEGER, INTEGER, INTEGER, INTEGER, NUMBER)
    x, weight, bias, n, channels, pixels, groups, eps = _read_arguments(operation, refs, *kinds)
    if not 0 < groups <= channels:
        raise _refuse(operation, f"{groups} groups of {channels} channels")
    dtype, number, own = _out(operation), operation.index, channels // groups
    reshape = lambda ref, *shape: program.add("reshape", (ref,), dtype, number, internal=True, shape=shape)
    grouped = reshape(x, n, groups, own, pixels)
    mean, _, variance = _mean_and_variance(program, operation, grouped, [2, 3], own * pixels)
    weight, bias = (None if ref is None else reshape(ref, 1, groups, own, 1) for ref in (weight, bias))
    y = _linear_norm(program, operation, grouped, (mean, variance), eps, weight, bias)
    return program.add("reshape", (y,), dtype, number, shape=operation.results[0].shape)


def _batch_norm(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    kinds = (TENSOR, OPTIONAL, OPTIONAL, OPTIONAL, OPTIONAL, FLAG, NUMBER, NUMBER)
    x, weight, bias, _, _, training, _, eps = _read_arguments(operation, refs, *kinds)
    dtype, number, shape = _out(operation), operation.index, operation.results[0].shape
    if not training or len(shape) < 2:
        raise _refuse(operation, "batch norm by its running mean, or of a vector")
    spread = [1, shape[1], *(1 for _ in shape[2:])]
    weight, bias = (
        None if ref is None else program.add("reshape", (ref,), dtype, number, internal=True, shape=spread) for ref in (weight, bias)
    )
    inner, axes = math.prod(shape[2:]), [0, *range(2, len(shape))]
    mean, _, variance = _mean_and_variance(program, operation, x, axes, shape[0] * inner, inner)
    y = _linear_norm(program, operation, x, (mean, variance), eps, weight, bias)
    program.nodes[y[1]] = program.nodes[y[1]]._replace(internal=False)
    return y


def _layer_norm(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    x, normalized, weight, bias, eps = _read_arguments(operation, refs, TENSOR, INTEGERS, OPTIONAL, OPTIONAL, NUMBER)
    dtype, number, axes = _out(operation), operation.index, list(range(-len(normalized), 0))
    mean, centred, variance = _mean_and_variance(program, operation, x, axes, math.prod(normalized))
    shifted = program.add("add", (variance, program.constant(eps)), dtype, number, internal=True)
    scale = program.add("rsqrt", (shifted,), dtype, number, internal=True)
    program.others = {1: mean, 2: scale}
    y = program.add("mul", (centred, scale), dtype, number, internal=True)
    if weight is not None:
        y = program.add("mul", (y, weight), dtype, number, internal=bias is not None)
    return y if bias is None else program.add("add", (y, bias), dtype, number)


def _silu(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    (x,) = _read_operands(operation, refs, 1)
    gate = program.add("logistic", (x,), _out(operation), operation.index, internal=True)
    return program.add("mul", (x, gate), _out(operation), operation.index)


def _gelu(program: Program, operation: Operation, refs: list[Ref]) -> Ref:
    (x,), dtype, number = _read_arguments(operation, refs, TENSOR, keywords=("approximate",)), _out(operation), operation.index
    half, one = program.constant(0.5), program.constant(1.0)
    if operation.attributes["kwargs"].get("approximate", "none") == "tanh":
        cube = program.add("mul", (program.add("mul", (x, x), dtype, number, internal=True), x), dtype, number, internal=True)
        scaled = program.add("mul", (program.constant(0.044715), cube), dtype, number, internal=True)
        inner = program.add("add", (x, scaled), dtype, number, internal=True)
        inner = program.add("mul", (program.constant(math.sqrt(2 / math.pi)), inner), dtype, number, internal=True)
        gate = program.add("tanh", (inner,), dtype, number, internal=True)
    else:
        inner = program.add("mul", (x, program.constant(math.sqrt(0.5))), dtype, number, internal=True)
        gate = program.add("erf", (inner,), dtype, number, internal=True)
    gate = program.add("add", (one, gate), dtype, number, internal=True)
    halved = program.add("mul", (half, x), dtype, number, internal=True)
    return program.add("mul", (halved, gate), dtype, number)


BUILDERS: dict[str, Builder] = {
    **{name: _elementwise(name) for name in (*SPECIAL, "add", "sub", "mul", "div", "max", "min", "neg", "abs", "sign", "floor", "ceil")},
    **{name: _elementwise(name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "and", "or")},
    "add_any": _elementwise("add"), "select_n": _elementwise("select"), "round": _elementwise("round"),
    "convert_element_type": _elementwise("convert"), "stop_gradient": _elementwise("convert"), "copy": _elementwise("convert"),
    "integer_pow": _integer_pow, "square": _integer_pow, "dot_general": _jax_product, "conv_general_dilated": _jax_convolution,
    "reduce_sum": _jax_sum, "reshape": _jax_movement("reshape", "shape", None), "squeeze": _jax_movement("reshape", "shape", None),
    "expand_dims": _jax_movement("reshape", "shape", None), "transpose": _jax_movement("transpose", None, "permutation"),
    "broadcast_in_dim": _jax_movement("broadcast", "shape", "broadcast_dimensions"),
    "reduce_max": _jax_movement("reduce_max", None, "axes"), "reduce_min": _jax_movement("reduce_min", None, "axes"),
    **{f"aten.{name}": _torch_binary(kind) for name, kind in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("div", "div"))},
    **{f"aten.{name}": _torch_unary(name) for name in ("exp", "exp2", "log", "tanh", "rsqrt", "sqrt", "erf", "neg", "abs", "sin", "cos")},
    "aten.sigmoid": _torch_unary("logistic"), "aten._to_copy": _torch_unary("convert"), "aten.pow": _torch_pow,
    "aten.mm": _torch_product((((1,), (0,)), ((), ()))), "aten.bmm": _torch_product((((2,), (1,)), ((0,), (0,)))),
    "aten.addmm": _torch_addmm((((1,), (0,)), ((), ()))), "aten.baddbmm": _torch_addmm((((2,), (1,)), ((0,), (0,)))),
    "aten.sum": _torch_sum, "aten.mean": _torch_sum, "aten._softmax": _softmax, "aten.native_layer_norm": _layer_norm,
    "aten.native_group_norm": _group_norm, "aten.native_batch_norm": _batch_norm,
    "aten.silu": _silu, "aten.gelu": _gelu, "aten.rsub": _torch_rsub, "aten.clamp": _torch_clamp, "aten.relu": _torch_relu,
    "aten.clamp_min": _torch_clamp, "aten.reciprocal": _torch_reciprocal, "aten.where": _torch_where,
    "aten.amax": _torch_extreme("reduce_max"),
    "aten.amin": _torch_extreme("reduce_min"), "aten.maximum": _torch_binary("max"), "aten.minimum": _torch_binary("min"),
    "aten.convolution": _torch_convolution, "aten._scaled_mm": _torch_scaled_product, "clamp": _elementwise("clamp"),
    "aten.tanh_backward": _nodes(_tanh_backward, TENSOR, TENSOR), "aten.sigmoid_backward": _nodes(_sigmoid_backward, TENSOR, TENSOR),
    "aten.silu_backward": _nodes(_silu_backward, TENSOR, TENSOR), "aten.gelu_backward": _nodes(_gelu_backward, TENSOR, TENSOR),
    "aten.threshold_backward": _nodes(_threshold_backward, TENSOR, TENSOR, NUMBER),
    "aten._log_softmax": _nodes(_log_softmax, TENSOR, INTEGER, FLAG),
    "aten._softmax_backward_data": _nodes(_softmax_backward, TENSOR, TENSOR, INTEGER, ANY),
    "aten._log_softmax_backward_data": _nodes(_log_softmax_backward, TENSOR, TENSOR, INTEGER, ANY),
}  # fmt: skip
