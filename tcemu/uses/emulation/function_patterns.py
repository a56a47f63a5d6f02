"""Softmax, norms and activations in a program (jaxpr), found by their formulas.

JAX and flax inline these functions, so that a program shows their primitives alone. Each result becomes an expression over the program's
variables, through `jit` and the like. An expression that is a function's formula, in any association of its products and with any casts
between f32, f16 and bf16 in between, is a `FunctionMatch`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isclose, nan, pi, prod, sqrt
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from tcemu.base.jax_internals import inner_programs
from tcemu.uses.emulation.primitives import PROGRAM_CALLS, equation_name, is_package_program

FLOATS = ("float32", "float16", "bfloat16")  # dtypes that kernels load and store
FUNCTIONS = ("softmax", "log_softmax", "rms_norm", "layer_norm", "silu", "gelu")
TOLERANCE = 0.01  # relative, of a formula's constants, which bf16 rounds
CALLS = tuple(name for name in PROGRAM_CALLS if name != "shard_map")
VIEWS = ("broadcast_in_dim", "reshape", "squeeze")
NEUTRAL = ("stop_gradient", "copy")  # primitives that return their operand
PURE = (
    "add", "sub", "mul", "div", "max", "neg", "square", "integer_pow", "pow", "sqrt", "rsqrt", "exp", "log", "tanh", "erf", "erfc",
    "logistic", "reduce_sum", "reduce_max", "convert_element_type", *VIEWS, *NEUTRAL,
)  # fmt: skip
KEPT_PARAMETERS = ("axes", "broadcast_dimensions", "y")
FOLDED: dict[str, Callable[..., Any]] = {  # primitives of scalars that are known before a program runs
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "max": max, "gt": lambda x, y: x > y,
    "neg": lambda x: -x, "sqrt": lambda x: sqrt(x) if x >= 0 else nan, "div": lambda x, y: x / y if y else nan,
    **dict.fromkeys(("convert_element_type", "broadcast_in_dim", "reshape"), lambda x: x),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Expression:
    """A value of a program as an operation on other values. Equal expressions of one program are one object."""

    op: str  # a primitive of PURE, "scalar", "literal" for an array that is known, or "input"
    args: tuple[Expression, ...]
    params: tuple[Any, ...]  # the parameters that are in KEPT_PARAMETERS
    shape: tuple[int, ...]
    dtype: np.dtype
    value: Any = None  # of a scalar that is known, broadcast to the shape


class FunctionMatch(NamedTuple):
    """A function in a program."""

    kind: str  # one of FUNCTIONS
    number: int  # number of the equation that makes the result
    operands: tuple[Any, ...]  # variables or literals: x, and for a norm the weight and the bias, or None
    axis: int  # axis of the rows
    eps: float | None = None  # of a norm
    form: str = ""  # of GELU: "tanh" or "erf"
    interior: frozenset[int] = frozenset()  # numbers of the equations between the operands and the result


class _Formula(NamedTuple):
    """A function that a matcher finds in an expression."""

    kind: str
    operands: tuple[Expression | None, ...]
    axis: int = -1
    eps: float | None = None
    form: str = ""


def find_functions(jaxpr: Jaxpr) -> dict[int, FunctionMatch]:
    """Return the functions of a program, without those of the programs inside it, by the number of the equation that makes the result."""
    expressions = _ProgramExpressions()
    env: dict[Any, Expression] = {v: expressions.add_input(v.aval, "literal") for v in jaxpr.constvars}
    env |= {v: expressions.add_input(v.aval) for v in jaxpr.invars}
    variables = expressions.atoms  # the first variable of each expression
    variables.update((expression, v) for v, expression in env.items())
    made: dict[Any, int] = dict.fromkeys(env, -1)  # number of the equation that makes a variable
    for number, equation in enumerate(jaxpr.eqns):
        for v, expression in zip(equation.outvars, expressions.evaluate(equation, env), strict=True):
            env[v], made[v] = expression, number
            variables.setdefault(expression, v)
    readers: dict[Any, set[int]] = defaultdict(set)
    for number, equation in enumerate(jaxpr.eqns):
        for v in _variables(equation.invars):
            readers[v].add(number)
    for v in _variables(jaxpr.outvars):
        readers[v].add(len(jaxpr.eqns))
    found: dict[int, FunctionMatch] = {}
    inside_found: set[int] = set()
    operands_found: set[Any] = set()
    for number in range(len(jaxpr.eqns) - 1, -1, -1):  # the largest formula first: its parts precede it
        equation = jaxpr.eqns[number]
        if len(equation.outvars) != 1 or equation.primitive.name not in PURE:
            continue
        if equation.primitive.name == "convert_element_type" and any(len(readers[v]) > 1 for v in _variables(equation.invars)):
            continue  # the function's result before this cast is needed too
        (result,) = equation.outvars
        formula = _match(env[result])
        parts = () if formula is None else tuple(part for part in formula.operands if part is not None)
        if formula is None or not all(part in variables for part in parts):
            continue
        if any(made[v] >= number for v in _variables([variables[part] for part in parts])):
            continue
        inside = _interior(env[result], formula)
        is_part = readers[result] and readers[result] <= inside_found and result not in operands_found
        if inside is None or is_part:  # of larger functions alone
            continue
        operands = tuple(None if part is None else variables[part] for part in formula.operands)
        inside.update(parts)  # of further variables, such as x - 0
        numbers = (
            i
            for i, other in enumerate(jaxpr.eqns[:number])
            if other.outvars
            and all((env[v] in inside or env[v].op == "scalar") and not any(v is operand for operand in operands) for v in other.outvars)
        )
        found[number] = match = FunctionMatch(formula.kind, number, operands, formula.axis, formula.eps, formula.form, frozenset(numbers))
        inside_found |= {number, *match.interior}
        operands_found.update(_variables([v for v in operands if v is not None]))
    return dict(sorted(found.items()))


def function_paths(path: str, jaxpr: Jaxpr, matches: dict[int, FunctionMatch]) -> dict[int, str]:
    """Return the full name of each match of a program inside `path`, with the scopes around it and its kind, numbered where it repeats."""
    names: Counter[str] = Counter()
    paths = {}
    for number, match in matches.items():
        *scopes, _ = equation_name(jaxpr.eqns[number]).split("/")
        name = "/".join(part for part in (path, *scopes, match.kind) if part)
        paths[number] = f"{name}.{names[name]}" if names[name] else name
        names[name] += 1
    return paths


def skipped_equations(jaxpr: Jaxpr, matches: Sequence[FunctionMatch], is_kept: Callable[[JaxprEqn], bool]) -> set[int]:
    """Return the numbers of the equations that nothing needs once these matches are computed by something else.

    Args:
        jaxpr: The program.
        matches: The functions that are computed from their operands.
        is_kept: Whether an equation is needed whatever reads its results.
    """
    finals, interior = {match.number: match for match in matches}, {i for match in matches for i in match.interior}
    needed = set(_variables(jaxpr.outvars))
    skipped = set()
    for number in range(len(jaxpr.eqns) - 1, -1, -1):
        equation = jaxpr.eqns[number]
        if number in finals:
            needed.update(_variables([v for v in finals[number].operands if v is not None]))
        elif number in interior and not needed.intersection(equation.outvars) and not equation.effects and not is_kept(equation):
            skipped.add(number)
        else:
            needed.update(_variables(equation.invars))
    return skipped


def _variables(atoms: Sequence[Any]) -> Iterator[Any]:
    return (v for v in atoms if not isinstance(v, Literal))


def _interior(result: Expression, formula: _Formula) -> set[Expression] | None:
    """Return the expressions between the operands and the result; None if anything else is read."""
    ends = {part for part in formula.operands if part is not None}
    inside, pending = set(), [result]
    while pending:
        expression = pending.pop()
        if expression in ends or expression in inside or expression.op == "scalar":
            continue
        if expression.op in ("input", "literal"):
            return None
        inside.add(expression)
        pending += expression.args
    return inside - {result}


# ---- from equations to expressions


@dataclass
class _ProgramExpressions:
    """The expressions of one program."""

    known: dict[Any, Expression] = field(default_factory=dict)
    atoms: dict[Expression, Any] = field(default_factory=dict)  # the variable or literal of an expression

    def add_input(self, aval: Any, op: str = "input") -> Expression:
        """Return a new expression that is computed elsewhere."""
        return Expression(op, (), (), tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None))  # type: ignore[arg-type]

    def evaluate(self, equation: JaxprEqn, env: dict[Any, Expression]) -> list[Expression]:
        """Return the results of an equation as expressions."""
        operands = [self._literal(v) if isinstance(v, Literal) else env[v] for v in equation.invars]
        kind = equation.primitive.name
        programs = list(inner_programs(equation.params)) if kind in CALLS else []
        if len(programs) == 1 and len(programs[0].invars) == len(operands) and not is_package_program(equation):
            return self._evaluate_program(programs[0], operands)
        if kind == "select_n" and operands[0].op == "scalar":
            return [operands[1 + bool(operands[0].value)]]
        if len(equation.outvars) != 1 or kind not in (*PURE, *FOLDED):
            return [self.add_input(v.aval) for v in equation.outvars]
        (out,) = equation.outvars
        if kind in FOLDED and all(e.op == "scalar" for e in operands):
            return [self._scalar(FOLDED[kind](*(e.value for e in operands)), out.aval)]
        if kind not in PURE:
            return [self.add_input(out.aval)]
        return [self._make(equation, operands, out.aval)]

    def _evaluate_program(self, jaxpr: Jaxpr, operands: Sequence[Expression]) -> list[Expression]:
        env = dict(zip(jaxpr.invars, operands, strict=True)) | {v: self.add_input(v.aval) for v in jaxpr.constvars}
        for equation in jaxpr.eqns:
            env.update(zip(equation.outvars, self.evaluate(equation, env), strict=True))
        return [self._literal(v) if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]

    def _literal(self, literal: Literal) -> Expression:
        aval: Any = literal.aval
        if not np.ndim(literal.val):
            return self._scalar(literal.val, aval)
        expression = self._unique(Expression("literal", (), (id(literal.val),), tuple(aval.shape), aval.dtype))
        self.atoms.setdefault(expression, literal)
        return expression

    def _scalar(self, value: Any, aval: Any) -> Expression:
        value = value.item() if hasattr(value, "item") else value
        return self._unique(Expression("scalar", (), (), tuple(aval.shape), aval.dtype, value))

    def _make(self, equation: JaxprEqn, operands: Sequence[Expression], aval: Any) -> Expression:
        kind = equation.primitive.name
        for neutral, (first, second) in (("sub", operands), ("max", operands[::-1])) if len(operands) == 2 else ():
            is_identity = second.op == "scalar" and second.value == (0 if neutral == "sub" else -inf)
            if kind == neutral and is_identity and first.shape == tuple(aval.shape):
                return first  # x - 0, and max(-Inf, x)
        params = tuple(_plain(equation.params[name]) for name in KEPT_PARAMETERS if name in equation.params)
        return self._unique(Expression(kind, tuple(operands), params, tuple(aval.shape), aval.dtype))

    def _unique(self, x: Expression) -> Expression:
        return self.known.setdefault((x.op, *map(id, x.args), x.params, x.shape, x.dtype, str(x.value)), x)


def _plain(value: Any) -> Any:
    return tuple(int(item) for item in value) if isinstance(value, tuple | list) else value


# ---- parts of formulas


def _is_narrow(x: Expression) -> bool:
    return x.dtype is not None and jnp.dtype(x.dtype).name in FLOATS


def _is_cast(x: Expression) -> bool:
    return x.op in NEUTRAL or (x.op == "convert_element_type" and _is_narrow(x) and _is_narrow(x.args[0]))


def _without_casts(x: Expression) -> Expression:
    """Return what casts between floats round, which a kernel rounds in its own way."""
    while _is_cast(x):
        (x,) = x.args
    return x


def _operand(x: Expression) -> Expression:
    """Return an operand as a kernel loads it: in the narrow dtype, if it is exactly that."""
    while x.op == "copy" or (x.op == "convert_element_type" and _is_cast(x) and _widens(x)):
        (x,) = x.args
    return x


def _widens(x: Expression) -> bool:
    return jnp.dtype(x.dtype).name == "float32" or x.dtype == x.args[0].dtype


def _is_scalar(x: Expression, value: float) -> bool:
    return x.op == "scalar" and isclose(float(x.value), value, rel_tol=TOLERANCE)


def _of_row(x: Expression, shape: tuple[int, ...], axis: int) -> Expression:
    """Return the number of each row that an array repeats along the axis, before its casts and views."""
    kept_axes = tuple(i for i in range(len(shape)) if i != axis)
    reduced, kept = tuple(shape[i] for i in kept_axes), tuple(1 if i == axis else size for i, size in enumerate(shape))
    while True:
        if _is_cast(x):
            (x,) = x.args
            continue
        if x.op not in VIEWS or x.shape not in (kept, shape, reduced):
            return x
        (inner,) = x.args
        if x.op != "broadcast_in_dim":
            fits = {inner.shape, x.shape} <= {reduced, kept}
        else:
            fits = (inner.shape == reduced and x.params[0] == kept_axes) or (
                inner.shape in (kept, shape) and x.params[0] == (*range(len(shape)),)
            )
        if not fits:
            return x
        x = inner


def _reduced(x: Expression, op: str, shape: tuple[int, ...], axis: int) -> Expression | None:
    """Return what a sum or a maximum reduces along the axis."""
    x = _of_row(x, shape, axis)
    return x.args[0] if x.op == op and x.params[0] == (axis,) and x.args[0].shape == shape else None


def _averaged(x: Expression, shape: tuple[int, ...]) -> Expression | None:
    """Return of what the last axis's mean is taken."""
    x = _of_row(x, shape, len(shape) - 1)
    for a, b in _orders(x) if x.op == "mul" else [x.args] if x.op == "div" else ():
        if _is_scalar(b, shape[-1] if x.op == "div" else 1 / shape[-1]):
            return _reduced(a, "reduce_sum", shape, len(shape) - 1)
    return None


