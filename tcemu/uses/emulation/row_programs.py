"""A program of many independent rows in which the products see all rows at once and everything else one row at a time.

XLA compiles norms, softmax and the like another way for another batch, and adds in another order then. Here their shapes do not depend on
the number of rows: each run of equations between two products is the body of a loop over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from tcemu.base.jax_internals import inner_programs, split_scan_operands, without_outer_transform
from tcemu.uses.emulation.primitives import PRODUCT_PRIMITIVES, PROGRAM_CALLS, bind_equation, equation_context

MIN_ROWS = 2  # XLA removes a loop of one iteration and fuses its body with what surrounds it


def vectorize_rows(program: ClosedJaxpr, is_row: Sequence[bool], size: int, result_types: Sequence[Any]) -> ClosedJaxpr:
    """Return the program for many rows of a program for one row.

    Args:
        program: Program of a call with one row: arrays with rows have a first axis of size 1.
        is_row: Whether each of its arguments has rows.
        size: Number of rows, at least 1.
        result_types: Types of the results of the same call with all rows.

    Returns:
        The program whose arguments and results with rows have a first axis of `size`. Results that depend on no row are unchanged.

    Raises:
        ValueError: A result depends on the rows and does not have them on its first axis.
    """
    depends = _find_dependent_results(program.jaxpr, is_row)
    for number, (one, full, row) in enumerate(zip(program.out_avals, result_types, depends, strict=True)):
        shape = (size, *one.shape[1:]) if row and one.shape[:1] == (1,) else None if row else one.shape
        if full.shape != shape:
            raise ValueError(
                f"emulate: rows=: result {number} is {full.dtype}{list(full.shape)} with {size} rows and {one.dtype}{list(one.shape)} with "
                f"one; expected a first axis of {size} and of 1. Rows must not depend on each other: a mean over them is computed outside"
            )

    def compute(*arrays: Array) -> list[Array]:
        def compute_row(rows: Sequence[Array]) -> list[Array]:
            remaining = iter(rows)
            args = [next(remaining) if row else array for array, row in zip(arrays, is_row, strict=True)]
            return _evaluate(program.jaxpr, program.consts, args)

        rows = [array[:, None] for array, row in zip(arrays, is_row, strict=True) if row]
        results = jax.vmap(compute_row, out_axes=[0 if row else None for row in depends])(rows)
        return [result[:, 0] if row else result for result, row in zip(results, depends, strict=True)]

    avals = [
        jax.ShapeDtypeStruct((size, *v.aval.shape[1:]), v.aval.dtype) if row else v.aval
        for v, row in zip(program.jaxpr.invars, is_row, strict=True)
    ]
    return without_outer_transform(jax.make_jaxpr(compute)(*avals), "vmap")


def _contains_product(equation: JaxprEqn) -> bool:
    return equation.primitive.name in PRODUCT_PRIMITIVES or any(
        _contains_product(inner) for program in inner_programs(equation.params) for inner in program.eqns
    )


# ---- which results depend on rows


def _find_dependent_results(jaxpr: Jaxpr, is_dependent: Sequence[bool]) -> list[bool]:
    """Return for each result of a program whether it depends on a dependent argument."""
    dependent = {v for v, depends in zip(jaxpr.invars, is_dependent, strict=True) if depends}
    for equation in jaxpr.eqns:
        dependent.update(_dependent_variables(equation, dependent))
    return _membership(jaxpr.outvars, dependent)


def _dependent_variables(equation: JaxprEqn, dependent: set[Any]) -> list[Any]:
    """Return the results of an equation that depend on dependent variables."""
    operands = _membership(equation.invars, dependent)
    if not any(operands):
        return []
    rule = DEPENDENCE_RULES.get(equation.primitive.name)
    results = [True] * len(equation.outvars) if rule is None else rule(equation, operands)
    return [v for v, depends in zip(equation.outvars, results, strict=True) if depends]


def _membership(variables: Sequence[Any], members: set[Any]) -> list[bool]:
    return [not isinstance(v, Literal) and v in members for v in variables]


def _dependence_in_program(equation: JaxprEqn, operands: list[bool]) -> list[bool]:
    (program,) = inner_programs(equation.params)
    return _find_dependent_results(program, operands)


def _dependence_in_scan(equation: JaxprEqn, operands: list[bool]) -> list[bool]:
    (program,) = inner_programs(equation.params)
    consts, carry, scanned = split_scan_operands(equation.params, operands)
    while True:
        results = _find_dependent_results(program, [*consts, *carry, *scanned])
        grown = [a or b for a, b in zip(carry, results, strict=False)]
        if grown == carry:
            return [*carry, *results[len(carry) :]]
        carry = grown


def _dependence_in_while(equation: JaxprEqn, operands: list[bool]) -> list[bool]:
    """Return the dependence of a loop's results: of all of them if the number of iterations depends on rows."""
    params = equation.params
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    carry = operands[second:]
    while True:
        results = _find_dependent_results(params["body_jaxpr"].jaxpr, [*operands[first:second], *carry])
        if any(_find_dependent_results(params["cond_jaxpr"].jaxpr, [*operands[:first], *carry])):
            return [True] * len(carry)
        grown = [a or b for a, b in zip(carry, results, strict=True)]
        if grown == carry:
            return carry
        carry = grown


