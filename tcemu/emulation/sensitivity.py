"""What each product of a function costs at its end: the function run with one product emulated at a time, in one program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from chex import PRNGKey
from jax import Array, lax

from tcemu.emulation.emulate import TracedCall
from tcemu.emulation.policy import Decision, DotGeneralLike, Policy
from tcemu.emulation.products import Product
from tcemu.emulation.rewriting import Rewriter, Scope

ALL, NONE = -1, -2  # what is emulated, in place of a product's number


def results_by(call: TracedCall, policy: Policy, convolutions: bool, key: PRNGKey | None = None) -> list[np.ndarray]:
    """The float results of a call under a policy, as float64."""
    rewriter = Rewriter(policy, convolutions, call.survey)
    scope = Scope(key=key)
    values = jax.jit(lambda *arrays: rewriter.evaluate(call.program.jaxpr, call.program.consts, arrays, scope))(*call.arrays)
    jax.effects_barrier()
    return _floats(values)


def distance(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """The norm of the differences over that of the wanted results; where these are all zero, the norm of the differences."""
    error = sum(float(((x - y) ** 2).sum()) for x, y in zip(found, wanted, strict=True))
    size = sum(float((y**2).sum()) for y in wanted)
    return float(np.sqrt(error / size)) if size else float(np.sqrt(error))


class Sensitivity(NamedTuple):
    """Relative errors of all results of a function."""

    alone: dict[Product, float]  # where one product is emulated
    together: float  # where all are


def sensitivity_of(call: TracedCall, decided: Callable[[Product], Decision], convolutions: bool) -> Sensitivity:
    """What each product costs at the end under a policy, and what all of them do. decided: the policy's decisions.

    One program serves all runs: which product is emulated is an argument of it. Its results are held against those of the same program
    with none emulated, so that nothing but the emulation differs.
    """
    numbers: dict[Product, int] = {}

    @jax.jit
    def with_selected(selected: Array, arrays: Sequence[Any]) -> list[Any]:
        rewriter = Rewriter(partial(_chosen, decided, selected, numbers), convolutions, call.survey)
        return rewriter.evaluate(call.program.jaxpr, call.program.consts, arrays, Scope())

    def run(selected: int) -> list[np.ndarray]:
        return _floats(with_selected(jnp.int32(selected), call.arrays))

    plain = run(NONE)
    alone = {product: distance(run(number), plain) for product, number in numbers.items()}
    return Sensitivity(alone=alone, together=distance(run(ALL), plain))


def _chosen(
    decided: Callable[[Product], Decision], selected: Array, numbers: dict[Product, int], product: Product
) -> DotGeneralLike | None:
    """What takes the place of a product: its emulation where `selected` says so, else the product itself."""
    emulation = decided(product).run
    if emulation is None:
        return None
    number = numbers.setdefault(product, len(numbers))

    def either(lhs: Array, rhs: Array, dimension_numbers: Any, **kwargs: Any) -> Array:
        def by(run: DotGeneralLike, lhs: Array, rhs: Array) -> Array:
            return run(lhs, rhs, dimension_numbers, **kwargs).astype(product.dtype)

        return lax.cond((selected == number) | (selected == ALL), partial(by, emulation), partial(by, lax.dot_general), lhs, rhs)

    return either


def _floats(values: Sequence[Array]) -> list[np.ndarray]:
    return [np.asarray(v, np.float64) for v in values if jnp.issubdtype(v.dtype, jnp.floating)]