def _orders(x: Expression) -> list[tuple[Expression, Expression]]:
    a, b = x.args
    return [(a, b), (b, a)]


def _squared(x: Expression | None) -> Expression | None:
    """Return of what this is the square."""
    if x is None:
        return None
    x = _without_casts(x)
    is_square = x.op == "square" or (x.op == "integer_pow" and x.params == (2,)) or (x.op == "mul" and x.args[0] is x.args[1])
    return x.args[0] if is_square else None


def _centred(x: Expression | None, shape: tuple[int, ...]) -> Expression | None:
    """Return the operand x of x - mean(x)."""
    x = None if x is None else _without_casts(x)
    if x is None or x.op != "sub" or x.shape != shape:
        return None
    averaged, operand = _averaged(x.args[1], shape), _operand(x.args[0])
    return operand if averaged is not None and _operand(averaged) is operand else None


def _of_column(x: Expression, columns: int) -> Expression | None:
    """Return the vector, a number for each column, that an array repeats along all other axes."""
    while x.shape != (columns,) and not (x.op == "literal" and prod(x.shape) == columns and x.shape[-1] == columns):
        if x.op not in (*VIEWS, "convert_element_type", "copy") or (x is _operand(x) and x.op not in VIEWS):
            return None
        (inner,) = x.args
        if x.op == "broadcast_in_dim" and (not inner.shape or x.params[0][-1] != len(x.shape) - 1):
            return None
        if inner.shape[-1:] != (columns,) or prod(inner.shape) != columns:
            return None
        x = inner
    x = _operand(x)
    return x if _is_narrow(x) and x.op != "scalar" else None


