"""The matrix products and functions of a program (jaxpr), with the roles of their operands, found without computing anything.

`Product` describes one product to a policy, and `Function` a softmax, norm or activation. `Survey` walks a program and follows where each
operand comes from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.source_info_util import summarize
from jax.typing import DTypeLike

from tcemu.base.jax_internals import is_backward, split_scan_operands
from tcemu.operations.products.dot_general import DimensionNumbers
from tcemu.uses.emulation.function_patterns import FunctionMatch, find_functions, function_paths
from tcemu.uses.emulation.origins import CONSTANT, GRADIENT, Origin, join_origins, operand_roles
from tcemu.uses.emulation.primitives import (
    PRODUCT_PRIMITIVES,
    PROGRAM_CALLS,
    equation_name,
    equation_path,
    has_products,
    inner_programs,
    is_package_program,
)

SOURCE_PATTERN = re.compile(r"(?P<file>.*?):(?P<line>\d+)(:\d+)? \((?P<function>.*)\)")


@dataclass(frozen=True)
class Product:
    """One matrix product of a program, as a policy sees it.

    Attributes:
        name: The path of the weight, as "layers/0/up/kernel"; or, where named scopes show the weight's module as in flax linen, or there is
            no weight, the scope. A product of two activations has before it the path that the weights of their own products share. Where a
            name repeats, ".1", ".2" and so on follow it.
        index: Number after the name, 0 for the first product of that name.
        primitive: "dot_general", "conv_general_dilated" or "ragged_dot_general".
        lhs_shape: Shape of the left operand.
        lhs_dtype: Dtype of the left operand.
        rhs_shape: Shape of the right operand.
        rhs_dtype: Dtype of the right operand.
        dimension_numbers: The primitive's parameter that describes the axes.
        preferred_element_type: The primitive's parameter of this name.
        shape: Shape of the result.
        dtype: Dtype of the result.
        repeats: Number of times that the loops around the product run it; None inside a `while`.
        roles: Roles of lhs and rhs: "activation", "weight", "gradient" or "constant" (without any of these origins).
        parameters: Paths of the parameters that the weights come from, as "params/up/kernel" or "layers/0/weight".
        source: Source line of the product, as "model.py:31 (mlp)".
        scope: The jit functions, named scopes and loops around the product, then its primitive, as "encoder/mlp/dot_general".
        layers: For a product of two activations, the paths of the weights of the nearest products that they come from.
    """

    name: str
    index: int
    primitive: str
    lhs_shape: tuple[int, ...]
    lhs_dtype: DTypeLike
    rhs_shape: tuple[int, ...]
    rhs_dtype: DTypeLike
    dimension_numbers: DimensionNumbers | lax.ConvDimensionNumbers | lax.RaggedDotDimensionNumbers
    preferred_element_type: DTypeLike | None
    shape: tuple[int, ...]
    dtype: DTypeLike
    repeats: int | None = 1
    roles: tuple[str, str] = ("constant", "constant")
    parameters: tuple[str, ...] = ()
    source: str = ""
    scope: str = ""
    layers: tuple[str, ...] = ()

    @property
    def is_float(self) -> bool:
        """True if both operands and the result are real floats."""
        return all(jnp.issubdtype(dtype, jnp.floating) for dtype in (self.lhs_dtype, self.rhs_dtype, self.dtype))

    @property
    def is_contraction(self) -> bool:
        """True if the product sums over an axis, be it of size 1.

        einsum("i,j->ij") and einsum("btd,btd->btd") sum over none: they only multiply elements.
        """
        if isinstance(self.dimension_numbers, lax.ConvDimensionNumbers):
            return True
        numbers = self.dimension_numbers
        (contracting, _), _ = numbers.dot_dimension_numbers if isinstance(numbers, lax.RaggedDotDimensionNumbers) else numbers
        return len(contracting) > 0

    @property
    def operands(self) -> str:
        """Both operands as text: "float32[4,8] · float32[8,2]"."""
        return f"{_format_array(self.lhs_dtype, self.lhs_shape)} · {_format_array(self.rhs_dtype, self.rhs_shape)}"

    @property
    def result(self) -> str:
        """The result as text: "float32[4,2]"."""
        return _format_array(self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.name}: {self.operands} -> {self.result}"


@dataclass(frozen=True)
class Function:
    """One softmax, norm or activation of a program, as a policy for functions sees it.

    Attributes:
        name: The path of a norm's weight, as "layers/0/norm/scale"; or, where named scopes show the weight's module as in flax linen, or
            there is no weight, the scope. Where a name repeats, ".1", ".2" and so on follow it.
        index: Number after the name, 0 for the first function of that name.
        kind: "softmax", "log_softmax", "rms_norm", "layer_norm", "silu" or "gelu".
        shape: Shape of the operand and of the result.
        operand_dtype: Dtype of the operand, as it is before any cast that widens it.
        dtype: Dtype of the result.
        axis: Axis of the rows of a softmax or a norm.
        eps: Number that a norm adds to the mean of the squares, or None.
        form: The formula of GELU, "tanh" or "erf"; "" for the others.
        has_weight: Whether a norm multiplies by a weight for each column.
        has_bias: Whether a norm adds a bias for each column.
        repeats: Number of times that the loops around the function run it; None inside a `while`.
        parameters: Paths of the parameters that the weight and the bias come from.
        source: Source line, as "model.py:31 (mlp)".
        scope: The jit functions, named scopes and loops around the function, then its kind.
    """

    name: str
    index: int
    kind: str
    shape: tuple[int, ...]
    operand_dtype: DTypeLike
    dtype: DTypeLike
    axis: int = -1
    eps: float | None = None
    form: str = ""
    has_weight: bool = False
    has_bias: bool = False
    repeats: int | None = 1
    parameters: tuple[str, ...] = ()
    source: str = ""
    scope: str = ""

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.shape[self.axis] if self.shape else 1

    @property
    def operands(self) -> str:
        """The operand as text: "float32[4,8]"."""
        return _format_array(self.operand_dtype, self.shape)

    @property
    def result(self) -> str:
        """The result as text: "float32[4,8]"."""
        return _format_array(self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.name}: {self.kind} of {self.operands} -> {self.result}"


def make_product(
    equation: JaxprEqn, name: str, index: int, repeats: int | None, origins: Sequence[Origin] = (CONSTANT, CONSTANT)
) -> Product:
    """Describe an equation to a policy. origins: origins of the equation's operands."""
    avals: list[Any] = [v.aval for v in (*equation.invars, *equation.outvars)]
    (lhs, rhs, *_, out), params = avals, equation.params
    return Product(
        name=name,
        index=index,
        primitive=equation.primitive.name,
        lhs_shape=tuple(lhs.shape),
        lhs_dtype=lhs.dtype,
        rhs_shape=tuple(rhs.shape),
        rhs_dtype=rhs.dtype,
        dimension_numbers=params[PRODUCT_PRIMITIVES[equation.primitive.name].axes_parameter],
        preferred_element_type=params["preferred_element_type"],
        shape=tuple(out.shape),
        dtype=out.dtype,
        repeats=repeats,
        roles=operand_roles(*origins[:2]),
        parameters=tuple(dict.fromkeys(path for origin in origins[:2] for path in origin.parameters)),
        source=_source_line(equation),
        scope=name,
        layers=join_origins(origins[:2]).layers if operand_roles(*origins[:2]) == ("activation", "activation") else (),
    )


