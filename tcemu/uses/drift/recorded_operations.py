"""Recorded operations of torch and JAX as nodes of a program: `BUILDERS` has one builder an operation.

A builder reads the parameters of an operation through the methods of its `_Call`, which raise NotModelled for parameters of another kind
than it knows: a record is not trusted. Any other exception of a builder is a fault of this module, and is not caught.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tcemu.base.errors import NotModelled
from tcemu.uses.drift.programs import SPECIAL, Program, Ref
from tcemu.uses.drift.records import DTYPES, Operation

MAX_NODES = 64


def append_operation(program: Program, operation: Operation, refs: list[Ref]) -> Ref | None:
    """Append the nodes of a recorded operation, and return its first result; None for an operation that is not known."""
    builder = BUILDERS.get(operation.name)
    if builder is None or not operation.results or operation.results[0].dtype not in DTYPES or len(program.nodes) > MAX_NODES:
        return None
    if any(tensor.dtype in ("float64", "int64", "uint64") and tensor.shape for tensor in operation.operands):
        return None
    try:
        result = builder(_Call(program, operation, refs))
    except NotModelled:  # parameters of another kind than the builder knows
        return None
    program.nodes[-1] = program.nodes[-1]._replace(internal=False)  # the result is rounded as it was recorded
    return result


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


@dataclass
class _Call:
    """A recorded operation and its tensors. Calling it appends a node within the operation; numbers become f32 constants."""

    program: Program
    operation: Operation
    refs: list[Ref]

    def __call__(self, kind: str, *inputs: Any, **facts: Any) -> Ref:
        refs = [x if isinstance(x, tuple) else self.program.constant(float(x)) for x in inputs]
        dtype = DTYPES[self.operation.results[0].dtype]
        return self.program.add(kind, refs, dtype, self.operation.index, internal=True, **facts)

    @property
    def result_shape(self) -> tuple[int, ...]:
        return self.operation.results[0].shape

    def refuse(self, what: str) -> NotModelled:
        return NotModelled(f"{self.operation.name}: {what}; nothing is known of it (tcemu/uses/drift/recorded_operations.py)")

    def arguments(self, *kinds: Kind, keywords: tuple[str, ...] = ()) -> list[Any]:
        """Return the positional arguments of an operation of torch: references for tensors, and plain values.

        Args:
            *kinds: The kinds of its arguments.
            keywords: Names of arguments that the caller reads from `operation.attributes["kwargs"]`.

        Raises:
            NotModelled: The operation has other arguments.
        """
        given, named = self.operation.attributes.get("args"), self.operation.attributes.get("kwargs")
        if not isinstance(given, list) or not isinstance(named, dict) or not set(named) <= {*keywords}:
            raise self.refuse(f"arguments {given!r} and {named!r}")
        tensors = iter(self.refs)
        values = [next(tensors, None) if isinstance(x, str) and x.startswith("#") else x for x in given]
        values += [kind.default for kind in kinds[len(values) :]]
        wrong = [x for x, kind in zip(values, kinds, strict=False) if x is ... or not kind.accepts(x)]
        if len(values) > len(kinds) or wrong:
            raise self.refuse(f"arguments {given!r}; expected {', '.join(kind.words for kind in kinds)}")
        return values

    def attribute(self, name: str, kind: Kind) -> Any:
        """Return a parameter of an operation of JAX. Raises NotModelled if it is of another kind."""
        value = self.operation.attributes.get(name, kind.default)
        if value is ... or not kind.accepts(value):
            raise self.refuse(f"{name} = {self.operation.attributes.get(name)!r}; expected {kind.words}")
        return value

    def operands(self, count: int) -> list[Ref]:
        """Return the first operands. Raises NotModelled if there are fewer."""
        if len(self.refs) < count:
            raise self.refuse(f"{len(self.refs)} operands; expected {count}")
        return self.refs[:count]

    def axes(self, axes: int | list[int] | None) -> list[int]:
        """Return axes of the first operand; all of them for None and []. Raises NotModelled for an axis that it does not have."""
        rank = len(self.operation.operands[0].shape) if self.operation.operands else 0
        found = [axes] if isinstance(axes, int) else axes or list(range(rank))
        if not all(-rank <= axis < rank for axis in found):
            raise self.refuse(f"axes {found} of an operand of rank {rank}")
        return found


Builder = Callable[[_Call], Ref]


def _formula(formula: Callable[..., Ref], *kinds: Kind, keywords: tuple[str, ...] = ()) -> Builder:
    """Return a builder that calls a formula with the arguments of an operation of torch."""
    return lambda call: formula(call, *call.arguments(*kinds, keywords=keywords))


# ---- operations of JAX, and of both


def _elementwise(kind: str) -> Builder:
    return lambda call: call(kind, *call.refs)


def _unary(kind: str) -> Builder:
    return lambda call: call(kind, *call.operands(1))


def _integer_pow(call: _Call) -> Ref:
    power = call.attribute("y", INTEGER._replace(default=2))
    (square,) = call.operands(1)
    if not 2 <= power <= 16:
        raise call.refuse(f"the power {power}")
    total: Ref | None = None
    while power:
        if power & 1:
            total = square if total is None else call("mul", total, square)
        power >>= 1
        if power:
            square = call("mul", square, square)
    assert total is not None
    return total


def _jax_product(call: _Call) -> Ref:
    contracted, batch = call.attribute("dimension_numbers", PAIR_OF_PAIRS)
    return call("product", *call.operands(2), axes=(contracted, batch))


def _jax_convolution(call: _Call) -> Ref:
    groups = [call.attribute(name, INTEGER) for name in ("feature_group_count", "batch_group_count")]
    dilations = [*call.attribute("lhs_dilation", INTEGERS), *call.attribute("rhs_dilation", INTEGERS)]
    padding, strides = call.attribute("padding", LISTS), call.attribute("window_strides", INTEGERS)
    numbers = call.attribute("dimension_numbers", LISTS)
    if groups != [1, 1] or set(dilations) != {1} or len(numbers) != 3:
        raise call.refuse("a dilated or grouped convolution")
    out = numbers[2]
    if [*out[:1], *out[2:], *out[1:2]] != list(range(len(out))):
        raise call.refuse("the channels of the result are not its last axis")
    return call("product", *call.operands(2), windows=numbers, padding=padding, strides=strides)


def _jax_sum(call: _Call) -> Ref:
    axes = call.axes(call.attribute("axes", INTEGERS))
    return call("sum", *call.operands(1), axes=axes)


def _jax_movement(kind: str, shape: str | None, axes: str | None) -> Builder:
    def build(call: _Call) -> Ref:
        facts: dict[str, Any] = {"shape": call.result_shape if shape else None}
        if axes:
            facts["axes"] = call.attribute(axes, INTEGERS)
        return call(kind, *call.operands(1), **facts)

    return build


# ---- operations of torch


def _torch_binary(kind: str) -> Builder:
    return _formula(lambda call, x, y: call(kind, x, y), VALUE, VALUE)


def _clamp(call: _Call, x: Ref, *bounds: Any) -> Ref:
    low, high = (call.operation.attributes["kwargs"].get(name, bound) for name, bound in zip(("min", "max"), bounds, strict=True))
    if not BOUND.accepts(low) or not BOUND.accepts(high) or (low is None and high is None):
        raise call.refuse(f"the bounds {low!r} and {high!r}")
    if low is not None:
        x = call("max", x, low)
    return x if high is None else call("min", x, high)


def _torch_extreme(kind: str) -> Builder:
    def build(call: _Call, x: Ref, axes: int | list[int] | None, keepdims: bool) -> Ref:
        return call(kind, x, axes=call.axes(axes), keepdims=keepdims)

    return _formula(build, TENSOR, AXES, KEEPDIMS)


def _torch_convolution(
    call: _Call, x: Ref, w: Ref, bias: Ref | None, strides: Any, padding: Any, dilation: Any, transposed: bool, _: Any, groups: int
) -> Ref:
    if transposed or groups != 1 or set(dilation) != {1}:
        raise call.refuse("a dilated, transposed or grouped convolution")
    rank = len(call.operation.operands[0].shape)
    channels_last = list(range(rank))  # of the operands: N or O, C or I, spatial axes
    windows = (channels_last, channels_last, None)
    total = call("product", x, w, windows=windows, padding=[[p, p] for p in padding], strides=strides)
    total = call("transpose", total, axes=[0, rank - 1, *range(1, rank - 1)])
    if bias is None:
        return total
    return call("add", total, call("reshape", bias, shape=[1, call.result_shape[1], *[1] * (rank - 2)]))


def _scaled_product(call: _Call, a: Ref, b: Ref, scale_a: Ref, scale_b: Ref, *rest: Any) -> Ref:
    if any(isinstance(x, tuple) for x in rest):
        raise call.refuse("a bias or a scale of the result")
    total = call("product", a, b, axes=(((1,), (0,)), ((), ())))
    return call("mul", call("mul", total, scale_a), scale_b)


def _tanh_backward(call: _Call, grad: Ref, y: Ref) -> Ref:
    return call("mul", grad, call("sub", 1.0, call("mul", y, y)))


def _sigmoid_backward(call: _Call, grad: Ref, y: Ref) -> Ref:
    return call("mul", call("mul", grad, call("sub", 1.0, y)), y)


def _silu(call: _Call) -> Ref:
    (x,) = call.operands(1)
    return call("mul", x, call("logistic", x))


def _silu_backward(call: _Call, grad: Ref, x: Ref) -> Ref:
    gate = call("logistic", x)
    slope = call("add", 1.0, call("mul", x, call("sub", 1.0, gate)))
    return call("mul", call("mul", grad, gate), slope)


def _gelu(call: _Call, x: Ref) -> Ref:
    if call.operation.attributes["kwargs"].get("approximate", "none") == "tanh":
        cube = call("mul", call("mul", x, x), x)
        inner = call("add", x, call("mul", 0.044715, cube))
        gate = call("tanh", call("mul", math.sqrt(2 / math.pi), inner))
    else:
        gate = call("erf", call("mul", x, math.sqrt(0.5)))
    gate = call("add", 1.0, gate)
    return call("mul", call("mul", 0.5, x), gate)


def _gelu_backward(call: _Call, grad: Ref, x: Ref) -> Ref:
    cumulative = call("mul", 0.5, call("add", 1.0, call("erf", call("mul", x, math.sqrt(0.5)))))
    density = call("mul", 1 / math.sqrt(2 * math.pi), call("exp", call("mul", call("mul", x, x), -0.5)))
    return call("mul", grad, call("add", cumulative, call("mul", x, density)))


def _softmax(call: _Call, x: Ref, axis: int, _: Any) -> Ref:
    call.axes(axis)
    largest = call("reduce_max", x, axes=[axis], keepdims=True)
    powers = call("exp", call("sub", x, largest))
    return call("div", powers, call("sum", powers, axes=[axis], keepdims=True))


def _softmax_backward(call: _Call, grad: Ref, y: Ref, axis: int, _: Any) -> Ref:
    total = call("sum", call("mul", grad, y), axes=[axis], keepdims=True)
    return call("mul", call("sub", grad, total), y)


def _log_softmax(call: _Call, x: Ref, axis: int, _: Any) -> Ref:
    largest = call("reduce_max", x, axes=[axis], keepdims=True)
    total = call("sum", call("exp", call("sub", x, largest)), axes=[axis], keepdims=True)
    return call("sub", call("sub", x, largest), call("log", total))


def _log_softmax_backward(call: _Call, grad: Ref, y: Ref, axis: int, _: Any) -> Ref:
    total = call("sum", grad, axes=[axis], keepdims=True)
    return call("sub", grad, call("mul", call("exp", y), total))


def _torch_pow(call: _Call, x: Ref, power: float) -> Ref:
    if power not in (1, 2, 3):
        raise call.refuse(f"the power {power}")
    if power == 1:
        return call("convert", x)
    square = call("mul", x, x)
    return square if power == 2 else call("mul", square, x)


def _torch_product(axes: Any) -> Builder:
    return lambda call: call("product", *call.operands(2), axes=axes)


def _torch_addmm(axes: Any) -> Builder:
    return _formula(lambda call, bias, a, b: call("add", call("product", a, b, bias, axes=axes), bias), TENSOR, TENSOR, TENSOR)


def _torch_sum(call: _Call, x: Ref, axes: int | list[int] | None, keepdims: bool) -> Ref:
    facts: dict[str, Any] = {"axes": call.axes(axes), "keepdims": keepdims}
    if call.operation.name == "aten.mean":
        facts["divisor"] = math.prod(call.operation.operands[0].shape[axis] for axis in facts["axes"])
    return call("sum", x, **facts)


def _mean_and_variance(call: _Call, x: Ref, axes: list[int], count: int, inner: int | None = None) -> tuple[Ref, Ref, Ref]:
    """Append a mean and a variance in two passes, and return the mean, x - mean and the variance; `rewrites` has one pass."""
    mean = call("sum", x, axes=axes, keepdims=True, divisor=count, inner=inner)
    centred = call("sub", x, mean)
    return mean, centred, call("sum", call("mul", centred, centred), axes=axes, keepdims=True, divisor=count)


def _linear_norm(call: _Call, x: Ref, mean: Ref, variance: Ref, eps: float, weight: Ref | None, bias: Ref | None) -> Ref:
    """Append x · scale + shift with scale = weight / sqrt(variance + eps) and shift = bias - mean · scale, as f32 within the operation."""
    scale = call("rsqrt", call("add", variance, call.program.constant(eps, np.float64), wide=True))  # PyTorch's eps is f64 on a CPU
    call.program.others = {1: mean, 2: scale}
    if weight is not None:
        scale = call("mul", scale, weight)
    shift = call("mul", mean, scale)
    shift = call("neg", shift) if bias is None else call("sub", bias, shift)
    return call("add", call("mul", x, scale), shift)


def _group_norm(
    call: _Call, x: Ref, weight: Ref | None, bias: Ref | None, n: int, channels: int, pixels: int, groups: int, eps: float
) -> Ref:
    if not 0 < groups <= channels:
        raise call.refuse(f"{groups} groups of {channels} channels")
    own = channels // groups
    grouped = call("reshape", x, shape=(n, groups, own, pixels))
    mean, _, variance = _mean_and_variance(call, grouped, [2, 3], own * pixels)
    weight, bias = (None if ref is None else call("reshape", ref, shape=(1, groups, own, 1)) for ref in (weight, bias))
    return call("reshape", _linear_norm(call, grouped, mean, variance, eps, weight, bias), shape=call.result_shape)


def _batch_norm(call: _Call, x: Ref, weight: Ref | None, bias: Ref | None, _: Any, __: Any, training: bool, ___: Any, eps: float) -> Ref:
    shape = call.result_shape
    if not training or len(shape) < 2:
        raise call.refuse("batch norm by its running mean, or of a vector")
    spread = [1, shape[1], *(1 for _ in shape[2:])]
    weight, bias = (None if ref is None else call("reshape", ref, shape=spread) for ref in (weight, bias))
    inner, axes = math.prod(shape[2:]), [0, *range(2, len(shape))]
    mean, _, variance = _mean_and_variance(call, x, axes, shape[0] * inner, inner)
    return _linear_norm(call, x, mean, variance, eps, weight, bias)


def _layer_norm(call: _Call, x: Ref, normalized: list[int], weight: Ref | None, bias: Ref | None, eps: float) -> Ref:
    mean, centred, variance = _mean_and_variance(call, x, list(range(-len(normalized), 0)), math.prod(normalized))
    scale = call("rsqrt", call("add", variance, eps))
    call.program.others = {1: mean, 2: scale}
    y = call("mul", centred, scale)
    if weight is not None:
        y = call("mul", y, weight)
    return y if bias is None else call("add", y, bias)


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
    **{f"aten.{name}": _unary(name) for name in ("exp", "exp2", "log", "tanh", "rsqrt", "sqrt", "erf", "neg", "abs", "sin", "cos")},
    "aten.sigmoid": _unary("logistic"), "aten._to_copy": _unary("convert"), "aten.pow": _formula(_torch_pow, TENSOR, NUMBER),
    "aten.mm": _torch_product((((1,), (0,)), ((), ()))), "aten.bmm": _torch_product((((2,), (1,)), ((0,), (0,)))),
    "aten.addmm": _torch_addmm((((1,), (0,)), ((), ()))), "aten.baddbmm": _torch_addmm((((2,), (1,)), ((0,), (0,)))),
    **{f"aten.{name}": _formula(_torch_sum, TENSOR, AXES, KEEPDIMS, keywords=("dtype",)) for name in ("sum", "mean")},
    "aten._softmax": _formula(_softmax, TENSOR, INTEGER, FLAG),
    "aten.native_layer_norm": _formula(_layer_norm, TENSOR, INTEGERS, OPTIONAL, OPTIONAL, NUMBER),
    "aten.native_group_norm": _formula(_group_norm, TENSOR, OPTIONAL, OPTIONAL, INTEGER, INTEGER, INTEGER, INTEGER, NUMBER),
    "aten.native_batch_norm": _formula(_batch_norm, TENSOR, OPTIONAL, OPTIONAL, OPTIONAL, OPTIONAL, FLAG, NUMBER, NUMBER),
    "aten.silu": _silu, "aten.gelu": _formula(_gelu, TENSOR, keywords=("approximate",)),
    "aten.rsub": _formula(lambda call, x, y, _: call("sub", y, x), VALUE, VALUE, ALPHA),
    **{f"aten.{name}": _formula(_clamp, TENSOR, BOUND, BOUND, keywords=("min", "max")) for name in ("clamp", "clamp_min")},
    "aten.relu": lambda call: call("max", *call.operands(1), 0.0), "aten.reciprocal": lambda call: call("div", 1.0, *call.operands(1)),
    "aten.where": _formula(lambda call, which, x, y: call("select", which, y, x), TENSOR, VALUE, VALUE),
    "aten.amax": _torch_extreme("reduce_max"),
    "aten.amin": _torch_extreme("reduce_min"), "aten.maximum": _torch_binary("max"), "aten.minimum": _torch_binary("min"),
    "aten.convolution": _formula(
        _torch_convolution, TENSOR, TENSOR, OPTIONAL, INTEGERS, INTEGERS, INTEGERS, FLAG, INTEGERS, INTEGER
    ),
    "aten._scaled_mm": _formula(
        _scaled_product, TENSOR, TENSOR, TENSOR, TENSOR, ANY, ANY, ANY, ANY, keywords=("out_dtype", "use_fast_accum")
    ),
    "clamp": _elementwise("clamp"),
    "aten.tanh_backward": _formula(_tanh_backward, TENSOR, TENSOR), "aten.sigmoid_backward": _formula(_sigmoid_backward, TENSOR, TENSOR),
    "aten.silu_backward": _formula(_silu_backward, TENSOR, TENSOR), "aten.gelu_backward": _formula(_gelu_backward, TENSOR, TENSOR),
    "aten.threshold_backward": _formula(
        lambda call, grad, x, threshold: call("select", call("gt", x, threshold), 0.0, grad), TENSOR, TENSOR, NUMBER
    ),
    "aten._log_softmax": _formula(_log_softmax, TENSOR, INTEGER, FLAG),
    "aten._softmax_backward_data": _formula(_softmax_backward, TENSOR, TENSOR, INTEGER, ANY),
    "aten._log_softmax_backward_data": _formula(_log_softmax_backward, TENSOR, TENSOR, INTEGER, ANY),
}  # fmt: skip
