"""Primitives that multiply matrices: how a policy's choice computes each of them, and where a program (jaxpr) has them.

A choice is called with the arguments of `jax.lax.dot_general`. A convolution becomes one product of patches, as implicit-GEMM kernels
compute it. A ragged product becomes one product for each group.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn
from jax.extend.source_info_util import current_name_stack, user_context

from tcemu.base.jax_internals import function_file, function_name, inner_programs
from tcemu.operations.products.dot_general import DotGeneral
from tcemu.operations.products.im2col import PatchOperands, PatchOptions, Windows, patches_product, plan_pieces
from tcemu.operations.products.ragged.ragged_dot import RaggedDot, expand_group_ids, ragged_axes

DotGeneralLike = Callable[..., Array]  # a function with the arguments of jax.lax.dot_general
CUSTOM_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")
PROGRAM_CALLS = (  # primitives that call one program once with their operands
    "jit", "pjit", "closed_call", "core_closed_call", "remat2", "checkpoint", "shard_map", *CUSTOM_DERIVATIVES,
)  # fmt: skip
OPAQUE = {  # primitives that multiply matrices, or may, in code that no program shows
    "scaled_dot": "a block-scaled product, with a quantisation of its own",
    "scaled_matmul": "a block-scaled product, with a quantisation of its own",
    "scaled_matmul_wrapper": "a block-scaled product, with a quantisation of its own",
    "dot_product_attention_fwd_wrapper": "attention as one kernel of cuDNN",
    "dot_product_attention_bwd_wrapper": "attention as one kernel of cuDNN",
    "dot_product_attention_fp8_fwd_wrapper": "attention as one kernel of cuDNN",
    "dot_product_attention_fp8_bwd_wrapper": "attention as one kernel of cuDNN",
    "ffi_call": "foreign code; what it computes is not seen",
    "pure_callback": "code of the host; what it computes is not seen",
    "io_callback": "code of the host; what it computes is not seen",
    "call_exported": "an exported program, which is compiled already",
}
PACKAGE = Path(__file__).parents[2]


def has_products(equation: JaxprEqn) -> bool:
    """Return whether an equation is a product, may hide one, contains one, or has a derivative rule that may have one."""
    kind = equation.primitive.name
    if kind in PRODUCT_PRIMITIVES or kind in OPAQUE or kind in CUSTOM_DERIVATIVES:
        return True
    return any(has_products(inner) for program in inner_programs(equation.params) for inner in program.eqns)


def callee_name(equation: JaxprEqn) -> str:
    """Return the name of the function that an equation calls, or of its primitive, as the names of products show it."""
    params, kind = equation.params, equation.primitive.name
    if kind in CUSTOM_DERIVATIVES:
        return function_name(params["call_jaxpr"].jaxpr)
    return params.get("name") or {"remat2": "checkpoint"}.get(kind, kind)


def equation_name(equation: JaxprEqn) -> str:
    """Return an equation's part of the names of products: the scopes around it, and the function it calls or its primitive."""
    return "/".join(part for part in (str(equation.source_info.name_stack), callee_name(equation)) if part)


def equation_path(path: str, equation: JaxprEqn, index: int) -> str:
    """Return the full name of an equation inside `path`. index: number of earlier equations there with the same name."""
    name = "/".join(part for part in (path, equation_name(equation)) if part)
    return f"{name}.{index}" if index else name


@contextmanager
def equation_context(equation: JaxprEqn) -> Iterator[None]:
    """Compute as the equation's program does: under its scopes and source line, in its context."""
    source = equation.source_info
    with user_context(source.traceback, name_stack=current_name_stack() + source.name_stack), equation.ctx.manager:
        yield


def bind_equation(equation: JaxprEqn, values: Sequence[Any], params: dict[str, Any] | None = None) -> list[Any]:
    """Compute an equation's results, with other parameters than its own if they are given."""
    primitive = equation.primitive
    results = primitive.bind(*values, **primitive.get_bind_params(equation.params if params is None else params))
    return list(results) if primitive.multiple_results else [results]


def is_package_program(equation: JaxprEqn) -> bool:
    """Return whether an equation calls a program of this package below the policies, whose products are part of an emulation."""
    for program in inner_programs(equation.params):
        source = function_file(program)
        if source and source.is_relative_to(PACKAGE) and not source.is_relative_to(Path(__file__).parent):
            return True
    return False