def _describe_place(product: Product) -> str:
    """Return a product's name before it is numbered: see `Product.name`."""
    if "gradient" in product.roles or not (product.parameters or product.layers):
        return product.scope
    return _place_of_parameters(product.parameters or product.layers, product.scope, len(product.parameters) == 1)


def _place_of_parameters(parameters: Sequence[str], scope: str, is_path: bool) -> str:
    """Return the scope if it shows the module of these parameters, and else the first path, or the module with the scope."""
    paths = [path.removeprefix("params/").split("/") for path in parameters]
    modules = [path[:-1] for path in paths]
    shared = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*modules, strict=False))]
    module = "/".join(shared)
    if not module or f"/{module}/" in f"/{re.sub('[()]', '/', scope)}/":
        return scope
    return "/".join(paths[0]) if is_path else f"{module}/{scope}"


def _source_line(equation: JaxprEqn) -> str:
    """Return the innermost source line outside JAX, as "model.py:31 (mlp)"."""
    match = SOURCE_PATTERN.fullmatch(summarize(equation.source_info))
    return f"{Path(match['file']).name}:{match['line']} ({match['function']})" if match else ""


def _format_array(dtype: DTypeLike, shape: Sequence[int]) -> str:
    return f"{jnp.dtype(dtype).name}[{','.join(map(str, shape))}]"


