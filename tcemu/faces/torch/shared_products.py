"""Products of tensors by programs that values and gradients share: one program for a recipe, shapes and dtypes.

A product by a `Recipe` is D = A·B, and its gradients are the products dA = g·Bᵀ and dB = Aᵀ·g by the recipe's own recipes. Here torch
brings the operands to the form [..., M, K] and [..., K, N], so that a gradient whose shapes another layer's value has compiles nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from threading import Lock
from typing import Any, NamedTuple

import jax.numpy as jnp
import torch
from jax import Array

from tcemu.faces.torch.exchange import DTYPES, check_process, program_context, to_jax, to_torch
from tcemu.faces.torch.operator_programs import compile_together, find_program
from tcemu.faces.torch.operators import Static, compute_value, find_by_name, register_name, stable_name
from tcemu.operations.products.dot_general import DotGeneral, ProductAxes, product_axes
from tcemu.operations.products.matmul import matmul, unbroadcast
from tcemu.operations.products.recipes import Recipe

_texts: dict[str, str | None] = {}  # what a registered recipe is, in words that hold in every process; None: it has no such words
_lock = Lock()


class ProgramCall(NamedTuple):
    """One call of a program."""

    compute: Any  # function of (arrays, seed, static arguments)
    static: Static
    tensors: tuple[torch.Tensor | None, ...]
    stored_as: str | None


@dataclass(frozen=True)
class SharedProduct:
    """A product whose value and gradients are computed by shared programs.

    Attributes:
        recipe: The recipe.
        a: Tensor [..., M, K].
        b: Tensor [..., K, N] with the same batch axes.
        bias: Tensor that broadcasts to the result, or None.
        dtype: Dtype of the result.
        shapes: Shapes of the operator's operands.
        axes: The axes of a dot_general's operands by their part in the product; None: the operands are A and B.
        is_swapped: A is the operand rhs.
    """

    recipe: Recipe
    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    dtype: torch.dtype
    shapes: tuple[torch.Size, torch.Size]
    axes: ProductAxes | None = None
    is_swapped: bool = False

    def value(self) -> torch.Tensor:
        """Compute the value."""
        (d,) = _run([_product_call("D", self.recipe, self.recipe, self.a, self.b, self.bias, self.dtype)])
        if self.axes is None:
            return d
        (lhs, rhs), axes = self.shapes, self.axes
        rows, columns = [lhs[i] for i in axes.rows], [rhs[i] for i in axes.columns]
        return (d.mT.contiguous() if self.is_swapped else d).reshape(*(lhs[i] for i in axes.lhs_batch), *rows, *columns)

    def gradients(self, g: torch.Tensor, requested: Sequence[int]) -> list[torch.Tensor] | None:
        """Compute the gradients of the requested operands, by number: lhs, rhs and the bias. None: these programs do not."""
        if self.recipe.gradients is None or {self.a.dtype, self.b.dtype, g.dtype} != {torch.float32}:
            return None
        recipe_da, recipe_db = self.recipe.gradients
        if recipe_da.is_stochastic or recipe_db.is_stochastic:
            return None
        a, b = self.a, self.b
        if self.axes is not None:
            g = g.reshape(*a.shape[:-2], *((b.shape[-1], a.shape[-2]) if self.is_swapped else (a.shape[-2], b.shape[-1])))
            g = g.mT if self.is_swapped else g
        calls = {
            0: lambda: _product_call("dA", self.recipe, recipe_da, g, b.mT, None, torch.float32),
            1: lambda: _product_call("dB", self.recipe, recipe_db, a.mT, g, None, torch.float32),
            2: lambda: _bias_call(g, self.bias),
        }
        numbers = [1 - number if self.is_swapped and number < 2 else number for number in requested]
        results = _run([calls[number]() for number in numbers])
        return results if self.axes is None else [self._restore(number, x) for number, x in zip(requested, results, strict=True)]

    def _restore(self, number: int, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient of an operand of dot_general in the order of its axes."""
        assert self.axes is not None
        order = (self.axes.a_order, self.axes.b_order)[number]
        x = (x.mT if self.is_swapped else x).reshape([self.shapes[number][axis] for axis in order])
        return x.permute([order.index(axis) for axis in range(len(order))]).contiguous()


