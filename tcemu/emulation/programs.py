"""What the equations of a program (jaxpr) hold: products, other programs, or what nobody sees into."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from tcemu.emulation.convolution import ConvolutionParams, through_patches
from tcemu.emulation.ragged import through_groups

Run = Callable[..., Array]  # with the arguments of jax.lax.dot_general


class ProductPrimitive(NamedTuple):
    """A primitive that multiplies matrices. Its first two operands are lhs and rhs.

    numbers: which of its parameters says what the axes are. through: (run, operands, parameters) -> the result by `run`.
    """

    numbers: str
    through: Callable[[Run, Sequence[Any], dict[str, Any]], Array]


def _through_dot(run: Run, values: Sequence[Any], params: dict[str, Any]) -> Array:
    (lhs, rhs), kept = values, {"out_sharding": None, **params}
    return run(lhs, rhs, kept.pop("dimension_numbers"), **kept)


def _through_patches(run: Run, values: Sequence[Any], params: dict[str, Any]) -> Array:
    (lhs, rhs), window = values, {**params}
    kept = {name: window.pop(name) for name in ("precision", "preferred_element_type")}
    kept["out_sharding"] = window.pop("out_sharding", None)
    return through_patches(run, lhs, rhs, ConvolutionParams(**window), **kept)


def _through_groups(run: Run, values: Sequence[Any], params: dict[str, Any]) -> Array:
    lhs, rhs, group_sizes = values
    return through_groups(run, lhs, rhs, group_sizes, params)


PRODUCTS = {
    "dot_general": ProductPrimitive("dimension_numbers", _through_dot),
    "conv_general_dilated": ProductPrimitive("dimension_numbers", _through_patches),
    "ragged_dot_general": ProductPrimitive("ragged_dot_dimension_numbers", _through_groups),
}
RULED = ("custom_jvp_call", "custom_vjp_call")
OPAQUE = {  # primitives that multiply matrices, or may, where nobody sees it
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
PACKAGE = Path(__file__).parents[1]


def programs(value: Any) -> Iterator[Jaxpr]:
    """The programs among an equation's parameters."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, dict | tuple | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from programs(item)


def has_products(equation: JaxprEqn) -> bool:
    """It is a product, may hide one, holds one, or has a derivative rule that may have one."""
    kind = equation.primitive.name
    if kind in PRODUCTS or kind in OPAQUE or kind in RULED:
        return True
    return any(has_products(inner) for program in programs(equation.params) for inner in program.eqns)


def called(equation: JaxprEqn) -> str:
    """The name that an equation has in the names of products: that of the function it calls, or its primitive's."""
    params, kind = equation.params, equation.primitive.name
    if kind in RULED:
        return params["call_jaxpr"].jaxpr.debug_info.func_name
    return params.get("name") or {"remat2": "checkpoint"}.get(kind, kind)


def name_of(equation: JaxprEqn) -> str:
    """An equation's part of the names of products: the scopes around it, and the function it calls or its primitive."""
    return "/".join(part for part in (str(equation.source_info.name_stack), called(equation)) if part)


def path_of(path: str, equation: JaxprEqn, index: int) -> str:
    """The whole name of an equation inside `path`. index: how many before it have its name there."""
    name = "/".join(part for part in (path, name_of(equation)) if part)
    return f"{name}.{index}" if index else name


def parts_of_scan(params: dict[str, Any], values: Sequence[Any]) -> list[list[Any]]:
    """What belongs to the operands of a scan: those alike in every turn, the carry's, and those cut along their first axis."""
    if "ft_in" in params:  # JAX 0.12 and later
        return [list(part) for part in params["ft_in"].update(values).unpack()]
    carry = params["num_consts"] + params["num_carry"]
    return [list(values[: params["num_consts"]]), list(values[params["num_consts"] : carry]), list(values[carry:])]


def is_ours(equation: JaxprEqn) -> bool:
    """The program is one of this package's own, below the policies: its products are part of an emulation."""
    for program in programs(equation.params):
        source = program.debug_info.func_filename
        if source and Path(source).is_relative_to(PACKAGE) and not Path(source).is_relative_to(Path(__file__).parent):
            return True
    return False
