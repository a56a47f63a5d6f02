"""What every result can do besides print itself: `records()`, `to_json()` and a table in a notebook. `Table` is the value behind it."""

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from html import escape
from math import inf, isfinite, isnan
from typing import Any, NamedTuple

import numpy as np

MOST_ROWS = 200  # that a notebook shows
Scalar = str | int | float | bool | None
Record = dict[str, Scalar]


class Table(NamedTuple):
    """A table of plain values. title: what it is of, in words; rows: one value for each of `heads`; facts: what is said of the whole."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    facts: Mapping[str, Any] = {}

    def records(self) -> list[Record]:
        """A dict for each row, of Python's own scalars."""
        return [dict(zip(self.heads, map(scalar, row), strict=True)) for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values: the title, the facts, and the rows as "records"."""
        return {"title": self.title, **self.facts, "records": self.records()}

    def html(self) -> str:
        """A plain table for a notebook: no script and no style of its own, and all text escaped."""
        heads = "".join(f"<th>{escape(head.replace('_', ' '))}</th>" for head in self.heads)
        rows = ["".join(f"<td>{escape(_shown(scalar(value)))}</td>" for value in row) for row in self.rows[:MOST_ROWS]]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        facts = [
            f"{name.replace('_', ' ')}: {_shown(value)}" for name, value in self.facts.items() if not isinstance(value, Mapping | list)
        ]
        more = [f"{len(self.rows) - MOST_ROWS:,} more rows; records() has all"] if len(self.rows) > MOST_ROWS else []
        notes = "".join(f"<div>{escape(line)}</div>" for line in facts + more)
        return f"<table><caption>{escape(self.title)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{notes}"


class Result:
    """What a result of tcemu can do besides print itself. A class of results says what its table is."""

    def table(self) -> Table:
        """The result as one table."""
        raise NotImplementedError

    def records(self) -> list[Record]:
        """A flat dict for each row, of Python's own scalars: what pandas.DataFrame, polars.DataFrame and csv.DictWriter take."""
        return self.table().records()

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return self.table().to_dict()

    def to_json(self, indent: int | None = None) -> str:
        """`to_dict()` as strict JSON. Numbers that JSON does not have are strings, which float() reads: "nan", "+inf", "-inf"."""
        return to_json(self.to_dict(), indent)

    def _repr_html_(self) -> str:
        return self.table().html()


def scalar(value: Any) -> Scalar:
    """One value as Python's own: NumPy's and JAX's scalars become numbers, fractions floats, and what has no number its text."""
    if isinstance(value, np.generic) or (hasattr(value, "ndim") and value.ndim == 0):
        value = value.item()
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if not isinstance(value, Fraction):
        return str(value)
    try:
        return float(value)
    except OverflowError:
        return inf if value > 0 else -inf


def to_json(value: Any, indent: int | None = None) -> str:
    """Plain values as strict JSON; see `Result.to_json`."""
    return json.dumps(_strict(value), indent=indent, allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _strict(one) for name, one in value.items()}
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        return [_strict(one) for one in value]
    value = scalar(value)
    if isinstance(value, float) and not isfinite(value):
        return "nan" if isnan(value) else "+inf" if value > 0 else "-inf"
    return value


def _shown(value: Scalar) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else str(value)
