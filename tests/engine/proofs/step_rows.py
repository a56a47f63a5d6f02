"""The arithmetics of `model_rows` with every pair of formats, and the forms of the step that serve them."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from support.llvm_products import arithmetics

from tcemu.engine.architectures.model_rows import ROWS
from tcemu.engine.arithmetic.fitting import specialize
from tcemu.engine.arithmetic.model import Model
from tcemu.engine.arithmetic.order import Order
from tcemu.engine.arithmetic.product_spec import ProductSpec
from tcemu.engine.arithmetic.step.forms import BoundedForm, GroupedForm, StepNumbers, bounded_form, grouped_form, step_numbers


class StepRow(NamedTuple):
    """One arithmetic as a kernel gets it."""

    model: Model
    spec: ProductSpec

    @property
    def terms(self) -> int:
        """Products of a step."""
        return Order.from_model(self.model, self.spec.k).step_size(self.spec.k)


@cache
def step_rows() -> dict[str, StepRow]:
    """Every fused model of the table with every pair of formats that an instruction multiplies by it."""
    requested = {name: (one.model, one.spec, one.block) for name, one in arithmetics().items()}
    rest = [row for row in ROWS if not row.model.result.is_integer and row.model.fraction_bits is not None]
    rest = [row for row in rest if row.model not in {model for model, *_ in requested.values()}]
    for row in rest:  # instructions of another toolkit, and of a K that `isa.instructions` does not list
        alike = [
            name
            for name, one in arithmetics().items()
            if (one.model.multiplicand, one.model.summed) == (row.model.multiplicand, row.model.summed)
        ]
        for name in alike:
            _, spec, block = requested[name]
            if spec.a in row.multiplicands and spec.d in row.accumulators:
                requested[f"{name}, but {row.label}"] = (row.model, spec._replace(k=row.k or spec.k), block)
    return {name: StepRow(*specialize(model, spec, block or None)) for name, (model, spec, block) in requested.items()}


@cache
def numbers() -> dict[str, StepNumbers]:
    """The numbers of every arithmetic."""
    found = {name: step_numbers(row.model, row.spec) for name, row in step_rows().items()}
    assert all(v is not None for v in found.values())
    return {name: v for name, v in found.items() if v is not None}


@cache
def bounded_forms() -> dict[str, BoundedForm]:
    """The bounded steps, by the arithmetic that they serve."""
    found = {name: bounded_form(row.model, row.spec, row.terms) for name, row in step_rows().items()}
    return {name: form for name, form in found.items() if form is not None}


@cache
def grouped_forms() -> dict[str, GroupedForm]:
    """The bounded steps of groups, likewise."""
    found = {
        name: grouped_form(numbers()[name], row.spec.a, row.spec.b, row.spec.scale, row.model.result, row.spec.d)
        for name, row in step_rows().items()
    }
    return {name: form for name, form in found.items() if form is not None}