def _factors(x: Expression, stop: Callable[[Expression], bool], inverse: bool = False) -> Iterator[tuple[Expression, bool]]:
    """Yield the factors of a product, each with whether it divides. Nothing below an expression where `stop` holds."""
    product = _without_casts(x)
    if product.op in ("mul", "div") and not stop(x):
        yield from _factors(product.args[0], stop, inverse)
        yield from _factors(product.args[1], stop, inverse ^ (product.op == "div"))
    elif not (product.op == "scalar" and product.value == 1):
        yield x, inverse


def _linear(x: Expression, factor: float = 1.0) -> tuple[float, Expression]:
    """Return c and y of c * y."""
    product = _without_casts(x)
    if product.op == "neg":
        return _linear(product.args[0], -factor)
    if product.op == "mul":
        for a, b in _orders(product):
            if b.op == "scalar":
                return _linear(a, factor * float(b.value))
    if product.op == "div" and product.args[1].op == "scalar" and product.args[1].value:
        return _linear(product.args[0], factor / float(product.args[1].value))
    return factor, x


# ---- formulas


def _match(x: Expression) -> _Formula | None:
    columns = x.shape[-1] if x.shape else 1
    if 0 in x.shape:
        return None
    matchers = (_match_softmax, _match_log_softmax, *((_match_norm,) if columns > 1 else ()), _match_silu, _match_gelu)
    for matcher in matchers:
        formula = matcher(x)
        if formula is not None and all(part is None or jnp.issubdtype(part.dtype, jnp.floating) for part in formula.operands):
            return formula
    return None


