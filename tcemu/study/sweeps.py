"""`sweep`: a product, or any function of a recipe, over a grid of arithmetics and seeds, with named errors against an exact product."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from tcemu.compilation import wide_vectors
from tcemu.formats import ARRAY_FORMATS
from tcemu.linalg.arguments import product_keys
from tcemu.linalg.gemm import gemm
from tcemu.linalg.matmul import matmul
from tcemu.linalg.recipes import Recipe
from tcemu.plots import dots, lines
from tcemu.quantize.operands import exact_factors, exact_values, quantize
from tcemu.results import Result, Table
from tcemu.study.accuracy import Reference
from tcemu.study.grid import GIVEN, Group, axes_of, check_axes, check_reach, groups, label, parameters
from tcemu.study.measures import USUAL, Measure, checked, measured
from tcemu.text import columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[..., tuple[ArrayLike, ...]]
STATELESS = (matmul, gemm)  # which do the same whenever they are traced; of other functions nobody knows


def sweep(
    fn: Callable[..., ArrayLike],
    over: Mapping[str, Iterable[Any] | Any],
    *,
    operands: Draw | tuple[ArrayLike, ...],
    recipe: Recipe | str | None = None,
    exact: str | Callable[..., ArrayLike] = "quantized",
    measures: str | Sequence[str] | Mapping[str, Measure] = USUAL,
    seeds: int | Iterable[int] = 1,
) -> Sweep:
    """Runs a function at every point of a grid of arithmetics, for several seeds, and measures how far it is from the exact result.

    fn: called as fn(*operands, ...) with what it names among recipe=, op=, target=, model= and key=; `tcemu.matmul` and `tcemu.gemm` are
    such, and so is `lambda a, b, recipe: ...`. It must be one that JAX can trace, and gives one float array.
    over: the axes of the grid, from names to values:
        "recipe" (names or Recipes), "op" (instructions, as "f16" or "e4m3 wgmma"), "target" (GPUs, as "H100");
        any field of `Model`: fraction_bits, terms, rounding, alignment, floor, result_bits, ...; "promote", None for never;
        of a Recipe: a, b, unit, split_k, reduction, out; and parameters of `operands` or of fn, as "k".
    operands: a function of a seed, and of axes that it names, that gives fn's arrays, as `tcemu.study.normal(256, 256, 4096)`; or the
    arrays themselves. float64 is rounded to float32 first, unless JAX's x64 mode is on.
    recipe: what the axes change, where neither "recipe" nor "op" is an axis.
    exact: "quantized", the product of two operands as the recipe quantises them, so that errors are those of the sums; "given", the product
    of the operands as they are; both in float64. Or a function of the operands, with what it names among axes, whose result is taken.
    measures: names of `tcemu.study.MEASURES` and "ulps", "mean_ulps", "bits_lost", "most_bits_lost", which are of the result's format; or a
    dict of functions of (value, exact). Elements that are not finite are left out and counted.
    seeds: how many, from 0 on, or which.

    Fields that a Model takes as arrays, and promote, go through one `vmap`: a program is compiled for each combination of all else, and of
    None, not for each point. Returns a `Sweep`.
    Raises TypeError for an axis that would not reach fn, ValueError for values that cannot be, and what fn raises.
    """
    axes, named = axes_of(over), checked(measures)
    takes, drawn = parameters(fn), parameters(operands) if callable(operands) else frozenset()
    check_axes(axes, takes & frozenset(GIVEN), (drawn | takes) - frozenset((*GIVEN, "seed")))
    if recipe is None and not {"recipe", "op"} & axes.keys():
        raise TypeError("recipe: give the recipe that the axes change, or an axis 'recipe' or 'op'")
    if not (exact in ("quantized", "given") or callable(exact)):
        raise ValueError(f"exact={exact!r}: wanted 'quantized', 'given', or a function of the operands")
    chosen = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not chosen:
        raise ValueError("seeds: wanted at least one")
    rows: dict[tuple, tuple[Any, ...]] = {}
    programs: dict[Any, Callable] = {}
    for group in groups(axes, recipe):
        check_reach(group.base, takes)
        program = _program(programs, fn, takes, group, exact == "quantized")
        for seed in chosen:
            given = _operands(operands, drawn, seed, group.own)
            values, factors = program(given, group.traced, np.uint32(seed))
            truth = _exact(exact, group, given, factors)
            for point, value in zip(group.points, np.asarray(values), strict=True):
                if value.shape != truth.shape:
                    raise ValueError(f"fn gave {list(value.shape)}, and the exact result is {list(truth.shape)}; give exact= a function")
                found, lost = measured(named, ARRAY_FORMATS[value.dtype], value.astype(np.float64), truth)
                labels = tuple(label(one) for one in point.values.values())
                rows[point.place, seed] = (*labels, seed, *found.values(), lost)
    ordered = tuple(row for _, row in sorted(rows.items(), key=lambda pair: pair[0]))
    return Sweep({name: tuple(map(label, values)) for name, values in axes.items()}, tuple(named), chosen, ordered, len(programs))


def _program(programs: dict[Any, Callable], fn: Callable, takes: frozenset[str], group: Group, quantized: bool) -> Callable:
    """The compiled function of (operands, traced fields, seed) for a group: all its points, and what the quantised operands multiply to."""
    own = tuple(sorted((name, value) for name, value in group.own.items() if name in takes))
    wanted = Wanted(fn, takes, group.base, tuple(group.known.items()), own, quantized)
    same = (wanted, tuple(group.traced))
    if same not in programs:
        programs[same] = _kept(wanted) if fn in STATELESS else _compiled(wanted)
    return programs[same]


class Wanted(NamedTuple):
    """What a program is made of. own: the user's axes that the function takes; quantized: whether it gives the factors of the operands."""

    fn: Callable
    takes: frozenset[str]
    base: Recipe
    known: tuple[tuple[str, Any], ...]
    own: tuple[tuple[str, Any], ...]
    quantized: bool