def share_matmul(tensors: Sequence[Any], static: Static) -> SharedProduct | None:
    """Return the product of `tcemu.torch.matmul`, or None if shared programs do not compute it."""
    (a, b, bias, scale_a, scale_b), (name, dtype) = tensors, static
    recipe = _shared_recipe(find_by_name(name), a, b)
    if recipe is None or scale_a is not None or scale_b is not None or a.shape[:-2] != b.shape[:-2]:
        return None
    return SharedProduct(recipe, a, b, bias, dtype, (a.shape, b.shape))


def share_dot_general(tensors: Sequence[Any], static: Static) -> SharedProduct | None:
    """Return the product of a dot_general by a recipe, or None if shared programs do not compute it."""
    (lhs, rhs), (name, left, right, left_batch, right_batch, dtype) = tensors, static
    function = find_by_name(name)
    if not isinstance(function, DotGeneral) or (recipe := _shared_recipe(function.recipe, lhs, rhs)) is None:
        return None
    axes = product_axes(((left, right), (left_batch, right_batch)), lhs.ndim, rhs.ndim)
    batch, size = [lhs.shape[i] for i in axes.lhs_batch], lambda x, numbers: prod(x.shape[i] for i in numbers)
    k = size(lhs, axes.lhs_contracting)
    a = lhs.permute(axes.a_order).reshape(*batch, size(lhs, axes.rows), k)
    b = rhs.permute(axes.b_order).reshape(*batch, k, size(rhs, axes.columns))
    swapped = function.a == "rhs"
    a, b = (b.mT, a.mT) if swapped else (a, b)
    return SharedProduct(recipe, a, b, None, dtype, (lhs.shape, rhs.shape), axes, swapped)


def _shared_recipe(recipe: Any, a: torch.Tensor, b: torch.Tensor) -> Recipe | None:
    """Return the recipe if shared programs compute its product of these operands, else None."""
    shared = isinstance(recipe, Recipe) and not recipe.is_stochastic and a.device.type == "cpu" and 0 not in (*a.shape, *b.shape)
    return recipe if shared else None


def _product_call(
    part: str, parent: Recipe, recipe: Recipe, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> ProgramCall:
    """Return the call that computes one product. part: D, dA or dB, the part of the product by `parent` that it is."""
    name = register_name(recipe.replace(backward="exact"))
    with _lock:
        if name not in _texts:
            known = stable_name(register_name(parent))
            _texts[name] = known and f"{part} of {known}"
    text = _texts[name]
    return ProgramCall(_compute_product, (name, dtype), (a, b, bias), text and repr(("product", text, dtype)))


def _bias_call(g: torch.Tensor, bias: torch.Tensor | None) -> ProgramCall:
    assert bias is not None
    shape, dtype = tuple(bias.shape), bias.dtype
    return ProgramCall(_compute_bias_gradient, (shape, dtype), (g,), repr(("gradient of a bias", shape, dtype)))


def _compute_product(arrays: Sequence[Any], seed: None, static: Static) -> Array:
    (a, b, bias), (name, dtype) = arrays, static
    return matmul(a, b, bias, recipe=find_by_name(name), dtype=DTYPES[dtype])


def _compute_bias_gradient(arrays: Sequence[Any], seed: None, static: Static) -> Array:
    (g,), (shape, dtype) = arrays, static
    return unbroadcast(g.astype(jnp.float32), shape).astype(DTYPES[dtype])


def _run(calls: Sequence[ProgramCall]) -> list[torch.Tensor]:
    """Compile the missing programs side by side, and run all of them."""
    check_process()
    arrays = [[None if tensor is None else to_jax(tensor) for tensor in call.tensors] for call in calls]
    with program_context(next(array for own in arrays for array in own if array is not None)):
        programs = [
            find_program(compute_value, (call.compute, call.static), own, (None,), call.stored_as)
            for call, own in zip(calls, arrays, strict=True)
        ]
        compile_together(programs)
        results = [program(own, None) for program, own in zip(programs, arrays, strict=True)]
    present = [tensor for call in calls for tensor in call.tensors if tensor is not None]
    return [to_torch(result, present) for result in results]