def _shifted(x: Expression) -> tuple[Expression, int] | None:
    """Return x and the axis of x - max(x)."""
    if x.op != "sub":
        return None
    operand = _operand(x.args[0])
    for axis, size in enumerate(x.shape):
        reduced = _reduced(x.args[1], "reduce_max", x.shape, axis) if size > 1 else None
        if reduced is not None and _operand(reduced) is operand:
            return operand, axis
    return None


def _match_softmax(x: Expression) -> _Formula | None:
    quotient = _without_casts(x)
    if quotient.op != "div":
        return None
    power = _without_casts(quotient.args[0])
    shifted = _shifted(_without_casts(power.args[0])) if power.op == "exp" else None
    summed = None if shifted is None else _reduced(quotient.args[1], "reduce_sum", x.shape, shifted[1])
    if shifted is None or summed is None or _without_casts(summed) is not power:
        return None
    return _Formula("softmax", shifted[:1], shifted[1])


def _match_log_softmax(x: Expression) -> _Formula | None:
    difference = _without_casts(x)
    shifted = _shifted(_without_casts(difference.args[0])) if difference.op == "sub" else None
    if shifted is None:
        return None
    log = _of_row(difference.args[1], x.shape, shifted[1])
    summed = _reduced(log.args[0], "reduce_sum", x.shape, shifted[1]) if log.op == "log" else None
    power = None if summed is None else _without_casts(summed)
    if power is None or power.op != "exp" or _without_casts(power.args[0]) is not _without_casts(difference.args[0]):
        return None
    return _Formula("log_softmax", shifted[:1], shifted[1])