def _compiled(wanted: Wanted) -> Callable:
    fn, takes, base = wanted.fn, wanted.takes, wanted.base

    def run(operands: tuple[Array, ...], traced: dict[str, Array], seed: Array) -> tuple[Array, tuple[list[Array], ...]]:
        key = jax.random.key(seed) if base.stochastic or "key" in takes else None

        def at(fields: dict[str, Any]) -> Array:
            used = base.what_if(**dict(wanted.known), **fields)
            ready = {"recipe": used, "op": used.op, "target": used.target, "model": used.arithmetic, "key": key}
            return fn(*operands, **dict(wanted.own), **{name: value for name, value in ready.items() if name in takes})

        values = jax.vmap(at)(traced) if traced else at({})[None]
        return values, _factors(base, operands, key) if wanted.quantized else ()

    return wide_vectors()(run)


_kept = lru_cache(maxsize=64)(_compiled)  # equal sweeps of tcemu's own products share their programs


def _factors(recipe: Recipe, operands: tuple[Array, ...], key: Array | None) -> tuple[list[Array], ...]:
    """Of A [..., M, K] and of B, with K last, the factors of what they are quantised to."""
    if len(operands) != 2 or any(x.ndim < 2 for x in operands):
        raise ValueError(
            f"exact='quantized' is of two matrices, and operands gave {[list(x.shape) for x in operands]}; give exact= a function"
        )
    keys = product_keys(key)
    sides = zip(recipe.schemes, (operands[0], jnp.swapaxes(operands[1], -1, -2)), (keys.a, keys.b), strict=True)
    return tuple(exact_factors(scheme, quantize(scheme, x, key=one)) for scheme, x, one in sides)


def _operands(operands: Draw | tuple[ArrayLike, ...], drawn: frozenset[str], seed: int, own: Mapping[str, Any]) -> tuple[Any, ...]:
    given = operands(seed, **{name: value for name, value in own.items() if name in drawn}) if callable(operands) else operands
    if not isinstance(given, tuple):
        raise TypeError(f"operands: got {type(given).__name__}; wanted a tuple of arrays")
    single = jax.dtypes.canonicalize_dtype(np.float64)
    return tuple(x.astype(single) if isinstance(x, np.ndarray) and x.dtype == np.float64 else x for x in given)


def _exact(exact: str | Callable, group: Group, operands: tuple[Any, ...], factors: tuple[list[Array], ...]) -> np.ndarray:
    if callable(exact):
        takes = parameters(exact)
        return np.asarray(exact(*operands, **{name: value for name, value in group.own.items() if name in takes}), np.float64)
    if exact == "given":
        a, b = (np.asarray(x, np.float64) for x in operands)
    else:
        a, b = exact_values(factors[0]), exact_values(factors[1]).swapaxes(-1, -2)
    return Reference.of(a, b, None).rows(0, a.shape[-2])[0]


