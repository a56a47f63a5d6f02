"""`sweep`: a product, or any function of a recipe, over a grid of arithmetics and seeds, with named errors against an exact product.

A grid's points are grouped by compiled program: a program takes the swept fields of a model as arrays and computes all points of its group.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import groupby, product
from math import prod
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.base.compilation import jit_wide_vectors
from tcemu.base.intervals import INTERVAL_METHOD, mean_interval
from tcemu.base.plain_values import Codecs, from_plain, to_plain
from tcemu.base.plots import dot_plot, line_plot
from tcemu.base.progress import interactive_line
from tcemu.base.provenance import Provenance, describe_arrays, function_name
from tcemu.base.results import SavedResult, Table
from tcemu.base.saved_files import DamagedFile
from tcemu.base.text import table_lines, wrap_lines
from tcemu.engine.arithmetic.model import LIMITS, ROUNDING_FIELDS, ROUNDING_MODES, Model
from tcemu.engine.formats.number_formats import ARRAY_FORMATS, F32
from tcemu.engine.isa.families import Instruction
from tcemu.engine.isa.targets import DEFAULT_TARGET
from tcemu.operations.products.gemm import gemm
from tcemu.operations.products.matmul import matmul, pruned_operand
from tcemu.operations.products.product_arguments import product_keys
from tcemu.operations.products.recipe_facts import RECIPE_COLUMNS, make_provenance, recipe_facts, unit_sentences
from tcemu.operations.products.recipes import Recipe, as_recipe, get_recipe
from tcemu.operations.quantize.quantizer import Quantizer, exact_factors, exact_values, quantize
from tcemu.uses.study.accuracy import DEFAULT_MEASURES, MEASURE_DEFINITIONS, Measure, Reference, compute_measures, resolve_measures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DrawOperands = Callable[..., tuple[ArrayLike, ...]]
STATELESS = (matmul, gemm)  # functions without state: equal programs of theirs are shared


def sweep(
    fn: Callable[..., ArrayLike],
    over: Mapping[str, Iterable[Any] | Any],
    *,
    operands: DrawOperands | tuple[ArrayLike, ...],
    recipe: Recipe | str | None = None,
    exact: str | Callable[..., ArrayLike] = "quantized",
    measures: str | Sequence[str] | Mapping[str, Measure] = DEFAULT_MEASURES,
    seeds: int | Iterable[int] = 1,
) -> Sweep:
    """Run a function at every point of a grid of arithmetics, for several seeds, and measure its errors against an exact result.

    Fields that a Model takes as arrays, and promote, go through one `vmap`: a program is compiled for each combination of the other axes,
    and of None, not for each point. A terminal or a notebook shows a line of progress.

    Args:
        fn: Function that JAX can trace, called as fn(*operands, ...) with the arguments that it names among recipe=, op=, target=, model=
            and key=, such as `tcemu.matmul`, `tcemu.gemm` or `lambda a, b, recipe: ...`. It returns one float array.
        over: Axes of the grid, from names to values: "recipe" (names or Recipes), "op" (instructions, as "f16" or "e4m3 wgmma") and
            "target" (GPUs, as "H100"); any field of `Model` (fraction_bits, terms, rounding, alignment, floor, ...); "promote",
            None for never; the fields a, b, unit, split_k, reduction and dtype of a Recipe; and parameters of `operands` or fn, as "k".
        operands: Function of a seed, and of axes that it names, that returns fn's arrays, as `tcemu.study.normal(256, 256, 4096)`; or the
            arrays themselves. float64 is rounded to float32 first, unless JAX's x64 mode is on.
        recipe: Recipe that the axes change, if neither "recipe" nor "op" is an axis.
        exact: "quantized" for the product of two operands as the recipe quantises them, so that errors are those of the sums; "given" for
            the product of the operands unchanged; both in float64. Or a function of the operands, and of axes that it names, that returns
            the exact result.
        measures: Names of `tcemu.study.MEASURES` and "ulps", "mean_ulps", "bits_lost", "most_bits_lost", which are in ulps of the result's
            format; or a dict of functions of (value, exact). Elements that are not finite are left out and counted.
        seeds: Number of seeds, counted from 0, or the seeds themselves.

    Returns:
        A `Sweep`.

    Raises:
        TypeError: An axis would not reach fn, or an argument is of another kind.
        ValueError: A value of an axis is impossible.
        Exception: Whatever fn raises.
    """
    axes, measures_by_name = normalize_axes(over), resolve_measures(measures)
    takes, operand_names = keyword_names(fn), keyword_names(operands) if callable(operands) else frozenset()
    check_axes(axes, takes & frozenset(FUNCTION_ARGUMENTS), (operand_names | takes) - frozenset((*FUNCTION_ARGUMENTS, "seed")))
    if recipe is None and not {"recipe", "op"} & axes.keys():
        raise TypeError("recipe: give the recipe that the axes change, or an axis 'recipe' or 'op'")
    if not (exact in ("quantized", "given") or callable(exact)):
        raise ValueError(f"exact={exact!r}: expected 'quantized', 'given', or a function of the operands")
    chosen = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not chosen:
        raise ValueError("seeds: expected at least one")
    rows: dict[tuple, tuple[Any, ...]] = {}
    programs: dict[Any, Callable] = {}
    recipes: dict[tuple, Recipe] = {}
    line = interactive_line(prod(map(len, axes.values())) * len(chosen))
    for group in group_points(axes, recipe):
        check_needs_no_recipe(group.base, takes)
        program = _get_program(programs, fn, takes, group, exact == "quantized")
        for seed in chosen:
            if line is not None:
                line.count("sweep", len(rows), "points")
            arrays = _draw_operands(operands, operand_names, seed, group.user_axes)
            values, factors = program(arrays, group.traced_fields, np.uint32(seed))
            truth = _exact_result(exact, group, arrays, factors)
            for point, value in zip(group.points, np.asarray(values), strict=True):
                if value.shape != truth.shape:
                    raise ValueError(f"fn gave {list(value.shape)}, and the exact result is {list(truth.shape)}; give exact= a function")
                errors, not_finite = compute_measures(measures_by_name, ARRAY_FORMATS[value.dtype], value.astype(np.float64), truth)
                labels = tuple(axis_label(one) for one in point.values.values())
                rows[point.indices, seed] = (*labels, seed, *errors.values(), not_finite)
                recipes.setdefault(point.indices, group.point_recipe(point))
    if line is not None:
        line.clear()
    order = sorted(rows)
    facts = {indices: recipe_facts(used) for indices, used in recipes.items()}
    return Sweep(
        axes={name: tuple(map(axis_label, values)) for name, values in axes.items()},
        measures=tuple(measures_by_name),
        seeds=chosen,
        rows=tuple(rows[place] for place in order),
        programs=len(programs),
        facts=tuple(facts[indices] for indices, _ in order),
        provenance=make_provenance(recipes.values(), operand_law(operands)),
    )


def operand_law(operands: DrawOperands | tuple[ArrayLike, ...]) -> str:
    """Return the distribution of operands: the repr of `normal` and `uniform`, the name of another function, or a digest of arrays."""
    if isinstance(operands, DrawnOperands):
        return f"{operands!r}: {operands.description}"
    return f"{function_name(operands)}(seed)" if callable(operands) else describe_arrays(operands)


def _get_program(programs: dict[Any, Callable], fn: Callable, takes: frozenset[str], group: PointGroup, quantized: bool) -> Callable:
    """Return a group's compiled function of (operands, traced fields, seed): its results and the factors of the quantised operands."""
    own = tuple(sorted((name, value) for name, value in group.user_axes.items() if name in takes))
    spec = ProgramSpec(fn, takes, group.base, tuple(group.fixed_fields.items()), own, quantized)
    key = (spec, tuple(group.traced_fields))
    if key not in programs:
        programs[key] = _cached_program(spec) if fn in STATELESS else _compile_program(spec)
    return programs[key]


