"""Base class of results, with `records()`, `to_json()` and a table for notebooks. `Table` is the value behind them."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from fractions import Fraction
from html import escape
from math import inf, isfinite, isnan
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from tcemu.base.plain_values import Codecs, field_types, from_plain, to_plain
from tcemu.base.saved_files import DamagedFile, check_members, check_saved, parse_json
from tcemu.base.text import table_lines

MAX_HTML_ROWS = 200  # rows of a table that a notebook shows
Scalar = str | int | float | bool | None
Record = dict[str, Scalar]


class Table(NamedTuple):
    """A table of plain values."""

    title: str  # description of the rows
    columns: tuple[str, ...]  # names of the columns
    rows: tuple[tuple[Any, ...], ...]  # one value per column
    facts: Mapping[str, Any] = {}  # values that hold for the whole table, by name

    def records(self) -> list[Record]:
        """Return a dict of Python scalars for each row, with the column names as keys."""
        return [dict(zip(self.columns, map(to_scalar, row), strict=True)) for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        """Return the table as plain values: the title, the facts under their names, and the rows as "records"."""
        return {"title": self.title, **self.facts, "records": self.records()}

    def text(self) -> str:
        """Return the table as aligned text, title first; columns of numbers are right-aligned. The facts are left out."""
        rows = [[to_scalar(value) for value in row] for row in self.rows]
        is_number = lambda value: value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        left = [n for n in range(len(self.columns)) if not all(is_number(row[n]) for row in rows)]
        heads = [name.replace("_", " ") for name in self.columns]
        return "\n".join([self.title, *table_lines(heads, [[_cell_text(value) for value in row] for row in rows], left)])

    def to_csv(self) -> str:
        """Return the table as CSV; see `Result.to_csv`."""
        facts = [f"# {name}: {to_json(value)}\n" for name, value in {"title": self.title, **self.facts}.items()]
        lines = [self.columns, *(map(to_scalar, row) for row in self.rows)]
        return "".join([*facts, *(",".join(map(_csv_cell, line)) + "\n" for line in lines)])

    def html(self) -> str:
        """Return the table as HTML without script or style, with all text escaped and at most `MAX_HTML_ROWS` rows."""
        heads = "".join(f"<th>{escape(head.replace('_', ' '))}</th>" for head in self.columns)
        rows = ["".join(f"<td>{escape(_cell_text(to_scalar(value)))}</td>" for value in row) for row in self.rows[:MAX_HTML_ROWS]]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        facts = [
            f"{name.replace('_', ' ')}: {_cell_text(value)}" for name, value in self.facts.items() if not isinstance(value, Mapping | list)
        ]
        more = [f"{len(self.rows) - MAX_HTML_ROWS:,} more rows; records() has all"] if len(self.rows) > MAX_HTML_ROWS else []
        notes = "".join(f"<div>{escape(line)}</div>" for line in facts + more)
        return f"<table><caption>{escape(self.title)}</caption><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{notes}"


class Result(ABC):
    """Base class of tcemu's results. A subclass implements `table`."""

    @abstractmethod
    def table(self) -> Table:
        """Return the result as one table."""

    def records(self) -> list[Record]:
        """Return a flat dict of Python scalars for each row, as pandas.DataFrame, polars.DataFrame and csv.DictWriter accept them."""
        return self.table().records()

    def to_dict(self) -> dict[str, Any]:
        """Return the title, the facts and the records as plain values."""
        return self.table().to_dict()

    def to_json(self, indent: int | None = None) -> str:
        """Return `to_dict()` as strict JSON.

        Args:
            indent: Spaces per level, or None for one line.

        Returns:
            JSON text. Numbers that JSON lacks are the strings "nan", "+inf" and "-inf", which `float` reads.
        """
        return to_json(self.to_dict(), indent)

    def to_csv(self) -> str:
        """Return the rows of `table()` as CSV, with the title and the facts of the whole in lines above the header.

        A fact, such as the versions, the evidence of each arithmetic, the distribution of the operands and the seeds, is one line
        "# NAME: VALUE" with its value as strict JSON. Columns could not keep it: a fact may be nested, and a table may have no rows.
        Texts are in quotes, so that a "#" in them begins no comment; None is an empty cell without quotes.

            pandas.read_csv("found.csv", comment="#")
            facts = dict(line[2:].split(": ", 1) for line in takewhile(lambda line: line.startswith("# "), open("found.csv")))

        Nothing of `table()` is lost. `from_json` needs what `to_json` writes.

        Returns:
            CSV text, with numbers in full precision, and "nan", "inf" and "-inf".
        """
        return self.table().to_csv()

    def __str__(self) -> str:
        return self.table().text()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self.table().html()


