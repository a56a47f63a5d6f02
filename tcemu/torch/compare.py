"""`compare`: every product of a torch model under several policies, beside the exact product of the same operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax
from torch.utils import _pytree as pytree

from tcemu.emulation.compare import named_policies
from tcemu.emulation.comparison import Comparison
from tcemu.emulation.convolution import through_patches
from tcemu.emulation.policy import Policy, decide, planned
from tcemu.emulation.product_errors import Run, errors_of
from tcemu.emulation.products import Product
from tcemu.emulation.sensitivity import distance
from tcemu.linalg.recipes import Recipe
from tcemu.torch.emulate import Emulation, emulate
from tcemu.torch.exchange import to_jax
from tcemu.torch.products import convolution_params


def compare(
    model: torch.nn.Module,
    policies: Recipe | str | Mapping[str, Policy] | Sequence[Recipe | str],
    inputs: Sequence[Any],
    *,
    convolutions: bool = False,
    results: bool = True,
) -> Comparison:
    """How far every product of model(*inputs) is from the exact one under each policy, and where that comes from: `tcemu.compare` of torch.

    policies, convolutions, results: as there. inputs: the model's positional arguments. The model runs once with its products in plain
    float32, whose operands are kept, and once under each policy; without gradients, and it is as it was afterwards.
    Returns a `Comparison`. Raises what `emulate` raises, also for a model that is emulated already.
    """
    runs: dict[Product, list[Run]] = {}
    policies = named_policies(policies)
    with Emulation(model, _plainly, convolutions) as plain:
        plain.decisions.capture = lambda product, operands, how: runs.setdefault(product, []).append(_run(operands, how))
        expected = _floats(plain, inputs)
    settled = {name: planned(policy, runs) for name, policy in policies.items()}
    rows = [
        errors_of(product, name, decision, found)
        for product, found in runs.items()
        for name, policy in settled.items()
        if (decision := decide(policy, product, convolutions, lambda: jax.random.key(0))).run is not None
    ]
    whole = {}
    for name, policy in (settled if results else {}).items():
        with emulate(model, policy, convolutions=convolutions) as emulated:
            whole[name] = distance(_floats(emulated, inputs), expected)
    return Comparison(tuple(rows), whole)


def plain_product(lhs: Array, rhs: Array, dimension_numbers: Any, precision: Any = None, **kwargs: Any) -> Array:
    """`jax.lax.dot_general` in float32 that is not cut to tf32."""
    return lax.dot_general(lhs, rhs, dimension_numbers, precision=lax.Precision.HIGHEST, **kwargs)


def _plainly(product: Product) -> Any:
    """A policy: every product of floats as it is."""
    return plain_product if product.is_float else None


def _run(operands: tuple[torch.Tensor, torch.Tensor], how: tuple[Any, ...]) -> Run:
    """The operands of one run as matrices: of a convolution, its patches and its kernel."""
    lhs, rhs = (to_jax(x) for x in operands)
    if len(how) == 2:
        return Run(np.asarray(lhs), np.asarray(rhs), how, {"preferred_element_type": jnp.promote_types(lhs.dtype, rhs.dtype)})
    found: list[Run] = []

    def kept(lhs: Array, rhs: Array, dimension_numbers: Any, **kwargs: Any) -> Array:
        found.append(Run(np.asarray(lhs), np.asarray(rhs), dimension_numbers, kwargs))
        return plain_product(lhs, rhs, dimension_numbers, **kwargs)

    params, dtype = convolution_params(*how), jnp.promote_types(lhs.dtype, rhs.dtype)
    through_patches(kept, lhs, rhs, params, precision=None, preferred_element_type=dtype, out_sharding=None)
    return found[0]


def _floats(model: Emulation, inputs: Sequence[Any]) -> list[np.ndarray]:
    """The float results of a run, as float64."""
    with torch.no_grad():
        values = pytree.tree_leaves(model(*inputs))
    return [value.double().cpu().numpy() for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