class ProgramSpec(NamedTuple):
    """The static facts of a program."""

    fn: Callable
    takes: frozenset[str]  # names of the parameters that fn takes
    base: Recipe
    fixed_fields: tuple[tuple[str, Any], ...]
    user_axes: tuple[tuple[str, Any], ...]  # the user's axes that fn takes
    quantized: bool  # whether it returns the factors of the quantised operands


def _compile_program(spec: ProgramSpec) -> Callable:
    fn, takes, base = spec.fn, spec.takes, spec.base

    def compute_points(operands: tuple[Array, ...], traced: dict[str, Array], seed: Array) -> tuple[Array, tuple[list[Array], ...]]:
        key = jax.random.key(seed) if base.is_stochastic or "key" in takes else None

        def compute(fields: dict[str, Any]) -> Array:
            used = base.what_if(**dict(spec.fixed_fields), **fields)
            ready = {"recipe": used, "op": used.op, "target": used.target, "model": used.arithmetic, "key": key}
            return fn(*operands, **dict(spec.user_axes), **{name: value for name, value in ready.items() if name in takes})

        values = jax.vmap(compute)(traced) if traced else compute({})[None]
        return values, _quantized_factors(base, operands, key) if spec.quantized else ()

    return jit_wide_vectors()(compute_points)