def to_scalar(value: Any) -> Scalar:
    """Convert a value to a Python scalar.

    Args:
        value: Any value.

    Returns:
        A number for a scalar of NumPy or JAX, the nearest float for a fraction (infinite if it overflows), the value itself for None, a
        string, bool, int or float, and its text for anything else.
    """
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
    """Encode plain values as strict JSON.

    Args:
        value: Scalars, mappings, sequences and arrays, nested in any way.
        indent: Spaces per level, or None for one line.

    Returns:
        JSON text. Numbers that JSON lacks are the strings "nan", "+inf" and "-inf", which `float` reads.
    """
    return json.dumps(_to_strict(value), indent=indent, allow_nan=False)


def _to_strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _to_strict(item) for name, item in value.items()}
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        return [_to_strict(item) for item in value]
    value = to_scalar(value)
    if isinstance(value, float) and not isfinite(value):
        return "nan" if isnan(value) else "+inf" if value > 0 else "-inf"
    return value


def _cell_text(value: Scalar) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    return "" if value is None else str(value)


def _csv_cell(value: Scalar) -> str:
    if isinstance(value, str):
        return '"' + value.replace('"', '""') + '"'
    return "" if value is None else str(value)


# ---- results read from files


class SavedResult(Result):
    """Base class of dataclasses that are saved with their table, and can be read again.

    A file has the title, the facts and the records of the table, and the fields.

    Attributes:
        saved_as: The members "kind" and "version" of their files.
    """

    saved_as: ClassVar[tuple[str, int]]

    def to_dict(self) -> dict[str, Any]:
        """Return the table and the fields as plain values, as `from_json` reads them."""
        return self.to_members(None)

    def to_members(self, codecs: Codecs | None) -> dict[str, Any]:
        """Return all members of a file.

        Args:
            codecs: How fields of some annotations are saved.
        """
        kind, version = self.saved_as
        return {"kind": kind, "version": version, **self.table().to_dict(), **to_plain(self, codecs)}

    @classmethod
    def from_members(cls, data: dict[str, Any], codecs: Codecs | None = None) -> Self:
        """Make the result of the members of a file.

        Args:
            data: The members. They are not trusted.
            codecs: How fields of some annotations are read.

        Raises:
            DamagedFile: They are no such result's.
        """
        return from_plain(cls.saved_as[0], cls, {name: data[name] for name in field_types(cls) if name in data}, codecs)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` writes.

        Whatever the file says, the result that is made of it must be saved as the same file again. So a record that does not agree with the
        rest of the file is found.

        Args:
            text: JSON text. It is not trusted: unknown names and other types are rejected.

        Returns:
            The result. Functions in policies come back as their names, and arrays do not come back.

        Raises:
            DamagedFile: It is no such result of this version. It is a ValueError.
        """
        data, (kind, version) = parse_json(text), cls.saved_as
        head = {name: data[name] for name in ("kind", "version") if name in data} if isinstance(data, dict) else data
        check_saved(kind, head, kind, version, ())
        try:
            result = cls.from_members(data)
            again = json.loads(result.to_json())
            str(result)  # raises for values that contradict each other
        except DamagedFile:
            raise
        except RecursionError:
            raise DamagedFile(f"{kind}: nested too deep") from None
        except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
            raise DamagedFile(f"{kind}: {type(error).__name__}: {str(error)[:200]}") from error
        wrong = [name for name in check_members(kind, data, again) if again[name] != data[name]]
        if wrong:
            raise DamagedFile(f"{kind}: {', '.join(wrong)} does not agree with the rest of the file")
        return result
