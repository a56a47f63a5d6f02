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

from tcemu.faces.torch.exchange import to_jax
from tcemu.faces.torch.matrix_products import convolution_params
from tcemu.faces.torch.module_emulation import Emulation, emulate
from tcemu.operations.products.recipes import Recipe
from tcemu.uses.emulation.compare import name_policies, relative_distance
from tcemu.uses.emulation.decisions import Policy, decide, plan_policy
from tcemu.uses.emulation.primitives import convolve_by_patches
from tcemu.uses.emulation.product_errors import CapturedRun, Comparison, measure_errors
from tcemu.uses.emulation.survey import Product


def compare(
    model: torch.nn.Module,
    policies: Recipe | str | Mapping[str, Policy] | Sequence[Recipe | str],
    inputs: Sequence[Any],
    *,
    convolutions: bool = False,
    results: bool = True,
) -> Comparison:
    """Compare every product of model(*inputs) under several policies with the exact product, as `tcemu.compare` does for JAX.

    The model runs once with its products in plain float32, whose operands are kept, and once under each policy; without gradients. It is
    unchanged afterwards.

    Args:
        model: The model.
        policies: Policies as in `tcemu.compare`.
        inputs: Positional arguments of the model.
        convolutions: Whether convolutions are products too.
        results: Whether to run the model under each policy too.

    Returns:
        A `Comparison`.

    Raises:
        TypeError: As `emulate`.
        ValueError: As `emulate`, also for a model that is emulated already.
    """
    runs: dict[Product, list[CapturedRun]] = {}
    policies = name_policies(policies)
    with Emulation(model, _plain_policy, convolutions) as plain:
        plain.decisions.capture = lambda product, operands, how: runs.setdefault(product, []).append(_captured_run(operands, how))
        expected = _as_float64(plain, inputs)
    plans = {name: plan_policy(policy, runs) for name, policy in policies.items()}
    rows = [
        measure_errors(product, name, decision, found)
        for product, found in runs.items()
        for name, policy in plans.items()
        if (decision := decide(policy, product, convolutions, lambda: jax.random.key(0))).dot_general is not None
    ]
    result_errors = {}
    for name, policy in (plans if results else {}).items():
        with emulate(model, policy, convolutions=convolutions) as emulated:
            result_errors[name] = relative_distance(_as_float64(emulated, inputs), expected)
    return Comparison.from_rows(rows, result_errors)


def plain_product(lhs: Array, rhs: Array, dimension_numbers: Any, precision: Any = None, **kwargs: Any) -> Array:
    """Compute `jax.lax.dot_general` in float32 without truncation to tf32."""
    return lax.dot_general(lhs, rhs, dimension_numbers, precision=lax.Precision.HIGHEST, **kwargs)


def _plain_policy(product: Product) -> Any:
    """Decide as a policy that computes every product of floats unchanged."""
    return plain_product if product.is_float else None


def _captured_run(operands: tuple[torch.Tensor, torch.Tensor], how: tuple[Any, ...]) -> CapturedRun:
    """Return the operands of one run as matrices; those of a convolution are its patches and its kernel."""
    lhs, rhs = (to_jax(x) for x in operands)
    if len(how) == 2:
        return CapturedRun(np.asarray(lhs), np.asarray(rhs), how, {"preferred_element_type": jnp.promote_types(lhs.dtype, rhs.dtype)})
    captured: list[CapturedRun] = []

    def capture_and_multiply(lhs: Array, rhs: Array, dimension_numbers: Any, **kwargs: Any) -> Array:
        captured.append(CapturedRun(np.asarray(lhs), np.asarray(rhs), dimension_numbers, kwargs))
        return plain_product(lhs, rhs, dimension_numbers, **kwargs)

    params, dtype = convolution_params(*how), jnp.promote_types(lhs.dtype, rhs.dtype)
    convolve_by_patches(capture_and_multiply, lhs, rhs, params, precision=None, preferred_element_type=dtype, out_sharding=None)
    return captured[0]


def _as_float64(model: Emulation, inputs: Sequence[Any]) -> list[np.ndarray]:
    """Return the float results of a run as float64."""
    with torch.no_grad():
        values = pytree.tree_leaves(model(*inputs))
    return [value.double().cpu().numpy() for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()]
