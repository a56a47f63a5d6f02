"""What was decided for every product of a program, and the table of that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from tcemu.emulation.policy import Policy, fits
from tcemu.emulation.products import Product
from tcemu.linalg.recipes import Recipe
from tcemu.plots import dots
from tcemu.results import Result, Table
from tcemu.text import columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Entry:
    """A line of a report.

    name: that of the product, or of what hides products. product: None for the latter. replaced: whether it is emulated. why: by what it
    is, or why it is not. undecided: the recipe treats its operands differently, and nothing tells which is which; lhs was taken as A.
    """

    name: str
    product: Product | None
    replaced: bool
    why: str
    undecided: bool = False


@dataclass(frozen=True, repr=False)
class Report(Result):
    """What `emulate` replaces in a program and what it leaves, and why. A sequence of `Entry`; str() is a table, `records()` for pandas.

    weights: what counts as a parameter, in words, from which the roles of operands follow.
    """

    entries: tuple[Entry, ...]
    weights: str = ""

    @property
    def replaced(self) -> tuple[Product, ...]:
        """The products that are emulated."""
        return tuple(e.product for e in self.entries if e.replaced and e.product is not None)

    @property
    def left(self) -> tuple[Entry, ...]:
        """What is evaluated as it was."""
        return tuple(e for e in self.entries if not e.replaced)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __getitem__(self, index: int) -> Entry:
        return self.entries[index]

    def __str__(self) -> str:
        rows = [[e.name, *_described(e.product), ("" if e.replaced else "left: ") + e.why] for e in self.entries]
        heads = ["product", "operands", "roles", "parameters", "result", "runs", "by"]
        count = f"{len(self.replaced)} of {len(self.entries)} products replaced"
        lines = [*columns(heads, rows, left=(0, 1, 2, 3, 4, 6)), count] if rows else ["no products"]
        return "\n".join([*lines, f"weights: {self.weights}"] if self.weights and rows else lines)

    def table(self) -> Table:
        """A row for each line of the report."""
        heads = ("product", "replaced", "by", "operands", "role_lhs", "role_rhs", "parameters", "result", "runs", "undecided", "source")
        return Table(repr(self)[1:-1], heads, tuple(_record(entry) for entry in self.entries), {"weights": self.weights})

    def plot(self) -> Figure:
        """How many results each product computes over all its runs (those of a `while`: once), replaced or left, as a matplotlib Figure.

        Raises ImportError if matplotlib is not installed.
        """
        series: dict[str, dict[str, float]] = {"replaced": {}, "left": {}}
        for entry in self.entries:
            if entry.product is not None:
                count = prod(entry.product.shape) * (1 if entry.product.repeats is None else entry.product.repeats)
                series["replaced" if entry.replaced else "left"][entry.name] = float(count)
        return dots([entry.name for entry in self.entries], series, "elements of results, over all runs")

    def __repr__(self) -> str:
        return f"<Report: {len(self.replaced)} products replaced, {len(self.left)} left>"


def _record(entry: Entry) -> tuple[Any, ...]:
    product = entry.product
    if product is None:
        return (entry.name, entry.replaced, entry.why, *(None,) * 6, entry.undecided, None)
    paths = ", ".join(product.parameters)
    facts = (product.operands, *product.roles, paths, product.result, product.repeats, entry.undecided, product.source)
    return (entry.name, entry.replaced, entry.why, *facts)


def _described(product: Product | None) -> tuple[str, str, str, str, str]:
    if product is None:
        return "", "", "", "", ""
    first, *more = product.parameters or ("",)
    parameters = first + (f" and {len(more)} more" if more else "")
    return product.operands, " · ".join(product.roles), parameters, product.result, "?" if product.repeats is None else str(product.repeats)


def unused(policy: Policy, entries: Sequence[Entry]) -> list[str]:
    """What to say of a policy in short form that replaced nothing, and of its rules that fit no product."""
    if policy is None or (callable(policy) and not isinstance(policy, Recipe)):
        return []
    products = [entry.product for entry in entries if entry.product is not None]
    names = ", ".join(dict.fromkeys(product.name for product in products[:8])) or "none"
    wanted = True
    lines = []
    if isinstance(policy, tuple):
        lines = [
            f"the rule for {pattern!r} fits no product; the products are {names}"
            for pattern, _ in policy
            if not any(fits(pattern, product) for product in products)
        ]
        wanted = any(choice is not None for _, choice in policy) and not lines
    if wanted and not any(entry.replaced or entry.why == "it is emulated already" for entry in entries):
        why = "; ".join(dict.fromkeys(f"{entry.name}: {entry.why}" for entry in entries[:4])) or "it has no matrix products"
        lines.append(f"no product is replaced ({why}); .report(...) lists all")
    return lines


def positional(entries: Sequence[Entry]) -> list[str]:
    """What to say of products whose operands got the recipe's sides by position alone."""
    found = [e for e in entries if e.undecided and e.product is not None]
    if not found:
        return []
    shown = "; ".join(f"{e.name} ({' · '.join(e.product.roles)})" for e in found[:4] if e.product is not None)
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return [
        f"the recipe treats its A and its B differently, and nothing tells which operand is which of {shown}{more}; lhs was taken as A. "
        "Say which arguments are the parameters, as parameters='w', or give these products a rule, as "
        "('NAME', tcemu.dot_general(recipe, a='rhs'))"
    ]