def _dependence_in_cond(equation: JaxprEqn, operands: list[bool]) -> list[bool]:
    branches = [_find_dependent_results(branch, operands[1:]) for branch in inner_programs(equation.params["branches"])]
    return [operands[0] or any(results) for results in zip(*branches, strict=True)]


DEPENDENCE_RULES: dict[str, Callable[[JaxprEqn, list[bool]], list[bool]]] = {  # every result of another primitive depends on every operand
    "scan": _dependence_in_scan,
    "while": _dependence_in_while,
    "cond": _dependence_in_cond,
} | dict.fromkeys(PROGRAM_CALLS, _dependence_in_program)


# ---- one row


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    """Evaluate a program with each run of equations between two products as one `Segment`."""
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    last_use = {v: number for number, equation in enumerate(jaxpr.eqns) for v in equation.invars if not isinstance(v, Literal)}
    last_use |= {v: len(jaxpr.eqns) for v in jaxpr.outvars if not isinstance(v, Literal)}
    pending: list[JaxprEqn] = []

    def compute_pending(number: int) -> None:
        if pending:
            made = dict.fromkeys(v for equation in pending for v in equation.outvars)
            inputs = dict.fromkeys(v for equation in pending for v in equation.invars if not isinstance(v, Literal) and v not in made)
            segment = Segment(tuple(pending), tuple(inputs), tuple(v for v in made if last_use.get(v, -1) >= number))
            env.update(zip(segment.results, segment([env[v] for v in inputs]), strict=True))
            pending.clear()

    for number, equation in enumerate(jaxpr.eqns):
        if _contains_product(equation):
            compute_pending(number)
            _evaluate_equation(equation, env, {name: _divide_programs(value) for name, value in equation.params.items()})
        else:
            pending.append(equation)
    compute_pending(len(jaxpr.eqns))
    return [v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]


def _evaluate_equation(equation: JaxprEqn, env: dict[Any, Any], params: dict[str, Any] | None = None) -> None:
    """Evaluate an equation, with other parameters if they are given, and add its results to the values of variables."""
    with equation_context(equation):
        results = bind_equation(equation, [v.val if isinstance(v, Literal) else env[v] for v in equation.invars], params)
    env.update(zip(equation.outvars, results, strict=True))


def _divide_programs(value: Any) -> Any:
    """Return an equation's parameter with every program in it divided into segments and products."""
    if isinstance(value, ClosedJaxpr):
        return jax.make_jaxpr(lambda *args: _evaluate(value.jaxpr, value.consts, args))(*(v.aval for v in value.jaxpr.invars))
    if isinstance(value, Jaxpr):
        return jax.make_jaxpr(lambda *args: _evaluate(value, (), args))(*(v.aval for v in value.invars)).jaxpr
    if isinstance(value, tuple | list) and any(isinstance(item, ClosedJaxpr | Jaxpr) for item in value):
        return type(value)(map(_divide_programs, value))
    return value


# ---- what lies between two products


@dataclass(frozen=True, eq=False)
class Segment:
    """Consecutive equations without products, which `jax.vmap` turns into a loop over the rows."""

    equations: tuple[JaxprEqn, ...]
    inputs: tuple[Any, ...]  # variables that the equations read and do not make
    results: tuple[Any, ...]  # variables that they make and that are read later

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """Compute the results from the inputs."""

        @jax.custom_batching.custom_vmap
        def compute(*values):
            env = dict(zip(self.inputs, values, strict=True))
            for equation in self.equations:
                _evaluate_equation(equation, env)
            return [env[v] for v in self.results]

        compute.def_vmap(self.compute_rows)
        return compute(*values)

    def compute_rows(self, size: int, batched: Sequence[bool], *values: Any) -> tuple[list[Any], list[bool]]:
        """Compute the equations that use rows in a loop over them, and all others once, as the rule of `custom_vmap`."""
        env = dict(zip(self.inputs, values, strict=True))
        rows = [v for v, has_rows in zip(self.inputs, batched, strict=True) if has_rows]
        in_loop, dependent, looped = set(rows), set(rows), []
        for equation in self.equations:
            if any(_membership(equation.invars, in_loop)):
                in_loop.update(equation.outvars)
                dependent.update(_dependent_variables(equation, dependent))
                looped.append(equation)
            else:
                _evaluate_equation(equation, env)
        shared = {v: value for v, value in env.items() if v not in in_loop}
        results = [v for v in self.results if v in in_loop]

        def compute_row(row: Sequence[Any]) -> list[Any]:
            own = shared | dict(zip(rows, row, strict=True))
            for equation in looped:
                _evaluate_equation(equation, own)
            return [own[v] for v in results]

        repeats = -(-MIN_ROWS // size)
        stacked = [jnp.concatenate([env[v]] * repeats) if repeats > 1 else env[v] for v in rows]
        for v, result in zip(results, lax.map(compute_row, stacked), strict=True):
            env[v] = result[:size] if v in dependent else result[0]  # what depends on no row is the same in every iteration
        return [env[v] for v in self.results], [v in dependent for v in self.results]