@dataclass(frozen=True, repr=False)
class Sweep(Result):
    """What a sweep found: a row for each point of the grid and each seed. str() is a table of means over the seeds, `plot()` a picture.

    axes: the values of each axis, as tables show them. measures: the names of the errors. seeds: which. rows: the values of the axes, the
    seed, the errors, and how many elements were not finite. programs: how many were compiled.
    """

    axes: dict[str, tuple[Any, ...]]
    measures: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: tuple[tuple[Any, ...], ...]
    programs: int

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        grid = " x ".join(f"{len(values)} {name}" for name, values in self.axes.items())
        return f"<Sweep of {grid}, {len(self.seeds)} seed{'s' if len(self.seeds) != 1 else ''}: {len(self)} rows>"

    @property
    def heads(self) -> tuple[str, ...]:
        return (*self.axes, "seed", *self.measures, "not_finite")

    def table(self) -> Table:
        """A row for each point and seed."""
        return Table(repr(self)[1:-1], self.heads, self.rows, {"programs": self.programs})

    def column(self, name: str, **at: Any) -> tuple[Any, ...]:
        """The values of one column in the rows where axes have the values `at`, as column("normwise", fraction_bits=13).

        Raises KeyError for another name, and where no row fits.
        """
        if unknown := [one for one in (name, *at) if one not in self.heads]:
            raise KeyError(f"{unknown[0]!r} is none of {', '.join(self.heads)}")
        wanted = {self.heads.index(axis): label(value) for axis, value in at.items()}
        found = tuple(row[self.heads.index(name)] for row in self.rows if all(row[i] == value for i, value in wanted.items()))
        if not found:
            raise KeyError(f"no row has {at}")
        return found

    def __str__(self) -> str:
        """A line for each point: the mean of each error over the seeds and, of several, the standard deviation of the first one."""
        several = len(self.seeds) > 1
        cells = []
        for values, rows in self._points():
            errors = [[row[len(values) + 1 + i] for row in rows] for i in range(len(self.measures) + 1)]
            cells.append([*map(str, values), *(f"{fmean(one):.3g}" for one in errors[:-1]), str(sum(errors[-1]))])
            cells[-1][len(values) + 1 : len(values) + 1] = [f"{stdev(errors[0]):.1g}"] if several else []
        heads = [*self.axes, *self.measures, "not finite"]
        heads[len(self.axes) + 1 : len(self.axes) + 1] = ["deviation"] if several else []
        if all(row[-1] == "0" for row in cells):
            heads, cells = heads[:-1], [row[:-1] for row in cells]
        return "\n".join(columns([head.replace("_", " ") for head in heads], cells, left=tuple(range(len(self.axes)))))

    def plot(self, measure: str | None = None, along: str | None = None) -> Figure:
        """An error over one axis as a matplotlib Figure: a line for each combination of the others, with a band over the seeds.

        measure: which; None: the first. along: the axis; None: the first with several numbers. Without such an axis, marks beside names.
        Raises KeyError for a measure or an axis that there is not, ImportError if matplotlib is not installed.
        """
        measure = self.measures[0] if measure is None else measure
        if measure not in self.measures or along not in (None, *self.axes):
            raise KeyError(
                f"measure={measure!r}, along={along!r}: wanted one of {', '.join(self.measures)}, along one of {', '.join(self.axes)}"
            )
        numeric = [name for name, values in self.axes.items() if sum(_is_number(value) for value in values) > 1]
        along = along or (numeric[0] if numeric else None)
        series: dict[str, list[tuple[float, float, float, float]]] = {}
        place, names = self.heads.index(measure), list(self.axes)
        marks: dict[str, float] = {}
        for values, rows in self._points():
            errors = [row[place] for row in rows]
            others = ", ".join(_said(name, value) for name, value in zip(names, values, strict=True) if name != along)
            x = None if along is None else values[names.index(along)]
            if x is not None and _is_number(x):
                series.setdefault(others, []).append((x, fmean(errors), min(errors), max(errors)))
            elif along is None:
                marks[others] = fmean(errors)
        shown = measure.replace("_", " ")
        return dots(list(marks), {shown: marks}, shown) if along is None else lines(series, along.replace("_", " "), shown)

    def _points(self) -> Iterator[tuple[tuple[Any, ...], list[tuple[Any, ...]]]]:
        """The values of the axes, and the rows of all seeds, point by point."""
        for values, rows in groupby(self.rows, key=lambda row: row[: len(self.axes)]):
            yield values, list(rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _said(name: str, value: Any) -> str:
    return str(value) if name in ("recipe", "op", "target") else f"{name.replace('_', ' ')} {'never' if value is None else value}"