# ---- products


class ProductPrimitive(NamedTuple):
    """A primitive that multiplies matrices. Its first two operands are lhs and rhs."""

    axes_parameter: str  # name of the parameter that describes the axes
    compute: Callable[[DotGeneralLike, Sequence[Any], dict[str, Any]], Array]  # result from a dot_general, the operands and the parameters


def _compute_dot(dot_general: DotGeneralLike, operands: Sequence[Any], params: dict[str, Any]) -> Array:
    (lhs, rhs), options = operands, {"out_sharding": None, **params}
    return dot_general(lhs, rhs, options.pop("dimension_numbers"), **options)


def _compute_convolution(dot_general: DotGeneralLike, operands: Sequence[Any], params: dict[str, Any]) -> Array:
    (lhs, rhs), window = operands, {**params}
    options = {name: window.pop(name) for name in ("precision", "preferred_element_type")}
    options["out_sharding"] = window.pop("out_sharding", None)
    return convolve_by_patches(dot_general, lhs, rhs, ConvolutionParams(**window), **options)


def _compute_ragged(dot_general: DotGeneralLike, operands: Sequence[Any], params: dict[str, Any]) -> Array:
    """Compute `lax.ragged_dot_general` by a choice, one group after the other, or by `RaggedDot` if the choice is a recipe with lhs as A.

    The choice sees a group with the rows of all other groups 0. Its arrays have the full size, so that there is one full product for each
    group.
    """
    lhs, rhs, group_sizes = operands
    if isinstance(dot_general, DotGeneral) and dot_general.lhs_recipe is not None:
        return RaggedDot(dot_general.lhs_recipe, dot_general.key)(lhs, rhs, group_sizes, **params)
    result_type = jax.eval_shape(lambda *x: lax.ragged_dot_general(*x, **{**params, "out_sharding": None}), lhs, rhs, group_sizes)
    numbers = params["ragged_dot_dimension_numbers"]
    options = {name: params[name] for name in ("precision", "preferred_element_type", "out_sharding")}
    axes, (contracting, batch) = ragged_axes(numbers, lhs.ndim, rhs.ndim), numbers.dot_dimension_numbers
    labels = expand_group_ids(axes._replace(inner=()), lhs.shape, group_sizes)
    label_axes = [*(axes.lhs[0] if axes.kind != "batch" else ()), *axes.outer, axes.ragged]  # axes of lhs
    labels = labels.reshape([lhs.shape[i] for i in label_axes])
    lhs_labels = _expand_labels(labels, label_axes, lhs.ndim)
    group_ids = jnp.arange(group_sizes.shape[-1] + (axes.kind == "batch"), dtype=jnp.int32)  # the rest too

    def multiply_group(number: Array, y: Array, dimension_numbers: Any) -> Array:
        result = dot_general(jnp.where(lhs_labels == number, lhs, jnp.zeros_like(lhs)), y, dimension_numbers, **options)
        shape = result_type.shape[1:] if axes.kind == "depth" else result_type.shape
        if jnp.shape(result) != shape:
            raise ValueError(
                f"policy: for a group of a ragged product its choice returned shape {list(result.shape)}; expected {list(shape)}"
            )
        return result.astype(result_type.dtype)

    if axes.kind == "depth":
        rhs_labels = _expand_labels(labels, [_rhs_axis(numbers, i) for i in label_axes], rhs.ndim)
        return lax.map(
            lambda number: multiply_group(number, jnp.where(rhs_labels == number, rhs, jnp.zeros_like(rhs)), (contracting, batch)),
            group_ids,
        )
    result_labels = _expand_labels(labels, [(*axes.lhs[0], *axes.lhs[1]).index(i) for i in label_axes], result_type.ndim)
    group_rhs, plain = None, (contracting, batch)
    if axes.kind == "rows":
        ((group,), *_) = axes.rhs
        group_rhs = jnp.moveaxis(rhs, group, 0)
        right, right_batch = (tuple(i - (i > group) for i in part) for part in (contracting[1], batch[1]))
        plain = (contracting[0], right), (batch[0], right_batch)

    def add_group(total: Array, part: tuple[Array, Array | None]) -> tuple[Array, None]:
        number, y = part
        return jnp.where(result_labels == number, multiply_group(number, rhs if y is None else y, plain), total), None

    return lax.scan(add_group, jnp.zeros(result_type.shape, result_type.dtype), (group_ids, group_rhs))[0]