def _make_function(match: FunctionMatch, equation: JaxprEqn, path: str, repeats: int | None, origins: Sequence[Origin | None]) -> Function:
    """Describe a function to a policy. origins: origins of x and, for a norm, of the weight and the bias, or None."""
    avals: list[Any] = [match.operands[0].aval, equation.outvars[0].aval]
    x, out = avals
    weights = [origin for origin in origins[1:] if origin is not None]
    return Function(
        name=path,
        index=0,
        kind=match.kind,
        shape=tuple(out.shape),
        operand_dtype=x.dtype,
        dtype=out.dtype,
        axis=match.axis,
        eps=match.eps,
        form=match.form,
        has_weight=len(origins) > 1 and origins[1] is not None,
        has_bias=len(origins) > 2 and origins[2] is not None,
        repeats=repeats,
        parameters=tuple(dict.fromkeys(path for origin in weights for path in origin.parameters)),
        source=_source_line(equation),
        scope=path,
    )


# ---- the walk through a program

Described = TypeVar("Described", Product, Function)

UPDATE_PRIMITIVES = ("add", "add_any", "sub", "select_n")  # primitives that make the next parameters from the last ones and a gradient


@dataclass(frozen=True)
class SurveyScope:
    """The surroundings of an equation."""

    path: str = ""  # names around it
    repeats: int | None = 1  # number of times that loops run it, None if unknown
    transposed: bool = False  # whether it is in the backward pass
    in_function: bool = False  # whether it is a part of a function that is found around it