def _match_norm(x: Expression) -> _Formula | None:
    y = _without_casts(x)
    if y.op == "add":
        for product, shift in _orders(y):
            bias = _of_column(shift, x.shape[-1])
            formula = _match_normed(product) if bias is not None and product.shape == x.shape else None
            if formula is not None and formula.kind == "layer_norm":
                return formula._replace(operands=(*formula.operands[:2], bias))
        return None
    return _match_normed(y)


def _match_normed(x: Expression) -> _Formula | None:
    """Match a norm without a bias: a product of x or x - mean, the reciprocal of a root, and a weight or none, in any order."""
    shape = x.shape
    for factor, inverse in _factors(x, lambda _: False):
        root = _root_argument(_of_row(factor, shape, len(shape) - 1), inverse)
        summed = None if root is None else _of_row(root, shape, len(shape) - 1)
        if summed is None or summed.op != "add":
            continue
        for variance, eps in _orders(summed):
            kind, operand = _moment(variance, shape) if eps.op == "scalar" else ("", None)
            if operand is not None:
                return _match_scaled(x, factor, kind, operand, float(eps.value))
    return None


def _root_argument(x: Expression, inverse: bool) -> Expression | None:
    """Return v of 1 / sqrt(v), which is inverted if it is a divisor."""
    if x.op == "div" and _is_scalar(x.args[0], 1.0):
        x, inverse = _without_casts(x.args[1]), not inverse
    if x.op == "pow" and x.args[1].op == "scalar" and x.args[1].value == (0.5 if inverse else -0.5):
        return x.args[0]
    return x.args[0] if x.op == ("sqrt" if inverse else "rsqrt") else None


def _moment(x: Expression, shape: tuple[int, ...]) -> tuple[str, Expression | None]:
    """Return the norm that has this moment under its root, and its operand x; None if it is no moment."""
    x = _of_row(x, shape, len(shape) - 1)
    if x.op == "max":
        for a, b in _orders(x):
            if b.op == "scalar" and b.value == 0:
                x = _of_row(a, shape, len(shape) - 1)
                break
    if x.op == "sub":  # mean(x^2) - mean(x)^2
        squared, mean = _squared(_averaged(x.args[0], shape)), _squared(_of_row(x.args[1], shape, len(shape) - 1))
        averaged = None if mean is None else _averaged(mean, shape)
        same = squared is not None and averaged is not None and _operand(averaged) is _operand(squared)
        return "layer_norm", _operand(squared) if same and squared is not None else None
    squared = _squared(_averaged(x, shape))
    centred = _centred(squared, shape)
    return ("layer_norm", centred) if centred is not None else ("rms_norm", None if squared is None else _operand(squared))


