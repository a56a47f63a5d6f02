"""What the policy decides for each product of a module, and the list of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from tcemu.emulation.policy import Planned, Policy, checked, decide, planned
from tcemu.emulation.products import Product
from tcemu.emulation.report import Entry
from tcemu.linalg.dot_general import DotGeneral
from tcemu.torch.exchange import TAKEN
from tcemu.torch.measured import Measured
from tcemu.torch.names import name_of, stochastic

Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
WEIGHT, ACTIVATION = "weight", "activation"


class Taken(NamedTuple):
    """A product that is replaced: its name, the names of what takes the place of `jax.lax.dot_general` and of its recipe, or "", and
    whether it wants a seed."""

    name: str
    by: str
    recipe: str
    seeded: bool


_all: WeakValueDictionary[str, Decisions] = WeakValueDictionary()
_numbers = count()


@torch.compiler.assume_constant_result
def decide_on(tag: str, name: str, facts: tuple, weights: tuple[str | None, str | None], fits: bool) -> Taken | None:
    """`Decisions.decide` of those with this tag. A compiled program holds for one tag, which torch compares: an object it would not."""
    decisions = _all[tag]
    return decisions.decide(name, facts, weights) if fits else decisions.leave(name, facts, weights)


class Decisions:
    """The policy's decisions on the products of one model. tag: a word that no others have."""

    def __init__(self, policy: Policy, convolutions: bool):
        self.tag = f"emulation {next(_numbers)}"
        _all[self.tag] = self
        self.policy, self.convolutions = checked(policy), convolutions
        self.plan: Policy = None
        self.is_planned = not isinstance(self.policy, Planned)
        if self.is_planned:
            self.plan = self.policy
        self.survey: Any = None  # what lists a run, if one is listed
        self.capture: Callable[[Product, Any, Any], None] | None = None  # what is given the operands of each product that is taken
        self._known: dict[tuple, tuple[Product, Taken | None, Entry]] = {}

    def settle(self, products: Sequence[Product]) -> None:
        """Products of a whole run, for a policy that must know all before it decides on one."""
        if not self.is_planned:
            self.plan, self.is_planned = planned(self.policy, products), True
            self._known.clear()

    def decide(self, name: str, facts: tuple, weights: tuple[str | None, str | None]) -> Taken | None:
        """What takes the place of a product, None where it is left. facts: see `_product`; weights: paths of the operands' parameters."""
        key = (name, facts, weights)
        if key not in self._known:
            product = _product(name, facts, weights)
            self._known[key] = (product, *self._decided(product))
        product, taken, entry = self._known[key]
        if self.survey is not None:
            self.survey.add(entry)
        return taken

    def leave(self, name: str, facts: tuple, weights: tuple[str | None, str | None]) -> None:
        """A product of dtypes, or on devices, that no operator takes."""
        if self.survey is not None:
            why = f"operands of {facts[2].removeprefix('torch.')} and {facts[4].removeprefix('torch.')}; tcemu.torch takes {TAKEN}"
            self.survey.add(Entry(name, _product(name, facts, weights), False, why))

    def captured(self, name: str, operands: Any, how: Any) -> None:
        """The operands of a product that runs now."""
        assert self.capture is not None
        product = next(p for p, _, entry in self._known.values() if entry.name == name and fits_operands(p, operands))
        self.capture(product, operands, how)

    def _decided(self, product: Product) -> tuple[Taken | None, Entry]:
        placeholder: Callable[[], Any] = lambda: jax.random.key(0)  # noqa: E731  in whose place a seed comes at each run
        decision = decide(self.plan, product, self.convolutions, placeholder)
        entry = Entry(product.name, product, decision.run is not None, decision.why, decision.undecided)
        if decision.run is None:
            return None, entry
        run = decision.run
        recipe = run.recipe if isinstance(run, Measured) or (isinstance(run, DotGeneral) and run.a == "lhs") else None
        seeded = stochastic(run)
        run = replace(run, key=None) if isinstance(run, DotGeneral) else run
        return Taken(product.name, name_of(run), "" if recipe is None else name_of(recipe), seeded), entry


def _product(name: str, facts: tuple, weights: tuple[str | None, str | None]) -> Product:
    """What a policy is told. facts: primitive, shape and dtype of lhs and of rhs, axes, shape of the result."""
    primitive, lhs, lhs_dtype, rhs, rhs_dtype, numbers, shape = facts
    found: list[Any] = [_dtype(dtype) for dtype in (lhs_dtype, rhs_dtype)]
    lhs_role, rhs_role = (ACTIVATION if path is None else WEIGHT for path in weights)
    return Product(
        name=name,
        index=int(name.rpartition(".")[2]) if name.rpartition("/")[2].rpartition(".")[2].isdigit() else 0,
        primitive=primitive,
        lhs_shape=lhs,
        lhs_dtype=found[0],
        rhs_shape=rhs,
        rhs_dtype=found[1],
        dimension_numbers=lax.ConvDimensionNumbers(*numbers) if primitive == "conv_general_dilated" else numbers,
        preferred_element_type=None,
        shape=shape,
        dtype=found[0],
        roles=(lhs_role, rhs_role),
        parameters=tuple(path for path in weights if path),
    )


def fits_operands(product: Product, operands: Any) -> bool:
    """These may be its operands."""
    return (product.lhs_shape, product.rhs_shape) == tuple(tuple(x.shape) for x in operands)


def _dtype(name: str) -> np.dtype:
    name = name.removeprefix("torch.")
    try:
        return np.dtype(jnp.dtype(name))
    except TypeError:  # as complex32
        return np.dtype(np.void)