def _rhs_axis(numbers: lax.RaggedDotDimensionNumbers, axis: int) -> int:
    """Return the axis of rhs that corresponds to a contracting or batch axis of lhs."""
    (left, right), (left_batch, right_batch) = numbers.dot_dimension_numbers
    return dict(zip((*left, *left_batch), (*right, *right_batch), strict=True))[axis]


def _expand_labels(labels: Array, axes: Sequence[int], ndim: int) -> Array:
    """Spread labels over these axes of an array with `ndim` axes, with size 1 elsewhere."""
    order = np.argsort(axes)
    return lax.expand_dims(labels.transpose(order), [i for i in range(ndim) if i not in axes])


# ---- convolutions

MATRIX_AXES = (((1,), (0,)), ((), ()))  # dimension numbers of [M, K] · [K, N]
BATCHED_MATRIX_AXES = (((2,), (1,)), ((0,), (0,)))  # the same with the groups in front


class ConvolutionParams(NamedTuple):
    """The parameters of `lax.conv_general_dilated` that decide which numbers are multiplied."""

    window_strides: Sequence[int]
    padding: Sequence[tuple[int, int]]
    lhs_dilation: Sequence[int]
    rhs_dilation: Sequence[int]
    dimension_numbers: lax.ConvDimensionNumbers
    feature_group_count: int
    batch_group_count: int


def convolve_by_patches(dot_general: DotGeneralLike, lhs: Array, rhs: Array, params: ConvolutionParams, **options: Any) -> Array:
    """Compute `lax.conv_general_dilated` by `dot_general(patches, kernel, dimension_numbers, **options)`.

    K runs over the positions of the window in row-major order, and within a position over the input features of a group. M is the batch and
    the positions of the output; N is the output features of a group. Padding and lhs_dilation insert zeros, which take part in the sums.
    Groups are a batch axis of the product. Many patches are cut along M for a recipe, with the same bits: see `products.im2col`.
    """
    lhs_spec, rhs_spec, out_spec = params.dimension_numbers
    groups = params.feature_group_count * params.batch_group_count  # one of them is 1
    x = lax.transpose(lhs, lhs_spec)  # [batch, features, *space]
    w = lax.transpose(rhs, rhs_spec)  # [output features, features of a group, *window]
    outputs, features, *window = w.shape
    config = [(0, 0, 0)] * 2 + [(low, high, step - 1) for (low, high), step in zip(params.padding, params.lhs_dilation, strict=True)]
    x = lax.pad(x, jnp.zeros((), x.dtype), config)
    batch = x.shape[0] // params.batch_group_count
    x = x.reshape(params.batch_group_count, batch, *x.shape[1:])
    windows = Windows(tuple(window), tuple(params.window_strides), tuple(params.rhs_dilation), params.feature_group_count)
    kernel = w.reshape(groups, outputs // groups, features, -1).transpose(0, 3, 2, 1).reshape(groups, -1, outputs // groups)
    recipe = dot_general.lhs_recipe if isinstance(dot_general, DotGeneral) else None
    pieces = None if recipe is None else plan_pieces(recipe, windows, x)
    if recipe is not None and pieces is not None:
        dtype = jnp.result_type(lhs, rhs) if options["preferred_element_type"] is None else options["preferred_element_type"]
        y = patches_product(PatchOptions(windows, pieces, np.dtype(dtype)), PatchOperands(recipe, x, jnp.swapaxes(kernel, -1, -2)))
    else:
        patches = windows.patches(x)
        y = (
            dot_general(patches[0], kernel[0], MATRIX_AXES, **options)[None]
            if groups == 1
            else dot_general(patches, kernel, BATCHED_MATRIX_AXES, **options)
        )
    space = windows.counts(x)
    y = jnp.moveaxis(y.reshape(groups, batch, *space, outputs // groups), (0, -1), (1, 2)).reshape(batch, outputs, *space)
    return lax.transpose(y, np.argsort(out_spec))


PRODUCT_PRIMITIVES = {
    "dot_general": ProductPrimitive("dimension_numbers", _compute_dot),
    "conv_general_dilated": ProductPrimitive("dimension_numbers", _compute_convolution),
    "ragged_dot_general": ProductPrimitive("ragged_dot_dimension_numbers", _compute_ragged),
}