def _match_scaled(x: Expression, root: Expression, kind: str, operand: Expression, eps: float) -> _Formula | None:
    def is_normed(y: Expression) -> bool:
        return (_operand(y) if kind == "rms_norm" else _centred(y, x.shape)) is operand

    weight, normed, roots = None, None, 0
    for factor, inverse in _factors(x, is_normed):
        if is_normed(factor) and not inverse and normed is None:
            normed = factor
        elif factor is root and not roots:
            roots += 1
        elif weight is None and not inverse and (vector := _of_column(factor, x.shape[-1])) is not None:
            weight = vector
        else:
            return None
    if normed is None or not roots:
        return None
    return _Formula(kind, (operand, weight, None), len(x.shape) - 1, eps) if operand.shape == x.shape else None


def _match_silu(x: Expression) -> _Formula | None:
    y = _without_casts(x)
    if y.op == "mul":
        for a, b in _orders(y):
            gate = _without_casts(b)
            if gate.op == "logistic" and _operand(gate.args[0]) is _operand(a):
                return _Formula("silu", (_operand(a),))
    if y.op == "div":
        total = _without_casts(y.args[1])
        for one, power in _orders(total) if total.op == "add" else ():
            power = _without_casts(power)
            factor, exponent = _linear(power.args[0]) if power.op == "exp" else (0.0, power)
            if _is_scalar(one, 1.0) and factor == -1 and _operand(exponent) is _operand(y.args[0]):
                return _Formula("silu", (_operand(y.args[0]),))
    return None


def _match_gelu(x: Expression) -> _Formula | None:
    for factor, inverse in _factors(x, lambda _: False):
        form, operand = ("", None) if inverse else _gelu_operand(_without_casts(factor))
        if operand is None or operand.shape != x.shape:
            continue
        others = [y for y, _ in _factors(x, lambda y: _operand(y) is operand) if y is not factor]  # noqa: B023
        scalars, values = [float(y.value) for y in others if y.op == "scalar"], [_operand(y) for y in others if y.op != "scalar"]
        if values == [operand] and isclose(prod(scalars), 0.5, rel_tol=TOLERANCE):
            return _Formula("gelu", (operand,), form=form)
    return None


def _gelu_operand(x: Expression) -> tuple[str, Expression | None]:
    """Return the form and the operand of 1 + tanh(u), 1 + erf(x / sqrt 2) or erfc(-x / sqrt 2)."""
    if x.op == "erfc":
        factor, operand = _linear(x.args[0])
        return "erf", _operand(operand) if isclose(factor, -sqrt(0.5), rel_tol=TOLERANCE) else None
    for one, other in _orders(x) if x.op == "add" else ():
        bounded = _without_casts(other)
        if _is_scalar(one, 1.0) and bounded.op == "erf":
            factor, operand = _linear(bounded.args[0])
            return "erf", _operand(operand) if isclose(factor, sqrt(0.5), rel_tol=TOLERANCE) else None
        if _is_scalar(one, 1.0) and bounded.op == "tanh":
            return "tanh", _tanh_operand(bounded.args[0])
    return "", None


def _tanh_operand(x: Expression) -> Expression | None:
    """Return x of sqrt(2 / pi) * (x + 0.044715 * x^3)."""
    factor, total = _linear(x)
    total = _without_casts(total)
    for first, second in _orders(total) if total.op == "add" and isclose(factor, sqrt(2 / pi), rel_tol=TOLERANCE) else ():
        operand = _operand(first)
        scalars, parts = [], []
        for y, inverse in _factors(second, lambda y: _operand(y) is operand):  # noqa: B023
            power = _without_casts(y)
            squared = _squared(y)
            if y.op == "scalar" and not inverse:
                scalars.append(float(y.value))
            elif power.op == "integer_pow" and power.params == (3,):
                parts += [power.args[0]] * 3
            else:
                parts += [y] if squared is None else [squared] * 2
        if isclose(prod(scalars), 0.044715, rel_tol=TOLERANCE) and [_operand(y) for y in parts] == [operand] * 3:
            return operand
    return None