_cached_program = lru_cache(maxsize=64)(_compile_program)  # equal sweeps of tcemu's own products share their programs


def _quantized_factors(recipe: Recipe, operands: tuple[Array, ...], key: Array | None) -> tuple[list[Array], ...]:
    """Return the factors of quantised A [..., M, K] and B, with K last."""
    if len(operands) != 2 or any(x.ndim < 2 for x in operands):
        raise ValueError(
            f"exact='quantized' is of two matrices, and operands gave {[list(x.shape) for x in operands]}; give exact= a function"
        )
    keys = product_keys(key)
    rows = pruned_operand(recipe, jnp.asarray(operands[0])), jnp.swapaxes(operands[1], -1, -2)
    schemes = zip(recipe.schemes, rows, (keys.a, keys.b), strict=True)
    return tuple(exact_factors(scheme, quantize(scheme, x, key=operand_key)) for scheme, x, operand_key in schemes)


def _draw_operands(
    operands: DrawOperands | tuple[ArrayLike, ...], drawn: frozenset[str], seed: int, own: Mapping[str, Any]
) -> tuple[Any, ...]:
    arrays = operands(seed, **{name: value for name, value in own.items() if name in drawn}) if callable(operands) else operands
    if not isinstance(arrays, tuple):
        raise TypeError(f"operands: got {type(arrays).__name__}; expected a tuple of arrays")
    single = jax.dtypes.canonicalize_dtype(np.float64)
    return tuple(x.astype(single) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x for x in arrays)


def _exact_result(exact: str | Callable, group: PointGroup, operands: tuple[Any, ...], factors: tuple[list[Array], ...]) -> np.ndarray:
    if callable(exact):
        takes = keyword_names(exact)
        return np.asarray(exact(*operands, **{name: value for name, value in group.user_axes.items() if name in takes}), np.float64)
    if exact == "given":
        a, b = (np.asarray(x, np.float64) for x in operands)
    else:
        a, b = exact_values(factors[0]), exact_values(factors[1]).swapaxes(-1, -2)
    return Reference.from_arrays(a, b, None).compute_rows(0, a.shape[-2])[0]