@dataclass
class Survey:
    """The products of a program and the origins of operands, by name."""

    products: dict[str, Product] = field(default_factory=dict)  # in the order of the program
    operands: dict[str, list[Origin]] = field(default_factory=dict)  # origins of the operands of equations that contain products
    scopes: dict[str, list[str]] = field(default_factory=dict)  # for each name before it is numbered, the scopes of its products
    with_functions: bool = False  # whether functions are listed too
    functions: dict[str, Function] = field(default_factory=dict)  # in the order of the program
    matches: dict[int, tuple[Jaxpr, dict[int, FunctionMatch]]] = field(default_factory=dict)  # found, by the program's id

    def find_functions(self, jaxpr: Jaxpr) -> dict[int, FunctionMatch]:
        """Return the functions of a program, without those inside its equations, by their equation's number; {} if none are listed."""
        if not self.with_functions:
            return {}
        if id(jaxpr) not in self.matches:
            self.matches[id(jaxpr)] = jaxpr, find_functions(jaxpr)
        return self.matches[id(jaxpr)][1]

    def has_functions(self, equation: JaxprEqn) -> bool:
        """Return whether an equation contains a function."""
        if not self.with_functions or is_package_program(equation):
            return False
        return any(
            self.find_functions(program) or any(self.has_functions(inner) for inner in program.eqns)
            for program in inner_programs(equation.params)
        )

    def walk(self, jaxpr: Jaxpr, args: Sequence[Origin], place: SurveyScope, consts: Sequence[Origin] = ()) -> list[Origin]:
        """Add the products of a program and return the origins of its results. consts: origins of its constants, if they are known."""
        env: dict[Any, Origin] = dict.fromkeys(jaxpr.constvars, CONSTANT) | dict(zip(jaxpr.constvars, consts, strict=False))
        env |= zip(jaxpr.invars, args, strict=True)
        names: Counter[str] = Counter()
        matches = {} if place.in_function else self.find_functions(jaxpr)
        paths, interior = function_paths(place.path, jaxpr, matches), {i for match in matches.values() for i in match.interior}
        for number, equation in enumerate(jaxpr.eqns):
            origins = [CONSTANT if isinstance(v, Literal) else env[v] for v in equation.invars]
            around = replace(place, in_function=True) if number in interior else place
            env.update(zip(equation.outvars, self._visit_equation(equation, origins, around, names), strict=True))
            if number in matches:
                operands = [None if v is None else CONSTANT if isinstance(v, Literal) else env[v] for v in matches[number].operands]
                function = _make_function(matches[number], equation, paths[number], place.repeats, operands)
                self.functions[paths[number]] = self._number_name(function)
        return [CONSTANT if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    def _visit_equation(self, equation: JaxprEqn, origins: list[Origin], place: SurveyScope, names: Counter[str]) -> list[Origin]:
        kind = equation.primitive.name
        begins = is_backward(equation)  # backward pass; names in inner programs do not show it
        inner = replace(place, transposed=place.transposed or begins)
        if has_products(equation) or (not place.in_function and self.has_functions(equation)):
            name = equation_name(equation)
            index, names[name] = names[name], names[name] + 1
            path = equation_path(place.path, equation, index)
            inner = replace(inner, path=path)
            if kind in PRODUCT_PRIMITIVES:
                self.products[path] = self._number_name(make_product(equation, path, index, place.repeats, origins))
            else:
                self.operands[path] = origins
        rule = CONTAINER_WALKS.get(kind)
        if rule is not None and not is_package_program(equation):
            return rule(self, equation, origins, inner)
        if kind == "select_n":
            origins = [CONSTANT, *origins[1:]]  # the selected values count, not the selector
        result = join_origins(origins)
        if kind in PRODUCT_PRIMITIVES and result.data:
            weights = [origin for origin in origins[:2] if origin.role == "weight"]
            result = replace(result, layers=join_origins(weights).parameters or result.layers)
        if not inner.transposed:
            result = _updated_parameter(equation, origins) or result
        elif begins and _begins_reverse_mode(equation):
            result = GRADIENT
        return [result] * len(equation.outvars)

    def _number_name(self, product: Described) -> Described:
        """Return a product or function with its name, numbered where those in other scopes have the same one."""
        if isinstance(product, Function):
            is_path = bool(product.parameters)
            name = _place_of_parameters(product.parameters, product.scope, is_path) if is_path else product.scope
        else:
            name = _describe_place(product)
        if name == product.scope:
            return product
        scopes = self.scopes.setdefault(name, [])
        if product.scope not in scopes:
            scopes.append(product.scope)
        index = scopes.index(product.scope)
        return replace(product, name=f"{name}.{index}" if index else name, index=index)


def _begins_reverse_mode(equation: JaxprEqn) -> bool:
    """Return whether an equation of the backward pass uses a loss's cotangent.

    The cotangent 1 of a loss is a literal. It is broadcast at once, or multiplied as a scalar first.
    """
    literals = [isinstance(v, Literal) for v in equation.invars]
    out: Any = equation.outvars[0].aval
    return any(literals) and (all(literals) or out.shape == ()) and jnp.issubdtype(out.dtype, jnp.floating)


def _updated_parameter(equation: JaxprEqn, origins: Sequence[Origin]) -> Origin | None:
    """Return the parameter's origin if the equation adds a gradient to a parameter, as a training step inside the program does."""
    if equation.primitive.name not in UPDATE_PRIMITIVES or not any(o.gradient for o in origins):
        return None
    avals: list[Any] = [v.aval for v in (*equation.invars, *equation.outvars)]
    shapes = [aval.shape for aval in avals]
    old = [o for o, shape in zip(origins, shapes[:-1], strict=True) if o.role == "weight" and shape == shapes[-1]]
    return join_origins(old) if old else None


# ---- equations that contain programs


def _walk_program(survey: Survey, equation: JaxprEqn, origins: list[Origin], place: SurveyScope) -> list[Origin]:
    (program,) = inner_programs(equation.params)
    return survey.walk(program, origins, place)


def _walk_scan(survey: Survey, equation: JaxprEqn, origins: list[Origin], place: SurveyScope) -> list[Origin]:
    params = equation.params
    (program,) = inner_programs(params)
    place = replace(place, repeats=None if place.repeats is None else place.repeats * params["length"])
    consts, init, xs = split_scan_operands(params, origins)
    state, results = _find_fixed_point(lambda state: survey.walk(program, [*consts, *state, *xs], place), init)
    return [*state, *results[len(init) :]]


def _walk_while(survey: Survey, equation: JaxprEqn, origins: list[Origin], place: SurveyScope) -> list[Origin]:
    params = equation.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    condition, body = (replace(place, path=f"{place.path}/{part}", repeats=None) for part in ("cond", "body"))
    program = params["body_jaxpr"].jaxpr
    state, _ = _find_fixed_point(lambda state: survey.walk(program, [*origins[first:second], *state], body), origins[second:])
    survey.walk(params["cond_jaxpr"].jaxpr, [*origins[:first], *state], condition)
    return state


def _find_fixed_point(turn: Callable[[list[Origin]], list[Origin]], state: list[Origin]) -> tuple[list[Origin], list[Origin]]:
    """Iterate a loop's body until the origins of its carry, which only grow, no longer change.

    Returns:
        The origins of the carry, and the results of the last iteration.
    """
    while True:
        results = turn(state)
        grown = [join_origins(pair) for pair in zip(state, results[: len(state)], strict=True)]
        if grown == state:
            return state, results
        state = grown


def _walk_cond(survey: Survey, equation: JaxprEqn, origins: list[Origin], place: SurveyScope) -> list[Origin]:
    branches = [
        survey.walk(branch, origins[1:], replace(place, path=f"{place.path}/{number}"))
        for number, branch in enumerate(inner_programs(equation.params["branches"]))
    ]
    return [join_origins(results) for results in zip(*branches, strict=True)]


CONTAINER_WALKS: dict[str, Callable[[Survey, JaxprEqn, list[Origin], SurveyScope], list[Origin]]] = {
    "scan": _walk_scan,
    "while": _walk_while,
    "cond": _walk_cond,
} | dict.fromkeys(PROGRAM_CALLS, _walk_program)
