"""The report of an emulation: the decision on every product and function of a program, as a sequence and as a table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tcemu.base.plain_values import to_plain
from tcemu.base.provenance import Provenance
from tcemu.base.results import Table
from tcemu.base.text import table_lines, wrap_lines
from tcemu.operations.functional.kernel_values import KernelValue
from tcemu.operations.products.recipe_facts import RECIPE_COLUMNS, make_provenance, recipe_facts, unit_sentences
from tcemu.operations.products.recipe_kinds import AnyRecipe
from tcemu.operations.products.recipes import Recipe
from tcemu.uses.emulation.decisions import NO_RULE, Choice, Policy, applied_recipe, matches_pattern, pattern_text, unused_rule_warnings
from tcemu.uses.emulation.saved_results import NumberedResult
from tcemu.uses.emulation.survey import Function, Product


@dataclass(frozen=True)
class Entry:
    """A line of a report.

    Attributes:
        name: Name of the product, or of an equation that hides products.
        product: The product; None for an equation that hides products.
        replaced: Whether the product is emulated.
        reason: Name of the replacement, or why the product is left.
        undecided: Whether the recipe treats its operands differently and nothing shows which is which; lhs was taken as A.
        choice: The policy's choice for the product.
        function: The softmax, norm or activation of this line; None for a product.
        kernel: The kernel that computes the function, as its name or value.
    """

    name: str
    product: Product | None
    replaced: bool
    reason: str
    undecided: bool = False
    choice: Choice = None
    function: Function | None = None
    kernel: KernelValue | str | None = None

    @property
    def recipe(self) -> AnyRecipe | None:
        """The recipe that computes the product; None if the product is left, or computed by a function."""
        return applied_recipe(self.choice, self.product.roles) if self.replaced and self.product is not None else None


@dataclass(frozen=True, repr=False)
class Report(NumberedResult):
    """The products and functions that `emulate` replaces in a program, and those that it leaves, with the reason.

    A report is a sequence of `Entry`; str() is a table, `records()` is what pandas takes, and `from_json` reads what `to_json` writes.

    Attributes:
        entries: A line for each product and, if `functions` was given, for each softmax, norm and activation, in the order of the program.
        weights: Description of the arrays that count as parameters; the roles of operands follow from them.
        provenance: Versions, and the evidence of each arithmetic.
    """

    saved_as = "tcemu report", 3

    entries: tuple[Entry, ...]
    weights: str = ""
    provenance: Provenance = field(default_factory=Provenance)

    @classmethod
    def from_entries(cls, entries: Sequence[Entry], weights: str = "") -> Report:
        """Make the report of these lines, with the provenance of now."""
        return cls(tuple(entries), weights, make_provenance(entry.recipe for entry in entries))

    @property
    def replaced(self) -> tuple[Product, ...]:
        """The products that are emulated."""
        return tuple(e.product for e in self.entries if e.replaced and e.product is not None)

    @property
    def replaced_functions(self) -> tuple[Function, ...]:
        """The softmaxes, norms and activations that a kernel computes."""
        return tuple(e.function for e in self.entries if e.replaced and e.function is not None)

    @property
    def unchanged(self) -> tuple[Entry, ...]:
        """The lines of products and functions that are left unchanged."""
        return tuple(e for e in self.entries if not e.replaced)

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __getitem__(self, index: int) -> Entry:
        return self.entries[index]

    def __str__(self) -> str:
        rows = []
        for entry in self.entries:
            target, *_, evidence = self._facts(entry)
            said = ("" if entry.replaced else "left: ") + entry.reason
            rows.append([entry.name, *_text_cells(entry.product or entry.function), said, target or "", evidence or ""])
        heads = ["product", "operands", "roles", "parameters", "result", "runs", "by", "target", "evidence"]
        functions = sum(entry.function is not None for entry in self.entries)
        count = f"{len(self.replaced)} of {len(self.entries) - functions} products"
        count += f" and {len(self.replaced_functions)} of {functions} functions replaced" if functions else " replaced"
        lines = [*table_lines(heads, rows, left=(0, 1, 2, 3, 4, 6, 7, 8)), count] if rows else ["no products"]
        lines += [f"weights: {self.weights}"] if self.weights and rows else []
        for sentence in unit_sentences(map(self._facts, self.entries)):
            lines += wrap_lines(sentence)
        return "\n".join(lines)

    def _facts(self, entry: Entry) -> tuple[str | None, ...]:
        return recipe_facts(entry.recipe, self.provenance.evidence)

    def table(self) -> Table:
        """Return the report with a row for each line."""
        rows = tuple((*_entry_record(entry), *self._facts(entry)) for entry in self.entries)
        return Table(repr(self)[1:-1], RECORD_COLUMNS, rows, {"weights": self.weights, "provenance": to_plain(self.provenance)})

    def __repr__(self) -> str:
        functions = f" and {len(self.replaced_functions)} functions" if any(entry.function for entry in self.entries) else ""
        return f"<Report: {len(self.replaced)} products{functions} replaced, {len(self.unchanged)} left>"


RECORD_COLUMNS = (
    "product", "replaced", "by", "operands", "role_lhs", "role_rhs", "parameters", "result", "runs", "undecided", "source", "function",
    *RECIPE_COLUMNS,
)  # fmt: skip


def _entry_record(entry: Entry) -> tuple[Any, ...]:
    computed = entry.product or entry.function
    if computed is None:
        return (entry.name, entry.replaced, entry.reason, *(None,) * 6, entry.undecided, None, None)
    roles, kind = (computed.roles, None) if isinstance(computed, Product) else ((None, None), computed.kind)
    paths = ", ".join(computed.parameters)
    facts = (computed.operands, *roles, paths, computed.result, computed.repeats, entry.undecided, computed.source, kind)
    return (entry.name, entry.replaced, entry.reason, *facts)


def _text_cells(computed: Product | Function | None) -> tuple[str, ...]:
    if computed is None:
        return ("",) * 5
    first, *more = computed.parameters or ("",)
    parameters = first + (f" and {len(more)} more" if more else "")
    roles = " · ".join(computed.roles) if isinstance(computed, Product) else computed.kind
    return computed.operands, roles, parameters, computed.result, "?" if computed.repeats is None else str(computed.repeats)


def unused_policy_warnings(policy: Policy, entries: Sequence[Entry]) -> list[str]:
    """Return warnings for a policy (functions excepted) that replaced nothing and for its rules that match no product."""
    if policy is None or (callable(policy) and not isinstance(policy, Recipe)):
        return []
    products = [entry.product for entry in entries if entry.product is not None]
    names = ", ".join(dict.fromkeys(product.name for product in products[:8])) or "none"
    expects_product = True
    lines = []
    if isinstance(policy, tuple):
        lines = unused_rule_warnings(policy, products, "product", names)
        expects_product = not policy or (any(choice is not None for _, choice in policy) and not lines)
    if expects_product and not any(entry.replaced or entry.reason == "it is emulated already" for entry in entries):
        why = "; ".join(dict.fromkeys(f"{entry.name}: {entry.reason}" for entry in entries[:4])) or "it has no matrix products"
        lines.append(f"no product is replaced ({why}); .report(...) lists all")
    return lines


def divided_layer_warnings(policy: Policy, entries: Sequence[Entry]) -> list[str]:
    """Return a warning for a rule by names that takes some layers and leaves the products of two activations that come from these alone.

    So a rule for the weights of attention leaves attention's own two products. There is no warning where rules take every weight.
    """
    if not isinstance(policy, tuple):
        return []
    weighted = [
        entry for entry in entries if entry.product is not None and entry.product.parameters and "activation" in entry.product.roles
    ]
    if all(entry.replaced for entry in weighted):
        return []
    left = [entry.product for entry in entries if entry.product is not None and not entry.replaced and entry.reason == NO_RULE]
    lines = []
    for pattern, choice in policy:
        if choice is None or not isinstance(pattern, str | re.Pattern):
            continue
        products = [entry.product for entry in weighted if entry.product is not None]
        taken = {path for product in products if matches_pattern(pattern, product) for path in product.parameters}
        divided = [product for product in left if product.layers and taken.issuperset(product.layers)]
        if divided:
            names = ", ".join(product.name for product in divided[:4]) + (f" and {len(divided) - 4} more" if len(divided) > 4 else "")
            lines.append(
                f"the rule for {pattern_text(pattern)} takes the products with {', '.join(divided[0].layers)} and leaves {names}: products "
                "of the activations that come from these, as attention has them. A rule for these names takes them; the rule "
                "(tcemu.policies.Where(role=('activation', 'activation')), None) leaves them without this warning"
            )
    return lines


def undecided_warnings(entries: Sequence[Entry]) -> list[str]:
    """Return a warning for products whose lhs was taken as A because nothing shows which operand is which."""
    undecided = [e for e in entries if e.undecided and e.product is not None]
    if not undecided:
        return []
    shown = "; ".join(f"{e.name} ({' · '.join(e.product.roles)})" for e in undecided[:4] if e.product is not None)
    more = f" and {len(undecided) - 4} more" if len(undecided) > 4 else ""
    return [
        f"the recipe treats its A and its B differently, and nothing shows which operand is which of {shown}{more}; lhs was taken as A. "
        "Name the arguments that are parameters, as parameters='w', or give these products a rule, as "
        "('NAME', tcemu.dot_general(recipe, a='rhs'))"
    ]


def policy_warnings(policy: Policy, entries: Sequence[Entry]) -> list[str]:
    """Return all warnings for a policy and the products of a run."""
    entries = [entry for entry in entries if entry.function is None]
    return unused_policy_warnings(policy, entries) + divided_layer_warnings(policy, entries) + undecided_warnings(entries)