@dataclass(frozen=True, repr=False)
class Sweep(SavedResult):
    """The results of a sweep, with a row for each point of the grid and each seed.

    str() is a table of means over the seeds, `plot()` a picture, `records()` is what pandas takes, `summary()` has means and intervals over
    the seeds, and `from_json` reads what `to_json` writes.

    Attributes:
        axes: Values of each axis, as tables show them.
        measures: Names of the errors.
        seeds: The seeds.
        rows: Values of the axes, the seed, the errors, and the number of elements that were not finite.
        programs: Number of programs that were compiled.
        facts: For each row, the values of `RECIPE_COLUMNS`: GPU, instruction, changes of the arithmetic, evidence.
        provenance: Versions, the evidence of each arithmetic, and the distribution of the operands.
    """

    saved_as = "tcemu sweep", 2

    axes: dict[str, tuple[Any, ...]]
    measures: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: tuple[tuple[Any, ...], ...]
    programs: int
    facts: tuple[tuple[str | None, ...], ...] = ()
    provenance: Provenance = field(default_factory=Provenance)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        grid = " x ".join(f"{len(values)} {name}" for name, values in self.axes.items())
        return f"<Sweep of {grid}, {len(self.seeds)} seed{'s' if len(self.seeds) != 1 else ''}: {len(self)} rows>"

    @property
    def column_names(self) -> tuple[str, ...]:
        return (*self.axes, "seed", *self.measures, "not_finite")

    @property
    def fact_columns(self) -> tuple[str, ...]:
        """The columns of `facts` in tables: those of `RECIPE_COLUMNS` that are no axis and no error."""
        return tuple(name for name in RECIPE_COLUMNS if name not in self.column_names) if self.facts else ()

    def _row_facts(self, number: int) -> list[str | None]:
        return [self.facts[number][RECIPE_COLUMNS.index(name)] for name in self.fact_columns]

    def table(self) -> Table:
        """Return a table with a row for each point and seed."""
        rows = tuple((*row, *self._row_facts(number)) for number, row in enumerate(self.rows))
        facts = {"programs": self.programs, "provenance": to_plain(self.provenance)}
        return Table(repr(self)[1:-1], (*self.column_names, *self.fact_columns), rows, facts)

    def summary(self) -> Table:
        """Return a table with a row for each point and error: mean, interval and standard deviation over the seeds.

        The interval is that of `INTERVAL_METHOD`; with fewer than two seeds, it and the deviation are None.
        """
        rows, number = [], 0
        for values, group in self._rows_by_point():
            for place, name in enumerate(self.measures, len(values) + 1):
                errors = [row[place] for row in group]
                found = mean_interval(errors)
                spread = (None, None, None) if len(errors) < 2 else (found.low, found.high, stdev(errors))
                rows.append((*values, name, len(errors), found.mean, *spread, *self._row_facts(number)))
            number += len(group)
        heads = (*self.axes, "error", "seeds", "mean", "low", "high", "deviation", *self.fact_columns)
        return Table(f"Means of {repr(self)[1:-1]}", heads, tuple(rows), {"interval": INTERVAL_METHOD})

    @classmethod
    def from_members(cls, data: dict[str, Any], codecs: Codecs | None = None) -> Self:
        found = super().from_members(data, codecs)
        count, kinds = len(found.axes), (int, *[float] * len(found.measures), int)
        rows = [(*row[:count], *from_plain("rows", tuple[kinds], list(row[count:]))) for row in found.rows]
        if [row[: count + 1] for row in rows] != [(*at, seed) for at in product(*found.axes.values()) for seed in sorted(found.seeds)]:
            raise DamagedFile("rows: expected one for each point of the axes and each seed, in this order")
        if len(found.facts) not in (0, len(rows)) or any(len(row) != len(RECIPE_COLUMNS) for row in found.facts):
            raise DamagedFile(f"facts: expected none, or {len(RECIPE_COLUMNS)} values for each row")
        return replace(found, rows=tuple(rows))

    def column(self, name: str, **at: Any) -> tuple[Any, ...]:
        """Return the values of one column in the rows whose axes have given values, as column("normwise", fraction_bits=13).

        Args:
            name: Name of the column.
            **at: Values of axes.

        Returns:
            The values in the order of the rows.

        Raises:
            KeyError: There is no such column or axis, or no row has these values.
        """
        if unknown := [n for n in (name, *at) if n not in self.column_names]:
            raise KeyError(f"{unknown[0]!r} is none of {', '.join(self.column_names)}")
        expected = {self.column_names.index(axis): axis_label(value) for axis, value in at.items()}
        values = tuple(row[self.column_names.index(name)] for row in self.rows if all(row[i] == value for i, value in expected.items()))
        if not values:
            raise KeyError(f"no row has {at}")
        return values

    def __str__(self) -> str:
        """Return a line for each point: each error's mean over the seeds, and the first error's standard deviation over several seeds."""
        several = len(self.seeds) > 1
        cells, number = [], 0
        shown = [name for name in ("target", "evidence") if name in self.fact_columns]
        for values, rows in self._rows_by_point():
            *errors, not_finite = zip(*(row[len(values) + 1 :] for row in rows), strict=True)
            means, spread = [f"{fmean(one):.3g}" for one in errors], [f"{stdev(one):.1g}" for one in errors[:several]]
            facts = dict(zip(self.fact_columns, self._row_facts(number), strict=True))
            known = [facts[name] or "-" for name in shown]
            cells.append([*map(str, values), *known, *means[:1], *spread, *means[1:], str(sum(not_finite))])
            number += len(rows)
        heads = [*self.axes, *shown, *self.measures[:1], *["deviation"] * several, *self.measures[1:], "not finite"]
        if all(row[-1] == "0" for row in cells):
            heads, cells = heads[:-1], [row[:-1] for row in cells]
        lines = table_lines([head.replace("_", " ") for head in heads], cells, left=tuple(range(len(self.axes) + len(shown))))
        return "\n".join([*lines, *(line for sentence in unit_sentences(self.facts) for line in wrap_lines(sentence))])

    def plot(self, measure: str | None = None, axis: str | None = None) -> Figure:
        """Draw an error over one axis: a line for each combination of the other axes, with a band over the seeds.

        Args:
            measure: Name of the error. None: the first.
            axis: Name of the axis. None: the first with several numbers; without such an axis, marks beside names are drawn.

        Returns:
            A matplotlib Figure.

        Raises:
            KeyError: There is no such measure or axis.
            ImportError: matplotlib is not installed.
        """
        measure = self.measures[0] if measure is None else measure
        if measure not in self.measures or axis not in (None, *self.axes):
            raise KeyError(
                f"measure={measure!r}, axis={axis!r}: expected one of {', '.join(self.measures)}, axis one of {', '.join(self.axes)}"
            )
        numeric = [name for name, values in self.axes.items() if sum(_is_number(value) for value in values) > 1]
        axis = axis or (numeric[0] if numeric else None)
        series: dict[str, list[tuple[float, Sequence[float]]]] = {}
        place, names = self.column_names.index(measure), list(self.axes)
        marks: dict[str, Sequence[float]] = {}
        for values, rows in self._rows_by_point():
            errors = [row[place] for row in rows]
            others = ", ".join(_axis_text(name, value) for name, value in zip(names, values, strict=True) if name != axis)
            x = None if axis is None else values[names.index(axis)]
            if x is not None and _is_number(x):
                series.setdefault(others, []).append((x, errors))
            elif axis is None:
                marks[others] = errors
        shown, several = measure.replace("_", " "), len(self.seeds) > 1
        note = self._plot_note(measure, "bars" if axis is None else "bands")
        over = ", ".join(name.replace("_", " ") for name in ([axis] if axis else self.axes))
        title = f"{shown[0].upper()}{shown[1:]} over {over}" + (f", {len(self.seeds)} seeds" if several else "")
        if axis is not None:
            return line_plot(series, title=title, x_label=axis.replace("_", " "), y_label=shown, note=note)
        return dot_plot({shown: marks}, title=title, label=shown, note=note)

    def _plot_note(self, measure: str, spread: str) -> str:
        """Say what the picture's figures are: the definition, the spread over seeds, the GPUs with their evidence, and the operands."""
        definition = MEASURE_DEFINITIONS.get(measure)
        note = [f"{measure.replace('_', ' ').capitalize()}: {definition}." if definition else ""]
        note += [f"Means over {len(self.seeds)} seeds; {spread} from the least to the greatest."] if len(self.seeds) > 1 else []
        columns = [RECIPE_COLUMNS.index(name) for name in ("target", "evidence")]
        known = dict.fromkeys(tuple(facts[column] for column in columns) for facts in self.facts)
        note += [f"{target}: {evidence}." for target, evidence in known if target]
        note += [f"\nOperands: {self.provenance.inputs}"] if self.provenance.inputs else []
        return " ".join(filter(None, note)).replace(" \n", "\n")

    def _rows_by_point(self) -> Iterator[tuple[tuple[Any, ...], list[tuple[Any, ...]]]]:
        """Yield the values of the axes and the rows of all seeds, point by point."""
        for values, rows in groupby(self.rows, key=lambda row: row[: len(self.axes)]):
            yield values, list(rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _axis_text(name: str, value: Any) -> str:
    return str(value) if name in ("recipe", "op", "target") else f"{name.replace('_', ' ')} {'never' if value is None else value}"


# ---- the grid

TRACED_FIELDS = (*LIMITS, "promote")  # fields that a recipe takes as arrays
MODEL_FIELDS = tuple(one.name for one in fields(Model))
RECIPE_FIELDS = ("a", "b", "split_k", "reduction", "dtype")  # other fields that `Recipe.replace` changes
INSTRUCTION_AXES = ("recipe", "op", "target")
FUNCTION_ARGUMENTS = ("recipe", "op", "target", "model", "key")  # arguments that a function may take by name


@dataclass(frozen=True)
class GridPoint:
    """One point of a grid."""

    indices: tuple[int, ...]  # index of each axis's value
    values: dict[str, Any]  # the values as they were given


@dataclass(frozen=True)
class PointGroup:
    """Points that one compiled program computes."""

    base: Recipe  # recipe that they share, without the swept fields
    fixed_fields: dict[str, Any]  # fields that they share
    traced_fields: dict[str, np.ndarray]  # for each field that the program takes, a value for each point, int32
    user_axes: dict[str, Any]  # values of the user's own axes
    points: tuple[GridPoint, ...]

    def point_recipe(self, point: GridPoint) -> Recipe:
        """Return the recipe of one point, with its values of the swept fields."""
        return self.base.what_if(**self.fixed_fields, **{name: point.values[name] for name in self.traced_fields})


def normalize_axes(over: Mapping[str, Iterable[Any] | Any]) -> dict[str, tuple[Any, ...]]:
    """Return the axes, each with a tuple of values. Raises ValueError for an axis without values, or for no axis."""
    single = (str, bytes, int, float, Recipe, Instruction)
    axes = {name: (values,) if isinstance(values, single) or values is None else tuple(values) for name, values in over.items()}
    if empty := [name for name, values in axes.items() if not values]:
        raise ValueError(f"over: {empty[0]} has no values")
    if not axes:
        raise ValueError("over: got no axes; give a dict from names to values, as {'fraction_bits': range(8, 24)}")
    plain = lambda value: value.item() if isinstance(value, np.generic) or getattr(value, "ndim", None) == 0 else value
    return {name: tuple(plain(value) for value in values) for name, values in axes.items()}


def check_axes(axes: Mapping[str, Any], takes: frozenset[str], user_axes: frozenset[str]) -> None:
    """Raise TypeError for an unknown axis, or for one that would not reach the function.

    Args:
        axes: Axes by name.
        takes: Names of `FUNCTION_ARGUMENTS` that the function takes.
        user_axes: Parameters of the function that draws operands, and the function's other parameters.
    """
    if not takes & {"recipe", "op", "target", "model"}:
        raise TypeError("fn: it takes none of recipe=, op=, target= and model=, by which a sweep tells it what to compute")
    for name in axes:
        wants = ("recipe",) if name in (*RECIPE_FIELDS, "promote", "recipe") else ("recipe", "model") if name in MODEL_FIELDS else ()
        wants = ("recipe", name) if name in ("op", "target") else wants
        if wants and not takes & set(wants):
            raise TypeError(f"over: {name} would not reach fn, which does not take {'= or '.join(wants)}=")
        if not wants and name not in user_axes:
            known = ", ".join((*INSTRUCTION_AXES, *MODEL_FIELDS, "promote", *RECIPE_FIELDS))
            raise TypeError(f"over: {name!r} is neither one of {known}, nor a parameter of operands")


def check_needs_no_recipe(base: Recipe, takes: frozenset[str]) -> None:
    """Raise TypeError if a function takes no recipe and this one does more than an instruction's sums."""
    plain = base.a == base.b == Quantizer() and base.promote is None and base.split_k == 1 and base.dtype in (F32, base.op.d)
    if "recipe" not in takes and not plain:
        raise TypeError(
            f"recipe: {base.name or base.op} scales operands, promotes sums or rounds results, and fn does not take recipe=; give fn the "
            "recipe, or an axis 'op'"
        )


def group_points(axes: Mapping[str, tuple[Any, ...]], default_recipe: Recipe | str | None) -> Iterator[PointGroup]:
    """Yield the points in the order of the grid, grouped by the program that computes them.

    Raises as `Recipe` and `get_recipe` for the first impossible point.
    """
    several = {name for name, values in axes.items() if name in TRACED_FIELDS and len(set(values) - {None}) > 1}
    collected: dict[tuple, list[GridPoint]] = {}
    for place in product(*(range(len(values)) for values in axes.values())):
        point = GridPoint(place, {name: values[i] for i, (name, values) in zip(place, axes.items(), strict=True)})
        swept = tuple(name for name in axes if name in several and point.values[name] is not None)
        fixed = tuple(i for i, name in zip(place, axes, strict=True) if name not in swept)
        collected.setdefault((swept, fixed), []).append(point)
    for (swept, _), points in collected.items():
        static = {name: value for name, value in points[0].values.items() if name not in swept}
        base = _base_recipe(static, default_recipe)
        known = {name: value for name, value in static.items() if name in (*MODEL_FIELDS, "promote")}
        for point in points:
            base.what_if(**known, **{name: point.values[name] for name in swept})  # raises for impossible values, which would be NaN later
        traced = {name: np.array([_traced_value(name, point.values[name]) for point in points], np.int32) for name in swept}
        own = {name: value for name, value in static.items() if name not in (*INSTRUCTION_AXES, *MODEL_FIELDS, "promote", *RECIPE_FIELDS)}
        yield PointGroup(base, known, traced, own, tuple(points))


def _traced_value(name: str, value: Any) -> int:
    """Return a field's value as a number: a rounding by its number."""
    return ROUNDING_MODES.index(value) if name in ROUNDING_FIELDS and isinstance(value, str) else value


def _base_recipe(static: Mapping[str, Any], default_recipe: Recipe | str | None) -> Recipe:
    """Return the recipe of some points before their arithmetic is changed."""
    target = static.get("target")
    if "op" in static:
        base = Recipe(static["op"], target or DEFAULT_TARGET, name=str(static["op"]))
    else:
        chosen = static.get("recipe", default_recipe)
        if isinstance(chosen, str) and target is not None:
            base = get_recipe(chosen, target)
        else:
            base = as_recipe(chosen)
            base = base if target is None else base.replace(target=target)
    changes = {name: static[name] for name in RECIPE_FIELDS if name in static}
    return base.replace(**changes) if changes else base


def axis_label(value: Any) -> Any:
    """Return a value of an axis as tables show it."""
    if isinstance(value, Recipe):
        return value.name or str(value.op)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def keyword_names(fn: Callable) -> frozenset[str]:
    """Return the names of the parameters that a function takes by keyword."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return frozenset(name for name, parameter in inspect.signature(fn).parameters.items() if parameter.kind in kinds)


# ---- operands

OperandPair = tuple[np.ndarray, np.ndarray]
LAWS: dict[str, tuple[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]]] = {
    "normal": ("N(0, 1) in float32", lambda rng, shape: rng.standard_normal(shape, np.float32)),
    "uniform": ("uniform from 0 to 1 in float32", lambda rng, shape: rng.random(shape, np.float32)),
}


@dataclass(frozen=True)
class DrawnOperands:
    """A function of a seed that draws operands from a distribution; `normal` and `uniform` return it.

    Attributes:
        law: Name of the distribution, one of LAWS.
        m: Rows of A.
        n: Columns of B.
        k: Columns of A and rows of B.
    """

    law: str
    m: int
    n: int
    k: int

    def __post_init__(self):
        for name in "mnk":
            size = getattr(self, name)
            if not isinstance(size, int | np.integer) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}: got {size!r}; expected an integer from 1")

    def __call__(self, seed: int) -> OperandPair:
        """Return A [m, k] and B [k, n] for a seed."""
        rng, (_, draw) = np.random.default_rng(seed), LAWS[self.law]
        return draw(rng, (self.m, self.k)), draw(rng, (self.k, self.n))

    @property
    def description(self) -> str:
        """The distribution in words."""
        return f"A [m, k], then B [k, n], {LAWS[self.law][0]}, by numpy.random.default_rng(seed)"

    def __repr__(self) -> str:
        return f"{self.law}(m={self.m}, n={self.n}, k={self.k})"


def normal(m: int, n: int, k: int) -> DrawnOperands:
    """Return a function of a seed that draws standard normal operands.

    Args:
        m: Rows of A.
        n: Columns of B.
        k: Columns of A and rows of B.

    Returns:
        A function from a seed to A [m, k] and B [k, n], float32. NumPy draws them: the same numbers on every machine.
    """
    return DrawnOperands("normal", m, n, k)


def uniform(m: int, n: int, k: int) -> DrawnOperands:
    """Return a function of a seed that draws operands uniform from 0 to 1, so that nothing cancels in a sum.

    Args:
        m: Rows of A.
        n: Columns of B.
        k: Columns of A and rows of B.

    Returns:
        A function from a seed to A [m, k] and B [k, n], float32. NumPy draws them: the same numbers on every machine.
    """
    return DrawnOperands("uniform", m, n, k)
